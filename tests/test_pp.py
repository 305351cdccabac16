"""The stage fence: what the environment opens, and that nonsense leaves the door shut."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_driver import pp
from memra_driver.pp import pp2_split, pp_cuts, stage_of


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
