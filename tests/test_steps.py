"""The clock: capacity, the open step, advance, truncate; every refusal leaves every byte as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, History, attention_only, device_counters, image, put, sequence, tiny

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import CapacityError, MemraError, StateError
from memra_driver.health import Fault

MakeDev = Callable[..., Any]


@pytest.fixture
def cache(dev: Any) -> Any:
    with Cache.new(dev, tiny(), 32, policy=POLICY) as cache:
        yield cache


@pytest.fixture
def plain(dev: Any) -> Any:
    """A cache without recurrent layers."""
    with Cache.new(dev, attention_only(), 32, policy=POLICY) as cache:
        yield cache


def refused(cache: Cache, error: type[MemraError], match: str, *calls: Callable[[], Any]) -> None:
    before = image(cache)
    for call in calls:
        with pytest.raises(error, match=match):
            call()
    assert image(cache) == before


# Capacity


def test_a_cache_takes_max_ctx_tokens_and_refuses_the_next(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    for _ in range(32):
        feed.step(1)
    History.of(dev).check(cache)
    refused(
        cache, CapacityError, r"len 32 need 33 tokens; max_ctx is 32",
        lambda: feed.append(3, 1), lambda: feed.conv(0, 1),
    )  # fmt: skip
    refused(cache, CapacityError, "max_ctx is 32", lambda: cache.advance(dev, 1))
    assert device_counters(cache) == ({3: 32, 7: 32}, {32})


def test_a_batch_that_does_not_fit_is_refused_whole(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(28)
    refused(cache, CapacityError, "len 28 need 33 tokens", lambda: feed.append(3, 5), lambda: feed.conv(0, 5))
    assert device_counters(cache) == ({3: 28, 7: 28}, {28})
    feed.step(4)
    History.of(dev).check(cache)


def test_a_verify_beyond_the_end_is_refused_and_the_cache_goes_on(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(30)
    with cache.snapshot(dev) as snap:
        refused(cache, CapacityError, "need 34", lambda: feed.append(3, 4))
        feed.step(2)
        cache.rollback(dev, snap, 0)
        History.of(dev).check(cache)


def test_a_full_cache_can_be_rolled_back_and_filled_again(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(30)
    with cache.snapshot(dev) as snap:
        feed.step(2)
        cache.rollback(dev, snap, 2)
        feed.step(2)
        History.of(dev).check(cache)


def test_no_rows_do_nothing_at_all(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(3)
    before = image(cache)
    feed.step(0, advance=False)
    cache.advance(dev, 0)
    assert image(cache) == before
    feed.step(2, advance=False)  # the step was not opened by no rows
    cache.advance(dev, 2)


def test_a_cache_of_no_tokens_takes_no_rows_and_no_more(dev: Any) -> None:
    with Cache.new(dev, tiny(), 0, policy=POLICY) as cache, cache.snapshot(dev) as snap:
        feed = Feed(cache)
        feed.step(0)
        refused(cache, CapacityError, "max_ctx is 0", lambda: feed.append(3, 1), lambda: cache.advance(dev, 1))
        cache.rollback(dev, snap, 0)
        cache.reset(dev)
        assert len(cache.digest()) == 64


# Lengths count tokens


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_length_counts_tokens_and_not_what_they_hold(dev: Any, plain: Cache, value: float) -> None:
    for tokens in range(1, 4):
        row = put(dev, np.full((1, 128), value, np.float32))
        for il in range(3):
            ops.append_kv(dev, plain, il, row, row)
        plain.advance(dev)
        assert [layer.len for layer in plain.kv] == [tokens] * 3
        assert device_counters(plain) == (dict.fromkeys(range(3), tokens), {tokens})
    assert bool(plain.health()) == bool(np.isnan(value))
    if np.isnan(value):
        seen = plain.health().faults[Fault.NONFINITE]
        assert (seen.count, seen.slot, seen.layer) == (3 * 3 * (4 + 4), 0, 0)  # 4 blocks of K and of V a row


# The open step


def test_an_open_step_takes_its_own_row_count_only(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.append(3, 2)
    assert cache.step_rows == 2
    refused(cache, StateError, "open step has 2", lambda: feed.append(7, 1), lambda: feed.conv(0, 3))
    refused(cache, StateError, "step of 2 rows is open", lambda: cache.advance(dev, 1), lambda: cache.advance(dev, 3))
    feed.append(7, 2)
    cache.advance(dev, 2)
    assert (cache.step_rows, cache.pos) == (0, 2)


def test_each_operation_runs_once_per_layer_and_step(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.append(3, 1)
    conv_out = feed.conv(0, 1)
    feed.scan(0, conv_out, 1)
    refused(cache, StateError, "layer 3 has run append", lambda: feed.append(3, 1))
    refused(cache, StateError, "layer 0 has run conv", lambda: feed.conv(0, 1))
    refused(cache, StateError, "layer 0 has run scan", lambda: feed.scan(0, conv_out, 1))
    cache.advance(dev)
    feed.append(3, 1)


def test_what_needs_whole_steps_is_refused_while_one_is_open(dev: Any, cache: Cache, plain: Cache) -> None:
    with cache.snapshot(dev) as snap:
        Feed(cache).append(3, 1)
        refused(
            cache, StateError, "step of 1 rows is open",
            lambda: cache.snapshot(dev), lambda: cache.snapshot_into(dev, snap), lambda: cache.truncate(dev, 0),
        )  # fmt: skip
    Feed(plain).append(0, 2)
    refused(plain, StateError, "step of 2 rows is open", lambda: plain.truncate(dev, 0))


def test_reading_does_not_disturb_an_open_step(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(2, advance=False)
    before = image(cache)
    assert len(cache.digest()) == 64
    cache.report()
    k, v = (put(dev, np.zeros((2, 128), np.float32)) for _ in range(2))
    ops.dequant_kv(dev, cache, 3, 0, 2, k, v)
    assert image(cache) == before
    cache.advance(dev, 2)
    History.of(dev).check(cache)


def test_pos_d_stays_where_it_is_until_the_step_is_closed(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(3)
    feed.step(2, advance=False)
    assert device_counters(cache) == ({3: 5, 7: 5}, {3})
    cache.advance(dev, 2)
    assert device_counters(cache) == ({3: 5, 7: 5}, {5})


def test_an_append_above_rows_that_nobody_wrote_is_refused(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(3, layers=[0, 1, 2, 3])
    for length in (0, 2):  # one row is enough
        cache.kv[7].len = length
        refused(cache, StateError, f"layer 7: len is {length}, pos is 3", lambda: feed.append(7, 1))
    cache.kv[7].len = 3  # the engine wrote them with a kernel of its own
    feed.append(7, 1)


def test_append_writes_at_pos_and_keeps_a_longer_length(dev: Any, plain: Cache) -> None:
    feed = Feed(plain)
    feed.step(6)
    rows = sequence(plain)
    plain.pos = 2
    plain.sync_d(dev)
    feed.step(2)  # the same tokens, so the same bytes
    assert sequence(plain) == rows
    assert device_counters(plain) == (dict.fromkeys(range(3), 6), {4})


def test_reading_and_preparing_may_repeat_within_a_step(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(2)
    conv_out = feed.conv(0, 2)
    before = image(cache)
    outs = [[dev.uninit(n) for n in (128, 128, 128, 4, 4)] for _ in range(2)]
    for out in outs:
        gates = [put(dev, np.ones(n, np.float32)) for n in (4, 4, 2, 2)]
        ops.gdn_prep(dev, cache, 0, conv_out, *gates, *out, eps=1e-6)
    k, v = (put(dev, np.zeros(128, np.float32)) for _ in range(2))
    ops.dequant_kv(dev, cache, 3, 1, 2, k, v)
    ops.dequant_kv(dev, cache, 3, 0, 1, k, v)
    assert image(cache) == before
    assert [each.to_numpy().tobytes() for each in outs[0]] == [each.to_numpy().tobytes() for each in outs[1]]


# Unsettled: the device is ahead of the host


def test_while_the_device_counters_are_ahead_the_host_changes_nothing(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(3)
    with cache.snapshot(dev) as snap:
        cache.as_c().contents.state = CacheState.UNSETTLED  # as a device-side accept count does
        refused(
            cache, StateError, "settle",
            lambda: cache.snapshot(dev), lambda: cache.snapshot_into(dev, snap), lambda: cache.rollback(dev, snap, 0),
            lambda: cache.advance(dev), lambda: cache.truncate(dev, 0), lambda: cache.sync_d(dev), cache.digest,
            lambda: feed.append(3, 1), lambda: feed.conv(0, 1),
        )  # fmt: skip
        cache.report()
        cache.reset(dev)
        feed.step(2)
        History.of(dev).check(cache)


# Advance


def test_advance_alone_moves_pos_for_an_engine_with_kernels_of_its_own(dev: Any, cache: Cache) -> None:
    cache.kv[3].len = cache.kv[7].len = 4
    cache.advance(dev, 4)
    assert (cache.pos, cache.step_rows) == (4, 0)
    assert device_counters(cache) == ({3: 0, 7: 0}, {4})
    cache.sync_d(dev)
    assert device_counters(cache) == ({3: 4, 7: 4}, {4})


def test_advance_takes_one_token_unless_told(dev: Any, cache: Cache) -> None:
    cache.advance(dev)
    assert cache.pos == 1


@pytest.mark.parametrize("n", [-1, -4])
def test_advance_does_not_go_back(dev: Any, cache: Cache, n: int) -> None:
    Feed(cache).step(5)
    refused(cache, StateError, "go back", lambda: cache.advance(dev, n))


def test_advance_takes_whole_numbers(dev: Any, cache: Cache) -> None:
    with pytest.raises(TypeError):
        cache.advance(dev, 1.0)
    assert cache.pos == 0


# Truncate


@pytest.mark.parametrize("new_len", [11, -1, 32, 33])
def test_truncate_to_what_the_cache_does_not_hold_is_refused(dev: Any, plain: Cache, new_len: int) -> None:
    Feed(plain).step(10)
    match = rf"truncate to {new_len}; the cache holds 10"
    refused(plain, CapacityError, match, lambda: plain.truncate(dev, new_len))


@pytest.mark.parametrize("new_len", [9, 10, 0])
def test_truncate_keeps_what_is_asked(dev: Any, plain: Cache, new_len: int) -> None:
    feed = Feed(plain)
    feed.step(10)
    kept = {name: data[: len(data) // 10 * new_len] for name, data in sequence(plain).items()}
    plain.truncate(dev, new_len)
    assert plain.pos == new_len
    assert sequence(plain) == kept
    assert device_counters(plain) == (dict.fromkeys(range(3), new_len), {new_len})
    feed.step(2)
    assert plain.pos == new_len + 2


def test_truncate_leaves_a_shorter_layer_as_it_is(dev: Any, plain: Cache) -> None:
    feed = Feed(plain)
    feed.step(3)
    feed.step(3, layers=[0, 1])
    plain.truncate(dev, 5)
    assert device_counters(plain) == ({0: 5, 1: 5, 2: 3}, {5})


def test_truncate_is_refused_where_a_recurrent_layer_exists(dev: Any, cache: Cache) -> None:
    Feed(cache).step(3)
    refused(cache, StateError, "snapshot and rollback", lambda: cache.truncate(dev, 3), lambda: cache.truncate(dev, 1))


def test_truncate_outdates_the_snapshots_above_it(dev: Any, plain: Cache) -> None:
    feed = Feed(plain)
    feed.step(3)
    with plain.snapshot(dev) as low:
        feed.step(3)
        with plain.snapshot(dev) as high:
            plain.truncate(dev, 4)
            with pytest.raises(MemraError, match="position 6"):
                plain.rollback(dev, high, 0)
            plain.rollback(dev, low, 1)
            assert (plain.pos, plain.replay_to) == (3, 4)


def test_a_rewound_cache_decodes_like_one_that_never_went_further(dev: Any, plain: Cache) -> None:
    feed = Feed(plain)
    feed.step(7, seed=3)
    plain.truncate(dev, 0)
    feed.step(5)
    with Cache.new(dev, attention_only(), 32, policy=POLICY) as twin:
        Feed(twin).step(5)
        assert plain.digest() == twin.digest()


# Several rows


@pytest.mark.parametrize("widths", [(1,) * 9, (2, 7), (9,), (4, 1, 4), (3, 3, 3)])
def test_rows_in_one_step_are_the_rows_of_single_steps(dev: Any, cache: Cache, widths: tuple[int, ...]) -> None:
    feed = Feed(cache)
    for width in widths:
        feed.step(width)
    History.of(dev).check(cache)


def test_layers_may_run_in_any_order_within_a_step(dev: Any, cache: Cache) -> None:
    Feed(cache).step(3, layers=[7, 2, 0, 3, 6, 5, 1, 4])
    History.of(dev).check(cache)
