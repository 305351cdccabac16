"""What a layer is, for every preset and for geometries made up; what ModelConfig refuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from memra_driver import config
from memra_driver.config import (
    PRESETS,
    Gemma4Config,
    LayerKind,
    MlaConfig,
    ModelConfig,
    SsmConfig,
    Step35Config,
)
from memra_driver.errors import ConfigError

E4B_SOURCES = [*range(24), *([22, 22, 22, 22, 22, 23] * 3)]


def tiny(**changes: object) -> ModelConfig:
    return ModelConfig(**{"n_layer": 8, "n_head_kv": 2, "head_dim_k": 64, "head_dim_v": 32, **changes})


def gemma(n_layer: int = 12, **changes: object) -> ModelConfig:
    pattern = [il % 6 != 5 for il in range(n_layer)]
    part = Gemma4Config(**{"swa_pattern": pattern, **changes})
    return ModelConfig(n_layer=n_layer, n_head_kv=2, head_dim_k=512, head_dim_v=512, arch="gemma4", gemma4=part)


def full_layers(cfg: ModelConfig) -> list[int]:
    return [il for il in range(cfg.n_layer) if cfg.layer_kind(il) is LayerKind.FULL]


# Presets.


@pytest.mark.parametrize(
    ("name", "n_layer", "n_trunk", "n_full", "conv_dim", "ring", "state", "kv_dim"),
    [
        ("qwen3.5-9b", 33, 32, 8, 8192, 24_576, 524_288, 1024),
        ("qwen3.6-27b", 65, 64, 16, 10_240, 30_720, 786_432, 1024),
        ("qwen3.6-35b-a3b", 41, 40, 10, 8192, 24_576, 524_288, 512),
        ("qwen3.5-122b-a10b", 48, 48, 12, 12_288, 36_864, 1_048_576, 512),
    ],
)
def test_a_qwen_preset_has_the_sizes_of_the_model(
    name: str, n_layer: int, n_trunk: int, n_full: int, conv_dim: int, ring: int, state: int, kv_dim: int
) -> None:
    cfg = ModelConfig.from_preset(name)
    assert (cfg.name, cfg.n_layer, cfg.n_trunk) == (name, n_layer, n_trunk)
    assert full_layers(cfg) == list(range(3, n_trunk, 4))
    assert len(full_layers(cfg)) == n_full
    ssm = cfg.ssm
    assert ssm is not None
    assert (ssm.conv_dim, ssm.conv_dim * ssm.pad) == (conv_dim, ring)
    assert ssm.state_size * ssm.state_size * ssm.time_step_rank == state
    assert ssm.key_dim == 16 * 128
    for il in full_layers(cfg):
        assert [cfg.kv_heads(il) * dim for dim in cfg.head_dims(il)] == [kv_dim, kv_dim]
        assert (cfg.owns_kv(il), cfg.kv_source(il), cfg.window(il)) == (True, il, None)
    assert not cfg.is_gemma


def test_the_trailing_mtp_block_is_no_exception_to_the_interval() -> None:
    cfg = ModelConfig.from_preset("qwen3.5-9b")
    assert full_layers(cfg) == [3, 7, 11, 15, 19, 23, 27, 31]
    assert cfg.layer_kind(32) is LayerKind.LINEAR


@pytest.mark.parametrize(
    ("name", "n_layer", "swa_dim", "global_dim", "window"),
    [
        ("gemma4-26b-a4b", 30, 8 * 256, 2 * 512, 1024),
        ("gemma4-12b", 48, 8 * 256, 1 * 512, 1024),
        ("gemma4-e4b", 42, 2 * 256, 2 * 512, 512),
    ],
)
def test_a_gemma_preset_has_two_kinds_of_layers(
    name: str, n_layer: int, swa_dim: int, global_dim: int, window: int
) -> None:
    cfg = ModelConfig.from_preset(name)
    assert cfg.is_gemma
    assert full_layers(cfg) == list(range(n_layer))
    for il in range(n_layer):
        windowed = il % 6 != 5
        assert cfg.is_windowed(il) is windowed
        assert cfg.window(il) == (window if windowed else None)
        assert [cfg.kv_heads(il) * dim for dim in cfg.head_dims(il)] == [swa_dim if windowed else global_dim] * 2


def test_e4b_borrows_from_the_last_owner_of_the_same_kind() -> None:
    cfg = ModelConfig.from_preset("gemma4-e4b")
    assert [cfg.owns_kv(il) for il in range(42)] == [True] * 24 + [False] * 18
    assert [cfg.kv_source(il) for il in range(42)] == E4B_SOURCES


def test_every_preset_loads_and_is_listed() -> None:
    assert len(PRESETS) == len(set(PRESETS)) == 7
    for name in PRESETS:
        cfg = ModelConfig.load(name)
        assert cfg == ModelConfig.from_preset(name)
        assert cfg.n_vocab in (248_320, 262_144)
        assert cfg.context_length == 262_144


def test_an_unknown_preset_is_answered_with_the_list_and_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'qwen3\.5-9b'") as caught:
        ModelConfig.load("Qwen3.5-9")
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(ConfigError, match=r"no preset. Presets: qwen3\.5-9b"):
        ModelConfig.from_preset("zzzzzz")


# Rules.


def test_only_four_fields_lack_a_default() -> None:
    bare = [f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING]
    assert bare == ["n_layer", "n_head_kv", "head_dim_k", "head_dim_v"]
    for part in (SsmConfig, Gemma4Config, Step35Config, MlaConfig):
        part()
    cfg = tiny()
    assert (cfg.n_head, cfg.rope_dim_count, cfg.arch) == (2, 64, "other")


@pytest.mark.parametrize(
    ("interval", "full"), [(0, range(8)), (1, range(8)), (2, [1, 3, 5, 7]), (4, [3, 7]), (5, [4]), (9, [])]
)
def test_every_interval_th_layer_is_full(interval: int, full: list[int]) -> None:
    assert full_layers(tiny(full_attention_interval=interval)) == list(full)


def test_configs_are_equal_and_hash_by_value() -> None:
    ssm = {"conv_kernel": 4, "state_size": 32, "time_step_rank": 2, "group_count": 1}
    one, two = tiny(ssm=SsmConfig(**ssm), rope_sections=[1, 2]), tiny(ssm=SsmConfig(**ssm), rope_sections=(1, 2))
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, dataclasses.replace(one, n_head_kv=4)}) == 2
    assert gemma() == gemma(swa_pattern=tuple(int(il % 6 != 5) for il in range(12)))


def test_derived_ssm_sizes() -> None:
    ssm = SsmConfig(conv_kernel=4, state_size=16, time_step_rank=4, group_count=2)
    assert (ssm.key_dim, ssm.conv_dim, ssm.pad) == (32, 128, 3)
    assert (SsmConfig(conv_kernel=1).pad, SsmConfig().pad) == (0, 0)


def test_gemma_layers_past_the_head_list_have_the_models_kv_heads() -> None:
    cfg = gemma(head_count_kv=[8, 7])
    assert [cfg.kv_heads(il) for il in range(4)] == [8, 7, 2, 2]


def test_step35_layers_differ_in_query_heads_only() -> None:
    part = Step35Config(
        head_count=[64, 96, 96, 96] * 2, head_count_kv=[8] * 8, swa_pattern=[False, True, True], sliding_window=512
    )
    cfg = tiny(arch="step35", step35=part, n_head=96, n_head_kv=8, head_dim_v=64)
    assert [cfg.heads(il) for il in range(8)] == [64, 96, 96, 96] * 2
    assert [cfg.is_windowed(il) for il in range(8)] == [False] + [True] * 7  # past the pattern: windowed
    assert (cfg.window(0), cfg.window(7), cfg.kv_heads(5), cfg.head_dims(5)) == (None, 512, 8, (64, 64))
    assert cfg.kv_source(7) == 7


def test_a_recurrent_layer_owns_and_reads_no_kv() -> None:
    cfg = tiny(full_attention_interval=4)
    assert [cfg.owns_kv(il) for il in range(4)] == [False, False, False, True]
    with pytest.raises(ConfigError, match="layer 2 is recurrent"):
        cfg.kv_source(2)


def test_layers_that_all_borrow_have_no_source() -> None:
    cfg = gemma(shared_kv_layers=12)
    assert not any(cfg.owns_kv(il) for il in range(12))
    with pytest.raises(ConfigError, match=r"layer 11 borrows K/V, but no global layer"):
        cfg.kv_source(11)


def test_a_borrower_without_an_owner_of_its_kind_has_no_source() -> None:
    cfg = gemma(shared_kv_layers=8)  # owners 0..3 are windowed
    assert [cfg.kv_source(il) for il in (4, 6, 10)] == [3, 3, 3]
    with pytest.raises(ConfigError, match="no global layer"):
        cfg.kv_source(5)


@pytest.mark.parametrize("il", [-1, 8, 1 << 40])
@pytest.mark.parametrize(
    "method", ["layer_kind", "is_windowed", "window", "heads", "kv_heads", "head_dims", "owns_kv", "kv_source"]
)
def test_a_layer_that_does_not_exist_is_refused(method: str, il: int) -> None:
    part = Step35Config(head_count=[2] * 8, head_count_kv=[2] * 8, sliding_window=8)
    with pytest.raises(ConfigError, match=f"layer {il} does not exist"):
        getattr(tiny(step35=part), method)(il)


# Refusals.


@pytest.mark.parametrize(
    "value", [-1, 2**32, 10**30, pytest.param(1 << 20_000, id="huge"), 1.0, "4", None, True, [4], float("nan")]
)
@pytest.mark.parametrize("field", ["n_layer", "n_head_kv", "head_dim_k", "n_vocab", "nextn_predict_layers"])
def test_a_count_is_a_whole_u32(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        tiny(**{field: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, 10**400, "1e-6", None, True])
def test_a_float_is_a_finite_f32(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^rms_eps: "):
        tiny(rms_eps=value)


@pytest.mark.parametrize("value", [5, "12", b"12", None, {"a": 1}, [1, -1], [1, 2.0], [True]])
def test_a_list_of_counts_holds_whole_u32(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^gemma4\.head_count_kv"):
        Gemma4Config(head_count_kv=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[2], ["true"], [None], [-1], 1])
def test_a_pattern_holds_flags(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^step35\.swa_pattern"):
        Step35Config(swa_pattern=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n_layer": 0}, "n_layer"),
        ({"n_layer": 65_537}, "n_layer"),
        ({"nextn_predict_layers": 9}, "nextn_predict_layers"),
        ({"arch": 5}, "arch"),
        ({"ssm": {"conv_kernel": 4}}, "ssm"),
        ({"gemma4": SsmConfig()}, "gemma4"),
        ({"arch": "gemma4"}, "gemma4"),
        ({"arch": "step35"}, "step35"),
        ({"gemma4": Gemma4Config()}, "gemma4.swa_pattern"),
        ({"gemma4": Gemma4Config(swa_pattern=[True] * 7)}, "gemma4.swa_pattern"),
        ({"gemma4": Gemma4Config(swa_pattern=[True] * 8, sliding_window=0)}, "gemma4.sliding_window"),
        ({"gemma4": Gemma4Config(swa_pattern=[True] * 8, shared_kv_layers=9)}, "gemma4.shared_kv_layers"),
        (
            {"gemma4": Gemma4Config(swa_pattern=[True] * 8, shared_kv_layers=2), "full_attention_interval": 4},
            "gemma4.shared_kv_layers",
        ),
        ({"step35": Step35Config()}, "step35.head_count"),
        ({"step35": Step35Config(head_count=[1] * 8, head_count_kv=[1] * 7)}, "step35.head_count_kv"),
        ({"step35": Step35Config(head_count=[1] * 8, head_count_kv=[1] * 8)}, "step35.sliding_window"),
        ({"mla": MlaConfig(kv_lora_rank=32, rope_dim=16)}, "head_dim_k"),
        ({"mla": MlaConfig(kv_lora_rank=48, rope_dim=16)}, "head_dim_v"),
    ],
)
def test_a_contradiction_is_refused_by_the_fields_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        tiny(**changes)


def test_what_is_unusual_but_legal() -> None:
    assert tiny(nextn_predict_layers=8).n_trunk == 0
    assert tiny(n_layer=65_536).n_layer == 65_536
    assert tiny(mla=MlaConfig(kv_lora_rank=32, rope_dim=32)).head_dim_k == 64
    assert gemma(shared_kv_layers=0).owns_kv(11)


def test_the_module_loads_neither_json_nor_gguf() -> None:
    code = (
        "import sys; before = set(sys.modules); import memra_driver.config;"
        "print(sorted({'json', 'gguf', 'numpy', 'importlib.resources'} & (set(sys.modules) - before)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_presets_are_a_name_of_the_module() -> None:
    assert config.PRESETS == PRESETS
    with pytest.raises(AttributeError, match="NO_SUCH"):
        _ = config.NO_SUCH
