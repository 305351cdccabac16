"""A port of the cache to C11, written from the kit's SPEC.md alone, passes the whole kit, and a wrong one does not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tally

from memra_driver import kit

PORT = Path(__file__).parent / "port"
PARTS = ("formats.h", "ops.h", "plan.h", "cache.h")  # the port itself; the others read the kit, hash and compare
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(CC is None, reason="there is no C compiler")

# A line of the port, and what a porter might have written instead.
MISTAKES = [
    ("formats.h", "isinf(1 / d) ? 0 : 1 / d", "1 / d"),
    ("formats.h", "fmaf(x[j], id, 8.5f)", "x[j] * id + 8.5f"),
    ("formats.h", " && signbit(x[j])", ""),
    ("ops.h", "h % keys : h", "h * keys / heads : h"),
    ("ops.h", " || !isfinite(bias[h])", ""),
    ("ops.h", " || !isfinite(a[h])", ""),
    ("plan.h", "packed ? 0 : (256", "(256"),
    ("plan.h", "d = item(get(a, \"placement\"), s, s);", ""),
    ("plan.h", "\"swa_pattern\"), il, 1)", "\"swa_pattern\"), il, 0)"),
    ("plan.h", " || dim < 1", ""),
    ("cache.h", "C.state == READY && n)", "n)"),
    ("cache.h", "C.state == READY && n)", "C.state == READY)"),
    ("cache.h", "if (C.state == READY) return NULL;", ""),
    ("cache.h", "    reject();\n    for (layer *l = C.at; l < C.at + C.n; l++) {\n        stand(l, 0);",
     "    for (layer *l = C.at; l < C.at + C.n; l++) {\n        stand(l, 0);"),
    ("cache.h", "high < saved + accept ? high : saved + accept", "high"),
    ("cache.h", "C.kept[i].pos <= stands", "C.kept[i].pos < stands"),
    ("cache.h", "C.round ? 0 : C.step_rows", "C.step_rows"),
]


NOT_SHOWN = {"l->len < 0"}  # no call of a kit leaves a length below 0
LEFT_OUT = """static int left_out(int which) {
    const char *chosen = getenv("LEFT_OUT");
    return chosen && atoi(chosen) == which;
}
"""


def alternatives(condition: str) -> list[str]:
    """What `||` joins, outside parentheses."""
    found, depth = [""], 0
    for part in re.split(r"([()]|\|\|)", condition):
        depth += (part == "(") - (part == ")")
        if part == "||" and not depth:
            found.append("")
        else:
            found[-1] += part
    return [each.strip() for each in found]


def one_left_out(text: str) -> tuple[str, list[str]]:
    """The port's cache, of whose reasons to refuse a call LEFT_OUT names one that it does not know; and the reasons."""
    reasons: list[str] = []

    def guarded(match: re.Match[str]) -> str:
        made = []
        for each in alternatives(match[1]):
            made.append(f"(({each}) && !left_out({len(reasons)}))")
            reasons.append(each)
        return f"REFUSE({' || '.join(made)}, {match[2]});"

    return LEFT_OUT + re.sub(r"\bREFUSE\((.*), ([A-Z]+)\);", guarded, text), reasons


def build(source: Path, program: Path, *options: str) -> Path:
    assert CC is not None
    command = [CC, "-std=c11", "-ffp-contract=off", *options, str(source / "main.c"), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, folder: Path, **more: str) -> tuple[int, str]:
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", **more}  # the program keeps what it reads until it ends
    done = subprocess.run([str(program), str(folder)], capture_output=True, text=True, timeout=120, env=env)
    return done.returncode, done.stdout + done.stderr


def test_the_port_passes_the_whole_kit(small_kit: Path, tmp_path: Path) -> None:
    program = build(PORT, tmp_path / "port", "-O2", "-Wall", "-Wextra", "-Werror")
    cases = (small_kit / "manifest.json").read_text().count('"id": ')
    tally.add("vectors", (small_kit / "manifest.json").read_text().count('"role": "out"'))
    assert run(program, small_kit) == (0, f"all {cases} cases\n")


def test_the_port_passes_the_larger_shapes_too_in_a_kit_of_the_size_that_is_promised(tmp_path: Path) -> None:
    kit.export(tmp_path / "kit")
    manifest = (tmp_path / "kit" / "manifest.json").read_text()
    cases = manifest.count('"id": ')
    assert run(build(PORT, tmp_path / "port", "-O2"), tmp_path / "kit") == (0, f"all {cases} cases\n")
    tally.add("vectors", manifest.count('"role": "out"'))
    n_bytes = sum(path.stat().st_size for path in (tmp_path / "kit").iterdir())
    (promised,) = re.findall(r"larger shapes, (\d+) MB", (PORT.parent.parent / "README.md").read_text())
    assert n_bytes == pytest.approx(int(promised) * 1e6, rel=0.05)


def test_the_port_passes_it_without_a_step_beside_its_memory(small_kit: Path, tmp_path: Path) -> None:
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "main.c").write_text("int main(void) { return 0; }\n")
    try:
        assert run(build(probe, tmp_path / "empty", *sanitize), probe)[0] == 0
    except AssertionError:
        pytest.skip("this compiler has no sanitizers")
    status, text = run(build(PORT, tmp_path / "port", "-O1", *sanitize), small_kit)
    assert "ERROR: AddressSanitizer" not in text
    assert "runtime error" not in text
    assert status == 0, text


@pytest.mark.parametrize(("part", "line", "mistake"), MISTAKES, ids=[line for _, line, _ in MISTAKES])
def test_a_port_with_one_mistake_fails_and_says_where(
    part: str, line: str, mistake: str, small_kit: Path, tmp_path: Path
) -> None:
    shutil.copytree(PORT, tmp_path / "wrong")
    text = (PORT / part).read_text()
    assert text.count(line) == 1
    (tmp_path / "wrong" / part).write_text(text.replace(line, mistake))
    status, said = run(build(tmp_path / "wrong", tmp_path / "port", "-O0", "-w"), small_kit)
    assert status == 1
    assert said.count("\n") == 1
    assert re.match(r"(append_kv|gdn_prep|plan|cache) .*: ", said), said


def test_a_port_that_does_not_know_one_of_the_reasons_to_refuse_a_call_fails(small_kit: Path, tmp_path: Path) -> None:
    """Each of them is shown by some call of the kit."""
    shutil.copytree(PORT, tmp_path / "wrong")
    text, reasons = one_left_out((PORT / "cache.h").read_text())
    (tmp_path / "wrong" / "cache.h").write_text(text)
    program = build(tmp_path / "wrong", tmp_path / "port", "-O1", "-w")
    shutil.copytree(small_kit, tmp_path / "kit")
    manifest = json.loads((small_kit / "manifest.json").read_text())
    manifest["cases"] = [case for case in manifest["cases"] if case["op"] == "cache"]
    (tmp_path / "kit" / "manifest.json").write_text(json.dumps(manifest))
    assert run(program, tmp_path / "kit")[0] == 0
    assert len(reasons) > 55
    left = {why for which, why in enumerate(reasons) if not run(program, tmp_path / "kit", LEFT_OUT=str(which))[0]}
    assert left == NOT_SHOWN


def test_a_changed_byte_of_the_kit_is_noticed_by_its_digest(small_kit: Path, tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    shutil.copytree(small_kit, kit)
    raw = bytearray((kit / "formats.bin").read_bytes())
    raw[0] ^= 1
    (kit / "formats.bin").write_bytes(raw)
    status, said = run(build(PORT, tmp_path / "port", "-O0"), kit)
    assert status == 1
    assert "has another digest" in said


def test_the_port_is_short_and_includes_nothing_but_itself_and_the_standard_library() -> None:
    assert sum((PORT / part).read_text().count("\n") for part in PARTS) < 700
    own = {path.name for path in PORT.iterdir()}
    standard = {"math.h", "stdarg.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"}
    for path in PORT.iterdir():
        assert set(re.findall(r'#include ["<](.*)[">]', path.read_text())) <= own | standard, path
