"""The C library as Python loads it: layouts, types of functions, statuses, and machines where it finds no driver."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import c_library_missing
from test_no_driver import child

import memra_driver
from memra_driver import capi, errors, layout, native
from memra_driver.capi.layout import API_STRUCTS, DeviceOptionsC
from memra_driver.capi.library import ANSWERS, FUNCTIONS, REFUSALS, Status, check_layout, failure
from memra_driver.errors import (
    AbiError,
    ConfigError,
    DriverError,
    DriverOutOfMemory,
    IllegalAddress,
    MemraError,
    NoDriver,
    OutOfMemory,
    UnsupportedDriver,
)

HEADERS = Path(memra_driver.get_include())
ALL_STRUCTS = {**layout.STRUCTS, **API_STRUCTS}
Row = tuple[str, str, int, int]


@pytest.fixture(scope="module")
def library() -> capi.Library:
    reason = c_library_missing()
    if reason:
        pytest.skip(reason)
    return capi.load()


@pytest.fixture(scope="module")
def rows(library: capi.Library) -> list[Row]:
    return library.layout_rows()


def header(name: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", (HEADERS / name).read_text(), flags=re.DOTALL)


# Layout


def test_the_layout_table_has_every_field_of_every_struct_of_both_headers(rows: list[Row]) -> None:
    declared = []
    for name in ("memra_driver.h", "memra_api.h"):
        for struct, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", header(name), re.DOTALL):
            fields = [line.split()[-1].lstrip("*") for line in body.split(";") if line.strip()]
            declared += [(struct, re.sub(r"\[.*", "", field)) for field in ("", *fields)]
    assert [(struct, field) for struct, field, _, _ in rows] == declared
    assert {struct for struct, _ in declared} == set(ALL_STRUCTS)


def test_the_librarys_structs_are_those_of_this_package(rows: list[Row]) -> None:
    check_layout(rows, ALL_STRUCTS)


@pytest.mark.parametrize("struct", ALL_STRUCTS)
def test_a_field_that_lies_elsewhere_is_named(rows: list[Row], struct: str) -> None:
    fields = [i for i, row in enumerate(rows) if row[0] == struct]
    for i in fields:
        name, field, offset, size = rows[i]
        told = rf"^{name}\.{field}: " if field else rf"^{name}: "
        for wrong in ((name, field, offset + 4, size), (name, field, offset, size + 1)):
            with pytest.raises(AbiError, match=told):
                check_layout([*rows[:i], wrong, *rows[i + 1 :]], ALL_STRUCTS)


def test_fields_that_only_one_side_has_are_named(rows: list[Row]) -> None:
    at = next(i for i, row in enumerate(rows) if row[:2] == ("memra_cache", "step_rows"))
    with pytest.raises(AbiError, match=r"^memra_cache\.step_rows: the library has nothing of that name"):
        check_layout(rows[:at] + rows[at + 1 :], ALL_STRUCTS)
    with pytest.raises(AbiError, match=r"^memra_cache\.colour: .* this package has nothing of that name"):
        check_layout([*rows, ("memra_cache", "colour", 304, 8)], ALL_STRUCTS)


def test_two_structs_of_one_size_with_fields_exchanged_are_told_apart(rows: list[Row]) -> None:
    swapped = {"dst": "src", "src": "dst"}
    moved = [(s, swapped.get(f, f) if s == "memra_copy" else f, o, n) for s, f, o, n in rows]
    with pytest.raises(AbiError, match=r"^memra_copy\.(dst|src): "):
        check_layout(moved, ALL_STRUCTS)


def test_a_library_of_another_layout_is_not_loaded(library: capi.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moved(ctypes.Structure):
        _fields_ = (("dst", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("src", ctypes.c_uint64))

    monkeypatch.setitem(layout.STRUCTS, "memra_copy", Moved)
    with pytest.raises(AbiError, match=r"memra_copy\.(src|bytes): the library has \(\d+, 8\), this package has"):
        capi.Library(library.path)


def test_a_library_of_another_version_is_not_loaded(library: capi.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ABI_VERSION", layout.ABI_VERSION + 1)
    with pytest.raises(AbiError, match=rf"ABI version {layout.ABI_VERSION - 1}, this package has"):
        capi.Library(library.path)


# Functions


def declared_functions() -> Iterator[tuple[str, str, list[str]]]:
    """Result, name and parameter types of every function of memra_api.h."""
    text = " ".join(header("memra_api.h").split())
    for result, name, params in re.findall(r"MEMRA_API ([\w *]*?)(memra_\w+)\(([^)]*)\);", text):
        kinds = [] if params == "void" else [kind.strip() for kind in params.split(",")]
        yield result.strip(), name, kinds


def kind_of(declared: str) -> str:
    """"pointer", or the C type of a parameter or result."""
    if "*" in declared or "[" in declared:
        return "pointer"
    return next(word for word in declared.split() if word != "const")


def ctypes_kind(kind: Any) -> str:
    if kind is None:
        return "void"
    names = {ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t", ctypes.c_uint32: "uint32_t",
             ctypes.c_uint64: "uint64_t", ctypes.c_float: "float"}  # fmt: skip
    return names.get(kind, "pointer")


def test_every_function_of_the_header_is_called_with_the_types_that_it_has() -> None:
    found, expected = {}, {}
    for result, name, params in declared_functions():
        expected[name] = [kind_of(result), *map(kind_of, params)]
    for name, kinds in FUNCTIONS.items():
        found[name] = ["int", *map(ctypes_kind, kinds)]
    for name, kinds in ANSWERS.items():
        found[name] = [*map(ctypes_kind, kinds)]
    assert found == expected


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_a_library_that_lacks_a_function_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "libpart.so"
    text = "int memra_device_open(void); int memra_device_open(void) { return 0; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=text, text=True, check=True)
    with pytest.raises(AbiError, match=r"libpart\.so has no function memra_"):
        capi.Library(path)


def test_what_is_no_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.so").write_text("no ELF at all")
    with pytest.raises(ConfigError, match=r"text\.so cannot be loaded"):
        capi.load(tmp_path / "text.so")
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(ConfigError, match=r"build\.py native"):
        capi.load()


def test_a_library_is_loaded_once(library: capi.Library) -> None:
    assert capi.load() is capi.load(library.path) is library


# Statuses


def test_the_statuses_are_those_of_the_header() -> None:
    found = re.search(r"enum memra_status \{(.*?)\}", header("memra_api.h"), re.DOTALL)
    assert found
    numbers = {name: int(value) for name, value in re.findall(r"MEMRA_(?:ERR_)?(\w+) = (\d+)", found[1])}
    assert numbers == {status.name: int(status) for status in Status}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (1, errors.ConfigError), (2, errors.ArrayError), (3, errors.DeviceMismatch), (4, errors.CapacityError),
        (5, errors.StateError), (6, errors.SnapshotError), (7, errors.UnsupportedError), (8, errors.HealthError),
        (9, errors.OutOfMemory), (10, errors.AbiError), (12, MemraError), (99, MemraError),
    ],
)  # fmt: skip
def test_every_status_is_an_exception_with_the_librarys_sentence(status: int, kind: type[MemraError]) -> None:
    error = failure(status, "append_kv: too much")
    assert str(error) == "append_kv: too much"
    assert type(error) is kind


@pytest.mark.parametrize(
    ("status", "code", "name", "kind"),
    [
        (Status.DRIVER, 719, "CUDA_ERROR_LAUNCH_FAILED", DriverError),
        (Status.DRIVER, 700, "CUDA_ERROR_ILLEGAL_ADDRESS", IllegalAddress),
        (Status.OUT_OF_MEMORY, 2, "CUDA_ERROR_OUT_OF_MEMORY", DriverOutOfMemory),
        (Status.NO_DRIVER, -1, "no libcuda.so.1", NoDriver),
        (Status.NO_DRIVER, 34, "CUDA_ERROR_STUB_LIBRARY", NoDriver),
        (Status.NO_DRIVER, -1, "no such entry point", UnsupportedDriver),
        (Status.NO_DRIVER, 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", UnsupportedDriver),
    ],
)  # fmt: skip
def test_a_failure_of_the_driver_is_the_exception_that_cuda_python_raises(
    status: Status, code: int, name: str, kind: type[DriverError]
) -> None:
    call = "cuLaunchKernelEx(append_kv, grid (1, 1, 1), block (256, 1, 1))"
    text = f"{call}: {name} ({code}): told: by the driver; do this"
    error = failure(status, text)
    assert type(error) is kind
    assert isinstance(error, DriverError)
    assert (error.call, error.name, error.code, error.detail) == (call, name, code, "told: by the driver; do this")
    assert str(error) == text


def test_memory_that_no_driver_was_asked_for_is_out_of_memory_alone() -> None:
    assert type(failure(Status.OUT_OF_MEMORY, "the cache needs 5 bytes on cuda:0, which has 4 free")) is OutOfMemory


def test_each_thread_has_its_own_sentence(library: capi.Library) -> None:
    def fail(flags: int) -> None:
        options = DeviceOptionsC(struct_size=ctypes.sizeof(DeviceOptionsC), flags=flags)
        with pytest.raises(ConfigError):
            library.call("memra_device_open", ctypes.byref(options), ctypes.byref(ctypes.c_void_p()))

    def told() -> str:
        return str(library.ask("memra_last_error").decode())

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        assert (one.submit(told).result(), other.submit(told).result()) == ("", "")
        one.submit(fail, 0x100).result()
        other.submit(fail, 0x200).result()
        assert "0x100" in one.submit(told).result()
        assert "0x200" in other.submit(told).result()


# No driver

OPEN = """
    from memra_driver import capi
    from memra_driver.errors import MemraError
    try:
        capi.device.LibraryDevice(capi.load(), 0, stream=None)
    except MemraError as error:
        print(f"{type(error).__name__}: {error}")
"""


def real_driver() -> bool:
    """Whether this machine has a libcuda that a child process would find."""
    return child("import ctypes\ntry: print(ctypes.CDLL('libcuda.so.1'))\nexcept OSError: print('none')\n") != "none\n"


@pytest.mark.standin
def test_without_libcuda_it_asks_for_the_driver(library: capi.Library) -> None:
    if real_driver():
        pytest.skip("this machine has a driver")
    fork = "import os, sys\nsys.stdout.flush()\nos.fork() and os.wait()\n"
    lines = child(OPEN, fork, OPEN).splitlines()
    assert len(lines) == 3  # a process that found none is no user of the GPU: nor is its child
    for line in lines:
        assert re.match(r"NoDriver: dlopen: no libcuda\.so\.1 \(-1\): .*; install an NVIDIA display driver", line), line


def old_driver(folder: Path, lacks: str) -> dict[str, str]:
    """The environment of a process that finds a driver without one of the functions; "": without any way to ask."""
    text = """
        #include <string.h>
        static int nothing(void) { return 0; }
        static int nine(int *value) { return *value = 9, 0; }  /* of sm_99 */
        int ASK(const char *name, void **function, int version, unsigned long long flags, int *found);
        int ASK(const char *name, void **function, int version, unsigned long long flags, int *found) {
            *function = strcmp(name, LACKS) ? (void *)nothing : 0;
            if (!strcmp(name, "cuDeviceGetAttribute")) *function = (void *)nine;
            return *function ? 0 : 500;
        }
    """
    ask = "cuGetProcAddress_v2" if lacks else "something_else"
    command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-x", "c", "-",
               f"-DASK={ask}", f'-DLACKS="{lacks}"', "-o", str(folder / "libcuda.so.1")]  # fmt: skip
    subprocess.run(command, input=text, text=True, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ("cuLibraryLoadData", "cuLibraryLoadData: no such entry point (-1): this driver lacks the call of CUDA 12.0"),
        ("cuMemAllocAsync", "cuMemAllocAsync: no such entry point (-1): this driver lacks the call of CUDA 11.2"),
        ("", "cuGetProcAddress: no such entry point (-1): this driver is older than CUDA 11.3"),
    ],
)
def test_a_driver_that_lacks_a_call_is_named_as_too_old(
    library: capi.Library, tmp_path: Path, lacks: str, told: str
) -> None:
    out = child(OPEN, **old_driver(tmp_path, lacks))
    assert out.startswith(f"UnsupportedDriver: {told}"), out
    assert "install a newer driver" in out


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize("lacks", ["cuGetErrorName", "cuGetErrorString", "cuKernelGetParamInfo"])
def test_what_is_only_told_or_checked_may_be_lacking(library: capi.Library, tmp_path: Path, lacks: str) -> None:
    """The functions of this driver return 0 and do nothing but say that a GPU is young, so that it can be opened."""
    assert child(OPEN, **old_driver(tmp_path, lacks)) == ""


def test_the_modules_of_the_library_load_nothing_of_nvidias() -> None:
    out = child(
        "import sys\nfrom memra_driver import capi\n"
        "print([name for name in sys.modules if name.startswith('cuda.bindings')])\n"
        "print('libcuda' in open('/proc/self/maps').read())\n"
    )
    assert out == "[]\nFalse\n"


def test_every_refusal_of_this_package_has_a_status_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MemraError)]
    refusals = {kind for kind in kinds if not issubclass(kind, DriverError)}
    assert refusals - set(REFUSALS.values()) == {MemraError, errors.CompileError, errors.ExportError, errors.KitError}
    assert len(set(REFUSALS.values())) == len(REFUSALS)
