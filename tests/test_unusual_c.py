"""Calls of the C library that no engine should make: an error that says so, and memory that stays whole."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
from decoding import TRUE, Player, begin, player_on
from standin import StandIn

from memra_driver import capi
from memra_driver.cache import CacheState
from memra_driver.capi.device import LibraryDevice
from memra_driver.errors import ArrayError, DriverError, SnapshotError, StateError


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
