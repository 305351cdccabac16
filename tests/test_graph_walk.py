"""Replays in any order with everything else, over a long life of one cache: no bit differs, and no address changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import addresses, beside, image, put, scalars
from decoding import HIDDEN, MAX_CTX, TRUE, WIDTH, WRONG, Player, draft, play, player_on
from geometries import GEOMETRIES
from recordings import Recorded, Taps, launch_by_hand, warm

from memra_driver import ops
from memra_driver.cache import CacheState
from memra_driver.config import ModelConfig
from memra_driver.errors import StateError

SEEDS = (30, 33, 34, 37)  # of walks of 50 legs on which everything happens that is waited for


@pytest.mark.long(13)
@pytest.mark.parametrize("model", [*GEOMETRIES])
def test_replays_mix_with_everything_else_and_no_address_ever_changes(
    dev: Any, model: str, request: pytest.FixtureRequest
) -> None:
    slow = type(dev).__name__ == "CudaDev" and not request.config.getoption("--gpu")
    player = GEOMETRIES[model].player(dev, MAX_CTX)
    Walk(player).run(40 if slow else 200)
    player.close()


@pytest.mark.long(60)
@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_replays_mix_with_everything_else_on_the_geometry_of_a_model(cuda: Any, seed: int) -> None:
    player = player_on(cuda, ModelConfig.from_preset("qwen3.5-9b"))
    Walk(player, heavy=True, seed=seed).run(200 // len(SEEDS))
    player.close()


class Walk:
    """Every leg begins where the last one ended: at either parity, at any position, with what is armed and parked."""

    def __init__(self, player: Player, *, heavy: bool = False, seed: int = 30) -> None:
        # A heavy state takes long to read and to compare: refusals are held to the scalars, and only true tokens stand
        # in the end, so that the same states come again.
        self.heavy = heavy
        self.player, self.cache, self.e, self.chance = player, player.cache, player.e, random.Random(seed)
        self.all_layers = range(self.cache.cfg.n_layer)
        player.step(TRUE, TRUE)
        warm(player)
        self.taps = Taps()
        self.parked: tuple[float, int] | None = None  # value, and the length that it belongs to
        self.value = 0.0
        self.could_park = False
        self.recorded = {name: self.record(name) for name in ("step", "verify", "round")}
        self.snap = self.cache.snapshot(self.e)
        self.stood = list(player.tokens)
        self.seen: set[str] = set()  # what has happened at least once
        self.events = [
            self.eager_step, self.replay, self.replay_verify, self.eager_round, self.replay_rounds, self.roll_back,
            self.renew, self.reset, self.arm, self.park, self.record_again, self.engine_launches,
        ]  # fmt: skip

    def run(self, legs: int) -> None:
        addresses_before, regions = addresses(self.cache), self.cache.regions()
        for _ in range(legs):
            done = []
            for _ in range(self.chance.randint(2, 5)):
                if len(self.player.tokens) > MAX_CTX - 3 * WIDTH:
                    self.reset()
                call = self.chance.choice(self.events)
                done.append(call.__name__)
                call()
                self.cache.settle(self.e)
                assert self.cache.state is CacheState.READY, done
                if self.parked is not None and self.parked[1] > len(self.player.tokens):
                    self.parked = None
                assert self.logits() == self.parked_value, done
            self.player.check()
            self.taps.check(self.cache)
            now = self.cache.regions()
            assert [row for row in regions if row not in now] == [], done  # the first park and larger taps add some
            assert addresses(self.cache) == addresses_before, done
            regions = now
        wanted = {"tapped launch", "refused for its taps", "parking launch", "launched three times", "disarmed"}
        wanted |= {"step behind rounds"}
        assert self.seen == wanted
        for each in (*self.recorded.values(), self.snap):
            each.close()

    @property
    def parked_value(self) -> float | None:
        return None if self.parked is None else self.parked[0]

    def logits(self) -> float | None:
        kept = self.cache.take_logits(self.e)
        return None if kept is None else float(kept.to_numpy()[0])

    # Eager.

    def step(self, *tokens: int) -> None:
        """One that taps what is armed."""
        start, layers = self.player.start, self.taps.of(len(tokens))
        self.player.step(*tokens, taps=layers)
        if layers:
            self.taps.write(start, tokens, self.all_layers)

    def eager_step(self) -> None:
        self.step(*[TRUE] * self.chance.randint(1, 2))

    def eager_round(self) -> None:
        play(self.player, 3, self.chance.randint(0, 3), self.chance.choice(["host", "device"]), look=False)

    def roll_back(self) -> None:
        player, cache, chance = self.player, self.cache, self.chance
        speculated = chance.randint(0, 2)
        if speculated == 1:
            self.step(WRONG)
        elif speculated == 2 and self.taps.serve(self.recorded["verify"]):
            self.launch("verify", [WRONG, WRONG], look=False)
        drafted = player.tokens[len(self.stood) :]
        if self.heavy and WRONG in drafted:
            drafted = drafted[: drafted.index(WRONG)]
        accept = chance.randint(0, len(drafted))
        cache.rollback(self.e, self.snap, accept)
        player.tokens = player.tokens[: len(self.stood) + accept]
        if self.parked is not None and self.parked[1] > len(player.tokens):
            self.parked = None
        while cache.state is CacheState.PENDING_REPLAY:
            rows = chance.randint(1, min(4, cache.replay_to - cache.pos))
            self.step(*player.tokens[cache.pos : cache.pos + rows])

    def renew(self) -> None:
        self.cache.snapshot_into(self.e, self.snap)
        self.stood = list(self.player.tokens)

    def reset(self) -> None:
        self.cache.reset(self.e)
        self.player.tokens, self.stood, self.parked = [], [], None
        self.taps.disarm()
        self.cache.snapshot_into(self.e, self.snap)

    # Recorded.

    def record(self, name: str) -> Recorded:
        """What is armed is tapped; and logits are parked where there is room already."""
        rows = {"step": 1, "verify": 2, "round": WIDTH}[name]
        park = self.could_park and self.chance.random() < 0.5
        made = Recorded(self.player, rows, a_round=name == "round", taps=self.taps.of(rows), park=park)
        made.sink = self.taps.mark()
        return made

    def record_again(self) -> None:
        name = self.chance.choice(["step", "verify", "round"])
        made = self.record(name)
        self.recorded[name].close()
        self.recorded[name] = made

    def fill(self, made: Recorded, tokens: list[int], accept: int) -> None:
        self.value += 1
        made.fill(tokens, accept, self.value)

    def launched(self, made: Recorded, tokens: list[int], accept: int, *, look: bool) -> None:
        if look:
            self.player.check_results(made.lane, self.player.tokens, tokens)
        if made.taps:
            self.taps.write(self.player.start, tokens, self.all_layers)
            self.seen.add("tapped launch")
        self.player.tokens += tokens[:accept]

    def has_parked(self, made: Recorded) -> None:
        """Behind launches that the cache knows of: a round's logits belong to the most that may stand."""
        if made.park:
            self.parked = self.value, self.cache.pos if made.a_round else len(self.player.tokens)
            self.seen.add("parking launch")

    def launch(self, name: str, tokens: list[int], accept: int | None = None, *, look: bool = True) -> None:
        """By the graph; where other taps are armed than were recorded it refuses, and changes nothing."""
        made = self.recorded[name]
        accept = made.rows if accept is None else accept
        self.fill(made, tokens, accept)
        if self.taps.serve(made):
            made.graph.launch()
            self.launched(made, tokens, accept, look=look)
            self.has_parked(made)
            return
        self.refused(made.graph.launch)

    def refused(self, call: Callable[[], None]) -> None:
        """Other taps are armed than were recorded: nothing has changed."""
        def seen() -> Any:
            return scalars(self.cache) if self.heavy else image(self.cache, self.snap), beside(self.cache)

        before = seen()
        with pytest.raises(StateError, match="captured with taps"):
            call()
        assert seen() == before
        self.seen.add("refused for its taps")

    def replay(self) -> None:
        self.launch("step", [TRUE])

    def replay_verify(self) -> None:
        self.launch("verify", [TRUE, TRUE])

    def replay_rounds(self) -> None:
        for _ in range(self.chance.randint(1, 2)):  # the second on the device clock
            accept = self.chance.randint(0, WIDTH)
            self.launch("round", draft(WIDTH, accept), accept, look=False)
        parked = self.recorded["round"].park
        if self.chance.random() < 0.5 and self.taps.serve(self.recorded["step"]):
            if parked:
                self.parked = None  # whether the round's stand is lost behind a step
            self.launch("step", [TRUE])
            parked |= self.recorded["step"].park
            self.seen.add("step behind rounds")
        if self.chance.random() < 0.3:
            if parked and self.cache.state is CacheState.UNSETTLED:
                self.parked = None  # whether its token stands, or where, is not known here
            play(self.player, 2, self.chance.randint(0, 2), "device", look=False)

    def engine_launches(self) -> None:
        """The engine holds the graph: it says what it will do, launches, and tells how often."""
        name = self.chance.choice(["step", "verify", "round"])
        made, launches = self.recorded[name], self.chance.choice([0, 1, 3])
        self.cache.prepare_replay(self.e)
        if launches and not self.taps.serve(made):
            self.refused(lambda: self.cache.replayed(made.graph, launches))
            return
        for _ in range(launches):
            accept = self.chance.randint(0, WIDTH) if made.a_round else made.rows
            tokens = draft(made.rows, accept)
            self.fill(made, tokens, accept)
            launch_by_hand(self.e, made.graph)
            self.launched(made, tokens, accept, look=not made.a_round)
        self.cache.replayed(made.graph, launches)
        if launches:
            self.has_parked(made)
        if launches == 3:
            self.seen.add("launched three times")

    # Beside the sequence.

    def arm(self) -> None:
        """Other layers, another order or none."""
        n, e = self.cache.cfg.n_layer, self.e
        ids = self.chance.choice([[0, n - 1], [n - 1, 0], [1], [0, 1, n - 1], []])
        if not ids:
            assert (self.cache.disarm_taps() is None) == (not self.taps.ids)
            self.taps.disarm()
            self.seen.add("disarmed")
            return
        t = self.chance.choice([2, WIDTH, WIDTH])
        self.cache.arm_taps(e, ids, t, HIDDEN)
        self.taps.arm(ids, t)
        residual = self.player.lane(1).fill((self.player.start, [WRONG])).at[ids[-1], "residual"]
        ops.tap_write(e, self.cache, ids[-1], residual)
        self.taps.write(self.player.start, [WRONG], ids[-1:])

    def park(self) -> None:
        self.value += 1
        row = put(self.e, np.full(self.cache.cfg.n_vocab, self.value, np.float32))
        self.cache.park_logits(self.e, row)
        self.parked, self.could_park = (self.value, len(self.player.tokens)), True
