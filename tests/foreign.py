"""Other libraries, as DLPack sees them: tensors that are handed to us, and a reader of what we hand out.

The structs are written down a second time here, so that a wrong layout shows.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import standin

from memra_driver.dlpack import shown

CPU, CUDA, PINNED, ROCM, MANAGED = 1, 2, 3, 10, 13
BFLOAT16 = (4, 16, 1)
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def nameless(value: object) -> str:
    """A test's id for a strange argument: `shown` without addresses, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", shown(value))


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


NAMES = {b"dltensor": Managed, b"dltensor_versioned": Versioned}
_USED = {name: ctypes.create_string_buffer(b"used_" + name) for name in NAMES}  # capsules do not copy their names


def _python(result: Any, name: str, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_is_valid = _python(ctypes.c_int, "PyCapsule_IsValid", ctypes.py_object, ctypes.c_char_p)
_pointer = _python(ctypes.c_void_p, "PyCapsule_GetPointer", ctypes.py_object, ctypes.c_char_p)
_rename = _python(ctypes.c_int, "PyCapsule_SetName", ctypes.py_object, ctypes.c_void_p)


def managed(capsule: Any) -> Any:
    """The struct in a fresh capsule."""
    (name,) = [name for name in NAMES if _is_valid(capsule, name)]
    return NAMES[name].from_address(_pointer(capsule, name))


def taken(capsule: Any) -> Any:
    """The struct, once the capsule has been consumed: from now on the deleter is the caller's to call."""
    struct = managed(capsule)
    _rename(capsule, ctypes.addressof(_USED[b"dltensor_versioned" if isinstance(struct, Versioned) else b"dltensor"]))
    return struct


def delete(struct: Any) -> None:
    """What a consumer does when it has no more need of a tensor."""
    Deleter(struct.deleter)(ctypes.addressof(struct))


def look(tensor: DLTensor) -> np.ndarray[Any, Any]:
    """The elements, where the memory is the host's: also that of the stand-in driver."""
    standin.finish()
    shape = tensor.shape[: tensor.ndim]
    dtype = np.dtype(f"{'iuf'[tensor.code]}{tensor.bits // 8}")
    size = int(np.prod(shape)) * dtype.itemsize
    raw = (ctypes.c_ubyte * size).from_address(tensor.data + tensor.byte_offset)
    return np.frombuffer(raw, dtype).reshape(shape)


class Tensor:
    """A tensor of another library over `ptr`. `told` keeps what __dlpack__ was asked for; strides in elements.

    Made by NumPy, and then changed where it shall be what NumPy cannot make.
    """

    def __init__(
        self, ptr: int, shape: Sequence[int], dtype: Any = np.float32, *, device: tuple[int, int] = (CUDA, 0),
        strides: Sequence[int] | None = None, versioned: bool = True, keep: Any = None, **changes: Any,
    ) -> None:  # fmt: skip
        self.ptr_, self.shape_, self.dtype_ = ptr, tuple(shape), np.dtype(dtype)
        self.strides_, self.device, self.versioned = strides, device, versioned
        self.keep, self.changes = keep, changes
        self.told: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **told: Any) -> Any:
        self.told.append(told)
        return self.capsule()

    def capsule(self) -> Any:
        size = self.dtype_.itemsize
        holder = SimpleNamespace(keep=self.keep)
        holder.__array_interface__ = {
            "shape": self.shape_, "typestr": self.dtype_.str, "data": (self.ptr_, False), "version": 3,
            "strides": None if self.strides_ is None else tuple(size * step for step in self.strides_),
        }  # fmt: skip
        array = np.asarray(holder)
        made = array.__dlpack__(max_version=(1, 0)) if self.versioned else array.__dlpack__()
        struct = managed(made)
        struct.tensor.device_type, struct.tensor.device_id = self.device
        for name, value in self.changes.items():
            if name == "lengths" and value is None:
                struct.tensor.shape = None
            elif name == "lengths":  # such as NumPy does not take
                for i, length in enumerate(value):
                    struct.tensor.shape[i] = length
            else:
                setattr(struct if name in ("flags", "major") else struct.tensor, name, value)
        return made


class OldTensor(Tensor):
    """One that speaks the protocol as it first was: `stream` only."""

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, versioned=False, **changes)

    def __dlpack__(self, *, stream: Any = None) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


class Foreign:
    """An array of another library over a slice: nothing but the CUDA array interface."""

    def __init__(self, slice_: Any, its_shape: Sequence[int], **changes: Any) -> None:
        self.slice = slice_
        self.__cuda_array_interface__ = {
            "shape": tuple(its_shape), "typestr": "<f4", "data": (slice_.ptr, False), "version": 3, "strides": None,
        } | changes  # fmt: skip
