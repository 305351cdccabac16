"""build.py: what it refuses, what it looks for, when it makes, keeps and repairs .venv."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from memra_driver import native, nvrtc
from memra_driver.errors import CompileError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """build.py as a module, its root in an empty folder; pip and venv must be replaced before they are reached."""
    spec = importlib.util.spec_from_file_location("build_under_test", ROOT / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    monkeypatch.setattr(module, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(module, "VENV_PYTHON", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(module, "STAMP", str(tmp_path / ".venv" / "memra-driver.stamp"))
    monkeypatch.setattr(module, "cuda_extra", lambda: "cu13")
    monkeypatch.delenv(module.GUARD, raising=False)
    return module


class Installer:
    """Stands in for venv, pip and the interpreter that they make; notes what was asked of it."""

    def __init__(self, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.venv = Path(build.VENV)
        self.lacks: list[str] = []
        self.pip_status = 0
        self._write_stamp = build.write_stamp
        monkeypatch.setattr(build, "make_venv", self._make)
        monkeypatch.setattr(build, "pip_install", self._install)
        monkeypatch.setattr(build, "missing_in", self._missing)

    def _make(self) -> None:
        self.calls.append("venv")
        self.venv.mkdir(exist_ok=True)
        self._write_stamp("")

    def _install(self, requirement: str) -> int:
        self.calls.append("pip")
        if self.pip_status == 0:
            self.lacks = []
        elif self.pip_status < 0:
            raise KeyboardInterrupt
        return self.pip_status

    def _missing(self, python: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.lacks]


@pytest.fixture
def installer(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(build, monkeypatch)


def call(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "build.py"), *args], capture_output=True, text=True, timeout=60)


# What it refuses


@pytest.mark.parametrize("args", [("--wheel",), ("--sdist",), ("-w", "."), ("bdist_wheel",), (".",)])
def test_unknown_arguments_are_refused_with_the_way_to_build_a_wheel(args: tuple[str, ...]) -> None:
    done = call(*args)
    assert done.returncode == 2
    assert repr(args[0]) in done.stderr
    for way in ("pip wheel --no-deps -w dist .", "pyproject-build", "python -P -m build"):
        assert way in done.stderr


def test_no_argument_prints_the_usage_and_fails() -> None:
    done = call()
    assert (done.returncode, done.stdout) == (2, "")
    assert "python -P -m build" in done.stderr


@pytest.mark.parametrize("command", ["run", "bench", "test", "kernels", "native"])
def test_help_answers_before_anything_is_set_up(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(build, "lacking", lambda *_: pytest.fail("looked for what to set up"))
    try:
        status = build.main([command, "--help"])
    except SystemExit as end:
        status = end.code
    assert status == 0
    assert f"build.py {command}" in capsys.readouterr().out


def test_kernels_refuses_an_unknown_option_before_anything_is_set_up(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "lacking", lambda *_: pytest.fail("looked for what to set up"))
    with pytest.raises(SystemExit) as end:
        build.main(["kernels", "--wheel"])
    assert end.value.code == 2


def test_the_file_parses_on_an_old_python() -> None:
    ast.parse((ROOT / "build.py").read_text(), feature_version=(3, 6))


def test_an_old_python_without_a_newer_one_on_the_path_is_told_which_it_needs(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "OLDEST", (99, 0))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as end:
        build.main(["run"])
    assert end.value.code == 1
    assert "Python 99.0 or newer is needed" in capsys.readouterr().err


# What it looks for


def script(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_newer_python_that_refuses_to_start_is_passed_over(build: ModuleType, tmp_path: Path) -> None:
    script(tmp_path / "a" / "python3.13", "exit 127")
    script(tmp_path / "a" / "python3.11", "echo False")
    good = script(tmp_path / "b" / "python3.11", "echo True")
    path = os.pathsep.join(["", str(tmp_path / "a"), str(tmp_path / "b")])
    assert build.newer_python(path) == good
    assert build.newer_python(str(tmp_path / "a")) is None


def test_modules_are_looked_for_not_distributions(build: ModuleType) -> None:
    absent = ["memra_no_such_module", "memra_no_such.module", "json.no_such.module"]
    assert build.missing(["json", "os.path", *absent]) == absent
    assert build.missing_in(sys.executable, ["json", *absent]) == absent


def test_an_interpreter_that_does_not_start_lacks_everything(build: ModuleType, tmp_path: Path) -> None:
    assert build.missing_in(str(tmp_path / "python"), ["json", "os"]) == ["json", "os"]


@pytest.mark.parametrize(
    ("command", "args", "nvrtc", "devices", "absent"),
    [
        ("run", [], False, 0, []),
        ("run", [], False, 1, ["NVRTC"]),
        ("run", [], True, 1, []),
        ("test", [], False, 0, ["NVRTC"]),
        ("kernels", [], False, 0, ["NVRTC"]),
        ("native", [], False, 1, []),
        ("run", ["model.gguf"], True, 0, ["gguf"]),
    ],
)
def test_the_compiler_is_needed_on_a_gpu_but_not_by_a_run_on_the_host(
    build: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    args: list[str],
    nvrtc: bool,
    devices: int,
    absent: list[str],
) -> None:
    monkeypatch.setattr(build, "missing", lambda names: [name for name in names if name == "gguf" and command == "run"])
    monkeypatch.setattr(build, "probe", lambda: {"nvrtc": nvrtc, "devices": devices})
    assert build.lacking(command, args) == absent


def test_the_probe_finds_no_device_behind_a_library_that_is_missing(build: ModuleType) -> None:
    found = build.probe()
    assert sorted(found) == ["devices", "nvrtc"]
    assert found["devices"] >= 0


# .venv


def test_a_finished_venv_is_used_as_it_stands(build: ModuleType, installer: Installer) -> None:
    assert build.set_up(["numpy"]) == build.VENV_PYTHON
    assert installer.calls == ["venv", "pip"]
    assert build.set_up(["numpy"]) == build.VENV_PYTHON
    assert installer.calls == ["venv", "pip"]


def test_an_interrupted_set_up_is_started_anew(build: ModuleType, installer: Installer) -> None:
    installer.pip_status = -1
    with pytest.raises(KeyboardInterrupt):
        build.set_up(["numpy"])
    assert build.read_stamp() == ""
    installer.pip_status = 0
    build.set_up(["numpy"])
    assert installer.calls == ["venv", "pip", "venv", "pip"]
    assert build.read_stamp() == build.recipe("cu13,gguf,cli,test")


def test_a_venv_that_has_lost_a_module_or_its_interpreter_is_made_anew(build: ModuleType, installer: Installer) -> None:
    build.set_up(["numpy"])
    installer.lacks = ["numpy"]
    build.set_up(["numpy"])
    assert installer.calls == ["venv", "pip", "venv", "pip"]


def test_a_changed_project_file_updates_the_venv_in_place(
    build: ModuleType, installer: Installer, tmp_path: Path
) -> None:
    build.set_up(["numpy"])
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    build.set_up(["numpy"])
    assert installer.calls == ["venv", "pip", "pip"]


def test_a_failed_update_leaves_the_venv_to_be_updated_again(
    build: ModuleType, installer: Installer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.set_up(["numpy"])
    before = build.read_stamp()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    installer.pip_status = 3
    with pytest.raises(SystemExit) as end:
        build.set_up(["numpy"])
    assert end.value.code == 1
    assert "exit status 3" in capsys.readouterr().err
    assert build.read_stamp() == before
    installer.pip_status = 0
    build.set_up(["numpy"])
    assert installer.calls == ["venv", "pip", "pip", "pip"]


def test_somebody_elses_venv_is_used_or_refused_but_never_changed(
    build: ModuleType, installer: Installer, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(build.VENV).mkdir()
    (Path(build.VENV) / "theirs").write_text("")
    assert build.set_up(["numpy"]) == build.VENV_PYTHON
    installer.lacks = ["numpy"]
    with pytest.raises(SystemExit):
        build.set_up(["numpy"])
    assert "was not made by build.py and lacks numpy" in capsys.readouterr().err
    assert installer.calls == []
    assert os.listdir(build.VENV) == ["theirs"]


def test_a_python_without_ensurepip_names_the_package_to_install(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "_base_executable", script(tmp_path / "bin" / "python", "echo no; exit 1"))
    with pytest.raises(SystemExit) as end:
        build.make_venv()
    assert end.value.code == 1
    assert "apt-get install python{}.{}-venv".format(*sys.version_info[:2]) in capsys.readouterr().err
    assert build.read_stamp() == ""  # ours, to be made anew


def test_set_up_that_changes_nothing_ends_instead_of_going_round(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def become(python: str, argv: Sequence[str]) -> None:
        started.append([python, *argv])
        build.main(list(argv))

    monkeypatch.setattr(build, "lacking", lambda *_: ["numpy"])
    monkeypatch.setattr(build, "set_up", lambda _: "venv-python")
    monkeypatch.setattr(build, "become", become)
    monkeypatch.setenv(build.GUARD, "")
    with pytest.raises(SystemExit) as end:
        build.main(["run", "x"])
    assert started == [["venv-python", "run", "x"]]
    assert end.value.code == 1
    assert "still lacks numpy" in capsys.readouterr().err


# test


@pytest.mark.parametrize(
    ("devices", "statuses", "worst"),
    [(0, [0], 0), (0, [1], 1), (0, [5], 5), (1, [0, 1], 1), (1, [2, 0], 2), (1, [5, 0], 0), (1, [0, 5], 0)],
)
def test_the_exit_status_is_the_worse_of_both_processes(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, devices: int, statuses: list[int], worst: int
) -> None:
    asked: list[list[str]] = []

    def pytest_process(args: Sequence[str]) -> int:
        asked.append(list(args))
        return statuses[len(asked) - 1]

    monkeypatch.setattr(build, "probe", lambda: {"nvrtc": True, "devices": devices})
    monkeypatch.setattr(build, "pytest", pytest_process)
    assert build.test(["-q"]) == worst
    assert asked == [["-n", "auto", "--dist", "worksteal", "-q"], ["--gpu", "-q"]][: len(statuses)]


def test_a_crashed_pytest_is_a_failure(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.subprocess, "call", lambda *_, **__: -11)
    assert build.pytest([]) == 139


# kernels


def test_kernels_leaves_one_cubin_for_each_source_and_none_of_an_older_text(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        nvrtc, "compile_all", lambda archs: {(source, arch): b"cubin" for source in nvrtc.sources() for arch in archs}
    )
    kept = tmp_path / "sm_90" / "append_kv.txt"
    kept.parent.mkdir()
    kept.write_text("not ours")
    (tmp_path / "sm_90" / "append_kv.0123456789abcdef.cubin").write_bytes(b"old")
    assert build.kernels(["--arch", "sm_90", "sm_120a", "--out", str(tmp_path)]) == 0
    for arch, others in (("sm_90", {kept.name}), ("sm_120a", set())):
        expected = {nvrtc.prebuilt_path(source, arch).name for source in nvrtc.sources()}
        assert set(os.listdir(tmp_path / arch)) == expected | others


def test_kernels_that_cannot_be_written_leave_those_that_are_there(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvrtc, "compile_all", lambda archs: {("append_kv.cu", arch): b"cubin" for arch in archs})
    old = tmp_path / "sm_90" / "append_kv.0123456789abcdef.cubin"
    old.parent.mkdir()
    old.write_bytes(b"old")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SystemExit) as end:
        build.kernels(["--arch", "sm_90", "--out", str(tmp_path)])
    assert end.value.code == 1
    assert "No space left" in capsys.readouterr().err
    assert list(old.parent.iterdir()) == [old]


def test_kernels_says_what_the_compiler_refuses(build: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        build.kernels(["--arch", "no-such-arch"])
    assert end.value.code == 1
    assert "no-such-arch" in capsys.readouterr().err


# native


@pytest.fixture
def no_set_up(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(build, "lacking", lambda *_: [])
    monkeypatch.setattr(build, "ROOT", str(ROOT))
    monkeypatch.setenv("PYTHONPATH", "")
    return build


def no_compiler() -> Path:
    raise CompileError("there is no C compiler")


def test_native_prints_where_the_library_is(
    no_set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "build", lambda: tmp_path / "lib.so")
    assert no_set_up.main(["native"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/lib.so\n"


def test_native_fails_without_a_compiler_and_takes_no_arguments(
    no_set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "build", no_compiler)
    for argv, status, says in ((["native"], 1, "there is no C compiler"), (["native", "--arch"], 2, "'--arch'")):
        with pytest.raises(SystemExit) as end:
            no_set_up.main(argv)
        assert end.value.code == status
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "bench", "test"])
def test_run_and_test_build_the_library_first_and_go_on_without(
    no_set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    order: list[str] = []

    def build_library() -> Path:
        order.append("native")
        return no_compiler()

    monkeypatch.setattr(native, "build", build_library)
    monkeypatch.setitem(no_set_up.COMMANDS, command, lambda args: order.append(command) or 0)
    assert no_set_up.main([command]) == 0
    assert order == ["native", command]
    assert "no C library: there is no C compiler" in capsys.readouterr().err
