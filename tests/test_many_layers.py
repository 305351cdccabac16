"""Counters beyond one launch's masks, and what else only larger or older caches show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memra_driver import Cache, CacheOptions, CachePlan, ModelConfig, ops
from memra_driver.errors import SnapshotError
from memra_driver.round import Round


def attention(n_layer: int, **fields: Any) -> ModelConfig:
    return ModelConfig(n_layer=n_layer, n_head_kv=1, head_dim_k=32, head_dim_v=32, **fields)


def counters(cache: Cache) -> tuple[list[int], int]:
    """Every len_d, and pos_d, as the device holds them."""
    lens = [int(layer.len_d.to_numpy()[0]) for layer in cache.kv if layer is not None]
    return lens, int(cache.pos_d(0).to_numpy()[0])


@pytest.mark.parametrize("n_layer", [63, 64, 65, 127, 128, 129, 200, 260])
def test_every_counter_of_a_deep_cache_is_stamped(dev: Any, n_layer: int) -> None:
    with Cache.new(dev, attention(n_layer), 16) as cache:
        expected = [(7 * il) % 13 for il in range(n_layer)]  # many distinct values in every window
        for layer, length in zip(cache.kv, expected, strict=True):
            assert layer is not None
            layer.len = length
        cache.pos = 5
        cache.sync_d(dev)
        assert counters(cache) == (expected, 5)
        cache.advance(dev, 2)
        assert counters(cache) == (expected, 7)
        cache.truncate(dev, 3)
        assert counters(cache) == ([min(length, 3) for length in expected], 3)
        cache.reset(dev)
        assert counters(cache) == ([0] * n_layer, 0)


@pytest.mark.parametrize("n_layer", [128, 129, 130, 200, 260])
def test_every_counter_of_a_deep_cache_follows_a_round(dev: Any, n_layer: int) -> None:
    """By counts of the device and, on its clock, of the host; a layer that takes no part stays."""
    held = dev.uninit(4 * 32)
    held.copy_from(np.ones(held.len, np.float32))
    cfg, options = attention(n_layer), CacheOptions(round_width=4)

    def rows(n: int, layers: range) -> None:
        for il in layers:
            ops.append_kv(dev, cache, il, held.view(0, n * 32), held.view(0, n * 32))

    whole, all_but_one = range(n_layer), range(n_layer - 1)
    with Cache.new(dev, cfg, 16, options=options) as cache:
        rows(2, whole)
        cache.advance(dev, 2)
        for n, accept, layers, by in ((4, 3, whole, "device"), (3, 1, whole, "host"), (3, 2, all_but_one, "device")):
            with Round(cache, dev, width=4) as r:
                rows(n, layers)
                if by == "device":
                    r.commit_from_device(dev.htod_i32([accept]))
                else:
                    r.commit(accept)  # on the device's clock still
        assert counters(cache) == ([8] * (n_layer - 1) + [6], 8)
        cache.settle(dev)
        assert ([layer.len for layer in cache.kv if layer is not None], cache.pos) == counters(cache)
    held.close()


def test_a_snapshot_beyond_a_truncation_is_not_restored(dev: Any) -> None:
    rows = np.ones((4, 32), np.float32)
    held = dev.uninit(rows.size)
    held.copy_from(rows.reshape(-1))
    with Cache.new(dev, attention(1), 16) as cache:
        ops.append_kv(dev, cache, 0, held, held)
        cache.advance(dev, 4)
        early = cache.snapshot(dev)
        ops.append_kv(dev, cache, 0, held, held)
        cache.advance(dev, 4)
        late = cache.snapshot(dev)
        cache.truncate(dev, 6)
        ops.append_kv(dev, cache, 0, held, held)
        cache.advance(dev, 4)
        with pytest.raises(SnapshotError, match="position 8"):
            cache.rollback(dev, late, 0)
        cache.rollback(dev, early, 0)
        assert (cache.pos, cache.kv[0].len) == (4, 4)  # type: ignore[union-attr]
        early.close()
        late.close()
    held.close()


def test_the_plan_prices_what_comes_later() -> None:
    later = CachePlan(attention(2, n_embd=96, n_vocab=50), 8).first_use
    assert later["tap_row"] == 96 * 4
    assert later["logits"] == 50 * 4
    assert later["snapshot"] == 0
