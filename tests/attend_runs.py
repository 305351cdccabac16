"""Attention as the kernels compute it, and as float64 does: arguments, launches, and an oracle that shares no code."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from checks import Array
from kernel_runs import run

from memra_driver.check import args as check_args
from memra_driver.check.args import PAIRS, Dims, Pair, partial_sums
from memra_driver.formats import BLOCK, FORMATS
from memra_driver.kernels import ATTEND_GROUPS, AttendGeometry, attend_kernel, attend_tile

TOLERANCE = 2e-3  # of the largest magnitude of the output
HEAD_DIMS = (64, 96, 128, 192, 256, 512)
LONG: list[tuple[Pair, Dims]] = [  # formats and head dims that long sequences are tried with
    *((formats, (128, 128)) for formats in PAIRS),
    *((("q8_0", "q5_1"), dims) for dims in ((64, 64), (192, 128), (256, 256), (512, 512))),
]
Heads = tuple[int, int]  # query heads, K/V heads
Tamper = Callable[[Array, Array, Array], None]  # changes q (rows, n_head, dim), k and v (tokens, n_head_kv, dim)


def group_round(n_head_kv: int) -> int:
    """Keys until a group gets its second tile."""
    return attend_tile(n_head_kv) * ATTEND_GROUPS


GROUP_ROUND = group_round(1)  # and with two K/V heads


# Inputs that are hard on a running softmax.


def plain(q: Array, k: Array, v: Array) -> None:
    """Inputs of normal scale."""


def dominating(q: Array, k: Array, v: Array) -> None:
    k[len(k) // 2] *= 20


def equal_keys(q: Array, k: Array, v: Array) -> None:
    k[:] = k[0]


def spiked_query(q: Array, k: Array, v: Array) -> None:
    q[..., 3] = 100


def growing(q: Array, k: Array, v: Array) -> None:
    """Every tile has larger scores than those before it, of either sign."""
    k *= np.linspace(0.1, 6, len(k), dtype=np.float32)[:, None, None]


def shrinking(q: Array, k: Array, v: Array) -> None:
    k *= np.linspace(6, 0.1, len(k), dtype=np.float32)[:, None, None]


def climbing(q: Array, k: Array, v: Array) -> None:
    """The newest key beats all before it, so that old sums are rescaled at every tile."""
    k[:] = q[-1, 0] / 3 * np.linspace(-1, 1, len(k), dtype=np.float32)[:, None, None]


def tiny_query(q: Array, k: Array, v: Array) -> None:
    q *= np.float32(1e-30)


def huge_query(q: Array, k: Array, v: Array) -> None:
    """Along one key, since of two keys of about the same score the winner hangs on bits that no path keeps."""
    q += 4 * k[len(k) // 2].repeat(q.shape[1] // k.shape[1], axis=0)
    q *= np.float32(1e6)


def large_values(q: Array, k: Array, v: Array) -> None:
    v *= np.float32(80)
    v += np.float32(100)


TAMPERS: tuple[Tamper, ...] = (
    plain, dominating, equal_keys, spiked_query, growing, shrinking, climbing, tiny_query, huge_query, large_values,
)  # fmt: skip


# Arguments and launches.


def attend_args(
    rng: np.random.Generator,
    rows: int,
    pos: int,
    *,
    heads: Heads = (2, 1),
    dims: Dims = (64, 64),
    formats: Pair = ("q8_0", "q5_1"),
    window: int = 0,
    tamper: Tamper = plain,
    room: int = 0,
) -> dict[str, Any]:
    """Of one sequence; its planes end with the last row that is seen, or `room` tokens of 0xFF later."""
    tokens, (n_head, n_head_kv) = pos + rows, heads
    k_format, v_format = (FORMATS[name] for name in formats)
    q = rng.standard_normal((rows, n_head, dims[0])).astype(np.float32)
    k, v = (rng.standard_normal((tokens, n_head_kv, dim)).astype(np.float32) for dim in dims)
    tamper(q, k, v)
    planes = []
    for x, fmt in ((k, k_format), (v, v_format)):
        stored = fmt.encode(x.reshape(tokens, -1))
        planes.append(np.concatenate([stored, np.full((room, stored.shape[1]), 0xFF, np.uint8)]))
    return check_args.attend_args(formats, q, *planes, pos, heads=heads, dims=dims, window=window)


def entry_of(dev: Any, args: dict[str, Any]) -> str:
    """The entry that an engine would launch on a device."""
    columns = args["rows"] * (args["n_head"] // args["n_head_kv"])
    return attend_kernel(dev.arch, AttendGeometry.of(args), columns, args["pieces"])


COMBINED = (
    "pos_d", "slot", "rows", "max_ctx", "n_head", "n_head_kv", "head_dim_v", "window", "pieces", "seqs", "n_seqs",
    "layer",
)  # fmt: skip


def combine_args(args: dict[str, Any], after: SimpleNamespace) -> dict[str, Any]:
    """Of the launch that follows attend."""
    out = np.full(args["rows"] * args["n_head"] * args["head_dim_v"], np.nan, np.float32)
    health = getattr(after, "health", None)
    return {name: args[name] for name in COMBINED} | {"part": after.part, "out": out, "health": health}


def attend(dev: Any, args: dict[str, Any], entry: str | None = None) -> SimpleNamespace:
    """out (rows, n_head, head_dim_v) and health of attend and its combination."""
    after = run(dev, entry or entry_of(dev, args), **args)
    combined = run(dev, "attend_combine", **combine_args(args, after))
    shape = (args["rows"], args["n_head"], args["head_dim_v"])
    return SimpleNamespace(out=combined.out.reshape(shape), health=combined.health)


def change_tokens(args: dict[str, Any], name: str, tokens: slice, fill: int | Array) -> dict[str, Any]:
    """The launch on planes whose tokens hold other bytes; name: k or v."""
    plane = args[name].copy()
    plane.reshape(-1, args[f"{name}_tok_bytes"])[tokens] = fill
    return args | {name: plane}


def row_alone(args: dict[str, Any], row: int) -> dict[str, Any]:
    """The launch for that row only, on planes that hold all rows."""
    q = args["q"].reshape(args["rows"], -1)[row].copy()
    part = partial_sums(1, args["n_head"], args["head_dim_v"])
    return args | {"q": q, "rows": 1, "slot": args["slot"] + row, "part": part}


def bits(x: Array) -> Array:
    """f32 as integers; every NaN is one number."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), np.ascontiguousarray(x).view(np.uint32))


def assert_same_bits(got: Array, expected: Array) -> None:
    apart = np.argwhere(bits(got) != bits(expected))
    if apart.size:
        at = tuple(apart[0])
        raise AssertionError(f"{len(apart)} of {got.size} differ; at {at}: {got[at]!r}, not {expected[at]!r}")


# The oracle.


def planes_of(args: dict[str, Any]) -> list[Array]:
    """K and V as float64 (tokens, n_head_kv, dim), every token of the planes."""
    decoded = []
    for name in "kv":
        fmt = next(fmt for fmt in FORMATS.values() if fmt.code == args[f"{name}_format"])
        dim = args[f"head_dim_{name}"]
        tokens = args[name].reshape(-1, args[f"{name}_tok_bytes"])
        used = tokens[:, : args["n_head_kv"] * dim // BLOCK * fmt.block_bytes]
        decoded.append(fmt.decode(used).astype(np.float64).reshape(len(tokens), args["n_head_kv"], dim))
    return decoded


def oracle(args: dict[str, Any]) -> Array:
    """Attention in float64 over the dequantised rows: (rows, n_head, head_dim_v)."""
    k, v = planes_of(args)
    rows, gqa, stop = args["rows"], args["n_head"] // args["n_head_kv"], args["slot"] + args["rows"]
    q = args["q"].astype(np.float64).reshape(rows, args["n_head_kv"], gqa, args["head_dim_k"])
    out = np.empty((rows, args["n_head_kv"], gqa, args["head_dim_v"]))
    key, last = np.arange(stop), args["slot"] + np.arange(rows)[:, None]
    seen = np.repeat((key <= last) & (key > last - (args["window"] or stop)), gqa, axis=0)
    for head in range(args["n_head_kv"]):
        keys, values = np.ascontiguousarray(k[:stop, head]), np.ascontiguousarray(v[:stop, head])
        score = q[:, head].reshape(rows * gqa, -1) @ keys.T * args["scale"]
        score[~seen] = -np.inf
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        out[:, head] = (weight @ values / weight.sum(axis=1, keepdims=True)).reshape(rows, gqa, -1)
    return out.reshape(rows, args["n_head"], args["head_dim_v"])


def assert_close(out: Array, args: dict[str, Any]) -> None:
    """The output is within TOLERANCE of float64 attention."""
    expected = oracle(args)
    apart = np.abs(out - expected)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(apart), np.inf, apart))), out.shape)
    error = apart[at] / np.abs(expected).max()
    assert error <= TOLERANCE, f"{error:.2e} of the largest magnitude at {at}: {out[at]!r}, not {expected[at]!r}"
