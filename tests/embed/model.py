"""What engine.c feeds the cache with, and the digests of plain decoding with it: its twin in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig, SsmConfig
from memra_driver.formats import FormatPolicy

MAX_CTX = 64
STATE, V_HEADS, K_HEADS, TAPS, HEAD_DIM, HEADS, HIDDEN, VOCAB = 32, 2, 1, 4, 64, 2, 8, 16
CHANNELS, VECTOR = STATE * (2 * K_HEADS + V_HEADS), V_HEADS * STATE
CONFIG = ModelConfig(
    n_layer=4, n_head=HEADS, n_head_kv=1, head_dim_k=HEAD_DIM, head_dim_v=HEAD_DIM, n_embd=HIDDEN, n_vocab=VOCAB,
    full_attention_interval=2, ssm=SsmConfig(TAPS, 0, STATE, V_HEADS, K_HEADS),
)  # fmt: skip
POLICY = FormatPolicy()
NAMES = ("k", "v", "q", "x", "alpha", "beta", "residual", "logits")
COLUMNS = dict(
    zip(NAMES, (HEAD_DIM, HEAD_DIM, HEADS * HEAD_DIM, CHANNELS, V_HEADS, V_HEADS, HIDDEN, VOCAB), strict=True)
)
F32 = np.ndarray[Any, np.dtype[np.float32]]


def number(layer: int, name: int, position: int, token: int, n: int) -> F32:
    """n numbers -1 .. 1, exact in f32: `number` of engine.c for columns 0 .. n-1."""
    word = np.uint32
    mixed = layer * 0x9E3779B1 ^ name * 0x85EBCA77 ^ position * 0xC2B2AE3D ^ token * 0x27D4EB2F
    x = word(mixed & 0xFFFFFFFF) ^ np.arange(n, dtype=word)
    with np.errstate(over="ignore"):
        x = (x ^ x >> word(15)) * word(0x2C1B3C6D)
        x = (x ^ x >> word(12)) * word(0x297A2D39)
    x ^= x >> word(15)
    return (((x >> word(8)).astype(np.int32) - (1 << 23)) / np.float32(1 << 23)).astype(np.float32)


def inputs(il: int, position: int, token: int) -> dict[str, F32]:
    return {name: number(il, i, position, token, COLUMNS[name]) for i, name in enumerate(NAMES)}


def put(e: Any, array: F32) -> Any:
    held = e.uninit(array.size)
    held.copy_from(np.ascontiguousarray(array, np.float32).reshape(-1))
    return held


def true_token(position: int) -> int:
    return position % 7


class Model:
    """The buffers of one step of one row over a cache that somebody made."""

    def __init__(self, e: Any) -> None:
        self.e = e
        self.w = put(e, np.float32(0.4) * number(99, 0, 0, 0, CHANNELS * TAPS))
        self.dt_bias, self.a = put(e, number(99, 1, 0, 0, V_HEADS)), put(e, number(99, 2, 0, 0, V_HEADS))
        self.convolved, self.scanned = e.uninit(CHANNELS), e.uninit(VECTOR)
        self.made = [e.uninit(n) for n in (VECTOR, VECTOR, VECTOR, V_HEADS, V_HEADS)]
        self.attended = e.uninit(HEADS * HEAD_DIM)
        self.rows = {il: {name: e.uninit(n) for name, n in COLUMNS.items()} for il in range(CONFIG.n_layer)}

    def decode(self, cache: Cache, calls: Any = ops, layers: Sequence[int] = range(CONFIG.n_layer)) -> None:
        """The operations of one plain step of the true token. calls: `ops`, or what has the same functions."""
        e, position = self.e, cache.pos
        for il in layers:
            at = self.rows[il]
            for name, array in inputs(il, position, true_token(position)).items():
                at[name].copy_from(array)
            if cache.kv[il] is not None:
                calls.append_kv(e, cache, il, at["k"], at["v"])
                calls.attend(e, cache, il, at["q"], self.attended, scale=0.125)
                continue
            calls.conv_update(e, cache, il, at["x"], self.w, self.convolved)
            gates = (at["alpha"], at["beta"], self.dt_bias, self.a)
            calls.gdn_prep(e, cache, il, self.convolved, *gates, *self.made, eps=1e-6)
            calls.gdn_scan(e, cache, il, *self.made, self.scanned, scale=0.2)


def plain_digests(e: Any, lengths: list[int]) -> list[str]:
    """The digests of the true tokens, decoded one by one, at each of `lengths`."""
    model, found = Model(e), []
    with Cache.new(e, CONFIG, MAX_CTX, policy=POLICY) as cache:
        for n in range(max(lengths) + 1):
            if n in lengths:
                found.append(cache.digest())
            if n < max(lengths):
                model.decode(cache)
                cache.advance(e)
    return found
