"""The README is true: its examples run, in order, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memra_driver
from memra_driver import config, layout

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_python_examples_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 3 ")
    assert lines[1] == "5 [5, 5]"


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
