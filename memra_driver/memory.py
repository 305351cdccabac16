"""Slices, and the memory that they are cut from. Nothing here calls CUDA.

A slice talks to its memory through a few operations (`Memory`): a `CudaStream` is the memory of a GPU, a `HostMemory`
that of the host, so one `CudaSlice` serves both. `close()` may be called twice. What is not closed is freed when the
object dies; such a free never raises, its error is handed to the memory (`record_error`). Nothing is freed at the end
of the process. Memory that went out through DLPack stays until the last consumer has let it go, also after `close()`.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from . import dlpack
from .errors import ArrayError, DriverError, ExportError, MemraError, StateError

ALIGNMENT = 256  # bytes; the driver's allocations have it, host memory follows

# Holds another object whenever something has changed that calls count on and nearly never changes: a slice, a stream
# or a context closed, kernels unloaded, a capture begun or ended. Who finds the object that was there when all was well
# need not ask each of them.
CHANGED: list[object] = [object()]


def note_change() -> None:
    """Call it behind such a change."""
    CHANGED[0] = object()


class Source(Protocol):
    """Where bytes come from, and go back. Addresses are ints, sizes are bytes, never 0."""

    def alloc_bytes(self, nbytes: int) -> int: ...
    def free_bytes(self, ptr: int, nbytes: int) -> None: ...
    def record_error(self, error: MemraError) -> None:
        """Keeps an error of a finaliser, to be raised by a later call."""


class Memory(Source, Protocol):
    """What a slice needs from the place where its bytes live."""

    device: int  # ordinal of the GPU; -1 for host memory

    def read(self, ptr: int, out: npt.NDArray[Any]) -> None:
        """Fills `out` from `ptr` and returns when it is filled."""

    def write(self, ptr: int, array: npt.NDArray[Any]) -> None:
        """Copies `array` to `ptr`, in order with the other work on this memory."""

    def lend(self, ptr: int, stream: int | None) -> None:
        """Memory of the allocation at `ptr` (0: of none) goes to a reader on `stream`, as DLPack writes it.

        The reader's stream waits for the work on this memory. Raises ExportError for a stream that cannot be.
        """

    def export_stream(self) -> int | None:
        """The stream that a reader of the memory must wait for, as the CUDA array interface writes it."""


class Closing:
    """`with` for everything that has `close()`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_all(calls: Iterable[Callable[[], object]]) -> None:
    """Makes every call: an error of the driver keeps none from being made, and the first is raised at the end."""
    first: DriverError | None = None
    for call in calls:
        try:
            call()
        except DriverError as error:
            first = first or error
    if first is not None:
        raise first


def check_contiguous(array: npt.NDArray[Any]) -> None:
    if not isinstance(array, np.ndarray):
        raise ArrayError(f"a NumPy array is needed, not {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise ArrayError(f"the array of shape {array.shape} and strides {array.strides} is not C-contiguous")


def _plain(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype, unless its elements are Python objects, which raw bytes must never become."""
    kind = np.dtype(dtype)
    if kind.hasobject or not kind.itemsize:
        raise ArrayError(f"a slice of {kind}: elements are numbers of a fixed size")
    return kind


class HostMemory:
    """Host memory with the addresses of NumPy arrays, 256-byte aligned like a GPU's."""

    device = -1

    def __init__(self) -> None:
        self._live: dict[int, npt.NDArray[np.uint8]] = {}

    @property
    def live_bytes(self) -> int:
        """Bytes allocated and not freed."""
        return sum(array.nbytes - ALIGNMENT for array in list(self._live.values()))

    @property
    def live_count(self) -> int:
        """Allocations that were not freed."""
        return len(self._live)

    def alloc_bytes(self, nbytes: int) -> int:
        array = np.empty(nbytes + ALIGNMENT, np.uint8)
        ptr = -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._live[ptr] = array
        return ptr

    def free_bytes(self, ptr: int, nbytes: int) -> None:
        if self._live.pop(ptr, None) is None:
            raise StateError(f"0x{ptr:x} was not allocated here, or was freed before")

    def read(self, ptr: int, out: npt.NDArray[Any]) -> None:
        ctypes.memmove(out.ctypes.data, ptr, out.nbytes)

    def write(self, ptr: int, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(ptr, array.ctypes.data, array.nbytes)

    def record_error(self, error: MemraError) -> None:
        """Nothing can fail here that a later call should hear of."""

    def lend(self, ptr: int, stream: int | None) -> None:
        if stream is not None:
            raise ExportError(f"memory of the host has no stream; DLPack asks for {stream!r}")

    def export_stream(self) -> int | None:
        return None

    @staticmethod
    def array(ptr: int, length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The elements at `ptr` as an array over the same memory, good as long as the slice that owns it."""
        kind = np.dtype(dtype)
        if not length:
            return np.empty(0, kind)
        raw: Any = (ctypes.c_ubyte * (length * kind.itemsize)).from_address(ptr)
        return np.ndarray(length, kind, buffer=raw)


def _free_quietly(memory: Source, ptr: int, nbytes: int) -> None:
    try:
        memory.free_bytes(ptr, nbytes)
    except MemraError as error:
        memory.record_error(error)


class Allocation:
    """Bytes of a memory, freed once: by `free`, or with the last object that holds this."""

    def __init__(self, memory: Source, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        self.ptr = memory.alloc_bytes(nbytes)
        self._loan: weakref.ref[_Loan] | None = None
        self._end = weakref.finalize(self, _free_quietly, memory, self.ptr, nbytes)
        self._end.atexit = False

    def loan(self) -> _Loan:
        """What keeps the bytes while somebody else has them: one object for all that have, gone with the last."""
        loan = None if self._loan is None else self._loan()
        if loan is None:
            loan = _Loan(self)
            self._loan = weakref.ref(loan)
        return loan

    def free(self) -> None:
        """Frees the bytes; while they are on loan the end of the loan does that."""
        if (self._loan is None or self._loan() is None) and self._end.detach() is not None:
            self.memory.free_bytes(self.ptr, self.nbytes)


class _Loan:
    __slots__ = ("__weakref__", "allocation")

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation


class CudaSlice(Closing):
    """`len` elements of `dtype` at `ptr`, uninitialised at birth; the owner of its allocation.

    `ptr` is 0 when there is nothing in it (no memory is asked for then), `device` is -1 on the host. Raises
    DriverOutOfMemory. After `close()` everything but `len`, `dtype`, `nbytes`, `device` raises StateError.

    Other libraries take it in place, as one dimension, through DLPack and `__cuda_array_interface__` (on the host
    through DLPack): both see every later change, so what a cache owns is to be read, and `ssm_state` changes its
    address with each eager scan. bf16 is exported as uint16, quantised planes as bytes.
    """

    _allocation: Allocation | None = None  # of an owner that is open and not empty

    def __init__(self, memory: Memory, length: int, dtype: npt.DTypeLike = np.float32) -> None:
        kind, length = _plain(dtype), operator.index(length)
        if length < 0:
            raise ArrayError(f"a slice of {length} elements")
        nbytes = length * kind.itemsize
        if nbytes:
            self._allocation = Allocation(memory, nbytes)
        self._describe(memory, self._allocation.ptr if self._allocation else 0, length, kind)
        self._open = [True]  # shared with the views, emptied by close(); longer once a view was closed alone

    def _describe(self, memory: Memory, ptr: int, length: int, dtype: np.dtype[Any]) -> None:
        self.memory = memory
        self.len = length
        self.dtype = dtype
        self.nbytes = length * dtype.itemsize
        self.device = memory.device
        self._ptr = ptr if self.nbytes else 0
        self.token = object()  # stands for this slice in keys that must not keep its memory

    @property
    def ptr(self) -> int:
        if not self._open:
            self._refuse()
        return self._ptr

    def _refuse(self) -> None:
        raise StateError(f"the slice of {self.len} {self.dtype} on device {self.device} is closed")

    @property
    def is_closed(self) -> bool:
        return not self._open

    def close(self) -> None:
        """Frees the memory, in stream order; views of it are closed with it.

        Arrays that other libraries have of it through DLPack stay good, and the last of them frees it.
        """
        if not self._open:
            return
        self._open.clear()
        note_change()
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            allocation.free()

    def __len__(self) -> int:
        return self.len

    def __repr__(self) -> str:
        state = f"0x{self._ptr:x}" if self._open else "closed"
        return f"<{type(self).__name__} {self.len} {self.dtype} on device {self.device}, {state}>"

    def view(self, start: int = 0, stop: int | None = None) -> CudaView:
        """Elements start .. stop-1, without a copy. Raises ArrayError out of range."""
        stop = self.len if stop is None else stop
        if not 0 <= start <= stop <= self.len:
            raise ArrayError(f"view {start}..{stop} of a slice of {self.len} elements")
        return CudaView(self, start * self.dtype.itemsize, stop - start, self.dtype)

    def plane(self, offset_bytes: int, length: int, dtype: npt.DTypeLike) -> CudaView:
        """`length` elements of `dtype` from a byte offset on, without a copy: how an arena is divided."""
        return CudaView(self, offset_bytes, length, _plain(dtype))

    def cast(self, dtype: npt.DTypeLike) -> CudaView:
        """The same bytes as elements of another type. Raises ArrayError where they do not divide."""
        kind = _plain(dtype)
        if self.nbytes % kind.itemsize:
            raise ArrayError(f"{self.nbytes} bytes are no whole number of {kind} elements")
        return CudaView(self, 0, self.nbytes // kind.itemsize, kind)

    def to_numpy(self) -> npt.NDArray[Any]:
        """Waits for the stream and returns a copy, shape (len,)."""
        out = np.empty(self.len, self.dtype)
        ptr = self.ptr
        if ptr:
            self.memory.read(ptr, out)
        return out

    def copy_from(self, array: npt.NDArray[Any]) -> None:
        """Copies a C-contiguous array of the same dtype and size in, in stream order; waits for nothing.

        Ordinary memory may be changed after the return, pinned memory only once the stream has passed.
        """
        ptr = self.ptr
        check_contiguous(array)
        if array.dtype != self.dtype or array.size != self.len:
            raise ArrayError(
                f"an array of {array.size} {array.dtype} cannot fill a slice of {self.len} {self.dtype} elements"
            )
        if ptr:
            self.memory.write(ptr, array)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, ordinal) for a GPU, (1, 0) for the host."""
        return dlpack.device_pair(self.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule over the same memory, shape (len,), that keeps it alive, also when this and its device are closed.

        stream: the consumer's, which waits for the work enqueued on this memory, the host does not. A handle; None or
        1 the legacy default stream, 2 that of the thread, -1 nothing waits. On the host None. Raises ExportError (a
        BufferError) for a copy, another device, stream 0, a dtype without a DLPack type; StateError.
        """
        if copy:
            raise ExportError("DLPack asks for a copy; to_numpy() makes one")
        dlpack.refuse_device(dl_device, self.__dlpack_device__())
        ptr, owner = self.ptr, self._owner()
        allocation = owner._allocation
        keep = owner if allocation is None else allocation.loan()
        capsule = dlpack.export(ptr, self.len, self.dtype, self.device, max_version, keep)
        self.memory.lend(0 if allocation is None else allocation.ptr, stream)
        return capsule

    def _owner(self) -> CudaSlice:
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, over the same memory. Not offered on the host, nor once closed.

        It keeps the object, not the memory: `close()` frees that under a consumer.
        """
        if not self._open or self.device < 0:
            raise AttributeError("__cuda_array_interface__")
        allocation = self._owner()._allocation
        self.memory.lend(0 if allocation is None else allocation.ptr, dlpack.NO_SYNC)
        return {
            "shape": (self.len,),
            "typestr": self.dtype.str,
            "data": (self._ptr, False),
            "version": 3,
            "strides": None,
            "stream": self.memory.export_stream(),
        }


class OpenWatch:
    """Tells whether any of some slices was closed since, or a view of them alone; keeps none of them alive."""

    def __init__(self, slices: Iterable[CudaSlice]) -> None:
        self._open = list({id(each._open): each._open for each in slices}.values())
        self._were = list(map(len, self._open))

    def is_true(self) -> bool:
        """Whether all are open still."""
        return list(map(len, self._open)) == self._were


class Borrowed(CudaSlice):
    """Elements at an address that someone else allocated and frees; `close()` closes this object only.

    allocation: where they lie, kept as long as this is, its views and what readers have of it through DLPack.
    """

    def __init__(
        self, memory: Memory, ptr: int, length: int, dtype: npt.DTypeLike = np.float32, *,
        allocation: Allocation | None = None,
    ) -> None:  # fmt: skip
        self._open = [True]
        self._allocation = allocation
        self._describe(memory, ptr, length, _plain(dtype))

    def close(self) -> None:
        self._open.clear()
        note_change()
        self._allocation = None


class CudaView(CudaSlice):
    """Part of another slice's memory. Owns nothing, keeps the owner alive, is closed when the owner is."""

    def __init__(self, parent: CudaSlice, offset_bytes: int, length: int, dtype: np.dtype[Any]) -> None:
        ptr = parent.ptr
        nbytes = length * dtype.itemsize
        if length < 0 or offset_bytes < 0 or offset_bytes + nbytes > parent.nbytes:
            raise ArrayError(f"bytes {offset_bytes}..{offset_bytes + nbytes} of a slice of {parent.nbytes} bytes")
        if (ptr + offset_bytes) % dtype.alignment:
            raise ArrayError(f"byte offset {offset_bytes} is not aligned for {dtype}")
        self.owner: CudaSlice = parent.owner if isinstance(parent, CudaView) else parent
        self._open = parent._open
        self._describe(parent.memory, ptr + offset_bytes, length, dtype)

    def close(self) -> None:
        """Closes the view only."""
        if self._open:
            self._open.append(False)  # the owner's list tells that not every view of it is open
        self._open = []
        note_change()

    def _owner(self) -> CudaSlice:
        return self.owner
