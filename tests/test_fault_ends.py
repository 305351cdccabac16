"""Every driver call of every birth and every end fails once: nothing of what was not born stays, and all that ends is
given back but what the failing call was to free."""

from __future__ import annotations

import functools
import gc
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tally
from caches import POLICY, put, rows_of
from cplan import CASES, SPREAD, library, new_cache
from decoding import OPTIONS, TRUE, Lane, hybrid
from fault_runs import CODE, Quick, Stage, Sweep, _free
from standin import StandIn
from through_c import is_through_c

from memra_driver import capi, driver, nvrtc
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


def births(standin: StandIn, born: Callable[[], Any], most: int | None = None) -> None:
    """Fails each call of a birth, or the first `most` of them."""
    each = Sweep(standin)
    for _ in range(2):
        made: list[Any] = []
        calls = each.calls_of(lambda made=made: made.append(born()))
        made.pop().close()
    before = held(standin)
    for nth in range(1, len(calls[:most]) + 1):
        each.fail(nth, calls, born)
        assert held(standin) == before, f"call {nth} of {calls}"
        each.check_balance()
    born().close()
    assert held(standin) == before
    each.check_balance()


def ends(standin: StandIn, born: Callable[[], Any], most: int | None = None) -> None:
    """Fails each call of a close, or the first `most` of them."""
    each = Sweep(standin)
    for _ in range(2):
        before = held(standin)
        each.check_balance()
        made = born()
        calls = each.calls_of(made.close)
    for nth in range(1, len(calls[:most]) + 1):
        if calls[nth - 1] == "cuCtxSetCurrent" and "cuMemFree" in calls:
            continue  # which goes by the current context: what it was to free is lost
        made = born()
        each.fail(nth, calls, made.close)
        made.close()  # the second time it has nothing to do
        assert held(standin) == before, f"call {nth} of {calls}"
        each.check_balance()


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
    births(standin, born)
    ends(standin, born)
    standin.trace_queries(False)
    stage.close()


class MadeInC:
    """A cache of memra_cache_new."""

    def __init__(self, case: Any, devices: list[Any]) -> None:
        self.cache = new_cache(case, devices[: 1 if case.fence is None else 2])

    def close(self) -> None:
        cache, self.cache = self.cache, None
        library().call("memra_cache_free", cache)


def caches_in_c(standin: StandIn, name: str, most: int | None = None) -> None:
    devices = [capi.device.LibraryDevice(library(), ordinal, stream=None) for ordinal in range(2)]
    born = partial(MadeInC, CASES[name] if name in CASES else SPREAD[name], devices)
    standin.trace_queries()
    births(standin, born, most)
    ends(standin, born, most)
    standin.trace_queries(False)
    for device in devices:
        device.close()


@pytest.mark.parametrize("name", ["mtp", "two"])
def test_each_call_of_the_birth_and_the_end_of_a_cache_of_the_library(
    standin: StandIn, c_library: Any, name: str
) -> None:
    caches_in_c(standin, name)


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
    ends(standin, OWNED[name](stage))
    standin.trace_queries(False)
    stage.end()
    stage.close()


def boundaries(make_dev: MakeDev, standin: StandIn, way: str, most: int | None = None) -> None:
    devices = gpus(make_dev, standin, way)
    standin.trace_queries()
    births(standin, lambda: Boundary(*devices, 8, 4), most)
    ends(standin, lambda: Boundary(*devices, 8, 4), most)
    standin.trace_queries(False)


@pytest.mark.parametrize("way", ["same", "peer", "staged"])
def test_each_call_of_the_birth_and_the_end_of_a_boundary(
    make_dev: MakeDev, standin: StandIn, way: str
) -> None:
    boundaries(make_dev, standin, way)


def gpus(make_dev: MakeDev, standin: StandIn, way: str) -> tuple[Any, Any]:
    standin.set_peers(way == "peer")
    return make_dev("cuda", 0), make_dev("cuda", 0 if way == "same" else 1)


def crossings(make_dev: MakeDev, standin: StandIn, way: str, most: int | None = None) -> None:
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
            for nth in range(1, len(names[ending][:most]) + 1):
                for name, call in calls.items():
                    if name == ending:
                        standin.trace_queries()
                        each.fail(nth, names[name], call)
                        standin.trace_queries(False)
                    given = call()
                    if name == "receive":
                        assert given.to_numpy().tobytes() == source.to_numpy().tobytes()


@pytest.mark.parametrize("way", ["same", "peer", "staged"])
def test_each_call_of_a_crossing(make_dev: MakeDev, standin: StandIn, way: str) -> None:
    crossings(make_dev, standin, way)


# Captures that are given up


def abandons(standin: StandIn, e: Any) -> None:
    """Fails each call of memra_capture_abandon; the next one ends the capture, and the device works again."""
    device = capi.device.library_device(e)
    each = Sweep(standin)

    def begun() -> Callable[[], None]:
        device.call("memra_capture_begin", 0)
        return lambda: device.call("memra_capture_abandon")

    standin.trace_queries()
    calls = each.calls_of(begun())
    for nth in range(1, len(calls) + 1):
        run = begun()
        each.fail(nth, calls, run)
        run()
        e.synchronize()
    standin.trace_queries(False)
    assert standin.live_graphs() == 0


@pytest.mark.parametrize("cuda_kind", ["c"], indirect=True)
def test_each_call_of_a_capture_that_is_abandoned(make_dev: MakeDev, standin: StandIn) -> None:
    abandons(standin, make_dev("cuda"))


@pytest.mark.parametrize("whose", ["Python's", "the library's"])
def test_a_capture_whose_block_raises_ends_although_a_call_of_that_fails(
    make_dev: MakeDev, standin: StandIn, c_library: Any, whose: str
) -> None:
    e = make_dev("cuda")
    e.kernels.load_all()
    capture = e.capture if whose == "Python's" else lambda: capi.calls.capture(e)

    def given_up() -> None:
        with suppress(ZeroDivisionError), capture():
            standin.clear_trace()
            raise ZeroDivisionError

    given_up()
    for nth, call in enumerate([call.name for call in standin.trace()], start=1):
        with suppress(ZeroDivisionError), capture():
            standin.fail("*", nth, CODE)
            raise ZeroDivisionError
        assert standin.pending_failures() == 0
        tally.add("fault points")
        if call == "cuGraphDestroy":
            driver.graph_destroy(standin.failed(CODE).src)
        standin.clear_trace()
        assert not driver.stream_is_capturing(e.stream.handle), call
        e.zeros(4).close()
        given_up()
    assert standin.live_graphs() == 0


def test_a_free_that_waited_for_the_end_of_a_capture_and_fails_is_told_by_the_next_call(
    make_dev: MakeDev, standin: StandIn
) -> None:
    e = make_dev("cuda")
    kept = e.zeros(4)
    with e.capture():
        kept.close()
        standin.fail("cuMemFreeAsync", code=CODE)
    assert standin.pending_failures() == 0
    with pytest.raises(DriverError, match="cuMemFreeAsync"):
        e.zeros(4)
    e.zeros(4).close()
    _free(standin.failed(CODE).src)


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
    "CudaDev with room for attention": lambda context: roomy(CudaDev),
    "CDev with room for attention": lambda context: roomy(capi.CDev),
}


def roomy(made: Callable[[int], Any]) -> Any:
    e = made(0)
    try:
        e.attend_scratch(1 << 12)
    except DriverError:
        e.close()
        raise
    return e


@pytest.mark.parametrize("name", DEVICES)
def test_each_call_of_the_birth_and_the_end_of_a(standin: StandIn, c_library: Any, name: str) -> None:
    with CudaContext(0) as context:
        standin.trace_queries()
        born = lambda: DEVICES[name](context)  # noqa: E731
        births(standin, born)
        ends(standin, born)
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
        e.synchronize()  # a wait that fails must not leave work behind that needs its kernels
        return e

    with CudaContext(0):
        standin.trace_queries()
        ends(standin, born)
        standin.trace_queries(False)


def loads_of_each(kind: str) -> list[Callable[[Any], Any]]:
    """What loads kernels at their first use, as small as it is: a kernel of a CudaDev, a source file of a CDev."""
    if kind == "CudaDev":
        return [lambda e, name=name: e.kernels.plan(name) for name in KERNELS]
    return [lambda e, source=source: e.c.load(source) for source in sorted({k.source for k in KERNELS.values()})]


@pytest.mark.parametrize("kind", ["CudaDev", "CDev"])
def test_each_call_that_loads_each_kernel(standin: StandIn, c_library: Any, kind: str) -> None:
    made = CudaDev if kind == "CudaDev" else capi.CDev
    each = Sweep(standin)
    standin.trace_queries()
    with CudaContext(0):
        for load in loads_of_each(kind):
            with made(0) as e:
                calls = each.calls_of(lambda e=e, load=load: load(e))
            assert "cuLibraryLoadData" in calls
            for nth in range(1, len(calls) + 1):
                with made(0) as e:
                    each.fail(nth, calls, partial(load, e))
                    load(e)
    each.check_balance()
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
    standin.trace_queries(False)


def opened(context: Any) -> Any:
    return capi.device.LibraryDevice(capi.load(), 0, stream=None)


@functools.cache
def cubins() -> list[Path]:
    """Of two small sources."""
    return [path for path in nvrtc.cubin_files("sm_90") if path.stem in ("copy_many", "counters")]


def from_a_file(device: Any) -> None:
    device.call("memra_device_load_file", str(cubins()[0]).encode())


def from_a_folder(device: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in cubins():
            shutil.copy(path, folder)
        device.call("memra_device_load_folder", folder.encode())


NOTHING = (None, 0, 0, 0, 0, 0, 0, None, 0)  # arguments of set_counters that set none
LOADS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "launch": (DEVICES["CudaDev"], lambda e: e.launch("set_counters", *NOTHING)),
    "prepare": (DEVICES["CudaDev"], lambda e: e.prepare("set_counters", NOTHING)),
    "memra_device_load": (DEVICES["CDev"], lambda e: e.c.load("counters.cu")),
    "memra_device_load_file": (opened, from_a_file),
    "memra_device_load_folder": (opened, from_a_folder),
}  # fmt: skip


def loads(standin: StandIn, name: str, most: int | None = None) -> None:
    """Fails each call that loads kernels, or the first `most`; the next attempt loads them."""
    made, load = LOADS[name]
    each = Sweep(standin)
    standin.trace_queries()
    with CudaContext(0) as context:
        with made(context) as e:
            calls = each.calls_of(lambda: load(e))
        assert calls
        for nth in range(1, len(calls[:most]) + 1):
            with made(context) as e:
                each.fail(nth, calls, lambda e=e: load(e))
                load(e)
    each.check_balance()
    standin.trace_queries(False)


@pytest.mark.parametrize("name", LOADS)
def test_each_call_that_loads_kernels(
    standin: StandIn, c_library: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read_once = functools.cache(nvrtc.compile_cubin)  # not from its file for each of a thousand calls
    monkeypatch.setattr(nvrtc, "compile_cubin", read_once)
    monkeypatch.setattr(nvrtc, "compile_sources", lambda names, arch: {each: read_once(each, arch) for each in names})
    loads(standin, name)


# Memory that runs out


def test_memory_that_runs_out_anywhere_is_named_and_leaves_all_as_it_was(
    make_dev: MakeDev, standin: StandIn
) -> None:
    """After 0 bytes, and after each allocation that an operation makes; the next attempt has room."""
    stage = Stage(make_dev, standin)
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
            tally.add("fault points")
        standin.run_out_after(0, sum(sizes))
        make().close()
        standin.run_out_after(0, 1 << 30)
        stage.end()
    stage.close()


# A fault of the device


@pytest.mark.misuse  # nothing can be freed on a context that is lost
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("cuLaunchKernelEx", lambda cache, e, snap, row: cache.rollback(e, snap, 0)),
        ("cuLaunchKernelEx", lambda cache, e, snap, row: cache.snapshot_into(e, snap)),
        ("cuMemcpyDtoDAsync", lambda cache, e, snap, row: cache.park_logits(e, row)),
    ],
    ids=["rollback", "snapshot_into", "park_logits"],
)
def test_a_lost_context_fails_everything_by_name_and_the_next_one_works(
    make_dev: MakeDev, standin: StandIn, name: str, use: Callable[..., Any]
) -> None:
    stage = Stage(make_dev, standin)
    stage.begin()
    cache, e = stage.cache, stage.e
    row = e.zeros(cache.cfg.n_vocab)
    standin.break_behind(name)
    with suppress(DriverError):
        use(cache, e, stage.snap, row)
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
    for each in (row, stage.snap, cache, stage.other.cache, e):
        with suppress(DriverError):
            each.close()
    assert int(driver._cu.cuDevicePrimaryCtxReset(0)[0]) == 0
    standin.take_errors()
    fresh = make_dev("cuda")
    with Cache.new(fresh, hybrid(), 16, policy=POLICY) as again:
        Lane(again, 2).fill((0, [TRUE, TRUE])).run(again)
        again.advance(fresh, 2)
        assert len(again.digest()) == 64
