"""The stage fence: what the environment opens, that nonsense leaves the door shut, and how stages are evened out."""

from __future__ import annotations

import logging
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from caches import attention_only, gemma, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_driver import pp
from memra_driver.config import PRESETS, Gemma4Config, ModelConfig
from memra_driver.errors import ConfigError, OutOfMemory
from memra_driver.plan import CacheOptions, CachePlan
from memra_driver.pp import balance, pp2_split, pp_cuts, stage_of


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pp, "_warned", set())


def env(stages: str = "", splits: str = "", split: str = "") -> dict[str, str]:
    named = {"MEMRA_PP_STAGES": stages, "MEMRA_PP_SPLITS": splits, "MEMRA_PP_SPLIT": split}
    return {name: value for name, value in named.items() if value}


@pytest.mark.parametrize("stages", ["", "0", "1", " 1 "])
def test_the_door_is_shut_without_a_word(stages: str, caplog: pytest.LogCaptureFixture) -> None:
    assert pp_cuts(32, {"MEMRA_PP_STAGES": stages, "MEMRA_PP_SPLITS": "junk"}) is None
    assert pp_cuts(32, {}) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("environ", "fence"),
    [
        (env("2"), (0, 16, 32)),
        (env("3"), (0, 10, 21, 32)),
        (env("32"), tuple(range(33))),
        (env("2", split="5"), (0, 5, 32)),
        (env("3", splits="3,8"), (0, 3, 8, 32)),
        (env("3", splits=" 3 , 8 "), (0, 3, 8, 32)),
        (env("2", splits="9", split="5"), (0, 9, 32)),
        (env("3", splits="3,8", split="junk"), (0, 3, 8, 32)),
        ({"MEMRA_PP_STAGES": "2", "MEMRA_PP_SPLITS": "", "MEMRA_PP_SPLIT": " "}, (0, 16, 32)),
    ],
)
def test_the_fence_that_an_environment_asks_for(
    environ: dict[str, str], fence: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert pp_cuts(32, environ) == fence
    assert not caplog.records


@pytest.mark.parametrize(
    "environ",
    [
        env("two"),
        env("-1"),
        env("2.0"),
        env("1_0"),
        env("٢"),
        env("9" * 5000),
        env("33"),
        env("3", splits="8"),
        env("3", splits="1,2,3"),
        env("3", splits="8,8"),
        env("3", splits="8,3"),
        env("3", splits="0,3"),
        env("3", splits="3,32"),
        env("3", splits="3,"),
        env("3", splits="a,b"),
        env("3", split="5"),
        env("2", split="0"),
        env("2", split="32"),
        env("2", split="x"),
        env("2", split="-5"),
    ],
)
def test_nonsense_leaves_one_stage_and_warns_once(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="memra_driver"):
        assert [pp_cuts(32, environ) for _ in range(3)] == [None] * 3
        assert pp2_split(32, environ) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "MEMRA_PP_" in caplog.text


@pytest.mark.parametrize("n_layers", [-1, 0, 1])
def test_too_few_layers_for_two_stages(n_layers: int) -> None:
    assert pp_cuts(n_layers, env("2")) is None


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMRA_PP_STAGES", "MEMRA_PP_SPLITS", "MEMRA_PP_SPLIT"):
        monkeypatch.delenv(name, raising=False)
    assert pp_cuts(8) is None
    monkeypatch.setenv("MEMRA_PP_STAGES", "2")
    assert (pp_cuts(8), pp2_split(8)) == ((0, 4, 8), 4)
    monkeypatch.setenv("MEMRA_PP_SPLIT", "3")
    assert (pp_cuts(8), pp2_split(8)) == ((0, 3, 8), 3)
    monkeypatch.setenv("MEMRA_PP_STAGES", "1")
    assert (pp_cuts(8), pp2_split(8)) == (None, None)


def test_pp2_split_is_for_exactly_two_stages() -> None:
    assert pp2_split(32, env("2")) == 16
    assert pp2_split(32, env("3")) is None


@pytest.mark.parametrize(
    ("fence", "stages"),
    [
        ((0, 3, 8), [0, 0, 0, 1, 1, 1, 1, 1, 1]),
        ((0, 1, 2, 8), [0, 1, 2, 2, 2, 2, 2, 2, 2]),
        ((0, 8), [0] * 9),
        ((0, 1, 2), [0, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_layer_belongs_to_the_stage_whose_range_holds_it(fence: tuple[int, ...], stages: list[int]) -> None:
    assert [stage_of(fence, il) for il in range(9)] == stages  # layer 8: past the trunk, so the last stage


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-2, 200),
    st.dictionaries(
        st.sampled_from(["MEMRA_PP_STAGES", "MEMRA_PP_SPLITS", "MEMRA_PP_SPLIT"]),
        st.one_of(st.text(max_size=12), st.from_regex(r"[0-9]{1,2}(,[0-9]{1,3}){0,4}", fullmatch=True)),
    ),
)
def test_any_environment_gives_a_sound_fence_or_none(n_layers: int, environ: dict[str, str]) -> None:
    fence = pp_cuts(n_layers, environ)
    if fence is not None:
        assert (fence[0], fence[-1]) == (0, n_layers)
        assert list(fence) == sorted(set(fence))
        assert len(fence) - 1 == int(environ["MEMRA_PP_STAGES"])
        owners = [stage_of(fence, il) for il in range(n_layers)]
        assert sorted(set(owners)) == list(range(len(fence) - 1))


# balance

ROOMY = CacheOptions(round_width=4, reserve_logits=True, reserve_taps=((2, 3), 4))
MODELS: dict[str, tuple[ModelConfig, CacheOptions]] = {
    "hybrid": (tiny(), CacheOptions()),
    "mtp": (tiny(n_layer=9, nextn_predict_layers=1), ROOMY),
    "mtp without state": (tiny(n_layer=9, nextn_predict_layers=1), CacheOptions(skip_mtp_state=True)),
    "attention": (attention_only(6), CacheOptions()),
    "borrowed": (gemma(shared=2), CacheOptions()),
    # The first stage cannot be made smaller; the others are still to be evened out.
    "heavy start": (
        gemma(n_layer=7, gemma4=Gemma4Config((32, *(1,) * 6), (True,) * 7, key_length_swa=32)),
        CacheOptions(),
    ),
}


def stage_bytes(cfg: ModelConfig, ctx: int, fence: tuple[int, ...], options: CacheOptions) -> list[int]:
    return [device.arena_bytes for device in CachePlan(cfg, ctx, options=options, fence=fence).per_device]


def fences(cfg: ModelConfig, n: int, options: CacheOptions) -> list[tuple[int, ...]]:
    """Every fence of n stages over which the operations run and which the plan takes."""
    found = []
    for cuts in combinations(range(1, cfg.n_trunk), n - 1):
        fence = (0, *cuts, cfg.n_layer)
        try:
            plan = CachePlan(cfg, 8, options=options, fence=fence)
        except ConfigError:  # tap layers on two stages
            continue
        if not [problem for problem in plan.check_ops() if "another device" in problem]:
            found.append(fence)
    return found


@pytest.mark.parametrize("ctx", [0, 40, 3000])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_no_fence_has_a_less_full_stage_nor_evener_ones(name: str, n: int, ctx: int) -> None:
    cfg, options = MODELS[name]
    possible = fences(cfg, n, options)
    if not possible:
        with pytest.raises(ConfigError, match="for 3 stages at most"):
            balance(cfg, ctx, n, options=options)
        return
    fence = balance(cfg, ctx, n, options=options)
    assert fence in possible
    sizes = {each: stage_bytes(cfg, ctx, each, options) for each in possible}
    least = min(max(each) for each in sizes.values())
    assert max(sizes[fence]) == least
    assert sum(s * s for s in sizes[fence]) == min(
        sum(s * s for s in each) for each in sizes.values() if max(each) == least
    )


@pytest.mark.parametrize("free", [(1, 3), (3, 1), (1, 1, 9), (5, 1, 2)])
def test_a_device_with_more_room_gets_more(free: tuple[int, ...]) -> None:
    cfg, options = MODELS["hybrid"]
    free_bytes = [each << 20 for each in free]

    def fullest(fence: tuple[int, ...]) -> float:
        return max(s / f for s, f in zip(stage_bytes(cfg, 2000, fence, options), free_bytes, strict=True))

    fence = balance(cfg, 2000, len(free), free_bytes)
    assert fullest(fence) == min(map(fullest, fences(cfg, len(free), options)))


@pytest.mark.filterwarnings("error")
def test_room_told_by_numpy_is_room_all_the_same() -> None:
    free = [3 << 40, 1 << 40]
    assert balance(tiny(), 1 << 20, 2, np.array(free)) == balance(tiny(), 1 << 20, 2, free)


def test_a_fence_fits_where_one_does_to_the_byte() -> None:
    cfg, options = MODELS["mtp"]
    for fence in fences(cfg, 3, options):
        exact = stage_bytes(cfg, 500, fence, options)
        found = stage_bytes(cfg, 500, balance(cfg, 500, 3, exact, options=options), options)
        assert all(size <= room for size, room in zip(found, exact, strict=True))
    least = min(stage_bytes(cfg, 500, fence, options)[0] for fence in fences(cfg, 3, options))
    with pytest.raises(OutOfMemory, match="no fence of 3 stages fits"):
        balance(cfg, 500, 3, [least - 1, 1 << 40, 1 << 40], options=options)
    with pytest.raises(OutOfMemory, match="no fence of 2 stages fits"):
        balance(cfg, 500, 2, [0, 1 << 40], options=options)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_preset_is_evened_out_and_keeps_borrowers_with_what_they_read(preset: str, n: int) -> None:
    cfg = ModelConfig.from_preset(preset)
    fence = balance(cfg, 32768, n)
    plan = CachePlan(cfg, 32768, fence=fence)
    assert len(fence) == n + 1
    assert (fence[0], fence[-1]) == (0, cfg.n_layer)
    assert plan.check_ops() == CachePlan(cfg, 32768).check_ops()
    sizes, layers = [device.arena_bytes for device in plan.per_device], []
    for il in range(cfg.n_layer):
        one = (0, il, il + 1, cfg.n_layer) if 0 < il < cfg.n_layer - 1 else None
        layers.append(0 if one is None else CachePlan(cfg, 32768, fence=one).per_device[1].arena_bytes)
    if cfg.gemma4 is None:
        assert max(sizes) - min(sizes) <= 2 * max(layers)


def test_it_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = balance(tiny(), 64, 2)
    monkeypatch.setenv("MEMRA_PP_STAGES", "2")
    monkeypatch.setenv("MEMRA_PP_SPLIT", str(expected[1] % 7 + 1))
    assert balance(tiny(), 64, 2) == expected


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ConfigError, r"0 stages; a trunk of 8 layers has 1 \.\. 8", (tiny(), 8, 0)),
        (ConfigError, r"9 stages; a trunk of 8 layers has 1 \.\. 8", (tiny(n_layer=9, nextn_predict_layers=1), 8, 9)),
        (ConfigError, "True stages", (tiny(), 8, True)),
        (ConfigError, "2 stages take as many whole numbers", (tiny(), 8, 2, [1 << 30])),
        (ConfigError, "2 stages take as many whole numbers", (tiny(), 8, 2, [1e9, 1e9])),
        (ConfigError, "2 stages take as many whole numbers", (tiny(), 8, 2, [None, 1 << 30])),
        (ConfigError, "2 stages take as many whole numbers", (tiny(), 8, 2, 1 << 30)),
        (ConfigError, "none below 0", (tiny(), 8, 2, [1 << 30, -1])),
        (ConfigError, r"can be cut at \[1, 2\], for 3 stages at most", (gemma(shared=2), 8, 4)),
        (ConfigError, "max_ctx is -1", (tiny(), -1, 2)),
    ],
)
def test_what_cannot_be_balanced_is_refused(error: Any, match: str, args: Any) -> None:
    with pytest.raises(error, match=match):
        balance(*args)
