"""Block formats: golden blocks, special values, error bounds, and the arithmetic under them. NumPy only."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_driver.errors import ArrayError
from memra_driver.formats import BLOCK, FORMATS, bf16_bits, f16_bits, fma_rn

F32_MAX = float(np.finfo(np.float32).max)
any_f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def noise(i: int) -> float:
    """A number in [-1, 1) from a hash of i."""
    x = (i * 2654435761 ^ 0x9E3779B9) & 0xFFFFFFFF
    return (x >> 8) / 2**24 * 2 - 1


def f32(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def block(value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(BLOCK, value, np.float32)


def encoded(name: str, x: np.ndarray[Any, Any]) -> str:
    return FORMATS[name].encode(x).tobytes().hex()


J = range(BLOCK)
GOLDEN = {
    "A": (
        f32([((37 * j) % 64 - 31.5) / 16 for j in J]),
        {
            "q8_0": "f0238116a93ed267fa8d22b54bde7306992ec257ea7f12a53ace63f6891eb147da6f",
            "q5_1": "1130e0bf2ab55aa980a2d5f72a4c7f91c4e6193b6e80b3d5",
            "q4_0": "e03340d973fc952ec851ea731da63fc862fb",
            "fp8": "c02bbb38b43d9cbe30b939b03e1cbd34b83bab4029bb36b43ca2bf2fba39b23e",
        },
    ),
    "B": (
        f32(J) * np.float32(0.05),
        {
            "q8_0": "40220004080c1014191d2125292d3135393d42464a4e52565a5e62666b6f73777b7f",
            "q5_1": "662a00000000ffff00112233445566778899aabbccddeeff",
            "q4_0": "33b248483737373726262626151515150404",
            "fp8": "00151d2225282a2b2d2e30313232333435363637383839393a3a3a3b3b3c3c3c",
        },
    ),
    "C": (
        f32([noise(j + 71) for j in J]) * np.float32(1.3),
        {
            "q8_0": "2c21ff6204a245e6882bcd7012b456f49639db7e208124c66506a84bed8e32d37614",
            "q5_1": "462d21bd9696d6d2bffc3004488cc105599dd2266aaee327",
            "q4_0": "213168fea802ac46e08b25df7913bd57f19c",
            "fp8": "833812b733a8ba2eb03924b436a0b931ac3a2aba2cb13818b634a4b930ae3a25",
        },
    ),
    "D": (
        f32([noise(j + 91) for j in J]) * np.float32(0.7) + np.float32(0.1),
        {
            "q8_0": "1d1e31db6c17c15500a93ee87d23cd620cb64bba4ff99f34de721dc75b05b041ea7f",
            "q5_1": "83299db82d2da5a584488cc105599dd1165aafe2266baff3",
            "q4_0": "11ae35ca3187ec53a81d64ca2086db42970d",
            "fp8": "29a63221ac3081b02ca13425aa3119ae2ead2f93b12aa53323ab3110af2ca034",
        },
    ),
    "zero": (block(0.0), {"q8_0": "00" * 34, "q5_1": "00" * 24, "q4_0": "0080" + "88" * 16, "fp8": "00" * 32}),
    "-2.5": (
        block(-2.5),
        {"q8_0": "0a25" + "81" * 32, "q5_1": "000000c1" + "00" * 20, "q4_0": "0035" + "00" * 16, "fp8": "c2" * 32},
    ),
    "minus zero": (
        block(-0.0),
        {"q8_0": "00" * 34, "q5_1": "00000080" + "00" * 20, "q4_0": "0000" + "88" * 16, "fp8": "80" * 32},
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", GOLDEN)
def test_golden_blocks_encode_to_the_byte(case: str, name: str) -> None:
    x, expected = GOLDEN[case]
    assert encoded(name, x) == expected[name]


def test_sizes_and_codes_are_those_of_the_layout() -> None:
    sizes = [(fmt.name, fmt.code, fmt.block_bytes) for fmt in FORMATS.values()]
    assert sizes == [("q8_0", 0, 34), ("q5_1", 1, 24), ("q4_0", 2, 18), ("fp8", 3, 32)]


@pytest.mark.parametrize("name", FORMATS)
def test_leading_shapes_only_shape_the_result(name: str) -> None:
    fmt = FORMATS[name]
    x = np.random.default_rng(0).standard_normal((3, 5, 96)).astype(np.float32)
    stored = fmt.encode(x)
    assert stored.shape == (3, 5, 3 * fmt.block_bytes)
    blocks = [fmt.encode(one).tobytes() for one in x.reshape(-1, BLOCK)]
    assert stored.tobytes() == b"".join(blocks)
    assert fmt.encode(x[:, ::2]).tobytes() == stored[:, ::2].tobytes()
    assert fmt.decode(stored).shape == x.shape
    assert np.array_equal(fmt.decode(stored[1, 2]), fmt.decode(stored)[1, 2])
    assert fmt.encode(x[:0]).shape == (0, 5, 3 * fmt.block_bytes)


@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_dtype_or_length_is_refused(name: str) -> None:
    fmt = FORMATS[name]
    for bad in (np.zeros(32), np.zeros(33, np.float32), np.float32(1)):
        with pytest.raises(ArrayError, match=name):
            fmt.encode(bad)  # type: ignore[arg-type]
    for bad_bytes in (np.zeros(fmt.block_bytes, np.int8), np.zeros(fmt.block_bytes + 1, np.uint8)):
        with pytest.raises(ArrayError, match=name):
            fmt.decode(bad_bytes)  # type: ignore[arg-type]


# Special values. d, m and codes apart.


def parts(name: str, x: np.ndarray[Any, Any]) -> tuple[list[int], list[int]]:
    """The f16 fields of one block as bits, and its 32 codes."""
    raw = FORMATS[name].encode(x)
    halves = {"q8_0": 1, "q5_1": 2, "q4_0": 1}[name]
    fields = raw[: 2 * halves].view("<u2").tolist()
    if name == "q8_0":
        return fields, raw[2:].view(np.int8).tolist()
    packed = raw[-16:]
    codes = [*(packed & 15).tolist(), *(packed >> 4).tolist()]
    high = int.from_bytes(raw[4:8].tobytes(), "little") if name == "q5_1" else 0
    return fields, [code | (high >> j & 1) << 4 for j, code in enumerate(codes)]


def with_lane(x: np.ndarray[Any, Any], lane: int, value: float) -> np.ndarray[Any, Any]:
    x = x.copy()
    x[lane] = value
    return x


RAMP = f32(np.linspace(-1, 1, BLOCK))


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0"])
def test_a_nan_gets_code_zero_and_leaves_the_others_alone(name: str) -> None:
    fields, codes = parts(name, RAMP)
    assert parts(name, with_lane(RAMP, 7, math.nan)) == (fields, with_lane(np.array(codes), 7, 0).tolist())


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0"])
def test_a_block_of_nan_has_a_nan_scale_and_zero_codes(name: str) -> None:
    fields, codes = parts(name, block(math.nan))
    assert fields == [0x7FFF] * len(fields)
    assert codes == [0] * BLOCK
    assert np.isnan(FORMATS[name].decode(FORMATS[name].encode(block(math.nan)))).all()


def test_an_infinity_makes_the_scale_infinite() -> None:
    assert parts("q8_0", with_lane(RAMP, 3, -math.inf)) == ([0x7C00], [0] * BLOCK)
    assert parts("q5_1", with_lane(RAMP, 3, math.inf)) == ([0x7C00, 0xBC00], [0] * BLOCK)
    assert parts("q5_1", with_lane(RAMP, 3, -math.inf)) == ([0x7C00, 0xFC00], [0] * BLOCK)
    assert parts("q4_0", with_lane(RAMP, 3, math.inf)) == ([0xFC00], with_lane(np.full(BLOCK, 8), 3, 0).tolist())


def test_a_scale_beyond_f16_is_stored_as_infinity_with_its_codes() -> None:
    fields, codes = parts("q8_0", RAMP * np.float32(127 * 70000))
    assert fields == [0x7C00]
    assert (codes[0], codes[-1]) == (-127, 127)
    fields, codes = parts("q5_1", RAMP - np.float32(70000))
    assert fields[1] == 0xFC00
    assert codes == sorted(codes)
    assert parts("q4_0", RAMP * np.float32(8 * 70000))[0] == [0x7C00]  # the lowest lane of the largest: -1


def test_a_tiny_block_keeps_its_codes_while_its_scale_rounds_to_zero() -> None:
    fields, codes = parts("q8_0", RAMP * np.float32(1e-6))
    assert fields == [0]
    assert (codes[0], codes[-1]) == (-127, 127)
    for name in ("q8_0", "q5_1", "q4_0"):
        assert (FORMATS[name].decode(FORMATS[name].encode(block(1e-8))) == 0).all()


@pytest.mark.parametrize(("name", "code"), [("q8_0", 0), ("q5_1", 0), ("q4_0", 8)])
@pytest.mark.parametrize("scale", [1e-41, 1e-40, 1e-39])
def test_where_the_inverse_scale_overflows_every_code_is_the_neutral_one(name: str, code: int, scale: float) -> None:
    x = with_lane(RAMP * np.float32(scale), 9, math.nan)
    fields, codes = parts(name, x)
    assert [bits & 0x7FFF for bits in fields] == [0] * len(fields)
    assert codes == [code] * BLOCK


def test_the_inverse_of_the_smallest_scale_that_has_one_is_used() -> None:
    smallest = np.nextafter(np.float32(2.0**-128), np.float32(1))  # 1/d is finite from here on
    assert parts("q8_0", with_lane(block(0), 5, smallest * np.float32(127)))[1][5] == 127
    assert parts("q4_0", with_lane(block(0), 5, smallest * np.float32(-8)))[1][5] == 0


def test_q4_0_takes_its_sign_from_the_lowest_of_equal_magnitudes() -> None:
    assert parts("q4_0", with_lane(with_lane(block(0), 4, -8.0), 9, 8.0)) == (
        [0x3C00],
        with_lane(with_lane(np.full(BLOCK, 8), 4, 0), 9, 15).tolist(),
    )
    assert parts("q4_0", with_lane(with_lane(block(0), 4, 8.0), 9, -8.0))[0] == [0xBC00]


@pytest.mark.parametrize("lane", [0, 13, 31])
def test_q5_1_stores_minus_zero_as_the_minimum_wherever_it_stands(lane: int) -> None:
    assert parts("q5_1", with_lane(block(0.0), lane, -0.0)) == ([0, 0x8000], [0] * BLOCK)
    x = with_lane(np.abs(RAMP), 31 - lane, 0.0)
    assert parts("q5_1", with_lane(x, lane, -0.0))[0][1] == 0x8000


@pytest.mark.parametrize("value", [3.0, -3.0, 0.1, 65504.0])
def test_a_constant_block_decodes_to_its_f16_value_in_q5_1(value: float) -> None:
    raw = FORMATS["q5_1"].encode(block(value))
    assert raw.tobytes() == b"\0\0" + np.float16(value).tobytes() + bytes(20)
    assert (FORMATS["q5_1"].decode(raw) == np.float32(np.float16(value))).all()


# e4m3

E4M3_CASES = [
    (0.0, 0x00), (-0.0, 0x80), (1.0, 0x38), (-2.5, 0xC2), (17.0, 0x58), (19.0, 0x5A), (431.9, 0x7D), (432.0, 0x7E),
    (448.0, 0x7E), (464.0, 0x7E), (464.5, 0x7E), (465.0, 0x7E), (1000.0, 0x7E), (-1000.0, 0xFE),
    (math.inf, 0x7E), (-math.inf, 0xFE), (1.5 * 2.0**-9, 0x02), (2.0**-9, 0x01), (1.01 * 2.0**-10, 0x01),
    (2.0**-10, 0x00), (-(2.0**-10), 0x80), (2.0**-11, 0x00), (1e-40, 0x00),
]  # fmt: skip


@pytest.mark.parametrize(("value", "code"), E4M3_CASES)
def test_e4m3_rounds_half_to_even_and_saturates(value: float, code: int) -> None:
    assert FORMATS["fp8"].encode(block(value)).tolist() == [code] * BLOCK


def test_every_nan_becomes_the_one_nan_of_e4m3() -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001] * 8, np.uint32)
    assert FORMATS["fp8"].encode(bits.view(np.float32)).tolist() == [0x7F] * BLOCK


def test_every_e4m3_code_decodes_to_its_value_and_back() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = FORMATS["fp8"].decode(codes)
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        exponent, mantissa = code >> 3 & 15, code & 7
        if code & 127 == 127:
            assert math.isnan(value)
            continue
        magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        assert math.copysign(1, value) == (-1 if code & 128 else 1)
        assert abs(value) == magnitude
    back = FORMATS["fp8"].encode(values)
    assert np.array_equal(back, np.where(codes & 127 == 127, 127, codes))


@given(any_f32)
def test_e4m3_picks_the_nearest_value(x: float) -> None:
    code = int(FORMATS["fp8"].encode(block(x))[0])
    values = FORMATS["fp8"].decode(np.arange(256, dtype=np.uint8))[:127].astype(np.float64)
    distance = np.abs(values - min(abs(x), 448.0))
    assert distance[code & 127] == distance.min()
    assert (code & 128 != 0) == (math.copysign(1, x) < 0)


# Error bounds

HALF_ULP = 2.0**-11  # relative rounding of an f16; below 2^-14 it is absolute, 2^-25


def f16_error(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.maximum(np.abs(x) * HALF_ULP, 2.0**-25)


def bound(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How far a decoded element may lie from x (blocks, 32): half a step, and the rounding of d and m to f16."""
    x = x.astype(np.float64)
    low, high, amax = x.min(1, keepdims=True), x.max(1, keepdims=True), np.abs(x).max(1, keepdims=True)
    slack = amax * 2.0**-20  # f32 arithmetic
    if name == "q8_0":
        return amax / 254 + 127 * f16_error(amax / 127) + slack
    if name == "q5_1":
        return (high - low) / 62 + 31 * f16_error((high - low) / 31) + f16_error(low) + slack
    if name == "q4_0":  # eight steps on the side of the largest magnitude, seven on the other
        return amax / 8 + 8 * f16_error(amax / 8) + slack
    return np.maximum(np.abs(x) / 16, 2.0**-10) + np.maximum(np.abs(x) - 448, 0)


@pytest.mark.parametrize("name", FORMATS)
def test_100000_random_blocks_decode_within_the_step_of_the_format(name: str) -> None:
    rng = np.random.default_rng(18)
    x = rng.standard_normal((100_000, BLOCK)) * 10.0 ** rng.uniform(-9, 2, (100_000, 1))
    x[::3] += rng.standard_normal((33_334, 1))
    x[1::3, 5] *= 40  # one spike
    x = x.astype(np.float32)
    decoded = FORMATS[name].decode(FORMATS[name].encode(x))
    error = np.abs(decoded.astype(np.float64) - x)
    worst = np.unravel_index(np.argmax(error / bound(name, x)), error.shape)
    assert (error <= bound(name, x)).all(), (worst, x[worst[0]])


@settings(max_examples=200)
@given(st.lists(any_f32, min_size=BLOCK, max_size=BLOCK), st.sampled_from(list(FORMATS)))
def test_finite_blocks_with_a_finite_scale_never_decode_to_nan(values: list[float], name: str) -> None:
    x = f32(values)
    x = x / max(1.0, float(np.abs(x).max()) / 60000)
    assert np.isfinite(FORMATS[name].decode(FORMATS[name].encode(x.astype(np.float32)))).all()


# Arithmetic


def round_f32(exact: Fraction) -> float:
    """The f32 nearest to a rational number, half to even."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 24, -149)
    while size >= Fraction(2) ** (exponent + 24):
        exponent += 1
    steps = round(size / Fraction(2) ** exponent)  # Python rounds half to even
    value = Fraction(steps) * Fraction(2) ** exponent
    sign = 1 if exact > 0 else -1
    return sign * (math.inf if value > Fraction(F32_MAX) else float(value))


@settings(max_examples=1000)
@given(any_f32, any_f32, any_f32)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert float(fma_rn(np.float32(a), np.float32(b), np.float32(c))) == round_f32(exact)


def test_fma_rounds_once_where_two_roundings_differ() -> None:
    rng = np.random.default_rng(5)
    a = (rng.integers(2**23, 2**24, 20000) * 2.0**-23).astype(np.float32)
    b = (rng.integers(2**23, 2**24, 20000) * 2.0**-23).astype(np.float32)
    # c puts the f32 rounding point right beside the product
    tie = (a.astype(np.float64) * b).astype(np.float32) * np.float32(2.0**24)
    for c in (tie, np.nextafter(tie, np.float32(0)), -tie, tie * np.float32(2.0**6)):
        expected = [round_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
                    for x, y, z in zip(a[:2000], b[:2000], c[:2000], strict=True)]
        assert fma_rn(a[:2000], b[:2000], c[:2000]).tolist() == expected
    # a product on a tie of f32, and a tail that decides it but is lost in f64
    x, y, z = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-90)
    for sign in (1, -1):
        exact = Fraction(float(x)) * Fraction(float(y)) + sign * Fraction(float(z))
        assert float(fma_rn(x, y, np.float32(sign) * z)) == round_f32(exact)


def test_fma_of_special_values_is_that_of_ieee() -> None:
    inf, nan = np.float32(math.inf), np.float32(math.nan)
    assert float(fma_rn(inf, np.float32(1), np.float32(2))) == math.inf
    assert np.isnan(fma_rn(f32([inf, nan, 1, inf]), f32([0, 1, nan, 1]), f32([1, 1, 1, -inf]))).all()
    assert float(fma_rn(np.float32(3e38), np.float32(3e38), np.float32(-1))) == math.inf


@given(st.floats(width=32))
def test_f16_and_bf16_bits_round_half_to_even(x: float) -> None:
    if math.isnan(x):
        assert (f16_bits(f32([x]))[0], bf16_bits(f32([x]))[0]) == (0x7FFF, 0x7FFF)
        return
    half = np.array(f16_bits(f32([x])), np.uint16).view(np.float16)[0]
    assert abs(x) >= 65520 if math.isinf(half) else abs(float(half) - x) <= max(abs(x) * HALF_ULP, 2.0**-25)
    low = int(f32([x]).view(np.uint32)[0])
    kept, rest = low >> 16, low & 0xFFFF
    assert int(bf16_bits(f32([x]))[0]) == kept + (rest > 0x8000 or (rest == 0x8000 and kept & 1))
