"""What the Rust cache holds, buffer by buffer, after each step of tests/vectors/cache_sequence.json; ours must too.

The vector's pattern fills whole buffers; a step of a phase writes into `ssm_state_alt` and swaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache as once
from typing import Any

import numpy as np
import pytest
import tally
from caches import POLICY
from seven_ops import Bytes, SevenOps
from vectors_data import FOLDER

from memra_driver.cache import Cache, CacheState
from memra_driver.config import LayerKind, ModelConfig, SsmConfig
from memra_driver.errors import ArrayError, DeviceMismatch, UnsupportedError
from memra_driver.kit.caches import pattern
from memra_driver.kit.files import fnv1a64
from memra_driver.layers import RecurLayer

MakeDev = Callable[..., Any]
Array = np.ndarray[Any, Any]


@once
def vector() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / "cache_sequence.json").read_text())
    return data


def config() -> ModelConfig:
    g = vector()["geometry"]
    ssm = SsmConfig(
        conv_kernel=g["ssm_conv_kernel"], state_size=g["ssm_state_size"], time_step_rank=g["ssm_time_step_rank"],
        group_count=g["ssm_group_count"],
    )  # fmt: skip
    return ModelConfig(
        g["n_layer"], g["n_head_kv"], g["head_dim_k"], g["head_dim_v"],
        full_attention_interval=g["full_attention_interval"], ssm=ssm,
    )  # fmt: skip


def floats(tag: int, layer: int, count: int) -> Array:
    return ((pattern(tag, layer, 0, count) >> 8).astype(np.int32) - 8388608).astype(np.float32)


def octets(tag: int, layer: int, start: int, count: int) -> Array:
    return (pattern(tag, layer, start, count) >> 24).astype(np.uint8)


def write(plane: Any, start: int, array: Array) -> None:
    if isinstance(plane, Bytes):
        size = plane.dtype.itemsize
        plane.data[start * size : start * size + array.nbytes] = array.tobytes()
    else:
        plane.view(start, start + array.size).copy_from(array)


def append_rows(cache: Cache, start: int, count: int, k_tag: int, v_tag: int) -> None:
    for il, kv in enumerate(cache.kv):
        if kv is not None:
            for plane, tok_bytes, tag in ((kv.k, kv.k_tok_bytes, k_tag), (kv.v, kv.v_tok_bytes, v_tag)):
                write(plane, start * tok_bytes, octets(tag, il, start * tok_bytes, count * tok_bytes))
            kv.len = start + count


def recurrent_step(state: RecurLayer, il: int, conv_tag: int, ssm_tag: int) -> None:
    write(state.conv_state, 0, floats(conv_tag, il, state.conv_state.len))
    write(state.ssm_state_alt, 0, floats(ssm_tag, il, state.ssm_state_alt.len))
    state.swap()


def steps(e: Any, cache: Cache) -> Iterator[tuple[str, Any]]:
    """Runs the sequence; yields (name of the step, snapshot) behind each."""
    yield "00_new", None
    for il, kv in enumerate(cache.kv):
        if kv is not None:
            write(kv.k, 0, octets(4, il, 0, kv.k.len))
            write(kv.v, 0, octets(5, il, 0, kv.v.len))
            kv.len = 5
    for il, state in enumerate(cache.recur):
        if state is not None:
            planes = (state.conv_state, state.ssm_state, state.ssm_state_alt)
            for tag, plane in enumerate(planes, start=1):
                write(plane, 0, floats(tag, il, plane.len))
    cache.pos = 5
    cache.sync_d(e)
    yield "01_phase_a", None
    snap = cache.snapshot(e)
    yield "02_snapshot", snap
    append_rows(cache, 5, 3, 14, 15)
    for il, state in enumerate(cache.recur):
        if state is not None:
            recurrent_step(state, il, 11, 12)
    cache.pos = 8
    cache.sync_d(e)
    yield "03_phase_b", snap
    cache.snapshot_into(e, snap)
    yield "04_snapshot_into", snap
    append_rows(cache, 8, 4, 24, 25)
    for il, state in enumerate(cache.recur):
        if state is not None:
            recurrent_step(state, il, 21, 22)
            recurrent_step(state, il, 31, 32)
    cache.pos = 12
    cache.sync_d(e)
    yield "05_phase_c", snap
    cache.rollback(e, snap, 2)
    yield "06_rollback_accept2", snap
    cache.rollback(e, snap, 0)
    yield "07_rollback_accept0", snap
    snap.close()


def buffer(cache: Cache, snap: Any, role: str, il: int) -> Any:
    where, name = role.split(".")
    if where == "snap":
        return getattr(snap, name)[il]
    field = {"conv": "conv_state", "ssm": "ssm_state", "ssm_alt": "ssm_state_alt"}.get(name, name)
    return getattr(cache.kv[il] or cache.recur[il], field)


def check_step(expected: dict[str, Any], cache: Cache, snap: Any) -> None:
    assert (cache.pos, cache.max_ctx) == (expected["cache"]["pos"], expected["cache"]["max_ctx"])
    assert [kv and kv.len for kv in cache.kv] == expected["cache"]["kv_len"]
    assert [kv and int(kv.len_d.to_numpy()[0]) for kv in cache.kv] == expected["cache"]["len_d"]
    if "snapshot" in expected:
        assert (snap.pos, snap.kv_len) == (expected["snapshot"]["pos"], expected["snapshot"]["kv_len"])
    for file in expected["files"]:
        plane = buffer(cache, snap, file["role"], file["layer"])
        assert (plane.len, plane.nbytes) == (file["n"], file["bytes"]), file["path"]
        assert fnv1a64(plane.to_numpy().tobytes()) == file["fnv1a64"], file["path"]
        tally.add("vectors")


def run(e: Any) -> None:
    cache = Cache.new(e, config(), vector()["geometry"]["max_ctx"], policy=POLICY)
    expected = {step["step"]: step for step in vector()["steps"]}
    seen = []
    for name, snap in steps(e, cache):
        check_step(expected[name], cache, snap)
        seen.append(name)
    assert seen == list(expected)
    cache.close()


def test_the_geometry_of_the_vector_is_ours() -> None:
    cfg, g = config(), vector()["geometry"]
    assert [cfg.layer_kind(il).value for il in range(cfg.n_layer)] == g["layer_kind"]
    assert {cfg.layer_kind(il) for il in (3, 7)} == {LayerKind.FULL}


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_every_buffer_holds_what_the_rust_cache_holds(make_dev: MakeDev, kind: str, arena: bool) -> None:
    run(make_dev(kind, arena=arena))


def test_a_device_of_seven_operations_over_bytearrays_holds_what_the_rust_cache_holds() -> None:
    run(SevenOps())


# The calls, without an arena


RUST_NEW = [
    call
    for il in range(9)
    for call in (
        [("alloc_u8", 16 * 136 + 8), ("alloc_u8", 16 * 48 + 8), ("htod_i32", 1)]
        if il in (3, 7)
        else [("zeros", 384), ("zeros", 1024), ("zeros", 1024)]
    )
]
RECURRENT = [il for il in range(9) if il not in (3, 7)]


def test_a_birth_asks_for_the_planes_of_the_rust_walk_in_its_order_and_then_for_ours() -> None:
    e = SevenOps()
    Cache.new(e, config(), 16, policy=POLICY)
    assert e.calls == [*RUST_NEW, ("htod_i32", 1), ("alloc_u8", 88)]


def test_snapshot_clones_ring_and_state_of_each_layer_in_order_and_copies_nothing_twice() -> None:
    e = SevenOps()
    cache = Cache.new(e, config(), 16, policy=POLICY)
    e.calls.clear()
    snap = cache.snapshot(e)
    assert e.calls == [("clone_dtod", n) for _ in RECURRENT for n in (384, 1024)]
    e.calls.clear()
    cache.snapshot_into(e, snap)
    assert e.calls == [("copy_into", n) for _ in RECURRENT for n in (384, 1024)]


def test_rollback_copies_each_layer_in_order_and_stamps_the_counters_in_place() -> None:
    e = SevenOps()
    cache = Cache.new(e, config(), 16, policy=POLICY)
    snap = cache.snapshot(e)
    for kv in filter(None, cache.kv):
        kv.len = 4
    cache.pos = 4
    e.calls.clear()
    cache.rollback(e, snap, 3)
    copies = [call for call in e.calls if call[0] == "copy_into"]
    assert copies == [("copy_into", n) for _ in RECURRENT for n in (384, 1024)]
    assert [call for call in e.calls if call not in copies] == [
        ("set_i32_one", 3),
        ("set_i32_one", 3),
        ("set_i32_one", 0),
    ]


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "planes"])
def test_our_devices_answer_the_seven_operations_alike(make_dev: MakeDev, arena: bool) -> None:
    for e in (make_dev("host", arena=arena), make_dev("cuda", arena=arena), SevenOps()):
        numbers = e.htod_i32([5, -6, 7])
        assert (numbers.len, numbers.nbytes, np.dtype(numbers.dtype).name) == (3, 12, "int32")
        e.set_i32_one(numbers, -9)
        assert numbers.to_numpy().tolist() == [-9, -6, 7]
        assert not e.alloc_u8(5).to_numpy().any()
        source, target = e.zeros(4), e.zeros(6)
        write(source, 0, np.arange(1, 5, dtype=np.float32))
        e.copy_into(target, 3, source, 2)
        assert target.to_numpy().tolist() == [0, 0, 0, 1, 2, 0]
        clone = e.clone_dtod(target)
        write(target, 0, np.zeros(6, np.float32))
        assert clone.to_numpy().tolist() == [0, 0, 0, 1, 2, 0]
        assert (e.uninit(0).ptr, e.zeros(0).len, e.clone_dtod(e.alloc_u8(0)).nbytes) == (0, 0, 0)
        e.copy_into(e.zeros(0), 0, e.zeros(0), 0)


def test_a_copy_between_devices_of_different_kinds_is_refused(make_dev: MakeDev) -> None:
    host, cuda = make_dev("host"), make_dev("cuda")
    for e, other in ((host, cuda), (cuda, host)):
        mine, theirs = e.zeros(4), other.zeros(4)
        for call in (
            lambda e=e, a=mine, b=theirs: e.copy_into(a, 0, b, 4),
            lambda e=e, a=mine, b=theirs: e.copy_into(b, 0, a, 4),
            lambda e=e, b=theirs: e.clone_dtod(b),
        ):
            with pytest.raises(DeviceMismatch):
                call()


@pytest.mark.parametrize(("off", "n"), [(3, 2), (-1, 1), (0, 6), (0, -1), (5, 0)])
def test_a_copy_out_of_range_is_refused(make_dev: MakeDev, off: int, n: int) -> None:
    for e in (make_dev("host"), make_dev("cuda")):
        with pytest.raises(ArrayError, match="copy_into"):
            e.copy_into(e.zeros(4), off, e.zeros(5), n)
        with pytest.raises(ArrayError, match="copy_into from uint8"):
            e.copy_into(e.zeros(4), 0, e.alloc_u8(4), 4)


def test_a_third_device_is_reset_and_digested_like_ours(make_dev: MakeDev) -> None:
    digests = set()
    for e in (make_dev("host"), make_dev("cuda"), SevenOps()):
        cache = Cache.new(e, config(), 16, policy=POLICY)
        for name, _ in steps(e, cache):
            if name == "05_phase_c":
                break
        digests.add(cache.digest())
        cache.reset(e)
        assert cache.pos == cache.kv[3].len == 0
        assert not any(state.ssm_state.to_numpy().any() or state.ssm_state_alt.to_numpy().any()
                       for state in cache.recur if state)  # fmt: skip
        digests.add(cache.digest())
        assert not cache.health()
        cache.clear_health()
        cache.close()
    assert len(digests) == 2


def test_a_slice_that_cannot_be_read_only_costs_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    e = SevenOps()
    cache = Cache.new(e, config(), 16, policy=POLICY)
    snap = cache.snapshot(e)
    monkeypatch.delattr(Bytes, "to_numpy")
    with pytest.raises(UnsupportedError, match="to_numpy"):
        cache.digest()
    cache.pos = 3
    cache.rollback(e, snap, 0)
    assert (cache.pos, cache.state) == (0, CacheState.READY)
