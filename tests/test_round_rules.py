"""What a round refuses, what may happen inside one, and what an unsettled cache allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from caches import POLICY, device_counters, image, scalars
from decoding import MAX_CTX, TRUE, WIDTH, Player, begin, draft, hybrid, play, player_on

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import ArrayError, CapacityError, ConfigError, DeviceMismatch, StateError
from memra_driver.health import Fault, FaultCount
from memra_driver.round import Round

MakeDev = Callable[..., Any]


@pytest.fixture
def player(dev: Any) -> Any:
    player = player_on(dev)
    yield player
    player.close()


# What is refused


def refused(cache: Cache, calls: Sequence[tuple[type[Exception], str, Callable[[], Any]]]) -> None:
    before = image(cache)
    for error, text, call in calls:
        with pytest.raises(error, match=text):
            call()
        assert image(cache) == before


def captured_step(player: Player) -> Any:
    lane = player.lane(1)
    with player.e.capture() as graph:
        lane.run(player.cache)
        player.cache.advance(player.e)
    return graph


def enter(cache: Cache, e: Any, width: int) -> None:
    Round(cache, e, width=width).__enter__()


def test_what_a_round_refuses_changes_nothing(player: Player, make_dev: MakeDev) -> None:
    player.step(TRUE, TRUE)
    cache, e, other = player.cache, player.e, make_dev("host")
    snap = cache.snapshot(e)
    graph = captured_step(player)
    with Round(cache, e, width=3) as r:
        wide = player.lane(4)
        refused(cache, [
            (StateError, "ran no step", lambda: r.commit(0)),
            (StateError, "ran no step", lambda: r.commit_from_device(e.htod_i32([0]))),
            (CapacityError, "4 rows in a round of width 3", lambda: wide.run(cache)),
        ])  # fmt: skip
        player.run(draft(3, 2))
        refused(cache, [
            (CapacityError, "accept_len is 4; the round ran 3 rows", lambda: r.commit(4)),
            (CapacityError, "accept_len is -1", lambda: r.commit(-1)),
            (TypeError, "integer", lambda: r.commit(1.0)),
            (StateError, "its commit moves pos", lambda: cache.advance(e, 3)),
            (StateError, "round", lambda: cache.snapshot(e)),
            (StateError, "round", lambda: cache.snapshot_into(e, snap)),
            (StateError, "round", lambda: cache.truncate(e, 1)),
            (StateError, "round", lambda: CacheBatch([cache])),
            (StateError, "round", lambda: cache.settle(e)),
            (StateError, "open", lambda: cache.prepare_replay(e)),
            (StateError, "open", lambda: cache.replayed(graph, 1)),
            (StateError, "open", graph.launch),
            (StateError, "open", lambda: enter(cache, e, 3)),
            (StateError, "has run append in this step", lambda: player.lane(3).run(cache, [1])),
            (StateError, "the open step has 3", lambda: player.lane(2).run(cache, [1])),
        ])  # fmt: skip
        assert len(cache.digest()) == 64
        assert cache.report()["cache_bytes"]
        r.commit(2)
        refused(cache, [
            (StateError, "the round is over", lambda: r.commit(1)),
            (StateError, "the round is over", lambda: r.commit_from_device(e.htod_i32([0]))),
            (StateError, "the round is over", r.reject),
        ])  # fmt: skip
    player.tokens += [TRUE] * 2
    player.check()
    refused(cache, [
        (StateError, "the round is over", lambda: r.commit(1)),
        (ConfigError, r"width 5; .*round_width=4", lambda: Round(cache, e, width=5)),
        (ConfigError, "width 0", lambda: Round(cache, e, width=0)),
        (ConfigError, "width -1", lambda: Round(cache, e, width=-1)),
        (TypeError, "integer", lambda: Round(cache, e, width=2.5)),
        (DeviceMismatch, "is none of", lambda: enter(cache, other, 2)),
    ])  # fmt: skip
    player.run([TRUE])
    refused(cache, [(StateError, "a step of 1 rows is open", lambda: enter(cache, e, 2))])
    cache.rollback(e, snap, 1)
    refused(cache, [(StateError, "pending replay of 1 tokens", lambda: enter(cache, e, 2))])
    graph.close()
    snap.close()
    cache.close()
    with pytest.raises(StateError, match="closed"):
        enter(cache, e, 2)


def test_a_cache_without_a_tape_has_no_rounds(dev: Any) -> None:
    with (
        Cache.new(dev, hybrid(), 8, policy=POLICY) as cache,
        pytest.raises(ConfigError, match=r"round of width 1; .*round_width=0"),
    ):
        Round(cache, dev, width=1)


def test_a_round_at_the_end_of_the_cache_fits_or_is_refused_whole(player: Player) -> None:
    cache, e = player.cache, player.e
    while len(player.tokens) < MAX_CTX - 2:
        player.step(TRUE, TRUE)
    with Round(cache, e, width=WIDTH) as r:
        refused(cache, [(CapacityError, "need 65.*max_ctx is 64", lambda: player.run(draft(3, 0)))])
        player.run(draft(2, 2))
        r.commit(2)
    player.tokens += [TRUE, TRUE]
    player.check()
    with Round(cache, e, width=WIDTH):
        refused(cache, [(CapacityError, "max_ctx is 64", lambda: player.run([TRUE]))])
    player.check()


def test_a_count_must_be_one_i32_of_the_caches_device(player: Player) -> None:
    player.step(TRUE)
    cache, e = player.cache, player.e
    with Round(cache, e, width=WIDTH) as r:
        player.run(draft(2, 0))
        refused(cache, [
            (ArrayError, "accept_d", lambda: r.commit_from_device(e.htod_i32([1, 1]))),
            (ArrayError, "accept_d", lambda: r.commit_from_device(e.zeros(1))),
            (ArrayError, "accept_d", lambda: r.commit_from_device(1)),
        ])  # fmt: skip
    player.check()


def test_a_layer_whose_rows_stand_above_pos_takes_no_part_in_a_round(player: Player) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    layer = cache.kv[3]
    assert layer is not None
    layer.len = 4
    cache.sync_d(e)
    lane = player.lane(1).fill((2, [TRUE]))
    text = r"layer 3: len is 4, pos is 2: a round .* would give up rows 2 \.\. 3; set len to pos"
    with Round(cache, e, width=WIDTH) as r:
        lane.run(cache, [0, 1, 2])  # the others do
        refused(cache, [(StateError, text, lambda: lane.run(cache, [3]))])
        r.commit(1)
    assert device_counters(cache) == ({1: 3, 3: 4}, {3})
    layer.len = 2
    cache.sync_d(e)


@pytest.mark.parametrize("length", [-1, MAX_CTX + 1])
def test_a_length_outside_the_cache_lets_no_round_begin(player: Player, length: int) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    layer = cache.kv[3]
    assert layer is not None
    layer.len = length
    refused(cache, [(StateError, f"len is {length}", lambda: enter(cache, e, WIDTH))])
    layer.len, cache.pos = 2, length
    refused(cache, [(StateError, f"pos is {length}", lambda: enter(cache, e, WIDTH))])
    cache.pos = 2
    play(player, WIDTH, 2)
    player.check()


# Rollback, reset and close inside


@pytest.mark.parametrize("accept", [0, 2])
def test_a_rollback_inside_a_round_rejects_it_first(player: Player, accept: int) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    with cache.snapshot(e) as snap:
        player.step(TRUE)
        player.step(TRUE)
        with Round(cache, e, width=WIDTH) as r:
            player.run(draft(3, 3))
            refused(cache, [(CapacityError, "accept_len is 3; 2 tokens", lambda: cache.rollback(e, snap, 3))])
            cache.rollback(e, snap, accept)
            assert (cache.pos, cache.step_rows, cache.open_round) == (2, 0, None)
            assert device_counters(cache)[0] == {1: 2 + accept, 3: 2 + accept}
            with pytest.raises(StateError, match="the round is over"):
                r.commit(1)
            if accept:
                player.step(TRUE, TRUE)
        player.tokens = player.tokens[: 2 + accept]
        player.check()


@pytest.mark.parametrize("by", ["host", "device"])
def test_a_reset_inside_a_round_rejects_it_first(player: Player, by: str) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    if by == "device":
        play(player, 2, 1, "device")
    with Round(cache, e, width=WIDTH):
        player.run(draft(3, 3))
        cache.reset(e)
        player.tokens = []
        player.check()
        player.step(TRUE)
    player.check()


def test_a_cache_may_be_closed_inside_a_round(player: Player) -> None:
    player.step(TRUE)
    with Round(player.cache, player.e, width=WIDTH) as r:
        player.run(draft(3, 3))
        player.cache.close()
        with pytest.raises(StateError):
            r.commit(1)
    assert player.cache.state is CacheState.CLOSED


def test_a_capture_begun_inside_a_round_takes_no_part_of_it(player: Player) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    with Round(cache, e, width=WIDTH) as r:
        player.run(draft(3, 2), [0, 1])
        count = e.htod_i32([2])
        with e.capture() as graph:
            before = scalars(cache)
            for call in (
                lambda: player.lane(3).run(cache, [2]), lambda: r.commit(2), lambda: r.commit_from_device(count),
                r.reject,
            ):  # fmt: skip
                with pytest.raises(StateError, match="capture"):
                    call()
                assert scalars(cache) == before
        assert graph.moves == []
        graph.close()
        player.lane(3).run(cache, [2, 3])
        r.commit(2)
    player.tokens += [TRUE, TRUE]
    player.check()


# A count that cannot be


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1])
def test_a_device_count_outside_the_rows_rejects_and_is_recorded(player: Player, count: int, parity: int) -> None:
    begin(player, parity)
    cache, e = player.cache, player.e
    with Round(cache, e, width=WIDTH) as r:
        player.run(draft(3, 3))
        r.commit_from_device(e.htod_i32([count]))
    cache.settle(e)
    player.check()
    assert cache.health().faults == {Fault.BAD_ACCEPT: FaultCount(1, 0, cache.pos)}
    cache.clear_health()
    play(player, 3, 2, "device")
    cache.settle(e)
    player.check()
    assert not cache.health()


# While the host does not know the count


def test_what_an_unsettled_cache_refuses_and_what_goes_on(player: Player) -> None:
    begin(player, 1)
    cache, e = player.cache, player.e
    snap = cache.snapshot(e)
    graph = captured_step(player)
    row = e.zeros(16)
    cache.arm_taps(e, [0, 1], 2, 8)
    play(player, 3, 2, "device")
    k, v = e.zeros(64), e.zeros(64)
    text = "the device counters are ahead of the host; call settle first"
    lane = player.lane(1)
    at = {name: part for (il, name), part in lane.at.items() if il == 0}
    prep = [at[name] for name in ("convolved", "alpha", "beta_raw", "dt_bias", "a", "sq", "sk", "sv", "g_log", "beta")]
    refused(cache, [
        (StateError, text, lambda: cache.snapshot(e)),
        (StateError, text, lambda: cache.snapshot_into(e, snap)),
        (StateError, text, lambda: cache.rollback(e, snap, 0)),
        (StateError, text, lambda: cache.truncate(e, 0)),
        (StateError, text, lambda: cache.advance(e, 1)),
        (StateError, text, lambda: cache.sync_d(e)),
        (StateError, text, cache.digest),
        (StateError, text, lambda: lane.run(cache, [0])),
        (StateError, text, lambda: lane.run(cache, [1])),
        (StateError, text, lambda: ops.gdn_prep(e, cache, 0, *prep, eps=1e-6)),
        (StateError, text, lambda: ops.attend(e, cache, 1, lane.at[1, "query"], lane.at[1, "attended"], scale=1.0)),
        (StateError, text, lambda: ops.dequant_kv(e, cache, 1, 0, 1, k, v)),
        (StateError, text, lambda: ops.tap_write(e, cache, 0, e.zeros(8))),
        (StateError, text, lambda: cache.park_logits(e, row)),
        (StateError, text, lambda: cache.take_logits(e)),
        (StateError, text, lambda: cache.arm_taps(e, [1], 1, 8)),
        (StateError, text, lambda: CacheBatch([cache])),
    ])  # fmt: skip
    assert cache.report()["cache_bytes"]
    play(player, 2, 1, "device")  # a round goes on
    player.lane(1).fill((player.start, [TRUE]))
    graph.launch()
    player.tokens.append(TRUE)
    cache.settle(e)
    cache.settle(e)  # nothing more to learn
    player.check()
    play(player, 2, 1, "device")
    cache.reset(e)
    player.tokens = []
    player.check()
    play(player, 2, 1, "device")
    graph.close()
    snap.close()
    cache.close()


def test_rounds_that_the_host_did_not_count_are_checked_against_the_largest_position(player: Player) -> None:
    cache, e = player.cache, player.e
    for _ in range(MAX_CTX // WIDTH):
        play(player, WIDTH, 1, "device", look=False)
    assert cache.pos == MAX_CTX
    with Round(cache, e, width=WIDTH):
        refused(cache, [(CapacityError, "max_ctx is 64", lambda: player.run([TRUE]))])
    cache.settle(e)
    player.check()
    assert cache.pos == MAX_CTX // WIDTH
    play(player, WIDTH, 3)
    player.check()


# Logits and taps on the same clock


def park(player: Player, value: float) -> None:
    row = player.e.uninit(16)
    row.copy_from(np.full(16, value, np.float32))
    player.cache.park_logits(player.e, row)


def parked(player: Player) -> float | None:
    kept = player.cache.take_logits(player.e)
    assert player.cache.as_c().contents.last_logits_dev.present == (kept is not None)
    return None if kept is None else float(kept.to_numpy()[0])


@pytest.mark.parametrize("by", ["host", "device"])
@pytest.mark.parametrize("accept", range(4))
def test_logits_parked_in_a_round_stand_only_when_all_its_rows_do(player: Player, accept: int, by: str) -> None:
    player.step(TRUE, TRUE)
    park(player, 1.0)
    with Round(player.cache, player.e, width=WIDTH) as r:
        player.run(draft(3, accept))
        park(player, 2.0)
        if by == "host":
            r.commit(accept)
        else:
            r.commit_from_device(player.e.htod_i32([accept]))
    player.cache.settle(player.e)
    assert parked(player) == (2.0 if accept == 3 else None)


def test_logits_parked_before_a_round_outlive_its_reject_and_commit(player: Player) -> None:
    player.step(TRUE, TRUE)
    park(player, 1.0)
    for accept in (0, 1, 2):
        play(player, 2, accept)
        assert parked(player) == 1.0
    with Round(player.cache, player.e, width=WIDTH):
        player.run(draft(3, 0))
    assert parked(player) == 1.0


def test_taps_are_written_in_rounds_on_either_clock(player: Player) -> None:
    cache, e = player.cache, player.e
    cache.arm_taps(e, [3, 0], WIDTH, 8)
    for by in ("host", "device", "device"):
        with Round(cache, e, width=WIDTH) as r:
            player.run(draft(3, 1))
            for il in (0, 3):
                residual = e.uninit(3 * 8)
                residual.copy_from(np.full(24, il + len(player.tokens), np.float32))
                ops.tap_write(e, cache, il, residual)
            if by == "host":
                r.commit(1)
            else:
                r.commit_from_device(e.htod_i32([1]))
        rows = cache.dflash_taps.buf.to_numpy().reshape(WIDTH, 2, 8)[:3]
        assert (rows[:, 0] == 3 + len(player.tokens)).all()
        assert (rows[:, 1] == len(player.tokens)).all()
        player.tokens.append(TRUE)
    cache.settle(e)
    player.check()


@pytest.mark.parametrize("accept", [0, 1, 2])
def test_logits_whose_token_may_be_gone_do_not_come_back_with_later_tokens(player: Player, accept: int) -> None:
    """The count stayed on the device; later rounds pass the length that the logits belong to, with other tokens."""
    begin(player, 0)
    with Round(player.cache, player.e, width=WIDTH) as r:
        player.run(draft(2, accept))
        park(player, 2.0)
        r.commit_from_device(player.e.htod_i32([accept]))
    player.tokens += [TRUE] * accept
    play(player, 3, 3, "device")
    player.cache.settle(player.e)
    player.check()
    assert parked(player) is None
