"""The command `memra-driver bench`: what it shows, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from bench_tiny import L2_BYTES, L2_CACHE_SIZE, TINY
from standin import StandIn
from test_bench_arithmetic import moved, rows_and_rates

from memra_driver import cli, nvrtc
from memra_driver.bench import report as bench_report
from memra_driver.bench import rows as bench_rows

ROOT = Path(__file__).resolve().parent.parent


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(["bench", *argv])
    text, errors = capsys.readouterr()
    return status, text, errors


def test_a_run_prints_tables_and_leaves_results_and_a_picture(
    standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    standin.set_attribute(0, L2_CACHE_SIZE, L2_BYTES)
    monkeypatch.setattr(bench_rows, "QUICK", TINY)
    monkeypatch.setattr(nvrtc, "compile_all", lambda archs: {})
    json_file, png_file = tmp_path / "x.json", tmp_path / "x.png"
    argv = ("--quick", "--what", "append", "--json", str(json_file), "--png", str(png_file))
    status, text, errors = run(capsys, *argv)
    assert status == 0, errors
    assert errors == "memra-driver: append\n"
    for part in ("append_kv q8_0+q5_1 kv_dim 64 T=8", "Stand-in GPU 0", "targets met", "ceilings of this run"):
        assert part in text
    result = json.loads(json_file.read_text())
    assert result["groups"] == ["append"]
    assert png_file.read_bytes().startswith(b"\x89PNG")
    assert run(capsys, "--read", str(json_file), "--what", "append")[1] == text  # a file shows what the run did


def test_two_files_are_compared_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    bench_report.write(first, rows_and_rates())
    bench_report.write(second, moved(seconds=1e-6))
    status, text, _ = run(capsys, "--compare", str(first), str(second))
    assert (status, text) == (0, "gdn_scan 32 heads B=1 T=1: 50% faster, 2 us -> 1 us\n")
    assert run(capsys, "--compare", str(first), str(first))[:2] == (0, "nothing moved by more than 10%\n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--what", "scans"], "--what scans: there are snapshot, append"),
        (["--device", "host"], "--device host: the bench measures a GPU"),
        (["--read", "nowhere.json"], "nowhere.json"),
        (["--compare", "nowhere.json", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, errors = run(capsys, *argv)
    assert (status, text) == (2, "")
    assert re.fullmatch(r"memra-driver: .*\n", errors)
    assert said in errors


def test_without_a_gpu_the_bench_refuses_in_one_line() -> None:
    """In a process of its own: the stand-in must not be there."""
    code = (
        "import sys\n"
        "from cuda import pathfinder\n"
        "def nothing(name): raise pathfinder.DynamicLibNotFoundError(name)\n"
        "pathfinder.load_nvidia_dynamic_lib = nothing\n"
        "from memra_driver.cli import main\n"
        "sys.exit(main(['bench']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("memra-driver: cuInit")
    assert "install an NVIDIA display driver" in line


def test_torch_is_not_imported_unless_peers_are_asked_for() -> None:
    code = "import sys, memra_driver.bench\nprint({'torch', 'cupy', 'fla', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"
