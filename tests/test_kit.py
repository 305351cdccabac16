"""The conformance kit: it records what this package says, it is the same each time, and a verifier notices a change."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tally
import vectors_data

from memra_driver import cli, kit
from memra_driver.config import PRESETS
from memra_driver.formats import K_FORMATS, V_FORMATS
from memra_driver.kit.caches import CALLS
from memra_driver.kit.files import Kit, Writer, arrays_of, entries_of, fnv1a64, packaged
from memra_driver.kit.kernels import FILES
from memra_driver.kit.schema import KEYWORDS, violation
from memra_driver.kvdev import HostDev

MakeDev = Callable[..., Any]


@pytest.fixture(scope="module")
def small(small_kit: Path) -> Kit:
    return Kit(small_kit)


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a kit whose manifest was changed."""
    shutil.copytree(source, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def case_of(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [case for case in manifest["cases"] if case["id"] == name]
    assert isinstance(found, dict)
    return found


def rewritten(folder: Path, manifest: dict[str, Any], entry: dict[str, Any], change: Callable[[Any], None]) -> None:
    """Changes an array of a kit and its digest. Others at the same place keep theirs, so it gets a place of its own."""
    path = folder / entry["file"]
    raw = path.read_bytes()
    kind = {"f32": np.float32, "u8": np.uint8, "i32": np.int32, "i64": np.int64, "u16": np.uint16}[entry["dtype"]]
    array = np.frombuffer(raw, kind, entry["bytes"] // np.dtype(kind).itemsize, entry["offset"]).copy()
    change(array)
    raw += bytes(-len(raw) % 16)
    entry |= {"offset": len(raw), "fnv1a64": fnv1a64(array)}
    path.write_bytes(raw + array.tobytes())
    for file in manifest["files"]:
        if file["name"] == entry["file"]:
            file["bytes"] = len(raw) + array.nbytes


# What it holds


def test_an_export_is_the_same_each_time(small_kit: Path, tmp_path: Path) -> None:
    kit.export(tmp_path / "again", small=True)
    names = sorted(path.name for path in small_kit.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (small_kit / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_small_kit_is_a_few_megabytes_and_brings_specification_and_schema(small_kit: Path) -> None:
    assert sum(path.stat().st_size for path in small_kit.iterdir()) < 7_500_000
    assert (small_kit / "SPEC.md").read_bytes() == packaged("SPEC.md")
    assert (small_kit / "manifest.schema.json").read_bytes() == packaged("manifest.schema.json")


def test_every_operation_format_pair_preset_call_and_kind_of_refusal_is_in_it(small: Kit) -> None:
    assert {case["op"] for case in small.cases} == {*FILES, "plan", "cache"}
    appended = [case["args"] for case in small.cases if case["op"] == "append_kv"]
    assert len({(args["k_format"], args["v_format"]) for args in appended}) == len(K_FORMATS) * len(V_FORMATS)
    plans = {case["id"]: case["args"] for case in small.cases if case["op"] == "plan"}
    for name in PRESETS:
        assert not plans[f"plan {name}"]["options"]["skip_mtp_state"]
        assert plans[f"plan {name} without MTP state"]["options"]["skip_mtp_state"]
    steps = [step for case in small.cases for step in case.get("steps", ())]
    assert {step["op"] for step in steps} == set(CALLS)
    refusals = {step["error"] for step in steps if "error" in step}
    assert refusals == {"CapacityError", "ConfigError", "SnapshotError", "StateError", "UnsupportedError"}
    assert {case["same_as"] for case in small.cases if "same_as" in case} == {
        "cache plain decoding, q8_0/q5_1", "cache plain decoding, fp8/q4_0"
    }  # fmt: skip


def test_the_bytes_of_the_reference_kernels_are_in_it(small: Kit) -> None:
    found = {case["id"].removeprefix("append_kv vector "): case for case in small.cases if " vector " in case["id"]}
    cases = [case for case in vectors_data.cases("append_rows") if case.case in found]
    assert len(cases) >= 12
    for case in cases:
        given, after = (arrays_of(small, found[case.case], role) for role in ("in", "out"))
        for side in "kv":
            assert given[f"{side}_rows"].tobytes() == case[f"{side}_rows"].tobytes(), case.case
            want = case.expected(f"{side}_out")
            if "except_block" in case:  # where 1/d overflows we store other codes, on purpose
                token = (want.size - 8) // case.max_ctx
                want = want[: token * (case.t0 + case.except_block["row"])]
            assert after[side][: want.size].tobytes() == want.tobytes(), case.case


def test_the_program_by_hand_holds_what_the_rust_cache_holds(small: Kit) -> None:
    steps = json.loads((vectors_data.FOLDER / "cache_sequence.json").read_text())["steps"]
    program = case_of(small.manifest, "cache by hand")
    ends = {"sync_d", "snapshot", "snapshot_into", "rollback"}
    planes = dict(program["start"]["planes"])
    seen = [(program["start"], dict(planes))]
    for step in program["steps"]:
        planes |= step["after"]["planes"]
        if step["op"] in ends:
            seen.append((step["after"], dict(planes)))
    for (state, planes), expected in zip(seen, steps, strict=True):
        for name, theirs in (("len", "kv_len"), ("len_d", "len_d")):
            assert state[name] == [-1 if n is None else n for n in expected["cache"][theirs]], expected["step"]
        assert state["pos"] == expected["cache"]["pos"]
        for file in expected["files"]:
            where, role = file["role"].split(".")
            if where == "cache":
                role = {"conv": "conv_state", "ssm": "ssm_state", "ssm_alt": "ssm_state_alt"}.get(role, role)
            if role != "len_d":
                prefix = "snapshot0." if where == "snap" else ""
                assert planes[f"{prefix}layer{file['layer']:02}.{role}"] == file["fnv1a64"], file["path"]


def test_equal_arrays_of_a_file_are_stored_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "kit")
    one, two, other = (writer.array("x.bin", "x", "in", np.full(5, value, np.float32)) for value in (1, 1, 2))
    assert one["offset"] == two["offset"] == 0
    assert other["offset"] == 32


@pytest.mark.parametrize(
    ("text", "digest"), [(b"", "cbf29ce484222325"), (b"a", "af63dc4c8601ec8c"), (b"foobar", "85944171f73967e8")]
)
def test_the_digest_is_fnv_1a_of_64_bits(text: bytes, digest: str) -> None:
    assert fnv1a64(text) == digest


@pytest.mark.parametrize("size", [1, 2, 255, 65_535, 65_536, 65_537, 131_073])
def test_the_digest_of_any_length_is_that_of_the_plain_loop(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    assert fnv1a64(data) == f"{h:016x}"


# Verifying


def recorded_outputs(small: Kit) -> int:
    """How many arrays a verifier compares with its own."""
    holders = (holder for case in small.cases for holder in (case, *case.get("steps", ())))
    return sum(len(list(entries_of(holder, "out"))) for holder in holders)


def test_this_installation_verifies_on_the_host(small_kit: Path, small: Kit) -> None:
    tally.add("vectors", recorded_outputs(small))
    results = list(kit.verify(HostDev(), small_kit))
    assert [result.line() for result in results if result.fault] == []
    assert len(results) == len({result.check for result in results}) > 200


def test_this_installation_verifies_on_a_cuda_device(make_dev: MakeDev, small_kit: Path, small: Kit) -> None:
    tally.add("vectors", recorded_outputs(small))
    results = list(kit.verify(make_dev("cuda"), small_kit))
    assert [result.line() for result in results if result.fault] == []
    assert len(results) > 200


RED: list[tuple[str, Callable[[Path, dict[str, Any]], None], str]] = []


def red(name: str, words: str) -> Callable[[Callable[[Path, dict[str, Any]], None]], None]:
    """A change that a verifier notices in a case, and words that it says."""
    return lambda change: RED.append((name, change, words))


def output(case: dict[str, Any], name: str, role: str = "out") -> dict[str, Any]:
    (entry,) = [each for each in case["arrays"] if (each["name"], each["role"]) == (name, role)]
    return entry


@red("append_kv vector pairs_q8_0_q5_1_96x64", "k[200] is")
def _byte(folder: Path, manifest: dict[str, Any]) -> None:
    entry = output(case_of(manifest, "append_kv vector pairs_q8_0_q5_1_96x64"), "k")
    rewritten(folder, manifest, entry, lambda array: array.__setitem__(200, array[200] ^ 1))


@red("gdn_scan 2 states of 32, 5 rows", "of the largest magnitude; 1e-05 is allowed")
def _float(folder: Path, manifest: dict[str, Any]) -> None:
    entry = output(case_of(manifest, "gdn_scan 2 states of 32, 5 rows"), "out")
    rewritten(folder, manifest, entry, lambda array: array.__setitem__(7, array[7] + 2e-4 * np.abs(array).max()))


@red("plan qwen3.5-9b", "the plan.arena_bytes is")
def _sum(folder: Path, manifest: dict[str, Any]) -> None:
    case_of(manifest, "plan qwen3.5-9b")["result"]["arena_bytes"] += 256


@red("plan gemma4-e4b", "rows[3] is")
def _row(folder: Path, manifest: dict[str, Any]) -> None:
    entry = output(case_of(manifest, "plan gemma4-e4b"), "rows")
    rewritten(folder, manifest, entry, lambda array: array.__setitem__(3, array[3] + 1))


@red("plan head_dim 48", "the plan.error is 'ConfigError', not 'StateError'")
def _refusal(folder: Path, manifest: dict[str, Any]) -> None:
    case_of(manifest, "plan head_dim 48")["result"]["error"] = "StateError"


@red("cache refusals", "call 0, attend: StateError, not allowed")
def _allowed(folder: Path, manifest: dict[str, Any]) -> None:
    case = case_of(manifest, "cache refusals")
    del case["steps"][0]["error"]
    case["steps"][0]["after"] = case["start"]


@red("cache truncate", "the cache.len[1] is 4, not 3")
def _length(folder: Path, manifest: dict[str, Any]) -> None:
    steps = case_of(manifest, "cache truncate")["steps"]
    step = next(step for step in steps if step["op"] == "snapshot")
    step["after"]["len"][1] = 3


@red("cache by hand", "the cache.planes.layer03.k is")
def _plane(folder: Path, manifest: dict[str, Any]) -> None:
    case_of(manifest, "cache by hand")["steps"][0]["after"]["planes"]["layer03.k"] = "0" * 16


@red("cache by hand", "sha256[0] is")
def _sha(folder: Path, manifest: dict[str, Any]) -> None:
    step = next(step for step in case_of(manifest, "cache by hand")["steps"] if step["op"] == "digest")
    rewritten(folder, manifest, output(step, "sha256"), lambda array: array.__setitem__(0, array[0] ^ 1))


@red("cache rounds, q8_0/q5_1", "it does not end as 'cache plain decoding, fp8/q4_0' does")
def _end(folder: Path, manifest: dict[str, Any]) -> None:
    case_of(manifest, "cache rounds, q8_0/q5_1")["same_as"] = "cache plain decoding, fp8/q4_0"


@pytest.fixture(scope="module")
def spoiled(small_kit: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a verifier says of each case after a change; those that two changes share see the first only."""
    said: dict[str, str] = {}
    folder = tmp_path_factory.mktemp("red")
    for turn in (0, 1):
        where = folder / f"kit{turn}"
        shutil.copytree(small_kit, where)
        manifest = json.loads((where / "manifest.json").read_text())
        mine = [each for i, each in enumerate(RED) if [name for name, _, _ in RED[:i]].count(each[0]) == turn]
        for _, change, _ in mine:
            change(where, manifest)
        names = {name for name, _, _ in mine} | {"cache plain decoding, fp8/q4_0"}
        manifest["cases"] = [case for case in manifest["cases"] if case["id"] in names]
        manifest["cases"].sort(key=lambda case: "same_as" in case)
        (where / "manifest.json").write_text(json.dumps(manifest))
        for result in kit.verify(HostDev(), where):
            if result.check != "cache plain decoding, fp8/q4_0":
                said[f"{turn} {result.check}"] = result.fault
    return said


@pytest.mark.parametrize("number", range(len(RED)), ids=[change.__name__ for _, change, _ in RED])
def test_a_verifier_notices_and_says(number: int, spoiled: dict[str, str]) -> None:
    name, _, words = RED[number]
    turn = [each for each, _, _ in RED[:number]].count(name)
    assert words in spoiled[f"{turn} {name}"]


# Comparing


@pytest.fixture(scope="module")
def few(small_kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of four cases."""
    names = {"append_kv vector pairs_q8_0_q5_1_96x64", "gdn_scan 2 states of 32, 5 rows", "cache refusals"}

    def keep(manifest: dict[str, Any]) -> None:
        manifest["cases"] = [case for case in manifest["cases"] if case["id"] in names | {"cache borrowed K/V"}]

    return changed(small_kit, tmp_path_factory.mktemp("few") / "kit", keep)


def test_two_kits_differ_in_words(few: Path, tmp_path: Path) -> None:
    def one(manifest: dict[str, Any]) -> None:
        manifest["made_by"] = "a port"
        rewritten(tmp_path / "one", manifest, output(manifest["cases"][0], "k"), lambda a: a.__setitem__(3, a[3] ^ 255))

    fault = kit.compare(few, changed(few, tmp_path / "one", one))
    before, after = arrays_of(Kit(few), Kit(few).cases[0], "out")["k"][3], arrays_of(Kit(few), Kit(few).cases[0], "in")
    assert fault == (
        "case 'append_kv vector pairs_q8_0_q5_1_96x64': k afterwards[3] is "
        f"{before} in the first, {before ^ 255} in the second (1 of {after['k'].size} differ)"
    )

    def fewer(manifest: dict[str, Any]) -> None:
        del manifest["cases"][-1]

    fault = kit.compare(few, changed(few, tmp_path / "fewer", fewer))
    assert "'cache borrowed K/V' is only in" in fault

    def other(manifest: dict[str, Any]) -> None:
        case_of(manifest, "cache refusals")["steps"][0]["error"] = "ConfigError"

    fault = kit.compare(few, changed(few, tmp_path / "other", other))
    assert fault == "case 'cache refusals': call 0, attend: it.error is 'StateError', not 'ConfigError'"


@pytest.mark.parametrize(("factor", "same"), [(0.5, True), (2.0, False)])
def test_what_differs_within_its_tolerance_is_no_difference(
    factor: float, same: bool, few: Path, tmp_path: Path
) -> None:
    def shift(manifest: dict[str, Any]) -> None:
        entry = output(case_of(manifest, "gdn_scan 2 states of 32, 5 rows"), "out")
        by = factor * entry["tolerance"]
        rewritten(tmp_path / "kit", manifest, entry, lambda a: a.__setitem__(1, a[1] + by * np.abs(a).max()))

    assert (kit.compare(few, changed(few, tmp_path / "kit", shift)) == "") is same


# The command


def test_the_command_exports_verifies_and_compares(
    small_kit: Path, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    monkeypatch.setattr(kit, "export", lambda folder, small: shutil.copytree(small_kit, folder) and 7)
    assert cli.main(["vectors", "export", str(tmp_path / "kit"), "--small"]) == 0
    assert capsys.readouterr().out.startswith("7 cases, ")
    assert cli.main(["vectors", "verify", str(few), "--device", "host"]) == 0
    assert capsys.readouterr().out == "ALL GREEN (4 cases)\n"
    assert cli.main(["vectors", "compare", str(few), str(few)]) == 0
    assert cli.main(["vectors", "compare", str(few), str(small_kit)]) == 1
    assert capsys.readouterr().out.startswith("the kits say the same\ncase 0 is ")
    bad = changed(few, tmp_path / "bad", lambda m: rewritten(tmp_path / "bad", m, output(m["cases"][0], "k"), negate))
    assert cli.main(["vectors", "verify", str(bad), "--device", "host", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["device"], said["checks"], said["failed"]) == ("host", 4, 1)
    assert cli.main(["vectors", "verify", str(tmp_path), "--device", "host"]) == 2
    assert "manifest.json: No such file" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["vectors", "export", str(few)]) == 2
    assert "is not empty; a kit goes into a folder of its own" in capsys.readouterr().err


def negate(array: Any) -> None:
    array[:] = ~array


# The schema


@pytest.mark.parametrize(
    ("value", "rule", "words"),
    [
        (1, {"type": "string"}, "is 1; it takes string"),
        (True, {"type": "integer"}, "is True; it takes integer"),
        (1.0, {"type": ["integer", "null"]}, "is 1.0; it takes integer or null"),
        (math.inf, {"type": "number"}, "is inf; it takes number"),
        (1, {"const": True}, "is 1, not True"),
        ("c", {"enum": ["a", "b"]}, "takes one of 'a', 'b'"),
        (7, {"minimum": 8}, "must lie in 8 .. inf"),
        (2**80, {"maximum": 8}, "is a number of 81 bits"),
        ("abc", {"maxLength": 2}, "has 3 characters; at most 2"),
        ("../x", {"pattern": "^[a-z]+$"}, "not of the form"),
        ([1, 2], {"maxItems": 1}, "has 2 entries; 0 .. 1"),
        ([1, "x"], {"items": {"type": "integer"}}, "the manifest[1] is 'x'"),
        ({}, {"required": ["a", "b"]}, "lacks a, b"),
        ({"a": 1}, {"additionalProperties": False}, "has 'a', which it may not"),
        ({"a": {"b": 1}}, {"properties": {"a": {"properties": {"b": {"const": 2}}}}}, "the manifest.a.b is 1"),
        ({"a": 1}, {"additionalProperties": {"type": "null"}}, "the manifest.a is 1"),
        ({"a": 1}, {"allOf": [{"if": {"required": ["a"]}, "then": {"required": ["b"]}}]}, "lacks b"),
        (3, {"$ref": "#/$defs/two", "$defs": {"two": {"const": 2}}}, "is 3, not 2"),
    ],
)
def test_what_breaks_a_schema_is_named(value: Any, rule: dict[str, Any], words: str) -> None:
    assert words in violation(value, rule)


def test_the_schema_of_the_manifest_uses_no_keyword_that_nobody_checks() -> None:
    notes = {"$schema", "$defs", "title", "description"}

    def walk(rule: dict[str, Any]) -> None:
        assert set(rule) <= KEYWORDS | notes
        inner = [*rule.get("properties", {}).values(), *rule.get("$defs", {}).values(), *rule.get("allOf", ())]
        inner += [rule[name] for name in ("items", "additionalProperties", "if", "then") if name in rule]
        for each in inner:
            if isinstance(each, dict):
                walk(each)

    walk(json.loads(packaged("manifest.schema.json")))


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (1, {"type": "number", "minimum": 1, "maximum": 1}),
        (None, {"type": ["object", "null"], "required": ["a"]}),
        ({"a": 2}, {"allOf": [{"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}]}),
        ([], {"type": "array", "items": {"type": "null"}}),
    ],
)
def test_what_keeps_a_schema_passes(value: Any, rule: dict[str, Any]) -> None:
    assert violation(value, rule) == ""
