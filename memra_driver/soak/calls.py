"""Calls of random programs: ways back, captures, taps and parked logits, beside those of soak/steps.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from memra_driver import ops
from memra_driver.formats import FORMATS
from memra_driver.health import Fault, FaultCount
from memra_driver.round import Round
from memra_driver.soak.lane import HIDDEN, INPUTS
from memra_driver.soak.look import same
from memra_driver.soak.model import BOTH, COUNTS, PENDING, READY, ROWS, TOKENS, UNSETTLED, Kept, event
from memra_driver.soak.player import WIDTH, Player, Recorded, launch_by_hand
from memra_driver.soak.steps import Steps

LAUNCHES = 3
FP8, Q8_0 = FORMATS["fp8"].code, FORMATS["q8_0"].code
MOST_FP8, MOST_Q8_0 = 464, 127 * 65504.0  # what rounds to its largest number; what its f16 scale reaches
TAPPED: list[list[int]] = [[0, 3], [3, 0], [2], [0, 1, 2, 3], [0, 3], [2], [], [1, 1], [2, 5], [-1]]


class Program(Steps):
    """All calls that a program may make on one cache."""

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        self.park_value = 0.0
        self.recorded = {False: self.record(1), True: self.record(WIDTH)}

    def close(self) -> None:
        for each in self.recorded.values():
            each.close()
        super().close()

    # Snapshots, and ways back.

    @event(lambda self: self.settled)
    def snapshot(self) -> None:
        made = self.attempt(self.settled, lambda: self.cache.snapshot(self.e))
        if made is not None:
            self.kept.append(Kept(made, list(self.tokens), self.generation))
            if len(self.kept) > 2:
                self.kept.pop(0).snap.close()

    @event(lambda self: self.kept and self.settled, 2, which=(0, 1))
    def snapshot_into(self, which: int) -> None:
        if self.kept:
            kept = self.kept[which % len(self.kept)]
            self.attempt(self.settled, lambda: self.cache.snapshot_into(self.e, kept.snap))
            if self.settled:
                kept.tokens, kept.generation, kept.good = list(self.tokens), self.generation, True

    @event(
        lambda self: self.kept and self.state is not UNSETTLED, 2,
        which=(0, 1), accept=(0, 0, 1, 2, 3, 5, -1),
    )  # fmt: skip
    def rollback(self, which: int, accept: int) -> None:
        if not self.kept:
            return
        kept = self.kept[which % len(self.kept)]
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
            same("what stood at the snapshot", history[: len(kept.tokens)], kept.tokens)
            if self.round is not None:
                self.over()  # it is rejected first
            self.replayed = {il: min(self.length(il), end) for il in self.owners}
            self.tokens[:] = history[:end]
            self.pos, self.state = len(kept.tokens), PENDING if accept else READY
            self.given_up(end)
            self.over()

    @event(
        lambda self: self.settled, rows=ROWS, tokens=TOKENS, accept=range(WIDTH + 1), open_step=BOTH, few=(0, 0, 1, 2)
    )  # fmt: skip
    def speculate(self, rows: int, tokens: list[int], accept: int, open_step: bool, few: int) -> None:
        """As a decoder does without rounds; the snapshot may be an older one."""
        if not self.kept:
            self.snapshot()
        self.run(rows=rows, tokens=tokens, few=few)
        if not open_step:
            self.run_the_rest()
            self.advance(off=0)
        self.rollback(which=0, accept=accept)

    @event(lambda self: not self.recurs and self.settled, 3, back=(1, 2, 3, 5, 9, 0, -1))
    def truncate(self, back: int) -> None:
        """Recurrent layers cannot."""
        new_len = self.pos - back
        allowed = not self.recurs and self.settled and 0 <= new_len <= self.pos
        self.attempt(allowed, lambda: self.cache.truncate(self.e, new_len))
        if allowed:
            del self.tokens[new_len:]
            self.pos = new_len
            self.given_up(new_len)

    @event(lambda self: self.pos > self.capacity - WIDTH, 3)
    def reset(self) -> None:
        self.cache.reset(self.e)
        self.tokens.clear()
        self.pos, self.state, self.parked = 0, READY, None
        self.generation += 1
        self.taps.disarm()
        self.over()

    @event(lambda self: False)
    def sync_d(self) -> None:
        self.attempt(self.state is not UNSETTLED, lambda: self.cache.sync_d(self.e))

    # Recordings.

    def record(self, rows: int, *, park: bool = False) -> Recorded:
        """A step of one row, or a round; it taps what is armed."""
        made = Recorded(self.player, rows, a_round=rows > 1, taps=self.taps.of(rows), park=park)
        made.sink = self.taps.mark()
        return made

    def can_replay(self, need: int) -> bool:
        return self.at_rest and self.state is not PENDING and self.pos + need <= self.capacity

    @event(lambda self: self.can_replay(1), wide=BOTH, park=BOTH)
    def record_again(self, wide: bool, park: bool) -> None:
        rows = WIDTH if wide else 1
        allowed = self.can_replay(rows) and (not park or (self.can_park and self.state is READY))
        made = self.attempt(allowed, lambda: self.record(rows, park=park))
        if made is not None:
            self.recorded[wide].close()
            self.recorded[wide] = made

    def fill(self, made: Recorded, tokens: Sequence[int], accept: int) -> None:
        self.park_value += 1
        made.fill(tokens[: made.rows], accept, self.park_value)

    def launched(self, made: Recorded, tokens: Sequence[int], accept: int) -> None:
        """What the model makes of one launch."""
        tokens = tokens[: made.rows]
        self.player.check_results(made.lane, self.tokens, tokens)
        if made.taps:
            self.taps.write(self.start, tokens, self.layers)
        if made.a_round:
            self.faults |= {Fault.BAD_ACCEPT} if not 0 <= accept <= WIDTH else set()
            self.moved(tokens[: accept if 0 <= accept <= WIDTH else 0], WIDTH, unsettles=True)
        else:
            self.moved(tokens, made.rows, launched=True)
        if made.park:
            self.parked, self.parked_sure = (self.park_value, self.pos), self.state is UNSETTLED and not made.a_round

    @event(lambda self: self.can_replay(1), wide=BOTH, tokens=TOKENS, accept=COUNTS)
    def launch(self, wide: bool, tokens: list[int], accept: int) -> None:
        made = self.recorded[wide]
        allowed = self.can_replay(made.rows) and self.taps.serve(made)
        self.fill(made, tokens, accept)
        attended = [part for (_, name), part in made.lane.at.items() if name == "attended"]
        self.attempt(allowed, made.graph.launch, *attended[:1])
        if allowed:
            self.launched(made, tokens, accept)

    @event(lambda self: self.can_replay(WIDTH), wide=BOTH, park=BOTH, tokens=TOKENS, accept=COUNTS)
    def record_and_launch(self, wide: bool, park: bool, tokens: list[int], accept: int) -> None:
        self.record_again(wide=wide, park=park)
        self.launch(wide=wide, tokens=tokens, accept=accept)

    @event(
        lambda self: self.can_replay(1), wide=BOTH, launches=(1, LAUNCHES, LAUNCHES, 0, -1),
        tokens=TOKENS, accepts=[*itertools.product(COUNTS, repeat=LAUNCHES)],
    )  # fmt: skip
    def engine_launches(self, wide: bool, launches: int, tokens: list[int], accepts: tuple[int, ...]) -> None:
        """The engine holds the graph; it launches only what it will be allowed to tell of."""
        made = self.recorded[wide]
        prepared = self.can_replay(0)
        fits = launches == 0 or (launches > 0 and self.can_replay(launches * made.rows) and self.taps.serve(made))
        allowed = prepared and fits
        self.attempt(prepared, lambda: self.cache.prepare_replay(self.e))
        pos, state = self.pos, self.state
        for n in range(launches if allowed else 0):
            row = tokens[n:] + tokens[:n]
            self.fill(made, row, accepts[n])
            launch_by_hand(self.e, made.graph)
            same("what the host was not told", (self.cache.pos, self.cache.state), (pos, state))
            self.launched(made, row, accepts[n])
        self.attempt(allowed, lambda: self.cache.replayed(made.graph, launches))

    # Beside the sequence.

    @event(lambda self: self.state is READY)
    def park(self) -> None:
        self.park_value += 1
        row = self.e.uninit(self.cache.cfg.n_vocab)
        row.copy_from(np.full(row.len, self.park_value, np.float32))
        allowed = self.state is READY
        self.attempt(allowed, lambda: self.cache.park_logits(self.e, row))
        if allowed:
            self.parked, self.can_park = (self.park_value, self.pos + len(self.step)), True
            self.parked_sure = False

    @event(
        lambda self: self.at_rest and self.state is not PENDING, rows=range(1, WIDTH + 1), tokens=TOKENS,
        accept=COUNTS, by=("host", "device"), park=BOTH,
    )  # fmt: skip
    def whole_round(self, rows: int, tokens: list[int], accept: int, by: str, park: bool) -> None:
        if self.round is None and self.step:
            self.run_the_rest()
            self.advance(off=0)
        if self.state is not PENDING and self.at_rest:
            self.begin_a_round(width=WIDTH)
        self.run(rows=rows, tokens=tokens, few=0)
        self.run_the_rest()
        if park:
            self.park()
        self.commit(accept=accept, by=by)

    @event(lambda self: self.state is not UNSETTLED, 2, ids=TAPPED, t=(5, 5, 4, 7, 1, 0))
    def arm(self, ids: list[int], t: int) -> None:
        """Also with other layers than were armed, or in another order, and in the middle of a step or round."""
        allowed = (
            self.state is not UNSETTLED and t > 0 and 0 < len(ids) == len(set(ids)) and set(ids) <= set(self.layers)
        )
        self.attempt(allowed, lambda: self.cache.arm_taps(self.e, ids, t, HIDDEN))
        if allowed:
            self.taps.arm(ids, t)

    @event(lambda self: False)
    def disarm(self) -> None:
        """Allowed at any time, and nothing but the sink is gone."""
        before, sink = self.seen()[0], self.cache.dflash_taps
        same("the sink that is taken out", self.cache.disarm_taps() is sink, True)
        self.unchanged("disarm", before, self.seen()[0])
        self.taps.disarm()

    @event(
        lambda self: self.taps.ids and self.steppable,
        il=(0, 1, 2, 3, 5, -1), rows=ROWS, tokens=TOKENS,
    )  # fmt: skip
    def tap(self, il: int, rows: int, tokens: list[int]) -> None:
        """By itself, at any time of a step or outside."""
        allowed = self.steppable and il in self.taps.of(rows)
        lane = self.player.lane(rows).fill((self.start, tokens[:rows]))
        residual = lane.at[il if il in self.layers else 0, "residual"]
        self.attempt(allowed, lambda: ops.tap_write(self.e, self.cache, il, residual))
        if allowed:
            self.taps.write(self.start, tokens[:rows], [il])

    # The error record.

    @event(lambda self: True, clear=(False, False, True))
    def look_at_health(self, clear: bool) -> None:
        """At any time it says what kernels have noticed, and nothing else."""
        same("what the error record tells of", set(self.cache.health().faults), self.faults)
        if clear:
            self.cache.clear_health()
            self.faults = set()
            same("a cleared error record", str(self.cache.health()), "no faults")

    @event(lambda self: self.settled and self.pos > self.capacity - WIDTH, 4, tokens=TOKENS)
    def overrun(self, tokens: list[int]) -> None:
        """An engine launches a recorded round once too often: no row has room, so none is written, and it is told."""
        made = self.recorded[True]
        if not self.settled or self.pos <= self.capacity - WIDTH or made.park or made.taps:
            return
        self.look_at_health(clear=True)
        self.fill(made, tokens, 0)
        self.cache.prepare_replay(self.e)
        launch_by_hand(self.e, made.graph)
        reads = self.player.oracle.reads
        told = {Fault.SLOT_RANGE: FaultCount(len(self.owners) + len(reads), min(reads), self.pos)}
        same("what a launch without room tells", self.cache.health().faults, told)
        self.cache.clear_health()

    @event(
        lambda self: self.settled and self.pos < self.capacity,
        which=range(5), value=(np.nan, np.inf, -np.inf, 460, 470, 1e37),
    )  # fmt: skip
    def spoiled_step(self, which: int, value: float) -> None:
        """A step with an input that no layer should get; it is told, and the way back leaves nothing of it."""
        if not self.settled or self.pos >= self.capacity:
            return
        self.look_at_health(clear=True)
        lane = self.player.lane(1).fill((self.start, [0]))
        il = [*lane.kinds][which % len(lane.kinds)]
        lane.at[il, INPUTS[lane.kinds[il]][0]].view(0, 1).copy_from(np.array([value], np.float32))
        with self.cache.snapshot(self.e) as snap:
            lane.run(self.cache)
            told = {kind: (seen.layer, seen.slot) for kind, seen in self.cache.health().faults.items()}
            self.cache.rollback(self.e, snap, 0)
        fault: Fault | None = Fault.NONFINITE
        if np.isfinite(value):
            form = self.cache.kv_layer(il).k_format if lane.kinds[il] == "FULL" else -1
            fault = Fault.FP8_SATURATED if form == FP8 and value > MOST_FP8 else None
            if form == Q8_0 and value > MOST_Q8_0:
                fault = Fault.SCALE_OVERFLOW
        same("what a spoiled step tells", told, {} if fault is None else {fault: (il, self.pos)})
        self.cache.clear_health()

    # Kernels of the engine's own.

    @event(
        lambda self: self.settled and self.pos < self.capacity, token=(0, 1), then=("sync_d", "advance", "launch"),
        tokens=TOKENS,
    )  # fmt: skip
    def own_step(self, token: int, then: str, tokens: list[int]) -> None:
        """The engine writes a row by itself and moves the host's clock; the device's follows, or a launch stamps it."""
        if not self.settled or self.pos >= self.capacity:
            return
        n, planes = self.pos, self.player.oracle.at((*self.tokens, token)).planes
        for il in self.owners:
            layer = self.cache.kv_layer(il)
            for name, plane, size in (("k", layer.k, layer.k_tok_bytes), ("v", layer.v, layer.v_tok_bytes)):
                plane.view(n * size, (n + 1) * size).copy_from(planes[il, name][n * size :])
            layer.len = n + 1
        for il, state in enumerate(self.cache.recur):
            if state is not None:
                state.conv_state.copy_from(planes[il, "conv"])
                state.ssm_state.copy_from(planes[il, "ssm"])
        if then == "advance":
            self.cache.advance(self.e)
        else:
            self.cache.pos = n + 1
        self.moved([token], 1)
        made = self.recorded[False]
        if then == "launch" and self.can_replay(1) and self.taps.serve(made):
            self.launch(wide=False, tokens=tokens, accept=0)
        else:
            self.cache.sync_d(self.e)

    @event(
        lambda self: self.settled and not self.recurs and self.pos, back=(1, 2, 3), token=(0, 1),
        then=("sync_d", "step", "own", "launch"), tokens=TOKENS,
    )  # fmt: skip
    def own_way_back(self, back: int, token: int, then: str, tokens: list[int]) -> None:
        """The engine assigns shorter lengths; from the next call on what stood above them is given up."""
        if not self.settled or self.recurs or back > self.pos:
            return
        stands = self.cache.pos = self.pos - back
        for il in self.owners:
            self.cache.kv_layer(il).len = stands
        del self.tokens[stands:]
        self.pos = stands
        self.given_up(stands)
        if then == "step":
            self.whole_step(rows=1, tokens=[token])
        elif then == "own":
            self.own_step(token=token, then="advance", tokens=tokens)
        elif then == "launch" and self.can_replay(1) and self.taps.serve(self.recorded[False]):
            self.launch(wide=False, tokens=tokens, accept=0)
        else:
            self.cache.sync_d(self.e)

    @event(lambda self: self.settled and self.owners and self.pos, which=range(3), off=(-1, 1), tokens=TOKENS)
    def wrong_length(self, which: int, off: int, tokens: list[int]) -> None:
        """With rows that nobody wrote, or rows above pos, a layer takes none in a round."""
        if not self.settled or not self.owners or not 0 < self.pos < self.capacity:
            return
        il = self.owners[which % len(self.owners)]
        layer, lane = self.cache.kv_layer(il), self.player.lane(1).fill((self.start, tokens[:1]))
        with Round(self.cache, self.e, width=1) as self.round:
            layer.len += off
            self.attempt(False, lambda: lane.run(self.cache, [il]))
            layer.len -= off
        self.over()
