"""What a cache keeps beside the sequence: parked logits, tapped hidden states, the error record."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from memra_driver import layout
from memra_driver.errors import (
    ArrayError,
    CapacityError,
    ConfigError,
    DeviceMismatch,
    HealthError,
    MemraError,
    StateError,
)
from memra_driver.health import Health
from memra_driver.interop import is_slice, operand
from memra_driver.layers import DflashTapSink
from memra_driver.layout import CacheState
from memra_driver.memory import Borrowed
from memra_driver.place import ordinal, read_bytes, zero_actions
from memra_driver.rules import CacheRules

if TYPE_CHECKING:
    from memra_driver.clock import CacheClock


class CacheBeside(CacheRules):
    """Parked logits, tap sink and error record of a cache; `Cache` builds on it."""

    _lazy: dict[tuple[str, int], Any]  # by name and device index
    _retired: list[tuple[tuple[str, int], Any]]
    # What this side last knew to stand in the C struct, behind the fields that it knows it by: C may have changed them.
    _logits: tuple[int, Any] | None = None
    _taps: tuple[Any, DflashTapSink] | None = None

    @property
    def logits_at(self) -> int | None:
        """The length that the sequence had with the token whose logits are parked."""
        return None if self._c.logits_at < 0 else self._c.logits_at

    @property
    def logits_row(self) -> Any:
        """Where logits are parked, or were last; None before."""
        c = self._c.last_logits_dev.slice
        if self._logits is None or c.ptr != self._logits[0]:
            d = self.plan.placement[-1]
            self._logits = c.ptr, self._slice_of(c, d) if c.ptr else None
        return self._logits[1]

    @property
    def last_logits_dev(self) -> Any:
        """The parked logits, f32 of at least n_vocab, or None.

        A slice of the last layer's device may be assigned: it belongs to position pos + step_rows, and the caller
        closes it. Raises ArrayError for one that does not fit.
        """
        return self.logits_row if self._c.last_logits_dev.present else None

    @last_logits_dev.setter
    def last_logits_dev(self, row: Any) -> None:
        if row is None:
            self.hold_logits(None, None)
            return
        e = self.devices[self.plan.placement[-1]]
        _check_slice(row, "last_logits_dev", max(self.cfg.n_vocab, 1), e)
        self.hold_logits(row, self.pos + self.step_rows)

    @property
    def dflash_taps(self) -> DflashTapSink | None:
        """The armed sink, or None.

        A sink over the caller's own buffer may be assigned; the caller closes the buffer. Raises ConfigError,
        ArrayError, DeviceMismatch for one that does not fit.
        """
        c = self._c.dflash_taps
        if not c.present:
            return None
        armed = self._armed()
        if self._taps is None or self._taps[0] != armed:  # a C caller armed another
            ids = c.layer_ids[: c.n_taps]
            self._taps = armed, DflashTapSink(ids, self._slice_of(c.buf, self.plan.device_of(ids[0])), c.hidden, c.t)
        return self._taps[1]

    @dflash_taps.setter
    def dflash_taps(self, sink: DflashTapSink | None) -> None:
        if sink is None:
            self._taps, self._c.dflash_taps.present = None, 0
            return
        e = self._check_taps(sink.layer_ids, sink.t, sink.hidden)
        _check_slice(sink.buf, "dflash_taps.buf", sink.t * len(sink.layer_ids) * sink.hidden, e)
        self._hold_taps(sink, ordinal(e))

    def park_logits(self, e: Any, row: Any) -> None:
        """Copies one row of n_vocab f32 into `last_logits_dev`, in stream order; e is the last layer's device.

        They belong to position pos + step_rows, and are dropped when the sequence goes below it. The buffer is
        allocated at the first call (unless reserved) and keeps its address.
        """
        self._check_last_device(e, "park_logits")
        self.check_state("park_logits", CacheState.READY)
        self.check_recording("park_logits")
        if self.cfg.n_vocab < 1:
            raise ConfigError("park_logits needs n_vocab, which this model description lacks")
        source = operand(row, "row", (self.cfg.n_vocab,), (np.float32,), e, rows=1, out=False, bare=True)
        kept = self._plane_beside("logits", e, self.cfg.n_vocab)
        if source.ptr != kept.ptr:  # else they are there
            e.copy_bytes(kept.ptr, source.ptr, source.nbytes)
        self.hold_logits(kept, self.pos + self.step_rows)
        graph = self.recording
        if graph is not None:
            graph.move_of(cast("CacheClock", self)).parked = kept

    def take_logits(self, e: Any) -> Any:
        """The parked logits as a slice, or None; they stay parked. Waits for nothing."""
        self._check_last_device(e, "take_logits")
        self.check_state("take_logits", CacheState.READY, CacheState.PENDING_REPLAY)
        return self.last_logits_dev

    def arm_taps(self, e: Any, layer_ids: Sequence[int], t: int, hidden: int) -> None:
        """Makes room for the residual stream after each of layer_ids, for up to t rows of `hidden` f32.

        Slot order is the given order; `ops.tap_write` fills it. The layers share one device, e. A buffer that
        is large enough is used again, at the same address. What stands in it before it is written is undefined.
        """
        self.check_state("arm_taps", CacheState.READY, CacheState.PENDING_REPLAY)
        ids, t, hidden = [operator.index(il) for il in layer_ids], operator.index(t), operator.index(hidden)
        if self._check_taps(ids, t, hidden) is not e:
            raise DeviceMismatch(f"tap layer {ids[0]} does not live on {e!r}; tap layers share one device")
        buf = self._plane_beside("taps", e, t * len(ids) * hidden)
        self._hold_taps(DflashTapSink(ids, buf.view(0, t * len(ids) * hidden), hidden, t), ordinal(e))

    def disarm_taps(self) -> DflashTapSink | None:
        """Takes the sink out and returns it; its buffer is written again after the next arm_taps."""
        sink, self.dflash_taps = self.dflash_taps, None
        return sink

    def tap_slot(self, e: Any, il: int, rows: int) -> tuple[DflashTapSink, int]:
        """The armed sink and the slot of layer il in it, after checking that e owns it and the rows fit."""
        self.check_readable("tap_write")
        sink = self.dflash_taps
        if sink is None:
            raise StateError("tap_write: no taps are armed; call arm_taps first")
        if il not in sink.layer_ids:
            raise ConfigError(f"layer {il} is not tapped; {sink.layer_ids} are")
        if self.devices[self.plan.device_of(il)] is not e:
            raise DeviceMismatch(f"layer {il} does not live on {e!r}")
        if rows > sink.t:
            raise CapacityError(f"{rows} rows to tap; the sink was armed for {sink.t}")
        if self._armed() != (tuple(sink.layer_ids), sink.buf.ptr, sink.hidden, sink.t):
            raise StateError("tap_write: the fields of the armed sink were changed; assign or arm it again")
        graph = self.recording
        if graph is not None:
            graph.move_of(cast("CacheClock", self)).taps = sink
        return sink, sink.layer_ids.index(il)

    # The error record.

    def health(self) -> Health:
        """The error record, after the work queued before; false when it is empty. Waits."""
        self.check_open("health")
        return Health.read(
            read_bytes(self._planes["health", None, d], layout.HEALTH_BYTES) for d in range(len(self.devices))
        )

    def clear_health(self) -> None:
        """Empties the error record, in stream order: on all devices, or where one fails, on none.

        Waits only where there are several: what could not be cleared on all of them is put back.
        """
        self.check_open("clear_health")
        self.check_not_recording("clear_health")
        records = [self._planes["health", None, d] for d in range(len(self.devices))]
        found = [read_bytes(record, layout.HEALTH_BYTES) for record in records] if len(records) > 1 else []
        for d, record in enumerate(records):
            try:
                for action in zero_actions(self.devices[d], [record]):
                    action()
            except MemraError as error:
                for cleared, held in zip(records[:d], found, strict=False):
                    try:
                        cleared.copy_from(np.frombuffer(held, np.uint8))
                    except MemraError:
                        error.add_note(f"cleared, and could not be put back: {Health.read([held])}")
                raise

    def strict_health(self) -> Health | None:
        """What check_strict takes, read before the call that waits has changed anything; None unless strict."""
        return self.health() if self.plan.options.strict else None

    def check_strict(self, found: Health | None) -> None:
        if found:
            raise HealthError(f"{found}; clear_health() goes on")

    # Inside.

    def drop_logits_above(self, stands: int) -> None:
        """Drops parked logits whose token is among those that were given up."""
        if self.logits_at is not None and self.logits_at > stands:
            self.keep_logits(None)

    def keep_logits(self, at: int | None) -> None:
        """The logits in the buffer belong to the length `at`; None: they are forgotten, and the buffer stays."""
        self._c.logits_sure = 0
        self._c.logits_at = -1 if at is None else at
        self._c.last_logits_dev.present = int(at is not None)

    def hold_logits(self, row: Any, at: int | None) -> None:
        """The logits in `row` belong to the length `at`; None: to none."""
        c = self._c.last_logits_dev.slice
        if row is None:
            c.ptr = 0
        else:
            layout.put_slice(c, row, ordinal(self.devices[self.plan.placement[-1]]))
        self._logits = c.ptr, row
        self.keep_logits(at)

    def kept_logits(self) -> Any:
        """What restore_logits takes: where logits are parked, and whose they are."""
        at = self.logits_at if self._c.last_logits_dev.present else None
        return bytes(self._c.last_logits_dev.slice), self._logits, at, self._c.logits_sure

    def restore_logits(self, kept: Any) -> None:
        """Back to what kept_logits returned."""
        raw, self._logits, at, sure = kept
        self._c.last_logits_dev.slice = layout.SliceC.from_buffer_copy(raw)
        self.keep_logits(at)
        self._c.logits_sure = sure

    def _armed(self) -> tuple[Any, ...]:
        c = self._c.dflash_taps
        return tuple(c.layer_ids[: c.n_taps]), c.buf.ptr, c.hidden, c.t

    def _slice_of(self, c: layout.SliceC, d: int) -> Any:
        """The slice over memory that a C caller put here."""
        return Borrowed(self.devices[d].memory, c.ptr, c.len, layout.DTYPES[c.dtype])

    def _check_taps(self, ids: Sequence[int], t: int, hidden: int) -> Any:
        """The device that layers `ids` share."""
        for il in ids:
            if not 0 <= il < self.cfg.n_layer:
                raise ConfigError(f"tap of layer {il}; layers are 0 .. {self.cfg.n_layer - 1}")
        if not ids or len(set(ids)) < len(ids):
            raise ConfigError(f"taps {list(ids)}: at least one layer, and each once")
        if t < 1 or hidden < 1:
            raise ConfigError(f"taps of {t} rows of {hidden}; at least 1 each")
        at = {self.plan.device_of(il) for il in ids}
        if len(at) > 1:
            raise DeviceMismatch(f"tap layers {list(ids)} live on devices {sorted(at)}; tap layers share one device")
        return self.devices[at.pop()]

    def _hold_taps(self, sink: DflashTapSink, device: int) -> None:
        c = self._c.dflash_taps
        self._tap_ids = (ctypes.c_int32 * len(sink.layer_ids))(*sink.layer_ids)
        c.present, c.n_taps, c.layer_ids, c.hidden, c.t = 1, len(sink.layer_ids), self._tap_ids, sink.hidden, sink.t
        layout.put_slice(c.buf, sink.buf, device)
        self._taps = self._armed(), sink

    def _plane_beside(self, name: str, e: Any, n: int) -> Any:
        """The reserved plane, or one allocated now; a larger one replaces it."""
        key = name, next(d for d, device in enumerate(self.devices) if device is e)
        c = getattr(self._c, name)
        found = self._lazy.get(key) or self._planes.get((name, None, key[1]))
        if c.ptr and c.len >= n and c.device == ordinal(e) and (found is None or found.len < n):
            return self._slice_of(c, key[1])  # a C caller made it
        if found is not None and found.len >= n:
            return found
        if getattr(e, "recording", None) is not None:
            raise StateError(
                f"{name} need {n} elements, and nothing is allocated while a capture is open; do it once before"
            )
        made = e.uninit(n)
        if key in self._lazy:
            self._retired.append((key, self._lazy[key]))  # a graph may hold its address
        self._lazy[key] = made
        layout.put_slice(c, made, ordinal(e))
        return made

    def _check_last_device(self, e: Any, what: str) -> None:
        last = self.devices[self.plan.placement[-1]]
        if e is not last:
            raise DeviceMismatch(f"{what}: logits live on the last layer's device, {last!r}, not on {e!r}")
        if not hasattr(e, "copy_bytes"):
            raise ArrayError(f"{e!r} copies by its seven operations only")


def _check_slice(value: Any, name: str, length: int, e: Any) -> None:
    """What a caller may put into the cache: an open f32 slice of at least `length` elements on e."""
    found = operand(value, name, (), (np.float32,), e, rows=None, out=True)
    if not is_slice(value):
        raise ArrayError(f"{name} is a {type(value).__name__}; the cache keeps it, so it takes a CudaSlice")
    if found.len < length:
        raise ArrayError(f"{name} has {found.len} elements; it takes at least {length}")
