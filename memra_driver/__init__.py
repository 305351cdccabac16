"""One sequence's state in a hybrid language model: quantised K/V, recurrent state, snapshot, rollback.

The names below load their module at first use, so importing the package costs next to nothing and
needs no driver, no NVRTC and no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from .errors import (
    AbiError,
    ArrayError,
    CapacityError,
    CompileError,
    ConfigError,
    DeviceMismatch,
    DriverError,
    DriverOutOfMemory,
    ExportError,
    HealthError,
    IllegalAddress,
    KitError,
    MemraError,
    NoDriver,
    OutOfMemory,
    SnapshotError,
    StateError,
    UnsupportedDriver,
    UnsupportedError,
)

if TYPE_CHECKING:
    from . import ops
    from .batch import CacheBatch
    from .boundary import Boundary
    from .cache import Cache
    from .config import Gemma4Config, LayerKind, ModelConfig, SsmConfig, Step35Config
    from .device import CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView
    from .formats import FormatPolicy
    from .graph import Graph
    from .kvdev import CudaDev, HostDev, KvDev
    from .layers import DflashTapSink, KvLayer, RecurLayer
    from .plan import CacheOptions, CachePlan
    from .pp import balance, pp_cuts, stage_of
    from .round import Round
    from .snapshot import CacheSnapshot

__version__ = "0.1.0"

__all__ = [
    "AbiError",
    "ArrayError",
    "Boundary",
    "Cache",
    "CacheBatch",
    "CacheOptions",
    "CachePlan",
    "CacheSnapshot",
    "CapacityError",
    "CompileError",
    "ConfigError",
    "CudaContext",
    "CudaDev",
    "CudaEvent",
    "CudaSlice",
    "CudaStream",
    "CudaView",
    "DeviceMismatch",
    "DflashTapSink",
    "DriverError",
    "DriverOutOfMemory",
    "ExportError",
    "FormatPolicy",
    "Gemma4Config",
    "Graph",
    "HealthError",
    "HostDev",
    "IllegalAddress",
    "KitError",
    "KvDev",
    "KvLayer",
    "LayerKind",
    "MemraError",
    "ModelConfig",
    "NoDriver",
    "OutOfMemory",
    "RecurLayer",
    "Round",
    "SnapshotError",
    "SsmConfig",
    "StateError",
    "Step35Config",
    "UnsupportedDriver",
    "UnsupportedError",
    "__version__",
    "balance",
    "errors",
    "get_cubins",
    "get_include",
    "get_library",
    "ops",
    "pp_cuts",
    "stage_of",
]

_HOME = {
    "batch": ("CacheBatch",),
    "boundary": ("Boundary",),
    "cache": ("Cache",),
    "config": ("Gemma4Config", "LayerKind", "ModelConfig", "SsmConfig", "Step35Config"),
    "device": ("CudaContext", "CudaEvent", "CudaSlice", "CudaStream", "CudaView"),
    "formats": ("FormatPolicy",),
    "graph": ("Graph",),
    "kvdev": ("CudaDev", "HostDev", "KvDev"),
    "layers": ("DflashTapSink", "KvLayer", "RecurLayer"),
    "ops": ("ops",),
    "plan": ("CacheOptions", "CachePlan"),
    "pp": ("balance", "pp_cuts", "stage_of"),
    "round": ("Round",),
    "snapshot": ("CacheSnapshot",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    module_name = _MODULE_OF.get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"{__name__}.{module_name}")
    value = module if name == module_name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def get_include() -> str:
    """Folder of `memra_driver.h`, `memra_formats.h` and the CUDA texts, for a compiler's `-I`.

    It lies inside an installed package, and beside it in a repository. Raises FileNotFoundError when the package was
    copied without it.
    """
    from .nvrtc import source_dir

    header = source_dir() / "memra_driver.h"
    if not header.is_file():
        raise FileNotFoundError(f"{header} is missing: reinstall memra-driver")
    return str(header.parent)


def get_library() -> str | None:
    """Path of `libmemra_driver.so.1`, the C library, to be loaded or linked; None where it has not been built.

    Beside it lies `libmemra_driver.so`, which only a linker can read.
    """
    from .native import library

    path = library()
    return None if path is None else str(path)


def get_cubins(arch: str) -> list[str]:
    """Paths of the compiled kernels for `arch` ("sm_90"), one cubin for each source, sorted, alone in their folder.

    Those that came with the package, where it has them for all of its sources; else they are compiled, which takes
    seconds, and stay in the cache folder. Neither a GPU nor a driver is needed. Raises ConfigError for an architecture
    that is spelt otherwise or older than sm_80 and for a cache folder that cannot be written, NoDriver where NVRTC is
    needed and missing, and CompileError.
    """
    from .nvrtc import cubin_files

    return [str(path) for path in cubin_files(arch)]
