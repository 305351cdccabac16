"""The portable text of the kernels as a device: host memory, and cuda_src as g++ compiled it, without any libcuda.

So it can run beside a real driver, which the stand-in cannot.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import standin

from memra_driver.kernels import KERNELS
from memra_driver.kvdev import HostDev

_SCALARS = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}
_Dim3 = ctypes.c_uint * 3


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(standin.build_kernels()))
    library.memra_cpu_fault.restype = ctypes.c_char_p
    return library


class PortableDev(HostDev):
    """HostDev with the portable kernels in place of their twins; needs g++."""

    def _launch(self, name: str, *args: Any) -> None:
        kernel = KERNELS[name]
        values = [
            _SCALARS[kind](value) if kind in _SCALARS else ctypes.c_uint64(0 if value is None else value.ptr)
            for (kind, _), value in zip(kernel.params, args, strict=True)
        ]
        grid, block, shared = kernel.shape({name: value for (_, name), value in zip(kernel.params, args, strict=True)})
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        if getattr(_library(), f"memra_cpu_launch_{name}")(_Dim3(*grid), _Dim3(*block), shared, pointers):
            raise RuntimeError(f"{name}: {_library().memra_cpu_fault().decode()}")
