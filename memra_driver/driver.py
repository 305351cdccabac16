"""One function per `cu*` call that this package makes: plain ints in and out, an exception on failure.

No objects, no policy, no state: streams, events, contexts and pointers are ints here, and who frees what is
`device.py`'s business. `cuda.bindings` is imported by the first call, never by this import. Every function raises
`DriverError` or one of its subclasses, which name the call; `NoDriver` says what to install.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NoReturn

from .errors import DriverError, DriverOutOfMemory, IllegalAddress, NoDriver, UnsupportedDriver

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
DEINITIALIZED = 4
STUB_LIBRARY = 34
PEER_ACCESS_UNSUPPORTED = 217
PEER_ACCESS_ALREADY_ENABLED = 704
TOO_MANY_PEERS = 711
NOT_READY = 600
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
ILLEGAL_ADDRESS = 700
CONTEXT_IS_DESTROYED = 709
SYSTEM_DRIVER_MISMATCH = 803
COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
# What to do about it, where the driver does not say. memra_error.c has the same.
_RELOAD = "reload NVIDIA's kernel modules (nvidia-modprobe -u -c 0), or restart the machine"
_CODE = "the cubin is of another GPU, or of an NVRTC newer than the driver: update the driver; see memra-driver info"
ADVICE = {
    STUB_LIBRARY: "put the driver's own libcuda.so.1 before the toolkit's stub",
    46: "another process holds the GPU in exclusive mode, or its mode is prohibited: nvidia-smi -q -d COMPUTE",
    100: "nvidia-smi -L lists the GPUs; CUDA_VISIBLE_DEVICES may hide them, and a container must be given them",
    101: "nvidia-smi -L lists the GPUs; CUDA_VISIBLE_DEVICES may hide some, and numbers them from 0",
    200: _CODE, 209: _CODE, 218: _CODE, 222: _CODE,
    802: "nvidia-fabricmanager must run on this machine",
    SYSTEM_DRIVER_MISMATCH: f"the driver was updated and its kernel module was not: {_RELOAD}",
    COMPAT_NOT_SUPPORTED_ON_DEVICE: "remove the CUDA compatibility package, or update the driver",
    999: _RELOAD,
}  # fmt: skip
# After one of these every later call on the context fails too: illegal address, assert, hardware stack, illegal
# instruction, misaligned address, address space, program counter, launch failure.
STICKY = frozenset({700, 710, 714, 715, 716, 717, 718, 719})
NOT_FROM_THE_DRIVER = -1  # `code` of an error that is not a CUresult: a missing library or entry point

NO_ROOM = "the GPU has no room for a context: nvidia-smi says who holds its memory"  # memra_device.c has the same

STREAM_NON_BLOCKING = 1
HOST_ALLOC_PORTABLE = 1
EVENT_EXTERNAL = 1  # in a capture: a node that records or waits for an event of outside it
EVENT_DISABLE_TIMING = 2
NEED_BINDINGS = "pip install 'cuda-python>=13,<14' (or '>=12.9.6,<13' for a driver older than 580)"


class _Unloaded:
    """Stands where the bindings will be; the first attribute asked of it imports them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(), name)


_cu: Any = _Unloaded()
_native: Any = None  # handle object -> int
_pointer_get_attribute: Any = None  # as the driver has it


def _load() -> Any:
    global _cu, _native
    try:
        from cuda.bindings import driver
        from cuda.bindings.utils import get_cuda_native_handle
    except ImportError as error:
        raise NoDriver(
            "import cuda.bindings", NOT_FROM_THE_DRIVER, "ImportError", f"{error}; {NEED_BINDINGS}"
        ) from error
    _native = get_cuda_native_handle
    _cu = driver
    return driver


def _reraise(call: str, error: Exception) -> NoReturn:
    """Raises what an exception of the bindings (which is not a status of the driver) means, as one of ours."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, ValueError) and "CUresult" in text:  # a status that these bindings have no name for
        code = next((int(word) for word in text.split() if word.isdigit()), NOT_FROM_THE_DRIVER)
        raise DriverError(call, code, "unknown CUresult", "newer than these cuda-bindings") from error
    if kind == "DynamicLibNotFoundError" or "dlopen" in text:
        raise NoDriver(
            call,
            NOT_FROM_THE_DRIVER,
            "no libcuda.so.1",
            "install an NVIDIA display driver to use a GPU; HostDev needs none",
        ) from error
    if isinstance(error, RuntimeError) and "not found" in text:
        raise UnsupportedDriver(
            call, NOT_FROM_THE_DRIVER, "no such entry point", "this driver lacks the call: install a newer driver"
        ) from error
    raise error


def _failure(call: str, status: Any) -> DriverError:
    """The exception of a status that is not zero."""
    code = int(status)
    name = getattr(status, "name", "unknown CUresult")
    meaning = " ".join((getattr(status, "__doc__", None) or "").split())
    detail = meaning.split(". ")[0].rstrip(".")
    if code in STICKY:
        detail += "; the error is sticky: the context is lost, end this process"
    if code in ADVICE:
        detail += f"; {ADVICE[code]}"
    if code == OUT_OF_MEMORY:
        return DriverOutOfMemory(call, code, name, detail)
    if code == ILLEGAL_ADDRESS:
        return IllegalAddress(call, code, name, detail)
    if code == STUB_LIBRARY:
        return NoDriver(call, code, name, detail)
    if code in (SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED_ON_DEVICE):
        return UnsupportedDriver(call, code, name, detail)
    return DriverError(call, code, name, detail)


def _outputs(name: str, args: tuple[Any, ...], shown: object, accepted: int = 0) -> tuple[Any, ...]:
    """Calls and returns (status, outputs...); raises unless the status is 0 or `accepted`."""
    try:
        result: tuple[Any, ...] = getattr(_cu, name)(*args)
    except (RuntimeError, ValueError) as error:
        _reraise(f"{name}({shown})", error)
    status = result[0]
    if status and int(status) != accepted:
        raise _failure(f"{name}({shown})", status)
    return result


def _call(name: str, *args: Any, shown: object = "") -> Any:
    """Calls and returns the first output, None where there is none; `shown` stands in the error's `call`."""
    result = _outputs(name, args, shown)
    return result[1] if len(result) > 1 else None


# Start, devices


def init() -> None:
    """Loads the driver and starts it; may be called again. Raises NoDriver, UnsupportedDriver (driver too old)."""
    _call("cuInit", 0, shown=0)
    has, needs = driver_get_version(), int(_cu.CUDA_VERSION)
    if has // 1000 < needs // 1000:
        raise UnsupportedDriver(
            "cuDriverGetVersion()",
            NOT_FROM_THE_DRIVER,
            "driver too old",
            f"the driver supports CUDA {version_text(has)}, these cuda-bindings need CUDA {needs // 1000}.0: "
            f"update the driver, or pip install 'cuda-python=={has // 1000}.*'",
        )


def version_text(version: int) -> str:
    """13040 -> "13.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_get_version() -> int:
    """The newest CUDA that the driver supports, 1000 * major + 10 * minor. Works before `init`."""
    return int(_call("cuDriverGetVersion"))


def bindings_version() -> int:
    """The CUDA that cuda-bindings was built for, like `driver_get_version`. Needs no driver."""
    return int(_cu.CUDA_VERSION)


def device_get_count() -> int:
    return int(_call("cuDeviceGetCount"))


def device_get(ordinal: int) -> int:
    return int(_call("cuDeviceGet", ordinal, shown=ordinal))


def device_get_name(device: int) -> str:
    raw: bytes = _call("cuDeviceGetName", 256, device, shown=device)
    return raw.partition(b"\0")[0].decode(errors="replace")


def device_total_mem(device: int) -> int:
    """Bytes of its memory; needs no context."""
    return int(_call("cuDeviceTotalMem", device, shown=device))


def device_get_attribute(name: str, device: int) -> int:
    """`name` is what follows CU_DEVICE_ATTRIBUTE_, as in "COMPUTE_CAPABILITY_MAJOR"."""
    attribute = getattr(_cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_call("cuDeviceGetAttribute", attribute, device, shown=f"{name}, {device}"))


def device_can_access_peer(device: int, peer: int) -> bool:
    return bool(_call("cuDeviceCanAccessPeer", device, peer, shown=f"{device}, {peer}"))


# Contexts


def device_primary_ctx_retain(device: int) -> int:
    try:
        context = _call("cuDevicePrimaryCtxRetain", device, shown=device)
    except DriverOutOfMemory as error:
        raise DriverOutOfMemory(error.call, error.code, error.name, f"{error.detail}; {NO_ROOM}") from None
    return int(_native(context))


def device_primary_ctx_release(device: int) -> None:
    _call("cuDevicePrimaryCtxRelease", device, shown=device)


def ctx_get_id(ctx: int) -> int | None:
    """A number that no other context of the process ever has; None where the driver (before 12.0) has none."""
    try:
        status, found = _cu.cuCtxGetId(ctx)
    except (RuntimeError, ValueError) as error:
        try:
            _reraise("cuCtxGetId()", error)
        except UnsupportedDriver:
            return None
    if status:
        raise _failure("cuCtxGetId()", status)
    return int(found)


def ctx_get_current() -> int:
    """The calling thread's context, 0 where it has none."""
    try:
        status, context = _cu.cuCtxGetCurrent()
    except (RuntimeError, ValueError) as error:
        _reraise("cuCtxGetCurrent()", error)
    if status:
        raise _failure("cuCtxGetCurrent()", status)
    return _native(context)  # type: ignore[no-any-return]


def ctx_set_current(context: int) -> None:
    _call("cuCtxSetCurrent", context)


def ctx_synchronize() -> None:
    """Waits for all work of the current context, on every stream."""
    _call("cuCtxSynchronize")


def ctx_enable_peer_access(peer: int) -> None:
    """Lets the current context reach the memory of context `peer`; twice is once."""
    _outputs("cuCtxEnablePeerAccess", (peer, 0), "", accepted=PEER_ACCESS_ALREADY_ENABLED)


# Memory. Sizes in bytes.


def mem_alloc_async(nbytes: int, stream: int) -> int:
    return int(_call("cuMemAllocAsync", nbytes, stream, shown=nbytes))


def mem_free_async(ptr: int, stream: int) -> None:
    _call("cuMemFreeAsync", ptr, stream, shown=f"0x{ptr:x}")


def mem_alloc(nbytes: int) -> int:
    return int(_call("cuMemAlloc", nbytes, shown=nbytes))


def mem_free(ptr: int) -> None:
    _call("cuMemFree", ptr, shown=f"0x{ptr:x}")


def mem_host_alloc(nbytes: int) -> int:
    """Page-locked host memory, for copies of every context."""
    return int(_call("cuMemHostAlloc", nbytes, HOST_ALLOC_PORTABLE, shown=nbytes))


def mem_free_host(address: int) -> None:
    _call("cuMemFreeHost", address, shown=f"0x{address:x}")


def mem_get_info() -> tuple[int, int]:
    """(free, total) bytes of the current context's device."""
    _, free, total = _outputs("cuMemGetInfo", (), "")
    return int(free), int(total)


def device_get_default_mem_pool(device: int) -> int:
    return int(_native(_call("cuDeviceGetDefaultMemPool", device, shown=device)))


def mem_pool_get_attribute(name: str, pool: int) -> int:
    """`name` is what follows CU_MEMPOOL_ATTR_, as in "RESERVED_MEM_CURRENT" or "USED_MEM_CURRENT" (bytes)."""
    attribute = getattr(_cu.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
    return int(_call("cuMemPoolGetAttribute", pool, attribute, shown=name))


def mem_pool_set_release_threshold(pool: int, nbytes: int) -> None:
    """What a pool keeps unused when somebody waits for the device; 0 at first, so that nothing is kept."""
    attribute = _cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    _call("cuMemPoolSetAttribute", pool, attribute, _cu.cuuint64_t(nbytes), shown=f"RELEASE_THRESHOLD, {nbytes}")


def mem_pool_trim_to(pool: int, nbytes: int) -> None:
    """Gives back what the pool holds unused above `nbytes`."""
    _call("cuMemPoolTrimTo", pool, nbytes, shown=nbytes)


def pointer_get_attribute(name: str, ptr: int) -> int:
    """`name` is what follows CU_POINTER_ATTRIBUTE_ of a 32-bit number, as in "DEVICE_ORDINAL" or "MEMORY_TYPE".

    Not through the bindings' own function: many versions of it have ordinal 0 for memory of any device.
    """
    global _pointer_get_attribute
    attribute = getattr(_cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    if _pointer_get_attribute is None:
        _, address, _ = _outputs("cuGetProcAddress", (b"cuPointerGetAttribute", 4000, 0), "cuPointerGetAttribute")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
        _pointer_get_attribute = kind(int(address))
    value = ctypes.c_int32()
    status = _pointer_get_attribute(ctypes.byref(value), int(attribute), ptr)
    if status:
        call = f"cuPointerGetAttribute({name}, 0x{ptr:x})"
        try:
            raise _failure(call, _cu.CUresult(status))
        except ValueError as error:
            _reraise(call, error)
    return value.value


def memcpy_dtod_async(dst: int, src: int, nbytes: int, stream: int) -> None:
    try:
        status = _cu.cuMemcpyDtoDAsync(dst, src, nbytes, stream)[0]
    except (RuntimeError, ValueError) as error:
        _reraise(f"cuMemcpyDtoDAsync({nbytes})", error)
    if status:
        raise _failure(f"cuMemcpyDtoDAsync({nbytes})", status)


def memcpy_htod_async(dst: int, src: int, nbytes: int, stream: int) -> None:
    """`src` is a host address. Pageable memory is staged before the return, pinned memory is read later."""
    _call("cuMemcpyHtoDAsync", dst, src, nbytes, stream, shown=nbytes)


def memcpy_dtoh_async(dst: int, src: int, nbytes: int, stream: int) -> None:
    """`dst` is a host address; its bytes are there once the stream has passed."""
    _call("cuMemcpyDtoHAsync", dst, src, nbytes, stream, shown=nbytes)


def memcpy_peer_async(dst: int, dst_context: int, src: int, src_context: int, nbytes: int, stream: int) -> None:
    _call("cuMemcpyPeerAsync", dst, dst_context, src, src_context, nbytes, stream, shown=nbytes)


def memset_d8_async(dst: int, value: int, nbytes: int, stream: int) -> None:
    _call("cuMemsetD8Async", dst, value, nbytes, stream, shown=nbytes)


# Streams, events


def stream_create() -> int:
    """A stream that does not wait for the legacy default stream, nor it for this one."""
    return int(_native(_call("cuStreamCreate", STREAM_NON_BLOCKING)))


def stream_destroy(stream: int) -> None:
    _call("cuStreamDestroy", stream)


def stream_synchronize(stream: int) -> None:
    _call("cuStreamSynchronize", stream)


def stream_query(stream: int) -> bool:
    """True when all work of the stream is done."""
    return not _outputs("cuStreamQuery", (stream,), "", accepted=NOT_READY)[0]


def stream_wait_event(stream: int, event: int, flags: int = 0) -> None:
    try:
        status = _cu.cuStreamWaitEvent(stream, event, flags)[0]
    except (RuntimeError, ValueError) as error:
        _reraise("cuStreamWaitEvent()", error)
    if status:
        raise _failure("cuStreamWaitEvent()", status)


def stream_get_ctx(stream: int) -> int:
    return int(_native(_call("cuStreamGetCtx", stream)))


def event_create(timing: bool) -> int:
    return int(_native(_call("cuEventCreate", 0 if timing else EVENT_DISABLE_TIMING)))


def event_record(event: int, stream: int, flags: int = 0) -> None:
    if flags:
        _call("cuEventRecordWithFlags", event, stream, flags)
        return
    try:
        status = _cu.cuEventRecord(event, stream)[0]
    except (RuntimeError, ValueError) as error:
        _reraise("cuEventRecord()", error)
    if status:
        raise _failure("cuEventRecord()", status)


def event_query(event: int) -> bool:
    """True when all work that the event stands for is done, also for one never recorded."""
    return not _outputs("cuEventQuery", (event,), "", accepted=NOT_READY)[0]


def event_synchronize(event: int) -> None:
    _call("cuEventSynchronize", event)


def event_elapsed_time(start: int, end: int) -> float:
    """Milliseconds between two recorded events with timing that have passed."""
    return float(_call("cuEventElapsedTime", start, end))


def event_destroy(event: int) -> None:
    _call("cuEventDestroy", event)


# Code


def library_load_data(image: bytes) -> int:
    """Loads a cubin for every context of the process; the driver keeps its own copy of `image`."""
    return int(_native(_call("cuLibraryLoadData", image, [], [], 0, [], [], 0, shown=f"{len(image)} bytes")))


def library_unload(library: int) -> None:
    _call("cuLibraryUnload", library)


def library_get_kernel(library: int, name: str) -> int:
    """A kernel handle, which `launch_kernel` takes in any context."""
    return int(_native(_call("cuLibraryGetKernel", library, name.encode(), shown=name)))


def kernel_get_param_info(kernel: int, count: int) -> list[tuple[int, int]]:
    """(offset, size) in bytes of the first `count` parameters, fewer where the kernel has fewer.

    Asking for one that is not there is an error that memory checkers report, so nothing is asked beyond `count`.
    Drivers before 12.4 lack the call: UnsupportedDriver.
    """
    params: list[tuple[int, int]] = []
    for index in range(count):
        result = _outputs("cuKernelGetParamInfo", (kernel, index), index, accepted=INVALID_VALUE)
        if result[0]:
            break
        params.append((int(result[1]), int(result[2])))
    return params


def kernel_set_attribute(name: str, value: int, kernel: int, device: int) -> None:
    """Sets a CU_FUNC_ATTRIBUTE_ of a kernel on one device."""
    attribute = getattr(_cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    _call("cuKernelSetAttribute", attribute, value, kernel, device, shown=f"{name}, {value}")


def launch_config(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, stream: int, *, early: bool = False
) -> Any:
    """What `launch_kernel` and `launcher` take.

    early: a programmatic dependent launch: the kernel's blocks may start while the kernel in front of it in the stream
    comes to its end, and must wait for that one themselves (griddepcontrol.wait). GPUs from sm_90 on.
    """
    config = _cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    config.hStream = _cu.CUstream(stream)
    if early:
        config.attrs = _early()
        config.numAttrs = 1
    return config


@functools.cache
def _early() -> list[Any]:
    """The attribute, which a config copies: the bindings take ten times as long to make one as to make a config."""
    attribute = _cu.CUlaunchAttribute()
    attribute.id = _cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


def launch_kernel(kernel: int, config: Any, params: int, name: str = "") -> None:
    """`params` is the address of a `void*[n]` that the caller keeps alive during the call; `name` is for errors."""
    launcher(kernel, config, params, name)()


def launcher(kernel: int, config: Any, params: int, name: str) -> Callable[[], None]:
    """`launch_kernel`, to be called again and again."""
    handle = _cu.CUfunction(kernel)  # the bindings' own object: of a CUkernel they make one at every call

    def launch() -> None:
        try:
            status = _cu.cuLaunchKernelEx(config, handle, params, 0)[0]
        except (RuntimeError, ValueError) as error:
            _reraise(_shown(config, name), error)
        if status:
            raise _failure(_shown(config, name), status)

    return launch


def _shown(config: Any, name: str) -> str:
    grid = config.gridDimX, config.gridDimY, config.gridDimZ
    block = config.blockDimX, config.blockDimY, config.blockDimZ
    return f"cuLaunchKernelEx({name}, grid {grid}, block {block})"


# Capture and graphs


def stream_begin_capture(stream: int, mode: str = "RELAXED") -> None:
    """From now on the stream's work is recorded. `mode` is what follows CU_STREAM_CAPTURE_MODE_."""
    value = getattr(_cu.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
    _call("cuStreamBeginCapture", stream, value, shown=mode)


def stream_end_capture(stream: int) -> int:
    """The graph of what was recorded. Where an error invalidated the capture this ends it and raises."""
    return int(_native(_call("cuStreamEndCapture", stream)))


def stream_is_capturing(stream: int) -> bool:
    """True from the begin to the end of a capture, also of an invalidated one."""
    return bool(_call("cuStreamIsCapturing", stream))


def graph_instantiate(graph: int) -> int:
    """An executable graph, which no longer needs `graph`."""
    return int(_native(_call("cuGraphInstantiate", graph, 0)))


def graph_upload(graph_exec: int, stream: int) -> None:
    """Brings the graph to the device, in stream order, so that its first launch is no slower than the next."""
    _call("cuGraphUpload", graph_exec, stream)


def graph_launch(graph_exec: int, stream: int) -> None:
    """Enqueues all that was recorded. A second launch of the same executable graph waits for the first."""
    try:
        status = _cu.cuGraphLaunch(graph_exec, stream)[0]
    except (RuntimeError, ValueError) as error:
        _reraise("cuGraphLaunch()", error)
    if status:
        raise _failure("cuGraphLaunch()", status)


def graph_destroy(graph: int) -> None:
    _call("cuGraphDestroy", graph)


def graph_exec_destroy(graph_exec: int) -> None:
    """May be called while a launch is under way; the driver frees the graph after that."""
    _call("cuGraphExecDestroy", graph_exec)
