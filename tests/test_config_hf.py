"""ModelConfig from config.json: which key gives which field, the defaults, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gguf_files import outcome, without
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memra_driver.config import ModelConfig, SsmConfig
from memra_driver.errors import ConfigError

HF_QWEN = {
    "model_type": "qwen3_5",
    "vocab_size": 5,
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "mtp_num_hidden_layers": 1,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-06,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
    },
}
HF_LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def qwen_with(**changes: object) -> dict[str, Any]:
    return {**HF_QWEN, "text_config": {**HF_QWEN["text_config"], **changes}}  # type: ignore[dict-item]


def test_a_qwen_config_json(hf: Path) -> None:
    hf.write_text(json.dumps(HF_QWEN))
    want = ModelConfig(
        arch="qwen35",
        n_layer=9,  # 8 and the MTP block, as a GGUF file counts
        n_embd=128,
        n_ff=96,
        n_head=4,
        n_head_kv=2,
        head_dim_k=64,
        head_dim_v=64,
        n_vocab=1000,
        context_length=4096,
        rms_eps=1e-6,
        rope_freq_base=1e7,
        rope_dim_count=16,
        full_attention_interval=4,
        nextn_predict_layers=1,
        ssm=SsmConfig(4, 64, 16, 4, 2),
    )
    for path in (hf, hf.parent, str(hf), str(hf.parent)):
        assert ModelConfig.from_hf(path) == want
        assert ModelConfig.load(path) == want


@pytest.mark.parametrize(
    ("model_type", "arch", "hybrid"),
    [
        ("qwen3", "qwen3", False),
        ("qwen3_moe", "qwen3moe", False),
        ("qwen3_next", "qwen35", True),
        ("qwen3_5_moe", "qwen35moe", True),
        ("qwen3_5_moe_text", "qwen35moe", True),
        ("minimax_m3_vl", "minimax-m3", True),
        ("hy_v3", "hy3", True),
        ("hy3", "hy3", True),
        ("glm_moe_dsa", "glm-dsa", True),
        ("olmoe", "olmoe", False),
        ("something_new", "something_new", False),
    ],
)
def test_a_model_type_names_the_architecture(hf: Path, model_type: str, arch: str, hybrid: bool) -> None:
    hf.write_text(json.dumps({**HF_LLAMA, "model_type": model_type}))
    cfg = ModelConfig.from_hf(hf)
    assert (cfg.arch, cfg.ssm) == (arch, SsmConfig() if hybrid else None)


def test_defaults_of_a_config_json_that_says_little(hf: Path) -> None:
    hf.write_text("\ufeff" + json.dumps({**HF_LLAMA, "head_dim": None, "text_config": None}), "utf-8")
    assert ModelConfig.from_hf(hf) == ModelConfig(
        arch="llama", n_layer=2, n_embd=64, n_head=2, n_head_kv=2, head_dim_k=32, head_dim_v=32
    )


@pytest.mark.parametrize(
    ("keys", "nextn"),
    [
        ({"num_nextn_predict_layers": 2, "mtp_num_hidden_layers": 1}, 2),
        ({"num_nextn_predict_layers": None, "mtp_num_hidden_layers": 1}, 1),
        ({"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 1}, 0),
        ({}, 0),
    ],
)
def test_mtp_blocks_come_on_top_of_the_hidden_layers(hf: Path, keys: dict[str, Any], nextn: int) -> None:
    hf.write_text(json.dumps({**HF_LLAMA, **keys}))
    cfg = ModelConfig.from_hf(hf)
    assert (cfg.n_layer, cfg.nextn_predict_layers, cfg.n_trunk) == (2 + nextn, nextn, 2)


@pytest.mark.parametrize(
    ("config", "key", "problem"),
    [
        (without(HF_LLAMA, "model_type"), "model_type", "missing"),
        (without(HF_LLAMA, "num_hidden_layers"), "num_hidden_layers", "missing"),
        (without(HF_LLAMA, "hidden_size"), "hidden_size", "missing"),
        (without(HF_LLAMA, "num_attention_heads"), "num_attention_heads", "missing"),
        ({**HF_LLAMA, "num_hidden_layers": "2"}, "num_hidden_layers", "a str, where a whole number"),
        ({**HF_LLAMA, "num_hidden_layers": 2.0}, "num_hidden_layers", "a float, where a whole number"),
        ({**HF_LLAMA, "num_hidden_layers": True}, "num_hidden_layers", "a bool, where a whole number"),
        ({**HF_LLAMA, "num_hidden_layers": -2}, "num_hidden_layers", "-2 is outside"),
        ({**HF_LLAMA, "num_hidden_layers": 0}, "num_hidden_layers", "0 is outside 1"),
        ({**HF_LLAMA, "num_hidden_layers": 10**30}, "num_hidden_layers", "a number of 100 bits is outside"),
        ({**HF_LLAMA, "num_hidden_layers": 100_000}, "num_hidden_layers", "100000 is outside 1 .. 65536"),
        ({**HF_LLAMA, "num_attention_heads": [2, 2]}, "num_attention_heads", "a list"),
        ({**HF_LLAMA, "rms_norm_eps": "1e-6"}, "rms_norm_eps", "a str, where a number"),
        ({**HF_LLAMA, "rms_norm_eps": 1e39}, "rms_norm_eps", "1e[+]39 is not a finite f32"),
        ({**HF_LLAMA, "rope_theta": 10**400}, "rope_theta", "inf is not a finite f32"),
        ({**HF_LLAMA, "rope_parameters": 5}, "rope_parameters", "a int, where an object"),
        ({**HF_LLAMA, "text_config": [1]}, "text_config", "a list, where an object"),
        ({**HF_LLAMA, "full_attention_interval": 4}, "full_attention_interval", "no recurrent layers"),
        ({**HF_LLAMA, "layer_types": ["full_attention"]}, "layer_types", "not a list of 2 entries"),
        ({**HF_LLAMA, "layer_types": ["linear_attention"] * 2}, "layer_types", "makes layer 0 attention"),
        ({**HF_LLAMA, "model_type": "gemma4"}, "model_type", "differ in size"),
        ({**HF_LLAMA, "model_type": "step3p5"}, "model_type", "differ in size"),
        (qwen_with(full_attention_interval=None), "layer_types", "interval 0 makes layer 0 attention"),
        (qwen_with(full_attention_interval=3), "layer_types", "interval 3 makes layer 2 attention"),
        (qwen_with(linear_conv_kernel_dim=None), "linear_conv_kernel_dim", "missing"),
        (qwen_with(linear_value_head_dim=32), "linear_value_head_dim", "32 is not linear_key_head_dim, 16"),
    ],
)
def test_a_config_json_is_refused_by_file_and_key(hf: Path, config: dict[str, Any], key: str, problem: str) -> None:
    hf.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{key}: .*{problem}") as caught:
        ModelConfig.from_hf(hf.parent)
    assert str(caught.value).startswith(f"{hf}: ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 64,
        b"{",
        b"[]",
        b"7",
        b"null",
        b'"config"',
        b"\xff\xfe{}",
        b'{"model_type": "llama", "num_hidden_layers": NaN}',
        b'{"rms_norm_eps": Infinity}',
        b'{"num_hidden_layers": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
    ids=range(13),
)
def test_what_is_not_a_json_object_is_refused(hf: Path, data: bytes) -> None:
    hf.write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        ModelConfig.from_hf(hf)


def test_a_huge_config_json_is_not_read(hf: Path) -> None:
    hf.write_bytes(b"{}")
    os.truncate(hf, 20 * 10**9)
    with pytest.raises(ConfigError, match="more than 16 MiB"):
        ModelConfig.from_hf(hf)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*HF_QWEN["text_config"], "text_config", "rope_theta"]), JSON, max_size=4))
def test_any_values_give_a_config_or_a_config_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**HF_QWEN["text_config"], **changes}))  # type: ignore[dict-item]
    got = outcome(path)
    assert str(path) in got if isinstance(got, str) else got.n_layer >= 1
