"""libmemra_driver.so, loaded: its functions with their types, its layout checked against ours, its statuses raised.

The parameters of the functions that launch kernels come from the kernel table; those of the others stand here. A
library that differs from this package in any field of any struct is refused before the first call.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import re
from collections.abc import Iterable, Mapping
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

from memra_driver import driver, layout, native
from memra_driver.capi.layout import API_STRUCTS, LayoutRowC, PlaneC
from memra_driver.errors import (
    AbiError,
    ArrayError,
    CapacityError,
    ConfigError,
    DeviceMismatch,
    DriverError,
    DriverOutOfMemory,
    HealthError,
    IllegalAddress,
    MemraError,
    NoDriver,
    OutOfMemory,
    SnapshotError,
    StateError,
    UnsupportedDriver,
    UnsupportedError,
)
from memra_driver.kernels import ATTEND_ENTRIES, KERNELS


class Status(IntEnum):
    """enum memra_status."""

    OK = 0
    CONFIG = 1
    ARRAY = 2
    DEVICE = 3
    CAPACITY = 4
    STATE = 5
    SNAPSHOT = 6
    UNSUPPORTED = 7
    HEALTH = 8
    OUT_OF_MEMORY = 9
    ABI = 10
    NO_DRIVER = 11
    DRIVER = 12


REFUSALS: dict[int, type[MemraError]] = {
    Status.CONFIG: ConfigError,
    Status.ARRAY: ArrayError,
    Status.DEVICE: DeviceMismatch,
    Status.CAPACITY: CapacityError,
    Status.STATE: StateError,
    Status.SNAPSHOT: SnapshotError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.HEALTH: HealthError,
    Status.OUT_OF_MEMORY: OutOfMemory,
    Status.ABI: AbiError,
}
FROM_DRIVER = re.compile(r"(?P<call>[^:]+): (?P<name>[^:]+) \((?P<code>-?\d+)\): (?P<detail>.*)")

_KINDS: dict[str, Any] = {"int": c_int32, "long long": c_int64, "float": c_float}


def _launches() -> dict[str, tuple[Any, ...]]:
    """memra_launch_*: the device, then the kernel's parameters. All entries of attend, or recur_step, are one."""
    found = {}
    for kernel in KERNELS.values():
        kinds = (c_uint64 if kind.endswith("*") else _KINDS[kind] for kind, _ in kernel.params)
        found[launch_function(kernel.name)] = (c_void_p, *kinds)
    return found


def launch_function(kernel: str) -> str:
    """The function that launches a kernel of the table."""
    return "memra_launch_attend" if kernel in ATTEND_ENTRIES else f"memra_launch_{re.sub(r'_[0-9]+$', '', kernel)}"


# Parameters by function. Structs, devices and host memory go by address: c_void_p; device memory is a c_uint64.
_P, _I, _L, _A, _F = c_void_p, c_int32, c_int64, c_uint64, c_float
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "memra_device_open": (_P, _P),
    "memra_device_load": (_P, _P, c_uint64),
    "memra_device_load_file": (_P, c_char_p),
    "memra_device_load_folder": (_P, c_char_p),
    "memra_device_synchronize": (_P,),
    "memra_device_close": (_P,),
    "memra_alloc": (_P, c_uint64, _P),
    "memra_free": (_P, _A),
    "memra_clear": (_P, _A, c_uint64),
    "memra_copy_bytes": (_P, _A, _A, c_uint64),
    "memra_copy_table": (_P, _P, _I),
    "memra_upload": (_P, _A, _P, c_uint64),
    "memra_download": (_P, _P, _A, c_uint64),
    "memra_memory_info": (_P, _P, _P), "memra_keep_memory": (_P, c_uint64), "memra_trim": (_P,),
    "memra_policy_from_env": (_P,),
    "memra_plan_new": (_P, _L, _P, _P, _P, _I, _P, _P),
    "memra_cache_new": (_P, _L, _P, _P, _P, _P, _I, _P),
    "memra_cache_free": (_P,),
    "memra_cache_bind": (_P, _P, _I),
    "memra_append_kv": (_P, _I, _L, _A, _A),
    "memra_dequant_kv": (_P, _I, _L, _L, _A, _A, _I),
    "memra_attend": (_P, _I, _L, _A, _A, _F, _I),
    "memra_conv_update": (_P, _I, _L, _A, _A, _A),
    "memra_gdn_prep": (_P, _I, _L, *(_A,) * 10, _F),
    "memra_gdn_scan": (_P, _I, _L, *(_A,) * 6, _F),
    "memra_recur_step": (_P, _I, _L, *(_A,) * 7, _F, _F),
    "memra_tap_write": (_P, _I, _L, _A),
    "memra_advance": (_P, _L),
    "memra_park_logits": (_P, _A),
    "memra_take_logits": (_P, _P),
    "memra_arm_taps": (_P, _P, _I, _L, _L),
    "memra_disarm_taps": (_P,),
    "memra_health_read": (_P, _P),
    "memra_clear_health": (_P,),
    "memra_digest": (_P, c_char_p),
    "memra_snapshot_new": (_P, _P),
    "memra_snapshot_into": (_P, _P),
    "memra_snapshot_free": (_P,),
    "memra_rollback": (_P, _P, _L),
    "memra_truncate": (_P, _L),
    "memra_reset": (_P,),
    "memra_sync": (_P,),
    "memra_settle": (_P,),
    "memra_round_begin": (_P, _L),
    "memra_round_commit": (_P, _L),
    "memra_round_commit_from_device": (_P, _A),
    "memra_round_reject": (_P,),
    "memra_capture_begin": (_P, c_uint32),
    "memra_capture_end": (_P, _P),
    "memra_capture_abandon": (_P,),
    "memra_graph_launch": (_P,),
    "memra_graph_close": (_P,),
    "memra_prepare_replay": (_P, _P, _L),
    "memra_replayed": (_P, _P, _L),
    "memra_attend_scratch": (_P, c_uint64, _P),
    "memra_recur_split": (_I, _I, _I, _I, _P, _P),
    **_launches(),
}
# Those that return something else than a status: what, and their parameters.
ANSWERS: dict[str, tuple[Any, ...]] = {
    "memra_abi_version": (c_int32,),
    "memra_layout_table": (POINTER(LayoutRowC), _P),
    "memra_last_error": (c_char_p,),
    "memra_last_driver_code": (c_int32,),
    "memra_device_handle": (c_uint64, _P),
    "memra_device_stream": (c_uint64, _P),
    "memra_device_arch": (c_int32, _P),
    "memra_options_default": (None, _P), "memra_policy_default": (None, _P),
    "memra_plane_table": (POINTER(PlaneC), _P),
    "memra_plan_free": (None, _P),
    "memra_attend_part_bytes": (c_uint64, _L, _L, _I, _I),
    "memra_attend_pieces": (c_int32, _I, _L),
}


def check_layout(rows: Iterable[tuple[str, str, int, int]], structs: Mapping[str, type[Structure]]) -> None:
    """Raises AbiError naming the first field that is not where `structs` have it. Row: struct, field, offset, size.

    The field "" is the struct as a whole.
    """
    theirs = {(name, field): (offset, size) for name, field, offset, size in rows}
    ours: dict[tuple[str, str], tuple[int, int]] = {}
    for name, struct in structs.items():
        ours[name, ""] = (0, ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            ours[name, field] = (place.offset, place.size)
    for name, field in {**theirs, **ours}:
        there, here = (side.get((name, field), "nothing of that name") for side in (theirs, ours))
        if there != here:
            what = f"{name}.{field}" if field else name
            raise AbiError(f"{what}: the library has {there}, this package has {here} (byte offset, bytes)")


def failure(status: int, text: str) -> MemraError:
    """The exception of a status that is not OK, and of its sentence."""
    told = FROM_DRIVER.fullmatch(text)
    if told is None or status not in (Status.OUT_OF_MEMORY, Status.NO_DRIVER, Status.DRIVER):
        return REFUSALS.get(status, MemraError)(text)
    code, name = int(told["code"]), told["name"]
    kind: type[DriverError] = DriverError
    if status == Status.OUT_OF_MEMORY:
        kind = DriverOutOfMemory
    elif status == Status.NO_DRIVER:
        kind = NoDriver if code == driver.STUB_LIBRARY or name == "no libcuda.so.1" else UnsupportedDriver
    elif code == driver.ILLEGAL_ADDRESS:
        kind = IllegalAddress
    return kind(told["call"], code, name, told["detail"])


def whole(n: Any) -> int:
    """A number that the library takes as an i64, which ctypes would cut off without a word."""
    number = operator.index(n)
    if ctypes.c_int64(number).value != number:
        raise ConfigError(f"{number} is no 64-bit number")
    return number


class Library:
    """The functions of one libmemra_driver.so. Raises AbiError unless it is of this package's version and layout."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._dll = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be loaded: {error}") from error
        self._functions = {name: self._typed(name, c_int32, kinds) for name, kinds in FUNCTIONS.items()}
        self._answers = {name: self._typed(name, kind, kinds) for name, (kind, *kinds) in ANSWERS.items()}
        version = self.ask("memra_abi_version")
        if version != layout.ABI_VERSION:
            raise AbiError(f"{self.path} has ABI version {version}, this package has {layout.ABI_VERSION}")
        check_layout(self.layout_rows(), {**layout.STRUCTS, **API_STRUCTS})

    def _typed(self, name: str, result: Any, kinds: Iterable[Any]) -> Any:
        try:
            function = getattr(self._dll, name)
        except AttributeError:
            raise AbiError(f"{self.path} has no function {name}") from None
        function.restype, function.argtypes = result, tuple(kinds)
        return function

    def call(self, name: str, *args: Any) -> None:
        """Calls a function that returns a status; raises what it stands for."""
        self.check(self._functions[name](*args))

    def check(self, status: int) -> None:
        """Raises what a status stands for, with the sentence of the call that has just returned it."""
        if status:
            raise failure(status, self._answers["memra_last_error"]().decode(errors="replace"))

    def ask(self, name: str, *args: Any) -> Any:
        """Calls a function that cannot fail, and returns its answer."""
        return self._answers[name](*args)

    def layout_rows(self) -> list[tuple[str, str, int, int]]:
        """Struct, field ("": the struct itself), offset and size of all that the library lays out."""
        n = c_int32()
        rows = self.ask("memra_layout_table", ctypes.byref(n))
        return [(row.type.decode(), row.field.decode(), row.offset, row.size) for row in rows[: n.value]]


@functools.cache
def _loaded(path: str) -> Library:
    return Library(path)


def load(path: str | os.PathLike[str] | None = None) -> Library:
    """The library at `path`, by default the package's own; loaded once. Raises ConfigError where there is none."""
    found = native.library() if path is None else Path(path)
    if found is None:
        raise ConfigError(f"{native.SONAME} has not been built: {native.HOW_TO_GET}")
    return _loaded(str(found.resolve()))
