"""Tests that take long begin first in every process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import order
import pytest


def item(name: str, seconds: float = 0.0) -> Any:
    marker = pytest.mark.long(seconds).mark if seconds else None
    return SimpleNamespace(name=name, get_closest_marker=lambda _: marker)


def runs(items: list[Any], processes: int) -> list[list[Any]]:
    """As `--dist worksteal` hands them out."""
    left, made = list(items), []
    for process in range(processes):
        room = len(left) // (processes - process)
        made.append(left[:room])
        del left[:room]
    return made


@pytest.mark.parametrize("processes", [2, 3, 13])
def test_each_process_begins_with_its_share_of_the_long_tests_and_none_is_lost(processes: int) -> None:
    items = [item(f"short{n}") for n in range(200)]
    for n in range(30):
        items.insert(7 * n, item(f"long{n}", 1 + n))
    made = order.arranged(items, processes)
    assert sorted(each.name for each in made) == sorted(each.name for each in items)
    for process, run in enumerate(runs(made, processes)):
        names = [each.name for each in run]
        mine = [f"long{n}" for n in range(29 - process, -1, -processes)]
        assert names[: len(mine)] == mine
        numbers = [int(name[5:]) for name in names[len(mine) :]]
        assert numbers == sorted(numbers)


def test_where_all_are_long_none_is_lost() -> None:
    items = [item(f"long{n}", 1 + n) for n in range(5)]
    assert {each.name for each in order.arranged(items, 3)} == {each.name for each in items}
