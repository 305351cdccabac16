"""The laws of attention's order: what a row is worth depends on its position and on what it sees, on nothing else.

All comparisons are of bits, on one device: the twin, the kernels as g++ compiled them, or with --gpu the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from attend_runs import (
    GROUP_ROUND,
    LONG,
    TAMPERS,
    Heads,
    Tamper,
    assert_same_bits,
    attend,
    attend_args,
    change_tokens,
    climbing,
    combine_args,
    entry_of,
    group_round,
    growing,
    planes_of,
    row_alone,
    shrinking,
)
from checks import faults
from kernel_runs import run, run_batch

from memra_driver.check.args import LAYER, PAIRS, Dims, Pair, any_planes, partial_sums, record
from memra_driver.health import Fault, FaultCount
from memra_driver.kernels import (
    ATTEND_COLUMNS,
    ATTEND_SHARED_BYTES,
    ATTEND_WIDTHS,
    attend_shared_bytes,
    attend_tile,
)
from memra_driver.plan import ATTEND_GROUPS as GROUPS
from memra_driver.reference_attend import FOLD

FORMATS = ("q8_0", "q5_1")


def assert_rows_stand_alone(dev: Any, args: dict[str, Any], rows: Any = None) -> None:
    together = attend(dev, args).out
    for row in range(args["rows"]) if rows is None else rows:
        assert_same_bits(attend(dev, row_alone(args, row)).out[0], together[row])


# Rows together and alone


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("heads", [(4, 2), (5, 1)])
def test_rows_together_give_the_bits_of_rows_alone(
    dev: Any, rng: np.random.Generator, formats: Pair, heads: Heads
) -> None:
    assert_rows_stand_alone(dev, attend_args(rng, 3, 62, heads=heads, formats=formats, tamper=growing))


@pytest.mark.parametrize("pos", [0, 1, 61, 63, 64, 126, 128])
@pytest.mark.parametrize("window", [0, 1, 2, 64, 65])
def test_rows_may_stand_on_both_sides_of_an_edge(dev: Any, rng: np.random.Generator, pos: int, window: int) -> None:
    assert_rows_stand_alone(dev, attend_args(rng, 4, pos, window=window, tamper=climbing))


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
def test_rows_stand_alone_whatever_the_scores(dev: Any, rng: np.random.Generator, tamper: Tamper) -> None:
    assert_rows_stand_alone(dev, attend_args(rng, 3, 190, heads=(3, 1), tamper=tamper))


@pytest.mark.parametrize("gqa", range(1, 17))
def test_rows_stand_alone_for_any_number_of_query_heads(dev: Any, rng: np.random.Generator, gqa: int) -> None:
    """Of 3 rows the columns fill a block, or end in the middle of one; blocks begin in the middle of a row."""
    assert_rows_stand_alone(dev, attend_args(rng, 3, 62, heads=(2 * gqa, 2), tamper=climbing))


@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (16, 1)])
def test_rows_of_several_blocks_of_columns_stand_alone(dev: Any, rng: np.random.Generator, heads: Heads) -> None:
    assert_rows_stand_alone(dev, attend_args(rng, 16, 55, heads=heads, window=40), rows=(0, 7, 8, 9, 15))


@pytest.mark.parametrize("dims", [(96, 192), (128, 64), (256, 96), (64, 256), (512, 512), (192, 128)])
def test_rows_stand_alone_at_every_width(dev: Any, rng: np.random.Generator, dims: Dims) -> None:
    assert_rows_stand_alone(dev, attend_args(rng, 2, 63, heads=(2, 1), dims=dims, tamper=growing))


# Keys fall into tiles of 64 with the first, of 32 with the others; the last is served by attend_pipe.
TILED: list[Heads] = [(1, 1), (3, 3), (4, 4)]


@pytest.mark.parametrize("heads", TILED)
@pytest.mark.parametrize(("rounds", "by", "behind"), [(1, -2, 0), (1, -1, 148), (2, -1, 0)])
def test_rows_stand_alone_where_groups_take_another_tile(
    dev: Any, rng: np.random.Generator, heads: Heads, rounds: int, by: int, behind: int
) -> None:
    pos = rounds * group_round(heads[1]) + by
    args = attend_args(rng, 3, pos, heads=heads, window=pos - behind if behind else 0, tamper=growing)
    assert_rows_stand_alone(dev, args, rows=(0, 2))


@pytest.mark.parametrize("heads", TILED)
@pytest.mark.parametrize("more", [0, pytest.param(1, marks=pytest.mark.gpu), pytest.param(5, marks=pytest.mark.gpu)])
def test_a_row_that_sees_only_a_groups_second_tile_stands_alone(
    dev: Any, rng: np.random.Generator, more: int, heads: Heads
) -> None:
    """The window of the first row still holds one key of the group's first tile, those of the others do not."""
    keys = attend_tile(heads[1])
    pos = group_round(heads[1]) + more * keys
    window = pos - keys + 2  # the first row sees keys from keys - 1 on
    args = attend_args(rng, 3, pos, heads=heads, window=window, tamper=growing)
    assert np.isfinite(attend(dev, args).out).all()
    assert_rows_stand_alone(dev, args)


# Tiles that begin a group, a fold of groups, or a round of all groups, and those beside them.
TILES = sorted({at + by for at in (1, 2, FOLD, 2 * FOLD, GROUPS - FOLD, GROUPS, 2 * GROUPS) for by in (-1, 0, 1)} - {0})


def assert_rows_stand_alone_around(dev: Any, args: dict[str, Any], tiles: Iterable[int]) -> None:
    """The rows of args, from two before the first key of each of these tiles on."""
    for tile in tiles:
        assert_rows_stand_alone(dev, args | {"slot": tile * attend_tile(args["n_head_kv"]) - 2})


@pytest.mark.parametrize(
    ("heads", "window"),
    [*(((3, 1), window) for window in (1, 2, 3, 65, 66)), *((heads, w) for heads in TILED[1:] for w in (1, 2, 33, 34))],
)
def test_rows_stand_alone_around_the_edges_of_tiles_groups_and_folds(
    dev: Any, rng: np.random.Generator, heads: Heads, window: int
) -> None:
    args = attend_args(rng, 4, TILES[-1] * attend_tile(heads[1]), heads=heads, window=window, tamper=growing)
    assert_rows_stand_alone_around(dev, args, TILES)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "formats", "tamper", "window"),
    [
        ((6, 1), ("q8_0", "q5_1"), growing, 0), ((6, 1), ("fp8", "q4_0"), climbing, 0),
        ((6, 1), ("q8_0", "fp8"), growing, 65), ((8, 8), ("q8_0", "q5_1"), growing, 0),
        ((6, 3), ("fp8", "q4_0"), climbing, 33),
    ],
)  # fmt: skip
def test_rows_stand_alone_around_every_edge_of_a_tile(
    cuda: Any, rng: np.random.Generator, heads: Heads, formats: Pair, tamper: Tamper, window: int
) -> None:
    tiles = range(1, 2 * GROUPS + 2)
    tokens = tiles[-1] * attend_tile(heads[1])
    args = attend_args(rng, 4, tokens, heads=heads, formats=formats, window=window, tamper=tamper, room=2)
    assert_rows_stand_alone_around(cuda, args, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("formats", PAIRS)
def test_rows_of_long_sequences_stand_alone_whatever_the_scores(
    cuda: Any, rng: np.random.Generator, tamper: Tamper, formats: Pair
) -> None:
    pos = 2 * GROUP_ROUND - 2
    args = attend_args(rng, 4, pos, heads=(12, 2), dims=(128, 128), formats=formats, tamper=tamper)
    assert_rows_stand_alone(cuda, args)


@pytest.mark.gpu
@pytest.mark.parametrize(("formats", "dims"), LONG)
@pytest.mark.parametrize(("pos", "window"), [(GROUP_ROUND - 5, 0), (3 * GROUP_ROUND + 60, 0), (20_000, 8500)])
def test_rows_of_long_sequences_stand_alone(
    cuda: Any, rng: np.random.Generator, formats: Pair, dims: Dims, pos: int, window: int
) -> None:
    args = attend_args(rng, 16, pos, heads=(16, 2), dims=dims, formats=formats, window=window, tamper=growing)
    assert_rows_stand_alone(cuda, args, rows=(0, 1, 4, 5, 15))


# Entries, batches, slots


@pytest.mark.parametrize("width", [width for width in ATTEND_WIDTHS if f"attend_{width}_wide" in ATTEND_COLUMNS])
@pytest.mark.parametrize(("rows", "heads"), [(1, (1, 1)), (3, (3, 1)), (5, (14, 2)), (4, (9, 3))])
def test_the_wide_entry_gives_the_bits_of_the_narrow_one(
    dev: Any, rng: np.random.Generator, width: int, rows: int, heads: Heads
) -> None:
    args = attend_args(rng, rows, 62, heads=heads, dims=(64, width), tamper=growing)
    assert attend_shared_bytes(32, heads[1], 64, width) <= ATTEND_SHARED_BYTES
    narrow = attend(dev, args, f"attend_{width}")
    wide = attend(dev, args, f"attend_{width}_wide")
    assert_same_bits(wide.out, narrow.out)
    assert np.array_equal(wide.health, narrow.health)


def test_a_wider_entry_than_needed_gives_the_same_bits(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 2, 62, heads=(3, 1), dims=(64, 64))
    expected = attend(dev, args).out
    for entry in ATTEND_COLUMNS:
        assert_same_bits(attend(dev, args, entry).out, expected)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize(("rows", "heads"), [(1, (2, 2)), (2, (6, 1)), (2, (3, 3))])
def test_a_sequence_of_a_batch_gets_the_bits_of_its_own_call(
    dev: Any, rng: np.random.Generator, rows: int, heads: Heads, window: int
) -> None:
    sequences = [
        attend_args(rng, rows, pos, heads=heads, window=window, room=room)
        | {"pos_d": np.array([pos], np.int32), "slot": -7}
        for pos, room in ((0, 0), (130, 2), (63, 9), (64, 0))
    ]
    sequences[1]["q"][5] = np.nan  # is reported by its own record
    entry = entry_of(dev, sequences[0])
    parts = run_batch(dev, entry, sequences)
    outs = run_batch(dev, "attend_combine", [combine_args(a, part) for a, part in zip(sequences, parts, strict=True)])
    for args, out in zip(sequences, outs, strict=True):
        alone = attend(dev, args)
        assert_same_bits(out.out, alone.out.reshape(-1))
        assert np.array_equal(out.health, alone.health)


def test_the_device_slot_beats_the_argument(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 2, 64, room=50)
    by_device = args | {"pos_d": np.array([64], np.int32), "slot": 3}
    assert_same_bits(attend(dev, by_device).out, attend(dev, args).out)


# What a row may not see


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("pos", [5, 62])
def test_bytes_at_and_beyond_the_rows_do_not_matter(
    dev: Any, rng: np.random.Generator, formats: Pair, pos: int
) -> None:
    args = attend_args(rng, 2, pos, formats=formats, room=70)
    expected = attend(dev, args).out
    assert np.isfinite(expected).all()
    for fill in (0x00, 0x7F, 0x7C):
        changed = args
        for name in "kv":
            changed = change_tokens(changed, name, slice(pos + 2, None), fill)
        assert_same_bits(attend(dev, changed).out, expected)


@pytest.mark.parametrize("formats", PAIRS)
def test_bytes_before_the_window_do_not_matter(dev: Any, rng: np.random.Generator, formats: Pair) -> None:
    args = attend_args(rng, 2, 140, formats=formats, window=9)
    expected = attend(dev, args).out
    for fill in (0x00, 0x7F, 0xFF):
        changed = args
        for name in "kv":
            changed = change_tokens(changed, name, slice(0, 140 - 8), fill)
        assert_same_bits(attend(dev, changed).out, expected)


BAD_FILLS = {"q8_0": (0x7F, 0xFF), "q5_1": (0x7F, 0xFF), "q4_0": (0x7F, 0xFC), "fp8": (0x7F, 0xFF)}


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize("heads", [(2, 1), (12, 1)])
def test_a_bad_row_spoils_only_those_that_see_it(
    dev: Any, rng: np.random.Generator, formats: Pair, plane: str, heads: Heads
) -> None:
    """Row 2 of 4 stands for a key that is not finite: rows 0 and 1 keep their bits, rows 2 and 3 become NaN."""
    args = attend_args(rng, 4, 30, heads=heads, formats=formats, tamper=growing)
    expected = attend(dev, args).out
    for fill in BAD_FILLS[formats["kv".index(plane)]]:
        out = attend(dev, change_tokens(args, plane, slice(32, 33), fill)).out
        assert_same_bits(out[:2], expected[:2])
        assert np.isnan(out[2:]).all()


@pytest.mark.parametrize("v_format", ["q5_1", "q4_0"])
@pytest.mark.parametrize("heads", [(2, 1), (12, 1)])
def test_an_infinite_value_reaches_only_rows_that_see_it(
    dev: Any, rng: np.random.Generator, v_format: str, heads: Heads
) -> None:
    args = attend_args(rng, 4, 30, heads=heads, formats=("q8_0", v_format))
    expected = attend(dev, args).out
    infinite = args["v"].reshape(34, -1)[32].copy()
    infinite[:2] = (0x00, 0x7C)  # d of the first block: elements are infinite, or NaN where their code is 0
    out = attend(dev, change_tokens(args, "v", slice(32, 33), infinite)).out
    assert_same_bits(out[:2], expected[:2])
    assert not np.isfinite(out[2:, :, :32]).any()
    assert np.isfinite(out[2:, :, 32:]).all()


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("plane", ["k", "v"])
def test_a_bad_row_that_has_left_the_window_is_forgotten(
    dev: Any, rng: np.random.Generator, formats: Pair, plane: str
) -> None:
    """Window 3: rows 0 and 1 see key 60, rows 2 and 3 of the same launch do not."""
    args = attend_args(rng, 4, 61, heads=(3, 1), formats=formats, window=3)
    expected = attend(dev, args).out
    out = attend(dev, change_tokens(args, plane, slice(60, 61), 0x7F)).out
    assert np.isnan(out[:2]).all()
    assert_same_bits(out[2:], expected[2:])


@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize("tamper", [growing, shrinking])
@pytest.mark.parametrize("token", [0, 3, 70, 199])
def test_a_nan_that_a_row_sees_reaches_it_however_little_it_weighs(
    dev: Any, rng: np.random.Generator, plane: str, tamper: Tamper, token: int
) -> None:
    args = attend_args(rng, 1, 199, formats=("fp8", "fp8"), tamper=tamper)
    args["q"] *= np.float32(40)  # old keys weigh less than an f32 holds
    assert np.isnan(attend(dev, change_tokens(args, plane, slice(token, token + 1), 0x7F)).out).all()


@pytest.mark.parametrize("formats", PAIRS)
def test_any_bytes_in_the_planes_leave_rows_alone_and_together_alike(
    dev: Any, rng: np.random.Generator, formats: Pair
) -> None:
    args = attend_args(rng, 3, 64, heads=(3, 1), formats=formats)
    planes = any_planes(rng, formats, (64, 64), 67)
    for window in (0, 4):
        any_bytes = args | {name: planes[name][:-8] for name in "kv"} | {"window": window}
        assert_rows_stand_alone(dev, any_bytes)


# Scratch, reports, refusals


def test_a_window_of_all_keys_is_no_window(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 3, 64)
    expected = attend(dev, args).out
    for window in (67, 68, 2**31 - 1):
        assert_same_bits(attend(dev, args | {"window": window}).out, expected)


@pytest.mark.parametrize("heads", TILED)
@pytest.mark.parametrize(
    ("rounds", "by", "window"), [(0, 0, 0), (0, 64, 0), (0, 200, 70), (1, 0, 0), (1, 700, 100)]
)
def test_scratch_that_nobody_wrote_never_reaches_the_output(
    dev: Any, rng: np.random.Generator, rounds: int, by: int, window: int, heads: Heads
) -> None:
    args = attend_args(rng, 2, rounds * group_round(heads[1]) + by, heads=heads, window=window)
    expected = attend(dev, args).out
    assert np.isfinite(expected).all()
    for fill in (0x00, 0x7F):
        assert_same_bits(attend(dev, args | {"part": partial_sums(2, heads[0], 64, fill)}).out, expected)


@pytest.mark.parametrize(("heads", "keys"), [((1, 1), 64), ((4, 2), 64), ((3, 3), 32), ((4, 4), 32), ((8, 8), 32)])
@pytest.mark.parametrize(("pos", "window"), [(0, 0), (31, 0), (32, 0), (63, 0), (64, 0), (500, 0), (500, 100)])
def test_a_key_belongs_to_the_group_of_its_tile_and_to_no_other(
    dev: Any, rng: np.random.Generator, heads: Heads, keys: int, pos: int, window: int
) -> None:
    args = attend_args(rng, 1, pos, heads=heads, window=window)
    entry, first = entry_of(dev, args), max(0, pos - window + 1) if window else 0

    def sums_of(launch: dict[str, Any]) -> Any:
        return run(dev, entry, **launch).part.view(np.uint32).reshape(heads[0], GROUPS, -1)[..., :66]

    before = sums_of(args)
    written = (before != np.uint32(0xFFFFFFFF)).all(axis=(0, 2))
    assert np.flatnonzero(written).tolist() == sorted({key // keys % GROUPS for key in range(first, pos + 1)})
    for key in {first, first + (pos - first) // 2, pos, min(pos, 31), min(pos, 32)}:
        after = sums_of(change_tokens(args, "v", slice(key, key + 1), 0x11))
        changed = (after != before).any(axis=(0, 2))
        assert np.flatnonzero(changed).tolist() == ([key // keys % GROUPS] if key >= first else [])


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize(("rounds", "by", "window"), [(0, 10, 0), (1, 64, 0), (1, 100, 300), (0, 300, 20)])
def test_a_query_that_is_not_finite_is_reported_once_a_head_and_row(
    dev: Any, rng: np.random.Generator, rounds: int, by: int, window: int, heads: Heads
) -> None:
    pos = rounds * group_round(heads[1]) + by
    args = attend_args(rng, 3, pos, heads=heads, window=window)
    q = args["q"].reshape(3, 4, 64)
    q[1, 0, [3, 60]] = np.nan
    q[1, 3, 9] = np.inf
    q[2, 2, 0] = -np.inf
    out = attend(dev, args)
    assert faults(out.health) == {Fault.NONFINITE: FaultCount(3, LAYER, pos + 1)}
    spoiled = {(row, head) for row, head in np.argwhere(np.isnan(out.out).all(axis=2)).tolist()}
    assert spoiled == {(1, 0), (1, 3), (2, 2)}
    assert np.isnan(out.out).sum() == 3 * 64


def test_a_report_is_of_blocks_that_work_and_may_be_absent(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 9, 60, heads=(4, 1))
    args["q"].reshape(9, 4, 64)[8, 1, 5] = np.nan  # a column of the second block
    assert faults(attend(dev, args).health) == {Fault.NONFINITE: FaultCount(1, LAYER, 68)}
    after = run(dev, entry_of(dev, args), **args | {"health": None})
    combined = run(dev, "attend_combine", **combine_args(args, after))
    assert np.argwhere(np.isnan(combined.out.reshape(9, 4, 64)).all(axis=2)).tolist() == [[8, 1]]


@pytest.mark.parametrize(
    ("slot", "by_device"),
    [*((slot, by_device) for slot in (-1, 9, -(2**31), 2**31 - 1) for by_device in (False, True)), (2**40, False)],
)
def test_a_slot_outside_the_cache_writes_nothing_and_is_reported(
    dev: Any, rng: np.random.Generator, slot: int, by_device: bool
) -> None:
    args = attend_args(rng, 2, 8, heads=(4, 2)) | {"slot": slot, "health": record()}
    if by_device:
        args |= {"slot": 8, "pos_d": np.array([slot], np.int32)}
    part = run(dev, entry_of(dev, args), **args)
    assert part.part.tobytes() == args["part"].tobytes()
    combined = run(dev, "attend_combine", **combine_args(args, part))
    assert np.isnan(combined.out).all()
    assert faults(combined.health) == {Fault.SLOT_RANGE: FaultCount(1, LAYER, max(slot, 0))}


def test_a_launch_changes_no_operand(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 2, 64, heads=(4, 2), room=1)
    after = run(dev, entry_of(dev, args), **args)
    for name in ("q", "k", "v"):
        assert getattr(after, name).tobytes() == args[name].tobytes()
    assert all(np.isfinite(plane[:66]).all() for plane in planes_of(args))
