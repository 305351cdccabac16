"""A snapshot of a cache: lengths, rings and states at one position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memra_driver.layers import RecurLayer
from memra_driver.layout import DTYPE_NAMES
from memra_driver.memory import Closing
from memra_driver.place import Action, close_slices, copy_actions, has_arena
from memra_driver.plan import CachePlan


class CacheSnapshot(Closing):
    """Lengths, rings and states of a cache at one position; K/V bytes are not copied.

    kv_len[il]: K/V length, None where the layer has none. conv[il], ssm[il]: copies on the layer's
    own device. Only the cache that made it accepts it, and only until its reset or until rows below
    `pos` were discarded; `snapshot_into` makes it good again.
    """

    def __init__(self, cache_id: int, n_layer: int) -> None:
        self.kv_len: list[int | None] = [None] * n_layer
        self.conv: list[Any] = [None] * n_layer
        self.ssm: list[Any] = [None] * n_layer
        self.pos = 0
        self.cache_id = cache_id
        self.generation = 0
        self.invalid = ""  # why it cannot be used; "" when it can
        self.is_closed = False
        self._buffers: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on all devices."""
        return sum(each.nbytes for each in self._buffers)

    def close(self) -> None:
        """Frees the copies; may be called twice."""
        self.is_closed, self.invalid = True, "it is closed"
        close_slices(self._buffers)
        self._buffers, self.conv, self.ssm = [], [None] * len(self.conv), [None] * len(self.ssm)

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
            return self.renew(plan, recur, d, e)
        for il, layer in layers:
            for plane, planes in ((layer.conv_state, self.conv), (layer.ssm_state, self.ssm)):
                planes[il] = e.clone_dtod(plane)
                self._buffers.append(planes[il])
        return []

    def renew(self, plan: CachePlan, recur: Sequence[RecurLayer | None], d: int, e: Any) -> list[Action]:
        """The copies that bring its buffers on device d up to now."""
        return copy_actions(e, [(kept, live) for live, kept in self.pairs(plan, recur, d)])

    def pairs(self, plan: CachePlan, recur: Sequence[RecurLayer | None], d: int) -> list[tuple[Any, Any]]:
        """(live, kept) of every ring and current state on device d."""
        found = []
        for il, layer in enumerate(recur):
            if layer is not None and plan.device_of(il) == d:
                found += [(layer.conv_state, self.conv[il]), (layer.ssm_state, self.ssm[il])]
        return found
