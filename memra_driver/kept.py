"""What a cache keeps of its operations, and how a call finds it again.

A call over the same slices as an earlier one, which their tokens tell, runs the `Prepared` that this left behind. One
over other slices of the same lengths runs the `Form` of the operation: a Prepared whose launches take the addresses of
each call. The first call of an operation leaves the one, the first call over other slices the other. What could be kept
of a call over new slices pays only when they come again: so it is noted that they came, and the next time they get a
Prepared of their own.
"""

from __future__ import annotations

import operator
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
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
What = tuple[Any, ...]  # an operation: its name, il, each value with its type
OpKey = tuple[Any, ...] | None  # and the token of each operand; None: there are no such
NOT_KNOWN = (AttributeError, TypeError)  # of an operand that is no slice of ours, a value that has no hash

Launches = Sequence[tuple[str, tuple[Any, ...]]]  # kernel and arguments


class Kept(dict[Any, Any]):
    """What was prepared, by its key; no slice and no cache is kept alive by it.

    forms: by the key with lengths in place of tokens; None: there was one set of slices. came: keys that took a form.
    """

    def __init__(self) -> None:
        self.forms: dict[tuple[Any, ...], Form | None] = {}
        self.came: set[tuple[Any, ...]] = set()

    def clear(self) -> None:
        super().clear()
        self.forms.clear()
        self.came.clear()


def prepare(
    e: Any, cache: Cache | CacheBatch, what: What, key: OpKey, given: tuple[Any, ...], operands: tuple[Operand, ...],
    source: int, op: StepOp | None, rows: int, launches: Launches,
) -> None:  # fmt: skip
    """Keeps an operation that was enqueued just now over the operands that the arrays given are.

    source: the layer whose structs it reads. op: what it is of a step; None where it changes nothing. Kept are
    operations outside a capture, on a device that prepares launches; over slices of our own, or as a form.
    """
    if open_captures or not getattr(e, "prepares", False):
        return
    if type(what[1]) is not int or not all(map(_is_plain, what[2::2])):
        return
    if any(member.state is not CacheState.READY for member in cache.members):
        return
    made, forms = [e.prepare(name, args) for name, args in launches], cache.prepared.forms
    form = (*what, *map(_len_of, operands))
    is_new = form not in forms
    if is_new:
        _make_room(forms)
        forms[form] = None
    if is_new and _says_all(key, given):
        _keep(cache, key, given, Prepared(e, cache, source, op, rows, made))
    else:
        forms[form] = Form(e, cache, source, op, rows, launches, made)


def on_new_slices(e: Any, cache: Cache | CacheBatch, key: OpKey, given: tuple[Any, ...]) -> bool:
    """Enqueues and notes an operation over other slices than before; False, and nothing done, where that may be wrong.

    Nothing was asked of the slices yet.
    """
    form = None if key is None else _form(cache, key[: -len(given)], given)
    if key is None or form is None or not form.takes(given) or not form.prepared.again(e, cache):
        return False
    _note(e, cache, key, given, form)
    return True


def on_new_arrays(
    e: Any, cache: Cache | CacheBatch, what: What, key: OpKey, given: tuple[Any, ...], operands: tuple[Operand, ...]
) -> bool:
    """The same for arrays that were checked, and are these operands."""
    form = _form(cache, what, operands)
    if form is None:
        return False
    for (place, _), each in zip(form.places, operands, strict=True):
        place.value = each.ptr
    if not form.prepared.again(e, cache):
        return False
    if key is not None and _says_all(key, given):
        _note(e, cache, key, given, form)
    return True


def _form(cache: Cache | CacheBatch, what: What, arrays: tuple[Any, ...]) -> Form | None:
    try:
        return cache.prepared.forms.get((*what, *map(_len_of, arrays))) if type(what[1]) is int else None
    except NOT_KNOWN:
        return None


def _note(e: Any, cache: Cache | CacheBatch, key: tuple[Any, ...], given: tuple[Any, ...], form: Form) -> None:
    """These slices came, of an operation that was enqueued just now; the second time it is kept."""
    came = cache.prepared.came
    if key in came:
        _keep(cache, key, given, form.of_these(e, cache))
    else:
        _make_room(came)
        came.add(key)


def _make_room(kept: Any) -> None:
    if len(kept) >= _MOST:
        kept.clear()


def _keep(cache: Cache | CacheBatch, key: OpKey, slices: tuple[Any, ...], known: Prepared) -> None:
    """Keeps an operation over these slices as long as they live; they may die before it."""
    owner, kept = weakref.ref(cache), cache.prepared

    def forget(_: Any) -> None:
        alive = owner()  # not `kept`: that would be a cycle, and the device would stay with it
        if alive is not None:
            alive.prepared.pop(key, None)

    if len(kept) >= _MOST:
        dict.clear(kept)  # the forms stay
    known.watch.refs = [weakref.ref(each, forget) for each in slices]
    kept[key] = known


def _says_all(key: OpKey, given: tuple[Any, ...]) -> bool:
    """Whether a call with an equal key is the same call: of slices of our own, and values that nobody can change."""
    if key is None or not all(type(each) in _OURS for each in given):
        return False
    return all(type(value) in _PLAIN or isinstance(value, np.generic) for value in key[2 : -len(given) : 2])


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
        # _ptr: what somebody closed is no error here, where the operation was enqueued already.
        memory = sorted((each._ptr, each._ptr + each.nbytes) for each in owners if each.nbytes)
        self.begins, self.ends = [begin for begin, _ in memory], [end for _, end in memory]  # of what the cache owns

    def takes(self, slices: tuple[Any, ...]) -> bool:
        """Whether nothing speaks against these slices, whose lengths are right; their addresses are in place then."""
        spans = []
        for each, (place, n_bytes) in zip(slices, self.places, strict=True):
            if type(each) not in _OURS or not each._open or each.dtype is not _F32 or each.device != self.device:
                return False
            ptr = each._ptr
            if type(ptr) is not int or ptr <= 0 or ptr % 4:
                return False
            end = ptr + n_bytes
            before = bisect_left(self.begins, end)  # what begins before the end must end before the begin
            if end > 1 << 64 or (before and self.ends[before - 1] > ptr):
                return False
            place.value = ptr
            spans.append((ptr, end))
        if self.writes:  # what is read may be read twice; where that is so, the usual way tells it from the rest
            spans.sort()
            return all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        return True

    def of_these(self, e: Any, cache: Cache | CacheBatch) -> Prepared:
        """The operation over the slices of the last call."""
        return Prepared(e, cache, *self.what, [launch.copy() for launch in self.prepared.watch.launches])
