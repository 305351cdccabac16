"""NaN, infinities, denormals, overflow: what each format stores, what each operation makes of them, and what it says.

The rules stand in SPEC.md, sections 4, 10 and 14; here are their examples, the same on every device.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import op_calls
import pytest
from caches import attention_only, image, put, tiny

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.errors import ConfigError
from memra_driver.formats import FormatPolicy
from memra_driver.health import Fault, FaultCount

Array = np.ndarray[Any, Any]
INF, NAN = float("inf"), float("nan")


# A block of 32 that holds one value, here as the bits of an f32, and zeros. By format: d (and m) as stored, the code of
# the value, that of a zero, and what is reported: N not finite, S scale overflow, F saturated.
FORMATS = ("q8_0", "q5_1", "q4_0", "fp8")
BLOCKS = {
    0x7FC00000: "0000 0 0 N | 0000 0000 0 0 N | 8000 0 8 N | 7F 0 N",  # a NaN
    0xFFC00000: "0000 0 0 N | 0000 0000 0 0 N | 8000 0 8 N | 7F 0 N",  # of either sign
    0x7F800001: "0000 0 0 N | 0000 0000 0 0 N | 8000 0 8 N | 7F 0 N",  # a signalling one
    0x7F800000: "7C00 0 0 N | 7C00 0000 0 0 N | FC00 0 8 N | 7E 0 N",  # infinity
    0xFF800000: "7C00 0 0 N | 7C00 FC00 0 0 N | 7C00 0 8 N | FE 0 N",
    0x7F7FFFFF: "7C00 127 0 S | 7C00 0000 31 0 S | FC00 0 8 S | 7E 0 F",  # the largest f32
    0x4AFDF020: "7C00 127 0 S | 7C00 0000 31 0 S | FC00 0 8 S | 7E 0 F",  # 65520 * 127
    0x4AFDEF22: "7BFF 127 0 - | 7C00 0000 31 0 S | FC00 0 8 S | 7E 0 F",  # 65519 * 127
    0x49F7EF88: "73CF 127 0 - | 7BFF 0000 31 0 - | FC00 0 8 S | 7E 0 F",  # 65519 * 31
    0x48FFEF00: "6C08 127 0 - | 7421 0000 31 0 - | FBFF 0 8 - | 7E 0 F",  # 65519 * 8
    0x43E88000: "4353 127 0 - | 4B80 0000 31 0 - | D344 0 8 - | 7E 0 F",  # 465
    0x43E80000: "434F 127 0 - | 4B7C 0000 31 0 - | D340 0 8 - | 7E 0 -",  # 464
    0x3B000000: "0102 127 0 - | 0421 0000 31 0 - | 8C00 0 8 - | 01 0 -",  # 2^-9
    0x3AC00000: "00C2 127 0 - | 0319 0000 31 0 - | 8A00 0 8 - | 01 0 -",  # 1.5 * 2^-10
    0x3A800000: "0081 127 0 - | 0211 0000 31 0 - | 8800 0 8 - | 00 0 -",  # 2^-10
    0xBA800000: "0081 -127 0 - | 0211 9400 0 31 - | 0800 0 8 - | 80 0 -",
    0x36FE0000: "0001 127 0 - | 0004 0000 31 0 - | 8010 0 8 - | 00 0 -",  # 127 * 2^-24: d is the smallest of f16
    0x35FE0000: "0000 127 0 - | 0001 0000 31 0 - | 8004 0 8 - | 00 0 -",  # 127 * 2^-26: d underflows, the codes stay
    0x01FE0000: "0000 0 0 - | 0000 0000 31 0 - | 8000 0 8 - | 00 0 -",  # 127 * 2^-130: 1/d overflows
    0x007FFFFF: "0000 0 0 - | 0000 0000 0 0 - | 8000 8 8 - | 00 0 -",  # the largest denormal
    0x00000001: "0000 0 0 - | 0000 0000 0 0 - | 8000 8 8 - | 00 0 -",  # the smallest
    0x80000000: "0000 0 0 - | 0000 8000 0 0 - | 8000 8 8 - | 80 0 -",  # -0
}
LETTERS = {"N": Fault.NONFINITE, "S": Fault.SCALE_OVERFLOW, "F": Fault.FP8_SATURATED}
AT = 5  # where the value stands in its block


def rows_of_blocks() -> Array:
    """A token for each value; it stands in the second of the four blocks."""
    rows = np.zeros((len(BLOCKS), 128), np.float32)
    rows.view(np.uint32)[:, 32 + AT] = list(BLOCKS)
    return rows


def told(name: str) -> list[list[str]]:
    """What the table says of a format, by value."""
    return [line.split("|")[FORMATS.index(name)].split() for line in BLOCKS.values()]


def f16(word: str) -> np.float32:
    return np.float32(struct.unpack("<e", int(word, 16).to_bytes(2, "little"))[0])


def e4m3(byte: int) -> np.float32:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return np.float32(NAN)
    return np.float32(sign * (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7))


def stored(name: str, words: list[str]) -> tuple[bytes, np.float32, np.float32]:
    """The bytes of the block, and what the value and a zero decode to."""
    if name == "fp8":
        code = int(words[0], 16)
        return bytes([0] * AT + [code] + [0] * (31 - AT)), e4m3(code), np.float32(0)
    *halves, code_word, zero_word, _ = words
    code, zero = int(code_word), int(zero_word)
    head = b"".join(int(half, 16).to_bytes(2, "little") for half in halves)
    d = f16(halves[0])
    codes = [code if j == AT else zero for j in range(32)]
    with np.errstate(all="ignore"):
        if name == "q8_0":
            return head + struct.pack("32b", *codes), d * np.float32(code), d * np.float32(zero)
        nibbles = bytes((codes[i] & 15) | (codes[i + 16] & 15) << 4 for i in range(16))
        if name == "q4_0":
            return head + nibbles, d * np.float32(code - 8), d * np.float32(zero - 8)
        high = sum((code >> 4) << j for j, code in enumerate(codes)).to_bytes(4, "little")
        value, rest = (np.float32(np.float64(d) * c + np.float64(f16(halves[1]))) for c in (code, zero))
        return head + high + nibbles, value, rest


@pytest.mark.parametrize(("k", "v"), [("q8_0", "q5_1"), ("fp8", "q4_0"), ("q8_0", "fp8")])
def test_each_format_stores_decodes_and_reports_what_the_table_says(dev: Any, k: str, v: str) -> None:
    rows = rows_of_blocks()
    with Cache.new(dev, attention_only(1), 64, policy=FormatPolicy(k=k, v=v)) as cache:
        put_rows = put(dev, rows)
        ops.append_kv(dev, cache, 0, put_rows, put_rows)
        out = [dev.uninit(rows.size) for _ in range(2)]
        layer = cache.kv[0]
        ops.dequant_kv(dev, cache, 0, 0, len(rows), *out)
        expected: dict[Fault, FaultCount] = {}
        for name, plane, tok_bytes, decoded in (
            (k, layer.k, layer.k_tok_bytes, out[0]), (v, layer.v, layer.v_tok_bytes, out[1]),
        ):  # fmt: skip
            tokens = plane.to_numpy()[: len(rows) * tok_bytes].reshape(len(rows), -1)
            values = decoded.to_numpy().reshape(rows.shape)
            for row, words in enumerate(told(name)):
                want, value, zero = stored(name, words)
                size = len(want)
                case = f"{name} of {list(BLOCKS)[row]:08X}"
                assert tokens[row, size : 2 * size].tobytes() == want, case
                np.testing.assert_array_equal(values[row, 32 + AT], value, case)
                np.testing.assert_array_equal(values[row, 32:37], np.full(5, zero), case)
                if words[-1] != "-":
                    kind = LETTERS[words[-1]]
                    seen = expected.get(kind, FaultCount(0, 0, row))
                    expected[kind] = FaultCount(seen.count + 1, 0, min(seen.slot, row))
        assert cache.health().faults == expected


# The linear layers. Row 1 of three holds the value; all else is ordinary.


def nonfinite(count: int, slot: int) -> dict[Fault, FaultCount]:
    return {Fault.NONFINITE: FaultCount(count, 0, slot)} if count else {}


CONVOLVED = {  # input -> the channel's outputs of rows 1 and 2, weights 1 over inputs of 0: sum / (1 + exp(-sum))
    NAN: (NAN, NAN), INF: (INF, INF), -INF: (NAN, NAN), -100.0: (-0.0, -0.0), -3e38: (-0.0, -0.0), 3e38: (3e38, 3e38),
    2.0**-140: (2.0**-141, 2.0**-141), -(2.0**-148): (-(2.0**-149), -(2.0**-149)),
}  # fmt: skip


@pytest.mark.parametrize("value", CONVOLVED, ids=str)
def test_a_convolution_keeps_a_value_in_its_channel_and_its_bits_in_the_ring(dev: Any, value: float) -> None:
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        x = np.zeros((3, 128), np.float32)
        x[1, 40] = value
        out = dev.uninit(x.size)
        ops.conv_update(dev, cache, 0, put(dev, x), put(dev, np.ones((128, 4), np.float32)), out)
        got = out.to_numpy().reshape(x.shape)
        want = np.zeros_like(x)
        want[1:, 40] = CONVOLVED[value]
        np.testing.assert_array_equal(got, want)
        assert np.signbit(got[1:, 40]).tolist() == np.signbit(want[1:, 40]).tolist() or np.isnan(want[1, 40])
        assert cache.recur[0].conv_state.to_numpy().tobytes() == np.ascontiguousarray(x.T).tobytes()
        assert cache.health().faults == nonfinite(int(not np.isfinite(value)), 1)


def test_a_signalling_nan_stays_as_it_is_in_the_ring(dev: Any) -> None:
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        x = np.zeros((3, 128), np.float32)
        x.view(np.uint32)[1, 40] = 0x7F800001
        ops.conv_update(dev, cache, 0, put(dev, x), put(dev, np.ones((128, 4), np.float32)), dev.uninit(x.size))
        assert cache.recur[0].conv_state.to_numpy().tobytes() == np.ascontiguousarray(x.T).tobytes()


# alpha, beta_raw -> g_log, beta, faults; dt_bias 0, a -1.
GATES = {
    (NAN, NAN): (NAN, NAN, 2), (INF, INF): (-INF, 1.0, 2), (-INF, -INF): (0.0, 0.0, 2),
    (200.0, 200.0): (-200.0, 1.0, 0), (-200.0, -200.0): (0.0, 0.0, 0), (3e38, -3e38): (-3e38, 0.0, 0),
}  # fmt: skip


def prepare(dev: Any, cache: Cache, mixed: Array, alpha: Array, beta_raw: Array) -> dict[str, Array]:
    rows = len(mixed)
    names = {"q": 64, "k": 64, "v": 64, "g_log": 2, "beta": 2}
    out = {name: dev.uninit(rows * n) for name, n in names.items()}
    given = (mixed, alpha, beta_raw, np.zeros(2, np.float32), np.full(2, -1, np.float32))
    ops.gdn_prep(dev, cache, 0, *(put(dev, each) for each in given), *out.values(), eps=1e-6)
    return {name: each.to_numpy().reshape(rows, -1) for name, each in out.items()}


@pytest.mark.parametrize("gates", GATES, ids=str)
def test_gates_of_what_is_not_finite(dev: Any, gates: tuple[float, float]) -> None:
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        alpha, beta_raw = np.zeros((2, 3, 2), np.float32)
        alpha[1, 1], beta_raw[1, 1] = gates
        got = prepare(dev, cache, np.ones((3, 128), np.float32), alpha, beta_raw)
        g_log, beta, faults = GATES[gates]
        np.testing.assert_array_equal(got["g_log"][1, 1], np.float32(g_log))
        np.testing.assert_array_equal(got["beta"][1, 1], np.float32(beta))
        assert np.isfinite(np.delete(got["g_log"].ravel(), 3)).all()
        assert cache.health().faults == nonfinite(faults, 1)


HEADS = {  # value in a head of q -> what it becomes, what the ones beside it become, faults
    NAN: (NAN, NAN, 1), INF: (NAN, 0.0, 1), -INF: (NAN, 0.0, 1), 2e19: (0.0, 0.0, 0),  # whose square is no f32
}  # fmt: skip


@pytest.mark.parametrize("value", HEADS, ids=str)
def test_a_head_of_q_or_k_with_a_value_that_has_no_square(dev: Any, value: float) -> None:
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        gates = np.zeros((3, 2), np.float32)
        mixed = np.ones((3, 128), np.float32)
        good = prepare(dev, cache, mixed, gates, gates)
        mixed[1, 7] = value
        got = prepare(dev, cache, mixed, gates, gates)
        itself, others, faults = HEADS[value]
        head = np.full(32, others, np.float32)
        head[7] = itself
        np.testing.assert_array_equal(got["q"][1], np.tile(head, 2))  # one key head, two value heads
        assert got["q"][[0, 2]].tobytes() == good["q"][[0, 2]].tobytes()
        for name in ("k", "v", "g_log", "beta"):
            assert got[name].tobytes() == good[name].tobytes()
        assert cache.health().faults == nonfinite(faults, 1)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFC12345, 0xFF800000, 0x00000001])
def test_v_is_taken_over_bit_by_bit(dev: Any, bits: int) -> None:
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        mixed = np.ones((1, 128), np.float32)
        mixed.view(np.uint32)[0, 70] = bits
        got = prepare(dev, cache, mixed, *np.zeros((2, 1, 2), np.float32))
        assert got["v"].tobytes() == mixed[:, 64:].tobytes()
        assert cache.health().faults == nonfinite(int(bits != 1), 0)


def scan(dev: Any, cache: Cache, changed: dict[str, tuple[int, float]], state: float = 1.0) -> tuple[Array, Array]:
    """Two heads of 32, one row: (outputs, states) when element i of an operand is another."""
    operands = {"q": 64, "k": 64, "v": 64, "g_log": 2, "beta": 2}
    given = []
    for name, n in operands.items():
        array = np.full(n, {"g_log": 0.0, "beta": 0.5}.get(name, 0.25), np.float32)
        if name in changed:
            array[changed[name][0]] = changed[name][1]
        given.append(put(dev, array))
    cache.recur[0].ssm_state.copy_from(np.full(2 * 32 * 32, state, np.float32))
    out = dev.uninit(64)
    ops.gdn_scan(dev, cache, 0, *given, out, scale=1.0)
    return out.to_numpy().reshape(2, 32), cache.recur[0].ssm_state.to_numpy().reshape(2, 32, 32)


# operand, element (of head 1) -> where head 1 is not finite: outputs, states; "head", "column" 3 of it, or nowhere.
SCANNED = {
    ("q", 40, NAN): ("head", ""), ("q", 40, INF): ("head", ""), ("k", 40, NAN): ("head", "head"),
    ("k", 40, INF): ("head", "head"), ("v", 35, NAN): ("column", "column"), ("v", 35, INF): ("column", "column"),
    ("g_log", 1, NAN): ("head", "head"), ("g_log", 1, INF): ("head", "head"), ("g_log", 1, -INF): ("", ""),
    ("beta", 1, NAN): ("head", "head"), ("beta", 1, INF): ("head", "head"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCANNED, ids=str)
def test_a_scan_carries_what_is_not_finite_no_further_than_the_arithmetic(
    dev: Any, case: tuple[str, int, float]
) -> None:
    with Cache.new(dev, tiny(n_layer=1), 16) as cache, Cache.new(dev, tiny(n_layer=1), 16) as twin:
        name, at, value = case
        out, state = scan(dev, cache, {name: (at, value)})
        good_out, good_state = scan(dev, twin, {})
        spoiled = {"head": [True] * 32, "column": [c == 3 for c in range(32)], "": [False] * 32}
        assert (~np.isfinite(out[1])).tolist() == spoiled[SCANNED[case][0]]
        assert (~np.isfinite(state[1])).all(axis=1).tolist() == spoiled[SCANNED[case][1]]
        assert (~np.isfinite(state[1])).any(axis=1).tolist() == spoiled[SCANNED[case][1]]
        assert out[0].tobytes() == good_out[0].tobytes()
        assert state[0].tobytes() == good_state[0].tobytes()
        assert not cache.health()  # gdn_prep has reported what its operands are made of


def test_a_gate_of_minus_infinity_forgets_a_finite_state_and_no_other(dev: Any) -> None:
    forgets: dict[str, tuple[int, float]] = {"g_log": (1, -INF)}
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        _, state = scan(dev, cache, forgets, state=1e30)
        assert (state[1] == np.float32(0.25 * 0.5 * 0.25)).all()
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        _, state = scan(dev, cache, forgets, state=INF)
        assert np.isnan(state[1]).all()


def test_a_state_of_denormals_stays_what_it_is(dev: Any) -> None:
    with Cache.new(dev, tiny(n_layer=1), 16) as cache:
        _, state = scan(dev, cache, {"beta": (1, 0.0)}, state=2.0**-149)
        assert (state[1] == np.float32(2.0**-149)).all()


# Attention: four tokens in one tile, two K/V heads of 64, four query heads.

ATTEND = attention_only(1, n_head=4)


def attend(
    dev: Any, *, q: dict[tuple[int, int], float] | None = None, k: Any = None, v: Any = None,
    policy: FormatPolicy | None = None, q_value: float | None = None, v_value: float | None = None,
) -> tuple[Array, Any]:  # fmt: skip
    """Rows 1 .. 3 over tokens 0 .. 3: (outputs [3, 4, 64], health). k, v: (token, elements, value) that is other."""
    random = np.random.default_rng(5)
    keys, values = random.standard_normal((2, 4, 128)).astype(np.float32)
    queries = random.standard_normal((3, 4, 64)).astype(np.float32)
    if q_value is not None:
        queries[:] = q_value
    if v_value is not None:
        values[:] = v_value
    for plane, change in ((keys, k), (values, v)):
        if change is not None:
            plane[change[0], change[1]] = change[2]
    for (row, head), value in (q or {}).items():
        queries[row, head, 9] = value
    with Cache.new(dev, ATTEND, 16, policy=FormatPolicy() if policy is None else policy) as cache:
        ops.append_kv(dev, cache, 0, put(dev, keys[:1]), put(dev, values[:1]))
        cache.advance(dev)
        ops.append_kv(dev, cache, 0, put(dev, keys[1:]), put(dev, values[1:]))
        appended = cache.health()
        cache.clear_health()
        out = dev.uninit(queries.size)
        ops.attend(dev, cache, 0, put(dev, queries), out, scale=0.125)
        health = cache.health()
        lost = [change for change in (k, v) if change is not None and not abs(change[2]) < 2e6]  # or d fits f16
        assert bool(appended) == bool(lost)
        return out.to_numpy().reshape(queries.shape), health


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_a_query_that_is_not_finite_spoils_its_head_of_its_row(dev: Any, value: float) -> None:
    good, _ = attend(dev)
    out, health = attend(dev, q={(1, 2): value})
    assert np.isnan(out[1, 2]).all()
    out[1, 2] = good[1, 2]
    assert out.tobytes() == good.tobytes()
    assert health.faults == nonfinite(1, 2)  # row 1 of position 1


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_a_key_that_is_not_a_number_spoils_the_rows_that_see_it(dev: Any, value: float) -> None:
    """Token 2, K/V head 1, which query heads 2 and 3 read. In e4m3 a NaN is one, and an infinity is 448."""
    policy = FormatPolicy(k="fp8") if np.isnan(value) else FormatPolicy()
    good, _ = attend(dev, policy=policy)
    out, health = attend(dev, k=(2, 64 + 9, value), policy=policy)
    assert np.isnan(out[1:, 2:]).all()
    out[1:, 2:] = good[1:, 2:]
    assert out.tobytes() == good.tobytes()
    assert not health  # the append has reported it


@pytest.mark.parametrize("value", [3e38, -3e38], ids=str)
def test_a_key_whose_d_overflowed_is_a_number_where_its_codes_say_which(dev: Any, value: float) -> None:
    """A score of infinity makes NaN, one of minus infinity weighs nothing."""
    keys = (2, slice(64, 128), value)
    good, _ = attend(dev, q_value=1.0)
    out, _ = attend(dev, k=keys, q_value=1.0)
    assert np.isnan(out[1:, 2:]).all() == (value > 0)
    assert np.isfinite(out[1:, 2:]).all() == (value < 0)
    assert out[0].tobytes() == good[0].tobytes()
    assert out[1:, :2].tobytes() == good[1:, :2].tobytes()


@pytest.mark.parametrize("value", [NAN, INF, 1e6], ids=str)  # the last is beyond the f16 that V is decoded to
def test_a_value_that_is_not_finite_spoils_its_dims_of_the_rows_that_see_it(dev: Any, value: float) -> None:
    policy = FormatPolicy(v="fp8") if np.isnan(value) else FormatPolicy()
    good, _ = attend(dev, policy=policy)
    out, health = attend(dev, v=(2, 64 + 9, value), policy=policy)
    spoiled = ~np.isfinite(out)
    assert spoiled[1:, 2:, 9].all()
    assert not spoiled[:, :2].any()
    assert not spoiled[0].any()
    assert not spoiled[..., 32:].any()  # another block, with a d of its own
    assert spoiled[1:, 2:].sum() == 4 * (32 if value == INF else 1)  # an infinite d spoils its block
    assert out[0].tobytes() == good[0].tobytes()
    assert not health


def test_queries_of_denormals_weigh_every_key_alike(dev: Any) -> None:
    good, _ = attend(dev, q_value=0.0)
    out, health = attend(dev, q_value=2.0**-149)
    np.testing.assert_allclose(out, good, rtol=0, atol=2e-3 * np.abs(good).max())
    assert not health


def test_values_of_f16_denormals_are_not_flushed(dev: Any) -> None:
    out, health = attend(dev, v_value=2.0**-24)
    np.testing.assert_allclose(out, np.full_like(out, 2.0**-24), rtol=2e-3)
    assert not health


# Numbers that go with a call


@pytest.mark.parametrize("factor", [NAN, INF, -INF, 1e39], ids=str)
def test_a_factor_that_is_not_finite_in_f32_is_refused(dev: Any, factor: float) -> None:
    with Cache.new(dev, tiny(n_head=4), 16) as cache:
        given = {op: {name: put(dev, x) for name, x in op_calls.arrays(op).items()} for op in op_calls.SHAPES}
        op_calls.call(dev, cache, "append_kv", given["append_kv"])
        q, out = put(dev, np.ones((2, 4, 64), np.float32)), dev.uninit(2 * 4 * 64)
        prep, scan_of, step = (given[op].values() for op in ("gdn_prep", "gdn_scan", "recur_step"))
        before = image(cache)
        for name, call in (
            ("scale", lambda: ops.attend(dev, cache, 3, q, out, scale=factor)),
            ("eps", lambda: ops.gdn_prep(dev, cache, 0, *prep, eps=factor)),
            ("scale", lambda: ops.gdn_scan(dev, cache, 0, *scan_of, scale=factor)),
            ("eps", lambda: ops.recur_step(dev, cache, 0, *step, eps=factor, scale=1.0)),
            ("scale", lambda: ops.recur_step(dev, cache, 0, *step, eps=1e-6, scale=factor)),
        ):
            with pytest.raises(ConfigError, match=f"{name} is -?(nan|inf|1e\\+39); it is a finite f32"):
                call()
            assert image(cache) == before
        ops.gdn_scan(dev, cache, 0, *scan_of, scale=3.4028235677973366e38 * (1 - 2**-53))  # which rounds to the largest
