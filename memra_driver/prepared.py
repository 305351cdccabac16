"""Eager operations that were checked once, to be enqueued again.

An operation asks much of its arrays, its layer and its cache, and most of the answers cannot change. A call over slices
of our own leaves a `Prepared` behind, which `kept` finds again; the next call compares what can have changed.
Where a comparison fails nothing was done, and the operation takes its usual way, which knows every rule and says what
is wrong. So no rule is stated here: what passes here passes there.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memra_driver.errors import MemraError
from memra_driver.graph import open_captures
from memra_driver.layers import KvLayer, RecurLayer
from memra_driver.layout import (
    LEN_WORD,
    POS_WORD,
    CacheC,
    KvLayerC,
    RecurLayerC,
    StepOp,
    ready_stand,
    stand_of,
    words,
)  # fmt: skip
from memra_driver.memory import CHANGED, OpenWatch
from memra_driver.place import Action, run_actions

if TYPE_CHECKING:
    from memra_driver.batch import CacheBatch
    from memra_driver.cache import Cache
    from memra_driver.launches import Launch

Again = Callable[[Any, Any], bool]  # of a device and a cache or batch


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


class _Watch:
    """What a prepared operation counts on beside the C structs: its launches, operands, and planes of a batch."""

    __slots__ = ("launches", "mark", "planes", "refs")

    def __init__(self, launches: list[Launch], planes: OpenWatch | None) -> None:
        self.mark: object = None  # of CHANGED, when all of it was last found open
        self.launches = launches
        self.planes = planes  # of the sequences of a batch; of a single one they are arguments
        self.refs: list[Any] = []  # to the operands: each takes the operation out of the cache when it dies

    def is_open(self) -> bool:
        """Whether all of it is there still, though something has changed somewhere."""
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


class Prepared:
    """One operation, and its launches with arguments in place. It holds C structs and addresses: no cache, no operand.

    again(e, cache) enqueues and notes it once more over the same operands; False, and nothing done, where that may be
    wrong. It is a closure over all that a call needs: an attribute costs a call as much as a comparison does.
    """

    __slots__ = ("__weakref__", "again", "watch")

    def __init__(
        self, e: Any, cache: Cache | CacheBatch, il: int, op: StepOp | None, rows: int, launches: list[Launch]
    ) -> None:
        if cache.batch is not None:
            d = cache.plan.device_of(il)
            names = KvLayer.PLANES if cache.members[0].kv[il] is not None else RecurLayer.PLANES
            planes = OpenWatch(member.planes[name, il, d] for member in cache.members for name in names)
            self.watch = _Watch(launches, planes)
            self.again = _of_batch(e, self.watch, cache.members, il, int(op or 0), rows)
            return
        self.watch = _Watch(launches, None)
        (single,) = cache.members
        kind = _reading if op is None else _appending if op is StepOp.APPEND else _recurring
        self.again = kind(e, self.watch, single, il, int(op or 0), rows)


# Where fields lie, in words of 8 or of 4 bytes; `layout` has those that others read, too.
_KV_OPS = KvLayerC.step_ops.offset // 4
_RECUR_OPS = RecurLayerC.step_ops.offset // 4
# The addresses of the two states and the words of both, counted from the ring on.
_SSM, _ALT, _PLANES_END = (
    (getattr(RecurLayerC, name).offset - RecurLayerC.conv_state.offset) // 8
    for name in ("ssm_state", "ssm_state_alt", "conv_dim")
)
_STATES = slice(_SSM, _PLANES_END)
_OPS_AND_SWAPS = slice(RecurLayerC.step_ops.offset, RecurLayerC.step_ops.offset + 8)  # of which swaps is the upper half
_ONE_SWAP = 1 << 32
_LOGITS, _SNAPSHOTS = CacheC.logits_at.offset // 8, CacheC.snapshots.offset // 8
_STEP = 1  # of what stand_of gives


def _span(layer_c: Any, first: Any, end: Any) -> tuple[memoryview, memoryview]:
    """The words of a struct from one field to before another, as they are at any time and as they are now."""
    span = words(layer_c)[0][first.offset // 8 : end.offset // 8]
    return span, memoryview(bytes(span)).cast("q")


def _kv_planes(layer_c: Any) -> tuple[memoryview, memoryview, memoryview]:
    """The words of an attention layer's struct, and those of them that are K and V, at any time and now."""
    return words(layer_c)[0], *_span(layer_c, KvLayerC.k, KvLayerC.kv_dim_k)


def _with_states(planes: memoryview, state: int, other: int) -> memoryview:
    """The words of a recurrent layer's planes with its two states at these addresses."""
    changed = array.array("q", planes.tolist())
    changed[_SSM], changed[_ALT] = state, other
    return memoryview(changed)


def _in_place(launches: Sequence[Launch], cache: Cache) -> None:
    """Launches of a single sequence find its position in the cache's own struct."""
    for launch in launches:
        if launch.has("slot"):
            launch.read_from("slot", cache._c, CacheC.pos)


# One closure for each way in which an operation of a single sequence changes it. What they compare first is the same.


def _reading(e: Any, watch: _Watch, cache: Cache, il: int, op: int, rows: int) -> Again:
    """attend and gdn_prep: they change nothing."""
    clock, _ = words(cache._c)
    stand, width, last = stand_of(cache._c), cache._c.round_width, cache.max_ctx - rows
    outside, inside = ready_stand(0, width), ready_stand(rows, width)  # of a step
    layer = cache.kv[il]
    kv, planes, born = (None, None, None) if layer is None else _kv_planes(layer._c)
    max_ctx, calls = cache.max_ctx, [launch.again for launch in watch.launches]
    _in_place(watch.launches, cache)

    def again(given: Any, _: Any) -> bool:
        if given is not e or (watch.mark is not CHANGED[0] and not watch.is_open()):
            return False
        pos = clock[POS_WORD]
        if (stand != inside and stand != outside) or not 0 <= pos <= last:
            return False
        if kv is not None and (planes != born or not pos + rows <= kv[LEN_WORD] <= max_ctx):
            return False
        for call in calls:
            call()
        return True

    return again


def _appending(e: Any, watch: _Watch, cache: Cache, il: int, op: int, rows: int) -> Again:
    """append_kv: len moves."""
    clock, _ = words(cache._c)
    stand, width, last = stand_of(cache._c), cache._c.round_width, cache.max_ctx - rows
    outside, inside = ready_stand(0, width), ready_stand(rows, width)
    layer_c, max_ctx = cache.kv_layer(il)._c, cache.max_ctx
    layer, planes, born = _kv_planes(layer_c)
    len_d, born_len_d = _span(layer_c, KvLayerC.len_d, KvLayerC.k_format)
    _, layer32 = words(layer_c)
    (launch,) = watch.launches
    call = launch.again
    launch.read_from("len", layer_c, KvLayerC.len)
    _in_place(watch.launches, cache)

    def again(given: Any, owner: Any) -> bool:
        if given is not e or (watch.mark is not CHANGED[0] and not watch.is_open()):
            return False
        pos, stands, ran, opens = clock[POS_WORD], layer[LEN_WORD], layer32[_KV_OPS], stand != inside
        if (opens and stand != outside) or not 0 <= pos <= last or ran & op or planes != born or len_d != born_len_d:
            return False
        if not pos <= stands <= max_ctx or (width and stands != pos):
            return False
        end = pos + rows
        try:
            if stands < end:
                layer[LEN_WORD] = end  # the launch takes it from there
            call()
            if opens:
                owner.note_step(layer_c, op, rows)
            else:  # the step is open: there is nothing else to note
                layer32[_KV_OPS] = ran | op
        except MemraError:  # the driver took nothing
            layer[LEN_WORD] = stands
            raise
        except BaseException:
            owner.taint()
            raise
        return True

    return again


def _recurring(e: Any, watch: _Watch, cache: Cache, il: int, op: int, rows: int) -> Again:
    """conv_update, gdn_scan, recur_step: ring and state move; outside a round a scan swaps the state's two buffers."""
    clock, _ = words(cache._c)
    stand, width, last = stand_of(cache._c), cache._c.round_width, cache.max_ctx - rows
    outside, inside = ready_stand(0, width), ready_stand(rows, width)
    recur = cache.recur[il]
    assert recur is not None  # what runs these operations
    layer_c = recur._c
    home, away = layer_c.home, layer_c.away
    planes, now = _span(layer_c, RecurLayerC.conv_state, RecurLayerC.conv_dim)
    at_home, swapped = _with_states(now, home, away), _with_states(now, away, home)
    states, to_home, to_swapped = planes[_STATES], at_home[_STATES], swapped[_STATES]
    noted = memoryview(layer_c).cast("B")[_OPS_AND_SWAPS].cast("Q")
    (launch,) = watch.launches
    call, swaps = launch.again, bool(op & StepOp.SCAN) and not width
    more = op + _ONE_SWAP if swaps else op
    if op & StepOp.SCAN:
        launch.read_from("state_in", layer_c, RecurLayerC.ssm_state)
        launch.read_from("state_out", layer_c, RecurLayerC.ssm_state_alt)
    _in_place(watch.launches, cache)

    def again(given: Any, owner: Any) -> bool:
        if given is not e or (watch.mark is not CHANGED[0] and not watch.is_open()):
            return False
        pos, before, opens, is_home = clock[POS_WORD], noted[0], stand != inside, planes == at_home
        if (opens and stand != outside) or not 0 <= pos <= last or before & op or not (is_home or planes == swapped):
            return False
        try:
            call()
            if swaps:
                states[:] = to_swapped if is_home else to_home
            noted[0] = (before + more) & 0xFFFF_FFFF_FFFF_FFFF
            if opens:
                owner.note_step(layer_c, op, rows)
        except MemraError:
            raise
        except BaseException:
            owner.taint()
            raise
        return True

    return again


class Advance:
    """An `advance` that ends a step of a cache that is ready, in no round and in no capture. It holds no cache.

    again(e, cache, n) does it once more; False, and nothing done, where that may be wrong.
    """

    __slots__ = ("again", "watch")

    def __init__(self, e: Any, cache: Cache) -> None:
        launches: list[Launch] = []
        for d, device in enumerate(cache.devices):
            args = cache.planes["pos_d", None, d], 0, 0, 0, 0, 1, 0, cache.planes["health", None, d], 0
            launches.append(device.prepare("set_counters", args))
        self.watch = _Watch(launches, None)
        self.again = _advancing(e, self.watch, cache)


def _advancing(e: Any, watch: _Watch, cache: Cache) -> Callable[[Any, Any, int], bool]:
    clock, _ = words(cache._c)
    stand, max_ctx, step_ops = stand_of(cache._c), cache.max_ctx, cache._step_ops
    calls, positions = [each.again for each in watch.launches], [each.field("b") for each in watch.launches]

    def again(given: Any, owner: Any, n: int) -> bool:
        if given is not e or (watch.mark is not CHANGED[0] and not watch.is_open()):
            return False
        state, step_rows, round_width = stand
        end = clock[POS_WORD] + n
        if state or round_width or step_rows != n or n < 1 or not n <= end <= max_ctx:
            return False
        for each in positions:
            each.value = end
        run_actions(calls, owner.taint)
        for ran in step_ops:
            ran.fill(0)
        stand[_STEP], clock[POS_WORD] = 0, end
        return True

    return again


class _Member:
    """One sequence of a batch: its C structs as words, and the addresses there, which must be those of now."""

    __slots__ = ("clock", "layer", "layer32", "layer_c", "max_ctx", "stand", "watched")

    def __init__(self, cache: Cache, il: int) -> None:
        self.max_ctx, self.clock, self.stand = cache.max_ctx, words(cache._c)[0], stand_of(cache._c)
        layer: Any = cache.kv[il] if cache.kv[il] is not None else cache.recur[il]
        self.layer_c = layer._c
        self.layer, self.layer32 = words(self.layer_c)
        if cache.kv[il] is not None:
            parts = [(KvLayerC.k, KvLayerC.kv_dim_k), (KvLayerC.len_d, KvLayerC.k_format)]
        else:  # the table has the address of the state, too
            parts = [(RecurLayerC.conv_state, RecurLayerC.ssm_state_alt)]
        self.watched = [_span(self.layer_c, first, end) for first, end in parts]


def _of_batch(e: Any, watch: _Watch, caches: Sequence[Cache], il: int, op: int, rows: int) -> Again:
    """An operation of several sequences, each of which finds its own in the table; their scans swap nothing."""
    members, outside, inside = [_Member(cache, il) for cache in caches], ready_stand(0, 0), ready_stand(rows, 0)
    has_kv = caches[0].kv[il] is not None
    appends, ops_at = op == StepOp.APPEND, _KV_OPS if has_kv else _RECUR_OPS
    calls = [launch.again for launch in watch.launches]

    def again(given: Any, batch: Any) -> bool:
        if given is not e or (watch.mark is not CHANGED[0] and not watch.is_open()):
            return False
        opens = members[0].stand != inside
        stands = outside if opens else inside  # they are in one step, or in none
        for member in members:  # is there anything in this sequence that speaks against it?
            pos = member.clock[POS_WORD]
            if member.stand != stands or not 0 <= pos <= member.max_ctx - rows:
                return False
            for span, born in member.watched:
                if span != born:
                    return False
            if has_kv and not (pos if op else pos + rows) <= member.layer[LEN_WORD] <= member.max_ctx:
                return False
            if op and member.layer32[ops_at] & op:
                return False
        if not op:
            for call in calls:
                call()
            return True
        try:
            calls[0]()
            for i, member in enumerate(members):
                if appends:
                    end = member.clock[POS_WORD] + rows
                    if member.layer[LEN_WORD] < end:
                        member.layer[LEN_WORD] = end
                if opens:
                    if member.clock[_LOGITS] > member.clock[POS_WORD] or member.clock[_SNAPSHOTS]:  # may be given up
                        batch.members[i].note_step(member.layer_c, op, rows)
                        continue
                    member.stand[_STEP] = rows
                member.layer32[ops_at] |= op
        except MemraError:
            raise
        except BaseException:
            for own in batch.members:
                own.taint()
            raise
        return True

    return again
