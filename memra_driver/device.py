"""Streams and events, and the memory of a GPU: the objects that own what the driver hands out.

Every call binds the context to the calling thread first; objects may be shared between threads. `close()` may be called
twice. What is not closed is freed when the object dies; such a free never raises: its first error is kept and raised
by the next call on that context. At the end of the process, and in a forked child, nothing is freed: the driver does
that. The context of `context.py` and the slices of `memory.py` are offered here too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy.typing as npt

from . import driver
from .context import CudaContext, in_a_fork
from .dlpack import NO_SYNC
from .errors import ArrayError, DeviceMismatch, DriverOutOfMemory, ExportError, MemraError, StateError
from .interop import LEGACY_STREAM, PER_THREAD_STREAM, same_stream, stream_handle
from .memory import Closing, CudaSlice, CudaView, HostMemory, Memory, check_contiguous, note_change, run_all

__all__ = [
    "LEGACY_STREAM", "CudaContext", "CudaEvent", "CudaSlice", "CudaStream", "CudaView", "HostMemory", "Memory",
]  # fmt: skip


class CudaStream(Closing):
    """A stream: its own non-blocking one, or a `foreign` one, which is never destroyed here.

    Also the `Memory` of a GPU: allocations are ordered in the stream (where the device has memory pools), and so are
    their frees. Whoever owns a foreign stream keeps it alive until every slice made on it is closed.
    """

    def __init__(self, context: CudaContext, foreign: Any = None) -> None:
        context.bind_alive()
        self.context = context
        self.device = context.device
        self.foreign = foreign
        self._live: dict[int, int] = {}  # pointers allocated here -> bytes
        self._lent: dict[int, bool] = {}  # those of them that others have or had; True: on other streams, too
        self._waiting: list[int] | None = None  # what is to be freed at the end of a capture; None: no capture
        self._destroy: weakref.finalize[[CudaContext, str, int], Any] | None = None
        if foreign is None:
            self._handle: int | None = driver.stream_create()
            self._destroy = weakref.finalize(self, _destroy_quietly, context, "stream", self._handle)
            self._destroy.atexit = False
            context._hold("stream", self._handle)
            return
        handle = stream_handle(foreign, self.device)
        if handle > PER_THREAD_STREAM and driver.stream_get_ctx(handle) != context.handle:
            raise DeviceMismatch(
                f"stream 0x{handle:x} belongs to another context than the primary one of device {self.device}"
            )
        self._handle = handle

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise StateError("the stream is closed")
        return self._handle

    @property
    def is_closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Waits for the stream and destroys it; does neither to a foreign stream that has no slices left.

        Slices made on it stay good and are freed as usual.
        """
        handle, self._handle = self._handle, None
        note_change()
        if handle is None or in_a_fork():
            return
        if self._destroy is not None and self._destroy.detach() is not None:
            self.context.let_go("stream", handle, _finish_stream)
        elif self._live:
            self.context.let_go("stream", handle, driver.stream_synchronize)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        """Waits until all work of the stream is done."""
        self.refuse_in_capture("synchronize")
        self.context.bind_alive()
        driver.stream_synchronize(self.handle)

    def query(self) -> bool:
        """True when all work of the stream is done; does not wait."""
        self.context.bind_alive()
        return driver.stream_query(self.handle)

    def record(self, event: CudaEvent) -> None:
        """The event stands for all work enqueued so far."""
        self.context.bind_alive()
        driver.event_record(event.handle, self.handle)

    def wait(self, event: CudaEvent) -> None:
        """Later work of this stream waits for the event; the host does not. The event may be of another device."""
        self.context.bind_alive()
        driver.stream_wait_event(self.handle, event.handle)

    def wait_stream(self, other: Any) -> None:
        """Later work of this stream waits for what is enqueued on `other` now; the host does not.

        other: what `foreign` may be, of this device. Raises StateError while a capture is open here: work outside a
        capture is no part of it.
        """
        self._order(stream_handle(other, self.device), self.handle)

    def release_to(self, other: Any) -> None:
        """Later work of `other` waits for what is enqueued here now; the host does not. Otherwise as `wait_stream`."""
        self._order(self.handle, stream_handle(other, self.device))

    def _order(self, first: int, then: int) -> None:
        self.context.bind_alive()
        if same_stream(first, then):
            return
        if self._waiting is not None:
            raise StateError("a capture is open on this stream; order it with other streams before or after")
        with CudaEvent(self.context) as done:
            driver.event_record(done.handle, first)
            driver.stream_wait_event(then, done.handle)

    def memcpy_dtod(self, dst: int, src: int, nbytes: int) -> None:
        """Copies between device addresses of this context, in stream order."""
        if nbytes:
            self.context.bind_alive()
            driver.memcpy_dtod_async(dst, src, nbytes, self.handle)

    def memset(self, dst: int, value: int, nbytes: int) -> None:
        """Fills bytes with `value` (0..255), in stream order."""
        if nbytes:
            self.context.bind_alive()
            driver.memset_d8_async(dst, value, nbytes, self.handle)

    def memcpy_htod(self, dst: int, array: npt.NDArray[Any]) -> None:
        """Copies a C-contiguous array to `dst`, in stream order. Ordinary memory may be changed after the return;
        pinned memory must stay unchanged until the stream has passed."""
        check_contiguous(array)
        if array.nbytes:
            self.refuse_in_capture("a copy from the host")
            self.context.bind_alive()
            driver.memcpy_htod_async(dst, array.ctypes.data, array.nbytes, self.handle)

    def memcpy_dtoh(self, array: npt.NDArray[Any], src: int) -> None:
        """Fills a C-contiguous, writeable array from `src` in stream order: it is full once the stream has passed."""
        check_contiguous(array)
        if not array.flags.writeable:
            raise ArrayError("the array to copy into is read-only")
        if array.nbytes:
            self.refuse_in_capture("a copy to the host")
            self.context.bind_alive()
            driver.memcpy_dtoh_async(array.ctypes.data, src, array.nbytes, self.handle)

    def refuse_in_capture(self, what: str) -> None:
        """A capture would record it, and each launch do it again with host memory as it is by then."""
        if self._waiting is not None:
            raise StateError(f"{what}: a capture is open on this stream; do it before or after")

    def alloc_bytes(self, nbytes: int) -> int:
        """Uninitialised bytes, 256-byte aligned, usable by this stream at once. Raises DriverOutOfMemory."""
        self.refuse_in_capture("an allocation")
        self.context.bind_alive()
        handle = self.handle
        try:
            ptr = driver.mem_alloc_async(nbytes, handle) if self.context.pools else driver.mem_alloc(nbytes)
        except DriverOutOfMemory as error:
            raise self._full(error) from None
        self._live[ptr] = nbytes
        self.context._hold("memory", ptr, nbytes)
        return ptr

    def _full(self, error: DriverOutOfMemory) -> DriverOutOfMemory:
        """The error, with what the device has."""
        with contextlib.suppress(MemraError):
            free, total = self.context.available()
            room = f"cuda:{self.device} has {free} of {total} bytes free; nvidia-smi says who holds the rest"
            return DriverOutOfMemory(error.call, error.code, error.name, f"{error.detail}; {room}")
        return error

    def free_bytes(self, ptr: int, nbytes: int) -> None:
        """Frees in stream order; without memory pools it waits for the stream first. Does nothing in a fork.

        What readers on other streams got is freed when the whole device is idle: nobody says what they still run.
        Once this stream is closed that holds for all readers.
        """
        if in_a_fork():
            return
        if self._live.pop(ptr, None) is None:
            raise StateError(f"0x{ptr:x} was not allocated on this stream, or was freed before")
        if self._waiting is None:
            self.context.let_go("memory", ptr, self._give_back)
        else:
            self._waiting.append(ptr)

    @contextlib.contextmanager
    def frees_wait(self) -> Iterator[None]:
        """Inside the block nothing is freed on this stream, at its end all that should have been.

        For captures: the driver refuses a free on a capturing stream, and the garbage collector chooses its moment.
        """
        self._waiting = []
        try:
            yield
        finally:
            waiting, self._waiting = self._waiting, None
            for ptr in waiting:
                try:
                    self.context.let_go("memory", ptr, self._give_back)
                except MemraError as error:
                    self.record_error(error)

    def _give_back(self, ptr: int) -> None:
        elsewhere = self._lent.pop(ptr, None)
        if elsewhere or (elsewhere is not None and self._handle is None):
            driver.ctx_synchronize()
        self._free(ptr)

    def _free(self, ptr: int) -> None:
        if self._handle is not None and self.context.pools:
            driver.mem_free_async(ptr, self._handle)
            return
        waits = [] if self._handle is None else [partial(driver.stream_synchronize, self._handle)]  # else close() has
        run_all([*waits, partial(driver.mem_free, ptr)])

    def read(self, ptr: int, out: npt.NDArray[Any]) -> None:
        """`memcpy_dtoh`, then waits for the stream."""
        self.memcpy_dtoh(out, ptr)
        self.synchronize()

    def write(self, ptr: int, array: npt.NDArray[Any]) -> None:
        """`memcpy_htod`."""
        self.memcpy_htod(ptr, array)

    def record_error(self, error: MemraError) -> None:
        self.context.record_error(error)

    def lend(self, ptr: int, stream: int | None) -> None:
        self.context.bind_alive()
        if stream is None:
            stream = LEGACY_STREAM
        if not isinstance(stream, int) or stream < NO_SYNC or stream == 0:
            raise ExportError(f"DLPack stream {stream!r}: -1, 1, 2 or a handle; 0 may mean 1 or 2")
        if self._handle is not None and stream != NO_SYNC:
            self.release_to(stream)
        if ptr in self._live:
            elsewhere = self._handle is None or not same_stream(stream, self._handle)
            self._lent[ptr] = elsewhere or self._lent.get(ptr, False)

    def export_stream(self) -> int | None:
        """The handle; 1 for stream 0, which the interface forbids; None once closed, which has waited."""
        return None if self._handle is None else self._handle or LEGACY_STREAM


class CudaEvent(Closing):
    """A point in a stream. With `timing`, two of them measure."""

    def __init__(self, context: CudaContext, *, timing: bool = False) -> None:
        context.bind_alive()
        self.context = context
        self._handle: int | None = driver.event_create(timing)
        self._destroy = weakref.finalize(self, _destroy_quietly, context, "event", self._handle)
        self._destroy.atexit = False
        context._hold("event", self._handle)

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise StateError("the event is closed")
        return self._handle

    def close(self) -> None:
        """Destroys the event; work that waits for it still does."""
        handle, self._handle = self._handle, None
        if handle is None or in_a_fork():
            return
        self._destroy.detach()
        self.context.let_go("event", handle, driver.event_destroy)

    def query(self) -> bool:
        """True when the work that it stands for is done; does not wait."""
        self.context.bind_alive()
        return driver.event_query(self.handle)

    def synchronize(self) -> None:
        """Waits until the work that it stands for is done."""
        self.context.bind_alive()
        driver.event_synchronize(self.handle)

    def elapsed_ms(self, start: CudaEvent) -> float:
        """Milliseconds from `start` to this one; both recorded, with timing, and passed."""
        self.context.bind_alive()
        return driver.event_elapsed_time(start.handle, self.handle)


def _finish_stream(handle: int) -> None:
    try:
        driver.stream_synchronize(handle)
    finally:
        driver.stream_destroy(handle)


def _destroy_quietly(context: CudaContext, kind: str, handle: int) -> None:
    if in_a_fork():
        return
    try:
        context.let_go(kind, handle, driver.stream_destroy if kind == "stream" else driver.event_destroy)
    except MemraError as error:
        context.record_error(error)
