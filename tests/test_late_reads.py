"""What a launch reads is what stood there when it was enqueued, and never what lies beyond the tokens that stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, device_counters, image, put
from decoding import OPTIONS, TRUE, WRONG, Player, draft, hybrid, play, player_on

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import CapacityError
from memra_driver.formats import K_FORMATS, V_FORMATS, FormatPolicy
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

MakeDev = Callable[..., Any]
STAMPS = 1000


# Values that ride in the queue


@pytest.fixture
def keep_busy(dev: Any, request: pytest.FixtureRequest) -> Any:
    """Queues work that takes some milliseconds on a GPU, so that what follows is enqueued long before it runs."""
    gpu = request.config.getoption("--gpu") and hasattr(dev, "stream")
    buffer = dev.alloc_u8(1 << 30 if gpu else 1 << 12)

    def queue() -> None:
        for _ in range(40 if gpu else 1):
            dev.clear_bytes(buffer.ptr, buffer.nbytes)

    yield queue
    buffer.close()


def read_back(e: Any, seen: Any, i: int, counter: Any) -> None:
    """Into a place of its own, in stream order."""
    e.copy_into(seen, i, counter, 1)


def test_every_stamp_of_a_length_is_seen_by_the_read_behind_it(dev: Any, keep_busy: Callable[[], None]) -> None:
    with Cache.new(dev, attention_only(1), STAMPS, policy=POLICY) as cache:
        layer = cache.kv[0]
        lens, positions = (dev.htod_i32([0] * STAMPS) for _ in range(2))
        cache.sync_d(dev)  # the kernels are loaded
        keep_busy()
        for i in range(STAMPS):
            layer.len, cache.pos = i + 1, i
            cache.sync_d(dev)
            read_back(dev, lens, i, layer.len_d)
            read_back(dev, positions, i, cache.pos_d(0))
        np.testing.assert_array_equal(lens.to_numpy(), np.arange(1, STAMPS + 1))
        np.testing.assert_array_equal(positions.to_numpy(), np.arange(STAMPS))


def test_every_advance_is_seen_by_the_read_behind_it(dev: Any, keep_busy: Callable[[], None]) -> None:
    with Cache.new(dev, attention_only(1), STAMPS, policy=POLICY) as cache:
        seen = dev.htod_i32([0] * STAMPS)
        cache.sync_d(dev)
        keep_busy()
        for i in range(STAMPS):
            cache.advance(dev)
            read_back(dev, seen, i, cache.pos_d(0))
        np.testing.assert_array_equal(seen.to_numpy(), np.arange(1, STAMPS + 1))


def test_host_memory_may_be_refilled_as_soon_as_a_copy_was_asked_for(dev: Any, keep_busy: Callable[[], None]) -> None:
    source, slot = np.zeros(64, np.float32), dev.zeros(64)
    seen = dev.zeros(STAMPS * 64)
    keep_busy()
    for i in range(STAMPS):
        source[:] = i
        slot.copy_from(source)
        source[:] = -1
        dev.copy_into(seen, i * 64, slot, 64)
    rows = seen.to_numpy().reshape(STAMPS, 64)
    np.testing.assert_array_equal(rows, np.repeat(np.arange(STAMPS, dtype=np.float32)[:, None], 64, axis=1))


def test_one_element_writes_and_fresh_slices_are_seen_in_order(dev: Any, keep_busy: Callable[[], None]) -> None:
    one, seen, fresh = dev.htod_i32([0]), dev.htod_i32([0] * 200), dev.htod_i32([0] * 200)
    keep_busy()
    for i in range(200):
        dev.set_i32_one(one, i)
        read_back(dev, seen, i, one)
        made = dev.htod_i32([i])
        read_back(dev, fresh, i, made)
        made.close()
    np.testing.assert_array_equal(seen.to_numpy(), np.arange(200))
    np.testing.assert_array_equal(fresh.to_numpy(), np.arange(200))


def test_tables_of_copies_queued_behind_each_other_each_do_their_own(dev: Any, keep_busy: Callable[[], None]) -> None:
    """Snapshots of layers of mixed parity are copied by a table, which the next one overwrites."""
    player = player_on(dev, hybrid(n_layer=8))
    cache = player.cache
    player.step(TRUE, TRUE)
    for il in (0, 4):
        player.run([TRUE], [il])
        cache.end_step(cache.pos)
        cache.recur[il].conv_state.copy_from(player.oracle.at(player.tokens).planes[il, "conv"])
        cache.recur[il].ssm_state.copy_from(player.oracle.at(player.tokens).planes[il, "ssm"])
    snaps = [cache.snapshot(dev) for _ in range(3)]
    keep_busy()
    for _ in range(20):
        for snap in snaps:
            cache.snapshot_into(dev, snap)
        for snap in snaps:
            cache.rollback(dev, snap, 0)
    player.check()
    for snap in snaps:
        snap.close()
    player.close()


def test_counts_on_the_device_may_be_written_while_earlier_rounds_wait(dev: Any, keep_busy: Callable[[], None]) -> None:
    player = player_on(dev)
    play(player, 3, 0, "device")  # kernels and scratch
    count, number, lane = dev.htod_i32([0]), np.zeros(1, np.int32), player.lane(3)
    keep_busy()
    for accept in (1, 3, 0, 2, 1, 0, 3, 2):
        lane.fill((len(player.tokens), draft(3, accept)))
        number[0] = accept
        count.copy_from(number)
        with Round(player.cache, dev, width=3) as r:
            lane.run(player.cache)
            r.commit_from_device(count)
        number[0] = -1
        player.tokens += [TRUE] * accept
    player.cache.settle(dev)
    player.check()
    player.close()


# Bytes beyond the tokens that stand


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("v", V_FORMATS)
@pytest.mark.parametrize("k", K_FORMATS)
def test_bytes_beyond_the_length_reach_no_output(dev: Any, k: str, v: str, byte: int) -> None:
    """NaN as scale and as element, in every row that nobody wrote; each output has the bits of a clean cache."""
    options = replace(OPTIONS, max_rows=40)
    player = player_on(dev, hybrid(n_layer=2), options, FormatPolicy(k=k, v=v))
    cache = player.cache
    for rows in (1, 31, 32, 33):
        poison(cache, byte)
        cache.reset(dev)
        player.tokens = []
        player.step(*[TRUE] * rows)  # looks at what attention gives
        check_finite(player)
        with cache.snapshot(dev) as snap:
            append_nan(player, 4)  # tokens that are rejected
            cache.advance(dev, 4)
            cache.rollback(dev, snap, 0)
        player.step(TRUE)
        with Round(cache, dev, width=4):
            append_nan(player, 4)
        player.step(TRUE)
        with Round(cache, dev, width=4) as r:
            player.run([TRUE, WRONG])
            r.commit(1)
        player.tokens.append(TRUE)
        check_finite(player)
        player.check()
    player.close()


def poison(cache: Cache, byte: int) -> None:
    for layer in filter(None, cache.kv):
        for plane in (layer.k, layer.v):
            plane.copy_from(np.full(plane.len, byte, np.uint8))


def append_nan(player: Player, rows: int) -> None:
    """A step of rows that are NaN throughout in K and V, over a recurrent state that sees ordinary ones."""
    player.run([WRONG] * rows, [0])
    layer = player.cache.kv[1]
    nan = put(player.e, np.full((rows, layer.kv_dim_k), np.nan, np.float32))
    ops.append_kv(player.e, player.cache, 1, nan, nan)


def check_finite(player: Player) -> None:
    cache, n = player.cache, len(player.tokens)
    k, v = player.e.uninit(n * 64), player.e.uninit(n * 64)
    ops.dequant_kv(player.e, cache, 1, 0, n, k, v)
    assert np.isfinite(k.to_numpy()).all()
    assert np.isfinite(v.to_numpy()).all()


# The last slot


def check_clocks(cache: Cache, n: int) -> None:
    lens = {il: n for il, layer in enumerate(cache.kv) if layer is not None}
    assert (cache.pos, cache.step_rows, cache.state) == (n, 0, CacheState.READY)
    assert {il: cache.kv[il].len for il in lens} == lens
    assert device_counters(cache) == (lens, {n})


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])  # planes: guarded one by one on the stand-in
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_the_last_slot_is_written_and_the_one_behind_it_never(make_dev: MakeDev, kind: str, arena: bool) -> None:
    e = make_dev(kind, arena=arena)
    cache = Cache.new(e, hybrid(), 32, policy=POLICY, options=CacheOptions(round_width=5))
    feed = Feed(cache)

    def refuse(text: str, call: Callable[[], Any]) -> None:
        before = image(cache)
        with pytest.raises(CapacityError, match=text):
            call()
        assert image(cache) == before

    for n in range(28):
        feed.step(1)
        check_clocks(cache, n + 1)
    refuse("5 rows .*28.* need 33.*max_ctx is 32", lambda: feed.append(1, 5))
    refuse("max_ctx is 32", lambda: feed.conv(0, 5))
    with Round(cache, e, width=5):
        refuse("max_ctx is 32", lambda: feed.append(1, 5))
    check_clocks(cache, 28)
    feed.step(2)
    with cache.snapshot(e) as snap:
        with Round(cache, e, width=4):
            refuse("4 rows .*30.* need 34", lambda: feed.append(1, 4))
        check_clocks(cache, 30)
        with Round(cache, e, width=4):
            feed.step(2, advance=False)
        check_clocks(cache, 30)
        feed.step(2)
        cache.rollback(e, snap, 0)
    check_clocks(cache, 30)
    with Round(cache, e, width=2) as r:
        feed.step(2, advance=False)
        r.commit(2)
    check_clocks(cache, 32)
    refuse("max_ctx is 32", lambda: feed.append(1, 1))
    refuse("max_ctx is 32", lambda: cache.advance(e))
    with Round(cache, e, width=1):
        refuse("max_ctx is 32", lambda: feed.append(3, 1))
    feed.append(1, 0)
    feed.step(0)
    check_clocks(cache, 32)
    twin = Cache.new(e, hybrid(), 32, policy=POLICY)
    Feed(twin).step(32)
    assert cache.digest() == twin.digest()
    cache.close()
    twin.close()


def test_a_cache_of_no_tokens_refuses_the_first(dev: Any) -> None:
    with Cache.new(dev, hybrid(), 0, policy=POLICY, options=OPTIONS) as cache:
        feed = Feed(cache)
        for call in (lambda: feed.append(1, 1), lambda: feed.conv(0, 1), lambda: cache.advance(dev)):
            with pytest.raises(CapacityError, match="max_ctx is 0"):
                call()
        with Round(cache, dev, width=1), pytest.raises(CapacityError, match="max_ctx is 0"):
            feed.append(1, 1)
        check_clocks(cache, 0)
