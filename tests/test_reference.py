"""The NumPy twins of append, dequantisation, counters and copies: against the reference vectors, and row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import Array, faults, same_bits, same_floats
from vectors_data import Case, cases, name_of

from memra_driver import reference
from memra_driver.check.args import record
from memra_driver.formats import BLOCK, FORMATS, K_FORMATS, V_FORMATS
from memra_driver.health import Fault, FaultCount

PAIRS = [(k, v) for k in K_FORMATS for v in V_FORMATS]


class Layer:
    """The planes of one attention layer and the calls on them."""

    def __init__(self, k_format: str, v_format: str, dim_k: int, dim_v: int, max_ctx: int, fill: int = 0xAA) -> None:
        self.formats = FORMATS[k_format], FORMATS[v_format]
        self.dims, self.max_ctx = (dim_k, dim_v), max_ctx
        self.tok_bytes = [
            dim // BLOCK * fmt.block_bytes for dim, fmt in zip(self.dims, self.formats, strict=True)
        ]
        self.k, self.v = (np.full(max_ctx * size + 8, fill, np.uint8) for size in self.tok_bytes)
        self.len_d, self.health = np.zeros(1, np.int32), record()

    def geometry(self) -> tuple[int, ...]:
        return (*self.dims, *self.tok_bytes, *(fmt.code for fmt in self.formats))

    def append(self, k_rows: Array, v_rows: Array, slot: int, rows: int, length: int = -1, pos_d: Any = None) -> None:
        reference.append_kv(
            k_rows, v_rows, self.k, self.v, self.len_d, pos_d, slot, rows, length, self.max_ctx, *self.geometry(),
            None, 1, self.health, 3,
        )  # fmt: skip

    def dequant(self, start: int, rows: int, bf16: bool = False) -> tuple[Array, Array]:
        k_out, v_out = (np.zeros(rows * dim, np.uint16 if bf16 else np.float32) for dim in self.dims)
        reference.dequant_kv(
            self.k, self.v, start, rows, self.max_ctx, *self.geometry(), k_out, v_out, int(bf16), self.health, 3
        )
        return k_out, v_out


def layer_of(case: Case) -> Layer:
    return Layer(case.k_format, case.v_format, case.kv_dim_k, case.kv_dim_v, case.max_ctx, case.fill)


def rows_of(layer: Layer, rows: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    k_rows, v_rows = (rng.standard_normal(rows * dim).astype(np.float32) for dim in layer.dims)
    return k_rows, v_rows


# Append and dequantise


def without_exception(case: Case, layer: Layer, k: Array, v: Array) -> tuple[Array, Array]:
    """The planes with the block where our rule differs taken out."""
    planes = []
    for plane, fmt, tok_bytes in zip((k, v), layer.formats, layer.tok_bytes, strict=True):
        plane = plane.copy()
        if "except_block" in case:
            at = (case.t0 + case.except_block["row"]) * tok_bytes + case.except_block["block"] * fmt.block_bytes
            plane[at : at + fmt.block_bytes] = 0
        planes.append(plane)
    return planes[0], planes[1]


@pytest.mark.parametrize("case", cases("append_rows"), ids=name_of)
def test_append_leaves_the_bytes_of_the_reference_kernels(case: Case) -> None:
    layer = layer_of(case)
    layer.append(case["k_rows"], case["v_rows"], case.t0, case.rows)
    got = without_exception(case, layer, layer.k, layer.v)
    expected = without_exception(case, layer, case.expected("k_out"), case.expected("v_out"))
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1], expected[1])
    assert layer.len_d[0] == case.t0 + case.rows


@pytest.mark.parametrize("case", [c for c in cases("append_rows") if "k_dequant" in c], ids=name_of)
def test_dequant_gives_the_floats_of_the_reference_kernels(case: Case) -> None:
    layer = layer_of(case)
    layer.k, layer.v = case["k_out"], case["v_out"]
    k_out, v_out = layer.dequant(case.t0, case.rows)
    assert same_floats(k_out, case.expected("k_dequant"))
    assert same_floats(v_out, case.expected("v_dequant"))


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_appended_rows_equal_single_appends(k_format: str, v_format: str) -> None:
    many, single = (Layer(k_format, v_format, 96, 64, 12) for _ in range(2))
    k_rows, v_rows = rows_of(many, 7)
    k_rows[40], v_rows[100] = np.nan, np.inf
    many.append(k_rows, v_rows, 2, 7)
    for t in range(7):
        single.append(k_rows[t * 96 : (t + 1) * 96], v_rows[t * 64 : (t + 1) * 64], 2 + t, 1)
    assert same_bits(many.k, single.k)
    assert same_bits(many.v, single.v)
    assert same_bits(many.health, single.health)
    assert many.len_d == single.len_d == [9]


def test_bf16_rows_are_the_float_rows_rounded() -> None:
    layer = Layer("q8_0", "q5_1", 64, 32, 5)
    layer.append(*rows_of(layer, 5), 0, 5)
    for floats, halves in zip(layer.dequant(1, 3), layer.dequant(1, 3, bf16=True), strict=True):
        back = (halves.astype(np.uint32) << 16).view(np.float32)
        assert (np.abs(back - floats) <= np.abs(floats) * 2.0**-8).all()
        assert len(set(back.tolist())) > 8


def test_the_slot_comes_from_the_device_counter_where_there_is_one() -> None:
    by_argument, by_counter = (Layer("q8_0", "q4_0", 32, 32, 6) for _ in range(2))
    rows = rows_of(by_argument, 2)
    by_argument.append(*rows, 3, 2)
    by_counter.append(*rows, -99, 2, pos_d=np.array([3], np.int32))
    assert same_bits(by_argument.k, by_counter.k)
    assert same_bits(by_argument.v, by_counter.v)


def test_len_d_grows_to_the_end_of_the_rows_or_takes_the_length_given() -> None:
    layer = Layer("q8_0", "q5_1", 32, 32, 16)
    rows = rows_of(layer, 2)
    layer.append(*rows, 6, 2)
    assert layer.len_d[0] == 8
    layer.append(*rows, 1, 2)
    assert layer.len_d[0] == 8
    layer.append(*rows, 1, 2, length=5)
    assert layer.len_d[0] == 5
    layer.append(*rows, 1, 2, length=0)
    assert layer.len_d[0] == 0


@pytest.mark.parametrize(("slot", "rows"), [(-1, 1), (4, 1), (3, 2), (0, 5), (2**31, 1), (-(2**40), 3)])
def test_rows_outside_the_cache_write_nothing_and_count_once(slot: int, rows: int) -> None:
    layer = Layer("q8_0", "q5_1", 64, 32, 4)
    layer.len_d[0] = 2
    before = layer.k.copy(), layer.v.copy()
    layer.append(*rows_of(layer, rows), slot, rows)
    assert same_bits(layer.k, before[0])
    assert same_bits(layer.v, before[1])
    assert layer.len_d[0] == 2
    assert faults(layer.health) == {Fault.SLOT_RANGE: FaultCount(1, 3, max(slot, 0))}


def test_dequant_outside_the_cache_writes_nothing() -> None:
    layer = Layer("q8_0", "q5_1", 32, 32, 4)
    k_out, v_out = layer.dequant(2, 3)
    assert not k_out.any()
    assert not v_out.any()
    assert faults(layer.health) == {Fault.SLOT_RANGE: FaultCount(1, 3, 2)}


@pytest.mark.parametrize("fill", [0x7F, 0xFF])
@pytest.mark.parametrize("rows", [1, 31, 32, 33])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_what_stands_beyond_the_rows_is_never_interpreted(k_format: str, v_format: str, rows: int, fill: int) -> None:
    layer = Layer(k_format, v_format, 32, 32, 40, fill)
    layer.append(*rows_of(layer, rows), 0, rows)
    assert all(np.isfinite(out).all() for out in layer.dequant(0, rows))
    assert (layer.k[rows * layer.tok_bytes[0] :] == fill).all()
    assert (layer.v[rows * layer.tok_bytes[1] :] == fill).all()
    assert faults(layer.health) == {}


def test_a_non_finite_input_is_counted_once_a_block() -> None:
    layer = Layer("q8_0", "fp8", 64, 64, 20)
    k_rows, v_rows = rows_of(layer, 4)
    k_rows[64 + 3] = k_rows[64 + 4] = np.nan  # one block of row 1
    k_rows[3 * 64 + 40] = np.inf
    v_rows[2 * 64] = -np.inf
    layer.append(k_rows, v_rows, 10, 4)
    assert faults(layer.health) == {Fault.NONFINITE: FaultCount(3, 3, 11)}


@pytest.mark.parametrize(("v_format", "value"), [("q5_1", 70000.0), ("q5_1", -70000.0), ("q4_0", 6e5), ("q4_0", -6e5)])
def test_a_scale_or_minimum_that_overflows_f16_is_counted(v_format: str, value: float) -> None:
    layer = Layer("q8_0", v_format, 64, 64, 20)
    k_rows, v_rows = rows_of(layer, 3)
    k_rows[70] = 9e6
    v_rows[2 * 64 : 2 * 64 + 32] = value
    v_rows[0] = np.inf  # an infinite scale, but not from finite inputs
    layer.append(k_rows, v_rows, 0, 3)
    assert faults(layer.health) == {
        Fault.NONFINITE: FaultCount(1, 3, 0),
        Fault.SCALE_OVERFLOW: FaultCount(2, 3, 1),
    }


def test_a_finite_input_beyond_464_counts_as_saturated_in_fp8_alone() -> None:
    layer = Layer("fp8", "fp8", 64, 64, 20)
    k_rows, v_rows = rows_of(layer, 3)
    k_rows[0], k_rows[64], k_rows[96], k_rows[97] = 464.0, 464.5, -465.0, 1e30
    v_rows[2 * 64 + 9] = np.inf
    layer.append(k_rows, v_rows, 5, 3)
    assert faults(layer.health) == {
        Fault.NONFINITE: FaultCount(1, 3, 7),
        Fault.FP8_SATURATED: FaultCount(2, 3, 6),
    }
    other = Layer("q8_0", "q5_1", 64, 64, 20)
    other.append(np.full(64, 1000, np.float32), np.full(64, 1000, np.float32), 0, 1)
    assert faults(other.health) == {}


def test_the_record_keeps_the_lowest_position_then_the_lowest_layer() -> None:
    health = record()
    for layer, slot in ((7, 20), (5, 20), (9, 30), (6, 20)):
        reference.report(health, Fault.NONFINITE, layer, slot, 2)
    reference.report(health, Fault.BAD_ACCEPT, 1, -4, 1)
    assert faults(health) == {Fault.NONFINITE: FaultCount(8, 5, 20), Fault.BAD_ACCEPT: FaultCount(1, 1, 0)}
    reference.report(None, Fault.NONFINITE, 0, 0, 1)


# Counters and copies


def test_set_counters_writes_the_masked_ones_and_no_other() -> None:
    counters = np.arange(1000, 1128, dtype=np.int32)
    reference.set_counters(counters, 7, -9, 1 << 0 | -(1 << 63), 1 << 5, 1 << 0 | 1 << 1, -(1 << 63), None, 0)
    changed = {i: int(x) for i, x in enumerate(counters) if x != 1000 + i}
    assert changed == {0: 7, 63: 7, 64 + 5: 7, 1: -9, 127: -9}


def test_copy_many_copies_every_entry_whatever_its_alignment() -> None:
    source = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
    target = np.zeros(4096, np.uint8)
    entries = [(0, 3, 1), (1, 0, 0), (17, 1000, 333), (400, 16, 1600), (2101, 7, 64)]
    table = np.array([[target.ctypes.data + to, source.ctypes.data + at, n] for to, at, n in entries], np.uint64)
    reference.copy_many(table.reshape(-1), len(entries), None, 0)
    expected = np.zeros_like(target)
    for to, at, n in entries:
        expected[to : to + n] = source[at : at + n]
    assert same_bits(target, expected)
