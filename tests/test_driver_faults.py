"""A failure at each driver call of each change in turn: the error names it; the cache is whole or says it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tally
from caches import POLICY, Feed, History, attention_only, image, put, rows_of, sequence, tiny
from standin import StandIn

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import DriverError, DriverOutOfMemory, StateError

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]
CODE = 719  # a launch that failed


@dataclass
class Scene:
    """A cache of 5 tokens on one or two devices, a snapshot at 3, and the handles swapped as asked."""

    devices: list[Any]
    cache: Cache
    snap: Any
    keep: list[Any]

    def close(self) -> None:
        for each in (*self.keep, self.snap, self.cache):
            each.close()
        for each in self.devices:
            each.close()


def scene(make_dev: MakeDev, n_devices: int, swaps: str = "even", cfg: Any = None) -> Scene:
    devices = [make_dev("cuda", ordinal) for ordinal in range(n_devices)]
    cfg = tiny() if cfg is None else cfg
    if n_devices == 1:
        cache = Cache.new(devices[0], cfg, 16, policy=POLICY)
    else:
        cache = Cache.new_pp2(*devices, 3, cfg, 16, policy=POLICY)
    feed = Feed(cache)
    feed.step(3)
    snap = cache.snapshot(devices[0])
    feed.step(2)
    for il, state in enumerate(cache.recur):
        if state is not None and (swaps == "odd" or (swaps == "mixed" and il % 4 == 0)):
            state.swap()
    return Scene(devices, cache, snap, [])


CHANGES: dict[str, Callable[[Scene], Any]] = {
    "snapshot": lambda s: s.keep.append(s.cache.snapshot(s.devices[0])),
    "snapshot_into": lambda s: s.cache.snapshot_into(s.devices[0], s.snap),
    "rollback": lambda s: s.cache.rollback(s.devices[0], s.snap, 0),
    "rollback and accept": lambda s: s.cache.rollback(s.devices[0], s.snap, 2),
    "advance": lambda s: s.cache.advance(s.devices[0], 1),
    "sync_d": lambda s: s.cache.sync_d(s.devices[0]),
    "reset": lambda s: s.cache.reset(s.devices[0]),
    "clear_health": lambda s: s.cache.clear_health(),
}


def calls_of(standin: StandIn, change: Callable[[Scene], Any], s: Scene) -> list[str]:
    """The driver calls of a change, in order: each of them is made to fail in turn."""
    standin.clear_trace()
    change(s)
    return [call.name for call in standin.trace()]


def fails(standin: StandIn, nth: int, name: str, change: Callable[[], Any]) -> DriverError:
    """Runs `change` with its nth driver call failing; the error must name that call and its code."""
    standin.fail("*", nth, CODE)
    with pytest.raises(DriverError, match=name) as caught:
        change()
    assert standin.pending_failures() == 0
    standin.clear_failures()
    assert caught.value.call.startswith(f"{name}(")
    assert (caught.value.code, caught.value.name) == (CODE, "CUDA_ERROR_LAUNCH_FAILED")
    tally.add("fault points")
    return caught.value


@pytest.mark.parametrize("swaps", ["even", "odd", "mixed"])
@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_failed_change_has_changed_nothing_or_tainted_the_cache(
    make_dev: MakeDev, standin: StandIn, name: str, n_devices: int, swaps: str
) -> None:
    change = CHANGES[name]
    s = scene(make_dev, n_devices, swaps)
    calls = calls_of(standin, change, s)
    s.close()
    assert calls
    for nth, call in enumerate(calls, start=1):
        s = scene(make_dev, n_devices, swaps)
        before = image(s.cache)
        fails(standin, nth, call, lambda s=s: change(s))
        if s.cache.state is CacheState.TAINTED:
            assert nth > 1, "a change that did nothing taints nothing"
            check_tainted(s)
        else:
            assert image(s.cache) == before, (nth, call)
            if name == "snapshot_into":
                assert s.snap.invalid
                s.cache.snapshot_into(s.devices[0], s.snap)
            change(s)  # and again, this time it works
        s.close()
        assert standin.live_bytes() == 0


def check_tainted(s: Scene) -> None:
    """It refuses everything that would trust its bytes, and is whole again after a rollback that accepts nothing."""
    cache, e = s.cache, s.devices[0]
    row = put(cache.devices[-1], rows_of(0, 7, "k", 0, 1, 128))
    before = image(cache)
    for call in (
        lambda: cache.snapshot(e), lambda: cache.snapshot_into(e, s.snap), lambda: cache.advance(e), cache.digest,
        lambda: cache.truncate(e, 0), lambda: cache.sync_d(e), lambda: Feed(cache).append(7, 1),
        lambda: Feed(cache).conv(0, 1), lambda: ops.dequant_kv(cache.devices[-1], cache, 7, 0, 1, row, row),
    ):  # fmt: skip
        with pytest.raises(StateError, match="tainted"):
            call()
    assert image(cache) == before
    cache.report()
    if not s.snap.invalid and s.snap.generation == cache.generation:
        cache.rollback(e, s.snap, 0)
        assert (cache.state, cache.pos) == (CacheState.READY, 3)
        History.of(e).check(cache)
    cache.reset(e)
    Feed(cache).step(4)
    History.of(e).check(cache)


def test_a_tainted_cache_accepts_no_tokens(make_dev: MakeDev, standin: StandIn) -> None:
    s = scene(make_dev, 2, "odd")
    fails(standin, 2, "cuLaunchKernelEx", lambda: s.cache.rollback(s.devices[0], s.snap, 2))
    assert s.cache.state is CacheState.TAINTED
    with pytest.raises(Exception, match="tainted cache accepts none"):
        s.cache.rollback(s.devices[0], s.snap, 1)
    s.cache.rollback(s.devices[0], s.snap, 0)
    History.of(s.devices[0]).check(s.cache)
    s.close()


def test_the_error_of_a_tainted_cache_says_what_to_do(make_dev: MakeDev, standin: StandIn) -> None:
    s = scene(make_dev, 2, "odd")
    error = fails(standin, 2, "cuLaunchKernelEx", lambda: s.cache.rollback(s.devices[0], s.snap, 0))
    told = (str(error), *getattr(error, "__notes__", ()))
    assert any("tainted: reset" in text for text in told)
    s.close()


def test_a_truncate_that_fails_on_the_second_device_taints(make_dev: MakeDev, standin: StandIn) -> None:
    for nth, tainted in ((1, False), (2, True)):
        devices = [make_dev("cuda", ordinal) for ordinal in range(2)]
        cache = Cache.new_pp2(*devices, 1, attention_only(), 16, policy=POLICY)
        Feed(cache).step(4)
        before = image(cache)
        fails(standin, nth, "cuLaunchKernelEx", lambda cache=cache, e=devices[0]: cache.truncate(e, 2))
        assert (cache.state is CacheState.TAINTED) == tainted
        if not tainted:
            assert image(cache) == before
        cache.reset(devices[0])
        Feed(cache).step(2)
        cache.close()


# Birth


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
def test_a_failed_birth_leaves_no_byte_behind(make_dev: MakeDev, standin: StandIn, arena: bool) -> None:
    devices = [make_dev("cuda", ordinal, arena=arena) for ordinal in range(2)]

    def born() -> Cache:
        return Cache.new_pp2(*devices, 3, tiny(), 16, policy=POLICY)

    held = standin.live_bytes()
    standin.clear_trace()
    born().close()
    calls = [call.name for call in standin.trace() if "Free" not in call.name]
    assert len(calls) == (4 if arena else len(calls))
    for nth, call in enumerate(calls, start=1):
        fails(standin, nth, call, born)
        assert standin.live_bytes() == held
    born().close()


# Operations


@pytest.mark.parametrize("op", ["append_kv", "conv_update", "gdn_scan"])
def test_a_launch_that_fails_leaves_the_step_as_it_was(make_dev: MakeDev, standin: StandIn, op: str) -> None:
    e = make_dev("cuda")
    cache = Cache.new(e, tiny(), 16, policy=POLICY)
    feed = Feed(cache)
    feed.step(3)
    conv_out = feed.conv(1, 2) if op == "gdn_scan" else None
    run = {
        "append_kv": lambda: feed.append(3, 2), "conv_update": lambda: feed.conv(0, 2),
        "gdn_scan": lambda: feed.scan(1, conv_out, 2),
    }[op]  # fmt: skip
    before = image(cache)
    standin.fail("cuLaunchKernelEx", 2 if op == "gdn_scan" else 1, CODE)  # gdn_prep comes first
    with pytest.raises(DriverError, match=rf"cuLaunchKernelEx\(.*{op}"):
        run()
    assert image(cache) == before
    run()  # the same again
    twin = Cache.new(e, tiny(), 16, policy=POLICY)
    feed = Feed(twin)
    feed.step(3)
    if op == "append_kv":
        feed.append(3, 2)
    elif op == "conv_update":
        feed.conv(0, 2)
    else:
        feed.scan(1, feed.conv(1, 2), 2)
    assert sequence(cache) == sequence(twin)
    cache.close()
    twin.close()


def test_a_kernel_that_cannot_be_loaded_changes_nothing(make_dev: MakeDev, standin: StandIn) -> None:
    for name in ("cuLibraryLoadData", "cuLibraryGetKernel"):
        e = make_dev("cuda")
        cache = Cache.new(e, tiny(), 16, policy=POLICY)
        before = image(cache)
        standin.fail(name, 1, 200)
        with pytest.raises(DriverError, match=name):
            Feed(cache).append(3, 1)
        assert image(cache) == before
        Feed(cache).step(2)
        History.of(e).check(cache)
        cache.close()


def test_a_digest_that_cannot_read_changes_nothing(make_dev: MakeDev, standin: StandIn) -> None:
    s = scene(make_dev, 1)
    before, digest = image(s.cache), s.cache.digest()
    for name in ("cuMemcpyDtoHAsync", "cuStreamSynchronize"):
        standin.fail(name, 3, CODE)
        with pytest.raises(DriverError, match=name):
            s.cache.digest()
        assert image(s.cache) == before
    assert s.cache.digest() == digest
    s.close()


# Memory that runs out


@pytest.mark.not_through_c  # has its table from birth
def test_a_table_that_cannot_be_allocated_changes_nothing(make_dev: MakeDev, standin: StandIn) -> None:
    s = scene(make_dev, 1, "mixed")
    before = image(s.cache)
    standin.fail("cuMemAllocAsync", 1, 2)
    with pytest.raises(DriverOutOfMemory, match="cuMemAllocAsync"):
        s.cache.rollback(s.devices[0], s.snap, 0)
    assert image(s.cache) == before
    s.cache.rollback(s.devices[0], s.snap, 0)
    History.of(s.devices[0]).check(s.cache)
    s.close()


# The end


@pytest.mark.misuse  # one allocation cannot be freed
@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
def test_a_free_that_fails_is_reported_and_keeps_no_other_from_being_made(
    make_dev: MakeDev, standin: StandIn, arena: bool
) -> None:
    e = make_dev("cuda", arena=arena)
    held = standin.live_count()
    cache = Cache.new(e, tiny(), 16, policy=POLICY)
    standin.fail("cuMemFreeAsync", 1, CODE)
    with pytest.raises(DriverError, match="cuMemFreeAsync"):
        cache.close()
    assert cache.state is CacheState.CLOSED
    assert standin.live_count() == held + 1
    cache.close()


def test_sequences_survive_a_failure_in_the_middle_of_a_round(make_dev: MakeDev, standin: StandIn) -> None:
    """A driver that fails once per round, at another call each time: after each recovery the tokens are the same."""
    e = make_dev("cuda")
    cache = Cache.new(e, tiny(), 32, policy=POLICY)
    feed = Feed(cache)
    feed.step(4)
    snap = cache.snapshot(e)
    expected = sequence(cache)
    for nth in range(1, 40):
        standin.fail("*", nth, CODE)
        try:
            feed.step(3)
            cache.rollback(e, snap, 1)
            feed.step(1)
        except DriverError:
            pass
        standin.clear_failures()
        cache.rollback(e, snap, 0)
        assert sequence(cache) == expected
        History.of(e).check(cache)
    snap.close()
    cache.close()
