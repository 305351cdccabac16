"""A cache that C makes is the one that Python makes: the same allocations, the same structs; and it ends the same."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cplan
import pytest
from caches import POLICY, attention_only, gemma, tiny
from cplan import Case, addresses, c_cache, c_device, changed, library, new_cache
from standin import Call, StandIn

from memra_driver import driver, layout, native
from memra_driver.cache import Cache
from memra_driver.config import SsmConfig
from memra_driver.errors import (
    AbiError,
    ArrayError,
    CompileError,
    ConfigError,
    DeviceMismatch,
    DriverError,
    DriverOutOfMemory,
    MemraError,
    OutOfMemory,
    StateError,
)
from memra_driver.kernels import KERNELS
from memra_driver.layout import CacheState, Invalid
from memra_driver.plan import CacheOptions

try:
    native.compiler()
except CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]

MTP = tiny(n_layer=9, nextn_predict_layers=1)
CASES = {
    "interval 4": Case.of(tiny(), 33),
    "no linear layers": Case.of(attention_only(), 33),
    "no attention layers": Case.of(tiny(n_layer=3), 33),
    "no tokens": Case.of(MTP, 0),
    "mtp": Case.of(MTP, 33, {}, {"round_width": 4, "max_rows": 7, "strict": True}),
    "mtp skipped": Case.of(MTP, 33, {}, {"skip_mtp_state": True, "reserve_logits": True}),
    "mtp that attends": Case.of(attention_only(4, nextn_predict_layers=2), 9, {}, {"skip_mtp_state": True}),
    "gemma": Case.of(gemma(shared=3), 33, {"wkv": False}),
    "gemma, windows of more than an int": changed(
        Case.of(gemma(), 5, {"gkv": False}), "cfg.gemma4.sliding_window", 2**32 - 1
    ),
    "step, windows and query heads by layer": changed(
        Case.of(attention_only(), 5), "cfg.step35",
        {"head_count": (4, 8, 2), "head_count_kv": (1, 1, 1), "swa_pattern": (True, False), "sliding_window": 9},
    ),
    "no query heads named": changed(Case.of(tiny(), 5), "cfg.n_head", 0),
    "gemma, nobody owns": Case.of(gemma(shared=6), 33),
    "reserved": Case.of(tiny(n_head=6), 33, {"v": "q4_0"}, {"reserve_logits": True, "reserve_taps": ((3, 0), 7)}),
    "no ring": Case.of(
        tiny(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1)), 5, {}, {"round_width": 1}
    ),
}  # fmt: skip
MODEL = CASES["mtp"].cfg
SPREAD = {
    "two": Case(MODEL, 33, {}, {"round_width": 2}, (0, 3, 9)),
    "two, to the trunk's end": Case(MODEL, 33, {}, {"reserve_logits": True}, (0, 3, 8)),
    "one twice": Case(
        MODEL, 33, {}, {"reserve_taps": ((8, 0), 2), "reserve_logits": True}, (0, 3, 5, 9), (0, 1, 0)
    ),
    "recurrent layers on one of two": Case(MODEL, 33, {}, {}, (0, 7, 8)),
}  # fmt: skip
BORN = ("cuMemAllocAsync", "cuMemsetD8Async")


# Struct against struct


class Blocks:
    """Addresses as (number of the allocation, offset in it), counted from the trace."""

    def __init__(self, calls: list[Call]) -> None:
        self.made = [(call.dst, call.bytes) for call in calls if call.name == "cuMemAllocAsync" and not call.code]

    def of(self, ptr: int) -> Any:
        if not ptr:
            return None
        ((n, offset),) = [(n, ptr - at) for n, (at, size) in enumerate(self.made) if at <= ptr < at + size]
        return n, offset


def shown(struct: Any, blocks: Blocks) -> Any:
    """Every field by name, addresses made comparable."""
    found: dict[str, Any] = {}
    for name, kind in struct._fields_:
        value = getattr(struct, name)
        if name in ("ptr", "home", "away"):
            value = blocks.of(value)
        elif isinstance(value, ctypes.Structure):
            value = shown(value, blocks)
        elif hasattr(kind, "contents"):
            value = bool(value)
        found[name] = value
    return found


def whole(cache: layout.CacheC, blocks: Blocks) -> Any:
    """All that a cache's structs say, but who it is and whose handle it has."""
    found = shown(cache, blocks)
    for name, n in (("kv", cache.n_layer), ("recur", cache.n_layer), ("devices", cache.n_devices)):
        found[name] = [shown(each, blocks) for each in getattr(cache, name)[:n]]
    for each in found["devices"]:
        del each["handle"]
    del found["id"]
    return found


def handles(cache: layout.CacheC) -> list[int]:
    return [each.handle for each in cache.devices[: cache.n_devices]]


def image(cache: layout.CacheC) -> list[bytes]:
    """The bytes of all structs of a cache."""
    arrays = (cache.kv[: cache.n_layer], cache.recur[: cache.n_layer], cache.devices[: cache.n_devices])
    return [bytes(cache), *(bytes(each) for array in arrays for each in array)]


def of_python(case: Case, devices: list[Any]) -> Cache:
    """The same cache on CudaDevs, one a stage."""
    options = CacheOptions(**case.options)
    policy = case.plan().policy
    fence = case.fence or (0, case.model().n_layer)
    return Cache.new_ppn(devices, fence, case.model(), case.max_ctx, policy=policy, options=options)


def compare(case: Case, standin: StandIn, make_dev: MakeDev, arena: bool) -> None:
    placement = case.placement or tuple(range(len(case.fence or (0, 0)) - 1))
    unique = [make_dev("cuda", n, arena=arena) for n in range(max(placement) + 1)]
    standin.clear_trace()
    with of_python(case, [unique[d] for d in placement]) as cache:
        asked = standin.trace()
        expected = whole(cache.as_c().contents, Blocks(asked))
    with ExitStack() as stack:
        devices = [stack.enter_context(c_device(e, arena=arena)) for e in unique]
        standin.clear_trace()
        cache = stack.enter_context(c_cache(case, [devices[d] for d in placement]))
        calls = standin.trace()
        blocks = Blocks(calls)
        assert whole(cache, blocks) == expected
        assert [size for _, size in blocks.made] == [size for _, size in Blocks(asked).made]
        assert handles(cache) == [device.handle for device in devices]
        check_birth(case, calls, arena)


def check_birth(case: Case, calls: list[Call], arena: bool) -> None:
    """One allocation and one clear a device; or those of each plane, but what is written before it is read."""
    plan = case.plan()
    if arena:
        expected = [(name, d.arena_bytes, d.device) for d in plan.per_device for name in BORN]
    else:
        expected = [
            (name, row.bytes, row.device) for row in plan.planes if row.bytes
            for name in (BORN[:1] if row.group in ("tape", "logits", "taps") else BORN)
        ]  # fmt: skip
    assert [(call.name, call.bytes, call.device) for call in calls] == expected
    for call in calls:
        if call.name == "cuMemsetD8Async":
            assert not any(ctypes.string_at(call.dst, call.bytes))


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c_makes_the_cache_that_python_makes(standin: StandIn, make_dev: MakeDev, case: Case, arena: bool) -> None:
    compare(case, standin, make_dev, arena)


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD)
def test_c_makes_the_cache_of_several_devices_that_python_makes(
    standin: StandIn, make_dev: MakeDev, case: Case, arena: bool
) -> None:
    compare(case, standin, make_dev, arena)


def test_ids_are_no_two_alike_and_never_pythons(standin: StandIn, make_dev: MakeDev) -> None:
    with c_device() as device, c_cache(CASES["mtp"], [device]) as one, c_cache(CASES["mtp"], [device]) as two:
        assert 2**32 <= one.id < two.id
    with Cache.new(make_dev("cuda"), MTP, 4, policy=POLICY) as cache:
        assert cache.id < 2**32


# What cannot be born leaves nothing


@pytest.fixture
def two(standin: StandIn) -> Iterator[list[Any]]:
    """Devices 0 and 1 of the library, the second without an arena, and a fresh trace."""
    with c_device() as first, c_device(ordinal=1, arena=False) as second:
        standin.clear_trace()
        yield [first, second]


def test_a_failure_of_any_call_leaves_nothing_allocated(standin: StandIn, two: list[Any]) -> None:
    case = SPREAD["two"]
    with c_cache(case, two):
        n_calls = len(standin.trace())
    live = standin.live_count()
    assert n_calls > 20
    for code, kind in ((2, DriverOutOfMemory), (999, DriverError)):
        for nth in range(1, n_calls + 1):
            standin.clear_failures()
            standin.fail("*", nth, code)
            with pytest.raises(kind, match="cuMem"):
                new_cache(case, two)
            assert (standin.pending_failures(), standin.live_count()) == (0, live)
    for name in ("cuMemGetInfo", "cuStreamIsCapturing", "cuMemPoolGetAttribute"):
        standin.clear_trace()
        standin.fail(name)
        with pytest.raises(DriverError, match=name):
            new_cache(case, two)
        assert standin.trace() == []
    with c_cache(case, two):  # and nothing is spoilt
        pass


@pytest.mark.misuse
def test_the_reason_of_a_birth_that_failed_is_told_even_if_the_clean_up_fails(standin: StandIn, two: list[Any]) -> None:
    standin.fail("cuMemsetD8Async", code=999)
    standin.fail("cuMemFreeAsync", code=700)
    with pytest.raises(DriverError, match=r"cuMemsetD8Async.*999"):
        new_cache(CASES["mtp"], two[:1])
    assert standin.pending_failures() == 0


@pytest.mark.misuse
def test_a_free_that_fails_keeps_no_other_from_being_made(standin: StandIn, two: list[Any]) -> None:
    live = standin.live_count()
    made = new_cache(SPREAD["two"], two)
    standin.fail("cuMemFreeAsync", 2, 999)
    standin.fail("cuMemFreeAsync", 4, 700)
    with pytest.raises(DriverError, match=r"cuMemFreeAsync.*\(999\)"):
        library().call("memra_cache_free", made)
    assert standin.live_count() == live + 2


ALLOCATOR = """
#include <stdlib.h>
long memra_test_left = -1, memra_test_live = 0; /* allocations that succeed yet, -1: all; what is not freed */
static void *counted(void *made) { if (made) memra_test_live++; return made; }
static int ends(void) { return memra_test_left >= 0 && memra_test_left-- == 0; }
void *memra_test_malloc(size_t n) { return ends() ? NULL : counted(malloc(n)); }
void *memra_test_calloc(size_t n, size_t size) { return ends() ? NULL : counted(calloc(n, size)); }
void memra_test_free(void *made) { if (made) memra_test_live--; free(made); }
"""


def test_host_memory_that_ends_at_any_point_leaves_nothing_allocated(standin: StandIn, tmp_path: Path) -> None:
    lib = cplan.library_on(ALLOCATOR, tmp_path)
    left, held = (ctypes.c_long.in_dll(lib._dll, f"memra_test_{name}") for name in ("left", "live"))
    case = SPREAD["one twice"]
    with c_device(lib=lib) as first, c_device(ordinal=1, lib=lib) as second:
        before = (held.value, standin.live_count())
        for allowed in range(100):
            left.value = allowed
            try:
                made = new_cache(case, [first, second, first], lib)
            except MemraError as error:
                kind = type(error)
            else:
                break
            left.value = -1
            assert (kind, held.value, standin.live_count()) == (OutOfMemory, *before)
        left.value = -1
        assert allowed > 15
        lib.call("memra_cache_free", made)
        assert (held.value, standin.live_count()) == before
        for refused in (
            Case(MODEL, -1), Case(MODEL, 8, {}, {}, (0, 3, 5, 7)), Case(MODEL | {"n_head_kv": 0}, 8),
            Case(MODEL, 8, {}, {"reserve_taps": ((0, 4), 1)}, (0, 3, 5, 9)),
            Case(MODEL | {"head_dim_k": 2**30, "n_head_kv": 1, "full_attention_interval": 1}, 2**31 - 1),
        ):  # fmt: skip
            with pytest.raises(ConfigError):
                new_cache(refused, [first, second, first], lib)
            assert held.value == before[0]


@pytest.mark.parametrize("ordinals", [(0, 0), (0, 1)], ids=["one GPU", "two GPUs"])
def test_what_cannot_fit_is_refused_before_the_first_byte(
    standin: StandIn, make_dev: MakeDev, ordinals: tuple[int, int]
) -> None:
    case = SPREAD["two"]
    arenas = [device.arena_bytes for device in case.plan().per_device]
    need = sum(arenas) if ordinals == (0, 0) else arenas[1]
    unique = [make_dev("cuda", n) for n in ordinals]
    with c_device(unique[0]) as first, c_device(unique[1]) as second:
        used = standin.live_bytes() // len(set(ordinals))  # what the devices were born with is the same on each
        standin.set_total_memory(ordinals[1], used + need - 1)
        standin.clear_trace()
        with pytest.raises(OutOfMemory) as expected:
            of_python(case, unique)
        with pytest.raises(OutOfMemory) as refused:
            new_cache(case, [first, second])
        assert str(refused.value) == str(expected.value)
        assert not isinstance(refused.value, DriverError)
        assert f"{need} bytes on cuda:{ordinals[1]}, which has {need - 1} free" in str(expected.value)
        assert standin.trace() == []
        standin.set_total_memory(ordinals[1], used + need)
        with c_cache(case, [first, second]):
            pass


def test_a_plan_that_is_refused_reaches_no_device(standin: StandIn, two: list[Any]) -> None:
    for case, sentence in (
        (Case(MODEL, -1, {}, {}, (0, 3, 9)), "max_ctx is -1; it must lie in 0 .. 2147483647"),
        (Case(MODEL, 8, {}, {}, (0, 3, 7)), "fence [0, 3, 7] ends at 7; it must end at 9 or 8"),
        (Case(MODEL, 8, {"k": "q4_0"}, {}, (0, 3, 9)), "FormatPolicy.k='q4_0': use one of q8_0, fp8"),
    ):
        with pytest.raises(ConfigError) as refused:
            new_cache(case, two)
        assert str(refused.value) == sentence
    args = cplan.arguments(CASES["mtp"])
    made = ctypes.POINTER(layout.CacheC)()
    for given, kind, sentence in (
        ((None, None, 0, ctypes.byref(made)), ArrayError, "devices or cache is NULL"),
        ((addresses(two), None, 1, None), ArrayError, "devices or cache is NULL"),
        ((addresses([None]), None, 0, ctypes.byref(made)), DeviceMismatch, "the device is NULL"),
        ((addresses(two), None, 2, ctypes.byref(made)), ConfigError, r"2 devices for the 1 stages of fence \[0, 9\]"),
    ):
        with pytest.raises(kind, match=sentence):
            library().call("memra_cache_new", *args, *given)
    assert not made
    assert standin.trace() == []


def test_nothing_is_born_or_ends_while_a_capture_is_open(standin: StandIn, two: list[Any]) -> None:
    case = SPREAD["two"]
    with c_cache(case, two) as cache:
        for device in two:
            device.call("memra_capture_begin", 0)
            standin.clear_trace()
            before = image(cache)
            for call in (
                lambda: library().call("memra_cache_free", ctypes.pointer(cache)), lambda: new_cache(case, two),
            ):  # fmt: skip
                with pytest.raises(StateError, match="a capture is open; only steps and rounds can be recorded"):
                    call()
            assert image(cache) == before
            assert standin.trace() == []
            device.call("memra_capture_abandon")


def test_nothing_is_born_or_ends_while_the_caller_records_the_stream(standin: StandIn, make_dev: MakeDev) -> None:
    e, case = make_dev("cuda"), CASES["mtp"]
    with c_device(e) as device, c_cache(case, [device]) as cache:
        driver.stream_begin_capture(e.stream.handle)
        before = image(cache)
        for call in (
            lambda: library().call("memra_cache_free", ctypes.pointer(cache)),
            lambda: new_cache(case, [device]),
        ):
            with pytest.raises(StateError, match="a capture is open"):
                call()
        assert image(cache) == before
        driver.graph_destroy(driver.stream_end_capture(e.stream.handle))


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

    def release(owned: Any) -> None:  # each is out of the list when it is released, and memory still stands
        first = made.contents.owned
        seen.append((owned.contents.slice.ptr, first.contents.slice.ptr if first else 0, made.contents.state))
        assert ctypes.string_at(made.contents.devices[0].pos_d.ptr, 4) == bytes(4)

    release_c = dict(layout.OwnedC._fields_)["release"](release)
    owned = [layout.OwnedC(release=release_c, slice=layout.SliceC(ptr=n)) for n in (11, 12)]
    owned[0].next = ctypes.pointer(owned[1])
    cache.owned = ctypes.pointer(owned[0])
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
