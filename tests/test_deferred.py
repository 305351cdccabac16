"""The stand-in driver in deferred mode: nothing happens before somebody waits, and what has no order has none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from raw_driver import CONTEXT_IS_DESTROYED, INVALID_VALUE, ok
from standin import StandIn

from memra_driver import driver
from memra_driver.errors import DriverError, DriverOutOfMemory, IllegalAddress

pytestmark = pytest.mark.standin
SEEDS = range(1, 25)
N = 64


@pytest.fixture
def streams(context: StandIn) -> Iterator[tuple[int, int]]:
    driver.init()
    context.defer(1)
    made = driver.stream_create(), driver.stream_create()
    yield made
    for stream in made:
        driver.stream_destroy(stream)


def bytes_at(ptr: int, n: int = N) -> set[int]:
    """Those that stand there now, whoever is still to write them."""
    return set(ctypes.string_at(ptr, n))


def made(stream: int, value: int) -> int:
    """N bytes, filled."""
    ptr = driver.mem_alloc_async(N, stream)
    driver.memset_d8_async(ptr, value, N, stream)
    driver.stream_synchronize(stream)
    return ptr


def test_work_happens_when_somebody_waits(context: StandIn, streams: tuple[int, int]) -> None:
    a, b = streams
    ptr = made(a, 1)
    event = driver.event_create(False)
    waits: list[Callable[[], Any]] = [
        lambda: driver.stream_synchronize(a), driver.ctx_synchronize, lambda: driver.event_synchronize(event),
        context.finish, lambda: [None for _ in range(100) if not driver.stream_query(a)],
        lambda: [None for _ in range(100) if not driver.event_query(event)],
    ]  # fmt: skip
    for value, wait in enumerate(waits, start=2):
        driver.memset_d8_async(ptr, value, N, a)
        driver.event_record(event, a)
        assert bytes_at(ptr) == {value - 1}
        wait()
        assert bytes_at(ptr) == {value}
    assert driver.stream_query(b)
    driver.event_destroy(event)
    driver.mem_free_async(ptr, a)


def test_host_memory_is_read_and_written_as_late_as_a_driver_may(context: StandIn, streams: tuple[int, int]) -> None:
    a, _ = streams
    ptr = made(a, 0)
    from cuda.bindings import driver as cu

    pinned = ok(cu.cuMemAllocHost(N))
    pageable = np.full(N, 1, np.uint8)
    driver.memcpy_htod_async(ptr, pageable.ctypes.data, N, a)
    pageable[:] = 2  # was staged
    back = np.zeros(N, np.uint8)
    driver.memcpy_dtoh_async(back.ctypes.data, ptr, N, a)
    assert set(back) == {0}
    driver.stream_synchronize(a)
    assert set(back) == {1}
    ctypes.memset(pinned, 3, N)
    driver.memcpy_htod_async(ptr, pinned, N, a)
    ctypes.memset(pinned, 4, N)  # is read later
    driver.stream_synchronize(a)
    assert bytes_at(ptr) == {4}
    ok(cu.cuMemFreeHost(pinned))
    driver.mem_free_async(ptr, a)


def outcomes(context: StandIn, ordered: bool) -> set[int]:
    """What is left of two fills on two streams, over all seeds."""
    found = set()
    for seed in SEEDS:
        context.defer(seed)
        a, b = driver.stream_create(), driver.stream_create()
        ptr = made(a, 0)
        driver.memset_d8_async(ptr, 1, N, a)
        if ordered:
            event = driver.event_create(False)
            driver.event_record(event, a)
            driver.stream_wait_event(b, event)
            driver.event_record(event, a)  # what follows is none of the wait's business
            driver.event_destroy(event)
        driver.memset_d8_async(ptr, 2, N, b)
        for stream in (b, a):
            driver.stream_synchronize(stream)
        found |= bytes_at(ptr)
        driver.mem_free_async(ptr, a)
        for stream in (a, b):
            driver.stream_destroy(stream)
    return found


def test_streams_go_in_any_order_that_events_allow(context: StandIn) -> None:
    driver.init()
    assert outcomes(context, ordered=False) == {1, 2}
    assert outcomes(context, ordered=True) == {2}


def test_the_default_stream_and_blocking_ones_wait_for_each_other(context: StandIn) -> None:
    from cuda.bindings import driver as cu

    driver.init()
    for seed in SEEDS:
        context.defer(seed)
        blocking = int(ok(cu.cuStreamCreate(0)))
        ptr = made(blocking, 0)
        for order in ((blocking, 0, blocking, 0), (0, blocking, 0, blocking)):
            for value, stream in enumerate(order, start=1):
                driver.memset_d8_async(ptr, value, N, stream)
            driver.stream_synchronize(order[-1])
            assert bytes_at(ptr) == {4}
            context.finish()
            assert bytes_at(ptr) == {4}  # nothing of the other stream was left to come
        driver.mem_free_async(ptr, blocking)
        driver.stream_destroy(blocking)


@pytest.mark.misuse
def test_memory_belongs_to_the_order_of_its_stream(context: StandIn) -> None:
    """Behind its free nobody uses it; before its allocation, or beside its free, another stream may not."""
    driver.init()
    told: set[str] = set()
    for seed in SEEDS:
        context.defer(seed)
        a, b = driver.stream_create(), driver.stream_create()
        ptr = driver.mem_alloc_async(N, a)
        driver.memset_d8_async(ptr, 1, N, b)
        context.finish()
        told |= {error.split(" 0x")[0] for error in context.take_errors()}
        context.reset()
    assert told == {"cuMemsetD8Async: destination"}
    context.defer(1)
    a, b = driver.stream_create(), driver.stream_create()
    ptr = made(a, 0)
    driver.memset_d8_async(ptr, 1, N, a)
    driver.mem_free_async(ptr, a)
    assert context.live_bytes() == 0
    assert bytes_at(ptr) == {0}  # and stays, for what was asked for before
    with pytest.raises(DriverError) as caught:
        driver.memset_d8_async(ptr, 2, N, a)
    assert caught.value.code == INVALID_VALUE
    driver.stream_synchronize(a)
    assert bytes_at(ptr) == {0xDD}


@pytest.mark.misuse
@pytest.mark.parametrize("pool", [True, False])
def test_a_free_that_knows_no_order_waits_or_takes_the_memory_away(context: StandIn, pool: bool) -> None:
    driver.init()
    context.defer(3)
    stream = driver.stream_create()
    ptr = driver.mem_alloc_async(N, stream) if pool else driver.mem_alloc(N)
    driver.stream_synchronize(stream)
    driver.memset_d8_async(ptr, 1, N, stream)
    driver.mem_free(ptr)
    if not pool:
        driver.stream_synchronize(stream)
        assert context.take_errors() == []
        return
    with pytest.raises(IllegalAddress, match="cuStreamSynchronize"):  # a fault is told by what waits for it
        driver.stream_synchronize(stream)
    assert "is not in a live allocation" in context.take_errors()[0]


def test_launches_of_one_graph_follow_each_other_on_any_streams(context: StandIn, streams: tuple[int, int]) -> None:
    a, b = streams
    ptr, target = made(a, 1), made(a, 0)
    driver.stream_begin_capture(a)
    driver.memcpy_dtod_async(target, ptr, N, a)
    driver.memset_d8_async(ptr, 7, N, a)
    graph = driver.stream_end_capture(a)
    ready = driver.graph_instantiate(graph)
    context.clear_trace()
    driver.graph_launch(ready, a)
    assert [call.name for call in context.trace()] == ["cuGraphLaunch", "node", "node"]
    assert bytes_at(target) == {0}
    driver.graph_launch(ready, b)
    driver.graph_exec_destroy(ready)  # the launches are under way
    driver.stream_synchronize(b)
    assert (bytes_at(target), bytes_at(ptr)) == ({7}, {7})
    driver.graph_destroy(graph)
    for each in (ptr, target):
        driver.mem_free_async(each, a)


def test_a_destroyed_stream_still_does_its_work(context: StandIn) -> None:
    driver.init()
    context.defer(5)
    stream, other = driver.stream_create(), driver.stream_create()
    ptr = made(stream, 0)
    driver.memset_d8_async(ptr, 1, N, stream)
    driver.stream_destroy(stream)
    driver.ctx_synchronize()
    assert bytes_at(ptr) == {1}
    driver.mem_free_async(ptr, other)
    driver.stream_destroy(other)


# Fault plans


def test_what_nobody_waits_for_any_more_is_not_read_into_memory_that_may_be_gone(context: StandIn) -> None:
    driver.init()
    context.defer(1)
    stream = driver.stream_create()
    ptr = made(stream, 5)
    back = np.zeros(N, np.uint8)
    driver.memcpy_dtoh_async(back.ctypes.data, ptr, N, stream)
    context.fail("cuStreamSynchronize", code=719)
    with pytest.raises(DriverError):
        driver.stream_synchronize(stream)
    context.finish()
    assert set(back) == {0}
    driver.mem_free_async(ptr, stream)
    driver.stream_destroy(stream)


def test_memory_runs_out_after_so_many_bytes(context: StandIn) -> None:
    driver.init()
    kept = driver.mem_alloc(100)
    context.run_out_after(0, 150)
    assert driver.mem_get_info()[0] == 150
    more = driver.mem_alloc(150)
    with pytest.raises(DriverOutOfMemory):
        driver.mem_alloc(1)
    driver.mem_free(more)
    for ptr in (driver.mem_alloc(150), kept):
        driver.mem_free(ptr)


@pytest.mark.misuse
@pytest.mark.parametrize("seed", [0, 1])
def test_a_context_that_breaks_fails_every_later_call_until_it_is_reset(context: StandIn, seed: int) -> None:
    from cuda.bindings import driver as cu

    driver.init()
    context.defer(seed)
    stream = driver.stream_create()
    ptr = made(stream, 0)
    context.break_behind("cuMemsetD8Async", nth=2)
    driver.memset_d8_async(ptr, 1, N, stream)
    driver.memset_d8_async(ptr, 2, N, stream)
    assert context.pending_failures() == 0
    for call in (lambda: driver.stream_synchronize(stream), lambda: driver.mem_alloc(1), driver.ctx_synchronize):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code == 719
    ok(cu.cuDevicePrimaryCtxReset(0))
    assert int(cu.cuStreamSynchronize(stream)[0]) == CONTEXT_IS_DESTROYED
    fresh = driver.device_primary_ctx_retain(0)
    driver.ctx_set_current(fresh)
    driver.mem_free(driver.mem_alloc(1))


def test_queries_are_counted_when_asked_for(context: StandIn) -> None:
    driver.init()
    context.clear_trace()
    driver.ctx_get_current()
    assert context.trace() == []
    context.trace_queries()
    context.fail("*", nth=2, code=719)
    driver.ctx_get_current()
    with pytest.raises(DriverError, match="cuDeviceGetCount"):
        driver.device_get_count()
    assert [call.name for call in context.trace()] == ["cuCtxGetCurrent", "cuDeviceGetCount"]
