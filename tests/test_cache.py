"""Fields, scalars, addresses and lifetime of a cache and its layers."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import inspect
import struct
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from caches import (
    POLICY,
    Feed,
    addresses,
    attention_only,
    device_counters,
    gemma,
    image,
    planes,
    put,
    scalars,
    sequence,
    tiny,
)

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import ArrayError, ConfigError, DeviceMismatch, MemraError, StateError
from memra_driver.formats import FORMATS, FormatPolicy
from memra_driver.kvdev import HostDev
from memra_driver.layers import DflashTapSink, KvLayer, RecurLayer
from memra_driver.plan import CacheOptions
from memra_driver.snapshot import CacheSnapshot

MakeDev = Callable[..., Any]


def new(e: Any, cfg: Any = None, max_ctx: int = 32, **options: Any) -> Cache:
    return Cache.new(e, tiny() if cfg is None else cfg, max_ctx, policy=POLICY, options=CacheOptions(**options))


# Fields


FIELDS = {
    KvLayer: ["k", "v", "kv_dim_k", "kv_dim_v", "k_tok_bytes", "v_tok_bytes", "len", "len_d"],
    RecurLayer: ["conv_state", "ssm_state", "ssm_state_alt"],
    Cache: ["kv", "recur", "pos", "max_ctx", "last_logits_dev", "dflash_taps"],
    CacheSnapshot: ["kv_len", "conv", "ssm", "pos"],
    DflashTapSink: ["layer_ids", "buf", "hidden", "t"],
}


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_every_field_of_the_rust_struct_is_an_attribute(kind: type) -> None:
    e = HostDev()
    with new(e) as cache, cache.snapshot(e) as snap:
        cache.dflash_taps = DflashTapSink([1, 2], e.zeros(8), 4, 1)
        have = {KvLayer: cache.kv[3], RecurLayer: cache.recur[0], Cache: cache, CacheSnapshot: snap,
                DflashTapSink: cache.dflash_taps}[kind]  # fmt: skip
        for field in FIELDS[kind]:
            assert hasattr(have, field), field
        cache.dflash_taps = None


def test_the_lists_have_an_entry_per_layer_and_at_most_one_of_a_pair(dev: Any) -> None:
    with new(dev, tiny(n_layer=9, nextn_predict_layers=1)) as cache:
        assert [layer is not None for layer in cache.kv] == [il in (3, 7) for il in range(9)]
        assert [layer is not None for layer in cache.recur] == [il not in (3, 7) for il in range(9)]
        assert (cache.pos, cache.max_ctx, cache.last_logits_dev, cache.dflash_taps) == (0, 32, None, None)


def test_skipped_mtp_layers_have_neither_kv_nor_state(dev: Any) -> None:
    with new(dev, tiny(n_layer=9, nextn_predict_layers=1), skip_mtp_state=True) as cache:
        assert (len(cache.kv), len(cache.recur)) == (9, 9)
        assert (cache.kv[8], cache.recur[8]) == (None, None)
        Feed(cache).step(2)
        with cache.snapshot(dev) as snap:
            assert (snap.kv_len[8], snap.conv[8], snap.ssm[8]) == (None, None, None)


def test_shapes_and_strides_are_those_of_the_geometry(dev: Any) -> None:
    with new(dev, tiny(head_dim_k=96, head_dim_v=32)) as cache:
        layer = cache.kv[3]
        assert (layer.kv_dim_k, layer.kv_dim_v, layer.k_tok_bytes, layer.v_tok_bytes) == (192, 64, 204, 48)
        assert (layer.k.len, layer.v.len, layer.len_d.len) == (32 * 204 + 8, 32 * 48 + 8, 1)
        assert [plane.dtype.name for plane in (layer.k, layer.v, layer.len_d)] == ["uint8", "uint8", "int32"]
        state = cache.recur[0]
        assert (state.conv_state.len, state.ssm_state.len, state.ssm_state_alt.len) == (128 * 3, 2048, 2048)
        assert {plane.dtype.name for plane in (state.conv_state, state.ssm_state, state.ssm_state_alt)} == {"float32"}


def test_the_formats_of_a_layer_are_decided_at_birth(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMRA_KV_V", "q4_0")
    with Cache.new(dev, attention_only(1), 4) as cache:
        monkeypatch.setenv("MEMRA_KV_V", "fp8")
        Feed(cache).step(2)
        layer = cache.kv[0]
        assert (layer.k_format, layer.v_format) == (FORMATS["q8_0"].code, FORMATS["q4_0"].code)
        assert layer.v_tok_bytes == 4 * 18
    with Cache.new(dev, attention_only(1), 4, policy=FormatPolicy(kv_fp8=True)) as cache:
        assert (cache.kv[0].k_format, cache.kv[0].v_format) == (FORMATS["fp8"].code,) * 2


def test_a_borrowing_layer_reads_the_last_owner_of_its_kind(dev: Any) -> None:
    with new(dev, gemma(shared=3)) as cache:
        assert [layer is not None for layer in cache.kv] == [True] * 3 + [False] * 3
        assert [cache.kv_layer_for(il) for il in range(6)] == [cache.kv[il] for il in (0, 1, 2, 1, 1, 2)]
        assert [cache.kv[il].window for il in range(3)] == [8, 8, 0]
    with new(dev) as cache, pytest.raises(ConfigError, match="layer 0"):
        cache.kv_layer_for(0)


def test_layers_that_share_all_kv_make_a_cache_of_nothing(dev: Any) -> None:
    with new(dev, gemma(shared=6)) as cache, cache.snapshot(dev) as snap:
        assert set(cache.kv) == set(cache.recur) == {None}
        cache.advance(dev, 3)
        cache.rollback(dev, snap, 0)
        assert (cache.pos, snap.nbytes, device_counters(cache)) == (0, 0, ({}, {0}))


# Scalars in C memory


def test_a_length_written_through_c_is_seen_by_python_and_the_other_way_round(dev: Any) -> None:
    with new(dev) as cache:
        c, layer = cache.as_c().contents, cache.kv[3]
        c.kv[3].len, c.pos = 7, 5
        assert (layer.len, cache.pos) == (7, 5)
        layer.len, cache.pos = 9, 8
        assert (c.kv[3].len, c.pos) == (9, 8)


def test_python_follows_a_swap_that_c_made(dev: Any) -> None:
    with new(dev) as cache:
        state = cache.recur[0]
        before, other = state.ssm_state, state.ssm_state_alt
        c = cache.as_c().contents.recur[0]
        c.ssm_state.ptr, c.ssm_state_alt.ptr = c.ssm_state_alt.ptr, c.ssm_state.ptr
        assert (state.ssm_state.ptr, state.ssm_state_alt.ptr) == (other.ptr, before.ptr)
        state.ssm_state.copy_from(np.full(2048, 3, np.float32))
        assert other.to_numpy()[0] == 3


def test_the_c_struct_stays_where_it_is() -> None:
    with new(HostDev()) as cache:
        pointer = cache.as_c()
        address = ctypes.addressof(pointer.contents)
        del pointer
        gc.collect()
        assert ctypes.addressof(cache.as_c().contents) == address
        assert cache.as_c().contents.kv[3].k.ptr == cache.kv[3].k.ptr


def test_the_state_in_c_follows_every_change(dev: Any) -> None:
    with new(dev) as cache:
        c, feed = cache.as_c().contents, Feed(cache)
        snap = cache.snapshot(dev)
        feed.step(3, advance=False)
        assert (c.step_rows, c.kv[3].step_ops, c.recur[0].step_ops, c.recur[0].swaps) == (3, 1, 6, 1)
        cache.advance(dev, 3)
        assert (c.step_rows, c.kv[3].step_ops, c.recur[0].step_ops, c.pos) == (0, 0, 0, 3)
        cache.rollback(dev, snap, 2)
        assert (c.state, c.replay_to, c.pos, c.kv[3].len) == (CacheState.PENDING_REPLAY, 2, 0, 2)
        feed.step(2)
        assert (c.state, c.replay_to, c.pos) == (CacheState.READY, 0, 2)
        cache.reset(dev)
        assert (c.generation, c.pos, c.kv[3].len, c.state) == (1, 0, 0, CacheState.READY)
        snap.close()
    assert c.state == CacheState.CLOSED


@pytest.mark.parametrize("value", [1.0, "3", None])
def test_a_length_takes_whole_numbers_only(value: Any) -> None:
    with new(HostDev()) as cache:
        with pytest.raises(TypeError):
            cache.pos = value
        with pytest.raises(TypeError):
            cache.kv[3].len = value
        assert (cache.pos, cache.kv[3].len) == (0, 0)


@pytest.mark.parametrize("name", ["max_ctx", "step_rows", "replay_to", "generation", "id", "state"])
def test_what_the_cache_keeps_itself_cannot_be_assigned(name: str) -> None:
    with new(HostDev()) as cache, pytest.raises(AttributeError):
        setattr(cache, name, 1)


def test_assigned_lengths_reach_the_device_with_sync_d(dev: Any) -> None:
    with new(dev, attention_only(4)) as cache:
        cache.pos = 3
        for il, length in enumerate((3, 9, 4, 32)):
            cache.kv[il].len = length
        assert device_counters(cache) == (dict.fromkeys(range(4), 0), {0})
        cache.sync_d(dev)
        assert device_counters(cache) == ({0: 3, 1: 9, 2: 4, 3: 32}, {3})


def test_sync_d_serves_more_counters_than_one_launch_takes(dev: Any) -> None:
    with new(dev, attention_only(300, n_head_kv=1, head_dim_k=32, head_dim_v=32), max_ctx=299) as cache:
        for il in range(300):
            cache.kv[il].len = il
        cache.pos = 299
        cache.sync_d(dev)
        assert device_counters(cache) == ({il: il for il in range(300)}, {299})


@pytest.mark.parametrize("wrong", [-1, 33, 2**40])
@pytest.mark.parametrize("field", ["pos", "len"])
def test_a_length_outside_the_cache_is_refused_wherever_it_would_be_used(dev: Any, field: str, wrong: int) -> None:
    with new(dev) as cache, cache.snapshot(dev) as snap:
        feed = Feed(cache)
        feed.step(4)
        if field == "pos":
            cache.pos = wrong
        else:
            cache.kv[3].len = wrong
        before = image(cache, snap)
        for call in (
            lambda: cache.sync_d(dev), lambda: cache.snapshot(dev), lambda: cache.snapshot_into(dev, snap),
            lambda: cache.digest(),
        ):  # fmt: skip
            with pytest.raises(StateError, match=str(wrong)):
                call()
        row = put(dev, np.zeros(128, np.float32))
        with pytest.raises(MemraError):
            ops.append_kv(dev, cache, 3, row, row)
        if field == "len":
            big = put(dev, np.zeros(128 * 34, np.float32))
            with pytest.raises(MemraError):
                ops.dequant_kv(dev, cache, 3, 0, 34, big, big)
        assert image(cache, snap) == before
        cache.reset(dev)
        assert (cache.pos, cache.kv[3].len) == (0, 0)


def test_an_advance_from_a_position_below_zero_is_refused(dev: Any) -> None:
    with new(dev) as cache:
        cache.pos = -3
        before = image(cache)
        with pytest.raises(StateError, match="pos is -3"):
            cache.advance(dev, 2)
        assert image(cache) == before


# Swaps


def test_a_scan_swaps_the_handles_and_never_the_memory(dev: Any) -> None:
    with new(dev) as cache:
        feed, state = Feed(cache), cache.recur[0]
        even, odd = state.ssm_state.ptr, state.ssm_state_alt.ptr
        for step in range(1, 5):
            feed.step(1)
            expected = (odd, even) if step % 2 else (even, odd)
            assert (state.ssm_state.ptr, state.ssm_state_alt.ptr, state.swaps) == (*expected, step)


def test_the_scan_reads_the_old_state_and_leaves_it_in_alt(dev: Any) -> None:
    with new(dev) as cache:
        feed, state = Feed(cache), cache.recur[0]
        feed.step(2)
        old = state.ssm_state.to_numpy()
        feed.step(3)
        assert np.array_equal(state.ssm_state_alt.to_numpy(), old)
        assert not np.array_equal(state.ssm_state.to_numpy(), old)


def test_a_buffer_of_another_layer_cannot_take_the_place_of_one(dev: Any) -> None:
    with new(dev) as cache:
        before = image(cache)
        with pytest.raises(StateError, match="addresses never change"):
            cache.recur[0].ssm_state = cache.recur[1].ssm_state
        with pytest.raises(StateError, match="addresses never change"):
            cache.kv[3].len_d = dev.htod_i32([1])
        assert image(cache) == before


# Addresses


def test_no_address_changes_through_anything_that_a_sequence_does(dev: Any) -> None:
    with new(dev) as cache, cache.snapshot(dev) as snap:
        born, regions = addresses(cache), cache.regions()
        kept = [each and each.ptr for each in (*snap.conv, *snap.ssm)]
        feed = Feed(cache)
        feed.step(5)
        cache.snapshot_into(dev, snap)
        feed.step(4)
        feed.step(1)
        cache.rollback(dev, snap, 3)
        feed.step(1)
        feed.step(2)
        cache.rollback(dev, snap, 0)
        feed.step(1)
        cache.sync_d(dev)
        cache.reset(dev)
        feed.step(1)
        cache.snapshot_into(dev, snap)
        assert addresses(cache) == born
        assert cache.regions() == regions
        assert [each and each.ptr for each in (*snap.conv, *snap.ssm)] == kept


def test_regions_name_every_live_buffer_once(dev: Any) -> None:
    with new(dev, round_width=2, reserve_logits=True) as cache:
        regions = cache.regions()
        assert len({name for name, *_ in regions}) == len(regions) == len(cache.plan.planes)
        assert {ptr for _, ptr, _, _ in regions} >= {plane.ptr for plane in planes(cache).values()}
        spans = sorted((ptr, ptr + n_bytes) for _, ptr, n_bytes, _ in regions if n_bytes)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert {device for *_, device in regions} == {getattr(dev, "ordinal", -1)}


def test_the_report_adds_up(dev: Any) -> None:
    with new(dev, round_width=2) as cache, cache.snapshot(dev) as snap:
        report = cache.report()
        assert sum(buffer["bytes"] for buffer in report["buffers"]) == cache.plan.plane_bytes
        assert report["cache_bytes"] == cache.plan.arena_bytes
        assert report["snapshots"] == [{"pos": 0, "bytes": snap.nbytes, "invalid": ""}]
        assert report["snapshot_bytes"] == snap.nbytes == cache.plan.first_use["snapshot"]
        assert [device["device"] for device in report["devices"]] == [dev.ordinal]
        assert 0 < report["devices"][0]["free_bytes"] <= report["devices"][0]["total_bytes"]


# Reset


def test_reset_zeroes_ring_states_and_counters_and_leaves_the_kv_bytes(dev: Any) -> None:
    with new(dev) as cache:
        feed = Feed(cache)
        feed.step(3)
        feed.step(1, advance=False)  # an odd number of swaps, and a step open
        kv = cache.kv[3].k.to_numpy()
        cache.last_logits_dev, cache.dflash_taps = dev.zeros(50), DflashTapSink([0], dev.zeros(1), 1, 1)
        cache.reset(dev)
        for state in filter(None, cache.recur):
            for plane in (state.conv_state, state.ssm_state, state.ssm_state_alt):
                assert not plane.to_numpy().any()
        assert np.array_equal(cache.kv[3].k.to_numpy(), kv)
        assert device_counters(cache) == ({3: 0, 7: 0}, {0})
        numbers = scalars(cache)
        assert (numbers["pos"], numbers["3.len"], numbers["3.ops"], numbers["step_rows"]) == (0, 0, 0, 0)
        assert (cache.generation, cache.state, cache.last_logits_dev, cache.dflash_taps) == (1, 0, None, None)


def test_a_reset_cache_decodes_like_a_new_one(dev: Any) -> None:
    with new(dev) as cache, new(dev) as fresh:
        Feed(cache, seed=5).step(3)
        cache.reset(dev)
        Feed(cache).step(4)
        Feed(fresh).step(4)
        assert sequence(cache) == sequence(fresh)
        assert cache.digest() == fresh.digest()


# The digest


def test_the_digest_sees_everything_that_is_the_sequence_and_nothing_else(dev: Any) -> None:
    with new(dev) as cache:
        Feed(cache).step(3)
        digest = cache.digest()

        def flip(plane: Any, index: int) -> bool:
            """Whether the digest notices one changed byte."""
            data = plane.to_numpy()
            changed = data.copy()
            changed.view(np.uint8)[index] ^= 1
            plane.copy_from(changed)
            noticed = cache.digest() != digest
            plane.copy_from(data)
            assert cache.digest() == digest
            return noticed

        layer, state = cache.kv[7], cache.recur[5]
        assert flip(layer.k, 3 * layer.k_tok_bytes - 1)
        assert not flip(layer.k, 3 * layer.k_tok_bytes)
        assert flip(layer.v, 3 * layer.v_tok_bytes - 1)
        assert not flip(layer.v, 3 * layer.v_tok_bytes)
        assert flip(layer.len_d, 0)
        assert flip(state.conv_state, state.conv_state.nbytes - 1)
        assert flip(state.ssm_state, state.ssm_state.nbytes - 1)
        assert not flip(state.ssm_state_alt, 0)
        assert not flip(cache.pos_d(0), 0)
        layer.len = 2
        assert cache.digest() != digest
        layer.len = 3
        cache.pos = 4
        assert cache.digest() != digest


def test_the_digest_is_the_stated_stream() -> None:
    e = HostDev()
    with new(e, tiny(n_layer=5, nextn_predict_layers=1), skip_mtp_state=True) as cache:
        Feed(cache).step(3)
        stream = b""
        for il in range(5):
            kv, state = cache.kv[il], cache.recur[il]
            if kv is not None:
                names = b"".join(struct.pack("<I", len(name)) + name for name in (b"q8_0", b"q5_1"))
                stream += b"\x01" + names + struct.pack("<qq", 3, 3)
                stream += kv.k.to_numpy()[: 3 * 136].tobytes() + kv.v.to_numpy()[: 3 * 96].tobytes()
            elif state is not None:
                stream += b"\x02" + state.conv_state.to_numpy().tobytes() + state.ssm_state.to_numpy().tobytes()
            else:
                stream += b"\x00"
        stream += struct.pack("<q", 3)
        assert cache.digest() == hashlib.sha256(stream).hexdigest()


# Lifetime


def test_closing_twice_is_closing_once(dev: Any) -> None:
    cache = new(dev)
    snap = cache.snapshot(dev)
    cache.close()
    cache.close()
    assert cache.state is CacheState.CLOSED
    snap.close()
    snap.close()


def test_a_closed_cache_refuses_everything_but_closing(dev: Any) -> None:
    cache = new(dev)
    snap = cache.snapshot(dev)
    row = put(dev, np.zeros(128, np.float32))
    cache.close()
    for call in (
        lambda: cache.snapshot(dev), lambda: cache.snapshot_into(dev, snap), lambda: cache.rollback(dev, snap, 0),
        lambda: cache.advance(dev), lambda: cache.truncate(dev, 0), lambda: cache.reset(dev), cache.report,
        cache.regions, lambda: cache.sync_d(dev), cache.digest, cache.health, cache.clear_health,
        lambda: ops.append_kv(dev, cache, 3, row, row), lambda: ops.dequant_kv(dev, cache, 3, 0, 0, row, row),
    ):  # fmt: skip
        with pytest.raises(StateError, match="closed"):
            call()
    with pytest.raises(StateError, match="closed"):
        cache.kv[3].k.to_numpy()
    snap.close()


def test_a_with_block_frees_the_cache_also_when_it_raises(make_dev: MakeDev) -> None:
    e = make_dev("host")
    with pytest.raises(KeyError), new(e):
        raise KeyError
    assert e.memory.live_bytes == 0


def test_a_cache_that_nobody_holds_is_freed_at_once(make_dev: MakeDev) -> None:
    e = make_dev("host")
    cache = new(e)
    Feed(cache).step(2)
    snap = cache.snapshot(e)
    gone = weakref.ref(cache)
    gc.disable()  # no cycle keeps it
    try:
        del cache
        assert gone() is None
        del snap
        assert e.memory.live_bytes == 0
    finally:
        gc.enable()


def test_a_plane_keeps_its_memory_alive_after_the_cache(make_dev: MakeDev) -> None:
    e = make_dev("host")
    layer_k = new(e).kv[3].k
    gc.collect()
    assert not layer_k.to_numpy().any()
    del layer_k
    assert e.memory.live_bytes == 0


# Devices


def test_another_device_is_refused_by_every_call(dev: Any, make_dev: MakeDev) -> None:
    other = make_dev("host")
    with new(dev) as cache, cache.snapshot(dev) as snap:
        before = image(cache, snap)
        for call in (
            lambda: cache.snapshot(other), lambda: cache.snapshot_into(other, snap), lambda: cache.advance(other),
            lambda: cache.rollback(other, snap, 0), lambda: cache.truncate(other, 0), lambda: cache.reset(other),
            lambda: cache.sync_d(other),
        ):  # fmt: skip
            with pytest.raises(DeviceMismatch):
                call()
        row = put(other, np.zeros(128, np.float32))
        with pytest.raises((DeviceMismatch, ArrayError)):
            ops.append_kv(other, cache, 3, row, row)
        assert image(cache, snap) == before


def test_each_cache_has_a_number_of_its_own() -> None:
    with new(HostDev()) as one, new(HostDev()) as two:
        assert one.id != two.id


def test_constructors_take_policy_and_options_by_name_only() -> None:
    for make in (Cache.new, Cache.new_pp2, Cache.new_ppn):
        parameters = inspect.signature(make).parameters
        for name in ("policy", "options"):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert parameters[name].default is None
