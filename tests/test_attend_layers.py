"""ops.attend picks the K/V and the window of its layer, and refuses what it has no kernel for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caches import POLICY, attention_only

from memra_driver import CacheOptions, CachePlan, Gemma4Config, ModelConfig, ops
from memra_driver.cache import Cache
from memra_driver.errors import CapacityError, ConfigError, DeviceMismatch, MemraError, StateError, UnsupportedError

ROWS = 9
# Layers windowed, windowed, global, windowed; then a windowed one that reads layer 3, and a global one that reads 2.
BORROWING = ModelConfig(
    arch="gemma4", n_layer=6, n_head=4, n_head_kv=2, head_dim_k=128, head_dim_v=128,
    gemma4=Gemma4Config(
        swa_pattern=(True, True, False, True, True, False), sliding_window=4, key_length_global=128,
        key_length_swa=64, shared_kv_layers=2,
    ),
)  # fmt: skip


def filled(dev: Any, cache: Cache, rng: np.random.Generator, rows: int = ROWS) -> None:
    for il, layer in enumerate(cache.kv):
        if layer is not None:
            k, v = dev.uninit(rows * layer.kv_dim_k), dev.uninit(rows * layer.kv_dim_v)
            for each in (k, v):
                each.copy_from(rng.standard_normal(each.len).astype(np.float32))
            ops.append_kv(dev, cache, il, k, v)
    cache.advance(dev, rows)
    cache.pos = rows - 1  # the last row is asked again


def expected(dev: Any, cache: Cache, source: int, q: Any, window: int) -> Any:
    """Float64 attention of the last row over what the expected layer decodes to."""
    layer = cache.kv[source]
    assert layer is not None
    rows, heads = layer.len, layer.n_head_kv
    k, v = dev.uninit(rows * layer.kv_dim_k), dev.uninit(rows * layer.kv_dim_v)
    ops.dequant_kv(dev, cache, source, 0, rows, k, v)
    keys = k.to_numpy().reshape(rows, heads, -1).astype(np.float64)
    values = v.to_numpy().reshape(rows, heads, -1).astype(np.float64)
    first = max(0, rows - window) if window else 0
    out = []
    for h, query in enumerate(q):
        of = h * heads // len(q)
        score = keys[first:, of] @ query
        weight = np.exp(score - score.max())
        out.append(weight / weight.sum() @ values[first:, of])
    return np.array(out)


@pytest.mark.parametrize("window", [None, 0, 1, 3, 9, 100])
def test_every_layer_attends_to_its_source_through_its_window(
    dev: Any, rng: np.random.Generator, window: int | None
) -> None:
    cfg = BORROWING
    with Cache.new(dev, cfg, 16, policy=POLICY) as cache:
        filled(dev, cache, rng)
        borrowers = 0
        for il in range(cfg.n_layer):
            source = cfg.kv_source(il)
            borrowers += source != il
            hk, hv = cfg.head_dims(il)
            q = rng.standard_normal((cfg.heads(il), hk)).astype(np.float32)
            held, out = dev.uninit(q.size), dev.uninit(cfg.heads(il) * hv)
            held.copy_from(q.reshape(-1))
            ops.attend(dev, cache, il, held, out, scale=1.0, window=window)
            width = (cfg.window(il) or 0) if window is None else window
            want = expected(dev, cache, source, q.astype(np.float64), width)
            got = out.to_numpy().reshape(want.shape)
            assert np.abs(got - want).max() <= 2e-3 * np.abs(want).max(), (il, source, width)
        assert borrowers == 2


@pytest.mark.parametrize("heads", [(4, 2), (6, 3), (4, 4), (8, 8)])
@pytest.mark.parametrize("window", [0, 100])
def test_both_launches_of_attend_have_the_same_tiles(
    dev: Any, rng: np.random.Generator, heads: tuple[int, int], window: int
) -> None:
    """Where keys fall into several: a group that the second one does not know of would be left out."""
    cfg = attention_only(1, n_head=heads[0], n_head_kv=heads[1], head_dim_k=64, head_dim_v=64)
    with Cache.new(dev, cfg, 200, policy=POLICY) as cache:
        filled(dev, cache, rng, 190)
        q = rng.standard_normal((heads[0], 64)).astype(np.float32)
        held, out = dev.uninit(q.size), dev.uninit(q.size)
        held.copy_from(q.reshape(-1))
        ops.attend(dev, cache, 0, held, out, scale=0.125, window=window)
        want = expected(dev, cache, 0, q.astype(np.float64) * 0.125, window)
        assert np.abs(out.to_numpy().reshape(want.shape) - want).max() <= 2e-3 * np.abs(want).max()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n_head": 3, "n_head_kv": 2, "head_dim_k": 64, "head_dim_v": 64}, "3 query heads over 2"),
        ({"n_head": 17, "n_head_kv": 1, "head_dim_k": 64, "head_dim_v": 64}, "17 query heads over 1"),
        ({"n_head": 1, "n_head_kv": 1, "head_dim_k": 32, "head_dim_v": 64}, "head_dim_k 32 has no kernel"),
        ({"n_head": 1, "n_head_kv": 1, "head_dim_k": 64, "head_dim_v": 160}, "head_dim_v 160 has no kernel"),
    ],
)
def test_a_geometry_without_a_kernel_is_refused_by_the_plan_and_the_operation(
    dev: Any, fields: dict[str, int], says: str
) -> None:
    cfg = attention_only(1, **fields)
    assert [says in problem for problem in CachePlan(cfg, 8, POLICY).check_ops()] == [True]
    with Cache.new(dev, cfg, 8, policy=POLICY) as cache:
        q, out = dev.zeros(cfg.heads(0) * cfg.head_dims(0)[0]), dev.zeros(cfg.heads(0) * cfg.head_dims(0)[1])
        with pytest.raises(UnsupportedError, match=says):
            ops.attend(dev, cache, 0, q, out, scale=1.0)


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_k_and_v_of_a_layer_on_another_device_are_not_borrowed(make_dev: Any, kind: str) -> None:
    """Neither on the device of the K/V nor on that of the layer."""
    devices = [make_dev(kind), make_dev(kind)]
    with Cache.new_pp2(*devices, 4, BORROWING, 16, policy=POLICY) as cache:
        for il, source in ((4, 3), (5, 2)):
            text = f"layer {il} reads the K/V of layer {source}, which lives on another device"
            for e, error, says in (
                (devices[0], UnsupportedError, text), (devices[1], DeviceMismatch, f"layer {source}"),
            ):  # fmt: skip
                with pytest.raises(error, match=says):
                    ops.attend(e, cache, il, e.zeros(4 * 128), e.zeros(4 * 128), scale=1.0)


def test_what_attend_refuses_it_leaves_as_it_is(dev: Any, rng: np.random.Generator) -> None:
    cfg = attention_only(1, n_head=2, n_head_kv=1, head_dim_k=64, head_dim_v=64)
    with Cache.new(dev, cfg, 16, policy=POLICY, options=CacheOptions(max_rows=4)) as cache:
        filled(dev, cache, rng)
        q, out = dev.zeros(5 * 128), dev.zeros(5 * 128)
        before, digest = out.to_numpy().tobytes(), cache.digest()

        def attend(rows: int, window: int | None = None, result: Any = out) -> None:
            ops.attend(dev, cache, 0, q.view(0, rows * 128), result.view(0, rows * 128), scale=1.0, window=window)

        attend(0)
        refusals: list[tuple[type[MemraError], str, Any]] = [
            (StateError, "only 9 rows stand", lambda: attend(2)),
            (CapacityError, "max_rows=4", lambda: attend(5)),
            (ConfigError, "window -1", lambda: attend(1, -1)),
            (MemraError, "share memory", lambda: attend(1, None, q)),
        ]
        for kind, says, call in refusals:
            with pytest.raises(kind, match=says):
                call()
        assert (out.to_numpy().tobytes(), cache.digest()) == (before, digest)
