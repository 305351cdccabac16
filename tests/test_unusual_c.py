"""Calls of the C library that no engine should make: an error that says so, and memory that stays whole."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
from caches import scalars
from decoding import MAX_CTX, TRUE, Player, begin, player_on
from standin import StandIn

from memra_driver import capi, driver
from memra_driver.cache import CacheState
from memra_driver.capi.device import LibraryDevice
from memra_driver.errors import ArrayError, CapacityError, DriverError, SnapshotError, StateError


@pytest.fixture
def player(cuda: Any) -> Any:
    player = player_on(cuda)
    capi.bind(player.cache)
    lane = player.lane(1).fill((0, [TRUE]))
    lane.run(player.cache, calls=capi.ops)  # the library's partial sums have room now
    player.cache.reset(cuda)
    yield player
    if player.cache.state is not CacheState.CLOSED:
        player.close()


def captured(player: Player) -> Any:
    with capi.calls.capture(player.e) as graph:
        player.lane(1).run(player.cache, calls=capi.ops)
        capi.calls.advance(player.cache, 1)
    return graph


def test_snapshots_and_graphs_of_the_library_keep_pythons_cache(cuda: Any) -> None:
    player = player_on(cuda)
    player.run([TRUE])
    player.cache.reset(cuda)
    player.lane(1).run(player.cache, calls=capi.ops)
    player.cache.reset(cuda)
    snap, graph = capi.calls.snapshot(player.cache), captured(player)
    lane = player.lane(1)
    player.oracle.close()
    del player
    gc.collect()
    graph.launch()
    snap.close()
    graph.close()
    lane.close()
    gc.collect()


def test_a_cache_is_not_closed_while_the_library_records_it(player: Player) -> None:
    cache = player.cache
    with capi.calls.capture(player.e) as graph:
        player.lane(1).run(cache, calls=capi.ops)
        with pytest.raises(StateError, match="close: the C library records this cache"):
            cache.close()
        capi.calls.advance(cache, 1)
    snap = capi.calls.snapshot(cache)
    player.close()
    with pytest.raises(StateError, match="the cache is closed"):
        graph.launch()
    graph.close()
    snap.close()


def test_a_cache_in_a_graph_is_not_bound_to_another_device(player: Player, c_library: capi.Library) -> None:
    cache, e = player.cache, player.e
    begin(player, 0)
    other = LibraryDevice(c_library, e.ordinal, stream=e.stream, context=e.context.handle)
    devices = (ctypes.c_void_p * 1)(other.address)
    with capi.calls.capture(e) as graph:
        player.lane(1).run(cache, calls=capi.ops)
        with pytest.raises(StateError, match="a capture records this cache"):
            c_library.call("memra_cache_bind", cache.as_c(), devices, 1)
        capi.calls.advance(cache, 1)
    with pytest.raises(StateError, match="a graph of the device before moves this cache"):
        c_library.call("memra_cache_bind", cache.as_c(), devices, 1)
    player.lane(1).fill((player.start, [TRUE]))
    graph.launch()
    player.tokens.append(TRUE)
    player.check()
    graph.close()
    c_library.call("memra_cache_bind", cache.as_c(), devices, 1)
    capi.bind(cache)
    other.close()


def test_pythons_snapshot_is_not_freed_by_the_library(player: Player, c_library: capi.Library) -> None:
    with player.cache.snapshot(player.e) as snap:
        with pytest.raises(SnapshotError, match="is Python's"):
            c_library.call("memra_snapshot_free", snap.as_c())
        player.cache.rollback(player.e, snap, 0)


def test_no_place_for_an_answer_is_an_error(player: Player, c_library: capi.Library) -> None:
    cache = player.cache.as_c()
    for name in ("memra_snapshot_new", "memra_take_logits", "memra_health_read", "memra_digest"):
        with pytest.raises(ArrayError):
            c_library.call(name, cache, None)
    with pytest.raises(ArrayError):
        c_library.call("memra_capture_end", capi.device.library_device(player.e).address, None)


def test_arming_again_and_again_takes_no_more_memory(player: Player) -> None:
    counts = []
    for i in range(40):
        capi.calls.arm_taps(player.cache, [i % 4, (i + 1) % 4][: 1 + i % 2], 2, 8)
        node, n = player.cache.as_c().contents.owned, 0
        while node:
            node, n = node.contents.next, n + 1
        counts.append(n)
    assert counts[-1] == counts[3] <= 4
    assert player.cache.dflash_taps.layer_ids == [3, 0]


@pytest.mark.parametrize("pos", [-(2**63), -1, 65, 2**63 - 1])
def test_a_wild_position_is_refused(player: Player, pos: int) -> None:
    cache, e = player.cache, player.e
    row = e.zeros(16)
    cache.pos = pos
    for call in (
        lambda: capi.calls.park_logits(cache, row), lambda: capi.calls.advance(cache, 1),
        lambda: capi.calls.digest(cache), lambda: capi.calls.round_begin(cache, 2),
    ):  # fmt: skip
        with pytest.raises(StateError, match="pos is"):
            call()
    cache.pos = 0


@pytest.mark.parametrize("parks", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("parity", [0, 1])
def test_a_capture_of_the_callers_own_is_launched_by_the_caller(
    player: Player, parity: int, ours_first: bool, parks: bool
) -> None:
    cache, e, lane = player.cache, player.e, player.lane(1)
    stream, row = e.stream.handle, e.zeros(16)
    begin(player, parity)
    capi.calls.park_logits(cache, row)
    if not ours_first:
        driver.stream_begin_capture(stream)
    with capi.calls.capture(e, yours=True) as graph:
        if ours_first:
            driver.stream_begin_capture(stream)
        lane.run(cache, calls=capi.ops)
        if parks:
            capi.calls.park_logits(cache, row)
        capi.calls.advance(cache, 1)
        if ours_first:
            made = driver.stream_end_capture(stream)
    if not ours_first:
        made = driver.stream_end_capture(stream)
    launched = driver.graph_instantiate(made)
    driver.graph_destroy(made)
    assert (cache.pos, cache.logits_at) == (3, 3)
    with pytest.raises(StateError, match="this graph is the caller's"):
        graph.launch()
    room = MAX_CTX - 3
    for call in (
        lambda: capi.calls.prepare_replay(cache, graph, room + 1), lambda: capi.calls.replayed(cache, graph, room + 1),
    ):  # fmt: skip
        with pytest.raises(CapacityError, match="max_ctx is 64"):
            call()
    for launches in (1, 0, 3):
        capi.calls.prepare_replay(cache, graph, launches)
        for _ in range(launches):
            lane.fill((player.start, [TRUE]))
            driver.graph_launch(launched, stream)
            player.tokens.append(TRUE)
        capi.calls.replayed(cache, graph, launches)
        player.check()
        assert cache.logits_at == (len(player.tokens) if parks else 3)
    graph.close()
    e.synchronize()
    driver.graph_exec_destroy(launched)


def test_what_the_stream_captures_unannounced_is_refused(player: Player) -> None:
    cache, e, lane = player.cache, player.e, player.lane(1)
    begin(player, 0)
    snap, row = capi.calls.snapshot(cache), e.zeros(16)
    before = scalars(cache), bytes(snap.as_c().contents)
    driver.stream_begin_capture(e.stream.handle)
    for call in (
        lambda: lane.run(cache, calls=capi.ops), lambda: capi.calls.snapshot_into(cache, snap),
        lambda: capi.calls.rollback(cache, snap, 0), lambda: capi.calls.reset(cache), lambda: capi.calls.sync(cache),
        lambda: capi.calls.clear_health(cache), lambda: capi.calls.prepare_replay(cache),
        lambda: capi.calls.park_logits(cache, row), lambda: capi.calls.snapshot(cache),
        lambda: capi.calls.round_begin(cache, 2), lambda: capi.calls.advance(cache, 1),
        lambda: capi.calls.digest(cache),
    ):  # fmt: skip
        with pytest.raises(StateError, match="the stream is capturing"):
            call()
    assert (scalars(cache), bytes(snap.as_c().contents)) == before
    driver.graph_destroy(driver.stream_end_capture(e.stream.handle))
    player.check()
    snap.close()


def test_an_announced_capture_that_does_not_capture_is_refused(player: Player) -> None:
    begin(player, 0)
    before = scalars(player.cache)
    with capi.calls.capture(player.e, yours=True) as graph:
        for call in (
            lambda: player.lane(1).run(player.cache, calls=capi.ops), lambda: capi.calls.advance(player.cache, 1),
        ):  # fmt: skip
            with pytest.raises(StateError, match="the stream is not capturing; begin it first"):
                call()
    assert scalars(player.cache) == before
    player.check()
    graph.close()


def test_a_snapshot_of_the_library_is_not_for_pythons_calls(player: Player) -> None:
    begin(player, 0)
    with capi.calls.snapshot(player.cache) as snap:
        for call in (player.cache.rollback, player.cache.snapshot_into):
            args = (0,) if call == player.cache.rollback else ()
            with pytest.raises(SnapshotError, match="LibrarySnapshot"):
                call(player.e, snap, *args)


@pytest.mark.standin
@pytest.mark.misuse
def test_a_capture_whose_end_failed_is_over(standin: StandIn, player: Player) -> None:
    standin.fail("cuStreamEndCapture", 1, 999)
    with pytest.raises(DriverError, match="cuStreamEndCapture"):
        captured(player)
    standin.clear_failures()
    begin(player, 0)
    player.check()
    graph = captured(player)
    player.lane(1).fill((player.start, [TRUE]))
    graph.launch()
    player.tokens.append(TRUE)
    player.check()
    graph.close()
