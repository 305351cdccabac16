"""Python's calls and the C library's on one cache, in any order: the bytes and clocks of plain decoding.

Each event of a program is done by either side, chosen at random, and so is each operation inside a step; snapshots,
rounds, graphs and parked logits of one side are used by the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caches import scalars
from decoding import MAX_CTX, TRUE, WIDTH, Player, draft, player_on

from memra_driver import capi, ops
from memra_driver.cache import CacheState
from memra_driver.errors import MemraError, StateError
from memra_driver.round import Round


@pytest.fixture
def player(cuda: Any) -> Any:
    player = player_on(cuda)
    lane = player.lane(WIDTH).fill((0, draft(WIDTH, WIDTH)))
    for calls in (ops, capi.ops):  # a capture allocates nothing: each side makes room for its partial sums now
        lane.run(player.cache, calls=calls)
        player.cache.reset(player.e)
    yield player
    player.close()


class Mixed:
    """A player whose calls come from either side."""

    def __init__(self, player: Player, rng: np.random.Generator) -> None:
        self.player, self.rng, self.cache, self.e = player, rng, player.cache, player.e
        self.snap: Any = None
        self.kept: list[int] = []
        self.graph: Any = None
        self.parked: int | None = None  # the length that the logits belong to

    def c(self) -> bool:
        return bool(self.rng.integers(2))

    def run(self, tokens: list[int]) -> Any:
        """The operations of a step, layer by layer by either side."""
        lane = self.player.lane(len(tokens)).fill((self.player.start, tokens))
        for il in lane.kinds:
            lane.run(self.cache, [il], calls=capi.ops if self.c() else ops)
        return lane

    def step(self) -> None:
        player, start = self.player, self.player.start
        left = player.cache.replay_to - start if player.cache.state is CacheState.PENDING_REPLAY else MAX_CTX - start
        rows = int(self.rng.integers(1, min(left, 4) + 1)) if left else 0
        replayed = player.tokens[start : start + rows]
        tokens = replayed or draft(rows, rows)
        if not rows:
            return
        lane = self.run(tokens)
        if self.c():
            capi.calls.advance(self.cache, rows)
        else:
            self.cache.advance(self.e, rows)
        if not replayed:
            player.tokens += tokens
        player.check_results(lane, player.tokens[:start], tokens)

    def round(self) -> None:
        rows = int(self.rng.integers(1, WIDTH + 1))
        if self.cache.state is CacheState.PENDING_REPLAY or len(self.player.tokens) + rows > MAX_CTX:
            return
        accept = int(self.rng.integers(0, rows + 1))
        tokens = draft(rows, accept)
        if self.c():
            capi.calls.round_begin(self.cache, WIDTH)
        else:
            Round(self.cache, self.e, width=WIDTH).__enter__()
        assert self.cache.open_round is not None
        lane = self.run(tokens)
        how = int(self.rng.integers(3))
        opened = self.cache.open_round
        if how == 2:
            count = self.e.htod_i32([accept])
            if self.c():
                capi.calls.round_commit_from_device(self.cache, count)
            else:
                opened.commit_from_device(count)
            if self.c():
                capi.calls.settle(self.cache)
            else:
                self.cache.settle(self.e)
        elif how:
            capi.calls.round_commit(self.cache, accept)
        else:
            opened.commit(accept)
        assert self.cache.open_round is None
        self.player.check_results(lane, self.player.tokens, tokens)
        self.player.tokens += tokens[:accept]

    def keep(self) -> None:
        if self.cache.state is CacheState.PENDING_REPLAY:
            return
        if self.snap is None:
            self.snap = capi.calls.snapshot(self.cache) if self.c() else self.cache.snapshot(self.e)
        elif self.c() or not hasattr(self.snap, "kv_len"):
            capi.calls.snapshot_into(self.cache, self.snap)
        else:
            self.cache.snapshot_into(self.e, self.snap)
        self.kept = list(self.player.tokens)

    def back(self) -> None:
        if self.snap is None:
            return
        c = self.snap.as_c().contents
        usable = not c.invalid and c.generation == self.cache.generation
        assert usable == (c.generation == self.cache.generation and self.player.tokens[: len(self.kept)] == self.kept)
        stand = len(self.player.tokens) - len(self.kept)
        accept = int(self.rng.integers(0, stand + 1)) if usable else 0
        try:
            if self.c() or not hasattr(self.snap, "kv_len"):
                capi.calls.rollback(self.cache, self.snap, accept)
            else:
                self.cache.rollback(self.e, self.snap, accept)
        except MemraError:
            assert not usable
            return
        assert usable
        self.player.tokens = self.player.tokens[: len(self.kept) + accept]

    def reset(self) -> None:
        if self.c():
            capi.calls.reset(self.cache)
        else:
            self.cache.reset(self.e)
        self.player.tokens, self.parked = [], None

    def park(self) -> None:
        if self.cache.state is CacheState.PENDING_REPLAY:
            return
        n = len(self.player.tokens)
        row = self.e.uninit(16)
        row.copy_from(np.full(16, n, np.float32))
        if self.c():
            capi.calls.park_logits(self.cache, row)
        else:
            self.cache.park_logits(self.e, row)
        self.parked = n

    def launch(self) -> None:
        """A step that one side records and either side's cache has moved since."""
        player = self.player
        if self.cache.state is CacheState.PENDING_REPLAY or len(player.tokens) + 3 > MAX_CTX:
            return
        if self.graph is None:
            lane = player.lane(1)
            lane.fill((player.start, [TRUE]))
            if self.c():
                with capi.calls.capture(self.e) as self.graph:
                    lane.run(self.cache, calls=capi.ops)
                    capi.calls.advance(self.cache, 1)
            else:
                with self.e.capture() as self.graph:
                    lane.run(self.cache)
                    self.cache.advance(self.e)
        for _ in range(int(self.rng.integers(1, 3))):
            player.lane(1).fill((player.start, [TRUE]))
            self.graph.launch()
            player.tokens.append(TRUE)

    def look(self) -> None:
        cache, n = self.cache, len(self.player.tokens)
        if self.parked is not None and self.parked > n:
            self.parked = None
        kept, address = cache.take_logits(self.e), capi.calls.take_logits(cache)
        assert (None if kept is None else kept.ptr) == address
        assert self.parked is None or (kept is not None and kept.to_numpy()[0] == self.parked)
        assert cache.digest() == capi.calls.digest(cache)
        assert not cache.health()
        assert not capi.calls.health(cache)
        if cache.state is CacheState.READY:
            self.player.check()

    def close(self) -> None:
        for each in (self.graph, self.snap):
            if each is not None:
                each.close()


EVENTS = ("step", "step", "round", "round", "keep", "back", "reset", "park", "launch", "launch")


@pytest.mark.parametrize("program", range(24))
def test_calls_of_both_sides_in_any_order_are_plain_decoding(
    player: Player, rng: np.random.Generator, program: int
) -> None:
    mixed = Mixed(player, rng)
    try:
        for _ in range(16):
            name = str(rng.choice(EVENTS, p=[0.15, 0.15, 0.15, 0.1, 0.12, 0.13, 0.03, 0.07, 0.05, 0.05]))
            print(name, len(player.tokens), player.cache.state.name)
            getattr(mixed, name)()
            mixed.look()
    finally:
        mixed.close()


def test_what_one_side_records_the_other_may_not_step_in(player: Player) -> None:
    cache, e, lane = player.cache, player.e, player.lane(1)
    player.step(TRUE)
    with e.capture() as graph:
        lane.run(cache)
        before = scalars(cache)
        for call in (
            lambda: lane.run(cache, [0], calls=capi.ops), lambda: capi.calls.advance(cache, 1),
            lambda: capi.calls.reset(cache), lambda: capi.calls.round_begin(cache, 2),
            lambda: capi.calls.prepare_replay(cache),
        ):  # fmt: skip
            with pytest.raises(StateError, match="Python records this cache"):
                call()
        assert scalars(cache) == before
        cache.advance(e)
    with capi.calls.capture(e) as other:
        lane.run(cache, calls=capi.ops)
        before = scalars(cache)
        for call in (
            lambda: lane.run(cache, [0]), lambda: cache.advance(e, 1), lambda: cache.reset(e),
            lambda: Round(cache, e, width=2).__enter__(), lambda: cache.prepare_replay(e),
        ):  # fmt: skip
            with pytest.raises(StateError, match="the C library records this cache"):
                call()
        assert scalars(cache) == before
        capi.calls.advance(cache, 1)
    for each in (graph, other, other, graph):
        lane.fill((player.start, [TRUE]))
        each.launch()
        player.tokens.append(TRUE)
        player.check()
    graph.close()
    other.close()
