"""What a run of the tests has tried, in numbers: `add` counts, from any test or helper, and the end of the run tells.

A test's numbers travel with its report, so that those of all processes of pytest-xdist come together, and count once it
has passed. Examples are those of hypothesis, as its own statistics give them.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

PREFIX = "count:"
EXAMPLES = "examples"  # of hypothesis; what runs it by itself adds its own
LINES = {  # what is counted: how the end of the run tells of it
    "fault points": "fault points: {} driver calls made to fail",
    "vectors": "vectors: {} recorded arrays, of the original kernels and of kits, that results were held against",
    "fuzz inputs": "fuzz inputs: {}",
    "soak steps": "soak steps: {} calls of random programs, compared with plain decoding",
}
_counted: collections.Counter[str] = collections.Counter()
_known: set[tuple[str, object]] = set()


def add(what: str, n: int = 1) -> None:
    """The test that runs has tried n of these, one of LINES or EXAMPLES."""
    assert what in {*LINES, EXAMPLES}, what
    _counted[what] += n


def once(what: str, which: object) -> None:
    """The test that runs has tried this one, and may try it again."""
    if (what, which) not in _known:
        _known.add((what, which))
        add(what)


def examples_of(statistics: str) -> int:
    """How many examples hypothesis ran, whatever their outcome was."""
    return sum(map(int, re.findall(r"(\d+) (?:passing|failing|invalid)\b", statistics)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _counted.clear()
    _known.clear()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        _counted[EXAMPLES] += examples_of(getattr(item, "hypothesis_statistics", ""))
        item.user_properties += [(PREFIX + what, n) for what, n in _counted.items() if n]


def total(reports: Iterable[Any]) -> collections.Counter[str]:
    """The sums over the reports of tests that passed."""
    found: collections.Counter[str] = collections.Counter()
    for report in reports:
        if report.when == "call":
            found["tests"] += 1
            for name, n in report.user_properties:
                if name.startswith(PREFIX):
                    found[name.removeprefix(PREFIX)] += n
    return found


def lines(found: collections.Counter[str]) -> list[str]:
    told = [f"laws: {found['tests']} tests passed, {found[EXAMPLES]} examples of hypothesis among them"]
    return told + [line.format(found[what]) for what, line in LINES.items() if found[what]]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in lines(total(terminalreporter.stats.get("passed", []))):
        terminalreporter.write_line(line)
