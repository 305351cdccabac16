"""The arguments of every kernel by name, over fresh inputs and poisoned outputs: for `check`, and for the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memra_driver.formats import FORMATS, K_FORMATS, V_FORMATS
from memra_driver.kernels import recur_split
from memra_driver.layout import HEALTH_BYTES
from memra_driver.plan import ATTEND_FOLDS, ATTEND_GROUPS, attend_part_bytes

Array = NDArray[Any]
Args = dict[str, Any]
Pair = tuple[str, str]  # the formats of K and V
Dims = tuple[int, int]  # elements of a row of K and of V, or of one head
Rng = np.random.Generator

PAIRS = [(k, v) for k in K_FORMATS for v in V_FORMATS]
LAYER, SLOT = 5, 11  # of every launch that takes them
ALONE: Args = {"seqs": None, "n_seqs": 1}  # no batch
ONE_LAYER: Args = {"n_layers": 1, "x_apart": 0, "ring_apart": 0}


# Inputs.


def poison(n: int, kind: Any = np.float32) -> Array:
    """Memory that shows where nothing was written."""
    return np.full(n * np.dtype(kind).itemsize, 0xA5, np.uint8).view(kind)


def normal(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(int(np.prod(shape)), np.float32)


def spread(rng: Rng, n: int) -> Array:
    """Both signs, magnitudes from 1e-9 to 1e5, a tenth of them zero."""
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-9, 5, n)
    return np.where(rng.random(n) < 0.1, 0, x).astype(np.float32)


def record() -> Array:
    return np.zeros(HEALTH_BYTES, np.uint8)


def i32(value: int) -> Array:
    return np.array([value], np.int32)


def spoil(rng: Rng, x: Array, n: int = 7) -> Array:
    """x with n values that are not finite."""
    x[rng.integers(0, x.size, n)] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), n)
    return x


def edges() -> Array:
    """Blocks at the edges of what the formats hold, one a row: f32 (blocks, 32). Six hold what is not finite."""
    ramp = np.arange(32, dtype=np.float32)
    tiny = np.float32(2.0**-149)
    one_of = [np.where(ramp == 5, np.float32(x), ramp / 7 - 2) for x in (np.nan, np.inf, -np.inf, -0.0, 65519.0)]
    beyond = np.nextafter(np.float32(464), np.float32(500))  # what fp8 counts as saturated
    fp8 = [448, 448.1, 464, beyond, 480, 2.0**-10, 2.0**-9, 3 * 2.0**-10, 2.0**-6, 0.0155, 1.5 * 2.0**-9]
    fp8 += [17, 18, 19, 0.0, tiny]
    rows = [
        *one_of,
        *(np.where(ramp == 7, np.float32(x), -ramp) for x in (448, 464, beyond, -464, -beyond)),
        np.where(ramp % 3 == 0, np.float32(np.inf), -np.float32(np.inf)),
        # the last but one of these is where the f16 of d just stays finite
        *(np.full(32, x) for x in (np.nan, 0.0, -0.0, -2.5, 65504.0, 127 * 65504.0, 127 * 65519.0, 127 * 65520.0)),
        np.where(ramp % 2 == 0, 0.0, -0.0),
        np.where(ramp % 2 == 0, -0.0, 0.0),
        (ramp - 16) * np.float32(3e38 / 16),  # differences overflow
        (ramp - 16) * np.float32(1e37),
        ramp * tiny,  # 1/d overflows
        np.where(ramp == 9, np.nan, ramp * tiny),
        (ramp - 9) * np.float32(2.0**-130),
        (ramp - 9) * np.float32(1e-38),
        (ramp - 9) * np.float32(3e-8),  # the f16 of d becomes zero
        (ramp - 9) * np.float32(2.0**-24),
        np.array([*fp8, *(-np.array(fp8))], np.float32),
        np.where(ramp == 3, 7.0, np.where(ramp == 20, -7.0, 0.5)),  # two of the largest magnitude
        np.where(ramp == 3, -7.0, np.where(ramp == 20, 7.0, 0.5)),
        (ramp - 15.5) / 2,  # products half way between codes
        ramp,
    ]
    return np.array(rows, np.float32)


# K/V.


def planes(pair: Pair, dims: Dims, max_ctx: int) -> Args:
    """K and V of `max_ctx` poisoned tokens with their padding, and what says how they are laid out."""
    args: Args = {}
    for side, name, dim in zip("kv", pair, dims, strict=True):
        token = dim // 32 * FORMATS[name].block_bytes
        args |= {
            side: poison(max_ctx * token + 8, np.uint8), f"{side}_tok_bytes": token,
            f"{side}_format": FORMATS[name].code,
        }  # fmt: skip
    return args | {"max_ctx": max_ctx}


def any_planes(rng: Rng, pair: Pair, dims: Dims, max_ctx: int) -> Args:
    """`planes` of any bytes at all: every code, every f16."""
    args = planes(pair, dims, max_ctx)
    for side in "kv":
        args[side][:-8] = rng.integers(0, 256, args[side].size - 8, np.uint8)
    return args


def append_args(pair: Pair, dims: Dims, x: Array, y: Array, slot: int, max_ctx: int, **other: Any) -> Args:
    return planes(pair, dims, max_ctx) | {
        "k_rows": x, "v_rows": y, "len_d": i32(2), "pos_d": None, "slot": slot, "rows": x.size // dims[0], "len": -1,
        "kv_dim_k": dims[0], "kv_dim_v": dims[1], **ALONE, "health": record(), "layer": LAYER,
    } | other  # fmt: skip


def dequant_args(rng: Rng, pair: Pair, dims: Dims, start: int, rows: int, max_ctx: int, bf16: int) -> Args:
    """Outputs are three elements longer than what is asked for."""
    kind = np.uint16 if bf16 else np.float32
    return any_planes(rng, pair, dims, max_ctx) | {
        "start": start, "rows": rows, "kv_dim_k": dims[0], "kv_dim_v": dims[1], "out_bf16": bf16,
        "k_out": poison(rows * dims[0] + 3, kind), "v_out": poison(rows * dims[1] + 3, kind), "health": record(),
        "layer": LAYER,
    }  # fmt: skip


def attend_args(
    pair: Pair, q: Array, k: Array, v: Array, pos: int, *, heads: tuple[int, int], dims: Dims, window: int
) -> Args:
    """q (rows, query heads, dim) at `pos` and behind it; k, v as they lie in planes; heads: query heads, K/V heads."""
    rows = q.size // (heads[0] * dims[0])
    layout = planes(pair, (heads[1] * dims[0], heads[1] * dims[1]), 0)
    return layout | {
        "q": q.reshape(-1), "k": k.reshape(-1), "v": v.reshape(-1), "pos_d": None, "slot": pos, "rows": rows,
        "max_ctx": k.size // layout["k_tok_bytes"], "n_head": heads[0], "n_head_kv": heads[1], "head_dim_k": dims[0],
        "head_dim_v": dims[1], "scale": dims[0] ** -0.5, "window": window,
        "part": partial_sums(rows, heads[0], dims[1]), "pieces": ATTEND_GROUPS, **ALONE, "health": record(),
        "layer": LAYER,
    }  # fmt: skip


def partial_sums(
    rows: int, n_head: int, head_dim_v: int, fill: int = 0xFF, pieces: int = ATTEND_GROUPS
) -> Array:
    """The scratch of attend, of which nobody has written any: every byte is `fill`, NaNs by default."""
    return np.full(attend_part_bytes(rows, n_head, head_dim_v, pieces), fill, np.uint8).view(np.float32)


def in_folds(args: Args) -> Args:
    """`attend_args` of a sequence as a batch of many has it."""
    part = partial_sums(args["rows"], args["n_head"], args["head_dim_v"], pieces=ATTEND_FOLDS)
    return args | {"part": part, "pieces": ATTEND_FOLDS}


# Recurrent layers.


def conv_args(rng: Rng, rows: int, channels: int, taps: int, **other: Any) -> Args:
    return {
        "x": normal(rng, rows, channels), "w": normal(rng, channels, taps),
        "conv_state": normal(rng, channels, taps - 1), "out": poison(rows * channels), "tape": None, "pos_d": None,
        "slot": SLOT, "rows": rows, "conv_dim": channels, "d_conv": taps, **ALONE, "health": record(), "layer": LAYER,
    } | other  # fmt: skip


def rebuild_args(conv: Args, accept: int, **other: Any) -> Args:
    """Of the ring and the rows that conv_update had."""
    return {
        "x": conv["x"], "ring_old": conv["conv_state"], "conv_state": poison(conv["conv_state"].size),
        "accept_d": None, "accept": accept, "rows": conv["rows"], "conv_dim": conv["conv_dim"],
        "d_conv": conv["d_conv"], **ONE_LAYER, "health": record(), "layer": LAYER,
    } | other  # fmt: skip


def several_rebuild_args(rng: Rng, accept: int, **other: Any) -> Args:
    """Three layers of 5 rows, 130 channels and 4 taps, with a gap behind each."""
    x_apart, ring_apart = 5 * 130 + 7, 3 * 130 + 11
    ring = normal(rng, 3 * ring_apart)
    made = rebuild_args(conv_args(rng, 5, 130, 4), accept)
    apart = {"n_layers": 3, "x_apart": x_apart, "ring_apart": ring_apart}
    return made | {"x": normal(rng, 3 * x_apart), "ring_old": ring, "conv_state": ring} | apart | other


def prep_args(rng: Rng, rows: int, keys: int, values: int, size: int, **other: Any) -> Args:
    vector, gates = rows * values * size, rows * values
    return {
        "conv_out": normal(rng, rows, (2 * keys + values) * size), "alpha": 5 * normal(rng, gates),
        "beta_raw": 5 * normal(rng, gates), "dt_bias": 5 * normal(rng, values), "a": -np.exp(normal(rng, values)),
        "q": poison(vector), "k": poison(vector), "v": poison(vector), "g_log": poison(gates), "beta": poison(gates),
        "pos_d": None, "slot": SLOT, "rows": rows, "num_k": keys, "num_v": values, "state_size": size, "eps": 1e-6,
        **ALONE, "health": record(), "layer": LAYER,
    } | other  # fmt: skip


def scan_args(rng: Rng, rows: int, heads: int, size: int, **other: Any) -> Args:
    vector = rows * heads * size
    unit = {name: normal(rng, vector) / np.float32(size**0.5) for name in "qk"}
    return unit | {
        "v": normal(rng, vector), "g_log": -np.abs(normal(rng, rows, heads)),
        "beta": rng.random(rows * heads, np.float32), "state_in": normal(rng, heads, size, size),
        "state_out": poison(heads * size * size), "out": poison(vector), "tape": None, "accept_d": None, "rows": rows,
        "num_v": heads, "state_size": size, "scale": size**-0.5, **ALONE, "health": record(), "layer": LAYER,
    } | other  # fmt: skip


def recur_args(
    rng: Rng, rows: int, keys: int, values: int, size: int, taps: int, columns: int = 0, **other: Any
) -> Args:
    """columns 0: as `recur_split` has it for one sequence."""
    channels, gates = (2 * keys + values) * size, rows * values
    split = (columns, -(-(-(-values // keys) * size) // columns)) if columns else recur_split(1, keys, values, size)
    return {
        "x": normal(rng, rows, channels), "w": normal(rng, channels, taps) / 2, "alpha": 5 * normal(rng, gates),
        "beta_raw": 5 * normal(rng, gates), "dt_bias": 5 * normal(rng, values), "a": -np.exp(normal(rng, values)),
        "conv_state": normal(rng, channels, taps - 1), "state_in": normal(rng, values, size, size),
        "state_out": poison(values * size * size), "out": poison(gates * size), "tape": None, "pos_d": None,
        "slot": SLOT, "rows": rows, "d_conv": taps, "num_k": keys, "num_v": values, "state_size": size,
        "columns": split[0], "blocks": split[1], "eps": 1e-6, "scale": size**-0.5, **ALONE, "health": record(),
        "layer": LAYER,
    } | other  # fmt: skip


# Counters and copies.


def commit_args(rng: Rng, pos: int, accept: int, rows: int, **other: Any) -> Args:
    """For a random mask."""
    low, high = rng.integers(-(2**63), 2**63, 2).tolist()
    return {
        "counters": rng.integers(-9, 9, 128).astype(np.int32), "pos_d": i32(pos), "accept_d": None, "accept": accept,
        "rows": rows, "mask_lo": low, "mask_hi": high, "move_pos": 1, "health": record(), "layer": LAYER,
    } | other  # fmt: skip


def rows_args(rng: Rng, rows: int, columns: int, src_stride: int, dst_stride: int) -> Args:
    """copy_rows between arrays that end with the last column of the last row."""
    src, dst = ((rows - 1) * stride + columns for stride in (src_stride, dst_stride))
    return {
        "src": normal(rng, src), "dst": poison(dst), "src_stride": src_stride, "dst_stride": dst_stride,
        "rows": rows, "columns": columns, "health": None, "layer": LAYER,
    }  # fmt: skip
