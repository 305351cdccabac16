"""Checks made of the packaged vectors: what the reference implementation left in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np

from memra_driver.check.args import Array, Rng, append_args, conv_args, i32, prep_args, scan_args
from memra_driver.check.case import TOLERANCE, Case, single
from memra_driver.formats import FORMATS
from memra_driver.oracle_formats import encode


def vector_cases(rng: Rng, small: bool) -> Iterator[Case]:
    folder = files("memra_driver").joinpath("vectors")
    with folder.joinpath("kernels.npz").open("rb") as file, np.load(file) as data:
        stored = dict(data)
    for entry in json.loads(folder.joinpath("kernels.json").read_text("utf-8")):
        arrays = {
            name: stored[key].reshape(-1) for name, key in entry.items() if isinstance(key, str) and key in stored
        }
        yield from VECTORS[entry["op"]](rng, entry, arrays)


def _append_vector(rng: Rng, entry: dict[str, Any], v: dict[str, Array]) -> Iterator[Case]:
    pair, dims, rows = (entry["k_format"], entry["v_format"]), (entry["kv_dim_k"], entry["kv_dim_v"]), entry["rows"]
    args = append_args(pair, dims, v["k_rows"], v["v_rows"], entry["t0"], entry["max_ctx"])
    want = {}
    for side, name in zip("kv", pair, strict=True):
        args[side][:] = entry["fill"]
        want[side] = v[f"{side}_out"].copy()
        if "except_block" in entry:  # 1/d overflows: we store codes that decode to zero or to the minimum
            row, block = entry["except_block"]["row"], entry["except_block"]["block"]
            size = FORMATS[name].block_bytes
            x = v[f"{side}_rows"].reshape(rows, -1, 32)[row, block]
            at = (entry["t0"] + row) * args[f"{side}_tok_bytes"] + block * size
            want[side][at : at + size] = encode(name, x.astype(np.float64)[None])[0]
    yield single(f"vector {entry['case']}", "append_kv", args, want=want)


def _conv_vector(rng: Rng, entry: dict[str, Any], v: dict[str, Array]) -> Iterator[Case]:
    rows, channels, taps = entry["rows"], entry["conv_dim"], entry["d_conv"]
    args = conv_args(rng, rows, channels, taps, x=v["x"], w=v["w"], conv_state=v["state0"])
    want = {"out": v["out"], "conv_state": v["states"][-channels * (taps - 1) :]}
    yield single(f"vector {entry['case']}", "conv_update", args, want=want, tolerance={"out": TOLERANCE})


def _gdn_vector(rng: Rng, entry: dict[str, Any], v: dict[str, Array]) -> Iterator[Case]:
    rows, keys, values, size = entry["rows"], entry["num_k"], entry["num_v"], entry["d_state"]
    given = {name: v[name] for name in ("conv_out", "alpha", "beta_raw", "dt_bias", "a")} | {"eps": entry["eps"]}
    prep = prep_args(rng, rows, keys, values, size, **given)
    operands = ("q", "k", "v", "g_log", "beta")
    near = dict.fromkeys(operands, TOLERANCE)
    want = {name: v[name] for name in operands}
    yield single(f"vector {entry['case']}", "gdn_prep", prep, want=want, tolerance=near)
    for taken, state in ((2, "state_after_2"), (rows, "state_final")):
        given = {name: v[name] for name in operands} | {"state_in": v["state0"], "scale": entry["scale"]}
        scan = scan_args(rng, rows, values, size, accept_d=i32(taken), **given)
        want = {"state_out": v[state]} | ({"out": v["out"]} if taken == rows else {})
        near = dict.fromkeys(("state_out", "out"), TOLERANCE)
        yield single(f"vector {entry['case']}, {taken} rows", "gdn_scan", scan, want=want, tolerance=near)


VECTORS = {"append_rows": _append_vector, "conv_update": _conv_vector, "gdn_step": _gdn_vector}
