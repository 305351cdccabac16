"""What an operation hands to its kernel: the numbers of the caller, the layer and the position."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from caches import POLICY, attention_only, tiny

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache
from memra_driver.errors import StateError
from memra_driver.health import Fault, FaultCount

LAYER, POS = 5, 4


def put(dev: Any, array: Any) -> Any:
    held = dev.uninit(array.size)
    held.copy_from(np.ascontiguousarray(array, np.float32).reshape(-1))
    return held


def test_a_fault_is_reported_for_its_layer_and_position(dev: Any, rng: np.random.Generator) -> None:
    with Cache.new(dev, tiny(), 16, policy=POLICY) as cache:
        cache.advance(dev, POS)
        layer = cache.recur[LAYER]
        assert layer is not None
        x = rng.standard_normal((3, layer.conv_dim))
        x[1, 7] = np.nan
        rows, w = put(dev, x), put(dev, rng.standard_normal((layer.conv_dim, layer.d_conv)))
        ops.conv_update(dev, cache, LAYER, rows, w, dev.uninit(x.size))
        assert cache.health().faults == {Fault.NONFINITE: FaultCount(1, LAYER, POS + 1)}
        cache.clear_health()
        heads, size = layer.num_v, layer.state_size
        gates = [put(dev, rng.standard_normal((3, heads))) for _ in range(2)]
        constants = [put(dev, rng.standard_normal(heads)) for _ in range(2)]
        made = [dev.uninit(3 * heads * n) for n in (size, size, size, 1, 1)]
        ops.gdn_prep(dev, cache, LAYER, rows, *gates, *constants, *made, eps=1e-6)
        seen = cache.health().faults[Fault.NONFINITE]
        assert (seen.layer, seen.slot) == (LAYER, POS + 1)


def test_eps_and_scale_are_those_of_the_caller(dev: Any, rng: np.random.Generator) -> None:
    with Cache.new(dev, tiny(), 16, policy=POLICY) as cache:
        layer = cache.recur[LAYER]
        assert layer is not None
        heads, keys, size = layer.num_v, layer.num_k, layer.state_size
        x = rng.standard_normal((1, layer.conv_dim)).astype(np.float32)
        gates = [put(dev, np.zeros((1, heads))) for _ in range(2)]
        constants = [put(dev, np.zeros(heads)) for _ in range(2)]
        q, k, v = (dev.uninit(heads * size) for _ in range(3))
        g_log, beta, out = dev.uninit(heads), dev.uninit(heads), dev.uninit(heads * size)
        ops.gdn_prep(dev, cache, LAYER, put(dev, x), *gates, *constants, q, k, v, g_log, beta, eps=0.5)
        by_head = x[0, : 2 * keys * size].reshape(2, keys, size).astype(np.float64)
        unit = by_head / np.sqrt((by_head**2).sum(axis=2, keepdims=True) + 0.5)
        of = np.arange(heads) % keys
        for got, want in zip((q, k), unit[:, of], strict=True):
            np.testing.assert_allclose(got.to_numpy().reshape(heads, size), want, atol=1e-5)
        ops.gdn_scan(dev, cache, LAYER, q, k, v, g_log, beta, out, scale=3.0)
        # From an empty state, with g_log 0 and beta 1/2: S = v k^T / 2, and out = 3 S q.
        along = (unit[0, of] * unit[1, of]).sum(axis=1, keepdims=True)
        want = 1.5 * v.to_numpy().reshape(heads, size) * along
        np.testing.assert_allclose(out.to_numpy().reshape(heads, size), want, atol=1e-4)


def test_every_operation_on_a_closed_cache_says_that_it_is_closed(dev: Any) -> None:
    cache = Cache.new(dev, tiny(), 16, policy=POLICY)
    other = Cache.new(dev, tiny(), 16, policy=POLICY)
    batch = CacheBatch([other, cache])
    cache.close()
    row = dev.zeros(1)
    for member in (cache, batch):
        for call in (
            lambda c: ops.append_kv(dev, c, 3, row, row),
            lambda c: ops.conv_update(dev, c, LAYER, row, row, row),
            lambda c: ops.gdn_prep(dev, c, LAYER, *[row] * 10, eps=1e-6),
            lambda c: ops.gdn_scan(dev, c, LAYER, *[row] * 6, scale=1.0),
            lambda c: ops.attend(dev, c, 3, row, row, scale=1.0),
            lambda c: c.advance(dev, 1),
        ):
            with pytest.raises(StateError, match="the cache is closed"):
                call(member)
    for call in (
        lambda: ops.dequant_kv(dev, cache, 3, 0, 0, row, row), lambda: ops.tap_write(dev, cache, 0, row),
        lambda: cache.park_logits(dev, row), lambda: cache.take_logits(dev), lambda: cache.arm_taps(dev, [0], 1, 8),
    ):  # fmt: skip
        with pytest.raises(StateError, match="the cache is closed"):
            call()
    batch.close()
    other.close()


def test_a_length_out_of_range_is_in_the_way_of_its_own_layer_alone(dev: Any, rng: np.random.Generator) -> None:
    """A length that the engine has assigned; nothing is read or written through it."""
    cfg = attention_only(2, n_head=2)
    with Cache.new(dev, cfg, 16, policy=POLICY) as cache:
        k, v = (put(dev, rng.standard_normal((1, n))) for n in (cache.kv_layer(1).kv_dim_k, cache.kv_layer(1).kv_dim_v))
        q, out = (put(dev, np.zeros((1, 2 * dim))) for dim in cfg.head_dims(1))
        cache.kv_layer(0).len = 17
        for il in (0, 1):
            calls = (
                lambda il=il: ops.append_kv(dev, cache, il, k, v),
                lambda il=il: ops.attend(dev, cache, il, q, out, scale=1.0),
                lambda il=il: ops.dequant_kv(dev, cache, il, 0, 1, dev.uninit(k.len), dev.uninit(v.len)),
            )
            for call in calls:
                with pytest.raises(StateError, match="layer 0: len is 17") if il == 0 else nullcontext():
                    call()
