"""Snapshots: whose they are, what they cost, what they never share with the live cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, History, attention_only, image, planes, sequence, tiny

from memra_driver.cache import Cache, CacheSnapshot, CacheState
from memra_driver.config import SsmConfig
from memra_driver.errors import MemraError, SnapshotError, StateError
from memra_driver.layout import Recorder

MakeDev = Callable[..., Any]


@pytest.fixture
def cache(dev: Any) -> Any:
    with Cache.new(dev, tiny(), 32, policy=POLICY) as cache:
        yield cache


def bytes_of(snap: CacheSnapshot) -> list[bytes | None]:
    return [None if kept is None else kept.to_numpy().tobytes() for kept in (*snap.conv, *snap.ssm)]


# What a snapshot is


def test_a_snapshot_holds_lengths_rings_and_states_of_its_moment(dev: Any, cache: Cache) -> None:
    Feed(cache).step(3)
    with cache.snapshot(dev) as snap:
        assert (snap.pos, snap.kv_len) == (3, [None, None, None, 3] * 2)
        seen = sequence(cache)
        for il in range(8):
            if cache.recur[il] is None:
                assert (snap.conv[il], snap.ssm[il]) == (None, None)
            else:
                assert snap.conv[il].to_numpy().tobytes() == seen[f"{il}.conv"]
                assert snap.ssm[il].to_numpy().tobytes() == seen[f"{il}.ssm"]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_snapshot_of_either_parity_holds_the_current_state(dev: Any, cache: Cache, steps: int) -> None:
    feed = Feed(cache)
    for _ in range(steps):
        feed.step(2)
    with cache.snapshot(dev) as snap:
        for il, state in enumerate(cache.recur):
            if state is not None:
                assert np.array_equal(snap.ssm[il].to_numpy(), state.ssm_state.to_numpy())
                assert not np.array_equal(snap.ssm[il].to_numpy(), state.ssm_state_alt.to_numpy())


def test_taking_a_snapshot_changes_nothing_in_the_cache(dev: Any, cache: Cache) -> None:
    Feed(cache).step(3)
    before = image(cache)
    with cache.snapshot(dev) as snap:
        cache.snapshot_into(dev, snap)
        assert image(cache) == before


def test_a_ring_of_no_columns_is_kept_as_nothing(dev: Any) -> None:
    cfg = tiny(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1))
    with Cache.new(dev, cfg, 8, policy=POLICY) as cache, cache.snapshot(dev) as snap:
        feed = Feed(cache)
        before = sequence(cache)
        feed.step(2)
        cache.rollback(dev, snap, 0)
        assert sequence(cache) == before
        assert [None if kept is None else kept.len for kept in snap.conv] == [0, 0, 0, None] * 2


@pytest.mark.parametrize("swaps", [(), (0, 1, 2, 4, 5, 6), (1, 4)], ids=["even", "odd", "mixed"])
def test_states_that_fill_no_whole_alignment_are_kept_and_restored(dev: Any, swaps: tuple[int, ...]) -> None:
    cfg = tiny(ssm=SsmConfig(conv_kernel=3, state_size=5, time_step_rank=3, group_count=1))
    with Cache.new(dev, cfg, 8, policy=POLICY) as cache, cache.snapshot(dev) as snap:
        for il in swaps:
            cache.recur[il].swap()
        fill(cache, 1)
        before = sequence(cache)
        cache.snapshot_into(dev, snap)
        assert bytes_of(snap) == [before.get(f"{il}.{name}") for name in ("conv", "ssm") for il in range(8)]
        fill(cache, 1000)
        assert not set(sequence(cache).values()) & set(filter(None, before.values()))
        cache.rollback(dev, snap, 0)
        assert sequence(cache) == before


def fill(cache: Cache, start: int) -> None:
    """Another number into every element of every ring and state."""
    for state in filter(None, cache.recur):
        for plane in (state.conv_state, state.ssm_state, state.ssm_state_alt):
            plane.copy_from(np.arange(start, start + plane.len, dtype=np.float32))
            start += plane.len


# Aliasing


def test_no_byte_of_a_snapshot_is_a_byte_of_the_cache(dev: Any, cache: Cache) -> None:
    with cache.snapshot(dev) as one, cache.snapshot(dev) as two:
        kept = [each for snap in (one, two) for each in (*snap.conv, *snap.ssm) if each is not None]
        spans = sorted((each.ptr, each.ptr + each.nbytes) for each in (*kept, *planes(cache).values()))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_snapshot_changes_through_snapshot_into_only(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(3)
    with cache.snapshot(dev) as snap, cache.snapshot(dev) as other:
        taken = bytes_of(snap)
        for _ in range(5):
            feed.step(1)
        assert bytes_of(snap) == taken
        cache.rollback(dev, snap, 0)
        for _ in range(5):
            feed.step(1)
        assert bytes_of(snap) == taken
        cache.reset(dev)
        feed.step(2)
        cache.snapshot_into(dev, snap)
        assert bytes_of(snap) != taken
        assert bytes_of(other) == taken


# Provenance


def refused(cache: Cache, snap: CacheSnapshot, match: str, *, renew: bool = True) -> None:
    """Neither rollback nor (renew) snapshot_into takes it, and nothing changes."""
    e = cache.devices[0]
    before = image(cache)
    with pytest.raises(SnapshotError, match=match):
        cache.rollback(e, snap, 0)
    if renew:
        with pytest.raises(SnapshotError, match=match):
            cache.snapshot_into(e, snap)
    assert image(cache) == before


def test_a_snapshot_of_another_cache_of_equal_geometry_is_refused(dev: Any, cache: Cache) -> None:
    with Cache.new(dev, tiny(), 32, policy=POLICY) as other, other.snapshot(dev) as snap:
        kept = bytes_of(snap)
        refused(cache, snap, f"cache {other.id}; this is cache {cache.id}")
        assert bytes_of(snap) == kept
        other.rollback(dev, snap, 0)


def test_a_snapshot_of_equal_bytes_and_other_shapes_is_refused(dev: Any) -> None:
    four = SsmConfig(conv_kernel=4, state_size=32, time_step_rank=4, group_count=1)
    one = SsmConfig(conv_kernel=4, state_size=64, time_step_rank=1, group_count=1)
    assert 4 * 32 * 32 == 64 * 64
    with (
        Cache.new(dev, tiny(ssm=four), 8, policy=POLICY) as cache,
        Cache.new(dev, tiny(ssm=one), 8, policy=POLICY) as other,
        other.snapshot(dev) as snap,
    ):
        refused(cache, snap, "this is cache")


def test_a_snapshot_of_another_device_is_refused(dev: Any, cache: Cache, make_dev: MakeDev) -> None:
    elsewhere = make_dev("host")
    with Cache.new(elsewhere, tiny(), 32, policy=POLICY) as other, other.snapshot(elsewhere) as snap:
        refused(cache, snap, "this is cache")


def test_a_snapshot_from_before_a_reset_is_refused_until_it_is_renewed(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    feed.step(3)
    with cache.snapshot(dev) as snap:
        cache.reset(dev)
        refused(cache, snap, "generation 0.* at 1", renew=False)
        feed.step(2)
        cache.snapshot_into(dev, snap)
        feed.step(2)
        cache.rollback(dev, snap, 0)
        History.of(dev).check(cache)


def test_a_snapshot_of_a_closed_cache_fits_nowhere_and_can_still_be_closed(dev: Any, cache: Cache) -> None:
    other = Cache.new(dev, tiny(), 32, policy=POLICY)
    snap = other.snapshot(dev)
    other.close()
    refused(cache, snap, "this is cache")
    with pytest.raises(StateError, match="closed"):
        other.rollback(dev, snap, 0)
    snap.close()


def test_a_closed_snapshot_is_refused(dev: Any, cache: Cache) -> None:
    snap = cache.snapshot(dev)
    snap.close()
    assert (snap.nbytes, snap.is_closed) == (0, True)
    refused(cache, snap, "closed")


# Fields that were assigned


@pytest.mark.parametrize("name", ["conv", "ssm"])
@pytest.mark.parametrize("shape", ["none", "smaller", "larger"])
def test_a_buffer_of_another_size_is_refused_by_name(dev: Any, cache: Cache, name: str, shape: str) -> None:
    Feed(cache).step(2)
    with cache.snapshot(dev) as snap:
        kept = getattr(snap, name)
        other = {"none": None, "smaller": dev.zeros(kept[1].len - 1), "larger": dev.zeros(kept[1].len + 1)}[shape]
        own, kept[1] = kept[1], other
        refused(cache, snap, rf"shape mismatch \({name}\)")
        kept[1] = own
        cache.rollback(dev, snap, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda snap: snap.kv_len.__setitem__(3, None), lambda snap: snap.kv_len.__setitem__(0, 2),
        lambda snap: snap.kv_len.__setitem__(3, 33), lambda snap: snap.kv_len.__setitem__(3, -1),
        lambda snap: snap.kv_len.pop(), lambda snap: snap.conv.pop(), lambda snap: setattr(snap, "pos", -1),
        lambda snap: setattr(snap, "pos", 33),
    ],
    ids=["no length", "a length too many", "beyond", "negative", "fewer lengths", "fewer rings", "pos < 0", "pos"],
)  # fmt: skip
def test_a_snapshot_that_is_no_state_of_the_cache_is_refused(dev: Any, cache: Cache, change: Any) -> None:
    Feed(cache).step(2)
    with cache.snapshot(dev) as snap:
        change(snap)
        refused(cache, snap, "snapshot_into|rollback")


# What it costs


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_thousand_rounds_of_snapshot_into_allocate_nothing(
    make_dev: MakeDev, monkeypatch: pytest.MonkeyPatch, kind: str, arena: bool
) -> None:
    e = make_dev(kind, arena=arena)
    with Cache.new(e, tiny(n_layer=4), 8, policy=POLICY) as cache, cache.snapshot(e) as snap:
        feed = Feed(cache)
        feed.step(3)
        cache.rollback(e, snap, 0)  # what compiles or uploads once has happened
        feed.step(3)
        allocated: list[int] = []
        alloc = e.memory.alloc_bytes
        monkeypatch.setattr(e.memory, "alloc_bytes", lambda n: allocated.append(n) or alloc(n))
        for number in range(1000):
            cache.snapshot_into(e, snap)
            if number % 10 == 0:
                cache.recur[number % 3].swap()  # parities of all kinds
                cache.rollback(e, snap, 0)
        assert [n for n in allocated if n > 1024] == []
        assert len(allocated) <= 2  # the table of copy_many, when a first mixed parity needs it
        assert cache.report()["snapshots"] == [{"pos": 3, "bytes": snap.nbytes, "invalid": ""}]


def test_the_report_says_why_a_snapshot_cannot_be_used(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    with cache.snapshot(dev) as early:
        feed.step(4)
        with cache.snapshot(dev) as late:
            cache.rollback(dev, early, 0)
            invalid = {snap["pos"]: snap["invalid"] for snap in cache.report()["snapshots"]}
            assert invalid[0] == ""
            assert "given up" in invalid[4]
            assert late.invalid == invalid[4]


def test_snapshots_without_recurrent_layers_cost_nothing_and_still_restore(dev: Any) -> None:
    with Cache.new(dev, attention_only(), 16, policy=POLICY) as cache, cache.snapshot(dev) as snap:
        feed = Feed(cache)
        feed.step(4)
        cache.snapshot_into(dev, snap)
        feed.step(3)
        cache.rollback(dev, snap, 1)
        assert [layer.len for layer in cache.kv] == [5, 5, 5]
        feed.step(1)
        assert (snap.nbytes, cache.pos) == (0, 5)


# What was found to fit is asked again


def _without(cache: Cache, snap: CacheSnapshot, call: str) -> tuple[type, str] | None:
    """How a renewal or a rollback is refused, None where it is not."""
    e = cache.devices[0]
    try:
        cache.snapshot_into(e, snap) if call == "snapshot_into" else cache.rollback(e, snap, 0)
    except MemraError as error:
        return type(error), str(error)
    return None


class Strange:
    """A slice of one element that compares as it likes."""

    len, nbytes, ptr, device = 1, 4, 64, -1
    dtype = np.dtype(np.float32)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = object.__hash__


def _close_one(snap: CacheSnapshot) -> None:
    snap.conv[0].close()


def _exchange(snap: CacheSnapshot) -> None:
    snap.ssm[0], snap.ssm[1] = snap.ssm[1], snap.ssm[0]


SPOILED: dict[str, Callable[[CacheSnapshot], Any]] = {
    "one view closed": _close_one,
    "a state missing": lambda snap: snap.ssm.__setitem__(0, None),
    "a ring of nobody": lambda snap: snap.conv.__setitem__(0, Strange()),
    "an entry less": lambda snap: snap.conv.pop(),
    "a length missing": lambda snap: snap.kv_len.__setitem__(3, None),
    "a length too large": lambda snap: snap.kv_len.__setitem__(3, 99),
    "a length in C too large": lambda snap: snap._lens_c.__setitem__(3, 99),
    "pos too large": lambda snap: setattr(snap, "pos", 99),
    "two states exchanged": _exchange,
}


@pytest.mark.not_through_c
@pytest.mark.parametrize("call", ["snapshot_into", "rollback"])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_snapshot_that_fitted_before_is_refused_like_one_that_is_new(
    dev: Any, cache: Cache, spoil: Callable[[CacheSnapshot], Any], call: str
) -> None:
    words = []
    for uses in (0, 3):
        with cache.snapshot(dev) as snap:
            for _ in range(uses):
                cache.snapshot_into(dev, snap)
                cache.rollback(dev, snap, 0)
            snap.copies.clear() if not uses else None
            spoil(snap)
            words.append(_without(cache, snap, call))
            if words[0] is not None:
                words[-1] = words[-1] and words[-1][0]  # addresses stand in some sentences
        cache.reset(dev)
    assert words[0] == words[1]
    assert (words[0] is None) == (spoil is _exchange)


def test_a_snapshot_renewed_step_after_step_is_like_one_that_is_new(dev: Any, cache: Cache) -> None:
    feed = Feed(cache)
    with cache.snapshot(dev) as snap:
        for rows in (1, 2, 1, 1, 3, 1):
            feed.step(rows)
            cache.snapshot_into(dev, snap)
            with cache.snapshot(dev) as other:
                assert (snap.pos, snap.kv_len, snap.invalid) == (other.pos, other.kv_len, "")
                assert bytes_of(snap) == bytes_of(other)


def _field(name: str, value: int) -> Callable[[Cache], None]:
    return lambda cache: setattr(cache._c, name, value)


def _length(value: int) -> Callable[[Cache], None]:
    return lambda cache: setattr(cache.kv[7]._c, "len", value)  # type: ignore[union-attr]


SPOILED_CACHE: dict[str, Callable[[Cache], Any]] = {
    "closed": Cache.close,
    "tainted": Cache.taint,
    "unsettled": lambda cache: cache.set_state(CacheState.UNSETTLED),
    "a step open": _field("step_rows", 2),
    "pos too large": _field("pos", 99),
    "pos below 0": _field("pos", -1),
    "a length too large": _length(99),
    "a length below 0": _length(-1),
    "C records it": lambda cache: cache.set_recorder(Recorder.C),
    "a state of nobody": lambda cache: setattr(cache.recur[1]._c.ssm_state, "ptr", 64),  # type: ignore[union-attr]
}


@pytest.mark.not_through_c
@pytest.mark.parametrize("spoil", SPOILED_CACHE.values(), ids=SPOILED_CACHE)
def test_a_renewal_that_came_through_before_is_refused_like_the_first(dev: Any, spoil: Callable[[Cache], Any]) -> None:
    words = []
    for uses in (0, 3):
        with Cache.new(dev, tiny(), 32, policy=POLICY) as cache, cache.snapshot(dev) as snap:
            for _ in range(uses):
                cache.snapshot_into(dev, snap)
            spoil(cache)
            words.append(_without(cache, snap, "snapshot_into"))
            cache.set_recorder(Recorder.NONE)
    assert words[0] is not None
    assert words[0] == words[1]


def test_states_that_were_exchanged_in_a_snapshot_are_restored_as_they_stand_there(dev: Any, cache: Cache) -> None:
    Feed(cache).step(2)
    with cache.snapshot(dev) as snap:
        cache.snapshot_into(dev, snap)
        cache.rollback(dev, snap, 0)
        kept = [snap.ssm[il].to_numpy().tobytes() for il in (1, 0)]
        _exchange(snap)
        cache.rollback(dev, snap, 0)
        found = [cache.recur[il].ssm_state.to_numpy().tobytes() for il in (0, 1)]  # type: ignore[union-attr]
        assert found == kept
        assert kept[0] != kept[1]
