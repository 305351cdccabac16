"""The NumPy twin of attend: partial sums by groups of key tiles, and their combination.

The order is that of the kernels: a tile is `attend_tile` neighbouring keys, tile j belongs to group j mod 132; a group
takes its tiles in ascending order; groups are folded in ascending order, eleven at a time, then the twelve
results. A launch that asks for folds has them from attend already. Each column (one query head of one row) is worked
on by itself over tiles of fixed shape, so neither the number of rows nor the live length changes a bit. Weights and
decoded V are rounded to f16 as in the kernels; sums are NumPy's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from memra_driver.formats import BLOCK
from memra_driver.health import Fault
from memra_driver.kernels import attend_tile
from memra_driver.plan import ATTEND_FOLDS, ATTEND_GROUPS, ATTEND_TAIL
from memra_driver.reference_common import BY_CODE, F32, I32, U8, U64, batched, k_bytes, report, v_bytes

GROUPS, TAIL = ATTEND_GROUPS, ATTEND_TAIL
FOLD = ATTEND_GROUPS // ATTEND_FOLDS
LOG2E = np.float32(1.4426950408889634)
MINUS_INFINITY = np.float32(-np.inf)


def first_key(last: int, window: int) -> int:
    """The first key that a row at position `last` sees; window 0: all."""
    return max(0, last - window + 1) if window > 0 else 0


def groups_of(last: int, window: int, tile_keys: int) -> list[int]:
    """The groups that hold a key for a row at position `last`, ascending."""
    first = first_key(last, window) // tile_keys
    tiles = last // tile_keys - first + 1
    return [group for group in range(GROUPS) if (group - first) % GROUPS < tiles]


@batched(("q", "part"), k=k_bytes, v=v_bytes)
def attend(
    q: F32, k: U8, v: U8, pos_d: I32 | None, slot: int, rows: int, max_ctx: int, n_head: int, n_head_kv: int,
    head_dim_k: int, head_dim_v: int, k_tok_bytes: int, v_tok_bytes: int, k_format: int, v_format: int, scale: float,
    window: int, part: F32, pieces: int, seqs: U64 | None, n_seqs: int, health: U8 | None, layer: int,
) -> None:  # fmt: skip
    """Partial sums (rows, n_head, pieces, head_dim_v + TAIL): weighted V, maximum (base 2), weight, of each piece."""
    pos = slot if pos_d is None else int(pos_d[0])
    if pos < 0 or pos + rows > max_ctx:
        report(health, Fault.SLOT_RANGE, layer, pos, 1)
        return
    gqa, tile_keys = n_head // n_head_kv, attend_tile(n_head_kv)
    queries = q[: rows * n_head * head_dim_k].reshape(rows, n_head_kv, gqa, head_dim_k)
    left = _sums(part, head_dim_v, rows, n_head_kv, gqa, pieces)
    sums = left if pieces == GROUPS else np.empty((rows, n_head_kv, gqa, GROUPS, head_dim_v + 2), np.float32)
    _report_queries(health, layer, pos, queries.reshape(rows, n_head, head_dim_k))
    factor = np.float32(scale) * LOG2E
    for row in range(rows):
        for group in groups_of(pos + row, window, tile_keys):
            sums[row, :, :, group, :head_dim_v] = 0
            sums[row, :, :, group, head_dim_v] = MINUS_INFINITY
            sums[row, :, :, group, head_dim_v + 1] = 0
    first = first_key(pos, window) // tile_keys
    with np.errstate(all="ignore"):
        for tile in range(first, (pos + rows - 1) // tile_keys + 1):
            at = np.arange(tile * tile_keys, (tile + 1) * tile_keys)
            keys = _decoded(k, k_format, k_tok_bytes, at, pos + rows, n_head_kv, head_dim_k)
            values = _decoded(v, v_format, v_tok_bytes, at, pos + rows, n_head_kv, head_dim_v)
            values = values.astype(np.float16).astype(np.float32)
            for row in range(rows):
                seen = (at <= pos + row) & (at >= first_key(pos + row, window))
                if seen.any():
                    _add_tile(sums[row, :, :, tile % GROUPS], queries[row], keys, values, seen, factor)
        for row in range(rows if pieces != GROUPS else 0):
            for fold, folded in _folds(sums[row].reshape(n_head, GROUPS, -1), groups_of(pos + row, window, tile_keys)):
                left[row, :, :, fold] = folded.reshape(n_head_kv, gqa, -1)


def _sums(part: F32, dim: int, *shape: int) -> F32:
    """The partial sums (shape, dim + 2) that lie in part."""
    used = part[: int(np.prod(shape)) * (dim + TAIL)]
    return used.reshape(*shape, dim + TAIL)[..., : dim + 2]


def _folds(sums: F32, used: list[int]) -> Iterator[tuple[int, F32]]:
    """The folds of the groups that are used, ascending, with their sums; sums (n_head, GROUPS, ..)."""
    for fold, groups in groupby(used, lambda group: group // FOLD):
        yield fold, functools.reduce(_fold, (sums[:, group] for group in groups))


def _add_tile(
    sums: F32, queries: F32, keys: F32, values: F32, seen: NDArray[np.bool_], factor: np.float32
) -> None:
    """Adds one tile to the sums (n_head_kv, gqa, head_dim_v + 2) of its group."""
    dim = values.shape[2]
    scaled = queries * factor  # first, so that no product is beyond an f32 where the score is not
    score = (keys[:, :, None, :] * scaled).sum(axis=3)  # (tile_keys, n_head_kv, gqa)
    score = np.where(seen[:, None, None], score, MINUS_INFINITY)
    old = sums[:, :, dim].copy()
    most = np.fmax(old, np.fmax.reduce(score, axis=0))
    base = np.where(most == MINUS_INFINITY, np.float32(0), most)
    worth = np.exp2(old - base)
    weight = np.exp2(score - base).astype(np.float16).astype(np.float32)
    visible = np.where(seen[:, None, None], values, np.float32(0))
    sums[:, :, :dim] *= worth[..., None]
    sums[:, :, :dim] += (weight[..., None] * visible[:, :, None, :]).sum(axis=0)
    sums[:, :, dim] = most
    sums[:, :, dim + 1] = sums[:, :, dim + 1] * worth + weight.sum(axis=0)


def _decoded(
    plane: U8, code: int, tok_bytes: int, at: NDArray[np.int_], stop: int, heads: int, dim: int
) -> F32:
    """The rows `at` of one tile as f32 (tile_keys, heads, dim); those at and above `stop` are 0 and are not read."""
    fmt = BY_CODE[code]
    out = np.zeros((at.size, heads, dim), np.float32)
    start, stop = int(at[0]), min(int(at[-1]) + 1, stop)
    tokens = plane[start * tok_bytes : stop * tok_bytes].reshape(stop - start, tok_bytes)
    out[: stop - start] = fmt.decode(tokens[:, : heads * dim // BLOCK * fmt.block_bytes]).reshape(-1, heads, dim)
    return out


def _report_queries(health: U8 | None, layer: int, pos: int, queries: F32) -> None:
    """One fault per head and row with a NaN or an infinity."""
    bad = np.asarray(~np.isfinite(queries).all(axis=2))
    rows = np.flatnonzero(bad.any(axis=1))
    if rows.size:
        report(health, Fault.NONFINITE, layer, pos + int(rows[0]), int(bad.sum()))


@batched(("part", "out"))
def attend_combine(
    part: F32, out: F32, pos_d: I32 | None, slot: int, rows: int, max_ctx: int, n_head: int, n_head_kv: int,
    head_dim_v: int, window: int, pieces: int, seqs: U64 | None, n_seqs: int, health: U8 | None, layer: int,
) -> None:  # fmt: skip
    """out (rows, n_head, head_dim_v) from the partial sums of attend."""
    pos = slot if pos_d is None else int(pos_d[0])
    if pos < 0 or pos + rows > max_ctx:
        return
    sums = _sums(part, head_dim_v, rows, n_head, pieces)
    result = out[: rows * n_head * head_dim_v].reshape(rows, n_head, head_dim_v)
    with np.errstate(all="ignore"):
        for row in range(rows):
            used = groups_of(pos + row, window, attend_tile(n_head_kv))
            if pieces == GROUPS:
                folds = [folded for _, folded in _folds(sums[row], used)]
            else:
                folds = [sums[row, :, fold] for fold in sorted({group // FOLD for group in used})]
            total = functools.reduce(_fold, folds)  # a row sees at least itself
            result[row] = total[:, :head_dim_v] / total[:, head_dim_v + 1 :]


def _fold(old: F32, new: F32) -> F32:
    """Two sums (n_head, head_dim_v + 2) as one."""
    most = np.fmax(old[:, -2], new[:, -2])
    base = np.where(most == MINUS_INFINITY, np.float32(0), most)
    folded = old * np.exp2(old[:, -2] - base)[:, None] + new * np.exp2(new[:, -2] - base)[:, None]
    folded[:, -2] = most
    return folded

