"""Foreign arrays: what an operation accepts besides our own slices.

NumPy arrays on the host device, and anything with `__cuda_array_interface__` on a CUDA device, are
used in place. What cannot be used as it stands (a stride, a dtype, another device, a read-only
output) is refused; nothing is copied behind the caller's back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from memra_driver.errors import ArrayError

HOST = -1


@dataclass(frozen=True)
class Operand:
    """Memory of an argument: `len` elements of `dtype` at `ptr`; `owner` keeps it alive."""

    ptr: int
    len: int
    dtype: np.dtype[Any]
    nbytes: int
    device: int
    owner: Any


def operand(
    value: Any, name: str, columns: Sequence[int], dtypes: Sequence[Any], device: int, *, rows: int | None, out: bool,
    batch: int | None = None,
) -> Operand:  # fmt: skip
    """The memory behind one argument, checked: C-contiguous, [rows, *columns], one of `dtypes`, on `device`.

    rows None: any number of rows. batch: so many blocks of them,
    [batch, rows, *columns]. A flat slice needs the right number of elements; an array needs
    the shape itself. Raises ArrayError naming the argument.
    """
    shape: tuple[int, ...] | None = None
    if isinstance(value, np.ndarray):
        found = _from_numpy(value, name, out)
        shape = value.shape
    elif all(hasattr(value, field) for field in ("ptr", "len", "dtype", "nbytes")):
        found = Operand(
            value.ptr, value.len, np.dtype(value.dtype), value.nbytes, getattr(value, "device", device), value
        )
    elif hasattr(value, "__cuda_array_interface__"):
        found, shape = _from_cuda_array(value, name, out, device)
    else:
        raise ArrayError(
            f"{name} is a {type(value).__name__}; it takes a CudaSlice, an array with __cuda_array_interface__,"
            " or a NumPy array on the host device"
        )
    if found.device != device:
        raise ArrayError(f"{name} lives on {_where(found.device)}, the layer on {_where(device)}")
    wanted = [np.dtype(dtype) for dtype in dtypes]
    if found.dtype not in wanted:
        raise ArrayError(f"{name} has dtype {found.dtype}; it takes {' or '.join(str(dtype) for dtype in wanted)}")
    lead = () if batch is None else (batch,)
    wanted_shape = (*lead, "rows" if rows is None else rows, *columns)
    text = f"[{', '.join(map(str, wanted_shape))}]"
    per_row = prod(columns) * prod(lead)
    if shape is not None and (
        len(shape) != len(wanted_shape) or any(w not in ("rows", n) for w, n in zip(wanted_shape, shape, strict=True))
    ):
        raise ArrayError(f"{name} has shape {list(shape)}; it takes {text}")
    if found.len % per_row or (rows is not None and found.len != rows * per_row):
        raise ArrayError(f"{name} has {found.len} elements; it takes {text}")
    if found.len and found.ptr % found.dtype.itemsize:
        raise ArrayError(
            f"{name} lies at 0x{found.ptr:x}, which is not aligned to its {found.dtype.itemsize}-byte elements"
        )
    return found


def vector(value: Any, name: str, length: int, device: int) -> Operand:
    """A one-dimensional f32 input of exactly `length` elements, as `operand` checks it."""
    return operand(value, name, (), (np.float32,), device, rows=length, out=False)


def refuse_overlap(outputs: dict[str, Operand], inputs: dict[str, Operand]) -> None:
    """Raises ArrayError when an output shares memory with an input or another output."""
    everything = [*outputs.items(), *inputs.items()]
    for i, (name, out) in enumerate(outputs.items()):
        for other, each in everything[i + 1 :]:
            if out.len and each.len and out.ptr < each.ptr + each.nbytes and each.ptr < out.ptr + out.nbytes:
                raise ArrayError(
                    f"{name} and {other} share memory; other rows of {other} are still read while {name} is written"
                )


def _from_numpy(array: np.ndarray[Any, Any], name: str, out: bool) -> Operand:
    if not array.flags.c_contiguous:
        raise ArrayError(f"{name} is strided {list(array.strides)}; it must be C-contiguous")
    if out and not array.flags.writeable:
        raise ArrayError(f"{name} is read-only and would be written")
    return Operand(array.ctypes.data, array.size, array.dtype, array.nbytes, HOST, array)


def _from_cuda_array(value: Any, name: str, out: bool, device: int) -> tuple[Operand, tuple[int, ...]]:
    from memra_driver import driver

    interface = value.__cuda_array_interface__
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    ptr, read_only = interface["data"]
    expected: list[int] = []
    step = dtype.itemsize
    for length in reversed(shape):
        expected.insert(0, step)
        step *= length
    strides = interface.get("strides")
    if (
        strides is not None
        and prod(shape)
        and any(s != e for s, e, n in zip(strides, expected, shape, strict=True) if n > 1)
    ):
        raise ArrayError(f"{name} is strided {list(strides)}; it must be C-contiguous")
    if out and read_only:
        raise ArrayError(f"{name} is read-only and would be written")
    where = driver.pointer_get_attribute("DEVICE_ORDINAL", ptr) if ptr else device
    return Operand(ptr, prod(shape), dtype, prod(shape) * dtype.itemsize, where, value), shape


def _where(device: int) -> str:
    return "the host" if device == HOST else f"cuda:{device}"
