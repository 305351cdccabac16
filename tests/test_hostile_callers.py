"""What a careless or interrupted caller does: nothing is restored, read or kept that is not what it claims to be."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, tiny
from standin import StandIn

from memra_driver import ops, reference
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import ArrayError, DeviceMismatch, SnapshotError, StateError
from memra_driver.kvdev import CudaDev


@pytest.mark.parametrize("synced", [True, False])
def test_a_snapshot_is_outdated_when_rows_below_it_are_written_anew(dev: Any, synced: bool) -> None:
    with Cache.new(dev, attention_only(), 32, policy=POLICY) as cache:
        Feed(cache).step(10)
        snap = cache.snapshot(dev)
        cache.pos = 3
        for layer in filter(None, cache.kv):
            layer.len = 3
        if synced:
            cache.sync_d(dev)
        Feed(cache, seed=99).step(7)
        with pytest.raises(SnapshotError, match="position 10"):
            cache.rollback(dev, snap, 0)
        cache.snapshot_into(dev, snap)
        cache.rollback(dev, snap, 0)
        snap.close()


def test_an_operation_that_is_interrupted_half_way_taints(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise MemoryError

    with Cache.new(host, tiny(), 16, policy=POLICY) as cache:
        snap = cache.snapshot(host)
        layer = cache.recur[0]
        x, w = np.ones((1, layer.conv_dim), np.float32), np.ones((layer.conv_dim, layer.d_conv), np.float32)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_nonfinite", interrupt)  # after the ring has rolled
            with pytest.raises(MemoryError):
                ops.conv_update(host, cache, 0, x, w, np.empty_like(x))
        assert cache.state is CacheState.TAINTED
        with pytest.raises(StateError, match="tainted"):
            ops.conv_update(host, cache, 0, x, w, np.empty_like(x))
        cache.rollback(host, snap, 0)
        assert cache.state is CacheState.READY
        snap.close()


def test_a_rollback_that_is_interrupted_taints(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with Cache.new(host, tiny(), 16, policy=POLICY) as cache:
        snap = cache.snapshot(host)
        Feed(cache).step(2)
        with monkeypatch.context() as patch:
            patch.setattr(type(host), "launch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                cache.rollback(host, snap, 0)
        assert cache.state is CacheState.TAINTED
        cache.rollback(host, snap, 0)
        assert (cache.state, cache.pos) == (CacheState.READY, 0)
        snap.close()


def test_a_snapshot_with_a_buffer_of_another_dtype_is_not_restored(dev: Any) -> None:
    with Cache.new(dev, tiny(), 16, policy=POLICY) as cache, cache.snapshot(dev) as snap:
        snap.ssm[0] = dev.alloc_u8(snap.ssm[0].len)
        with pytest.raises(SnapshotError, match="shape mismatch"):
            cache.rollback(dev, snap, 0)
        snap.ssm[0] = np.zeros(3)
        with pytest.raises(SnapshotError, match="shape mismatch"):
            cache.snapshot_into(dev, snap)


def test_bytes_never_become_python_objects(dev: Any) -> None:
    with dev.zeros(4) as held:
        for make in (lambda: held.cast(object), lambda: held.plane(0, 1, object), lambda: held.cast("V0")):
            with pytest.raises(ArrayError):
                make()


def test_a_struct_that_was_scribbled_on_is_named(host: Any) -> None:
    with Cache.new(host, tiny(), 16, policy=POLICY) as cache:
        struct = cache.as_c().contents
        kept = struct.recur[0].ssm_state.ptr
        struct.recur[0].ssm_state.ptr = 1234
        with pytest.raises(StateError, match="ssm_state is 0x4d2"):
            cache.digest()
        struct.recur[0].ssm_state.ptr = kept
        struct.state = 17
        with pytest.raises(StateError, match="state is 17"):
            cache.digest()
        struct.state = 0
        for value in (2**63, -(2**63) - 1, 2**64 + 3):
            with pytest.raises(StateError, match="64-bit"):
                cache.pos = value
        assert cache.pos == 0


@pytest.mark.standin
def test_kernels_of_a_device_that_is_dropped_are_unloaded(standin: StandIn) -> None:
    e = CudaDev()
    e.launch("set_counters", e.zeros(128), 0, 0, 0, 0, 0, 0, None, 0)
    assert len(standin.calls("cuLibraryLoadData")) == 1
    del e
    gc.collect()
    assert len(standin.calls("cuLibraryUnload")) == 1


@pytest.mark.standin
def test_a_stream_of_another_device_is_refused(make_dev: Any) -> None:
    with pytest.raises(DeviceMismatch, match=r"stream given is of cuda:0, not of cuda:1"):
        CudaDev(1, make_dev("cuda", 0).stream)


def test_a_cache_closed_inside_a_capture_stays_closed_and_the_graph_is_given_up(dev: Any) -> None:
    cache = Cache.new(dev, attention_only(1), 8, policy=POLICY)
    rows = dev.zeros(128)

    def capture() -> None:
        with dev.capture() as graph:
            ops.append_kv(dev, cache, 0, rows, rows)
            cache.advance(dev, 1)
            cache.close()
        graph.launch()

    with pytest.raises(StateError, match="given up"):
        capture()
    assert cache.state is CacheState.CLOSED
    rows.close()


def test_an_interrupted_operation_inside_a_capture_gives_the_graph_up(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = type(host).launch

    def interrupt(self: Any, *args: Any) -> None:
        launch(self, *args)
        raise KeyboardInterrupt

    with Cache.new(host, attention_only(1), 8, policy=POLICY) as cache:
        rows = np.ones((1, 128), np.float32)

        def capture() -> None:
            with host.capture():
                ops.append_kv(host, cache, 0, rows, rows)
                cache.advance(host, 1)
                with monkeypatch.context() as patch:
                    patch.setattr(type(host), "launch", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        ops.append_kv(host, cache, 0, rows, rows)

        with pytest.raises(StateError, match="given up"):
            capture()
        assert (cache.state, cache.pos) == (CacheState.READY, 0)  # nothing of it ran
        ops.append_kv(host, cache, 0, rows, rows)
        cache.advance(host, 1)


def test_an_interrupted_advance_of_a_batch_taints_its_members(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = type(host).launch

    def interrupt(self: Any, *args: Any) -> None:
        launch(self, *args)
        raise KeyboardInterrupt

    with Cache.new(host, attention_only(1), 8, policy=POLICY) as cache, CacheBatch([cache]) as batch:
        with monkeypatch.context() as patch:
            patch.setattr(type(host), "launch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                batch.advance(host, 1)
        assert cache.state is CacheState.TAINTED
        cache.reset(host)
