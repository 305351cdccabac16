"""The C structs of a cache's layers, filled from its plan.

A plan knows everything that stands in them but where the arenas lie, so it is written down once, and each cache takes
a copy and adds the addresses.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_driver import layout
from memra_driver.place import Planes, has_arena, ordinal
from memra_driver.plan import MAX_INT, CachePlan

_SLICES = {  # of a layer's struct: field, plane
    layout.KvLayerC: {name: name for name in ("k", "v", "len_d")},
    layout.RecurLayerC: {name: name for name in ("conv_state", "ssm_state", "ssm_state_alt", "tape")},
}
_BORN = {"home": "ssm_state", "away": "ssm_state_alt"}  # fields of a recurrent layer that hold an address alone


class LayerStructs:
    """The structs of all layers of a plan, with offsets in the arenas in place of addresses."""

    def __init__(self, plan: CachePlan) -> None:
        n = plan.cfg.n_layer
        kv, recur = (layout.KvLayerC * n)(), (layout.RecurLayerC * n)()
        rows = {(row.plane, row.layer): row for row in plan.planes}
        addresses: dict[int, list[list[int]]] = {d: [[], []] for d in range(plan.n_devices)}  # as 64-bit words
        devices: dict[int, list[list[int]]] = {d: [[], []] for d in range(plan.n_devices)}  # as 32-bit words
        for il in range(n):
            d = kv[il].device_index = recur[il].device_index = plan.device_of(il)
            source = plan.kv_source(il)
            kv[il].n_head, kv[il].kv_source = (0, -1) if source is None else (plan.cfg.heads(il), source)
            if plan.has_kv(il):
                _fill_kv(kv[il], plan, il)
            elif plan.has_state(il):
                _fill_recur(recur[il], plan, il)
            else:
                continue
            which, structs = (0, kv) if plan.has_kv(il) else (1, recur)
            kind = type(structs[il])
            begin = il * ctypes.sizeof(kind)
            for name, plane in _SLICES[kind].items():
                row = rows.get((plane, il))
                if row is None:
                    continue
                c, at = getattr(structs[il], name), begin + getattr(kind, name).offset
                c.len, c.dtype = row.len, layout.DTYPE_CODES[layout.DTYPE_NAMES[row.dtype]]
                devices[d][which].append((at + layout.SliceC.device.offset) // 4)
                if row.len:
                    c.ptr = row.offset
                    addresses[d][which].append((at + layout.SliceC.ptr.offset) // 8)
            for name, plane in _BORN.items() if which else ():
                if rows[plane, il].len:
                    setattr(structs[il], name, rows[plane, il].offset)
                    addresses[d][which].append((begin + getattr(kind, name).offset) // 8)
        self._kv, self._recur = bytes(kv), bytes(recur)
        self._addresses = {d: [np.array(each, np.intp) for each in both] for d, both in addresses.items()}
        self._devices = {d: [np.array(each, np.intp) for each in both] for d, both in devices.items()}

    def copy(self, plan: CachePlan, devices: Sequence[Any], planes: Planes) -> tuple[Any, Any]:
        """The structs of a cache on these devices: arrays of KvLayerC and RecurLayerC."""
        n = plan.cfg.n_layer
        kv: Any = (layout.KvLayerC * n).from_buffer_copy(self._kv)
        recur: Any = (layout.RecurLayerC * n).from_buffer_copy(self._recur)
        for which, structs in enumerate((kv, recur)):
            words, ints = np.frombuffer(structs, np.uint64), np.frombuffer(structs, np.int32)
            for d, e in enumerate(devices):
                ints[self._devices[d][which]] = ordinal(e)
                if has_arena(e):
                    words[self._addresses[d][which]] += np.uint64(planes.arenas[d].ptr)
        if not all(map(has_arena, devices)):
            _add_planes(plan, kv, recur, devices, planes)
        return kv, recur


def _add_planes(plan: CachePlan, kv: Any, recur: Any, devices: Sequence[Any], planes: Planes) -> None:
    """The addresses of planes that are allocations of their own."""
    for row in plan.planes:
        il, d = row.layer, row.device
        if il is None or has_arena(devices[d]) or row.plane in ("logits", "taps"):
            continue
        ptr = planes[row.plane, il, d].ptr
        c = (kv if plan.has_kv(il) else recur)[il]
        getattr(c, row.plane).ptr = ptr
        for name, plane in _BORN.items():
            if plane == row.plane:
                setattr(c, name, ptr)


_known: weakref.WeakKeyDictionary[CachePlan, LayerStructs] = weakref.WeakKeyDictionary()


def structs_of(plan: CachePlan) -> LayerStructs:
    """The structs of a plan, written down at the first call."""
    found = _known.get(plan)
    if found is None:
        found = _known[plan] = LayerStructs(plan)
    return found


def _fill_kv(c: layout.KvLayerC, plan: CachePlan, il: int) -> None:
    c.present = 1
    c.kv_dim_k, c.kv_dim_v = plan.kv_dims(il)
    c.k_tok_bytes, c.v_tok_bytes = plan.tok_bytes(il)
    c.k_format, c.v_format = (form.code for form in plan.formats(il))
    c.n_head_kv = plan.cfg.kv_heads(il)
    c.head_dim_k, c.head_dim_v = plan.cfg.head_dims(il)
    c.window = min(plan.cfg.window(il) or 0, MAX_INT)


def _fill_recur(c: layout.RecurLayerC, plan: CachePlan, il: int) -> None:
    ssm = plan.cfg.ssm
    assert ssm is not None  # the plan refuses a recurrent layer without it
    c.present = 1
    c.conv_dim, c.d_conv = ssm.conv_dim, ssm.conv_kernel
    c.num_k, c.num_v, c.state_size = ssm.group_count, ssm.time_step_rank, ssm.state_size
