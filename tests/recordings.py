"""Captured steps and rounds of a player, a launch as an engine makes it, and a model of what is tapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from caches import rows_of
from decoding import HIDDEN, WIDTH, Lane, Player, draft, play

from memra_driver import driver
from memra_driver.cache import Cache
from memra_driver.errors import MemraError
from memra_driver.graph import Graph
from memra_driver.round import Round


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
        self.lane = Lane(cache, rows)
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
            self.lane.close()
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
        self.graph.close()
        self.lane.close()


@contextmanager
def recorded(*args: Any, **options: Any) -> Iterator[Recorded]:
    made = Recorded(*args, **options)
    yield made
    made.close()


def warm(player: Player) -> None:
    """Room for attention of the widest step, which a capture cannot make."""
    play(player, WIDTH, 0)


def launch_by_hand(e: Any, graph: Graph) -> None:
    """As an engine launches a graph that it holds: nothing of ours runs before or behind."""
    if hasattr(graph, "handle"):
        driver.graph_launch(graph.handle, e.stream.handle)
    else:
        graph._run()


class Taps:
    """What stands in the tap sink of a cache, by what was armed and written."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.t = 0
        self.rows: dict[tuple[int, int], bytes] = {}  # by row and slot; what nobody wrote is undefined
        self.buffer, self.room = 0, 0  # a number for the buffer, and its elements
        self.addresses: dict[int, int] = {}  # by buffer

    def arm(self, ids: Sequence[int], t: int) -> None:
        need = t * len(ids) * HIDDEN
        if need > self.room:
            self.buffer, self.room = self.buffer + 1, need
        self.ids, self.t, self.rows = list(ids), t, {}

    def disarm(self) -> None:
        self.ids, self.t, self.rows = [], 0, {}

    def of(self, rows: int) -> list[int]:
        """The layers that a step of `rows` rows may tap."""
        return self.ids if rows <= self.t else []

    def write(self, start: int, tokens: Sequence[int], layers: Sequence[int]) -> None:
        """A step of these tokens at `start` has tapped those of `layers` that are armed."""
        for slot, il in enumerate(self.ids):
            if il in layers:
                for r, token in enumerate(tokens):
                    self.rows[r, slot] = rows_of(token, il, "residual", start + r, 1, HIDDEN).tobytes()

    def mark(self) -> tuple[Any, ...]:
        return list(self.ids), self.buffer, self.t

    def serve(self, made: Recorded) -> bool:
        """Whether the sink that `made` writes is armed: the same slots of the same buffer, and as many rows."""
        if not made.taps:
            return True
        assert made.sink is not None
        ids, buffer, t = made.sink
        return (self.ids, self.buffer) == (ids, buffer) and self.t >= t

    def check(self, cache: Cache) -> None:
        """The sink says what is armed, here and in C, and holds what was written; its address never changes."""
        sink, c = cache.dflash_taps, cache.as_c().contents.dflash_taps
        assert bool(c.present) == (sink is not None) == bool(self.ids)
        if sink is None:
            return
        assert (sink.layer_ids, sink.t, sink.hidden) == (self.ids, self.t, HIDDEN)
        assert (list(c.layer_ids[: c.n_taps]), c.t, c.hidden, c.buf.ptr) == (self.ids, self.t, HIDDEN, sink.buf.ptr)
        assert self.addresses.setdefault(self.buffer, sink.buf.ptr) == sink.buf.ptr
        held = sink.buf.to_numpy().reshape(self.t, len(self.ids), HIDDEN)
        assert {at: held[at].tobytes() for at in self.rows} == self.rows
