"""The stand-in driver and the CPU shim: what they count, poison, guard, refuse and report."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import standin as standin_module
from standin import StandIn

cu = pytest.importorskip("cuda.bindings.driver")
pytestmark = pytest.mark.standin

FAULTS = standin_module.SHIM / "faults.cu"
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400
ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED, LAUNCH_FAILED = 700, 709, 719


def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


@pytest.fixture
def context(standin: StandIn) -> Iterator[StandIn]:
    """A retained and current primary context of device 0."""
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    yield standin
    ok(cu.cuCtxSetCurrent(0))
    ok(cu.cuDevicePrimaryCtxRelease(0))


@pytest.fixture
def stream(context: StandIn) -> Iterator[Any]:
    made = ok(cu.cuStreamCreate(1))
    yield made
    cu.cuStreamDestroy(made)


Launch = Callable[..., int]


@pytest.fixture
def launch(context: StandIn) -> Iterator[Launch]:
    """launch(name, threads, *(value, ctype), grid=..., smem=...) -> code, of a kernel of faults.cu."""
    context.use_kernels(standin_module.build_kernels([FAULTS]))
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))

    def run(name: str, threads: int, *args: tuple[Any, Any], grid: int = 1, smem: int = 0) -> int:
        kernel = ok(cu.cuLibraryGetKernel(library, name.encode()))
        params = (tuple(a for a, _ in args), tuple(c for _, c in args))
        return int(cu.cuLaunchKernel(kernel, grid, 1, 1, threads, 1, 1, smem, 0, params, 0)[0])

    yield run
    ok(cu.cuLibraryUnload(library))


PTR, INT = ctypes.c_void_p, ctypes.c_int


def on_device(array: np.ndarray) -> int:
    ptr = int(ok(cu.cuMemAlloc(array.nbytes)))
    ok(cu.cuMemcpyHtoD(ptr, array.ctypes.data, array.nbytes))
    return ptr


def from_device(ptr: int, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    ok(cu.cuMemcpyDtoH(out.ctypes.data, ptr, out.nbytes))
    return out


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


# ---------------------------------------------------------------- launches


def test_a_kernel_runs_and_stands_in_the_trace(context: StandIn, launch: Launch) -> None:
    data = np.arange(1000, dtype=np.float32)
    ptr = on_device(data)
    assert launch("add_one", 128, (ptr, PTR), (1000, INT), grid=8) == 0
    assert (from_device(ptr, data) == data + 1).all()
    call = context.calls("cuLaunchKernel")[-1]
    assert (call.kernel, call.grid, call.block, call.smem) == ("add_one", (8, 1, 1), (128, 1, 1), 0)
    assert context.launches() == ["add_one"]
    ok(cu.cuMemFree(ptr))


def test_threads_run_backward_when_asked_to(context: StandIn, launch: Launch) -> None:
    out = np.zeros(64, np.uint32)
    ptr = on_device(out)
    assert launch("missing_barrier", 64, (ptr, PTR)) == 0
    forward = from_device(ptr, out)
    context.schedule("backward")
    assert launch("missing_barrier", 64, (ptr, PTR)) == 0
    backward = from_device(ptr, out)
    assert (forward == 0xA5A5A5A5).any()
    assert (forward != backward).any()
    ok(cu.cuMemFree(ptr))


def test_parameters_are_described_as_a_driver_does(launch: Launch, context: StandIn) -> None:
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"parameters"))
    info = [cu.cuKernelGetParamInfo(kernel, i) for i in range(6)]
    assert [(r[1], r[2]) for r in info[:5]] == [(0, 1), (8, 8), (16, 4), (20, 4), (24, 8)]
    assert int(info[5][0]) == INVALID_VALUE
    assert int(cu.cuLibraryGetKernel(library, b"no_such_kernel")[0]) == 500
    ok(cu.cuLibraryUnload(library))


@pytest.mark.misuse
@pytest.mark.parametrize(
    ("grid", "block", "smem"),
    [
        ((0, 1, 1), (32, 1, 1), 0),
        ((1, 65536, 1), (32, 1, 1), 0),
        ((1, 1, 65536), (32, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (32, 33, 1), 0),
        ((1, 1, 1), (1, 1, 65), 0),
        ((1, 1, 1), (0, 1, 1), 0),
        ((1, 1, 1), (32, 1, 1), 49153),
    ],
)
def test_a_launch_that_no_gpu_takes_is_refused(
    context: StandIn, launch: Launch, grid: tuple[int, ...], block: tuple[int, ...], smem: int
) -> None:
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"add_one"))
    result = cu.cuLaunchKernel(kernel, *grid, *block, smem, 0, ((0, 0), (PTR, INT)), 0)
    assert int(result[0]) == INVALID_VALUE
    assert len(context.take_errors()) == 1


@pytest.mark.misuse
def test_a_stream_of_another_device_does_not_take_a_launch(context: StandIn, launch: Launch) -> None:
    ctx0, ctx1 = ok(cu.cuCtxGetCurrent()), ok(cu.cuDevicePrimaryCtxRetain(1))
    ok(cu.cuCtxSetCurrent(ctx1))
    stream = ok(cu.cuStreamCreate(1))
    ok(cu.cuCtxSetCurrent(ctx0))
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"add_one"))
    result = cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, ((0, 0), (PTR, INT)), 0)
    assert int(result[0]) == INVALID_HANDLE
    ok(cu.cuDevicePrimaryCtxRelease(1))


@pytest.fixture
def doomed(launch: Launch) -> Iterator[Launch]:
    """`launch`, for kernels that leave the context unusable; it is thrown away afterwards."""
    yield launch
    ok(cu.cuDevicePrimaryCtxReset(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))


@pytest.mark.misuse
def test_a_kernel_must_not_get_host_or_freed_memory(context: StandIn, doomed: Launch) -> None:
    host = np.zeros(8, np.float32)
    assert doomed("add_one", 32, (host.ctypes.data, PTR), (0, INT)) == ILLEGAL_ADDRESS
    assert "is not live device memory" in context.take_errors()[0]
    assert int(cu.cuCtxSynchronize()[0]) == ILLEGAL_ADDRESS  # a fault stays


@pytest.mark.misuse
def test_a_kernel_that_writes_past_its_memory_is_named(context: StandIn, launch: Launch) -> None:
    ptr = int(ok(cu.cuMemAlloc(100)))
    assert launch("writes_at", 1, (ptr, PTR), (100, ctypes.c_longlong)) == 0
    assert context.take_errors() == ["writes_at: byte 100 of an allocation of 100 bytes was written"]
    ok(cu.cuMemFree(ptr))


# ---------------------------------------------------------------- the shim


def test_barriers_shuffles_ballots_and_atomics_do_what_a_gpu_does(context: StandIn, launch: Launch) -> None:
    x = np.arange(96, dtype=np.float32)
    out, ballots = np.zeros(97, np.float32), np.zeros(2, np.uint32)
    d_x, d_out, d_ballots = on_device(x), on_device(out), on_device(ballots)
    assert launch("sums", 96, (d_x, PTR), (d_out, PTR), (d_ballots, PTR)) == 0
    got = from_device(d_out, out)
    assert got[0] == x.sum()
    assert (got[1:] == np.repeat(x.reshape(-1, 8).sum(axis=1), 8)).all()
    assert from_device(d_ballots, ballots).tolist() == [0b111, 3 * 0xAAAAAAAA % 2**32]
    for ptr in (d_x, d_out, d_ballots):
        ok(cu.cuMemFree(ptr))


@pytest.mark.misuse
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("deadlock", "deadlock: 16 threads wait at __syncthreads, 16 in __ballot_sync"),
        ("full_mask_in_half_a_warp", "__shfl_xor_sync: mask ffffffff names lane"),
        ("lane_outside_its_mask", "lane 16 calls it but is not in its mask 0000ffff"),
        ("reads_outside_its_mask", "reads lane 20, which is not in mask 0000ffff"),
        ("different_intrinsics_meet", "meets"),
    ],
)
def test_a_fault_fails_the_launch_and_every_later_call(
    context: StandIn, doomed: Launch, kernel: str, text: str
) -> None:
    ptr = int(ok(cu.cuMemAlloc(256)))
    assert doomed(kernel, 32, (ptr, PTR)) == LAUNCH_FAILED
    (error,) = context.take_errors()
    assert error.startswith(f"cuLaunchKernel: {kernel}: ")
    assert text in error
    assert int(cu.cuCtxSynchronize()[0]) == LAUNCH_FAILED
    assert int(cu.cuMemFree(ptr)[0]) == LAUNCH_FAILED


def test_shared_memory_is_poisoned_for_each_block(context: StandIn, launch: Launch) -> None:
    out = np.zeros(64, np.uint32)
    ptr = on_device(out)
    assert launch("dynamic_shared", 32, (ptr, PTR), grid=2, smem=128) == 0
    assert (from_device(ptr, out)[:32] == 0xA5A5A5A5).all()
    assert launch("missing_barrier", 32, (ptr, PTR), grid=2) == 0
    seen = from_device(ptr, out)[:32]
    assert (seen[:31] == 0xA5A5A5A5).all()
    assert seen[31] == 0
    ok(cu.cuMemFree(ptr))


def test_two_threads_launch_at_once(context: StandIn, launch: Launch) -> None:
    current, results = ok(cu.cuCtxGetCurrent()), []

    def work(start: int) -> None:
        ok(cu.cuCtxSetCurrent(current))
        data = np.full(2048, start, np.float32)
        ptr = on_device(data)
        for _ in range(20):
            assert launch("add_one", 256, (ptr, PTR), (2048, INT), grid=8) == 0
        results.append((from_device(ptr, data) == start + 20).all())
        ok(cu.cuMemFree(ptr))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


# ---------------------------------------------------------------- the sanitized build

CHILD = """
import ctypes, sys
from pathlib import Path
import standin
from cuda.bindings import driver as cu

def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) > 1 else None

control = standin.load()
control.use_kernels(standin.build_kernels([standin.SHIM / "faults.cu"]))
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
library = ok(cu.cuLibraryLoadData(b"x", [], [], 0, [], [], 0))
ptr, out = int(ok(cu.cuMemAlloc(100))), int(ok(cu.cuMemAlloc(128)))
args = eval(sys.argv[2])
kernel = ok(cu.cuLibraryGetKernel(library, sys.argv[1].encode()))
print("before", flush=True)
ok(cu.cuLaunchKernel(kernel, 1, 1, 1, int(sys.argv[3]), 1, 1, 0, 0, args, 0))
print("after", flush=True)
"""


@pytest.mark.parametrize(
    ("kernel", "args", "threads", "text"),
    [
        ("writes_at", "((ptr, 99), (ctypes.c_void_p, ctypes.c_longlong))", 1, None),
        ("writes_at", "((ptr, 100), (ctypes.c_void_p, ctypes.c_longlong))", 1, "heap-buffer-overflow"),
        ("writes_at", "((ptr, -1), (ctypes.c_void_p, ctypes.c_longlong))", 1, "heap-buffer-overflow"),
        ("reads_word_at", "((ptr, out, 4), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))", 1, None),
        ("reads_word_at", "((ptr, out, 2), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))", 1, "misaligned"),
        ("past_a_shared_array", "((out, 31), (ctypes.c_void_p, ctypes.c_int))", 32, None),
        ("past_a_shared_array", "((out, 33), (ctypes.c_void_p, ctypes.c_int))", 32, "faults.cu"),
    ],
)
def test_the_sanitized_build_stops_at_an_access_that_a_gpu_would_let_pass(
    standin: StandIn, kernel: str, args: str, threads: int, text: str | None
) -> None:
    environment = standin_module.sanitized_environment()
    if environment is None:
        pytest.skip("gcc has no libasan here")
    run = subprocess.run(
        [sys.executable, "-c", CHILD, kernel, args, str(threads)], env=environment, capture_output=True, text=True
    )
    assert "before" in run.stdout, run.stderr
    assert ("after" in run.stdout) == (text is None), run.stderr
    if text is not None:
        assert run.returncode != 0
        assert text in run.stderr
        assert "faults.cu" in run.stderr
