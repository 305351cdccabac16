"""Folds of attention: where a block sums up eleven groups, every bit is that of groups one by one.

Both paths of the kernels on the stand-in, the twin, and with --gpu.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attend_runs import (
    GROUP_ROUND,
    TAMPERS,
    Heads,
    Tamper,
    assert_close,
    assert_same_bits,
    attend,
    attend_args,
    change_tokens,
    climbing,
    combine_args,
    entry_of,
    growing,
)
from checks import faults
from kernel_runs import run, run_batch
from standin import StandIn

from memra_driver.check.args import LAYER, PAIRS, Dims, Pair, in_folds
from memra_driver.errors import ConfigError, UnsupportedError
from memra_driver.formats import BLOCK, FORMATS
from memra_driver.health import Fault, FaultCount
from memra_driver.kernels import (
    ATTEND_FOLD_COLUMNS,
    ATTEND_FOLD_SEQS,
    ATTEND_TILE,
    KERNELS,
    AttendGeometry,
    attend_kernel,
    attend_pieces,
)
from memra_driver.nvrtc import PIPE_ARCH
from memra_driver.plan import ATTEND_FOLDS, ATTEND_GROUPS

FOLD = ATTEND_GROUPS // ATTEND_FOLDS * ATTEND_TILE  # keys of one
SHAPES: list[tuple[Heads, Dims]] = [  # served by attend_pipe, by all widths that a warp sums up; then the others
    ((16, 2), (256, 256)), ((24, 4), (256, 256)), ((32, 8), (128, 128)), ((6, 2), (128, 128)), ((3, 1), (256, 512)),
    ((8, 8), (64, 192)), ((2, 1), (96, 96)), ((4, 4), (96, 512)),
]  # fmt: skip


def members(
    rng: np.random.Generator, positions: Sequence[int], rows: int = 1, room: int = 2, **shape: Any
) -> list[dict[str, Any]]:
    """Sequences of a batch at these positions, each with planes, a counter and a record of its own."""
    return [
        attend_args(rng, rows, pos, room=room + b, **shape) | {"pos_d": np.array([pos], np.int32), "slot": -7}
        for b, pos in enumerate(positions)
    ]


def in_batch(dev: Any, sequences: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """out (rows, n_head, head_dim_v) and health of each, in one launch that folds."""
    folded = [in_folds(args) for args in sequences]
    parts = run_batch(dev, entry_of(dev, folded[0]), folded)
    outs = run_batch(dev, "attend_combine", [combine_args(a, part) for a, part in zip(folded, parts, strict=True)])
    shape = tuple(sequences[0][name] for name in ("rows", "n_head", "head_dim_v"))
    return [SimpleNamespace(out=each.out.reshape(shape), health=each.health) for each in outs]


def assert_as_alone(dev: Any, sequences: list[dict[str, Any]]) -> list[SimpleNamespace]:
    together = in_batch(dev, sequences)
    for args, each in zip(sequences, together, strict=True):
        alone = attend(dev, args)
        assert_same_bits(each.out, alone.out)
        assert np.array_equal(each.health, alone.health)
    return together


@pytest.mark.parametrize(("heads", "dims"), SHAPES)
@pytest.mark.parametrize("formats", [PAIRS[0], PAIRS[-1]])
def test_sequences_of_any_length_get_the_bits_of_their_own_calls(
    dev: Any, rng: np.random.Generator, heads: Heads, dims: Dims, formats: Pair
) -> None:
    positions = (0, FOLD - 2, 63, 130, FOLD + 70, 64)
    sequences = members(rng, positions, heads=heads, dims=dims, formats=formats, tamper=growing)
    if dev.arch == PIPE_ARCH and 96 not in dims:
        assert entry_of(dev, sequences[0]).startswith("attend_pipe")
    for args, each in zip(sequences, assert_as_alone(dev, sequences), strict=True):
        assert_close(each.out, args | {"slot": int(args["pos_d"][0])})


@pytest.mark.parametrize("count", [ATTEND_FOLD_SEQS, 11, 24])
def test_a_block_may_have_several_sequences(dev: Any, rng: np.random.Generator, count: int) -> None:
    positions = [int(pos) for pos in rng.integers(0, 300, count)]
    assert_as_alone(dev, members(rng, positions, heads=(4, 2), dims=(64, 64), tamper=climbing))


@pytest.mark.parametrize("window", [1, 65, FOLD, 1000])
@pytest.mark.parametrize(("rows", "heads"), [(1, (4, 4)), (4, (4, 2)), (3, (2, 2))])
def test_windows_and_rows_on_both_sides_of_the_edge_of_a_fold(
    dev: Any, rng: np.random.Generator, rows: int, heads: Heads, window: int
) -> None:
    """Groups that some rows see and others do not, in the first fold and in the last one."""
    positions = (0, 62, FOLD - 2, FOLD + 62, 2 * FOLD - 1, 1100)
    sequences = members(rng, positions, rows, heads=heads, window=window, tamper=growing)
    for args, each in zip(sequences, assert_as_alone(dev, sequences), strict=True):
        assert_close(each.out, args | {"slot": int(args["pos_d"][0])})


@pytest.mark.parametrize(
    ("pos", "window"), [(GROUP_ROUND + 40, 0), (GROUP_ROUND + 40, GROUP_ROUND - 70), (GROUP_ROUND + 900, 1000)]
)
def test_groups_that_come_round_fold_in_their_own_order(
    dev: Any, rng: np.random.Generator, pos: int, window: int
) -> None:
    sequences = members(rng, (pos, 5), 2, heads=(2, 2), window=window, tamper=growing)
    assert_as_alone(dev, sequences)


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
def test_inputs_made_to_break_it_fold_alike(dev: Any, rng: np.random.Generator, tamper: Tamper) -> None:
    sequences = members(rng, (FOLD + 20, 200), heads=(4, 2), tamper=tamper)
    for args, each in zip(sequences, assert_as_alone(dev, sequences), strict=True):
        assert_close(each.out, args | {"slot": int(args["pos_d"][0])})


@pytest.mark.parametrize("scale", [40.0, 1e4])
def test_groups_that_outweigh_all_before_leave_no_more_than_an_f32_holds(
    dev: Any, rng: np.random.Generator, scale: float
) -> None:
    """References so far apart that sums vanish beside others, in either order."""
    sequences = members(rng, (500, 600), heads=(4, 2), tamper=growing)
    for args in sequences:
        args["q"] *= np.float32(scale)
    assert_as_alone(dev, sequences)


@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize(("heads", "dims"), [((4, 2), (64, 64)), ((2, 1), (96, 96))])
def test_a_bad_token_of_one_sequence_spoils_only_rows_that_see_it(
    dev: Any, rng: np.random.Generator, heads: Heads, dims: Dims, plane: str
) -> None:
    sequences = members(rng, (126, 300, 126), 4, heads=heads, dims=dims, formats=("fp8", "fp8"))
    clean = in_batch(dev, sequences)
    sequences[0] = change_tokens(sequences[0], plane, slice(128, 129), 0x7F)  # of the third row
    sequences[1] = change_tokens(sequences[1], plane, slice(304, None), 0x7F)  # nobody sees these
    sequences[2] = change_tokens(sequences[2], plane, slice(70, 71), 0x7F)
    found = assert_as_alone(dev, sequences)
    assert_same_bits(found[0].out[:2], clean[0].out[:2])
    assert np.isnan(found[0].out[2:]).all()
    assert_same_bits(found[1].out, clean[1].out)
    assert np.isnan(found[2].out).all()


def test_a_position_outside_the_cache_leaves_the_others_alone_and_is_reported_once(
    dev: Any, rng: np.random.Generator
) -> None:
    sequences = members(rng, (70,) * 13, heads=(4, 2), room=0)
    for b, pos in ((3, -5), (11, 71 + 11), (12, 2**31 - 1)):
        sequences[b]["pos_d"] = np.array([pos], np.int32)
    found = in_batch(dev, sequences)
    for b, (args, each) in enumerate(zip(sequences, found, strict=True)):
        if b in (3, 11, 12):
            assert np.isnan(each.out).all()
            at = max(0, int(args["pos_d"][0]))
            assert faults(each.health) == {Fault.SLOT_RANGE: FaultCount(1, LAYER, at)}
        else:
            assert_same_bits(each.out, attend(dev, args).out)
            assert faults(each.health) == {}


@pytest.mark.parametrize(("pos", "window"), [(10, 0), (FOLD + 100, 0), (FOLD + 100, 300)])
def test_a_query_that_is_not_finite_is_reported_once_in_its_own_record(
    dev: Any, rng: np.random.Generator, pos: int, window: int
) -> None:
    sequences = members(rng, (pos, pos + 1, 3), 2, heads=(4, 2), window=window)
    sequences[1]["q"].reshape(2, 4, 64)[1, [0, 3], 9] = np.nan
    found = assert_as_alone(dev, sequences)
    counts = [faults(each.health) for each in found]
    assert counts == [{}, {Fault.NONFINITE: FaultCount(2, LAYER, pos + 2)}, {}]
    assert np.argwhere(np.isnan(found[1].out).all(axis=2)).tolist() == [[1, 0], [1, 3]]


def test_many_sequences_of_few_columns_are_folded() -> None:
    few, many = ATTEND_FOLD_COLUMNS, ATTEND_FOLD_SEQS
    assert {attend_pieces(n_seqs, columns) for n_seqs in (many, 256) for columns in (1, few)} == {ATTEND_FOLDS}
    others = [(1, 1), (many - 1, few), (many, few + 1), (256, 128)]
    assert {attend_pieces(n_seqs, columns) for n_seqs, columns in others} == {ATTEND_GROUPS}


def test_an_entry_is_launched_for_its_own_pieces_alone(cuda: Any, standin: StandIn) -> None:
    """part may have room for those that were asked for, and no more."""
    groups = attend_args(np.random.default_rng(3), 1, 70, heads=(6, 2), dims=(128, 128))
    folds = in_folds(groups)
    for entry, args in ((entry_of(cuda, groups), folds), (entry_of(cuda, folds), groups)):
        with pytest.raises((ConfigError, UnsupportedError), match=entry):
            run(cuda, entry, **args)
    assert standin.launches() == []


@pytest.mark.parametrize("arch", [PIPE_ARCH, "sm_80"])
def test_folds_of_many_columns_have_no_entry(arch: str) -> None:
    geometry = AttendGeometry(2, 256, 256, 2 * 8 * 34, 2 * 8 * 24, FORMATS["q8_0"].code, FORMATS["q5_1"].code)
    with pytest.raises(ConfigError, match="folds of 9 columns; at most 8"):
        attend_kernel(arch, geometry, 9, ATTEND_FOLDS)


@pytest.mark.parametrize("arch", [PIPE_ARCH, "sm_80"])
def test_folds_have_an_entry_of_their_own_where_groups_have_one_of_as_few_columns(arch: str) -> None:
    seen = set()
    for (n_head_kv, dim), (k, v) in itertools.product([(2, 256), (4, 256), (8, 128), (4, 64), (8, 192)], PAIRS):
        bytes_ = [n_head_kv * dim // BLOCK * FORMATS[name].block_bytes for name in (k, v)]
        geometry = AttendGeometry(n_head_kv, dim, dim, bytes_[0], bytes_[1], FORMATS[k].code, FORMATS[v].code)
        for columns in range(1, ATTEND_FOLD_COLUMNS + 1):
            groups, folds = (attend_kernel(arch, geometry, columns, n) for n in (ATTEND_GROUPS, ATTEND_FOLDS))
            assert folds == (f"{groups}_folds" if arch == PIPE_ARCH else groups)
            seen.add(folds)
    assert seen <= KERNELS.keys()
    assert len(seen) == (3 * len(PAIRS) + 2 if arch == PIPE_ARCH else 4)
