"""The scalars of a cache, in C memory, and what its state allows now.

`Cache` builds on this. Operations, rounds and batches ask here before they touch the device: a refusal leaves
every byte and every scalar as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memra_driver import layout
from memra_driver.config import ModelConfig
from memra_driver.errors import CapacityError, ConfigError, DeviceMismatch, SnapshotError, StateError
from memra_driver.layers import KvLayer, RecurLayer, fixed, scalar
from memra_driver.layout import CacheState, StepOp
from memra_driver.snapshot import CacheSnapshot


class CacheRules:
    """Layers, clock and state of a cache, without its buffers."""

    cfg: ModelConfig
    devices: tuple[Any, ...]
    kv: list[KvLayer | None]
    recur: list[RecurLayer | None]
    _c: layout.CacheC

    pos = scalar("pos", "tokens committed; may be assigned, then call sync_d")
    max_ctx = fixed("max_ctx", "capacity in tokens")
    step_rows = fixed("step_rows", "rows of the open step; 0: none is open")
    replay_to = fixed("replay_to", "where a pending replay ends; 0: none is pending")
    generation = fixed("generation", "counts resets")
    id = fixed("id", "unique in the process")

    @property
    def state(self) -> CacheState:
        """What the cache allows now."""
        return CacheState(self._c.state)

    # Checks. Each raises before anything is changed.

    def check_device(self, e: Any) -> None:
        if not any(e is each for each in self.devices):
            raise DeviceMismatch(f"{e!r} is none of this cache's devices {list(self.devices)}")

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

    def check_settled(self, what: str) -> None:
        """Ready, and no step open."""
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
        self.check_length("pos", self.pos)
        for il, layer in enumerate(self.kv):
            if layer is not None:
                self.check_length(f"layer {il}: len", layer.len)

    def check_length(self, name: str, value: int) -> None:
        if not 0 <= value <= self.max_ctx:
            raise StateError(f"{name} is {value}; it must lie in 0 .. {self.max_ctx}")

    def check_owner(self, snap: CacheSnapshot) -> None:
        if snap.cache_id != self.id:
            raise SnapshotError(f"snapshot of cache {snap.cache_id}; this is cache {self.id}")
        if snap.is_closed:
            raise SnapshotError("this snapshot is closed")

    def check_shapes(self, what: str, snap: CacheSnapshot) -> None:
        """A snapshot's fields may have been assigned; they must still fit the layers that they speak of."""
        wanted = {
            "conv": [None if layer is None else layer.conv_state.len for layer in self.recur],
            "ssm": [None if layer is None else layer.ssm_state.len for layer in self.recur],
        }
        for name, lens in wanted.items():
            found = [None if kept is None else kept.len for kept in getattr(snap, name)]
            if found != lens:
                raise SnapshotError(f"{what}: shape mismatch ({name}): {found} elements, the layers have {lens}")
        if [saved is None for saved in snap.kv_len] != [layer is None for layer in self.kv]:
            raise SnapshotError(f"{what}: kv_len {snap.kv_len} names other layers than those with K/V")
        if not all(0 <= number <= self.max_ctx for number in (snap.pos, *filter(None, snap.kv_len))):
            raise SnapshotError(f"{what}: pos {snap.pos}, kv_len {snap.kv_len}; they must lie in 0 .. {self.max_ctx}")

    # One operation of a step.

    @contextmanager
    def step_op(self, e: Any, il: int, op: StepOp, rows: int) -> Iterator[KvLayer | RecurLayer]:
        """One mutating operation of a step: checks, yields the layer, and notes the step when it was enqueued."""
        layer = self.layer(e, il, op)
        name = op.name or ""
        self.check_state(name.lower(), CacheState.READY, CacheState.PENDING_REPLAY)
        if self.step_rows and rows != self.step_rows:
            raise StateError(f"layer {il}: {rows} rows, but the open step has {self.step_rows}; advance first")
        if layer.step_ops & op:
            raise StateError(f"layer {il} has run {name.lower()} in this step; each runs once, then advance")
        self.check_replay(name.lower(), rows)
        self.check_length("pos", self.pos)
        if isinstance(layer, KvLayer):
            self.check_length(f"layer {il}: len", layer.len)
        need = self.pos + rows
        if need > self.max_ctx:
            raise CapacityError(
                f"layer {il}: {rows} rows behind len {self.pos} need {need} tokens; max_ctx is {self.max_ctx}"
            )
        if isinstance(layer, KvLayer) and layer.len < self.pos:
            raise StateError(
                f"layer {il}: len is {layer.len}, pos is {self.pos}: nobody wrote rows {layer.len} .. {self.pos - 1};"
                " set len or roll back"
            )
        yield layer
        layer._c.step_ops |= op
        self._c.step_rows = rows

    def check_readable(self, what: str) -> None:
        """Refuses an operation that reads the sequence where the host does not know where it stands."""
        self.check_state(what, CacheState.READY, CacheState.PENDING_REPLAY)

    def layer(self, e: Any, il: int, op: StepOp) -> KvLayer | RecurLayer:
        """Layer il, of the kind that op works on, after checking that e owns it."""
        if not 0 <= il < self.cfg.n_layer:
            raise ConfigError(f"layer {il}; layers are 0 .. {self.cfg.n_layer - 1}")
        found = self.kv[il] if op is StepOp.APPEND else self.recur[il]
        if found is None:
            kind = "K/V" if op is StepOp.APPEND else "recurrent state"
            raise ConfigError(f"layer {il} has no {kind}")
        if e is not found.owner:
            raise DeviceMismatch(f"layer {il} lives on {found.owner!r}, not on {e!r}")
        return found

    def kv_layer(self, il: int) -> KvLayer:
        layer = self.kv[il]
        if layer is None:
            raise ConfigError(f"layer {il} has no K/V")
        return layer

    def end_step(self, pos: int) -> None:
        for layer in (*self.kv, *self.recur):
            if layer is not None:
                layer._c.step_ops = 0
        self._c.step_rows = 0
        self._c.pos = pos

    def taint(self) -> None:
        self._c.state = CacheState.TAINTED
