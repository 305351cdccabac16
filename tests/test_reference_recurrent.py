"""The NumPy twins of convolution, gates and scan: against the reference vectors, float64, and row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import Array, close, faults, same_bits
from vectors_data import Case, cases, name_of

from memra_driver import reference
from memra_driver.check.args import record
from memra_driver.health import Fault, FaultCount

# Convolution


def convolve(x: Array, w: Array, ring: Array, rows: int, d_conv: int, health: Any = None, slot: int = 0) -> Array:
    out = np.empty_like(x[: rows * (x.size // max(rows, 1))])
    reference.conv_update(x, w, ring, out, None, None, slot, rows, w.size // d_conv, d_conv, None, 1, health, 2)
    return out


@pytest.mark.parametrize("case", cases("conv_update"), ids=name_of)
def test_conv_rings_equal_the_vectors_and_outputs_agree(case: Case) -> None:
    x, w, ring, dim = case["x"], case["w"], case["state0"], case.conv_dim
    states, expected = case.expected("states").reshape(case.rows, -1), case.expected("out").reshape(case.rows, -1)
    for t in range(case.rows):
        out = convolve(x[t * dim : (t + 1) * dim], w, ring, 1, case.d_conv)
        assert same_bits(ring, states[t])
        assert close(out, expected[t])


@pytest.mark.parametrize("case", cases("conv_update"), ids=name_of)
@pytest.mark.parametrize("from_device", [False, True])
def test_a_ring_rebuilt_after_t_rows_is_the_ring_after_t_rows(case: Case, from_device: bool) -> None:
    states = [case["state0"], *case.expected("states").reshape(case.rows, -1)]
    for accept, state in enumerate(states):
        for in_place in (False, True):
            old = case["state0"]
            ring = old if in_place else np.zeros_like(old)
            accept_d = np.array([accept], np.int32) if from_device else None
            reference.conv_ring_rebuild(
                case["x"], old, ring, accept_d, -7 if from_device else accept, case.rows, case.conv_dim, case.d_conv,
                1, 0, 0, None, 0,
            )  # fmt: skip
            assert same_bits(ring, state)


@pytest.mark.parametrize("accept", [-1, 4])
def test_a_bad_accept_count_writes_nothing_and_counts_once(accept: int) -> None:
    ring, health = np.ones(6, np.float32), record()
    reference.conv_ring_rebuild(np.zeros(6, np.float32), ring.copy(), ring, None, accept, 3, 2, 4, 1, 0, 0, health, 5)
    assert (ring == 1).all()
    assert faults(health) == {Fault.BAD_ACCEPT: FaultCount(1, 5, 0)}


@pytest.mark.parametrize("d_conv", range(1, 9))
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 19])
def test_conv_is_the_causal_convolution_of_the_whole_history(d_conv: int, rows: int) -> None:
    rng, dim = np.random.default_rng(d_conv * 100 + rows), 37
    x = rng.standard_normal(rows * dim).astype(np.float32)
    w = rng.standard_normal(dim * d_conv).astype(np.float32)
    ring = rng.standard_normal(dim * (d_conv - 1)).astype(np.float32)
    history = np.concatenate([ring.reshape(dim, -1).T, x.reshape(rows, dim)]).astype(np.float64)
    expected = np.empty((rows, dim))
    for c in range(dim):
        y = np.convolve(history[:, c], w.reshape(dim, d_conv)[c, ::-1], "valid")
        expected[:, c] = y / (1 + np.exp(-y))
    single, outs = ring.copy(), []
    for t in range(rows):
        outs.append(convolve(x[t * dim : (t + 1) * dim], w, single, 1, d_conv))
    out = convolve(x, w, ring, rows, d_conv)
    assert close(out.reshape(rows, dim), expected, 1e-6)
    assert same_bits(out, np.concatenate(outs))
    assert same_bits(ring, single)
    assert same_bits(ring, np.ascontiguousarray(history[rows:].T.astype(np.float32)).reshape(-1))


def test_conv_counts_runs_of_32_channels_that_are_not_finite() -> None:
    dim, health = 70, record()
    x = np.zeros(3 * dim, np.float32)
    x[dim + 31] = x[dim + 30] = np.nan
    x[dim + 32] = np.inf
    x[2 * dim + 69] = np.nan
    convolve(x, np.zeros(dim * 4, np.float32), np.zeros(dim * 3, np.float32), 3, 4, health, slot=40)
    assert faults(health) == {Fault.NONFINITE: FaultCount(3, 2, 41)}


# Gates and scan


def prepare(
    inputs: list[Array],
    rows: int,
    num_k: int,
    num_v: int,
    state_size: int,
    eps: float,
    health: Any = None,
    slot: int = 0,
) -> list[Array]:
    """q, k, v, g_log, beta."""
    sizes = [num_v * state_size] * 3 + [num_v] * 2
    outs = [np.zeros(rows * size, np.float32) for size in sizes]
    reference.gdn_prep(*inputs, *outs, None, slot, rows, num_k, num_v, state_size, eps, None, 1, health, 4)
    return outs


def scan(
    operands: list[Array], state: Array, rows: int, num_v: int, state_size: int, scale: float, in_place: bool = False
) -> tuple[Array, Array]:
    """(out, state afterwards)."""
    out = np.zeros(rows * num_v * state_size, np.float32)
    before = state.copy()
    after = before if in_place else np.full_like(state, np.nan)
    reference.gdn_scan(*operands, before, after, out, None, None, rows, num_v, state_size, scale, None, 1, None, 4)
    assert in_place or same_bits(before, state)
    return out, after


OPERANDS = ("q", "k", "v", "g_log", "beta")


@pytest.mark.parametrize("case", cases("gdn_step"), ids=name_of)
def test_prep_and_scan_agree_with_the_vectors(case: Case) -> None:
    inputs = [case[name] for name in ("conv_out", "alpha", "beta_raw", "dt_bias", "a")]
    got = prepare(inputs, case.rows, case.num_k, case.num_v, case.d_state, case.eps)
    for name, array in zip(OPERANDS, got, strict=True):
        assert close(array, case.expected(name)), name
    assert same_bits(got[2], case["v"])
    operands = [case[name] for name in OPERANDS]
    out, state = scan(operands, case["state0"], case.rows, case.num_v, case.d_state, case.scale)
    assert close(out, case.expected("out"))
    assert close(state, case.expected("state_final"))
    two = [array[: array.size // case.rows * 2] for array in operands]
    assert close(scan(two, case["state0"], 2, case.num_v, case.d_state, case.scale)[1], case.expected("state_after_2"))


def split(arrays: list[Array], rows: int, t: int) -> list[Array]:
    return [array[array.size // rows * t : array.size // rows * (t + 1)] for array in arrays]


def random_inputs(rows: int, num_k: int, num_v: int, state_size: int) -> list[Array]:
    rng = np.random.default_rng(rows + num_k * 10 + state_size)
    sizes = (rows * (2 * num_k + num_v) * state_size, rows * num_v, rows * num_v, num_v, num_v)
    conv_out, alpha, beta_raw, dt_bias, a = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    return [conv_out, alpha * 15, beta_raw, dt_bias, -np.abs(a)]


@pytest.mark.parametrize("state_size", [32, 64, 128, 256])
@pytest.mark.parametrize(("num_k", "num_v"), [(2, 4), (3, 3), (2, 3), (4, 2)])
def test_prepared_and_scanned_rows_equal_single_rows(num_k: int, num_v: int, state_size: int) -> None:
    rows, scale = 5, state_size**-0.5
    inputs = random_inputs(rows, num_k, num_v, state_size)
    state = np.random.default_rng(1).standard_normal(num_v * state_size**2).astype(np.float32)
    operands = prepare(inputs, rows, num_k, num_v, state_size, 1e-6)
    out, after = scan(operands, state, rows, num_v, state_size, scale)
    in_place = scan(operands, state, rows, num_v, state_size, scale, in_place=True)
    assert same_bits(in_place[0], out)
    assert same_bits(in_place[1], after)
    for t in range(rows):
        row = prepare([*split(inputs[:3], rows, t), *inputs[3:]], 1, num_k, num_v, state_size, 1e-6)
        for one, many in zip(row, split(operands, rows, t), strict=True):
            assert same_bits(one, many)
        row_out, state = scan(row, state, 1, num_v, state_size, scale, in_place=t % 2 == 1)
        assert same_bits(row_out, split([out], rows, t)[0])
    assert same_bits(state, after)


@pytest.mark.parametrize("state_size", [32, 128])
def test_prep_and_scan_are_the_gated_delta_rule(state_size: int) -> None:
    rows, num_k, num_v, eps = 4, 2, 5, 1e-6
    inputs = random_inputs(rows, num_k, num_v, state_size)
    conv_out, alpha, beta_raw, dt_bias, a = (array.astype(np.float64) for array in inputs)
    mixed = conv_out.reshape(rows, 2 * num_k + num_v, state_size)
    qk = mixed[:, : 2 * num_k] / np.sqrt((mixed[:, : 2 * num_k] ** 2).sum(-1, keepdims=True) + eps)
    heads = np.arange(num_v) % num_k
    q, k, v = qk[:, heads], qk[:, num_k + heads], mixed[:, 2 * num_k :]
    g_log = a * np.logaddexp(0, alpha.reshape(rows, num_v) + dt_bias)
    beta = (1 / (1 + np.exp(-beta_raw))).reshape(rows, num_v)
    got = prepare(inputs, rows, num_k, num_v, state_size, eps)
    for array, expected in zip(got, (q, k, v, g_log, beta), strict=True):
        assert close(array, expected.reshape(-1), 1e-6)

    start = np.random.default_rng(2).standard_normal((num_v, state_size, state_size)).astype(np.float32)
    state, outs = start.astype(np.float64), []
    for t in range(rows):
        g = np.exp(g_log[t])[:, None]
        delta = beta[t][:, None] * (v[t] - g * np.einsum("hci,hi->hc", state, k[t]))
        state = g[:, :, None] * state + delta[:, :, None] * k[t][:, None, :]
        outs.append(np.einsum("hci,hi->hc", state, q[t]) * 0.25)
    out, after = scan(got, start.reshape(-1), rows, num_v, state_size, 0.25)
    assert close(out, np.array(outs).reshape(-1))
    assert close(after, state.reshape(-1))


def test_a_scan_whose_outputs_are_dropped_leaves_the_same_state() -> None:
    operands = prepare(random_inputs(3, 1, 2, 32), 3, 1, 2, 32, 1e-6)
    state = np.ones(2 * 32 * 32, np.float32)
    expected = scan(operands, state, 3, 2, 32, 0.5)[1]
    reference.gdn_scan(*operands, state, state, None, None, None, 3, 2, 32, 0.5, None, 1, None, 0)
    assert same_bits(state, expected)


def test_prep_counts_runs_of_a_head_once_however_many_value_heads_share_it() -> None:
    rows, num_k, num_v, size, health = 3, 2, 6, 64, record()
    inputs = random_inputs(rows, num_k, num_v, size)
    mixed = inputs[0].reshape(rows, -1)
    mixed[1, 5] = mixed[1, 6] = np.nan  # q, head 0, first run
    mixed[1, 3 * size + 40] = np.inf  # k, head 1, second run
    mixed[2, 4 * size] = -np.inf  # v
    inputs[1][2 * num_v] = np.nan  # a decay gate of row 2
    inputs[2][2 * num_v] = np.nan  # and the other gate of the same head
    prepare(inputs, rows, num_k, num_v, size, 1e-6, health, slot=100)
    assert faults(health) == {Fault.NONFINITE: FaultCount(5, 4, 101)}


def test_prep_ignores_key_heads_that_no_value_head_takes() -> None:
    health, inputs = record(), random_inputs(1, 3, 2, 32)
    inputs[0][2 * 32] = np.nan  # q, head 2
    prepare(inputs, 1, 3, 2, 32, 1e-6, health)
    assert faults(health) == {}
