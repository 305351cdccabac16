"""Slices, and the memory that they are cut from. Nothing here calls CUDA.

A slice talks to its memory through a few operations (`Memory`): a `CudaStream` is the memory of a GPU, a `HostMemory`
that of the host, so one `CudaSlice` serves both. `close()` may be called twice. What is not closed is freed when the
object dies; such a free never raises, its error is handed to the memory (`record_error`). Nothing is freed at the end
of the process.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from .errors import ArrayError, MemraError, StateError

ALIGNMENT = 256  # bytes; the driver's allocations have it, host memory follows


class Memory(Protocol):
    """What a slice needs from the place where its bytes live. Addresses are ints, sizes are bytes, never 0."""

    device: int  # ordinal of the GPU; -1 for host memory

    def alloc_bytes(self, nbytes: int) -> int: ...
    def free_bytes(self, ptr: int, nbytes: int) -> None: ...
    def read(self, ptr: int, out: npt.NDArray[Any]) -> None:
        """Fills `out` from `ptr` and returns when it is filled."""

    def write(self, ptr: int, array: npt.NDArray[Any]) -> None:
        """Copies `array` to `ptr`, in order with the other work on this memory."""

    def record_error(self, error: MemraError) -> None:
        """Keeps an error of a finaliser, to be raised by a later call."""

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


def _free_quietly(memory: Memory, ptr: int, nbytes: int) -> None:
    try:
        memory.free_bytes(ptr, nbytes)
    except MemraError as error:
        memory.record_error(error)


class CudaSlice(Closing):
    """`len` elements of `dtype` at `ptr`, uninitialised at birth; the owner of its allocation.

    `ptr` is 0 when there is nothing in it (no memory is asked for then), `device` is -1 on the host. Raises
    DriverOutOfMemory. After `close()` everything but `len`, `dtype`, `nbytes`, `device` raises StateError.
    """

    def __init__(self, memory: Memory, length: int, dtype: npt.DTypeLike = np.float32) -> None:
        kind, length = _plain(dtype), operator.index(length)
        if length < 0:
            raise ArrayError(f"a slice of {length} elements")
        nbytes = length * kind.itemsize
        ptr = memory.alloc_bytes(nbytes) if nbytes else 0
        self._describe(memory, ptr, length, kind)
        self._open = [True]  # shared with the views, emptied by close()
        if ptr:
            self._free = weakref.finalize(self, _free_quietly, memory, ptr, nbytes)
            self._free.atexit = False

    def _describe(self, memory: Memory, ptr: int, length: int, dtype: np.dtype[Any]) -> None:
        self.memory = memory
        self.len = length
        self.dtype = dtype
        self.nbytes = length * dtype.itemsize
        self.device = memory.device
        self._ptr = ptr if self.nbytes else 0

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
        """Frees the memory, in stream order; views of it are closed with it."""
        if not self._open:
            return
        self._open.clear()
        if self._ptr and self._free.detach() is not None:
            self.memory.free_bytes(self._ptr, self.nbytes)

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

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, over the same memory; a consumer sees every later change. Not offered on the host."""
        if not self._open or self.device < 0:
            raise AttributeError("__cuda_array_interface__")
        return {
            "shape": (self.len,),
            "typestr": self.dtype.str,
            "data": (self._ptr, False),
            "version": 3,
            "strides": None,
            "stream": self.memory.export_stream(),
        }


class Borrowed(CudaSlice):
    """Elements at an address that someone else allocated and frees; `close()` closes this object only."""

    def __init__(self, memory: Memory, ptr: int, length: int, dtype: npt.DTypeLike = np.float32) -> None:
        self._open = [True]
        self._describe(memory, ptr, length, _plain(dtype))

    def close(self) -> None:
        self._open.clear()


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
        self._open = []
