"""Saved kits as a stranger may have made them: a small sound one with a few values of its manifest changed.

`try_kit(whole, folder, seed)` makes one, verifies and compares it, and holds both to their law: a KitError, or results
with faults that are text, every one a printable line; with bounded memory. Digests are mostly repaired, so that what
stands behind them is reached.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memra_driver import kit
from memra_driver.errors import KitError
from memra_driver.kit import caches as kit_caches
from memra_driver.kit.files import Kit, Writer, fnv1a64
from memra_driver.kvdev import HostDev

SOME = (
    "append_kv q8_0/q4_0 64x32, 3 rows at 5", "append_kv slot -1", "dequant_kv q8_0/q5_1 bf16, rows 3 .. 7",
    "conv_update 33 channels, 4 taps, 1 rows", "conv_ring_rebuild 33 channels, 4 taps, 1 of 1 rows, in place",
    "gdn_prep 2 to 6 heads of 32, 1 rows", "gdn_scan 2 states of 32, 3 rows in place, to the tape",
    "attend q8_0/fp8 2x2 heads of 64/64, 1 rows at 70", "plan fence [0, 2, 4], devices None",
    "plan borrowed K/V, gkv True, wkv True", "plan query heads by layer", "cache truncate",
    "cache snapshots given up",
)  # fmt: skip
VALUES = (
    None, True, False, -1, 0, 1, 2, 3, 31, 2**16, 2**31 - 1, 2**31, 2**40, 2**53, 2**60, 2**64, 2**200, -(2**63), 0.5,
    1e300, "", "q8_0", "../x.bin", "a\x1b[2J\nb", "x" * 300, [], {}, [[]], {"a": 1}, {"a\x1b[2J\nb": 1}, [2**40] * 8,
)  # fmt: skip


def tiny_kit(small_kit: Path, folder: Path) -> Path:
    """A kit of one or two cases of each kind, in files of their own."""
    source, writer = Kit(small_kit), Writer(folder)
    cases = [copy.deepcopy(case) for case in source.cases if case["id"] in SOME]
    assert len(cases) == len(SOME)
    for case in cases:
        for holder in (case, *case.get("steps", ())):
            holder["arrays"] = [
                writer.array(
                    each["file"], each["name"], each["role"], source.array(each).reshape(each["shape"]),
                    each.get("tolerance", 0.0),
                )
                for each in holder["arrays"]
            ]  # fmt: skip
    writer.finish("a test", True, cases)
    return writer.folder


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a JSON value."""
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)


def _repaired(manifest: dict[str, Any], folder: Path) -> None:
    """Corrects every digest."""
    for case in manifest["cases"]:
        for holder in (case, *case.get("steps", ())):
            for each in holder.get("arrays", ()):
                with contextlib.suppress(Exception):
                    raw = (folder / each["file"]).read_bytes()
                    each["fnv1a64"] = fnv1a64(raw[each["offset"] : each["offset"] + each["bytes"]])


def _change(manifest: dict[str, Any], dice: random.Random) -> None:
    whole = not isinstance(manifest.get("cases"), list) or not manifest["cases"] or dice.random() < 0.1
    container, key = dice.choice([*_places(manifest if whole else dice.choice(manifest["cases"]))])
    what = dice.random()
    if what < 0.2:
        del container[key]
    elif what < 0.3 and isinstance(container, list):
        container.insert(key, copy.deepcopy(dice.choice(container)))
    elif what < 0.35 and isinstance(container, dict):
        container[dice.choice(("a\x1b[2J\nb", "op", ""))] = container.pop(key)
    elif what < 0.5 and type(container[key]) is int:
        container[key] += dice.choice((-32, -2, -1, 1, 2, 32))
    else:
        container[key] = copy.deepcopy(dice.choice(VALUES))


def _changed(tiny: Path, folder: Path, dice: random.Random) -> tuple[Path, Path]:
    """Three cases of the kit as they are, and changed."""
    whole, other = folder / "whole", folder / "kit"
    for each in (whole, other):
        shutil.rmtree(each, ignore_errors=True)
        shutil.copytree(tiny, each)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["cases"] = dice.sample(manifest["cases"], 3)
    (whole / "manifest.json").write_text(json.dumps(manifest))
    for _ in range(dice.randint(1, 3)):
        _change(manifest, dice)
        if not isinstance(manifest.get("cases"), list) or not all(isinstance(c, dict) for c in manifest["cases"]):
            break
    if dice.random() < 0.3:
        path = dice.choice(sorted(other.glob("*.bin")))
        raw = np.frombuffer(path.read_bytes(), np.uint8).copy()
        raw[dice.randrange(raw.size) :] = dice.randrange(256)
        path.write_bytes(raw.tobytes())
    with contextlib.suppress(Exception):
        _repaired(manifest, other)
    (other / "manifest.json").write_text(json.dumps(manifest))
    return whole, other


def try_kit(tiny: Path, folder: Path, seed: int) -> bool:
    """Whether the kit was read and found without fault."""
    whole, other = _changed(tiny, folder, random.Random(seed))
    told: list[str] = []
    sound = False
    tracemalloc.start()
    try:
        told = [result.fault for result in kit.verify(HostDev(), other)]
        sound = not any(told)
    except KitError as error:
        told = [str(error)]
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 * kit_caches.MAX_CACHE_BYTES
    try:
        told.append(kit.compare(whole, other))
    except KitError as error:
        told.append(str(error))
    for line in told:
        assert line.isprintable(), line
    return sound
