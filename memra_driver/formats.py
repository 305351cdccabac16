"""K/V block formats: bytes per block, NumPy encoders and decoders to the byte, and the policy.

A block is 32 consecutive elements of one token. All multi-byte fields are little-endian and nothing
is padded, neither inside a block nor between blocks. The layouts stand as C structs in
`cuda_src/memra_formats.h`; the arithmetic here and in the kernels is the same, operation by operation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memra_driver.errors import ArrayError, ConfigError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

BLOCK = 32  # elements per block, in every format
FP8_MAX_IN = 464.0  # a finite input beyond it is farther from 448 than half a step: counted as saturated
_CHUNK = 4096  # blocks encoded at a time, so that the temporaries stay in the cache of the CPU
_F16_NAN = 0x7FFF  # the NaN that the device's f32 -> f16 conversion makes


def fma_rn(a: Any, b: Any, c: Any) -> F32:
    """`a * b + c` in f32 with one rounding (half to even), element by element, as the GPU's FMA.

    The product of two f32 is exact in f64. The f64 sum is rounded to odd, which makes the second
    rounding, to f32, harmless (53 >= 24 + 2 bits).
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        # TwoSum: the exact error of the f64 sum.
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        inexact = (error != 0) & np.isfinite(error) & ((bits & 1) == 0)
        if inexact.any():
            away = np.where((error > 0) == (total > 0), 1, -1)
            total = (bits + np.where(inexact, away, 0)).view(np.float64)
        return np.asarray(total.astype(np.float32))


def f16_bits(x: F32) -> NDArray[np.uint16]:
    """f32 -> f16, half to even, overflow to infinity; every NaN becomes 0x7FFF. Returns the bits."""
    with np.errstate(all="ignore"):
        bits = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        bits[nan] = _F16_NAN
    return bits


def bf16_bits(x: F32) -> NDArray[np.uint16]:
    """f32 -> bf16, half to even; every NaN becomes 0x7FFF. Returns the bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    out = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FFF
    return out


def _inverse(d: F32) -> F32:
    """1/d; 0 where d is 0, and where d is so small that 1/d overflows."""
    inv = np.float32(1) / d
    inv[np.isinf(inv)] = 0
    return inv


def _to_codes(scaled: F32) -> NDArray[np.int8]:
    """Rounds half to even; NaN becomes 0. The values lie within the range of the code already."""
    np.rint(scaled, out=scaled)
    nan = np.isnan(scaled)
    if nan.any():
        scaled[nan] = 0
    return scaled.astype(np.int8)


def _nibbles(codes: U8) -> U8:
    """Byte i: the low 4 bits of element i, and above them the low 4 bits of element i + 16."""
    return (codes[:, :16] & np.uint8(15)) | (codes[:, 16:] << np.uint8(4))


def _encode_q8_0(x: F32, out: U8) -> None:
    amax = np.fmax.reduce(np.abs(np.ascontiguousarray(x.T)), axis=0)
    d = amax / np.float32(127)
    out[:, 0:2] = f16_bits(d)[:, None].view(np.uint8)
    out[:, 2:34] = _to_codes(x * _inverse(d)[:, None]).view(np.uint8)


def _minimum(t: F32) -> F32:
    """Minimum over axis 0, NaN ignored, with -0 below +0 as on the GPU."""
    low = np.asarray(np.fmin.reduce(t, axis=0))
    zero = np.flatnonzero(low == 0)
    if zero.size:
        column = t[:, zero]
        low[zero] = np.where(((column == 0) & np.signbit(column)).any(axis=0), np.float32(-0.0), np.float32(0.0))
    return low


def _encode_q5_1(x: F32, out: U8) -> None:
    t = np.ascontiguousarray(x.T)
    low = _minimum(t)
    d = (np.fmax.reduce(t, axis=0) - low) / np.float32(31)
    scaled = x - low[:, None]
    scaled *= _inverse(d)[:, None]
    codes = _to_codes(scaled).view(np.uint8)
    out[:, 0:2] = f16_bits(d)[:, None].view(np.uint8)
    out[:, 2:4] = f16_bits(low)[:, None].view(np.uint8)
    out[:, 4:8] = np.packbits(codes > 15, axis=1, bitorder="little")
    out[:, 8:24] = _nibbles(codes)


def _encode_q4_0(x: F32, out: U8) -> None:
    t = np.ascontiguousarray(x.T)
    magnitude = np.abs(t)
    lane = np.argmax(magnitude == np.fmax.reduce(magnitude, axis=0), axis=0)  # the lowest one
    d = t[lane, np.arange(lane.size)] / np.float32(-8)
    inv = _inverse(d)
    scaled = fma_rn(x, inv[:, None], np.float32(8.5))
    nan = np.isnan(scaled)
    if nan.any():
        scaled[nan] = 0
        scaled[(inv == 0) & (d != 0) & np.isfinite(d)] = 8  # 1/d overflowed: every element decodes to 0
    codes = np.minimum(scaled, np.float32(15)).astype(np.uint8)
    out[:, 0:2] = f16_bits(d)[:, None].view(np.uint8)
    out[:, 2:18] = _nibbles(codes)


@functools.cache
def _fp8_values() -> F32:
    """The value of each of the 256 e4m3 codes; 0x7F and 0xFF are NaN."""
    code = np.arange(256, dtype=np.uint32)
    values = ((code & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
    values[127::128] = np.nan
    return np.where(code & 0x80, -values, values)


@functools.cache
def _fp8_codes() -> U8:
    """The e4m3 code of each f32 whose low 16 bits are zero, by its high 16 bits.

    An f32 with low bits set rounds like the one whose lowest high bit is set instead: that bit lies
    below every bit that decides, and only says "not exact".
    """
    high = np.arange(0x8000, dtype=np.uint32)
    magnitude = (high << 16).view(np.float32)
    finite = _fp8_values()[:127]
    middle = (finite[1:] + finite[:-1]) / 2
    code = np.searchsorted(middle, magnitude, side="left")
    tie = magnitude == middle[np.minimum(code, middle.size - 1)]
    code += tie & (code & 1 == 1)
    code[np.isnan(magnitude)] = 127
    negative = np.where(code == 127, 127, code | 128)
    return np.concatenate([code, negative]).astype(np.uint8)


def _encode_fp8(x: F32, out: U8) -> None:
    bits = np.ascontiguousarray(x).view(np.uint32)
    high = (bits >> 16) | (((bits & 0xFFFF) + 0xFFFF) >> 16)
    np.take(_fp8_codes(), high, out=out, mode="clip")


def _f16(raw: U8) -> F32:
    """Two bytes per block -> f32, shape (blocks, 1)."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _decode_q8_0(raw: U8) -> F32:
    return raw[:, 2:34].view(np.int8) * _f16(raw[:, 0:2])


def _split(packed: U8) -> U8:
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _decode_q5_1(raw: U8) -> F32:
    codes = _split(raw[:, 8:24]) | (np.unpackbits(raw[:, 4:8], axis=1, bitorder="little") << 4)
    # d * q is exact in f32 (11 + 5 bits), so this is the fused multiply-add of the kernel.
    return codes * _f16(raw[:, 0:2]) + _f16(raw[:, 2:4])


def _decode_q4_0(raw: U8) -> F32:
    return (_split(raw[:, 2:18]).view(np.int8) - np.int8(8)) * _f16(raw[:, 0:2])


def _decode_fp8(raw: U8) -> F32:
    return _fp8_values()[raw]


@dataclass(frozen=True)
class BlockFormat:
    """One format of 32-element blocks. `code` is `enum memra_format` and the kernels' format argument."""

    name: str
    code: int
    block_bytes: int
    _encode: Callable[[F32, U8], None] = field(repr=False, compare=False)
    _decode: Callable[[U8], F32] = field(repr=False, compare=False)

    def encode(self, x: F32) -> U8:
        """f32 [..., n] -> u8 [..., n // 32 * block_bytes], n a multiple of 32.

        Byte for byte what the kernels store, special values included. Raises ArrayError for another
        dtype or a length that is no multiple of 32.
        """
        if x.dtype != np.float32 or x.ndim == 0 or x.shape[-1] % BLOCK:
            raise ArrayError(f"{self.name}: encode takes float32 [..., n] with n a multiple of {BLOCK}, "
                             f"not {x.dtype} {list(x.shape)}")
        flat = np.ascontiguousarray(x).reshape(-1, BLOCK)
        nan = np.isnan(flat)
        if nan.any():  # fmin and fmax of a signalling NaN are NaN on some paths of NumPy; those of a quiet one never
            flat = np.where(nan, np.float32(np.nan), flat)
        out = np.empty((flat.shape[0], self.block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            for start in range(0, flat.shape[0], _CHUNK):
                self._encode(flat[start : start + _CHUNK], out[start : start + _CHUNK])
        return out.reshape(*x.shape[:-1], x.shape[-1] // BLOCK * self.block_bytes)

    def decode(self, raw: U8) -> F32:
        """u8 [..., m] -> f32 [..., m // block_bytes * 32], m a multiple of block_bytes; else ArrayError."""
        if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % self.block_bytes:
            raise ArrayError(f"{self.name}: decode takes uint8 [..., m] with m a multiple of {self.block_bytes}, "
                             f"not {raw.dtype} {list(raw.shape)}")
        with np.errstate(all="ignore"):
            values = self._decode(np.ascontiguousarray(raw).reshape(-1, self.block_bytes))
        return values.reshape(*raw.shape[:-1], raw.shape[-1] // self.block_bytes * BLOCK)


FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        BlockFormat("q8_0", 0, 34, _encode_q8_0, _decode_q8_0),
        BlockFormat("q5_1", 1, 24, _encode_q5_1, _decode_q5_1),
        BlockFormat("q4_0", 2, 18, _encode_q4_0, _decode_q4_0),
        BlockFormat("fp8", 3, 32, _encode_fp8, _decode_fp8),
    )
}
K_FORMATS = ("q8_0", "fp8")
V_FORMATS = ("q5_1", "q4_0", "fp8")


@dataclass(frozen=True)
class FormatPolicy:
    """Which formats the layers of a model get.

    k, v: the plain pair. gkv, wkv: e4m3 for K and V on Gemma's global, windowed layers.
    kv_fp8: e4m3 on every layer of any other model. Raises ConfigError for a format that K or V
    cannot have.
    """

    k: str = "q8_0"
    v: str = "q5_1"
    gkv: bool = True
    wkv: bool = True
    kv_fp8: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("k", K_FORMATS), ("v", V_FORMATS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"FormatPolicy.{name}={getattr(self, name)!r}: use one of {', '.join(allowed)}")
        for option in fields(self)[2:]:
            if not isinstance(getattr(self, option.name), bool):
                raise ConfigError(f"FormatPolicy.{option.name}={getattr(self, option.name)!r}: use True or False")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> FormatPolicy:
        """Reads MEMRA_KV_K, MEMRA_KV_V, MEMRA_GEMMA_GKV, MEMRA_GEMMA_WKV, MEMRA_DRAFT and MEMRA_KV_FP8 now.

        gkv is off if exactly "0"; wkv likewise, and where unset it is off if MEMRA_DRAFT is set, to
        whatever; kv_fp8 is on if exactly "1". Raises ConfigError for an unknown format.
        """
        env = os.environ if environ is None else environ
        k, v = env.get("MEMRA_KV_K") or "q8_0", env.get("MEMRA_KV_V") or "q5_1"
        for name, value, allowed in (("MEMRA_KV_K", k, K_FORMATS), ("MEMRA_KV_V", v, V_FORMATS)):
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: use one of {', '.join(allowed)}, or unset it")
        return cls(
            k=k,
            v=v,
            gkv=env.get("MEMRA_GEMMA_GKV") != "0",
            wkv=env.get("MEMRA_GEMMA_WKV", "0" if "MEMRA_DRAFT" in env else "1") != "0",
            kv_fp8=env.get("MEMRA_KV_FP8") == "1",
        )

    def pair(self, gemma: bool, windowed: bool) -> tuple[BlockFormat, BlockFormat]:
        """(K's format, V's format) of a layer; `windowed` counts for Gemma only."""
        fp8 = (self.wkv if windowed else self.gkv) if gemma else self.kv_fp8
        return (FORMATS["fp8"], FORMATS["fp8"]) if fp8 else (FORMATS[self.k], FORMATS[self.v])
