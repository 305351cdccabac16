"""A soak is clean where nothing is wrong, repeats a program by its seed, and finds what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from standin import StandIn
from test_seeded_faults import _kept, stage_in_one_buffer, with_kernel

from memra_driver import clock, driver
from memra_driver.cache import Cache
from memra_driver.clock import CacheClock
from memra_driver.device import CudaStream
from memra_driver.errors import MemraError
from memra_driver.kvdev import CudaDev
from memra_driver.round import Round
from memra_driver.rules import CacheRules
from memra_driver.snapshot import CacheSnapshot
from memra_driver.soak import Finding, Soak

pytestmark = pytest.mark.standin
Fault = Callable[[pytest.MonkeyPatch], None]
MOST_PROGRAMS = 30
_alive: list[Any] = []


@pytest.fixture
def soaking(standin: StandIn) -> Iterator[Callable[..., Soak]]:
    """soaking(seed): a soak on the stand-in driver."""
    made: list[Soak] = []

    def make(seed: int = 1) -> Soak:
        made.append(Soak(lambda arena: CudaDev(arena=arena), seed, small=True))
        return made[-1]

    yield make
    with suppress(MemraError):
        for each in made:
            each.close()
    standin.finish()
    while _kept:
        _kept.pop().close()
    _alive.clear()


def first(soak: Soak, seed: int) -> Finding | None:
    """What the first of some programs finds."""
    for number in itertools.count(seed):
        found = soak.program(number)
        if found or number == seed + MOST_PROGRAMS:
            print(number, found and found[0].line())
            return found[0] if found else None
    return None


def wrong_after_rollback(m: pytest.MonkeyPatch) -> None:
    right = Cache.rollback

    def rollback(self: Cache, e: Any, snap: Any, accept_len: int) -> None:
        right(self, e, snap, accept_len)
        for layer in filter(None, self.kv):
            layer.len -= accept_len > 2

    m.setattr(Cache, "rollback", rollback)


def unwaited(m: pytest.MonkeyPatch) -> None:
    def read(self: CudaStream, ptr: int, out: Any) -> None:
        _alive.append(out)  # the device may still write it
        self.memcpy_dtoh(out, ptr)

    m.setattr(CudaStream, "read", read)


IN_PYTHON: dict[str, Fault] = {
    "a snapshot is leaked": lambda m: m.setattr(CacheSnapshot, "close", lambda self: _kept.append(self)),
    "a length is wrong after a rollback": wrong_after_rollback,
    "the ring is stale after a partial commit": lambda m: m.setattr(Round, "_rebuild_rings", lambda *args: []),
    "states are not home before a graph": lambda m: m.setattr(clock, "copy_actions", lambda *args: []),
    "a replay may take too many rows": lambda m: m.setattr(CacheRules, "check_replay", lambda *args: None),
    "a snapshot outlives its rows": lambda m: m.setattr(CacheClock, "give_up", lambda *args: None),
}
LATE: dict[str, Fault] = {
    "an event wait is skipped": lambda m: m.setattr(CudaStream, "wait", lambda self, event: None),
    "a staging buffer is used again": stage_in_one_buffer,
    "a wait is missing": unwaited,
    "a free comes too early": lambda m: m.setattr(CudaStream, "_free", lambda self, ptr: driver.mem_free(ptr)),
}
IN_KERNELS = {
    "a bounds check is missing": ("append_kv.cu", "if (first < 0 || first + rows > max_ctx) {", "if (first < 0) {"),
    "a bit is wrong": ("append_kv.cu", "inv, 8.5f", "inv, 8.25f"),
    "a ring is not rebuilt": ("conv.cu", "taken > rows", "taken >= rows"),
    "a launch without room is not told": (
        "append_kv.cu",
        "if (leader) memra_report(health, MEMRA_FAULT_SLOT_RANGE",
        "if (0) memra_report(health, MEMRA_FAULT_SLOT_RANGE",
    ),
}


@pytest.mark.misuse
@pytest.mark.parametrize("name", [*IN_PYTHON, *LATE])
def test_a_soak_finds_that(standin: StandIn, soaking: Any, monkeypatch: Any, name: str) -> None:
    soak = soaking()
    soak.program(0)
    if name in LATE:
        standin.defer(3)
    with monkeypatch.context() as patch:
        (IN_PYTHON | LATE)[name](patch)
        assert first(soak, 1)
    standin.take_errors()


@pytest.mark.misuse
@pytest.mark.parametrize("name", IN_KERNELS)
def test_a_soak_finds_in_a_kernel_that(standin: StandIn, soaking: Any, tmp_path: Path, name: str) -> None:
    with_kernel(standin, tmp_path, *IN_KERNELS[name])
    assert first(soaking(), 1)
