"""A whole step of a small model over fixed buffers, with inputs that need no model.

Inputs are a function of layer, position and token, so a row that was rejected differs from the one that stands there
later. A `Lane` has the buffers of one step; a captured step reads them again at each launch.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_driver import ops
from memra_driver.config import LayerKind, ModelConfig

HIDDEN = 8  # elements of a row of the residual stream, as far as it is tapped
SCALE = 0.125  # of attention
INPUTS = {
    "FULL": ("k", "v", "query", "residual"), "BORROWING": ("query", "residual"),
    "LINEAR": ("x", "alpha", "beta_raw", "residual"),
}  # fmt: skip
MADE = {"FULL": (), "BORROWING": (), "LINEAR": ("sq", "sk", "sv", "g_log", "beta")}
RESULTS = {"FULL": ("attended",), "BORROWING": ("attended",), "LINEAR": ("convolved", "scanned")}
Array = np.ndarray[Any, Any]


def rows_of(seed: int, il: int, name: str, start: int, count: int, columns: int) -> Array:
    """[count, columns] unit-normal f32: the same row for the same position, whatever the call."""
    rows = [_row(seed, il, name, start + t, columns) for t in range(count)]
    return np.stack(rows) if rows else np.empty((0, columns), np.float32)


@functools.lru_cache(1 << 14)
def _row(seed: int, il: int, name: str, position: int, columns: int) -> Array:
    random = np.random.default_rng([seed, il, zlib.crc32(name.encode()), position])
    return random.standard_normal(columns, np.float32)


@functools.lru_cache(64)
def _convolution(il: int, channels: int, taps: int) -> Array:
    random = np.random.default_rng([il, channels, taps])
    return (random.standard_normal((channels, taps), np.float32) * np.float32(0.4)).reshape(-1)


def kind_of(cache: Any, il: int) -> str | None:
    """What a step does at layer il: FULL, BORROWING, LINEAR, or None: nothing."""
    if cache.members[0].kv[il] is not None:
        return "FULL"
    if cache.cfg.layer_kind(il) is LayerKind.FULL and not cache.cfg.owns_kv(il):
        return "BORROWING"
    return None if cache.members[0].recur[il] is None else "LINEAR"


def columns(cfg: ModelConfig, il: int) -> dict[str, int]:
    """Elements per row of everything that a step of layer il reads, makes and leaves."""
    hk, hv = cfg.head_dims(il)
    sizes = {"k": cfg.kv_heads(il) * hk, "v": cfg.kv_heads(il) * hv}
    sizes |= {"query": cfg.heads(il) * hk, "attended": cfg.heads(il) * hv, "residual": HIDDEN}
    if cfg.ssm is not None:
        heads, states = cfg.ssm.time_step_rank, cfg.ssm.time_step_rank * cfg.ssm.state_size
        sizes |= dict.fromkeys(("x", "convolved"), cfg.ssm.conv_dim)
        sizes |= dict.fromkeys(("alpha", "beta_raw", "g_log", "beta"), heads)
        sizes |= dict.fromkeys(("sq", "sk", "sv", "scanned"), states)
    return sizes


class Lane:
    """Buffers of one step of `rows` rows over a cache, or over a batch of sequences.

    fused: the last linear layer takes recur_step, the others its three operations one by one. salt: added to each
    token, so that others stand for them.
    """

    def __init__(self, cache: Any, rows: int, *, fused: bool = True, salt: int = 0) -> None:
        self.salt = salt
        self.cfg, self.rows, self.n = cache.cfg, rows, len(cache.members)
        first = cache.members[0]
        self.owners = {il: first.devices[first.plan.device_of(il)] for il in range(self.cfg.n_layer)}
        self.kinds = {il: kind for il in range(self.cfg.n_layer) if (kind := kind_of(cache, il)) is not None}
        self.fused = max((il for il, kind in self.kinds.items() if kind == "LINEAR"), default=None) if fused else None
        self.at: dict[tuple[int, str], Any] = {}
        self._fixed: list[Any] = []  # what the parts are cut from, of each device
        self._inputs: list[tuple[Any, list[tuple[int, str, int]]]] = []
        for e in dict.fromkeys(self.owners.values()):
            mine = [il for il in self.kinds if self.owners[il] is e]
            self._inputs.append((self._cut(e, mine, INPUTS), self._parts(mine, INPUTS)))
            self._cut(e, mine, MADE)
            self._cut(e, mine, RESULTS)
            for il in mine:
                if self.kinds[il] == "LINEAR":
                    self._weights(e, il)

    def _parts(self, layers: Sequence[int], names: dict[str, Any]) -> list[tuple[int, str, int]]:
        return [(il, name, columns(self.cfg, il)[name]) for il in layers for name in names[self.kinds[il]]]

    def _cut(self, e: Any, layers: Sequence[int], names: dict[str, Any]) -> Any:
        parts = self._parts(layers, names)
        whole = e.uninit(self.n * self.rows * sum(size for _, _, size in parts))
        self._fixed.append(whole)
        whole.copy_from(np.zeros(whole.len, np.float32))
        start = 0
        for il, name, size in parts:
            stop = start + self.n * self.rows * size
            self.at[il, name] = whole.view(start, stop)
            start = stop
        return whole

    def _weights(self, e: Any, il: int) -> None:
        for name in ("w", "dt_bias", "a"):
            array = self.constant(il, name)
            self.at[il, name] = e.uninit(array.size)
            self._fixed.append(self.at[il, name])
            self.at[il, name].copy_from(array)

    def constant(self, il: int, name: str) -> Array:
        """w, dt_bias or a of a linear layer, flat."""
        ssm = self.cfg.ssm
        assert ssm is not None
        if name == "w":
            return _convolution(il, ssm.conv_dim, ssm.conv_kernel)
        low, high = {"dt_bias": (-1, 1), "a": (-2, -0.1)}[name]
        return np.linspace(low, high, ssm.time_step_rank, dtype=np.float32)

    def fill(self, *sequences: tuple[int, Sequence[int]]) -> Lane:
        """Sets the inputs: of each sequence the position that the step starts at, and its tokens."""
        if len(sequences) != self.n or {len(tokens) for _, tokens in sequences} != {self.rows}:
            raise ValueError(f"{sequences} for {self.n} sequences of {self.rows} rows")
        for whole, parts in self._inputs:
            flat = [
                _row(self.salt + token, il, name, start + r, size)
                for il, name, size in parts
                for start, tokens in sequences
                for r, token in enumerate(tokens)
            ]
            if whole.len:
                whole.copy_from(np.concatenate(flat))
        return self

    def run(self, cache: Any, layers: Sequence[int] | None = None, taps: Sequence[int] = (), calls: Any = ops) -> None:
        """Enqueues the operations of the step, and after the layers of `taps` the tap; the step stays open.

        calls: ops, or what has the same functions.
        """
        for il in self.kinds if layers is None else layers:
            e = self.owners[il]
            at = {name: part for (layer, name), part in self.at.items() if layer == il}
            gates = [at[name] for name in ("alpha", "beta_raw", "dt_bias", "a") if name in at]
            if il == self.fused:
                calls.recur_step(e, cache, il, at["x"], at["w"], *gates, at["scanned"], eps=1e-6, scale=0.2)
            elif self.kinds[il] == "LINEAR":
                calls.conv_update(e, cache, il, at["x"], at["w"], at["convolved"])
                made = [at[name] for name in MADE["LINEAR"]]
                calls.gdn_prep(e, cache, il, at["convolved"], *gates, *made, eps=1e-6)
                calls.gdn_scan(e, cache, il, *made, at["scanned"], scale=0.2)
            else:
                if self.kinds[il] == "FULL":
                    calls.append_kv(e, cache, il, at["k"], at["v"])
                calls.attend(e, cache, il, at["query"], at["attended"], scale=SCALE)
            if il in taps:
                calls.tap_write(e, cache, il, at["residual"])

    def close(self) -> None:
        """Frees the buffers."""
        for each in self._fixed:
            each.close()

    def results(self, b: int = 0) -> list[dict[tuple[int, str], bytes]]:
        """What each row of sequence b has put out, by layer and name."""
        names = [(il, name) for il, kind in self.kinds.items() for name in RESULTS[kind]]
        names = [(il, name) for il, name in names if il != self.fused or name != "convolved"]  # nobody made that
        arrays = {key: self.at[key].to_numpy().reshape(self.n, self.rows, -1)[b] for key in names}
        return [{key: array[r].tobytes() for key, array in arrays.items()} for r in range(self.rows)]
