"""The main job of a cache, on inputs that need no model: speculative decoding, checked bit for bit.

A `Session` drives one sequence, or several that step together in a `CacheBatch`. Each round verifies draft + 1 rows
at once and draws how many of them stand. With the method "rollback" it snapshots before, rolls back and replays those
that stand; with "round" a `Round` commits them. Each sequence has a twin that decodes only the tokens that stand,
one at a time. After every round both must have the same digest, and the rows that stand must have the same
bytes in everything that the operations returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from memra_driver.batch import CacheBatch
from memra_driver.boundary import Boundary
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig
from memra_driver.errors import CapacityError, ConfigError, MemraError, UnsupportedError
from memra_driver.formats import FormatPolicy
from memra_driver.place import united
from memra_driver.plan import CacheOptions, CachePlan
from memra_driver.pp import balance
from memra_driver.round import Round
from memra_driver.session.inputs import Inputs, Weights
from memra_driver.session.steps import Decoder, Hashes, commit_bytes
from memra_driver.session.times import OpTimes

ACCEPT_CHANCE = 0.75
METHODS = ("rollback", "round")
MAX_ROWS = CacheOptions().max_rows  # a prompt is read in steps of as many tokens where every step attends


@dataclass(frozen=True)
class Outcome:
    """What one round did to each sequence. `fault` says what differed; "" when nothing did."""

    number: int
    accepted: tuple[int, ...]
    pos: tuple[int, ...]
    digests: tuple[str, ...]
    fault: str


class Session:
    """`batch` speculative sequences over `cfg`, and their twins. Iterate `run()`.

    stages: the device, or a list with that of each stage of `fence` (None: pp.balance); hidden-state rows cross from
    one to the next. Sequence b has a prompt of `prompt` + b tokens. attend: every attention layer attends in every
    step. graph: the verifying step, or the whole round, is recorded once and launched for every round; this and a
    batch are for one device. Raises CapacityError when prompt and rounds do not fit into max_ctx, UnsupportedError
    when the geometry has no kernels, ConfigError for what cannot be combined.
    """

    def __init__(
        self, stages: Any, cfg: ModelConfig, max_ctx: int, *, prompt: int, rounds: int, draft: int, seed: int,
        attend: bool = True, method: str = "rollback", batch: int = 1, graph: bool = False,
        policy: FormatPolicy | None = None, fence: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        if method not in METHODS:
            raise ConfigError(f"method {method!r}; there are {', '.join(METHODS)}")
        if batch < 1 or (batch > 1 and method == "round"):
            raise ConfigError(f"a batch of {batch} with the method {method}: a round is of one sequence; use rollback")
        self.width = draft + 1
        longest = prompt + batch - 1
        need = longest + rounds * self.width
        if need > max_ctx:
            raise CapacityError(
                f"a prompt of {longest} and {rounds} rounds of {self.width} rows may need {need} tokens;"
                f" max_ctx is {max_ctx}"
            )
        self.stages = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        self.devices, placement = united(self.stages)
        if len(self.devices) > 1 and (graph or batch > 1):
            raise ConfigError("graph and batch are for stages on one device: a capture and a batch belong to one")
        self.e, self.last, self.prompt, self.rounds = self.stages[0], self.stages[-1], prompt, rounds
        self.attend, self.method, self.graph = attend, method, graph
        options = CacheOptions(max_rows=max(MAX_ROWS, self.width), round_width=self.width if method == "round" else 0)
        if fence is None:
            fence = balance(cfg, max_ctx, len(self.stages), policy=policy, options=options)
        plan = CachePlan(cfg, max_ctx, policy, options, fence, placement=placement)
        problems = [problem for problem in plan.check_ops() if attend or not problem.startswith("attend")]
        if problems:
            raise UnsupportedError("; ".join(problems))
        self._max_rows = options.max_rows
        self._draws = [np.random.default_rng([seed, b]) for b in range(batch)]
        self._recorded: Any = None
        with ExitStack() as owned:
            self._build(owned, plan, batch, seed)
            self._owned = owned.pop_all()

    def _build(self, owned: ExitStack, plan: CachePlan, batch: int, seed: int) -> None:
        """Two caches a sequence, and what steps them; `owned` closes what is there, the last first."""

        def keep(made: Any) -> Any:
            owned.callback(made.close)
            return made

        self.caches: list[Cache] = [keep(Cache(plan, self.devices)) for _ in range(batch)]
        self.twins: list[Cache] = [keep(Cache(plan, self.devices)) for _ in range(batch)]
        self.inputs = [Inputs(plan.cfg, seed, b) for b in range(batch)]
        self.times: OpTimes = keep(OpTimes(self.devices))
        weights: Weights = keep(Weights(lambda il: self.devices[plan.device_of(il)], self.inputs[0]))
        most = batch * max(self.prompt + batch - 1, self.width)  # rows of a step
        crossings = {
            il: keep(Boundary(a, b, max(plan.cfg.n_embd, 1), most))
            for il, (a, b) in zip(plan.fence[1:-1], pairwise(self.stages), strict=True)
        }

        def decoder(target: Any, inputs: list[Inputs], *, fixed: bool = False) -> Decoder:
            made: Decoder = keep(
                Decoder(target, inputs, weights, self.times, crossings, attend=self.attend, fixed=fixed)
            )
            return made

        pairs = list(zip(self.caches, self.inputs, strict=True))
        self.alone = [decoder(cache, [inputs]) for cache, inputs in pairs]
        self.plain = [decoder(twin, [inputs]) for twin, inputs in zip(self.twins, self.inputs, strict=True)]
        target = CacheBatch(self.caches) if batch > 1 else self.caches[0]
        self.together = decoder(target, self.inputs, fixed=self.graph)
        self._accept_d = keep(self.last.htod_i32([0]))

    def run(self) -> Iterator[Outcome]:
        """Yields the primed prompts as round 0, then each round; stops behind the first that differs."""
        snaps = [cache.snapshot(self.e) for cache in self.caches] if self.method == "rollback" else []
        for number in range(self.rounds + 1):
            try:
                done = self._prime() if number == 0 else self._round(number, snaps)
            except MemraError as error:
                nothing = (0,) * len(self.caches)
                positions = tuple(cache.pos for cache in self.caches)
                done = Outcome(number, nothing, positions, (), f"{type(error).__name__}: {error}")
            yield done
            if done.fault:
                break
            for inputs, cache in zip(self.inputs, self.caches, strict=True):
                inputs.forget_before(cache.pos)
        for snap in snaps:
            snap.close()

    def close(self) -> None:
        """Frees the caches and all scratch; may be called twice."""
        if self._recorded is not None:
            self._recorded.close()
        self._owned.close()

    # One round.

    def _prime(self) -> Outcome:
        prompts = [self.prompt + b for b in range(len(self.caches))]
        seen = [self._read(decoder, length) for decoder, length in zip(self.alone, prompts, strict=True)]
        return self._compare(0, prompts, [seen])

    def _read(self, decoder: Decoder, tokens: int) -> dict[int, str]:
        """Reads a prompt: in one step, or where steps attend in several."""
        hashes: dict[int, str] = {}
        rows = self._max_rows if self.attend else max(tokens, 1)
        for start in range(0, tokens, rows):
            hashes |= decoder.step(min(rows, tokens - start))[0]
        return hashes

    def _round(self, number: int, snaps: list[Any]) -> Outcome:
        accepted = [self._draw_accepted(draw) for draw in self._draws]
        if self.method == "round":
            return self._compare(number, accepted, [self._verify_and_commit(accepted[0])])
        for cache, snap in zip(self.caches, snaps, strict=True):
            with self.times.measure("snapshot_into", 2 * snap.nbytes):
                cache.snapshot_into(self.e, snap)
        verified = self._launch(accepted[0]) if self.graph else self.together.step(self.width)
        for cache, snap, count in zip(self.caches, snaps, accepted, strict=True):
            with self.times.measure("rollback", 2 * snap.nbytes):
                cache.rollback(self.e, snap, count)
        return self._compare(number, accepted, [verified, self.replay(accepted)])

    def replay(self, accepted: list[int]) -> Hashes:
        """Runs the accepted tokens of each sequence again, in one step."""
        counts = zip(self.alone, accepted, strict=True)
        return [decoder.step(count)[0] if count else {} for decoder, count in counts]

    def _verify_and_commit(self, accepted: int) -> Hashes:
        """A round of one sequence."""
        (cache,) = self.caches
        if self.graph:
            verified = self._launch(accepted)
            cache.settle(self.e)
            return verified
        with Round(cache, self.e, width=self.width) as r:
            verified = self.together.step(self.width, advance=False)
            with self.times.measure("commit", commit_bytes(cache, accepted, again=0 < accepted < self.width)):
                r.commit(accepted)
        return verified

    def _launch(self, accepted: int) -> Hashes:
        """The recorded step or round, which is recorded before its first launch."""
        if self._recorded is None:
            self._recorded = self._record()
        n_bytes = self.together.cost(self.width, in_round=self.method == "round")
        if self.method == "round":
            self._accept_d.copy_from(np.array([accepted], np.int32))
            n_bytes += commit_bytes(self.caches[0], accepted, again=True)
        return self.together.replay(self._recorded, self.width, n_bytes)

    def _record(self) -> Any:
        self.together.reserve(self.width)
        with self.e.capture() as graph:
            if self.method == "round":
                with Round(self.caches[0], self.e, width=self.width) as r:
                    self.together.enqueue(self.width)
                    r.commit_from_device(self._accept_d)
            else:
                self.together.enqueue(self.width)
                self.together.target.advance(self.e, self.width)
        return graph

    def _draw_accepted(self, draw: np.random.Generator) -> int:
        """How many of the verified rows stand: each with the chance of a good draft, up to the first that fails."""
        chances = draw.random(self.width) < ACCEPT_CHANCE
        return self.width if chances.all() else int(chances.argmin())

    def _compare(self, number: int, accepted: list[int], seen: list[Hashes]) -> Outcome:
        """Lets the twins decode the accepted tokens and compares outputs and digests."""
        faults = []
        for b, (twin, plain, count) in enumerate(zip(self.twins, self.plain, accepted, strict=True)):
            who = f"sequence {b}: " if len(self.twins) > 1 else ""
            for _ in range(count):
                position = twin.pos
                (expected,) = plain.step(1)[0].values()
                if any(hashes[b].get(position) != expected for hashes in seen):
                    faults.append(f"{who}outputs at position {position}")
        digests = tuple(cache.digest() for cache in self.caches)
        for b, (digest, twin) in enumerate(zip(digests, self.twins, strict=True)):
            if digest != twin.digest():
                faults.append(f"sequence {b}: digest" if len(self.twins) > 1 else "digest")
        self.times.settle()
        fault = f"{faults[0]} differ from plain decoding" if faults else ""
        return Outcome(number, tuple(accepted), tuple(cache.pos for cache in self.caches), digests, fault)
