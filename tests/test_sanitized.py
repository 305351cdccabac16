"""Kernels and the C library, built with the address and the undefined-behaviour sanitizer, once more under test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from memra_driver import nvrtc
from memra_driver.kernels import KERNELS

pytestmark = pytest.mark.standin

FILES = (
    "test_kernels.py", "test_kernels_recurrent.py", "test_kernels_batch.py", "test_recur_step.py",
    "test_kernel_order.py::test_threads_and_blocks_may_run_in_any_order",
)  # fmt: skip
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
C_LIBRARY = (
    "test_capi_kernels.py", "test_capi_memory.py", "test_capi_device.py",
    "test_embed.py::test_a_running_cache_goes_to_c_for_ten_steps_and_comes_back",
)  # fmt: skip
CHECK = "import sys, standin; standin.load(); from memra_driver import cli; sys.exit(cli.main(sys.argv[1:]))"


def on_the_sanitized_build(*arguments: str) -> str:
    """What this Python prints with these arguments on sanitized kernels; it has to succeed."""
    reason = standin.missing()
    if reason:
        pytest.skip(reason)
    environment = standin.sanitized_environment()
    if environment is None:
        pytest.skip("gcc has no libasan here")
    nvrtc.compile_all(["sm_90"])  # on all cores
    compiler = nvrtc.library_path()  # where, under a preloaded libasan, it does not find its own libraries
    folders = (str(Path(compiler).parent) if compiler else "", environment.get("LD_LIBRARY_PATH", ""))
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=standin.TESTS.parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    return run.stdout


@pytest.mark.long(120)
def test_no_kernel_leaves_its_memory_or_does_what_c_leaves_undefined() -> None:
    tests = [f"tests/{each}" for each in (*FILES, *ATTEND)]
    told = on_the_sanitized_build("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not host", *tests)
    assert int(re.findall(r"(\d+) passed", told)[-1]) > 300


@pytest.mark.long(14)
def test_the_c_library_does_neither() -> None:
    tests = [f"tests/{each}" for each in C_LIBRARY]
    told = on_the_sanitized_build("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    assert int(re.findall(r"(\d+) passed", told)[-1]) > 100


@pytest.mark.long(15)
def test_check_with_its_large_shapes_of_every_entry_of_attend_finds_nothing_either(tmp_path: Path) -> None:
    arguments = ("check", "--device", "cuda:0", "--save", str(tmp_path / "red.npz"))
    *found, last = on_the_sanitized_build("-c", CHECK, *arguments).splitlines()
    assert last == f"ALL GREEN ({len(found)} checks)"
    assert {line.split()[1] for line in found} == KERNELS.keys()
