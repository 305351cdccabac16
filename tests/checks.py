"""What tests of kernels and of their twins say about arrays and error records."""

from __future__ import annotations

from typing import Any

import numpy as np

from memra_driver.health import Fault, FaultCount, Health

Array = np.ndarray[Any, Any]


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def same_floats(a: Array, b: Array) -> bool:
    """Bit for bit, but one NaN is as good as another."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def close(got: Array, expected: Array, tolerance: float = 1e-5) -> bool:
    return bool(np.abs(got.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max())


def record() -> Array:
    return np.zeros(88, np.uint8)


def faults(health: Array) -> dict[Fault, FaultCount]:
    return Health.read([health.tobytes()]).faults
