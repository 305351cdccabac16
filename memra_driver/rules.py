"""The scalars of a cache, in C memory, and what its state allows now.

`Cache` builds on this. Operations, rounds and batches ask here before they touch the device: a refusal leaves
every byte and every scalar as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from memra_driver import layout
from memra_driver.config import ModelConfig
from memra_driver.errors import CapacityError, ConfigError, DeviceMismatch, MemraError, SnapshotError, StateError
from memra_driver.graph import captures_of_this_thread, open_captures
from memra_driver.layers import KvLayer, RecurLayer, fixed, scalar
from memra_driver.layout import CacheState, Recorder, StepOp
from memra_driver.place import Planes
from memra_driver.plan import CachePlan
from memra_driver.snapshot import CacheSnapshot
from memra_driver.structs import CacheStructs

if TYPE_CHECKING:
    from memra_driver.cache import Cache
    from memra_driver.graph import Graph
    from memra_driver.kept import Kept
    from memra_driver.round import Round


class At(NamedTuple):
    """Where a launch finds its position and its sequences: pos_d where not None, else slot; or a table of sequences."""

    pos_d: Any
    slot: int
    seqs: Any
    n_seqs: int
    health: Any


def op_name(op: StepOp) -> str:
    """What errors call an operation of a step."""
    return "recur_step" if op == StepOp.CONV | StepOp.SCAN else str(op.name).lower()


def _shape(plane: Any) -> tuple[Any, ...]:
    """Elements, dtype and device of a slice, as far as it has them."""
    dtype = getattr(plane, "dtype", None)
    return getattr(plane, "len", None), None if dtype is None else np.dtype(dtype), getattr(plane, "device", None)


class CacheRules:
    """Layers, clock and state of a cache, without its buffers."""

    cfg: ModelConfig
    devices: tuple[Any, ...]
    plan: CachePlan
    _planes: Planes
    prepared: Kept
    _round: Round | None = None
    _c: layout.CacheC
    _structs: CacheStructs

    # Made when first asked for, as CacheStructs says.

    @functools.cached_property
    def kv(self) -> list[KvLayer | None]:
        """The K/V of each layer; None where it has none."""
        return [
            KvLayer(self._structs.kv[il], self.plan, il, self.devices[d], self._planes) if has_kv else None
            for il, (d, has_kv, _) in enumerate(self.plan.kinds)
        ]

    @functools.cached_property
    def recur(self) -> list[RecurLayer | None]:
        """The recurrent state of each layer; None where it has none."""
        return [
            RecurLayer(self._structs.recur[il], self.plan, il, self.devices[d], self._planes) if has_state else None
            for il, (d, _, has_state) in enumerate(self.plan.kinds)
        ]

    @functools.cached_property
    def _attending(self) -> list[tuple[int, KvLayer]]:
        return [(il, layer) for il, layer in enumerate(self.kv) if layer is not None]

    @functools.cached_property
    def _step_ops(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Those of all layers, in the C structs."""
        return tuple(layout.column(c, "step_ops", np.uint32) for c in (self._structs.kv, self._structs.recur))

    pos = scalar("pos", "tokens committed; may be assigned, then call sync_d")
    max_ctx = fixed("max_ctx", "capacity in tokens")
    step_rows = fixed("step_rows", "rows of the open step; 0: none is open")
    replay_to = fixed("replay_to", "where a pending replay ends; 0: none is pending")
    generation = fixed("generation", "counts resets")
    id = fixed("id", "unique in the process")

    @property
    def state(self) -> CacheState:
        """What the cache allows now."""
        try:
            return CacheState(self._c.state)
        except ValueError:
            raise StateError(f"state is {self._c.state} in the C struct, which is none of enum memra_state") from None

    @property
    def recording(self) -> Graph | None:
        """The graph that is being recorded on one of the cache's devices."""
        if not open_captures:
            return None
        return next((e.recording for e in self.devices if getattr(e, "recording", None) is not None), None)

    @property
    def device_clock(self) -> bool:
        """Whether kernels must take the position from pos_d: in a capture, or where the host does not know it."""
        return self.state is CacheState.UNSETTLED or self.recording is not None

    @property
    def open_round(self) -> Round | None:
        """The round that is open, whoever began it."""
        width = self._c.round_width
        if not width:
            return None
        if self._round is None or self._round.width != width:
            from memra_driver.round import Round

            self._round = Round.begun(cast("Cache", self))
        return self._round

    def begin_round(self, round_: Round | None, width: int) -> None:
        """A round of `width` is open from now on; None: none is."""
        self._round, self._c.round_width = round_, width

    def set_state(self, state: CacheState) -> None:
        self._c.state = state

    def set_recorder(self, recorder: Recorder) -> None:
        self._c.recorder = recorder

    # Checks. Each raises before anything is changed.

    def check_recording(self, what: str) -> None:
        """In a capture: the graph learns of the cache, or `what` is refused."""
        self._check_recorder(what)
        graph = self.recording
        if graph is None:
            self._check_other_captures(what)
            return
        if any(getattr(e, "recording", None) is None for e in self.devices):
            raise StateError(f"{what}: a capture belongs to one device; this cache spans {len(self.devices)}")
        graph.touch(cast("Cache", self))

    def check_not_recording(self, what: str) -> None:
        self._check_recorder(what)
        if self.recording is not None:
            raise StateError(f"{what}: a capture is open; only steps and rounds can be recorded")
        self._check_other_captures(what)

    def _check_other_captures(self, what: str) -> None:
        others = captures_of_this_thread()
        if others:
            raise StateError(
                f"{what}: a capture is open on {others[-1].e!r}, and this cache lives on {list(self.devices)};"
                " a capture belongs to one device"
            )

    def _check_recorder(self, what: str) -> None:
        if self._c.recorder == Recorder.C:
            raise StateError(f"{what}: the C library records this cache; end that capture first")

    def check_device(self, e: Any) -> None:
        if e is not self.devices[0] and not any(e is each for each in self.devices):
            raise DeviceMismatch(f"the {e!r} given is none of the objects of this cache, {list(self.devices)}")

    def check_state(self, what: str, *allowed: CacheState) -> None:
        state = self.state
        if state in allowed:
            return
        reasons = {
            CacheState.CLOSED: "the cache is closed",
            CacheState.TAINTED: "tainted by an earlier driver error; reset, close, or roll back with accept_len 0",
            CacheState.UNSETTLED: "the device counters are ahead of the host; call settle first",
            CacheState.PENDING_REPLAY: f"pending replay of {self.replay_to - self.pos} tokens; run them first",
        }
        raise StateError(f"{what}: {reasons.get(state, state.name)}")

    def check_open(self, what: str) -> None:
        """Refused on a closed cache only."""
        if self.state is CacheState.CLOSED:
            self.check_state(what)

    def check_settled(self, what: str) -> None:
        """Ready, and no step, round or capture open."""
        c = self._c
        if c.state or c.recorder or c.round_width or c.step_rows or open_captures:  # a closer look
            self.check_not_recording(what)
            if self.open_round is not None:
                raise StateError(f"{what}: a round is open; commit or leave it first")
            self.check_state(what, CacheState.READY)
            if self.step_rows:
                raise StateError(f"{what}: a step of {self.step_rows} rows is open; advance or roll back first")
        self.check_lengths()

    def check_replay(self, what: str, rows: int) -> None:
        left = self.replay_to - self.pos
        if self.state is CacheState.PENDING_REPLAY and rows > left:
            raise StateError(f"{what} of {rows} rows: pending replay of {left} tokens; a step may take at most those")

    def check_lengths(self) -> None:
        """Lengths may have been assigned, here or from C; nothing is read through a wrong one."""
        most = self.max_ctx
        self.check_length("pos", self.pos)
        for il, layer in self._attending:
            if not 0 <= layer.len <= most:
                self.check_length(f"layer {il}: len", layer.len)

    def check_not_behind(self, il: int) -> None:
        """Rows are appended behind rows that somebody wrote."""
        length = self.kv_layer(il).len
        if length < self.pos:
            raise StateError(
                f"layer {il}: len is {length}, pos is {self.pos}: nobody wrote rows {length} .. {self.pos - 1};"
                " set len or roll back"
            )

    def check_not_ahead(self, il: int) -> None:
        """Rounds and captures set len_d to the position where they end: rows that stand above pos would be lost."""
        length = self.kv_layer(il).len
        if length > self.pos:
            raise StateError(
                f"layer {il}: len is {length}, pos is {self.pos}: a round or a recorded step would give up rows"
                f" {self.pos} .. {length - 1}; set len to pos, then sync_d"
            )

    def check_length(self, name: str, value: int) -> None:
        if not 0 <= value <= self.max_ctx:
            raise StateError(f"{name} is {value}; it must lie in 0 .. {self.max_ctx}")

    def check_owner(self, snap: CacheSnapshot) -> None:
        if not isinstance(snap, CacheSnapshot):
            raise SnapshotError(f"a {type(snap).__name__} is no CacheSnapshot; capi.calls takes those of the C library")
        if snap.cache_id != self.id:
            raise SnapshotError(f"snapshot of cache {snap.cache_id}; this is cache {self.id}")
        if snap.is_closed:
            raise SnapshotError("this snapshot is closed")

    def check_shapes(self, what: str, snap: CacheSnapshot) -> None:
        """A snapshot's fields may have been assigned; they must still fit the layers that they speak of."""
        for name, plane in (("conv", "conv_state"), ("ssm", "ssm_state")):
            wanted = [None if layer is None else _shape(getattr(layer, plane)) for layer in self.recur]
            found = [None if kept is None else _shape(kept) for kept in getattr(snap, name)]
            if found != wanted:
                raise SnapshotError(f"{what}: shape mismatch ({name}): {found}, the layers have {wanted}")
        self.check_saved(what, snap)

    def check_saved(self, what: str, snap: CacheSnapshot) -> None:
        """The numbers of a snapshot: lengths of the layers that have K/V, within the cache."""
        if snap.is_as_stamped() and 0 <= snap.pos <= self.max_ctx:
            return
        if [saved is None for saved in snap.kv_len] != [layer is None for layer in self.kv]:
            raise SnapshotError(f"{what}: kv_len {snap.kv_len} names other layers than those with K/V")
        if not all(0 <= number <= self.max_ctx for number in (snap.pos, *filter(None, snap.kv_len))):
            raise SnapshotError(f"{what}: pos {snap.pos}, kv_len {snap.kv_len}; they must lie in 0 .. {self.max_ctx}")

    # One operation of a step.

    @property
    def planes(self) -> Planes:
        """Its buffers by name, layer and device index."""
        return self._planes

    batch: None = None  # a Cache stands for itself; a CacheBatch for several

    @property
    def members(self) -> tuple[Cache, ...]:
        return (cast("Cache", self),)

    def at(self, il: int) -> At:
        """Where a launch for layer il finds its position."""
        d = self.plan.device_of(il)
        pos_d = self._planes["pos_d", None, d] if self.device_clock else None
        return At(pos_d, self.pos, None, 1, self._planes["health", None, d])

    @contextmanager
    def step(self, e: Any, il: int, op: StepOp, rows: int) -> Iterator[At]:
        """One mutating operation of a step: checks, yields where it works, and notes the step when it was enqueued."""
        with self.step_op(e, il, op, rows):
            yield self.at(il)

    def check_attend(self, il: int, rows: int) -> None:
        """Every row that the query rows see was written."""
        layer = self.kv_layer(il)
        self.check_length("pos", self.pos)
        self.check_length(f"layer {il}: len", layer.len)
        if layer.len < self.pos + rows:
            raise StateError(
                f"layer {il}: attend of {rows} rows at position {self.pos}, but only {layer.len} rows stand"
            )

    def check_settled_read(self, what: str) -> None:
        """Refused in a capture, or where the host does not know the lengths."""
        self.check_not_recording(what)
        self.check_state(what, CacheState.READY, CacheState.PENDING_REPLAY)

    @contextmanager
    def step_op(self, e: Any, il: int, op: StepOp, rows: int) -> Iterator[KvLayer | RecurLayer]:
        """One mutating operation of a step: checks, yields the layer, and notes the step when it was enqueued."""
        layer = self.check_step(e, il, op, rows)
        try:
            yield layer
            self.note_step(layer._c, int(op), rows)
        except MemraError:
            raise  # the driver took nothing
        except BaseException:
            self.taint()  # interrupted: whether the device has it, nobody knows
            raise

    def check_step(self, e: Any, il: int, op: StepOp, rows: int) -> KvLayer | RecurLayer:
        """Whether one mutating operation of a step may run now; returns its layer."""
        layer = self.layer(e, il, op)
        name = op_name(op)
        self.check_recording(name)
        self.check_steppable(name)
        if self.open_round is not None and rows > self.open_round.width:
            raise CapacityError(f"layer {il}: {rows} rows in a round of width {self.open_round.width}")
        if self.step_rows and rows != self.step_rows:
            raise StateError(f"layer {il}: {rows} rows, but the open step has {self.step_rows}; advance first")
        if layer.step_ops & op:
            ran = op_name(StepOp(layer.step_ops & op))
            raise StateError(f"layer {il} has run {ran} in this step; each runs once, then advance")
        self.check_replay(name, rows)
        self.check_length("pos", self.pos)
        if isinstance(layer, KvLayer):
            self.check_length(f"layer {il}: len", layer.len)
        need = self.pos + rows
        if need > self.max_ctx:
            raise CapacityError(
                f"layer {il}: {rows} rows behind len {self.pos} need {need} tokens; max_ctx is {self.max_ctx}"
            )
        if isinstance(layer, KvLayer):
            self.check_not_behind(il)
            if self.open_round is not None or self.recording is not None:
                self.check_not_ahead(il)
        return layer

    def note_step(self, layer_c: Any, op: int, rows: int) -> None:
        """The operation was enqueued: it belongs to the step, or opens one."""
        c, graph = self._c, self.recording
        if not c.step_rows and c.state == CacheState.READY and graph is None:
            cast("Cache", self).give_up(c.pos)  # rows from pos on are new, whatever stood there
        layer_c.step_ops |= op
        c.step_rows = rows
        if graph is not None:
            graph.note(cast("Cache", self), c.pos + rows)

    def check_steppable(self, what: str) -> None:
        """Ready or replaying; unsettled only in a round or a capture, which take the position from the device."""
        allowed = [CacheState.READY, CacheState.PENDING_REPLAY]
        if self.open_round is not None or self.recording is not None:
            allowed.append(CacheState.UNSETTLED)
        self.check_state(what, *allowed)

    def check_readable(self, what: str) -> None:
        """An operation that reads the sequence and changes nothing."""
        self.check_recording(what)
        self.check_steppable(what)

    def check_replayable(self, what: str, need: int) -> None:
        """A recorded step or round may be launched: ready or unsettled, no step open, room for `need` rows."""
        self.check_state(what, CacheState.READY, CacheState.UNSETTLED)
        if self.open_round is not None:
            raise StateError(f"{what}: a round is open; commit or leave it first")
        if self.step_rows:
            raise StateError(f"{what}: a step of {self.step_rows} rows is open; advance or roll back first")
        self.check_lengths()
        if self.pos + need > self.max_ctx:
            raise CapacityError(f"{what}: {need} rows behind position {self.pos}; max_ctx is {self.max_ctx}")

    def layer(self, e: Any, il: int, op: StepOp) -> KvLayer | RecurLayer:
        """Layer il, of the kind that op works on, after checking that e owns it."""
        self.check_open(f"layer {il}")
        if not 0 <= il < self.cfg.n_layer:
            raise ConfigError(f"layer {il}; layers are 0 .. {self.cfg.n_layer - 1}")
        found = self.kv[il] if op is StepOp.APPEND else self.recur[il]
        if found is None:
            kind = "K/V" if op is StepOp.APPEND else "recurrent state"
            layers: list[Any] = [*(self.kv if op is StepOp.APPEND else self.recur)]
            owners = [i for i, each in enumerate(layers) if each is not None]
            raise ConfigError(f"layer {il} has no {kind}; layers {owners} have")
        if e is not found.owner:
            raise DeviceMismatch(f"layer {il} lives on {found.owner!r}, another object than the {e!r} given")
        return found

    def kv_layer(self, il: int) -> KvLayer:
        layer = self.kv[il]
        if layer is None:
            raise ConfigError(f"layer {il} has no K/V")
        return layer

    def end_step(self, pos: int) -> None:
        for step_ops in self._step_ops:
            step_ops.fill(0)
        self._c.step_rows = 0
        self._c.pos = pos

    def taint(self) -> None:
        self._c.state = CacheState.TAINTED
