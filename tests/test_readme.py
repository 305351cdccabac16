"""The README is true: its examples run, in order, and what it names exists."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from standin import StandIn

import memra_driver
from memra_driver import CudaDev, config, layout

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TENSORS = [block for block in BLOCKS if re.search(r"^import (torch|cupy)$", block, re.MULTILINE)]
NCCL = [block for block in BLOCKS if "import nccl" in block]
NIXL = [block for block in BLOCKS if "import nixl" in block]


def test_the_python_examples_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in BLOCKS if block not in TENSORS + NCCL + NIXL]
    assert len(blocks) == 5
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 3 ")
    assert lines[1] == "5 [5, 5]"
    assert lines[2] == "(0, 16, 33) 1 3"


def check_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the program for torch and CuPy."""
    (block,) = TENSORS
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["True True", "0 0.0", "32 128"]


@pytest.mark.standin
def test_the_example_for_tensors_runs_on_numpy_and_the_stand_in(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from array_library import Library

    library = Library()
    monkeypatch.setitem(sys.modules, "torch", library.torch())
    monkeypatch.setitem(sys.modules, "cupy", library.cupy())
    check_tensors(capsys)
    assert standin.calls("cuEventRecord") == []  # one stream: nothing has to be put in order
    assert len(standin.calls("cuStreamCreate")) == 1
    library.close()


@pytest.mark.gpu
def test_the_example_for_tensors_runs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    before = torch.cuda.current_stream()
    try:
        check_tensors(capsys)
    finally:
        torch.cuda.set_stream(before)


def test_the_chapter_for_porters_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its commands, in order, in a folder with nothing in it but the tests."""
    pytest.importorskip("typer")
    from memra_driver import cli

    (commands,) = re.findall(r"```\n(memra-driver vectors .*?)```", README.split("## For porters")[1], re.DOTALL)
    (tmp_path / "tests").symlink_to(Path(__file__).parent)
    with contextlib.chdir(tmp_path):
        for line in commands.splitlines():
            words = shlex.split(line, comments=True)
            if words[0] == "memra-driver":
                assert cli.main(words[1:]) == 0
            elif shutil.which("cc"):
                subprocess.run(words, check=True)
    said = capfd.readouterr().out.splitlines()
    assert said[1] == f"ALL GREEN ({said[0].split()[0]} cases)"
    assert said[2] == "the kits say the same"
    assert said[3:] in ([], [f"all {said[0].split()[0]} cases"])


@pytest.mark.gpu
def test_the_example_for_nccl_runs_on_two_gpus(gpu_count: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nccl.core", reason="nccl4py is not installed", exc_type=ImportError)
    if gpu_count < 2:
        pytest.skip("needs two GPUs")
    (block,) = NCCL
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "True"


def test_a_slice_is_what_nccl_takes_for_a_buffer(standin: StandIn) -> None:
    buffer = pytest.importorskip("nccl.core.buffer", reason="nccl4py is not installed", exc_type=ImportError)
    with CudaDev() as e, e.uninit(6) as floats, e.alloc_u8(5) as octets:
        for each, count in ((floats, 6), (floats.view(2, 5), 3), (octets, 5)):
            found = buffer.NcclBuffer(each)
            assert (found.ptr, found.count, found.device_id) == (each.ptr, count, 0)


def test_the_example_for_nixl_runs_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nixl_cu13", reason="nixl-cu13 is not installed")
    (block,) = NIXL
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "DONE 7"


def test_the_speed_that_it_tells_is_that_of_the_run_on_record() -> None:
    spec = importlib.util.spec_from_file_location("bench_readme", ROOT / "tests" / "bench" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    told = README.split(script.BEGIN)[1].split(script.END)[0]
    assert told == script.chapter(), ".venv/bin/python tests/bench/readme.py"
    assert script.PICTURE.is_file() is script.RECORD.is_file()


def test_every_preset_is_named() -> None:
    for name in config.PRESETS:
        assert f"`{name}`" in README


def test_the_field_table_is_the_rust_structs() -> None:
    table = README.split("| class | fields |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))
    fields = {name: re.findall(r"`(\w+)`", text) for name, text in rows.items()}
    for name, struct in (("KvLayer", layout.KvLayerC), ("RecurLayer", layout.RecurLayerC), ("Cache", layout.CacheC)):
        of_struct = [field[0] for field in struct._fields_]
        assert [field for field in of_struct if field in fields[name]] == fields[name]
    for name in fields:
        assert hasattr(memra_driver, name)


def test_the_commands_exist() -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from memra_driver.cli import app

    for command in sorted(set(re.findall(r"^memra-driver (\w+)", README, re.MULTILINE))):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
