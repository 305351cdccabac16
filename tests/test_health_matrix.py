"""Each operation that can meet a fault reports it, with layer, position and count, in the record of its own cache.

Alone, captured, in a round, batched, on borrowed K/V and over two devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import op_calls
import pytest
from caches import POLICY, Feed, gemma, image, put, tiny
from standin import StandIn

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import DriverError, HealthError, StateError
from memra_driver.formats import FormatPolicy
from memra_driver.health import Fault, FaultCount
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

MakeDev = Callable[..., Any]
Array = np.ndarray[Any, Any]
T, BAD_ROW = 2, 1
CFG = tiny(n_head=4)
OPTIONS = CacheOptions(round_width=T)


@dataclass(frozen=True)
class Spoiled:
    """An operation, and a value in row BAD_ROW of one of its inputs."""

    op: str
    name: str
    value: float
    kind: Fault
    count: int = 1
    fp8: bool = False
    stays: bool = False  # in the ring, so that the convolution's row 0 of the next step is not finite either

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.kind.name}"


CASES = (
    Spoiled("append_kv", "k_rows", np.nan, Fault.NONFINITE),
    Spoiled("append_kv", "v_rows", -np.inf, Fault.NONFINITE),
    Spoiled("append_kv", "k_rows", 9e6, Fault.SCALE_OVERFLOW),
    Spoiled("append_kv", "v_rows", 9e6, Fault.SCALE_OVERFLOW),
    Spoiled("append_kv", "k_rows", 500.0, Fault.FP8_SATURATED, fp8=True),
    Spoiled("append_kv", "v_rows", -500.0, Fault.FP8_SATURATED, fp8=True),
    Spoiled("attend", "q", np.nan, Fault.NONFINITE),
    Spoiled("conv_update", "x", np.inf, Fault.NONFINITE),
    Spoiled("gdn_prep", "conv_out", np.nan, Fault.NONFINITE),
    Spoiled("gdn_prep", "alpha", np.nan, Fault.NONFINITE),
    Spoiled("gdn_prep", "beta_raw", np.inf, Fault.NONFINITE),
    # The input, and what the convolution makes of it.
    Spoiled("recur_step", "x", np.nan, Fault.NONFINITE, count=2, stays=True),
    Spoiled("recur_step", "alpha", np.nan, Fault.NONFINITE),
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def new(e: Any, case: Spoiled | None = None, cfg: Any = None, **options: Any) -> Cache:
    policy = FormatPolicy(kv_fp8=True) if case is not None and case.fp8 else POLICY
    chosen = CacheOptions(**options) if options else OPTIONS
    return Cache.new(e, CFG if cfg is None else cfg, 32, policy=policy, options=chosen)


def inputs(case: Spoiled, members: int = 1, bad: int = 0) -> dict[str, Array]:
    """Arrays of the operation, [members * T, ..]; the value stands in those of member `bad`."""
    if case.op == "attend":
        found = {"q": np.ones((members * T, 4, 64), np.float32), "out": np.zeros((members * T, 4, 64), np.float32)}
    else:
        found = op_calls.arrays(case.op)
        once = ("w", "dt_bias", "a")
        found = {name: x if name in once else np.concatenate([x] * members) for name, x in found.items()}
    found[case.name].reshape(members, T, -1)[bad, BAD_ROW, -1] = case.value
    return found


def layer_of(case: Spoiled) -> int:
    return 3 if case.op == "attend" else op_calls.LAYER[case.op]


def prepared(case: Spoiled, cache: Any, given: dict[str, Any], il: int) -> Callable[[], None]:
    """The operation, behind what opens its step; all buffers are made now."""
    e = cache.e if isinstance(cache, CacheBatch) else cache.devices[cache.plan.device_of(il)]
    members = len(cache.members)
    before = {"attend": "append_kv", "gdn_prep": "conv_update"}.get(case.op)
    first: dict[str, Any] = {}
    if before is not None:
        arrays = op_calls.arrays(before)
        first = {name: put(e, x if name == "w" else np.concatenate([x] * members)) for name, x in arrays.items()}

    def run() -> None:
        if before is not None:
            op_calls.call(e, cache, before, first, il)
        if case.op == "attend":
            ops.attend(e, cache, il, given["q"], given["out"], scale=0.125)
        else:
            op_calls.call(e, cache, case.op, given, il)

    return run


def seen(case: Spoiled, il: int, slot: int, times: int = 1, more: int = 0) -> dict[Fault, FaultCount]:
    return {case.kind: FaultCount(case.count * times + more, il, slot)}


@every_case
def test_alone(dev: Any, case: Spoiled) -> None:
    with new(dev, case) as cache:
        Feed(cache).step(5)
        given = {name: put(dev, array) for name, array in inputs(case).items()}
        prepared(case, cache, given, layer_of(case))()
        assert cache.health().faults == seen(case, layer_of(case), 5 + BAD_ROW)


@every_case
def test_in_a_round(dev: Any, case: Spoiled) -> None:
    with new(dev, case) as cache:
        Feed(cache).step(5)
        given = {name: put(dev, array) for name, array in inputs(case).items()}
        with Round(cache, dev, width=T):
            prepared(case, cache, given, layer_of(case))()
        assert cache.health().faults == seen(case, layer_of(case), 5 + BAD_ROW)


@every_case
def test_in_a_graph_at_the_position_of_the_launch(dev: Any, case: Spoiled) -> None:
    with new(dev, case) as cache:
        feed = Feed(cache)
        feed.step(5)
        good = inputs(case)
        good[case.name][~np.isfinite(good[case.name]) | (np.abs(good[case.name]) > 100)] = 0
        given = {name: put(dev, array) for name, array in good.items()}
        run = prepared(case, cache, given, layer_of(case))
        run()  # attention has its scratch now
        cache.advance(dev, T)
        with dev.capture() as graph:
            run()
            cache.advance(dev, T)
            with pytest.raises(StateError, match="capture"):
                cache.clear_health()
        graph.launch()
        assert not cache.health()
        given[case.name].copy_from(inputs(case)[case.name].reshape(-1))
        pos = cache.pos
        graph.launch()
        graph.launch()
        more = int(case.stays)
        assert cache.health().faults == seen(case, layer_of(case), pos + BAD_ROW, times=2, more=more)
        cache.clear_health()
        graph.launch()
        row = 0 if case.stays else BAD_ROW
        assert cache.health().faults == seen(case, layer_of(case), pos + 2 * T + row, more=more)
        graph.close()


@every_case
def test_of_a_batch_in_the_record_of_its_member(dev: Any, case: Spoiled) -> None:
    caches = [new(dev, case) for _ in range(3)]
    for cache, tokens in zip(caches, (5, 0, 3), strict=True):
        if tokens:
            Feed(cache).step(tokens)
    with CacheBatch(caches) as batch:
        given = {name: put(dev, array) for name, array in inputs(case, 3, bad=2).items()}
        prepared(case, batch, given, layer_of(case))()
        found = [cache.health().faults for cache in caches]
        assert found == [{}, {}, seen(case, layer_of(case), 3 + BAD_ROW)]
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("kind", ["host", "cuda"])
@every_case
def test_over_two_devices_in_the_record_of_the_layers_device(
    make_dev: MakeDev, gpu_count: int, kind: str, case: Spoiled
) -> None:
    devices = [make_dev(kind, min(number, gpu_count - 1)) for number in range(2)]
    policy = FormatPolicy(kv_fp8=True) if case.fp8 else POLICY
    with Cache.new_pp2(*devices, 4, CFG, 32, policy=policy, options=OPTIONS) as cache:
        Feed(cache).step(5)
        il = layer_of(case) + 4
        given = {name: put(devices[1], array) for name, array in inputs(case).items()}
        prepared(case, cache, given, il)()
        assert cache.health().faults == seen(case, il, 5 + BAD_ROW)
        assert not any(cache.health_d(0).to_numpy())
        given = {name: put(devices[0], array) for name, array in inputs(case).items()}
        prepared(case, cache, given, il - 4)()
        assert cache.health().faults == seen(case, il - 4, 5 + BAD_ROW, times=2)
        cache.clear_health()
        assert not cache.health()


def test_attention_on_borrowed_kv_names_the_layer_that_borrows(dev: Any) -> None:
    cfg = gemma(shared=2, n_head=4)
    with new(dev, cfg=cfg) as cache:
        rows = put(dev, np.ones(T * cache.kv[2].kv_dim_k, np.float32))
        ops.append_kv(dev, cache, 2, rows, rows)
        q = np.ones((T, 4, 64), np.float32)
        q[1, 3, 63] = np.inf
        assert cache.cfg.kv_source(5) == 2
        ops.attend(dev, cache, 5, put(dev, q), dev.uninit(q.size), scale=0.125)
        assert cache.health().faults == {Fault.NONFINITE: FaultCount(1, 5, 1)}


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_bad_count_is_noted_once_a_device_at_the_position_of_its_round(
    make_dev: MakeDev, gpu_count: int, kind: str, devices: int
) -> None:
    made = [make_dev(kind, min(number, gpu_count - 1)) for number in range(devices)]
    born = Cache.new if devices == 1 else lambda *args, **named: Cache.new_pp2(*args[:2], 4, *args[2:], **named)
    with born(*made, CFG, 32, policy=POLICY, options=OPTIONS) as cache:
        feed = Feed(cache)
        feed.step(5)
        for count, faults in ((1, {}), (T + 1, {Fault.BAD_ACCEPT: FaultCount(devices, 0, 6)})):
            with Round(cache, made[0], width=T) as r:
                feed.step(T, advance=False)
                r.commit_from_device(made[-1].htod_i32([count]))
            cache.settle(made[0])
            assert (cache.health().faults, cache.pos) == (faults, 6)


# A strict cache, and records of caches that are not well


def test_a_strict_cache_settles_and_then_raises_until_it_is_cleared(dev: Any) -> None:
    with new(dev, strict=True, round_width=T) as cache:
        feed = Feed(cache)
        feed.step(5)
        with Round(cache, dev, width=T) as r:
            feed.step(T, advance=False)
            r.commit_from_device(dev.htod_i32([-1]))
        with pytest.raises(HealthError, match=r"BAD_ACCEPT x1, first at layer 0, position 5.*clear_health"):
            cache.settle(dev)
        assert (cache.state, cache.pos) == (CacheState.READY, 5)
        before = image(cache)
        for _ in range(2):
            with pytest.raises(HealthError, match="BAD_ACCEPT"):
                cache.digest()
        assert image(cache) == before
        feed.step(2)  # what does not wait goes on
        cache.clear_health()
        assert len(cache.digest()) == 64


def test_the_record_of_a_closed_cache_is_refused(dev: Any) -> None:
    cache = new(dev)
    cache.close()
    for call in (cache.health, cache.clear_health):
        with pytest.raises(StateError, match="closed"):
            call()


@pytest.mark.standin
def test_the_record_of_a_tainted_cache_is_read_and_cleared(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda", arena=False)  # where a rollback is a launch for the states and one for each counter
    with new(e) as cache:
        feed = Feed(cache)
        feed.step(3)
        snap = cache.snapshot(e)
        nan = put(e, np.full((1, 128), np.nan, np.float32))
        ops.append_kv(e, cache, 3, nan, nan)
        standin.fail("cuLaunchKernelEx", 2, 719)  # behind the copy of the states
        with pytest.raises(DriverError):
            cache.rollback(e, snap, 0)
        assert cache.state is CacheState.TAINTED
        assert cache.health().faults == {Fault.NONFINITE: FaultCount(8, 3, 3)}
        cache.clear_health()
        assert not cache.health()
