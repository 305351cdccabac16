"""A cache that C makes is the one that Python makes: the same allocations, the same structs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cplan
import pytest
from caches import POLICY
from cplan import (
    CASES,
    MODEL,
    MTP,
    SPREAD,
    Case,
    addresses,
    c_cache,
    c_device,
    handles,
    image,
    library,
    new_cache,
    of_python,
)
from standin import Call, StandIn, finish

from memra_driver import driver, layout, native
from memra_driver.cache import Cache
from memra_driver.errors import (
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

try:
    native.compiler()
except CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]

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
            finish()
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
                with pytest.raises(StateError, match=r"capture is open|stream is capturing"):
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
            with pytest.raises(StateError, match=r"capture is open|stream is capturing"):
                call()
        assert image(cache) == before
        driver.graph_destroy(driver.stream_end_capture(e.stream.handle))
