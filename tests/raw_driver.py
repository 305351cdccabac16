"""The bare bindings, for tests of the stand-in itself: results unpacked, arrays there and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver as cu

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400
ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED, LAUNCH_FAILED = 700, 709, 719


def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def on_device(array: np.ndarray) -> int:
    ptr = int(ok(cu.cuMemAlloc(array.nbytes)))
    ok(cu.cuMemcpyHtoD(ptr, array.ctypes.data, array.nbytes))
    ok(cu.cuStreamSynchronize(0))  # no other stream waits for the default one
    return ptr


def from_device(ptr: int, like: np.ndarray) -> np.ndarray:
    """What stands there once all work of the context is done."""
    ok(cu.cuCtxSynchronize())
    out = np.empty_like(like)
    ok(cu.cuMemcpyDtoH(out.ctypes.data, ptr, out.nbytes))
    return out
