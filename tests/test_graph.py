"""Recorded steps and rounds: replayed in any order with everything else, they leave the bits of plain decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caches import POLICY, image
from decoding import OPTIONS, TRUE, WIDTH, Lane, Player, begin, draft, play, player_on
from recordings import launch_by_hand, recorded, warm

from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import ConfigError, StateError
from memra_driver.round import Round


@pytest.fixture
def player(dev: Any) -> Any:
    player = player_on(dev)
    yield player
    player.close()


def test_a_capture_runs_nothing_and_moves_nothing(player: Player) -> None:
    begin(player, 1)
    warm(player)
    before = image(player.cache)
    with recorded(player, 1) as step, recorded(player, WIDTH, a_round=True) as a_round:
        assert image(player.cache) == before
        assert [(m.need, m.tokens, m.unsettles) for m in step.graph.moves] == [(1, 1, False)]
        assert [(m.need, m.tokens, m.unsettles) for m in a_round.graph.moves] == [(WIDTH, WIDTH, True)]
    player.check()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("parity", [0, 1])
def test_a_captured_step_is_an_eager_step(player: Player, rows: int, parity: int) -> None:
    begin(player, parity)
    player.step(*[TRUE] * rows)
    with recorded(player, rows) as step:
        for _ in range(4):
            step.step(*[TRUE] * rows)
            player.check()
        player.step(TRUE)  # swaps
        step.step(*[TRUE] * rows)
        player.check()


@pytest.mark.parametrize("parity", [0, 1])
def test_a_captured_round_takes_every_count(player: Player, parity: int) -> None:
    begin(player, parity)
    warm(player)
    with recorded(player, WIDTH, a_round=True) as a_round:
        for accept in range(WIDTH + 1):
            a_round.play(accept)
            assert player.cache.state is CacheState.UNSETTLED
            player.cache.settle(player.e)
            player.check()
        for accept in (1, 0, 4, 2):  # and goes on without the host
            a_round.play(accept)
        player.cache.settle(player.e)
        player.check()
        for bad in (-1, WIDTH + 1):
            a_round.fill(draft(WIDTH, WIDTH), bad)
            a_round.graph.launch()
            player.cache.settle(player.e)
            player.check()
        assert player.cache.health()


@pytest.mark.parametrize("accept", range(WIDTH + 1))
def test_a_round_captured_with_a_host_count_leaves_the_cache_settled(player: Player, accept: int) -> None:
    begin(player, 1)
    warm(player)
    with recorded(player, WIDTH, a_round=True, accept=accept) as a_round:
        for _ in range(3):
            a_round.play(accept)
            player.check()
        player.step(TRUE)
        a_round.play(accept)
        player.check()


def test_a_round_captured_while_unsettled_unsettles_at_every_launch(player: Player) -> None:
    begin(player, 1)
    play(player, WIDTH, 1, "device")
    with recorded(player, WIDTH, a_round=True) as a_round, recorded(player, 1) as step:
        player.cache.settle(player.e)
        player.check()
        a_round.play(2)
        assert player.cache.state is CacheState.UNSETTLED
        step.step(TRUE)
        assert player.cache.state is CacheState.UNSETTLED
        player.cache.settle(player.e)
        player.check()
        step.step(TRUE)
        player.check()


def test_a_step_and_a_round_fit_into_one_capture(player: Player) -> None:
    begin(player, 1)
    warm(player)
    one, wide, count = player.lane(1), player.lane(WIDTH), player.e.htod_i32([2])
    with player.e.capture() as graph:
        one.run(player.cache)
        player.cache.advance(player.e)
        with Round(player.cache, player.e, width=WIDTH) as r:
            wide.run(player.cache)
            r.commit_from_device(count)
    assert [(m.need, m.tokens) for m in graph.moves] == [(1 + WIDTH, 1 + WIDTH)]
    for _ in range(2):
        n = len(player.tokens)
        one.fill((n, [TRUE]))
        wide.fill((n + 1, draft(WIDTH, 2)))
        graph.launch()
        player.tokens += [TRUE] * 3
    player.cache.settle(player.e)
    player.check()
    graph.close()


def test_what_needs_more_room_later_leaves_a_capture_its_own(player: Player) -> None:
    """Attention of more rows takes a larger scratch; the graph goes on with the one it knows."""
    player.step(TRUE)
    with recorded(player, 1) as step:
        step.step(TRUE)
        player.step(*[TRUE] * 6)
        step.step(TRUE)
        player.step(*[TRUE] * 8)
        step.step(TRUE)
        player.check()


def test_two_caches_move_together_in_one_capture(player: Player) -> None:
    e = player.e
    other = player_on(e)
    player.step(TRUE, TRUE)
    player.step(TRUE)
    other.step(TRUE)
    lanes = [Lane(each.cache, 1) for each in (player, other)]
    with e.capture() as graph:
        for each, lane in zip((player, other), lanes, strict=True):
            lane.run(each.cache)
            each.cache.advance(e)
    for _ in range(3):
        for each, lane in zip((player, other), lanes, strict=True):
            lane.fill((each.start, [TRUE]))
        graph.launch()
        for each in (player, other):
            each.tokens.append(TRUE)
            each.check()
        other.step(TRUE)
    graph.close()
    for lane in lanes:
        lane.close()
    other.close()


def test_a_captured_batch_steps_all_its_sequences(dev: Any) -> None:
    players = [player_on(dev) for _ in range(3)]
    for n, each in enumerate(players):
        each.step(*[TRUE] * (n + 1))
    with CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, 2)
        lane.fill(*[(each.start, [TRUE, TRUE]) for each in players]).run(batch)
        batch.advance(dev, 2)
        for each in players:
            each.tokens += [TRUE, TRUE]
        before = [image(each.cache) for each in players]
        with dev.capture() as graph:
            lane.run(batch)
            batch.advance(dev, 2)
        assert [image(each.cache) for each in players] == before
        for swapped in (0, 2, 1):
            lane.fill(*[(each.start, [TRUE, TRUE]) for each in players])
            graph.launch()
            for each in players:
                each.tokens += [TRUE, TRUE]
                each.check()
            players[swapped].step(TRUE)
            lane.fill(*[(each.start, [TRUE, TRUE]) for each in players]).run(batch)  # the table is a new one
            batch.advance(dev, 2)
            for each in players:
                each.tokens += [TRUE, TRUE]
                each.check()
        graph.close()
    lane.close()
    for each in players:
        each.close()


# Logits on the same clock


def parked(player: Player) -> float | None:
    kept = player.cache.take_logits(player.e)
    assert player.cache.as_c().contents.last_logits_dev.present == (kept is not None)
    return None if kept is None else float(kept.to_numpy()[0])


def test_logits_parked_in_a_captured_step_belong_to_its_last_launch(player: Player) -> None:
    cache, e = player.cache, player.e
    row = e.zeros(16)
    player.step(TRUE, TRUE)
    cache.park_logits(e, row)
    snap = cache.snapshot(e)
    cache.reset(e)
    cache.snapshot_into(e, snap)
    player.tokens = []
    player.step(TRUE)
    lane = player.lane(1)
    with e.capture() as graph:
        lane.run(cache)
        cache.park_logits(e, row)
        cache.advance(e)
    assert parked(player) is None  # nothing ran
    address = None
    for n in (1, 2, 3):
        row.copy_from(np.full(16, n, np.float32))
        lane.fill((player.start, [TRUE]))
        graph.launch()
        player.tokens.append(TRUE)
        assert parked(player) == n
        address = address or cache.take_logits(e).ptr
        assert cache.take_logits(e).ptr == address
    player.step(TRUE)
    assert parked(player) == 3
    cache.rollback(e, snap, 3)  # the logits belong to length 4
    assert parked(player) is None
    cache.reset(e)
    graph.close()
    snap.close()


@pytest.mark.parametrize("accept", [1, WIDTH])
def test_logits_parked_in_a_captured_round_stand_only_when_all_its_rows_do(player: Player, accept: int) -> None:
    cache, e = player.cache, player.e
    row, count = e.zeros(16), e.htod_i32([accept])
    player.step(TRUE, TRUE)
    warm(player)
    cache.park_logits(e, row)
    lane = player.lane(WIDTH).fill((2, draft(WIDTH, accept)))
    with e.capture() as graph, Round(cache, e, width=WIDTH) as r:
        lane.run(cache)
        cache.park_logits(e, row)
        r.commit_from_device(count)
    assert parked(player) == 0
    row.copy_from(np.ones(16, np.float32))
    graph.launch()
    cache.settle(e)
    assert parked(player) == (1 if accept == WIDTH else None)
    graph.close()


@pytest.mark.parametrize("again", ["", "step", "plain step"])
@pytest.mark.parametrize("accept", [0, 2, WIDTH])
def test_logits_of_a_step_behind_a_count_that_the_host_does_not_know_are_kept(
    player: Player, accept: int, again: str
) -> None:
    """Their token stands, wherever that is; settle finds out where."""
    cache, e = player.cache, player.e
    row = e.zeros(16)
    player.step(TRUE, TRUE)
    warm(player)
    cache.park_logits(e, row)
    lane = player.lane(1)
    graphs = []
    for parks in (True, False):
        with e.capture() as graph:
            lane.run(cache)
            if parks:
                cache.park_logits(e, row)
            cache.advance(e)
        graphs.append(graph)
    play(player, WIDTH, accept, "device")
    launched = [graphs[0], *{"": [], "step": [graphs[0]], "plain step": [graphs[1]]}[again]]
    for n, graph in enumerate(launched):
        if graph is graphs[0]:
            row.copy_from(np.full(16, n + 1, np.float32))
        lane.fill((player.start, [TRUE]))
        graph.launch()
        player.tokens.append(TRUE)
    cache.settle(e)
    player.check()
    assert parked(player) == (2 if again == "step" else 1)
    assert cache.logits_at == len(player.tokens) - (again == "plain step")
    for graph in graphs:
        graph.close()


def test_logits_of_such_a_step_are_lost_behind_another_count(player: Player) -> None:
    cache, e = player.cache, player.e
    row = e.zeros(16)
    player.step(TRUE, TRUE)
    warm(player)
    cache.park_logits(e, row)
    lane = player.lane(1)
    with e.capture() as graph:
        lane.run(cache)
        cache.park_logits(e, row)
        cache.advance(e)
    play(player, WIDTH, 2, "device")
    lane.fill((player.start, [TRUE]))
    graph.launch()
    player.tokens.append(TRUE)
    play(player, WIDTH, 1, "device")
    cache.settle(e)
    player.check()
    assert parked(player) is None
    graph.close()


# A graph that the engine launches itself


@pytest.mark.parametrize("parity", [0, 1])
def test_an_engine_may_launch_the_graph_itself(player: Player, parity: int) -> None:
    cache, e = player.cache, player.e
    begin(player, parity)
    with recorded(player, 1) as step:
        for launches in (1, 3, 0, 2):
            cache.prepare_replay(e)
            for n in range(launches):
                step.lane.fill((len(player.tokens) + n, [TRUE]))
                launch_by_hand(e, step.graph)
            cache.replayed(step.graph, launches)
            player.tokens += [TRUE] * launches
            player.check()
            player.step(TRUE)
        before = image(cache)
        with pytest.raises(ConfigError, match="-1 launches"):
            cache.replayed(step.graph, -1)
        with Cache.new(e, cache.cfg, 8, policy=POLICY, options=OPTIONS) as stranger:
            seen = image(stranger)
            with pytest.raises(ConfigError, match="moves another cache"):
                stranger.replayed(step.graph, 1)
            assert image(stranger) == seen
        assert image(cache) == before
    player.check()


def test_rounds_launched_by_hand_are_settled_once(player: Player) -> None:
    cache, e = player.cache, player.e
    begin(player, 1)
    warm(player)
    with recorded(player, WIDTH, a_round=True) as a_round:
        cache.prepare_replay(e)
        for accept in (2, 0, 4):
            tokens = draft(WIDTH, accept)
            a_round.fill(tokens, accept)
            launch_by_hand(e, a_round.graph)
            player.tokens += tokens[:accept]
        cache.replayed(a_round.graph, 3)
        assert cache.state is CacheState.UNSETTLED
        with pytest.raises(StateError, match="settle"):
            cache.digest()
        cache.settle(e)
        player.check()
