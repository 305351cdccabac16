"""The path of attention for GPUs that copy in bulk: the laws of attention's order, for geometries that it serves.

On the stand-in, which says that it is such a GPU, and with --gpu; the twin and other GPUs take another path there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attend_runs import (
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
    group_round,
    growing,
    row_alone,
)
from checks import faults
from kernel_runs import run, run_batch

from memra_driver.check.args import LAYER, PAIRS, Dims, Pair
from memra_driver.health import Fault, FaultCount
from memra_driver.kernels import (
    ATTEND_FOLD_COLUMNS,
    ATTEND_FOLDS,
    ATTEND_GROUPS,
    KERNELS,
    PIPE_COLUMNS,
    PIPE_FIXED,
    AttendGeometry,
    attend_kernel,
)
from memra_driver.memory import CudaSlice
from memra_driver.nvrtc import PIPE_ARCH

# By what a warp sums up: 64, 128 and 256 dims; teams of 8, 4, 2 and 1 warps; stages of 64, 32 and 16 keys.
SHAPES: list[tuple[Heads, Dims]] = [
    ((8, 1), (256, 256)), ((16, 2), (256, 256)), ((6, 3), (256, 128)), ((24, 4), (256, 256)), ((5, 5), (256, 256)),
    ((32, 8), (128, 128)), ((4, 4), (64, 64)), ((8, 2), (512, 512)), ((3, 1), (256, 512)), ((8, 8), (64, 192)),
]  # fmt: skip
SMALL: list[tuple[Heads, Dims]] = [((6, 2), (128, 128)), ((4, 4), (64, 64)), ((8, 8), (64, 64))]
BAD = {"q8_0": 0x7F, "q5_1": 0x7F, "q4_0": 0x7F, "fp8": 0x7F}


def assert_rows_stand_alone(dev: Any, args: dict[str, Any]) -> None:
    together = attend(dev, args).out
    for row in range(args["rows"]):
        assert_same_bits(attend(dev, row_alone(args, row)).out[0], together[row])


@pytest.mark.parametrize(
    ("heads", "dims", "formats"),
    [*((*shape, PAIRS[i % len(PAIRS)]) for i, shape in enumerate(SHAPES)), *((*SHAPES[1], pair) for pair in PAIRS)],
)
def test_every_shape_is_that_of_float64_and_its_rows_stand_alone(
    dev: Any, rng: np.random.Generator, heads: Heads, dims: Dims, formats: Pair
) -> None:
    args = attend_args(rng, 3, 126, heads=heads, dims=dims, formats=formats, tamper=growing, room=2)
    if dev.arch == PIPE_ARCH and formats[1] != "q4_0":  # whose tokens are not always whole lines
        assert entry_of(dev, args).startswith("attend_pipe")
    assert_close(attend(dev, args).out, args)
    assert_rows_stand_alone(dev, args)


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("formats", PAIRS)
def test_inputs_made_to_break_it_stay_close_and_rows_stand_alone(
    dev: Any, rng: np.random.Generator, tamper: Tamper, formats: Pair
) -> None:
    args = attend_args(rng, 2, 200, heads=(3, 1), dims=(256, 256), formats=formats, tamper=tamper)
    assert_close(attend(dev, args).out, args)
    assert_rows_stand_alone(dev, args)


@pytest.mark.parametrize(
    ("formats", "heads_kv", "dim", "columns"), [(pair, *fixed) for pair in PAIRS for fixed in PIPE_FIXED[pair[0]]]
)
def test_rows_stand_alone_in_every_entry_made_for_one_geometry(
    dev: Any, rng: np.random.Generator, formats: Pair, heads_kv: int, dim: int, columns: int
) -> None:
    rows = 2 if columns < 24 else 4
    heads = (heads_kv * columns // rows, heads_kv)
    args = attend_args(rng, rows, 63, heads=heads, dims=(dim, dim), formats=formats, tamper=climbing, room=1)
    if dev.arch == PIPE_ARCH:
        k, v = formats
        assert entry_of(dev, args) == f"attend_pipe_{k}_{v}_{heads_kv}x{dim}_{columns}"
    assert_close(attend(dev, args).out, args)
    assert_rows_stand_alone(dev, args)


@pytest.mark.parametrize("pos", [0, 14, 31, 62, 126])
@pytest.mark.parametrize("window", [0, 2, 17, 65])
@pytest.mark.parametrize(("heads", "dims"), SMALL)
def test_rows_may_stand_on_both_sides_of_the_edge_of_a_stage(
    dev: Any, rng: np.random.Generator, pos: int, window: int, heads: Heads, dims: Dims
) -> None:
    args = attend_args(rng, 4, pos, heads=heads, dims=dims, window=window, tamper=climbing, room=1)
    assert_close(attend(dev, args).out, args)
    assert_rows_stand_alone(dev, args)


@pytest.mark.parametrize(("heads", "dims"), SMALL)
@pytest.mark.parametrize(("rounds", "by", "window"), [(1, -1, 0), (1, 40, 4150), (2, -1, 0)])
def test_groups_may_take_several_tiles(
    dev: Any, rng: np.random.Generator, rounds: int, by: int, window: int, heads: Heads, dims: Dims
) -> None:
    pos = rounds * group_round(heads[1]) + by
    args = attend_args(rng, 2, pos, heads=heads, dims=dims, window=window, tamper=growing)
    assert_close(attend(dev, args).out, args)
    assert_rows_stand_alone(dev, args)


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize(("heads", "dims"), [((6, 2), (128, 128)), ((8, 4), (64, 128))])
def test_a_bad_row_spoils_only_those_that_see_it(
    dev: Any, rng: np.random.Generator, formats: Pair, plane: str, heads: Heads, dims: Dims
) -> None:
    args = attend_args(rng, 4, 30, heads=heads, dims=dims, formats=formats, tamper=growing, room=3)
    expected = attend(dev, args).out
    bad = BAD[formats["kv".index(plane)]]
    out = attend(dev, change_tokens(args, plane, slice(32, 33), bad)).out
    assert_same_bits(out[:2], expected[:2])
    assert np.isnan(out[2:]).all()
    assert_same_bits(attend(dev, change_tokens(args, plane, slice(34, None), bad)).out, expected)  # nobody sees these


@pytest.mark.parametrize("plane", ["k", "v"])
def test_a_bad_row_that_has_left_the_window_is_forgotten(dev: Any, rng: np.random.Generator, plane: str) -> None:
    """Window 3: rows 0 and 1 see key 60, rows 2 and 3 of the same launch do not; nobody sees key 57."""
    args = attend_args(rng, 4, 61, heads=(6, 2), dims=(128, 128), window=3)
    expected = attend(dev, args).out
    out = attend(dev, change_tokens(args, plane, slice(60, 61), 0x7F)).out
    assert np.isnan(out[:2]).all()
    assert_same_bits(out[2:], expected[2:])
    assert_same_bits(attend(dev, change_tokens(args, plane, slice(57, 58), 0x7F)).out, expected)


@pytest.mark.parametrize("v_format", ["q5_1", "q4_0"])
def test_an_infinite_value_reaches_only_rows_that_see_it(dev: Any, rng: np.random.Generator, v_format: str) -> None:
    args = attend_args(rng, 4, 30, heads=(6, 2), dims=(128, 128), formats=("q8_0", v_format))
    expected = attend(dev, args).out
    infinite = args["v"].reshape(34, -1)[32].copy()
    infinite[:2] = (0x00, 0x7C)  # d of the first head's first block: infinite, or NaN where a code is 0
    out = attend(dev, change_tokens(args, "v", slice(32, 33), infinite)).out
    assert_same_bits(out[:2], expected[:2])
    assert not np.isfinite(out[2:, :3, :32]).any()
    assert_same_bits(out[2:, :3, 32:], expected[2:, :3, 32:])
    assert_same_bits(out[2:, 3:], expected[2:, 3:])


# A block's d as f16: infinite, a NaN, more than f16 holds beside large codes; and on both sides of 1024, where a closer
# look begins. Its m: infinite, all that f16 holds, on both sides of 32768. Of fp8 a NaN at either end.
SPOILED_D = [(0, 0x7C00), (0, 0xFE00), (0, 0x6FFF), (0, 0x6400), (0, 0xE3FF)]
SPOILED_M = [(2, 0xFC00), (2, 0x7BFF), (2, 0x7800), (2, 0xF7FF)]
SPOILED = {"q5_1": SPOILED_D + SPOILED_M, "q4_0": SPOILED_D, "fp8": [(0, 0x7F), (31, 0xFF)]}


# Eight columns of a block are of one row, or of several; with 9 and 12 query heads a K/V head some are of two.
SHARED: list[tuple[Heads, Dims]] = [
    ((16, 2), (256, 256)), ((24, 2), (256, 256)), ((36, 4), (256, 256)), ((96, 8), (64, 192)), ((12, 1), (64, 64)),
    ((6, 2), (128, 128)), ((8, 8), (64, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "dims"), SHARED)
@pytest.mark.parametrize("v_format", ["q5_1", "q4_0", "fp8"])
def test_a_block_that_f16_may_not_hold_reaches_only_rows_that_see_it(
    dev: Any, rng: np.random.Generator, v_format: str, heads: Heads, dims: Dims
) -> None:
    args = attend_args(rng, 2, 30, heads=heads, dims=dims, formats=("q8_0", v_format))
    expected = attend(dev, args).out
    row, n_blocks = args["v"].reshape(32, -1)[31], heads[1] * dims[1] // 32
    spoiled = SPOILED[v_format] if heads == (16, 2) else SPOILED[v_format][:2]
    for i, (place, value) in enumerate(spoiled):
        changed = row.copy().reshape(n_blocks, -1)
        block = (5 * i + 3) % n_blocks
        if v_format == "fp8":
            changed[block, place] = value
        else:
            changed[block, place : place + 2] = (value & 0xFF, value >> 8)
        these = change_tokens(args, "v", slice(31, 32), changed.reshape(-1))
        assert_same_bits(attend(dev, these).out[0], expected[0])
        assert_rows_stand_alone(dev, these)


@pytest.mark.parametrize("v_format", ["q5_1", "q4_0", "fp8"])
@pytest.mark.parametrize(("heads", "dims"), [((16, 2), (256, 256)), ((6, 2), (128, 96)), ((8, 8), (64, 64))])
def test_rows_that_nobody_sees_may_hold_anything(
    dev: Any, rng: np.random.Generator, v_format: str, heads: Heads, dims: Dims
) -> None:
    args = attend_args(rng, 2, 21, heads=heads, dims=dims, formats=("q8_0", v_format), window=5, room=40)
    expected = attend(dev, args).out
    assert_close(expected, args)
    for tokens in (slice(0, 17), slice(23, None)):
        left = args["v"].reshape(63, -1)[tokens]
        args = change_tokens(args, "v", tokens, rng.integers(0, 256, left.shape, np.uint8))
        assert_same_bits(attend(dev, args).out, expected)


@pytest.mark.parametrize(("rows", "slot"), [(1, -(2**40)), (3, -(2**40)), (1, 0), (1, 2**40)])
def test_a_sequence_of_a_batch_gets_the_bits_of_its_own_call(
    dev: Any, rng: np.random.Generator, rows: int, slot: int
) -> None:
    sequences = [
        attend_args(rng, rows, pos, heads=(24, 4), dims=(128, 128), room=room, tamper=growing)
        | {"pos_d": np.array([pos], np.int32), "slot": -7}
        for pos, room in ((0, 0), (400, 2), (63, 9), (64, 0), (130, 1))
    ]
    sequences[1]["q"][5] = np.nan  # is reported by its own record
    parts = run_batch(dev, entry_of(dev, sequences[0]), sequences, slot)
    outs = run_batch(dev, "attend_combine", [combine_args(a, part) for a, part in zip(sequences, parts, strict=True)])
    for args, out in zip(sequences, outs, strict=True):
        alone = attend(dev, args)
        assert_same_bits(out.out, alone.out.reshape(-1))
        assert np.array_equal(out.health, alone.health)


# Entries of one geometry, and for any, with stages as large as a tile, half and a quarter of one.
ONE_ROW: list[tuple[Heads, Dims, Pair]] = [
    ((16, 2), (256, 256), PAIRS[0]), ((24, 4), (256, 256), PAIRS[0]), ((32, 8), (128, 128), PAIRS[0]),
    ((16, 2), (256, 256), ("fp8", "fp8")), ((6, 2), (128, 128), ("q8_0", "q4_0")),
    ((8, 1), (512, 512), ("q8_0", "fp8")), ((16, 2), (512, 512), PAIRS[0]),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "dims", "formats"), ONE_ROW)
@pytest.mark.parametrize("pos", [0, 63, 64, 300])
def test_the_hosts_position_counts_for_nothing_beside_that_of_the_device(
    dev: Any, rng: np.random.Generator, heads: Heads, dims: Dims, formats: Pair, pos: int
) -> None:
    args = attend_args(rng, 1, pos, heads=heads, dims=dims, formats=formats, room=401 - pos)
    expected = attend(dev, args)
    assert_close(expected.out, args)
    for beside in (-1, 0, pos - 1, pos, pos + 1, 400, 401, 402, 2**31, 2**40, -(2**40)):
        got = attend(dev, args | {"slot": beside, "pos_d": np.array([pos], np.int32)})
        assert_same_bits(got.out, expected.out)
        assert np.array_equal(got.health, expected.health)


@pytest.mark.parametrize(("heads", "dims", "formats"), ONE_ROW)
def test_a_position_of_the_device_outside_the_cache_is_reported_beside_a_slot_within(
    dev: Any, rng: np.random.Generator, heads: Heads, dims: Dims, formats: Pair
) -> None:
    args = attend_args(rng, 1, 200, heads=heads, dims=dims, formats=formats)
    for pos in (-1, 201, 2**31 - 1):
        part = run(dev, entry_of(dev, args), **args | {"pos_d": np.array([pos], np.int32)})
        assert part.part.tobytes() == args["part"].tobytes()
        assert faults(part.health) == {Fault.SLOT_RANGE: FaultCount(1, LAYER, max(pos, 0))}


def test_a_slot_outside_the_cache_writes_nothing_and_is_reported(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 2, 8, heads=(6, 2), dims=(128, 128))
    for slot in (-1, 9, 2**40):
        part = run(dev, entry_of(dev, args), **args | {"slot": slot})
        assert part.part.tobytes() == args["part"].tobytes()
        assert faults(part.health) == {Fault.SLOT_RANGE: FaultCount(1, LAYER, max(slot, 0))}


def test_a_query_that_is_not_finite_is_reported_once_a_head_and_row(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 3, 200, heads=(6, 2), dims=(128, 128))
    q = args["q"].reshape(3, 6, 128)
    q[1, 0, [3, 60]] = np.nan
    q[2, 4, 9] = np.inf
    out = attend(dev, args)
    assert faults(out.health) == {Fault.NONFINITE: FaultCount(2, LAYER, 201)}
    assert np.argwhere(np.isnan(out.out).all(axis=2)).tolist() == [[1, 0], [2, 4]]
    assert np.isnan(out.out).sum() == 2 * 128


@pytest.mark.parametrize("formats", [("q8_0", "q5_1"), ("fp8", "fp8")])
@pytest.mark.parametrize(("heads", "dims"), [((16, 2), (256, 256)), ((8, 2), (512, 512)), ((8, 4), (320, 320))])
def test_wherever_an_element_is_not_finite_it_is_reported(
    dev: Any, rng: np.random.Generator, heads: Heads, dims: Dims, formats: Pair
) -> None:
    args = attend_args(rng, 2, 70, heads=heads, dims=dims, formats=formats)
    good = attend(dev, args).out
    for at in (*range(0, dims[0], 64), *range(63, dims[0], 64)):  # of each pair of blocks, which have a factor each
        q = args["q"].reshape(2, heads[0], dims[0]).copy()
        q[1, -1, at] = (np.nan, np.inf, -np.inf)[at // 64 % 3]
        out = attend(dev, args | {"q": q.reshape(args["q"].shape)})
        assert faults(out.health) == {Fault.NONFINITE: FaultCount(1, LAYER, 71)}
        assert np.isnan(out.out[1, -1]).all()
        assert_same_bits(out.out[0], good[0])
        assert_same_bits(out.out[1, :-1], good[1, :-1])


@pytest.mark.parametrize("formats", [("q8_0", "q5_1"), ("fp8", "fp8")])
@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (512, 512)])
def test_elements_near_the_largest_f32_that_make_an_ordinary_score(
    dev: Any, rng: np.random.Generator, dims: Dims, formats: Pair
) -> None:
    """Each 64 elements take back what those before them make of equal keys; sums on the way stay within an f32."""
    args = attend_args(rng, 2, 70, heads=(4, 2), dims=dims, formats=formats, tamper=lambda q, k, v: k.fill(1))
    q = args["q"].reshape(2, 4, -1, 2, 64)
    q[..., 0, :], q[..., 1, :] = 1e38, -1e38
    q[1] *= -1
    assert_close(attend(dev, args).out, args)


@pytest.mark.parametrize("formats", [("q8_0", "q5_1"), ("fp8", "fp8")])
@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (512, 512)])
def test_pairs_of_blocks_of_any_magnitudes(dev: Any, rng: np.random.Generator, dims: Dims, formats: Pair) -> None:
    for decades in (3, 30):
        args = attend_args(rng, 3, 100, heads=(4, 2), dims=dims, formats=formats)
        q = args["q"].reshape(-1, dims[0] // 64, 64)
        q *= 10 ** rng.uniform(-decades, 0, (len(q), q.shape[1], 1)).astype(np.float32)
        assert_close(attend(dev, args).out, args)
        assert_rows_stand_alone(dev, args)


@pytest.mark.parametrize("width", PIPE_COLUMNS)
def test_blocks_of_any_number_of_columns_give_the_same_bits(cuda: Any, rng: np.random.Generator, width: int) -> None:
    if cuda.arch != PIPE_ARCH:
        pytest.skip(f"these entries run on {PIPE_ARCH} only")
    heads, dims = {64: ((6, 2), (128, 128)), 128: ((8, 8), (64, 128)), 256: ((8, 8), (64, 192))}[width]
    for pos in (60, 62):
        args = attend_args(rng, 5, pos, heads=heads, dims=dims, tamper=growing, room=3)
        expected = attend(cuda, args, f"attend_pipe_{width}_8")
        for columns in PIPE_COLUMNS[width]:
            for slot in (-1, pos, 2**31):  # beside the device's position
                beside = args | {"slot": slot, "pos_d": np.array([pos], np.int32)}
                assert_same_bits(attend(cuda, beside, f"attend_pipe_{width}_{columns}").out, expected.out)


def test_the_path_follows_from_the_geometry_alone() -> None:
    served = 0
    for n_head_kv in range(1, 18):
        for dim in (64, 96, 128, 192, 256, 512):
            tok_bytes = n_head_kv * dim // 32
            geometry = AttendGeometry(n_head_kv, dim, dim, 34 * tok_bytes, 24 * tok_bytes, 0, 1)
            launches = [(columns, ATTEND_GROUPS) for columns in range(1, 257)]
            launches += [(columns, ATTEND_FOLDS) for columns in range(1, ATTEND_FOLD_COLUMNS + 1)]
            paths = {attend_kernel(PIPE_ARCH, geometry, *launch).startswith("attend_pipe") for launch in launches}
            assert len(paths) == 1
            served += paths == {True}
            padded = geometry._replace(k_tok_bytes=geometry.k_tok_bytes + 16)
            for launch in launches:
                assert not attend_kernel("sm_80", geometry, *launch).startswith("attend_pipe")
                assert not attend_kernel(PIPE_ARCH, padded, *launch).startswith("attend_pipe")
    assert served > 15


def test_queries_need_only_the_alignment_of_a_float(dev: Any, rng: np.random.Generator) -> None:
    args = attend_args(rng, 1, 70, heads=(6, 2), dims=(128, 128))
    expected = attend(dev, args).out
    shifted = np.concatenate([np.zeros(1, np.float32), args["q"]])
    slices = {name: CudaSlice(dev.memory, x.size, x.dtype) for name, x in args.items() if isinstance(x, np.ndarray)}
    whole = CudaSlice(dev.memory, shifted.size, shifted.dtype)
    whole.copy_from(shifted)
    for name, each in slices.items():
        each.copy_from(args[name].reshape(-1))
    values = args | slices | {"q": whole.view(1, shifted.size)}
    entry = entry_of(dev, args)
    dev.launch(entry, *(values[name] for _, name in KERNELS[entry].params))
    after = SimpleNamespace(part=slices["part"].to_numpy(), health=slices["health"].to_numpy())
    out = run(dev, "attend_combine", **combine_args(args, after)).out
    assert_same_bits(out, expected.reshape(-1))
    for each in (*slices.values(), whole):  # its view ends with it
        each.close()
