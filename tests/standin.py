"""The stand-in CUDA driver: builds it, loads it into this process, steers it.

`load()` builds two shared objects on first use and loads the first before anything asks for a
driver: tests/fake_cuda as `libcuda.so.1`, and the kernels of cuda_src compiled for the CPU by
tests/cpu_shim, which the stand-in hands out whatever image it is given. Both are kept in a cache
folder under the hash of what they were built from. With MEMRA_CPU_SANITIZE=1 both are built with
the address and the undefined-behaviour sanitizer (preload libasan then).
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent
CUDA_SRC = TESTS.parent / "cuda_src"
SHIM = TESTS / "cpu_shim"

SANITIZED = os.environ.get("MEMRA_CPU_SANITIZE") == "1"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_DRIVER_FLAGS = ("-std=gnu11", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
_KERNEL_FLAGS = (
    "-x", "c++", "-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-strict-aliasing", "-DMEMRA_CPU", "-Wall", "-Wno-unknown-pragmas", "-I", str(SHIM), "-I", str(CUDA_SRC),
)  # fmt: skip
# Shared arrays live in a section of their own; without this they would get no red zones. With -O2 the compiler takes
# twice as long, and what it makes is hardly faster.
_KERNEL_SANITIZERS = (*SANITIZERS, "-fsanitize-sections=memra_smem", "-DMEMRA_CPU_SANITIZE", "-O1")


def missing() -> str | None:
    """Why the stand-in cannot be built here, or None."""
    if platform.system() != "Linux":
        return "the stand-in driver needs Linux"
    absent = [tool for tool in ("gcc", "g++") if shutil.which(tool) is None]
    return f"the stand-in driver needs {' and '.join(absent)}" if absent else None


# ---------------------------------------------------------------- building


def cache_dir() -> Path:
    """Where built libraries are kept: under XDG_CACHE_HOME, or the temporary folder if that cannot be written."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memra_driver-tests"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass
    other = Path(tempfile.gettempdir()) / f"memra_driver-tests-{os.getuid()}"
    other.mkdir(parents=True, exist_ok=True)
    return other


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _key(command: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(_compiler_version(command[0]).encode())
    digest.update("\0".join(command).encode())
    for file in sorted(files):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def built(name: str, command: Sequence[str], inputs: Sequence[Path], read: Sequence[Path]) -> Path:
    """The output of `command inputs -o output`, made unless the same was made before.

    Safe in parallel: of several processes one makes it, and the others wait.
    """
    folder = cache_dir() / _key(command, [*inputs, *read])
    output = folder / name
    if output.exists():
        return output
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if output.exists():
            return output
        fresh = Path(scratch) / name
        run = subprocess.run([*command, *map(str, inputs), "-o", str(fresh)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{' '.join(run.args)}\n{run.stderr}")
        os.replace(fresh, output)
    return output


def build_driver(sanitized: bool = SANITIZED) -> Path:
    """The stand-in libcuda.so.1."""
    folder = TESTS / "fake_cuda"
    extra = ("-DMEMRA_CPU_SANITIZE", *SANITIZERS) if sanitized else ()
    command = ("gcc", *_DRIVER_FLAGS, *extra, "-shared", "-Wl,-soname,libcuda.so.1", "-pthread")
    return built("libcuda.so.1", command, sorted(folder.glob("*.c")), sorted(folder.glob("*.h")))


def build_kernels(sources: Sequence[Path] | None = None, sanitized: bool = SANITIZED) -> Path:
    """A shared object with the kernels of `sources` (default: all of cuda_src), compiled two at a time."""
    sources = sorted(CUDA_SRC.glob("*.cu")) if sources is None else sources
    headers = [*SHIM.glob("*.h"), *CUDA_SRC.glob("*.cuh"), *CUDA_SRC.glob("*.h")]
    extra = _KERNEL_SANITIZERS if sanitized else ()
    command = ("g++", *_KERNEL_FLAGS, *extra, "-c")
    with ThreadPoolExecutor(2) as pool:
        objects = pool.map(
            lambda source: built(f"{source.stem}.o", command, [source], headers), [*sources, SHIM / "shim.cpp"]
        )
        return built("kernels.so", ("g++", "-shared", *(SANITIZERS if sanitized else ())), list(objects), [])


def sanitized_environment() -> dict[str, str] | None:
    """The environment in which a child process runs on the sanitized build; None where gcc has no libasan."""
    run = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = Path(run.stdout.strip())
    if not library.is_absolute():
        return None
    return {
        **os.environ,
        "MEMRA_CPU_SANITIZE": "1",
        "LD_PRELOAD": str(library),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps much until its end
        "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
    }


# ---------------------------------------------------------------- what the stand-in reports


class _Record(ctypes.Structure):
    """struct fake_record of tests/fake_cuda/fake.h."""

    _fields_ = [
        ("call", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("node", ctypes.c_char_p),
        ("stream", ctypes.c_uint64),
        ("dst", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("captured", ctypes.c_int32),
        ("early", ctypes.c_int32),
    ]


# What ends an object, and what made it.
ENDS = {
    "cuStreamDestroy": "cuStreamCreate", "cuEventDestroy": "cuEventCreate", "cuLibraryUnload": "cuLibraryLoadData",
    "cuDevicePrimaryCtxRelease": "cuDevicePrimaryCtxRetain",
}  # fmt: skip


class Call(NamedTuple):
    """One call that created, destroyed, enqueued or waited, or one node of a graph that was launched.

    `dst` and `src` are addresses or handles: an allocation or creation returns in `dst`, a free, destroy, event
    record or wait names its object in `src`; of a memset `src` is the value. `code` is what the call returned.
    In deferred mode that is what it returned as it was asked, also where the work fails later.
    `captured`: the call became a node of a graph and ran nothing. The nodes of a launch follow its cuGraphLaunch;
    their name is "node", `node` is the call that was captured, the rest is as that call had it.
    `early`: a launch that may begin before the kernel in front of it has ended.
    """

    name: str
    stream: int
    dst: int
    src: int
    bytes: int
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    device: int
    code: int
    node: str
    captured: bool
    early: bool


def _call(r: _Record) -> Call:
    return Call(
        r.call.decode(), r.stream, r.dst, r.src, r.bytes, (r.kernel or b"").decode(),
        tuple(r.grid), tuple(r.block), r.smem, r.device, r.code,
        (r.node or b"").decode(), bool(r.captured), bool(r.early),
    )  # fmt: skip


class StandIn:
    """Control of the stand-in driver of this process. Make it with `load()`."""

    def __init__(self, driver: Path, kernels: Path) -> None:
        self._lib = ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
        for name in ("live_bytes", "live_count", "live_graphs", "check_guards"):
            getattr(self._lib, f"fake_{name}").restype = ctypes.c_uint64
        for name in ("trace", "errors"):
            function = getattr(self._lib, f"fake_{name}")
            function.restype = ctypes.c_size_t
            function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._lib.fake_set_fail.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int)
        self._lib.fake_set_deferred.argtypes = (ctypes.c_uint64,)
        self._lib.fake_set_memory_left.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._lib.fake_set_total_memory.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._kernels = kernels
        self.reset()

    def reset(self) -> None:
        """Forgets trace, failures and errors, counts live memory from here, takes all settings back.

        Contexts, streams and allocations that somebody still holds stay as they are.
        """
        self._lib.fake_reset()
        self.use_kernels(self._kernels)

    # What happened.

    def trace(self) -> list[Call]:
        """Every call since `reset` or `clear_trace`, in order."""
        return [_call(record) for record in self._records()]

    def _records(self) -> ctypes.Array[_Record]:
        n = self._lib.fake_trace(None, 0)
        records = (_Record * n)()
        self._lib.fake_trace(records, n)
        return records

    def failed(self, code: int) -> Call:
        """The first call of the trace that returned this code."""
        return next(_call(record) for record in self._records() if record.code == code)

    def calls(self, *names: str) -> list[Call]:
        """The calls of the trace with one of these cu names."""
        return [call for call in self.trace() if call.name in names]

    def launches(self) -> list[str]:
        """The names of the kernels launched, in order: by calls that were not captured, and by nodes of graphs."""
        calls = self.calls("cuLaunchKernel", "cuLaunchKernelEx", "node")
        return [call.kernel for call in calls if not call.captured and (call.name != "node" or call.kernel)]

    def balance(self) -> collections.Counter[str]:
        """Of streams, events, libraries and contexts: how many more the trace saw made than given back."""
        done = collections.Counter(record.call.decode() for record in self._records() if not record.code)
        return collections.Counter({made: done[made] - done[ended] for ended, made in ENDS.items()})

    def clear_trace(self) -> None:
        self._lib.fake_trace_clear()

    def errors(self) -> list[str]:
        """Misuse seen so far, broken guards and writes to freed memory included. Lets all queued work run first."""
        self._lib.fake_finish()
        self._lib.fake_check_guards()
        n = self._lib.fake_errors(None, 0)
        text = ctypes.create_string_buffer(n)
        self._lib.fake_errors(text, n)
        return text.raw[:n].decode(errors="replace").splitlines()

    def take_errors(self) -> list[str]:
        """`errors()`, then forgets them: for tests that misuse the driver on purpose."""
        errors = self.errors()
        self._lib.fake_errors_clear()
        return errors

    def live_bytes(self) -> int:
        """Bytes allocated since `reset` and not freed."""
        return int(self._lib.fake_live_bytes())

    def live_count(self) -> int:
        """Allocations made since `reset` and not freed."""
        return int(self._lib.fake_live_count())

    def live_graphs(self) -> int:
        """Captures begun since `reset` and not ended, graphs and executable graphs not destroyed."""
        return int(self._lib.fake_live_graphs())

    def live_contexts(self) -> list[int]:
        """The devices whose primary context somebody retains."""
        active = [ctypes.c_int() for _ in range(2)]
        for device, each in enumerate(active):
            self._lib.cuDevicePrimaryCtxGetState(device, ctypes.byref(ctypes.c_uint()), ctypes.byref(each))
        return [device for device, each in enumerate(active) if each.value]

    def assert_clean(self) -> None:
        """No misuse, no broken guard, no memory and no graph left since `reset`."""
        errors = self.errors()
        assert not errors, "\n".join(errors)
        assert self.live_bytes() == 0, f"{self.live_count()} allocations were never freed"
        assert self.live_graphs() == 0, f"{self.live_graphs()} graphs or captures were never closed"

    # What shall happen.

    def fail(self, name: str, nth: int = 1, code: int = 999) -> None:
        """Lets the nth call of this cu name from now fail with `code`, without effect. "*": of any record of the trace.

        "node" counts the nodes of graphs: the nth does not run, nor do those behind it; their launch returns `code`.
        """
        self._inject(name, nth, code, breaks=False)

    def break_behind(self, name: str, nth: int = 1, code: int = 719) -> None:
        """Lets the nth call succeed, and every later call of its context fail with `code`: a fault of the device.

        The context is lost until somebody resets it (cuDevicePrimaryCtxReset) or the last one releases it.
        """
        self._inject(name, nth, code, breaks=True)

    def _inject(self, name: str, nth: int, code: int, breaks: bool) -> None:
        if not self._lib.fake_set_fail(name.encode(), nth, code, breaks):
            raise RuntimeError("too many injected failures")

    def defer(self, seed: int) -> None:
        """Lets work wait in its stream until somebody waits for it or asks; 0: it runs at once, as ever.

        The seed shuffles what the order of streams and events leaves open. Lasts until the next `reset`, which goes
        back to FAKE_CUDA_DEFERRED, a seed too.
        """
        self._lib.fake_set_deferred(seed)

    def finish(self) -> None:
        """Lets all queued work run."""
        self._lib.fake_finish()

    def trace_queries(self, on: bool = True) -> None:
        """Whether calls that only ask are in the trace as well, and counted by "*"."""
        self._lib.fake_set_trace_queries(int(on))

    def asked(self, call: Callable[[], Any]) -> list[str]:
        """What `call` asks of the driver, questions too: names of calls, and of kernels where they are launched."""
        self.clear_trace()
        self.trace_queries()
        try:
            call()
        finally:
            self.trace_queries(False)
        return [each.kernel or each.name for each in self.trace()]

    def pending_failures(self) -> int:
        """How many injected failures have not happened yet."""
        return int(self._lib.fake_pending_failures())

    def clear_failures(self) -> None:
        self._lib.fake_clear_failures()

    def run_out_after(self, device: int, nbytes: int) -> None:
        """The device has room for so many bytes beside what lives there now."""
        self._lib.fake_set_memory_left(device, nbytes)

    def set_total_memory(self, device: int, nbytes: int) -> None:
        self._lib.fake_set_total_memory(device, nbytes)

    def set_attribute(self, device: int, attribute: int, value: int) -> None:
        """Sets a CUdevice_attribute: 75 and 76 the compute capability, 115 memory pools."""
        self._lib.fake_set_attribute(device, int(attribute), value)

    def set_peers(self, can: bool) -> None:
        """Whether devices reach each other's memory. What a context has enabled already it keeps."""
        self._lib.fake_set_peers(int(can))

    def set_device_count(self, n: int) -> None:
        self._lib.fake_set_device_count(n)

    def set_driver_version(self, version: int) -> None:
        self._lib.fake_set_driver_version(version)

    def use_kernels(self, path: Path) -> None:
        """The shared object that libraries and modules loaded from now on stand for; its threads run forward."""
        self._loaded = path
        self._lib.fake_set_kernels(str(path).encode())
        self.schedule("forward")

    def schedule(self, order: str) -> None:
        """The order in which threads and blocks of later launches run: "forward" or "backward"."""
        ctypes.CDLL(str(self._loaded)).memra_cpu_schedule(int(order == "backward"))


def _refuse_a_real_driver() -> None:
    with open("/proc/self/maps") as maps:
        if any("/libcuda.so" in line for line in maps):
            raise RuntimeError("a real libcuda is loaded in this process; it and the stand-in cannot share one")


@functools.cache
def load() -> StandIn:
    """Builds the stand-in if needed and loads it, so that every later look-up of libcuda.so.1 finds it."""
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    _refuse_a_real_driver()
    return StandIn(build_driver(), build_kernels())


def finish() -> None:
    """Lets all queued work run, where there is a stand-in: for tests that look at device memory by its address."""
    if load.cache_info().currsize:
        load().finish()


if __name__ == "__main__":
    print(build_driver(), build_kernels(), sep="\n", file=sys.stdout)
