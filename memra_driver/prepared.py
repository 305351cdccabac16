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
from memra_driver.layers import KvLayer, RecurLayer, swap_states
from memra_driver.layout import CacheState, KvLayerC, Recorder, RecurLayerC, StepOp
from memra_driver.memory import Borrowed, CudaSlice, CudaView, OpenWatch
from memra_driver.place import Action

if TYPE_CHECKING:
    from memra_driver.batch import CacheBatch
    from memra_driver.cache import Cache
    from memra_driver.launches import Launch

_OURS = frozenset({CudaSlice, CudaView, Borrowed})
_PLAIN = frozenset({float, int, type(None)})  # of other types equal values may mean different things
_BY_C, _SCAN = int(Recorder.C), int(StepOp.SCAN)
_MOST = 1024  # operations that a cache keeps; an engine whose arrays are always new ones would collect them without end

Launches = Sequence[tuple[str, tuple[Any, ...]]]  # kernel and arguments


def enqueued_again(
    e: Any, cache: Cache | CacheBatch, name: str, il: int, values: tuple[Any, ...], operands: tuple[Any, ...]
) -> bool:
    """Whether the operation was known, nothing spoke against it, and it is enqueued and noted."""
    key = _key(name, il, values, operands)
    known = None if key is None else cache.prepared.get(key)
    return known is not None and known.e is e and not open_captures and known.again(cache, operands)


def prepare(
    e: Any, cache: Cache | CacheBatch, name: str, il: int, values: tuple[Any, ...], operands: tuple[Any, ...],
    source: int, op: StepOp | None, rows: int, launches: Launches,
) -> None:  # fmt: skip
    """Keeps an operation that was enqueued just now, for `enqueued_again`; the slices may die before it.

    source: the layer whose structs it reads. op: what it is of a step; None where it changes nothing. Kept are
    operations outside a capture, on a device that prepares launches, over slices of our own.
    """
    if open_captures or not getattr(e, "prepares", False):
        return
    key, kept = _key(name, il, values, operands), cache.prepared
    if key is None or any(type(each) not in _OURS for each in operands):
        return
    if any(member.state is not CacheState.READY for member in cache.members):
        return
    known, owner = Prepared(e, cache, source, op, rows, launches), weakref.ref(cache)

    def forget(_: Any) -> None:
        alive = owner()  # not `kept`: that would be a cycle, and the device would stay with it
        if alive is not None:
            alive.prepared.pop(key, None)

    if len(kept) >= _MOST:
        kept.clear()
    known.refs = [weakref.ref(each, forget) for each in operands]
    kept[key] = known


def _key(name: str, il: int, values: tuple[Any, ...], operands: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What an operation is kept under; None where what is equal to its values may mean something else."""
    if type(il) is not int:
        return None
    for value in values:
        kind = type(value)
        if kind not in _PLAIN or (kind is float and value == 0):  # of either sign
            return None
    return name, il, values, *map(type, values), *map(id, operands)


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


class _Member:
    """One sequence of an operation, and the addresses in its C struct that must be those of the first call."""

    __slots__ = ("c", "last", "layer", "max_ctx", "watched")

    def __init__(self, cache: Cache, il: int, rows: int, in_batch: bool) -> None:
        self.c, self.max_ctx = cache._c, cache.max_ctx
        self.last = self.max_ctx - rows  # where pos may be at most
        kv, recur = cache.kv[il], cache.recur[il]
        self.layer: Any
        if kv is not None:
            self.layer, parts = kv._c, [(KvLayerC.k.offset, KvLayerC.v.offset + KvLayerC.v.size)]
            parts.append((KvLayerC.len_d.offset, KvLayerC.len_d.offset + KvLayerC.len_d.size))
        else:
            assert recur is not None
            end = RecurLayerC.ssm_state_alt if in_batch else RecurLayerC.ssm_state  # a batch's table has that address
            self.layer, parts = recur._c, [(RecurLayerC.conv_state.offset, end.offset)]
        memory = memoryview(self.layer).cast("B")
        self.watched = [(memory[begin:end], bytes(memory[begin:end])) for begin, end in parts]


class Prepared:
    """One operation with its arguments in place. It holds C structs and addresses: no cache, and no operand."""

    refs: list[Any]  # to its operands: each takes this out of the cache when it dies

    def __init__(
        self, e: Any, cache: Cache | CacheBatch, il: int, op: StepOp | None, rows: int, launches: Launches
    ) -> None:
        self.e, self.op, self.rows = e, int(op or 0), rows
        single = cache.batch is None
        self.members = [_Member(member, il, rows, not single) for member in cache.members]
        self.reads_kv = op is None and cache.members[0].kv[il] is not None
        self.in_round = cache.open_round is not None
        self.launches: list[Launch] = [e.prepare(name, args) for name, args in launches]
        self.planes: OpenWatch | None = None  # of the sequences of a batch; of a single one they are arguments
        if not single:
            names = RecurLayer.PLANES if cache.members[0].kv[il] is None else KvLayer.PLANES
            d = cache.plan.device_of(il)
            self.planes = OpenWatch(member.planes[name, il, d] for member in cache.members for name in names)
        self.slots = [launch.field("slot") for launch in self.launches if single and launch.has("slot")]
        self.appends = op is StepOp.APPEND
        self.length = self.launches[0].field("len") if single and self.appends else None
        self.states: tuple[Any, Any] | None = None
        if single and self.op & _SCAN:
            self.states = self.launches[0].field("state_in"), self.launches[0].field("state_out")

    def again(self, cache: Cache | CacheBatch, operands: tuple[Any, ...]) -> bool:
        """Enqueues and notes it once more over the same operands; False, and nothing done, where that may be wrong."""
        for each in operands:
            if not each._open:
                return False
        for member in self.members:
            if not self._is_free(member):
                return False
        if self.planes is not None and not (self._in_step() and self.planes.is_true()):
            return False
        if not self.launches[0].is_open:
            return False
        first = self.members[0]
        pos, layer = first.c.pos, first.layer
        for slot in self.slots:
            slot.value = pos
        if self.length is not None:
            length, end = layer.len, pos + self.rows
            self.length.value = end if end > length else length
        if self.states is not None:
            self.states[0].value, self.states[1].value = layer.ssm_state.ptr, layer.ssm_state_alt.ptr
        if not self.op:
            for launch in self.launches:
                launch.run()
            return True
        try:
            self.launches[0].run()
            for i, member in enumerate(self.members):
                self._note(member, cache, i)
        except MemraError:
            raise
        except BaseException:
            for own in cache.members:
                own.taint()
            raise
        return True

    def _is_free(self, member: _Member) -> bool:
        """Whether nothing in this sequence speaks against the operation."""
        c, layer, op = member.c, member.layer, self.op
        pos, width = c.pos, c.round_width
        if c.state or c.recorder == _BY_C or not 0 <= pos <= member.last or bool(width) is not self.in_round:
            return False
        for memory, frozen in member.watched:
            if bytes(memory) != frozen:
                return False
        if not op:
            return not self.reads_kv or pos + self.rows <= layer.len <= member.max_ctx
        if layer.step_ops & op or c.step_rows not in (0, self.rows) or (width and self.rows > width):
            return False
        if self.appends:
            return bool(pos == layer.len if width else pos <= layer.len <= member.max_ctx)
        if self.states is not None:
            now = layer.ssm_state.ptr, layer.ssm_state_alt.ptr
            return now in ((layer.home, layer.away), (layer.away, layer.home))
        return True

    def _in_step(self) -> bool:
        """Whether the sequences of a batch stand in one step."""
        rows = self.members[0].c.step_rows
        return all(member.c.step_rows == rows for member in self.members)

    def _note(self, member: _Member, cache: Cache | CacheBatch, i: int) -> None:
        c, layer = member.c, member.layer
        if self.appends:
            end = c.pos + self.rows
            if layer.len < end:
                layer.len = end
        if self.states is not None and not self.in_round:
            swap_states(layer)
        if c.step_rows:  # the step is open: there is nothing else to note
            layer.step_ops |= self.op
        else:
            cache.members[i].note_step(layer, self.op, self.rows)
