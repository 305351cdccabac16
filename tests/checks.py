"""What tests of kernels and of their twins say about arrays and error records."""

from __future__ import annotations

from typing import Any

import numpy as np

from memra_driver.health import Fault, FaultCount, Health

Array = np.ndarray[Any, Any]


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def same_floats(a: Array, b: Array) -> bool:
    """Bit for bit, but one NaN is as good as another (its sign differs between devices). f32, or bf16 as uint16."""
    bits, magnitude, infinity = (
        (np.uint32, 0x7FFFFFFF, 0x7F800000) if a.dtype == np.float32 else (np.uint16, 0x7FFF, 0x7F80)
    )
    a, b = a.view(bits), b.view(bits)
    return bool(((a == b) | ((a & magnitude > infinity) & (b & magnitude > infinity))).all())


def close(got: Array, expected: Array, tolerance: float = 1e-5) -> bool:
    """NaN where NaN is expected, the same infinities, the rest within `tolerance` of the largest magnitude."""
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return False
    x, y = got[finite].astype(np.float64), expected[finite].astype(np.float64)
    return bool(np.abs(x - y).max(initial=0) <= tolerance * np.abs(y).max(initial=0))


def worst(got: Array, expected: Array) -> str:
    """Where the two differ most, for a failing test."""
    with np.errstate(all="ignore"):
        apart = np.abs(got - expected)
    at = int(np.argmax(np.where(np.isfinite(apart), apart, (np.isnan(got) != np.isnan(expected)) * np.inf)))
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    return f"element {at} of {got.size} is {got[at]!r}, not {expected[at]!r}; largest magnitude {largest!r}"


def faults(health: Array) -> dict[Fault, FaultCount]:
    return Health.read([health.tobytes()]).faults
