"""Block formats by float64 formulas of their own, as the oracle of `check` needs them; see oracle.py."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]

F16, E4M3, BF16 = (10, -14), (3, -6), (7, -126)  # bits of mantissa, lowest exponent
NAMES = ("q8_0", "q5_1", "q4_0", "fp8")  # by code
BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q4_0": 18, "fp8": 32}


# Small floating-point numbers.


def f32(x: Any) -> F64:
    """Rounded to the nearest f32."""
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def small_code(x: F64, kind: tuple[int, int]) -> NDArray[np.int64]:
    """|x| rounded half to even, as exponent and mantissa; what lies above the largest number goes on counting."""
    mantissa, low = kind
    magnitude = np.where(np.isfinite(x), np.abs(x), 0.0)
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, low), low)
    steps = np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(np.int64)
    return np.asarray((exponent.astype(np.int64) - low) * 2**mantissa + steps)


def small_value(code: Array, kind: tuple[int, int]) -> F64:
    """The number that exponent and mantissa stand for."""
    mantissa, low = kind
    exponent, steps = code.astype(np.int64) >> mantissa, code.astype(np.int64) % 2**mantissa
    whole = steps + np.where(exponent > 0, 2**mantissa, 0)
    return np.asarray(np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - 1 + low - mantissa))


def ieee_bits(x: F64, kind: tuple[int, int]) -> NDArray[np.uint16]:
    """f16 or bf16: overflow to infinity; NaN 0x7FFF."""
    infinity = {F16: 0x7C00, BF16: 0x7F80}[kind]
    code = np.where(np.isinf(x), infinity, np.minimum(small_code(x, kind), infinity))
    return np.where(np.isnan(x), 0x7FFF, code | np.where(np.signbit(x), 0x8000, 0)).astype(np.uint16)


def from_f16(bits: Array) -> F64:
    magnitude = bits.astype(np.int64) & 0x7FFF
    value = np.where(magnitude < 0x7C00, small_value(magnitude, F16), np.inf)
    value = np.where(magnitude > 0x7C00, np.nan, value)
    return np.where(bits.astype(np.int64) & 0x8000, -value, value)


# Block formats: x (blocks, 32).


def encode(name: str, x: F64) -> NDArray[np.uint8]:
    """(blocks, 32) to (blocks, bytes)."""
    with np.errstate(all="ignore"):
        return _ENCODE[name](x)


def _inverse(d: F64) -> F64:
    inverse = f32(1 / d)
    return np.where((d == 0) | np.isinf(inverse), 0.0, inverse)


def _bytes(*parts: Array) -> NDArray[np.uint8]:
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts], axis=1)


def _whole(x: F64) -> NDArray[np.int64]:
    return np.where(np.isnan(x), 0, x).astype(np.int64)


def _halves(codes: NDArray[np.int64]) -> NDArray[np.uint8]:
    return (codes[:, :16] % 16 + 16 * (codes[:, 16:] % 16)).astype(np.uint8)


def _q8_0(x: F64) -> NDArray[np.uint8]:
    d = f32(np.fmax.reduce(np.abs(x), axis=1) / 127)
    codes = np.clip(_whole(np.rint(f32(x * _inverse(d)[:, None]))), -127, 127)
    return _bytes(ieee_bits(d, F16), codes.astype(np.int8))


def _q5_1(x: F64) -> NDArray[np.uint8]:
    low = np.fmin.reduce(x, axis=1)
    below_zero = ((x == 0) & np.signbit(x)).any(axis=1)
    low = np.where(low == 0, np.where(below_zero, -0.0, 0.0), low)
    d = f32(f32(np.fmax.reduce(x, axis=1) - low) / 31)
    codes = np.clip(_whole(np.rint(f32(f32(x - low[:, None]) * _inverse(d)[:, None]))), 0, 31)
    high = (codes // 16 << np.arange(32)).sum(axis=1).astype(np.uint32)
    return _bytes(ieee_bits(d, F16), ieee_bits(low, F16), high, _halves(codes))


def _q4_0(x: F64) -> NDArray[np.uint8]:
    magnitude = np.abs(x)
    largest = magnitude == np.fmax.reduce(magnitude, axis=1)[:, None]
    d = f32(x[np.arange(len(x)), largest.argmax(axis=1)] / -8)
    inverse = _inverse(d)
    codes = np.minimum(_whole(np.trunc(_fused(x, inverse[:, None], 8.5))), 15)
    codes[(inverse == 0) & (d != 0) & np.isfinite(d)] = 8
    return _bytes(ieee_bits(d, F16), _halves(codes))


def _fused(a: F64, b: F64, c: float) -> F64:
    """a * b + c rounded once to f32. A float64 that lies half way between two f32 may have been rounded to it."""
    total = a * b + c
    rounded = f32(total)
    bits = np.ascontiguousarray(total).view(np.int64)
    halfway = np.isfinite(total) & (bits % 2**29 == 2**28)
    b = np.broadcast_to(b, a.shape)
    for at in zip(*np.nonzero(halfway), strict=True):
        exact = Fraction(a[at]) * Fraction(b[at]) + Fraction(c)
        if exact != Fraction(total[at]):
            beside = np.nextafter(total[at], np.inf if exact > Fraction(total[at]) else -np.inf)
            rounded[at] = f32(beside)
    return rounded


def _fp8(x: F64) -> NDArray[np.uint8]:
    code = np.where(np.isinf(x), 0x7E, np.minimum(small_code(x, E4M3), 0x7E)) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


_ENCODE: dict[str, Callable[[F64], NDArray[np.uint8]]] = {"q8_0": _q8_0, "q5_1": _q5_1, "q4_0": _q4_0, "fp8": _fp8}


def decode(name: str, raw: NDArray[np.uint8]) -> F64:
    """(blocks, bytes) to (blocks, 32), each an f32."""
    raw = raw.astype(np.int64)
    with np.errstate(all="ignore"):
        if name == "fp8":
            value = np.where(raw % 128 == 127, np.nan, small_value(raw % 128, E4M3))
            return np.where(raw >= 128, -value, value)
        d = from_f16(raw[:, :1] + 256 * raw[:, 1:2])
        if name == "q8_0":
            return f32(d * np.where(raw[:, 2:] > 127, raw[:, 2:] - 256, raw[:, 2:]))
        low_nibbles, high_nibbles = raw[:, -16:] % 16, raw[:, -16:] // 16
        codes = np.concatenate([low_nibbles, high_nibbles], axis=1)
        if name == "q4_0":
            return f32(d * (codes - 8))
        element = np.arange(32)
        codes = codes + 16 * (raw[:, 4 + element // 8] >> element % 8 & 1)
        return f32(d * codes + from_f16(raw[:, 2:3] + 256 * raw[:, 3:4]))
