"""One sequence's state in a hybrid model: the Rust struct `memra_kv::Cache`, field for field.

Two clocks run in a cache. `pos` counts the tokens that are committed; each attention layer's
`len` counts the K/V rows that stand, and a recurrent layer stands at `pos`. A step of T rows works
on positions pos .. pos+T-1 and ends with `advance`. After it, len == len_d == max(pos, replay_to)
in every layer that took part.

What a cache allows is its `state`:

    ready           everything
    unsettled       settle, reset, close, report (the device knows counts that the host does not)
    pending replay  after rollback(accept_len > 0): K/V stands at replay_to, the recurrent state at
                    pos. Steps up to replay_to, rollback, reset, close, digest, report
    tainted         a driver error in the middle of a change. reset, close, rollback(accept_len=0)
    closed          nothing

Every refusal comes before anything is changed. The scalars live in C memory (`as_c`), so a C caller
and Python see the same numbers.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from memra_driver import layout
from memra_driver.clock import CacheClock
from memra_driver.config import ModelConfig
from memra_driver.digest import digest_of
from memra_driver.errors import (
    CapacityError,
    ConfigError,
    DriverError,
    SnapshotError,
    StateError,
)
from memra_driver.formats import FormatPolicy
from memra_driver.kept import Kept
from memra_driver.layers import DflashTapSink, KvLayer, RecurLayer
from memra_driver.layout import CacheState, StepOp
from memra_driver.memory import CHANGED, Borrowed, run_all
from memra_driver.place import (
    Action,
    Copies,
    close_slices,
    copies_of,
    has_arena,
    keep_actions,
    ordinal,
    place,
    restore_actions,
    run_actions,
    united,
    zero_actions,
)
from memra_driver.plan import CacheOptions, CachePlan
from memra_driver.snapshot import CacheSnapshot, drop_snapshots
from memra_driver.structs import structs_of

__all__ = ["Cache", "CacheSnapshot", "CacheState", "DflashTapSink", "KvLayer", "RecurLayer"]


class Cache(CacheClock):
    """The state of one sequence. Build one with `new`, `new_pp2` or `new_ppn`.

    kv[il] is a KvLayer or None, recur[il] a RecurLayer or None; both lists have n_layer entries.
    One thread owns a cache at a time. Nothing here waits for the device except digest, settle, health,
    clear_health of several devices, and reading a slice.
    """

    def __init__(self, plan: CachePlan, devices: Sequence[Any]) -> None:
        self.plan, self.cfg = plan, plan.cfg
        self.devices = tuple(devices)
        self._planes, self._owners = place(plan, self.devices)
        self._structs = structs_of(plan, self.devices, self._planes)
        self._c = self._structs.cache
        self.prepared = Kept()
        self._lazy: dict[tuple[str, int], Any] = {}  # what was allocated on first use
        self._retired: list[tuple[tuple[str, int], Any]] = []  # and what a larger one replaced

    # Birth and end.

    @classmethod
    def new(
        cls, e: Any, cfg: ModelConfig, max_ctx: int, *, policy: FormatPolicy | None = None,
        options: CacheOptions | None = None,
    ) -> Cache:  # fmt: skip
        """A cache on one device, zeroed. policy None: FormatPolicy.from_env(), read at this call.

        On an arena device: one allocation and one clear. Raises ConfigError for a geometry that
        cannot be, OutOfMemory (need, free, device) before the first byte, DriverError.
        """
        return cls(CachePlan.of(cfg, max_ctx, policy, options), (e,))

    @classmethod
    def new_pp2(
        cls, dev0: Any, dev1: Any, split: int, cfg: ModelConfig, max_ctx: int, *, policy: FormatPolicy | None = None,
        options: CacheOptions | None = None,
    ) -> Cache:  # fmt: skip
        """Layers below `split` on dev0, the others on dev1; 0 < split < trunk layers."""
        if not 0 < split < cfg.n_trunk:
            raise ConfigError(f"split is {split}; it must lie in 1 .. {cfg.n_trunk - 1}, inside the trunk")
        return cls.new_ppn((dev0, dev1), (0, split, cfg.n_layer), cfg, max_ctx, policy=policy, options=options)

    @classmethod
    def new_ppn(
        cls, devs: Sequence[Any], fence: Sequence[int], cfg: ModelConfig, max_ctx: int, *,
        policy: FormatPolicy | None = None, options: CacheOptions | None = None,
    ) -> Cache:  # fmt: skip
        """Layers fence[s] .. fence[s+1]-1 on devs[s]; trailing MTP layers on the last. Stages may share a device."""
        if len(devs) + 1 != len(fence):
            raise ConfigError(f"ppn cache: devs vs fence mismatch: {len(devs)} devices, {len(fence)} fence posts")
        unique, placement = united(devs)
        return cls(CachePlan.of(cfg, max_ctx, policy, options, fence, placement), unique)

    def close(self) -> None:
        """Frees every buffer; may be called twice. Snapshots keep their own memory but fit nothing any more.

        Refused while the C library records it.
        """
        self._check_recorder("close")
        self._c.state = CacheState.CLOSED
        self.prepared.clear()
        self._known_advance = None
        if self.open_round is not None:
            self.open_round.over()
        drop_snapshots(self._c)
        owned = []
        while self._c.owned:  # what the C library allocated for it
            node = self._c.owned.contents  # not the pointer, which is the field itself and changes with it
            self._c.owned = node.next
            owned.append(partial(self._release, node))
        owners = [*self._owners, *self._lazy.values(), *(plane for _, plane in self._retired)]
        self._owners, self._lazy, self._retired = [], {}, []
        run_all([*owned, partial(close_slices, owners)])

    def _release(self, node: Any) -> None:
        """Lets the C library free what it allocated."""
        status = node.release(ctypes.pointer(node))
        self.check_c(status)

    @staticmethod
    def check_c(status: int) -> None:
        """Raises what a status of the C library means; the library that is bound puts its own in place of this."""
        if status:
            raise DriverError("memra_release()", status, "a status of the C library", "memra_last_error tells more")

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def as_c(self) -> Any:
        """Pointer to the memra_cache struct; valid as long as this object lives."""
        return ctypes.pointer(self._structs.whole())

    # Snapshot and rollback.

    def snapshot(self, e: Any) -> CacheSnapshot:
        """A new snapshot of this moment, on each layer's own device. Allocates; waits for nothing."""
        self.check_device(e)
        self.check_settled("snapshot")
        snap = CacheSnapshot(self._c)
        try:
            for d, device in enumerate(self.devices):
                run_actions(snap.allocate(self.plan, self.recur, d, device), lambda: None)
        except BaseException:
            snap.close()
            raise
        self._stamp(snap)
        self._snapshots.add(snap)
        return snap

    def snapshot_into(self, e: Any, snap: CacheSnapshot) -> None:
        """Renews a snapshot of this cache in place: no allocation, one launch per arena device.

        (Where the states of some layers were exchanged and those of others not, an upload may precede it.) A failure in
        the middle invalidates the snapshot, not the cache. Waits for nothing.
        """
        known = snap.renewal if type(snap) is CacheSnapshot else None
        if known is None or not known.again(e, self._c, snap):
            self._renew(e, snap)

    def _renew(self, e: Any, snap: CacheSnapshot) -> None:
        """A snapshot_into with every check."""
        mark = CHANGED[0]
        self.check_device(e)
        self.check_settled("snapshot_into")
        self.check_owner(snap)
        copies = self._state_copies("snapshot_into", snap, restore=False)
        snap.begin_stamp()
        run_actions([action for each in copies for action in keep_actions(each)], lambda: None)
        self._stamp(snap)
        snap.keep_renewal(mark, e, self, copies)

    def rollback(self, e: Any, snap: CacheSnapshot, accept_len: int) -> None:
        """Back to `snap`, keeping the K/V rows of the first accept_len tokens after it.

        Ring and state return to the snapshot, pos = snap.pos, len = len_d = saved + accept_len (a
        layer that took no part keeps its saved length). With accept_len > 0 a replay is pending:
        run the accepted rows again until pos reaches replay_to. Legal in the middle of a step and
        after any number of swaps. Enqueues one launch per arena device, where all layers took part; waits for
        nothing. Raises SnapshotError, CapacityError (accept_len), StateError.
        """
        if type(accept_len) is not int:
            accept_len = operator.index(accept_len)
        known = snap.way_back if type(snap) is CacheSnapshot else None
        if known is None or not known.again(e, self, snap, accept_len):
            self._go_back(e, snap, accept_len)

    def _go_back(self, e: Any, snap: CacheSnapshot, accept_len: int) -> None:
        """A rollback with every check."""
        mark = CHANGED[0]
        self.check_device(e)
        self.check_not_recording("rollback")
        self.check_state("rollback", CacheState.READY, CacheState.PENDING_REPLAY, CacheState.TAINTED)
        self.check_owner(snap)
        if snap.invalid:
            raise SnapshotError(f"this snapshot cannot be restored: {snap.invalid}")
        if snap.generation != self.generation:
            raise SnapshotError(
                f"snapshot of generation {snap.generation}; the cache was reset and is at {self.generation}"
            )
        copies = self._state_copies("rollback", snap, restore=True)
        in_step = 0 if self.open_round is not None else self.step_rows  # a round is rejected first
        limit = min(max(self.pos + in_step, self.replay_to), self.max_ctx) - snap.pos
        if self.state is CacheState.TAINTED:
            limit = 0
        if not 0 <= accept_len <= limit:
            raise CapacityError(
                f"accept_len is {accept_len}; {max(limit, 0)} tokens stand after the snapshot at position {snap.pos}"
                + (" (a tainted cache accepts none)" if self.state is CacheState.TAINTED else "")
            )
        saved = snap.lens()
        lens = {
            il: min(max(self._len_before_round(il), saved[il]), saved[il] + accept_len) for il, _ in self._attending
        }
        actions: list[Action] = []
        for d, copying in enumerate(copies):
            actions += self._restore_actions(d, copying, lens, snap.pos)
        self._run_and_end_round(actions)
        for il, length in lens.items():
            self.kv_layer(il).len = length
        self.end_step(snap.pos)
        self._c.replay_to = snap.pos + accept_len if accept_len else 0
        self._c.state = CacheState.PENDING_REPLAY if accept_len else CacheState.READY
        self.give_up(snap.pos + accept_len)
        snap.keep_return(mark, e, self, copies)

    # The clock; advance, sync_d, settle and replays stand in clock.py.

    def truncate(self, e: Any, new_len: int) -> None:
        """The append-only rewind of a cache without recurrent layers: pos = new_len, no len above it."""
        new_len = operator.index(new_len)
        self.check_device(e)
        self.check_settled("truncate")
        if any(layer is not None for layer in self.recur):
            raise StateError("truncate: recurrent layers cannot go back by a length; use snapshot and rollback")
        if not 0 <= new_len <= self.pos:
            raise CapacityError(
                f"truncate to {new_len}; the cache holds {self.pos} tokens, so 0 .. {self.pos} is possible"
            )
        lens = {il: min(layer.len, new_len) for il, layer in enumerate(self.kv) if layer is not None}
        actions: list[Action] = []
        for d in range(len(self.devices)):
            actions += self._counter_actions(d, lens, new_len)
        run_actions(actions, self.taint)
        for il, length in lens.items():
            self.kv_layer(il).len = length
        self.pos = new_len
        self.give_up(new_len)

    def reset(self, e: Any) -> None:
        """Empties the cache in place: ring, states and counters zero, logits and taps dropped, generation + 1.

        K/V bytes stay (they lie beyond len), and so does the error record.
        """
        self.check_device(e)
        self.check_not_recording("reset")
        self.check_open("reset")
        actions: list[Action] = []
        for d, device in enumerate(self.devices):
            names = ("conv_state", "ssm_state", "ssm_state_alt")
            planes = [row for row in self.plan.planes if row.device == d and row.plane in names]
            actions += zero_actions(device, [self._planes[row.plane, row.layer, d] for row in planes])
            actions += self._counter_actions(d, dict.fromkeys(self.plan.counter_layers[d], 0), 0)
        self._run_and_end_round(actions)
        for layer in filter(None, self.kv):
            layer.len = 0
        self.end_step(0)
        self._c.replay_to, self._c.state = 0, CacheState.READY
        self._c.generation += 1
        self.keep_logits(None)
        self.disarm_taps()

    # What it holds.

    def report(self) -> dict[str, Any]:
        """Every live buffer and snapshot with its bytes, their sum, and what each device says is free."""
        self.check_open("report")
        snapshots = [
            {"pos": snap.pos, "bytes": snap.nbytes, "invalid": snap.invalid}
            for snap in sorted(self._snapshots, key=lambda snap: snap.pos)
            if not snap.is_closed
        ]
        buffers = [{"name": name, "bytes": n_bytes, "device": at} for name, _, n_bytes, at in self.regions()]
        allocated = sum(
            sums.arena_bytes if has_arena(e) else sums.plane_bytes
            for sums, e in zip(self.plan.per_device, self.devices, strict=True)
        )
        devices = []
        for e in self.devices:
            available, total = e.mem_info() if hasattr(e, "mem_info") else (None, None)
            devices.append({"device": ordinal(e), "free_bytes": available, "total_bytes": total})
        return {
            "buffers": buffers,
            "snapshots": snapshots,
            "cache_bytes": allocated + sum(plane.nbytes for _, plane in self._beside()),
            "snapshot_bytes": sum(snap["bytes"] for snap in snapshots),
            "devices": devices,
        }

    def regions(self) -> list[tuple[str, int, int, int]]:
        """(name, device pointer, bytes, device) of every live buffer; addresses hold until close.

        ssm_state and ssm_state_alt are named as they were born: each eager scan makes them change roles, and
        `recur[il].ssm_state` is the one that is current.
        """
        self.check_open("regions")
        planned = [
            (row.name, self._planes[row.plane, row.layer, row.device].ptr, row.bytes, ordinal(self.devices[row.device]))
            for row in self.plan.planes
        ]
        return planned + [
            (name, plane.ptr, plane.nbytes, ordinal(self.devices[d])) for (name, d), plane in self._beside()
        ]

    def kv_layer_for(self, il: int) -> KvLayer:
        """The K/V that layer il reads: its own, or that of the last owning layer of its kind."""
        return self.kv_layer(self.cfg.kv_source(il))

    def digest(self) -> str:
        """SHA-256 (hex) of what the sequence is: formats, lengths, K/V below len, rings, states, pos. Waits.

        The stream is laid out in digest.py. Compare within one device: the last bits of expf differ between a
        CPU and a GPU.
        """
        self.check_not_recording("digest")
        self.check_state("digest", CacheState.READY, CacheState.PENDING_REPLAY)
        self.check_lengths()
        digest = digest_of(self)
        self.check_strict(self.strict_health())
        return digest

    # Inside, and for ops.

    def pos_d(self, il: int) -> Any:
        """The device mirror of pos beside layer il."""
        return self._planes["pos_d", None, self.plan.device_of(il)]

    def health_d(self, il: int) -> Any:
        """The error record beside layer il."""
        return self._planes["health", None, self.plan.device_of(il)]

    def _beside(self) -> list[tuple[tuple[str, int], Any]]:
        """What was allocated on first use, by name and device index; the C library's buffers too."""
        found = [*self._lazy.items(), *self._retired]
        node = self._c.owned
        while node:
            c = node.contents.slice
            if c.ptr:
                d = next(d for d, e in enumerate(self.devices) if ordinal(e) == c.device)
                name = next((name for name in ("logits", "taps") if getattr(self._c, name).ptr == c.ptr), "replaced")
                found.append(((name, d), Borrowed(self.devices[d].memory, c.ptr, c.len)))
            node = node.contents.next
        return found

    def _len_before_round(self, il: int) -> int:
        """len of layer il, without the rows of an open round."""
        layer = self.kv_layer(il)
        in_round = self.open_round is not None and layer.step_ops & StepOp.APPEND
        return int(self.pos if in_round else layer.len)

    def _run_and_end_round(self, actions: list[Action]) -> None:
        """Runs a change that leaves nothing of a round that is open: it is over, unless nothing was done."""

        def over() -> None:
            if self.open_round is not None:
                self.open_round.over()

        def half_made() -> None:
            self.taint()
            over()

        run_actions(actions, half_made)
        over()

    def _state_copies(self, what: str, snap: CacheSnapshot, *, restore: bool) -> list[Copies]:
        """The copies between the live states and those of snap, which must fit, by device.

        A snapshot as it was made has the copies of each arrangement of the states that it met.
        """
        rings, states = (layout.column(self._structs.recur, name, np.uint64) for name in ("conv_state", "ssm_state"))
        key = restore, rings.tobytes(), states.tobytes()
        known = snap.copies.get(key) if snap.is_as_made() else None
        if known is None:
            self.check_shapes(what, snap)
            known = []
            for d, device in enumerate(self.devices):
                pairs = snap.pairs(self.plan, self.recur, d)
                known.append(copies_of(device, pairs if restore else [(kept, live) for live, kept in pairs]))
            snap.keep_copies(key, known)
        else:
            self.check_saved(what, snap)
        return known

    def _restore_actions(self, d: int, copies: Copies, lens: dict[int, int], pos: int) -> list[Action]:
        """The copies on device d; then its counters are those of `lens` and pos."""
        if not copies.are_few:
            return [*copies.actions, *self._counter_actions(d, lens, pos)]
        counters, values, packed = self._counters(d, lens, pos)
        return restore_actions(copies, counters, packed, values, self._planes["health", None, d])

    def _stamp(self, snap: CacheSnapshot) -> None:
        """Notes in snap where the cache stands, once its copies are enqueued."""
        attends = np.array([has_kv for _, has_kv, _ in self.plan.kinds])
        snap.stamp(layout.column(self._structs.kv, "len", np.int64), attends, self.pos, self.generation)
