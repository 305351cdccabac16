"""Devices of the C library on the stand-in driver: who opens, who frees, what fails, what is refused."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import numpy as np
import pytest
from standin import StandIn

from memra_driver import capi, driver
from memra_driver.cache import Cache
from memra_driver.capi.device import LibraryDevice
from memra_driver.capi.layout import DeviceOptionsC
from memra_driver.config import ModelConfig
from memra_driver.device import CudaContext, CudaSlice, CudaStream
from memra_driver.errors import (
    AbiError,
    ArrayError,
    ConfigError,
    DeviceMismatch,
    DriverError,
    StateError,
    UnsupportedError,
)
from memra_driver.kvdev import CudaDev, HostDev

pytestmark = pytest.mark.standin
CODE = 719
CODE_NAME = r"CUDA_ERROR_LAUNCH_FAILED \(719\).*sticky"
TABLE_BYTES = 4096 * 24
BORN = {"cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease", "cuStreamCreate": "cuStreamDestroy",
        "cuMemAllocAsync": "cuMemFreeAsync"}  # fmt: skip


@pytest.fixture
def e(c_library: capi.Library, standin: StandIn) -> Iterator[capi.CDev]:
    made = capi.CDev()
    standin.clear_trace()
    yield made
    standin.clear_failures()
    made.close()


def alloc(device: LibraryDevice, n: int) -> int:
    ptr = ctypes.c_uint64(1)
    device.call("memra_alloc", n, ctypes.byref(ptr))
    return ptr.value


# Open and close


def test_a_device_opens_what_it_closes(c_library: capi.Library, standin: StandIn) -> None:
    device = LibraryDevice(c_library, 1, stream=None)
    assert [call.name for call in standin.trace()] == list(BORN)
    assert {call.device for call in standin.trace()} == {1}
    assert standin.live_bytes() == TABLE_BYTES
    assert (device.arch, device.is_closed) == ("sm_90", False)
    standin.clear_trace()
    device.close()
    device.close()
    with pytest.raises(StateError, match="closed"):
        device.call("memra_device_synchronize")
    calls = [call.name for call in standin.trace()]
    assert calls == ["cuStreamSynchronize", "cuMemFreeAsync", "cuStreamDestroy", "cuDevicePrimaryCtxRelease"]


def test_a_device_that_is_dropped_is_closed(c_library: capi.Library, standin: StandIn) -> None:
    device = LibraryDevice(c_library, 0, stream=None)
    device.load("counters.cu")
    del device
    gc.collect()
    for begin, end in BORN.items() | {("cuLibraryLoadData", "cuLibraryUnload")}:
        assert len(standin.calls(begin)) == len(standin.calls(end)) == 1


def test_handles_are_no_two_alike(c_library: capi.Library) -> None:
    handles = []
    for _ in range(3):
        with LibraryDevice(c_library, 0, stream=None) as device:
            handles.append(device.handle)
    assert len(set(handles)) == 3
    assert 0 not in handles


def test_a_foreign_stream_and_context_are_used_and_never_ended(c_library: capi.Library, standin: StandIn) -> None:
    with CudaContext() as context, CudaStream(context) as stream:
        standin.clear_trace()
        device = LibraryDevice(c_library, 0, stream=stream, context=context.handle)
        assert device.stream == stream.handle
        device.call("memra_clear", alloc(device, 64), 64)
        device.call("memra_free", standin.calls("cuMemAllocAsync")[-1].dst)
        device.close()
        streams = {call.stream for call in standin.trace()}
        assert streams == {stream.handle}
        assert not standin.calls("cuStreamDestroy", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease")
        stream.synchronize()


def test_a_stream_that_was_given_lives_as_long_as_the_device(c_library: capi.Library, standin: StandIn) -> None:
    with CudaContext() as context:
        device = LibraryDevice(c_library, 0, stream=CudaStream(context))
        gc.collect()
        device.call("memra_device_synchronize")
        assert not standin.calls("cuStreamDestroy")
        device.close()
        del device
        gc.collect()
        assert len(standin.calls("cuStreamDestroy")) == 1


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_the_default_streams_have_no_context_of_their_own(c_library: capi.Library, handle: int) -> None:
    with CudaContext() as context, CudaStream(context, handle) as stream:
        device = LibraryDevice(c_library, 0, stream=stream)
        assert device.stream == (handle or 1)
        device.call("memra_device_synchronize")
        device.close()


def test_a_stream_or_context_of_another_device_is_refused(c_library: capi.Library, standin: StandIn) -> None:
    with CudaContext(1) as other, CudaStream(other) as stream:
        standin.clear_trace()
        before = driver.ctx_get_current()
        with pytest.raises(DeviceMismatch, match=rf"stream 0x{stream.handle:x} belongs to another context"):
            LibraryDevice(c_library, 0, stream=stream)
        with pytest.raises(DeviceMismatch, match="context given is of cuda:1, not of cuda:0"):
            LibraryDevice(c_library, 0, stream=None, context=other.handle)
        retained, released = (
            len(standin.calls(name)) for name in ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease")
        )
        assert retained == released == 1
        assert driver.ctx_get_current() == before
    assert standin.live_bytes() == 0


def test_options_that_cannot_be_are_refused_before_the_driver_is_asked(
    c_library: capi.Library, standin: StandIn
) -> None:
    size = ctypes.sizeof(DeviceOptionsC)
    out = ctypes.c_void_p(1)
    for options, error, told in (
        (DeviceOptionsC(struct_size=size - 4), AbiError, "memra_device_options: struct_size is 28"),
        (DeviceOptionsC(struct_size=size, flags=3), ConfigError, "flags 0x3"),
    ):
        with pytest.raises(error, match=told):
            c_library.call("memra_device_open", ctypes.byref(options), ctypes.byref(out))
    for given in ((None, ctypes.byref(out)), (ctypes.byref(DeviceOptionsC(struct_size=size)), None)):
        with pytest.raises(ArrayError, match="NULL"):
            c_library.call("memra_device_open", *given)
    assert standin.trace() == []


@pytest.mark.parametrize("ordinal", [-1, 2, 2**31 - 1])
def test_a_gpu_that_is_not_there_is_a_driver_error(c_library: capi.Library, standin: StandIn, ordinal: int) -> None:
    with pytest.raises(DriverError, match=r"cuDeviceGet\(\): CUDA_ERROR_INVALID_DEVICE"):
        LibraryDevice(c_library, ordinal, stream=None)
    assert standin.trace() == []


def test_an_open_that_fails_at_any_call_leaves_nothing(c_library: capi.Library, standin: StandIn) -> None:
    named = []
    driver.init()
    driver.ctx_set_current(0)
    questions = ("cuInit", "cuCtxGetCurrent", "cuDeviceGet", "cuCtxSetCurrent", "cuDeviceGetAttribute")
    for call in (*questions, *BORN):
        for nth in range(1, 4 if call == "cuDeviceGetAttribute" else 2):
            standin.clear_trace()
            standin.fail(call, nth, CODE)
            with pytest.raises(DriverError, match=rf"^{call}\(") as caught:
                LibraryDevice(c_library, 0, stream=None)
            named.append(caught.value.call.partition("(")[0])
            assert caught.value.code == CODE
            assert standin.pending_failures() == 0
            made = [c.name for c in standin.trace() if c.name in BORN and not c.code]
            ended = [c.name for c in standin.trace() if c.name in BORN.values()]
            assert [BORN[name] for name in reversed(made)] == ended
            assert standin.live_bytes() == 0
            assert driver.ctx_get_current() == 0
    assert set(named) == {*questions, *BORN}


def test_what_went_with_its_context_is_no_error_at_the_end(c_library: capi.Library, standin: StandIn) -> None:
    from cuda.bindings import driver as cu

    device = LibraryDevice(c_library, 0, stream=None)
    device.load("counters.cu")
    assert int(cu.cuDevicePrimaryCtxReset(0)[0]) == 0
    for name, *args in (("memra_device_synchronize",), ("memra_clear", 4096, 1)):
        with pytest.raises(StateError, match="somebody destroyed the context of device 0"):
            device.call(name, *args)
    standin.clear_trace()
    device.close()
    assert device.is_closed
    assert not {"cuStreamSynchronize", "cuMemFreeAsync", "cuStreamDestroy"} & {c.name for c in standin.trace()}
    standin.take_errors()  # a context that is released once more than it lives


@pytest.mark.misuse  # what cannot be freed stays
@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuMemFreeAsync", "cuLibraryUnload", "cuStreamDestroy"])
def test_a_close_that_fails_says_so_and_frees_all_the_rest(
    c_library: capi.Library, standin: StandIn, call: str
) -> None:
    device = LibraryDevice(c_library, 0, stream=None)
    device.load("counters.cu")
    standin.clear_trace()
    standin.fail(call, 1, CODE)
    with pytest.raises(DriverError, match=CODE_NAME):
        device.close()
    assert device.is_closed
    ended = {c.name for c in standin.trace()}
    assert ended == {"cuStreamSynchronize", "cuLibraryUnload", *BORN.values()}
    device.close()


@pytest.mark.parametrize("whose", ["the library's", "the caller's", "Python's"])
def test_a_device_is_not_closed_while_a_capture_is_open(
    c_device: LibraryDevice, standin: StandIn, whose: str
) -> None:
    if whose == "Python's":
        driver.stream_begin_capture(c_device.stream)
    else:
        c_device.call("memra_capture_begin", int(whose == "the caller's"))
    with pytest.raises(StateError, match="a capture is open"):
        c_device.close()
    assert not c_device.is_closed
    assert not standin.calls("cuStreamSynchronize", "cuMemFreeAsync")
    if whose == "Python's":
        driver.graph_destroy(driver.stream_end_capture(c_device.stream))
    else:
        c_device.call("memra_capture_abandon")


def test_every_call_on_a_closed_device_is_refused(c_library: capi.Library, standin: StandIn) -> None:
    device = LibraryDevice(c_library, 0, stream=None)
    address = device.address
    device.close()
    standin.clear_trace()
    n = ctypes.byref(ctypes.c_uint64())
    for name, *args in (
        ("memra_alloc", 1, n), ("memra_free", 256), ("memra_clear", 256, 1), ("memra_copy_bytes", 256, 512, 1),
        ("memra_copy_table", None, 0), ("memra_upload", 256, b"x", 1), ("memra_download", n, 256, 1),
        ("memra_memory_info", n, n), ("memra_device_load", b"x", 1), ("memra_device_load_file", b"x"),
        ("memra_device_load_folder", b"x"), ("memra_device_synchronize",), ("memra_attend_scratch", 1, n),
        ("memra_device_close",), ("memra_capture_begin", 0),
    ):  # fmt: skip
        with pytest.raises(StateError, match="the device is closed"):
            c_library.call(name, address, *args)
        if name != "memra_device_close":
            with pytest.raises(DeviceMismatch, match="NULL"):
                c_library.call(name, None, *args)
    c_library.call("memra_device_close", None)
    for name in ("memra_device_handle", "memra_device_stream", "memra_device_arch"):
        assert c_library.ask(name, address) == c_library.ask(name, None) == 0
    assert standin.trace() == []


def test_every_call_makes_the_devices_context_current(c_library: capi.Library, standin: StandIn) -> None:
    with LibraryDevice(c_library, 0, stream=None) as one, LibraryDevice(c_library, 1, stream=None) as two:
        ptrs = [alloc(device, 64) for device in (one, two)]
        for device, ptr in zip((one, two), ptrs, strict=True):
            for name, *args in (("memra_clear", ptr, 64), ("memra_upload", ptr, b"12345678", 8), ("memra_free", ptr)):
                driver.ctx_set_current(0)
                device.call(name, *args)
                assert driver.ctx_get_current() != 0
        assert {call.device for call in standin.calls("cuMemFreeAsync")} == {0, 1}


# As a device of Python's


def test_slices_outlive_the_device_and_are_freed_without_it(c_library: capi.Library, standin: StandIn) -> None:
    e = capi.CDev()
    kept, dropped = e.zeros(8), e.zeros(8)
    e.close()
    assert standin.live_count() == 2
    del dropped
    gc.collect()
    assert standin.live_count() == 1
    kept.close()
    assert standin.live_bytes() == 0


def test_a_dropped_device_and_its_slices_leave_nothing(c_library: capi.Library, standin: StandIn) -> None:
    e = capi.CDev()
    kept = e.htod_i32([1, 2])
    e.zeros(100)
    del e
    gc.collect()
    assert kept.to_numpy().tolist() == [1, 2]
    del kept
    gc.collect()
    assert standin.live_bytes() == 0
    assert len(standin.calls("cuDevicePrimaryCtxRetain")) == len(standin.calls("cuDevicePrimaryCtxRelease"))


def test_it_works_on_a_stream_and_context_of_the_caller(c_library: capi.Library, standin: StandIn) -> None:
    with CudaContext() as context, CudaStream(context) as stream:
        for given in (stream, stream.handle):
            with capi.CDev(0, given, context) as e:
                assert e.stream.handle == stream.handle
                assert e.zeros(4).to_numpy().tolist() == [0] * 4
        assert len(standin.calls("cuDevicePrimaryCtxRetain")) == len(standin.calls("cuStreamCreate")) == 1
        with pytest.raises(ConfigError, match="the context given is of cuda:0, not of cuda:1"):
            capi.CDev(1, context=context)
        with pytest.raises(DeviceMismatch):
            capi.CDev(1, stream)
        stream.synchronize()
    assert standin.live_bytes() == 0


def test_a_finaliser_s_error_is_raised_by_the_next_call(e: capi.CDev, standin: StandIn) -> None:
    dropped = e.zeros(4)
    standin.fail("cuMemFreeAsync", 1, CODE)
    del dropped
    gc.collect()
    with pytest.raises(DriverError, match="cuMemFreeAsync"):
        e.zeros(4)
    e.zeros(4).close()
    standin.reset()  # of what could not be freed


def test_a_refused_slice_stays_as_it_is(e: capi.CDev) -> None:
    piece = CudaSlice(e.memory, 4)
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ArrayError, match="read-only"):
        e.memory.read(piece.ptr, fixed)
    with pytest.raises(ArrayError, match="contiguous"):
        e.memory.memcpy_htod(piece.ptr, np.zeros((4, 4), np.float32)[:, 0])


@pytest.mark.parametrize("pools", [0, 1])
def test_bytes_of_any_value_fill_too(c_library: capi.Library, standin: StandIn, pools: int) -> None:
    standin.set_attribute(0, 115, pools)
    with capi.CDev() as e, e.alloc_u8(4) as piece:
        e.stream.memset(piece.ptr, 7, 3)
        assert piece.to_numpy().tolist() == [7, 7, 7, 0]


# Beside a CudaDev

CFG = ModelConfig(n_layer=1, n_head_kv=1, head_dim_k=64, head_dim_v=64)


def test_a_cudadev_is_lent_to_the_library_once_and_closed_with_it(c_library: capi.Library, standin: StandIn) -> None:
    e = CudaDev()
    with Cache.new(e, CFG, 8) as one, Cache.new(e, CFG, 8) as two:
        for cache in (one, two, one):
            capi.bind(cache)
        handles = {cache.as_c().contents.devices[0].handle for cache in (one, two)}
        assert len(handles) == 1
        assert 0 not in handles
        capi.calls.advance(one, 3)
        assert (one.pos, two.pos) == (3, 0)
    e.close()
    assert standin.live_bytes() == 0
    for begin, end in {**BORN, "cuLibraryLoadData": "cuLibraryUnload"}.items():
        assert len(standin.calls(begin)) == len(standin.calls(end)), begin


def test_what_is_no_cuda_device_is_not_lent(c_library: capi.Library) -> None:
    with Cache.new(HostDev(), CFG, 8) as cache, pytest.raises(UnsupportedError, match="HostDev"):
        capi.bind(cache)


def test_a_dropped_cudadev_takes_the_librarys_device_along(c_library: capi.Library, standin: StandIn) -> None:
    e = CudaDev()
    cache = Cache.new(e, CFG, 8)
    capi.bind(cache)
    cache.close()
    del e, cache
    gc.collect()
    assert standin.live_bytes() == 0
    for begin, end in {**BORN, "cuLibraryLoadData": "cuLibraryUnload"}.items():
        assert len(standin.calls(begin)) == len(standin.calls(end)), begin
