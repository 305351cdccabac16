"""A snapshot of a cache: lengths, rings and states at one position."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memra_driver import layout
from memra_driver.errors import SnapshotError
from memra_driver.layers import RecurLayer, fixed, scalar
from memra_driver.layout import DTYPE_NAMES, Invalid, SnapshotC
from memra_driver.memory import Closing
from memra_driver.place import Action, Copies, close_slices, copies_of, has_arena, keep_actions
from memra_driver.plan import CachePlan
from memra_driver.snapshot_again import Renewal, Return

if TYPE_CHECKING:
    from memra_driver.cache import Cache

_VALID = int(Invalid.VALID)
_INVALID, _STAMPS = SnapshotC.invalid.offset // 4, SnapshotC.stamps.offset // 4  # where they lie, in words of 4 bytes


class CacheSnapshot(Closing):
    """Lengths, rings and states of a cache at one position; K/V bytes are not copied.

    kv_len[il]: K/V length, None where the layer has none. conv[il], ssm[il]: copies on the layer's
    own device. Only the cache that made it accepts it, and only until its reset or until rows below
    `pos` were discarded; `snapshot_into` makes it good again.
    """

    pos = scalar("pos", "where it stands")
    cache_id = fixed("cache_id", "whose it is")
    generation = fixed("generation", "resets of the cache before it")

    def __init__(self, cache_c: layout.CacheC) -> None:
        n_layer = cache_c.n_layer
        self._lens_c = (ctypes.c_int64 * n_layer)(*[-1] * n_layer)
        self._conv_c, self._ssm_c = (layout.SliceC * n_layer)(), (layout.SliceC * n_layer)()
        self._c = SnapshotC(
            kv_len=self._lens_c, conv=self._conv_c, ssm=self._ssm_c, n_layer=n_layer, cache_id=cache_c.id,
            generation=cache_c.generation,
        )  # fmt: skip
        self._list: list[int | None] = [None] * n_layer
        self._seen = -1  # the stamp that _list is of; at first of none
        self.conv: list[Any] = [None] * n_layer
        self.ssm: list[Any] = [None] * n_layer
        self.is_closed = False
        self._buffers: list[Any] = []
        self.copies: dict[Any, list[Copies]] = {}  # by direction and the arrangement of the live states
        self.renewal: Renewal | None = None  # a snapshot_into, and a rollback, that may be done once more
        self.way_back: Return | None = None
        self._made: tuple[list[Any], list[Any]] | None = None  # conv and ssm, where all are views of buffers of its own
        self._has_clones = False
        self._saved = np.ndarray(n_layer, np.int64, buffer=self._lens_c)
        self._lens = memoryview(self._lens_c)
        self._stamped: bytes | None = None  # what was saved at last; None once somebody has _list, and may change it
        self.level: int | None = None  # the one length of all layers in that
        self._c32 = layout.words(self._c)[1]
        self._c.next, cache_c.snapshots = cache_c.snapshots, ctypes.pointer(self._c)
        self._unlink = weakref.finalize(self, _unlink, cache_c, self._c)
        self._unlink.atexit = False

    @property
    def kv_len(self) -> list[int | None]:
        """K/V length of each layer, None where it has none; the list may be changed."""
        if self._seen != self._c.stamps:
            self._list, self._seen = [None if n < 0 else n for n in self._lens_c], self._c.stamps
        self._stamped = None
        return self._list

    @kv_len.setter
    def kv_len(self, lens: Sequence[int | None]) -> None:
        self._list, self._seen, self._stamped = list(lens), self._c.stamps, None

    @property
    def invalid(self) -> str:
        """Why it cannot be restored; "" when it can."""
        c = self._c
        if c.invalid == Invalid.VALID:
            return ""
        return {
            Invalid.GIVEN_UP: f"it stands at position {c.pos}, and the rows from {c.given_up} on were given up since",
            Invalid.HALF_WAY: "a snapshot_into failed half way",
            Invalid.CACHE_CLOSED: "its cache is closed",
            Invalid.CLOSED: "it is closed",
        }[Invalid(c.invalid)]

    def as_c(self) -> Any:
        """Pointer to the memra_snapshot struct, as the fields stand now; valid as long as this object lives."""
        n_layer = self._c.n_layer
        if not len(self.kv_len) == len(self.conv) == len(self.ssm) == n_layer:
            raise SnapshotError(f"rollback and snapshot_into take {n_layer} entries in kv_len, conv and ssm")
        self._lens_c[:] = [-1 if n is None else n for n in self.kv_len]
        for name, kept, c in (("conv", self.conv, self._conv_c), ("ssm", self.ssm, self._ssm_c)):
            for il, plane in enumerate(kept):
                c[il] = layout.SliceC()
                try:
                    if plane is not None:
                        layout.put_slice(c[il], plane, getattr(plane, "device", -1))
                except (AttributeError, KeyError):
                    raise SnapshotError(f"shape mismatch ({name}): {plane!r} of layer {il} is no slice") from None
        return ctypes.pointer(self._c)

    def begin_stamp(self) -> None:
        """Copies are under way: should they fail, it cannot be restored."""
        self._c.invalid = Invalid.HALF_WAY

    def stamp(self, lens: np.ndarray[Any, Any], present: np.ndarray[Any, Any], pos: int, generation: int) -> None:
        """Its copies are enqueued: it stands where the cache does. lens: of all layers, where present."""
        self._saved.fill(-1)
        np.copyto(self._saved, lens, where=present)
        self._c.pos, self._c.generation = pos, generation
        found = set(self._saved[present].tolist()) or {pos}
        self.stamped(found.pop() if len(found) == 1 else None)

    def stamped(self, level: int | None) -> None:
        """All that is saved stands in it: it is valid. level: the length of every layer; None where they differ."""
        self._stamped, self.level, c32 = self._lens.tobytes(), level, self._c32
        c32[_STAMPS], c32[_INVALID] = c32[_STAMPS] + 1 & 0xFFFF_FFFF, _VALID

    def is_as_stamped(self) -> bool:
        """Whether kv_len is what `stamp` wrote: nobody has asked for the list, or written to the C struct."""
        return self._lens.tobytes() == self._stamped

    def lens(self) -> list[Any]:
        """kv_len, to be read: -1 or None where a layer has none."""
        return self._saved.tolist() if self.is_as_stamped() else self.kv_len

    def is_as_made(self) -> bool:
        """Whether conv and ssm are the planes that it was born with, none of them closed."""
        made = self._made
        if made is None or not all(len(each._open) == 1 for each in self._buffers):
            return False
        try:
            return self.conv == made[0] and self.ssm == made[1]
        except Exception:  # somebody else's objects stand there, which compare as they like
            return False

    def is_whole(self) -> bool:
        """Whether conv and ssm are the planes that it was born with, and kv_len is what `stamp` wrote."""
        if self._lens.tobytes() != self._stamped:
            return False
        try:
            return (self.conv, self.ssm) == self._made
        except Exception:  # as in is_as_made
            return False

    def keep_copies(self, key: Any, copies: list[Copies]) -> None:
        """For the next time that the live states lie so."""
        if self.is_as_made() and len(self.copies) < 16:
            self.copies[key] = copies

    def keep_renewal(self, mark: object, e: Any, cache: Cache, copies: list[Copies]) -> None:
        """For the next `snapshot_into`. mark: of memory.CHANGED, from before the checks of the one just done."""
        if not self.is_as_made():
            self.renewal = None
            return
        if self.renewal is None or not self.renewal.is_of(e, cache._c):
            self.renewal = Renewal(mark, e, cache, self)
        self.renewal.learn(copies)

    def keep_return(self, mark: object, e: Any, cache: Cache, copies: list[Copies]) -> None:
        """For the next `rollback`, as keep_renewal."""
        if not self.is_as_made():
            self.way_back = None
            return
        if self.way_back is None or not self.way_back.is_of(e, cache._c):
            self.way_back = Return(mark, e, cache, self)
        if not self.way_back.learn(cache, copies):
            self.way_back = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on all devices."""
        return sum(each.nbytes for each in self._buffers)

    def close(self) -> None:
        """Frees the copies; may be called twice."""
        self.is_closed, self._c.invalid = True, Invalid.CLOSED
        self._unlink()
        close_slices(self._buffers)
        self._buffers, self.conv, self.ssm = [], [None] * len(self.conv), [None] * len(self.ssm)
        self._made = self.renewal = self.way_back = None
        self.copies.clear()

    def allocate(self, plan: CachePlan, recur: Sequence[RecurLayer | None], d: int, e: Any) -> list[Action]:
        """Makes its buffers on device d: one allocation of the arena's own shape, or a clone of each plane.

        Returns the copies that fill them; clones are full.
        """
        layers = [(il, layer) for il, layer in enumerate(recur) if layer is not None and plan.device_of(il) == d]
        if has_arena(e) and layers:
            begin, end = plan.per_device[d].snapshot
            kept = e.uninit((end - begin) // 4)
            self._buffers.append(kept)
            at = {(row.plane, row.layer): row for row in plan.planes if row.device == d}
            for il, _ in layers:
                for name, planes in (("conv_state", self.conv), ("ssm_state", self.ssm)):
                    row = at[name, il]
                    planes[il] = kept.plane(row.offset - begin, row.len, DTYPE_NAMES[row.dtype])
            self._note_made()
            return keep_actions(copies_of(e, [(kept, live) for live, kept in self.pairs(plan, recur, d)]))
        self._has_clones = self._has_clones or bool(layers)
        self._note_made()
        for il, layer in layers:
            for plane, planes in ((layer.conv_state, self.conv), (layer.ssm_state, self.ssm)):
                planes[il] = e.clone_dtod(plane)
                self._buffers.append(planes[il])
        return []

    def _note_made(self) -> None:
        self._made = None if self._has_clones else (list(self.conv), list(self.ssm))

    def pairs(self, plan: CachePlan, recur: Sequence[RecurLayer | None], d: int) -> list[tuple[Any, Any]]:
        """(live, kept) of every ring and current state on device d."""
        found = []
        for il, layer in enumerate(recur):
            if layer is not None and plan.device_of(il) == d:
                found += [(layer.conv_state, self.conv[il]), (layer.ssm_state, self.ssm[il])]
        return found


def snapshots_of(cache_c: layout.CacheC) -> Iterator[SnapshotC]:
    """Every open snapshot of a cache, Python's and C's."""
    node = cache_c.snapshots
    while node:
        yield node.contents
        node = node.contents.next


def drop_snapshots(cache_c: layout.CacheC) -> None:
    """The cache is closed: its snapshots fit nothing any more, and are on their own."""
    for snap in list(snapshots_of(cache_c)):
        snap.invalid, snap.next = Invalid.CACHE_CLOSED, None
    cache_c.snapshots = None


def _unlink(cache_c: layout.CacheC, snap_c: SnapshotC) -> None:
    """Takes a snapshot out of its cache's list, if it still stands there."""
    before: Any = None
    for each in snapshots_of(cache_c):
        if ctypes.addressof(each) == ctypes.addressof(snap_c):
            if before is None:
                cache_c.snapshots = each.next
            else:
                before.next = each.next
            return
        before = each
