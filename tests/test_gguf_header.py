"""GGUF headers are read without the tensors, whatever the file's size, and hostile ones do no harm."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import (
    ARCH,
    GEMMA,
    HUGE,
    LLAMA,
    NUMBERS,
    QWEN,
    STEP,
    entry,
    outcome,
    raw_gguf,
    text,
    u32,
    u64,
    write_gguf,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memra_driver import config_files, gguf_header
from memra_driver.config import ModelConfig
from memra_driver.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_a_20_gb_file_costs_its_header_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"tokenizer.ggml.tokens": [f"token {i}" for i in range(50_000)]}
    write_gguf(file, "qwen35", QWEN, plain=tokens, tensors={"token_embd.weight": np.zeros((77, 64), np.float16)})
    header_bytes = file.stat().st_size
    os.truncate(file, 20 * 10**9)
    read = []
    plain_open = config_files._open

    class Counting:
        def __init__(self, path: str) -> None:
            self._file = plain_open(path)

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def read(self, count: int) -> bytes:
            data = self._file.read(count)
            read.append(len(data))
            return data

    monkeypatch.setattr(config_files, "_open", Counting)
    ModelConfig.from_gguf(file)  # imports the gguf package
    read.clear()
    start = time.perf_counter()
    cfg = ModelConfig.from_gguf(file)
    assert time.perf_counter() - start < 1.0
    assert (cfg.n_layer, cfg.n_vocab) == (9, 77)
    assert sum(read) <= header_bytes + 2 * gguf_header._WINDOW


def test_a_header_is_enough_and_every_cut_of_it_is_refused(file: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((7, 64), np.float16), "output.weight": np.zeros((7, 64), np.float32)}
    write_gguf(file, "gemma4", GEMMA, plain={"general.name": "é", "tokens": ["a", "", "ccc"]}, tensors=tensors)
    data = file.read_bytes()
    want = ModelConfig.from_gguf(file)
    readable = []
    for cut in range(len(data), -1, -1):
        os.truncate(file, cut)
        got = outcome(file)
        if isinstance(got, str):
            assert str(file) in got
        else:
            assert got == want
            readable.append(cut)
    first = readable[-1]
    assert readable == list(range(len(data), first - 1, -1))  # no cut of the header passes
    tensor_bytes = 7 * 64 * (2 + 4)
    assert tensor_bytes <= len(data) - first < tensor_bytes + 32  # what comes after it is padding and tensors


def test_the_hand_made_file_is_sound(file: Path) -> None:
    file.write_bytes(raw_gguf(ARCH, *NUMBERS))
    assert ModelConfig.from_gguf(file).n_layer == 2
    file.write_bytes(raw_gguf(ARCH, *NUMBERS, version=2))
    assert ModelConfig.from_gguf(file).n_layer == 2


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "inside it"),
        (b"GGU", "inside it"),
        (b"\x00" * 64, "not a GGUF file"),
        (b"FUGG" + raw_gguf()[4:], "not a GGUF file"),
        (raw_gguf(version=1), "version: 1 is not 2 or 3"),
        (raw_gguf(version=4), "version: 4 is not 2 or 3"),
        (raw_gguf(version=0), "version: 0 is not 2 or 3"),
        (raw_gguf(version=3 << 24), "big-endian"),
        (raw_gguf(*NUMBERS), "general.architecture: missing"),
        (raw_gguf(entry("general.architecture", 4, u32(1))), "general.architecture: missing, or not a string"),
        (raw_gguf(n_keys=HUGE), f"{HUGE} keys"),
        (raw_gguf(n_keys=5), "5 keys do not fit"),
        (raw_gguf(ARCH, *NUMBERS, n_tensors=HUGE), f"{HUGE} tensors"),
        (raw_gguf(ARCH, *NUMBERS, n_tensors=1), "1 tensors do not fit"),
        (raw_gguf(u64(HUGE), rest=b"x" * 20), f"key 0: a string of {HUGE} bytes"),
        (raw_gguf(u64(70_000), rest=b"x" * 80_000), "key 0: a string of 70000 bytes"),
        (raw_gguf(u64(1000), rest=b"x" * 20), "key 0: the file ends"),
        (raw_gguf(entry(b"\xff\xfe", 4, u32(1)), rest=b"x" * 20), "key 0: not UTF-8"),
        (raw_gguf(entry("general.architecture", 8, text(b"\xc3"))), "general.architecture: not UTF-8"),
        (raw_gguf(entry("general.architecture", 8, u64(HUGE)), rest=b"x" * 20), "general.architecture: the file ends"),
        (raw_gguf(entry("general.architecture", 8, text("x" * 70_000))), "a string of 70000 bytes"),
        (raw_gguf(entry("a", 13, u64(1))), "a: unknown value type 13"),
        (raw_gguf(entry("a", HUGE >> 32, u64(1))), "a: unknown value type 4294967295"),
        (raw_gguf(entry("a", 9, u32(4) + u64(HUGE)), rest=b"x" * 20), f"a: {HUGE} elements"),
        (raw_gguf(entry("a", 9, u32(4) + u64(9)), rest=b"x" * 20), "a: 9 elements do not fit"),
        (raw_gguf(entry("a", 9, u32(8) + u64(HUGE)), rest=b"x" * 20), f"a: {HUGE} strings"),
        (raw_gguf(entry("a", 9, u32(8) + u64(2) + u64(HUGE) + text("b"))), "a: the file ends"),
        (raw_gguf(entry("a", 9, u32(8) + u64(1) + u64(HUGE))), "a: the file ends"),
        (raw_gguf(entry("a", 9, u32(9) + u64(1) + u32(4) + u64(1) + u32(1))), "a: an array of arrays"),
        (raw_gguf(entry("a", 9, u32(77) + u64(1)), rest=b"x" * 20), "a: unknown value type 77"),
        (raw_gguf(ARCH, ARCH), "general.architecture: appears twice"),
        (raw_gguf(entry("a\x1b[2J" + "b" * 200, 77, u64(1))), r"'a\\x1b[2J"),
        (raw_gguf(ARCH, *NUMBERS, n_tensors=1, rest=text("t") + u32(9) + b"\x00" * 90), "t: 9 dimensions"),
        (raw_gguf(ARCH, *NUMBERS, n_tensors=1, rest=u64(HUGE) + b"\x00" * 20), "tensor 0: a string of"),
        (raw_gguf(ARCH, *NUMBERS, n_tensors=1, rest=text(b"\xff") + b"\x00" * 30), "tensor 0: not UTF-8"),
        (raw_gguf(ARCH, *NUMBERS, n_tensors=1, rest=text("t" * 12) + u32(1)), "t{12}: the file ends"),
        (
            raw_gguf(ARCH, *NUMBERS, n_tensors=1, rest=text("token_embd.weight") + u32(2) + u64(HUGE) * 2 + bytes(12)),
            f"llama.vocab_size: {HUGE} is outside",
        ),
    ],
)
def test_a_hostile_header_is_refused(file: Path, data: bytes, problem: str) -> None:
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")) as caught:
        ModelConfig.from_gguf(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(file))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([entry("a", 9, u32(8) + u64(2**31))], "2147483648 strings"),
        ([entry("a", 9, u32(0) + u64(10**10))], "10000000000 elements"),
        ([entry("a", 9, u32(0) + u64(130 << 20))], "136314880 elements"),
        ([entry("a", 8, u64(10**10))], "reaches past 128 MiB"),
        ([entry("a", 9, u32(8) + u64(1 << 22))], "general.architecture: missing"),  # so many empty strings
        ([ARCH, *NUMBERS, entry("llama.rope.dimension_sections", 9, u32(0) + u64(100 << 20))], "104857600 elements"),
    ],
)
def test_a_hole_of_20_gb_drives_neither_loops_nor_memory(file: Path, entries: list[bytes], problem: str) -> None:
    file.write_bytes(raw_gguf(*entries))
    os.truncate(file, 20 * 10**9)
    with pytest.raises(ConfigError, match=problem):
        ModelConfig.from_gguf(file)


@pytest.fixture(scope="module")
def sound_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    folder = tmp_path_factory.mktemp("sound")
    tensors = {"token_embd.weight": np.zeros((7, 4), np.float16)}
    made = [
        write_gguf(folder / f"{arch}.gguf", arch, keys, plain={"tokens": ["a", "bb"]}, tensors=tensors).read_bytes()
        for arch, keys in (("qwen35", QWEN), ("gemma4", GEMMA), ("step35", STEP), ("llama", LLAMA))
    ]
    return folder / "corrupt.gguf", made


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_a_corrupt_file_gives_a_config_or_a_config_error(
    sound_files: tuple[Path, list[bytes]], which: int, patches: list[tuple[int, bytes]], shape: int
) -> None:
    path, made = sound_files
    data = bytearray(made[which])
    for at, patch in patches:
        at %= len(data)
        if shape == 1:
            data[at:at] = patch  # everything behind it moves
        elif shape == 2:
            del data[at : at + len(patch)]
        else:
            data[at : at + len(patch)] = patch
    path.write_bytes(data)
    got = outcome(path)
    if isinstance(got, str):
        assert str(path) in got
    else:
        assert 1 <= got.n_layer <= 65_536
        assert got.kv_heads(0) >= 0
        assert got.head_dims(got.n_layer - 1) >= (0, 0)
