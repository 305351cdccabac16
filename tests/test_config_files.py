"""ModelConfig from GGUF files: which key gives which field, the defaults, and what is refused by which name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import ARCH, GEMMA, LLAMA, NUMBERS, QWEN, STEP, raw_gguf, without, write_gguf

from memra_driver import gguf_header
from memra_driver.config import LayerKind, MlaConfig, ModelConfig, SsmConfig, Step35Config
from memra_driver.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


# GGUF: rules and defaults.


@pytest.mark.parametrize(
    ("arch", "known_as"),
    [("qwen35", "qwen35"), ("qwen35moe", "qwen35moe"), ("qwen3next", "qwen35"), ("qwen3nextmoe", "qwen35moe")],
)
def test_a_qwen_file(file: Path, arch: str, known_as: str) -> None:
    write_gguf(file, arch, QWEN, plain={"general.name": "Tiny é"})
    assert ModelConfig.from_gguf(file) == ModelConfig(
        arch=known_as,
        name="Tiny é",
        n_layer=9,
        n_embd=128,
        n_head=4,
        n_head_kv=2,
        head_dim_k=64,
        head_dim_v=32,
        full_attention_interval=4,
        nextn_predict_layers=1,
        ssm=SsmConfig(4, 64, 16, 4, 2),
    )
    assert ModelConfig.from_gguf(str(file)).n_trunk == 8


def test_a_preset_equals_the_file_of_its_model(file: Path) -> None:
    preset = ModelConfig.from_preset("qwen3.5-9b")
    keys = {
        "block_count": 33,
        "embedding_length": 4096,
        "feed_forward_length": 12_288,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 248_320,
        "context_length": 262_144,
        "full_attention_interval": 4,
        "nextn_predict_layers": 1,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 4096,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 32,
        "ssm.group_count": 16,
    }
    write_gguf(file, "qwen35", keys, plain={"general.name": "qwen3.5-9b"})
    assert ModelConfig.load(str(file)) == preset


def test_defaults_of_a_file_that_says_little(file: Path) -> None:
    write_gguf(file, "llama", LLAMA)
    cfg = ModelConfig.from_gguf(file)
    assert cfg == ModelConfig(arch="llama", n_layer=2, n_embd=64, n_head=2, n_head_kv=2, head_dim_k=32, head_dim_v=32)
    assert (cfg.rms_eps, cfg.rope_freq_base, cfg.rope_dim_count, cfg.rope_sections) == (1e-6, 1e4, 32, ())
    assert (cfg.ssm, cfg.gemma4, cfg.step35, cfg.mla, cfg.name) == (None, None, None, None, "")
    assert all(cfg.layer_kind(il) is LayerKind.FULL for il in range(2))


def test_the_bare_suffix_is_read_where_the_scoped_key_is_absent(file: Path) -> None:
    write_gguf(file, "llama", LLAMA, bare=True)
    assert ModelConfig.from_gguf(file).n_layer == 2
    write_gguf(file, "llama", {**LLAMA, "context_length": 7}, plain={"context_length": 9, "vocab_size": 11})
    cfg = ModelConfig.from_gguf(file)
    assert (cfg.context_length, cfg.n_vocab) == (7, 11)


def test_a_scoped_key_of_the_wrong_type_hides_the_bare_one(file: Path) -> None:
    write_gguf(file, "llama", {**LLAMA, "context_length": "7"}, plain={"context_length": 9})
    assert ModelConfig.from_gguf(file).context_length == 0


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
def test_an_integer_may_have_any_width_and_sign(file: Path, kind: str) -> None:
    write_gguf(file, "llama", {**LLAMA, "context_length": 100}, types={"context_length": kind, "block_count": kind})
    cfg = ModelConfig.from_gguf(file)
    assert (cfg.n_layer, cfg.context_length) == (2, 100)


def test_a_bool_counts_as_an_integer(file: Path) -> None:
    write_gguf(file, "llama", {**LLAMA, "nextn_predict_layers": True})
    assert ModelConfig.from_gguf(file).nextn_predict_layers == 1


@pytest.mark.parametrize("value", ["5", 5.0, [5]])
def test_an_optional_integer_of_another_type_counts_as_absent(file: Path, value: object) -> None:
    write_gguf(file, "llama", {**LLAMA, "attention.head_count_kv": value, "full_attention_interval": value})
    cfg = ModelConfig.from_gguf(file)
    assert (cfg.n_head_kv, cfg.full_attention_interval) == (2, 0)


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [(1e-5, "float32", 1e-5), (1e-5, "float64", 1e-5), (1, "uint32", 1e-6), ("1e-5", "string", 1e-6)],
)
def test_a_float_is_f32_or_f64_and_anything_else_the_default(file: Path, value: Any, kind: str, read: float) -> None:
    key = "attention.layer_norm_rms_epsilon"
    write_gguf(file, "llama", {**LLAMA, key: value}, types={key: kind})
    assert ModelConfig.from_gguf(file).rms_eps == read


def test_the_vocabulary_is_the_last_dimension_of_the_embedding(file: Path) -> None:
    tensors = {
        "output.weight": np.zeros((9, 64), np.float32),
        "token_embd.weight": np.zeros((77, 64), np.float16),
        "z": np.zeros(5, np.float32),
    }
    write_gguf(file, "llama", LLAMA, tensors=tensors)
    assert ModelConfig.from_gguf(file).n_vocab == 77
    write_gguf(file, "llama", {**LLAMA, "vocab_size": 78}, tensors=tensors)
    assert ModelConfig.from_gguf(file).n_vocab == 78


def test_a_gemma_file_with_heads_per_layer(file: Path) -> None:
    write_gguf(file, "gemma4", GEMMA, plain={"tokenizer.ggml.suppress_tokens": [3, 5]})
    cfg = ModelConfig.from_gguf(file)
    part = cfg.gemma4
    assert part is not None
    assert (cfg.n_head_kv, part.suppress_tokens) == (8, (3, 5))  # an array is no scalar: n_head_kv is n_head
    assert [cfg.kv_heads(il) * cfg.head_dims(il)[0] for il in (0, 5, 11)] == [2048, 1024, 1024]
    assert (cfg.window(0), cfg.window(5), cfg.ssm) == (1024, None, SsmConfig())
    assert (part.rope_base_global, part.rope_base_swa, part.final_logit_softcapping) == (1e6, 1e4, 30.0)


def test_a_gemma_file_with_one_head_count_and_shared_layers(file: Path) -> None:
    keys = {**GEMMA, "attention.head_count_kv": 2, "attention.shared_kv_layers": 6}
    write_gguf(file, "gemma4", keys)
    cfg = ModelConfig.from_gguf(file)
    assert cfg.gemma4 is not None
    assert (cfg.n_head_kv, cfg.gemma4.head_count_kv) == (2, ())
    assert [cfg.kv_heads(il) * cfg.head_dims(il)[1] for il in (0, 5)] == [512, 1024]
    assert [cfg.kv_source(il) for il in range(12)] == [0, 1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 5]


def test_a_gemma_pattern_of_numbers_is_windowed_where_one(file: Path) -> None:
    write_gguf(file, "gemma4", {**GEMMA, "attention.sliding_window_pattern": [1, 0, 2, 1] * 3})
    cfg = ModelConfig.from_gguf(file)
    assert [cfg.is_windowed(il) for il in range(4)] == [True, False, False, True]


def test_a_step35_file_with_arrays(file: Path) -> None:
    write_gguf(file, "step35", {**STEP, "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4})
    cfg = ModelConfig.from_gguf(file)
    assert (cfg.n_head, cfg.n_head_kv, cfg.head_dim_k, cfg.head_dim_v) == (96, 8, 128, 128)
    assert [cfg.heads(il) for il in range(4)] == [64, 96, 96, 96]
    assert [cfg.window(il) for il in range(5)] == [None, 512, 512, 512, None]
    assert cfg.step35 == Step35Config(
        (64, 96, 96, 96) * 2, (8,) * 8, (False, True, True, True) * 2, 512, 5e6, 1e4, 64, 128
    )


def test_a_step35_file_with_scalars(file: Path) -> None:
    keys = {**STEP, "attention.head_count": 64, "attention.head_count_kv": 8, "attention.sliding_window_pattern": 4}
    write_gguf(file, "step35", {**keys, "rope.freq_base": 7e6, "rope.dimension_count": 96})
    part = ModelConfig.from_gguf(file).step35
    assert part == Step35Config((64,) * 8, (8,) * 8, (False, True, True, True) * 2, 512, 7e6, 7e6, 48, 96)


def test_a_step35_file_without_a_pattern_is_windowed_everywhere(file: Path) -> None:
    write_gguf(file, "step35", without(STEP, "attention.sliding_window_pattern"))
    cfg = ModelConfig.from_gguf(file)
    assert all(cfg.is_windowed(il) for il in range(8))


def test_a_glm_file_keeps_the_latent(file: Path) -> None:
    keys = {
        **LLAMA,
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.q_lora_rank": 2048,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "rope.dimension_count": 64,
    }
    write_gguf(file, "glm-dsa", keys)
    assert ModelConfig.from_gguf(file).mla == MlaConfig(2048, 512, 256, 256, 64)
    write_gguf(file, "glm-dsa", {**keys, "attention.key_length": 512})
    with pytest.raises(ConfigError, match=r"model\.gguf: glm-dsa\.attention\.key_length: 512 is not 512 \+ 64"):
        ModelConfig.from_gguf(file)


@pytest.mark.parametrize(
    ("arch", "keys", "key", "problem"),
    [
        ("llama", without(LLAMA, "block_count"), "llama.block_count", "missing"),
        ("llama", without(LLAMA, "embedding_length"), "llama.embedding_length", "missing"),
        ("llama", without(LLAMA, "attention.head_count"), "llama.attention.head_count", "missing"),
        ("llama", {**LLAMA, "block_count": "2"}, "llama.block_count", "STRING, where a whole number"),
        ("llama", {**LLAMA, "block_count": 2.0}, "llama.block_count", "FLOAT32, where a whole number"),
        ("llama", {**LLAMA, "attention.head_count": [2, 2]}, "llama.attention.head_count", "ARRAY"),
        ("llama", {**LLAMA, "attention.head_count": 0}, "llama.attention.head_count", "0 heads"),
        ("llama", {**LLAMA, "block_count": 0}, "llama.block_count", "outside 1 .. 65536"),
        ("llama", {**LLAMA, "block_count": 4_000_000_000}, "llama.block_count", "outside 1 .. 65536"),
        ("llama", {**LLAMA, "nextn_predict_layers": 3}, "llama.nextn_predict_layers", "3 of only 2 layers"),
        ("llama", {**LLAMA, "full_attention_interval": 4}, "llama.full_attention_interval", "no recurrent layers"),
        ("llama", {**LLAMA, "rope.freq_base": float("nan")}, "llama.rope.freq_base", "nan is not a finite f32"),
        ("qwen35", without(QWEN, "ssm.conv_kernel"), "qwen35.ssm.conv_kernel", "missing"),
        ("qwen35", without(QWEN, "ssm.state_size"), "qwen35.ssm.state_size", "missing"),
        ("gemma4", without(GEMMA, "attention.sliding_window_pattern"), "sliding_window_pattern", "0 entries for 12"),
        ("gemma4", {**GEMMA, "attention.sliding_window_pattern": [True]}, "sliding_window_pattern", "1 entries for 12"),
        ("gemma4", {**GEMMA, "attention.head_count_kv": ["8"]}, "gemma4.attention.head_count_kv", "array of STRING"),
        ("gemma4", {**GEMMA, "attention.head_count_kv": [8.0]}, "gemma4.attention.head_count_kv", "array of FLOAT32"),
        ("gemma4", {**GEMMA, "attention.head_count_kv": [8, -1]}, r"head_count_kv\[1\]", "-1 is outside"),
        ("gemma4", {**GEMMA, "attention.shared_kv_layers": 13}, "gemma4.attention.shared_kv_layers", "13 of only 12"),
        ("step35", without(STEP, "attention.sliding_window"), "step35.attention.sliding_window", "missing"),
        ("step35", without(STEP, "attention.head_count_kv"), "step35.attention.head_count_kv", "missing"),
        ("step35", {**STEP, "attention.head_count": [64] * 7}, "step35.attention.head_count", "7 entries for 8"),
        ("glm-dsa", LLAMA, "glm-dsa.attention.q_lora_rank", "missing"),
    ],
)
def test_a_refusal_names_the_file_and_the_key(
    file: Path, arch: str, keys: dict[str, Any], key: str, problem: str
) -> None:
    write_gguf(file, arch, keys)
    with pytest.raises(ConfigError, match=f"{key}: .*{problem}") as caught:
        ModelConfig.from_gguf(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("kind", "value"), [("int32", -1), ("int64", -(2**63)), ("uint64", 2**32), ("uint64", 2**64 - 1)]
)
def test_an_integer_that_rust_would_wrap_is_refused(file: Path, kind: str, value: int) -> None:
    write_gguf(file, "llama", {**LLAMA, "context_length": value}, types={"context_length": kind})
    with pytest.raises(ConfigError, match=rf"llama\.context_length: {value} is outside 0 \.\. 4294967295"):
        ModelConfig.from_gguf(file)


def test_a_later_part_of_a_split_file_says_so(file: Path) -> None:
    write_gguf(file, "llama", {}, plain={"split.no": 1, "split.count": 2})
    with pytest.raises(ConfigError, match="one part of a split file: open the first"):
        ModelConfig.from_gguf(file)


def test_without_the_gguf_package_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file, "llama", LLAMA)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        ModelConfig.from_gguf(file)


# Paths.


def test_load_knows_a_gguf_file_by_its_first_bytes(tmp_path: Path) -> None:
    blob = write_gguf(tmp_path / "sha256-0123", "llama", LLAMA)
    assert ModelConfig.load(blob) == ModelConfig.from_gguf(blob)


@pytest.mark.parametrize(
    "name", ["absent.gguf", "absent.json", "absent/config.json", "nul\x00.gguf", "x" * 5000 + ".gguf"]
)
def test_a_path_that_cannot_be_opened_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        ModelConfig.load(f"{tmp_path}/{name}")


def test_a_folder_without_a_config_json_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json'?: cannot be opened"):
        ModelConfig.load(tmp_path)
    with pytest.raises(ConfigError, match="not a regular file"):
        ModelConfig.from_gguf(tmp_path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (ModelConfig.load, ModelConfig.from_gguf, ModelConfig.from_hf):
        with pytest.raises(ConfigError, match="not a regular file"):
            read(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_a_config_error(file: Path) -> None:
    file.write_bytes(raw_gguf(ARCH, *NUMBERS))
    file.chmod(0)
    with pytest.raises(ConfigError, match="cannot be opened"):
        ModelConfig.from_gguf(file)


def test_a_file_that_fails_while_it_is_read_is_a_config_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(raw_gguf(ARCH, *NUMBERS))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(gguf_header.GgufHeader, "_string", fail)
    with pytest.raises(ConfigError, match=r"cannot be read: .*Input/output error"):
        ModelConfig.from_gguf(file)
