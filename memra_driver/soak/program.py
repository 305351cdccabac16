"""One program of a soak: what a seed makes several caches of one device go through, on one thread or two.

A part of a program runs on a thread of its own, over device objects of its own. Its caches share a geometry and take
turns; some step together in a batch; caches are born and closed in between, and so is memory that nobody but the part
knows, which must hold its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from memra_driver.batch import CacheBatch
from memra_driver.errors import MemraError
from memra_driver.soak.calls import Program
from memra_driver.soak.geometry import MAX_ROWS, Geometry, drawn
from memra_driver.soak.lane import Lane
from memra_driver.soak.look import same_bytes
from memra_driver.soak.plain import Oracle

LARGE_CHANCE, PROMPT_CHANCE = 0.02, 0.1
PROMPTS = (61, 61, 130)  # tokens: close to the ends of tiles of keys
MOST_CACHES = 3  # of a part
MOST_STRANGERS = 4


@dataclass
class Tally:
    """What a part has done."""

    steps: int = 0
    compared: int = 0
    refused: int = 0
    caches: int = 0
    calls: Any = field(default_factory=hashlib.sha256)  # of every call and what stood behind it


class Stranger:
    """Memory that no cache has to do with: filled in one stream, copied in another, and looked at before it goes."""

    def __init__(self, random: Random, devices: Sequence[Any]) -> None:
        e, other = random.sample(devices, 2)
        self.bytes = np.frombuffer(random.randbytes(random.choice((4, 100, 256, 4096, 70_000))), np.uint8)
        self.slice = e.alloc_u8(self.bytes.size)
        self.slice.copy_from(self.bytes)
        if random.random() < 0.8:
            source = self.slice
            self.slice = other.alloc_u8(source.len)
            other.copy_into(self.slice, 0, source, source.len)
            source.close()

    def check(self) -> int:
        """It holds what was put there; returns how many bytes that are."""
        return same_bytes("memory that no cache has to do with", self.slice.to_numpy(), self.bytes)

    def close(self) -> None:
        self.slice.close()


class Part:
    """What one thread of a program does. `devices`: two objects of one GPU; caches live on the first.

    small: only models and lengths that a CPU is fast enough for.
    After it `tally` says what was done, `last` the call that was made last.
    """

    def __init__(self, seed: int, number: int, devices: Sequence[Any], *, small: bool) -> None:
        random = self.random = Random(f"{seed}/{number}")
        self.devices, self.e = devices, devices[0]
        width = "small" if small else "large" if random.random() < LARGE_CHANCE else "usual"
        self.geometry: Geometry = drawn(random, width)
        self.prompt = random.choice(PROMPTS) if width == "usual" and random.random() < PROMPT_CHANCE else 0
        self.capacity = self.prompt + random.randint(8 if small else 12, 16 if small else 28)
        self.length = random.randint(20, 60)
        self.salt = random.getrandbits(20) << 1
        self.tally, self.last = Tally(), "its birth"
        self.programs: list[Program] = []
        self.strangers: list[Stranger] = []
        self.oracle: Oracle | None = None

    def __str__(self) -> str:
        prompt = f", behind a prompt of {self.prompt}" if self.prompt else ""
        return f"{self.geometry}, {self.capacity} tokens{prompt}"

    def run(self, stopped: Callable[[], bool]) -> None:
        """Runs the part, or as far as nobody has stopped it; frees all that it made, whatever happens."""
        try:
            self._run(stopped)
        except BaseException:
            with suppress(MemraError):  # what came first is the news
                self._close()
            raise
        self._close()

    def _run(self, stopped: Callable[[], bool]) -> None:
        self.oracle = self.geometry.oracle(self.e, self.capacity, self.salt)
        self._be_born()
        for _ in range(self.length):
            if stopped():
                return
            self._step()
        while self.programs:
            self._end(0)
        while self.strangers:
            self._forget(0)

    def _step(self) -> None:
        chosen = self.random.random()
        if chosen < 0.1:
            self._a_stranger()
        elif chosen < 0.14 and len(self.programs) < MOST_CACHES:
            self._be_born()
        elif chosen < 0.15 and len(self.programs) > 1:
            self._end(self.random.randrange(len(self.programs)))
        elif chosen < 0.2 and len(self.programs) > 1:
            self._batch()
        else:
            which = self.random.randrange(len(self.programs))
            self._call(which, self.random.getrandbits(24))

    def _note(self, what: str) -> None:
        self.last = what
        self.tally.steps += 1
        self.tally.calls.update(what.encode())

    # One cache.

    def _be_born(self) -> None:
        self._note(f"cache {len(self.programs)} is born")
        assert self.oracle is not None
        made = Program(self.geometry.player(self.e, self.capacity, self.oracle))
        self.programs.append(made)
        self.tally.caches += 1
        for start in range(0, self.prompt, MAX_ROWS):
            rows = min(MAX_ROWS, self.prompt - start)
            made.whole_step(rows=rows, tokens=[0] * rows)
        self._check(made)

    def _call(self, which: int, number: int) -> None:
        program = self.programs[which]
        self.last = f"cache {which}: a call"
        try:
            program.call(number)
        finally:
            self._note(f"cache {which}: {program.called}")
        self._check(program)

    def _check(self, program: Program) -> None:
        program.check()
        self.tally.calls.update(repr((program.pos, program.state.name, program.tokens)).encode())

    def _end(self, which: int) -> None:
        self._note(f"cache {which} is closed")
        program = self.programs.pop(which)
        try:
            program.look_at_health(clear=False)
        finally:
            self.tally.refused += program.refused
            program.close()

    # Several.

    def _batch(self) -> None:
        """Some caches step together; one that may not makes the batch refuse."""
        random, programs = self.random, self.programs
        chosen = random.sample(programs, random.randint(2, len(programs)))
        rows = random.choice((1, 1, 2, 5))
        tokens = [[random.randrange(2) for _ in range(rows)] for _ in chosen]
        self._note(f"a batch of {[programs.index(each) for each in chosen]}, tokens {tokens}")
        if all(each.settled and each.pos + rows <= each.capacity for each in chosen):
            self._step_together(chosen, tokens)
        else:
            before = [each.seen() for each in chosen]
            chosen[0].attempt(False, lambda: self._step_together(chosen, tokens))
            for each, seen in zip(chosen, before, strict=True):
                for was, now in zip(seen, each.seen(), strict=True):
                    each.unchanged("a batch that was refused", was, now)
        for each in chosen:
            self._check(each)

    def _step_together(self, programs: Sequence[Program], tokens: Sequence[Sequence[int]]) -> None:
        with CacheBatch([each.cache for each in programs]) as batch, ExitStack() as stack:
            lane = Lane(batch, len(tokens[0]), salt=programs[0].player.oracle.salt)
            stack.callback(lane.close)
            lane.fill(*((each.start, mine) for each, mine in zip(programs, tokens, strict=True)))
            lane.run(batch)
            batch.advance(self.e, lane.rows)
            for b, (each, mine) in enumerate(zip(programs, tokens, strict=True)):
                each.player.check_results(lane, each.tokens, mine, b)
                each.moved(mine, lane.rows)

    # What no cache has to do with.

    def _a_stranger(self) -> None:
        if len(self.strangers) < MOST_STRANGERS and self.random.random() < 0.6:
            self._note("other memory is made")
            self.strangers.append(Stranger(self.random, self.devices))
        elif self.strangers:
            self._forget(self.random.randrange(len(self.strangers)))

    def _forget(self, which: int) -> None:
        self._note("other memory is freed")
        stranger = self.strangers.pop(which)
        try:
            self.tally.compared += stranger.check()
        finally:
            stranger.close()

    def _close(self) -> None:
        """Frees what is left, whatever fails."""
        with ExitStack() as stack:
            for stranger in self.strangers:
                stack.callback(stranger.close)
            for program in self.programs:
                self.tally.refused += program.refused
                stack.callback(program.close)
            if self.oracle is not None:
                self.tally.compared += self.oracle.compared
                stack.callback(self.oracle.close)
        self.programs, self.strangers, self.oracle = [], [], None
