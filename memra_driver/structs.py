"""The C structs of a cache, filled from its plan.

A plan knows all that stands in them but addresses and handles. So it is written down once for devices of one kind, a
Pattern, and each cache takes a copy and puts those in.
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

    Somebody waits for the birth of a cache. So addresses within arenas, and arrays, are made when they are asked for,
    of what was known at birth: the cache and its devices may be closed by then.
    """

    def __init__(self, pattern: Pattern, devices: Sequence[Any], planes: Planes) -> None:
        self._pattern, self._array = pattern, pattern.words.copy()
        words = self._array.data
        self.cache = layout.CacheC.from_buffer(words)  # to be handed to others as `whole`
        self.cache.id = next(_ids)
        base = ctypes.addressof(self.cache)
        for word, begin in pattern.pointers:
            words[word] = base + begin
        for (handle, stream), e in zip(pattern.of_devices, devices, strict=True):
            words[handle], words[stream] = getattr(e, "c_handle", 0), getattr(getattr(e, "stream", None), "handle", 0)
        for key, word in pattern.apart:
            words[word] = planes[key].ptr
        self._arenas = {d: arena.ptr for d, arena in planes.arenas.items()}
        if pattern.has_slices:
            self.whole()

    def whole(self) -> layout.CacheC:
        """`cache`, and all that it points to, with every address."""
        _ = self._words  # puts them in
        return self.cache

    @functools.cached_property
    def _words(self) -> memoryview:
        for d, at, offsets in self._pattern.in_arenas:
            self._array[at] = offsets + np.uint64(self._arenas[d])
        return self._array.data

    @functools.cached_property
    def kv(self) -> Any:
        """A KvLayerC of each layer."""
        return self._pattern.array("kv", self._words)

    @functools.cached_property
    def recur(self) -> Any:
        """A RecurLayerC of each layer."""
        return self._pattern.array("recur", self._words)


class Pattern:
    """The structs of the caches of a plan on devices of these ordinals, as words of 8 bytes without addresses.

    arenas: which devices have one.
    """

    def __init__(self, plan: CachePlan, ordinals: Sequence[int], arenas: Sequence[bool]) -> None:
        n, end = plan.cfg.n_layer, ctypes.sizeof(layout.CacheC)
        self._arrays: dict[str, tuple[Any, int]] = {}  # what the first struct points to: types, and where they begin
        for name, kind in (
            ("kv", layout.KvLayerC * n), ("recur", layout.RecurLayerC * n),
            ("devices", layout.CacheDeviceC * len(ordinals)),
        ):  # fmt: skip
            self._arrays[name] = kind, end
            end += ctypes.sizeof(kind)
        self.words = np.zeros(end // _WORD_BYTES, np.uint64)
        cache = layout.CacheC.from_buffer(self.words.data)
        kv, recur, of_devices = (self.array(name, self.words.data) for name in self._arrays)
        base = ctypes.addressof(cache)

        def word_of(c: Any, field: str) -> int:
            """Which word a field of one of the structs is."""
            at: int = ctypes.addressof(c) + getattr(type(c), field).offset - base
            return at // _WORD_BYTES

        slots: list[tuple[Key, int]] = []  # planes, and the word that holds the address of each; none of 0 bytes

        def put(c: Any, field: str, key: Key) -> None:
            """All of a slice but its address, which goes to a slot."""
            if key in plan.cuts:
                c_slice = getattr(c, field)
                _, c_slice.len, dtype = plan.cuts[key]
                c_slice.dtype, c_slice.device = layout.DTYPE_CODES[dtype], ordinals[key[2]]
                if c_slice.len:
                    slots.append((key, word_of(c_slice, "ptr")))

        _fill_cache(cache, plan, len(ordinals))
        for il, (d, has_kv, has_state) in enumerate(plan.kinds):
            _fill_layer(kv[il], recur[il], plan, il)
            c = kv[il] if has_kv else recur[il]
            for name in _SLICES[type(c)] if has_kv or has_state else ():
                put(c, name, (name, il, d))
            for field, name in _BORN.items() if has_state else ():
                if plan.cuts[name, il, d][1]:
                    slots.append(((name, il, d), word_of(c, field)))
        for d, c in enumerate(of_devices):
            c.ordinal, c.has_arena = ordinals[d], arenas[d]
            for name in ("pos_d", "health", *(("counters", "states") if arenas[d] else ())):
                put(c, name, (name, None, d))
        reserved = [row for row in plan.planes if row.plane in ("logits", "taps")]
        for row in reserved:
            put(cache, row.plane, (row.plane, row.layer, row.device))

        self.has_slices = bool(reserved)  # whether the first struct has any
        # Of each device with an arena: the words that are addresses there, and how far each is from where it begins.
        self.in_arenas: list[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        for d in itertools.compress(range(len(arenas)), arenas):
            keys, words = zip(*(slot for slot in slots if slot[0][2] == d), strict=True)
            offsets = np.array([plan.cuts[key][0] for key in keys], np.uint64)
            self.in_arenas.append((d, np.array(words, np.intp), offsets))
        self.apart = [(key, word) for key, word in slots if not arenas[key[2]]]  # each an allocation of its own
        self.pointers = [(word_of(cache, name), begin) for name, (_, begin) in self._arrays.items()]
        self.of_devices = [(word_of(c, "handle"), word_of(c, "stream")) for c in of_devices]

    def array(self, name: str, words: memoryview) -> Any:
        """The structs of this field of the first one."""
        kind, begin = self._arrays[name]
        return kind.from_buffer(words, begin)


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
