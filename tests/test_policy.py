"""Which formats a layer gets, from a policy or the environment."""

from __future__ import annotations

from typing import Any

import pytest

from memra_driver.errors import ConfigError
from memra_driver.formats import K_FORMATS, V_FORMATS, FormatPolicy


def test_the_default_policy_is_q8_0_and_q5_1_and_e4m3_for_gemma() -> None:
    policy = FormatPolicy.from_env({})
    assert policy == FormatPolicy("q8_0", "q5_1", gkv=True, wkv=True, kv_fp8=False)
    names = {(g, w): [fmt.name for fmt in policy.pair(g, w)] for g in (False, True) for w in (False, True)}
    assert names[False, False] == names[False, True] == ["q8_0", "q5_1"]
    assert names[True, False] == names[True, True] == ["fp8", "fp8"]


def pair_names(env: dict[str, str], gemma: bool, windowed: bool) -> list[str]:
    return [fmt.name for fmt in FormatPolicy.from_env(env).pair(gemma, windowed)]


def test_each_switch_moves_its_own_layers_only() -> None:
    plain, e4m3 = ["q8_0", "q5_1"], ["fp8", "fp8"]
    assert pair_names({"MEMRA_GEMMA_GKV": "0"}, True, False) == plain
    assert pair_names({"MEMRA_GEMMA_GKV": "0"}, True, True) == e4m3
    assert pair_names({"MEMRA_GEMMA_WKV": "0"}, True, True) == plain
    assert pair_names({"MEMRA_GEMMA_GKV": "off"}, True, False) == e4m3  # only "0" is off
    assert pair_names({"MEMRA_DRAFT": ""}, True, True) == plain
    assert pair_names({"MEMRA_DRAFT": "x", "MEMRA_GEMMA_WKV": "1"}, True, True) == e4m3
    assert pair_names({"MEMRA_DRAFT": "x"}, True, False) == e4m3
    assert pair_names({"MEMRA_KV_FP8": "1"}, False, False) == e4m3
    assert pair_names({"MEMRA_KV_FP8": "yes"}, False, False) == plain  # only "1" is on
    assert pair_names({"MEMRA_KV_FP8": "1", "MEMRA_GEMMA_GKV": "0"}, True, False) == plain
    assert pair_names({"MEMRA_KV_K": "fp8", "MEMRA_KV_V": "q4_0"}, False, True) == ["fp8", "q4_0"]
    assert pair_names({"MEMRA_KV_K": "", "MEMRA_KV_V": ""}, False, False) == plain


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMRA_KV_V", "q4_0")
    assert FormatPolicy.from_env().v == "q4_0"
    monkeypatch.setenv("MEMRA_KV_V", "fp8")
    assert FormatPolicy.from_env().v == "fp8"
    monkeypatch.setenv("MEMRA_KV_V", "q8_0")
    with pytest.raises(ConfigError, match=r"MEMRA_KV_V='q8_0'.*q5_1, q4_0, fp8"):
        FormatPolicy.from_env()


@pytest.mark.parametrize("bad", [{"k": "q5_1"}, {"k": "Q8_0"}, {"v": "q8_0"}, {"v": ""}, {"gkv": 1}, {"kv_fp8": None}])
def test_an_unknown_format_or_switch_is_refused_at_construction(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        FormatPolicy(**bad)


def test_every_allowed_pair_can_be_built() -> None:
    pairs = [[fmt.name for fmt in FormatPolicy(k, v).pair(False, False)] for k in K_FORMATS for v in V_FORMATS]
    assert pairs == [[k, v] for k in K_FORMATS for v in V_FORMATS]
