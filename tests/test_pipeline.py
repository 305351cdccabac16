"""Pipeline stages: each layer on the device of its stage, one call for all devices, the bytes of a single device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, History, attention_only, device_counters, image, planes, put, sequence, tiny
from seven_ops import SevenOps

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import ConfigError, DeviceMismatch
from memra_driver.plan import CacheOptions

MakeDev = Callable[..., Any]
MTP = tiny(n_layer=9, nextn_predict_layers=1)
FENCES = [(0, 3, 8), (0, 1, 2, 8), (0, 3, 4, 8), (0, 4, 8), (0, 8)]  # stages of one kind of layer among them


@pytest.fixture(params=["host", "host, stage devices alike", "cuda", "cuda, one ordinal"])
def devices(request: pytest.FixtureRequest, make_dev: MakeDev, gpu_count: int) -> Any:
    """devices(n): a device per stage; two ordinals in turn, all on one, or the very same object."""
    kind, _, alike = request.param.partition(", ")
    ordinals = 1 if alike else min(gpu_count, 2)

    def make(n: int) -> list[Any]:
        if alike == "stage devices alike":
            return [make_dev(kind)] * n
        return [make_dev(kind, ordinal % ordinals) for ordinal in range(n)]

    return make


@pytest.fixture(params=["host", "cuda", "cuda, one ordinal"])
def stages(request: pytest.FixtureRequest, make_dev: MakeDev, gpu_count: int) -> Any:
    """Two devices that are not the same object."""
    kind, _, alike = request.param.partition(", ")
    second = 0 if alike or gpu_count < 2 else 1
    return [make_dev(kind, 0), make_dev(kind, second)]


def run(cache: Cache) -> list[Any]:
    """A session of every kind of call; what the sequence is after each."""
    e, feed = cache.devices[0], Feed(cache)
    seen = []
    feed.step(5)
    with cache.snapshot(e) as snap:
        feed.step(4)
        seen.append((sequence(cache), device_counters(cache), cache.digest()))
        cache.rollback(e, snap, 2)
        seen.append((sequence(cache), device_counters(cache), cache.digest()))
        feed.step(2)
        cache.snapshot_into(e, snap)
        feed.step(1)
        cache.rollback(cache.devices[-1], snap, 0)
        seen.append((sequence(cache), device_counters(cache), cache.digest()))
    cache.reset(e)
    feed.step(2)
    seen.append((sequence(cache), device_counters(cache), cache.digest()))
    return seen


@pytest.mark.parametrize("fence", FENCES)
def test_any_fence_gives_the_bytes_of_one_device(devices: Any, make_dev: MakeDev, fence: tuple[int, ...]) -> None:
    stages = devices(len(fence) - 1)
    kind = "host" if stages[0].ordinal < 0 else "cuda"
    with Cache.new(make_dev(kind), tiny(), 32, policy=POLICY) as single:
        expected = run(single)
    with Cache.new_ppn(stages, fence, tiny(), 32, policy=POLICY) as cache:
        assert run(cache) == expected
        assert not cache.health()


def test_new_pp2_is_a_fence_of_one_cut(devices: Any) -> None:
    stages = devices(2)
    with Cache.new_pp2(*stages, 3, MTP, 16, policy=POLICY) as cache:
        assert cache.plan.fence == (0, 3, 9)
        owners = [(cache.kv[il] or cache.recur[il]).owner for il in range(9)]
        assert owners == [stages[0]] * 3 + [stages[1]] * 6  # the MTP layer goes with the last


@pytest.mark.parametrize("fence", [(0, 3, 8), (0, 3, 9)])
def test_mtp_layers_live_on_the_last_stage(devices: Any, fence: tuple[int, ...]) -> None:
    stages = devices(2)
    with Cache.new_ppn(stages, fence, MTP, 16, policy=POLICY) as cache:
        assert cache.recur[8].owner is stages[1]
        feed = Feed(cache)
        feed.step(3)
        with cache.snapshot(stages[0]) as snap:
            kept = snap.ssm[8].to_numpy()
            feed.step(1)
            cache.rollback(stages[1], snap, 0)
            assert np.array_equal(cache.recur[8].ssm_state.to_numpy(), kept)


@pytest.mark.standin
def test_each_plane_lies_on_the_gpu_of_its_stage(make_dev: MakeDev) -> None:
    from memra_driver import driver

    stages = [make_dev("cuda", 0), make_dev("cuda", 1)]
    with Cache.new_pp2(*stages, 4, tiny(), 16, policy=POLICY) as cache, cache.snapshot(stages[0]) as snap:
        for name, plane in planes(cache).items():
            head = name.partition(".")[0]
            expected = int(head.removeprefix("device")) if head.startswith("device") else int(head) // 4
            assert driver.pointer_get_attribute("DEVICE_ORDINAL", plane.ptr) == plane.device == expected
        for kept in (snap.conv, snap.ssm):
            for il, each in enumerate(kept):
                if each is not None:
                    assert driver.pointer_get_attribute("DEVICE_ORDINAL", each.ptr) == il // 4
        assert {(name, device) for name, _, _, device in cache.regions()} == {
            (row.name, row.device) for row in cache.plan.planes
        }


def test_the_c_structs_say_which_device_a_layer_is_on(make_dev: MakeDev) -> None:
    stages = [make_dev("host"), make_dev("host")]
    with Cache.new_pp2(*stages, 4, tiny(), 16, policy=POLICY) as cache:
        c = cache.as_c().contents
        assert c.n_devices == 2
        assert [(c.kv[il] if c.kv[il].present else c.recur[il]).device_index for il in range(8)] == [0] * 4 + [1] * 4
        assert c.devices[0].pos_d.ptr != c.devices[1].pos_d.ptr


def test_stages_that_share_a_device_share_its_arena(make_dev: MakeDev) -> None:
    e, other = make_dev("host"), make_dev("host")
    with Cache.new_ppn((e, other, e), (0, 2, 4, 8), tiny(), 16, policy=POLICY) as cache:
        assert cache.devices == (e, other)
        assert [cache.plan.device_of(il) for il in range(8)] == [0, 0, 1, 1, 0, 0, 0, 0]
        assert e.memory.live_bytes == cache.plan.per_device[0].arena_bytes
        Feed(cache).step(3)
        History.of(e).check(cache)


def test_an_operation_wants_the_device_of_its_layer(stages: Any, make_dev: MakeDev) -> None:
    with Cache.new_pp2(*stages, 4, tiny(), 16, policy=POLICY) as cache:
        row = put(stages[0], np.zeros((1, 128), np.float32))
        before = image(cache)
        with pytest.raises(DeviceMismatch, match="layer 7"):
            ops.append_kv(stages[0], cache, 7, row, row)
        twin = make_dev("host") if stages[0].ordinal < 0 else make_dev("cuda", 0)
        with pytest.raises(DeviceMismatch, match="layer 3"):  # another object for the same memory is another device
            ops.append_kv(twin, cache, 3, row, row)
        with pytest.raises(DeviceMismatch):
            cache.advance(twin)
        assert image(cache) == before
        ops.append_kv(stages[0], cache, 3, row, row)


def test_advance_and_truncate_reach_every_device(devices: Any) -> None:
    stages = devices(2)
    with Cache.new_pp2(*stages, 1, attention_only(), 16, policy=POLICY) as cache:
        feed = Feed(cache)
        feed.step(6)
        assert device_counters(cache) == (dict.fromkeys(range(3), 6), {6})
        cache.truncate(stages[1], 2)
        assert device_counters(cache) == (dict.fromkeys(range(3), 2), {2})
        cache.advance(stages[1], 3)
        assert device_counters(cache)[1] == {5}


def test_health_is_one_record_over_all_devices(devices: Any) -> None:
    stages = devices(2)
    with Cache.new_pp2(*stages, 4, tiny(), 16, policy=POLICY) as cache:
        cache.pos = 2
        for il in (3, 7):
            cache.kv[il].len = 2
        for il, stage in ((7, stages[1]), (3, stages[0])):
            row = put(stage, np.where(np.arange(128) == 0, np.nan, 1).astype(np.float32).reshape(1, 128))
            ops.append_kv(stage, cache, il, row, row)
        (seen,) = cache.health().faults.values()
        assert (seen.count, seen.slot, seen.layer) == (4, 2, 3)
        cache.clear_health()
        assert not cache.health()
        cache.advance(stages[0])
        for il, stage, bad in ((3, stages[0], 1), (7, stages[1], 0)):  # the position counts before the layer
            rows = np.ones((2, 128), np.float32)
            rows[bad, 0] = np.nan
            ops.append_kv(stage, cache, il, put(stage, rows), put(stage, rows))
        (seen,) = cache.health().faults.values()
        assert (seen.count, seen.slot, seen.layer) == (4, 3, 7)


def test_devices_of_three_kinds_hold_one_cache(make_dev: MakeDev) -> None:
    host, cuda, third = make_dev("host"), make_dev("cuda", arena=False), SevenOps()
    stages = (host, cuda, third)
    with Cache.new_ppn(stages, (0, 2, 4, 8), tiny(), 16, policy=POLICY) as cache:
        feed = Feed(cache)
        sums = cache.plan.per_device
        assert cache.report()["cache_bytes"] == sums[0].arena_bytes + sums[1].plane_bytes + sums[2].plane_bytes
        feed.step(3, layers=range(4))
        cache.kv[7].len = 3  # the third device has no kernels
        cache.sync_d(host)
        with cache.snapshot(third) as snap:
            before = sequence(cache)
            feed.step(2, layers=range(4))
            for il in (4, 5, 6):
                cache.recur[il].ssm_state.data[:4] = b"abcd"
                cache.recur[il].swap()
            cache.rollback(cuda, snap, 0)
            assert sequence(cache) == before
            assert device_counters(cache) == ({3: 3, 7: 3}, {3})
        cache.reset(cuda)
        assert not any(any(data) for data in sequence(cache).values())
        cache.clear_health()


@pytest.mark.parametrize("split", [0, -1, 8, 9, 100])
def test_a_split_outside_the_trunk_is_refused_before_any_allocation(make_dev: MakeDev, split: int) -> None:
    stages = [make_dev("host"), make_dev("host")]
    with pytest.raises(ConfigError, match=rf"split is {split}; .* 1 \.\. 7"):
        Cache.new_pp2(*stages, split, MTP, 16, policy=POLICY)
    assert [stage.memory.live_bytes for stage in stages] == [0, 0]


@pytest.mark.parametrize("fence", [(0, 4, 4, 8), (0, 5, 3, 8), (0, 9), (8, 0), (0, 4), (1, 8), (0, 2, 4)])
def test_a_fence_that_is_no_partition_is_refused_before_any_allocation(
    make_dev: MakeDev, fence: tuple[int, ...]
) -> None:
    stages = [make_dev("host") for _ in range(len(fence) - 1)]
    with pytest.raises(ConfigError, match="fence"):
        Cache.new_ppn(stages, fence, tiny(), 16, policy=POLICY)
    assert {stage.memory.live_bytes for stage in stages} == {0}


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_fence_for_another_number_of_devices_is_refused(make_dev: MakeDev, n: int) -> None:
    stages = [make_dev("host") for _ in range(n)]
    with pytest.raises(ConfigError, match="devs vs fence mismatch"):
        Cache.new_ppn(stages, (0, 4, 8), tiny(), 16, policy=POLICY)


def test_reserved_logits_live_on_the_last_stage_and_taps_with_their_layers(stages: Any) -> None:
    options = CacheOptions(reserve_logits=True, reserve_taps=((0, 2), 3))
    with Cache.new_pp2(*stages, 4, tiny(), 16, policy=POLICY, options=options) as cache:
        where = {row.plane: row.device for row in cache.plan.planes if row.group in ("logits", "taps")}
        assert where == {"logits": 1, "taps": 0}
        assert cache.state is CacheState.READY
