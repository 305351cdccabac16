"""The wheel and the editable install: what is in them, and that an empty environment without a compiler is enough.

Built in a copy of the checkout, by pip and hatchling as they stand here: neither needs a network.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from memra_driver import native, nvrtc

ROOT = Path(__file__).resolve().parent.parent
TOP = (".gitignore", "LICENSE", "README.md", "build.py", "pyproject.toml")
BUILT = {"__pycache__", "lib", "cubins"}
# A Python that sees nothing but what is put on its path.
BARE = [sys.executable, "-I", "-S", "-c"]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
ARCH = "sm_120a"  # of the cubins that the wheel brings, which are none that a driver would take


def without_compiler(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("CC", "PYTHONPATH")}
    return {**kept, "PATH": "/nowhere", **more}


def checkout(folder: Path) -> Path:
    """A copy of what pip needs of the checkout, without what was built in it."""
    for name in TOP:
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("memra_driver", "cuda_src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*BUILT))
    return folder


def pip(folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
    pytest.importorskip("hatchling")
    pytest.importorskip("pip")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args, "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--no-index", "--quiet"], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def wheel_of(folder: Path, env: dict[str, str] | None = None) -> Path:
    pip(folder, "wheel", "--wheel-dir", str(folder / "dist"), ".", env=env)
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with a compiler, after `build.py kernels`."""
    folder = checkout(tmp_path_factory.mktemp("with") / "repo")
    for source in nvrtc.sources():
        path = folder / "memra_driver" / "cubins" / ARCH / nvrtc.prebuilt_path(source, ARCH).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF" + source.encode())
    return wheel_of(folder)


@pytest.fixture(scope="module")
def poor_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a compiler, where a library that nobody can vouch for was left."""
    folder = checkout(tmp_path_factory.mktemp("without") / "repo")
    (folder / "memra_driver" / "lib").mkdir()
    (folder / "memra_driver" / "lib" / native.SONAME).write_bytes(b"of other texts")
    return wheel_of(folder, without_compiler())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment into which the wheel was installed, and nothing else."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip(folder, "--python", str(python), "install", str(wheel), env=without_compiler())
    return python


def ask(python: list[str], code: str, *args: str, env: dict[str, str] | None = None) -> list[str]:
    """The lines that a Python prints which has no compiler on its path and stands in no checkout."""
    done = subprocess.run(
        [*python, code, *args], env=env or without_compiler(), cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def names_of(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


LIBRARY = {"memra_driver/lib/libmemra_driver.so", "memra_driver/lib/libmemra_driver.so.1"}


@needs_cc
def test_the_wheel_with_the_library_serves_every_python_on_one_platform(wheel: Path) -> None:
    assert re.fullmatch(r"memra_driver-0\.1\.0-py3-none-linux_\w+\.whl", wheel.name)
    assert names_of(wheel) >= LIBRARY
    about = zipfile.ZipFile(wheel).read("memra_driver-0.1.0.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in about


def test_the_wheel_without_a_compiler_serves_every_platform_and_lacks_the_library_only(
    wheel: Path, poor_wheel: Path
) -> None:
    assert poor_wheel.name == "memra_driver-0.1.0-py3-none-any.whl"
    cubins = {name for name in names_of(wheel) if name.endswith(".cubin")}
    assert names_of(poor_wheel) == names_of(wheel) - LIBRARY - cubins


def test_the_wheel_has_the_package_the_kernels_the_headers_and_the_licence_and_no_more(wheel: Path) -> None:
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "memra_driver").rglob("*")
        if path.is_file() and not BUILT & set(path.relative_to(ROOT).parts)
    }
    shared = {f"memra_driver/cuda_src/{path.name}" for path in native.shared_files()}
    cubins = {f"memra_driver/cubins/{ARCH}/{nvrtc.prebuilt_path(source, ARCH).name}" for source in nvrtc.sources()}
    about = "memra_driver-0.1.0.dist-info/"
    rest = names_of(wheel) - package - shared - cubins - LIBRARY
    assert package | shared | cubins <= names_of(wheel)
    assert {"memra_driver/cuda_src/memra_driver.h", "memra_driver/cuda_src/memra_api.h"} <= shared
    assert about + "licenses/LICENSE" in rest
    assert {name for name in rest if not name.startswith(about)} == set()


@needs_cc
def test_an_empty_environment_without_a_compiler_finds_headers_library_and_cubins(installed: Path) -> None:
    code = """
import ctypes, memra_driver
print(memra_driver.get_include())
print(memra_driver.get_library())
print(ctypes.CDLL(memra_driver.get_library()).memra_abi_version())
print(*memra_driver.get_cubins("sm_120a"), sep="\\n")
try:
    memra_driver.get_cubins("sm_90")
except memra_driver.NoDriver as error:
    print(error)
"""
    include, library, version, *cubins, told = ask([str(installed), "-I", "-c"], code)
    (package,) = installed.parent.parent.glob("lib/python*/site-packages/memra_driver")
    header = (package / "cuda_src" / "memra_driver.h").read_text()
    assert Path(include) == package / "cuda_src"
    assert Path(library) == package / "lib" / "libmemra_driver.so.1"
    assert f"#define MEMRA_ABI_VERSION {version}\n" in header
    assert [Path(path).read_bytes() for path in cubins] == [b"\x7fELF" + s.encode() for s in nvrtc.sources()]
    assert {Path(path).parent for path in cubins} == {package / "cubins" / ARCH}
    assert "pip install" in told


def test_an_environment_with_nvrtc_compiles_at_first_use_what_the_wheel_does_not_bring(installed: Path) -> None:
    pytest.importorskip("cuda.bindings")
    code = """
import os, sys
import memra_driver
sys.path += sys.argv[1].split(os.pathsep)
print(memra_driver.__file__)
from memra_driver import nvrtc
print(nvrtc.sources_hash())
print(*memra_driver.get_cubins("sm_90"), sep="\\n")
"""
    compiler = nvrtc.library_path()  # which cuda-python looks for in its own environment, and then as any library
    assert compiler is not None
    env = without_compiler(MEMRA_CACHE_DIR=os.environ["MEMRA_CACHE_DIR"], LD_LIBRARY_PATH=os.path.dirname(compiler))
    where, texts, *cubins = ask([str(installed), "-I", "-c"], code, os.pathsep.join(sys.path), env=env)
    assert installed.parent.parent in Path(where).parents
    assert texts == nvrtc.sources_hash()  # so what a GPU said of the one holds for the other
    assert [Path(path).stem for path in cubins] == [Path(source).stem for source in nvrtc.sources()]
    for path, source in zip(cubins, nvrtc.sources(), strict=True):
        assert Path(path).read_bytes() == nvrtc.compile_cubin(source, "sm_90")


@needs_cc
def test_a_c_program_builds_with_the_flags_that_the_installed_package_prints(installed: Path, tmp_path: Path) -> None:
    (line,) = ask([str(installed), "-I", "-m"], "memra_driver", "--cflags", "--libs")
    source = tmp_path / "main.c"
    source.write_text(
        "#include <memra_driver.h>\n#include <stdio.h>\n"
        'int main(void) { return printf("%d", (int)memra_abi_version()) < 0; }\n'
    )
    program = str(tmp_path / "main")
    subprocess.run(
        ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", str(source), "-o", program, *shlex.split(line)], check=True
    )
    assert ask([program], "") == [str(native_version())]


def native_version() -> int:
    header = (native.source_dir() / "memra_driver.h").read_text()
    return int(re.findall(r"#define MEMRA_ABI_VERSION (\d+)", header)[0])


def test_a_package_without_the_library_finds_its_headers_and_says_what_is_missing(
    poor_wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(poor_wheel).extractall(tmp_path)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import memra_driver
from memra_driver.inventory import inventory
print(memra_driver.get_include())
print(memra_driver.get_library())
print(*inventory()["missing"], sep="\\n")
"""
    include, library, *missing = ask(BARE, code, str(tmp_path))
    assert Path(include) == tmp_path / "memra_driver" / "cuda_src"
    assert library == "None"
    assert [line for line in missing if line.startswith("libmemra_driver.so") and "build.py native" in line]


@needs_cc
def test_an_editable_install_finds_the_headers_of_the_checkout_and_the_library_that_it_built(tmp_path: Path) -> None:
    pytest.importorskip("editables")
    folder = checkout(tmp_path / "repo")
    pip(folder, "install", "--editable", ".", "--target", str(tmp_path / "site"))
    code = """
import ctypes, site, sys
site.addsitedir(sys.argv[1])
import memra_driver
print(memra_driver.get_include())
print(memra_driver.get_library())
print(ctypes.CDLL(memra_driver.get_library()).memra_abi_version())
"""
    include, library, version = ask(BARE, code, str(tmp_path / "site"))
    assert not (tmp_path / "site" / "memra_driver").exists()  # no copy of anything
    assert Path(include) == folder / "cuda_src"
    assert Path(library) == folder / "memra_driver" / "lib" / "libmemra_driver.so.1"
    assert int(version) == native_version()


def test_an_editable_install_without_a_compiler_has_all_but_the_library(tmp_path: Path) -> None:
    pytest.importorskip("editables")
    folder = checkout(tmp_path / "repo")
    pip(folder, "install", "--editable", ".", "--target", str(tmp_path / "site"), env=without_compiler())
    code = """
import site, sys
site.addsitedir(sys.argv[1])
import memra_driver
print(memra_driver.get_include(), memra_driver.get_library())
"""
    assert ask(BARE, code, str(tmp_path / "site")) == [f"{folder / 'cuda_src'} None"]
