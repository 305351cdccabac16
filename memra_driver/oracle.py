"""What every kernel should leave in memory, by formulas in float64 that share no code with reference.py.

`run(kernel, a)` changes the arrays of `a` (parameter -> flat array, number or None) as the kernel would. Where a
format or a counter is exact, so is this; the rest is rounded once, at the end. `seqs` and `table` are lists: of the
buffers of each sequence, and of (dst, src) byte arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from memra_driver.oracle_formats import BF16, BLOCK_BYTES, F64, NAMES, Array, decode, encode, f32, ieee_bits

Args = dict[str, Any]

NONFINITE, SCALE_OVERFLOW, FP8_SATURATED, SLOT_RANGE, BAD_ACCEPT = range(5)
GROUPS, TAIL = 132, 8


# The error record.


def report(a: Args, kind: int, slot: int, count: int = 1) -> None:
    """`count` faults, the first at position slot."""
    if a["health"] is None or not count:
        return
    words = a["health"].view(np.uint64)
    words[kind] += np.uint64(count)
    words[5 + kind] = max(int(words[5 + kind]), 2**64 - 1 - (max(slot, 0) * 2**16 + a["layer"]))
    words[10] |= np.uint64(1 << kind)


def report_rows(a: Args, kind: int, first: int, bad: Array) -> None:
    """The set elements of bad (rows, groups)."""
    for row, groups in enumerate(bad.reshape(len(bad), -1)):
        report(a, kind, first + row, int(groups.sum()))


def runs_of_32(bad: Array) -> Array:
    """(rows, n) to (rows, runs): whether a run of up to 32 neighbours has one."""
    padded = np.zeros((len(bad), -(-bad.shape[1] // 32) * 32), bool)
    padded[:, : bad.shape[1]] = bad
    return np.asarray(padded.reshape(len(bad), -1, 32).any(axis=2))


def position(a: Args) -> int:
    return int(a["slot"] if a["pos_d"] is None else a["pos_d"][0])


# Kernels.


def append_kv(a: Args) -> None:
    first, rows = position(a), a["rows"]
    if first < 0 or first + rows > a["max_ctx"]:
        report(a, SLOT_RANGE, first)
        return
    for side in "kv":
        name = NAMES[a[f"{side}_format"]]
        with np.errstate(invalid="ignore"):  # a signalling NaN
            x = a[f"{side}_rows"].astype(np.float64).reshape(-1, 32)
        stored = encode(name, x)
        token = a[f"{side}_tok_bytes"]
        plane = a[side][first * token : (first + rows) * token].reshape(rows, token)
        plane[:, : stored.size // rows] = stored.reshape(rows, -1)
        finite = np.isfinite(x).all(axis=1)
        report_rows(a, NONFINITE, first, ~finite.reshape(rows, -1))
        if name == "fp8":
            beyond = ((np.abs(x) > 464) & np.isfinite(x)).any(axis=1)
            report_rows(a, FP8_SATURATED, first, beyond.reshape(rows, -1))
        else:
            scales = stored[:, : 4 if name == "q5_1" else 2].copy().view(np.uint16)
            infinite = finite & (scales & 0x7FFF == 0x7C00).any(axis=1)
            report_rows(a, SCALE_OVERFLOW, first, infinite.reshape(rows, -1))
    a["len_d"][0] = a["len"] if a["len"] >= 0 else max(a["len_d"][0], first + rows)


def rows_of(a: Args, side: str, start: int, stop: int, dim: int) -> F64:
    """Decoded rows (stop - start, dim)."""
    name, token = NAMES[a[f"{side}_format"]], a[f"{side}_tok_bytes"]
    size = dim // 32 * BLOCK_BYTES[name]
    raw = a[side][start * token : stop * token].reshape(stop - start, token)[:, :size]
    return decode(name, raw.reshape(-1, BLOCK_BYTES[name])).reshape(stop - start, dim)


def dequant_kv(a: Args) -> None:
    start, rows = a["start"], a["rows"]
    if start < 0 or start + rows > a["max_ctx"]:
        report(a, SLOT_RANGE, start)
        return
    for side in "kv":
        values = rows_of(a, side, start, start + rows, a[f"kv_dim_{side}"]).reshape(-1)
        a[f"{side}_out"][: values.size] = ieee_bits(values, BF16) if a["out_bf16"] else values


def conv_update(a: Args) -> None:
    rows, channels, taps = a["rows"], a["conv_dim"], a["d_conv"]
    x = a["x"].reshape(rows, channels)
    ring = a["conv_state"].reshape(channels, taps - 1)
    history = np.concatenate([ring.T, x]).astype(np.float64)
    with np.errstate(all="ignore"):
        windows = np.stack([history[t : t + taps] for t in range(rows)])
        y = np.einsum("tjc,cj->tc", windows, a["w"].reshape(channels, taps).astype(np.float64))
        a["out"][:] = (y / (1 + np.exp(-y))).reshape(-1)
    report_rows(a, NONFINITE, position(a), runs_of_32(~np.isfinite(x)))
    if a["tape"] is None:
        ring[:] = history[len(history) - (taps - 1) :].T
    else:
        a["tape"][: x.size] = a["x"]


def conv_ring_rebuild(a: Args) -> None:
    taken = a["accept"] if a["accept_d"] is None else int(a["accept_d"][0])
    if not 0 <= taken <= a["rows"]:
        for _ in range(a["n_layers"]):
            report(a, BAD_ACCEPT, 0)
        return
    channels, pad = a["conv_dim"], a["d_conv"] - 1
    old = a["ring_old"].copy()
    for i in range(a["n_layers"]):
        x = a["x"][i * a["x_apart"] :][: a["rows"] * channels].reshape(-1, channels)
        for c in range(channels):
            at = i * a["ring_apart"] + c * pad
            a["conv_state"][at : at + pad] = [*old[at : at + pad], *x[:taken, c]][taken:]


def gdn_prep(a: Args) -> None:
    rows, keys, values, size = a["rows"], a["num_k"], a["num_v"], a["state_size"]
    first = position(a)
    mixed = a["conv_out"].astype(np.float64).reshape(rows, 2 * keys + values, size)
    alpha, raw = (a[name].astype(np.float64).reshape(rows, values) for name in ("alpha", "beta_raw"))
    bias, factor = a["dt_bias"].astype(np.float64), a["a"].astype(np.float64)
    with np.errstate(all="ignore"):
        for name, heads in (("q", mixed[:, :keys]), ("k", mixed[:, keys : 2 * keys])):
            unit = heads / np.sqrt((heads**2).sum(axis=2, keepdims=True) + a["eps"])
            a[name][:] = np.stack([unit[:, h % keys] for h in range(values)], axis=1).reshape(-1)
        a["v"][:] = mixed[:, 2 * keys :].reshape(-1)
        step = f32(alpha + bias)
        a["g_log"][:] = (factor * np.where(step > 20, step, np.logaddexp(0, step))).reshape(-1)
        a["beta"][:] = (1 / (1 + np.exp(-raw))).reshape(-1)
    used = [h for h in range(2 * keys + values) if h >= 2 * keys or h % keys < values]
    report_rows(a, NONFINITE, first, runs_of_32(~np.isfinite(mixed[:, used].reshape(rows, -1))))
    report_rows(a, NONFINITE, first, ~(np.isfinite(alpha) & np.isfinite(bias) & np.isfinite(factor)))
    report_rows(a, NONFINITE, first, ~np.isfinite(raw))


def gdn_scan(a: Args) -> None:
    rows, heads, size = a["rows"], a["num_v"], a["state_size"]
    taken = rows if a["accept_d"] is None else int(a["accept_d"][0])
    if not 0 <= taken <= rows:
        report(a, BAD_ACCEPT, 0)
        return
    operands = [a[name] for name in ("q", "k", "v", "g_log", "beta")]
    q, k, v = (x.astype(np.float64).reshape(rows, heads, size) for x in operands[:3])
    g, beta = (x.astype(np.float64).reshape(rows, heads, 1) for x in operands[3:])
    state = a["state_in"].astype(np.float64).reshape(heads, size, size)
    for t in range(taken):
        decay = np.exp(g[t])
        delta = beta[t] * (v[t] - decay * np.einsum("hcr,hr->hc", state, k[t]))
        state = decay[:, :, None] * state + delta[:, :, None] * k[t][:, None, :]
        if a["out"] is not None:
            out = a["scale"] * np.einsum("hcr,hr->hc", state, q[t])
            a["out"][t * heads * size : (t + 1) * heads * size] = out.reshape(-1)
    a["state_out"][:] = state.reshape(-1)
    if a["tape"] is not None:
        kept = np.concatenate(operands)
        a["tape"][: kept.size] = kept


def recur_step(a: Args) -> None:
    rows, values, size = a["rows"], a["num_v"], a["state_size"]
    channels = (2 * a["num_k"] + values) * size
    step = a | {"conv_dim": channels, "out": np.empty(rows * channels), "accept_d": None}
    conv_update(step)
    step["conv_out"] = step["out"]
    for name, width in (("q", size), ("k", size), ("v", size), ("g_log", 1), ("beta", 1)):
        step[name] = np.empty(rows * values * width)
    gdn_prep(step)
    gdn_scan(step | {"out": a["out"], "tape": None if a["tape"] is None else a["tape"][rows * channels :]})


def set_counters(a: Args) -> None:
    for i in range(128):
        part, bit = ("lo", "hi")[i // 64], 1 << i % 64
        if a[f"a_{part}"] & bit:
            a["counters"][i] = a["a"]
        elif a[f"b_{part}"] & bit:
            a["counters"][i] = a["b"]


def restore(a: Args) -> None:
    a["dst"][: a["bytes"]] = a["src"][: a["bytes"]]
    a["dst2"][: a["bytes2"]] = a["src2"][: a["bytes2"]]
    set_counters(a)


def commit_counters(a: Args) -> None:
    taken, start = a["accept"] if a["accept_d"] is None else int(a["accept_d"][0]), int(a["pos_d"][0])
    if not 0 <= taken <= a["rows"]:
        report(a, BAD_ACCEPT, start, int(bool(a["move_pos"])))
        taken = 0
    for i in range(128):
        if a[("mask_lo", "mask_hi")[i // 64]] & 1 << i % 64:
            a["counters"][i] = start + taken
    if a["move_pos"]:
        a["pos_d"][0] = start + taken


def advance_batch(a: Args) -> None:
    for sequence in a["seqs"][: a["n_seqs"]]:
        sequence["pos_d"][0] += a["n"]


def copy_many(a: Args) -> None:
    for dst, src in a["table"][: a["n"]]:
        dst[:] = src


def copy_rows(a: Args) -> None:
    for row in range(a["rows"]):
        to, at = row * a["dst_stride"], row * a["src_stride"]
        a["dst"][to : to + a["columns"]] = a["src"][at : at + a["columns"]]


def tile_keys(a: Args) -> int:
    return 64 if a["n_head_kv"] < 3 else 32


def attend(a: Args) -> None:
    """The result of attention stands in for the partial sums: one piece holds it all. `attend_combine` divides."""
    first, rows, heads, dim = position(a), a["rows"], a["n_head"], a["head_dim_v"]
    if first < 0 or first + rows > a["max_ctx"]:
        report(a, SLOT_RANGE, first)
        return
    q = a["q"].astype(np.float64).reshape(rows, a["n_head_kv"], -1, a["head_dim_k"])
    finite = np.isfinite(a["q"].reshape(rows, heads, -1)).all(axis=2)
    report_rows(a, NONFINITE, first, ~finite)
    part = a["part"].reshape(rows, heads, a["pieces"], dim + TAIL)[..., : dim + 2]
    for row in range(rows):
        part[row] = 0
        part[row, :, :, dim] = -np.inf
        piece = (first + row) // tile_keys(a) % GROUPS // (GROUPS // a["pieces"])
        part[row, :, piece, :dim] = attended(a, q[row], first + row)
        part[row, :, piece, dim:] = (0, 1)


def attended(a: Args, q: F64, last: int) -> F64:
    """(n_head, head_dim_v): what the queries of a row at position `last` see; q (n_head_kv, gqa, head_dim_k)."""
    kv_heads, dim = a["n_head_kv"], a["head_dim_v"]
    start = max(0, last + 1 - a["window"]) if a["window"] else 0
    keys = rows_of(a, "k", start, last + 1, kv_heads * a["head_dim_k"]).reshape(-1, kv_heads, a["head_dim_k"])
    values = rows_of(a, "v", start, last + 1, kv_heads * dim).reshape(-1, kv_heads, dim)
    with np.errstate(all="ignore"):
        score = a["scale"] * np.einsum("hgd,khd->hgk", q, keys)
        weight = np.exp(score - score.max(axis=2, keepdims=True))
        result = np.einsum("hgk,khd->hgd", weight / weight.sum(axis=2, keepdims=True), values)
    return np.asarray(result.reshape(-1, dim), np.float64)


def attend_combine(a: Args) -> None:
    first, rows, heads, dim = position(a), a["rows"], a["n_head"], a["head_dim_v"]
    if first < 0 or first + rows > a["max_ctx"]:
        return
    part = a["part"].astype(np.float64).reshape(rows, heads, a["pieces"], dim + TAIL)
    for row in range(rows):
        last = first + row
        start = max(0, last - a["window"] + 1) if a["window"] else 0
        tiles = range(start // tile_keys(a), last // tile_keys(a) + 1)
        pieces = sorted({tile % GROUPS // (GROUPS // a["pieces"]) for tile in tiles})
        sums = part[row][:, pieces]
        worth = np.exp2(sums[:, :, dim] - sums[:, :, dim].max(axis=1, keepdims=True))
        total = np.einsum("hg,hgd->hd", worth, sums[:, :, :dim])
        a["out"].reshape(rows, heads, dim)[row] = total / (worth * sums[:, :, dim + 1]).sum(axis=1)[:, None]


# Batches: a kernel's own arrays, and a block of each array that all sequences share.

SHARED = {
    "append_kv": ("k_rows", "v_rows"),
    "conv_update": ("x", "out"),
    "gdn_prep": ("conv_out", "alpha", "beta_raw", "q", "k", "v", "g_log", "beta"),
    "gdn_scan": ("q", "k", "v", "g_log", "beta", "out"),
    "recur_step": ("x", "alpha", "beta_raw", "out"),
    "attend": ("q", "part"),
    "attend_combine": ("part", "out"),
}


def run(kernel: str, a: Args) -> None:
    """Does to the arrays of `a` what the kernel should do."""
    name = kernel if kernel == "attend_combine" else re.sub(r"^(attend|recur_step)_.*", r"\1", kernel)
    one: Callable[[Args], None] = globals()[name]
    if a.get("seqs") is None or name not in SHARED:
        one(a)
        return
    n = a["n_seqs"]
    for i, sequence in enumerate(a["seqs"][:n]):
        own = {field: value for field, value in sequence.items() if field in a}
        if "ssm_state" in sequence:
            own |= {"state_in": sequence["ssm_state"], "state_out": sequence["ssm_state"]}
        own |= {each: np.split(a[each], n)[i] for each in SHARED[name] if a[each] is not None}
        one(a | own)
