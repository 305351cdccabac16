"""What a cache allocates: the plan to the byte on each device, nothing where it cannot fit, nothing after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, device_counters, gemma, image, planes, tiny
from standin import StandIn

from memra_driver.cache import Cache
from memra_driver.config import ModelConfig, SsmConfig
from memra_driver.errors import ConfigError, DriverOutOfMemory, OutOfMemory
from memra_driver.kvdev import HostDev
from memra_driver.plan import CacheOptions, CachePlan

MakeDev = Callable[..., Any]
MIB = 1 << 20
MTP = tiny(n_layer=9, nextn_predict_layers=1)

GEOMETRIES: dict[str, tuple[ModelConfig, CacheOptions]] = {
    "interval 4": (tiny(), CacheOptions()),
    "no linear layers": (attention_only(), CacheOptions()),
    "no attention layers": (tiny(n_layer=3), CacheOptions()),
    "mtp": (MTP, CacheOptions()),
    "mtp skipped": (MTP, CacheOptions(skip_mtp_state=True)),
    "shared kv": (gemma(shared=3), CacheOptions()),
    "round width 4": (MTP, CacheOptions(round_width=4)),
    "round width 64": (tiny(), CacheOptions(round_width=64)),
    "reserved": (tiny(), CacheOptions(reserve_logits=True, reserve_taps=((3, 0), 7))),
    "no ring": (
        tiny(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1)),
        CacheOptions(round_width=1),
    ),
}


def held(e: Any) -> int:
    """Bytes that were allocated on e and not freed."""
    return int(e.memory.live_bytes if isinstance(e, HostDev) else e.context.live_bytes)


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_cache_allocates_its_plan_to_the_byte(make_dev: MakeDev, kind: str, geometry: str, arena: bool) -> None:
    cfg, options = GEOMETRIES[geometry]
    e = make_dev(kind, arena=arena)
    before = held(e)
    with Cache.new(e, cfg, 33, policy=POLICY, options=options) as cache:
        (sums,) = cache.plan.per_device
        assert held(e) - before == (sums.arena_bytes if arena else sums.plane_bytes)
        assert cache.report()["cache_bytes"] == held(e) - before
        expected = {row.name: row.bytes for row in cache.plan.planes}
        assert {name: n_bytes for name, _, n_bytes, _ in cache.regions()} == expected
        born = held(e)
        with cache.snapshot(e) as snap:
            kept = [each for each in (*snap.conv, *snap.ssm) if each is not None]
            assert snap.nbytes == held(e) - born
            assert snap.nbytes == (sums.snapshot_bytes if arena else sum(each.nbytes for each in kept))
        assert held(e) == born
    assert held(e) == before


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_each_device_holds_its_own_part_of_the_plan(make_dev: MakeDev, kind: str, arena: bool) -> None:
    devices = [make_dev(kind, arena=arena), make_dev(kind, arena=arena)]
    before = [held(e) for e in devices]
    options = CacheOptions(round_width=4, reserve_logits=True)
    with Cache.new_pp2(*devices, 3, MTP, 33, policy=POLICY, options=options) as cache:
        for e, sums, start in zip(devices, cache.plan.per_device, before, strict=True):
            assert held(e) - start == (sums.arena_bytes if arena else sums.plane_bytes)


@pytest.mark.standin
@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
def test_the_driver_is_asked_for_the_plan_of_each_device(make_dev: MakeDev, standin: StandIn, arena: bool) -> None:
    devices = [make_dev("cuda", 0, arena=arena), make_dev("cuda", 1, arena=arena)]
    standin.clear_trace()
    with Cache.new_pp2(*devices, 3, MTP, 33, policy=POLICY, options=CacheOptions(round_width=4)) as cache:
        for ordinal, sums in enumerate(cache.plan.per_device):
            asked = [call.bytes for call in standin.calls("cuMemAllocAsync") if call.device == ordinal]
            planned = [row.bytes for row in cache.plan.planes if row.device == ordinal and row.bytes]
            assert asked == ([sums.arena_bytes] if arena else planned)
            assert sum(asked) == (sums.arena_bytes if arena else sums.plane_bytes)


def test_everything_is_born_zero_and_where_the_plan_says(dev: Any) -> None:
    with Cache.new(dev, MTP, 33, policy=POLICY, options=CacheOptions(round_width=2)) as cache:
        for name, plane in planes(cache).items():
            assert not plane.to_numpy().any(), name
        base = min(ptr for _, ptr, _, _ in cache.regions())
        rows = {row.name: row for row in cache.plan.planes}
        for name, ptr, _, _ in cache.regions():
            assert ptr - base == rows[name].offset
        assert device_counters(cache) == ({3: 0, 7: 0}, {0})


def test_a_plane_without_bytes_has_no_address(make_dev: MakeDev) -> None:
    cfg, _ = GEOMETRIES["no ring"]
    for arena in (True, False):
        with Cache.new(make_dev("cuda", arena=arena), cfg, 4, policy=POLICY) as cache:
            assert [(layer.conv_state.ptr, layer.conv_state.len) for layer in cache.recur if layer] == [(0, 0)] * 6


# What cannot fit


@pytest.mark.standin
@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
def test_a_plan_beyond_the_free_memory_is_refused_before_the_first_byte(
    make_dev: MakeDev, standin: StandIn, arena: bool
) -> None:
    e = make_dev("cuda", arena=arena)
    plan = CachePlan(tiny(), 64, POLICY)
    need = plan.arena_bytes if arena else plan.plane_bytes
    standin.set_total_memory(0, need - 1)
    standin.clear_trace()
    with pytest.raises(OutOfMemory, match=rf"{need} bytes on cuda:0, which has {need - 1} free") as caught:
        Cache.new(e, tiny(), 64, policy=POLICY)
    assert not isinstance(caught.value, DriverOutOfMemory)
    # One allocation is refused by the driver, several are not begun.
    assert [(call.name, call.bytes, call.code) for call in standin.trace()] == [("cuMemAllocAsync", need, 2)] * arena
    standin.set_total_memory(0, need)
    Cache.new(e, tiny(), 64, policy=POLICY).close()


@pytest.mark.standin
def test_what_a_birth_on_one_gpu_asks_of_the_driver(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    Cache.new(e, tiny(), 64, policy=POLICY).close()
    standin.trace_queries()
    standin.clear_trace()
    with Cache.new(e, tiny(), 64, policy=POLICY):
        asked = [call.name for call in standin.trace()]
    ready = ["cuCtxGetCurrent", "cuCtxGetId"]
    assert asked == [*ready, "cuMemAllocAsync", *ready, "cuMemsetD8Async"]


@pytest.mark.standin
def test_a_device_of_the_users_own_is_asked_what_is_free_before_it_allocates(
    make_dev: MakeDev, standin: StandIn
) -> None:
    class Own:
        """Has all that a CudaDev has but its word that it refuses what it has no room for."""

        def __init__(self, e: Any) -> None:
            self.e = e

        def __getattr__(self, name: str) -> Any:
            if name == "overcommits":
                raise AttributeError(name)
            return getattr(self.e, name)

    e = Own(make_dev("cuda"))
    Cache.new(e, tiny(), 64, policy=POLICY).close()
    standin.set_total_memory(0, 1000)
    standin.clear_trace()
    with pytest.raises(OutOfMemory, match="which has 1000 free"):
        Cache.new(e, tiny(), 64, policy=POLICY)
    assert standin.trace() == []


@pytest.mark.standin
def test_what_is_free_cannot_be_told_either(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    standin.set_total_memory(0, CachePlan(tiny(), 64, POLICY).arena_bytes - 1)
    for nth in (1, 2):  # the one asks for the driver's error, the other for that of the cache
        standin.fail("cuMemGetInfo", nth)
    with pytest.raises(DriverOutOfMemory, match="cuMemAllocAsync"):
        Cache.new(e, tiny(), 64, policy=POLICY)
    assert standin.pending_failures() == 0


@pytest.mark.standin
def test_two_stages_on_one_gpu_are_checked_together(make_dev: MakeDev, standin: StandIn) -> None:
    devices = [make_dev("cuda", 0), make_dev("cuda", 0)]  # two streams of one GPU
    plan = CachePlan(tiny(), 64, POLICY, fence=(0, 4, 8))
    standin.set_total_memory(0, plan.arena_bytes - 1)
    standin.clear_trace()
    with pytest.raises(OutOfMemory, match=f"{plan.arena_bytes} bytes on cuda:0"):
        Cache.new_pp2(*devices, 4, tiny(), 64, policy=POLICY)
    assert standin.trace() == []


@pytest.mark.standin
def test_the_second_device_is_checked_before_the_first_allocates(make_dev: MakeDev, standin: StandIn) -> None:
    devices = [make_dev("cuda", 0), make_dev("cuda", 1)]
    standin.set_total_memory(1, 1000)
    standin.clear_trace()
    with pytest.raises(OutOfMemory, match="cuda:1, which has 1000 free"):
        Cache.new_pp2(*devices, 4, tiny(), 64, policy=POLICY)
    assert standin.trace() == []


@pytest.mark.standin
def test_bytes_that_the_pool_keeps_for_reuse_count_as_free(
    make_dev: MakeDev, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memra_driver import driver

    e = make_dev("cuda", arena=False)
    need = CachePlan(tiny(), 64, POLICY).plane_bytes
    pool = {"RESERVED_MEM_CURRENT": need + 500, "USED_MEM_CURRENT": 500}
    monkeypatch.setattr(driver, "mem_get_info", lambda: (0, 8 * MIB))
    monkeypatch.setattr(driver, "mem_pool_get_attribute", lambda name, handle: pool[name])
    assert e.mem_info() == (need, 8 * MIB)
    Cache.new(e, tiny(), 64, policy=POLICY).close()
    pool["USED_MEM_CURRENT"] += 1
    with pytest.raises(OutOfMemory, match=f"{need - 1} free"):
        Cache.new(e, tiny(), 64, policy=POLICY)


THRESHOLD = 4  # of CUmemPool_attribute


def test_memory_is_kept_when_asked_for_and_given_back(make_dev: MakeDev, standin: StandIn) -> None:
    from memra_driver import driver

    e = make_dev("cuda")
    pool = driver.device_get_default_mem_pool(0)
    for n_bytes in (1 << 33, 0):
        standin.clear_trace()
        e.keep_memory(n_bytes)
        assert [(call.name, call.src) for call in standin.trace()] == [("cuMemPoolSetAttribute", THRESHOLD)]
        assert driver.mem_pool_get_attribute("RELEASE_THRESHOLD", pool) == n_bytes
    standin.clear_trace()
    e.trim()
    assert [(call.name, call.bytes) for call in standin.trace()] == [("cuStreamSynchronize", 0), ("cuMemPoolTrimTo", 0)]
    for wrong in (-1, 2**63):
        with pytest.raises(ConfigError, match="0 for none"):
            e.keep_memory(wrong)
    standin.set_attribute(0, 115, 0)  # no memory pools
    old = make_dev("cuda")
    standin.clear_trace()
    old.keep_memory(1)
    old.trim()
    assert [call.name for call in standin.trace()] == ["cuStreamSynchronize"]


def test_a_host_without_the_memory_refuses_too(make_dev: MakeDev, monkeypatch: pytest.MonkeyPatch) -> None:
    e = make_dev("host")
    monkeypatch.setattr(e, "mem_info", lambda: (1000, 2000))
    with pytest.raises(OutOfMemory, match="on host, which has 1000 free"):
        Cache.new(e, tiny(), 64, policy=POLICY)
    assert held(e) == 0
    monkeypatch.setattr(e, "mem_info", lambda: (None, None))  # a system that does not tell
    Cache.new(e, tiny(), 64, policy=POLICY).close()


def test_a_cache_of_2_31_tokens_is_refused_by_size_and_not_by_a_crash(dev: Any) -> None:
    before = held(dev)
    cfg = ModelConfig.from_preset("qwen3.6-27b")
    with pytest.raises(OutOfMemory, match=str(CachePlan(cfg, 2**31 - 1, POLICY).arena_bytes)):
        Cache.new(dev, cfg, 2**31 - 1, policy=POLICY)
    assert held(dev) == before


@pytest.mark.standin
def test_a_snapshot_that_does_not_fit_leaves_the_cache_as_it_was(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    plan = CachePlan(tiny(), 64, POLICY)
    cache = Cache.new(e, tiny(), 64, policy=POLICY)
    Feed(cache).step(3)
    before, live = image(cache), standin.live_bytes()
    standin.set_total_memory(0, live + plan.first_use["snapshot"] - 1)
    with pytest.raises(DriverOutOfMemory, match="cuMemAllocAsync"):
        cache.snapshot(e)
    assert standin.live_bytes() == live
    assert image(cache) == before
    standin.set_total_memory(0, live + plan.first_use["snapshot"])
    cache.snapshot(e).close()
    cache.close()


@pytest.mark.standin
def test_an_allocation_that_fails_half_way_frees_all_that_were_made(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda", arena=False)
    planes_made = len([row for row in CachePlan(tiny(), 64, POLICY).planes if row.bytes])
    for nth in range(1, planes_made + 1):
        standin.fail("cuMemAllocAsync", nth, code=2)
        with pytest.raises(DriverOutOfMemory, match="cuMemAllocAsync"):
            Cache.new(e, tiny(), 64, policy=POLICY)
        assert standin.pending_failures() == 0
        assert standin.live_bytes() == 0


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
def test_host_memory_that_ends_half_way_is_given_back(
    make_dev: MakeDev, monkeypatch: pytest.MonkeyPatch, arena: bool
) -> None:
    e = make_dev("host", arena=arena)
    alloc, left = e.memory.alloc_bytes, 0

    def alloc_bytes(n_bytes: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return int(alloc(n_bytes))

    monkeypatch.setattr(e.memory, "alloc_bytes", alloc_bytes)
    for allowed in range(1 if arena else 12):
        left = allowed
        with pytest.raises(MemoryError):
            Cache.new(e, tiny(), 64, policy=POLICY)
        assert held(e) == 0


# Free memory comes back


@pytest.mark.standin
def test_snapshots_that_are_dropped_return_their_bytes_and_kept_ones_are_reported(
    make_dev: MakeDev, standin: StandIn
) -> None:
    e = make_dev("cuda")
    cache = Cache.new(e, tiny(), 64, policy=POLICY)
    Feed(cache).step(2)
    free = e.mem_info()[0]
    for _ in range(100):
        cache.snapshot(e)
    assert e.mem_info()[0] == free
    assert cache.report()["snapshots"] == []
    kept = [cache.snapshot(e) for _ in range(10)]
    report = cache.report()
    assert report["snapshots"] == [{"pos": 2, "bytes": snap.nbytes, "invalid": ""} for snap in kept]
    assert report["snapshot_bytes"] == free - e.mem_info()[0] == free - report["devices"][0]["free_bytes"]
    cache.close()
    for snap in kept:
        snap.close()
    assert standin.live_bytes() == 0


def test_a_snapshot_without_bytes_is_reported_while_it_lives(dev: Any) -> None:
    with Cache.new(dev, attention_only(), 8, policy=POLICY) as cache:
        snap = cache.snapshot(dev)
        assert cache.report()["snapshots"] == [{"pos": 0, "bytes": 0, "invalid": ""}]
        snap.close()
        assert cache.report()["snapshots"] == []


# Guard bytes


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_no_step_writes_beyond_its_planes(make_dev: MakeDev, kind: str) -> None:
    """Without an arena each plane is an allocation of its own; the stand-in guards every one of them."""
    e = make_dev(kind, arena=False)
    with Cache.new(e, tiny(), 12, policy=POLICY) as cache, cache.snapshot(e) as snap:
        feed = Feed(cache)
        feed.step(5)
        cache.snapshot_into(e, snap)
        feed.step(7)
        cache.rollback(e, snap, 2)
        feed.step(2)
        for layer in filter(None, cache.kv):
            assert not layer.k.to_numpy()[-8:].any()  # the pad, right behind a full plane
            assert not layer.v.to_numpy()[-8:].any()


def test_the_tail_pads_of_an_arena_stay_zero(dev: Any) -> None:
    with Cache.new(dev, tiny(), 12, policy=POLICY) as cache:
        Feed(cache).step(12)
        for layer in filter(None, cache.kv):
            for plane, tok_bytes in ((layer.k, layer.k_tok_bytes), (layer.v, layer.v_tok_bytes)):
                data = plane.to_numpy()
                assert np.count_nonzero(data[: 12 * tok_bytes])
                assert not data[12 * tok_bytes :].any()
