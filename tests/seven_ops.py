"""A device with the seven operations and nothing else, over bytearrays: what a port has to bring."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np


class Bytes:
    """A slice: `ptr, len, dtype, nbytes`; to_numpy serves digest and health."""

    def __init__(self, n: int, dtype: str) -> None:
        self.dtype, self.len = np.dtype(dtype), n
        self.nbytes = n * self.dtype.itemsize
        self.data = bytearray(self.nbytes)
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.data)) if n else 0

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(bytes(self.data), self.dtype)


class SevenOps:
    """The device. `calls` lists what was asked of it: (operation, elements)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def zeros(self, n: int) -> Bytes:
        self.calls.append(("zeros", n))
        return Bytes(n, "float32")

    def uninit(self, n: int) -> Bytes:
        self.calls.append(("uninit", n))
        made = Bytes(n, "float32")
        made.data[:] = b"\xaa" * made.nbytes
        return made

    def alloc_u8(self, n: int) -> Bytes:
        self.calls.append(("alloc_u8", n))
        return Bytes(n, "uint8")

    def htod_i32(self, v: Sequence[int]) -> Bytes:
        self.calls.append(("htod_i32", len(v)))
        made = Bytes(len(v), "int32")
        made.data[:] = np.array(v, np.int32).tobytes()
        return made

    def clone_dtod(self, src: Bytes) -> Bytes:
        self.calls.append(("clone_dtod", src.len))
        made = Bytes(src.len, src.dtype.name)
        made.data[:] = src.data
        return made

    def copy_into(self, dst: Bytes, off: int, src: Bytes, n: int) -> None:
        self.calls.append(("copy_into", n))
        assert dst.dtype == src.dtype
        assert 0 <= n <= src.len
        assert 0 <= off <= dst.len - n
        size = dst.dtype.itemsize
        dst.data[off * size : (off + n) * size] = src.data[: n * size]

    def set_i32_one(self, d: Bytes, v: int) -> None:
        self.calls.append(("set_i32_one", v))
        d.data[:4] = np.array([v], np.int32).tobytes()
