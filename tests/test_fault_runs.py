"""Every driver call of every public operation fails once: see fault_runs.py for what must hold then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from decoding import OPTIONS, TRUE, WRONG, Lane
from fault_runs import ATTENTION, Quick, Run, Stage, sweep
from foreign import Foreign, Tensor
from standin import StandIn

from memra_driver import capi, ops
from memra_driver.batch import CacheBatch
from memra_driver.device import CudaEvent, CudaSlice, CudaStream
from memra_driver.layout import HEALTH_BYTES
from memra_driver.round import Round

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]
Prepare = Callable[[Stage], Run]


def after(s: Stage, *before: str, then: str, il: int, **more: Any) -> Run:
    """`then`, behind other operations of the same step."""
    for name in before:
        s.op(name, il, **more)()
    return s.op(then, il, **more)


def kept(s: Stage, made: Callable[[], Any]) -> Run:
    return lambda: s.keep.append(made())


def tapped(s: Stage) -> Run:
    s.cache.arm_taps(s.devices[-1], [3, 2], 4, 8)
    return s.op("tap_write", 3)


def parked(s: Stage, again: bool) -> Run:
    row = s.row()
    if again:
        s.cache.park_logits(s.devices[-1], row)
    return lambda: s.cache.park_logits(s.devices[-1], row)


def opened(s: Stage, end: Callable[[Round], Any], rows: int = 3) -> Run:
    r = s.round(rows)
    return lambda: end(r)


def from_device(s: Stage, accept: int) -> Run:
    count = s.devices[-1].htod_i32([accept])
    s.keep.append(count)
    return opened(s, lambda r: r.commit_from_device(count))


def unsettled(s: Stage) -> Run:
    from_device(s, 2)()
    return lambda: s.cache.settle(s.e)


def in_round(s: Stage, run: Run) -> Run:
    s.round()
    return run


def in_step(s: Stage, run: Run) -> Run:
    s.lane(2, WRONG).run(s.cache, calls=Quick())
    return run


def swapped(s: Stage, which: int) -> None:
    """Lets layers 0 .. which-1 stand in their other buffer."""
    for layer in list(filter(None, s.cache.recur))[:which]:
        layer.swap()


def dequantised(s: Stage) -> Run:
    e = s.cache.kv[3].owner
    k, v = e.uninit(128), e.uninit(128)
    s.keep += [k, v]
    return lambda: ops.dequant_kv(e, s.cache, 3, 1, 3, k, v)


def faulted(s: Stage) -> None:
    """Something stands in the record of each device."""
    for il in (0, s.cfg.n_layer - 1):
        s.cache.health_d(il).copy_from(np.arange(1, 1 + HEALTH_BYTES, dtype=np.uint8))


def other_stream(s: Stage) -> CudaStream:
    s.keep.append(CudaStream(s.e.context))
    return s.keep[-1]


def of_other_libraries(s: Stage) -> Run:
    """An append of rows that nobody of ours made: K is filled on another stream, V is where it says that it is."""
    layer, at = s.cache.kv_layer(3), s.lane(2).at
    k = Foreign(at[3, "k"], (2, layer.kv_dim_k), stream=other_stream(s).handle)
    v = Tensor(at[3, "v"].ptr, (2, layer.kv_dim_v))
    return lambda: ops.append_kv(s.e, s.cache, 3, k, v)


# On one device, and where they may span them on two.
CHANGES: dict[str, Prepare] = {
    "append_kv": lambda s: s.op("append_kv", 3),
    "attend": lambda s: after(s, "append_kv", then="attend", il=3),
    "dequant_kv": dequantised,
    "conv_update": lambda s: s.op("conv_update", 2),
    "gdn_prep": lambda s: after(s, "conv_update", then="gdn_prep", il=2),
    "gdn_scan": lambda s: after(s, "conv_update", "gdn_prep", then="gdn_scan", il=2),
    "recur_step": lambda s: s.op("recur_step", 2),
    "tap_write": tapped,
    "arm_taps": lambda s: lambda: s.cache.arm_taps(s.devices[-1], [2], 3, 8),
    "disarm_taps": lambda s: (s.cache.arm_taps(s.devices[-1], [2], 3, 8), s.cache.disarm_taps)[1],
    "park_logits": lambda s: parked(s, again=False),
    "park_logits again": lambda s: parked(s, again=True),
    "take_logits": lambda s: (parked(s, again=False)(), lambda: s.cache.take_logits(s.devices[-1]))[1],
    "snapshot": lambda s: kept(s, lambda: s.cache.snapshot(s.e)),
    "snapshot, mixed": lambda s: (swapped(s, 1), kept(s, lambda: s.cache.snapshot(s.e)))[1],
    "snapshot_into": lambda s: lambda: s.cache.snapshot_into(s.e, s.snap),
    "snapshot_into, mixed": lambda s: (swapped(s, 1), lambda: s.cache.snapshot_into(s.e, s.snap))[1],
    "rollback": lambda s: lambda: s.cache.rollback(s.e, s.snap, 0),
    "rollback, accept": lambda s: lambda: s.cache.rollback(s.e, s.snap, 2),
    "rollback, mixed": lambda s: (swapped(s, 1), lambda: s.cache.rollback(s.e, s.snap, 1))[1],
    "rollback in a step": lambda s: in_step(s, lambda: s.cache.rollback(s.e, s.snap, 3)),
    "rollback in a round": lambda s: in_round(s, lambda: s.cache.rollback(s.e, s.snap, 1)),
    "advance": lambda s: (s.lane(1).run(s.cache, calls=Quick()), lambda: s.cache.advance(s.e))[1],
    "advance alone": lambda s: lambda: s.cache.advance(s.e, 2),
    "reset": lambda s: lambda: s.cache.reset(s.e),
    "reset in a round": lambda s: in_round(s, lambda: s.cache.reset(s.e)),
    "sync_d": lambda s: lambda: s.cache.sync_d(s.e),
    "health": lambda s: lambda: s.cache.health(),
    "clear_health": lambda s: (faulted(s), s.cache.clear_health)[1],
    "digest": lambda s: lambda: s.cache.digest(),
    "report": lambda s: lambda: s.cache.report(),
    "round": lambda s: Round(s.cache, s.e, width=3).__enter__,
    "append_kv in a round": lambda s: (Round(s.cache, s.e, width=3).__enter__(), s.op("append_kv", 1))[1],
    "conv_update in a round": lambda s: (Round(s.cache, s.e, width=3).__enter__(), s.op("conv_update", 0))[1],
    "commit all": lambda s: opened(s, lambda r: r.commit(3)),
    "commit some": lambda s: opened(s, lambda r: r.commit(2)),
    "commit none": lambda s: opened(s, lambda r: r.commit(0)),
    "commit_from_device": lambda s: from_device(s, 2),
    "settle": unsettled,
    "reject": lambda s: opened(s, lambda r: r.reject()),
    "leave a round": lambda s: opened(s, lambda r: r.__exit__(None, None, None)),
    "prepare_replay": lambda s: (swapped(s, 2), lambda: s.cache.prepare_replay(s.e))[1],
    "prepare_replay at home": lambda s: lambda: s.cache.prepare_replay(s.e),
    "to_numpy": lambda s: s.cache.kv[1].k.to_numpy,
    "copy_from": lambda s: lambda: s.cache.kv[1].k.copy_from(np.arange(s.cache.kv[1].k.len, dtype=np.uint8)),
    "mem_info": lambda s: s.devices[-1].mem_info,
}


def steps(s: Stage, caches: Sequence[Any] | None = None, *, capture: Any = None) -> Callable[[], Any]:
    """Records a step of one row of each cache, once the device has room for its attention."""
    caches = [s.cache] if caches is None else caches
    for player in (s.player, *s.mates):
        s.step(player, 1)
    lanes = [Lane(cache, 1).fill((cache.pos, [TRUE])) for cache in caches]
    s.keep += lanes

    def record() -> Any:
        with (s.e.capture() if capture is None else capture(s.e)) as graph:
            for cache, lane in zip(caches, lanes, strict=True):
                lane.run(cache, calls=Quick())
                cache.advance(s.e)
        return graph

    return record


def launched(s: Stage, record: Callable[[], Any], which: int = 0) -> Run:
    graph = record()
    s.keep.append(graph)
    swapped(s, which)
    return graph.launch


def rounds(s: Stage, *, capture: Any = None) -> Callable[[], Any]:
    """Records a round whose count is on the device."""
    lane, number = s.lane(2), s.e.htod_i32([1])
    s.keep.append(number)

    def record() -> Any:
        with (s.e.capture() if capture is None else capture(s.e)) as graph, Round(s.cache, s.e, width=2) as r:
            lane.run(s.cache, calls=Quick())
            r.commit_from_device(number)
        return graph

    return record


def batched(s: Stage, *ops_: str, il: int) -> Run:
    """The last of these operations, over a batch of two; the others come before it."""
    batch = CacheBatch([s.cache, s.mate()])
    lane = Lane(batch, 2).fill((s.cache.pos, [TRUE] * 2), (2, [TRUE] * 2))
    s.keep += [batch, lane]
    *before, last = [s.op(name, il, cache=batch, lane=lane) for name in ops_]
    for run in before:
        run()
    return last


def advanced(s: Stage) -> Run:
    batched(s, "append_kv", il=1)()
    batch = next(each for each in s.keep if isinstance(each, CacheBatch))
    return lambda: batch.advance(s.e, 2)


def uploaded(s: Stage) -> Run:
    """A batch whose table is out of date."""
    run = batched(s, "append_kv", il=1)
    swapped(s, 2)
    return run


ALONE: dict[str, Prepare] = {
    "capture": lambda s: kept(s, steps(s)),
    "capture of a round": lambda s: kept(s, rounds(s)),
    "capture of two": lambda s: kept(s, steps(s, [s.cache, s.mate()])),
    "graph launch": lambda s: launched(s, steps(s)),
    "graph launch, states away": lambda s: launched(s, steps(s), which=2),
    "graph launch of a round": lambda s: launched(s, rounds(s)),
    "graph launch of two": lambda s: launched(s, steps(s, [s.cache, s.mate()]), which=1),
    "batch": lambda s: kept(s, partial(CacheBatch, [s.cache, s.mate()])),
    "append_kv of a batch": lambda s: batched(s, "append_kv", il=1),
    "append_kv of a batch, uploaded": uploaded,
    "attend of a batch": lambda s: batched(s, "append_kv", "attend", il=1),
    "conv_update of a batch": lambda s: batched(s, "conv_update", il=0),
    "gdn_prep of a batch": lambda s: batched(s, "conv_update", "gdn_prep", il=0),
    "recur_step of a batch": lambda s: batched(s, "recur_step", il=0),
    "gdn_scan of a batch": lambda s: batched(s, "conv_update", "gdn_prep", "gdn_scan", il=0),
    "advance of a batch": advanced,
    "append_kv of other libraries' arrays": of_other_libraries,
    "wait_stream": lambda s: partial(s.e.stream.wait_stream, other_stream(s)),
    "release_to": lambda s: partial(s.e.stream.release_to, other_stream(s)),
    "export": lambda s: partial(s.cache.kv[1].k.__dlpack__, stream=other_stream(s).handle),
}


# What streams, events and devices offer beside a cache.


def bytes_of(s: Stage, call: Callable[[Any, Any], Any]) -> Run:
    """`call` with 64 bytes of the last device and 64 of the first."""
    a, b = s.devices[-1].alloc_u8(64), s.e.alloc_u8(64)
    s.keep += [a, b]
    return lambda: call(a, b)


def events_of(s: Stage, call: Callable[[CudaEvent, CudaEvent], Any]) -> Run:
    """`call` with two events that have passed."""
    start, end = (CudaEvent(s.e.context, timing=True) for _ in range(2))
    s.keep += [start, end]
    for each in (start, end):
        s.e.stream.record(each)
    s.e.synchronize()
    return lambda: call(start, end)


def launch_of(s: Stage, name: str) -> Run:
    """A kernel that no operation of a cache launches in the library, over memory of its own."""
    layer, e = s.cache.kv[1], s.e
    out, counters, table = e.zeros(2 * 64), e.htod_i32([0] * 4), e.alloc_u8(24)
    table.copy_from(np.array([out.ptr, counters.ptr, 16], np.uint64).view(np.uint8))
    s.keep += [out, counters, table]
    shape = 64, 64, layer.k_tok_bytes, layer.v_tok_bytes, layer.k_format, layer.v_format
    args: dict[str, tuple[Any, ...]] = {
        "copy_many": (table, 1, None, 0), "copy_rows": (out, out.view(64), 64, 64, 1, 64, None, 0),
        "dequant_kv": (layer.k, layer.v, 0, 1, 32, *shape, out, out.view(64), 0, None, 0),
        "set_counters": (counters, 1, 2, 1, 0, 2, 0, None, 0),
        "restore": (out, out.view(64), 64, None, None, 0, counters, 1, 2, 1, 0, 2, 0, None, 0),
    }  # fmt: skip
    return lambda: e.launch(name, *args[name])


STREAMS: dict[str, Prepare] = {
    "memcpy_dtod": lambda s: bytes_of(s, lambda a, b: s.e.stream.memcpy_dtod(b.ptr, b.ptr + 32, 32)),
    "memcpy_htod": lambda s: bytes_of(s, lambda a, b: s.e.stream.memcpy_htod(b.ptr, np.ones(64, np.uint8))),
    "memcpy_dtoh": lambda s: bytes_of(s, lambda a, b: s.e.stream.memcpy_dtoh(np.ones(64, np.uint8), b.ptr)),
    "memset": lambda s: bytes_of(s, lambda a, b: s.e.stream.memset(b.ptr, 0, 64)),
    "memset to a value": lambda s: bytes_of(s, lambda a, b: s.e.stream.memset(b.ptr, 7, 64)),
    "read": lambda s: bytes_of(s, lambda a, b: s.e.stream.read(b.ptr, np.ones(64, np.uint8))),
    "write": lambda s: bytes_of(s, lambda a, b: s.e.stream.write(b.ptr, np.ones(64, np.uint8))),
    "query": lambda s: s.e.stream.query,
    "synchronize": lambda s: s.e.synchronize,
    "record": lambda s: events_of(s, lambda start, end: s.e.stream.record(end)),
    "wait": lambda s: events_of(s, lambda start, end: s.e.stream.wait(end)),
    "query of an event": lambda s: events_of(s, lambda start, end: end.query()),
    "synchronize with an event": lambda s: events_of(s, lambda start, end: end.synchronize()),
    "elapsed_ms": lambda s: events_of(s, lambda start, end: end.elapsed_ms(start)),
    "alloc_bytes": lambda s: kept(s, lambda: CudaSlice(s.e.memory, 64, np.uint8)),
    "zeros": lambda s: kept(s, lambda: s.e.zeros(16)),
    "uninit": lambda s: kept(s, lambda: s.e.uninit(16)),
    "alloc_u8": lambda s: kept(s, lambda: s.e.alloc_u8(64)),
    "alloc_arena": lambda s: kept(s, lambda: s.e.alloc_arena(512)),
    "htod_i32": lambda s: kept(s, lambda: s.e.htod_i32([1, 2])),
    "clone_dtod": lambda s: kept(s, lambda: s.e.clone_dtod(s.cache.kv[1].k)),
    "set_i32_one": lambda s: bytes_of(s, lambda a, b: s.e.set_i32_one(b.cast(np.int32), 7)),
    "copy_into": lambda s: bytes_of(s, lambda a, b: s.e.copy_into(b, 0, s.cache.kv[1].k, 32)),
    "copy_bytes": lambda s: bytes_of(s, lambda a, b: s.e.copy_bytes(b.ptr, b.ptr + 32, 32)),
    "clear_bytes": lambda s: bytes_of(s, lambda a, b: s.e.clear_bytes(b.ptr, 64)),
    "copy_many": lambda s: bytes_of(s, lambda a, b: s.e.copy_many([(b.ptr, b.ptr + 32, 16)])),
    "launch of copy_many": lambda s: launch_of(s, "copy_many"),
    "launch of copy_rows": lambda s: launch_of(s, "copy_rows"),
    "launch of dequant_kv": lambda s: launch_of(s, "dequant_kv"),
    "launch of set_counters": lambda s: launch_of(s, "set_counters"),
    "launch of restore": lambda s: launch_of(s, "restore"),
    "the array interface": lambda s: lambda: s.cache.kv[1].k.__cuda_array_interface__,
    "name": lambda s: s.e.context.name,
    "arch": lambda s: lambda: s.e.context.arch,
    "is_alive": lambda s: s.e.context.is_alive,
    "memory_info": lambda s: s.e.context.memory_info,
    "pool_info": lambda s: s.e.context.pool_info,
    "keep_memory": lambda s: partial(s.e.keep_memory, 0),
    "trim": lambda s: s.e.trim,
    "trim of a context": lambda s: s.e.context.trim,
}
ACROSS: dict[str, Prepare] = {
    "copy_into of another device": lambda s: bytes_of(s, lambda a, b: s.e.copy_into(b, 0, a, 64)),
    "count_from": lambda s: bytes_of(s, lambda a, b: s.e.count_from(s.devices[-1], a.ptr)),
    "enable_peer": lambda s: partial(s.e.context.enable_peer, s.devices[-1].context),
}
ALL = CHANGES | ALONE | STREAMS | ACROSS
EACH = [
    *((name, n) for name in CHANGES for n in (1, 2)), *((name, 1) for name in ALONE | STREAMS),
    *((name, 2) for name in ACROSS),
]  # fmt: skip


@pytest.mark.parametrize(("name", "devices"), EACH)
def test_each_call(make_dev: MakeDev, standin: StandIn, name: str, devices: int) -> None:
    stage = Stage(make_dev, standin, devices=devices)
    sweep(stage, ALL[name], several="of two" in name)
    stage.close()


@pytest.mark.parametrize("name", ["settle", "digest"])
def test_each_call_of_what_a_strict_cache_waits_for(make_dev: MakeDev, standin: StandIn, name: str) -> None:
    stage = Stage(make_dev, standin, options=replace(OPTIONS, strict=True))
    sweep(stage, ALL[name])
    stage.close()


@pytest.mark.parametrize("devices", [1, 2])
def test_each_call_of_truncate(make_dev: MakeDev, standin: StandIn, devices: int) -> None:
    stage = Stage(make_dev, standin, devices=devices, cfg=ATTENTION)
    sweep(stage, lambda s: lambda: s.cache.truncate(s.e, 3))
    stage.close()


@pytest.mark.parametrize("name", ["snapshot", "rollback, accept", "reset", "clear_health"])
@pytest.mark.parametrize("pools", [True, False], ids=["pools", "no-pools"])
def test_each_call_where_every_plane_is_an_allocation(
    make_dev: MakeDev, standin: StandIn, pools: bool, name: str
) -> None:
    standin.set_attribute(0, 115, int(pools))
    stage = Stage(make_dev, standin, arena=False)
    sweep(stage, CHANGES[name])
    stage.close()


# What the library has functions of its own for.

OF_THE_LIBRARY: dict[str, Prepare] = {
    "memra_snapshot_new": lambda s: kept(s, lambda: capi.calls.snapshot(s.cache)),
    "memra_snapshot_new, mixed": lambda s: (swapped(s, 1), kept(s, lambda: capi.calls.snapshot(s.cache)))[1],
    "memra_arm_taps": lambda s: lambda: capi.calls.arm_taps(s.cache, [2], 3, 8),
    "memra_capture": lambda s: kept(s, steps(s, capture=capi.calls.capture)),
    "memra_capture of a round": lambda s: kept(s, rounds(s, capture=capi.calls.capture)),
    "memra_capture of two": lambda s: kept(s, steps(s, [s.cache, s.mate()], capture=capi.calls.capture)),
    "memra_graph_launch": lambda s: launched(s, steps(s, capture=capi.calls.capture)),
    "memra_graph_launch of a round": lambda s: launched(s, rounds(s, capture=capi.calls.capture)),
    "memra_graph_launch, states away": lambda s: launched(s, steps(s, capture=capi.calls.capture), which=2),
    "memra_graph_launch of two": lambda s: launched(
        s, steps(s, [s.cache, s.mate()], capture=capi.calls.capture), which=1
    ),
}


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
@pytest.mark.parametrize("cuda_kind", ["c"], indirect=True)
def test_each_call_of_the_library(make_dev: MakeDev, standin: StandIn, name: str) -> None:
    stage = Stage(make_dev, standin)
    sweep(stage, OF_THE_LIBRARY[name], several="of two" in name)
    stage.close()
