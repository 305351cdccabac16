"""The clock of a cache: pos and the lengths on the host, and their mirrors on the devices."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from memra_driver.beside import CacheBeside
from memra_driver.errors import CapacityError, ConfigError, StateError
from memra_driver.layout import CacheState, Invalid
from memra_driver.place import (
    COUNTERS_PER_LAUNCH,
    Action,
    commit_counter_actions,
    copy_actions,
    counter_actions,
    run_actions,
    signed_word,
)
from memra_driver.prepared import Advance, enqueue
from memra_driver.snapshot import CacheSnapshot, snapshots_of

if TYPE_CHECKING:
    from memra_driver.cache import Cache
    from memra_driver.graph import Graph, Move


class CacheClock(CacheBeside):
    """How a cache moves, and how host and device agree on where it stands; `Cache` builds on it."""

    _known_advance: Advance | None = None

    @functools.cached_property
    def _snapshots(self) -> weakref.WeakSet[CacheSnapshot]:
        """Those that somebody holds; open or closed."""
        return weakref.WeakSet()

    def advance(self, e: Any, n: int = 1) -> None:
        """Ends a step: pos += n, and pos_d follows in stream order. With no step open it moves pos alone."""
        if type(n) is not int:
            n = operator.index(n)
        if self._known_advance is not None and self._known_advance.again(e, self, n):
            return
        self.check_device(e)
        self.check_advance(n)
        if n:
            ends = bool(self.step_rows) and not self.device_clock
            run_actions(self.commit_actions(None, n, n, {}, self.pos + n), self.taint)
            self.advanced(n)
            if ends and all(getattr(each, "prepares", False) for each in self.devices):
                self._known_advance = Advance(e, cast("Cache", self))

    def check_advance(self, n: int) -> None:
        """What advance refuses."""
        self.check_recording("advance")
        if self.open_round is not None:
            raise StateError("advance: a round is open; its commit moves pos")
        self.check_steppable("advance")
        if self.step_rows and n != self.step_rows:
            raise StateError(
                f"advance by {n}, but a step of {self.step_rows} rows is open; advance by {self.step_rows}"
            )
        if n < 0:
            raise StateError(f"advance by {n}; use rollback or truncate to go back")
        self.check_replay("advance", n)
        self.check_length("pos", self.pos)
        if self.pos + n > self.max_ctx:
            raise CapacityError(
                f"advance from {self.pos} by {n} needs {self.pos + n} positions; max_ctx is {self.max_ctx}"
            )

    def advanced(self, n: int) -> None:
        """The host's part of an advance that was enqueued."""
        if not self.step_rows and self.state is CacheState.READY and self.recording is None:
            self.give_up(self.pos)  # the engine wrote rows of its own from here on
        graph = self.recording
        if graph is not None:
            graph.note(self, self.pos + n)
        self.end_step(self.pos + n)
        if self.state is CacheState.PENDING_REPLAY and self.pos == self.replay_to:
            self._c.state, self._c.replay_to = CacheState.READY, 0

    def sync_d(self, e: Any) -> None:
        """Stamps every len_d and pos_d from the host values, in stream order; call it after assigning len or pos."""
        self.check_device(e)
        self.check_not_recording("sync_d")
        self.check_state("sync_d", CacheState.READY, CacheState.PENDING_REPLAY)
        self.check_lengths()
        run_actions(self._stamp_actions(), self.taint)
        self.give_up(max(self.pos + self.step_rows, self.replay_to))

    def settle(self, e: Any) -> None:
        """After a device-side accept count: reads the counters back, and the host's follow. Waits."""
        self.check_device(e)
        self.check_not_recording("settle")
        if self.open_round is not None:
            raise StateError("settle: a round is open; commit or leave it first")
        self.check_state("settle", CacheState.READY, CacheState.UNSETTLED)
        if self.state is CacheState.READY:
            return
        pos = int(self._planes["pos_d", None, 0].to_numpy()[0])
        lens = {il: int(layer.len_d.to_numpy()[0]) for il, layer in enumerate(self.kv) if layer is not None}
        found = self.strict_health()
        for il, length in lens.items():
            self.kv_layer(il).len = length
        if self._c.logits_sure:
            self.keep_logits(self._c.logits_at - (self.pos - pos))
        self.end_step(pos)
        self.set_state(CacheState.READY)
        self.drop_logits_above(pos)
        self.check_strict(found)

    def unsettle(self, since: int) -> None:
        """The devices know a count that the host does not: pos is the most that it can be, and at least `since`."""
        if self.state is not CacheState.UNSETTLED:
            self._c.sure_pos = since
        self.set_state(CacheState.UNSETTLED)
        graph = self.recording
        if graph is not None:
            graph.move_of(self).unsettles = True

    def drop_unsure_logits(self) -> None:
        """Before tokens follow on a count that the host does not know: whether logits parked with it stand, or where
        logits parked behind it, is lost."""
        if self.state is CacheState.UNSETTLED:
            self.drop_logits_above(self._c.sure_pos)

    def prepare_replay(self, e: Any, graph: Graph | None = None, launches: int = 1) -> None:
        """Before a recorded graph is launched: stamps the counters, and brings each state to where it was born.

        At most one device copy a layer, and only where the two buffers have changed places an odd number of
        times. `Graph.launch` calls it; an engine that launches the graph itself does so too. Waits for nothing.
        With the graph and how often it will be launched, what `replayed` would refuse is refused here, in time.
        """
        self.check_device(e)
        self.check_not_recording("prepare_replay")
        if graph is None:
            self.check_replayable("prepare_replay", 0)
        else:
            self._check_launches("prepare_replay", graph, launches)
        away = [layer for layer in self.recur if layer is not None and layer.ssm_state.ptr != layer.home.ptr]
        actions: list[Action] = []
        for device in self.devices:
            actions += copy_actions(device, [(layer.home, layer.away) for layer in away if layer.owner is device])
        if self.state is CacheState.READY:
            actions += self._stamp_actions()
        run_actions(actions, self.taint)
        for layer in away:
            layer.swap()

    def replayed(self, graph: Graph, launches: int) -> None:
        """A recorded graph ran `launches` times since prepare_replay: the host's clock moves as the ops would have."""
        launches = operator.index(launches)
        move = self._check_launches("replayed", graph, launches)
        if not launches:
            return
        begin = self.pos
        if self.state is CacheState.READY:
            self.give_up(begin)
        if move.unsettles or not self._c.logits_sure:
            self.drop_unsure_logits()
        if move.parked is not None:
            last = begin + move.tokens * (launches - 1)
            self.hold_logits(move.parked, None if move.logits_at is None else last + move.logits_at)
            # Its token stands wherever the cache does, though the host knows only the most that this can be.
            self._c.logits_sure = self.state is CacheState.UNSETTLED and not move.unsettles
        self.end_step(self.pos + move.tokens * launches)
        for il in move.appended:
            self.kv_layer(il).len = self.pos
        if move.unsettles:
            self.unsettle(begin)

    def _check_launches(self, what: str, graph: Graph, launches: int) -> Move:
        """What one launch of the graph does here, where `launches` of them have room."""
        move = next((move for move in graph.moves if move.cache is self), None)
        if move is None:
            raise ConfigError("this graph moves another cache")
        if launches < 0:
            raise ConfigError(f"{launches} launches")
        self.check_replayable(what, move.need + move.tokens * (launches - 1) if launches else 0)
        if launches:
            move.check()
        return move

    def give_up(self, stands: int) -> None:
        """K/V rows at and above `stands` are given up: snapshots and logits that count on them are no longer true."""
        self.drop_logits_above(stands)
        for snap in snapshots_of(self._c):
            if snap.pos > stands and snap.invalid == Invalid.VALID:
                snap.invalid, snap.given_up = Invalid.GIVEN_UP, stands

    def commit_actions(
        self, counts: Sequence[Any] | None, accept: int, rows: int, lens: dict[int, int], pos: int
    ) -> list[Action]:
        """Ends a step on the devices: len_d of the layers of `lens`, and pos_d.

        With a device-side count, one for each device, or where kernels take the position from the device, they move by
        the accepted rows; else they are stamped with `lens` and `pos`.
        """
        actions: list[Action] = []
        moved = counts is not None or self.device_clock
        for d, e in enumerate(self.devices):
            if not moved:
                actions += self._counter_actions(d, lens, pos)
                continue
            layers = self.plan.counter_layers[d]
            counters = [self.kv_layer(il).len_d for il in layers]
            chosen = [i for i, il in enumerate(layers) if il in lens]
            pos_d, health = self._planes["pos_d", None, d], self._planes["health", None, d]
            packed = self._planes.get(("counters", None, d))
            count = None if counts is None else counts[d]
            actions += commit_counter_actions(e, counters, packed, chosen, pos_d, count, accept, rows, health)
        return actions

    def tape(self, il: int, rows: int) -> list[Any]:
        """Where a round of `rows` rows keeps x, q, k, v, g_log and beta of layer il, one behind the other."""
        layer = self.recur[il]
        assert layer is not None
        plane = self.step_tape(il)
        vector, gate = rows * layer.num_v * layer.state_size, rows * layer.num_v
        parts, at = [], 0
        for size in (rows * layer.conv_dim, vector, vector, vector, gate, gate):
            parts.append(plane.view(at, at + size))
            at += size
        return parts

    def step_tape(self, il: int) -> Any:
        """The whole tape of layer il: x, and behind it what the scan of a round keeps."""
        return self._planes["tape", il, self.plan.device_of(il)]

    def scan_tape(self, il: int, rows: int) -> Any:
        """Where the scan of a round keeps its operands: the tape behind x."""
        layer, plane = self.recur[il], self.step_tape(il)
        assert layer is not None
        return plane.view(rows * layer.conv_dim, plane.len)

    def _stamp_actions(self) -> list[Action]:
        """Every len_d and pos_d from the host values."""
        lens = {il: layer.len for il, layer in enumerate(self.kv) if layer is not None}
        actions: list[Action] = []
        for d in range(len(self.devices)):
            actions += self._counter_actions(d, lens, self.pos)
        return actions

    def _counter_actions(self, d: int, lens: dict[int, int], pos: int) -> list[Action]:
        """Stamps len_d of the layers of `lens` that live on device d, and its pos_d."""
        layers = self.plan.counter_layers[d]
        mine = [lens[il] for il in layers if il in lens] if lens else []
        if not mine or (len(mine) == len(layers) < COUNTERS_PER_LAUNCH and mine.count(mine[0]) == len(mine)):
            action = self._counter_launch(d, len(mine), mine[0] if mine else pos, pos)
            if action is not None:
                return [action]
        counters, values, packed = self._counters(d, lens, pos)
        return counter_actions(self.devices[d], counters, packed, values, self._planes["health", None, d])

    def _counters(self, d: int, lens: dict[int, int], pos: int) -> tuple[list[Any], dict[int, int], Any]:
        """The counters of device d, by index the values of those of `lens` and of pos_d, the plane of all or None."""
        layers = self.plan.counter_layers[d]
        counters = [self.kv_layer(il).len_d for il in layers] + [self._planes["pos_d", None, d]]
        values = {i: lens[il] for i, il in enumerate(layers) if il in lens} | {len(layers): pos}
        return counters, values, self._planes.get(("counters", None, d))

    def _counter_launch(self, d: int, n: int, length: int, pos: int) -> Action | None:
        """The launch that stamps n len_d of device d (all of them, or 0) and its pos_d.

        None where the counters do not lie side by side, or the device prepares no launches.
        """
        e, packed = self.devices[d], self._planes.get(("counters", None, d))
        if packed is None or not getattr(e, "prepares", False):
            return None

        def args() -> tuple[Any, ...]:
            counters, masks = (packed, ((1 << n) - 1, 1 << n)) if n else (self._planes["pos_d", None, d], (0, 1))
            words = [signed_word(mask >> shift) for mask in masks for shift in (0, 64)]
            return counters, length, pos, *words, self._planes["health", None, d], 0

        return enqueue(e, cast("Cache", self), ("counters", d, n), "set_counters", args, {"a": length, "b": pos})
