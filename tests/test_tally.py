"""The numbers at the end of a run are those of the tests that passed, whichever process they ran in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tally

SUITE = """
import pytest, tally
from hypothesis import given, settings, strategies as st

@pytest.mark.parametrize("n", [1, 2, 3])
def test_that_passes(n):
    tally.add("fault points", n)
    tally.once("vectors", "one")
    tally.once("vectors", "one")

def test_that_fails():
    tally.add("fault points", 100)
    assert False

def test_that_is_skipped():
    tally.add("fault points", 100)
    pytest.skip("no")

@pytest.fixture
def prepared():
    tally.add("fuzz inputs", 10)

def test_whose_fixture_counts_and_its_end_does_not(prepared, request):
    request.addfinalizer(lambda: tally.add("fuzz inputs", 100))
    tally.add("fuzz inputs")
    tally.add("fuzz inputs", 5)

@settings(max_examples=7, database=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_with_examples(number):
    tally.add("fuzz inputs")

def test_that_runs_a_machine_by_itself():
    tally.add("examples", 3)
"""
EXPECTED = [
    "laws: 6 tests passed, 10 examples of hypothesis among them",
    "fault points: 6 driver calls made to fail",
    "vectors: 3 recorded arrays, of the original kernels and of kits, that results were held against",
    "fuzz inputs: 23",
]


@pytest.mark.parametrize("processes", ["0", "2"])
def test_the_end_of_a_run_tells_the_sums_of_all_processes(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parent}\n")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "tally", "-p", "no:cacheprovider", "-n", processes]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert re.search("1 failed, 6 passed, 1 skipped", done.stdout), done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.partition(":")[0] in ("laws", *tally.LINES)]
    assert told == EXPECTED


def test_what_no_line_tells_of_is_not_counted() -> None:
    with pytest.raises(AssertionError):
        tally.add("laws of nature")
