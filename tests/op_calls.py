"""Each operation on the tiny model: its arguments, a call of it, and how to see that it was refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, image, tiny

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.errors import ArrayError, MemraError

Array = np.ndarray[Any, Any]
T = 2
MATRIX, HEADS, GATES = (T, 128), (T, 2, 32), (T, 2)

# Arguments of each operation on the tiny model: name -> shape; outputs are those that may not be read-only.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "append_kv": {"k_rows": MATRIX, "v_rows": MATRIX},
    "dequant_kv": {"k_out": MATRIX, "v_out": MATRIX},
    "conv_update": {"x": MATRIX, "w": (128, 4), "out": MATRIX},
    "gdn_prep": {
        "conv_out": MATRIX, "alpha": GATES, "beta_raw": GATES, "dt_bias": (2,), "a": (2,), "q": HEADS, "k": HEADS,
        "v": HEADS, "g_log": GATES, "beta": GATES,
    },
    "gdn_scan": {"q": HEADS, "k": HEADS, "v": HEADS, "g_log": GATES, "beta": GATES, "out": HEADS},
    "recur_step": {
        "x": MATRIX, "w": (128, 4), "alpha": GATES, "beta_raw": GATES, "dt_bias": (2,), "a": (2,), "out": HEADS,
    },
}  # fmt: skip
OUTPUTS = {
    "append_kv": (), "dequant_kv": ("k_out", "v_out"), "conv_update": ("out",),
    "gdn_prep": ("q", "k", "v", "g_log", "beta"), "gdn_scan": ("out",),
    "recur_step": ("out",),
}  # fmt: skip
WRITERS = [op for op, names in OUTPUTS.items() if names]
LAYER = {"append_kv": 3, "dequant_kv": 3, "conv_update": 0, "gdn_prep": 0, "gdn_scan": 0, "recur_step": 0}
OTHER_LAYER = {op: 0 if il == 3 else 3 for op, il in LAYER.items()}


def arrays(op: str, rows: int = T) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    shapes = {name: (rows, *shape[1:]) if shape[0] == T and name not in ("dt_bias", "a") else shape
              for name, shape in SHAPES[op].items()}  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def call(e: Any, cache: Cache, op: str, given: dict[str, Any], il: int | None = None) -> None:
    il = LAYER[op] if il is None else il
    eps, scale = {"eps": 1e-6}, {"scale": 1.0}
    extra = {"gdn_prep": eps, "gdn_scan": scale, "recur_step": eps | scale}.get(op, {})
    span = (0, T) if op == "dequant_kv" else ()
    getattr(ops, op)(e, cache, il, *span, *given.values(), **extra)


def new(e: Any, cfg: Any = None, max_ctx: int = 32) -> Cache:
    cache = Cache.new(e, tiny() if cfg is None else cfg, max_ctx, policy=POLICY)
    if cfg is None:
        Feed(cache).step(T)
    return cache


def refuse(
    e: Any, cache: Cache, op: str, given: dict[str, Any], match: str, error: type[MemraError] = ArrayError
) -> None:
    before = image(cache)
    with pytest.raises(error, match=match):
        call(e, cache, op, given)
    assert image(cache) == before
