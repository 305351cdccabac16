"""NVRTC and the cubin cache. No GPU and no driver; the sources are made here, so the law holds for any kernel."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memra_driver import get_cubins, nvrtc
from memra_driver.errors import CompileError, ConfigError

ARCH = "sm_90"
KERNEL = '#include "one.cuh"\nextern "C" __global__ void store(float* x) { x[0] = VALUE; }\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A source folder of one kernel, a header, and a header that the header includes."""
    root = tmp_path / "src"
    root.mkdir()
    (root / "store.cu").write_text(KERNEL)
    (root / "one.cuh").write_text('  #  include "two.h"\n#define VALUE (float)TWO\n')
    (root / "two.h").write_text("#pragma once\n#define TWO 2\n")
    return root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(path))
    return path


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names the sources that really went through the compiler."""
    done: list[str] = []
    original = nvrtc._compile

    def counted(source: str, *rest: object) -> bytes:
        done.append(source)
        return original(source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc, "_compile", counted)
    return done


def only_entry(cache: Path) -> Path:
    entries = list(cache.iterdir())
    assert len(entries) == 1
    return entries[0]


def test_a_kernel_compiles_to_an_elf_image_and_to_ptx(folder: Path, cache: Path) -> None:
    assert nvrtc.compile_cubin("store.cu", ARCH, folder)[:4] == b"\x7fELF"
    assert ".entry store(" in nvrtc.compile_ptx("store.cu", ARCH, folder)
    assert ".target sm_90" in nvrtc.compile_ptx("store.cu", ARCH, folder)


def test_includes_are_followed_to_the_end_and_only_our_own(folder: Path) -> None:
    (folder / "two.h").write_text('#include "one.cuh"\n#include "absent.h"\n#include <stdint.h>\n')
    assert list(nvrtc.include_files("store.cu", folder)) == ["one.cuh", "two.h"]


def test_the_second_compile_comes_from_the_cache_with_the_same_bytes(
    folder: Path, cache: Path, compiles: list[str]
) -> None:
    first = nvrtc.compile_cubin("store.cu", ARCH, folder)
    assert nvrtc.compile_cubin("store.cu", ARCH, folder) == first
    assert compiles == ["store.cu"]


def test_an_entry_is_the_cubin_and_its_digest_under_the_key(folder: Path, cache: Path) -> None:
    cubin = nvrtc.compile_cubin("store.cu", ARCH, folder)
    entry = only_entry(cache)
    assert entry.name == nvrtc.cache_key("store.cu", ARCH, folder) + ".cubin"
    assert entry.read_bytes() == cubin + hashlib.sha256(cubin).digest()


@pytest.mark.parametrize("name", ["store.cu", "one.cuh", "two.h"])
def test_a_changed_byte_in_any_file_of_ours_changes_the_key(name: str, folder: Path) -> None:
    before = nvrtc.cache_key("store.cu", ARCH, folder), nvrtc.sources_hash(folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    after = nvrtc.cache_key("store.cu", ARCH, folder), nvrtc.sources_hash(folder)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_file_that_no_source_includes_leaves_the_keys(folder: Path) -> None:
    before = nvrtc.cache_key("store.cu", ARCH, folder), nvrtc.sources_hash(folder)
    (folder / "other.cuh").write_text("// nothing\n")
    assert (nvrtc.cache_key("store.cu", ARCH, folder), nvrtc.sources_hash(folder)) == before
    (folder / "more.cu").write_text('#include "other.cuh"\n')
    assert nvrtc.cache_key("store.cu", ARCH, folder) == before[0]
    with_more = nvrtc.sources_hash(folder)
    (folder / "other.cuh").write_text("// something\n")
    assert len({before[1], with_more, nvrtc.sources_hash(folder)}) == 3


def test_a_renamed_include_changes_the_key(folder: Path) -> None:
    before = nvrtc.cache_key("store.cu", ARCH, folder)
    (folder / "two.h").rename(folder / "new.h")
    (folder / "one.cuh").write_text((folder / "one.cuh").read_text().replace("two.h", "new.h"))
    assert nvrtc.cache_key("store.cu", ARCH, folder) != before


def test_architecture_options_schema_and_compiler_are_in_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [nvrtc.cache_key("store.cu", arch, folder) for arch in ("sm_90", "sm_90a", "sm_80")]
    for name, value in (
        ("OPTIONS", ("--std=c++17", "--fmad=false")),
        ("OPTIONS", ("--fmad=false", "--std=c++17")),
        ("SCHEMA", nvrtc.SCHEMA + 1),
        ("version", lambda: (99, 1)),
        ("version", lambda: (9, 91)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, name, value)
            keys.append(nvrtc.cache_key("store.cu", ARCH, folder))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "broken",
    [b"", b"\x7fELF", b"\x7fELF" + bytes(100), b"not a cubin" * 50, None],
    ids=["empty", "magic-only", "wrong-digest", "garbage", "truncated"],
)
def test_a_broken_entry_is_compiled_again_and_healed(
    broken: bytes | None, folder: Path, cache: Path, compiles: list[str]
) -> None:
    cubin = nvrtc.compile_cubin("store.cu", ARCH, folder)
    entry = only_entry(cache)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-7] if broken is None else broken)
    assert nvrtc.compile_cubin("store.cu", ARCH, folder) == cubin
    assert len(compiles) == 2
    assert only_entry(cache).read_bytes() == whole


def test_a_cache_entry_that_is_a_folder_does_not_matter(folder: Path, cache: Path) -> None:
    cubin = nvrtc.compile_cubin("store.cu", ARCH, folder)
    entry = only_entry(cache)
    entry.unlink()
    (entry / "inside").mkdir(parents=True)
    assert nvrtc.compile_cubin("store.cu", ARCH, folder) == cubin
    assert [path.name for path in cache.iterdir()] == [entry.name]  # and no temporary file stays


def test_a_file_where_the_cache_folder_should_be_does_not_matter(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("mine")
    with caplog.at_level(logging.DEBUG, "memra_driver"):
        assert nvrtc.compile_cubin("store.cu", ARCH, folder)[:4] == b"\x7fELF"
    assert cache.read_text() == "mine"
    assert "cannot be kept" in caplog.text


def test_a_read_only_cache_does_not_matter(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> tuple[int, str]:
        raise PermissionError(13, "Permission denied")

    cache.mkdir()
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() == 0:  # root writes everywhere
        monkeypatch.setattr("tempfile.mkdtemp", refuse)
    first = nvrtc.compile_cubin("store.cu", ARCH, folder)
    assert nvrtc.compile_cubin("store.cu", ARCH, folder) == first
    assert len(compiles) == 2
    assert list(cache.iterdir()) == []
    cache.chmod(stat.S_IRWXU)


def test_a_full_disk_leaves_no_half_entry(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert nvrtc.compile_cubin("store.cu", ARCH, folder)[:4] == b"\x7fELF"
    assert list(cache.iterdir()) == []


def test_no_home_and_no_setting_means_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MEMRA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert nvrtc.cache_dir() is None
    assert nvrtc.compile_cubin("store.cu", ARCH, folder)[:4] == b"\x7fELF"


def test_our_variable_beats_xdg_and_xdg_beats_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("MEMRA_CACHE_DIR", "")
    assert nvrtc.cache_dir() == tmp_path / ".cache" / "memra_driver"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert nvrtc.cache_dir() == tmp_path / ".cache" / "memra_driver"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert nvrtc.cache_dir() == tmp_path / "xdg" / "memra_driver"
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path / "own"))
    assert nvrtc.cache_dir() == tmp_path / "own"


def test_writers_at_once_leave_one_whole_entry(folder: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        cubins = set(pool.map(lambda _: nvrtc.compile_cubin("store.cu", ARCH, folder), range(16)))
    assert len(cubins) == 1
    cubin = cubins.pop()
    assert only_entry(cache).read_bytes() == cubin + hashlib.sha256(cubin).digest()


def test_a_cubin_that_came_with_the_package_needs_neither_cache_nor_compiler(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> tuple[int, int]:
        raise AssertionError("NVRTC was asked for")

    monkeypatch.setattr(nvrtc, "prebuilt_dir", lambda: tmp_path / "cubins")
    cubin = nvrtc.compile_cubin("store.cu", ARCH, folder)
    path = nvrtc.prebuilt_path("store.cu", ARCH, folder)
    path.parent.mkdir(parents=True)
    path.write_bytes(cubin + b"prebuilt")
    monkeypatch.setattr(nvrtc, "version", absent)
    assert nvrtc.compile_cubin("store.cu", ARCH, folder) == cubin + b"prebuilt"
    (folder / "two.h").write_text("#define TWO 3\n")  # another text: the one that came along is not for it
    with pytest.raises(AssertionError, match="NVRTC was asked for"):
        nvrtc.compile_cubin("store.cu", ARCH, folder)


def test_a_compile_error_carries_the_log_and_the_options(folder: Path, cache: Path) -> None:
    (folder / "two.h").write_text("#define TWO undeclared_name\n")
    with pytest.raises(CompileError, match=r"store\.cu for sm_90") as caught:
        nvrtc.compile_cubin("store.cu", ARCH, folder)
    assert 'identifier "undeclared_name" is undefined' in caught.value.log
    assert caught.value.log in str(caught.value)
    assert "--gpu-architecture=sm_90" in caught.value.options
    assert not cache.exists()


def test_a_missing_source_is_a_compile_error_that_names_the_file(folder: Path, cache: Path) -> None:
    with pytest.raises(CompileError, match=r"absent\.cu"):
        nvrtc.compile_cubin("absent.cu", ARCH, folder)


def test_a_missing_include_is_told_by_the_compiler(folder: Path, cache: Path) -> None:
    (folder / "two.h").unlink()
    with pytest.raises(CompileError, match=r"two\.h"):
        nvrtc.compile_cubin("store.cu", ARCH, folder)


@pytest.mark.parametrize("arch", ["90", "compute_90", "sm_90 --fmad=false", "../sm_90", "SM_90", "sm_90b", ""])
def test_an_architecture_is_spelled_one_way(arch: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="sm_90"):
        nvrtc.compile_cubin("store.cu", arch, folder)


def test_an_architecture_that_nvrtc_does_not_know_is_a_compile_error(folder: Path, cache: Path) -> None:
    with pytest.raises(CompileError, match="gpu-architecture"):
        nvrtc.compile_cubin("store.cu", "sm_990", folder)


@pytest.mark.parametrize("arch", ["sm_11", "sm_75", "sm_79"])
def test_an_architecture_older_than_the_kernels_need_is_refused_before_the_compiler(arch: str) -> None:
    for call in (lambda: get_cubins(arch), lambda: nvrtc.compile_cubin("attend.cu", arch)):
        with pytest.raises(ConfigError, match=rf"^architecture {arch}; the kernels need sm_80 or newer"):
            call()


def test_compile_all_compiles_what_is_not_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.compile_all(["sm_80", "sm_90"], folder=folder)
    assert len(first) == 2 * len(nvrtc.sources(folder))
    lost = next(path for path in cache.glob("*.cubin"))
    lost.unlink()
    compiled, found = [], nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *args: compiled.append(args) or found(*args))
    assert nvrtc.compile_all(["sm_80", "sm_90"], folder=folder) == first
    assert len(compiled) == 1
    assert lost.is_file()
    monkeypatch.setattr(nvrtc, "ThreadPoolExecutor", None)  # nothing is left for threads to do
    assert nvrtc.compile_all(["sm_80", "sm_90"], folder=folder) == first
    assert len(compiled) == 1


def test_compile_all_covers_every_pair(folder: Path, cache: Path) -> None:
    (folder / "more.cu").write_text('extern "C" __global__ void more(int* x) { x[0] = 1; }\n')
    cubins = nvrtc.compile_all(["sm_80", "sm_90"], jobs=2, folder=folder)
    assert sorted(cubins) == [(s, a) for s in ("more.cu", "store.cu") for a in ("sm_80", "sm_90")]
    assert len({nvrtc.compile_cubin(s, a, folder) == cubin for (s, a), cubin in cubins.items()}) == 1
    assert len(list(cache.iterdir())) == 4


def test_no_path_of_this_machine_gets_into_a_cubin(folder: Path, cache: Path) -> None:
    assert str(folder).encode() not in nvrtc.compile_cubin("store.cu", ARCH, folder)


def test_the_library_that_compiles_can_be_named() -> None:
    path = nvrtc.library_path()
    assert path is not None
    assert f"libnvrtc.so.{nvrtc.version()[0]}" in path
