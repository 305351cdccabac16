"""The package as a whole: names that load at first use, at no cost before it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memra_driver
from memra_driver import nvrtc

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


def test_cubins_of_other_sources_or_architectures_are_not_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvrtc, "prebuilt_dir", lambda: tmp_path)
    current = [nvrtc.prebuilt_path(source, "sm_90") for source in ("append_kv.cu", "gdn_scan.cu")]
    current[0].parent.mkdir()
    for path in (*current, tmp_path / "sm_90" / "append_kv.0123456789abcdef.cubin", tmp_path / "sm_90" / "notes.txt"):
        path.write_bytes(b"")
    assert memra_driver.get_cubins("sm_90") == [str(path) for path in current]
    assert memra_driver.get_cubins("sm_80") == []


def test_there_is_no_c_library_yet() -> None:
    assert memra_driver.get_library() is None
