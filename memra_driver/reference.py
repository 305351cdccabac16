"""The NumPy twin of every kernel: the oracle of the tests, and what HostDev runs.

A function has the name of its kernel and the parameters of the kernel table, in order. Arrays are
flat: uint8, int32, float32; `k_out`, `v_out` float32 or, for bf16, uint16; `health` uint8[88];
`pos_d`, `len_d`, `accept_d` int32[1]; copy_many's `table` uint64 [dst, src, bytes] * n of host
addresses. Where the kernel takes a null pointer, None stands. Outputs are written in place.

Every operation works element by element, so T rows in one call give the bits of T calls. Sums
follow the warp: a lane adds up its elements in ascending order, then the lanes pair up 16, 8, 4, 2
and 1 apart. Quantised bytes, rings and counters equal those of the GPU; convolution, prep and scan
round the product and the sum of a fused multiply-add apart, and so agree within a tolerance only.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memra_driver.formats import BLOCK, FP8_MAX_IN, BlockFormat, bf16_bits
from memra_driver.health import Fault
from memra_driver.memory import HostMemory
from memra_driver.reference_common import BY_CODE, F32, FIELDS, I32, U8, U64, Mask, batched, k_bytes, report, v_bytes

_ONE = np.float32(1)
_SCAN_ELEMENTS = 1 << 17  # state elements that gdn_scan works on at a time: they stay in the cache of the CPU


def _report_groups(health: U8 | None, kind: Fault, layer: int, slot: int, bad: Mask) -> None:
    """Reports the set elements of `bad` (rows, groups); row r stands at position slot + r."""
    rows = np.flatnonzero(bad.any(axis=1))
    if rows.size:
        report(health, kind, layer, slot + int(rows[0]), int(bad.sum()))


def _nonfinite(health: U8 | None, layer: int, slot: int, x: F32) -> None:
    """Reports runs of up to 32 neighbours along the last axis of x (rows, n) with a NaN or an infinity."""
    if health is None or np.isfinite(x).all():
        return
    bad = ~np.isfinite(x)
    starts = np.arange(0, x.shape[1], BLOCK)
    _report_groups(health, Fault.NONFINITE, layer, slot, np.logical_or.reduceat(bad, starts, axis=1))


def _slot(pos_d: I32 | None, slot: int) -> int:
    return slot if pos_d is None else int(pos_d[0])


def _append_faults(health: U8 | None, layer: int, slot: int, fmt: BlockFormat, x: F32, stored: U8) -> None:
    if health is None:
        return
    _nonfinite(health, layer, slot, x)
    blocks = x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    if fmt.name == "fp8":
        beyond: Mask = np.logical_or.reduce((np.abs(blocks) > FP8_MAX_IN) & np.isfinite(blocks), axis=2)
        _report_groups(health, Fault.FP8_SATURATED, layer, slot, beyond)
        return
    n_half = 2 if fmt.name == "q5_1" else 1  # f16 d, and m
    halves = stored.reshape(*blocks.shape[:2], fmt.block_bytes)[:, :, : 2 * n_half].copy().view(np.uint16)
    infinite = ((halves & 0x7FFF) == 0x7C00).any(axis=2)
    if infinite.any():
        infinite &= np.isfinite(blocks).all(axis=2)
        _report_groups(health, Fault.SCALE_OVERFLOW, layer, slot, infinite)


@batched(("k_rows", "v_rows"), k=k_bytes, v=v_bytes, len_d=lambda a: 1)
def append_kv(
    k_rows: F32, v_rows: F32, k: U8, v: U8, len_d: I32, pos_d: I32 | None, slot: int, rows: int, len: int, max_ctx: int,
    kv_dim_k: int, kv_dim_v: int, k_tok_bytes: int, v_tok_bytes: int, k_format: int, v_format: int,
    seqs: U64 | None, n_seqs: int, health: U8 | None, layer: int,
) -> None:
    """Quantises rows into slots slot .. slot+rows-1 and sets len_d: `len`, or for -1 max(len_d, slot + rows)."""
    slot = _slot(pos_d, slot)
    if slot < 0 or slot + rows > max_ctx:
        report(health, Fault.SLOT_RANGE, layer, slot, 1)
        return
    for source, cache, dim, tok_bytes, code in (
        (k_rows, k, kv_dim_k, k_tok_bytes, k_format),
        (v_rows, v, kv_dim_v, v_tok_bytes, v_format),
    ):
        fmt = BY_CODE[code]
        x = source[: rows * dim].reshape(rows, dim)
        stored = fmt.encode(x)
        cache[slot * tok_bytes : (slot + rows) * tok_bytes].reshape(rows, tok_bytes)[:, : stored.shape[1]] = stored
        _append_faults(health, layer, slot, fmt, x, stored)
    len_d[0] = len if len >= 0 else max(int(len_d[0]), slot + rows)


def dequant_kv(
    k: U8, v: U8, start: int, rows: int, max_ctx: int, kv_dim_k: int, kv_dim_v: int, k_tok_bytes: int, v_tok_bytes: int,
    k_format: int, v_format: int, k_out: NDArray[Any], v_out: NDArray[Any], out_bf16: int,
    health: U8 | None, layer: int,
) -> None:
    """Decodes rows start .. start+rows-1 to f32, or to bf16 (its bits as uint16)."""
    if start < 0 or start + rows > max_ctx:
        report(health, Fault.SLOT_RANGE, layer, start, 1)
        return
    for cache, out, dim, tok_bytes, code in (
        (k, k_out, kv_dim_k, k_tok_bytes, k_format),
        (v, v_out, kv_dim_v, v_tok_bytes, v_format),
    ):
        fmt = BY_CODE[code]
        tokens = cache[start * tok_bytes : (start + rows) * tok_bytes].reshape(rows, tok_bytes)
        values = fmt.decode(tokens[:, : dim // BLOCK * fmt.block_bytes]).reshape(-1)
        out[: rows * dim] = bf16_bits(values) if out_bf16 else values


@batched(("x", "out"), conv_state=lambda a: a["conv_dim"] * (a["d_conv"] - 1))
def conv_update(
    x: F32, w: F32, conv_state: F32, out: F32, tape: F32 | None, pos_d: I32 | None, slot: int, rows: int, conv_dim: int,
    d_conv: int, seqs: U64 | None, n_seqs: int, health: U8 | None, layer: int,
) -> None:
    """out = SiLU(causal depthwise convolution of the ring and x); the ring then holds the last d_conv - 1 inputs.

    With a tape, x is copied there and the ring stays.
    """
    x = x[: rows * conv_dim].reshape(rows, conv_dim)
    ring = conv_state[: conv_dim * (d_conv - 1)].reshape(conv_dim, d_conv - 1)
    taps = np.ascontiguousarray(w[: conv_dim * d_conv].reshape(conv_dim, d_conv).T)
    history = np.concatenate([ring.T, x])
    total = np.zeros((rows, conv_dim), np.float32)
    with np.errstate(all="ignore"):
        for j in range(d_conv):
            total += history[j : j + rows] * taps[j]
        np.divide(total, _ONE + np.exp(-total), out=out[: rows * conv_dim].reshape(rows, conv_dim))
    if tape is None:
        ring[:] = history[rows:].T
    else:
        tape[: x.size] = x.reshape(-1)
    _nonfinite(health, layer, _slot(pos_d, slot), x)


def conv_ring_rebuild(
    x: F32, ring_old: F32, conv_state: F32, accept_d: I32 | None, accept: int, rows: int, conv_dim: int, d_conv: int,
    n_layers: int, x_apart: int, ring_apart: int, health: U8 | None, layer: int,
) -> None:
    """conv_state = the ring after the first `accept` rows of x on top of ring_old (may be conv_state itself).

    Of n_layers at once: x and the rings of the next begin x_apart and ring_apart elements further.
    """
    accept = accept if accept_d is None else int(accept_d[0])
    if accept < 0 or accept > rows:
        report(health, Fault.BAD_ACCEPT, layer, 0, n_layers)
        return
    shape = (conv_dim, d_conv - 1)
    size = shape[0] * shape[1]
    for i in range(n_layers):
        ring, inputs = slice(i * ring_apart, i * ring_apart + size), i * x_apart
        taken = x[inputs : inputs + accept * conv_dim].reshape(accept, conv_dim)
        history = np.concatenate([ring_old[ring].reshape(shape).T, taken])
        conv_state[ring].reshape(shape)[:] = history[accept:].T


def _lane_sum(products: F32) -> F32:
    """Sums (..., n) to (..., 1) in the order of a warp, n = 32 * 2^i. Overwrites `products`."""
    lanes = products[..., :32]
    for start in range(32, products.shape[-1], 32):
        lanes += products[..., start : start + 32]
    for half in (16, 8, 4, 2, 1):
        lanes[..., :half] += lanes[..., half : 2 * half]
    return lanes[..., :1]


@batched(("conv_out", "alpha", "beta_raw", "q", "k", "v", "g_log", "beta"))
def gdn_prep(
    conv_out: F32, alpha: F32, beta_raw: F32, dt_bias: F32, a: F32, q: F32, k: F32, v: F32, g_log: F32, beta: F32,
    pos_d: I32 | None, slot: int, rows: int, num_k: int, num_v: int, state_size: int, eps: float,
    seqs: U64 | None, n_seqs: int, health: U8 | None, layer: int,
) -> None:
    """Splits conv_out into q, k (scaled to length 1; value head h takes key head h mod num_k) and v; makes the gates.

    beta = 1 / (1 + exp(-beta_raw)); g_log = a * softplus(alpha + dt_bias).
    """
    slot = _slot(pos_d, slot)
    n_key, n_used = num_k * state_size, min(num_k, num_v) * state_size
    n_mixed = 2 * n_key + num_v * state_size
    mixed = conv_out[: rows * n_mixed].reshape(rows, n_mixed)
    key_head = np.arange(num_v) % num_k
    gates = rows * num_v
    with np.errstate(all="ignore"):
        for source, out in ((mixed[:, :n_key], q), (mixed[:, n_key : 2 * n_key], k)):
            heads = source.reshape(rows, num_k, state_size)
            scale = _ONE / np.sqrt(_lane_sum(heads * heads) + np.float32(eps))
            np.take(heads * scale, key_head, axis=1, out=out[: gates * state_size].reshape(rows, num_v, state_size))
            _nonfinite(health, layer, slot, source[:, :n_used])
        v[: gates * state_size].reshape(rows, num_v * state_size)[:] = mixed[:, 2 * n_key :]
        _nonfinite(health, layer, slot, mixed[:, 2 * n_key :])
        step = alpha[:gates].reshape(rows, num_v) + dt_bias[:num_v]
        softplus = np.where(step > 20, step, np.log1p(np.exp(step)))
        g_log[:gates].reshape(rows, num_v)[:] = a[:num_v] * softplus
        beta[:gates] = _ONE / (_ONE + np.exp(-beta_raw[:gates]))
    if health is not None:
        weights = np.isfinite(dt_bias[:num_v]) & np.isfinite(a[:num_v])
        for finite in (np.isfinite(alpha[:gates]).reshape(rows, num_v) & weights, np.isfinite(beta_raw[:gates])):
            _report_groups(health, Fault.NONFINITE, layer, slot, ~finite.reshape(rows, num_v))


@batched(("q", "k", "v", "g_log", "beta", "out"), ssm_state=lambda a: a["num_v"] * a["state_size"] ** 2)
def gdn_scan(
    q: F32, k: F32, v: F32, g_log: F32, beta: F32, state_in: F32, state_out: F32, out: F32 | None, tape: F32 | None,
    accept_d: I32 | None, rows: int, num_v: int, state_size: int, scale: float, seqs: U64 | None, n_seqs: int,
    health: U8 | None, layer: int,
) -> None:
    """The gated delta rule, row after row. state_in may be state_out; out None: the outputs are dropped.

    Per row and head, S [column][row]: kv = S k; dl = beta (v - g kv); S = g S + dl k^T; out = scale S q,
    g = exp(g_log). accept_d: only that many rows are taken. With a tape, the operands are copied there.
    """
    if accept_d is not None:
        if not 0 <= accept_d[0] <= rows:
            report(health, Fault.BAD_ACCEPT, layer, 0, 1)
            return
        rows = int(accept_d[0])
    if tape is not None:
        operands = np.concatenate([q, k, v, g_log, beta])
        tape[: operands.size] = operands
    size, shape = num_v * state_size, (num_v, state_size, state_size)
    # vectors over the rows of the state (rows, num_v, 1, S), over its columns (rows, num_v, S, 1), gates (.., 1, 1)
    q, k = (x[: rows * size].reshape(rows, num_v, 1, state_size) for x in (q, k))
    v = v[: rows * size].reshape(rows, num_v, state_size, 1)
    before, after = (s[: size * state_size].reshape(shape) for s in (state_in, state_out))
    result = None if out is None else out[: rows * size].reshape(rows, num_v, state_size)
    step = max(1, _SCAN_ELEMENTS // state_size**2)
    product = np.empty((step, state_size, state_size), np.float32)
    with np.errstate(all="ignore"):
        gate = np.exp(g_log[: rows * num_v]).reshape(rows, num_v, 1, 1)
        beta = beta[: rows * num_v].reshape(rows, num_v, 1, 1)
        if rows == 0:
            after[:] = before
        for h in range(0, num_v, step):
            heads = slice(h, h + step)
            state, source, part = after[heads], before[heads], product[: min(step, num_v - h)]
            for t in range(rows):
                g = gate[t, heads]
                np.multiply(source, k[t, heads], out=part)
                delta = beta[t, heads] * (v[t, heads] - g * _lane_sum(part))
                np.multiply(source, g, out=state)
                np.multiply(k[t, heads], delta, out=part)
                state += part
                source = state
                if result is not None:
                    np.multiply(state, q[t, heads], out=part)
                    np.multiply(_lane_sum(part)[..., 0], np.float32(scale), out=result[t, heads])


@batched(
    ("x", "alpha", "beta_raw", "out"),
    conv_state=lambda a: (2 * a["num_k"] + a["num_v"]) * a["state_size"] * (a["d_conv"] - 1),
    ssm_state=lambda a: a["num_v"] * a["state_size"] ** 2,
)
def recur_step(
    x: F32, w: F32, alpha: F32, beta_raw: F32, dt_bias: F32, a: F32, conv_state: F32, state_in: F32, state_out: F32,
    out: F32, tape: F32 | None, pos_d: I32 | None, slot: int, rows: int, d_conv: int, num_k: int, num_v: int,
    state_size: int, columns: int, blocks: int, eps: float, scale: float, seqs: U64 | None, n_seqs: int,
    health: U8 | None, layer: int,
) -> None:
    """conv_update, gdn_prep and gdn_scan in one. With a tape, x and the scan's operands are copied there.

    columns and blocks say how a GPU shares the work.
    """
    conv_dim, gates = (2 * num_k + num_v) * state_size, rows * num_v
    mixed = np.empty(rows * conv_dim, np.float32)
    q, k, v = (np.empty(gates * state_size, np.float32) for _ in range(3))
    g_log, beta = np.empty((2, gates), np.float32)
    conv_update(x, w, conv_state, mixed, tape, pos_d, slot, rows, conv_dim, d_conv, None, 1, health, layer)
    gdn_prep(
        mixed, alpha, beta_raw, dt_bias, a, q, k, v, g_log, beta, pos_d, slot, rows, num_k, num_v, state_size, eps,
        None, 1, health, layer,
    )  # fmt: skip
    behind = None if tape is None else tape[rows * conv_dim :]
    gdn_scan(
        q, k, v, g_log, beta, state_in, state_out, out, behind, None, rows, num_v, state_size, scale, None, 1, health,
        layer,
    )  # fmt: skip


def set_counters(
    counters: I32, a: int, b: int, a_lo: int, a_hi: int, b_lo: int, b_hi: int, health: U8 | None, layer: int
) -> None:
    """counters[i] = a where bit i of (a_hi:a_lo) is set, else b where bit i of (b_hi:b_lo) is set; i < 128."""
    for i in range(128):
        bit = i % 64
        if ((a_lo, a_hi)[i // 64] >> bit) & 1:
            counters[i] = a
        elif ((b_lo, b_hi)[i // 64] >> bit) & 1:
            counters[i] = b


def restore(
    src: U8 | None, dst: U8 | None, bytes: int, src2: U8 | None, dst2: U8 | None, bytes2: int, counters: I32 | None,
    a: int, b: int, a_lo: int, a_hi: int, b_lo: int, b_hi: int, health: U8 | None, layer: int,
) -> None:  # fmt: skip
    """Two copies, either of which may be of no bytes, and the counters, if there are any, as set_counters sets them."""
    for to, source, count in ((dst, src, bytes), (dst2, src2, bytes2)):
        if to is not None and source is not None:
            to[:count] = source[:count]
    if counters is not None:
        set_counters(counters, a, b, a_lo, a_hi, b_lo, b_hi, health, layer)


def commit_counters(
    counters: I32, pos_d: I32, accept_d: I32 | None, accept: int, rows: int, mask_lo: int, mask_hi: int, move_pos: int,
    health: U8 | None, layer: int,
) -> None:
    """counters[i] = pos + accept where bit i of (mask_hi:mask_lo) is set; then, if move_pos, pos += accept.

    A count outside 0 .. rows is reported, and counts as 0: an append may have moved the counters already.
    """
    taken = accept if accept_d is None else int(accept_d[0])
    if not 0 <= taken <= rows:
        if move_pos:
            report(health, Fault.BAD_ACCEPT, layer, int(pos_d[0]), 1)
        taken = 0
    end = int(pos_d[0]) + taken
    for i in range(128):
        if (mask_lo, mask_hi)[i // 64] >> i % 64 & 1:
            counters[i] = end
    if move_pos:
        pos_d[0] = end


def copy_many(table: NDArray[np.uint64], n: int, health: U8 | None, layer: int) -> None:
    """n copies of any size and alignment between host addresses; entries must not overlap."""
    for dst, src, count in table[: 3 * n].reshape(n, 3).tolist():
        ctypes.memmove(dst, src, count)


def copy_rows(
    src: F32, dst: F32, src_stride: int, dst_stride: int, rows: int, columns: int, health: U8 | None, layer: int
) -> None:
    """dst row r, at dst_stride * r, = src row r, at src_stride * r: (rows, columns)."""
    for row in range(rows):
        dst[row * dst_stride : row * dst_stride + columns] = src[row * src_stride : row * src_stride + columns]


def advance_batch(seqs: U64, n_seqs: int, n: int, health: U8 | None, layer: int) -> None:
    """*pos_d += n of every sequence."""
    for addresses in seqs.reshape(-1, len(FIELDS))[:n_seqs].tolist():
        HostMemory.array(addresses[FIELDS.index("pos_d")], 1, np.int32)[0] += n
