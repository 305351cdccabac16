"""The package as a whole: names that load at first use, at no cost before it."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import memra_driver
from memra_driver import __main__ as command
from memra_driver import native, nvrtc

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("memra_driver.h", "memra_formats.h")


def python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", memra_driver.__all__)
def test_every_public_name_resolves_and_is_the_same_object_twice(name: str) -> None:
    assert getattr(memra_driver, name) is getattr(memra_driver, name)


def test_all_and_dir_list_what_is_declared_for_type_checkers() -> None:
    tree = ast.parse(Path(memra_driver.__file__).read_text())
    (declared,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = {alias.name for node in declared.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(memra_driver._MODULE_OF)
    assert names < set(memra_driver.__all__) <= set(dir(memra_driver))
    errors = {name for name, value in vars(memra_driver.errors).items() if isinstance(value, type)}
    assert errors < set(memra_driver.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        memra_driver.no_such_name  # noqa: B018


def test_importing_the_package_imports_neither_numpy_nor_the_bindings_nor_its_own_modules() -> None:
    loaded = set(json.loads(python("import json, sys, memra_driver; print(json.dumps(sorted(sys.modules)))")))
    assert {name for name in loaded if name.startswith("memra_driver.")} == {"memra_driver.errors"}
    assert not {"numpy", "cuda", "cuda.bindings"} & loaded


def test_the_names_that_need_no_device_import_without_the_bindings() -> None:
    code = """
import sys
sys.modules["cuda"] = None
import memra_driver
for name in memra_driver.__all__:
    getattr(memra_driver, name)
"""
    python(code)


def test_importing_costs_at_most_15_ms_more_than_numpy() -> None:
    code = """
import sys, time
import numpy
start = time.perf_counter()
import memra_driver
print(time.perf_counter() - start)
"""
    assert min(float(python(code)) for _ in range(5)) < 0.015


def test_include_is_the_folder_of_the_headers() -> None:
    folder = Path(memra_driver.get_include())
    assert [name for name in HEADERS if not (folder / name).is_file()] == []


def test_a_copy_without_headers_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "source_dir", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"memra_driver\.h is missing"):
        memra_driver.get_include()


# Cubins for programs in C


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names what was "compiled" by a stand-in for NVRTC; package and cache folder are empty."""
    done: list[str] = []

    def compile_cubin(source: str, arch: str, folder: Path | None = None) -> bytes:
        done.append(source)
        return b"\x7fELF" + f"{source} {arch}".encode()

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 5))
    monkeypatch.setattr(nvrtc, "prebuilt_dir", lambda: tmp_path / "cubins")
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path / "cache"))
    return done


def prebuild(arch: str, sources: list[str]) -> list[Path]:
    paths = [nvrtc.prebuilt_path(source, arch) for source in sources]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF")
    return paths


def test_cubins_that_came_with_the_package_need_no_compiler(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = prebuild("sm_90", nvrtc.sources())
    monkeypatch.delattr(nvrtc, "version")
    assert memra_driver.get_cubins("sm_90") == [str(path) for path in paths]
    assert compiled == []


@pytest.mark.parametrize("spoilt", ["missing", "of another text", "damaged", "none"])
def test_cubins_are_compiled_where_the_package_has_not_all_of_them(
    compiled: list[str], tmp_path: Path, spoilt: str
) -> None:
    if spoilt != "none":
        paths = prebuild("sm_90", nvrtc.sources())
        if spoilt == "missing":
            paths[0].unlink()
        elif spoilt == "damaged":
            paths[0].write_bytes(b"cubin")
        else:
            (paths[0].parent / "append_kv.0123456789abcdef.cubin").write_bytes(b"\x7fELF")
    found = [Path(path) for path in memra_driver.get_cubins("sm_90")]
    assert sorted(compiled) == nvrtc.sources()
    # What a driver is given is the cubin to the last byte, from a folder that can be loaded as a whole.
    assert [path.read_bytes() for path in found] == [b"\x7fELF" + f"{s} sm_90".encode() for s in nvrtc.sources()]
    assert sorted(found[0].parent.iterdir()) == found
    assert found[0].parent.parent == tmp_path / "cache"


def test_a_folder_of_cubins_is_kept_healed_and_of_one_architecture_text_and_compiler(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [Path(path) for path in memra_driver.get_cubins("sm_90")]
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in first}
    assert memra_driver.get_cubins("sm_90") == [str(path) for path in first]
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in first} == before
    first[0].write_bytes(b"\x7fELF")
    first[1].unlink()
    (first[0].parent / "stray.cubin").write_bytes(b"\x7fELF")
    assert memra_driver.get_cubins("sm_90") == [str(path) for path in first]
    assert {path: path.read_bytes() for path in first[0].parent.iterdir()} == {
        path: cubin for path, (cubin, _) in before.items()
    }
    folders = {first[0].parent, Path(memra_driver.get_cubins("sm_80")[0]).parent}
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 6))
    folders.add(Path(memra_driver.get_cubins("sm_90")[0]).parent)
    assert len(folders) == 3


def test_cubins_that_cannot_be_kept_are_an_error_that_names_the_setting(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(memra_driver.ConfigError, match="MEMRA_CACHE_DIR"):
        memra_driver.get_cubins("sm_90")
    monkeypatch.setattr(nvrtc, "cache_dir", lambda: None)
    with pytest.raises(memra_driver.ConfigError, match="MEMRA_CACHE_DIR"):
        memra_driver.get_cubins("sm_90")
    with pytest.raises(memra_driver.ConfigError, match="sm_90a"):
        memra_driver.get_cubins("../sm_90")


# The C library


def test_the_library_is_a_path_where_it_was_built_and_none_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "library_dir", lambda: tmp_path)
    assert memra_driver.get_library() is None
    (tmp_path / "libmemra_driver.so.1").write_bytes(b"")
    assert memra_driver.get_library() == str(tmp_path / "libmemra_driver.so.1")


def flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["memra-driver", *argv])
    status = command.main()
    told = capsys.readouterr()
    return status, told.out, told.err


def test_the_flags_of_a_c_build_are_one_line_for_a_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "library_dir", lambda: tmp_path / "a b")
    include = f"-I{memra_driver.get_include()}"
    assert flags(monkeypatch, capsys, "--cflags") == (0, f"{include}\n", "")
    status, out, err = flags(monkeypatch, capsys, "--cflags", "--libs")
    assert (status, out) == (2, "")
    assert "build.py native" in err
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "libmemra_driver.so.1").write_bytes(b"")
    status, out, _ = flags(monkeypatch, capsys, "--cflags", "--libs")
    assert (status, out.count("\n")) == (0, 1)
    folder = tmp_path / "a b"
    assert shlex.split(out) == [include, f"-L{folder}", "-lmemra_driver", f"-Wl,-rpath,{folder}"]
    assert shlex.split(flags(monkeypatch, capsys, "--libs")[1]) == shlex.split(out)[1:]


def test_the_folder_of_the_cubins_is_printed_and_an_error_is_one_line(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = os.path.dirname(memra_driver.get_cubins("sm_90")[0])
    assert flags(monkeypatch, capsys, "--cubins", "sm_90") == (0, f"{folder}\n", "")
    assert flags(monkeypatch, capsys, "--cubins=sm_90") == (0, f"{folder}\n", "")
    status, out, err = flags(monkeypatch, capsys, "--cubins", "90")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "sm_90a" in err


def test_what_is_compiled_for_a_c_build_is_told_on_stderr_a_line_a_source(tmp_path: Path) -> None:
    (tmp_path / "store.cu").write_text('extern "C" __global__ void store(int* x) { x[0] = 1; }\n')
    program = (
        "import pathlib, sys\n"
        "from memra_driver import __main__, nvrtc\n"
        "folder = pathlib.Path(sys.argv.pop(1))\n"
        "nvrtc.source_dir = lambda: folder\n"
        "sys.exit(__main__.main())\n"
    )
    command_line = [sys.executable, "-c", program, str(tmp_path), "--cubins", "sm_90"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEMRA_CACHE_DIR": str(tmp_path / "cache")}
    first, again = (
        subprocess.run(command_line, capture_output=True, text=True, check=True, env=environment) for _ in range(2)
    )
    assert re.fullmatch(r"memra-driver: compiled store\.cu for sm_90 in \d+\.\d s\n", first.stderr)
    assert (again.stdout, again.stderr) == (first.stdout, "")
