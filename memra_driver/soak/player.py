"""A cache and the tokens that stand in it; captured steps and rounds of it; what is tapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_driver import driver
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import MemraError
from memra_driver.graph import Graph
from memra_driver.round import Round
from memra_driver.soak.lane import HIDDEN, Lane, rows_of
from memra_driver.soak.look import Difference, device_counters, same, same_bytes
from memra_driver.soak.plain import Moment, Oracle

WIDTH = 4  # of a round
TRUE, WRONG = 0, 1  # tokens: what stands in the end, and what a draft got wrong


def draft(rows: int, accept: int) -> list[int]:
    """Tokens of a round of which the first `accept` are right."""
    return [TRUE] * accept + [WRONG] * (rows - accept)


class Player:
    """Drives a cache. With a replay pending, `tokens` goes to its end.

    shares: the oracle serves other players too, and stays open.
    """

    def __init__(self, cache: Cache, oracle: Oracle, *, shares: bool = False) -> None:
        self.cache, self.oracle, self.e = cache, oracle, cache.devices[0]
        self.last = cache.devices[cache.plan.placement[-1]]  # where logits are, and counts
        self.tokens: list[int] = []
        self._lanes: dict[int, Lane] = {}
        self._shares = shares

    def lane(self, rows: int) -> Lane:
        """The buffers of a step of so many rows."""
        if rows not in self._lanes:
            self._lanes[rows] = Lane(self.cache, rows, salt=self.oracle.salt)
        return self._lanes[rows]

    @property
    def start(self) -> int:
        """Where the next row stands, whether the host knows it or not."""
        return self.cache.pos if self.cache.state is CacheState.PENDING_REPLAY else len(self.tokens)

    def run(self, tokens: Sequence[int], layers: Sequence[int] | None = None, taps: Sequence[int] = ()) -> Lane:
        """The operations of a step of these tokens, without its end."""
        lane = self.lane(len(tokens)).fill((self.start, tokens))
        lane.run(self.cache, layers, taps)
        return lane

    def step(self, *tokens: int, taps: Sequence[int] = ()) -> None:
        """A whole step; what each row put out is what plain decoding puts out there."""
        start = self.start
        lane = self.run(tokens, taps=taps)
        self.cache.advance(self.e, len(tokens))
        before = self.tokens[:start]
        self.tokens[start : start + len(tokens)] = tokens
        self.check_results(lane, before, tokens)

    def warm(self) -> None:
        """Room for attention of the widest step, which a capture cannot make: a round that is given up."""
        with Round(self.cache, self.e, width=WIDTH):
            self.run([WRONG] * WIDTH)

    def close(self) -> None:
        """Frees the cache, the oracle's and all buffers."""
        self.cache.close()
        if not self._shares:
            self.oracle.close()
        for lane in self._lanes.values():
            lane.close()

    # What it should be.

    def check_results(self, lane: Lane, before: Sequence[int], tokens: Sequence[int], b: int = 0) -> None:
        """What sequence b of a lane has put out is what plain decoding puts out behind `before`."""
        found = lane.results(b)
        for r in range(len(tokens)):
            want = self.oracle.at((*before, *tokens[: r + 1])).results
            for (il, name), raw in found[r].items():
                what = f"layer {il} {name}, row {r} of {len(tokens)} at position {len(before) + r}"
                self.oracle.compared += same_bytes(what, raw, want[il, name])

    def check(self) -> None:
        """Every clock stands behind the last token, and the bytes are those of plain decoding."""
        cache, n = self.cache, len(self.tokens)
        found = cache.state, cache.pos, cache.step_rows, cache.open_round
        same("state, pos, step_rows and round", found, (CacheState.READY, n, 0, None))
        self._check_lengths({il: n for il, layer in enumerate(cache.kv) if layer is not None}, n)
        moment = self.oracle.at(self.tokens)
        if cache.digest() != moment.digest:
            self._check_planes(moment, moment, {})
            raise Difference(f"the digest is not that of plain decoding of {n} tokens, and no plane differs")
        self.oracle.compared += moment.nbytes

    def check_pending(self, lens: dict[int, int]) -> None:
        """K/V stands at `lens`, ring and state at pos, as plain decoding left them there."""
        cache, n = self.cache, len(self.tokens)
        found = cache.state, cache.replay_to, cache.step_rows
        same("state, replay_to and step_rows", found, (CacheState.PENDING_REPLAY, n, 0))
        self._check_lengths(lens, cache.pos)
        self._check_planes(self.oracle.at(self.tokens), self.oracle.at(self.tokens[: cache.pos]), lens)

    def _check_lengths(self, lens: dict[int, int], pos: int) -> None:
        found = {il: layer.len for il, layer in enumerate(self.cache.kv) if layer is not None}
        same("len by layer", found, lens)
        same("len_d by layer, and pos_d", device_counters(self.cache), (lens, {pos}))

    def _check_planes(self, written: Moment, begun: Moment, lens: dict[int, int]) -> None:
        """K/V as `written` has it, below `lens` where that is given; rings and states as `begun` has them."""
        for il, layer in enumerate(self.cache.kv):
            if layer is not None:
                for name, tok_bytes in (("k", layer.k_tok_bytes), ("v", layer.v_tok_bytes)):
                    n_bytes = lens[il] * tok_bytes if il in lens else written.planes[il, name].size
                    stands = getattr(layer, name).view(0, n_bytes).to_numpy()
                    wanted = written.planes[il, name][:n_bytes]
                    self.oracle.compared += same_bytes(f"layer {il} {name}", stands, wanted, tok_bytes)
        for il, state in enumerate(self.cache.recur):
            if state is not None:
                for name, plane in (("conv", state.conv_state), ("ssm", state.ssm_state)):
                    what = f"layer {il} {name}_state"
                    self.oracle.compared += same_bytes(what, plane.to_numpy(), begun.planes[il, name])


class Recorded:
    """A captured step, or a captured round with its count on the device, and the buffers that it reads.

    It writes the taps of layers `taps`; with `park` it parks the row `logits`.
    """

    def __init__(
        self, player: Player, rows: int, *, a_round: bool = False, accept: int | None = None, taps: Sequence[int] = (),
        park: bool = False,
    ) -> None:  # fmt: skip
        self.player, self.rows, self.a_round, self.accept, self.park = player, rows, a_round, accept, park
        self.taps = list(taps)
        self.sink: tuple[Any, ...] | None = None
        cache, e = player.cache, player.e
        self.lane = Lane(cache, rows, salt=player.oracle.salt)
        self.count, self.logits = e.htod_i32([0]), e.zeros(cache.cfg.n_vocab)
        try:
            with e.capture() as self.graph:
                if a_round:
                    with Round(cache, e, width=WIDTH) as r:
                        self._step(cache)
                        if accept is None:
                            r.commit_from_device(self.count)
                        else:
                            r.commit(accept)
                else:
                    self._step(cache)
                    cache.advance(e, rows)
        except MemraError:
            self._free()
            raise

    def _step(self, cache: Cache) -> None:
        self.lane.run(cache, taps=self.taps)
        if self.park:
            cache.park_logits(self.player.e, self.logits)

    def fill(self, tokens: Sequence[int], accept: int = 0, logits: float = 0) -> None:
        """Sets what the next launch reads."""
        self.lane.fill((self.player.start, tokens))
        self.count.copy_from(np.array([accept], np.int32))
        if self.park:
            self.logits.copy_from(np.full(self.logits.len, logits, np.float32))

    def step(self, *tokens: int, look: bool = True) -> None:
        """One launch of a step."""
        self.fill(tokens)
        self.graph.launch()
        if look:
            self.player.check_results(self.lane, self.player.tokens, tokens)
        self.player.tokens += tokens

    def play(self, accept: int, *, look: bool = True) -> None:
        """One launch of a round."""
        tokens = draft(self.rows, accept)
        self.fill(tokens, accept)
        self.graph.launch()
        if look:
            self.player.check_results(self.lane, self.player.tokens, tokens)
        self.player.tokens += tokens[:accept]

    def close(self) -> None:
        """Frees the graph and the buffers."""
        self.graph.close()
        self._free()

    def _free(self) -> None:
        for each in (self.lane, self.count, self.logits):
            each.close()


def launch_by_hand(e: Any, graph: Graph) -> None:
    """As an engine launches a graph that it holds: nothing of ours runs before or behind."""
    if hasattr(graph, "handle"):
        driver.graph_launch(graph.handle, e.stream.handle)
    else:
        graph._run()


class Taps:
    """What stands in the tap sink of a cache, by what was armed and written. salt: of the lanes."""

    def __init__(self, salt: int = 0) -> None:
        self.salt = salt
        self.ids: list[int] = []
        self.t = 0
        self.rows: dict[tuple[int, int], bytes] = {}  # by row and slot; what nobody wrote is undefined
        self.buffer, self.room = 0, 0  # a number for the buffer, and its elements
        self.addresses: dict[int, int] = {}  # by buffer

    def arm(self, ids: Sequence[int], t: int) -> None:
        """The cache has armed these."""
        need = t * len(ids) * HIDDEN
        if need > self.room:
            self.buffer, self.room = self.buffer + 1, need
        self.ids, self.t, self.rows = list(ids), t, {}

    def disarm(self) -> None:
        """And now none."""
        self.ids, self.t, self.rows = [], 0, {}

    def of(self, rows: int) -> list[int]:
        """The layers that a step of `rows` rows may tap."""
        return self.ids if rows <= self.t else []

    def write(self, start: int, tokens: Sequence[int], layers: Sequence[int]) -> None:
        """A step of these tokens at `start` has tapped those of `layers` that are armed."""
        for slot, il in enumerate(self.ids):
            if il in layers:
                for r, token in enumerate(tokens):
                    self.rows[r, slot] = rows_of(self.salt + token, il, "residual", start + r, 1, HIDDEN).tobytes()

    def mark(self) -> tuple[Any, ...]:
        """What a capture that begins now will write to."""
        return list(self.ids), self.buffer, self.t

    def serve(self, made: Recorded) -> bool:
        """Whether the sink that `made` writes is armed: the same slots of the same buffer, and as many rows."""
        if not made.taps or made.sink is None:
            return True
        ids, buffer, t = made.sink
        return (self.ids, self.buffer) == (ids, buffer) and self.t >= t

    def check(self, cache: Cache) -> None:
        """The sink says what is armed, here and in C, and holds what was written; its address never changes."""
        sink, c = cache.dflash_taps, cache.as_c().contents.dflash_taps
        same("taps are armed, here and in C", (sink is not None, bool(c.present)), (bool(self.ids), bool(self.ids)))
        if sink is None:
            return
        same("taps", (sink.layer_ids, sink.t, sink.hidden), (self.ids, self.t, HIDDEN))
        found = list(c.layer_ids[: c.n_taps]), c.t, c.hidden, c.buf.ptr
        same("taps in C", found, (self.ids, self.t, HIDDEN, sink.buf.ptr))
        same("where taps lie", sink.buf.ptr, self.addresses.setdefault(self.buffer, sink.buf.ptr))
        held = sink.buf.to_numpy().reshape(self.t, len(self.ids), HIDDEN)
        for (r, slot), wanted in self.rows.items():
            same_bytes(f"tap of layer {self.ids[slot]}, row {r}", held[r, slot], wanted)
