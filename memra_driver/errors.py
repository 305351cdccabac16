"""Every exception that this package raises, in one tree under `MemraError`.

A message says what was asked, what the limit is, and what to do. An error of this tree that is
not a `DriverError` is a refusal: it came before anything was changed.
"""

from __future__ import annotations


class MemraError(Exception):
    """Root of every exception of this package."""


class ConfigError(MemraError, ValueError):
    """A model description, policy, option or geometry that cannot be used, named by key and file."""


class ArrayError(MemraError, ValueError):
    """An array of the wrong dtype, shape, stride, device, or one that overlaps another."""


class ExportError(ArrayError, BufferError):
    """An export that DLPack asked for and that cannot be given: a copy, another device, a stream or type it lacks."""


class DeviceMismatch(MemraError, ValueError):
    """A device object that does not own what the call touches."""


class CapacityError(MemraError):
    """More positions than the cache was built for (names len, need and max_ctx)."""


class StateError(MemraError):
    """A call that the state of the cache, device or slice does not allow now."""


class SnapshotError(MemraError):
    """A snapshot of another cache, geometry or generation, a closed or an outdated one."""


class UnsupportedError(MemraError):
    """A legal geometry for which this operation has no kernel, or a GPU for which there is none."""


class KitError(MemraError, ValueError):
    """A conformance kit that cannot be used: a file, size, name, type, number or digest in it does not hold."""


class HealthError(MemraError):
    """The error record of a `strict` cache is not empty."""


class OutOfMemory(MemraError):
    """The plan needs more bytes than the device has free, or an allocation failed."""


class AbiError(MemraError):
    """Two descriptions of one struct or kernel differ (names the field)."""


class CompileError(MemraError):
    """NVRTC or the C compiler refused a source, or there is no C compiler; carries its `log` and the `options`."""

    def __init__(self, message: str, log: str = "", options: tuple[str, ...] = ()) -> None:
        super().__init__(message if not log else f"{message}\n{log}")
        self.log = log
        self.options = options


class DriverError(MemraError):
    """A call of the CUDA driver or of NVRTC failed: `call`, `code`, `name`, `detail`."""

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call}: {name} ({code})" + (f": {detail}" if detail else ""))
        self.call = call
        self.code = code
        self.name = name
        self.detail = detail


class DriverOutOfMemory(DriverError, OutOfMemory):
    """The driver could not allocate."""


class NoDriver(DriverError):
    """A library of NVIDIA's is missing; the message says what to install."""


class UnsupportedDriver(DriverError):
    """The driver is too old for these bindings, or lacks an entry point."""


class IllegalAddress(DriverError):
    """A kernel touched memory that is not its own. The context cannot be used any more."""
