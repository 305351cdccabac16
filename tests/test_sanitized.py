"""The kernel tests once more, on kernels built with the address and the undefined-behaviour sanitizer."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import standin

pytestmark = pytest.mark.standin

FILES = ("test_kernels.py", "test_kernels_recurrent.py", "test_kernel_order.py")


def test_no_kernel_leaves_its_memory_or_does_what_c_leaves_undefined() -> None:
    reason = standin.missing()
    if reason:
        pytest.skip(reason)
    environment = standin.sanitized_environment()
    if environment is None:
        pytest.skip("gcc has no libasan here")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES]
    run = subprocess.run(command, cwd=standin.TESTS, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > 300
