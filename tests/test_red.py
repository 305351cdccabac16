"""A test that fails on the stand-in driver says what is wrong, and nothing that only follows from its having failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import standin

pytestmark = pytest.mark.standin
SUITE = """
import ctypes
import pytest

def test_that_fails_with_a_slice_open(make_dev):
    kept = make_dev("cuda").zeros(4)
    assert kept is None

def test_that_passes_and_leaks(standin, make_dev):
    lost.append(make_dev("cuda").zeros(4))

def test_that_fails_and_writes_behind_an_allocation(make_dev):
    kept = make_dev("cuda").zeros(4)
    ctypes.memset(kept.ptr + 16, 0, 1)
    assert kept is None

lost = []
"""


@pytest.mark.skipif(standin.missing() is not None, reason=str(standin.missing()))
def test_what_a_failed_test_has_open_is_no_leak_but_a_broken_guard_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parent}\nmarkers = gpu\n standin\n")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-n", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    told = re.findall(r"^(FAILED|ERROR) .*::(\w+)", done.stdout, re.MULTILINE)
    assert sorted(told) == [
        ("ERROR", "test_that_fails_and_writes_behind_an_allocation"),
        ("ERROR", "test_that_passes_and_leaks"),
        ("FAILED", "test_that_fails_and_writes_behind_an_allocation"),
        ("FAILED", "test_that_fails_with_a_slice_open"),
    ], done.stdout + done.stderr
    assert "1 allocations were never freed" in done.stdout
    assert "byte 16 of an allocation of 16 bytes was written" in done.stdout
