"""Launches: the kernels of a device loaded, and their parameters put in place."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memra_driver import driver, nvrtc
from memra_driver.errors import AbiError, MemraError, UnsupportedDriver
from memra_driver.interop import PER_THREAD_STREAM
from memra_driver.kernels import KERNELS, Kernel, Shape
from memra_driver.memory import CudaSlice, OpenWatch, note_change, run_all

if TYPE_CHECKING:
    from memra_driver.device import CudaContext, CudaStream

EARLY_DRIVER = 12030  # drivers from 12.3 on also record launches that begin early
_CTYPES: dict[str, Any] = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


class LaunchPlan:
    """One loaded kernel with its parameter block, which each launch fills in place.

    The driver copies the block during the call, so it may be filled again at once. Not for two
    threads at a time. early: the GPU can start a launch before the kernel in front of it has ended.
    """

    def __init__(self, kernel: Kernel, handle: int, *, early: bool) -> None:
        self.kernel = kernel
        self.handle = handle
        self.early = early
        self.names = tuple(name for _, name in kernel.params)
        self.is_pointer = tuple(kind.endswith("*") for kind, _ in kernel.params)
        fields = [(name, _CTYPES.get(kind, ctypes.c_uint64)) for kind, name in kernel.params]
        block = type(f"{kernel.name}_params", (ctypes.Structure,), {"_fields_": fields})
        self._block = block()
        base = ctypes.addressof(self._block)
        offsets = [getattr(block, name).offset for name in self.names]
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.layout = [(offset, ctypes.sizeof(kind)) for offset, (_, kind) in zip(offsets, fields, strict=True)]

    def launch(self, stream: int, args: Sequence[Any]) -> None:
        """Enqueues the kernel with its arguments in the table's order; slices give their address, None is null."""
        config = driver.launch_config(*self._fill(args), stream, early=self.early)
        driver.launch_kernel(self.handle, config, ctypes.addressof(self._pointers), self.kernel.name)

    def prepare(self, context: CudaContext, stream: CudaStream, args: Sequence[Any]) -> Launch:
        """The launch of these arguments, to be run as often as wanted."""
        config = driver.launch_config(*self._fill(args), stream.handle, early=self.early)
        slices = OpenWatch(each for each in args if isinstance(each, CudaSlice))
        return Launch(self, context, stream, config, self._block, slices)

    def close(self) -> None:
        """The kernel is gone."""
        self.handle = 0
        note_change()

    def _fill(self, args: Sequence[Any]) -> Shape:
        """Puts the arguments into the block; returns the launch shape."""
        if len(args) != len(self.names):
            raise AbiError(f"{self.kernel.name} takes {len(self.names)} arguments, not {len(args)}")
        block = self._block
        for name, pointer, value in zip(self.names, self.is_pointer, args, strict=True):
            if pointer:
                value = 0 if value is None else value.ptr
            setattr(block, name, value)
        return self.kernel.shape(dict(zip(self.names, args, strict=True)))


class Launch:
    """A kernel with its arguments in place, in a block of its own: a copy of the one given.

    `field(name).value` writes one of them over: none that the launch shape depends on.
    """

    def __init__(
        self, plan: LaunchPlan, context: CudaContext, stream: CudaStream, config: Any, block: Any, slices: OpenWatch
    ) -> None:
        self._plan, self._context, self._stream, self._config = plan, context, stream, config
        self._block, self._slices = type(block).from_buffer_copy(block), slices
        begin = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_void_p * len(plan.layout))(*[begin + offset for offset, _ in plan.layout])
        self._launch = driver.launcher(plan.handle, config, ctypes.addressof(self._pointers), plan.kernel.name)
        self._read: dict[str, Any] = {}  # the structs that arguments are read from
        self._fields: dict[str, Any] = {}

    def copy(self) -> Launch:
        """Another launch with these arguments, all of them in its block."""
        return Launch(self._plan, self._context, self._stream, self._config, self._block, self._slices)

    @property
    def is_open(self) -> bool:
        """Whether kernel and stream are open, the context ready, and no slice among the arguments was closed since.

        As long as `memory.CHANGED` holds the same object, this says the same.
        """
        there = self._plan.handle != 0 and self._stream._handle is not None and self._context.is_ready
        return there and self._slices.is_true()

    def has(self, name: str) -> bool:
        """Whether the kernel has a parameter of this name."""
        return name in self._plan.names

    def field(self, name: str) -> Any:
        """The place of one argument."""
        found = self._fields.get(name)
        if found is None:
            kind = dict(self._block._fields_)[name]
            found = self._fields[name] = kind.from_buffer(self._block, getattr(type(self._block), name).offset)
        return found

    def read_from(self, name: str, struct: Any, field: Any) -> None:
        """From now on each launch takes an argument from a field of a C struct, as it is by then.

        The parameter has no more bytes than the field, or than the first of its own fields: these are little-endian.
        None that the launch shape depends on.
        """
        self._pointers[self._plan.names.index(name)] = ctypes.addressof(struct) + field.offset
        self._read[name] = struct

    @property
    def again(self) -> Callable[[], None]:
        """What enqueues the kernel as long as `is_open` holds.

        The driver takes the context from the stream; only its own streams are those of the context that is current.
        """
        return self.run if self._stream.handle <= PER_THREAD_STREAM else self._launch

    def run(self) -> None:
        """Enqueues the kernel."""
        self._context.bind()
        self._launch()


def _unload_quietly(libraries: dict[str, int], pid: int) -> None:
    """What is not closed is unloaded when the object dies; not in a forked child, and without raising."""
    if os.getpid() == pid:
        with contextlib.suppress(MemraError):
            while libraries:
                driver.library_unload(libraries.popitem()[1])


class KernelSet:
    """The kernels of one device (arch, CUdevice), compiled or found in the cache at their first use."""

    def __init__(self, arch: str, device: int) -> None:
        self.arch = arch
        self.device = device
        self.early = nvrtc.begins_early(arch) and driver.driver_get_version() >= EARLY_DRIVER
        self._libraries: dict[str, int] = {}
        self._plans: dict[str, LaunchPlan] = {}
        self._unload = weakref.finalize(self, _unload_quietly, self._libraries, os.getpid())
        self._unload.atexit = False

    def has(self, name: str) -> bool:
        """Whether a kernel is loaded."""
        return name in self._plans

    def plan(self, name: str) -> LaunchPlan:
        """The launch plan of a kernel. The first use of a source may compile it.

        Raises CompileError, NoDriver (NVRTC is missing), DriverError, and AbiError when the loaded
        kernel's parameters are not those of the table.
        """
        found = self._plans.get(name)
        return self._load(KERNELS[name]) if found is None else found

    def load_all(self) -> None:
        """Loads every kernel of the table; what has to be compiled for that is compiled at once, in threads."""
        served = [kernel for kernel in KERNELS.values() if kernel.arch in (None, self.arch)]
        missing = {kernel.source for kernel in served} - self._libraries.keys()
        for source, cubin in nvrtc.compile_sources(sorted(missing), self.arch).items() if missing else ():
            self._libraries[source] = driver.library_load_data(cubin)
        for kernel in served:
            self.plan(kernel.name)

    def close(self) -> None:
        """Unloads everything; may be called twice. The work that uses it must have ended."""
        mine = [*(plan.close for plan in self._plans.values())]
        mine += [functools.partial(driver.library_unload, library) for library in self._libraries.values()]
        self._plans.clear()
        self._libraries.clear()
        run_all(mine)

    def _load(self, kernel: Kernel) -> LaunchPlan:
        library = self._libraries.get(kernel.source)
        if library is None:
            library = driver.library_load_data(nvrtc.compile_cubin(kernel.source, self.arch))
            self._libraries[kernel.source] = library
        handle = driver.library_get_kernel(library, kernel.name)
        plan = LaunchPlan(kernel, handle, early=self.early)
        if kernel.shared_bytes:
            limit = kernel.shared_bytes
            driver.kernel_set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", limit, plan.handle, self.device)
        try:
            found = driver.kernel_get_param_info(plan.handle, len(plan.layout))
        except UnsupportedDriver:
            found = plan.layout  # a driver before 12.4 does not tell
        if found != plan.layout:
            raise AbiError(
                f"{kernel.name} was built with parameters {found} (offset, bytes); the table has {plan.layout}"
            )
        self._plans[kernel.name] = plan
        return plan
