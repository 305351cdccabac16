"""Random programs against a model that knows every past state and foresees what is refused.

The model predicts for each call whether it is allowed. A call that is refused must leave every byte, scalar and
address as it was; a call that is allowed must succeed, and leave what plain decoding of the same tokens leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from caches import POLICY, addresses, image, put
from decoding import OPTIONS, WIDTH, Lane, Oracle, Player, hybrid, play
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheSnapshot, CacheState
from memra_driver.errors import MemraError
from memra_driver.round import Round

READY, UNSETTLED, PENDING = CacheState.READY, CacheState.UNSETTLED, CacheState.PENDING_REPLAY
CAPACITY = 24
LAYERS = 4
ROWS = st.integers(1, WIDTH + 1)
TOKENS = st.lists(st.integers(0, 1), min_size=WIDTH + 1, max_size=WIDTH + 1)


@dataclass
class Kept:
    """A snapshot, and what the model knows of it."""

    snap: CacheSnapshot
    tokens: list[int]
    generation: int
    good: bool = True


@dataclass
class Recording:
    """A captured step, or round, and the buffers that it reads."""

    lane: Lane
    graph: Any
    count: Any = field(default=None)

    def close(self) -> None:
        self.graph.close()
        self.lane.close()


class Programs(RuleBasedStateMachine):
    """`tokens` stand (with a replay pending: up to its end); `pos` is what the host believes."""

    def __init__(self, e: Any) -> None:
        super().__init__()
        self.e = e
        self.cache = Cache.new(e, hybrid(), CAPACITY, policy=POLICY, options=OPTIONS)
        self.player = Player(self.cache, Oracle(e))
        play(self.player, WIDTH, 0)  # room for attention, which a capture cannot make
        self.tokens: list[int] = self.player.tokens
        self.pos, self.state, self.generation = 0, READY, 0
        self.sure = 0  # while unsettled: where the cache stood when the host last knew
        self.step: list[int] = []  # the tokens of the open step
        self.ran = 0  # how many of its layers have run
        self.round: Round | None = None
        self.past_round: Round | None = None
        self.kept: list[Kept] = []
        self.parked: tuple[float, int] | None = None  # value, and the length that it belongs to
        self.park_value = 0.0
        self.one, self.wide = self.record(1), self.record(WIDTH)
        self.batch = CacheBatch([self.cache])
        self.batch_lane = Lane(self.batch, 1)
        self.where = addresses(self.cache)

    def teardown(self) -> None:
        for each in (self.one, self.wide, self.batch, self.batch_lane, *(kept.snap for kept in self.kept), self.player):
            each.close()

    # What the model says.

    @property
    def at_rest(self) -> bool:
        return not self.step and self.round is None

    @property
    def start(self) -> int:
        """Where the next row stands in truth."""
        return self.pos if self.state is PENDING else len(self.tokens)

    def attempt(self, allowed: bool, call: Callable[[], Any]) -> Any:
        """Runs `call` where it is allowed; else it must be refused and change nothing."""
        if allowed:
            return call()
        before = image(self.cache, *(kept.snap for kept in self.kept))
        with pytest.raises(MemraError):
            call()
        assert image(self.cache, *(kept.snap for kept in self.kept)) == before
        return None

    def drop_logits_above(self, length: int) -> None:
        if self.parked is not None and self.parked[1] > length:
            self.parked = None

    def moved(self, tokens: Sequence[int], most: int, *, unsettles: bool = False) -> None:
        """A step or round has ended: `tokens` stand now, of which the host knows that they are at most `most`."""
        before = self.pos
        self.tokens += tokens
        self.pos += most
        if self.state is UNSETTLED and most:
            self.drop_logits_above(self.sure)
        elif unsettles:
            self.state, self.sure = UNSETTLED, before
        self.drop_logits_above(self.pos)

    def over(self) -> None:
        self.step, self.ran = [], 0
        self.past_round, self.round = self.round or self.past_round, None

    # Steps.

    @rule(rows=ROWS, tokens=TOKENS, layers=st.sampled_from([4, 4, 4, 1, 2, 3]))
    def run(self, rows: int, tokens: list[int], layers: int) -> None:
        tokens = tokens[:rows]
        if self.state is PENDING:
            tokens = (self.tokens[self.pos :] + tokens)[:rows]
        allowed = (
            not self.step
            and (self.state is not UNSETTLED or self.round is not None)
            and (self.round is None or rows <= self.round.width)
            and (self.state is not PENDING or rows <= len(self.tokens) - self.pos)
            and self.pos + rows <= CAPACITY
        )
        lane = self.player.lane(rows).fill((self.start, tokens))
        self.attempt(allowed, lambda: lane.run(self.cache, range(layers)))
        if allowed:
            self.step, self.ran = tokens, layers
            if layers == LAYERS:
                self.player.check_results(lane, self.tokens[: self.start], tokens)

    @rule()
    def run_the_rest(self) -> None:
        if self.step and self.ran < LAYERS:
            lane = self.player.lane(len(self.step)).fill((self.start, self.step))
            lane.run(self.cache, range(self.ran, LAYERS))
            self.ran = LAYERS

    @rule(rows=ROWS, tokens=TOKENS)
    def whole_step(self, rows: int, tokens: list[int]) -> None:
        if self.state is PENDING:
            rows = min(rows, len(self.tokens) - self.pos)
        self.run(rows=rows, tokens=tokens, layers=LAYERS)
        self.run_the_rest()
        self.advance(off=0)

    @rule(off=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def advance(self, off: int) -> None:
        rows = len(self.step)
        if self.step and self.ran < LAYERS and off == 0:
            return  # legal, but no plain decoding leaves half a step
        n = rows + off if rows else min(off, 0)
        allowed = self.state is not UNSETTLED and self.round is None and n == rows
        self.attempt(allowed, lambda: self.cache.advance(self.e, n))
        if allowed and rows:
            if self.state is PENDING:
                self.pos += rows
                self.state = READY if self.pos == len(self.tokens) else PENDING
            else:
                self.moved(self.step, rows)
            self.over()

    @rule(token=st.integers(0, 1))
    def step_in_a_batch(self, token: int) -> None:
        allowed = self.at_rest and self.state is READY and self.pos < CAPACITY
        self.batch_lane.fill((self.start, [token]))
        self.attempt(allowed, lambda: self.batch_lane.run(self.batch))
        if allowed:
            self.batch.advance(self.e)
            self.moved([token], 1)

    # Rounds.

    @rule(width=ROWS)
    def begin_a_round(self, width: int) -> None:
        allowed = width <= WIDTH and self.at_rest and self.state is not PENDING
        made = self.attempt(allowed, lambda: Round(self.cache, self.e, width=width).__enter__())
        self.round = made or self.round

    @rule(accept=st.integers(-1, WIDTH + 1), by=st.sampled_from(["host", "device"]))
    def commit(self, accept: int, by: str) -> None:
        r = self.round or self.past_round
        if r is None or (self.step and self.ran < LAYERS):
            return
        rows = len(self.step)
        possible = self.round is not None and rows > 0
        stands = self.step[: accept if 0 <= accept <= rows else 0]
        if by == "host":
            allowed = possible and 0 <= accept <= rows
            self.attempt(allowed, lambda: r.commit(accept))
            if allowed:
                self.moved(stands, len(stands))
        else:  # the host does not see that a count is wrong
            count = self.e.htod_i32([accept])
            allowed = possible
            self.attempt(allowed, lambda: r.commit_from_device(count))
            if allowed:
                self.moved(stands, rows, unsettles=True)
        if allowed:
            self.over()

    @rule(
        rows=st.integers(1, WIDTH), tokens=TOKENS, accept=st.integers(-1, WIDTH + 1),
        by=st.sampled_from(["host", "device"]), park=st.booleans(),
    )  # fmt: skip
    def whole_round(self, rows: int, tokens: list[int], accept: int, by: str, park: bool) -> None:
        if self.round is None and self.step:
            self.run_the_rest()
            self.advance(off=0)
        if self.state is not PENDING and self.at_rest:
            self.begin_a_round(width=WIDTH)
        self.run(rows=rows, tokens=tokens, layers=LAYERS)
        self.run_the_rest()
        if park:
            self.park()
        self.commit(accept=accept, by=by)

    @rule()
    def leave_the_round(self) -> None:
        if self.round is not None:
            self.round.__exit__(None, None, None)
            self.moved([], 0)
            self.over()

    @rule()
    def settle(self) -> None:
        allowed = self.round is None and self.state is not PENDING
        self.attempt(allowed, lambda: self.cache.settle(self.e))
        if allowed and self.state is UNSETTLED:
            self.state, self.pos = READY, len(self.tokens)
            self.drop_logits_above(self.pos)

    # Snapshots.

    @rule()
    def snapshot(self) -> None:
        allowed = self.at_rest and self.state is READY
        made = self.attempt(allowed, lambda: self.cache.snapshot(self.e))
        if made is not None:
            self.kept.append(Kept(made, list(self.tokens), self.generation))
            if len(self.kept) > 2:
                self.kept.pop(0).snap.close()

    @rule(which=st.integers(0, 1))
    def snapshot_into(self, which: int) -> None:
        if which < len(self.kept):
            allowed = self.at_rest and self.state is READY
            kept = self.kept[which]
            self.attempt(allowed, lambda: self.cache.snapshot_into(self.e, kept.snap))
            if allowed:
                kept.tokens, kept.generation, kept.good = list(self.tokens), self.generation, True

    @rule(which=st.integers(0, 1), accept=st.sampled_from([0, 0, 1, 2, 3, 5, -1]))
    def rollback(self, which: int, accept: int) -> None:
        if which >= len(self.kept):
            return
        kept = self.kept[which]
        history = list(self.tokens)
        if self.state is READY and self.round is None:
            history += self.step
        end = len(kept.tokens) + accept
        allowed = (
            self.state is not UNSETTLED
            and kept.good
            and kept.generation == self.generation
            and len(kept.tokens) <= end <= len(history)
        )
        self.attempt(allowed, lambda: self.cache.rollback(self.e, kept.snap, accept))
        if allowed:
            assert history[: len(kept.tokens)] == kept.tokens
            self.tokens[:] = history[:end]
            self.pos, self.state = len(kept.tokens), PENDING if accept else READY
            for each in self.kept:
                each.good &= len(each.tokens) <= end
            self.drop_logits_above(end)
            self.over()

    @rule(rows=ROWS, tokens=TOKENS, accept=st.integers(0, WIDTH), open_step=st.booleans())
    def speculate(self, rows: int, tokens: list[int], accept: int, open_step: bool) -> None:
        """As a decoder does without rounds; the snapshot may be an older one."""
        if not self.kept:
            self.snapshot()
        self.run(rows=rows, tokens=tokens, layers=LAYERS)
        if not open_step:
            self.run_the_rest()
            self.advance(off=0)
        self.rollback(which=0, accept=accept)

    @rule(sure=st.integers(0, 4))
    def reset(self, sure: int) -> None:
        if sure == 0 or self.pos > CAPACITY - 2:
            self.cache.reset(self.e)
            self.tokens.clear()
            self.pos, self.state, self.parked = 0, READY, None
            self.generation += 1
            self.over()

    # Recordings.

    def record(self, rows: int) -> Recording:
        lane, count = Lane(self.cache, rows), self.e.htod_i32([0])
        try:
            with self.e.capture() as graph:
                if rows == 1:
                    lane.run(self.cache)
                    self.cache.advance(self.e)
                else:
                    with Round(self.cache, self.e, width=rows) as r:
                        lane.run(self.cache)
                        r.commit_from_device(count)
        except MemraError:
            lane.close()
            raise
        return Recording(lane, graph, count)

    def can_replay(self, rows: int) -> bool:
        return self.at_rest and self.state is not PENDING and self.pos + rows <= CAPACITY

    @rule(wide=st.booleans())
    def record_again(self, wide: bool) -> None:
        rows = WIDTH if wide else 1
        made = self.attempt(self.can_replay(rows), lambda: self.record(rows))
        if made is not None:
            (self.wide if wide else self.one).close()
            if wide:
                self.wide = made
            else:
                self.one = made

    @rule(token=st.integers(0, 1))
    def launch_a_step(self, token: int) -> None:
        allowed = self.can_replay(1)
        self.one.lane.fill((self.start, [token]))
        self.attempt(allowed, self.one.graph.launch)
        if allowed:
            self.player.check_results(self.one.lane, self.tokens, [token])
            self.moved([token], 1)

    @rule(tokens=TOKENS, accept=st.integers(-1, WIDTH + 1))
    def launch_a_round(self, tokens: list[int], accept: int) -> None:
        tokens = tokens[:WIDTH]
        allowed = self.can_replay(WIDTH)
        self.wide.lane.fill((self.start, tokens))
        self.wide.count.copy_from(np.array([accept], np.int32))
        self.attempt(allowed, self.wide.graph.launch)
        if allowed:
            self.player.check_results(self.wide.lane, self.tokens, tokens)
            self.moved(tokens[: accept if 0 <= accept <= WIDTH else 0], WIDTH, unsettles=True)

    # Beside the sequence.

    @rule()
    def park(self) -> None:
        self.park_value += 1
        row = put(self.e, np.full(16, self.park_value, np.float32))
        allowed = self.state is READY
        self.attempt(allowed, lambda: self.cache.park_logits(self.e, row))
        if allowed:
            self.parked = self.park_value, self.pos + len(self.step)

    @rule()
    def sync_d(self) -> None:
        self.attempt(self.state is not UNSETTLED, lambda: self.cache.sync_d(self.e))
        self.attempt(False, lambda: self.cache.truncate(self.e, 0))  # recurrent layers cannot

    # What holds after every call.

    @invariant()
    def the_cache_is_what_the_model_says(self) -> None:
        cache = self.cache
        assert (cache.state, cache.pos, cache.step_rows) == (self.state, self.pos, len(self.step))
        assert (cache.open_round, cache.generation) == (self.round, self.generation)
        assert cache.replay_to == (len(self.tokens) if self.state is PENDING else 0)
        assert addresses(cache) == self.where
        if self.state is UNSETTLED:
            with pytest.raises(MemraError):
                cache.digest()
            return
        kept = cache.take_logits(self.e)
        assert (None if kept is None else kept.to_numpy()[0]) == (None if self.parked is None else self.parked[0])
        if self.state is READY and self.at_rest:
            self.player.check()


def profile(examples: int, calls: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=calls, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip


def test_programs_leave_plain_decoding_and_refuse_what_the_model_foresees(
    dev: Any, request: pytest.FixtureRequest
) -> None:
    slow = hasattr(dev, "stream") and not request.config.getoption("--gpu")
    run_state_machine_as_test(lambda: Programs(dev), settings=profile(*((50, 30) if slow else (200, 40))))
