"""Models of every preset's layer pattern at small widths, and a session over any stages: for tests of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from caches import POLICY, TINY_SSM, Feed, device_counters

from memra_driver.cache import Cache
from memra_driver.config import ModelConfig
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

MAX_CTX = 32
OPTIONS = CacheOptions(round_width=4)
SMALL_SSM = replace(TINY_SSM, time_step_rank=1)


def small(preset: str) -> ModelConfig:
    """The preset's layers, each of the kind that it has there, with heads of 32 and 64, and a state of 32 x 32."""
    cfg = ModelConfig.from_preset(preset)
    gemma = cfg.gemma4
    if gemma is not None:
        counts = tuple(1 + count % 2 for count in gemma.head_count_kv)
        gemma = replace(gemma, head_count_kv=counts, key_length_global=64, key_length_swa=32, sliding_window=4)
    return replace(
        cfg, n_head=2, n_head_kv=1, head_dim_k=64, head_dim_v=64, n_embd=16, n_vocab=20, gemma4=gemma,
        ssm=None if cfg.ssm is None else SMALL_SSM,
    )  # fmt: skip


def placed(devices: Sequence[Any], fence: Sequence[int], cfg: ModelConfig, options: CacheOptions = OPTIONS) -> Cache:
    """A cache with the stages of `fence` on devices[s]."""
    return Cache.new_ppn(devices, fence, cfg, MAX_CTX, policy=POLICY, options=options)


def session(cache: Cache, *, counts: Sequence[int] = (1, 0)) -> list[Any]:
    """Steps, a roll back, a round that the host ends and some that the device does: the sequence after each."""
    first, last = cache.devices[0], cache.devices[cache.plan.placement[-1]]
    feed, rows, seen = Feed(cache), 2, []

    def look() -> None:
        seen.append((cache.digest(), device_counters(cache), cache.health().faults))

    feed.step(rows)
    with cache.snapshot(last) as snap:
        feed.step(2)
        cache.rollback(first, snap, 1)
        feed.step(1)
        look()
        with Round(cache, last, width=4) as r:
            feed.step(rows, advance=False)
            r.commit(1)
        for count in counts:
            accepted = last.htod_i32([count])
            with Round(cache, first, width=4) as r:
                feed.step(rows, advance=False)
                r.commit_from_device(accepted)
            accepted.copy_from(np.array([rows], np.int32))  # behind the copies that the others have taken
            cache.settle(first)
            look()
        cache.rollback(last, snap, 0)
    look()
    return seen
