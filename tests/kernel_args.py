"""The arguments of kernels by name, with random inputs and poisoned outputs, for kernel_runs.run."""

from __future__ import annotations

from typing import Any

import numpy as np
from checks import Array, record

from memra_driver.formats import BLOCK, FORMATS, K_FORMATS, V_FORMATS

FORMAT_PAIRS = [(k, v) for k in K_FORMATS for v in V_FORMATS]
F32_MIN_SUBNORMAL = float(np.float32(2.0**-149))
Names = tuple[str, str]  # the formats of K and V
Dims = tuple[int, int]
Span = tuple[int, int, int]  # rows, first slot, capacity
LAYER, SLOT = 5, 11  # of every launch that takes them
ALONE: dict[str, Any] = {"seqs": None, "n_seqs": 1}  # no batch


def poisoned(size: int, dtype: Any = np.float32) -> Array:
    """Output memory that shows where nothing was written."""
    return np.full(size * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(int(np.prod(shape))).astype(np.float32)


def spread(rng: np.random.Generator, size: int) -> Array:
    """f32 of both signs and magnitudes from 1e-9 to 1e5, a tenth of them zero."""
    x = rng.standard_normal(size) * 10.0 ** rng.uniform(-9, 5, size)
    return np.where(rng.random(size) < 0.1, 0, x).astype(np.float32)


def special_blocks() -> Array:
    """Blocks of 32 at the edges of what formats can hold, one edge a row: f32 (n, 32)."""
    ramp = np.arange(32, dtype=np.float32)
    one_of = [np.where(ramp == 5, np.float32(x), ramp / 7 - 2) for x in (np.nan, np.inf, -np.inf, -0.0, 65519.0)]
    edges = [448, 448.1, 464, np.nextafter(np.float32(464), np.float32(500)), 480, 2.0**-10, 2.0**-9, 3 * 2.0**-10]
    edges += [2.0**-6, 0.0155, 1.5 * 2.0**-9, 17, 18, 19, 0.0, F32_MIN_SUBNORMAL]
    blocks = [
        *one_of,
        np.where(ramp % 3 == 0, np.float32(np.inf), -np.float32(np.inf)),
        np.full(32, np.nan),
        np.zeros(32),
        np.full(32, -0.0),
        np.where(ramp % 2 == 0, 0.0, -0.0),
        np.full(32, -2.5),
        np.full(32, 65504.0),
        np.full(32, 127 * 65504.0),
        np.full(32, 127 * 65519.0),  # f16 d just stays finite
        np.full(32, 127 * 65520.0),  # and just does not
        (ramp - 16) * np.float32(3e38 / 16),  # differences overflow
        (ramp - 16) * np.float32(1e37),
        ramp * F32_MIN_SUBNORMAL,  # 1/d overflows
        np.where(ramp == 9, np.nan, ramp * F32_MIN_SUBNORMAL),
        (ramp - 9) * np.float32(2.0**-130),
        (ramp - 9) * np.float32(1e-38),
        (ramp - 9) * np.float32(3e-8),  # f16 d rounds to zero
        (ramp - 9) * np.float32(2.0**-24),
        np.array([*edges, *(-np.array(edges, np.float32))], np.float32),
        np.where(ramp == 3, 7.0, np.where(ramp == 20, -7.0, 0.5)),  # two of the largest magnitude
        np.where(ramp == 3, -7.0, np.where(ramp == 20, 7.0, 0.5)),
        (ramp - 15.5) / 2,  # products half way between codes
        ramp,
    ]
    return np.array(blocks, np.float32)


def cache_bytes(rng: np.random.Generator, formats: tuple[str, str], dims: tuple[int, int], tokens: int) -> list[Array]:
    """K and V planes (with their 8 bytes of padding) of any bytes at all: every code, every f16."""
    return [
        rng.integers(0, 256, tokens * dim // 32 * FORMATS[name].block_bytes + 8, np.uint8)
        for name, dim in zip(formats, dims, strict=True)
    ]


def append_args(
    formats: Names, dims: Dims, k_rows: Array, v_rows: Array, slot: int, max_ctx: int, **other: Any
) -> dict[str, Any]:
    k_format, v_format = (FORMATS[name] for name in formats)
    k_tok_bytes, v_tok_bytes = dims[0] // BLOCK * k_format.block_bytes, dims[1] // BLOCK * v_format.block_bytes
    args: dict[str, Any] = {
        "k_rows": k_rows, "v_rows": v_rows, "k": poisoned(max_ctx * k_tok_bytes + 8, np.uint8),
        "v": poisoned(max_ctx * v_tok_bytes + 8, np.uint8), "len_d": np.zeros(1, np.int32), "pos_d": None,
        "slot": slot, "rows": k_rows.size // dims[0], "len": -1, "max_ctx": max_ctx,
        "kv_dim_k": dims[0], "kv_dim_v": dims[1], "k_tok_bytes": k_tok_bytes, "v_tok_bytes": v_tok_bytes,
        "k_format": k_format.code, "v_format": v_format.code, **ALONE, "health": record(), "layer": 3,
    }  # fmt: skip
    assert other.keys() <= args.keys()
    return args | other


def dequant_args(
    formats: Names, dims: Dims, planes: list[Array], start: int, rows: int, max_ctx: int, bf16: int
) -> dict[str, Any]:
    kind = np.uint16 if bf16 else np.float32
    tok_bytes = [dim // BLOCK * FORMATS[name].block_bytes for name, dim in zip(formats, dims, strict=True)]
    return {
        "k": planes[0], "v": planes[1], "start": start, "rows": rows, "max_ctx": max_ctx,
        "kv_dim_k": dims[0], "kv_dim_v": dims[1], "k_tok_bytes": tok_bytes[0], "v_tok_bytes": tok_bytes[1],
        "k_format": FORMATS[formats[0]].code, "v_format": FORMATS[formats[1]].code,
        "k_out": poisoned(rows * dims[0], kind), "v_out": poisoned(rows * dims[1], kind), "out_bf16": bf16,
        "health": record(), "layer": 2,
    }  # fmt: skip


def conv_args(rng: np.random.Generator, rows: int, conv_dim: int, d_conv: int) -> dict[str, Any]:
    return {
        "x": normal(rng, rows, conv_dim), "w": normal(rng, conv_dim, d_conv),
        "conv_state": normal(rng, conv_dim, d_conv - 1), "out": poisoned(rows * conv_dim), "tape": None, "pos_d": None,
        "slot": SLOT, "rows": rows, "conv_dim": conv_dim, "d_conv": d_conv, **ALONE, "health": record(), "layer": LAYER,
    }  # fmt: skip


def rebuild_args(args: dict[str, Any], accept: int, **other: Any) -> dict[str, Any]:
    return {
        "x": args["x"], "ring_old": args["conv_state"], "conv_state": poisoned(args["conv_state"].size),
        "accept_d": None, "accept": accept, "rows": args["rows"], "conv_dim": args["conv_dim"],
        "d_conv": args["d_conv"], "health": record(), "layer": LAYER,
    } | other  # fmt: skip


def prep_args(rng: np.random.Generator, rows: int, num_k: int, num_v: int, state_size: int) -> dict[str, Any]:
    values, gates = rows * num_v * state_size, rows * num_v
    return {
        "conv_out": normal(rng, rows, (2 * num_k + num_v) * state_size), "alpha": 5 * normal(rng, gates),
        "beta_raw": 5 * normal(rng, gates), "dt_bias": normal(rng, num_v), "a": -np.exp(normal(rng, num_v)),
        "q": poisoned(values), "k": poisoned(values), "v": poisoned(values), "g_log": poisoned(gates),
        "beta": poisoned(gates), "pos_d": None, "slot": SLOT, "rows": rows, "num_k": num_k, "num_v": num_v,
        "state_size": state_size, "eps": 1e-6, **ALONE, "health": record(), "layer": LAYER,
    }  # fmt: skip


def scan_args(rng: np.random.Generator, rows: int, num_v: int, state_size: int) -> dict[str, Any]:
    values, state = rows * num_v * state_size, num_v * state_size * state_size
    unit = {name: normal(rng, values) / np.float32(np.sqrt(state_size)) for name in "qk"}
    return unit | {
        "v": normal(rng, values), "g_log": -np.abs(normal(rng, rows, num_v)),
        "beta": rng.random(rows * num_v, np.float32), "state_in": normal(rng, state), "state_out": poisoned(state),
        "out": poisoned(values), "tape": None, "accept_d": None, "rows": rows, "num_v": num_v, "state_size": state_size,
        "scale": state_size**-0.5, **ALONE, "health": record(), "layer": LAYER,
    }  # fmt: skip


def counter_args(rng: np.random.Generator, pos: int, accept: int, rows: int, **other: Any) -> dict[str, Any]:
    """commit_counters for a random mask."""
    low, high = rng.integers(-(2**63), 2**63, 2).tolist()
    return {
        "counters": rng.integers(-9, 9, 128).astype(np.int32), "pos_d": np.array([pos], np.int32), "accept_d": None,
        "accept": accept, "rows": rows, "mask_lo": low, "mask_hi": high, "move_pos": 1, "health": record(),
        "layer": LAYER,
    } | other  # fmt: skip


def rows_args(rng: np.random.Generator, rows: int, columns: int, src_stride: int, dst_stride: int) -> dict[str, Any]:
    """copy_rows between arrays that end with the last column of the last row."""
    src, dst = ((rows - 1) * stride + columns for stride in (src_stride, dst_stride))
    return {
        "src": normal(rng, src), "dst": poisoned(dst), "src_stride": src_stride, "dst_stride": dst_stride,
        "rows": rows, "columns": columns, "health": None, "layer": LAYER,
    }  # fmt: skip


def row_of(args: dict[str, Any], row: int, *names: str) -> dict[str, Any]:
    """The arguments of a launch for that row alone; the named arrays are token-major."""
    rows = args["rows"]
    parts = {name: args[name].reshape(rows, -1)[row].copy() for name in names}
    slot = {"slot": args["slot"] + row} if "slot" in args else {}
    return args | parts | slot | {"rows": 1}
