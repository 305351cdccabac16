"""How a cache that C made ends, and how the library takes hold of one that Python made."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import cplan
import pytest
from caches import POLICY
from cplan import (
    CASES,
    MTP,
    SPREAD,
    addresses,
    c_cache,
    c_device,
    handles,
    image,
    library,
    new_cache,
    of_python,
)
from standin import StandIn

from memra_driver import layout, native
from memra_driver.cache import Cache
from memra_driver.errors import (
    AbiError,
    ArrayError,
    CompileError,
    DeviceMismatch,
    DriverError,
    MemraError,
    StateError,
)
from memra_driver.kernels import KERNELS
from memra_driver.layout import CacheState, Invalid

try:
    native.compiler()
except CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]


@pytest.fixture
def two(standin: StandIn) -> Iterator[list[Any]]:
    """Devices 0 and 1 of the library, the second without an arena, and a fresh trace."""
    with c_device() as first, c_device(ordinal=1, arena=False) as second:
        standin.clear_trace()
        yield [first, second]


# The end


def test_a_cache_frees_all_in_stream_order_and_waits_for_nothing(standin: StandIn, two: list[Any]) -> None:
    live = standin.live_count()
    made = new_cache(SPREAD["two"], two)
    born = [call for call in standin.trace() if call.name == "cuMemAllocAsync"]
    standin.clear_trace()
    library().call("memra_cache_free", made)
    freed = standin.trace()
    assert [(call.name, call.src, call.stream) for call in freed] == [
        ("cuMemFreeAsync", call.dst, call.stream) for call in born
    ]  # fmt: skip
    assert standin.live_count() == live
    library().call("memra_cache_free", None)


def test_the_end_lets_snapshots_go_and_releases_what_the_library_made(standin: StandIn, two: list[Any]) -> None:
    made = new_cache(CASES["mtp"], two[:1])
    cache = made.contents
    snapshots = [layout.SnapshotC(invalid=invalid) for invalid in (Invalid.VALID, Invalid.GIVEN_UP)]
    snapshots[0].next = ctypes.pointer(snapshots[1])
    cache.snapshots = ctypes.pointer(snapshots[0])
    seen: list[tuple[int, int, int]] = []

    def release(owned: Any) -> int:  # each is out of the list when it is released, and memory still stands
        first = made.contents.owned
        seen.append((owned.contents.slice.ptr, first.contents.slice.ptr if first else 0, made.contents.state))
        assert ctypes.string_at(made.contents.devices[0].pos_d.ptr, 4) == bytes(4)
        return 0

    release_c = dict(layout.OwnedC._fields_)["release"](release)
    owned = [layout.OwnedC(release=release_c, slice=layout.SliceC(ptr=n)) for n in (11, 12)]
    owned[0].next = ctypes.pointer(owned[1])
    cache.owned = ctypes.pointer(owned[0])
    standin.finish()
    library().call("memra_cache_free", made)
    assert seen == [(11, 12, CacheState.CLOSED), (12, 0, CacheState.CLOSED)]
    assert [(snap.invalid, bool(snap.next)) for snap in snapshots] == [(Invalid.CACHE_CLOSED, False)] * 2


def test_a_graph_that_moved_a_cache_is_not_launched_after_its_end(standin: StandIn) -> None:
    with c_device() as device:
        device.load(KERNELS["commit_counters"].source)
        made, graph = new_cache(CASES["mtp"], [device]), ctypes.c_void_p()
        device.call("memra_capture_begin", 0)
        library().call("memra_advance", made, 1)
        device.call("memra_capture_end", ctypes.byref(graph))
        library().call("memra_graph_launch", graph)
        assert made.contents.pos == 1
        library().call("memra_cache_free", made)
        standin.clear_trace()
        with pytest.raises(StateError, match="the cache is closed"):
            library().call("memra_graph_launch", graph)
        assert standin.trace() == []
        library().call("memra_graph_close", graph)


def test_a_cache_outlives_its_device_without_harm(standin: StandIn) -> None:
    with c_device() as device:
        made = new_cache(CASES["mtp"], [device])
    standin.clear_trace()
    library().call("memra_cache_free", made)
    assert standin.trace() == []
    assert standin.live_count() == 0  # it went with the context


def test_a_forked_child_cannot_make_bind_or_free(standin: StandIn, two: list[Any]) -> None:
    case = SPREAD["two"]
    with c_device() as gone:
        orphan = new_cache(CASES["mtp"], [gone])
    with c_cache(case, two) as cache:
        devices = addresses(two)
        standin.clear_trace()
        child = os.fork()
        if not child:
            refused = []
            for call in (
                lambda: library().call("memra_cache_free", ctypes.pointer(cache)),
                lambda: library().call("memra_cache_free", orphan),
                lambda: library().call("memra_cache_bind", ctypes.pointer(cache), devices, 2),
                lambda: new_cache(case, two),
            ):
                try:
                    call()
                except StateError as error:
                    refused.append("fork" in str(error))
            untouched = cache.state == CacheState.READY and standin.trace() == []
            planned = isinstance(cplan.outcome_of_c(case), tuple)  # which takes no device
            os._exit(0 if untouched and planned and refused == [True] * 4 else 1)
        assert os.waitpid(child, 0)[1] == 0
    library().call("memra_cache_free", orphan)


@pytest.mark.misuse
def test_a_free_that_fails_keeps_no_other_from_being_made(standin: StandIn, two: list[Any]) -> None:
    live = standin.live_count()
    made = new_cache(SPREAD["two"], two)
    standin.fail("cuMemFreeAsync", 2, 999)
    standin.fail("cuMemFreeAsync", 4, 700)
    with pytest.raises(DriverError, match=r"cuMemFreeAsync.*\(999\)"):
        library().call("memra_cache_free", made)
    assert library().ask("memra_last_driver_code") == 999  # of the failure that is told
    assert standin.live_count() == live + 2


def test_a_stream_that_cannot_be_asked_keeps_no_cache_alive(standin: StandIn, two: list[Any]) -> None:
    """A context that a fault has spoiled answers every call with it; what the host holds is freed all the same."""
    live = standin.live_count()
    made = new_cache(SPREAD["two"], two)
    standin.fail("cuStreamIsCapturing", 1, 700)
    with pytest.raises(DriverError, match="cuStreamIsCapturing"):
        library().call("memra_cache_free", made)
    assert standin.live_count() == live


# Python's caches


def test_the_library_takes_hold_of_a_cache_that_python_made(standin: StandIn, make_dev: MakeDev) -> None:
    unique = [make_dev("cuda", 0), make_dev("cuda", 1)]
    with of_python(SPREAD["two"], unique) as cache, c_device(unique[0]) as first, c_device(unique[1]) as second:
        struct = cache.as_c().contents
        standin.clear_trace()
        library().call("memra_cache_bind", cache.as_c(), addresses([first, second]), 2)
        assert handles(struct) == [first.handle, second.handle]
        assert standin.trace() == []
        with pytest.raises(StateError, match=rf"cache {cache.id} is Python's; Cache.close frees it"):
            library().call("memra_cache_free", cache.as_c())
        assert cache.state is CacheState.READY


def test_a_device_that_is_not_the_caches_own_is_not_bound(standin: StandIn, make_dev: MakeDev) -> None:
    unique = [make_dev("cuda", 0), make_dev("cuda", 1)]
    cache = of_python(SPREAD["two"], unique)
    pointer, struct = cache.as_c(), cache.as_c().contents
    with c_device(unique[0]) as first, c_device(unique[1]) as second, c_device(ordinal=1) as other:

        def refused(kind: type[MemraError], sentence: str, given: Any, n: int = 2) -> None:
            before = image(struct)
            with pytest.raises(kind, match=sentence):
                library().call("memra_cache_bind", pointer, given, n)
            assert image(struct) == before

        refused(DeviceMismatch, "1 devices for a cache on 2", addresses([first]), 1)
        refused(DeviceMismatch, "device 0 of the cache is cuda:0, the one given is cuda:1", addresses([second, first]))
        refused(DeviceMismatch, "the device is NULL", addresses([first, None]))
        refused(DeviceMismatch, "device 1 of the cache works on stream 0x", addresses([first, other]))
        refused(ArrayError, "cache or devices is NULL", None)
        mine = addresses([first, second])
        for name in ("struct_size", "abi_version"):
            setattr(struct, name, getattr(struct, name) + 1)
            refused(AbiError, "struct_size|ABI version", mine)
            setattr(struct, name, getattr(struct, name) - 1)
        with pytest.raises(ArrayError, match="cache or devices is NULL"):
            library().call("memra_cache_bind", None, mine, 2)
        second.close()
        refused(StateError, "the device is closed", mine)
        cache.close()
        refused(StateError, "the cache is closed", mine)


def test_a_cache_in_host_memory_is_not_bound(standin: StandIn, make_dev: MakeDev) -> None:
    with Cache.new(make_dev("host"), MTP, 4, policy=POLICY) as cache, c_device() as device:
        given = addresses([device])
        with pytest.raises(DeviceMismatch, match="device 0 of the cache is host memory"):
            library().call("memra_cache_bind", cache.as_c(), given, 1)


def test_a_cache_on_the_default_stream_is_bound_by_either_of_its_names(standin: StandIn, make_dev: MakeDev) -> None:
    """0 and 1 are one stream, and a device of the library cannot be asked for by 0."""
    e = make_dev("cuda", stream=0)
    with Cache.new(e, MTP, 4, policy=POLICY) as cache, c_device(e) as device:
        assert (cache.as_c().contents.devices[0].stream, device.stream) == (0, 1)
        library().call("memra_cache_bind", cache.as_c(), addresses([device]), 1)
        assert handles(cache.as_c().contents) == [device.handle]
