"""Launches on the stand-in driver, and what the CPU shim does with right and wrong kernels."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import standin as standin_module
from cuda.bindings import driver as cu
from raw_driver import (
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    LAUNCH_FAILED,
    from_device,
    ok,
    on_device,
)
from standin import StandIn

pytestmark = pytest.mark.standin

FAULTS = standin_module.SHIM / "faults.cu"
PTR, INT = ctypes.c_void_p, ctypes.c_int

Launch = Callable[..., int]


@pytest.fixture
def launch(context: StandIn) -> Iterator[Launch]:
    """launch(name, threads, *(value, ctype), grid=..., smem=...) -> code, of a kernel of faults.cu."""
    context.use_kernels(standin_module.build_kernels([FAULTS]))
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))

    def run(name: str, threads: int, *args: tuple[Any, Any], grid: int = 1, smem: int = 0) -> int:
        kernel = ok(cu.cuLibraryGetKernel(library, name.encode()))
        params = (tuple(a for a, _ in args), tuple(c for _, c in args))
        code = int(cu.cuLaunchKernel(kernel, grid, 1, 1, threads, 1, 1, smem, 0, params, 0)[0])
        return code or int(cu.cuCtxSynchronize()[0])

    yield run
    ok(cu.cuLibraryUnload(library))


# ---------------------------------------------------------------- launches


def test_a_kernel_runs_and_stands_in_the_trace(context: StandIn, launch: Launch) -> None:
    data = np.arange(1000, dtype=np.float32)
    ptr = on_device(data)
    assert launch("add_one", 128, (ptr, PTR), (1000, INT), grid=8) == 0
    assert (from_device(ptr, data) == data + 1).all()
    call = context.calls("cuLaunchKernel")[-1]
    assert (call.kernel, call.grid, call.block, call.smem) == ("add_one", (8, 1, 1), (128, 1, 1), 0)
    assert context.launches() == ["add_one"]
    ok(cu.cuMemFree(ptr))


def test_threads_run_backward_when_asked_to(context: StandIn, launch: Launch) -> None:
    out = np.zeros(64, np.uint32)
    ptr = on_device(out)
    assert launch("missing_barrier", 64, (ptr, PTR)) == 0
    forward = from_device(ptr, out)
    context.schedule("backward")
    assert launch("missing_barrier", 64, (ptr, PTR)) == 0
    backward = from_device(ptr, out)
    assert (forward == 0xA5A5A5A5).any()
    assert (forward != backward).any()
    ok(cu.cuMemFree(ptr))


def test_parameters_are_described_as_a_driver_does(launch: Launch, context: StandIn) -> None:
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"parameters"))
    info = [cu.cuKernelGetParamInfo(kernel, i) for i in range(6)]
    assert [(r[1], r[2]) for r in info[:5]] == [(0, 1), (8, 8), (16, 4), (20, 4), (24, 8)]
    assert int(info[5][0]) == INVALID_VALUE
    assert int(cu.cuLibraryGetKernel(library, b"no_such_kernel")[0]) == 500
    ok(cu.cuLibraryUnload(library))


@pytest.mark.misuse
@pytest.mark.parametrize(
    ("grid", "block", "smem"),
    [
        ((0, 1, 1), (32, 1, 1), 0),
        ((1, 65536, 1), (32, 1, 1), 0),
        ((1, 1, 65536), (32, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (32, 33, 1), 0),
        ((1, 1, 1), (1, 1, 65), 0),
        ((1, 1, 1), (0, 1, 1), 0),
        ((1, 1, 1), (32, 1, 1), 49153),
    ],
)
def test_a_launch_that_no_gpu_takes_is_refused(
    context: StandIn, launch: Launch, grid: tuple[int, ...], block: tuple[int, ...], smem: int
) -> None:
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"add_one"))
    result = cu.cuLaunchKernel(kernel, *grid, *block, smem, 0, ((0, 0), (PTR, INT)), 0)
    assert int(result[0]) == INVALID_VALUE
    assert len(context.take_errors()) == 1


def test_a_kernel_without_a_context_runs_in_that_of_the_stream(context: StandIn, launch: Launch) -> None:
    ctx0, ctx1 = ok(cu.cuCtxGetCurrent()), ok(cu.cuDevicePrimaryCtxRetain(1))
    ok(cu.cuCtxSetCurrent(ctx1))
    stream, memory = ok(cu.cuStreamCreate(1)), ok(cu.cuMemAlloc(128))
    ok(cu.cuCtxSetCurrent(ctx0))
    library = ok(cu.cuLibraryLoadData(b"\x7fELF", [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"add_one"))
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, ((int(memory), 32), (PTR, INT)), 0))
    ok(cu.cuStreamSynchronize(stream))
    assert int(ok(cu.cuCtxGetCurrent())) == int(ctx0)
    ok(cu.cuCtxSetCurrent(ctx1))
    ok(cu.cuMemFree(memory))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuCtxSetCurrent(ctx0))
    ok(cu.cuDevicePrimaryCtxRelease(1))


@pytest.fixture
def doomed(launch: Launch) -> Iterator[Launch]:
    """`launch`, for kernels that leave the context unusable; it is thrown away afterwards."""
    yield launch
    ok(cu.cuDevicePrimaryCtxReset(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))


@pytest.mark.misuse
def test_a_kernel_must_not_get_host_or_freed_memory(context: StandIn, doomed: Launch) -> None:
    host = np.zeros(8, np.float32)
    assert doomed("add_one", 32, (host.ctypes.data, PTR), (0, INT)) == ILLEGAL_ADDRESS
    assert "is not live device memory" in context.take_errors()[0]
    assert int(cu.cuCtxSynchronize()[0]) == ILLEGAL_ADDRESS  # a fault stays


@pytest.mark.misuse
def test_a_kernel_that_writes_past_its_memory_is_named(context: StandIn, launch: Launch) -> None:
    ptr = int(ok(cu.cuMemAlloc(100)))
    assert launch("writes_at", 1, (ptr, PTR), (100, ctypes.c_longlong)) == 0
    assert context.take_errors() == ["writes_at: byte 100 of an allocation of 100 bytes was written"]
    ok(cu.cuMemFree(ptr))


# ---------------------------------------------------------------- the shim


def test_barriers_shuffles_ballots_and_atomics_do_what_a_gpu_does(context: StandIn, launch: Launch) -> None:
    x = np.arange(96, dtype=np.float32)
    out, ballots = np.zeros(97, np.float32), np.zeros(2, np.uint32)
    d_x, d_out, d_ballots = on_device(x), on_device(out), on_device(ballots)
    assert launch("sums", 96, (d_x, PTR), (d_out, PTR), (d_ballots, PTR)) == 0
    got = from_device(d_out, out)
    assert got[0] == x.sum()
    assert (got[1:] == np.repeat(x.reshape(-1, 8).sum(axis=1), 8)).all()
    assert from_device(d_ballots, ballots).tolist() == [0b111, 3 * 0xAAAAAAAA % 2**32]
    for ptr in (d_x, d_out, d_ballots):
        ok(cu.cuMemFree(ptr))


@pytest.mark.misuse
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("deadlock", "deadlock: 16 threads wait at __syncthreads, 16 in __ballot_sync"),
        ("full_mask_in_half_a_warp", "__shfl_xor_sync: mask ffffffff names lane"),
        ("lane_outside_its_mask", "lane 16 calls it but is not in its mask 0000ffff"),
        ("reads_outside_its_mask", "reads lane 20, which is not in mask 0000ffff"),
        ("different_intrinsics_meet", "meets"),
    ],
)
def test_a_fault_fails_the_launch_and_every_later_call(
    context: StandIn, doomed: Launch, kernel: str, text: str
) -> None:
    ptr = int(ok(cu.cuMemAlloc(256)))
    assert doomed(kernel, 32, (ptr, PTR)) == LAUNCH_FAILED
    (error,) = context.take_errors()
    assert error.startswith(f"cuLaunchKernel: {kernel}: ")
    assert text in error
    assert int(cu.cuCtxSynchronize()[0]) == LAUNCH_FAILED
    assert int(cu.cuMemFree(ptr)[0]) == LAUNCH_FAILED


def test_shared_memory_is_poisoned_for_each_block(context: StandIn, launch: Launch) -> None:
    out = np.zeros(64, np.uint32)
    ptr = on_device(out)
    assert launch("dynamic_shared", 32, (ptr, PTR), grid=2, smem=128) == 0
    assert (from_device(ptr, out)[:32] == 0xA5A5A5A5).all()
    assert launch("missing_barrier", 32, (ptr, PTR), grid=2) == 0
    seen = from_device(ptr, out)[:32]
    assert (seen[:31] == 0xA5A5A5A5).all()
    assert seen[31] == 0
    ok(cu.cuMemFree(ptr))


def test_two_threads_launch_at_once(context: StandIn, launch: Launch) -> None:
    current, results = ok(cu.cuCtxGetCurrent()), []

    def work(start: int) -> None:
        ok(cu.cuCtxSetCurrent(current))
        data = np.full(2048, start, np.float32)
        ptr = on_device(data)
        for _ in range(20):
            assert launch("add_one", 256, (ptr, PTR), (2048, INT), grid=8) == 0
        results.append((from_device(ptr, data) == start + 20).all())
        ok(cu.cuMemFree(ptr))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


# ---------------------------------------------------------------- the sanitized build

CHILD = """
import ctypes, sys
from pathlib import Path
import standin
from cuda.bindings import driver as cu

def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) > 1 else None

control = standin.load()
control.use_kernels(standin.build_kernels([standin.SHIM / "faults.cu"]))
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
library = ok(cu.cuLibraryLoadData(b"x", [], [], 0, [], [], 0))
ptr, out = int(ok(cu.cuMemAlloc(100))), int(ok(cu.cuMemAlloc(128)))
args = eval(sys.argv[2])
kernel = ok(cu.cuLibraryGetKernel(library, sys.argv[1].encode()))
print("before", flush=True)
ok(cu.cuLaunchKernel(kernel, 1, 1, 1, int(sys.argv[3]), 1, 1, 0, 0, args, 0))
ok(cu.cuCtxSynchronize())
print("after", flush=True)
"""


@pytest.mark.parametrize(
    ("kernel", "args", "threads", "text"),
    [
        ("writes_at", "((ptr, 99), (ctypes.c_void_p, ctypes.c_longlong))", 1, None),
        ("writes_at", "((ptr, 100), (ctypes.c_void_p, ctypes.c_longlong))", 1, "heap-buffer-overflow"),
        ("writes_at", "((ptr, -1), (ctypes.c_void_p, ctypes.c_longlong))", 1, "heap-buffer-overflow"),
        ("reads_word_at", "((ptr, out, 4), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))", 1, None),
        ("reads_word_at", "((ptr, out, 2), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))", 1, "misaligned"),
        ("past_a_shared_array", "((out, 31), (ctypes.c_void_p, ctypes.c_int))", 32, None),
        ("past_a_shared_array", "((out, 33), (ctypes.c_void_p, ctypes.c_int))", 32, "faults.cu"),
    ],
)
def test_the_sanitized_build_stops_at_an_access_that_a_gpu_would_let_pass(
    standin: StandIn, kernel: str, args: str, threads: int, text: str | None
) -> None:
    environment = standin_module.sanitized_environment()
    if environment is None:
        pytest.skip("gcc has no libasan here")
    run = subprocess.run(
        [sys.executable, "-c", CHILD, kernel, args, str(threads)], env=environment, capture_output=True, text=True
    )
    assert "before" in run.stdout, run.stderr
    assert ("after" in run.stdout) == (text is None), run.stderr
    if text is not None:
        assert run.returncode != 0
        assert text in run.stderr
        assert "faults.cu" in run.stderr
