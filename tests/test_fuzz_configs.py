"""Config files of strangers: a configuration or a ConfigError, whatever their bytes are, at a price that they pay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fuzz_configs
import pytest
import tally
from gguf_files import ARCH, HUGE, NUMBERS, entry, raw_gguf, text, u32, u64
from test_config_hf import HF_LLAMA

from memra_driver.config import ModelConfig
from memra_driver.errors import ConfigError

gguf = pytest.importorskip("gguf")
SEEDS, EACH = range(0, 2000, 500), 500


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    fuzz_configs.warm(tmp_path_factory.mktemp("sound") / "a.gguf")


@pytest.mark.parametrize("first", SEEDS)
def test_a_changed_gguf_file_keeps_to_the_law(tmp_path: Path, first: int) -> None:
    sound = [fuzz_configs.try_gguf(tmp_path / "a.gguf", seed) for seed in range(first, first + EACH)]
    tally.add("fuzz inputs", len(sound))
    assert 10 < sum(sound) < EACH // 2  # both outcomes are reached


@pytest.mark.parametrize("first", SEEDS)
def test_a_changed_config_json_keeps_to_the_law(tmp_path: Path, first: int) -> None:
    sound = [fuzz_configs.try_hf(tmp_path / "config.json", seed) for seed in range(first, first + EACH)]
    tally.add("fuzz inputs", len(sound))
    assert EACH // 4 < sum(sound) < EACH


CLAIMS = [2**20 + 1, 2**32, 2**60, HUGE]
CLAIMED = {
    "keys": lambda n: raw_gguf(ARCH, *NUMBERS, n_keys=n),
    "tensors": lambda n: raw_gguf(ARCH, *NUMBERS, n_tensors=n),
    "bytes of a key": lambda n: raw_gguf(ARCH, u64(n), rest=bytes(64)),
    "bytes of a string": lambda n: raw_gguf(entry("general.architecture", 8, u64(n)), rest=bytes(64)),
    "bytes of a string that is skipped": lambda n: raw_gguf(ARCH, *NUMBERS, entry("a", 8, u64(n)), rest=bytes(64)),
    "numbers that are read": lambda n: raw_gguf(
        ARCH, *NUMBERS, entry("llama.rope.dimension_sections", 9, u32(4) + u64(n)), rest=bytes(64)
    ),
    "strings of an array": lambda n: raw_gguf(ARCH, entry("a", 9, u32(8) + u64(n)), rest=bytes(64)),
    "bytes of the first of an array": lambda n: raw_gguf(ARCH, entry("a", 9, u32(8) + u64(1) + u64(n)), rest=bytes(64)),
    "layers": lambda n: raw_gguf(ARCH, *NUMBERS[1:], entry("llama.block_count", 10, u64(n))),
    "dimensions": lambda n: raw_gguf(ARCH, *NUMBERS, n_tensors=1, rest=text("t") + u32(n % 2**32 or 9) + bytes(64)),
}
READ_ALL = """
import resource, sys
from memra_driver.config import ModelConfig
from memra_driver.errors import ConfigError
sound, *files = sys.argv[1:]
ModelConfig.load(sound)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
for file in files:
    try:
        ModelConfig.load(file)
    except ConfigError as error:
        print(error)
"""


def test_a_number_that_claims_2_to_the_60_is_refused_where_there_is_no_memory_for_it(tmp_path: Path) -> None:
    (tmp_path / "sound.gguf").write_bytes(raw_gguf(ARCH, *NUMBERS))
    files = [tmp_path / "sound.gguf"]
    for name, made in CLAIMED.items():
        for n in CLAIMS:
            files.append(tmp_path / f"{name} {n}.gguf")
            files[-1].write_bytes(made(n))
    (tmp_path / "hole.json").touch()
    os.truncate(tmp_path / "hole.json", 1 << 40)
    files.append(tmp_path / "hole.json")
    command = [sys.executable, "-c", READ_ALL, *files]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = done.stdout.splitlines()
    assert len(refused) == len(files) - 1, done.stdout
    assert all(str(file) in line for file, line in zip(files[1:], refused, strict=True))


def test_a_small_config_json_costs_little(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HF_LLAMA))
    ModelConfig.from_hf(file)
    assert fuzz_configs.cost(lambda: ModelConfig.from_hf(file)) < 1 << 16


@pytest.mark.parametrize("name", ["\ud800", "qwen\x1b[2J", "a\nb", "\x00"])
def test_an_architecture_is_a_name_that_can_be_printed(tmp_path: Path, name: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**HF_LLAMA, "model_type": name}))
    with pytest.raises(ConfigError, match="model_type: missing, or not a name"):
        ModelConfig.from_hf(file)


def test_a_key_of_a_strange_architecture_is_escaped_in_every_message(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    arch = entry("general.architecture", 8, text("a\x1b[2Jb"))
    numbers = [entry(f"a\x1b[2Jb.{key}", 4, u32(value)) for key, value in (
        ("block_count", 2), ("embedding_length", 64), ("attention.head_count", 2), ("nextn_predict_layers", 9),
    )]  # fmt: skip
    file.write_bytes(raw_gguf(arch, *numbers))
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_gguf(file)
    assert str(error.value) == rf"{file}: 'a\x1b[2Jb.nextn_predict_layers'..: 9 of only 2 layers"
