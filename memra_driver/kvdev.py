"""Devices that can hold a cache: the seven operations of the Rust trait, CUDA, and the host.

`KvDev` is all that a cache needs. A device may offer more, and a cache then uses it:

    arena              True: all planes of a cache are views of one allocation
    alloc_arena(n)     n zeroed bytes as one slice with `plane(offset, len, dtype)`
    copy_bytes, copy_many, clear_bytes    by address, in stream order
    launch(name, ...)  the kernel table
    count_from(e, ptr) an i32 that another device knows, here
    mem_info()         (available, total) bytes
    overcommits        False: an allocation that it has no room for is refused, with DriverOutOfMemory
    ordinal            CUDA ordinal, -1 for host memory
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from memra_driver import driver, nvrtc, reference, reference_attend
from memra_driver.context import in_a_fork
from memra_driver.device import CudaContext, CudaEvent, CudaSlice, CudaStream, HostMemory
from memra_driver.errors import AbiError, ArrayError, ConfigError, DeviceMismatch, StateError, UnsupportedError
from memra_driver.graph import CudaGraph, Graph, HostGraph, capture_cuda, recording
from memra_driver.interop import same_stream
from memra_driver.kernels import KERNELS
from memra_driver.launches import KernelSet, Launch
from memra_driver.memory import Borrowed, run_all

S = TypeVar("S")


class KvDev(Protocol[S]):
    """The seven operations. A slice S has `ptr`, `len`, `dtype`, `nbytes`; `to_numpy` serves digest and health.

    Element units. All work is in one order (a stream); nothing waits. A zero-length slice has ptr
    0 and never reaches a driver.
    """

    def zeros(self, n: int) -> S:
        """n f32, zeroed."""

    def uninit(self, n: int) -> S:
        """n f32 of any value."""

    def alloc_u8(self, n: int) -> S:
        """n bytes, zeroed (as in Rust, despite the name)."""

    def htod_i32(self, v: Sequence[int]) -> S:
        """A new i32 slice with the values of v."""

    def clone_dtod(self, src: S) -> S:
        """A new slice with a copy of src."""

    def copy_into(self, dst: S, off: int, src: S, n: int) -> None:
        """src[0 .. n] to dst[off .. off + n]. Raises ArrayError out of range."""

    def set_i32_one(self, d: S, v: int) -> None:
        """Element 0 of an i32 slice, in place."""


def twin_of(name: str) -> Callable[..., None]:
    """The NumPy twin of a kernel; all widths of attend have one, and all state sizes of recur_step."""
    if name.startswith("recur_step"):
        found: Callable[..., None] = reference.recur_step
    elif name.startswith("attend"):
        found = reference_attend.attend_combine if name == "attend_combine" else reference_attend.attend
    else:
        found = getattr(reference, name)
    return found


class _SliceDev:
    """The seven operations over a `Memory`, for the two devices of this package."""

    memory: Any
    arena: bool
    recording: Graph | None = None  # the capture that is open
    prepares = False  # whether it has `prepare`
    _scratch: list[CudaSlice]
    _count: CudaSlice | None = None

    def zeros(self, n: int) -> CudaSlice:
        return self._cleared(n, np.float32)

    def uninit(self, n: int) -> CudaSlice:
        return self._made(n, np.float32)

    def alloc_u8(self, n: int) -> CudaSlice:
        return self._cleared(n, np.uint8)

    def alloc_arena(self, n: int) -> CudaSlice:
        return self._cleared(n, np.uint8)

    def htod_i32(self, v: Sequence[int]) -> CudaSlice:
        made = self._made(len(v), np.int32)
        return self._filled(made, lambda: made.copy_from(np.array(v, np.int32)))

    def clone_dtod(self, src: CudaSlice) -> CudaSlice:
        made = self._made(src.len, src.dtype)
        return self._filled(made, lambda: self.copy_into(made, 0, src, src.len))

    def copy_into(self, dst: CudaSlice, off: int, src: CudaSlice, n: int) -> None:
        if dst.dtype != src.dtype:
            raise ArrayError(f"copy_into from {src.dtype} to {dst.dtype}")
        if not (0 <= n <= src.len and 0 <= off <= dst.len - n):
            raise ArrayError(f"copy_into of {n} elements from a slice of {src.len} to {off} of a slice of {dst.len}")
        if dst.device != self.memory.device:
            raise DeviceMismatch(f"copy_into on {self!r} into a slice of device {dst.device}")
        if n:
            self._copy(dst, dst.ptr + off * dst.dtype.itemsize, src, n * src.dtype.itemsize)

    def set_i32_one(self, d: CudaSlice, v: int) -> None:
        d.view(0, 1).copy_from(np.array([v], np.int32))

    def live(self) -> tuple[int, int]:
        """(things, bytes) that were made on this device object and not given back, beside what it keeps till its end.

        Things are allocations; on a GPU streams and events too.
        """
        kept = [each for each in (*self._scratch, *self._kept()) if each is not None and each.nbytes]
        things, n_bytes = self._held()
        return things - len(kept), n_bytes - sum(each.nbytes for each in kept)

    def _held(self) -> tuple[int, int]:
        raise NotImplementedError

    def _kept(self) -> list[CudaSlice | None]:
        return [self._count]

    def attend_scratch(self, n_bytes: int) -> CudaSlice:
        """Room for the partial sums of attention, shared by all caches of this device.

        A larger buffer is added when one is needed; the old ones stay until the device closes, since recorded
        graphs hold their addresses. One stream never uses it twice at once.
        """
        if not self._scratch or self._scratch[-1].nbytes < n_bytes:
            if self.recording is not None:
                raise StateError(
                    f"attend needs {n_bytes} bytes of scratch, and a capture allocates nothing; attend once before"
                )
            self._scratch.append(self.uninit(n_bytes // 4))
        return self._scratch[-1]

    def count_from(self, e: Any, count: int) -> CudaSlice:
        """The i32 at `count` on device e, here, in the order of both streams; good until the next call."""
        if self._count is None:
            self._count = self._made(1, np.int32)
        self.copy_into(self._count, 0, Borrowed(e.memory, count, 1, np.int32), 1)
        return self._count

    def copy_bytes(self, dst: int, src: int, n_bytes: int) -> None:
        raise NotImplementedError

    def clear_bytes(self, ptr: int, n_bytes: int) -> None:
        raise NotImplementedError

    def _copy(self, dst: CudaSlice, to: int, src: CudaSlice, n_bytes: int) -> None:
        raise NotImplementedError

    def _made(self, n: int, dtype: Any) -> CudaSlice:
        if self.recording is not None:
            raise StateError(f"an allocation of {n} elements: a capture is open on this device; do it before or after")
        return CudaSlice(self.memory, n, dtype)

    def _cleared(self, n: int, dtype: Any) -> CudaSlice:
        made = self._made(n, dtype)
        return self._filled(made, lambda: self.clear_bytes(made.ptr, made.nbytes))

    @staticmethod
    def _filled(made: CudaSlice, fill: Any) -> CudaSlice:
        """Runs `fill`; a slice that could not be filled is freed."""
        try:
            if made.len:
                fill()
        except BaseException:
            made.close()
            raise
        return made


class CudaDev(_SliceDev):
    """A GPU through the CUDA driver: the primary context of `device`, one stream, the kernels.

    stream: None makes a non-blocking one; else an int handle, an object with `__cuda_stream__`, a
    torch or CuPy stream, which stays the caller's. context: a CudaContext to share. arena=False:
    every plane is an allocation of its own, so that a memory checker sees each overrun.
    One owner thread at a time. Raises NoDriver (says what to install), UnsupportedDriver, DriverError;
    UnsupportedError for a GPU older than the kernels need.
    """

    overcommits = False
    prepares = True

    def __init__(
        self, device: int = 0, stream: Any = None, context: CudaContext | None = None, *, arena: bool = True
    ) -> None:
        if context is not None and context.device != device:
            raise ConfigError(f"the context given is of cuda:{context.device}, not of cuda:{device}")
        self.ordinal = device
        self.arena = arena
        self.context = CudaContext(device) if context is None else context
        self._owns_context = context is None
        try:
            self.arch = self.context.arch
            if nvrtc.is_too_old(self.arch):
                raise UnsupportedError(f"cuda:{device} ({self.context.name()}) is {nvrtc.too_old(self.arch)}")
            self.stream = stream if isinstance(stream, CudaStream) else CudaStream(self.context, stream)
            if self.stream.device != device:
                raise DeviceMismatch(f"the stream given is of cuda:{self.stream.device}, not of cuda:{device}")
            self._owns_stream = self.stream is not stream
            self.kernels = KernelSet(self.arch, driver.device_get(device))
        except BaseException:
            if self._owns_context:
                self.context.close()
            raise
        self.memory: CudaStream = self.stream
        self._scratch = []
        self._table: CudaSlice | None = None  # the entries of the last copy_many
        self._table_entries: list[tuple[int, int, int]] = []
        self._attached: list[Any] = []  # what works on the stream from elsewhere, and is closed before it

    def __repr__(self) -> str:
        return f"CudaDev({self.ordinal})"

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """Records what the operations enqueue inside the block as a CUDA graph; nothing of it runs now.

        All kernels are loaded first. Raises StateError when a capture is open, or when a cache that takes part has
        a step open at either end.
        """
        self.kernels.load_all()
        with capture_cuda(self) as graph:
            yield graph

    def launch(self, name: str, *args: Any) -> None:
        """Enqueues a kernel of the table; the first use of a source may compile it."""
        self.context.bind_alive()
        plan = self.kernels.plan(name)
        plan.launch(self.stream.handle, args)

    def prepare(self, name: str, args: Sequence[Any]) -> Launch:
        """A launch with its arguments in place, for calls that come again; nothing is enqueued.

        Of a kernel that is loaded it asks nothing of the driver: what was just enqueued must not end in an error.
        """
        if not self.kernels.has(name):
            self.context.bind()
        return self.kernels.plan(name).prepare(self.context, self.stream, args)

    def copy_bytes(self, dst: int, src: int, n_bytes: int) -> None:
        """Copies between addresses of this device, in stream order."""
        self.stream.memcpy_dtod(dst, src, n_bytes)

    def copy_many(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """All (dst, src, bytes) in one launch, in stream order. The table is uploaded when it changed."""
        entries = list(entries)
        if not entries:
            return
        if entries != self._table_entries:
            array = np.array(entries, np.uint64).reshape(-1)
            if self._table is None or self._table.len < array.size:
                self._table_entries = []
                old, self._table = self._table, CudaSlice(self.memory, array.size, np.uint64)
                if old is not None:
                    old.close()
            self._table_entries = []  # an upload that fails leaves no claim about what the table holds
            self._table.view(0, array.size).copy_from(array)
            self._table_entries = entries
        self.launch("copy_many", self._table, len(entries), None, 0)

    def clear_bytes(self, ptr: int, n_bytes: int) -> None:
        """Zeroes bytes of this device, in stream order."""
        self.stream.memset(ptr, 0, n_bytes)

    def mem_info(self) -> tuple[int, int]:
        """(available, total) bytes: what the driver calls free, and what the memory pool holds unused."""
        return self.context.available()

    def keep_memory(self, n_bytes: int) -> None:
        """Of the memory that is freed from now on up to n_bytes stay with the process, for its next allocations.

        The driver takes back all that is free whenever somebody waits, and to map it anew takes most of the birth of a
        cache; a server that opens and closes sessions keeps what one of them needs. It counts for the device's default
        memory pool, so for every CudaDev and every other library that allocates there (what torch allocates by itself
        is elsewhere), until it is called again; 0 is how the process began. `trim` gives back what is kept.
        """
        n_bytes = operator.index(n_bytes)
        if not 0 <= n_bytes < 2**63:
            raise ConfigError(f"keep_memory({n_bytes}): it is a number of bytes, 0 for none")
        self.context.keep_memory(n_bytes)

    def trim(self) -> None:
        """Waits for the stream, and gives unused memory of the pool back, for whoever else needs it."""
        self.synchronize()
        self.context.trim()

    def _held(self) -> tuple[int, int]:
        return self.context.live_count, self.context.live_bytes

    def _kept(self) -> list[CudaSlice | None]:
        return [self._count, self._table]

    def synchronize(self) -> None:
        """Waits for the stream."""
        self.stream.synchronize()

    def close(self) -> None:
        """Ends the work, unloads the kernels, frees what is this device's own; may be called twice.

        Close the caches first: their slices live on this stream. In a forked child it does nothing.
        """
        if self.stream.is_closed or in_a_fork():
            return
        mine = [*self._attached, *self._scratch, *filter(None, [self._table, self._count]), self.kernels]
        mine += [self.stream] if self._owns_stream else []
        mine += [self.context] if self._owns_context else []
        run_all([self._finish, *(each.close for each in mine)])

    def _finish(self) -> None:
        if self.context.is_alive():
            self.stream.synchronize()

    def __enter__(self) -> CudaDev:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _copy(self, dst: CudaSlice, to: int, src: CudaSlice, n_bytes: int) -> None:
        source = src.memory
        if not isinstance(source, CudaStream):
            raise DeviceMismatch(f"copy_into cuda:{self.ordinal} from host memory; use copy_from")
        here = source.device == self.ordinal
        if here and (source.is_closed or same_stream(source.handle, self.stream.handle)):
            self.copy_bytes(to, src.ptr, n_bytes)
            return
        self.stream.refuse_in_capture("a copy from another stream")
        with CudaEvent(source.context) as written, CudaEvent(self.context) as read:
            source.record(written)  # the other stream's work on src comes first
            self.stream.wait(written)
            if here:
                self.copy_bytes(to, src.ptr, n_bytes)
            else:
                there, mine = source.context.handle, self.context.handle
                driver.memcpy_peer_async(to, mine, src.ptr, there, n_bytes, self.stream.handle)
            self.stream.record(read)  # and what it does to src later comes behind
            source.wait(read)
        self.context.bind()


class HostDev(_SliceDev):
    """Host memory and the NumPy twin of the kernels; every call has ended when it returns."""

    ordinal = -1
    arch = "host"

    def __init__(self, *, arena: bool = True) -> None:
        self.arena = arena
        self.memory: HostMemory = HostMemory()
        self._scratch = []

    def __repr__(self) -> str:
        return "HostDev()"

    @contextmanager
    def capture(self) -> Iterator[HostGraph]:
        """Notes the calls inside the block, for HostGraph.launch to run."""
        graph = HostGraph(self)
        with recording(self, graph):
            yield graph

    def launch(self, name: str, *args: Any) -> None:
        """Runs the twin of a kernel of the table, or notes the call while a capture is open."""
        self._do(self._launch, name, *args)

    def _do(self, call: Callable[..., Any], *args: Any) -> None:
        if self.recording is None:
            call(*args)
        else:
            cast(HostGraph, self.recording).calls.append((call, *args))

    def _launch(self, name: str, *args: Any) -> None:
        if len(args) != len(KERNELS[name].params):
            raise AbiError(f"{name} takes {len(KERNELS[name].params)} arguments, not {len(args)}")
        values = []
        for (kind, _), value in zip(KERNELS[name].params, args, strict=True):
            if kind.endswith("*") and value is not None:
                value = HostMemory.array(value.ptr, value.len, value.dtype)
            values.append(value)
        twin_of(name)(*values)

    def copy_bytes(self, dst: int, src: int, n_bytes: int) -> None:
        """Copies between host addresses."""
        self._do(ctypes.memmove, dst, src, n_bytes)

    def _copy(self, dst: CudaSlice, to: int, src: CudaSlice, n_bytes: int) -> None:
        if src.device != self.memory.device:
            raise DeviceMismatch(f"copy_into on {self!r} from a slice of device {src.device}; use to_numpy")
        self.copy_bytes(to, src.ptr, n_bytes)

    def copy_many(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """All (dst, src, bytes)."""
        for entry in entries:
            self.copy_bytes(*entry)

    def clear_bytes(self, ptr: int, n_bytes: int) -> None:
        """Zeroes bytes."""
        self._do(ctypes.memset, ptr, 0, n_bytes)

    def mem_info(self) -> tuple[int | None, int | None]:
        """(available, total) bytes by the operating system's word; None where it does not tell."""
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None, None
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return sizes.get("MemAvailable"), sizes.get("MemTotal")

    def _held(self) -> tuple[int, int]:
        return self.memory.live_count, self.memory.live_bytes

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def close(self) -> None:
        """Nothing to give back; slices free themselves."""
