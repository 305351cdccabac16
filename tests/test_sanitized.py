"""The kernel tests once more, on kernels built with the address and the undefined-behaviour sanitizer."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import standin

pytestmark = pytest.mark.standin

FILES = ("test_kernels.py", "test_kernels_recurrent.py", "test_kernels_batch.py", "test_kernel_order.py")
ATTEND = (  # the shapes that take long run on the plain build only
    "test_attend_laws.py::test_rows_together_give_the_bits_of_rows_alone",
    "test_attend_laws.py::test_rows_stand_alone_at_every_width",
    "test_attend_laws.py::test_a_wider_entry_than_needed_gives_the_same_bits",
    "test_attend_laws.py::test_a_sequence_of_a_batch_gets_the_bits_of_its_own_call",
    "test_attend_laws.py::test_bytes_at_and_beyond_the_rows_do_not_matter",
    "test_attend_laws.py::test_bytes_before_the_window_do_not_matter",
    "test_attend_laws.py::test_a_bad_row_that_has_left_the_window_is_forgotten",
    "test_attend_laws.py::test_any_bytes_in_the_planes_leave_rows_alone_and_together_alike",
    "test_attend_laws.py::test_a_slot_outside_the_cache_writes_nothing_and_is_reported",
)


def test_no_kernel_leaves_its_memory_or_does_what_c_leaves_undefined() -> None:
    reason = standin.missing()
    if reason:
        pytest.skip(reason)
    environment = standin.sanitized_environment()
    if environment is None:
        pytest.skip("gcc has no libasan here")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not host", *FILES, *ATTEND]
    run = subprocess.run(command, cwd=standin.TESTS, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > 300
