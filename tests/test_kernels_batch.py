"""Kernels that serve a batch, a round or a commit: against their twins, and against single calls bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import Array, faults
from kernel_runs import run, run_batch, same

from memra_driver.check.args import (
    LAYER,
    PAIRS,
    Pair,
    append_args,
    commit_args,
    conv_args,
    normal,
    poison,
    prep_args,
    rows_args,
    scan_args,
    spread,
)
from memra_driver.health import Fault, FaultCount
from memra_driver.layout import SeqC
from memra_driver.memory import CudaSlice

POSITIONS = (0, 5, 63, 2)
WEIGHTS = {"w", "dt_bias", "a"}  # what all sequences of a batch share


def at(pos: int) -> dict[str, Any]:
    """A sequence's position as a batch gives it."""
    return {"pos_d": np.array([pos], np.int32), "slot": -99}


def assert_single_calls_agree(dev: Any, kernel: str, sequences: list[dict[str, Any]]) -> None:
    """One launch for all leaves the bits of a launch for each. The weights are those of the first."""
    weights = {name: sequences[0][name] for name in WEIGHTS & sequences[0].keys()}
    sequences = [args | weights for args in sequences]
    for args, got in zip(sequences, run_batch(dev, kernel, sequences), strict=True):
        same(got, run(dev, kernel, **args))


# Batches


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("rows", [1, 3])
def test_appending_for_a_batch_is_appending_for_each(
    dev: Any, rng: np.random.Generator, formats: Pair, rows: int
) -> None:
    sequences = []
    for pos in POSITIONS:
        k_rows, v_rows = spread(rng, rows * 96), spread(rng, rows * 64)
        args = append_args(formats, (96, 64), k_rows, v_rows, 0, pos + rows + pos % 3) | at(pos)
        sequences.append(args | {"len_d": rng.integers(0, 70, 1).astype(np.int32)})
    sequences[2]["k_rows"][5] = np.nan
    assert_single_calls_agree(dev, "append_kv", sequences)


def test_a_sequence_that_is_full_is_reported_and_leaves_the_others_alone(dev: Any, rng: np.random.Generator) -> None:
    sequences = [
        append_args(("q8_0", "q5_1"), (32, 32), normal(rng, 64), normal(rng, 64), 0, max_ctx) | at(pos)
        for pos, max_ctx in ((3, 8), (7, 8), (6, 8), (-1, 8))
    ]
    results = run_batch(dev, "append_kv", sequences)
    for (pos, full), args, got in zip([(3, False), (7, True), (6, False), (0, True)], sequences, results, strict=True):
        assert faults(got.health) == ({Fault.SLOT_RANGE: FaultCount(1, LAYER, pos)} if full else {})
        assert (got.k.tobytes() == args["k"].tobytes()) == full
    assert_single_calls_agree(dev, "append_kv", sequences)


@pytest.mark.parametrize("d_conv", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 17, 40])
@pytest.mark.parametrize("conv_dim", [33, 129])
def test_convolving_a_batch_is_convolving_each(
    dev: Any, rng: np.random.Generator, rows: int, conv_dim: int, d_conv: int
) -> None:
    sequences = [conv_args(rng, rows, conv_dim, d_conv) | at(pos) for pos in POSITIONS]
    sequences[1]["x"][-1] = np.inf
    assert_single_calls_agree(dev, "conv_update", sequences)


@pytest.mark.parametrize(("num_k", "num_v", "state_size"), [(2, 6, 64), (1, 3, 32), (3, 2, 128)])
@pytest.mark.parametrize("rows", [1, 3])
def test_preparing_a_batch_is_preparing_each(
    dev: Any, rng: np.random.Generator, rows: int, num_k: int, num_v: int, state_size: int
) -> None:
    sequences = [prep_args(rng, rows, num_k, num_v, state_size) | at(pos) for pos in POSITIONS]
    sequences[3]["alpha"][0] = np.nan
    sequences[1]["conv_out"][-1] = np.inf
    assert_single_calls_agree(dev, "gdn_prep", sequences)


@pytest.mark.parametrize("state_size", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 3])
def test_scanning_a_batch_is_scanning_each_in_place(
    dev: Any, rng: np.random.Generator, rows: int, state_size: int
) -> None:
    sequences = [scan_args(rng, rows, 3, state_size) for _ in POSITIONS]
    for args, got in zip(sequences, run_batch(dev, "gdn_scan", sequences), strict=True):
        alone = run(dev, "gdn_scan", **args)
        assert got.state_out.tobytes() == alone.state_out.tobytes()
        assert got.out.tobytes() == alone.out.tobytes()


def test_many_sequences_share_one_launch(dev: Any, rng: np.random.Generator) -> None:
    sequences = []
    for pos in range(200):
        rows = np.full(32, pos, np.float32)
        sequences.append(append_args(("q8_0", "fp8"), (32, 32), rows, rows.copy(), 0, pos + 1) | at(pos))
    assert_single_calls_agree(dev, "append_kv", sequences)
    assert_single_calls_agree(dev, "conv_update", [conv_args(rng, 2, 3, 4) | at(pos) for pos in range(200)])


@pytest.mark.parametrize("n_seqs", [1, 3, 128, 129, 256])
@pytest.mark.parametrize("n", [1, 16])
def test_the_position_of_every_sequence_moves_and_nothing_else(
    dev: Any, rng: np.random.Generator, n_seqs: int, n: int
) -> None:
    table = np.zeros((n_seqs, len(SeqC._fields_)), np.uint64)
    counters = rng.integers(0, 10_000, 2 * n_seqs).astype(np.int32)
    held = CudaSlice(dev.memory, counters.size, np.int32)
    held.copy_from(counters)
    table[:, [name for name, _ in SeqC._fields_].index("pos_d")] = held.ptr + 8 * np.arange(n_seqs, dtype=np.uint64)
    run(dev, "advance_batch", seqs=table.reshape(-1), n_seqs=n_seqs, n=n, health=None, layer=0)
    counters[::2] += n
    assert np.array_equal(held.to_numpy(), counters)
    held.close()


# The tape of a round


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("d_conv", [1, 2, 4, 8])
def test_a_taped_convolution_keeps_the_ring_and_the_inputs(
    dev: Any, rng: np.random.Generator, rows: int, d_conv: int
) -> None:
    args = conv_args(rng, rows, 131, d_conv)
    args["x"][7] = np.nan
    plain = run(dev, "conv_update", **args)
    taped = run(dev, "conv_update", **args | {"tape": poison(rows * 131 + 5)})
    assert taped.out.tobytes() == plain.out.tobytes()
    assert taped.conv_state.tobytes() == args["conv_state"].tobytes()
    assert taped.tape[:-5].tobytes() == args["x"].tobytes()
    assert taped.tape[-5:].tobytes() == poison(5).tobytes()
    assert np.array_equal(taped.health, plain.health)


@pytest.mark.parametrize("state_size", [32, 64, 128, 256])
@pytest.mark.parametrize(("rows", "num_v"), [(1, 1), (3, 2), (5, 3)])
def test_a_taped_scan_keeps_its_operands(
    dev: Any, rng: np.random.Generator, rows: int, num_v: int, state_size: int
) -> None:
    args = scan_args(rng, rows, num_v, state_size)
    operands = np.concatenate([args[name].reshape(-1) for name in ("q", "k", "v", "g_log", "beta")])
    plain = run(dev, "gdn_scan", **args)
    taped = run(dev, "gdn_scan", **args | {"tape": poison(operands.size + 5)})
    assert taped.out.tobytes() == plain.out.tobytes()
    assert taped.state_out.tobytes() == plain.state_out.tobytes()
    assert taped.tape[:-5].tobytes() == operands.tobytes()
    assert taped.tape[-5:].tobytes() == poison(5).tobytes()


@pytest.mark.parametrize("accept", [0, 1, 3, 5])
def test_a_tape_scanned_again_gives_the_state_after_the_accepted_rows(
    dev: Any, rng: np.random.Generator, accept: int
) -> None:
    args = scan_args(rng, 5, 3, 64)
    sizes = {name: args[name].size for name in ("q", "k", "v", "g_log", "beta")}
    tape = run(dev, "gdn_scan", **args | {"tape": poison(sum(sizes.values()))}).tape
    parts = dict(zip(sizes, np.split(tape, np.cumsum(list(sizes.values()))[:-1]), strict=True))
    again = args | parts | {"accept_d": np.array([accept], np.int32), "out": None}
    in_place = run(dev, "gdn_scan", **again | {"state_out": again["state_in"]})
    expected = args["state_in"]
    if accept:
        taken = {name: args[name].reshape(5, -1)[:accept].reshape(-1).copy() for name in (*sizes, "out")}
        expected = run(dev, "gdn_scan", **args | taken | {"rows": accept}).state_out
    assert in_place.state_out.tobytes() == expected.tobytes()


# Accept counts on the device


@pytest.mark.parametrize("accept", [0, 1, 2, 4])
def test_a_scan_takes_the_rows_that_the_device_says(
    cuda: Any, host: Any, rng: np.random.Generator, accept: int
) -> None:
    args = scan_args(rng, 4, 2, 64)
    counted = args | {"accept_d": np.array([accept], np.int32)}
    on_cuda = run(cuda, "gdn_scan", **counted)
    same(on_cuda, run(host, "gdn_scan", **counted), nearly=("state_out", "out"))
    values = accept * 2 * 64
    assert on_cuda.out[:values].tobytes() == run(cuda, "gdn_scan", **args).out[:values].tobytes()
    assert on_cuda.out[values:].tobytes() == args["out"][values:].tobytes()
    assert not faults(on_cuda.health)


@pytest.mark.parametrize("accept", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_scan_of_a_count_outside_the_rows_writes_nothing_and_is_reported(
    dev: Any, rng: np.random.Generator, accept: int
) -> None:
    args = scan_args(rng, 4, 2, 64) | {"accept_d": np.array([accept], np.int32), "tape": poison(4 * 2 * 194)}
    got = run(dev, "gdn_scan", **args)
    for name in ("state_in", "state_out", "out", "tape"):
        assert getattr(got, name).tobytes() == args[name].tobytes()
    assert faults(got.health) == {Fault.BAD_ACCEPT: FaultCount(1, LAYER, 0)}


def masked(args: dict[str, Any], value: int) -> Array:
    mask = (args["mask_hi"] % 2**64) << 64 | args["mask_lo"] % 2**64
    return np.array([value if mask >> i & 1 else args["counters"][i] for i in range(128)], np.int32)


@pytest.mark.parametrize("by_device", [False, True])
@pytest.mark.parametrize("move_pos", [0, 1])
@pytest.mark.parametrize("accept", [0, 1, 7])
def test_a_commit_moves_the_masked_counters_and_the_position(
    dev: Any, rng: np.random.Generator, accept: int, move_pos: int, by_device: bool
) -> None:
    for edge in ({}, {"mask_lo": -1, "mask_hi": -1}, {"mask_lo": 0, "mask_hi": 0}, {"mask_lo": -(2**63), "mask_hi": 1}):
        args = commit_args(rng, 40, accept, 7, move_pos=move_pos, **edge)
        if by_device:
            args |= {"accept": -5, "accept_d": np.array([accept], np.int32)}
        got = run(dev, "commit_counters", **args)
        assert np.array_equal(got.counters, masked(args, 40 + accept))
        assert got.pos_d[0] == 40 + move_pos * accept
        assert not faults(got.health)


@pytest.mark.parametrize("by_device", [False, True])
@pytest.mark.parametrize("move_pos", [0, 1])
@pytest.mark.parametrize("accept", [-1, 8, 2**31 - 1, -(2**31)])
def test_a_commit_of_a_count_outside_the_rows_is_one_of_none_and_is_reported_once(
    dev: Any, rng: np.random.Generator, accept: int, move_pos: int, by_device: bool
) -> None:
    args = commit_args(rng, 40, accept, 7, move_pos=move_pos)
    if by_device:
        args |= {"accept": 3, "accept_d": np.array([accept], np.int32)}
    got = run(dev, "commit_counters", **args)
    assert np.array_equal(got.counters, masked(args, 40))
    assert got.pos_d[0] == 40
    assert faults(got.health) == ({Fault.BAD_ACCEPT: FaultCount(1, LAYER, 40)} if move_pos else {})
    assert run(dev, "commit_counters", **args | {"health": None}).pos_d[0] == 40


# Rows that lie apart


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("columns", [1, 31, 255, 1023, 1024, 1025, 3001])
def test_copied_rows_move_their_columns_only(dev: Any, rng: np.random.Generator, rows: int, columns: int) -> None:
    for src_gap, dst_gap in ((0, 0), (3, 0), (0, 5), (1000, 1)):
        args = rows_args(rng, rows, columns, columns + src_gap, columns + dst_gap)
        got = run(dev, "copy_rows", **args)
        expected = args["dst"].copy()
        for row in range(rows):
            to, source = row * args["dst_stride"], row * args["src_stride"]
            expected[to : to + columns] = args["src"][source : source + columns]
        assert got.dst.tobytes() == expected.tobytes()
        assert got.src.tobytes() == args["src"].tobytes()


def test_one_row_may_be_copied_to_many(dev: Any, rng: np.random.Generator) -> None:
    args = rows_args(rng, 4, 100, 0, 100)
    assert run(dev, "copy_rows", **args).dst.tobytes() == np.tile(args["src"][:100], 4).tobytes()


def test_the_record_of_a_batch_may_be_absent(dev: Any, rng: np.random.Generator) -> None:
    sequences = [conv_args(rng, 2, 33, 4) | at(pos) | {"health": None} for pos in POSITIONS]
    sequences[0]["x"][0] = np.nan
    assert_single_calls_agree(dev, "conv_update", sequences)
