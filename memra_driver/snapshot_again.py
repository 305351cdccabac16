"""Snapshots renewed, and restored, once more: what a speculative decoder does every round, asked less.

Both remember a call that passed every check, and compare what can have changed since. Where a comparison fails nothing
was done, and the usual way, which knows every rule, says what is wrong: no rule is stated here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memra_driver.errors import MemraError
from memra_driver.graph import open_captures
from memra_driver.layout import (
    POS_WORD,
    CacheC,
    CacheState,
    Invalid,
    KvLayerC,
    RecurLayerC,
    SnapshotC,
    ready_stand,
    stand_of,
    words,
)  # fmt: skip
from memra_driver.memory import CHANGED, OpenWatch
from memra_driver.place import COUNTERS_PER_LAUNCH, Action, Copies, keep_actions, restore_arguments, run_actions

if TYPE_CHECKING:
    from memra_driver.cache import Cache
    from memra_driver.launches import Launch
    from memra_driver.snapshot import CacheSnapshot

_MOST = 4  # arrangements of the live states that are remembered
# Where fields lie, in words of 8 bytes (_INVALID: of 4), of a cache, of what stand_of gives, and of a snapshot.
_REPLAY, _GENERATION, _LOGITS, _SNAPSHOTS = (
    getattr(CacheC, name).offset // 8 for name in ("replay_to", "generation", "logits_at", "snapshots")
)
_STATE, _STEP, _ROUND = range(3)
_PENDING_REPLAY = int(CacheState.PENDING_REPLAY)  # of _STATE, whose upper half says that nobody records
_SNAP_POS, _SNAP_GENERATION, _NEXT = (getattr(SnapshotC, name).offset // 8 for name in ("pos", "generation", "next"))
_INVALID, _HALF_WAY = SnapshotC.invalid.offset // 4, int(Invalid.HALF_WAY)


def _numbers(struct: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> memoryview:
    """Numbers of 8 bytes in the memory of a struct, as they are at any time: equal to others in one comparison."""
    return np.ndarray(shape, np.int64, buffer=struct, offset=offset, strides=strides).data


def _evenly(layers: list[int]) -> slice:
    """These layers as one slice; ModelConfig.layer_kind has all with K/V equally far apart."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    found = slice(layers[0], layers[-1] + 1, step) if layers else slice(0)
    assert list(range(found.stop))[found] == layers
    return found


def _prepares(e: Any) -> bool:
    """Whether e keeps launches with their arguments in place."""
    return getattr(e, "prepares", False)


def _in_turn(actions: list[Action]) -> Action:
    """One call that makes all of them."""
    if len(actions) == 1:
        return actions[0]

    def run() -> None:
        for action in actions:
            action()

    return run


class _Known:
    """Calls between one cache and one snapshot that passed every check, by how the live states lay then."""

    def __init__(self, mark: object, e: Any, cache: Cache, snap: CacheSnapshot) -> None:
        self._mark, self._e = mark, e  # mark: of CHANGED, from before the checks
        self._cache_c, self._max_ctx, self._snap_c = cache._c, cache.max_ctx, snap._c
        self._c, (self._snap, self._snap32) = words(cache._c)[0], words(snap._c)
        self._stand, self._idle = stand_of(cache._c), ready_stand(0, 0)
        self._devices = [(each.stream, each.context) for each in cache.devices if hasattr(each, "context")]
        owners = [*cache._owners, *snap._buffers]
        self._watch = OpenWatch(owners) if len(self._devices) == len(cache.devices) else None
        # What is looked at of all layers at once: lengths, where they are saved, pos and the first length as often.
        attending = [il for il, layer in enumerate(cache.kv) if layer is not None]
        n, step, at = cache._c.n_layer, ctypes.sizeof(KvLayerC), KvLayerC.len.offset
        self._lens = _numbers(cache._structs.kv, at, (n,), (step,))[_evenly(attending)]
        self._saved = _numbers(snap._lens_c, 0, (n,), (8,))[_evenly(attending)]
        self._all_pos = self._as_often(cache._c, CacheC.pos.offset)
        self._all_first = self._as_often(cache._structs.kv, at + step * min(attending, default=0))
        # Ring and current state.
        ring, state = RecurLayerC.conv_state.offset, RecurLayerC.ssm_state.offset
        strides = state - ring, ctypes.sizeof(RecurLayerC)
        self._states = _numbers(cache._structs.recur, ring, (2, n), strides)
        self._arranged: list[tuple[memoryview, Any]] = []  # how the states lay, and what served then
        self._launches: list[Launch] = []  # of all arrangements

    def _as_often(self, struct: Any, offset: int) -> memoryview:
        """One number of a struct, as if it were every length."""
        return _numbers(struct, offset, (len(self._lens),), (0,))

    def is_of(self, e: Any, cache_c: CacheC) -> bool:
        """Whether it is about these, nothing was closed since, and it has room for one more arrangement."""
        same = e is self._e and cache_c is self._cache_c and len(self._arranged) < _MOST
        return same and (self._mark is CHANGED[0] or self._is_open())

    def _is_open(self) -> bool:
        """Whether memory, streams and contexts are there still, though something has changed somewhere."""
        mark = CHANGED[0]  # read first: what changes from here on will be noticed
        if open_captures or self._watch is None or not self._watch.is_true():
            return False
        if any(stream.is_closed or not context.is_ready for stream, context in self._devices):
            return False
        if not all(launch.is_open for launch in self._launches):
            return False
        self._mark = mark
        return True

    def _prepared(self, e: Any, args: Sequence[Any]) -> Launch:
        """The launch of these copies on device e."""
        launch: Launch = e.prepare("restore", args)
        self._launches.append(launch)
        return launch

    def _learn(self, served: Any) -> None:
        self._arranged.append((np.array(self._states, order="C").data, served))

    def _served(self) -> Any:
        """What served when the states lay as they lie now; None: nothing is known."""
        for at, (frozen, served) in enumerate(self._arranged):
            if self._states == frozen:
                self._arranged.insert(0, self._arranged.pop(at))  # where the next call looks first
                return served
        return None


class Renewal(_Known):
    """A `snapshot_into`."""

    def __init__(self, mark: object, e: Any, cache: Cache, snap: CacheSnapshot) -> None:
        super().__init__(mark, e, cache, snap)
        self._parts = (  # what a call looks at, in one look
            e, cache._c, self._c, self._snap, self._snap32, self._stand, self._idle, cache.max_ctx, self._lens,
            self._all_pos, self._saved,
        )  # fmt: skip

    def _has_room(self) -> bool:
        """Whether every length lies within the cache."""
        return all(0 <= length <= self._max_ctx for length in self._lens)

    def learn(self, copies: list[Copies]) -> None:
        """The copies, by device, that serve where the states lie now: one launch each, where they are few."""
        actions: list[Action] = []
        for each in copies:
            if each.are_one_launch and _prepares(each.e):
                actions.append(self._prepared(each.e, restore_arguments(each)).again)
            else:
                actions += keep_actions(each)
        self._learn(_in_turn(actions))

    def again(self, e: Any, cache_c: CacheC, snap: CacheSnapshot) -> bool:
        """Copies and stamps as before; False, and nothing done, where that may be wrong."""
        own_e, own_c, c, kept, kept32, stand, idle, most, lens, all_pos, saved = self._parts
        if e is not own_e or cache_c is not own_c or (self._mark is not CHANGED[0] and not self._is_open()):
            return False
        pos = c[POS_WORD]
        if stand != idle or not 0 <= pos <= most or not 0 <= kept[_SNAP_POS] <= most:
            return False
        level: int | None = pos
        if lens != all_pos:
            level = None
            if not self._has_room():
                return False
        frozen, copy = self._arranged[0]
        if self._states != frozen:
            copy = self._served()
        if copy is None or not snap.is_whole():
            return False
        kept32[_INVALID] = _HALF_WAY
        copy()
        saved[:] = lens
        kept[_SNAP_POS], kept[_SNAP_GENERATION] = pos, c[_GENERATION]
        snap.stamped(level)
        return True


class _Told(ctypes.Structure):
    """What the launches of a rollback are told: the length of every layer."""

    _fields_ = (("length", ctypes.c_int64),)


class Return(_Known):
    """A `rollback` of a cache that is ready and in no round, all of whose layers took part: one launch a device."""

    def __init__(self, mark: object, e: Any, cache: Cache, snap: CacheSnapshot) -> None:
        super().__init__(mark, e, cache, snap)
        self._told_c = _Told()
        self._all_told = self._as_often(self._told_c, _Told.length.offset)
        self._parts = (  # what a call looks at, in one look
            e, cache._c, self._c, self._snap, self._snap32, self._stand, self._idle, cache.max_ctx,
            self._lens, self._saved, words(self._told_c)[0], ctypes.addressof(snap._c),
        )  # fmt: skip

    def learn(self, cache: Cache, copies: list[Copies]) -> bool:
        """The copies, by device, that serve where the states lie now, if they are one launch each; else False."""
        launches: list[Launch] = []
        for d, each in enumerate(copies):
            n, packed = len(cache.plan.counter_layers[d]), cache._planes.get(("counters", None, d))
            ready = each.are_few and packed is not None and n < COUNTERS_PER_LAUNCH
            if not ready or not _prepares(each.e):
                return False
            args = restore_arguments(each, packed, 0, 0, (1 << n) - 1, 1 << n, cache._planes["health", None, d])
            launches.append(self._prepared(each.e, args))
            launches[-1].read_from("a", self._told_c, _Told.length)
            launches[-1].read_from("b", self._snap_c, SnapshotC.pos)
        self._learn([launch.again for launch in launches])
        return True

    def again(self, e: Any, cache: Cache, snap: CacheSnapshot, accept: int) -> bool:
        """Restores as before; False, and nothing done, where that may be wrong."""
        own_e, own_c, c, kept, kept32, stand, idle, most, lens, saved, told, snap_at = self._parts
        if e is not own_e or cache._c is not own_c or (self._mark is not CHANGED[0] and not self._is_open()):
            return False
        step = 0
        if stand != idle:
            step = stand[_STEP]
            if stand[_STATE] or stand[_ROUND]:
                return False
        at = kept[_SNAP_POS]
        end = at + accept
        if kept32[_INVALID] or kept[_SNAP_GENERATION] != c[_GENERATION] or not 0 <= at <= end <= most:
            return False
        if end > c[POS_WORD] + step and end > c[_REPLAY]:
            return False
        length = snap.level
        frozen, calls = self._arranged[0]
        if self._states != frozen:
            calls = self._served()
        if calls is None or length is None or not snap.is_whole():
            return False
        if accept:
            if lens != self._all_first:
                return False
            now = lens[0] if len(lens) else length
            length = length + accept if now >= length + accept else max(now, length)
        told[0] = length
        if len(calls) > 1:
            run_actions(calls, cache.taint)
        else:
            try:
                calls[0]()
            except MemraError:  # the driver took nothing
                raise
            except BaseException:
                cache.taint()
                raise
        lens[:] = self._all_told if accept else saved
        if step:  # else no layer has run anything
            for step_ops in cache._step_ops:
                step_ops.fill(0)
        stand[_STEP], c[POS_WORD], c[_REPLAY] = 0, at, end if accept else 0
        if accept:
            stand[_STATE] = _PENDING_REPLAY
        if c[_LOGITS] > end or c[_SNAPSHOTS] != snap_at or kept[_NEXT]:
            cache.give_up(end)
        return True
