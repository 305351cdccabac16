"""What a cache asks of the driver, by the stand-in's trace: how often, where, and never more than stated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, put, tiny
from standin import Call, StandIn

from memra_driver import driver, ops
from memra_driver.cache import Cache
from memra_driver.config import SsmConfig
from memra_driver.kernels import RESTORE_BYTES
from memra_driver.plan import CacheOptions

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]
ALLOCATIONS = ("cuMemAlloc", "cuMemAllocAsync")
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuStreamWaitEvent")
MTP = tiny(n_layer=9, nextn_predict_layers=1)
PADDED = tiny(ssm=SsmConfig(conv_kernel=3, state_size=5, time_step_rank=3, group_count=1))  # no plane fills its 256s


@pytest.fixture
def e(make_dev: MakeDev) -> Any:
    return make_dev("cuda")


@pytest.fixture
def cache(e: Any) -> Any:
    with Cache.new(e, tiny(), 32, policy=POLICY) as cache:
        yield cache


def asked(standin: StandIn, call: Callable[[], Any]) -> list[Call]:
    """What `call` asks of the driver."""
    standin.clear_trace()
    call()
    return standin.trace()


def names(calls: list[Call]) -> list[str]:
    return [call.kernel or call.name for call in calls]


# Birth


@pytest.mark.parametrize("cfg", [tiny(), MTP, attention_only(), tiny(n_layer=3)], ids=["8", "mtp", "full", "linear"])
def test_a_birth_is_one_allocation_and_one_clear(e: Any, standin: StandIn, cfg: Any) -> None:
    options = CacheOptions(round_width=4, reserve_logits=True)
    made: list[Cache] = []
    calls = asked(standin, lambda: made.append(Cache.new(e, cfg, 32, policy=POLICY, options=options)))
    size = made[0].plan.arena_bytes
    assert [(call.name, call.bytes, call.stream) for call in calls] == [
        ("cuMemAllocAsync", size, e.stream.handle), ("cuMemsetD8Async", size, e.stream.handle),
    ]  # fmt: skip
    assert calls[1].src == 0
    made[0].close()


def test_a_birth_on_two_devices_is_that_on_each(make_dev: MakeDev, standin: StandIn) -> None:
    devices = [make_dev("cuda", 0), make_dev("cuda", 1)]
    made: list[Cache] = []
    calls = asked(standin, lambda: made.append(Cache.new_pp2(*devices, 4, tiny(), 32, policy=POLICY)))
    for ordinal, device in enumerate(devices):
        mine = [call for call in calls if call.device == ordinal]
        assert names(mine) == ["cuMemAllocAsync", "cuMemsetD8Async"]
        assert {call.stream for call in mine} == {device.stream.handle}
    assert len(calls) == 4
    made[0].close()


def test_without_an_arena_every_plane_is_an_allocation_of_its_own(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda", arena=False)
    made: list[Cache] = []
    calls = asked(standin, lambda: made.append(Cache.new(e, tiny(), 32, policy=POLICY)))
    assert [c.bytes for c in calls if c.name in ALLOCATIONS] == [row.bytes for row in made[0].plan.planes]
    made[0].close()


def test_a_close_is_one_free(e: Any, standin: StandIn) -> None:
    cache = Cache.new(e, tiny(), 32, policy=POLICY)
    assert names(asked(standin, cache.close)) == ["cuMemFreeAsync"]
    assert asked(standin, cache.close) == []


# Snapshots


def parity(cache: Cache, swaps: str) -> None:
    """Swaps the handles of no, all, or some layers."""
    for il, state in enumerate(cache.recur):
        if state is not None and (swaps == "odd" or (swaps == "mixed" and il % 4 == 0)):
            state.swap()


def spans(cfg: Any, snap: Any, swaps: str) -> list[int]:
    """Bytes from the first plane of a snapshot to the end of its last; at odd parity the trunk's states apart."""
    planes = [(each.ptr, each.nbytes) for each in (*snap.conv, *snap.ssm) if each is not None]
    trunk = {each.ptr for each in snap.ssm[: cfg.n_trunk] if each is not None}
    apart = [[p for p in planes if p[0] not in trunk], [p for p in planes if p[0] in trunk]]
    groups = apart if swaps == "odd" else [planes]
    return [max(ptr + n for ptr, n in group) - min(ptr for ptr, _ in group) for group in groups]


@pytest.mark.parametrize("cfg", [tiny(), MTP, PADDED], ids=["8", "mtp", "padded"])
@pytest.mark.parametrize("swaps", ["even", "odd"])
def test_snapshots_of_even_and_odd_parity_are_one_launch_of_as_many_blocks_as_they_fill(
    e: Any, standin: StandIn, cfg: Any, swaps: str
) -> None:
    with Cache.new(e, cfg, 32, policy=POLICY) as cache, cache.snapshot(e) as snap:
        cache.rollback(e, snap, 0)  # the kernels are loaded
        for il in range(cfg.n_trunk):  # the MTP layer never runs
            if cache.recur[il] is not None and swaps == "odd":
                cache.recur[il].swap()
        copied = spans(cfg, snap, swaps)
        assert 0 <= snap.nbytes - sum(copied) < 256 * len(copied)  # the pad behind the last plane of a copy
        blocks = sum(-(-n_bytes // RESTORE_BYTES) for n_bytes in copied)
        for _ in range(3):
            calls = asked(standin, lambda: cache.snapshot_into(e, snap))
            assert [(*names([call]), call.grid) for call in calls] == [("restore", (blocks, 1, 1))]
            assert names(asked(standin, lambda: cache.rollback(e, snap, 0))) == ["restore"]
        made: list[Any] = []
        calls = asked(standin, lambda: made.append(cache.snapshot(e)))
        assert [(*names([call]), call.grid[0]) for call in calls] == [("cuMemAllocAsync", 0), ("restore", blocks)]
        made[0].close()


def test_snapshots_of_mixed_parity_are_one_launch_over_an_uploaded_table(
    e: Any, standin: StandIn, cache: Cache
) -> None:
    with cache.snapshot(e) as snap:
        cache.rollback(e, snap, 0)
        parity(cache, "mixed")
        cache.snapshot_into(e, snap)  # the table is made
        for _ in range(2):
            assert names(asked(standin, lambda: cache.rollback(e, snap, 0))) == [
                "cuMemcpyHtoDAsync", "copy_many", "set_counters",
            ]  # fmt: skip
            assert names(asked(standin, lambda: cache.snapshot_into(e, snap))) == ["cuMemcpyHtoDAsync", "copy_many"]
        assert names(asked(standin, lambda: cache.snapshot_into(e, snap))) == ["copy_many"]  # the table is that already


@pytest.mark.parametrize("accept", [0, 2])
def test_rollback_is_one_launch_whatever_it_accepts(
    e: Any, standin: StandIn, cache: Cache, accept: int
) -> None:
    feed = Feed(cache)
    feed.step(3)
    with cache.snapshot(e) as snap:
        feed.step(1)
        feed.step(3)
        calls = asked(standin, lambda: cache.rollback(e, snap, accept))
        assert names(calls) == ["restore"]


def test_layers_that_took_no_part_cost_no_further_launch(e: Any, standin: StandIn, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(3)
    with cache.snapshot(e) as snap:
        feed.step(2, layers=[0, 1, 2, 3])
        assert names(asked(standin, lambda: cache.rollback(e, snap, 2))) == ["restore"]


def test_a_cache_without_recurrent_layers_copies_nothing(e: Any, standin: StandIn) -> None:
    with Cache.new(e, attention_only(), 32, policy=POLICY) as cache:
        made: list[Any] = []
        e.kernels.load_all()
        assert asked(standin, lambda: made.append(cache.snapshot(e))) == []
        assert asked(standin, lambda: cache.snapshot_into(e, made[0])) == []
        cache.sync_d(e)
        for _ in range(2):
            assert names(asked(standin, lambda: cache.rollback(e, made[0], 0))) == ["restore"]


def test_two_devices_copy_and_count_each_on_its_own_stream(make_dev: MakeDev, standin: StandIn) -> None:
    devices = [make_dev("cuda", 0), make_dev("cuda", 1)]
    with Cache.new_pp2(*devices, 3, tiny(), 32, policy=POLICY) as cache, cache.snapshot(devices[0]) as snap:
        Feed(cache).step(3)
        for given in devices:  # whichever is passed
            cache.rollback(given, snap, 0)
            for call in (lambda e: cache.rollback(e, snap, 0), lambda e: cache.snapshot_into(e, snap)):
                calls = asked(standin, lambda call=call, given=given: call(given))
                for ordinal, device in enumerate(devices):
                    mine = [call for call in calls if call.device == ordinal]
                    assert names(mine) == ["restore"]
                    assert {call.stream for call in mine} == {device.stream.handle}


# The clock


def test_a_change_of_the_counters_is_one_launch(e: Any, standin: StandIn, cache: Cache) -> None:
    Feed(cache).step(3)
    assert names(asked(standin, lambda: cache.advance(e, 2))) == ["set_counters"]
    assert names(asked(standin, lambda: cache.sync_d(e))) == ["set_counters"]
    assert names(asked(standin, lambda: cache.reset(e))) == ["cuMemsetD8Async", "set_counters"]
    assert asked(standin, lambda: cache.advance(e, 0)) == []
    with Cache.new(e, attention_only(120), 32, policy=POLICY) as many:
        many.advance(e, 5)
        assert names(asked(standin, lambda: many.truncate(e, 3))) == ["set_counters"]


def test_every_operation_is_one_launch_on_the_owners_stream(e: Any, standin: StandIn, cache: Cache) -> None:
    e.kernels.load_all()
    for rows in (1, 3):
        cache.reset(e)
        Feed(cache).step(rows)
        k, v, x, out = (put(e, np.ones((rows, 128), np.float32)) for _ in range(4))
        w = put(e, np.ones((128, 4), np.float32))
        alpha, beta_raw, g_log, beta = (put(e, np.ones((rows, 2), np.float32)) for _ in range(4))
        dt_bias, a = (put(e, np.ones(2, np.float32)) for _ in range(2))
        q, key, value, y = (put(e, np.ones((rows, 2, 32), np.float32)) for _ in range(4))
        operands = (q, key, value, g_log, beta)
        for name, call in {
            "append_kv": lambda k=k, v=v: ops.append_kv(e, cache, 3, k, v),
            "dequant_kv": lambda k=k, v=v, n=rows: ops.dequant_kv(e, cache, 3, 0, n, k, v),
            "conv_update": lambda x=x, w=w, out=out: ops.conv_update(e, cache, 0, x, w, out),
            "gdn_prep": lambda x=out, ins=(alpha, beta_raw, dt_bias, a), outs=operands: ops.gdn_prep(
                e, cache, 0, x, *ins, *outs, eps=1e-6
            ),
            "gdn_scan": lambda ins=operands, y=y: ops.gdn_scan(e, cache, 0, *ins, y, scale=1.0),
        }.items():
            calls = asked(standin, call)
            assert [(c.name, c.kernel, c.stream) for c in calls] == [("cuLaunchKernelEx", name, e.stream.handle)]
        cache.advance(e, rows)


@pytest.mark.parametrize("cuda_kind", ["cuda", "c"], indirect=True)
@pytest.mark.parametrize(
    ("capability", "version", "early"),
    [((9, 0), 12030, True), ((9, 0), 12020, False), ((8, 0), 13000, False)],
)
def test_a_launch_may_begin_before_the_one_in_front_has_ended_where_gpu_and_driver_can(
    make_dev: MakeDev, standin: StandIn, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: int,
    early: bool,
) -> None:  # fmt: skip
    """Also one that is captured; the stand-in refuses to begin early where a GPU or driver could not."""
    monkeypatch.setattr("cuda.bindings.driver.CUDA_VERSION", 12000)  # those of 13 refuse older drivers
    standin.set_driver_version(version)
    for attribute, value in zip((75, 76), capability, strict=True):
        standin.set_attribute(0, attribute, value)
    e = make_dev("cuda")
    with Cache.new(e, tiny(), 32, policy=POLICY) as cache:
        k, v = (put(e, np.ones((1, cache.kv_layer(3).kv_dim_k), np.float32)) for _ in range(2))
        with e.capture() as graph:
            ops.append_kv(e, cache, 3, k, v)
            cache.advance(e, 1)
        ops.append_kv(e, cache, 3, k, v)
        cache.advance(e, 1)
        graph.close()
    launches = standin.calls("cuLaunchKernelEx")
    assert {launch.captured for launch in launches if launch.kernel == "append_kv"} == {True, False}
    assert {launch.early for launch in launches} == {early}


def test_what_lets_a_launch_begin_early_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings take longer to make an attribute than to launch."""
    first = driver.launch_config((1, 1, 1), (32, 1, 1), 0, 0, early=True)
    monkeypatch.setattr("cuda.bindings.driver.CUlaunchAttribute", None)
    second = driver.launch_config((2, 1, 1), (64, 1, 1), 0, 0, early=True)
    allowed = [config.attrs[0].value.programmaticStreamSerializationAllowed for config in (first, second)]
    assert (allowed, first.numAttrs, second.numAttrs) == ([1, 1], 1, 1)
    assert driver.launch_config((1, 1, 1), (32, 1, 1), 0, 0).numAttrs == 0


def test_nothing_but_reading_waits(e: Any, standin: StandIn, cache: Cache) -> None:
    standin.clear_trace()
    feed = Feed(cache)
    feed.step(3)
    snap = cache.snapshot(e)
    feed.step(2)
    cache.rollback(e, snap, 1)
    feed.step(1)
    cache.sync_d(e)
    cache.clear_health()
    cache.reset(e)
    snap.close()
    assert [call.name for call in standin.trace() if call.name in WAITS or "DtoH" in call.name] == []
    cache.digest()
    assert standin.calls("cuStreamSynchronize") != []


def test_no_operation_allocates(e: Any, standin: StandIn, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(2)
    with cache.snapshot(e) as snap:
        feed.step(2)
        cache.rollback(e, snap, 0)
        row, out = put(e, np.ones((1, 128), np.float32)), put(e, np.ones((1, 128), np.float32))
        w = put(e, np.ones((128, 4), np.float32))
        standin.clear_trace()
        ops.append_kv(e, cache, 3, row, row)
        ops.conv_update(e, cache, 0, row, w, out)
        cache.advance(e)
        cache.snapshot_into(e, snap)
        cache.rollback(e, snap, 0)
        cache.reset(e)
        assert standin.calls(*ALLOCATIONS, "cuMemFree", "cuMemFreeAsync") == []


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
def test_a_buffer_of_no_bytes_never_reaches_the_driver(make_dev: MakeDev, standin: StandIn, arena: bool) -> None:
    e = make_dev("cuda", arena=arena)
    cfg = tiny(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1))
    standin.clear_trace()
    with Cache.new(e, cfg, 4, policy=POLICY) as cache, cache.snapshot(e) as snap:
        feed = Feed(cache)
        feed.step(2)
        cache.snapshot_into(e, snap)
        feed.step(0)
        feed.step(1)
        cache.rollback(e, snap, 0)
        cache.digest()
        cache.reset(e)
    memory = [call for call in standin.trace() if call.name.startswith(("cuMemcpy", "cuMemset", "cuMemAlloc"))]
    assert memory
    assert all(call.bytes for call in memory)


def test_the_digest_reads_each_plane_once_and_not_the_part_beyond_len(e: Any, standin: StandIn, cache: Cache) -> None:
    Feed(cache).step(3)
    calls = [call for call in asked(standin, cache.digest) if call.name == "cuMemcpyDtoHAsync"]
    state = [128 * 3 * 4, 2 * 32 * 32 * 4] * 3
    assert [call.bytes for call in calls] == [*state, 4, 3 * 4 * 34, 3 * 4 * 24] * 2
