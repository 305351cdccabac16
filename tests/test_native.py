"""The C library: when it is built, what it exports and needs, and that a C program links with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from memra_driver import native
from memra_driver.errors import CompileError

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
COMPILERS = [pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"there is no {name}"))
             for name in ("gcc", "clang")]  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library of two small texts, in place of ours; the compiler is the default one."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "memra_answer.c").write_text(
        '#include "memra_answer.h"\n'
        '__attribute__((visibility("default"))) int memra_answer(void) { return MEMRA_ANSWER; }\n'
        "const char *memra_where(void) { return __FILE__; }\n"
    )
    (folder / "memra_answer.h").write_text("#define MEMRA_ANSWER 42\n")
    monkeypatch.setattr(native, "source_dir", lambda: folder)
    monkeypatch.delenv("CC", raising=False)
    return folder


def inode(path: Path) -> int:
    return path.stat().st_ino


@needs_cc
def test_it_is_built_anew_for_another_text_flag_or_compiler_and_for_nothing_else(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = tmp_path / "lib"
    path = native.build(lib)
    built = [inode(path)]

    def rebuilt(*flags: str) -> bool:
        before = inode(path)
        keep = open(path, "rb")  # so that the number is not given to a new file  # noqa: SIM115
        assert native.build(lib, flags) == path
        keep.close()
        built.append(inode(path))
        return built[-1] != before

    assert not rebuilt()
    (texts / "notes.txt").write_text("not read")
    assert not rebuilt()
    for name, text in (("memra_answer.h", "#define MEMRA_ANSWER 43\n"), ("memra_more.c", "int memra_more;\n")):
        (texts / name).write_text(text)
        assert rebuilt()
        assert not rebuilt()
    assert rebuilt("-O1")
    assert not rebuilt("-O1")
    wrapper = tmp_path / "other-cc"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 99 && exit\nexec {native.compiler()[0]} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    assert rebuilt("-O1")
    assert not rebuilt("-O1")
    wrapper.write_text(wrapper.read_text().replace("99", "100"))
    assert rebuilt("-O1")


@needs_cc
def test_what_the_compiler_or_linker_refuses_leaves_the_former_library_and_nothing_else(
    texts: Path, tmp_path: Path
) -> None:
    path = native.build(tmp_path / "lib")
    before = path.read_bytes()
    names = sorted(os.listdir(path.parent))
    assert names == ["libmemra_driver.so", "libmemra_driver.so.1"]
    for text, told in (("int memra_bad(void) { return undeclared; }\n", "undeclared"),
                       ("int absent(void);\nint memra_bad(void) { return absent(); }\n", "absent")):  # fmt: skip
        (texts / "memra_bad.c").write_text(text)
        with pytest.raises(CompileError, match="refused the C library") as caught:
            native.build(path.parent)
        assert told in caught.value.log
        assert path.read_bytes() == before
        assert sorted(os.listdir(path.parent)) == names


@needs_cc
def test_no_path_of_this_machine_gets_into_it(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.build(tmp_path / "one").read_bytes()
    moved = tmp_path / "elsewhere"
    shutil.copytree(texts, moved)
    monkeypatch.setattr(native, "source_dir", lambda: moved)
    assert native.build(tmp_path / "two").read_bytes() == first


@needs_cc
def test_a_folder_that_cannot_be_written_is_named(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").write_text("not a folder")
    with pytest.raises(CompileError, match=re.escape(str(tmp_path / "lib"))):
        native.build(tmp_path / "lib")


def test_without_a_compiler_texts_or_linux_it_says_which(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="no C compiler"):
        native.build(tmp_path / "lib")
    monkeypatch.setenv("CC", "no-such-cc -m64")
    with pytest.raises(CompileError, match="CC names no-such-cc"):
        native.build(tmp_path / "lib")
    monkeypatch.setattr(native, "source_dir", lambda: tmp_path)
    assert native.build_if_possible(said.append) is None
    monkeypatch.setattr(native.platform, "system", lambda: "Darwin")
    assert native.build_if_possible(said.append) is None
    assert "checkout" in said[0]
    assert "for Linux, not Darwin" in said[1]
    assert not (tmp_path / "lib").exists()


@needs_cc
def test_cc_may_carry_arguments(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (texts / "memra_answer.h").write_text("")
    monkeypatch.setenv("CC", "cc -DMEMRA_ANSWER=7")
    assert answer(native.build(tmp_path / "lib")) == 7


def answer(library: Path) -> int:
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).memra_answer())"
    return int(subprocess.run([sys.executable, "-c", code, library], capture_output=True, check=True).stdout)


@needs_cc
def test_a_program_links_by_name_and_runs_with_the_one_file_that_can_be_loaded(texts: Path, tmp_path: Path) -> None:
    library = native.build(tmp_path / "a b" / "lib")
    program = tmp_path / "program"
    (tmp_path / "main.c").write_text("int memra_answer(void);\nint main(void) { return memra_answer(); }\n")
    link = [f"-L{library.parent}", "-lmemra_driver", f"-Wl,-rpath,{library.parent}"]
    subprocess.run(["cc", tmp_path / "main.c", "-o", program, *link], check=True)
    assert subprocess.run([program]).returncode == 42
    for_linkers = library.parent / native.LINK_NAME
    assert not for_linkers.read_bytes().startswith(b"\x7fELF")  # a second copy would be a second registry of devices
    for_linkers.unlink()
    assert subprocess.run([program]).returncode == 42
    library.unlink()
    assert subprocess.run([program], capture_output=True).returncode == 127


# Ours


def built(compiler: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CC", compiler)
    return native.build(standin.cache_dir() / f"native-{compiler}", ["-Werror"])


def listed(pattern: str, *command: str | Path) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(re.findall(pattern, done.stdout, re.MULTILINE))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_it_compiles_without_a_warning_and_exports_what_the_header_declares(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = (native.source_dir() / "memra_api.h").read_text()
    declared = set(re.findall(r"^MEMRA_API [^;(]*?(memra_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 40
    assert listed(r"^\w* *[A-Z] (\w+)$", "nm", "-D", "--defined-only", built(compiler, monkeypatch)) == declared


@pytest.mark.parametrize("compiler", COMPILERS)
def test_it_needs_the_c_library_of_the_system_and_no_driver(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built(compiler, monkeypatch)
    needed = listed(r"NEEDED.*\[(.*)\]", "readelf", "-d", path)
    assert {"libc.so.6"} <= needed
    assert {name for name in needed if not re.match(r"(libc|libdl|libpthread|ld-linux[\w-]*)\.so", name)} == set()
    assert listed(r"SONAME.*\[(.*)\]", "readelf", "-d", path) == {"libmemra_driver.so.1"}


def test_users_get_kernels_and_headers_that_need_no_others() -> None:
    names = {path.name for path in native.shared_files()}
    assert {"memra_driver.h", "memra_api.h", "memra_formats.h", "device.cuh", "append_kv.cu"} <= names
    assert not {name for name in names if name.endswith(".c")} | {"memra_internal.h"} & names
    for path in native.shared_files():
        included = set(re.findall(r'^ *# *include "([^"]+)"', path.read_text(), re.MULTILINE))
        assert included - {"cuda_cpu.h"} <= names  # which the CPU build of the tests has
