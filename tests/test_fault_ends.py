"""Every driver call of every birth and every end fails once: nothing of what was not born stays, and all that ends is
given back but what the failing call was to free."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import tally
from caches import POLICY, put, rows_of
from cplan import CASES, SPREAD, library, new_cache
from decoding import OPTIONS, TRUE, Lane, hybrid
from fault_runs import CODE, Quick, Stage, Sweep
from standin import StandIn
from through_c import is_through_c

from memra_driver import capi, driver
from memra_driver.batch import CacheBatch
from memra_driver.boundary import Boundary
from memra_driver.cache import Cache, CacheState
from memra_driver.device import CudaContext, CudaEvent, CudaStream
from memra_driver.errors import DriverError, DriverOutOfMemory, MemraError, OutOfMemory
from memra_driver.kernels import KERNELS
from memra_driver.kvdev import CudaDev
from memra_driver.plan import CacheOptions

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]


def held(standin: StandIn) -> tuple[int, int]:
    gc.collect(0)
    return standin.live_count(), standin.live_graphs()


def births(standin: StandIn, born: Callable[[], Any]) -> int:
    """Fails each call of a birth; returns how many there were."""
    each = Sweep(standin)
    for _ in range(2):
        made: list[Any] = []
        calls = each.calls_of(lambda made=made: made.append(born()))
        made.pop().close()
    before = held(standin)
    for nth in range(1, len(calls) + 1):
        each.fail(nth, calls, born)
        assert held(standin) == before, f"call {nth} of {calls}"
        each.check_balance()
    born().close()
    assert held(standin) == before
    each.check_balance()
    return each.points


def ends(standin: StandIn, born: Callable[[], Any]) -> int:
    """Fails each call of a close; returns how many there were."""
    each = Sweep(standin)
    for _ in range(2):
        before = held(standin)
        each.check_balance()
        made = born()
        calls = each.calls_of(made.close)
    for nth in range(1, len(calls) + 1):
        if calls[nth - 1] == "cuCtxSetCurrent" and "cuMemFree" in calls:
            continue  # which goes by the current context: what it was to free is lost
        made = born()
        each.fail(nth, calls, made.close)
        made.close()  # the second time it has nothing to do
        assert held(standin) == before, f"call {nth} of {calls}"
        each.check_balance()
    return each.points


# Caches

RESERVED = CacheOptions(round_width=2, reserve_logits=True, reserve_taps=([1], 2))
CACHES: dict[str, Callable[[list[Any]], Cache]] = {
    "new": lambda devices: Cache.new(devices[0], hybrid(), 16, policy=POLICY),
    "new, reserved": lambda devices: Cache.new(devices[0], hybrid(), 16, policy=POLICY, options=RESERVED),
    "new_pp2": lambda devices: Cache.new_pp2(*devices, 2, hybrid(), 16, policy=POLICY, options=OPTIONS),
    "new_ppn": lambda devices: Cache.new_ppn(
        [devices[0], devices[1], devices[0]], (0, 1, 3, 4), hybrid(), 16, policy=POLICY
    ),
}


@pytest.mark.parametrize("pools", [True, False], ids=["pools", "no-pools"])
@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
@pytest.mark.parametrize("name", CACHES)
def test_each_call_of_the_birth_and_the_end_of_a_cache(
    make_dev: MakeDev, standin: StandIn, name: str, arena: bool, pools: bool
) -> None:
    for ordinal in range(2):
        standin.set_attribute(ordinal, 115, int(pools))
    stage = Stage(make_dev, standin, devices=2, arena=arena)
    standin.trace_queries()
    born = lambda: CACHES[name](stage.devices)  # noqa: E731
    tally.add("fault points", births(standin, born))
    tally.add("fault points", ends(standin, born))
    standin.trace_queries(False)
    stage.close()


@pytest.mark.parametrize("name", ["mtp", "two"])
def test_each_call_of_the_birth_and_the_end_of_a_cache_of_the_library(
    standin: StandIn, c_library: Any, name: str
) -> None:
    devices = [capi.device.LibraryDevice(library(), ordinal, stream=None) for ordinal in range(2)]
    case = CASES[name] if name in CASES else SPREAD[name]

    class Made:
        def __init__(self) -> None:
            self.cache = new_cache(case, devices[: 1 if case.fence is None else 2])

        def close(self) -> None:
            cache, self.cache = self.cache, None
            library().call("memra_cache_free", cache)

    standin.trace_queries()
    tally.add("fault points", births(standin, Made))
    tally.add("fault points", ends(standin, Made))
    standin.trace_queries(False)
    for device in devices:
        device.close()


def test_a_cache_that_cannot_be_freed_is_closed(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    cache = Cache.new(e, hybrid(), 16, policy=POLICY)
    standin.fail("cuMemFreeAsync", code=CODE)
    with pytest.raises(DriverError, match="cuMemFreeAsync"):
        cache.close()
    assert cache.state is CacheState.CLOSED
    failed = standin.calls("cuMemFreeAsync")[-1]
    driver.mem_free_async(failed.src, failed.stream)


# What belongs to a cache

OWNED: dict[str, Callable[[Stage], Callable[[], Any]]] = {
    "snapshot": lambda s: lambda: s.cache.snapshot(s.e),
    "batch": lambda s: partial(CacheBatch, [s.cache, s.mate()]),
    "slice": lambda s: lambda: s.e.zeros(5),
    "graph": lambda s: lambda: recorded(s, s.e.capture),
    "event": lambda s: lambda: CudaEvent(s.e.context),
    "parked logits": lambda s: lambda: with_logits(s),
    "memra_snapshot": lambda s: lambda: capi.calls.snapshot(s.cache),
    "memra_graph": lambda s: lambda: recorded(s, lambda: capi.calls.capture(s.e)),
}


def recorded(s: Stage, capture: Callable[[], Any]) -> Any:
    lane = next((each for each in s.keep if isinstance(each, Lane)), None)
    if lane is None:
        lane = Lane(s.cache, 1).fill((0, [TRUE]))
        s.keep.append(lane)
    with capture() as graph:
        lane.run(s.cache, calls=Quick())
        s.cache.advance(s.e)
    return graph


def with_logits(s: Stage) -> Cache:
    """A cache with a buffer that was made on first use."""
    row = next((each for each in s.keep if not isinstance(each, Lane)), None) or s.row()
    cache = Cache.new(s.e, hybrid(), 16, policy=POLICY)
    cache.park_logits(s.e, row)
    return cache


@pytest.mark.parametrize("name", OWNED)
def test_each_call_of_the_end_of(make_dev: MakeDev, standin: StandIn, name: str) -> None:
    stage = Stage(make_dev, standin)
    if name.startswith("memra") and not is_through_c(stage.other.cache):
        stage.e.kernels.load_all()
        capi.device.library_device(stage.e)
    stage.begin()
    standin.trace_queries()
    tally.add("fault points", ends(standin, OWNED[name](stage)))
    standin.trace_queries(False)
    stage.end()
    stage.close()


@pytest.mark.parametrize("way", ["same", "peer", "staged"])
def test_each_call_of_the_birth_and_the_end_of_a_boundary(
    make_dev: MakeDev, standin: StandIn, way: str
) -> None:
    devices = gpus(make_dev, standin, way)
    standin.trace_queries()
    tally.add("fault points", births(standin, lambda: Boundary(*devices, 8, 4)))
    tally.add("fault points", ends(standin, lambda: Boundary(*devices, 8, 4)))
    standin.trace_queries(False)


def gpus(make_dev: MakeDev, standin: StandIn, way: str) -> tuple[Any, Any]:
    standin.set_peers(way == "peer")
    return make_dev("cuda", 0), make_dev("cuda", 0 if way == "same" else 1)


@pytest.mark.parametrize("way", ["same", "peer", "staged"])
def test_each_call_of_a_crossing(make_dev: MakeDev, standin: StandIn, way: str) -> None:
    """A send, a receive or a release that fails is made again, and the rows arrive."""
    a, b = gpus(make_dev, standin, way)
    each = Sweep(standin)
    with Boundary(a, b, 8, 4) as boundary:
        for number, ending in enumerate([None, "send", "receive", "release"]):
            source = put(a, rows_of(number, 0, "x", 0, 3, 8))
            calls = {
                "send": partial(boundary.send, source), "receive": boundary.receive, "release": boundary.release,
            }  # fmt: skip
            if ending is None:
                standin.trace_queries()
                names = {name: each.calls_of(call) for name, call in calls.items()}
                standin.trace_queries(False)
                continue
            for nth in range(1, len(names[ending]) + 1):
                for name, call in calls.items():
                    if name == ending:
                        standin.trace_queries()
                        each.fail(nth, names[name], call)
                        standin.trace_queries(False)
                    given = call()
                    if name == "receive":
                        assert given.to_numpy().tobytes() == source.to_numpy().tobytes()
    tally.add("fault points", each.points)


# Devices

DEVICES: dict[str, Callable[[Any], Any]] = {
    "CudaDev": lambda context: CudaDev(0),
    "CudaDev on a context": lambda context: CudaDev(0, context=context),
    "CudaContext": lambda context: CudaContext(1),
    "CudaStream": CudaStream,
    "CudaEvent": CudaEvent,
    "CDev": lambda context: capi.CDev(0),
    "CDev of another GPU": lambda context: capi.CDev(1),
    "memra_device": lambda context: capi.device.LibraryDevice(capi.load(), 1, stream=None),
}


@pytest.mark.parametrize("name", DEVICES)
def test_each_call_of_the_birth_and_the_end_of_a(standin: StandIn, c_library: Any, name: str) -> None:
    with CudaContext(0) as context:
        standin.trace_queries()
        born = lambda: DEVICES[name](context)  # noqa: E731
        tally.add("fault points", births(standin, born))
        tally.add("fault points", ends(standin, born))
        standin.trace_queries(False)


@pytest.mark.parametrize("kind", ["CudaDev", "CDev"])
def test_each_call_of_the_end_of_a_device_that_has_worked(
    standin: StandIn, c_library: Any, kind: str
) -> None:
    made = CudaDev if kind == "CudaDev" else capi.CDev

    def born() -> Any:
        e = made(0)
        with Cache.new(e, hybrid(), 16, policy=POLICY) as cache:
            lane = Lane(cache, 1).fill((0, [TRUE]))
            lane.run(cache)
            lane.close()
        table = e.zeros(64)
        e.copy_many([(table.ptr + 8 * n, table.ptr + 8 * n + 4, 4) for n in range(4)])
        table.close()
        return e

    with CudaContext(0):
        standin.trace_queries()
        tally.add("fault points", ends(standin, born))
        standin.trace_queries(False)


def loads(kind: str) -> list[Callable[[Any], Any]]:
    """What loads kernels at their first use, as small as it is: a kernel of a CudaDev, a source file of a CDev."""
    if kind == "CudaDev":
        return [lambda e, name=name: e.kernels.plan(name) for name in KERNELS]
    return [lambda e, source=source: e.c.load(source) for source in sorted({k.source for k in KERNELS.values()})]


@pytest.mark.parametrize("kind", ["CudaDev", "CDev"])
def test_each_call_that_loads_kernels(standin: StandIn, c_library: Any, kind: str) -> None:
    made = CudaDev if kind == "CudaDev" else capi.CDev
    each = Sweep(standin)
    standin.trace_queries()
    with CudaContext(0):
        for load in loads(kind):
            with made(0) as e:
                calls = each.calls_of(lambda e=e, load=load: load(e))
            assert "cuLibraryLoadData" in calls
            for nth in range(1, len(calls) + 1):
                with made(0) as e:
                    each.fail(nth, calls, partial(load, e))
                    load(e)
    each.check_balance()
    tally.add("fault points", each.points)
    standin.trace_queries(False)


@pytest.mark.parametrize("kind", ["CudaDev", "CDev"])
def test_a_library_or_kernel_that_does_not_load_among_all_leaves_the_others(
    standin: StandIn, c_library: Any, kind: str
) -> None:
    made = CudaDev if kind == "CudaDev" else capi.CDev
    each = Sweep(standin)
    standin.trace_queries()
    with CudaContext(0):
        with made(0) as e:
            calls = each.calls_of(e.kernels.load_all)
        begins = [nth for nth, name in enumerate(calls, 1) if name in ("cuLibraryLoadData", "cuLibraryGetKernel")]
        assert len(begins) == len({k.source for k in KERNELS.values()}) + len(KERNELS)
        for nth in begins:
            with made(0) as e:
                each.fail(nth, calls, e.kernels.load_all)
                e.kernels.load_all()
    each.check_balance()
    tally.add("fault points", each.points)
    standin.trace_queries(False)


# Memory that runs out


def test_memory_that_runs_out_anywhere_is_named_and_leaves_all_as_it_was(
    make_dev: MakeDev, standin: StandIn
) -> None:
    """After 0 bytes, and after each allocation that an operation makes; the next attempt has room."""
    stage = Stage(make_dev, standin)
    points = 0
    for name, make in {
        "new": lambda: Cache.new(stage.e, hybrid(), 16, policy=POLICY),
        "snapshot": lambda: stage.cache.snapshot(stage.e),
        "batch": lambda: CacheBatch([stage.cache, stage.other.cache]),
        "slices": lambda: stage.e.clone_dtod(stage.cache.kv[1].k),
    }.items():
        stage.begin()
        standin.clear_trace()
        make().close()
        sizes = [call.bytes for call in standin.calls("cuMemAllocAsync")]
        before = stage.look(), standin.live_count()
        for n in range(len(sizes)):
            standin.run_out_after(0, sum(sizes[: n + 1]) - 1)
            with pytest.raises((OutOfMemory, DriverOutOfMemory), match=r"bytes|cuMemAllocAsync"):
                make()
            gc.collect(0)
            assert (stage.look(), standin.live_count()) == before, name
            points += 1
        standin.run_out_after(0, sum(sizes))
        make().close()
        standin.run_out_after(0, 1 << 30)
        stage.end()
    tally.add("fault points", points)
    stage.close()


# A fault of the device


@pytest.mark.misuse  # nothing can be freed on a context that is lost
@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemcpyDtoDAsync"])
def test_a_lost_context_fails_everything_by_name_and_the_next_one_works(
    make_dev: MakeDev, standin: StandIn, name: str
) -> None:
    stage = Stage(make_dev, standin)
    stage.begin()
    cache, e = stage.cache, stage.e
    standin.break_behind(name)
    with suppress(DriverError):
        cache.rollback(e, stage.snap, 0)
    assert standin.pending_failures() == 0
    lane = stage.player.lane(2)
    for call in (
        lambda: cache.snapshot(e), lambda: cache.reset(e), cache.health, lambda: lane.run(cache),
        e.synchronize, lambda: e.zeros(4), cache.kv[1].k.to_numpy, lambda: stage.other.cache.digest(),
    ):  # fmt: skip
        with pytest.raises(MemraError) as caught:
            call()
        told = caught.value
        assert "tainted" in str(told) or (isinstance(told, DriverError) and told.code == 719)
    for each in (stage.snap, cache, stage.other.cache, e):
        with suppress(DriverError):
            each.close()
    assert int(driver._cu.cuDevicePrimaryCtxReset(0)[0]) == 0
    standin.take_errors()
    fresh = make_dev("cuda")
    with Cache.new(fresh, hybrid(), 16, policy=POLICY) as again:
        Lane(again, 2).fill((0, [TRUE, TRUE])).run(again)
        again.advance(fresh, 2)
        assert len(again.digest()) == 64
