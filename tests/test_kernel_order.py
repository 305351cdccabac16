"""Laws of every kernel of the table: the order in which threads run does not show, nor does repetition."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attend_runs import attend_args, combine_args
from kernel_runs import run
from standin import StandIn

from memra_driver.check.args import (
    append_args,
    commit_args,
    conv_args,
    dequant_args,
    in_folds,
    partial_sums,
    prep_args,
    rebuild_args,
    recur_args,
    rows_args,
    scan_args,
    spread,
)
from memra_driver.kernels import ATTEND_ENTRIES, KERNELS, PIPE_ENTRIES
from memra_driver.plan import SCAN_STATE_SIZES

FORMATS = ("q8_0", "q5_1")


def _recur_args(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """A key head is shared by blocks, its ring by all of them."""
    args = recur_args(rng, 9, 2, 3, size, 4, columns=32)
    args["x"][rng.integers(0, args["x"].size, 9)] = np.inf
    return args | {"state_out": args["state_in"]}


def _attend_args(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """Of an entry of attend; an entry made for one geometry gets that one."""
    shape: dict[str, Any] = {"heads": (6, 2), "dims": (64, 64), "formats": ("q8_0", "fp8")}
    fixed = re.fullmatch(r"attend_pipe_(q8_0|fp8)_(\w+)_(\d)x(\d+)_\d+(?:_folds)?", name)
    if fixed:
        heads_kv, dim = int(fixed[3]), int(fixed[4])
        shape = {"heads": (3 * heads_kv, heads_kv), "dims": (dim, dim), "formats": (fixed[1], fixed[2])}
    elif name in PIPE_ENTRIES:
        heads_kv, dims = {"64": (4, (64, 64)), "128": (8, (64, 128)), "256": (8, (192, 192))}[name.split("_")[2]]
        shape = {"heads": (3 * heads_kv, heads_kv), "dims": dims, "formats": ("fp8", "q5_1")}
    else:
        shape["dims"] = (64, int(name.split("_")[1]))
    folds = name.endswith("_folds")
    args = attend_args(rng, 2 if folds else 3, 63, window=40, **shape)
    args = in_folds(args) if folds else args
    args["q"][rng.integers(0, args["q"].size, 3)] = np.nan
    args["v"][rng.integers(0, args["v"].size, 9)] = 0x7F
    return args


def _with_bad(rng: np.random.Generator, args: dict[str, Any], name: str, value: float) -> dict[str, Any]:
    args[name][rng.integers(0, args[name].size, 9)] = value
    return args


def _append_args(rng: np.random.Generator) -> dict[str, Any]:
    x = spread(rng, 20 * 96)
    x[rng.integers(0, x.size, 9)] = np.nan
    return append_args(FORMATS, (96, 96), x, x.copy(), 3, 30)


def _conv_args(rng: np.random.Generator) -> dict[str, Any]:
    return _with_bad(rng, conv_args(rng, 35, 300, 4), "x", np.inf)


def _rebuild_args(rng: np.random.Generator) -> dict[str, Any]:
    conv = _conv_args(rng)
    return rebuild_args(conv, 2, conv_state=conv["conv_state"])


def _scan_args(rng: np.random.Generator) -> dict[str, Any]:
    scan = scan_args(rng, 3, 4, 64)
    return scan | {"state_out": scan["state_in"]}


def _combine_args(rng: np.random.Generator) -> dict[str, Any]:
    sums = partial_sums(3, 6, 64)
    sums[:] = rng.standard_normal(sums.size)
    return combine_args(_attend_args(rng, "attend_64"), SimpleNamespace(part=sums))


def _restore_args(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "src": rng.integers(0, 256, 40_000, np.uint8), "dst": np.zeros(40_000, np.uint8), "bytes": 39_999,
        "src2": rng.integers(0, 256, 100, np.uint8), "dst2": np.zeros(100, np.uint8), "bytes2": 64,
        "counters": np.zeros(128, np.int32), **COUNTERS,
    }  # fmt: skip


COUNTERS = {"a": 1, "b": 2, "a_lo": 0x0F0F, "a_hi": -1, "b_lo": 0x00FF, "b_hi": 0, "health": None, "layer": 0}
# One launch of each kernel, several blocks wide, with bad inputs so that the error record is written to.
ARGUMENTS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "append_kv": _append_args,
    "dequant_kv": lambda rng: dequant_args(rng, FORMATS, (96, 96), 3, 20, 30, 0),
    "conv_update": _conv_args,
    "conv_ring_rebuild": _rebuild_args,
    "gdn_prep": lambda rng: _with_bad(rng, prep_args(rng, 5, 2, 6, 64), "conv_out", np.nan),
    "gdn_scan": _scan_args,
    **{f"recur_step_{size}": partial(_recur_args, size=size) for size in SCAN_STATE_SIZES},
    "set_counters": lambda rng: {"counters": np.zeros(128, np.int32), **COUNTERS},
    "restore": _restore_args,
    "commit_counters": lambda rng: commit_args(rng, pos=7, accept=2, rows=3),
    "copy_rows": lambda rng: rows_args(rng, 5, 1100, 1200, 1300),
    "attend_combine": _combine_args,
    **{name: partial(_attend_args, name=name) for name in ATTEND_ENTRIES},
}


KERNELS_WITH_ARRAYS = sorted(KERNELS.keys() - {"copy_many", "advance_batch"})  # the tables of those hold addresses


def bytes_of(after: SimpleNamespace) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in vars(after).items()}


@pytest.mark.parametrize("name", KERNELS_WITH_ARRAYS)
def test_threads_and_blocks_may_run_in_any_order(
    standin: StandIn, cuda: Any, rng: np.random.Generator, name: str
) -> None:
    args = ARGUMENTS[name](rng)
    forward = bytes_of(run(cuda, name, **args))
    standin.schedule("backward")
    assert bytes_of(run(cuda, name, **args)) == forward


@pytest.mark.parametrize("name", KERNELS_WITH_ARRAYS)
def test_a_launch_repeated_gives_the_same_bytes(cuda: Any, rng: np.random.Generator, name: str) -> None:
    args = ARGUMENTS[name](rng)
    first = bytes_of(run(cuda, name, **args))
    for _ in range(3):
        assert bytes_of(run(cuda, name, **args)) == first
