"""The tests that take long begin first, each process of pytest-xdist with its share of them, so that none is the last.

With `--dist worksteal` a process gets a run of consecutive tests, and one that is done takes from the end of another's:
the long ones stand at the beginning of these runs.
"""

from __future__ import annotations

from itertools import islice

import pytest


def pytest_configure(config: pytest.Config) -> None:
    told = "long(seconds): takes about so long, on the stand-in or a GPU; begins first, where processes share the tests"
    config.addinivalue_line("markers", told)


@pytest.hookimpl(trylast=True)  # behind all that selects tests or moves them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes > 1:
        items[:] = arranged(items, processes)


def seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("long")
    return float(marker.args[0]) if marker else 0.0


def arranged(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """The items so that each of the runs begins with its share of the long ones, the longest first."""
    long = sorted((item for item in items if seconds(item)), key=seconds, reverse=True)
    rest = iter([item for item in items if not seconds(item)])
    made: list[pytest.Item] = []
    for process in range(processes):
        room = (len(items) - len(made)) // (processes - process)  # as the scheduler cuts
        mine = long[process::processes]
        made += [*mine, *islice(rest, max(0, room - len(mine)))]
    return made
