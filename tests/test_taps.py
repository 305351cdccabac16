"""Tapped hidden states and parked logits: where they go, whose they are, and when they are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, image, put, tiny
from decoding import OPTIONS, TRUE, Player, hybrid, player_on
from standin import StandIn

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.errors import ArrayError, CapacityError, ConfigError, DeviceMismatch, DriverError, StateError
from memra_driver.layers import DflashTapSink
from memra_driver.plan import CacheOptions

MakeDev = Callable[..., Any]
HIDDEN = 8  # n_embd of the model


@pytest.fixture
def player(dev: Any) -> Any:
    player = player_on(dev)
    yield player
    player.close()


def after(il: int, rows: int, token: int = 0) -> np.ndarray[Any, Any]:
    """The residual stream after layer il: it says which layer, which row and which token it is of."""
    values = np.full((rows, HIDDEN), il, np.float32)
    values[:, 1] = np.arange(rows)
    values[:, 2] = token
    return values


def tap_all(e: Any, cache: Cache, rows: int, token: int = 0) -> None:
    """A step as an engine runs it: after each layer its residual stream, if it is tapped."""
    for il in range(cache.cfg.n_layer):
        if il in cache.dflash_taps.layer_ids:
            ops.tap_write(e, cache, il, put(e, after(il, rows, token)))


def held(cache: Cache) -> np.ndarray[Any, Any]:
    """[t, taps, hidden]"""
    sink = cache.dflash_taps
    return sink.buf.to_numpy().reshape(sink.t, len(sink.layer_ids), sink.hidden)


# Taps


@pytest.mark.parametrize("ids", [(0, 3), (3, 0), (2,), (1, 3, 0, 2), (0, 2, 3)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_slot_holds_what_stands_after_its_layer_in_the_given_order(
    dev: Any, player: Player, ids: tuple[int, ...], rows: int
) -> None:
    cache = player.cache
    cache.arm_taps(dev, ids, 5, HIDDEN)
    sink = cache.dflash_taps
    assert (sink.layer_ids, sink.t, sink.hidden, sink.buf.len) == ([*ids], 5, HIDDEN, 5 * len(ids) * HIDDEN)
    c = cache.as_c().contents.dflash_taps
    assert (c.present, c.n_taps, list(c.layer_ids[: c.n_taps]), c.hidden, c.t) == (1, len(ids), [*ids], HIDDEN, 5)
    assert (c.buf.ptr, c.buf.len) == (sink.buf.ptr, sink.buf.len)
    tap_all(dev, cache, 5, token=7)
    tap_all(dev, cache, rows, token=9)
    for slot, il in enumerate(ids):
        np.testing.assert_array_equal(held(cache)[:rows, slot], after(il, rows, 9))
        np.testing.assert_array_equal(held(cache)[rows:, slot], after(il, 5, 7)[rows:])  # the rest stays


def test_taps_are_free_to_be_written_at_any_time_of_a_step(dev: Any, player: Player) -> None:
    cache = player.cache
    cache.arm_taps(dev, [1], 2, HIDDEN)
    for token in (1, 2):
        tap_all(dev, cache, 2, token)
        assert held(cache)[0, 0, 2] == token
    player.run([TRUE])
    tap_all(dev, cache, 1, 3)
    cache.advance(dev)
    tap_all(dev, cache, 1, 4)
    player.tokens.append(TRUE)
    player.check()
    with cache.snapshot(dev) as snap:
        player.step(TRUE, TRUE)
        cache.rollback(dev, snap, 1)
        tap_all(dev, cache, 1, 5)  # the replay taps too
        cache.arm_taps(dev, [2], 1, HIDDEN)
    assert held(cache).shape == (1, 1, HIDDEN)


def test_what_cannot_be_tapped_is_refused(dev: Any, player: Player, make_dev: MakeDev) -> None:
    cache, other = player.cache, make_dev("host")
    row = put(dev, after(0, 1))
    with pytest.raises(StateError, match="no taps are armed"):
        ops.tap_write(dev, cache, 0, row)
    cache.arm_taps(dev, [0, 3], 2, HIDDEN)
    tap_all(dev, cache, 2, 5)
    before, sink, bytes_before = image(cache), cache.dflash_taps, held(cache).tobytes()
    for error, text, ids, t, hidden in (
        (ConfigError, "tap of layer 4; layers are 0 .. 3", [0, 4], 1, HIDDEN),
        (ConfigError, "tap of layer -1", [-1, 0], 1, HIDDEN),
        (ConfigError, "each once", [1, 2, 1], 1, HIDDEN),
        (ConfigError, "at least one layer", [], 1, HIDDEN),
        (ConfigError, "at least 1 each", [0], 0, HIDDEN),
        (ConfigError, "at least 1 each", [0], 1, 0),
        (ConfigError, "at least 1 each", [0], -1, HIDDEN),
        (TypeError, "integer", [0.5], 1, HIDDEN),
        (TypeError, "integer", [0], 1.5, HIDDEN),
    ):
        with pytest.raises(error, match=text):
            cache.arm_taps(dev, ids, t, hidden)
    with pytest.raises(DeviceMismatch, match="does not live on"):
        cache.arm_taps(other, [0], 1, HIDDEN)
    for error, text, call in (
        (CapacityError, "3 rows to tap; the sink was armed for 2", lambda: tap_all(dev, cache, 3)),
        (ConfigError, r"layer 1 is not tapped; \[0, 3\] are", lambda: ops.tap_write(dev, cache, 1, row)),
        (ConfigError, "layer 4 is not tapped", lambda: ops.tap_write(dev, cache, 4, row)),
        (ConfigError, "layer -1 is not tapped", lambda: ops.tap_write(dev, cache, -1, row)),
        (ArrayError, "residual", lambda: ops.tap_write(dev, cache, 0, dev.zeros(HIDDEN + 1))),
        (ArrayError, "dtype", lambda: ops.tap_write(dev, cache, 0, dev.alloc_u8(HIDDEN))),
        (ArrayError, "share memory", lambda: ops.tap_write(dev, cache, 0, sink.buf.view(0, HIDDEN))),
    ):
        with pytest.raises(error, match=text):
            call()
    ops.tap_write(dev, cache, 0, dev.uninit(0))  # nothing
    assert cache.dflash_taps is sink
    assert held(cache).tobytes() == bytes_before
    assert image(cache) == before
    cache.reset(dev)
    assert (cache.dflash_taps, cache.as_c().contents.dflash_taps.present) == (None, 0)
    with pytest.raises(StateError, match="no taps are armed"):
        ops.tap_write(dev, cache, 0, row)


def test_an_assigned_sink_is_armed_for_python_and_for_c(dev: Any, player: Player) -> None:
    cache = player.cache
    mine = dev.uninit(2 * 2 * HIDDEN)
    sink = DflashTapSink([3, 0], mine, HIDDEN, 2)
    cache.dflash_taps = sink
    c = cache.as_c().contents.dflash_taps
    assert (c.present, c.n_taps, list(c.layer_ids[:2]), c.hidden, c.t) == (1, 2, [3, 0], HIDDEN, 2)
    assert (c.buf.ptr, c.buf.len) == (mine.ptr, mine.len)
    tap_all(dev, cache, 2, 6)
    for slot, il in enumerate((3, 0)):
        np.testing.assert_array_equal(held(cache)[:, slot], after(il, 2, 6))
    c.present = 0  # as a C caller disarms
    assert cache.dflash_taps is None
    c.present = 1
    assert cache.disarm_taps() is sink
    assert (cache.dflash_taps, c.present) == (None, 0)
    cache.dflash_taps = sink
    cache.dflash_taps = None
    assert c.present == 0


def test_a_sink_that_does_not_fit_is_not_assigned(dev: Any, player: Player) -> None:
    cache = player.cache
    cache.arm_taps(dev, [1], 1, HIDDEN)
    sink, before = cache.dflash_taps, bytes(cache.as_c().contents.dflash_taps)
    closed = dev.uninit(HIDDEN)
    closed.close()
    for error, ids, buf, hidden, t in (
        (ConfigError, [4], dev.zeros(HIDDEN), HIDDEN, 1),
        (ConfigError, [], dev.zeros(HIDDEN), HIDDEN, 1),
        (ConfigError, [1, 1], dev.zeros(HIDDEN), HIDDEN, 1),
        (ConfigError, [1], dev.zeros(HIDDEN), HIDDEN, 0),
        (ArrayError, [1], dev.zeros(2 * HIDDEN - 1), HIDDEN, 2),
        (ArrayError, [1], dev.alloc_u8(4 * HIDDEN), HIDDEN, 1),
        (ArrayError, [1], None, HIDDEN, 1),
        (ArrayError, [1], closed, HIDDEN, 1),
    ):
        with pytest.raises(error):
            cache.dflash_taps = DflashTapSink(ids, buf, hidden, t)
        assert cache.dflash_taps is sink
        assert bytes(cache.as_c().contents.dflash_taps) == before


def test_assigned_logits_are_those_that_are_taken_and_stand_for_the_position(dev: Any, player: Player) -> None:
    cache = player.cache
    mine, c = put(dev, np.arange(16, dtype=np.float32)), cache.as_c().contents.last_logits_dev
    player.step(TRUE, TRUE)
    with cache.snapshot(dev) as snap:
        player.step(TRUE)
        cache.last_logits_dev = mine
        assert (c.present, c.slice.ptr, cache.logits_at) == (1, mine.ptr, 3)
        assert cache.take_logits(dev) is mine
        for error, row in ((ArrayError, dev.zeros(15)), (ArrayError, dev.alloc_u8(16)), (ArrayError, object())):
            with pytest.raises(error):
                cache.last_logits_dev = row
            assert cache.last_logits_dev is mine
        cache.rollback(dev, snap, 0)
    assert (cache.last_logits_dev, c.present) == (None, 0)
    cache.last_logits_dev = mine
    cache.last_logits_dev = None
    assert (cache.take_logits(dev), c.present) == (None, 0)
    cache.park_logits(dev, mine)  # to the cache's own buffer, whatever was assigned before
    assert cache.last_logits_dev.ptr != mine.ptr


def test_logits_assigned_in_an_open_step_belong_to_its_end(dev: Any, player: Player) -> None:
    cache, mine = player.cache, dev.zeros(16)
    player.step(TRUE, TRUE)
    with cache.snapshot(dev) as snap:
        player.run([TRUE, TRUE])
        cache.last_logits_dev = mine
        assert cache.logits_at == 4
        cache.advance(dev, 2)
        cache.rollback(dev, snap, 1)  # of the two rows one stands
        assert cache.take_logits(dev) is None
    mine.close()


def test_a_launch_that_parks_brings_back_the_buffer_that_it_recorded(dev: Any, player: Player) -> None:
    cache, mine, row = player.cache, dev.zeros(16), put(dev, np.full(16, 4, np.float32))
    player.step(TRUE)
    lane = player.lane(1)
    cache.park_logits(dev, row)
    own = cache.last_logits_dev.ptr
    cache.last_logits_dev = mine
    with dev.capture() as graph:
        lane.run(cache)
        cache.park_logits(dev, row)
        cache.advance(dev)
    assert cache.take_logits(dev) is mine  # nothing ran
    graph.launch()
    assert cache.take_logits(dev).ptr == own
    assert cache.as_c().contents.last_logits_dev.slice.ptr == own
    assert (cache.take_logits(dev).to_numpy() == 4).all()
    graph.close()


def test_arming_again_with_fewer_rows_keeps_the_address_and_with_more_keeps_the_old_buffer(
    dev: Any, player: Player
) -> None:
    cache = player.cache
    cache.arm_taps(dev, [0, 3], 4, HIDDEN)
    first = cache.dflash_taps
    for ids, t in (((3,), 8), ((1, 2), 2), ((3, 0), 4)):
        cache.arm_taps(dev, ids, t, HIDDEN)
        assert cache.dflash_taps.buf.ptr == first.buf.ptr
        tap_all(dev, cache, t)
        for slot, il in enumerate(ids):
            np.testing.assert_array_equal(held(cache)[:, slot], after(il, t))
    cache.arm_taps(dev, [3, 0], 5, HIDDEN)
    assert cache.dflash_taps.buf.ptr != first.buf.ptr
    assert len(first.buf.to_numpy()) == 4 * 2 * HIDDEN  # a graph may still write it
    tap_all(dev, cache, 5)
    taken = cache.disarm_taps()
    assert (taken.t, cache.dflash_taps, cache.as_c().contents.dflash_taps.present) == (5, None, 0)
    assert cache.disarm_taps() is None
    names = [name for name, *_ in cache.regions()]
    assert names.count("taps") == 2
    cache.arm_taps(dev, [2], 1, HIDDEN)
    assert cache.dflash_taps.buf.ptr == taken.buf.ptr


def test_reserved_taps_are_part_of_the_plan_and_serve_every_smaller_sink(dev: Any) -> None:
    options = CacheOptions(reserve_taps=((0, 3), 4))
    with Cache.new(dev, hybrid(), 8, policy=POLICY, options=options) as cache:
        where = {name: (ptr, n) for name, ptr, n, _ in cache.regions()}
        bytes_before = cache.report()["cache_bytes"]
        for ids, t in (((3, 0), 4), ((1,), 8), ((2, 1, 0), 2)):
            cache.arm_taps(dev, ids, t, HIDDEN)
            assert cache.dflash_taps.buf.ptr == where["taps"][0]
            tap_all(dev, cache, t)
        assert cache.report()["cache_bytes"] == bytes_before
        cache.arm_taps(dev, [0, 3], 5, HIDDEN)
        assert cache.report()["cache_bytes"] == bytes_before + 4 * 5 * 2 * HIDDEN


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_taps_of_a_cache_on_two_devices_live_with_their_layers(make_dev: MakeDev, kind: str) -> None:
    devices = [make_dev(kind), make_dev(kind)]
    with Cache.new_pp2(*devices, 2, hybrid(), 8, policy=POLICY, options=OPTIONS) as cache:
        for ids, e, other in (((0, 1), *devices), ((3, 2), *reversed(devices)), ((1,), *devices)):
            cache.arm_taps(e, ids, 2, HIDDEN)
            buf = cache.dflash_taps.buf
            assert buf.memory is e.memory
            tap_all(e, cache, 2)
            for slot, il in enumerate(ids):
                np.testing.assert_array_equal(held(cache)[:, slot], after(il, 2))
            with pytest.raises(DeviceMismatch, match="does not live on"):
                ops.tap_write(other, cache, ids[0], put(other, after(ids[0], 1)))
        with pytest.raises(DeviceMismatch, match="share one device"):
            cache.arm_taps(devices[0], [0, 2], 2, HIDDEN)
        with pytest.raises(DeviceMismatch, match="share one device"):
            cache.arm_taps(devices[1], [0], 2, HIDDEN)


def test_captured_taps_are_written_at_each_launch(dev: Any, player: Player) -> None:
    cache = player.cache
    player.step(TRUE)
    cache.arm_taps(dev, [0, 3], 2, HIDDEN)
    residual, lane = put(dev, after(3, 1)), player.lane(1)
    sink = cache.dflash_taps
    tap_all(dev, cache, 2, 5)
    bytes_before = sink.buf.to_numpy().tobytes()
    with dev.capture() as graph:
        lane.run(cache)
        ops.tap_write(dev, cache, 3, residual)
        cache.advance(dev)
        with pytest.raises(StateError, match=r"taps need .*while a capture is open"):
            cache.arm_taps(dev, [0, 3], 3, HIDDEN)
    assert cache.dflash_taps is sink
    assert sink.buf.to_numpy().tobytes() == bytes_before
    for token in (8, 9):
        residual.copy_from(after(3, 1, token).reshape(-1))
        lane.fill((player.start, [TRUE]))
        graph.launch()
        player.tokens.append(TRUE)
        np.testing.assert_array_equal(held(cache)[:1, 1], after(3, 1, token))
        np.testing.assert_array_equal(held(cache)[1, 0], after(0, 2, 5)[1])
    player.check()
    graph.close()


@pytest.mark.standin
def test_a_sink_that_cannot_be_allocated_leaves_the_old_one_armed(make_dev: MakeDev, standin: StandIn) -> None:
    player = player_on(make_dev("cuda"))
    cache, e = player.cache, player.e
    cache.arm_taps(e, [0], 1, HIDDEN)
    sink, regions = cache.dflash_taps, cache.regions()
    standin.fail("cuMemAllocAsync", 1, 2)
    with pytest.raises(DriverError):
        cache.arm_taps(e, [0, 1], 4, HIDDEN)
    assert (cache.dflash_taps, cache.regions()) == (sink, regions)
    tap_all(e, cache, 1)
    standin.clear_trace()
    cache.arm_taps(e, [3], 1, HIDDEN)
    assert standin.trace() == []
    row = put(e, after(3, 1))
    standin.clear_trace()
    ops.tap_write(e, cache, 3, row)
    assert standin.launches() == ["copy_rows"]
    assert len(standin.trace()) == 1
    player.close()


# Parked logits


def logits(player: Player, value: float) -> Any:
    return put(player.e, np.full(16, value, np.float32))


def parked(player: Player) -> float | None:
    kept = player.cache.take_logits(player.e)
    assert player.cache.last_logits_dev is kept
    assert player.cache.as_c().contents.last_logits_dev.present == (kept is not None)
    return None if kept is None else float(kept.to_numpy()[0])


def test_parked_logits_are_made_at_first_use_and_keep_their_address(dev: Any, player: Player) -> None:
    cache = player.cache
    assert parked(player) is None
    before = cache.report()["cache_bytes"]
    assert "logits" not in {name for name, *_ in cache.regions()}
    cache.park_logits(dev, logits(player, 1))
    kept = cache.take_logits(dev)
    assert (kept.len, kept.dtype) == (16, np.float32)
    assert cache.as_c().contents.last_logits_dev.slice.ptr == kept.ptr
    assert cache.report()["cache_bytes"] == before + 64
    assert [(ptr, n) for name, ptr, n, _ in cache.regions() if name == "logits"] == [(kept.ptr, 64)]
    assert parked(player) == 1
    assert parked(player) == 1  # taking leaves them parked
    for value in (2, 3):
        player.step(TRUE)
        cache.park_logits(dev, logits(player, value))
        assert parked(player) == value
        assert cache.take_logits(dev).ptr == kept.ptr
    cache.reset(dev)
    assert parked(player) is None
    cache.park_logits(dev, logits(player, 4))
    assert cache.take_logits(dev).ptr == kept.ptr


def test_reserved_logits_are_part_of_the_plan(dev: Any) -> None:
    options = CacheOptions(reserve_logits=True)
    with Cache.new(dev, hybrid(), 8, policy=POLICY, options=options) as cache:
        where = {name: ptr for name, ptr, *_ in cache.regions()}
        cache.park_logits(dev, put(dev, np.arange(16, dtype=np.float32)))
        assert cache.take_logits(dev).ptr == where["logits"]
        np.testing.assert_array_equal(cache.take_logits(dev).to_numpy(), np.arange(16))


def test_parking_copies_the_row(dev: Any, player: Player) -> None:
    row = logits(player, 1)
    player.cache.park_logits(dev, row)
    row.copy_from(np.full(16, 2, np.float32))
    assert parked(player) == 1


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_logits_live_on_the_last_layers_device(make_dev: MakeDev, kind: str) -> None:
    devices = [make_dev(kind), make_dev(kind)]
    with Cache.new_pp2(*devices, 2, hybrid(), 8, policy=POLICY) as cache:
        for call in (
            lambda: cache.park_logits(devices[0], devices[0].zeros(16)),
            lambda: cache.take_logits(devices[0]),
        ):
            with pytest.raises(DeviceMismatch, match="last layer's device"):
                call()
        cache.park_logits(devices[1], devices[1].zeros(16))
        assert cache.take_logits(devices[1]).memory is devices[1].memory


@pytest.mark.parametrize(("accept", "stands"), [(0, False), (1, False), (2, True), (3, True)])
def test_logits_stand_as_long_as_their_token_does(player: Player, accept: int, stands: bool) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    with cache.snapshot(e) as snap:
        player.step(TRUE, TRUE)
        cache.park_logits(e, logits(player, 1))  # of length 4
        player.step(TRUE)
        cache.rollback(e, snap, accept)
        assert parked(player) == (1 if stands else None)
        if accept:
            player.step(*[TRUE] * accept)
        assert parked(player) == (1 if stands else None)


def test_logits_parked_at_the_snapshot_outlive_a_rollback_to_it(player: Player) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    cache.park_logits(e, logits(player, 1))
    with cache.snapshot(e) as snap:
        player.step(TRUE, TRUE)
        cache.rollback(e, snap, 0)
    assert parked(player) == 1


@pytest.mark.parametrize("accept", [2, 3])
def test_logits_parked_in_an_open_step_belong_to_its_end(player: Player, accept: int) -> None:
    cache, e = player.cache, player.e
    player.step(TRUE, TRUE)
    with cache.snapshot(e) as snap:
        player.run([TRUE] * 3)
        cache.park_logits(e, logits(player, 1))  # of length 5
        cache.rollback(e, snap, accept)
        assert parked(player) == (1 if accept == 3 else None)


@pytest.mark.parametrize(("length", "stands"), [(5, True), (4, True), (3, False), (0, False)])
def test_a_truncate_below_drops_them(dev: Any, length: int, stands: bool) -> None:
    player = player_on(dev, hybrid(full_attention_interval=0, ssm=None, n_layer=2))
    player.step(*[TRUE] * 4)
    player.cache.park_logits(dev, logits(player, 1))
    player.step(TRUE)
    player.cache.truncate(dev, length)
    assert parked(player) == (1 if stands else None)
    player.tokens = player.tokens[:length]
    player.check()
    player.close()


def test_what_cannot_be_parked_is_refused(dev: Any, player: Player, make_dev: MakeDev) -> None:
    cache, other = player.cache, make_dev("host")
    player.step(TRUE, TRUE)
    cache.park_logits(dev, logits(player, 1))
    snap = cache.snapshot(dev)
    before = image(cache)

    def refuse(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=text):
            call()
        assert image(cache) == before

    for n in (15, 17, 32, 0):
        refuse(ArrayError, "row", lambda n=n: cache.park_logits(dev, dev.zeros(n)))
    refuse(ArrayError, "dtype", lambda: cache.park_logits(dev, dev.alloc_u8(64)))
    refuse(ArrayError, "row", lambda: cache.park_logits(dev, [0.0] * 16))
    refuse(DeviceMismatch, "last layer's device", lambda: cache.park_logits(other, other.zeros(16)))
    assert parked(player) == 1
    player.step(TRUE)
    cache.rollback(dev, snap, 1)
    before = image(cache)
    refuse(StateError, "pending replay of 1 tokens", lambda: cache.park_logits(dev, dev.zeros(16)))
    assert parked(player) == 1
    snap.close()
    silent = Cache.new(dev, hybrid(n_vocab=0), 8, policy=POLICY)
    with pytest.raises(ConfigError, match="n_vocab"):
        silent.park_logits(dev, dev.zeros(16))
    silent.close()
    cache.close()
    for call in (lambda: cache.park_logits(dev, dev.zeros(16)), lambda: cache.take_logits(dev)):
        with pytest.raises(StateError, match="closed"):
            call()


@pytest.mark.standin
def test_parking_is_one_copy_on_the_device_and_what_fails_leaves_what_stood(
    make_dev: MakeDev, standin: StandIn
) -> None:
    player = player_on(make_dev("cuda"))
    cache, e = player.cache, player.e
    row = logits(player, 1)
    standin.fail("cuMemAllocAsync", 1, 2)
    with pytest.raises(DriverError):
        cache.park_logits(e, row)
    assert parked(player) is None
    standin.clear_trace()
    cache.park_logits(e, row)
    assert [(c.name, c.bytes) for c in standin.trace()] == [("cuMemAllocAsync", 64), ("cuMemcpyDtoDAsync", 64)]
    standin.clear_trace()
    cache.park_logits(e, row)
    cache.take_logits(e)
    assert [c.name for c in standin.trace()] == ["cuMemcpyDtoDAsync"]
    player.step(TRUE)
    standin.fail("cuMemcpyDtoDAsync", 1, 719)
    with pytest.raises(DriverError):
        cache.park_logits(e, logits(player, 2))
    assert parked(player) == 1
    player.close()


def test_other_lanes_of_one_device_keep_their_own(dev: Any) -> None:
    players = [player_on(dev) for _ in range(2)]
    for n, each in enumerate(players):
        each.cache.park_logits(dev, logits(each, n))
        each.cache.arm_taps(dev, [n], 1, HIDDEN)
        tap_all(dev, each.cache, 1)
    assert [parked(each) for each in players] == [0, 1]
    assert [held(each.cache)[0, 0, 0] for each in players] == [0, 1]
    for each in players:
        each.close()


def test_a_captured_tap_is_launched_only_into_the_slots_that_it_was_captured_with(dev: Any) -> None:
    with Cache.new(dev, tiny(), 16, policy=POLICY) as cache:
        residual = dev.zeros(2 * 8)
        residual.copy_from(np.arange(16, dtype=np.float32))
        cache.arm_taps(dev, [0, 3], 2, 8)
        ops.tap_write(dev, cache, 0, residual)
        with dev.capture() as graph:
            ops.tap_write(dev, cache, 3, residual)

        def slots() -> Any:
            assert cache.dflash_taps is not None
            return cache.dflash_taps.buf.to_numpy().reshape(2, 2, 8)

        graph.launch()
        assert np.array_equal(slots()[:, 1], np.arange(16).reshape(2, 8))
        before = slots().tobytes()
        for layer_ids, t in (([3, 0], 2), ([0, 2], 2), ([0, 3], 1)):
            cache.arm_taps(dev, layer_ids, t, 8)
            with pytest.raises(StateError, match="captured with taps"):
                graph.launch()
        cache.disarm_taps()
        with pytest.raises(StateError, match="none are armed"):
            graph.launch()
        cache.arm_taps(dev, [0, 3], 2, 8)  # as it was: the same slots of the same buffer
        assert slots().tobytes() == before
        residual.copy_from(np.full(16, 7, np.float32))
        graph.launch()
        assert np.array_equal(slots()[:, 1], np.full((2, 8), 7))
        graph.close()
        residual.close()
