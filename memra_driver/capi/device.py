"""Devices of the C library: `CDev`, which holds caches as CudaDev does, and those that it opens beside a CudaDev."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_driver import driver, nvrtc
from memra_driver.capi.layout import DeviceOptionsC
from memra_driver.capi.library import Library, launch_function, load, whole
from memra_driver.device import LEGACY_STREAM, CudaContext, CudaStream
from memra_driver.errors import AbiError, ArrayError, ConfigError, MemraError, StateError, UnsupportedError
from memra_driver.kernels import ATTEND_ENTRIES, KERNELS, AttendGeometry, attend_kernel
from memra_driver.kvdev import CudaDev
from memra_driver.memory import Borrowed, Closing, CudaSlice, check_contiguous

NO_ARENA = 1


class LibraryDevice(Closing):
    """A memra_device: opened, its kernels loaded as they are asked for, closed. `stream`, if given, is kept alive."""

    def __init__(
        self, library: Library, ordinal: int, *, stream: CudaStream | None, context: int = 0, arena: bool = True
    ) -> None:
        handle = 0 if stream is None else stream.handle or LEGACY_STREAM  # 0 asks for a stream of the library's own
        options = DeviceOptionsC(
            struct_size=ctypes.sizeof(DeviceOptionsC), ordinal=ordinal, stream=handle, context=context,
            flags=0 if arena else NO_ARENA,
        )  # fmt: skip
        opened = ctypes.c_void_p()
        library.call("memra_device_open", ctypes.byref(options), ctypes.byref(opened))
        assert opened.value is not None  # what a status of 0 says
        self.library = library
        self._address: int | None = opened.value
        self._close = weakref.finalize(self, _close_quietly, library, opened.value, stream)
        self._close.atexit = False
        self.handle: int = library.ask("memra_device_handle", opened)
        self.stream: int = library.ask("memra_device_stream", opened)
        self.arch = f"sm_{library.ask('memra_device_arch', opened)}"
        self._sources: set[str] = set()
        self.open_graph: Any = None  # calls.LibraryGraph, while it is recorded

    @property
    def address(self) -> int:
        if self._address is None:
            raise StateError("the device is closed")
        return self._address

    @property
    def is_closed(self) -> bool:
        return self._address is None

    def call(self, name: str, *args: Any) -> None:
        """Calls a function whose first argument is the device."""
        self.library.call(name, self.address, *args)

    def load(self, source: str) -> None:
        """The kernels of a source file; the first use may compile it. Raises CompileError, NoDriver, DriverError."""
        if source not in self._sources:
            cubin = nvrtc.compile_cubin(source, self.arch)
            self.call("memra_device_load", cubin, len(cubin))
            self._sources.add(source)

    def load_all(self) -> None:
        """Every kernel of the table."""
        for kernel in KERNELS.values():
            self.load(kernel.source)

    def close(self) -> None:
        """Waits, and gives back what is the device's own; may be called twice. Refused while a capture is open."""
        if self._address is None:
            return
        try:
            self.call("memra_device_close")
        except StateError:
            raise
        except BaseException:
            self._gone()
            raise
        self._gone()

    def _gone(self) -> None:
        self._address = None
        self._close.detach()


def _close_quietly(library: Library, address: int, stream: CudaStream | None) -> None:
    """What is not closed is closed when the object dies; `stream` lives until then. The library refuses in a fork."""
    with contextlib.suppress(MemraError):
        library.call("memra_device_close", address)


class CStream(CudaStream):
    """The stream of a library device as memory: what it allocates, frees and moves goes through the library."""

    def __init__(self, context: CudaContext, c: LibraryDevice) -> None:
        super().__init__(context, c.stream)
        self.c = c

    def close(self) -> None:
        """Ends this object; the stream is the library's, or the caller's."""
        self._handle = None

    def synchronize(self) -> None:
        self.context.bind()
        self.c.call("memra_device_synchronize")

    def alloc_bytes(self, nbytes: int) -> int:
        self.context.bind()
        ptr = ctypes.c_uint64()
        self.c.call("memra_alloc", nbytes, ctypes.byref(ptr))
        self._live[ptr.value] = nbytes
        self.context._hold("memory", ptr.value, nbytes)
        return ptr.value

    def memcpy_dtod(self, dst: int, src: int, nbytes: int) -> None:
        self.context.bind()
        self.c.call("memra_copy_bytes", dst, src, nbytes)

    def memset(self, dst: int, value: int, nbytes: int) -> None:
        if value:
            super().memset(dst, value, nbytes)
            return
        self.context.bind()
        self.c.call("memra_clear", dst, nbytes)

    def memcpy_htod(self, dst: int, array: npt.NDArray[Any]) -> None:
        check_contiguous(array)
        self.context.bind()
        self.c.call("memra_upload", dst, array.ctypes.data, array.nbytes)

    def read(self, ptr: int, out: npt.NDArray[Any]) -> None:
        check_contiguous(out)
        if not out.flags.writeable:
            raise ArrayError("the array to copy into is read-only")
        self.context.bind()
        self.c.call("memra_download", out.ctypes.data, ptr, out.nbytes)

    def _free(self, ptr: int) -> None:
        if self.c.is_closed:
            driver.mem_free(ptr)  # its close has waited for the stream
        else:
            self.c.call("memra_free", ptr)


class CDev(CudaDev):
    """A GPU through libmemra_driver.so: as CudaDev, with the library's memory, copies and launches.

    Arguments as CudaDev has them. library: a path, by default the package's own. What the library has no call for
    (events, copies from another device, captures that Python begins) is done beside it, on the same stream.
    """

    prepares = False
    kernels: Any  # what loads them: the LibraryDevice

    def __init__(
        self, device: int = 0, stream: Any = None, context: CudaContext | None = None, *, arena: bool = True,
        library: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        if context is not None and context.device != device:
            raise ConfigError(f"the context given is of cuda:{context.device}, not of cuda:{device}")
        self.ordinal, self.arena = device, arena
        found = load(library)
        self.context = CudaContext(device) if context is None else context
        self._owns_context = context is None
        try:
            given = stream if stream is None or isinstance(stream, CudaStream) else CudaStream(self.context, stream)
            shared = 0 if context is None else context.handle
            self.c = LibraryDevice(found, device, stream=given, context=shared, arena=arena)
            self.stream = CStream(self.context, self.c)
        except BaseException:
            if self._owns_context:
                self.context.close()
            raise
        self.kernels = self.c
        self.arch = self.c.arch
        self.memory = self.stream
        self._scratch = []
        self._attached = []

    def __repr__(self) -> str:
        return f"CDev({self.ordinal})"

    @property
    def c_handle(self) -> int:
        """memra_cache_device.handle of a cache that lives here."""
        return self.c.handle

    def launch(self, name: str, *args: Any) -> None:
        """Enqueues a kernel of the table.

        Of attend and recur_step the library chooses the entry: UnsupportedError for another.
        """
        kernel = KERNELS[name]
        if len(args) != len(kernel.params):
            raise AbiError(f"{name} takes {len(kernel.params)} arguments, not {len(args)}")
        at = {parameter: value for (_, parameter), value in zip(kernel.params, args, strict=True)}
        if name in ATTEND_ENTRIES:
            columns = at["rows"] * (at["n_head"] // at["n_head_kv"])
            chosen = attend_kernel(self.arch, AttendGeometry.of(at), columns, at["pieces"])
            if name != chosen:
                raise UnsupportedError(f"the C library launches {chosen} for this attend, not {name}")
        if name.startswith("recur_step") and name != f"recur_step_{at['state_size']}":
            chosen = f"recur_step_{at['state_size']}"
            raise UnsupportedError(f"the C library launches {chosen} for this state size, not {name}")
        self.context.bind()
        self.c.load(kernel.source)
        values = (
            (0 if value is None else value.ptr) if kind.endswith("*") else value
            for (kind, _), value in zip(kernel.params, args, strict=True)
        )
        self.c.call(launch_function(name), *values)

    def copy_many(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """All (dst, src, bytes) in one launch, in stream order. The table is uploaded when it changed."""
        entries = list(entries)
        if entries:
            self.context.bind()
            self.c.load(KERNELS["copy_many"].source)
            table = np.array(entries, np.uint64)
            self.c.call("memra_copy_table", table.ctypes.data, len(entries))

    def attend_scratch(self, n_bytes: int) -> CudaSlice:
        """The library's room for the partial sums of attention."""
        if not self._scratch or self._scratch[-1].nbytes < n_bytes:
            self.context.bind()
            part = ctypes.c_uint64()
            self.c.call("memra_attend_scratch", n_bytes, ctypes.byref(part))
            self._scratch.append(Borrowed(self.memory, part.value, n_bytes // 4))
        return self._scratch[-1]

    def mem_info(self) -> tuple[int, int]:
        """(available, total) bytes: what the driver calls free, and what the memory pool holds unused."""
        self.context.bind()
        available, total = ctypes.c_uint64(), ctypes.c_uint64()
        self.c.call("memra_memory_info", ctypes.byref(available), ctypes.byref(total))
        return available.value, total.value

    def keep_memory(self, n_bytes: int) -> None:
        """As CudaDev.keep_memory."""
        self.c.call("memra_keep_memory", whole(n_bytes))

    def trim(self) -> None:
        """As CudaDev.trim."""
        self.c.call("memra_trim")

    def close(self) -> None:
        """Waits and gives back what is this device's own; may be called twice. Close the caches first."""
        if self.c.is_closed:
            return
        try:
            self.c.close()
        finally:
            if self.c.is_closed:
                for each in (*self._scratch, *filter(None, [self._count])):
                    each.close()
                self.stream.close()
                if self._owns_context:
                    self.context.close()


def library_device(e: Any) -> LibraryDevice:
    """The library's device for e, with all kernels; for a CudaDev one beside it, on its stream, closed with it."""
    if isinstance(e, CDev):
        found = e.c
    elif isinstance(e, CudaDev):
        attached = next((each for each in e._attached if isinstance(each, LibraryDevice)), None)
        if attached is None:
            attached = LibraryDevice(load(), e.ordinal, stream=e.stream, context=e.context.handle, arena=e.arena)
            e._attached.append(attached)
        found = attached
    else:
        raise UnsupportedError(f"the C library works on CUDA devices, not on {e!r}")
    found.load_all()
    return found


def bind(cache: Any) -> Library:
    """Lets the library work on a cache of any CUDA devices; once is enough. Returns the library."""
    devices = [library_device(e) for e in cache.devices]
    struct = cache.as_c()
    if any(struct.contents.devices[d].handle != each.handle for d, each in enumerate(devices)):
        addresses = (ctypes.c_void_p * len(devices))(*(each.address for each in devices))
        devices[0].library.call("memra_cache_bind", struct, addresses, len(devices))
    cache.check_c = devices[0].library.check
    for each in devices:
        if each.open_graph is not None and cache not in each.open_graph.kept:
            each.open_graph.kept.append(cache)  # the graph has the address of its struct
    return devices[0].library
