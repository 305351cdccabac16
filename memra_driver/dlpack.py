"""DLPack capsules: those that go out, and what one that comes in says. Nothing here calls CUDA.

A capsule that goes out is NumPy's: an array over the address holds what keeps the memory alive, NumPy makes the capsule
of it (and never looks at the address), and the device is then written into its tensor. The reason is the deleter. A
consumer may call it on any thread, in a forked child, and when the interpreter is gone, as the destructors of a C++
program do at its end. NumPy's is C and returns in that last case; a ctypes callback crashes there, and so does the
deleter of cuda.core's Buffer. That class also makes no consumer's stream wait, knows bytes only, takes a tenth of a
second and more to import, and does not come with cuda-python 12.

A capsule that comes in is read and kept as it is; nobody renames it, so its own destructor calls the producer's
deleter when the operand that holds it goes.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from typing import Any, NamedTuple

import numpy as np

from .errors import ExportError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
NO_SYNC = -1  # the consumer's stream that nothing is to wait for
READ_ONLY, IS_COPIED = 1, 2  # flags of a versioned tensor
VERSION = (1, 0)  # of the layout below
MAX_DIMS = 64  # what NumPy and torch can have; a count beyond it is garbage, and so are the lengths it would read

_OLD, _VERSIONED = b"dltensor", b"dltensor_versioned"  # names of capsules that nobody has consumed
# DLTensor: data, device type, device id, dimensions, type code, bits, lanes, shape, strides, byte offset.
_TENSOR = struct.Struct("@QiiiBBHQQQ")
# What stands before it in DLManagedTensorVersioned: major, minor, context, deleter, flags.
_HEAD = struct.Struct("@IIQQQ")
_DEVICE = struct.Struct("@ii")
_DEVICE_AT = 8  # where device type and id stand in a DLTensor
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_BFLOAT = 4

# Prototypes of our own: those that hang on ctypes.pythonapi are shared with everybody in the process.
_is_valid: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Kept:
    """What NumPy takes for an array over `ptr`; as that array's base it keeps `keep` alive."""

    __slots__ = ("__array_interface__", "keep")

    def __init__(self, ptr: int, length: int, dtype: np.dtype[Any], keep: Any) -> None:
        self.__array_interface__ = {"shape": (length,), "typestr": dtype.str, "data": (ptr, False), "version": 3}
        self.keep = keep


def device_pair(device: int) -> tuple[int, int]:
    """(type, id) of an ordinal of ours; -1 is the host."""
    return (CPU, 0) if device < 0 else (CUDA, device)


def shown(foreign: object) -> str:
    """What a message shows of an object of another library: never long, and never an error of its own."""
    try:
        text = str(foreign)
    except Exception:  # an int of more digits than Python writes, or a __str__ that fails
        text = type(foreign).__name__
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def refuse_device(asked: Any, own: tuple[int, int]) -> None:
    """Raises ExportError unless `asked`, the dl_device of a consumer, is None or the device of the memory."""
    if asked is not None and (pair := _pair("dl_device", asked)) != own:
        raise ExportError(f"DLPack asks for device {pair}; this lives on {own}, and to_numpy() copies to the host")


def _pair(name: str, asked: Any) -> tuple[int, int]:
    try:
        first, second = (operator.index(each) for each in asked)
    except Exception:
        raise ExportError(f"{name} is a pair of integers or None, not {shown(asked)}") from None
    return first, second


def export(
    ptr: int, length: int, dtype: np.dtype[Any], device: int, max_version: tuple[int, int] | None, keep: Any
) -> Any:
    """A capsule of `length` elements at `ptr`; `keep` lives until its deleter has run. Raises ExportError.

    Versioned where max_version allows and NumPy can (from 2.1 on), of the older form otherwise.
    """
    versioned = max_version is not None and _pair("max_version", max_version) >= VERSION
    array = np.asarray(_Kept(ptr or 1 << 8, length, dtype, keep))  # NumPy before 2 takes no 0
    try:
        try:
            capsule = array.__dlpack__(max_version=VERSION) if versioned else array.__dlpack__()
        except TypeError:  # NumPy before 2.1
            capsule = array.__dlpack__()
    except (BufferError, TypeError) as error:
        raise ExportError(f"elements of {dtype} have no DLPack type here ({error}); cast() to bytes or bits") from None
    at, _ = _tensor_at(capsule)
    if not length:
        ctypes.memset(at, 0, 8)  # what is empty has no address
    ctypes.memmove(at + _DEVICE_AT, _DEVICE.pack(*device_pair(device)), _DEVICE.size)
    return capsule


class Tensor(NamedTuple):
    """What a capsule describes; `strides` in elements, None where they are those of C order."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any] | None  # None: a type that NumPy has no name for
    type_name: str
    flags: int
    device: tuple[int, int]


def read(capsule: Any) -> Tensor:
    """What a capsule holds that nobody has consumed; good as long as the capsule. Raises BufferError.

    bfloat16 comes as the uint16 of its bits.
    """
    at, versioned = _tensor_at(capsule)
    flags = 0
    if versioned:
        major, minor, _, _, flags = _HEAD.unpack(ctypes.string_at(at - _HEAD.size, _HEAD.size))
        if major != VERSION[0]:
            raise BufferError(f"DLPack version {major}.{minor}; {VERSION[0]}.x can be read")
    data, kind, index, ndim, code, bits, lanes, shape_at, strides_at, offset = _TENSOR.unpack(
        ctypes.string_at(at, _TENSOR.size)
    )
    if not 0 <= ndim <= MAX_DIMS:
        raise BufferError(f"a tensor of {ndim} dimensions; up to {MAX_DIMS} can be read")
    if ndim and not shape_at:
        raise BufferError(f"a tensor of {ndim} dimensions without a shape")
    if data + offset >= 1 << 64:
        raise BufferError(f"byte offset {offset} from 0x{data:x} leaves the address space")
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    if ndim:
        shape = struct.unpack(f"@{ndim}q", ctypes.string_at(shape_at, 8 * ndim))
        strides = struct.unpack(f"@{ndim}q", ctypes.string_at(strides_at, 8 * ndim)) if strides_at else None
    ptr = data + offset if data else 0
    return Tensor(ptr, shape, strides, *_dtype(code, bits, lanes), flags, (kind, index))


def _tensor_at(capsule: Any) -> tuple[int, bool]:
    """Address of the DLTensor in a capsule that nobody has consumed, and whether it is versioned."""
    if _is_valid(capsule, _VERSIONED):
        return _pointer(capsule, _VERSIONED) + _HEAD.size, True
    if _is_valid(capsule, _OLD):
        return _pointer(capsule, _OLD), False
    raise BufferError(f"{shown(capsule)} is no fresh DLPack capsule")


@functools.cache
def _dtype(code: int, bits: int, lanes: int) -> tuple[np.dtype[Any] | None, str]:
    if (code, bits, lanes) == (_BFLOAT, 16, 1):
        return np.dtype(np.uint16), "bfloat16"
    try:
        dtype = np.dtype(f"{_KINDS[code]}{bits // 8}") if lanes == 1 and bits % 8 == 0 else None
    except (KeyError, TypeError):
        dtype = None
    if dtype is None:
        return None, f"DLPack type {code} of {bits} bits and {lanes} lanes"
    return dtype, str(dtype)
