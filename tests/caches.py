"""Small caches, steps that drive them, and what there is to compare: shared by the tests of the cache.

A `Feed` decodes with inputs that are a function of (seed, layer, position) alone. A `History` is the
oracle: it decodes one token at a time on a cache of its own and keeps every state that this had.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.config import Gemma4Config, ModelConfig, SsmConfig
from memra_driver.formats import FormatPolicy

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


def rows_of(seed: int, il: int, name: str, start: int, count: int, columns: int) -> np.ndarray[Any, Any]:
    """[count, columns] unit-normal f32: the same row for the same position, whatever the call."""
    rows = [_row(seed, il, name, start + t, columns) for t in range(count)]
    return np.stack(rows) if rows else np.empty((0, columns), np.float32)


@functools.lru_cache(1 << 14)
def _row(seed: int, il: int, name: str, position: int, columns: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng([seed, il, zlib.crc32(name.encode()), position])
    return random.standard_normal(columns, np.float32)


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


def scalars(cache: Cache) -> dict[str, Any]:
    """Every number of the cache that is no address."""
    numbers: dict[str, Any] = {
        name: getattr(cache, name) for name in ("pos", "max_ctx", "step_rows", "replay_to", "generation", "id", "state")
    }
    for il, layer in enumerate(cache.kv):
        if layer is not None:
            numbers[f"{il}.len"], numbers[f"{il}.ops"] = layer.len, layer.step_ops
    for il, state in enumerate(cache.recur):
        if state is not None:
            numbers[f"{il}.swaps"], numbers[f"{il}.ops"] = state.swaps, state.step_ops
    return numbers


def planes(cache: Cache) -> dict[str, Any]:
    """Every live slice by name; states by handle, as they stand now."""
    found: dict[str, Any] = {}
    for il, layer in enumerate(cache.kv):
        if layer is not None:
            found |= {f"{il}.{name}": getattr(layer, name) for name in ("k", "v", "len_d")}
    for il, state in enumerate(cache.recur):
        if state is not None:
            found |= {f"{il}.{name}": getattr(state, name) for name in ("conv_state", "ssm_state", "ssm_state_alt")}
    for il in range(cache.cfg.n_layer):
        d = cache.plan.device_of(il)
        found |= {f"device{d}.pos_d": cache.pos_d(il), f"device{d}.health": cache.health_d(il)}
    return found


def addresses(cache: Cache) -> dict[str, int]:
    """The address of every slice; the two states of a layer in ascending order, since their handles swap."""
    found = {name: plane.ptr for name, plane in planes(cache).items()}
    for il, state in enumerate(cache.recur):
        if state is not None:
            pair = sorted((state.ssm_state.ptr, state.ssm_state_alt.ptr))
            found[f"{il}.ssm_state"], found[f"{il}.ssm_state_alt"] = pair
    return found


def image(cache: Cache, *snapshots: Any) -> dict[str, Any]:
    """Everything that a refusal must leave as it is: all bytes, all scalars, the handles; snapshots too."""
    seen = scalars(cache)
    for name, plane in planes(cache).items():
        seen[f"{name}.ptr"], seen[f"{name}.bytes"] = plane.ptr, plane.to_numpy().tobytes()
    for number, snap in enumerate(snapshots):
        seen[f"snap{number}"] = (list(snap.kv_len), snap.pos, snap.generation, snap.invalid)
        for name, kept in (("conv", snap.conv), ("ssm", snap.ssm)):
            seen[f"snap{number}.{name}"] = [None if each is None else each.to_numpy().tobytes() for each in kept]
    return seen


def beside(cache: Cache) -> dict[str, Any]:
    """What `image` leaves out: every buffer by name and address, parked logits, and the tap sink."""
    logits, sink, c = cache.last_logits_dev, cache.dflash_taps, cache.as_c().contents
    seen: dict[str, Any] = {"regions": cache.regions(), "round": cache.open_round, "logits_at": cache.logits_at}
    seen["present"] = c.last_logits_dev.present, c.dflash_taps.present
    if logits is not None:
        seen["logits"] = logits.ptr, logits.to_numpy().tobytes()
    if sink is not None:
        seen["taps"] = list(sink.layer_ids), sink.hidden, sink.t, sink.buf.ptr, sink.buf.to_numpy().tobytes()
    return seen


def device_counters(cache: Cache) -> tuple[dict[int, int], set[int]]:
    """len_d by layer, and the set of pos_d over the devices."""
    lens = {il: int(layer.len_d.to_numpy()[0]) for il, layer in enumerate(cache.kv) if layer is not None}
    return lens, {int(cache.pos_d(il).to_numpy()[0]) for il in range(cache.cfg.n_layer)}


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
