"""Checks made of the packaged vectors: what the reference implementation left in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np

from memra_driver.check_case import ALONE, LAYER, TOLERANCE, Args, Array, Case, Rng, i32, poison, record, single
from memra_driver.check_cases import append_args
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
        yield from VECTORS[entry["op"]](entry, arrays)


def _append_vector(entry: dict[str, Any], v: dict[str, Array]) -> Iterator[Case]:
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


def _conv_vector(entry: dict[str, Any], v: dict[str, Array]) -> Iterator[Case]:
    rows, channels, taps = entry["rows"], entry["conv_dim"], entry["d_conv"]
    args: Args = {
        "x": v["x"], "w": v["w"], "conv_state": v["state0"], "out": poison(rows * channels), "tape": None,
        "pos_d": None, "slot": 0, "rows": rows, "conv_dim": channels, "d_conv": taps, **ALONE,
        "health": record(), "layer": LAYER,
    }  # fmt: skip
    want = {"out": v["out"], "conv_state": v["states"][-channels * (taps - 1) :]}
    yield single(f"vector {entry['case']}", "conv_update", args, want=want, tolerance={"out": TOLERANCE})


def _gdn_vector(entry: dict[str, Any], v: dict[str, Array]) -> Iterator[Case]:
    rows, keys, values, size = entry["rows"], entry["num_k"], entry["num_v"], entry["d_state"]
    vector, gates = rows * values * size, rows * values
    operands = ("q", "k", "v", "g_log", "beta")
    fresh = {name: poison(gates if name in ("g_log", "beta") else vector) for name in operands}
    prep = fresh | {
        **{name: v[name] for name in ("conv_out", "alpha", "beta_raw", "dt_bias", "a")}, "pos_d": None, "slot": 0,
        "rows": rows, "num_k": keys, "num_v": values, "state_size": size, "eps": entry["eps"], **ALONE,
        "health": record(), "layer": LAYER,
    }  # fmt: skip
    near = dict.fromkeys(operands, TOLERANCE)
    want = {name: v[name] for name in operands}
    yield single(f"vector {entry['case']}", "gdn_prep", prep, want=want, tolerance=near)
    for taken, state in ((2, "state_after_2"), (rows, "state_final")):
        scan = {name: v[name] for name in operands} | {
            "state_in": v["state0"], "state_out": poison(v["state0"].size), "out": poison(vector), "tape": None,
            "accept_d": i32(taken), "rows": rows, "num_v": values, "state_size": size, "scale": entry["scale"], **ALONE,
            "health": record(), "layer": LAYER,
        }  # fmt: skip
        want = {"state_out": v[state]} | ({"out": v["out"]} if taken == rows else {})
        near = dict.fromkeys(("state_out", "out"), TOLERANCE)
        yield single(f"vector {entry['case']}, {taken} rows", "gdn_scan", scan, want=want, tolerance=near)


VECTORS = {"append_rows": _append_vector, "conv_update": _conv_vector, "gdn_step": _gdn_vector}
