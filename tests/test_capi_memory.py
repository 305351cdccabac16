"""Memory of the C library's devices on the stand-in driver: what is asked of it, what waits, what is refused."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import echo_kernels
import numpy as np
import pytest
from standin import StandIn

from memra_driver import capi, driver
from memra_driver.capi.device import LibraryDevice
from memra_driver.device import CudaContext
from memra_driver.errors import (
    ArrayError,
    ConfigError,
    DriverError,
    DriverOutOfMemory,
    StateError,
)

pytestmark = pytest.mark.standin
CODE = 719
CODE_NAME = r"CUDA_ERROR_LAUNCH_FAILED \(719\).*sticky"
TABLE_BYTES = 4096 * 24


def alloc(device: LibraryDevice, n: int) -> int:
    ptr = ctypes.c_uint64(1)
    device.call("memra_alloc", n, ctypes.byref(ptr))
    return ptr.value


def test_memory_is_moved_in_the_order_of_the_stream_and_only_reading_waits(
    c_device: LibraryDevice, standin: StandIn
) -> None:
    a, b = alloc(c_device, 64), alloc(c_device, 64)
    assert a % 256 == b % 256 == 0
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    c_device.call("memra_upload", a, source.ctypes.data, 64)
    c_device.call("memra_clear", b, 64)
    c_device.call("memra_copy_bytes", b + 16, a, 32)
    assert not standin.calls("cuStreamSynchronize")
    c_device.call("memra_download", target.ctypes.data, b, 64)
    assert target.tolist() == [0] * 16 + list(range(32)) + [0] * 16
    c_device.call("memra_free", a)
    c_device.call("memra_free", b)
    assert [call.name for call in standin.trace()] == [
        "cuMemAllocAsync", "cuMemAllocAsync", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuMemcpyDtoDAsync",
        "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuMemFreeAsync", "cuMemFreeAsync",
    ]  # fmt: skip
    assert {call.stream for call in standin.trace()} == {c_device.stream}


def test_no_bytes_never_reach_the_driver(c_device: LibraryDevice, standin: StandIn) -> None:
    assert alloc(c_device, 0) == 0
    for name, *args in (
        ("memra_free", 0), ("memra_clear", 0, 0), ("memra_copy_bytes", 0, 0, 0), ("memra_upload", 0, None, 0),
        ("memra_copy_table", None, 0),
    ):  # fmt: skip
        c_device.call(name, *args)
    assert standin.trace() == []


def test_bytes_at_address_zero_are_refused(c_device: LibraryDevice, standin: StandIn) -> None:
    for name, *args in (
        ("memra_clear", 0, 4), ("memra_copy_bytes", 0, 256, 4), ("memra_copy_bytes", 256, 0, 4),
        ("memra_upload", 0, b"1234", 4), ("memra_upload", 256, None, 4), ("memra_download", None, 256, 4),
        ("memra_download", b"1234", 0, 4), ("memra_copy_table", None, 1), ("memra_alloc", 4, None),
        ("memra_memory_info", None, None), ("memra_attend_scratch", 4, None),
    ):  # fmt: skip
        with pytest.raises(ArrayError, match=name):
            c_device.call(name, *args)
    with pytest.raises(ConfigError, match="-1 entries"):
        c_device.call("memra_copy_table", None, -1)
    assert standin.trace() == []


def test_out_of_memory_names_the_call_and_its_size(c_device: LibraryDevice, standin: StandIn) -> None:
    with pytest.raises(DriverOutOfMemory, match=r"^cuMemAllocAsync\(1099511627776\): CUDA_ERROR_OUT_OF_MEMORY \(2\): "):
        alloc(c_device, 2**40)


@pytest.mark.parametrize(
    ("call", "name", "args"),
    [
        ("cuMemFreeAsync", "memra_free", (256,)),
        ("cuMemsetD8Async", "memra_clear", (256, 8)),
        ("cuMemcpyDtoDAsync", "memra_copy_bytes", (256, 512, 8)),
        ("cuMemcpyHtoDAsync", "memra_upload", (256, b"12345678", 8)),
        ("cuMemcpyDtoHAsync", "memra_download", (b"12345678", 256, 8)),
        ("cuStreamSynchronize", "memra_device_synchronize", ()),
    ],
)
def test_each_failing_call_is_named_with_its_size(
    c_device: LibraryDevice, standin: StandIn, call: str, name: str, args: tuple[Any, ...]
) -> None:
    standin.fail(call, 1, CODE)
    shown = {"memra_free": "0x100", "memra_device_synchronize": ""}.get(name, "8")
    with pytest.raises(DriverError, match=rf"^{call}\({shown}\): {CODE_NAME}"):
        c_device.call(name, *args)


def test_without_memory_pools_a_free_waits_first(c_library: capi.Library, standin: StandIn) -> None:
    standin.set_attribute(0, 115, 0)
    device = LibraryDevice(c_library, 0, stream=None)
    device.call("memra_free", alloc(device, 16))
    names = [call.name for call in standin.trace()]
    assert names[-3:] == ["cuMemAlloc", "cuStreamSynchronize", "cuMemFree"]
    device.close()
    assert not standin.calls("cuMemAllocAsync", "cuMemFreeAsync")


def test_free_memory_is_what_the_driver_and_the_pool_have(c_device: LibraryDevice, standin: StandIn) -> None:
    available, total = ctypes.c_uint64(), ctypes.c_uint64()
    kept = alloc(c_device, 1000)
    c_device.call("memra_memory_info", ctypes.byref(available), ctypes.byref(total))
    assert total.value - available.value == TABLE_BYTES + 1000
    c_device.call("memra_free", kept)


def test_memory_is_kept_when_asked_for_and_given_back(c_device: LibraryDevice, standin: StandIn) -> None:
    standin.clear_trace()
    c_device.call("memra_keep_memory", 1 << 33)
    c_device.call("memra_trim")
    found = [(call.name, call.src, call.bytes) for call in standin.trace()]
    assert found == [("cuMemPoolSetAttribute", 4, 0), ("cuStreamSynchronize", 0, 0), ("cuMemPoolTrimTo", 0, 0)]
    pool = driver.device_get_default_mem_pool(0)
    assert driver.mem_pool_get_attribute("RELEASE_THRESHOLD", pool) == 1 << 33
    with pytest.raises(ConfigError, match="memra_keep_memory"):
        c_device.call("memra_keep_memory", 2**64 - 1)
    c_device.call("memra_keep_memory", 0)


def test_nothing_is_allocated_moved_from_or_to_the_host_or_waited_for_in_a_capture(
    c_device: LibraryDevice, standin: StandIn
) -> None:
    c_device.load_all()
    ptr, out = alloc(c_device, 64), ctypes.c_uint64()
    scratch = ctypes.c_uint64()
    c_device.call("memra_attend_scratch", 64, ctypes.byref(scratch))
    entries = np.array([[ptr, ptr + 32, 8]], np.uint64)
    c_device.call("memra_capture_begin", 0)
    standin.clear_trace()
    for name, *args in (
        ("memra_alloc", 4, ctypes.byref(out)), ("memra_free", ptr), ("memra_upload", ptr, b"1234", 4),
        ("memra_download", b"1234", ptr, 4), ("memra_device_synchronize",),
        ("memra_copy_table", entries.ctypes.data, 1), ("memra_attend_scratch", 128, ctypes.byref(out)),
    ):  # fmt: skip
        with pytest.raises(StateError, match="capture"):
            c_device.call(name, *args)
    assert standin.trace() == []
    c_device.call("memra_attend_scratch", 64, ctypes.byref(out))
    assert out.value == scratch.value
    c_device.call("memra_clear", ptr, 8)
    c_device.call("memra_copy_bytes", ptr, ptr + 32, 8)
    assert [call.captured for call in standin.trace()] == [True, True]
    c_device.call("memra_capture_abandon")
    c_device.call("memra_free", ptr)


# The copy table


def copy_table(c_device: LibraryDevice, entries: list[tuple[int, int, int]]) -> None:
    table = np.array(entries, np.uint64)
    c_device.call("memra_copy_table", table.ctypes.data, len(entries))


def test_a_table_copies_all_its_entries(c_device: LibraryDevice, standin: StandIn) -> None:
    c_device.load_all()
    n, size = 7, 16
    ptr = alloc(c_device, 2 * n * size)
    source = np.arange(n * size, dtype=np.uint8)
    c_device.call("memra_upload", ptr, source.ctypes.data, source.nbytes)
    copy_table(c_device, [(ptr + (n + n - 1 - i) * size, ptr + i * size, size) for i in range(n)])  # backwards
    found = np.zeros(n * size, np.uint8)
    c_device.call("memra_download", found.ctypes.data, ptr + n * size, found.nbytes)
    assert found.reshape(n, size)[::-1].tobytes() == source.tobytes()
    c_device.call("memra_free", ptr)


def test_the_first_tables_allocate_nothing_and_equal_ones_are_uploaded_once(
    c_device: LibraryDevice, standin: StandIn, echo: Path
) -> None:
    standin.use_kernels(echo)
    c_device.load_all()
    n = 4096
    ptr = alloc(c_device, 2 * n)
    entries = [(ptr + n + i, ptr + i, 1) for i in range(n)]
    standin.clear_trace()
    for _ in range(2):
        copy_table(c_device, entries)
        assert echo_kernels.last(echo, "copy_many")[1] == n
    assert [call.name for call in standin.trace()] == ["cuMemcpyHtoDAsync", "cuLaunchKernelEx", "cuLaunchKernelEx"]
    table = np.zeros((n, 3), np.uint64)
    c_device.call("memra_download", table.ctypes.data, echo_kernels.last(echo, "copy_many")[0], table.nbytes)
    assert [tuple(row) for row in table.tolist()] == entries
    standin.clear_trace()
    copy_table(c_device, entries[:5])
    copy_table(c_device, entries[:4] + entries[5:6])
    assert [call.bytes for call in standin.calls("cuMemcpyHtoDAsync")] == [120, 120]
    c_device.call("memra_free", ptr)


def test_a_larger_table_takes_the_place_of_the_first(c_device: LibraryDevice, standin: StandIn, echo: Path) -> None:
    standin.use_kernels(echo)
    c_device.load_all()
    n = 5000
    ptr = alloc(c_device, 2 * n)
    entries = [(ptr + n + i, ptr + i, 1) for i in range(n)]
    standin.clear_trace()
    standin.fail("cuMemAllocAsync", 1, 2)
    with pytest.raises(DriverOutOfMemory, match=str(24 * n)):
        copy_table(c_device, entries)
    copy_table(c_device, entries[:100])  # the old one is good still
    standin.clear_trace()
    copy_table(c_device, entries)
    names = [call.name for call in standin.trace()]
    assert names == ["cuMemAllocAsync", "cuMemFreeAsync", "cuMemcpyHtoDAsync", "cuLaunchKernelEx"]
    c_device.call("memra_free", ptr)


def test_an_upload_that_failed_is_done_again(c_device: LibraryDevice, standin: StandIn) -> None:
    c_device.load_all()
    ptr = alloc(c_device, 64)
    for entries in ([(ptr, ptr + 32, 4)], [(ptr, ptr + 16, 4)]):
        standin.fail("cuMemcpyHtoDAsync", 1, CODE)
        with pytest.raises(DriverError, match="cuMemcpyHtoDAsync"):
            copy_table(c_device, entries)
        standin.clear_trace()
        copy_table(c_device, entries)
        assert len(standin.calls("cuMemcpyHtoDAsync")) == 1
    c_device.call("memra_free", ptr)


def test_scratch_grows_and_stays_where_it_was_until_the_end(c_library: capi.Library, standin: StandIn) -> None:
    with CudaContext():  # which would free what is forgotten
        device = LibraryDevice(c_library, 0, stream=None)
        standin.clear_trace()
        found = []
        for n in (100, 50, 200, 100, 0):
            out = ctypes.c_uint64()
            device.call("memra_attend_scratch", n, ctypes.byref(out))
            found.append(out.value)
        assert found[0] == found[1] != found[2] == found[3] != 0
        assert found[4] == 0
        assert [call.bytes for call in standin.calls("cuMemAllocAsync")] == [100, 200]
        assert not standin.calls("cuMemFreeAsync")
        device.close()
        assert standin.live_bytes() == 0
