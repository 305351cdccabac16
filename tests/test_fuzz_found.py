"""What the fuzzers of the C library have found, each once by hand and with the right answer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import POINTER, byref, c_int32, c_void_p
from pathlib import Path
from typing import Any

import pytest
from cplan import CASES, SPREAD, Case, arguments, c_cache, c_device, changed, image, library, new_cache
from standin import StandIn

from memra_driver import layout, native
from memra_driver.capi.device import LibraryDevice
from memra_driver.errors import (
    ArrayError,
    CapacityError,
    CompileError,
    ConfigError,
    DriverError,
    MemraError,
    StateError,
    UnsupportedError,
)

try:
    native.compiler()
except CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.standin

READY = 0
ALL = ("append_kv.cu", "conv.cu", "gdn_prep.cu", "gdn_scan.cu", "recur_step.cu", "counters.cu", "copy_many.cu")


@pytest.fixture
def device(standin: StandIn) -> Iterator[LibraryDevice]:
    with c_device() as made:
        yield made


def new_snapshot(cache: layout.CacheC) -> Any:
    made = POINTER(layout.SnapshotC)()
    library().call("memra_snapshot_new", ctypes.pointer(cache), byref(made))
    return made


def test_a_split_without_a_place_for_its_answer_is_refused() -> None:
    n = c_int32(77)
    for columns, blocks in ((None, byref(n)), (byref(n), None), (None, None)):
        with pytest.raises(ArrayError, match="columns or blocks is NULL"):
            library().call("memra_recur_split", 1, 1, 2, 32, columns, blocks)
    assert n.value == 77


# A kernel that was not loaded is a refusal: told before the first call of the driver, with nothing changed.


def refused_untouched(standin: StandIn, cache: layout.CacheC, name: str, *args: Any) -> None:
    before = image(cache)
    standin.clear_trace()
    with pytest.raises(UnsupportedError, match="is not loaded"):
        library().call(name, ctypes.pointer(cache), *args)
    assert image(cache) == before
    assert standin.trace() == []


def test_without_its_kernels_a_cache_does_not_move_and_is_not_tainted(standin: StandIn, device: LibraryDevice) -> None:
    device.load("counters.cu")
    with c_device() as bare, c_cache(CASES["mtp"], [device]) as cache:
        snap = new_snapshot(cache)
        handle, valid, count = cache.devices[0].handle, bytes(snap.contents), standin.live_count()
        cache.devices[0].handle = bare.handle  # the same GPU, by a device without kernels
        for name, *args in (
            ("memra_snapshot_into", snap), ("memra_rollback", snap, 0), ("memra_reset",), ("memra_sync",),
            ("memra_advance", 1), ("memra_prepare_replay", None, 1),
        ):  # fmt: skip
            refused_untouched(standin, cache, name, *args)
        with pytest.raises(UnsupportedError, match="restore is not loaded"):
            new_snapshot(cache)
        assert (bytes(snap.contents), standin.live_count()) == (valid, count)
        cache.devices[0].handle = handle
        library().call("memra_rollback", ctypes.pointer(cache), snap, 0)
        library().call("memra_snapshot_free", snap)
        assert cache.state == READY
    with c_device() as bare, c_cache(CASES["no linear layers"], [bare]) as cache:
        refused_untouched(standin, cache, "memra_truncate", 0)


def test_where_copies_need_a_launch_its_kernel_is_asked_for_first(standin: StandIn) -> None:
    with c_device(arena=False) as device:
        device.load("copy_many.cu")
        device.load("counters.cu")
        with c_device(arena=False) as bare, c_cache(CASES["mtp"], [device]) as cache:
            snap = new_snapshot(cache)
            bare.load("counters.cu")
            handle = cache.devices[0].handle
            cache.devices[0].handle = bare.handle  # the same GPU, by a device without the kernel
            valid = bytes(snap.contents)
            refused_untouched(standin, cache, "memra_snapshot_into", snap)
            refused_untouched(standin, cache, "memra_rollback", snap, 0)
            assert bytes(snap.contents) == valid
            cache.devices[0].handle = handle
            library().call("memra_snapshot_free", snap)


@pytest.mark.parametrize("missing", ["conv.cu", "counters.cu"])
def test_a_round_that_cannot_be_ended_stays_open(standin: StandIn, device: LibraryDevice, missing: str) -> None:
    kernels = [source for source in ALL if source != missing]
    for source in kernels:
        device.load(source)
    with c_cache(CASES["mtp"], [device]) as cache:
        rows, apart = ctypes.c_uint64(), 1 << 14
        device.call("memra_alloc", 10 * apart, byref(rows))
        device.call("memra_clear", rows.value, 10 * apart)
        call, at = ctypes.pointer(cache), [rows.value + i * apart for i in range(10)]
        library().call("memra_round_begin", call, 2)
        library().call("memra_recur_step", call, 0, 2, *at[:7], 1e-6, 0.2)
        library().call("memra_append_kv", call, 3, 2, *at[7:9])
        refused_untouched(standin, cache, "memra_round_commit", 1)
        refused_untouched(standin, cache, "memra_round_commit_from_device", at[9])
        if missing == "counters.cu":
            refused_untouched(standin, cache, "memra_round_reject")
        assert (cache.state, cache.round_width) == (READY, 2)
        device.load(missing)
        library().call("memra_round_commit", call, 1)
        assert (cache.pos, cache.round_width) == (1, 0)
        device.call("memra_free", rows.value)


@pytest.mark.parametrize("code", [4, 709])  # the driver is at its end; the context is destroyed
def test_what_is_not_made_is_told_of_whatever_the_driver_says(
    standin: StandIn, device: LibraryDevice, code: int
) -> None:
    """An end frees in peace what went with its context, so these are none there."""
    with c_cache(CASES["mtp"], [device]) as cache:
        snapshot = c_void_p()
        standin.fail("cuMemAllocAsync", 1, code)
        with pytest.raises(DriverError, match=rf"cuMemAllocAsync.*\({code}\)"):
            library().call("memra_snapshot_new", ctypes.pointer(cache), byref(snapshot))
        assert snapshot.value is None


def test_a_birth_that_fails_tells_of_its_first_failure(standin: StandIn) -> None:
    with c_device(arena=False) as device:
        standin.fail("cuMemAllocAsync", 2, 719)
        standin.fail("cuMemFreeAsync", 1, 999)
        with pytest.raises(DriverError, match=r"cuMemAllocAsync.*\(719\)"):
            new_cache(CASES["mtp"], [device])
        assert library().ask("memra_last_driver_code") == 719


# Captures


def test_a_capture_that_the_driver_does_not_end_can_be_abandoned_again(
    standin: StandIn, device: LibraryDevice
) -> None:
    device.call("memra_capture_begin", 0)
    standin.fail("cuStreamEndCapture", 1, 999)
    with pytest.raises(DriverError, match="cuStreamEndCapture"):
        device.call("memra_capture_abandon")
    with pytest.raises(StateError, match="a capture is open on this device already"):
        device.call("memra_capture_begin", 0)
    device.call("memra_capture_abandon")
    device.call("memra_device_synchronize")
    assert standin.live_graphs() == 0


def test_a_capture_whose_end_fails_twice_is_still_open(standin: StandIn, device: LibraryDevice) -> None:
    made = c_void_p()
    device.call("memra_capture_begin", 0)
    for nth in (1, 2):
        standin.fail("cuStreamEndCapture", nth, 999)
    with pytest.raises(DriverError, match="cuStreamEndCapture"):
        device.call("memra_capture_end", byref(made))
    assert made.value is None
    device.call("memra_capture_end", byref(made))
    library().call("memra_graph_close", made)
    assert standin.live_graphs() == 0


@pytest.mark.parametrize(
    ("first", "second"), [("cuStreamEndCapture", None), ("cuGraphInstantiate", "cuGraphDestroy")]
)
def test_the_end_of_a_capture_tells_of_its_first_failure(
    standin: StandIn, device: LibraryDevice, first: str, second: str | None
) -> None:
    """A step that is still open, or a graph that cannot be destroyed, comes behind it."""
    device.load("conv.cu")
    with c_cache(CASES["mtp"], [device]) as cache:
        rows = ctypes.c_uint64()
        device.call("memra_alloc", 1 << 16, byref(rows))
        device.call("memra_capture_begin", 0)
        at = [rows.value + each for each in (0, 1 << 14, 1 << 15)]
        library().call("memra_conv_update", ctypes.pointer(cache), 0, 1, *at)
        standin.fail(first, 1, 719)
        if second is not None:
            standin.fail(second, 1, 999)
        made = c_void_p()
        with pytest.raises(DriverError, match=rf"^{first}\w*\(.*\(719\)"):
            device.call("memra_capture_end", byref(made))
        assert library().ask("memra_last_driver_code") == 719
        assert (made.value, cache.step_rows) == (None, 0)
        device.call("memra_free", rows.value)


def test_the_error_record_of_two_devices_is_not_read_by_half(standin: StandIn) -> None:
    with ExitStack() as stack:
        two = [stack.enter_context(c_device(ordinal=ordinal)) for ordinal in (0, 1)]
        cache = stack.enter_context(c_cache(SPREAD["two"], two))
        two[1].call("memra_capture_begin", 0)
        standin.clear_trace()
        health = layout.HealthC()
        with pytest.raises(StateError, match="health: a capture is open"):
            library().call("memra_health_read", ctypes.pointer(cache), byref(health))
        assert standin.trace() == []
        assert bytes(health) == bytes(ctypes.sizeof(health))
        two[1].call("memra_capture_abandon")


# Numbers that nobody could mean


def test_a_position_of_any_size_gives_way_to_a_rollback(standin: StandIn, device: LibraryDevice) -> None:
    for source in ALL:
        device.load(source)
    with c_cache(CASES["no linear layers"], [device]) as cache:
        rows, call = ctypes.c_uint64(), ctypes.pointer(cache)
        device.call("memra_alloc", 1 << 16, byref(rows))
        device.call("memra_clear", rows.value, 1 << 16)
        snap = new_snapshot(cache)
        library().call("memra_append_kv", call, 0, 3, rows.value, rows.value + (1 << 15))
        cache.pos = 2**63 - 1  # with the 3 rows of the step it is more than an i64 holds
        with pytest.raises(CapacityError, match="accept_len is 34; 33 tokens stand"):
            library().call("memra_rollback", call, snap, 34)
        library().call("memra_rollback", call, snap, 3)
        assert (cache.pos, cache.replay_to, cache.kv[0].len) == (0, 3, 3)
        library().call("memra_snapshot_free", snap)
        device.call("memra_free", rows.value)


def refuses(words: str, case: Case, **fields: Any) -> None:
    """C refuses the case with some numbers of its structs other than its arrays are long."""
    config, max_ctx, policy, options = arguments(case)
    for name, value in fields.items():
        setattr((config if hasattr(config.contents, name) else options).contents, name, value)
    made = c_void_p()
    with pytest.raises(MemraError, match=words):
        library().call("memra_plan_new", config, max_ctx, policy, options, None, 0, None, byref(made))
    assert made.value is None


def test_more_taps_than_layers_are_not_looked_for() -> None:
    case = changed(CASES["mtp"], "options.reserve_taps", ((0,), 1))
    refuses("reserve_taps names 4294967295 layers; the model has 9", case, n_tap_layers=2**32 - 1)


def test_flags_behind_the_last_layer_are_not_read() -> None:
    case = CASES["step, windows and query heads by layer"]
    config, *rest = arguments(case)
    config.contents.step35_n_swa_pattern = 2**32 - 1
    pattern = (ctypes.c_uint8 * 4)(1, 0, 1, 7)  # 3 layers, and what is no flag
    config.contents.step35_swa_pattern = ctypes.cast(pattern, POINTER(ctypes.c_uint8))
    made = c_void_p()
    library().call("memra_plan_new", config, *rest, None, 0, None, byref(made))
    library().ask("memra_plan_free", ctypes.cast(made, library()._answers["memra_plan_free"].argtypes[0]))
    pattern[2] = 7
    with pytest.raises(ConfigError, match=r"step35\.swa_pattern\[2\]: needs true or false"):
        library().call("memra_plan_new", config, *rest, None, 0, None, byref(made))


def test_more_stages_than_layers_are_refused_without_a_look_at_their_fence() -> None:
    made, fence = c_void_p(), (c_int32 * 2)(0, 9)
    for n_stages in (10, 2**31 - 1):
        with pytest.raises(ConfigError, match=f"{n_stages} stages for 9 layers: every stage owns at least one layer"):
            library().call("memra_plan_new", *arguments(CASES["mtp"]), fence, n_stages, None, byref(made))


def test_a_table_of_more_copies_than_a_launch_takes_reserves_nothing(standin: StandIn, device: LibraryDevice) -> None:
    device.load("copy_many.cu")
    entry = layout.CopyC(256, 512, 16)
    standin.clear_trace()
    with pytest.raises(CapacityError, match="memra_copy_table: 2147483647 entries; at most 33554431"):
        device.call("memra_copy_table", byref(entry), 2**31 - 1)
    assert standin.trace() == []


def test_more_taps_than_layers_are_not_armed(standin: StandIn, device: LibraryDevice) -> None:
    with c_cache(CASES["mtp"], [device]) as cache:
        ids = (c_int32 * 1)(0)
        with pytest.raises(ConfigError, match="taps of 2147483647 layers; the model has 9"):
            library().call("memra_arm_taps", ctypes.pointer(cache), ids, 2**31 - 1, 1, 8)
        assert not cache.owned


def test_a_pipe_that_nobody_writes_is_no_cubin(device: LibraryDevice, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.cubin")
    for name, path in (("memra_device_load_file", tmp_path / "a.cubin"), ("memra_device_load_folder", tmp_path)):
        with pytest.raises(ConfigError, match=r"a\.cubin: cannot be read: not a regular file"):
            device.call(name, str(path).encode())
