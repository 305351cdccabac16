"""Any stages on any devices: what a cache holds there is what it holds on one, and it lies where its stage is."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from caches import Feed, device_counters, tiny
from decoding import MAX_CTX, OPTIONS, WIDTH, Oracle, Player, draft, hybrid, play
from happens import races
from stages import SMALL_SSM, placed, session, small
from standin import StandIn

from memra_driver import driver
from memra_driver.boundary import Boundary
from memra_driver.cache import Cache, CacheState
from memra_driver.config import PRESETS, ModelConfig
from memra_driver.errors import ArrayError, ConfigError, DeviceMismatch, DriverError, UnsupportedError
from memra_driver.health import FaultCount
from memra_driver.kvdev import CudaDev
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

MakeDev = Callable[..., Any]
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoHAsync")
TINY = tiny(n_layer=9, nextn_predict_layers=1, n_head_kv=1, ssm=SMALL_SSM)
KINDS = ["two GPUs", "four GPUs", "four GPUs that do not reach each other", "one GPU"]


@pytest.fixture(params=KINDS)
def stage_devices(request: pytest.FixtureRequest, make_dev: MakeDev, gpu_count: int) -> Any:
    """stage_devices(choice): a device for each stage; choice says which of up to four it is."""
    gpus = {"two GPUs": 2, "one GPU": 1}.get(request.param, 4)
    if request.config.getoption("--gpu"):
        if "not reach" in request.param or gpu_count < gpus:
            pytest.skip(f"needs {request.param}")
    else:
        standin = request.getfixturevalue("standin")
        standin.set_device_count(4)
        standin.set_peers("not reach" not in request.param)
    made: dict[int, Any] = {}

    def choose(choice: Any) -> list[Any]:
        for each in choice:
            if each not in made:
                made[each] = make_dev("cuda", each % gpus)
        return [made[each] for each in choice]

    return choose


def random_fence(chance: random.Random, cfg: ModelConfig, stages: int) -> tuple[int, ...]:
    cuts = sorted(chance.sample(range(1, cfg.n_trunk), stages - 1))
    return (0, *cuts, chance.choice((cfg.n_trunk, cfg.n_layer)))


_single: dict[tuple[str, str], Any] = {}


def on_one_device(e: Any, name: str, cfg: ModelConfig, **how: Any) -> Any:
    """The session on one device, run once for a kind of device."""
    key = type(e).__name__, name
    if key not in _single:
        with placed([e], (0, cfg.n_layer), cfg) as cache:
            _single[key] = session(cache, **how)
    return _single[key]


@pytest.mark.parametrize("part", range(5))
def test_two_hundred_random_fences_give_the_bytes_of_one_device(
    stage_devices: Any, part: int, request: pytest.FixtureRequest
) -> None:
    chance = random.Random(request.node.name)  # with the kind of devices: no two tests have the same fences
    expected = on_one_device(stage_devices([0])[0], "tiny", TINY)
    for _ in range(5):  # by five parts, four kinds of devices, in Python and in C
        stages = chance.randint(2, 6)
        fence, choice = random_fence(chance, TINY, stages), [chance.randrange(4) for _ in range(stages)]
        with placed(stage_devices(choice), fence, TINY) as cache:
            assert session(cache) == expected, (fence, choice)


@pytest.mark.parametrize("stage_devices", KINDS[:3], indirect=True)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_presets_layers_give_the_bytes_of_one_device(stage_devices: Any, preset: str) -> None:
    cfg = small(preset)
    assert [cfg.layer_kind(il) for il in range(cfg.n_layer)] == [
        ModelConfig.from_preset(preset).layer_kind(il) for il in range(cfg.n_layer)
    ]
    chance = random.Random(preset)
    expected = on_one_device(stage_devices([0])[0], preset, cfg, counts=(1,))
    with placed(stage_devices((0, 1, 2, 3, 1)), random_fence(chance, cfg, 5), cfg) as cache:
        assert session(cache, counts=(1,)) == expected


def home_of(ptr: int) -> int:
    return driver.pointer_get_attribute("DEVICE_ORDINAL", ptr)


def test_every_buffer_lies_on_the_device_of_its_stage(stage_devices: Any) -> None:
    options = CacheOptions(round_width=4, reserve_logits=True, reserve_taps=((4, 5), 3))
    devices = stage_devices((0, 1, 2, 3))
    with placed(devices, (0, 2, 4, 6, 9), TINY, options) as cache, cache.snapshot(devices[0]) as snap:
        assert [cache.plan.device_of(il) for il in (0, 2, 4, 6, 8)] == [0, 1, 2, 3, 3]
        regions = {name: (ptr, device) for name, ptr, _, device in cache.regions()}
        assert len(regions) == len(cache.plan.planes)
        for row in cache.plan.planes:
            ptr, device = regions[row.name]
            assert home_of(ptr) == device == devices[row.device].ordinal, row.name
            if row.layer is not None:
                assert devices[row.device] is devices[cache.plan.device_of(row.layer)]
        for kept in (snap.conv, snap.ssm):
            for il, each in enumerate(kept):
                if each is not None:
                    assert home_of(each.ptr) == devices[cache.plan.device_of(il)].ordinal
        session(cache)
        for e in devices[:3]:
            if e._count is not None:  # a device of the C library keeps its own
                assert home_of(e._count.ptr) == e.ordinal
        for a, b in pairwise(devices):
            with Boundary(a, b, 16, 2) as boundary:
                assert home_of(boundary._slots.ptr) == b.ordinal


@pytest.mark.standin
def test_the_driver_itself_is_asked_where_memory_lies(stage_devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many versions of the bindings say 0 of every pointer."""
    from cuda.bindings import driver as bindings

    monkeypatch.setattr(bindings, "cuPointerGetAttribute", lambda *args: (bindings.CUresult(0), 0))
    for e in stage_devices((0, 1)):
        with e.uninit(4) as held:
            assert home_of(held.ptr) == e.ordinal
            assert driver.pointer_get_attribute("MEMORY_TYPE", held.ptr) == 2  # of a device
    with pytest.raises(DriverError, match=r"cuPointerGetAttribute\(DEVICE_ORDINAL, 0x10\): CUDA_ERROR_INVALID_VALUE"):
        home_of(16)


@pytest.mark.parametrize("fence", [(0, 4, 4, 9), (0, 5, 3, 9), (0, 10), (9, 0), (1, 9), (0, 4, 7), (0, 2.0, 9)])
@pytest.mark.standin
def test_a_refused_fence_asks_for_no_memory(stage_devices: Any, standin: StandIn, fence: Any) -> None:
    devices = stage_devices(range(len(fence) - 1))
    standin.clear_trace()
    with pytest.raises(ConfigError, match="fence"):
        placed(devices, fence, TINY)
    assert standin.trace() == []


# Counts on the device.


@pytest.fixture
def player(stage_devices: Any) -> Any:
    """Four stages on three devices, the last of them in the middle as well."""
    devices = stage_devices((0, 2, 1, 2))
    cache = Cache.new_ppn(devices, (0, 1, 2, 3, 4), hybrid(), MAX_CTX, options=OPTIONS, policy=None)
    player = Player(cache, Oracle(devices[0], policy=cache.plan.policy))
    yield player
    player.close()


def test_rounds_follow_each_other_on_all_devices_without_the_host_knowing_the_counts(player: Player) -> None:
    player.step(0, 0, 0)
    chance = random.Random(1)
    for _ in range(8):
        rows = chance.randint(1, WIDTH)
        play(player, rows, chance.randint(0, rows), "device")
        assert player.cache.state is CacheState.UNSETTLED
    player.cache.settle(player.e)
    player.check()


@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1])
def test_a_count_that_cannot_be_rejects_on_every_device_and_is_a_fault(player: Player, count: int) -> None:
    player.step(0, 0)
    with Round(player.cache, player.e, width=WIDTH) as r:
        player.run(draft(3, 0))
        r.commit_from_device(player.last.htod_i32([count]))
    player.cache.settle(player.last)
    player.check()
    (seen,) = player.cache.health().faults.values()
    assert seen == FaultCount(len(player.cache.devices), 0, 2)  # once each, where the round is
    player.cache.clear_health()


@pytest.mark.standin
def test_a_count_reaches_each_device_once_and_nobody_waits(player: Player, standin: StandIn) -> None:
    cache = player.cache
    for _ in range(2):
        play(player, 3, 1, "device")  # kernels, scratch and the place for the count are there
    cache.settle(player.e)
    count = player.last.htod_i32([2])
    lane = player.lane(3).fill((player.start, draft(3, 2)))
    standin.clear_trace()
    for _ in range(2):
        with Round(cache, player.e, width=WIDTH) as r:
            lane.run(cache)
            r.commit_from_device(count)
        player.last.clear_bytes(count.ptr, 4)  # as the next decision would, in its own order
    trace = standin.trace()
    assert [call.name for call in trace if call.name in WAITS] == []
    assert not standin.calls("cuMemAlloc", "cuMemAllocAsync")
    assert len(standin.calls("cuEventCreate")) == len(standin.calls("cuEventDestroy")) > 0
    assert races(trace) == []
    copies = [call for call in trace if call.name.startswith("cuMemcpy")]
    others = [e for e in cache.devices if e is not player.last]
    assert [(call.stream, call.src, call.bytes) for call in copies] == [
        (e.stream.handle, count.ptr, 4) for e in others
    ] * 2
    for copy in copies:  # the device's own launches come behind its copy
        assert any(call.stream == copy.stream and call.kernel for call in trace[trace.index(copy) :])


@pytest.mark.standin
def test_the_room_for_a_count_goes_with_its_device(make_dev: MakeDev, standin: StandIn) -> None:
    with CudaDev(0), CudaDev(1):  # what nobody frees would go with the contexts otherwise
        before = standin.live_count()
        devices = [make_dev("cuda", 0), make_dev("cuda", 1)]
        with placed(devices, (0, 4, 9), TINY) as cache:
            feed = Feed(cache)
            with Round(cache, devices[0], width=4) as r, devices[1].htod_i32([1]) as count:
                feed.step(2, advance=False)
                r.commit_from_device(count)
        for e in devices:
            e.close()
        gc.collect()
        assert standin.live_count() == before


@pytest.mark.standin
@pytest.mark.at_once
@pytest.mark.parametrize("side", ["first", "last"])
def test_the_order_of_a_count_is_seen_to_on_both_sides(
    player: Player, standin: StandIn, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """What the laws above would miss, they see: without its wait either stream runs ahead."""
    if type(player.last).__name__ == "CDev":
        pytest.skip("its waits are in C")
    play(player, 3, 1, "device")
    player.cache.settle(player.e)
    count = player.last.htod_i32([2])
    e = player.e if side == "first" else player.last
    monkeypatch.setattr(e.stream, "wait", lambda event: None)
    standin.clear_trace()
    for value in (1, 2):
        player.last.clear_bytes(count.ptr, 4)
        with Round(player.cache, player.e, width=WIDTH) as r:
            player.run(draft(3, value))
            r.commit_from_device(count)
    assert races(standin.trace())
    monkeypatch.undo()
    player.cache.settle(player.e)


def test_a_count_of_another_device_than_the_last_layers_is_refused(make_dev: MakeDev, stage_devices: Any) -> None:
    devices = stage_devices((0, 1))
    if devices[0].ordinal == devices[1].ordinal:
        pytest.skip("one GPU: memory of either is memory of both")
    with placed(devices, (0, 4, 9), TINY) as cache:
        feed = Feed(cache)
        with Round(cache, devices[0], width=4) as r:
            feed.step(2, advance=False)
            with pytest.raises(ArrayError, match="accept_d lives on cuda:0"):
                r.commit_from_device(devices[0].htod_i32([1]))
            r.commit_from_device(devices[1].htod_i32([1]))
        cache.settle(devices[0])
        assert (cache.pos, device_counters(cache)[1]) == (1, {1})


def test_host_devices_take_a_count_too_and_a_mix_with_gpus_does_not(make_dev: MakeDev) -> None:
    host = [make_dev("host"), make_dev("host")]
    cfg = tiny()
    with placed([make_dev("host")], (0, 8), cfg) as single:
        expected = session(single)
    with placed(host, (0, 3, 8), cfg) as cache:
        assert session(cache) == expected
    mixed = [make_dev("cuda"), host[0]]
    with placed(mixed, (0, 4, 8), cfg) as cache:
        feed = Feed(cache)
        with Round(cache, mixed[0], width=4) as r:
            feed.step(2, advance=False)
            with pytest.raises(DeviceMismatch, match="the host would wait"):
                r.commit_from_device(np.ones(1, np.int32))
            r.commit(2)
        assert device_counters(cache)[1] == {2}


def test_a_device_without_kernels_takes_no_count(make_dev: MakeDev) -> None:
    from seven_ops import SevenOps

    devices = [SevenOps(), make_dev("host")]
    with placed(devices, (0, 4, 8), tiny()) as cache:
        feed = Feed(cache)
        with Round(cache, devices[1], width=4) as r:
            feed.step(2, layers=range(4, 8), advance=False)
            with pytest.raises(UnsupportedError, match="seven operations only"):
                r.commit_from_device(np.ones(1, np.int32))


@pytest.mark.standin
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_count_that_does_not_arrive_leaves_the_round_open(player: Player, standin: StandIn, nth: int) -> None:
    """A call of the driver that fails while the count is on its way has changed nothing of the cache."""
    play(player, 3, 1, "device")
    player.cache.settle(player.e)
    count = player.last.htod_i32([2])
    with Round(player.cache, player.e, width=WIDTH) as r:
        player.run(draft(3, 2))
        standin.clear_trace()
        standin.fail("*", nth, 999)
        with pytest.raises(DriverError):
            r.commit_from_device(count)
        standin.clear_failures()
        assert not [call for call in standin.trace() if call.kernel]
        made = [call for call in standin.calls("cuEventCreate") if not call.code]
        assert len(made) == len(standin.calls("cuEventDestroy"))
        assert (player.cache.state, player.cache.step_rows) == (CacheState.READY, 3)
        r.commit(2)
    player.tokens += draft(3, 2)[:2]
    player.check()
