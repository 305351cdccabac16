"""Snapshots that are renewed and restored again and again: asked less, and the same bytes, clocks and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, device_counters, gemma, image, put, sequence, tiny
from standin import StandIn

from memra_driver import ops
from memra_driver.cache import Cache, CacheSnapshot, CacheState
from memra_driver.errors import DriverError, MemraError, StateError
from memra_driver.layout import Recorder
from memra_driver.round import Round

pytestmark = pytest.mark.not_through_c
MakeDev = Callable[..., Any]


def new(e: Any, cfg: Any = None) -> Cache:
    return Cache.new(e, tiny() if cfg is None else cfg, 32, policy=POLICY)


def forget(snap: CacheSnapshot) -> None:
    """The next calls know nothing of earlier ones."""
    snap.renewal = snap.way_back = None
    snap.copies.clear()


def looks(cache: Cache) -> list[tuple[str, Any]]:
    """All of a cache but where it lies."""
    return [each for each in image(cache).items() if "ptr" not in each[0] and each[0] != "id"]


def known(e: Any, cache: Cache, snap: CacheSnapshot) -> None:
    """Both calls were made before, at this parity."""
    for _ in range(2):
        cache.snapshot_into(e, snap)
        cache.rollback(e, snap, 0)


@pytest.mark.parametrize(
    "cfg", [tiny(), attention_only(), tiny(n_layer=3), tiny(n_layer=4), gemma(shared=2)],
    ids=["8", "full", "linear", "one full", "gemma"],
)  # fmt: skip
@pytest.mark.parametrize("advance", [True, False], ids=["closed step", "open step"])
def test_rounds_of_speculation_are_those_of_a_cache_that_knows_nothing(cuda: Any, cfg: Any, advance: bool) -> None:
    with new(cuda, cfg) as mine, new(cuda, cfg) as other:
        a, b = Feed(mine), Feed(other)
        for feed in (a, b):
            feed.step(2)
        with mine.snapshot(cuda) as snap, other.snapshot(cuda) as twin:
            for accept in (0, 2, 0, 1, 3, 0, 0, 2):
                mine.snapshot_into(cuda, snap)
                forget(twin)
                other.snapshot_into(cuda, twin)
                assert (snap.pos, snap.lens(), snap.invalid) == (twin.pos, twin.lens(), "")
                for feed in (a, b):
                    feed.step(3, advance=advance, seed=accept)
                mine.rollback(cuda, snap, accept)
                forget(twin)
                other.rollback(cuda, twin, accept)
                assert looks(mine) == looks(other)
                assert device_counters(mine) == device_counters(other)
                if accept:
                    assert mine.state is CacheState.PENDING_REPLAY
                    for feed in (a, b):
                        feed.step(accept, seed=accept)
                assert sequence(mine) == sequence(other)


def test_layers_of_different_lengths_are_restored_one_by_one(cuda: Any) -> None:
    with new(cuda) as cache:
        feed = Feed(cache)
        feed.step(4)
        with cache.snapshot(cuda) as snap:
            known(cuda, cache, snap)
            feed.step(3, layers=[0, 1, 2, 3])
            cache.rollback(cuda, snap, 2)
            assert [layer.len for layer in cache.kv if layer] == [6, 4]
            cache.rollback(cuda, snap, 0)
            cache.kv[3].len = 5  # type: ignore[union-attr]
            cache.snapshot_into(cuda, snap)
            assert snap.kv_len == [None, None, None, 5, None, None, None, 4]
            cache.rollback(cuda, snap, 0)
            assert device_counters(cache) == ({3: 5, 7: 4}, {4})


@pytest.mark.parametrize("il", [1, 3, 5])
def test_one_layer_that_stands_elsewhere_is_seen_wherever_it_is(cuda: Any, il: int) -> None:
    with new(cuda, tiny(n_layer=7, full_attention_interval=2)) as cache:
        Feed(cache).step(4)
        with cache.snapshot(cuda) as snap:
            known(cuda, cache, snap)
            for layer in filter(None, cache.kv):
                layer._c.len = 7
            cache.kv[il]._c.len, cache._c.pos = 5, 7  # type: ignore[union-attr]
            cache.rollback(cuda, snap, 2)
            assert device_counters(cache) == ({1: 6, 3: 6, 5: 6} | {il: 5}, {4})
            cache.rollback(cuda, snap, 0)
            cache.kv[il]._c.len = 9  # type: ignore[union-attr]
            cache.snapshot_into(cuda, snap)
            assert snap.kv_len == [{1: 4, 3: 4, 5: 4, il: 9}.get(each) for each in range(7)]


def test_a_length_changed_in_a_list_handed_out_is_restored(cuda: Any) -> None:
    with new(cuda) as cache:
        Feed(cache).step(4)
        with cache.snapshot(cuda) as snap:
            known(cuda, cache, snap)
            snap.kv_len[7] = 2
            cache.rollback(cuda, snap, 0)
            assert device_counters(cache) == ({3: 4, 7: 2}, {4})
            cache.snapshot_into(cuda, snap)
            assert snap.kv_len == [None, None, None, 4, None, None, None, 2]


def test_the_count_of_renewals_goes_round(cuda: Any) -> None:
    with new(cuda) as cache, cache.snapshot(cuda) as snap:
        known(cuda, cache, snap)
        snap._c.stamps = 2**32 - 1
        Feed(cache).step(2)
        Feed(cache).step(2)  # the states lie as they did
        cache.snapshot_into(cuda, snap)
        assert (snap._c.stamps, snap.invalid) == (0, "")
        assert snap.kv_len == [None, None, None, 4, None, None, None, 4]


def test_so_they_are_where_there_are_no_states_that_would_show_it(cuda: Any) -> None:
    with new(cuda, attention_only()) as cache:
        feed = Feed(cache)
        feed.step(4)
        with cache.snapshot(cuda) as snap:
            known(cuda, cache, snap)
            feed.step(3, layers=[1])
            cache.rollback(cuda, snap, 2)
            assert device_counters(cache) == ({0: 4, 1: 6, 2: 4}, {4})
            cache.rollback(cuda, snap, 0)
            cache.advance(cuda, 2)  # pos alone
            cache.rollback(cuda, snap, 1)
            assert device_counters(cache) == ({0: 4, 1: 4, 2: 4}, {4})


@pytest.mark.parametrize("odd", [False, True], ids=["even", "odd"])
def test_a_call_that_is_known_is_one_launch_and_asks_nothing(cuda: Any, standin: StandIn, odd: bool) -> None:
    with new(cuda) as cache, cache.snapshot(cuda) as snap:
        for layer in filter(None, cache.recur if odd else []):
            layer.swap()
        known(cuda, cache, snap)
        for _ in range(2):
            assert standin.asked(lambda: cache.snapshot_into(cuda, snap)) == ["restore"]
            assert standin.asked(lambda: cache.rollback(cuda, snap, 0)) == ["restore"]
            cuda.zeros(8).close()  # something ended, but nothing of these


def test_two_devices_are_known_too(make_dev: MakeDev, standin: StandIn) -> None:
    devices = [make_dev("cuda", 0), make_dev("cuda", 1)]
    with Cache.new_pp2(*devices, 3, tiny(), 32, policy=POLICY) as cache, cache.snapshot(devices[0]) as snap:
        Feed(cache).step(1)
        known(devices[0], cache, snap)
        assert standin.asked(lambda: cache.rollback(devices[0], snap, 0)) == ["restore", "restore"]
        assert standin.asked(lambda: cache.snapshot_into(devices[0], snap)) == ["restore", "restore"]
        standin.fail("cuLaunchKernelEx", 2, 719)
        with pytest.raises(DriverError):
            cache.rollback(devices[0], snap, 0)
        assert cache.state is CacheState.TAINTED
        cache.rollback(devices[0], snap, 0)
        standin.fail("cuLaunchKernelEx", 2, 719)
        with pytest.raises(DriverError):
            cache.snapshot_into(devices[0], snap)
        assert (cache.state, "failed half way" in snap.invalid) == (CacheState.READY, True)


SPOILED: dict[str, Callable[[Cache], Any]] = {
    "nothing": lambda cache: None,
    "closed": Cache.close,
    "tainted": Cache.taint,
    "unsettled": lambda cache: cache.set_state(CacheState.UNSETTLED),
    "no such state": lambda cache: setattr(cache._c, "state", 77),
    "reset": lambda cache: cache.reset(cache.devices[0]),
    "C records it": lambda cache: cache.set_recorder(Recorder.C),
    "a round open": lambda cache: setattr(cache._c, "round_width", 2),
    "a step open": lambda cache: setattr(cache._c, "step_rows", 2),
    "pos below the snapshot": lambda cache: setattr(cache._c, "pos", 1),
    "pos too large": lambda cache: setattr(cache._c, "pos", 99),
    "a replay pending": lambda cache: setattr(cache._c, "replay_to", 5) or setattr(cache._c, "state", 2),
    "a length below": lambda cache: setattr(cache.kv[7]._c, "len", 1),
    "a state of nobody": lambda cache: setattr(cache.recur[1]._c.ssm_state, "ptr", 64),
    "a ring of nobody": lambda cache: setattr(cache.recur[1]._c.conv_state, "ptr", 64),
}  # fmt: skip


@pytest.mark.misuse
@pytest.mark.parametrize("accept", [0, 1, 9, -1])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_rollback_that_came_through_before_is_refused_or_done_like_the_first(
    cuda: Any, spoil: Callable[[Cache], Any], accept: int
) -> None:
    found = []
    for uses in (0, 2):
        cache = new(cuda)
        Feed(cache).step(3)
        snap = cache.snapshot(cuda)
        for _ in range(uses):
            known(cuda, cache, snap)
        for _ in range(2):  # the states lie as they did
            Feed(cache).step(1)
        spoil(cache)
        try:
            cache.rollback(cuda, snap, accept)
            words = None
        except MemraError as error:
            words = type(error), str(error).replace(f"cache {cache.id}", "cache")
        c = cache._c
        found.append((words, c.state, c.pos, c.replay_to, c.step_rows, [layer.len for layer in cache.kv if layer]))
        cache.set_recorder(Recorder.NONE)
        c.round_width = 0
        snap.close()
        cache.close()
    assert found[0] == found[1]


def test_a_rollback_inside_a_round_ends_it(cuda: Any) -> None:
    from memra_driver.plan import CacheOptions

    options = CacheOptions(round_width=4)
    with Cache.new(cuda, tiny(), 32, policy=POLICY, options=options) as cache, cache.snapshot(cuda) as snap:
        known(cuda, cache, snap)
        with Round(cache, cuda, width=3):
            Feed(cache).step(3, advance=False)
            cache.rollback(cuda, snap, 0)
            assert cache.open_round is None
        assert (cache.pos, cache.step_rows) == (0, 0)


def test_it_gives_up_what_stands_above(cuda: Any) -> None:
    with new(cuda) as cache:
        feed = Feed(cache)
        feed.step(2)
        with cache.snapshot(cuda) as snap:
            known(cuda, cache, snap)
            for _ in range(2):  # the states lie as they did
                feed.step(1)
            cache.park_logits(cuda, put(cuda, np.ones(50, np.float32)))
            with cache.snapshot(cuda) as later:
                cache.rollback(cuda, snap, 0)
                assert "given up" in later.invalid
                assert (snap.invalid, cache.last_logits_dev) == ("", None)


def test_a_launch_that_fails_restores_nothing_and_an_interrupt_taints(
    cuda: Any, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with new(cuda) as cache, cache.snapshot(cuda) as snap:
        known(cuda, cache, snap)
        Feed(cache).step(2)
        Feed(cache).step(2)
        before = image(cache)
        standin.fail("cuLaunchKernelEx", 1, 719)
        with pytest.raises(DriverError):
            cache.rollback(cuda, snap, 1)
        assert image(cache) == before
        with monkeypatch.context() as patch:
            patch.setattr("cuda.bindings.driver.cuLaunchKernelEx", interrupt)
            with pytest.raises(KeyboardInterrupt):
                cache.rollback(cuda, snap, 0)
        assert cache.state is CacheState.TAINTED
        cache.rollback(cuda, snap, 0)


def test_a_renewal_that_fails_half_way_leaves_a_snapshot_that_is_refused(cuda: Any, standin: StandIn) -> None:
    with new(cuda) as cache, cache.snapshot(cuda) as snap:
        known(cuda, cache, snap)
        standin.fail("cuLaunchKernelEx", 1, 719)
        with pytest.raises(DriverError, match=r"cuLaunchKernelEx\(restore, grid"):
            cache.snapshot_into(cuda, snap)
        assert "failed half way" in snap.invalid
        with pytest.raises(MemraError, match="half way"):
            cache.rollback(cuda, snap, 0)


def test_what_is_known_ends_with_what_it_counts_on(make_dev: MakeDev) -> None:
    e = make_dev("cuda")
    with new(e) as cache, cache.snapshot(e) as snap:
        known(e, cache, snap)
        for call in (lambda: cache.rollback(e, snap, 0), lambda: cache.snapshot_into(e, snap)):
            e.synchronize()
            e.kernels.close()
            call()  # loads them anew
        with e.capture():
            with pytest.raises(StateError, match="capture"):
                cache.rollback(e, snap, 0)
            with pytest.raises(StateError, match="capture"):
                cache.snapshot_into(e, snap)
        snap.ssm[0].close()
        for call in (lambda: cache.rollback(e, snap, 0), lambda: cache.snapshot_into(e, snap)):
            with pytest.raises(StateError, match="closed"):
                call()


def test_what_is_parked_and_tapped_goes_on_after_it(cuda: Any) -> None:
    """A rollback that is known leaves operations that are known."""
    with new(cuda) as cache, cache.snapshot(cuda) as snap:
        known(cuda, cache, snap)
        k, v = (put(cuda, np.ones((1, 128), np.float32)) for _ in range(2))
        for _ in range(3):
            ops.append_kv(cuda, cache, 3, k, v)
            cache.rollback(cuda, snap, 0)
            assert (cache.kv[3].len, cache.kv[3].step_ops, device_counters(cache)) == (0, 0, ({3: 0, 7: 0}, {0}))  # type: ignore[union-attr]
