"""The C structs of a cache, filled from its plan.

A plan knows everything that stands in them but where its planes lie and whose device has them, so it is written down
once for devices of one kind, and each cache takes a copy and adds the addresses.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_driver import layout
from memra_driver.place import Key, Planes, has_arena, ordinal
from memra_driver.plan import MAX_INT, CachePlan

_SLICES = {  # of a layer's struct, each named like its plane
    layout.KvLayerC: ("k", "v", "len_d"),
    layout.RecurLayerC: ("conv_state", "ssm_state", "ssm_state_alt", "tape"),
}
_BORN = {"home": "ssm_state", "away": "ssm_state_alt"}  # fields of a recurrent layer that hold an address alone
_WORD_BYTES = 8

_ids = itertools.count(1)


class CacheStructs:
    """The structs of one cache: one piece of memory, which each of them keeps alive.

    Somebody waits for the birth of a cache: it has the scalars of `cache`, and all else is made when it is asked for.
    """

    def __init__(self, pattern: Pattern, devices: Sequence[Any], planes: Planes) -> None:
        self._pattern, self._devices, self._planes = pattern, devices, planes
        self._words = pattern.words.copy()
        self.cache = layout.CacheC.from_buffer(self._words.data)  # pointers and slices are null before `whole`
        self.cache.id = next(_ids)
        if pattern.has_slices:
            self.whole()

    def whole(self) -> layout.CacheC:
        """`cache` with all that it points to."""
        _ = self._memory
        return self.cache

    @functools.cached_property
    def _memory(self) -> memoryview:
        """All of it, with every address."""
        self._pattern.fill(self._words, ctypes.addressof(self.cache), self._devices, self._planes)
        return self._words.data

    @functools.cached_property
    def kv(self) -> Any:
        """A KvLayerC of each layer."""
        return self._array("kv")

    @functools.cached_property
    def recur(self) -> Any:
        """A RecurLayerC of each layer."""
        return self._array("recur")

    @functools.cached_property
    def devices(self) -> Any:
        """A CacheDeviceC of each device."""
        return self._array("devices")

    def _array(self, name: str) -> Any:
        kind, begin = self._pattern.arrays[name]
        return kind.from_buffer(self._memory, begin)


class Pattern:
    """The structs of the caches of a plan on devices of these ordinals, before their planes have addresses.

    arenas: which devices have one.
    """

    def __init__(self, plan: CachePlan, ordinals: Sequence[int], arenas: Sequence[bool]) -> None:
        n = plan.cfg.n_layer
        end: int = ctypes.sizeof(layout.CacheC)
        self.arrays: dict[str, tuple[Any, int]] = {}  # what the first struct points to: types, and where they begin
        for name, kind in (
            ("kv", layout.KvLayerC * n), ("recur", layout.RecurLayerC * n),
            ("devices", layout.CacheDeviceC * len(ordinals)),
        ):  # fmt: skip
            self.arrays[name] = kind, end
            end += ctypes.sizeof(kind)
        self.words = np.zeros(end // _WORD_BYTES, np.uint64)
        self._ordinals = ordinals
        self._slots: list[tuple[Key, int]] = []  # planes, and the word that holds the address of each
        cache = layout.CacheC.from_buffer(self.words.data)
        kv, recur, of_devices = (kind.from_buffer(self.words.data, begin) for kind, begin in self.arrays.values())
        self._base = ctypes.addressof(cache)
        _fill_cache(cache, plan, len(ordinals))
        for il, (d, has_kv, has_state) in enumerate(plan.kinds):
            _fill_layer(kv[il], recur[il], plan, il)
            c = kv[il] if has_kv else recur[il]
            for name in _SLICES[type(c)] if has_kv or has_state else ():
                self._put(plan, getattr(c, name), (name, il, d))
            for field, name in _BORN.items() if has_state else ():
                self._note(plan, c, field, (name, il, d))
        for d, c in enumerate(of_devices):
            c.ordinal, c.has_arena = ordinals[d], arenas[d]
            for name in ("pos_d", "health", *(("counters", "states") if arenas[d] else ())):
                self._put(plan, getattr(c, name), (name, None, d))
        own = [row for row in plan.planes if row.plane in ("logits", "taps")]
        for row in own:
            self._put(plan, getattr(cache, row.plane), (row.plane, row.layer, row.device))
        self.has_slices = bool(own)  # whether there are any in the first struct
        # Of each device with an arena: the words that are addresses there, and how far each is from where it begins.
        self._in_arena: list[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        for d in itertools.compress(range(len(arenas)), arenas):
            keys, places = zip(*(slot for slot in self._slots if slot[0][2] == d), strict=True)
            offsets = np.array([plan.cuts[key][0] for key in keys], np.uint64)
            self._in_arena.append((d, np.array(places, np.intp), offsets))
        self._alone = [(key, word) for key, word in self._slots if not arenas[key[2]]]
        self._pointers = [(self._word_of(cache, name), begin) for name, (_, begin) in self.arrays.items()]
        self._of_devices = [(self._word_of(c, "handle"), self._word_of(c, "stream")) for c in of_devices]

    def fill(self, array: np.ndarray[Any, Any], base: int, devices: Sequence[Any], planes: Planes) -> None:
        """Puts addresses into a copy of `words` at `base`: of its own parts, of the devices and of the planes."""
        for d, at, offsets in self._in_arena:
            array[at] = offsets + np.uint64(planes.arenas[d].ptr)
        words = array.data
        for key, word in self._alone:
            words[word] = planes[key].ptr
        for (handle, stream), e in zip(self._of_devices, devices, strict=True):
            words[handle], words[stream] = getattr(e, "c_handle", 0), getattr(getattr(e, "stream", None), "handle", 0)
        for word, begin in self._pointers:
            words[word] = base + begin

    def _put(self, plan: CachePlan, c: layout.SliceC, key: Key) -> None:
        """A slice: all but its address."""
        cut = plan.cuts.get(key)
        if cut is not None:
            _, c.len, dtype = cut
            c.dtype, c.device = layout.DTYPE_CODES[dtype], self._ordinals[key[2]]
            self._note(plan, c, "ptr", key)

    def _note(self, plan: CachePlan, c: Any, field: str, key: Key) -> None:
        """This field is the address of a plane: 0 of one without bytes."""
        if plan.cuts[key][1]:
            self._slots.append((key, self._word_of(c, field)))

    def _word_of(self, c: Any, field: str) -> int:
        """Which word a field of one of the structs is."""
        at: int = ctypes.addressof(c) + getattr(type(c), field).offset - self._base
        return at // _WORD_BYTES


_known: weakref.WeakKeyDictionary[CachePlan, dict[Any, Pattern]] = weakref.WeakKeyDictionary()


def structs_of(plan: CachePlan, devices: Sequence[Any], planes: Planes) -> CacheStructs:
    """The structs of a cache of this plan on these devices; what all such have alike is written down at the first."""
    known = _known.get(plan)
    if known is None:
        known = _known[plan] = {}
    kind = tuple(map(ordinal, devices)), tuple(map(has_arena, devices))
    found = known.get(kind)
    if found is None:
        found = known[kind] = Pattern(plan, *kind)
    return CacheStructs(found, devices, planes)


def _fill_cache(c: layout.CacheC, plan: CachePlan, n_devices: int) -> None:
    c.struct_size, c.abi_version = ctypes.sizeof(layout.CacheC), layout.ABI_VERSION
    c.max_ctx, c.n_layer, c.n_devices = plan.max_ctx, plan.cfg.n_layer, n_devices
    c.logits_at, c.n_vocab = -1, plan.cfg.n_vocab
    options = plan.options
    c.round_limit, c.max_rows, c.strict = options.round_width, options.max_rows, options.strict


def _fill_layer(kv: layout.KvLayerC, recur: layout.RecurLayerC, plan: CachePlan, il: int) -> None:
    kv.device_index, has_kv, has_state = plan.kinds[il]
    recur.device_index = kv.device_index
    source = plan.kv_source(il)
    kv.n_head, kv.kv_source = (0, -1) if source is None else (plan.cfg.heads(il), source)
    if has_kv:
        _fill_kv(kv, plan, il)
    elif has_state:
        _fill_recur(recur, plan, il)


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
