"""Slices that go out through DLPack: what the capsule says, who waits for whom, and who frees the memory when."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, tiny
from foreign import CPU, CUDA, Versioned, delete, look, managed, taken
from standin import StandIn

from memra_driver import driver
from memra_driver.cache import Cache
from memra_driver.device import CudaContext, CudaSlice, CudaStream, HostMemory
from memra_driver.errors import DriverError, ExportError, MemraError, StateError
from memra_driver.kvdev import CudaDev

pytestmark = pytest.mark.standin
FREES = ("cuMemFreeAsync", "cuMemFree")
ORDER = ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy"]
LEGACY, PER_THREAD = 1, 2


@pytest.fixture
def context(standin: StandIn) -> Iterator[CudaContext]:
    with CudaContext() as context:
        yield context


@pytest.fixture
def stream(context: CudaContext, standin: StandIn) -> Iterator[CudaStream]:
    with CudaStream(context) as stream:
        standin.clear_trace()
        yield stream


@pytest.fixture(params=["cuda", "host"])
def memory(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("stream") if request.param == "cuda" else HostMemory()


def filled(memory: Any, n: int = 8, dtype: Any = np.float32) -> CudaSlice:
    piece = CudaSlice(memory, n, dtype)
    piece.copy_from(np.arange(n, dtype=dtype))
    return piece


def pair(memory: Any) -> tuple[int, int]:
    return (CPU, 0) if memory.device < 0 else (CUDA, memory.device)


# What the capsule says


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.uint16, np.int64, np.uint64])
@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
def test_a_capsule_describes_the_memory(memory: Any, dtype: Any, max_version: Any) -> None:
    with filled(memory, 8, dtype) as piece:
        assert piece.__dlpack_device__() == pair(memory)
        capsule = piece.__dlpack__(max_version=max_version)
        struct = managed(capsule)
        assert isinstance(struct, Versioned) == (max_version is not None and max_version >= (1, 0))
        if isinstance(struct, Versioned):
            assert (struct.major, struct.flags) == (1, 0)
        tensor = struct.tensor
        assert (tensor.data, tensor.byte_offset) == (piece.ptr, 0)
        assert (tensor.device_type, tensor.device_id) == pair(memory)
        assert (tensor.ndim, tensor.shape[0]) == (1, 8)
        assert not tensor.strides or tensor.strides[0] == 1
        assert (tensor.code, tensor.bits, tensor.lanes) == ("iuf".index(piece.dtype.kind), 8 * piece.dtype.itemsize, 1)
        assert look(tensor).tolist() == list(range(8))


def test_a_view_is_exported_where_it_lies(memory: Any) -> None:
    with filled(memory) as piece:
        capsule = piece.view(2, 5).__dlpack__()
        tensor = managed(capsule).tensor
        assert (tensor.data, tensor.shape[0]) == (piece.ptr + 8, 3)
        look(tensor)[1] = -1
        assert piece.to_numpy().tolist() == [0, 1, 2, -1, 4, 5, 6, 7]


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_what_is_empty_has_no_address(memory: Any, max_version: Any) -> None:
    with CudaSlice(memory, 0) as empty, filled(memory) as piece:
        for each in (empty, piece.view(3, 3)):
            capsule = each.__dlpack__(max_version=max_version)
            tensor = managed(capsule).tensor
            assert (tensor.data, tensor.ndim, tensor.shape[0]) == (None, 1, 0)


def test_quantised_planes_are_bytes(standin: StandIn, make_dev: Any) -> None:
    e = make_dev("cuda")
    with Cache.new(e, tiny(), 16, policy=POLICY) as cache:
        Feed(cache).step(3)
        for il, layer in enumerate(cache.kv):
            if layer is not None:
                for plane in (layer.k, layer.v):
                    capsule = plane.__dlpack__(max_version=(1, 0))
                    tensor = managed(capsule).tensor
                    assert (tensor.code, tensor.bits) == (1, 8), il
                    assert plane.__cuda_array_interface__["typestr"] == "|u1"
                    assert look(tensor).tobytes() == plane.to_numpy().tobytes()


def test_numpy_takes_a_slice_of_the_host_in_place() -> None:
    memory = HostMemory()
    piece = filled(memory)
    array = np.from_dlpack(piece)
    assert array.ctypes.data == piece.ptr
    array[0] = 50
    assert piece.to_numpy()[0] == 50
    assert np.from_dlpack(piece.view(2, 4)).tolist() == [2, 3]
    piece.close()
    assert array.tolist() == [50, 1, 2, 3, 4, 5, 6, 7]
    assert memory.live_bytes == 32
    del array
    assert memory.live_bytes == 0


# What is refused


@pytest.mark.parametrize(
    "asked",
    [
        {"copy": True}, {"dl_device": (2, 1)}, {"dl_device": (10, 0)}, {"stream": 0}, {"stream": -2},
        {"stream": "main"}, {"stream": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_an_export_that_cannot_be_given_is_refused_in_dlpacks_own_error(
    memory: Any, standin: StandIn, asked: dict[str, Any]
) -> None:
    with filled(memory) as piece:
        standin.clear_trace()
        with pytest.raises(BufferError) as caught:
            piece.__dlpack__(**asked)
        assert isinstance(caught.value, ExportError)
        assert isinstance(caught.value, MemraError)
        assert standin.trace() == []


def test_the_host_is_asked_for_no_stream_and_a_gpu_not_for_the_host(stream: CudaStream) -> None:
    with filled(HostMemory()) as piece:
        for asked in (1, -1, 2):
            with pytest.raises(ExportError, match="no stream"):
                piece.__dlpack__(stream=asked)
    with filled(stream) as piece:
        with pytest.raises(ExportError, match="to_numpy"):
            piece.__dlpack__(dl_device=(CPU, 0))
        with pytest.raises((BufferError, RuntimeError)):
            np.from_dlpack(piece)
        with pytest.raises(BufferError):
            np.from_dlpack(piece, device="cpu")
        piece.__dlpack__(dl_device=(CUDA, 0), copy=False)


@pytest.mark.parametrize("dtype", ["S4", ">f4", [("bits", np.uint16)]], ids=["text", "big-endian", "fields"])
def test_elements_that_dlpack_has_no_type_for_are_refused_and_their_bytes_are_not(memory: Any, dtype: Any) -> None:
    with CudaSlice(memory, 4, dtype) as piece:
        with pytest.raises(ExportError, match="cast"):
            piece.__dlpack__()
        assert managed(piece.cast(np.uint8).__dlpack__()).tensor.bits == 8


def test_a_closed_slice_is_not_exported(memory: Any) -> None:
    piece = filled(memory)
    view = piece.view()
    piece.close()
    for closed in (piece, view):
        with pytest.raises(StateError, match="closed"):
            closed.__dlpack__()
        assert closed.__dlpack_device__() == pair(memory)


# Who waits for whom


@pytest.mark.parametrize(("asked", "handle"), [(None, LEGACY), (LEGACY, LEGACY), (PER_THREAD, PER_THREAD)])
def test_a_default_stream_waits_for_the_slices_stream(
    stream: CudaStream, standin: StandIn, asked: int | None, handle: int
) -> None:
    with filled(stream) as piece:
        standin.clear_trace()
        piece.__dlpack__(stream=asked)
        calls = standin.trace()
        assert [call.name for call in calls] == ORDER
        assert (calls[1].stream, calls[2].stream) == (stream.handle, handle)
        assert calls[1].src == calls[2].src == calls[0].dst


def test_the_consumers_stream_waits_for_the_slices_stream(
    context: CudaContext, stream: CudaStream, standin: StandIn
) -> None:
    with CudaStream(context) as theirs, filled(stream) as piece:
        standin.clear_trace()
        piece.view(1, 2).__dlpack__(stream=theirs.handle)
        calls = standin.trace()
        assert [call.name for call in calls] == ORDER
        assert (calls[1].stream, calls[2].stream) == (stream.handle, theirs.handle)


@pytest.mark.parametrize("handle", [None, 0, 1, 2])
def test_nothing_waits_for_its_own_stream_nor_where_that_is_asked(
    context: CudaContext, standin: StandIn, handle: int | None
) -> None:
    with CudaStream(context, handle) as stream, filled(stream) as piece:
        own = {None: stream.handle, 0: 1, 1: None, 2: 2}[handle]
        standin.clear_trace()
        piece.__dlpack__(stream=own)
        piece.__dlpack__(stream=-1)
        assert standin.trace() == []


def test_a_closed_stream_has_been_waited_for(context: CudaContext, standin: StandIn) -> None:
    stream = CudaStream(context)
    piece = filled(stream)
    stream.close()
    standin.clear_trace()
    assert piece.__cuda_array_interface__["stream"] is None
    capsule = piece.__dlpack__()
    assert standin.trace() == []
    assert look(managed(capsule).tensor).tolist() == list(range(8))
    piece.close()


def test_in_a_capture_only_its_own_stream_gets_slices(make_dev: Any) -> None:
    e = make_dev("cuda")
    held = e.zeros(4)
    with e.capture() as graph:
        held.__dlpack__(stream=e.stream.handle)
        held.__dlpack__(stream=-1)
        for other in (None, 1, 2):
            with pytest.raises(StateError, match="capture"):
                held.__dlpack__(stream=other)
        for order in (e.stream.wait_stream, e.stream.release_to):
            with pytest.raises(StateError, match="capture"):
                order(1)
            order(e.stream)
    graph.close()
    held.close()


# Who frees the memory


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_memory_lives_until_its_last_capsule_is_done_with(
    stream: CudaStream, standin: StandIn, consumed: bool, max_version: Any
) -> None:
    piece = filled(stream)
    ptr = piece.ptr
    first, second = piece.__dlpack__(max_version=max_version), piece.view(4).__dlpack__(max_version=max_version)
    structs = [taken(each) if consumed else managed(each) for each in (first, second)]
    piece.close()
    assert piece.is_closed
    assert standin.calls(*FREES) == []
    assert look(structs[1].tensor).tolist() == [4, 5, 6, 7]
    if consumed:
        delete(structs[0])
    del first
    assert standin.calls(*FREES) == []
    if consumed:
        delete(structs[1])
    del second
    assert [(call.src, call.stream) for call in standin.calls(*FREES)] == [(ptr, stream.handle)]
    assert stream.context.live_bytes == 0


def test_a_capsule_that_was_consumed_frees_nothing_by_itself(stream: CudaStream, standin: StandIn) -> None:
    piece = filled(stream)
    capsule = piece.__dlpack__()
    struct = taken(capsule)
    del capsule, piece
    gc.collect()
    assert standin.calls(*FREES) == []
    delete(struct)
    assert len(standin.calls(*FREES)) == 1


def test_a_capsule_that_is_dropped_first_leaves_the_slice_as_it_was(stream: CudaStream, standin: StandIn) -> None:
    with filled(stream) as piece:
        for _ in range(3):
            piece.__dlpack__(stream=-1)
        assert standin.calls(*FREES) == []
        assert piece.to_numpy().tolist() == list(range(8))
    assert len(standin.calls(*FREES)) == 1


def test_memory_outlives_its_cache_its_stream_and_its_device(standin: StandIn) -> None:
    e = CudaDev()
    cache = Cache.new(e, tiny(), 16, policy=POLICY)
    Feed(cache).step(3)
    state = cache.recur[0].ssm_state
    expected = state.to_numpy()
    capsule = state.__dlpack__(max_version=(1, 0))
    cache.close()
    e.close()
    del cache, state, e
    gc.collect()
    assert standin.calls("cuDevicePrimaryCtxRelease") == []
    assert look(managed(capsule).tensor).tobytes() == expected.tobytes()
    del capsule
    assert standin.live_bytes() == 0
    assert len(standin.calls("cuDevicePrimaryCtxRelease")) == 1


def test_what_readers_on_other_streams_got_is_freed_once_the_device_is_idle(
    context: CudaContext, stream: CudaStream, standin: StandIn
) -> None:
    def ends(export: Callable[[CudaSlice], object]) -> list[str]:
        piece = filled(stream)
        export(piece)
        standin.clear_trace()
        piece.close()
        return [call.name for call in standin.trace()]

    waited = ["cuCtxSynchronize", "cuMemFreeAsync"]
    with CudaStream(context) as theirs:
        assert ends(lambda piece: piece.__dlpack__(stream=theirs.handle)) == waited
        assert ends(lambda piece: piece.view(1, 2).__dlpack__()) == waited
        assert ends(lambda piece: piece.__dlpack__(stream=-1)) == waited
        assert ends(lambda piece: piece.__cuda_array_interface__) == waited
        assert ends(lambda piece: piece.view(1, 2).__cuda_array_interface__) == waited
        assert ends(lambda piece: piece.__dlpack__(stream=stream.handle)) == ["cuMemFreeAsync"]
        assert ends(lambda piece: piece.ptr) == ["cuMemFreeAsync"]


def test_what_readers_on_its_own_stream_got_is_freed_in_its_order_while_it_is_open(
    context: CudaContext, standin: StandIn
) -> None:
    for closed, ends in ((False, ["cuMemFreeAsync"]), (True, ["cuCtxSynchronize", "cuMemFree"])):
        stream = CudaStream(context)
        piece = filled(stream)
        capsule = piece.__dlpack__(stream=stream.handle)
        piece.close()
        if closed:
            stream.close()
        standin.clear_trace()
        del capsule
        assert [call.name for call in standin.trace()] == ends
        stream.close()


def test_a_deleter_may_run_on_a_thread_that_python_never_saw(stream: CudaStream, standin: StandIn) -> None:
    piece = filled(stream)
    struct = taken(piece.__dlpack__(max_version=(1, 0)))
    piece.close()
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    start = ctypes.c_void_p(struct.deleter), ctypes.c_void_p(ctypes.addressof(struct))
    assert libc.pthread_create(ctypes.byref(thread), None, *start) == 0
    assert libc.pthread_join(thread, None) == 0  # ctypes lets the interpreter go meanwhile
    assert len(standin.calls(*FREES)) == 1
    assert standin.errors() == []


def test_a_deleter_puts_the_context_of_its_thread_back(stream: CudaStream, standin: StandIn) -> None:
    piece = filled(stream)
    struct = taken(piece.__dlpack__())
    piece.close()
    seen: list[int] = []

    def work() -> None:
        with CudaContext(1) as other:
            other.bind()
            delete(struct)
            seen.extend([driver.ctx_get_current(), other.handle])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] == seen[1] != stream.context.handle
    assert [call.device for call in standin.calls(*FREES)] == [0]


def test_a_deleter_inside_a_capture_frees_at_its_end(make_dev: Any, standin: StandIn) -> None:
    e = make_dev("cuda")
    held = e.zeros(4)
    capsule = held.__dlpack__()
    held.close()
    with e.capture() as graph:
        del capsule
        assert standin.calls(*FREES, "cuCtxSynchronize") == []
    assert [call.name for call in standin.calls(*FREES, "cuCtxSynchronize")] == ["cuCtxSynchronize", "cuMemFreeAsync"]
    graph.close()


@pytest.mark.misuse
def test_an_error_of_a_deleter_is_raised_once_by_the_next_call(stream: CudaStream, standin: StandIn) -> None:
    piece = filled(stream)
    struct = taken(piece.__dlpack__())
    piece.close()
    standin.fail("cuMemFreeAsync", 1, 1)
    delete(struct)
    with pytest.raises(DriverError, match="cuMemFreeAsync"):
        stream.synchronize()
    stream.synchronize()


def test_without_memory_pools_exported_memory_is_freed_too(standin: StandIn) -> None:
    standin.set_attribute(0, 115, 0)
    with CudaContext() as context, CudaStream(context) as stream:
        piece = filled(stream)
        capsule = piece.__dlpack__()
        piece.close()
        standin.clear_trace()
        del capsule
        assert [call.name for call in standin.trace()] == ["cuCtxSynchronize", "cuStreamSynchronize", "cuMemFree"]
