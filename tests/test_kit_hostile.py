"""A saved kit is a stranger's file: whatever is wrong with it is refused by name, before it is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_kits
import numpy as np
import pytest
import tally

from memra_driver import kit
from memra_driver.errors import KitError
from memra_driver.kit import files as kit_files
from memra_driver.kit.files import Kit, fnv1a64
from memra_driver.kvdev import HostDev


@pytest.fixture(scope="module")
def tiny(small_kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz_kits.tiny_kit(small_kit, tmp_path_factory.mktemp("tiny") / "kit")


Change = Callable[[dict[str, Any], Path], None]


def changed(tiny: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(tiny, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest, folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_the_kit_that_is_changed_here_is_good(tiny: Path) -> None:
    assert [result.line() for result in kit.verify(HostDev(), tiny) if result.fault] == []


def first(manifest: dict[str, Any], op: str = "append_kv") -> dict[str, Any]:
    case: dict[str, Any] = next(case for case in manifest["cases"] if case["op"] == op)
    return case


def array(manifest: dict[str, Any], **fields: Any) -> None:
    first(manifest)["arrays"][0].update(fields)


def arguments(manifest: dict[str, Any], op: str = "append_kv", **fields: Any) -> None:
    first(manifest, op)["args"].update(fields)


def link(manifest: dict[str, Any], folder: Path) -> None:
    (folder / "formats.bin").rename(folder.parent / "elsewhere.bin")
    (folder / "formats.bin").symlink_to(folder.parent / "elsewhere.bin")


def pipe(manifest: dict[str, Any], folder: Path) -> None:
    (folder / "formats.bin").unlink()
    os.mkfifo(folder / "formats.bin")


def sparse(manifest: dict[str, Any], folder: Path) -> None:
    with (folder / "formats.bin").open("r+b") as file:
        file.truncate(1 << 40)
    next(each for each in manifest["files"] if each["name"] == "formats.bin")["bytes"] = 1 << 40


def many(manifest: dict[str, Any], folder: Path) -> None:
    """Each file alone would be read."""
    for number in range(3):
        (folder / f"more{number}.bin").touch()
        os.truncate(folder / f"more{number}.bin", 400 << 20)
        manifest["files"].append({"name": f"more{number}.bin", "bytes": 400 << 20})


def shorter(manifest: dict[str, Any], folder: Path) -> None:
    (folder / "formats.bin").write_bytes((folder / "formats.bin").read_bytes()[:-1])


def flip(manifest: dict[str, Any], folder: Path) -> None:
    raw = bytearray((folder / "formats.bin").read_bytes())
    raw[0] ^= 1
    (folder / "formats.bin").write_bytes(raw)


def twice(manifest: dict[str, Any], key: str) -> None:
    manifest[key].append(manifest[key][0])


def option(manifest: dict[str, Any], **fields: Any) -> None:
    first(manifest, "cache")["args"]["options"].update(fields)


def step(manifest: dict[str, Any], which: str, **fields: Any) -> None:
    next(each for each in first(manifest, "cache")["steps"] if each["op"] == which).update(fields)


BAD: dict[str, tuple[Change, str]] = {
    "a path upwards": (lambda m, _: array(m, file="../elsewhere.bin"), "not of the form"),
    "a name of two lines": (lambda m, _: array(m, file="formats.bin\n"), "not of the form"),
    "an absolute path": (lambda m, _: array(m, file="/etc/passwd"), "not of the form"),
    "a file that is not listed": (lambda m, _: array(m, file="other.bin"), "which the manifest does not list"),
    "a listed file that is none": (lambda m, _: m["files"].append({"name": "x.bin", "bytes": 1}), "No such file"),
    "a link out of the folder": (link, "formats.bin: Too many levels of symbolic links"),
    "a pipe that nobody writes": (pipe, "is no regular file"),
    "a file of a terabyte": (sparse, "bytes; at most"),
    "files of more than a gigabyte together": (many, "bytes; at most 536870912 are read"),
    "a file that is too short": (shorter, "the manifest says"),
    "a changed byte": (flip, "its digest is"),
    "an array beyond its file": (lambda m, _: array(m, offset=1 << 30), "do not lie in formats.bin"),
    "an array that is not aligned": (lambda m, _: array(m, offset=4), "do not lie in formats.bin"),
    "a shape of another size": (lambda m, _: array(m, shape=[7]), "are not [7] of f32"),
    "a shape that overflows": (lambda m, _: array(m, shape=[2**40, 2**40]), "are not [1099511627776, 1099511627776]"),
    "a negative shape": (lambda m, _: array(m, shape=[-1]), "shape[0] is -1"),
    "a type that is none": (lambda m, _: array(m, dtype="f64"), "dtype is 'f64'"),
    "a type of another size": (lambda m, _: array(m, dtype="u8"), "of u8"),
    "another role": (lambda m, _: array(m, role="inout"), "role is 'inout'"),
    "two cases of one name": (lambda m, _: twice(m, "cases"), "two cases are called"),
    "a file that is listed twice": (lambda m, _: twice(m, "files"), "is listed twice"),
    "an array that stands there twice": (lambda m, _: twice(first(m), "arrays"), "stands there twice"),
    "another format of kits": (lambda m, _: m.update(format="memra-kit-2"), "not 'memra-kit-1'"),
    "an unknown field": (lambda m, _: m.update(extra=1), "has 'extra', which it may not"),
    "no cases": (lambda m, _: m["cases"].clear(), "cases has 0 entries"),  # which would all be green
    "a field that is missing": (lambda m, _: m.pop("files"), "lacks files"),
    "an operation that is none": (lambda m, _: first(m).update(op="system"), "op is 'system'"),
    "an argument that is missing": (lambda m, _: first(m)["args"].pop("rows"), "lacks the numbers rows"),
    "more rows than there are": (lambda m, _: arguments(m, rows=4), "k_rows has 192 elements"),
    "a larger plane than there is": (lambda m, _: arguments(m, max_ctx=2**31 - 1), "append_kv with these arguments"),
    "another token size": (lambda m, _: arguments(m, k_tok_bytes=67), "k_tok_bytes is 67"),
    "a format that K cannot have": (lambda m, _: arguments(m, k_format=2), "k_format is 2"),
    "an alias that is none": (lambda m, _: arguments(m, conv_state="ring_old"), "nothing that append_kv takes"),
    "an array that nobody takes": (lambda m, _: array(m, name="q"), "nothing that append_kv takes"),
    "heads that do not divide": (lambda m, _: arguments(m, "attend", n_head=3), "3 query heads over 2"),
    "a state that no kernel has": (lambda m, _: arguments(m, "gdn_scan", state_size=48), "state_size is 48"),
    "a cache of a terabyte": (lambda m, _: first(m, "cache")["args"].update(max_ctx=2**31 - 1), "bytes; 1 and"),
    "scratch of a terabyte": (lambda m, _: option(m, max_rows=2**31 - 1), "bytes; 1 and"),
    "a snapshot that is none": (lambda m, _: step(m, "rollback", slot=3), "there is no snapshot 3"),
    "the fifth snapshot": (lambda m, _: step(m, "snapshot", slot=4), "slot is 4"),
    "a call without its argument": (lambda m, _: step(m, "snapshot", op="rollback"), "lacks accept"),
    "a call that is none": (lambda m, _: step(m, "snapshot", op="close"), "op is 'close'"),
    "a layer that is none": (lambda m, _: step(m, "attend", layer=9), "attend in layer 9"),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused(name: str, tiny: Path, tmp_path: Path) -> None:
    change, words = BAD[name]
    with pytest.raises(KitError) as error:
        list(kit.verify(HostDev(), changed(tiny, tmp_path / "kit", change)))
    assert words in str(error.value)


def test_a_range_that_many_arrays_share_is_hashed_once_and_all_of_them_up_to_a_limit(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(manifest: dict[str, Any], folder: Path) -> None:
        manifest["cases"] = [first(manifest)]
        entry = first(manifest)["arrays"][0]
        first(manifest)["arrays"] += [{**entry, "name": f"n{i}"} for i in range(50)]

    kit_of_one = changed(tiny, tmp_path / "kit", shared)
    hashed: list[int] = []
    monkeypatch.setattr(kit_files, "fnv1a64", lambda data: hashed.append(data.nbytes) or fnv1a64(data))
    entries = Kit(kit_of_one).cases[0]["arrays"]
    assert len(hashed) == len({(each["file"], each["offset"], each["bytes"]) for each in entries}) < len(entries) - 49
    monkeypatch.setattr(kit_files, "MAX_ARRAY_BYTES", sum(hashed) - 1)
    with pytest.raises(KitError, match=f"with it the arrays have {sum(hashed)} bytes; at most {sum(hashed) - 1}"):
        Kit(kit_of_one)


def test_options_that_no_cache_can_have_are_a_fault_of_the_case(tiny: Path, tmp_path: Path) -> None:
    wrong = changed(tiny, tmp_path / "kit", lambda m, _: option(m, reserve_taps=[1, [2]]))
    (fault,) = [result.fault for result in kit.verify(HostDev(), wrong) if result.fault]
    assert fault.startswith("ConfigError: CacheOptions.reserve_taps is [1, [2]]")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "codec can't decode"),
        (b"[" * 100_000, ""),
        (b'{"format": 1, "format": 1}', "a key twice"),
        (b'{"format": NaN}', "NaN is no number of JSON"),
        (b'{"format": ' + b"9" * 5000 + b"}", ""),
        (b"[]", "it takes object"),
        (b"1e999", "is inf"),
    ],
    ids=["empty", "not UTF-8", "deep", "a key twice", "NaN", "a long number", "a list", "an infinity"],
)
def test_a_manifest_that_is_none_is_refused(text: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(KitError, match=r"manifest\.json: ") as error:
        Kit(tmp_path)
    assert words in str(error.value)


def test_a_manifest_beyond_its_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(kit_files.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(KitError, match="at most 67108864 are read"):
        Kit(tmp_path)


# Any change at all


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_no_change_makes_more_than_a_refusal_or_a_fault(first: int, tiny: Path, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        fuzz_kits.try_kit(tiny, tmp_path, seed)
        tally.add("fuzz inputs")


def test_a_raw_change_of_the_manifest_is_refused_or_found(tiny: Path, tmp_path: Path) -> None:
    def few(manifest: dict[str, Any], folder: Path) -> None:
        manifest["cases"] = manifest["cases"][:2]

    whole = changed(tiny, tmp_path / "whole", few)
    shutil.copytree(whole, tmp_path / "kit")
    text = (whole / "manifest.json").read_bytes()
    chance = np.random.default_rng(0)
    outcomes = {"refused": 0, "differs": 0, "same": 0}
    for _ in range(200):
        at, gone, come = (int(chance.integers(0, limit)) for limit in (len(text), 3, 3))
        raw = text[:at] + bytes(chance.integers(32, 127, come, np.uint8)) + text[at + gone :]
        (tmp_path / "kit" / "manifest.json").write_bytes(raw)
        tally.add("fuzz inputs")
        try:
            outcomes["differs" if kit.compare(whole, tmp_path / "kit") else "same"] += 1
        except KitError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100
    assert outcomes["differs"] > 0
