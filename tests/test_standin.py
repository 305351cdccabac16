"""The stand-in driver: what it counts, poisons, guards, refuses and reports."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu
from raw_driver import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    from_device,
    ok,
    on_device,
)
from standin import StandIn

pytestmark = pytest.mark.standin


@pytest.fixture
def stream(context: StandIn) -> Iterator[Any]:
    made = ok(cu.cuStreamCreate(1))
    yield made
    cu.cuStreamDestroy(made)


# ---------------------------------------------------------------- devices and contexts


def test_two_h200_like_devices_are_offered(standin: StandIn) -> None:
    ok(cu.cuInit(0))
    A = cu.CUdevice_attribute
    assert ok(cu.cuDeviceGetCount()) == 2
    for device in range(2):
        assert ok(cu.cuDeviceGetName(64, device)).split(b"\0")[0] == f"Stand-in GPU {device}".encode()
        get = [
            ok(cu.cuDeviceGetAttribute(a, device))
            for a in (
                A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                A.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
                A.CU_DEVICE_ATTRIBUTE_WARP_SIZE,
            )
        ]
        assert get == [9, 0, 132, 1, 32]
    assert int(cu.cuDeviceGet(2)[0]) == 101


def test_settings_last_until_the_next_reset(standin: StandIn) -> None:
    ok(cu.cuInit(0))
    standin.set_device_count(1)
    standin.set_driver_version(12080)
    standin.set_attribute(0, 75, 12)
    assert ok(cu.cuDeviceGetCount()) == 1
    assert ok(cu.cuDriverGetVersion()) == 12080
    assert ok(cu.cuDeviceGetAttribute(cu.CUdevice_attribute(75), 0)) == 12
    standin.reset()
    assert ok(cu.cuDeviceGetCount()) == 2
    assert ok(cu.cuDriverGetVersion()) >= 13000
    assert ok(cu.cuDeviceGetAttribute(cu.CUdevice_attribute(75), 0)) == 9


@pytest.mark.misuse
def test_a_primary_context_dies_with_its_last_release_and_takes_its_memory_along(standin: StandIn) -> None:
    ok(cu.cuInit(0))
    first, second = ok(cu.cuDevicePrimaryCtxRetain(1)), ok(cu.cuDevicePrimaryCtxRetain(1))
    assert int(first) == int(second)
    ok(cu.cuCtxSetCurrent(first))
    stream = ok(cu.cuStreamCreate(1))
    ok(cu.cuMemAlloc(1000))
    ok(cu.cuDevicePrimaryCtxRelease(1))
    ok(cu.cuMemAlloc(24))
    assert standin.live_bytes() == 1024
    ok(cu.cuDevicePrimaryCtxRelease(1))
    assert standin.live_bytes() == 0
    assert int(cu.cuMemAlloc(8)[0]) == CONTEXT_IS_DESTROYED
    assert int(cu.cuStreamSynchronize(stream)[0]) == CONTEXT_IS_DESTROYED
    ok(cu.cuCtxSetCurrent(0))
    assert standin.take_errors() == []
    assert int(cu.cuDevicePrimaryCtxRelease(1)[0]) == INVALID_CONTEXT
    assert "more often than retained" in standin.take_errors()[0]


@pytest.mark.misuse
def test_the_current_context_belongs_to_the_thread(context: StandIn) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend([int(ok(cu.cuCtxGetCurrent())), int(cu.cuMemAlloc(8)[0])]))
    thread.start()
    thread.join()
    assert seen == [0, INVALID_CONTEXT]
    assert int(ok(cu.cuCtxGetCurrent())) != 0


# ---------------------------------------------------------------- memory


def test_memory_is_aligned_poisoned_at_birth_and_counted(context: StandIn) -> None:
    like = np.empty(1000, np.uint8)
    a, b = int(ok(cu.cuMemAlloc(1000))), int(ok(cu.cuMemAllocAsync(24, 0)))
    assert a % 256 == b % 256 == 0
    assert (from_device(a, like) == 0xA5).all()
    assert (context.live_bytes(), context.live_count()) == (1024, 2)
    ok(cu.cuMemFree(a))
    ok(cu.cuMemFreeAsync(b, 0))
    assert context.live_bytes() == 0


def test_freed_memory_is_poisoned(context: StandIn) -> None:
    ptr = int(ok(cu.cuMemAlloc(64)))
    ok(cu.cuMemFree(ptr))
    assert ctypes.string_at(ptr, 64) == b"\xdd" * 64


@pytest.mark.misuse
def test_a_second_free_and_a_wild_free_are_refused_and_noted(context: StandIn) -> None:
    ptr = int(ok(cu.cuMemAlloc(64)))
    assert int(cu.cuMemFree(ptr + 8)[0]) == INVALID_VALUE
    ok(cu.cuMemFree(ptr))
    assert int(cu.cuMemFree(ptr)[0]) == INVALID_VALUE
    assert len(context.take_errors()) == 2


@pytest.mark.misuse
@pytest.mark.parametrize(("at", "text"), [(100, "byte 100 of"), (-1, "1 bytes before"), (355, "byte 355 of")])
def test_a_write_beside_an_allocation_is_noted(context: StandIn, at: int, text: str) -> None:
    ptr = int(ok(cu.cuMemAlloc(100)))
    ctypes.memset(ptr + at, 0, 1)
    assert text in context.take_errors()[0]
    ok(cu.cuMemFree(ptr))


@pytest.mark.misuse
def test_a_write_to_freed_memory_is_noted(context: StandIn) -> None:
    ptr = int(ok(cu.cuMemAlloc(100)))
    ok(cu.cuMemFree(ptr))
    ctypes.memset(ptr + 7, 0, 1)
    assert "byte 7 of a freed allocation" in context.take_errors()[0]


@pytest.mark.misuse
def test_copies_and_fills_stay_inside_live_memory(context: StandIn) -> None:
    host = np.zeros(128, np.uint8)
    a, b = int(ok(cu.cuMemAlloc(100))), int(ok(cu.cuMemAlloc(100)))
    refused = [
        cu.cuMemcpyDtoDAsync(a, b, 101, 0),
        cu.cuMemcpyDtoDAsync(a + 1, b, 100, 0),
        cu.cuMemcpyDtoDAsync(a, a + 10, 50, 0),  # overlap
        cu.cuMemcpyHtoDAsync(a + 60, host.ctypes.data, 41, 0),
        cu.cuMemcpyDtoHAsync(host.ctypes.data, b + 1, 100, 0),
        cu.cuMemsetD8Async(a, 0, 101, 0),
        cu.cuMemsetD32Async(a + 2, 0, 1, 0),  # alignment
        cu.cuMemcpyDtoDAsync(host.ctypes.data, a, 8, 0),  # host memory
    ]
    assert [int(r[0]) for r in refused] == [INVALID_VALUE] * len(refused)
    assert len(context.take_errors()) == len(refused)
    ok(cu.cuMemFree(a))
    ok(cu.cuMemFree(b))


def test_copies_and_fills_move_the_bytes(context: StandIn) -> None:
    data = np.arange(64, dtype=np.uint8)
    a, b = on_device(data), int(ok(cu.cuMemAlloc(64)))
    ok(cu.cuMemcpyDtoDAsync(b, a, 64, 0))
    ok(cu.cuMemsetD8Async(b, 7, 3, 0))
    ok(cu.cuMemsetD32Async(b + 8, 0x01020304, 2, 0))
    expected = data.copy()
    expected[:3], expected[8:16] = 7, [4, 3, 2, 1] * 2
    assert (from_device(b, data) == expected).all()
    ok(cu.cuMemFree(a))
    ok(cu.cuMemFree(b))


def test_what_does_not_fit_is_out_of_memory_and_the_rest_stays_free(context: StandIn) -> None:
    context.set_total_memory(0, 4096)
    free, total = cu.cuMemGetInfo()[1:]
    ptr = int(ok(cu.cuMemAlloc(free - 96)))
    assert total == 4096
    assert cu.cuMemGetInfo()[1] == 96
    assert int(cu.cuMemAllocAsync(97, 0)[0]) == OUT_OF_MEMORY
    ok(cu.cuMemFree(ptr))
    assert context.errors() == []


def test_a_pointer_knows_its_allocation(context: StandIn) -> None:
    A = cu.CUpointer_attribute
    ptr = int(ok(cu.cuMemAlloc(100)))
    get = {a: int(ok(cu.cuPointerGetAttribute(a, ptr + 5))) for a in (
        A.CU_POINTER_ATTRIBUTE_CONTEXT, A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, A.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        A.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, A.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    )}  # fmt: skip
    assert list(get.values()) == [int(ok(cu.cuCtxGetCurrent())), 2, 0, ptr, 100]
    ok(cu.cuMemFree(ptr))
    assert int(cu.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr)[0]) == INVALID_VALUE


def test_the_pool_reports_what_is_used(context: StandIn) -> None:
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    before = int(ok(cu.cuMemPoolGetAttribute(pool, used)))
    ptr = int(ok(cu.cuMemAllocAsync(4096, 0)))
    assert int(ok(cu.cuMemPoolGetAttribute(pool, used))) == before + 4096
    ok(cu.cuMemFreeAsync(ptr, 0))


@pytest.mark.misuse
def test_a_second_device_has_its_own_memory_and_peer_copies_cross_over(context: StandIn) -> None:
    data = np.arange(32, dtype=np.uint8)
    ctx0, ctx1 = ok(cu.cuCtxGetCurrent()), ok(cu.cuDevicePrimaryCtxRetain(1))
    a = on_device(data)
    ok(cu.cuCtxSetCurrent(ctx1))
    b = int(ok(cu.cuMemAlloc(32)))
    stream = ok(cu.cuStreamCreate(1))
    assert int(cu.cuMemcpyDtoDAsync(b, a, 32, stream)[0]) == INVALID_VALUE
    assert int(cu.cuMemFree(a)[0]) == INVALID_VALUE
    assert int(cu.cuMemsetD8Async(a, 0, 32, stream)[0]) == INVALID_VALUE
    assert len(context.take_errors()) == 3
    ok(cu.cuMemcpyPeerAsync(b, ctx1, a, ctx0, 32, stream))
    assert (from_device(b, data) == data).all()
    ok(cu.cuMemFree(b))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuCtxSetCurrent(ctx0))
    ok(cu.cuMemFree(a))
    ok(cu.cuDevicePrimaryCtxRelease(1))
    assert context.errors() == []


# ---------------------------------------------------------------- streams and events


@pytest.mark.misuse
def test_a_destroyed_stream_or_event_is_refused(context: StandIn, stream: Any) -> None:
    event = ok(cu.cuEventCreate(0))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuEventDestroy(event))
    assert int(cu.cuStreamSynchronize(stream)[0]) == INVALID_HANDLE
    assert int(cu.cuStreamSynchronize(12345)[0]) == INVALID_HANDLE
    assert int(cu.cuEventRecord(event, 0)[0]) == INVALID_HANDLE
    assert len(context.take_errors()) == 3


def test_events_are_recorded_waited_for_and_timed(context: StandIn, stream: Any) -> None:
    start, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
    ok(cu.cuEventRecord(start, stream))
    ok(cu.cuStreamWaitEvent(0, start, 0))
    ok(cu.cuEventRecord(end, stream))
    ok(cu.cuEventSynchronize(end))
    assert ok(cu.cuEventElapsedTime(start, end)) >= 0
    assert int(ok(cu.cuStreamIsCapturing(stream))) == 0
    assert int(ok(cu.cuStreamGetCtx(stream))) == int(ok(cu.cuCtxGetCurrent()))
    ok(cu.cuEventDestroy(start))
    ok(cu.cuEventDestroy(end))


@pytest.mark.misuse
def test_the_time_of_an_event_without_timing_or_record_is_refused(context: StandIn) -> None:
    plain, untimed = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(2))
    for start, end in ((plain, plain), (untimed, untimed)):
        assert int(cu.cuEventElapsedTime(start, end)[0]) == INVALID_HANDLE
    ok(cu.cuEventDestroy(plain))
    ok(cu.cuEventDestroy(untimed))
    assert len(context.take_errors()) == 2


# ---------------------------------------------------------------- trace and injected failures


def test_the_trace_names_calls_bytes_and_addresses_in_order(context: StandIn, stream: Any) -> None:
    data = np.zeros(16, np.uint8)
    context.clear_trace()
    ptr = int(ok(cu.cuMemAllocAsync(16, stream)))
    ok(cu.cuMemsetD8Async(ptr, 3, 16, stream))
    ok(cu.cuMemcpyDtoHAsync(data.ctypes.data, ptr, 16, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuMemFreeAsync(ptr, stream))
    seen = [(c.name, c.stream, c.dst, c.src, c.bytes, c.device, c.code) for c in context.trace()]
    handle = int(stream)
    assert seen == [
        ("cuMemAllocAsync", handle, ptr, 0, 16, 0, 0),
        ("cuMemsetD8Async", handle, ptr, 3, 16, 0, 0),
        ("cuMemcpyDtoHAsync", handle, data.ctypes.data, ptr, 16, 0, 0),
        ("cuStreamSynchronize", handle, 0, 0, 0, 0, 0),
        ("cuMemFreeAsync", handle, 0, ptr, 16, 0, 0),
    ]


def test_an_injected_failure_hits_the_nth_call_once_and_does_nothing(context: StandIn) -> None:
    context.fail("cuMemAlloc", nth=2, code=OUT_OF_MEMORY)
    a = int(ok(cu.cuMemAlloc(8)))
    assert int(cu.cuMemAlloc(8)[0]) == OUT_OF_MEMORY
    assert context.live_count() == 1
    b = int(ok(cu.cuMemAlloc(8)))
    ok(cu.cuMemFree(a))
    ok(cu.cuMemFree(b))
    assert context.errors() == []
    assert context.pending_failures() == 0


def test_a_star_counts_every_traced_call_and_no_query(context: StandIn) -> None:
    context.fail("*", nth=3, code=999)
    ptr = int(ok(cu.cuMemAlloc(8)))
    ok(cu.cuCtxGetCurrent())
    cu.cuMemGetInfo()
    ok(cu.cuMemsetD8Async(ptr, 0, 8, 0))
    assert int(cu.cuCtxSynchronize()[0]) == 999
    assert context.trace()[-1].code == 999
    ok(cu.cuMemFree(ptr))
