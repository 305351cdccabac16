"""The error record: which fault, how often, where first; what clears it, and what a strict cache does about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, image, put, tiny

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import HealthError
from memra_driver.formats import FormatPolicy
from memra_driver.health import Fault, FaultCount
from memra_driver.plan import CacheOptions

Array = np.ndarray[Any, Any]


def new(e: Any, cfg: Any, max_ctx: int = 64, policy: FormatPolicy = POLICY, **options: Any) -> Cache:
    return Cache.new(e, cfg, max_ctx, policy=policy, options=CacheOptions(**options))


def nan_at(rows: int, columns: int, *where: tuple[int, int], value: float = np.nan) -> Array:
    array = np.ones((rows, columns), np.float32)
    for row, column in where:
        array[row, column] = value
    return array


def test_the_record_names_the_fault_the_first_place_and_how_often(dev: Any) -> None:
    with new(dev, tiny()) as cache:
        Feed(cache).step(5)
        assert not cache.health()
        assert str(cache.health()) == "no faults"
        bad, good = nan_at(3, 128, (1, 0), (1, 31), (1, 32), (2, 127)), np.ones((3, 128), np.float32)
        ops.append_kv(dev, cache, 7, put(dev, bad), put(dev, good))
        ops.append_kv(dev, cache, 3, put(dev, good), put(dev, nan_at(3, 128, (2, 5), value=np.inf)))
        health = cache.health()
        assert bool(health)
        (seen,) = health.faults.values()
        assert (seen.count, seen.layer, seen.slot) == (4, 7, 6)  # blocks, not elements; row 1 of position 5
        assert str(health) == "NONFINITE x4, first at layer 7, position 6"


def test_the_lowest_position_and_then_the_lowest_layer_is_the_first(dev: Any) -> None:
    with new(dev, attention_only(3)) as cache:
        rows = put(dev, nan_at(1, 128, (0, 0)))
        for il in (2, 0, 1):
            ops.append_kv(dev, cache, il, rows, rows)
        assert (cache.health().faults[Fault.NONFINITE].layer, cache.health().faults[Fault.NONFINITE].slot) == (0, 0)
        cache.advance(dev)
        ops.append_kv(dev, cache, 0, rows, rows)
        assert cache.health().faults[Fault.NONFINITE].slot == 0
        assert cache.health().faults[Fault.NONFINITE].count == 8


def test_conv_and_prep_report_runs_of_32_and_gates(dev: Any) -> None:
    with new(dev, tiny(n_layer=1)) as cache:
        weights = put(dev, np.ones((128, 4), np.float32))
        out = dev.uninit(2 * 128)
        ops.conv_update(dev, cache, 0, put(dev, nan_at(2, 128, (0, 3), (0, 4), (1, 64))), weights, out)
        assert cache.health().faults[Fault.NONFINITE].count == 2
        cache.clear_health()
        heads = [dev.uninit(2 * 2 * 32) for _ in range(3)]
        gates = [dev.uninit(2 * 2) for _ in range(2)]
        ops.gdn_prep(
            dev, cache, 0, put(dev, nan_at(2, 128, (1, 0), (1, 127))), put(dev, nan_at(2, 2, (1, 1))),
            *(put(dev, np.ones(n, np.float32)) for n in (4, 2, 2)), *heads, *gates, eps=1e-6,
        )  # fmt: skip
        seen = cache.health().faults[Fault.NONFINITE]
        assert (seen.count, seen.slot, seen.layer) == (3, 1, 0)  # a run of q, a run of v, one gate


@pytest.mark.parametrize("fused", [False, True], ids=["gdn_prep", "recur_step"])
@pytest.mark.parametrize("spoiled", [("dt_bias",), ("a",), ("dt_bias", "a"), ("alpha", "a")], ids="+".join)
def test_a_constant_of_the_gates_that_is_not_finite_counts_once_for_each_row_and_head(
    dev: Any, spoiled: tuple[str, ...], fused: bool
) -> None:
    gates = {"alpha": np.ones((2, 2), np.float32), "beta": np.ones((2, 2), np.float32)}
    gates |= {"dt_bias": np.ones(2, np.float32), "a": -np.ones(2, np.float32)}
    for name in spoiled:
        gates[name][..., 1] = np.nan if name == "a" else -np.inf
    with new(dev, tiny(n_layer=1)) as cache:
        given = [put(dev, array) for array in gates.values()]
        rows = put(dev, np.ones((2, 128), np.float32))
        if fused:
            w, out = put(dev, np.ones((128, 4), np.float32)), dev.uninit(2 * 2 * 32)
            ops.recur_step(dev, cache, 0, rows, w, *given, out, eps=1e-6, scale=0.2)
        else:
            made = [dev.uninit(2 * 2 * 32) for _ in range(3)] + [dev.uninit(2 * 2) for _ in range(2)]
            ops.gdn_prep(dev, cache, 0, rows, *given, *made, eps=1e-6)
        assert cache.health().faults == {Fault.NONFINITE: FaultCount(2, 0, 0)}


def test_a_scale_that_f16_cannot_hold_is_reported_and_finite_inputs_only(dev: Any) -> None:
    with new(dev, attention_only(1)) as cache:
        large = np.float32(65520 * 127)  # d rounds to an infinity
        rows = nan_at(1, 128, (0, 0), (0, 40), value=large)
        rows[0, 33] = np.inf  # of the second block, which is a non-finite one then
        ops.append_kv(dev, cache, 0, put(dev, rows), put(dev, nan_at(1, 128, (0, 0), value=70000 * 31)))
        faults = cache.health().faults
        assert (faults[Fault.SCALE_OVERFLOW].count, faults[Fault.NONFINITE].count) == (2, 1)
        assert set(faults) == {Fault.SCALE_OVERFLOW, Fault.NONFINITE}


SATURATION = {  # value -> (byte, counted as saturated)
    448.0: (0x7E, False), 464.0: (0x7E, False), 464.5: (0x7E, True), 465.0: (0x7E, True), 1000.0: (0x7E, True),
    -465.0: (0xFE, True), np.inf: (0x7E, False), -np.inf: (0xFE, False), np.nan: (0x7F, False), -0.0: (0x80, False),
    2.0**-9: (0x01, False), 2.0**-10: (0x00, False), 2.0**-11: (0x00, False), -(2.0**-11): (0x80, False),
}  # fmt: skip


def test_e4m3_saturates_by_one_rule_and_counts_it(dev: Any) -> None:
    with new(dev, attention_only(1), policy=FormatPolicy(kv_fp8=True)) as cache:
        rows = np.zeros((len(SATURATION), 128), np.float32)
        rows[:, 33] = list(SATURATION)
        ops.append_kv(dev, cache, 0, put(dev, rows), put(dev, np.zeros_like(rows)))
        stored = cache.kv[0].k.to_numpy()[: rows.size].reshape(rows.shape)
        assert stored[:, 33].tolist() == [byte for byte, _ in SATURATION.values()]
        assert not stored[:, :33].any()
        assert not stored[:, 34:].any()
        faults = cache.health().faults
        counted = [index for index, (_, saturated) in enumerate(SATURATION.values()) if saturated]
        assert (faults[Fault.FP8_SATURATED].count, faults[Fault.FP8_SATURATED].slot) == (len(counted), counted[0])
        assert faults[Fault.NONFINITE].count == 3


def test_clear_health_empties_the_record_and_nothing_else(dev: Any) -> None:
    with new(dev, attention_only(1)) as cache:
        rows = put(dev, nan_at(1, 128, (0, 0)))
        ops.append_kv(dev, cache, 0, rows, rows)
        before = image(cache)
        cache.clear_health()
        after = image(cache)
        assert not any(after.pop("device0.health.bytes"))
        assert any(before.pop("device0.health.bytes"))
        assert after == before
        assert not cache.health()


def test_a_fault_does_not_stop_the_sequence_and_a_reset_does_not_forget_it(dev: Any) -> None:
    with new(dev, attention_only(1)) as cache:
        rows = put(dev, nan_at(1, 128, (0, 0)))
        ops.append_kv(dev, cache, 0, rows, rows)
        cache.advance(dev)
        assert (cache.pos, cache.kv[0].len, cache.state) == (1, 1, CacheState.READY)
        assert len(cache.digest()) == 64
        cache.reset(dev)
        assert cache.health()


def test_a_strict_cache_raises_at_the_next_call_that_waits(dev: Any) -> None:
    with new(dev, attention_only(1), strict=True) as cache:
        rows = put(dev, nan_at(1, 128, (0, 0)))
        assert len(cache.digest()) == 64
        ops.append_kv(dev, cache, 0, rows, rows)  # waits for nothing
        cache.advance(dev)
        with pytest.raises(HealthError, match=r"NONFINITE x2, first at layer 0, position 0.*clear_health"):
            cache.digest()
        cache.clear_health()
        assert len(cache.digest()) == 64


def test_a_slot_outside_the_cache_writes_nothing_and_is_reported(dev: Any) -> None:
    """What no operation asks for: a device counter that points past the end, as a broken caller may have."""
    with new(dev, attention_only(1), 4) as cache:
        layer, pos_d = cache.kv[0], cache.pos_d(0)
        rows = put(dev, np.ones((2, 128), np.float32))
        for slot, reported in ((3, 3), (4, 4), (-1, 0), (2**31 - 1, 2**31 - 1)):
            cache.clear_health()
            pos_d.copy_from(np.array([slot], np.int32))
            dev.launch(
                "append_kv", rows, rows, layer.k, layer.v, layer.len_d, pos_d, 0, 2, -1, 4, 128, 128,
                layer.k_tok_bytes, layer.v_tok_bytes, layer.k_format, layer.v_format, None, 1, cache.health_d(0), 5,
            )  # fmt: skip
            assert not layer.k.to_numpy().any()
            assert not layer.v.to_numpy().any()
            assert layer.len_d.to_numpy()[0] == 0
            seen = cache.health().faults
            assert list(seen) == [Fault.SLOT_RANGE]
            assert (seen[Fault.SLOT_RANGE].count, seen[Fault.SLOT_RANGE].slot, seen[Fault.SLOT_RANGE].layer) == (
                1, reported, 5,
            )  # fmt: skip
