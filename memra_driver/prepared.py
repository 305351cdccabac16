"""Eager operations that were checked once, to be enqueued again.

An operation asks much of its arrays, its layer and its cache, and most of the answers cannot change. Its first call
over slices of our own leaves a `Prepared` behind; the next call over the same slices compares what can have changed.
Where a comparison fails nothing was done, and the operation takes its usual way, which knows every rule and says what
is wrong. So no rule is stated here: what passes here passes there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memra_driver.errors import MemraError
from memra_driver.graph import open_captures
from memra_driver.layers import KvLayer, RecurLayer
from memra_driver.layout import (
    LEN_WORD,
    POS_WORD,
    RECORDER_WORD32,
    ROUND_WIDTH_WORD,
    STATE_WORD32,
    STEP_ROWS_WORD,
    CacheState,
    KvLayerC,
    Recorder,
    RecurLayerC,
    StepOp,
    words,
)  # fmt: skip
from memra_driver.memory import CHANGED, Borrowed, CudaSlice, CudaView, OpenWatch
from memra_driver.place import Action

if TYPE_CHECKING:
    from memra_driver.batch import CacheBatch
    from memra_driver.cache import Cache
    from memra_driver.launches import Launch

_OURS = frozenset({CudaSlice, CudaView, Borrowed})
_PLAIN = frozenset({float, int, type(None)})  # of other types equal values may mean different things
_BY_C = int(Recorder.C)
_MOST = 1024  # operations that a cache keeps; an engine whose arrays are always new ones would collect them without end

Launches = Sequence[tuple[str, tuple[Any, ...]]]  # kernel and arguments


def enqueued_again(e: Any, cache: Cache | CacheBatch, il: Any, key: tuple[Any, ...]) -> bool:
    """Whether the operation was known, nothing spoke against it, and it is enqueued and noted.

    key: its name, il, each value with its type, the id of each operand.
    """
    try:
        known = cache.prepared.get(key)
    except TypeError:  # a value that has no hash
        return False
    return known is not None and type(il) is int and known.again(e, cache)


def prepare(
    e: Any, cache: Cache | CacheBatch, il: Any, key: tuple[Any, ...], operands: tuple[Any, ...], source: int,
    op: StepOp | None, rows: int, launches: Launches, values: tuple[Any, ...] = (),
) -> None:  # fmt: skip
    """Keeps an operation that was enqueued just now, for `enqueued_again`; the slices may die before it.

    source: the layer whose structs it reads. op: what it is of a step; None where it changes nothing. Kept are
    operations outside a capture, on a device that prepares launches, over slices of our own.
    """
    if open_captures or not getattr(e, "prepares", False):
        return
    if type(il) is not int or not all(map(_is_plain, values)) or any(type(each) not in _OURS for each in operands):
        return
    if any(member.state is not CacheState.READY for member in cache.members):
        return
    known, owner, kept = Prepared(e, cache, source, op, rows, launches), weakref.ref(cache), cache.prepared

    def forget(_: Any) -> None:
        alive = owner()  # not `kept`: that would be a cycle, and the device would stay with it
        if alive is not None:
            alive.prepared.pop(key, None)

    if len(kept) >= _MOST:
        kept.clear()
    known.refs = [weakref.ref(each, forget) for each in operands]
    kept[key] = known


def _is_plain(value: Any) -> bool:
    """Whether what is equal to this value and of its type means the same."""
    kind = type(value)
    return kind in _PLAIN and not (kind is float and value == 0)  # zero has either sign


def enqueue(
    e: Any, cache: Cache, key: tuple[Any, ...], name: str, args: Callable[[], tuple[Any, ...]], fresh: dict[str, Any]
) -> Action:
    """The launch of a kernel with `args()`, kept under `key` by devices that prepare launches.

    fresh: the arguments that another call with this key may have otherwise, by name; slices, None and numbers.
    """
    if not getattr(e, "prepares", False):
        given = args()
        return lambda: e.launch(name, *given)
    launch = cache.prepared.get(key)
    if launch is None or not launch.is_open:
        launch = cache.prepared[key] = e.prepare(name, args())
    for field, value in fresh.items():
        launch.field(field).value = 0 if value is None else getattr(value, "ptr", value)
    return launch.run  # type: ignore[no-any-return]


# Where fields lie, in words of 8 or of 4 bytes; `layout` has those that others read, too.
_KV_OPS = KvLayerC.step_ops.offset // 4
_SSM, _ALT = RecurLayerC.ssm_state.offset // 8, RecurLayerC.ssm_state_alt.offset // 8  # their addresses
_RECUR_OPS, _SWAPS = RecurLayerC.step_ops.offset // 4, RecurLayerC.swaps.offset // 4


class _Member:
    """One sequence of an operation: its C structs as words, and the addresses there, which must be those of now."""

    __slots__ = ("away", "c", "c32", "home", "last", "layer", "layer32", "layer_c", "max_ctx", "watched")

    def __init__(self, cache: Cache, il: int, rows: int, in_batch: bool) -> None:
        self.max_ctx, self.last = cache.max_ctx, cache.max_ctx - rows  # last: where pos may be at most
        kv, recur = cache.kv[il], cache.recur[il]
        self.layer_c: Any
        self.home = self.away = 0
        if kv is not None:
            self.layer_c = kv._c
            parts = [(KvLayerC.k, KvLayerC.kv_dim_k), (KvLayerC.len_d, KvLayerC.k_format)]
        else:
            assert recur is not None
            self.layer_c, self.home, self.away = recur._c, recur.home.ptr, recur.away.ptr
            # A batch's table has the address of the state, too.
            parts = [(RecurLayerC.conv_state, RecurLayerC.ssm_state_alt if in_batch else RecurLayerC.ssm_state)]
        (self.c, self.c32), (self.layer, self.layer32) = words(cache._c), words(self.layer_c)
        spans = [self.layer[first.offset // 8 : end.offset // 8] for first, end in parts]
        self.watched = [(span, memoryview(bytes(span)).cast("q")) for span in spans]


class Prepared:
    """One operation with its arguments in place. It holds C structs and addresses: no cache, and no operand."""

    refs: list[Any]  # to its operands: each takes this out of the cache when it dies

    def __init__(
        self, e: Any, cache: Cache | CacheBatch, il: int, op: StepOp | None, rows: int, launches: Launches
    ) -> None:
        self.mark: object = None  # of CHANGED, when all that it counts on was last found open
        self.e, self.op, self.rows = e, int(op or 0), rows
        single = cache.batch is None
        self.members = [_Member(member, il, rows, not single) for member in cache.members]
        self.width = self.members[0].c[ROUND_WIDTH_WORD]
        self.has_kv = cache.members[0].kv[il] is not None
        self.ops_at = _KV_OPS if self.has_kv else _RECUR_OPS
        self.launches: list[Launch] = [e.prepare(name, args) for name, args in launches]
        self.calls = [launch.again for launch in self.launches]
        self.planes: OpenWatch | None = None  # of the sequences of a batch; of a single one they are arguments
        if not single:
            names = KvLayer.PLANES if self.has_kv else RecurLayer.PLANES
            d = cache.plan.device_of(il)
            self.planes = OpenWatch(member.planes[name, il, d] for member in cache.members for name in names)
        self.slots = [launch.field("slot") for launch in self.launches if single and launch.has("slot")]
        self.appends = op is StepOp.APPEND
        self.length = self.launches[0].field("len") if single and self.appends else None
        self.scans = single and bool(self.op & StepOp.SCAN)
        if self.scans:
            self.before, self.after = self.launches[0].field("state_in"), self.launches[0].field("state_out")

    def again(self, e: Any, cache: Cache | CacheBatch) -> bool:
        """Enqueues and notes it once more over the same operands; False, and nothing done, where that may be wrong."""
        if self.e is not e or (self.mark is not CHANGED[0] and not self._is_open()):
            return False
        op, rows, step_rows = self.op, self.rows, -1
        for member in self.members:  # is there anything in this sequence that speaks against it?
            c, c32, layer = member.c, member.c32, member.layer
            pos = c[POS_WORD]
            if c32[STATE_WORD32] or c32[RECORDER_WORD32] == _BY_C or c[ROUND_WIDTH_WORD] != self.width:
                return False
            if not 0 <= pos <= member.last:
                return False
            for now, frozen in member.watched:
                if now != frozen:
                    return False
            if self.has_kv:
                stands, least = layer[LEN_WORD], pos if op else pos + rows
                if not least <= stands <= member.max_ctx or (op and self.width and stands != pos):
                    return False
            before, step_rows = step_rows, c[STEP_ROWS_WORD]
            if before not in (-1, step_rows):  # the sequences of a batch stand in one step
                return False
            if op and (member.layer32[self.ops_at] & op or (step_rows and step_rows != rows)):
                return False
            if self.scans:
                state, other = layer[_SSM], layer[_ALT]
                if (state != member.home or other != member.away) and (state != member.away or other != member.home):
                    return False
        # Of a batch every sequence finds its own in the table.
        for slot in self.slots:
            slot.value = pos
        if not op:
            for call in self.calls:
                call()
            return True
        if self.length is not None:
            self.length.value = stands if stands > pos + rows else pos + rows
        if self.scans:
            self.before.value, self.after.value = state, other
        try:
            self.calls[0]()
            for member in self.members:
                layer = member.layer
                if self.appends and layer[LEN_WORD] < member.c[POS_WORD] + rows:
                    layer[LEN_WORD] = member.c[POS_WORD] + rows
                if self.scans and not self.width:
                    layer[_SSM], layer[_ALT] = other, state
                    member.layer32[_SWAPS] = (member.layer32[_SWAPS] + 1) & 0xFFFFFFFF
                if step_rows:  # the step is open: there is nothing else to note
                    member.layer32[self.ops_at] |= op
                else:
                    cache.members[self.members.index(member)].note_step(member.layer_c, op, rows)
        except MemraError:
            raise
        except BaseException:
            for own in cache.members:
                own.taint()
            raise
        return True

    def _is_open(self) -> bool:
        """Whether all that it counts on is there still, though something has changed somewhere."""
        mark = CHANGED[0]  # read first: what changes from here on will be noticed
        if open_captures or not all(launch.is_open for launch in self.launches):
            return False
        operands = [ref() for ref in self.refs]
        if not all(each is not None and each._open for each in operands):
            return False
        if self.planes is not None and not self.planes.is_true():
            return False
        self.mark = mark
        return True
