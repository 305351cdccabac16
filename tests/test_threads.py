"""Caches on threads of their own, each with its own device object, are the caches of one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from caches import POLICY, Feed, History, tiny

from memra_driver.cache import Cache, CacheState

MakeDev = Callable[..., Any]
ROUNDS = 4


def session(cache: Cache, seed: int) -> list[str]:
    """Rounds of verify, rollback and replay; the digest after each."""
    e, feed = cache.devices[0], Feed(cache, seed)
    digests = []
    with cache.snapshot(e) as snap:
        for number in range(ROUNDS):
            cache.snapshot_into(e, snap)
            feed.step(4)
            cache.rollback(e, snap, accept := (seed + number) % 5)
            if accept:
                feed.step(accept)
            digests.append(cache.digest())
    assert cache.state is CacheState.READY
    return digests


def born_and_run(e: Any, seed: int) -> list[str]:
    with Cache.new(e, tiny(), 32, policy=POLICY) as cache:
        return session(cache, seed)


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs each job on a thread of its own, all started at one barrier; returns their results, raises their errors."""
    barrier, results, errors = threading.Barrier(len(jobs)), [None] * len(jobs), []

    def run(index: int) -> None:
        try:
            barrier.wait(30)
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("kinds", [("host", "host"), ("cuda", "cuda"), ("host", "cuda"), ("cuda",) * 4])
def test_caches_on_their_own_threads_give_the_digests_of_one_thread(make_dev: MakeDev, kinds: Sequence[str]) -> None:
    alone = [born_and_run(make_dev(kind), seed) for seed, kind in enumerate(kinds)]
    devices = [make_dev(kind) for kind in kinds]
    jobs = [lambda e=e, seed=seed: born_and_run(e, seed) for seed, e in enumerate(devices)]
    assert together(jobs) == alone


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_cache_may_be_handed_from_one_thread_to_the_next(make_dev: MakeDev, kind: str) -> None:
    e = make_dev(kind)
    cache = together([lambda: Cache.new(e, tiny(), 32, policy=POLICY)])[0]
    feed = Feed(cache)
    for rows in (3, 1, 4):
        together([lambda rows=rows: feed.step(rows)])
    History.of(e).check(cache)
    together([cache.close])


@pytest.mark.standin
def test_two_gpus_on_two_threads_do_not_mix_their_contexts(make_dev: MakeDev) -> None:
    alone = [born_and_run(make_dev("cuda", 0), seed) for seed in range(2)]
    devices = [make_dev("cuda", ordinal) for ordinal in range(2)]
    jobs = [lambda e=e, seed=seed: born_and_run(e, seed) for seed, e in enumerate(devices)]
    assert together(jobs) == alone


def test_caches_of_one_thread_take_turns(make_dev: MakeDev) -> None:
    e, other = make_dev("host"), make_dev("cuda")
    with Cache.new(e, tiny(), 32, policy=POLICY) as one, Cache.new(other, tiny(), 32, policy=POLICY) as two:
        feeds = Feed(one), Feed(two)
        for rows in (2, 3, 1):
            for feed in feeds:
                feed.step(rows)
        History.of(e).check(one)
        History.of(other).check(two)


def test_two_caches_of_one_device_do_not_touch_each_other(dev: Any) -> None:
    with Cache.new(dev, tiny(), 32, policy=POLICY) as one, Cache.new(dev, tiny(), 32, policy=POLICY) as two:
        feeds = Feed(one), Feed(two, seed=8)
        snap = one.snapshot(dev)
        for rows in (2, 3, 1):
            for feed in feeds:
                feed.step(rows)
        History.of(dev).check(one)
        two.reset(dev)
        History.of(dev).check(one)
        one.rollback(dev, snap, 0)
        assert (one.pos, two.pos, two.generation) == (0, 0, 1)
        snap.close()
