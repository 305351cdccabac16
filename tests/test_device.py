"""Contexts, streams, events and slices on the stand-in driver: who allocates, who frees, what is refused."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from standin import StandIn

from memra_driver import driver
from memra_driver.device import CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, HostMemory
from memra_driver.errors import (
    ArrayError,
    ConfigError,
    DeviceMismatch,
    DriverError,
    DriverOutOfMemory,
    IllegalAddress,
    MemraError,
    NoDriver,
    OutOfMemory,
    StateError,
    UnsupportedDriver,
)

pytestmark = pytest.mark.standin
FREES = ("cuMemFreeAsync", "cuMemFree")
ALLOCATIONS = ("cuMemAllocAsync", "cuMemAlloc")


@pytest.fixture
def context(standin: StandIn) -> Iterator[CudaContext]:
    with CudaContext() as context:
        standin.clear_trace()
        yield context


@pytest.fixture
def stream(context: CudaContext, standin: StandIn) -> Iterator[CudaStream]:
    with CudaStream(context) as stream:
        standin.clear_trace()
        yield stream


@pytest.fixture(params=["cuda", "host"])
def memory(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("stream") if request.param == "cuda" else HostMemory()


def numbers(n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(n, dtype=np.float32)


# Slices: memory


def test_a_slice_asks_for_its_bytes_once_and_frees_them_once_on_the_same_stream(
    stream: CudaStream, standin: StandIn
) -> None:
    piece = CudaSlice(stream, 100, np.uint16)
    ptr = piece.ptr
    assert (piece.len, piece.nbytes, piece.dtype, piece.device) == (100, 200, np.dtype(np.uint16), 0)
    assert [(c.name, c.bytes, c.stream, c.dst) for c in standin.trace()] == [
        ("cuMemAllocAsync", 200, stream.handle, ptr)
    ]
    piece.close()
    piece.close()
    assert [(c.src, c.stream) for c in standin.calls(*FREES)] == [(ptr, stream.handle)]
    assert standin.live_bytes() == 0


def test_a_dead_slice_frees_its_memory(stream: CudaStream, standin: StandIn) -> None:
    piece = CudaSlice(stream, 10)
    ptr = piece.ptr
    del piece
    gc.collect()
    assert [call.src for call in standin.calls(*FREES)] == [ptr]


def test_a_slice_in_a_cycle_frees_its_memory_before_its_stream_goes(context: CudaContext, standin: StandIn) -> None:
    stream = CudaStream(context)
    piece = CudaSlice(stream, 10)
    knot: list[Any] = [piece, stream]
    knot.append(knot)
    del stream, piece, knot
    gc.collect()
    gc.collect()
    ends = [call.name for call in standin.calls("cuMemFreeAsync", "cuStreamDestroy")]
    assert ends == ["cuMemFreeAsync", "cuStreamDestroy"]


def test_without_memory_pools_a_slice_waits_before_it_frees(standin: StandIn) -> None:
    standin.set_attribute(0, 115, 0)
    with CudaContext() as context, CudaStream(context) as stream:
        assert context.pool_info() == (0, 0)
        standin.clear_trace()
        CudaSlice(stream, 10).close()
        assert [call.name for call in standin.trace()] == ["cuMemAlloc", "cuStreamSynchronize", "cuMemFree"]


def test_a_zero_length_slice_never_reaches_the_driver(stream: CudaStream, standin: StandIn) -> None:
    with CudaSlice(stream, 0) as piece:
        piece.copy_from(numbers(0))
        assert piece.ptr == 0
        assert piece.to_numpy().shape == (0,)
        assert piece.view(0, 0).ptr == 0
        assert piece.__cuda_array_interface__["data"] == (0, False)
        stream.memset(piece.ptr, 0, piece.nbytes)
        stream.memcpy_dtod(piece.ptr, piece.ptr, piece.nbytes)
    assert standin.trace() == []


def test_an_empty_view_of_a_full_slice_has_no_pointer(memory: Any) -> None:
    with CudaSlice(memory, 4) as piece:
        assert piece.view(2, 2).ptr == 0


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.uint16, np.int64])
def test_bytes_go_in_and_come_out(memory: Any, dtype: Any) -> None:
    array = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    with CudaSlice(memory, 24, dtype) as piece:
        assert piece.ptr % 256 == 0
        piece.copy_from(array)
        out = piece.to_numpy()
        assert out.dtype == dtype
        assert out.tobytes() == array.tobytes()


def test_to_numpy_waits_and_copy_from_does_not(stream: CudaStream, standin: StandIn) -> None:
    with CudaSlice(stream, 4) as piece:
        piece.copy_from(numbers(4))
        assert standin.calls("cuStreamSynchronize") == []
        piece.to_numpy()
        assert [call.name for call in standin.trace()][-2:] == ["cuMemcpyDtoHAsync", "cuStreamSynchronize"]


@pytest.mark.parametrize(
    "array",
    [
        numbers(8)[::2],
        numbers(5),
        numbers(3),
        np.zeros(4, np.float64),
        np.zeros(4, np.int32),
        np.zeros((4, 4), np.float32).T[:1],
        [0.0, 1.0, 2.0, 3.0],
        np.zeros(4, ">f4"),
    ],
    ids=["strided", "long", "short", "f64", "i32", "transposed", "list", "big-endian"],
)
def test_an_array_that_does_not_fit_is_refused_and_nothing_is_written(memory: Any, array: Any) -> None:
    with CudaSlice(memory, 4) as piece:
        piece.copy_from(numbers(4))
        with pytest.raises(ArrayError):
            piece.copy_from(array)
        assert piece.to_numpy().tobytes() == numbers(4).tobytes()


def test_a_read_only_or_strided_array_cannot_be_copied_into(stream: CudaStream, standin: StandIn) -> None:
    read_only = numbers(4)
    read_only.flags.writeable = False
    with CudaSlice(stream, 4) as piece:
        for array in (read_only, numbers(8)[::2]):
            with pytest.raises(ArrayError):
                stream.memcpy_dtoh(array, piece.ptr)
    assert standin.calls("cuMemcpyDtoHAsync") == []


def test_out_of_memory_is_typed_and_names_the_call_and_its_size(stream: CudaStream, standin: StandIn) -> None:
    standin.fail("cuMemAllocAsync", 1, 2)
    with pytest.raises(DriverOutOfMemory) as caught:
        CudaSlice(stream, 1 << 28)
    assert isinstance(caught.value, OutOfMemory)
    assert caught.value.call == "cuMemAllocAsync(1073741824)"
    assert (caught.value.code, caught.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert str(caught.value).startswith("cuMemAllocAsync(1073741824): CUDA_ERROR_OUT_OF_MEMORY (2): ")
    assert standin.live_bytes() == 0
    CudaSlice(stream, 8).close()


def test_a_slice_of_negative_length_is_refused(memory: Any) -> None:
    with pytest.raises(ArrayError):
        CudaSlice(memory, -1)


def test_host_memory_keeps_and_returns_every_byte() -> None:
    memory = HostMemory()
    with CudaSlice(memory, 100) as piece:
        assert memory.live_bytes == 400
        assert piece.device == -1
        array = HostMemory.array(piece.ptr, 100, np.float32)
        array[:] = 7
        assert piece.to_numpy().tolist() == [7.0] * 100
        assert not hasattr(piece, "__cuda_array_interface__")
    assert memory.live_bytes == 0
    kept = CudaSlice(memory, 1)
    del kept
    gc.collect()
    assert memory.live_bytes == 0


def test_memory_is_freed_by_whom_it_came_from_and_once(memory: Any) -> None:
    with CudaSlice(memory, 4) as piece:
        ptr = piece.ptr
        with pytest.raises(StateError):
            memory.free_bytes(ptr + 256, 16)
    with pytest.raises(StateError):
        memory.free_bytes(ptr, 16)


# Slices: views


def test_a_view_shares_bytes_and_owns_nothing(memory: Any) -> None:
    with CudaSlice(memory, 10) as piece:
        piece.copy_from(numbers(10))
        part = piece.view(2, 6)
        assert isinstance(part, CudaView)
        assert (part.ptr, part.len, part.nbytes, part.owner) == (piece.ptr + 8, 4, 16, piece)
        assert part.to_numpy().tolist() == [2.0, 3.0, 4.0, 5.0]
        part.view(1, 2).copy_from(np.array([-1], np.float32))
        assert piece.to_numpy()[3] == -1
        part.close()
        with pytest.raises(StateError):
            part.to_numpy()
        assert piece.to_numpy().size == 10


def test_planes_divide_an_arena_by_byte_offset(memory: Any) -> None:
    with CudaSlice(memory, 1024, np.uint8) as arena:
        counters, state = arena.plane(256, 4, np.int32), arena.plane(512, 8, np.float32)
        assert (counters.ptr - arena.ptr, state.ptr - arena.ptr) == (256, 512)
        counters.copy_from(np.array([1, 2, 3, 4], np.int32))
        assert arena.to_numpy()[256:272].tobytes() == np.array([1, 2, 3, 4], np.int32).tobytes()
        assert state.cast(np.uint8).nbytes == 32


@pytest.mark.parametrize("bad", [(-1, 2), (3, 2), (0, 5), (5, 5)])
def test_a_view_out_of_range_is_refused(memory: Any, bad: tuple[int, int]) -> None:
    with CudaSlice(memory, 4) as piece, pytest.raises(ArrayError):
        piece.view(*bad)


@pytest.mark.parametrize("bad", [(-4, 1), (16, 1), (0, 5), (0, -1), (2, 1)])
def test_a_plane_out_of_range_or_misaligned_is_refused(memory: Any, bad: tuple[int, int]) -> None:
    with CudaSlice(memory, 16, np.uint8) as piece, pytest.raises(ArrayError):
        piece.plane(*bad, np.float32)


def test_a_cast_that_does_not_divide_is_refused(memory: Any) -> None:
    with CudaSlice(memory, 6, np.uint8) as piece, pytest.raises(ArrayError):
        piece.cast(np.float32)


def test_a_view_keeps_its_owner_alive(stream: CudaStream, standin: StandIn) -> None:
    part = CudaSlice(stream, 10).view(1, 2).view(0, 1)
    gc.collect()
    assert standin.calls(*FREES) == []
    del part
    gc.collect()
    assert len(standin.calls(*FREES)) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda piece: piece.ptr,
        lambda piece: piece.to_numpy(),
        lambda piece: piece.copy_from(numbers(4)),
        lambda piece: piece.view(0, 1),
        lambda piece: piece.plane(0, 1, np.uint8),
        lambda piece: piece.cast(np.uint8),
    ],
    ids=["ptr", "to_numpy", "copy_from", "view", "plane", "cast"],
)
def test_a_closed_slice_and_its_views_refuse(memory: Any, use: Callable[[CudaSlice], object]) -> None:
    piece = CudaSlice(memory, 4)
    whole = piece.view()
    piece.close()
    for closed in (piece, whole):
        assert closed.is_closed
        assert not hasattr(closed, "__cuda_array_interface__")
        assert "closed" in repr(closed)
        with pytest.raises(StateError, match="closed"):
            use(closed)


def test_the_array_interface_describes_the_memory_and_its_stream(stream: CudaStream, context: CudaContext) -> None:
    with CudaSlice(stream, 6, np.int32) as piece:
        assert piece.__cuda_array_interface__ == {
            "shape": (6,),
            "typestr": "<i4",
            "data": (piece.ptr, False),
            "version": 3,
            "strides": None,
            "stream": stream.handle,
        }
    for handle, exported in ((0, 1), (1, 1), (2, 2)):
        with CudaStream(context, handle) as default, CudaSlice(default, 1) as piece:
            assert piece.__cuda_array_interface__["stream"] == exported


# Streams


def test_a_stream_is_created_non_blocking_and_destroyed_once(context: CudaContext, standin: StandIn) -> None:
    stream = CudaStream(context)
    handle = stream.handle
    assert stream.__cuda_stream__() == (0, handle)
    stream.close()
    stream.close()
    assert [call.name for call in standin.trace()] == ["cuStreamCreate", "cuStreamSynchronize", "cuStreamDestroy"]
    with pytest.raises(StateError, match="closed"):
        stream.synchronize()


def foreign_streams(handle: int) -> dict[str, Any]:
    return {
        "int": handle,
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
        "torch": SimpleNamespace(cuda_stream=handle),
        "cupy": SimpleNamespace(ptr=handle),
    }


@pytest.mark.parametrize("kind", ["int", "protocol", "torch", "cupy"])
def test_a_foreign_stream_is_used_and_never_destroyed(kind: str, stream: CudaStream, standin: StandIn) -> None:
    foreign = CudaStream(stream.context, foreign_streams(stream.handle)[kind])
    assert foreign.handle == stream.handle
    CudaSlice(foreign, 4).close()
    assert standin.calls("cuMemAllocAsync")[0].stream == stream.handle
    foreign.close()
    del foreign
    gc.collect()
    assert standin.calls("cuStreamCreate", "cuStreamDestroy", "cuStreamSynchronize") == []


@pytest.mark.parametrize("wrong", ["stream", -1, True, 1.5, SimpleNamespace(ptr="x"), object()])
def test_what_is_no_stream_is_refused(wrong: Any, context: CudaContext) -> None:
    with pytest.raises(ConfigError):
        CudaStream(context, wrong)


def test_an_unknown_version_of_the_stream_protocol_is_refused(context: CudaContext) -> None:
    with pytest.raises(ConfigError, match="version 7"):
        CudaStream(context, SimpleNamespace(__cuda_stream__=lambda: (7, 1)))


def test_a_stream_of_another_device_is_refused(context: CudaContext, standin: StandIn) -> None:
    standin.set_device_count(2)
    with CudaContext(1) as other, CudaStream(other) as theirs, pytest.raises(DeviceMismatch):
        CudaStream(context, theirs)


def test_slices_outlive_their_stream_and_are_freed_without_it(context: CudaContext, standin: StandIn) -> None:
    stream = CudaStream(context)
    piece = CudaSlice(stream, 4)
    stream.close()
    piece.close()
    ends = [call.name for call in standin.trace()][-3:]
    assert ends == ["cuStreamSynchronize", "cuStreamDestroy", "cuMemFree"]


def test_copies_and_fills_name_their_stream_and_size(stream: CudaStream, standin: StandIn) -> None:
    with CudaSlice(stream, 16, np.uint8) as piece:
        stream.memset(piece.ptr, 3, 8)
        stream.memset(piece.ptr + 8, 5, 8)
        stream.memcpy_dtod(piece.ptr, piece.ptr + 12, 4)
        assert piece.to_numpy().tolist() == [5] * 4 + [3] * 4 + [5] * 8
    calls = standin.calls("cuMemsetD8Async", "cuMemcpyDtoDAsync")
    assert [(call.bytes, call.stream) for call in calls] == [(n, stream.handle) for n in (8, 8, 4)]
    assert stream.query()


# Events


def test_events_order_streams_and_measure(context: CudaContext, stream: CudaStream, standin: StandIn) -> None:
    with CudaStream(context) as second, CudaEvent(context, timing=True) as a, CudaEvent(context, timing=True) as b:
        stream.record(a)
        second.wait(a)
        second.record(b)
        b.synchronize()
        assert b.query()
        assert b.elapsed_ms(a) >= 0
        waits = standin.calls("cuStreamWaitEvent")
        assert [(call.stream, call.src) for call in waits] == [(second.handle, a.handle)]
    assert len(standin.calls("cuEventCreate")) == len(standin.calls("cuEventDestroy")) == 2


def test_a_dead_event_is_destroyed_and_a_closed_one_refuses(context: CudaContext, standin: StandIn) -> None:
    event = CudaEvent(context)
    event.close()
    event.close()
    with pytest.raises(StateError):
        event.query()
    kept = CudaEvent(context)
    del kept
    gc.collect()
    assert len(standin.calls("cuEventDestroy")) == 2


# Contexts


def test_every_retain_of_a_primary_context_has_one_release(standin: StandIn) -> None:
    first, second = CudaContext(), CudaContext()
    assert first.handle == second.handle
    first.close()
    first.close()
    assert len(standin.calls("cuDevicePrimaryCtxRelease")) == 1
    with CudaStream(second):
        pass
    del second
    gc.collect()
    assert len(standin.calls("cuDevicePrimaryCtxRetain")) == len(standin.calls("cuDevicePrimaryCtxRelease")) == 2
    assert standin.calls("cuDevicePrimaryCtxReset", "cuCtxCreate") == []


def test_a_closed_context_refuses_work_and_is_released_with_the_last_thing_on_it(standin: StandIn) -> None:
    context = CudaContext()
    stream = CudaStream(context)
    piece = CudaSlice(stream, 4)
    context.close()
    with pytest.raises(StateError, match="closed"):
        piece.to_numpy()
    with pytest.raises(StateError, match="closed"):
        CudaStream(context)
    assert standin.calls("cuDevicePrimaryCtxRelease") == []
    stream.close()
    assert standin.calls("cuDevicePrimaryCtxRelease") == []
    piece.close()
    assert len(standin.calls("cuDevicePrimaryCtxRelease")) == 1
    assert context.live_bytes == 0


def test_a_context_tells_what_its_gpu_is(context: CudaContext) -> None:
    assert context.arch == "sm_{}{}".format(*context.compute_capability)
    free, total = context.memory_info()
    assert 0 < free <= total
    assert "\0" not in context.name()


def test_each_thread_gets_the_context_bound_and_a_bound_one_is_not_set_again(
    stream: CudaStream, standin: StandIn
) -> None:
    with CudaSlice(stream, 4) as piece:
        piece.copy_from(numbers(4))
        before: list[int] = []
        result: list[Any] = []

        def work() -> None:
            before.append(driver.ctx_get_current())
            result.append(piece.to_numpy())
            before.append(driver.ctx_get_current())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert before == [0, stream.context.handle]
        assert result[0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_free_puts_the_context_of_the_thread_back(stream: CudaStream, standin: StandIn) -> None:
    standin.set_device_count(2)
    with CudaContext(1) as other:
        piece = CudaSlice(stream, 4)
        other.bind()
        del piece
        gc.collect()
        assert len(standin.calls(*FREES)) == 1
        assert driver.ctx_get_current() == other.handle
    stream.context.bind()


def test_two_devices_reach_each_other_once_enabled(context: CudaContext, standin: StandIn) -> None:
    standin.set_device_count(2)
    with CudaContext(1) as other:
        assert context.enable_peer(other) is driver.device_can_access_peer(0, 1)
        assert context.enable_peer(other) is driver.device_can_access_peer(0, 1)


# Errors


@pytest.mark.misuse
def test_an_error_in_a_finaliser_is_raised_once_by_the_next_call(stream: CudaStream, standin: StandIn) -> None:
    piece, later = CudaSlice(stream, 4), CudaSlice(stream, 8)
    standin.fail("cuMemFreeAsync", 1, 1)
    standin.fail("cuMemFreeAsync", 2, 999)
    del piece, later
    gc.collect()
    with pytest.raises(DriverError, match="cuMemFreeAsync") as caught:
        stream.synchronize()
    assert caught.value.code == 1
    stream.synchronize()


@pytest.mark.misuse
@pytest.mark.parametrize("code", [driver.DEINITIALIZED, driver.CONTEXT_IS_DESTROYED])
def test_memory_that_went_with_its_context_is_no_error(code: int, stream: CudaStream, standin: StandIn) -> None:
    standin.fail("cuMemFreeAsync", 1, code)
    standin.fail("cuMemFreeAsync", 2, code)
    CudaSlice(stream, 4).close()
    lost = CudaSlice(stream, 4)
    del lost
    gc.collect()
    stream.synchronize()


@pytest.mark.misuse
def test_an_illegal_address_is_typed_and_said_to_be_sticky(stream: CudaStream, standin: StandIn) -> None:
    standin.fail("cuStreamSynchronize", 1, 700)
    with pytest.raises(IllegalAddress, match="sticky") as caught:
        stream.synchronize()
    assert (caught.value.call, caught.value.name) == ("cuStreamSynchronize()", "CUDA_ERROR_ILLEGAL_ADDRESS")


@pytest.mark.misuse
def test_a_code_without_a_name_is_still_a_driver_error(stream: CudaStream, standin: StandIn) -> None:
    standin.fail("cuStreamSynchronize", 1, 12345)
    with pytest.raises(DriverError, match="unknown") as caught:
        stream.synchronize()
    assert caught.value.code == 12345


@pytest.mark.misuse
@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("cuMemAllocAsync", lambda stream: CudaSlice(stream, 4)),
        ("cuMemcpyHtoDAsync", lambda stream: CudaSlice(stream, 4).copy_from(numbers(4))),
        ("cuMemcpyDtoHAsync", lambda stream: CudaSlice(stream, 4).to_numpy()),
        ("cuMemcpyDtoDAsync", lambda stream: stream.memcpy_dtod(1 << 20, 1 << 21, 4)),
        ("cuMemsetD8Async", lambda stream: stream.memset(1 << 20, 0, 4)),
        ("cuStreamSynchronize", lambda stream: stream.synchronize()),
        ("cuStreamCreate", lambda stream: CudaStream(stream.context)),
        ("cuStreamDestroy", lambda stream: CudaStream(stream.context).close()),
        ("cuEventCreate", lambda stream: CudaEvent(stream.context)),
        ("cuEventRecord", lambda stream: stream.record(CudaEvent(stream.context))),
        ("cuStreamWaitEvent", lambda stream: stream.wait(CudaEvent(stream.context))),
        ("cuEventSynchronize", lambda stream: CudaEvent(stream.context).synchronize()),
        ("cuMemFreeAsync", lambda stream: CudaSlice(stream, 4).close()),
        ("cuDevicePrimaryCtxRetain", lambda stream: CudaContext()),
        ("cuLibraryLoadData", lambda stream: driver.library_load_data(b"\x7fELF")),
        ("cuDeviceGet", lambda stream: CudaContext(17)),
    ],
)
def test_each_failing_call_is_named(
    name: str, work: Callable[[CudaStream], object], stream: CudaStream, standin: StandIn
) -> None:
    if name != "cuDeviceGet":
        standin.fail(name, 1, 999)
    with pytest.raises(DriverError) as caught:
        work(stream)
    assert caught.value.call.startswith(f"{name}(")
    assert caught.value.code == (101 if name == "cuDeviceGet" else 999)
    assert standin.pending_failures() == 0


def test_a_driver_older_than_the_bindings_is_refused_and_nothing_is_retained(standin: StandIn) -> None:
    standin.set_driver_version((driver.bindings_version() // 1000 - 1) * 1000 + 80)
    with pytest.raises(UnsupportedDriver, match="update the driver"):
        CudaContext()
    assert standin.calls("cuDevicePrimaryCtxRetain") == []


def test_the_toolkits_stub_library_is_no_driver(standin: StandIn) -> None:
    standin.fail("cuInit", 1, 34)
    with pytest.raises(NoDriver, match="stub"):
        CudaContext()


# Kernels


def test_a_library_hands_out_kernels_with_their_parameters(context: CudaContext, standin: StandIn) -> None:
    library = driver.library_load_data(b"\x7fELF")
    kernel = driver.library_get_kernel(library, "copy_many")
    params = [(0, 8), (8, 4), (16, 8), (24, 4)]
    assert driver.kernel_get_param_info(kernel, 4) == params
    assert driver.kernel_get_param_info(kernel, 2) == params[:2]
    assert driver.kernel_get_param_info(kernel, 9) == params
    with pytest.raises(DriverError, match=r"cuLibraryGetKernel\(absent\)") as caught:
        driver.library_get_kernel(library, "absent")
    assert caught.value.name == "CUDA_ERROR_NOT_FOUND"
    driver.library_unload(library)


# Fork


def in_a_fork(work: Callable[[], None]) -> str:
    """What `work` raises in a forked child, as text."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            told = "nothing"
        except MemraError as error:
            told = f"{type(error).__name__}: {error}"
        except BaseException as error:
            told = f"not ours: {error!r}"
        os.write(send, told.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(pid, 0)
    return told


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(stream: CudaStream) -> None:
    with CudaSlice(stream, 4) as piece:
        for work in (piece.to_numpy, stream.synchronize, CudaContext, lambda: CudaSlice(stream, 4)):
            told = in_a_fork(work)  # type: ignore[arg-type]
            assert told.startswith("StateError")
            assert "fork" in told
        assert piece.to_numpy().size == 4


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_frees_nothing(stream: CudaStream, standin: StandIn) -> None:
    kept = [CudaSlice(stream, 4), CudaSlice(stream, 4), CudaEvent(stream.context)]

    def work() -> None:
        kept[0].close()
        kept.clear()
        gc.collect()
        stream.close()
        stream.context.close()
        ends = standin.calls(*FREES, "cuEventDestroy", "cuStreamDestroy", "cuDevicePrimaryCtxRelease")
        if ends:
            raise AssertionError(ends)

    assert in_a_fork(work) == "nothing"
    for thing in kept:
        thing.close()
    assert len(standin.calls(*FREES)) == 2
