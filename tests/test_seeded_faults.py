"""The tools can find something: with a fault in the package each of them reports it, and without it none does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin as standin_module
from caches import POLICY
from decoding import hybrid
from fault_runs import Stage, sweep
from standin import StandIn
from test_check import with_kernel
from test_fault_ends import births

from memra_driver import cache as cache_module
from memra_driver import check, driver, place
from memra_driver.cache import Cache
from memra_driver.device import CudaStream
from memra_driver.errors import DriverError
from memra_driver.formats import FORMATS
from memra_driver.kvdev import CudaDev
from memra_driver.snapshot import CacheSnapshot

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]
Fault = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(1, 9)

_kept: list[Any] = []  # what a fault has lost, or the device may still write


@pytest.fixture(autouse=True)
def nothing_is_lost(standin: StandIn) -> Any:
    yield
    standin.finish()
    while _kept:
        _kept.pop().close()


# Deferred mode finds what has no order.


def copied(a: Any, b: Any) -> bool:
    """Rows cross from one device to another, behind the work that makes them."""
    with b.zeros(64) as target, a.zeros(64) as source:
        source.copy_from(np.ones(64, np.float32))
        b.copy_into(target, 0, source, 64)
        return bool((target.to_numpy() == 1).all())


def refilled(a: Any, _: Any) -> bool:
    """Host memory is used again as soon as a copy was asked for."""
    source = np.zeros(64, np.float32)
    with a.zeros(64) as slot, a.zeros(4 * 64) as seen:
        for i in range(4):
            source[:] = i
            slot.copy_from(source)
            a.copy_into(seen, i * 64, slot, 64)
        return seen.to_numpy().reshape(4, 64)[:, 0].tolist() == [0, 1, 2, 3]


def read(a: Any, _: Any) -> bool:
    out = Out(64)
    _kept.append(out)
    with a.zeros(64) as slot:
        slot.copy_from(np.ones(64, np.float32))
        a.memory.read(slot.ptr, out.array)
        return bool((out.array == 1).all())


class Out:
    """An array that a copy may fill late."""

    def __init__(self, n: int) -> None:
        self.array = np.zeros(n, np.float32)

    def close(self) -> None:
        """It may go."""


def freed(a: Any, _: Any) -> bool:
    """Memory is given back while the stream still works on it."""
    slot = a.zeros(64)
    a.clear_bytes(slot.ptr, slot.nbytes)
    slot.close()
    with suppress(DriverError):
        a.synchronize()
    return not standin_module.load().take_errors()


def stage_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as cu

    class Pinned:
        ptr = 0

        def close(self) -> None:
            cu.cuMemFreeHost(self.ptr)

    lock = threading.Lock()  # a soak has two threads

    def memcpy_htod(self: CudaStream, dst: int, array: Any) -> None:
        with lock:
            if not any(isinstance(each, Pinned) for each in _kept):
                self.context.bind()
                made = Pinned()
                made.ptr = int(cu.cuMemAllocHost(1 << 20)[1])
                _kept.append(made)
            pinned = next(each for each in _kept if isinstance(each, Pinned))
        ctypes.memmove(pinned.ptr, array.ctypes.data, array.nbytes)
        driver.memcpy_htod_async(dst, pinned.ptr, array.nbytes, self.handle)

    monkeypatch.setattr(CudaStream, "memcpy_htod", memcpy_htod)


WITHOUT_ORDER: dict[str, tuple[Callable[[Any, Any], bool], Fault]] = {
    "an event wait is skipped": (copied, lambda m: m.setattr(CudaStream, "wait", lambda self, event: None)),
    "a staging buffer is used again": (refilled, stage_in_one_buffer),
    "a wait is missing": (read, lambda m: m.setattr(CudaStream, "synchronize", lambda self: None)),
    "a free comes too early": (freed, lambda m: m.setattr(CudaStream, "_free", lambda self, ptr: driver.mem_free(ptr))),
}


@pytest.mark.misuse
@pytest.mark.parametrize("name", WITHOUT_ORDER)
def test_deferred_mode_finds_that(standin: StandIn, make_dev: MakeDev, monkeypatch: Any, name: str) -> None:
    program, fault = WITHOUT_ORDER[name]
    devices = make_dev("cuda", 0), make_dev("cuda", 1)

    def ends_well(seed: int) -> bool:
        standin.defer(seed)
        with suppress(DriverError):
            return program(*devices)
        return False

    assert all(map(ends_well, SEEDS))
    with monkeypatch.context() as patch:
        fault(patch)
        assert not all(map(ends_well, SEEDS))
    standin.reset()  # the context works again


# The fault run finds what goes on behind an error, or says nothing of it.


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "memset_d8_async", lambda *args: driver._cu.cuMemsetD8Async(*args))


def swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_actions(actions: Any, taint: Callable[[], None]) -> None:
        with suppress(DriverError):
            place.run_actions(actions, taint)

    monkeypatch.setattr(cache_module, "run_actions", run_actions)


def leaked(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(made: Any, fill: Callable[[], None]) -> Any:
        _kept.append(made)
        fill()
        return _kept.pop()

    monkeypatch.setattr(CudaDev, "_filled", staticmethod(filled))


def born(stage: Stage) -> None:
    births(stage.standin, lambda: Cache.new(stage.e, hybrid(), 16, policy=POLICY))


def rolled_back(stage: Stage) -> None:
    sweep(stage, lambda s: lambda: s.cache.rollback(s.e, s.snap, 2))


def reset(stage: Stage) -> None:
    sweep(stage, lambda s: lambda: s.cache.reset(s.e))


def snapped(stage: Stage) -> None:
    sweep(stage, lambda s: lambda: s.keep.append(s.cache.snapshot(s.e)))


BEHIND_AN_ERROR: dict[str, tuple[Callable[[Stage], None], Fault, str]] = {
    "a status is unchecked": (born, unchecked, "nobody was told"),
    "an error is swallowed": (rolled_back, swallowed, "nobody was told"),
    "a change is half made, and the cache says nothing": (
        reset, lambda m: m.setattr(Cache, "taint", lambda self: None), "failed|bytes|pos",
    ),
    "a buffer is leaked": (born, leaked, "call"),
    "a snapshot is leaked": (
        snapped, lambda m: m.setattr(CacheSnapshot, "close", lambda self: _kept.append(self)), "left behind",
    ),
}  # fmt: skip


@pytest.mark.misuse
@pytest.mark.parametrize("name", BEHIND_AN_ERROR)
def test_the_fault_run_finds_that(standin: StandIn, make_dev: MakeDev, monkeypatch: Any, name: str) -> None:
    run, fault, told = BEHIND_AN_ERROR[name]
    stage = Stage(make_dev, standin)
    run(stage)
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError, match=told):
            run(stage)
    standin.clear_failures()


# Guards and checks find a wrong kernel.


@pytest.mark.misuse
def test_the_guards_find_a_missing_bounds_check(standin: StandIn, make_dev: MakeDev, tmp_path: Path) -> None:
    def append_behind_the_end() -> list[str]:
        e = make_dev("cuda", arena=False)
        k_form, v_form = FORMATS["q8_0"], FORMATS["q5_1"]
        rows, k, v = e.zeros(32), e.alloc_u8(2 * k_form.block_bytes), e.alloc_u8(2 * v_form.block_bytes)
        len_d, health = e.htod_i32([2]), e.alloc_u8(88)
        e.launch(
            "append_kv", rows, rows, k, v, len_d, None, 2, 1, -1, 2, 32, 32, k_form.block_bytes, v_form.block_bytes,
            k_form.code, v_form.code, None, 1, health, 0,
        )  # fmt: skip
        return standin.take_errors()

    assert append_behind_the_end() == []
    with_kernel(standin, tmp_path, "append_kv.cu", "if (first < 0 || first + p.rows > p.max_ctx) {", "if (first < 0) {")
    assert any("of an allocation of" in error for error in append_behind_the_end())


def test_the_check_finds_a_wrong_bit_in_a_kernel(standin: StandIn, make_dev: MakeDev, tmp_path: Path) -> None:
    def faults() -> list[Any]:
        e = make_dev("cuda", arena=False)
        cases = [case for case in check.cases(small=True) if "append_kv" in {name for name, _ in case.launches}]
        return [result.fault for result in check.run(e, cases, tmp_path / "red.npz") if result.fault]

    assert faults() == []
    with_kernel(standin, tmp_path, "append_kv.cu", "(e, s.inv, 8.5f", "(e, s.inv, 8.25f")
    assert faults()
