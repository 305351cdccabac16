"""A model of a cache that knows every past state and foresees what is refused.

An event makes one call, or a few in a row, after asking the model whether it is allowed. A call that is refused must
leave every byte, scalar and address as it was; a call that is allowed must succeed, and leave what plain decoding of
the same tokens leaves. soak/steps.py and soak/calls.py have the events.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memra_driver.cache import CacheSnapshot, CacheState
from memra_driver.errors import DriverError, MemraError
from memra_driver.health import Fault
from memra_driver.round import Round
from memra_driver.soak.look import Difference, addresses, beside, first_change, image, same
from memra_driver.soak.player import WIDTH, Player, Taps

READY, UNSETTLED, PENDING = CacheState.READY, CacheState.UNSETTLED, CacheState.PENDING_REPLAY
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


@functools.cache
def events_of(kind: Any) -> dict[str, Any]:
    """By name: whether it is likely to be allowed, its weight, the choices of its arguments."""
    methods = inspect.getmembers(kind, lambda member: hasattr(member, "event"))
    return {name: method.event for name, method in methods}


@dataclass
class Kept:
    """A snapshot, and what the model knows of it."""

    snap: CacheSnapshot
    tokens: list[int]
    generation: int
    good: bool = True


class Model:
    """`tokens` stand (with a replay pending: up to its end); `pos` is what the host believes."""

    def __init__(self, player: Player) -> None:
        self.player, self.e, self.cache = player, player.e, player.cache
        self.layers = range(self.cache.cfg.n_layer)
        self.capacity = self.cache.max_ctx
        self.recurs = any(self.cache.recur)
        player.warm()
        self.tokens: list[int] = player.tokens
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
        self.taps = Taps(player.oracle.salt)
        self.faults: set[Fault] = set()  # what the error record tells of
        self.refused = 0  # calls so far
        self.where = addresses(self.cache)
        self.regions = self.cache.regions()

    def close(self) -> None:
        """Frees everything."""
        for kept in self.kept:
            kept.snap.close()
        self.player.close()

    def call(self, number: int) -> str:
        """Makes the next call of the program, and tells which; one of four may be any, also where it is likely to be
        refused.
        """
        chance = random.Random(number)
        some = chance.random() < 0.75
        kind: Any = type(self)
        events = events_of(kind)
        weights = {name: weight for name, (likely, weight, _) in events.items() if not some or likely(self)}
        (name,) = chance.choices([*weights], [*weights.values()])
        arguments = {key: chance.choice(choices) for key, choices in events[name][2].items()}
        self.called = f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"
        getattr(self, name)(**arguments)
        return self.called

    called = "its birth"  # the last call

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
        self.refused += 1
        before, written = self.seen(), [each.to_numpy().tobytes() for each in outputs]
        try:
            call()
        except DriverError:
            raise
        except MemraError:
            pass
        else:
            raise Difference("it was not refused")
        for was, now in zip(before, self.seen(), strict=True):
            self.unchanged("a refusal", was, now)
        same("outputs of what was refused", [each.to_numpy().tobytes() for each in outputs] == written, True)
        return None

    @staticmethod
    def unchanged(what: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Raises Difference with what `what` has changed."""
        changed = first_change(before, after)
        if changed:
            raise Difference(f"{what} changed {changed}")

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

    def check(self) -> None:
        """The cache is what the model says. Waits."""
        cache = self.cache
        clock = cache.state, cache.pos, cache.step_rows
        same("state, pos and step_rows", clock, (self.state, self.pos, len(self.step)))
        same("round and generation", (cache.open_round, cache.generation), (self.round, self.generation))
        same("replay_to", cache.replay_to, len(self.tokens) if self.state is PENDING else 0)
        self.unchanged("addresses:", self.where, addresses(cache))
        before, self.regions = self.regions, cache.regions()
        same("buffers that are gone", [row for row in before if row not in self.regions], [])
        names = [name for name, *_ in self.regions]
        found = names.count("logits"), names.count("taps")
        same("buffers of logits and taps", found, (self.can_park, self.taps.buffer))  # at first use only
        self.taps.check(cache)
        kept = [each for each in self.kept if each.generation == self.generation]
        same("snapshots that are good", [not each.snap.invalid for each in kept], [each.good for each in kept])
        if self.state is UNSETTLED:
            self.check_digest_is_refused()
            return
        row = cache.take_logits(self.player.last)
        parked = None if row is None else {*row.to_numpy().tolist()}
        same("parked logits", parked, None if self.parked is None else {self.parked[0]})
        if self.settled:
            self.player.check()
        elif self.at_rest:
            self.player.check_pending(self.replayed)

    def check_digest_is_refused(self) -> None:
        """Refused while the host does not know the lengths."""
        try:
            self.cache.digest()
        except DriverError:
            raise
        except MemraError:
            return
        raise Difference("digest was not refused while the cache is unsettled")
