"""The calls that the host times of operations stand beside: the driver's own, packed beforehand, from Python and C."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memra_driver import capi, native
from memra_driver.bench.measure import Bench, watched
from memra_driver.bench.rows import Row
from memra_driver.bench.work import REPEATABLE, Workload
from memra_driver.errors import CompileError, DriverError, StateError
from memra_driver.kernels import KERNELS

LOOPS = Path(__file__).resolve().parent / "calls.c"
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared")


class Packed:
    """A launch whose parameter block is filled once; calling it is one cuLaunchKernel as cuda-python has it."""

    def __init__(self, e: Any, name: str, args: list[Any]) -> None:
        from cuda.bindings import driver as cu

        self.name = name
        kernel = KERNELS[name]
        kinds: dict[str, Any] = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}
        values = [getattr(value, "ptr", value) or 0 for value in args]
        self._block: list[Any] = [
            kinds.get(kind, ctypes.c_uint64)(value) for (kind, _), value in zip(kernel.params, values, strict=True)
        ]
        self._pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in self._block))
        self._kept = args
        grid, block, shared = kernel.shape(dict(zip((name for _, name in kernel.params), args, strict=True)))
        self.kernel, self.stream = e.kernels.plan(name).handle, e.stream.handle
        self.shape = (*grid, *block, shared)
        self.params = ctypes.addressof(self._pointers)
        handles = cu.CUkernel(self.kernel), cu.CUstream(self.stream)  # what the bindings hand out
        self._launch, self._args = cu.cuLaunchKernel, (handles[0], *self.shape, handles[1], self.params, 0)

    def __call__(self) -> None:
        self._launch(*self._args)


def packed_launches(work: Workload, op: str) -> list[list[Packed]]:
    """The launches of an operation on each of its layers, packed."""
    work.caches[0].prepared.clear()  # what is known already goes another way
    call, found = work.calls(op, work.rows), []
    for il in work.layers(op):
        with watched(work.e) as done:
            call(il)
        found.append([Packed(work.e, name, args) for what, name, *args in done if what == "launch"])
    work.e.synchronize()
    work.caches[0].end_step(work.tokens - work.rows)
    if not all(found):
        raise StateError(f"{op} launched nothing that could be packed")
    return found


def raw_copy(bench: Bench, n_bytes: int) -> Callable[[], Any]:
    """One cuMemcpyDtoDAsync as cuda-python has it."""
    from cuda.bindings import driver as cu

    copy = cu.cuMemcpyDtoDAsync
    to, source, stream = bench.room.ptr, bench.numbers.ptr, bench.e.stream.handle
    args = cu.CUdeviceptr(to), cu.CUdeviceptr(source), n_bytes, cu.CUstream(stream)
    return lambda: copy(*args)


def raw_birth(bench: Bench, n_bytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """One allocation from the stream's pool and its clear, as cuda-python has them; and what frees it."""
    from cuda.bindings import driver as cu

    stream, made = cu.CUstream(bench.e.stream.handle), []

    def birth() -> None:
        made.append(cu.cuMemAllocAsync(n_bytes, stream)[1])
        cu.cuMemsetD8Async(made[-1], 0, n_bytes, stream)

    return birth, lambda: cu.cuMemFreeAsync(made.pop(), stream)


class _Op(ctypes.Structure):
    """bench_op in LOOPS."""

    _fields_ = (
        ("op", ctypes.c_void_p), ("advance", ctypes.c_void_p), ("cache", ctypes.c_void_p), ("layers", ctypes.c_void_p),
        ("at", ctypes.c_void_p), ("rows", ctypes.c_int64), ("n_layers", ctypes.c_int32), ("steps", ctypes.c_int32),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    """bench_launch in LOOPS."""

    _fields_ = (("kernel", ctypes.c_void_p), ("params", ctypes.c_void_p), ("shape", ctypes.c_uint * 7))


def from_c(bench: Bench, work: Workload, op: str, launches: list[list[Packed]], *, ahead: int) -> Iterator[Row]:
    """An operation on every layer through the C library, and its launches alone, plain ones and such as the library
    makes, all called from C, step after step; nothing without library or compiler. `ahead`: rows that stand behind the
    clock, for an operation that reads them."""
    path = native.library()
    if path is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            loop, plain_loop, ex_loop = _built(
                Path(folder) / "bench_calls.so", f"bench_{op}", "bench_launches", "bench_launches_ex"
            )
        except CompileError:
            return
    (cache,), pos, found, steps = work.caches, work.tokens - work.rows, work.layers(op), bench.launches
    operands, numbers = _operands(work, op)
    layers = (ctypes.c_int32 * len(found))(*found)
    addresses = (ctypes.c_uint64 * len(operands))(*(each.ptr for each in operands))
    library = ctypes.CDLL(str(path))
    capi.bind(cache)
    mine = _Op(
        _address(library, f"memra_{op}"), None if op in REPEATABLE else _address(library, "memra_advance"),
        ctypes.addressof(cache.as_c().contents), ctypes.addressof(layers), ctypes.addressof(addresses), work.rows,
        len(found), steps, numbers.get("eps", 0), numbers.get("scale", 0),
    )  # fmt: skip
    each = [launch for of_layer in launches for launch in of_layer]
    raw = (_Launch * len(each))(*(_Launch(one.kernel, one.params, one.shape) for one in each))
    driver, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(bench.e.stream.handle)
    plain, ex = (ctypes.c_void_p(_address(driver, name)) for name in ("cuLaunchKernel", "cuLaunchKernelEx"))
    turns = [
        lambda: _seconds(loop, ctypes.byref(mine)),
        lambda: _seconds(plain_loop, plain, stream, raw, len(each), steps),
        lambda: _seconds(ex_loop, ex, stream, raw, len(each), steps, int(bench.e.kernels.early)),
    ]
    work.place(pos, ahead=ahead)
    seconds = bench.medians_of(turns, after=lambda: work.place(pos, ahead=ahead))
    names = ("from C", "raw launches from C", "raw Ex launches from C")
    for name, who, each_seconds in zip(names, ("memra", "CUDA driver", "CUDA driver"), seconds, strict=True):
        yield Row("host", f"{op}, {name}", who=who, host_seconds=each_seconds / (steps * len(found)))


def _address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _operands(work: Workload, op: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The slices and numbers that the workload hands to an operation, in the order of both interfaces."""
    found: list[Any] = []

    class Noted:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda e, cache, il, *operands, **numbers: found.append((operands, numbers))

    before, work.ops = work.ops, Noted()
    try:
        work.calls(op, work.rows)(work.layers(op)[0])
    finally:
        work.ops = before
    (only,) = found
    return only  # type: ignore[no-any-return]


def _built(output: Path, *names: str) -> list[Any]:
    command = [*native.compiler(), *FLAGS, "-o", str(output), str(LOOPS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{command[0]} refused {LOOPS.name}", done.stderr, FLAGS)
    loops = [getattr(ctypes.CDLL(str(output)), name) for name in names]
    for loop in loops:
        loop.restype = ctypes.c_int64
    return loops


def _seconds(loop: Any, *args: Any) -> float:
    nanoseconds: int = loop(*args)
    if nanoseconds < 0:
        raise DriverError("a call from C", -nanoseconds, "failed")
    return nanoseconds / 1e9
