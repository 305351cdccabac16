"""Calls that no decode loop makes, but somebody will: refused before anything is changed, or done right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import POLICY, device_counters, image, put, scalars
from decoding import MAX_CTX, TRUE, Player, begin, hybrid, play, player_on

from memra_driver import check, ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache
from memra_driver.check.cases import counter_cases
from memra_driver.errors import ArrayError, CapacityError, ConfigError, MemraError, StateError
from memra_driver.round import Round

MakeDev = Callable[..., Any]


@pytest.fixture
def player(dev: Any) -> Any:
    player = player_on(dev)
    yield player
    player.close()


def unchanged(cache: Cache, error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    before = image(cache)
    with pytest.raises(error, match=text):
        call()
    assert image(cache) == before


def captured(player: Player, rows: int = 1) -> Any:
    with player.e.capture() as graph:
        player.lane(rows).run(player.cache)
        player.cache.advance(player.e, rows)
    return graph


def test_a_recorded_advance_alone_needs_room_like_a_step(dev: Any) -> None:
    """An engine that appends with kernels of its own records no other operation."""
    with Cache.new(dev, hybrid(), 4, policy=POLICY) as cache:
        with dev.capture() as graph:
            cache.advance(dev, 2)
        for layer in filter(None, cache.kv):
            layer.len = 4
        graph.launch()
        graph.launch()
        unchanged(cache, CapacityError, "2 rows behind position 4; max_ctx is 4", graph.launch)
        graph.close()


def test_rows_that_nobody_wrote_are_not_appended_behind_by_a_launch(player: Player) -> None:
    begin(player, 1)
    graph, layer = captured(player), player.cache.kv[1]
    assert layer is not None
    layer.len = 2
    for call in (graph.launch, lambda: player.cache.replayed(graph, 1)):
        unchanged(player.cache, StateError, r"layer 1: len is 2, pos is 3: nobody wrote rows 2 \.\. 2", call)
    layer.len = 3
    graph.close()


def test_an_engine_is_told_before_it_launches_more_than_fits(player: Player) -> None:
    cache, e = player.cache, player.e
    begin(player, 0)
    graph = captured(player)
    fits = MAX_CTX - 3
    unchanged(cache, CapacityError, "max_ctx is 64", lambda: cache.prepare_replay(e, graph, fits + 1))
    unchanged(cache, ConfigError, "-1 launches", lambda: cache.prepare_replay(e, graph, -1))
    cache.prepare_replay(e, graph, fits)
    with Cache.new(e, hybrid(), 8, policy=POLICY) as other:
        unchanged(other, ConfigError, "this graph moves another cache", lambda: other.prepare_replay(e, graph))
    graph.close()


@pytest.mark.parametrize("n", [1.0, "1", None])
def test_a_batch_advances_by_whole_numbers_only(dev: Any, n: Any) -> None:
    with Cache.new(dev, hybrid(), 8, policy=POLICY) as one, Cache.new(dev, hybrid(), 8, policy=POLICY) as two:
        batch = CacheBatch([one, two])
        for cache in (one, two):
            unchanged(cache, TypeError, "integer", lambda: batch.advance(dev, n))
        batch.close()


def test_a_step_of_one_member_alone_is_not_ended_by_the_batch(player: Player) -> None:
    e, cache = player.e, player.cache
    with Cache.new(e, hybrid(), MAX_CTX, policy=POLICY) as other:
        player.step(TRUE, TRUE)
        for order in ([cache, other], [other, cache]):
            batch = CacheBatch(order)
            player.run([TRUE])
            text = f"sequence {order.index(cache)}: a step of 1 rows of its own is open"
            unchanged(cache, StateError, text, lambda batch=batch: batch.advance(e, 1))
            unchanged(other, StateError, text, lambda batch=batch: batch.advance(e, 1))
            cache.advance(e)
            player.tokens.append(TRUE)
            batch.close()
        player.check()


def test_an_armed_sink_whose_fields_were_changed_is_not_written_to(player: Player) -> None:
    cache, e = player.cache, player.e
    for field, value in (("t", 1000), ("hidden", 80), ("layer_ids", [1, 3])):
        cache.arm_taps(e, [1], 4, 8)
        sink = cache.dflash_taps
        setattr(sink, field, value)
        columns = sink.hidden
        unchanged(cache, StateError, "were changed", lambda n=columns: ops.tap_write(e, cache, 1, e.zeros(2 * n)))
        cache.disarm_taps()


def test_a_recorded_tap_into_a_closed_buffer_is_not_launched(player: Player) -> None:
    from memra_driver.layers import DflashTapSink

    cache, e = player.cache, player.e
    begin(player, 0)
    mine, residual = e.zeros(8), put(e, np.ones(8, np.float32))
    cache.dflash_taps = DflashTapSink([1], mine, 8, 1)
    with e.capture() as graph:
        player.lane(1).run(cache)
        ops.tap_write(e, cache, 1, residual)
        cache.advance(e)
    mine.close()
    unchanged(cache, StateError, "closed", graph.launch)
    cache.disarm_taps()
    graph.close()


def test_operations_of_another_device_are_refused_in_a_capture(player: Player, make_dev: MakeDev) -> None:
    begin(player, 0)
    e = player.e
    other = player_on(make_dev("host" if e.ordinal < 0 else "cuda"))
    other.step(TRUE)
    lane = other.lane(1).fill((1, [TRUE]))
    before = scalars(other.cache)
    with e.capture() as graph:
        player.lane(1).run(player.cache)
        for call in (
            lambda: lane.run(other.cache), lambda: other.cache.advance(other.e), lambda: other.cache.reset(other.e),
            lambda: Round(other.cache, other.e, width=2).__enter__(), lambda: other.cache.snapshot(other.e),
        ):  # fmt: skip
            with pytest.raises(StateError, match="a capture is open on"):
                call()
        assert scalars(other.cache) == before
        player.cache.advance(e)
        other.e.synchronize()  # work on another device does not end the capture
    player.lane(1).fill((player.start, [TRUE]))
    graph.launch()
    player.tokens.append(TRUE)
    player.check()
    other.check()
    graph.close()
    other.close()


def test_nothing_is_allocated_or_moved_to_the_host_in_a_capture(player: Player) -> None:
    begin(player, 0)
    cache, e = player.cache, player.e
    calls = [
        lambda: e.zeros(4), lambda: e.uninit(4), lambda: e.alloc_u8(4), lambda: e.htod_i32([1]),
        lambda: e.clone_dtod(cache.kv[1].len_d), lambda: Cache.new(e, hybrid(), 4, policy=POLICY), cache.clear_health,
    ]  # fmt: skip
    if e.ordinal >= 0:
        held = e.zeros(4)
        calls += [lambda: held.to_numpy(), lambda: held.copy_from(np.zeros(4, np.float32)), e.synchronize, cache.health]
    with e.capture() as graph:
        player.lane(1).run(cache)
        for call in calls:
            with pytest.raises(StateError, match="a capture is open"):
                call()
        cache.advance(e)
    player.lane(1).fill((player.start, [TRUE]))
    graph.launch()
    player.tokens.append(TRUE)
    player.check()
    graph.close()


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_a_count_and_a_row_of_logits_come_in_their_natural_shapes(host: Any, shape: tuple[int, ...]) -> None:
    player = player_on(host)
    player.step(TRUE, TRUE)
    with Round(player.cache, host, width=2) as r:
        player.run([TRUE, TRUE])
        for wrong in ((2,), (1, 2)):
            with pytest.raises(ArrayError, match="accept_d"):
                r.commit_from_device(np.ones(wrong, np.int32))
        r.commit_from_device(np.ones(shape, np.int32))
    player.cache.settle(host)
    player.tokens.append(TRUE)
    player.check()
    for row in (np.full(16, 3, np.float32), np.full((1, 16), 3, np.float32)):
        player.cache.park_logits(host, row)
        assert (player.cache.take_logits(host).to_numpy() == 3).all()
    for row in (np.zeros((16, 1), np.float32), np.zeros((2, 16), np.float32), np.zeros((), np.float32)):
        with pytest.raises(ArrayError, match="row"):
            player.cache.park_logits(host, row)
    player.cache.park_logits(host, player.cache.take_logits(host))  # where they are
    player.close()


@pytest.mark.parametrize("factor", ["1.0", None, b"1", True, object()])
def test_a_factor_that_is_no_number_is_refused_and_taints_nothing(player: Player, factor: Any) -> None:
    begin(player, 0)
    cache, e, lane = player.cache, player.e, player.lane(1).fill((3, [TRUE]))
    ops.append_kv(e, cache, 1, lane.at[1, "k"], lane.at[1, "v"])
    at = {name: part for (il, name), part in lane.at.items() if il == 0}
    made = [at[name] for name in ("sq", "sk", "sv", "g_log", "beta")]
    gates = [at[name] for name in ("convolved", "alpha", "beta_raw", "dt_bias", "a")]
    for call in (
        lambda: ops.attend(e, cache, 1, lane.at[1, "query"], lane.at[1, "attended"], scale=factor),
        lambda: ops.gdn_scan(e, cache, 0, *made, at["scanned"], scale=factor),
        lambda: ops.gdn_prep(e, cache, 0, *gates, *made, eps=factor),
    ):
        unchanged(cache, ConfigError, "it is a number", call)


def test_a_window_wider_than_any_cache_is_none(player: Player) -> None:
    begin(player, 0)
    cache, e, lane = player.cache, player.e, player.lane(1).fill((3, [TRUE]))
    ops.append_kv(e, cache, 1, lane.at[1, "k"], lane.at[1, "v"])
    found = []
    for window in (0, 2**31, 2**32 + 1):
        ops.attend(e, cache, 1, lane.at[1, "query"], lane.at[1, "attended"], scale=0.1, window=window)
        found.append(lane.at[1, "attended"].to_numpy().tobytes())
    assert len(set(found)) == 1


def test_a_position_assigned_inside_a_round_is_checked_at_its_end(player: Player) -> None:
    begin(player, 0)
    cache, e = player.cache, player.e
    with Round(cache, e, width=4) as r:
        player.run([TRUE] * 3)
        for pos in (-3, MAX_CTX - 2):
            cache.pos = pos
            unchanged(cache, StateError, r"pos.* must lie in 0 \.\. 64", lambda: r.commit(2))
        cache.pos = 3
        r.commit(2)
    player.tokens += [TRUE, TRUE]
    player.check()
    assert device_counters(cache)[1] == {5}
    play(player, 2, 1)
    player.check()


def test_the_line_of_a_failed_check_comes_before_its_input_is_saved(host: Any, tmp_path: Path) -> None:
    case = next(counter_cases(np.random.default_rng(0), True))
    name = next(name for name, array in case.arrays.items() if array.size)
    case.want[name] = case.arrays[name] + np.array(1, case.arrays[name].dtype)
    results = check.run(host, [case], tmp_path / "absent" / "file.npz")
    assert next(results).line().startswith("FAILED")
    with pytest.raises(MemraError, match="absent"):
        next(results)
