"""torch and CuPy in small, over NumPy and the stand-in driver: enough of them for the program of the README.

The library owns context and stream before anybody else, its tensors lie in device memory (which is the host's, on the
stand-in), and it keeps both sides of DLPack as the protocol wants them kept.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import standin
from foreign import BFLOAT16, Tensor, delete, look, taken

from memra_driver.device import CudaContext, CudaSlice, CudaStream

BITS = {"code": BFLOAT16[0], "bits": BFLOAT16[1], "lanes": BFLOAT16[2]}


class Numbers:
    """What can be computed with, and what comes of it."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def array(self) -> Any:
        """The elements, once the work on them is done: this library computes on the host."""
        standin.finish()
        return self._array

    def __sub__(self, other: Numbers) -> Numbers:
        return Numbers(self.array - other.array)

    def float(self) -> Numbers:
        return Numbers(self.array.astype(np.float32))

    def abs(self) -> Numbers:
        return Numbers(abs(self.array))

    def max(self) -> Numbers:
        return Numbers(self.array.max())

    def item(self) -> Any:
        return self.array.item()

    def __int__(self) -> int:
        return int(self.array)


class Array(Numbers):
    """A tensor: a NumPy array over device memory that `keep` holds. What is computed from it is in NumPy's memory."""

    def __init__(self, library: Library, array: np.ndarray[Any, Any], keep: Any) -> None:
        super().__init__(array)
        self.library, self.keep = library, keep
        self.shape = array.shape

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self.array)))

    def __getitem__(self, index: Any) -> Array:
        return Array(self.library, self.array[index], self.keep)

    def view(self, *shape: int) -> Array:
        return Array(self.library, self.array.reshape(shape), self.keep)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int, max_version: Any = None, copy: Any = None) -> Any:
        assert copy is False
        if stream != -1:
            self.library.stream.release_to(stream)
        narrow = self.array.dtype == ml_dtypes.bfloat16
        told = Tensor(
            self.array.ctypes.data, self.array.shape, np.uint16 if narrow else self.array.dtype, keep=self,
            strides=[step // self.array.itemsize for step in self.array.strides], **BITS if narrow else {},
        )  # fmt: skip
        return told.capsule()


class Library:
    """The memory and the current stream that both libraries share."""

    def __init__(self) -> None:
        self.context = CudaContext()
        self.own = CudaStream(self.context)
        self.stream = self.own

    def made(self, *shape: int, dtype: Any = np.float32, device: str) -> Array:
        assert device == "cuda"
        dtype = np.dtype(dtype)
        held = CudaSlice(self.own, math.prod(shape) * dtype.itemsize, np.uint8)
        raw = (ctypes.c_ubyte * held.nbytes).from_address(held.ptr)
        return Array(self, np.frombuffer(raw, dtype).reshape(shape), held)

    def randn(self, *shape: int, device: str) -> Array:
        made = self.made(*shape, device=device)
        made.array[:] = np.random.default_rng(0).standard_normal(shape, np.float32)
        return made

    def from_dlpack(self, given: Any) -> Array:
        assert tuple(given.__dlpack_device__()) == (2, 0)
        struct = taken(given.__dlpack__(stream=self.stream.handle, max_version=(1, 0)))
        array = look(struct.tensor)
        weakref.finalize(array, delete, struct)
        return Array(self, array, array)

    def close(self) -> None:
        self.own.close()
        self.context.close()

    def torch(self) -> Any:
        """import torch"""
        cuda = SimpleNamespace(
            Stream=lambda: self.own,
            set_stream=lambda stream: setattr(self, "stream", stream),
            current_stream=lambda: SimpleNamespace(__cuda_stream__=self.stream.__cuda_stream__, device_index=0),
        )
        return SimpleNamespace(
            cuda=cuda, randn=self.randn, empty=self.made, bfloat16=ml_dtypes.bfloat16, from_dlpack=self.from_dlpack,
            empty_like=lambda other: self.made(*other.shape, dtype=other.array.dtype, device="cuda"),
        )  # fmt: skip

    def cupy(self) -> Any:
        """import cupy"""

        class ExternalStream:
            def __init__(stream, handle: int) -> None:
                stream.handle = handle

            def __enter__(stream) -> None:
                stream.before, self.stream = self.stream, CudaStream(self.context, stream.handle)

            def __exit__(stream, *exc: object) -> None:
                self.stream = stream.before

        return SimpleNamespace(cuda=SimpleNamespace(ExternalStream=ExternalStream), from_dlpack=self.from_dlpack)
