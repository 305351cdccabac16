"""What a cache keeps of its operations, and how a call finds it again.

A call over the same slices as one before, which their tokens tell, runs the `Prepared` that was kept of that. One over
other slices of the same lengths runs the `Form` of the operation: a Prepared whose launches take new addresses. The
first call of an operation leaves the one behind, the first call over other slices the other. What a call over new
slices could keep pays only when they come again, so at first it is noted that they came, and at the second time they
get a Prepared of their own.
"""

from __future__ import annotations

import operator
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memra_driver.graph import open_captures
from memra_driver.interop import Operand
from memra_driver.kernels import KERNELS
from memra_driver.layout import CacheState, StepOp
from memra_driver.memory import Borrowed, CudaSlice, CudaView
from memra_driver.prepared import Prepared

if TYPE_CHECKING:
    from memra_driver.batch import CacheBatch
    from memra_driver.cache import Cache
    from memra_driver.launches import Launch

_OURS = frozenset({CudaSlice, CudaView, Borrowed})
_PLAIN = frozenset({float, int, type(None)})  # of other types equal values may mean different things
_MOST = 1024  # of each kind that a cache keeps; an engine whose arrays are always new ones would collect without end
_F32 = np.dtype(np.float32)
_len_of = operator.attrgetter("len")
OpKey = tuple[Any, ...] | None  # its name, il, each value with its type, the token of each operand; None: no such
NOT_KNOWN = (AttributeError, TypeError)  # of an operand that is no slice of ours, a value that has no hash

Launches = Sequence[tuple[str, tuple[Any, ...]]]  # kernel and arguments


class Kept(dict[Any, Any]):
    """What was prepared, by its key; no slice and no cache is kept alive by it.

    forms: by the key with lengths in place of tokens; None: one Prepared was made of it. came: keys of calls of a form.
    """

    def __init__(self) -> None:
        self.forms: dict[tuple[Any, ...], Form | None] = {}
        self.came: set[tuple[Any, ...]] = set()

    def clear(self) -> None:
        super().clear()
        self.forms.clear()
        self.came.clear()


def prepare(
    e: Any, cache: Cache | CacheBatch, il: Any, key: OpKey, operands: tuple[Any, ...], source: int,
    op: StepOp | None, rows: int, launches: Launches, values: tuple[Any, ...] = (),
) -> None:  # fmt: skip
    """Keeps an operation that was enqueued just now.

    source: the layer whose structs it reads. op: what it is of a step; None where it changes nothing. Kept are
    operations outside a capture, on a device that prepares launches, over slices of our own.
    """
    if key is None or open_captures or not getattr(e, "prepares", False):
        return
    if type(il) is not int or not all(map(_is_plain, values)) or any(type(each) not in _OURS for each in operands):
        return
    if any(member.state is not CacheState.READY for member in cache.members):
        return
    made, forms = [e.prepare(name, args) for name, args in launches], cache.prepared.forms
    form = _form_key(key, operands)
    if form in forms and key not in cache.prepared:
        forms[form] = Form(e, cache, source, op, rows, launches, made)
        return
    if form not in forms:
        _make_room(forms)
        forms[form] = None
    _keep(cache, key, operands, Prepared(e, cache, source, op, rows, made))


def on_new_slices(e: Any, cache: Cache | CacheBatch, key: OpKey, operands: tuple[Any, ...]) -> bool:
    """Enqueues and notes an operation over other slices than before; False, and nothing done, where that may be wrong."""
    if key is None or type(key[1]) is not int:
        return False
    kept = cache.prepared
    try:
        form = kept.forms.get(_form_key(key, operands))
    except NOT_KNOWN:
        return False
    if form is None or not form.again(e, cache, operands):
        return False
    if key in kept.came:
        kept.came.discard(key)
        _keep(cache, key, operands, form.of_these(e, cache))
    else:
        _make_room(kept.came)
        kept.came.add(key)
    return True


def _form_key(key: tuple[Any, ...], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*key[: -len(operands)], *map(_len_of, operands))


def _make_room(kept: Any) -> None:
    if len(kept) >= _MOST:
        kept.clear()


def _keep(cache: Cache | CacheBatch, key: tuple[Any, ...], operands: tuple[Any, ...], known: Prepared) -> None:
    """Keeps an operation over the same slices as long as they live; they may die before it."""
    owner, kept = weakref.ref(cache), cache.prepared

    def forget(_: Any) -> None:
        alive = owner()  # not `kept`: that would be a cycle, and the device would stay with it
        if alive is not None:
            alive.prepared.pop(key, None)

    if len(kept) >= _MOST:
        dict.clear(kept)  # the forms stay
    known.watch.refs = [weakref.ref(each, forget) for each in operands]
    kept[key] = known


def _is_plain(value: Any) -> bool:
    """Whether what is equal to this value and of its type means the same."""
    kind = type(value)
    return kind in _PLAIN and not (kind is float and value == 0)  # zero has either sign


class Form:
    """An operation over slices of given lengths, which each call brings anew."""

    __slots__ = ("begins", "device", "ends", "places", "prepared", "what", "writes")

    def __init__(
        self, e: Any, cache: Cache | CacheBatch, il: int, op: StepOp | None, rows: int, launches: Launches,
        made: list[Launch],
    ) -> None:  # fmt: skip
        self.prepared, self.what, self.device = Prepared(e, cache, il, op, rows, made), (il, op, rows), e.ordinal
        self.places: list[tuple[Any, int]] = []  # of each operand: where its address goes, how many bytes it has
        self.writes = False
        for launch, (name, args) in zip(made, launches, strict=True):
            for (kind, field), value in zip(KERNELS[name].params, args, strict=True):
                if isinstance(value, Operand):
                    self.places.append((launch.field(field), value.nbytes))
                    self.writes |= not kind.startswith("const ")
        owners = [each for member in cache.members for each in member._owners if isinstance(each, CudaSlice)]
        memory = sorted((each.ptr, each.ptr + each.nbytes) for each in owners if each.nbytes)
        self.begins, self.ends = [begin for begin, _ in memory], [end for _, end in memory]  # of what the cache owns

    def again(self, e: Any, cache: Any, operands: tuple[Any, ...]) -> bool:
        """The operation over these slices, whose lengths are right."""
        spans = []
        for each, (place, n_bytes) in zip(operands, self.places, strict=True):
            if type(each) not in _OURS or not each._open or each.dtype is not _F32 or each.device != self.device:
                return False
            ptr = each._ptr
            if type(ptr) is not int or ptr <= 0 or ptr % 4:
                return False
            end = ptr + n_bytes
            if end > 1 << 64:
                return False
            before = bisect_left(self.begins, end)  # what begins before the end must end before the begin
            if before and self.ends[before - 1] > ptr:
                return False
            place.value = ptr
            spans.append((ptr, end))
        if self.writes:  # what is read may be the same memory twice, what is written not: a closer look
            spans.sort()
            end = 0
            for ptr, behind in spans:
                if ptr < end:
                    return False
                end = behind
        return self.prepared.again(e, cache)

    def of_these(self, e: Any, cache: Cache | CacheBatch) -> Prepared:
        """The operation over the slices of the last call."""
        return Prepared(e, cache, *self.what, [launch.copy() for launch in self.prepared.watch.launches])
