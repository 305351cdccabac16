"""Calls of random programs: steps, attention by itself, batches and rounds."""

from __future__ import annotations

from collections.abc import Sequence

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.health import Fault
from memra_driver.round import Round
from memra_driver.soak.lane import RESULTS, SCALE, Lane
from memra_driver.soak.look import same_bytes
from memra_driver.soak.model import COUNTS, PENDING, READY, ROWS, TOKENS, UNSETTLED, Model, event
from memra_driver.soak.player import WIDTH, Player

OUTPUTS = {name for names in RESULTS.values() for name in names}


class Steps(Model):
    """What moves the sequence forward, and is no capture."""

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        self.batch = CacheBatch([self.cache])
        self.batch_lane = Lane(self.batch, 1, salt=player.oracle.salt)

    def close(self) -> None:
        self.batch.close()
        self.batch_lane.close()
        super().close()

    # Steps.

    @event(lambda self: not self.step and self.steppable, rows=ROWS, tokens=TOKENS, few=(0, 0, 0, 1, 2, 3))
    def run(self, rows: int, tokens: list[int], few: int) -> None:
        """A step of all layers, or of the first few; what is armed and has room is tapped."""
        tokens = tokens[:rows]
        if self.state is PENDING:
            tokens = (self.tokens[self.pos :] + tokens)[:rows]
        allowed = (
            not self.step
            and self.steppable
            and (self.round is None or rows <= self.round.width)
            and (self.state is not PENDING or rows <= len(self.tokens) - self.pos)
            and self.pos + rows <= self.capacity
        )
        layers = self.layers[:few] if few else self.layers
        lane = self.player.lane(rows).fill((self.start, tokens))
        outputs = [part for (_, name), part in lane.at.items() if name in OUTPUTS]
        self.attempt(allowed, lambda: lane.run(self.cache, layers, self.taps.of(rows)), *outputs)
        if allowed:
            self.step, self.ran = tokens, len(layers)
            self.tapped(layers)
            if layers == self.layers:
                self.player.check_results(lane, self.tokens[: self.start], tokens)

    @event(lambda self: 0 < self.ran < len(self.layers))
    def run_the_rest(self) -> None:
        """The layers of the open step that have not run."""
        if self.step and self.ran < len(self.layers):
            lane = self.player.lane(len(self.step)).fill((self.start, self.step))
            rest = self.layers[self.ran :]
            lane.run(self.cache, rest, self.taps.of(len(self.step)))
            self.tapped(rest)
            self.ran = len(self.layers)

    @event(lambda self: 0 < self.ran < len(self.layers), rows=ROWS, tokens=TOKENS)
    def run_the_rest_wider(self, rows: int, tokens: list[int]) -> None:
        """A step has the same rows in every layer."""
        changing = [il for il in self.layers[self.ran :] if il in self.owners or self.cache.recur[il] is not None]
        if self.ran > 0 and changing and rows != len(self.step):
            lane = self.player.lane(rows).fill((self.start, tokens[:rows]))
            self.attempt(False, lambda: lane.run(self.cache, changing[:1]))

    def tapped(self, layers: Sequence[int]) -> None:
        if self.taps.of(len(self.step)):
            self.taps.write(self.start, self.step, layers)

    @event(lambda self: self.at_rest and self.steppable, 2, rows=ROWS, tokens=TOKENS)
    def whole_step(self, rows: int, tokens: list[int]) -> None:
        if self.state is PENDING:
            rows = min(rows, len(self.tokens) - self.pos)
        self.run(rows=rows, tokens=tokens, few=0)
        self.run_the_rest()
        self.advance(off=0)

    @event(lambda self: self.ran == len(self.layers) and self.round is None, off=(0, 0, 0, 0, 1, -1))
    def advance(self, off: int) -> None:
        rows = len(self.step)
        if self.step and self.ran < len(self.layers) and off == 0:
            return  # legal, but no plain decoding leaves half a step
        n = rows + off if rows else min(off, 0)
        allowed = self.state is not UNSETTLED and self.round is None and n == rows
        self.attempt(allowed, lambda: self.cache.advance(self.e, n))
        if allowed and rows:
            if self.state is PENDING:
                self.replayed = {il: self.length(il) for il in self.owners}
                self.pos += rows
                self.state = READY if self.pos == len(self.tokens) else PENDING
            else:
                self.moved(self.step, rows)
            self.over()

    @event(
        lambda self: self.ran or self.state is PENDING, 3,
        which=range(5), rows=ROWS, window=(None, None, 0, 1, 5, -1),
    )  # fmt: skip
    def attend(self, which: int, rows: int, window: int | None) -> None:
        """By itself, of an open step's rows or of those of a pending replay, also through another window."""
        il = [*self.player.oracle.reads][which % len(self.player.oracle.reads)]
        allowed = self.steppable and self.pos + rows <= self.length(self.player.oracle.reads[il][0]) and window != -1
        ahead = self.tokens[self.pos :] if self.state is PENDING else self.step
        tokens, before = [*ahead[:rows], *[0] * (rows - len(ahead))], self.tokens[: self.start]
        lane = self.player.lane(rows).fill((self.start, tokens))
        q, out = lane.at[il, "query"], lane.at[il, "attended"]
        self.attempt(allowed, lambda: ops.attend(self.e, self.cache, il, q, out, scale=SCALE, window=window), out)
        if allowed:
            oracle = self.player.oracle
            for r, attended in enumerate(out.to_numpy().reshape(rows, -1)):
                after = (*before, *tokens[: r + 1])
                if window is None:
                    what, wanted = f"layer {il} attended, row {r} of {rows}", oracle.at(after).results[il, "attended"]
                    oracle.compared += same_bytes(what, attended, wanted)
                else:
                    oracle.check_attended(after, il, attended.tobytes(), window)

    @event(lambda self: self.owners and self.state is not UNSETTLED, which=range(3), start=(0, 0, 1, 7), rows=range(6))
    def dequant(self, which: int, start: int, rows: int) -> None:
        """Decodes rows that stand, to the formulas' own numbers."""
        if not self.owners:
            return
        il = self.owners[which % len(self.owners)]
        stop, layer = start + rows, self.cache.kv_layer(il)
        allowed = self.state is not UNSETTLED and stop <= self.length(il)
        with self.e.uninit(rows * layer.kv_dim_k) as k, self.e.uninit(rows * layer.kv_dim_v) as v:
            self.attempt(allowed, lambda: ops.dequant_kv(self.e, self.cache, il, start, stop, k, v))
            if allowed:
                stands = [*self.tokens, *(self.step if self.state is READY else ())]
                for side, found in zip("kv", self.player.oracle.decoded(stands, il, start, stop), strict=True):
                    made = (k if side == "k" else v).to_numpy()
                    self.player.oracle.compared += same_bytes(
                        f"layer {il} {side}, decoded from {start} on", made, found
                    )

    @event(lambda self: self.settled, token=(0, 1))
    def step_in_a_batch(self, token: int) -> None:
        allowed = self.settled and self.pos < self.capacity
        self.batch_lane.fill((self.start, [token]))
        self.attempt(allowed, lambda: self.batch_lane.run(self.batch))
        if allowed:
            self.batch.advance(self.e)
            self.player.check_results(self.batch_lane, self.tokens, [token])
            self.moved([token], 1)

    # Rounds.

    @event(lambda self: self.at_rest and self.state is not PENDING, width=ROWS)
    def begin_a_round(self, width: int) -> None:
        allowed = width <= WIDTH and self.at_rest and self.state is not PENDING
        made = self.attempt(allowed, lambda: Round(self.cache, self.e, width=width).__enter__())
        self.round = made or self.round

    @event(lambda self: self.round is not None and self.step, accept=COUNTS, by=("host", "device"))
    def commit(self, accept: int, by: str) -> None:
        r = self.round or self.past_round
        if r is None or (self.step and self.ran < len(self.layers)):
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
                self.faults |= {Fault.BAD_ACCEPT} if not 0 <= accept <= rows else set()
                self.moved(stands, rows, unsettles=True)
        if allowed:
            self.over()

    @event(lambda self: self.round is not None)
    def leave_the_round(self) -> None:
        if self.round is not None:
            self.round.__exit__(None, None, None)
            self.moved([], 0)
            self.over()

    @event(lambda self: self.state is UNSETTLED and self.round is None, 5)
    def settle(self) -> None:
        allowed = self.round is None and self.state is not PENDING
        self.attempt(allowed, lambda: self.cache.settle(self.e))
        if allowed and self.state is UNSETTLED:
            if self.parked is not None and self.parked_sure:
                self.parked = self.parked[0], self.parked[1] - (self.pos - len(self.tokens))
            self.state, self.pos, self.parked_sure = READY, len(self.tokens), False
            self.drop_logits_above(self.pos)
