"""C and Python plan the same cache, byte for byte, and refuse the same ones with the same sentence."""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import Any

import cplan
import numpy as np
import pytest
from caches import attention_only, gemma, tiny
from cplan import Case, c_plan, changed, library, outcome_of_c, outcome_of_python
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_driver import native
from memra_driver.capi.layout import PlanC, PolicyC
from memra_driver.config import PRESETS, ModelConfig
from memra_driver.errors import AbiError, ArrayError, CompileError, ConfigError
from memra_driver.formats import K_FORMATS, V_FORMATS, FormatPolicy
from memra_driver.layout import DTYPE_CODES, DTYPE_NAMES
from memra_driver.plan import PLANES, CacheOptions

try:
    native.compiler()
except CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

MAX_INT = 2**31 - 1
CONTEXTS = (0, 1, 4096, MAX_INT)
POLICIES = [
    *({"k": k, "v": v} for k in K_FORMATS for v in V_FORMATS),
    {"gkv": False}, {"wkv": False}, {"gkv": False, "wkv": False, "v": "q4_0"}, {"kv_fp8": True},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"skip_mtp_state": True}, {"round_width": 4}, {"round_width": 64, "skip_mtp_state": True},
    {"reserve_logits": True}, {"reserve_taps": ((3, 0), 7), "round_width": 1},
    {"max_rows": MAX_INT, "round_width": 1, "reserve_logits": True, "reserve_taps": ((1,), 1), "strict": True},
]  # fmt: skip


def same(case: Case) -> Any:
    """The plan, or the sentence of its refusal, which are one on both sides."""
    found, expected = outcome_of_c(case), outcome_of_python(case)
    assert found == expected, case
    return found


# One table


def test_c_has_the_table_of_planes_that_python_has() -> None:
    n = ctypes.c_int32()
    table = library().ask("memra_plane_table", ctypes.byref(n))
    assert [
        (row.name.decode(), row.owner.decode(), row.dtype, row.group.decode(), row.section, row.mtp_section)
        for row in table[: n.value]
    ] == [(p.name, p.owner, DTYPE_CODES[DTYPE_NAMES[p.dtype]], p.group, p.section, p.mtp_section) for p in PLANES]


def test_the_defaults_of_c_are_those_of_python() -> None:
    options, expected = cplan.options_c({}), CacheOptions()
    assert {name: getattr(options, name) for name, _ in options._fields_ if name != "tap_layers"} == {
        "struct_size": ctypes.sizeof(options), "max_rows": expected.max_rows, "round_width": expected.round_width,
        "reserve_logits": 0, "tap_rows": 0, "n_tap_layers": 0, "skip_mtp_state": 0, "strict": 0, "reserved": 0,
    }  # fmt: skip


# One plan


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_planned_alike_for_every_policy_option_and_length(preset: str) -> None:
    cfg = ModelConfig.from_preset(preset)
    for policy, options, max_ctx in itertools.product(POLICIES, OPTIONS, CONTEXTS):
        rows, _, _ = same(Case.of(cfg, max_ctx, policy, options))
        assert sum(row[0] == "k" for row in rows) >= 8


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_planned_alike_over_several_devices(preset: str) -> None:
    cfg = ModelConfig.from_preset(preset)
    n = cfg.n_layer
    for fence, placement in (
        ((0, n), None), ((0, n), (0,)), ((0, 7, n), None), ((0, 7, n), (1, 0)), ((0, 7, n), (1, 1)),
        ((0, 7, 11, n), (0, 1, 0)), ((0, 7, 11, cfg.n_trunk), (2, 0, 2)), (tuple(range(n + 1)), None),
    ):  # fmt: skip
        for options in ({}, {"round_width": 3, "reserve_logits": True, "reserve_taps": ((8,), 5)}):
            _, sums, device_of = same(Case.of(cfg, 100, {}, options, fence, placement))
            assert len(sums) == max(device_of) + 1


def some_case(dice: random.Random) -> Case:
    """A small model of any kind: hybrid or not, Gemma, Step, MTP layers, windows, shares; mostly legal."""
    n_layer = dice.choice((1, 2, 3, 5, 8, 12, 20, 101))
    cfg: dict[str, Any] = {
        "n_layer": n_layer, "n_head_kv": dice.randint(1, 5), "head_dim_k": 32 * dice.randint(1, 16),
        "head_dim_v": 32 * dice.randint(1, 16), "n_embd": dice.randint(1, 100), "n_vocab": dice.randint(1, 1000),
        "n_head": dice.choice((0, 1, 8, 24)), "full_attention_interval": dice.choice((0, 0, 1, 2, 3, 4, n_layer, 200)),
        "nextn_predict_layers": min(n_layer, dice.choice((0, 0, 1, 2, 3))),
        "ssm": {"conv_kernel": dice.randint(1, 8), "inner_size": 7, "state_size": dice.randint(1, 130),
                "time_step_rank": dice.randint(1, 9), "group_count": dice.randint(1, 4)},
    }  # fmt: skip
    flags = tuple(dice.random() < 0.6 for _ in range(n_layer))
    if dice.random() < 0.35:
        shared = dice.randint(0, n_layer)
        interval = cfg["full_attention_interval"]
        if interval > 1:  # what borrows must attend
            shared = 1 if n_layer % interval == 0 else 0
        cfg["gemma4"] = {
            "head_count_kv": tuple(dice.randint(1, 4) for _ in range(dice.randint(0, n_layer + 2))),
            "swa_pattern": flags + (True,) * dice.randint(0, 2), "sliding_window": dice.choice((1, 512, 2**32 - 1)),
            "key_length_global": 32 * dice.randint(1, 16), "key_length_swa": 32 * dice.randint(1, 16),
            "shared_kv_layers": shared,
        }  # fmt: skip
    if dice.random() < 0.25:
        heads = tuple(dice.randint(1, 64) for _ in range(n_layer))
        cfg["step35"] = {
            "head_count": heads, "head_count_kv": heads, "swa_pattern": flags[: dice.randint(0, n_layer)],
            "sliding_window": dice.choice((1, 4096)),
        }  # fmt: skip
    fence, placement = None, None
    if n_layer > 2 and dice.random() < 0.5:
        end = n_layer - dice.choice((0, cfg["nextn_predict_layers"]))
        cuts = dice.sample(range(1, end), dice.randint(0, min(4, end - 1))) if end > 1 else []
        fence = (0, *sorted(cuts), end) if end else None
    if fence is not None and dice.random() < 0.5:
        placement = tuple(dice.randrange(len(fence) - 1) for _ in fence[1:])
    options: dict[str, Any] = {
        "max_rows": dice.choice((1, 16, MAX_INT)), "round_width": dice.choice((0, 0, 1, 4, 33)),
        "reserve_logits": dice.random() < 0.4, "skip_mtp_state": dice.random() < 0.4,
    }  # fmt: skip
    if dice.random() < 0.3:
        options["reserve_taps"] = ((dice.randrange(n_layer),), dice.randint(1, 9))
    max_ctx = dice.choice((0, 1, 31, 4096, dice.randint(0, MAX_INT), MAX_INT))
    return Case(cfg, max_ctx, dice.choice(POLICIES), options, fence, placement)


def test_500_random_models_are_planned_alike(rng: np.random.Generator) -> None:
    dice = random.Random(int(rng.integers(2**32)))
    outcomes = [same(some_case(dice)) for _ in range(500)]
    assert [each for each in outcomes if isinstance(each, str)] == []
    assert sum(max(device_of) > 0 for _, _, device_of in outcomes) > 50


# Refusals

HYBRID = Case.of(tiny(n_layer=9, nextn_predict_layers=1))
ATTENTION = Case.of(attention_only())
GEMMA = Case.of(gemma())
STEP = changed(
    Case.of(attention_only(8)), "cfg.step35",
    {"head_count": (4,) * 8, "head_count_kv": (1,) * 8, "swa_pattern": (False, True) * 4, "sliding_window": 512},
)  # fmt: skip
BIG = 2**32 - 1
BREAKS: list[tuple[Case, str, Any]] = [
    (HYBRID, "max_ctx", -1), (HYBRID, "max_ctx", 2**31), (HYBRID, "max_ctx", -(2**63)),
    (HYBRID, "cfg.n_layer", 0), (HYBRID, "cfg.n_layer", 65_537), (HYBRID, "cfg.n_layer", BIG),
    (HYBRID, "cfg.nextn_predict_layers", 10), (HYBRID, "cfg.nextn_predict_layers", BIG),
    (HYBRID, "cfg.n_head_kv", 0), (HYBRID, "cfg.head_dim_k", 0), (HYBRID, "cfg.head_dim_k", 80),
    (HYBRID, "cfg.head_dim_v", 33), (HYBRID, "cfg.head_dim_v", BIG), (HYBRID, "cfg.head_dim_k", 2**32 - 32),
    (HYBRID, "cfg.n_head_kv", 2**25), (HYBRID, "cfg.n_head", 2**31), (HYBRID, "cfg.n_head", BIG),
    (HYBRID, "cfg.ssm", None), (HYBRID, "cfg.ssm.conv_kernel", 0), (HYBRID, "cfg.ssm.conv_kernel", 9),
    (HYBRID, "cfg.ssm.state_size", 0), (HYBRID, "cfg.ssm.time_step_rank", 0), (HYBRID, "cfg.ssm.group_count", 0),
    (HYBRID, "cfg.ssm.state_size", 2**29), (HYBRID, "cfg.ssm.time_step_rank", BIG),
    (HYBRID, "cfg.ssm.group_count", 2**30), (HYBRID, "options.max_rows", 0), (HYBRID, "options.max_rows", -1),
    (HYBRID, "options.max_rows", 2**31), (HYBRID, "options.max_rows", 2**63 - 1),
    (HYBRID, "options.round_width", -1), (HYBRID, "options.round_width", -(2**63)),
    (HYBRID, "options.round_width", 2**31), (HYBRID, "options.reserve_taps", ((0,), 0)),
    (HYBRID, "options.reserve_taps", ((0,), 2**31)), (HYBRID, "options.reserve_taps", ((-1,), 1)),
    (HYBRID, "options.reserve_taps", ((0, 9), 1)),
    (Case(HYBRID.cfg, options={"reserve_taps": ((2, 0, 4), 1)}), "fence", (0, 3, 9)),
    (Case(HYBRID.cfg, options={"reserve_taps": ((0,), 1)}), "cfg.n_embd", 0),
    (Case(HYBRID.cfg, options={"reserve_logits": True}), "cfg.n_vocab", 0),
    (HYBRID, "fence", (0,)), (HYBRID, "fence", ()), (HYBRID, "fence", (1, 9)), (HYBRID, "fence", (-1, 9)),
    (HYBRID, "fence", (0, 10)), (HYBRID, "fence", (0, 7)), (HYBRID, "fence", (0, 4, 4, 9)),
    (HYBRID, "fence", (0, 5, 4, 8)), (HYBRID, "fence", (0, -1, 9)), (ATTENTION, "fence", (0, 2)),
    (HYBRID, "fence", (0, *range(-4, 200, 2))), (Case.of(attention_only(300)), "fence", (0, *range(-4, 200, 2))),
    (Case(HYBRID.cfg, fence=(0, 3, 9)), "placement", (0, 2)), (Case(HYBRID.cfg, fence=(0, 3, 9)), "placement", (-1, 0)),
    (HYBRID, "options.reserve_taps", ((0,) * 20, 1)),
    (HYBRID, "placement", (1,)),
    (HYBRID, "policy.k", "q5_1"), (HYBRID, "policy.k", "q4_0"), (HYBRID, "policy.v", "q8_0"),
    (GEMMA, "cfg.gemma4.swa_pattern", ()), (GEMMA, "cfg.gemma4.swa_pattern", (True,) * 5),
    (GEMMA, "cfg.gemma4.sliding_window", 0), (GEMMA, "cfg.gemma4.shared_kv_layers", 7),
    (GEMMA, "cfg.gemma4.shared_kv_layers", BIG), (GEMMA, "cfg.gemma4.key_length_swa", 48),
    (GEMMA, "cfg.gemma4.key_length_global", 0), (GEMMA, "cfg.gemma4.head_count_kv", (4, 4, 0)),
    (changed(GEMMA, "cfg.gemma4.shared_kv_layers", 2), "cfg.full_attention_interval", 3),
    (STEP, "cfg.step35.head_count", (4,) * 7), (STEP, "cfg.step35.sliding_window", 0),
    (STEP, "cfg.step35.head_count", (4, BIG) * 4),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "value"), BREAKS, ids=lambda each: "" if isinstance(each, Case) else None)
def test_what_python_refuses_c_refuses_with_the_same_sentence(case: Case, change: str, value: Any) -> None:
    assert not isinstance(same(case), str)
    assert isinstance(same(changed(case, change, value)), str)


@given(st.integers(0, 2**64 - 1))
@settings(max_examples=300, deadline=None)
def test_of_several_reasons_to_refuse_both_name_the_same(seed: int) -> None:
    dice = random.Random(seed)
    case, change, value = dice.choice(BREAKS)
    case = changed(case, change, value)
    for _, other, different in dice.sample(BREAKS, 3):
        part = other.split(".")[1:-1]
        if (not part or case.cfg.get(part[0]) is not None) and not (other == "policy.k" and case.policy is None):
            case = changed(case, other, different)
    if None not in (case.fence, case.placement) and len(case.placement or ()) != len(case.fence or ()) - 1:
        case = changed(case, "placement", None)  # C takes one number of stages for both
    same(case)


WIDE = Case.of(attention_only(3, n_head_kv=2**16, head_dim_k=2**15 - 32, head_dim_v=2**15 - 32), MAX_INT)


def test_bytes_that_no_i64_holds_are_refused_alike() -> None:
    assert not isinstance(same(changed(WIDE, "cfg.n_layer", 1)), str)  # K and V of a layer: just below 2^63
    assert "arena of device 0" in same(WIDE)
    assert len(same(changed(WIDE, "fence", (0, 1, 2, 3)))[1]) == 3
    assert "arena of device 1" in same(changed(changed(WIDE, "fence", (0, 1, 2, 3)), "placement", (0, 1, 1)))
    taps = Case.of(tiny(n_embd=2**31), options={"reserve_taps": ((0,), MAX_INT)})
    assert same(taps).startswith("taps needs")
    assert same(changed(taps, "fence", (0, 4, 8))).startswith("device0.taps needs")
    assert not isinstance(same(changed(taps, "cfg.n_embd", 2**29)), str)
    tape = Case.of(tiny(), options={"round_width": MAX_INT})
    tape = changed(tape, "cfg.ssm", {"conv_kernel": 1, "state_size": 2**9, "time_step_rank": 2**21, "group_count": 1})
    assert same(tape).startswith("layer00.tape needs")


def test_a_convolution_beyond_64_bits_is_refused_by_c_too() -> None:
    vast = changed(HYBRID, "cfg.ssm", {"conv_kernel": 4, "state_size": BIG, "time_step_rank": BIG, "group_count": BIG})
    assert outcome_of_python(vast).startswith("layer 0: conv_dim is ")
    assert outcome_of_c(vast) == f"layer 0: conv_dim is {2**64 - 1} channels; at most {MAX_INT}"


# What only C can be given


def plan_of(config: Any, policy: Any = None, options: Any = None) -> None:
    """Plans with structs as they are, and forgets it."""
    given = [None if each is None else ctypes.pointer(each) for each in (config, policy, options)]
    made = ctypes.POINTER(PlanC)()
    library().call("memra_plan_new", given[0], 8, *given[1:], None, 0, None, ctypes.byref(made))
    library().ask("memra_plan_free", made)


def test_a_struct_of_another_size_is_refused_by_name() -> None:
    config, policy, options = cplan.config_c(HYBRID.cfg), cplan.policy_c({}), cplan.options_c({})
    plan_of(config, policy, options)
    for part, name in ((config, "memra_config"), (policy, "memra_policy"), (options, "memra_options")):
        part.struct_size += 4
        with pytest.raises(AbiError, match=f"{name}: struct_size"):
            plan_of(config, policy, options)
        part.struct_size -= 4


def test_null_arrays_and_flags_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(ArrayError, match="config is NULL"):
        plan_of(None)
    for case, name, n in (
        (GEMMA, "gemma4_swa_pattern", 6),
        (GEMMA, "gemma4_head_count_kv", 6),
        (STEP, "step35_head_count", 8),
    ):
        config = cplan.config_c(case.cfg)
        setattr(config, name, None)
        with pytest.raises(ArrayError, match=f"memra_config.{name} is NULL, but has {n} entries"):
            plan_of(config)
    config = cplan.config_c(GEMMA.cfg)
    config.gemma4_swa_pattern[4] = 2
    with pytest.raises(ConfigError, match=r"gemma4.swa_pattern\[4\]: needs true or false"):
        plan_of(config)
    options = cplan.options_c({})
    options.n_tap_layers = 3
    with pytest.raises(ArrayError, match="tap_layers is NULL, but has 3 entries"):
        plan_of(cplan.config_c(HYBRID.cfg), None, options)
    for code in (17, -1, 4):
        policy = cplan.policy_c({})
        policy.v = code
        with pytest.raises(ConfigError, match=f"FormatPolicy.v={code}: use one of q5_1, q4_0, fp8"):
            plan_of(cplan.config_c(HYBRID.cfg), policy)
    with pytest.raises(ArrayError, match="plan is NULL"):
        library().call("memra_plan_new", None, 8, None, None, None, 0, None, None)
    with pytest.raises(ArrayError, match="policy is NULL"):
        library().call("memra_policy_from_env", None)
    library().ask("memra_plan_free", None)


@pytest.mark.parametrize("n_stages", [-1, 0, 1, 2])
def test_without_a_fence_there_is_one_stage(n_stages: int) -> None:
    made = ctypes.POINTER(PlanC)()
    args = (*cplan.arguments(HYBRID), None, n_stages, None, ctypes.byref(made))
    if n_stages < 2:
        library().call("memra_plan_new", *args)
        assert made.contents.n_devices == 1
        library().ask("memra_plan_free", made)
        return
    with pytest.raises(ConfigError, match=r"2 devices for the 1 stages of fence \[0, 9\]"):
        library().call("memra_plan_new", *args)
    assert not made


# The environment


NAMES = ("MEMRA_KV_K", "MEMRA_KV_V", "MEMRA_GEMMA_GKV", "MEMRA_GEMMA_WKV", "MEMRA_DRAFT", "MEMRA_KV_FP8")


@pytest.mark.parametrize(
    "env",
    [
        {}, {"MEMRA_KV_K": "fp8", "MEMRA_KV_V": "q4_0"}, {"MEMRA_KV_K": "", "MEMRA_KV_V": ""},
        {"MEMRA_GEMMA_GKV": "0"}, {"MEMRA_GEMMA_GKV": "off"}, {"MEMRA_GEMMA_GKV": ""}, {"MEMRA_GEMMA_WKV": "0"},
        {"MEMRA_DRAFT": ""}, {"MEMRA_DRAFT": "x", "MEMRA_GEMMA_WKV": "1"}, {"MEMRA_DRAFT": "x", "MEMRA_GEMMA_WKV": ""},
        {"MEMRA_KV_FP8": "1"}, {"MEMRA_KV_FP8": "yes"}, {"MEMRA_KV_FP8": "1", "MEMRA_GEMMA_GKV": "0"},
        {"MEMRA_KV_K": "q5_1"}, {"MEMRA_KV_K": "Q8_0"}, {"MEMRA_KV_V": "q8_0"}, {"MEMRA_KV_V": " fp8"},
        {"MEMRA_KV_K": "no", "MEMRA_KV_V": "no"},
    ],
    ids=repr,
)  # fmt: skip
def test_both_read_the_same_policy_from_the_environment(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for case in (HYBRID, GEMMA):
        same(changed(case, "policy", None))
    read = PolicyC(k=77)
    try:
        expected, refused = bytes(cplan.policy_c(vars(FormatPolicy.from_env()))), ""
    except ConfigError as error:
        expected, refused = bytes(read), str(error)
    try:
        library().call("memra_policy_from_env", ctypes.byref(read))
    except ConfigError as error:
        assert str(error) == refused  # noqa: PT017
    else:
        assert not refused
    assert bytes(read) == expected


def test_a_plan_of_many_layers_numbers_them_all() -> None:
    rows, _, device_of = same(Case.of(attention_only(1200), 3, {}, {}, (0, 1000, 1200)))
    assert device_of == [0] * 1000 + [1] * 200
    assert max(row[1] for row in rows if row[1] is not None) == 1199


def test_a_plan_is_the_callers_until_it_is_freed() -> None:
    with c_plan(HYBRID) as first, c_plan(GEMMA) as second:
        assert first.n_layer == 9
        assert second.n_layer == 6
        assert first.rows[0].plane == b"k"
