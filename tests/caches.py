"""Small caches, steps that drive them, and what there is to compare: shared by the tests of the cache.

A `Feed` decodes with inputs that are a function of (seed, layer, position) alone. A `History` is the
oracle: it decodes one token at a time on a cache of its own and keeps every state that this had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.config import Gemma4Config, ModelConfig, SsmConfig
from memra_driver.formats import FormatPolicy
from memra_driver.soak.lane import rows_of
from memra_driver.soak.look import addresses, beside, device_counters, image, planes, scalars

__all__ = [
    "HISTORY_TOKENS", "POLICY", "TINY_SSM", "Feed", "History", "addresses", "attention_only", "beside",
    "device_counters", "gemma", "image", "planes", "put", "rows_of", "scalars", "sequence", "tiny",
]  # fmt: skip

POLICY = FormatPolicy()
TINY_SSM = SsmConfig(conv_kernel=4, state_size=32, time_step_rank=2, group_count=1)


def tiny(**changes: Any) -> ModelConfig:
    """Layers [linear, linear, linear, full] x 2; 2 K/V heads of 64; 128 channels, 4 taps; 2 states of 32 x 32."""
    values: dict[str, Any] = {
        "n_layer": 8, "n_head_kv": 2, "head_dim_k": 64, "head_dim_v": 64, "full_attention_interval": 4,
        "n_embd": 32, "n_vocab": 50, "ssm": TINY_SSM,
    }  # fmt: skip
    return ModelConfig(**values | changes)


def attention_only(n_layer: int = 3, **changes: Any) -> ModelConfig:
    """No recurrent layers."""
    return tiny(n_layer=n_layer, full_attention_interval=0, ssm=None, **changes)


def gemma(shared: int = 0, **changes: Any) -> ModelConfig:
    """Six layers, windowed except every third; windowed heads of 32 x 4, global ones of 64 x 2."""
    part = {
        "head_count_kv": (4, 4, 2, 4, 4, 2), "swa_pattern": (True, True, False) * 2, "sliding_window": 8,
        "key_length_global": 64, "key_length_swa": 32, "shared_kv_layers": shared,
    }  # fmt: skip
    values: dict[str, Any] = {"n_layer": 6, "n_head_kv": 2, "head_dim_k": 64, "head_dim_v": 64, "arch": "gemma4"}
    return ModelConfig(**values | {"n_embd": 32, "n_vocab": 50, "gemma4": Gemma4Config(**part)} | changes)


def put(e: Any, array: np.ndarray[Any, Any]) -> Any:
    """A slice of e with the array's elements."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype == np.float32:
        slice_ = e.uninit(flat.size)
    elif flat.dtype == np.uint16:  # what bf16 travels as
        slice_ = e.alloc_u8(2 * flat.size).cast(np.uint16)
    else:
        raise AssertionError(flat.dtype)
    slice_.copy_from(flat)
    return slice_


class Feed:
    """Runs the ops of whole steps over a cache."""

    def __init__(self, cache: Cache, seed: int = 0) -> None:
        self.cache, self.seed = cache, seed

    def append(self, il: int, rows: int, seed: int | None = None) -> None:
        layer = self.cache.kv[il]
        assert layer is not None
        k, v = (
            put(layer.owner, self._rows(il, name, rows, columns, seed))
            for name, columns in (("k", layer.kv_dim_k), ("v", layer.kv_dim_v))
        )
        ops.append_kv(layer.owner, self.cache, il, k, v)

    def conv(self, il: int, rows: int, seed: int | None = None) -> Any:
        layer = self.cache.recur[il]
        assert layer is not None
        e = layer.owner
        x = put(e, self._rows(il, "x", rows, layer.conv_dim, seed))
        w = put(e, rows_of(0, il, "w", 0, layer.conv_dim, layer.d_conv) * np.float32(0.4))
        out = e.uninit(x.len)
        ops.conv_update(e, self.cache, il, x, w, out)
        return out

    def scan(self, il: int, conv_out: Any, rows: int, seed: int | None = None) -> Any:
        layer = self.cache.recur[il]
        assert layer is not None
        e, heads, size = layer.owner, layer.num_v, layer.state_size
        alpha, beta_raw = (put(e, self._rows(il, name, rows, heads, seed)) for name in ("alpha", "beta_raw"))
        dt_bias, a = (put(e, np.linspace(low, high, heads, dtype=np.float32)) for low, high in ((-1, 1), (-2, -0.1)))
        q, k, v, out = (e.uninit(rows * heads * size) for _ in range(4))
        g_log, beta = (e.uninit(rows * heads) for _ in range(2))
        ops.gdn_prep(e, self.cache, il, conv_out, alpha, beta_raw, dt_bias, a, q, k, v, g_log, beta, eps=1e-6)
        ops.gdn_scan(e, self.cache, il, q, k, v, g_log, beta, out, scale=size**-0.5)
        return out

    def step(
        self, rows: int, *, layers: Sequence[int] | None = None, advance: bool = True, seed: int | None = None
    ) -> None:
        """One step over `layers` (default: all); seed takes other tokens than the feed's own."""
        for il in range(self.cache.cfg.n_layer) if layers is None else layers:
            if self.cache.kv[il] is not None:
                self.append(il, rows, seed)
            elif self.cache.recur[il] is not None:
                self.scan(il, self.conv(il, rows, seed), rows, seed)
        if advance:
            self.cache.advance(self.cache.devices[0], rows)

    def _rows(self, il: int, name: str, rows: int, columns: int, seed: int | None) -> np.ndarray[Any, Any]:
        return rows_of(self.seed if seed is None else seed, il, name, self.cache.pos, rows, columns)


def sequence(cache: Cache) -> dict[str, bytes]:
    """What the sequence is: K/V bytes below len, rings, current states."""
    seen: dict[str, bytes] = {}
    for il, layer in enumerate(cache.kv):
        if layer is not None:
            seen[f"{il}.k"] = layer.k.to_numpy()[: layer.len * layer.k_tok_bytes].tobytes()
            seen[f"{il}.v"] = layer.v.to_numpy()[: layer.len * layer.v_tok_bytes].tobytes()
    for il, state in enumerate(cache.recur):
        if state is not None:
            seen[f"{il}.conv"] = state.conv_state.to_numpy().tobytes()
            seen[f"{il}.ssm"] = state.ssm_state.to_numpy().tobytes()
    return seen


HISTORY_TOKENS = 32
_histories: dict[str, History] = {}


class History:
    """states[t]: what plain decoding of t tokens leaves, t = 0 .. tokens."""

    def __init__(self, e: Any, cfg: ModelConfig, max_ctx: int, tokens: int, seed: int = 0) -> None:
        with Cache.new(e, cfg, max_ctx, policy=POLICY) as cache:
            feed = Feed(cache, seed)
            self.states = [sequence(cache)]
            for _ in range(tokens):
                feed.step(1)
                self.states.append(sequence(cache))

    @classmethod
    def of(cls, e: Any) -> History:
        """The tiny model's on a device of e's kind, made once: kinds differ in the last bits of expf."""
        kind = type(e).__name__
        if kind not in _histories:
            _histories[kind] = cls(e, tiny(), HISTORY_TOKENS, HISTORY_TOKENS)
        return _histories[kind]

    def check(self, cache: Cache) -> None:
        """The cache stands at pos in every clock, with the bytes that plain decoding has there."""
        expected = self.states[cache.pos]
        lens = {il: cache.pos for il, layer in enumerate(cache.kv) if layer is not None}
        assert {il: layer.len for il, layer in enumerate(cache.kv) if layer is not None} == lens
        assert device_counters(cache) == (lens, {cache.pos})
        assert sequence(cache) == expected
