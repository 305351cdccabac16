"""The host's clock behind a recorded graph, and what moves with it: snapshots, logits, capacity, tap sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from decoding import MAX_CTX, TRUE, WIDTH, WRONG, Player, begin, draft, play, player_on
from recordings import launch_by_hand, warm

from memra_driver import ops
from memra_driver.cache import DflashTapSink
from memra_driver.errors import CapacityError, SnapshotError, StateError
from memra_driver.round import Round


@pytest.fixture
def player(dev: Any) -> Any:
    player = player_on(dev)
    yield player
    player.close()


def captured_step(player: Player, parks: Any = None) -> Any:
    """One token a launch; its logits are parked from the row `parks`."""
    cache, e, lane = player.cache, player.e, player.lane(1)
    with e.capture() as graph:
        lane.run(cache)
        if parks is not None:
            cache.park_logits(e, parks)
        cache.advance(e)
    return graph


def launch(player: Player, graph: Any, tokens: Sequence[int]) -> None:
    for token in tokens:
        player.lane(1).fill((player.start, [token]))
        graph.launch()
        player.tokens.append(token)


def park_in_a_device_round(player: Player, accept: int) -> None:
    """A round whose last row parks logits, and whose count the host does not learn."""
    cache, e = player.cache, player.e
    with Round(cache, e, width=WIDTH) as r:
        player.run(draft(WIDTH, accept))
        cache.park_logits(e, e.zeros(16))
        r.commit_from_device(e.htod_i32([accept]))
    player.tokens += [TRUE] * accept


def test_a_launch_below_a_snapshot_gives_it_up_though_pos_passes_it_again(player: Player) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    warm(player)
    graph = captured_step(player)
    player.step(TRUE, TRUE, TRUE)
    with cache.snapshot(e) as snap:
        cache.pos = cache.kv[1].len = cache.kv[3].len = 2
        player.tokens = [TRUE] * 2
        launch(player, graph, [WRONG] * 4)
        assert cache.pos == 6 > snap.pos
        with pytest.raises(SnapshotError, match="position 5"):
            cache.rollback(e, snap, 0)
    assert (cache.pos, cache.kv[1].len) == (6, 6)
    graph.close()


def test_logits_of_a_round_whose_count_is_unknown_are_lost_at_a_launch(player: Player) -> None:
    """Three of four rows stand and one more comes by the launch: their length is reached, their token never was."""
    cache, e = player.cache, player.e
    begin(player, 0)
    warm(player)
    cache.park_logits(e, e.zeros(16))
    graph = captured_step(player)
    park_in_a_device_round(player, 3)
    launch(player, graph, [TRUE])
    cache.settle(e)
    player.check()
    assert cache.take_logits(e) is None
    graph.close()


def test_logits_of_a_round_whose_count_is_unknown_are_lost_at_a_commit_of_the_host(player: Player) -> None:
    cache, e = player.cache, player.e
    begin(player, 0)
    park_in_a_device_round(player, 3)
    play(player, 1, 1)
    cache.settle(e)
    player.check()
    assert cache.take_logits(e) is None


@pytest.mark.parametrize("launches", [1, 3])
def test_logits_of_launches_by_hand_belong_to_the_last(player: Player, launches: int) -> None:
    cache, e = player.cache, player.e
    row = e.zeros(16)
    begin(player, 0)
    warm(player)
    cache.park_logits(e, row)
    graph = captured_step(player, row)
    with cache.snapshot(e) as snap:
        cache.prepare_replay(e)
        for n in range(launches):
            player.lane(1).fill((3 + n, [TRUE]))
            launch_by_hand(e, graph)
        cache.replayed(graph, launches)
        player.tokens += [TRUE] * launches
        player.check()
        assert cache.logits_at == cache.pos == 3 + launches
        cache.rollback(e, snap, launches - 1)
        assert cache.take_logits(e) is None
        cache.rollback(e, snap, 0)
    graph.close()


def test_every_launch_of_several_must_have_fitted(player: Player) -> None:
    cache, e = player.cache, player.e
    begin(player, 0)
    warm(player)
    graph = captured_step(player)
    while len(player.tokens) < MAX_CTX - 2:
        player.step(TRUE)
    with pytest.raises(CapacityError, match="max_ctx is 64"):
        cache.replayed(graph, 3)
    player.check()
    cache.prepare_replay(e)
    for n in range(2):
        player.lane(1).fill((MAX_CTX - 2 + n, [TRUE]))
        launch_by_hand(e, graph)
    cache.replayed(graph, 2)
    player.tokens += [TRUE] * 2
    player.check()
    graph.close()


def test_a_capture_needs_the_most_that_any_part_of_it_writes(player: Player) -> None:
    """A round of four rows of which one stands, then a step: two positions are passed, four are written."""
    cache, e = player.cache, player.e
    begin(player, 0)
    warm(player)
    wide, one = player.lane(WIDTH), player.lane(1)
    with e.capture() as graph:
        with Round(cache, e, width=WIDTH) as r:
            wide.run(cache)
            r.commit(1)
        one.run(cache)
        cache.advance(e)
    assert [(move.need, move.tokens) for move in graph.moves] == [(WIDTH, 2)]
    while len(player.tokens) < MAX_CTX - WIDTH + 1:
        player.step(TRUE)
    with pytest.raises(CapacityError, match="max_ctx is 64"):
        graph.launch()
    player.check()
    graph.close()


def test_a_launch_refuses_a_sink_of_another_row_size_in_the_same_buffer(player: Player) -> None:
    cache, e = player.cache, player.e
    buffer, residual = e.zeros(32), e.zeros(8)
    wide, narrow = DflashTapSink([1], buffer, 16, 2), DflashTapSink([1], buffer, 8, 2)
    begin(player, 0)
    cache.dflash_taps = narrow
    with e.capture() as graph:
        ops.tap_write(e, cache, 1, residual)
    cache.dflash_taps = wide
    with pytest.raises(StateError, match="captured with taps"):
        graph.launch()
    player.check()
    cache.dflash_taps = DflashTapSink([1], buffer, 8, 2)
    graph.launch()
    player.check()
    graph.close()
    cache.disarm_taps()
    buffer.close()
