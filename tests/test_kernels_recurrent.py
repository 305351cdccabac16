"""Kernels of the linear-attention layers against their NumPy twins: convolution, ring, gates, scan.

Rings are exact. Results of expf and of sums agree within 1e-5 of the largest magnitude; on one device T rows in one
launch give the bits of T launches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checks import close, faults, worst
from kernel_runs import run, same
from vectors_data import Case, cases, name_of

from memra_driver.check.args import (
    ALONE,
    LAYER,
    SLOT,
    conv_args,
    poison,
    prep_args,
    rebuild_args,
    record,
    scan_args,
    several_rebuild_args,
)
from memra_driver.health import Fault, FaultCount
from memra_driver.kernels import KERNELS


def row_of(args: dict[str, Any], row: int, *names: str) -> dict[str, Any]:
    """The arguments of a launch for that row alone; the named arrays are token-major."""
    rows = args["rows"]
    parts = {name: args[name].reshape(rows, -1)[row].copy() for name in names}
    slot = {"slot": args["slot"] + row} if "slot" in args else {}
    return args | parts | slot | {"rows": 1}


def nonfinite(count: int, slot: int) -> dict[Fault, FaultCount]:
    return {Fault.NONFINITE: FaultCount(count, LAYER, slot)}


# ---------------------------------------------------------------- conv_update


@pytest.mark.parametrize("d_conv", range(1, 9))
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 17, 40])
def test_convolution_agrees_with_its_twin_and_rolls_the_ring(
    cuda: Any, host: Any, rng: np.random.Generator, d_conv: int, rows: int
) -> None:
    args = conv_args(rng, rows, 131, d_conv)
    on_cuda = run(cuda, "conv_update", **args)
    same(on_cuda, run(host, "conv_update", **args), nearly=("out",))
    history = np.concatenate([args["conv_state"].reshape(131, -1).T, args["x"].reshape(rows, 131)])
    assert np.array_equal(on_cuda.conv_state, history[rows:].T.reshape(-1))


@pytest.mark.parametrize("conv_dim", [1, 32, 127, 128, 129, 8192])
def test_convolution_takes_any_number_of_channels(
    cuda: Any, host: Any, rng: np.random.Generator, conv_dim: int
) -> None:
    args = conv_args(rng, 3, conv_dim, 4)
    same(run(cuda, "conv_update", **args), run(host, "conv_update", **args), nearly=("out",))


@pytest.mark.parametrize("d_conv", [1, 2, 4, 8])
def test_convolving_rows_together_or_one_by_one_is_the_same(cuda: Any, rng: np.random.Generator, d_conv: int) -> None:
    args = conv_args(rng, 37, 33, d_conv)
    args["x"][5 * 33] = np.nan
    together = run(cuda, "conv_update", **args)
    single, outs = args, []
    for row in range(37):
        after = run(cuda, "conv_update", **row_of(single, row, "x", "out"))
        single = single | {"conv_state": after.conv_state, "health": after.health}
        outs.append(after.out)
    assert together.out.tobytes() == np.concatenate(outs).tobytes()
    assert together.conv_state.tobytes() == single["conv_state"].tobytes()
    assert np.array_equal(together.health, single["health"])


def test_convolution_of_more_rows_than_a_grid_dimension_holds(cuda: Any, host: Any, rng: np.random.Generator) -> None:
    args = conv_args(rng, 66_000, 3, 4)
    same(run(cuda, "conv_update", **args), run(host, "conv_update", **args), nearly=("out",))


def test_convolution_reports_runs_of_32_channels_with_a_bad_input(
    cuda: Any, host: Any, rng: np.random.Generator
) -> None:
    args = conv_args(rng, 20, 70, 4)
    x = args["x"].reshape(20, 70)
    x[19, [0, 31]] = np.inf  # one run
    x[18, [31, 32, 69]] = np.nan  # three runs
    x[4, 65] = -np.inf
    on_cuda = run(cuda, "conv_update", **args | {"slot": -1, "pos_d": np.array([100], np.int32)})
    on_host = run(host, "conv_update", **args | {"slot": -1, "pos_d": np.array([100], np.int32)})
    same(on_cuda, on_host, nearly=("out",))
    assert faults(on_cuda.health) == nonfinite(5, 104)


def test_silu_holds_at_both_ends(cuda: Any, host: Any) -> None:
    x = np.array([0, -0.0, 1, -1, 80, -80, 89, -89, 200, -200, 3e38, -3e38, 1e-40], np.float32)
    args = {
        "x": x, "w": np.ones(x.size, np.float32), "conv_state": np.empty(0, np.float32), "out": poison(x.size),
        "tape": None, "pos_d": None, "slot": 0, "rows": 1, "conv_dim": x.size, "d_conv": 1, **ALONE, "health": record(),
        "layer": 0,
    }  # fmt: skip
    a, b = run(cuda, "conv_update", **args).out, run(host, "conv_update", **args).out
    for one, other in zip(a, b, strict=True):
        assert close(np.array([one]), np.array([other]), 1e-5) or abs(other) < 1e-30


# ---------------------------------------------------------------- conv_ring_rebuild


@pytest.mark.parametrize("d_conv", [1, 2, 4, 8])
@pytest.mark.parametrize("accept", [0, 1, 2, 5, 9])
def test_a_rebuilt_ring_is_that_after_the_accepted_rows(
    cuda: Any, host: Any, rng: np.random.Generator, d_conv: int, accept: int
) -> None:
    args = conv_args(rng, 9, 130, d_conv)
    expected = args["conv_state"]
    if accept:
        taken = {name: args[name][: accept * 130].copy() for name in ("x", "out")}
        expected = run(host, "conv_update", **args | taken | {"rows": accept}).conv_state
    by_argument = rebuild_args(args, accept)
    by_device = rebuild_args(args, 99, accept_d=np.array([accept], np.int32))
    in_place = rebuild_args(args, accept, conv_state=args["conv_state"])
    for dev in (cuda, host):
        for launch in (by_argument, by_device, in_place):
            after = run(dev, "conv_ring_rebuild", **launch)
            assert after.conv_state.tobytes() == expected.tobytes()
            assert not faults(after.health)


@pytest.mark.parametrize("by_device", [False, True])
@pytest.mark.parametrize("accept", [0, 1, 2, 5, 6])
def test_rings_of_several_layers_are_rebuilt_as_each_alone(
    cuda: Any, host: Any, rng: np.random.Generator, accept: int, by_device: bool
) -> None:
    args = several_rebuild_args(rng, accept)
    if by_device:
        args |= {"accept": 0, "accept_d": np.array([accept], np.int32)}
    expected = args["conv_state"].copy()
    for i in range(3):
        x, ring = i * args["x_apart"], slice(i * args["ring_apart"], i * args["ring_apart"] + 3 * 130)
        old = expected[ring].copy()
        alone = {"x": args["x"][x : x + 5 * 130], "ring_old": old, "conv_state": old.copy()}
        expected[ring] = run(host, "conv_ring_rebuild", **args | alone | {"n_layers": 1}).conv_state
    for dev in (cuda, host):
        after = run(dev, "conv_ring_rebuild", **args)
        assert after.conv_state.tobytes() == expected.tobytes()
        assert faults(after.health) == ({Fault.BAD_ACCEPT: FaultCount(3, LAYER, 0)} if accept > 5 else {})


@pytest.mark.parametrize("accept", [-1, 10, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("by_device", [False, True])
def test_an_accept_count_outside_the_rows_leaves_the_ring_and_is_reported(
    cuda: Any, host: Any, rng: np.random.Generator, accept: int, by_device: bool
) -> None:
    args = rebuild_args(conv_args(rng, 9, 130, 4), accept)
    if by_device:
        args |= {"accept": 0, "accept_d": np.array([accept], np.int32)}
    on_cuda = run(cuda, "conv_ring_rebuild", **args)
    same(on_cuda, run(host, "conv_ring_rebuild", **args))
    assert np.array_equal(on_cuda.conv_state, args["conv_state"], equal_nan=True)
    assert faults(on_cuda.health) == {Fault.BAD_ACCEPT: FaultCount(1, LAYER, 0)}


@pytest.mark.parametrize("case", cases("conv_update"), ids=name_of)
def test_rings_equal_the_vectors_and_outputs_agree(cuda: Any, as_recorded: Any, case: Case) -> None:
    args = {
        "x": case["x"], "w": case["w"], "conv_state": case["state0"], "out": poison(case["out"].size), "tape": None,
        "pos_d": None, "slot": 0, "rows": case.rows, "conv_dim": case.conv_dim, "d_conv": case.d_conv, **ALONE,
        "health": None, "layer": 0,
    }  # fmt: skip
    got = run(cuda, "conv_update", **args)
    assert got.conv_state.tobytes() == case.expected("states").reshape(case.rows, -1)[-1].tobytes()
    assert as_recorded(got.out, case.expected("out")), worst(got.out, case["out"])


# ---------------------------------------------------------------- gdn_prep

HEADS = [(1, 1, 32), (2, 4, 64), (3, 5, 128), (16, 32, 128), (1, 3, 256), (4, 2, 32)]


PREPARED = ("q", "k", "g_log", "beta")  # v is a copy


@pytest.mark.parametrize(("num_k", "num_v", "state_size"), HEADS)
@pytest.mark.parametrize("rows", [1, 3])
def test_preparation_agrees_with_its_twin(
    cuda: Any, host: Any, rng: np.random.Generator, num_k: int, num_v: int, state_size: int, rows: int
) -> None:
    args = prep_args(rng, rows, num_k, num_v, state_size)
    on_cuda = run(cuda, "gdn_prep", **args)
    same(on_cuda, run(host, "gdn_prep", **args), nearly=PREPARED)
    q = on_cuda.q.reshape(rows, num_v, state_size)
    assert np.allclose(np.linalg.norm(q, axis=2), 1, atol=1e-4)
    assert np.array_equal(q, q[:, np.arange(num_v) % num_k])  # heads are tiled, not repeated in blocks
    assert not faults(on_cuda.health)


def test_preparing_rows_together_or_one_by_one_is_the_same(cuda: Any, rng: np.random.Generator) -> None:
    args = prep_args(rng, 4, 2, 6, 64)
    together = run(cuda, "gdn_prep", **args)
    per_row = ("conv_out", "alpha", "beta_raw", "q", "k", "v", "g_log", "beta")
    singles = [run(cuda, "gdn_prep", **row_of(args, row, *per_row)) for row in range(4)]
    for name in ("q", "k", "v", "g_log", "beta"):
        assert getattr(together, name).tobytes() == b"".join(getattr(single, name).tobytes() for single in singles)


def test_gates_hold_at_both_ends(cuda: Any, host: Any, rng: np.random.Generator) -> None:
    ends = np.array([20, 20.000002, 19.99, 100, -100, 88, -88, 3e38, -3e38, 0, -0.0, 1e-40], np.float32)
    args = prep_args(rng, 1, 1, ends.size, 32)
    args |= {"alpha": ends, "beta_raw": ends.copy(), "dt_bias": np.zeros(ends.size, np.float32)}
    args["a"] = np.full(ends.size, -0.5, np.float32)
    a, b = run(cuda, "gdn_prep", **args), run(host, "gdn_prep", **args)
    for name in ("g_log", "beta"):
        one, other = getattr(a, name), getattr(b, name)
        assert np.allclose(one, other, rtol=1e-5, atol=1e-37), f"{name}: {one} {other}"
    assert a.g_log[0] == -10  # softplus(x) is x from 20 on
    assert a.g_log[1] == -0.5 * ends[1]


def test_a_zero_head_stays_zero_whatever_eps(cuda: Any, host: Any, rng: np.random.Generator) -> None:
    args = prep_args(rng, 1, 1, 1, 32) | {"conv_out": np.zeros(96, np.float32), "eps": 1e-12}
    for dev in (cuda, host):
        after = run(dev, "gdn_prep", **args)
        assert not after.q.any()
        assert not after.k.any()


def test_preparation_counts_a_shared_key_head_once(cuda: Any, host: Any, rng: np.random.Generator) -> None:
    args = prep_args(rng, 2, 2, 6, 64)
    mixed = args["conv_out"].reshape(2, -1)
    mixed[1, 3] = np.nan  # q head 0: one run, though three value heads read it
    mixed[1, [128 + 64, 128 + 127]] = np.inf  # k head 1: two runs
    mixed[0, 256 + 5 * 64] = np.inf  # v head 5: one run
    args["alpha"][7] = np.nan
    args["beta_raw"][7] = np.inf
    on_cuda = run(cuda, "gdn_prep", **args)
    same(on_cuda, run(host, "gdn_prep", **args), nearly=(*PREPARED, "v", "conv_out", "alpha", "beta_raw"))
    assert faults(on_cuda.health) == nonfinite(6, SLOT)


# ---------------------------------------------------------------- gdn_scan


SCANNED = ("state_out", "out")


@pytest.mark.parametrize("state_size", [32, 64, 128, 256])
@pytest.mark.parametrize(("rows", "num_v"), [(1, 1), (1, 3), (5, 2)])
def test_the_scan_agrees_with_its_twin(
    cuda: Any, host: Any, rng: np.random.Generator, state_size: int, rows: int, num_v: int
) -> None:
    args = scan_args(rng, rows, num_v, state_size)
    on_cuda = run(cuda, "gdn_scan", **args)
    same(on_cuda, run(host, "gdn_scan", **args), nearly=SCANNED)
    assert np.array_equal(on_cuda.state_in, args["state_in"])
    assert not faults(on_cuda.health)


@pytest.mark.parametrize("state_size", [32, 64, 128, 256])
def test_the_scan_in_place_gives_the_bits_of_two_buffers(cuda: Any, rng: np.random.Generator, state_size: int) -> None:
    args = scan_args(rng, 3, 2, state_size)
    apart = run(cuda, "gdn_scan", **args)
    in_place = run(cuda, "gdn_scan", **args | {"state_out": args["state_in"]})
    assert in_place.state_out.tobytes() == apart.state_out.tobytes()
    assert in_place.out.tobytes() == apart.out.tobytes()


@pytest.mark.parametrize("cuda_kind", ["cuda"])  # the C library has a shape of its own
@pytest.mark.parametrize("state_size", [32, 64, 128, 256])
@pytest.mark.parametrize("warps", [1, 4])
def test_the_warps_of_a_block_do_not_matter_to_the_scan(
    cuda: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, state_size: int, warps: int
) -> None:
    args = scan_args(rng, 3, 2, state_size)
    before = run(cuda, "gdn_scan", **args)
    shape = ((state_size // (8 * warps), 2, 1), (32, warps, 1), 0)
    scan = replace(KERNELS["gdn_scan"], shape=lambda _: shape)
    monkeypatch.setattr(cuda.kernels.plan("gdn_scan"), "kernel", scan)
    after = run(cuda, "gdn_scan", **args)
    assert after.state_out.tobytes() == before.state_out.tobytes()
    assert after.out.tobytes() == before.out.tobytes()


@pytest.mark.parametrize("state_size", [32, 64, 128, 256])
def test_scanning_rows_together_or_one_by_one_is_the_same(cuda: Any, rng: np.random.Generator, state_size: int) -> None:
    args = scan_args(rng, 4, 2, state_size)
    together = run(cuda, "gdn_scan", **args)
    single, outs = args, []
    for row in range(4):
        after = run(cuda, "gdn_scan", **row_of(single, row, "q", "k", "v", "g_log", "beta", "out"))
        single = single | {"state_in": after.state_out}
        outs.append(after.out)
    assert together.state_out.tobytes() == single["state_in"].tobytes()
    assert together.out.tobytes() == np.concatenate(outs).tobytes()


def test_a_scan_without_an_output_moves_the_state_alike(cuda: Any, host: Any, rng: np.random.Generator) -> None:
    args = scan_args(rng, 3, 2, 64)
    for dev in (cuda, host):
        with_out = run(dev, "gdn_scan", **args)
        without = run(dev, "gdn_scan", **args | {"out": None})
        assert without.state_out.tobytes() == with_out.state_out.tobytes()


def test_a_padded_row_with_closed_gates_leaves_the_state_as_it_is(dev: Any, rng: np.random.Generator) -> None:
    args = scan_args(rng, 1, 2, 128)
    args |= {"g_log": np.zeros(2, np.float32), "beta": np.zeros(2, np.float32)}
    assert run(dev, "gdn_scan", **args).state_out.tobytes() == args["state_in"].tobytes()


def test_a_gate_that_forgets_everything_leaves_the_newest_row_alone(dev: Any, rng: np.random.Generator) -> None:
    args = scan_args(rng, 1, 1, 32)
    args |= {"g_log": np.array([-1e9], np.float32), "beta": np.ones(1, np.float32)}
    state = run(dev, "gdn_scan", **args).state_out.reshape(32, 32)
    assert np.array_equal(state, np.outer(args["v"], args["k"]).astype(np.float32))


@pytest.mark.parametrize("case", cases("gdn_step"), ids=name_of)
def test_operands_outputs_and_states_agree_with_the_vectors(
    cuda: Any, as_recorded: Any, rng: np.random.Generator, case: Case
) -> None:
    args = prep_args(rng, case.rows, case.num_k, case.num_v, case.d_state)
    args |= {name: case[name] for name in ("conv_out", "alpha", "beta_raw", "dt_bias", "a")} | {"eps": case.eps}
    prepared = run(cuda, "gdn_prep", **args)
    operands = {name: case.expected(name) for name in ("q", "k", "v", "g_log", "beta")}
    for name, expected in operands.items():
        got = getattr(prepared, name)
        assert as_recorded(got, expected), f"{name}: {worst(got, expected)}"
    args = scan_args(rng, case.rows, case.num_v, case.d_state) | operands
    args |= {"state_in": case["state0"], "scale": case.scale}
    scanned = run(cuda, "gdn_scan", **args)
    assert as_recorded(scanned.out, case.expected("out")), worst(scanned.out, case["out"])
    assert as_recorded(scanned.state_out, case.expected("state_final")), worst(scanned.state_out, case["state_final"])
