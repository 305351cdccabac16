"""Attention over quantised planes against float64: formats, head dims, head counts, windows, edges, hard inputs.

On the host the twin is tested, on the stand-in the kernels as g++ compiled them, with --gpu the GPU's tensor cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attend_runs import (
    GROUP_ROUND,
    HEAD_DIMS,
    LONG,
    TAMPERS,
    Heads,
    Tamper,
    assert_close,
    attend,
    attend_args,
    climbing,
    group_round,
    growing,
)

from memra_driver.check.args import PAIRS, Dims, Pair


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_is_that_of_float64_for_every_pair_of_formats(
    dev: Any, rng: np.random.Generator, formats: Pair, rows: int
) -> None:
    args = attend_args(rng, rows, 70, heads=(4, 2), dims=(64, 96), formats=formats, room=3)
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("dims", [(k, v) for k in HEAD_DIMS for v in HEAD_DIMS])
def test_attention_takes_any_two_head_dims(dev: Any, rng: np.random.Generator, dims: Dims) -> None:
    args = attend_args(rng, 1, 67, heads=(2, 1), dims=dims)
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("heads", [*((gqa, 1) for gqa in range(1, 17)), (3, 3), (6, 2)])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_attention_takes_any_number_of_heads_and_rows(
    dev: Any, rng: np.random.Generator, heads: Heads, rows: int
) -> None:
    args = attend_args(rng, rows, 57, heads=heads)
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("heads", [(2, 1), (3, 3)])  # tiles of 64 keys, and of 32
@pytest.mark.parametrize("pos", [0, 1, 30, 31, 32, 33, 62, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_attention_holds_around_the_edges_of_a_tile(
    dev: Any, rng: np.random.Generator, pos: int, rows: int, heads: Heads
) -> None:
    args = attend_args(rng, rows, pos, heads=heads, room=1)
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("pos", [0, 64, 191])
def test_a_window_is_the_number_of_keys_that_a_row_sees(
    dev: Any, rng: np.random.Generator, pos: int, window: int
) -> None:
    args = attend_args(rng, 3, pos, window=window)
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("formats", PAIRS)
def test_attention_stays_close_for_inputs_made_to_break_it(
    dev: Any, rng: np.random.Generator, tamper: Tamper, formats: Pair
) -> None:
    args = attend_args(rng, 2, 200, heads=(3, 1), formats=formats, tamper=tamper)
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e-20, 1e20, 1e30, 1e37])
@pytest.mark.parametrize("formats", PAIRS[:2])
def test_queries_of_any_size_that_the_scale_undoes_give_the_same_scores(
    dev: Any, rng: np.random.Generator, size: float, formats: Pair
) -> None:
    args = attend_args(rng, 2, 70, heads=(2, 1), formats=formats)
    args["q"] *= np.float32(size)
    args["scale"] = 0.125 / size
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3)])
@pytest.mark.parametrize(("rounds", "by"), [(1, -2), (1, -1), (1, 0), (1, 64), (2, 0)])
@pytest.mark.parametrize(("tamper", "window"), [(growing, 0), (climbing, 0), (growing, 8300), (growing, 4150)])
def test_attention_holds_where_groups_take_another_tile(
    dev: Any, rng: np.random.Generator, rounds: int, by: int, heads: Heads, tamper: Tamper, window: int
) -> None:
    pos = rounds * group_round(heads[1]) + by
    args = attend_args(rng, 2, pos, heads=heads, window=window, tamper=tamper)
    assert_close(attend(dev, args).out, args)


@pytest.mark.gpu
@pytest.mark.parametrize(("formats", "dims"), LONG)
@pytest.mark.parametrize(("rows", "heads"), [(1, (8, 2)), (4, (16, 1)), (16, (16, 1)), (16, (32, 8))])
def test_attention_holds_for_long_sequences(
    cuda: Any, rng: np.random.Generator, formats: Pair, dims: Dims, rows: int, heads: Heads
) -> None:
    args = attend_args(rng, rows, GROUP_ROUND + 1000, heads=heads, dims=dims, formats=formats, tamper=growing)
    assert_close(attend(cuda, args).out, args)


@pytest.mark.gpu
@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("formats", PAIRS)
def test_attention_stays_close_over_long_sequences_made_to_break_it(
    cuda: Any, rng: np.random.Generator, tamper: Tamper, formats: Pair
) -> None:
    args = attend_args(rng, 4, 2 * GROUP_ROUND + 100, heads=(12, 2), dims=(128, 128), formats=formats, tamper=tamper)
    assert_close(attend(cuda, args).out, args)
