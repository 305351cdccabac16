"""A model of a cache that knows every past state and foresees what is refused.

An event makes one call, or a few in a row, after asking the model whether it is allowed. A call that is refused must
leave every byte, scalar and address as it was; a call that is allowed must succeed, and leave what plain decoding of
the same tokens leaves. program_steps.py and programs.py have the events.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from caches import addresses, beside, image
from decoding import WIDTH
from geometries import Geometry
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from recordings import Taps, warm

from memra_driver.cache import CacheSnapshot, CacheState
from memra_driver.errors import MemraError
from memra_driver.round import Round

READY, UNSETTLED, PENDING = CacheState.READY, CacheState.UNSETTLED, CacheState.PENDING_REPLAY
CAPACITY = 24
BOTH = (False, True)
ROWS = range(1, WIDTH + 2)
TOKENS = [list(tokens) for tokens in itertools.product((0, 1), repeat=WIDTH + 1)]
COUNTS = range(-1, WIDTH + 2)  # accepted tokens, two of them wrong


def event(likely: Callable[[Any], Any], weight: int = 1, **choices: Sequence[Any]) -> Callable[[Any], Any]:
    """A method that a program may call where the model finds it `likely` to be allowed, with one of each `choices`."""

    def mark(method: Any) -> Any:
        method.event = likely, weight, choices
        return method

    return mark


@dataclass
class Kept:
    """A snapshot, and what the model knows of it."""

    snap: CacheSnapshot
    tokens: list[int]
    generation: int
    good: bool = True


class Model(RuleBasedStateMachine):
    """`tokens` stand (with a replay pending: up to its end); `pos` is what the host believes."""

    def __init__(self, e: Any, geometry: Geometry) -> None:
        super().__init__()
        self.e, self.reads = e, geometry.reads
        self.player = geometry.player(e, CAPACITY)
        self.cache = self.player.cache
        self.layers = range(self.cache.cfg.n_layer)
        self.recurs = any(self.cache.recur)
        warm(self.player)
        self.tokens: list[int] = self.player.tokens
        self.pos, self.state, self.generation = 0, READY, 0
        self.sure = 0  # while unsettled: where the cache stood when the host last knew
        self.owners = [il for il, layer in enumerate(self.cache.kv) if layer is not None]
        self.replayed: dict[int, int] = {}  # with a replay pending: rows of K/V by layer
        self.step: list[int] = []  # the tokens of the open step
        self.ran = 0  # how many of its layers have run
        self.round: Round | None = None
        self.past_round: Round | None = None
        self.kept: list[Kept] = []
        self.parked: tuple[float, int] | None = None  # value, and the length that it belongs to
        self.parked_sure = False  # behind every count that the host does not know
        self.can_park = False  # in a capture, which allocates nothing: once something was parked
        self.taps = Taps()
        self.where = addresses(self.cache)
        self.regions = self.cache.regions()
        methods = inspect.getmembers(type(self), lambda member: hasattr(member, "event"))
        self.events = {name: method.event for name, method in methods}

    def teardown(self) -> None:
        for each in (*(kept.snap for kept in self.kept), self.player):
            each.close()

    @rule(number=st.integers(0, 2**24 - 1))
    def call(self, number: int) -> None:
        """The next call of the program; one of four may be any, also where it is likely to be refused."""
        chance = random.Random(number)
        some = chance.random() < 0.75
        weights = {name: weight for name, (likely, weight, _) in self.events.items() if not some or likely(self)}
        (name,) = chance.choices([*weights], [*weights.values()])
        arguments = {key: chance.choice(choices) for key, choices in self.events[name][2].items()}
        note(f"{name} {arguments}")
        getattr(self, name)(**arguments)

    # What the model says.

    @property
    def at_rest(self) -> bool:
        return not self.step and self.round is None

    @property
    def settled(self) -> bool:
        return self.at_rest and self.state is READY

    @property
    def steppable(self) -> bool:
        return self.state is not UNSETTLED or self.round is not None

    @property
    def start(self) -> int:
        """Where the next row stands in truth."""
        return self.pos if self.state is PENDING else len(self.tokens)

    def length(self, il: int) -> int:
        """Rows of K/V that layer il has, as the host believes."""
        stands = self.replayed[il] if self.state is PENDING else self.pos
        return max(stands, self.pos + len(self.step)) if il < self.ran else stands

    def seen(self) -> Any:
        """Everything that a refusal must leave as it is."""
        return image(self.cache, *(kept.snap for kept in self.kept)), beside(self.cache)

    def attempt(self, allowed: bool, call: Callable[[], Any], *outputs: Any) -> Any:
        """Runs `call` where it is allowed; else it must be refused and change nothing, nor write the outputs."""
        if allowed:
            return call()
        before = self.seen(), [each.to_numpy().tobytes() for each in outputs]
        with pytest.raises(MemraError):
            call()
        assert (self.seen(), [each.to_numpy().tobytes() for each in outputs]) == before
        return None

    # What it learns.

    def moved(self, tokens: Sequence[int], most: int, *, unsettles: bool = False, launched: bool = False) -> None:
        """A step or round has ended: `tokens` stand now, of which the host knows that they are at most `most`."""
        before = self.pos
        self.tokens += tokens
        self.pos += most
        if self.state is UNSETTLED and most:
            if unsettles or not launched or not self.parked_sure:
                self.drop_logits_above(self.sure)
        elif unsettles:
            self.state, self.sure = UNSETTLED, before
        self.drop_logits_above(self.pos)

    def over(self) -> None:
        """No step and no round is open any more."""
        self.step, self.ran = [], 0
        self.past_round, self.round = self.round or self.past_round, None

    def given_up(self, stands: int) -> None:
        """The rows from `stands` on are no longer true."""
        for each in self.kept:
            each.good &= len(each.tokens) <= stands
        self.drop_logits_above(stands)

    def drop_logits_above(self, length: int) -> None:
        if self.parked is not None and self.parked[1] > length:
            self.parked, self.parked_sure = None, False

    # What holds after every call.

    @invariant()
    def the_cache_is_what_the_model_says(self) -> None:
        cache = self.cache
        assert (cache.state, cache.pos, cache.step_rows) == (self.state, self.pos, len(self.step))
        assert (cache.open_round, cache.generation) == (self.round, self.generation)
        assert cache.replay_to == (len(self.tokens) if self.state is PENDING else 0)
        assert addresses(cache) == self.where
        before, self.regions = self.regions, cache.regions()
        assert [row for row in before if row not in self.regions] == []  # what was born stays where it is
        names = [name for name, *_ in self.regions]
        assert (names.count("logits"), names.count("taps")) == (self.can_park, self.taps.buffer)  # at first use only
        self.taps.check(cache)
        if self.state is UNSETTLED:
            with pytest.raises(MemraError):
                cache.digest()
            return
        kept = cache.take_logits(self.e)
        assert (None if kept is None else kept.to_numpy()[0]) == (None if self.parked is None else self.parked[0])
        if self.settled:
            self.player.check()
        elif self.at_rest:
            self.player.check_pending(self.replayed)
