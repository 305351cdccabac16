"""Rollback and replay: after any of them the cache is what plain decoding left at that position, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, History, device_counters, image, put, scalars, sequence, tiny

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import CapacityError, SnapshotError, StateError

PENDING = CacheState.PENDING_REPLAY


@pytest.fixture
def history(dev: Any) -> History:
    return History.of(dev)


@pytest.fixture
def cache(dev: Any) -> Any:
    with Cache.new(dev, tiny(), 32, policy=POLICY) as cache:
        yield cache


@pytest.fixture
def feed(cache: Cache) -> Feed:
    return Feed(cache)


# Undoing everything since the snapshot


def test_undoing_a_verify_of_any_width_restores_the_moment_of_the_snapshot(
    dev: Any, cache: Cache, feed: Feed, history: History
) -> None:
    feed.step(10)
    with cache.snapshot(dev) as snap:
        for width in range(1, 7):
            feed.step(width)
            history.check(cache)
            cache.rollback(dev, snap, 0)
            assert (cache.pos, cache.state) == (10, CacheState.READY)
            history.check(cache)
        feed.step(4)  # the same tokens again
        history.check(cache)


def test_undoing_twice_in_a_row_and_undoing_nothing_change_nothing(
    dev: Any, cache: Cache, feed: Feed, history: History
) -> None:
    feed.step(4)
    with cache.snapshot(dev) as snap:
        cache.rollback(dev, snap, 0)
        feed.step(3)
        cache.rollback(dev, snap, 0)
        before = sequence(cache)
        cache.rollback(dev, snap, 0)
        assert sequence(cache) == before
        history.check(cache)


def test_a_snapshot_of_an_empty_cache_undoes_the_prompt(dev: Any, cache: Cache, feed: Feed, history: History) -> None:
    with cache.snapshot(dev) as snap:
        feed.step(7)
        cache.rollback(dev, snap, 0)
        history.check(cache)
        assert cache.pos == 0


@pytest.mark.parametrize("bonus", [False, True], ids=["no bonus", "bonus"])
@pytest.mark.parametrize("accept", [0, 1, 3, 4])
def test_every_accept_count_ends_with_all_clocks_at_one_position(
    dev: Any, cache: Cache, feed: Feed, history: History, accept: int, bonus: bool
) -> None:
    feed.step(5)
    with cache.snapshot(dev) as snap:
        feed.step(4)
        cache.rollback(dev, snap, accept)
        if accept:
            feed.step(accept)
        assert (cache.pos, cache.state, cache.replay_to) == (5 + accept, CacheState.READY, 0)
        history.check(cache)
        if bonus:
            feed.step(1)
            history.check(cache)


def test_full_acceptance_needs_no_rollback(dev: Any, cache: Cache, feed: Feed, history: History) -> None:
    feed.step(5)
    with cache.snapshot(dev) as snap:
        feed.step(4)
        history.check(cache)
        cache.snapshot_into(dev, snap)
        feed.step(2)
        cache.rollback(dev, snap, 0)
        history.check(cache)


def test_other_tokens_after_a_rejection_give_what_plain_decoding_of_those_gives(
    dev: Any, cache: Cache, feed: Feed
) -> None:
    feed.step(5)
    with cache.snapshot(dev) as snap:
        feed.step(4, seed=77)
        cache.rollback(dev, snap, 0)
    feed.step(3, seed=99)
    with Cache.new(dev, tiny(), 32, policy=POLICY) as twin:
        plain = Feed(twin)
        plain.step(5)
        for _ in range(3):
            plain.step(1, seed=99)
        assert sequence(cache) == sequence(twin)
        assert cache.digest() == twin.digest()


# While a replay is pending


def test_after_a_rollback_that_accepts_the_kv_stands_and_the_state_waits(
    dev: Any, cache: Cache, feed: Feed, history: History
) -> None:
    feed.step(6)
    with cache.snapshot(dev) as snap:
        feed.step(4)
        kv = {name: value for name, value in sequence(cache).items() if name.endswith((".k", ".v"))}
        cache.rollback(dev, snap, 2)
        assert (cache.state, cache.pos, cache.replay_to) == (PENDING, 6, 8)
        assert device_counters(cache) == ({3: 8, 7: 8}, {6})
        seen = sequence(cache)
        assert {name: seen[name] for name in kv} == {
            name: value[: len(value) // 10 * 8] for name, value in kv.items()
        }  # 10 rows stood, 8 stand
        assert all(seen[name] == history.states[6][name] for name in seen if name not in kv)


def test_what_needs_a_settled_cache_is_refused_while_a_replay_is_pending(dev: Any, cache: Cache, feed: Feed) -> None:
    feed.step(6)
    with cache.snapshot(dev) as snap, cache.snapshot(dev) as other:
        feed.step(4)
        cache.rollback(dev, snap, 2)
        before = image(cache, snap, other)
        for call in (
            lambda: cache.snapshot(dev), lambda: cache.snapshot_into(dev, snap),
            lambda: cache.snapshot_into(dev, other), lambda: cache.truncate(dev, 3), lambda: cache.advance(dev, 3),
            lambda: feed.append(3, 3), lambda: feed.conv(0, 3),
        ):  # fmt: skip
            with pytest.raises(StateError, match="pending replay of 2 tokens"):
                call()
        scan_operands = [put(dev, np.zeros((3, 2, 32), np.float32)) for _ in range(4)]
        gates = [put(dev, np.zeros((3, 2), np.float32)) for _ in range(2)]
        with pytest.raises(StateError, match="pending replay of 2 tokens"):
            ops.gdn_scan(dev, cache, 0, *scan_operands[:3], *gates, scan_operands[3], scale=1.0)
        assert image(cache, snap, other) == before


def test_reading_is_allowed_while_a_replay_is_pending(dev: Any, cache: Cache, feed: Feed) -> None:
    feed.step(6)
    with cache.snapshot(dev) as snap:
        feed.step(4)
        cache.rollback(dev, snap, 2)
        before = image(cache, snap)
        assert len(cache.digest()) == 64
        assert cache.report()["snapshots"][0]["pos"] == 6
        assert not cache.health()
        cache.sync_d(dev)
        k, v = (put(dev, np.zeros((8, 128), np.float32)) for _ in range(2))
        ops.dequant_kv(dev, cache, 3, 0, 8, k, v)
        assert image(cache, snap) == before


@pytest.mark.parametrize("widths", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_the_replay_writes_no_row_twice_and_ends_at_the_accepted_position(
    dev: Any, cache: Cache, feed: Feed, history: History, widths: tuple[int, ...]
) -> None:
    feed.step(6)
    with cache.snapshot(dev) as snap:
        feed.step(5)
        cache.rollback(dev, snap, 3)
        for width in widths:
            assert cache.state is PENDING
            feed.step(width)
            assert device_counters(cache) == ({3: 9, 7: 9}, {cache.pos})  # max(pos, replay_to)
            assert cache.kv[3].len == 9
        assert (cache.pos, cache.state, cache.replay_to) == (9, CacheState.READY, 0)
        history.check(cache)


def test_half_a_replay_says_how_much_is_left(dev: Any, cache: Cache, feed: Feed) -> None:
    feed.step(2)
    with cache.snapshot(dev) as snap:
        feed.step(4)
        cache.rollback(dev, snap, 3)
        feed.step(1)
        with pytest.raises(StateError, match="pending replay of 2 tokens"):
            cache.snapshot(dev)
        with pytest.raises(StateError, match="pending replay of 2 tokens"):
            feed.append(3, 3)
        feed.step(2)
        cache.snapshot(dev).close()


@pytest.mark.parametrize("replayed", [0, 1, 2])
def test_a_pending_replay_may_be_rolled_back_and_accept_less(
    dev: Any, cache: Cache, feed: Feed, history: History, replayed: int
) -> None:
    feed.step(6)
    with cache.snapshot(dev) as snap:
        feed.step(4)
        cache.rollback(dev, snap, 3)
        if replayed:
            feed.step(replayed)
        with pytest.raises(CapacityError, match="accept_len is 4; 3 tokens"):
            cache.rollback(dev, snap, 4)
        cache.rollback(dev, snap, 2)
        assert (cache.pos, cache.replay_to) == (6, 8)
        feed.step(2)
        history.check(cache)
        cache.rollback(dev, snap, 0)
        history.check(cache)


def test_a_pending_replay_ends_with_a_reset(dev: Any, cache: Cache, feed: Feed) -> None:
    with cache.snapshot(dev) as snap:
        feed.step(4)
        cache.rollback(dev, snap, 2)
        cache.reset(dev)
        assert (cache.state, cache.replay_to, cache.pos) == (CacheState.READY, 0, 0)
        feed.step(3)


# In the middle of a step


def test_rollback_is_legal_behind_every_single_operation_of_a_step(
    dev: Any, cache: Cache, feed: Feed, history: History
) -> None:
    feed.step(3)
    with cache.snapshot(dev) as snap:
        for stop in range(1, 9):
            feed.step(3, layers=range(stop), advance=False)
            assert cache.step_rows == 3
            cache.rollback(dev, snap, 0)
            assert (cache.step_rows, cache.pos) == (0, 3)
            history.check(cache)
        feed.conv(0, 2)  # the ring has rolled, the state has not moved
        cache.rollback(dev, snap, 0)
        history.check(cache)
        feed.step(2)
        history.check(cache)


def test_rows_of_an_open_step_can_be_accepted(dev: Any, cache: Cache, feed: Feed, history: History) -> None:
    feed.step(3)
    with cache.snapshot(dev) as snap:
        feed.step(2)
        feed.step(3, advance=False)
        with pytest.raises(CapacityError, match="accept_len is 6; 5 tokens"):
            cache.rollback(dev, snap, 6)
        cache.rollback(dev, snap, 4)
        assert (cache.pos, cache.replay_to, cache.step_rows) == (3, 7, 0)
        feed.step(4)
        history.check(cache)


def test_a_layer_that_took_no_part_keeps_its_saved_length(dev: Any, cache: Cache, feed: Feed) -> None:
    feed.step(3)
    with cache.snapshot(dev) as snap:
        feed.step(2, layers=[0, 1, 2, 3])  # say, a drafter that runs the lower half
        cache.rollback(dev, snap, 2)
        assert device_counters(cache) == ({3: 5, 7: 3}, {3})
        assert (cache.kv[3].len, cache.kv[7].len) == (5, 3)
        feed.step(2, layers=[0, 1, 2, 3])
        before = scalars(cache)
        with pytest.raises(StateError, match="layer 7: len is 3, pos is 5"):
            feed.append(7, 1)  # rows 3 and 4 of it were never written
        assert scalars(cache) == before


# Swaps


@pytest.mark.parametrize("swaps", range(5))
def test_rollback_restores_the_state_after_any_number_of_swaps(
    dev: Any, cache: Cache, feed: Feed, history: History, swaps: int
) -> None:
    feed.step(4)
    with cache.snapshot(dev) as snap:
        for _ in range(swaps):
            feed.step(1)
        cache.rollback(dev, snap, 0)
        history.check(cache)
        feed.step(3)
        history.check(cache)


@pytest.mark.parametrize("taken_at", [0, 1])
@pytest.mark.parametrize("swapped", [(0,), (1, 5), (0, 2, 4, 6), (0, 1, 2, 4, 5, 6)])
def test_layers_of_mixed_parity_are_kept_and_restored(
    dev: Any, cache: Cache, feed: Feed, history: History, swapped: tuple[int, ...], taken_at: int
) -> None:
    """Foreign code may exchange the handles of some layers: what is current then is what counts."""
    feed.step(4)
    if taken_at:
        for il in swapped:
            exchange(cache, il)
    with cache.snapshot(dev) as snap:
        if not taken_at:
            for il in swapped:
                exchange(cache, il)
        feed.step(3)
        cache.rollback(dev, snap, 0)
        history.check(cache)
        cache.snapshot_into(dev, snap)
        feed.step(2)
        cache.rollback(dev, snap, 1)
        feed.step(1)
        history.check(cache)


def exchange(cache: Cache, il: int) -> None:
    """Exchanges the handles of a layer's states and the bytes with them, so that the sequence stays what it is."""
    state = cache.recur[il]
    current, other = state.ssm_state.to_numpy(), state.ssm_state_alt.to_numpy()
    state.ssm_state, state.ssm_state_alt = state.ssm_state_alt, state.ssm_state
    state.ssm_state.copy_from(current)
    state.ssm_state_alt.copy_from(other)


def test_one_scan_alone_changes_the_parity_of_one_layer_and_rollback_copes(
    dev: Any, cache: Cache, feed: Feed, history: History
) -> None:
    feed.step(4)
    with cache.snapshot(dev) as snap:
        feed.step(2, layers=[5], advance=False)
        cache.rollback(dev, snap, 0)
        history.check(cache)
        feed.step(2)
        history.check(cache)


# What is refused


@pytest.mark.parametrize("accept", [-1, 5, 100, 2**40])
def test_an_accept_count_outside_what_stands_is_refused(dev: Any, cache: Cache, feed: Feed, accept: int) -> None:
    feed.step(3)
    with cache.snapshot(dev) as snap:
        feed.step(4)
        before = image(cache, snap)
        with pytest.raises(CapacityError, match=rf"accept_len is {accept}; 4 tokens stand after .* position 3"):
            cache.rollback(dev, snap, accept)
        with pytest.raises(TypeError):
            cache.rollback(dev, snap, 1.5)
        assert image(cache, snap) == before


def test_an_accept_count_never_reaches_past_the_capacity(dev: Any, cache: Cache, feed: Feed) -> None:
    feed.step(3)
    with cache.snapshot(dev) as snap:
        cache.pos = 1000  # assigned by mistake
        cache.kv[3].len = 1000
        before = image(cache, snap)
        with pytest.raises(CapacityError, match="29 tokens"):
            cache.rollback(dev, snap, 30)
        assert image(cache, snap) == before
        cache.rollback(dev, snap, 0)
        assert (cache.pos, cache.kv[3].len) == (3, 3)


def test_a_snapshot_above_an_assigned_position_is_not_restored(dev: Any, cache: Cache, feed: Feed) -> None:
    feed.step(5)
    with cache.snapshot(dev) as snap:
        cache.pos = 2
        before = image(cache, snap)
        with pytest.raises(CapacityError, match="position 5"):
            cache.rollback(dev, snap, 0)
        assert image(cache, snap) == before


# Any order of events


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_of_rounds_stays_on_the_path_of_plain_decoding(
    dev: Any, cache: Cache, feed: Feed, history: History, seed: int
) -> None:
    chance = random.Random(seed)
    snap = cache.snapshot(dev)
    for _ in range(40):
        if cache.pos > 26:
            cache.reset(dev)
            cache.snapshot_into(dev, snap)
        event = chance.choice(["step", "step", "verify", "verify", "half", "snapshot"])
        if event == "step":
            feed.step(chance.randint(1, 3))
        elif event == "snapshot":
            snap.close()
            snap = cache.snapshot(dev)
        else:
            cache.snapshot_into(dev, snap)
            width = chance.randint(1, 5)
            if event == "half":  # interrupted somewhere in the middle of the step
                feed.step(width, layers=range(chance.randint(1, 8)), advance=False)
                accept = 0
            else:
                feed.step(width)
                accept = chance.randint(0, width)
            cache.rollback(dev, snap, accept)
            while cache.state is PENDING:
                feed.step(chance.randint(1, cache.replay_to - cache.pos))
        history.check(cache)
    snap.close()


def test_a_rollback_outdates_snapshots_of_given_up_tokens_only(
    dev: Any, cache: Cache, feed: Feed, history: History
) -> None:
    feed.step(2)
    early = cache.snapshot(dev)
    feed.step(2)
    middle = cache.snapshot(dev)
    feed.step(4)
    late = cache.snapshot(dev)
    cache.rollback(dev, early, 3)  # rows 2, 3, 4 stand: position 5
    with pytest.raises(SnapshotError, match="position 8"):
        cache.rollback(dev, late, 0)
    feed.step(3)
    cache.rollback(dev, middle, 0)
    assert cache.pos == 4
    history.check(cache)
    cache.snapshot_into(dev, late)  # good again
    feed.step(1)
    cache.rollback(dev, late, 0)
    history.check(cache)
    for snap in (early, middle, late):
        snap.close()
