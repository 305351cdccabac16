"""Kernels whose results are exact, against their NumPy twins: append, dequantise, counters, copies.

On the stand-in driver the kernels run as g++ compiled them; with --gpu, on the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import faults, same_floats
from kernel_runs import run, same
from vectors_data import Case, cases, name_of

from memra_driver.check.args import LAYER, PAIRS, Dims, Pair, append_args, dequant_args, edges, poison, record, spread
from memra_driver.formats import BLOCK, FORMATS
from memra_driver.health import Fault, FaultCount
from memra_driver.kernels import APPEND_MANY
from memra_driver.memory import CudaSlice

Span = tuple[int, int, int]  # rows, first slot, capacity

# ---------------------------------------------------------------- append_kv


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize(
    ("dims", "span"),
    [
        ((32, 32), (1, 0, 1)),
        ((64, 32), (3, 5, 8)),  # ends exactly at the capacity
        ((96, 160), (7, 2, 11)),  # a block of threads spans rows
        ((512, 512), (2, 1, 4)),
        ((32, 1024), (5, 0, 5)),
        ((1024, 64), (17, 3, 40)),
    ],
)
def test_append_stores_the_bytes_of_its_twin(
    cuda: Any, host: Any, rng: np.random.Generator, formats: Pair, dims: Dims, span: Span
) -> None:
    rows, slot, max_ctx = span
    args = append_args(formats, dims, spread(rng, rows * dims[0]), spread(rng, rows * dims[1]), slot, max_ctx)
    on_cuda = run(cuda, "append_kv", **args)
    same(on_cuda, run(host, "append_kv", **args))
    assert on_cuda.len_d[0] == max(args["len_d"][0], slot + rows)
    for name in "kv":
        size = args[f"{name}_tok_bytes"]
        plane = getattr(on_cuda, name)
        assert (plane[: slot * size] == 0xA5).all()
        assert (plane[(slot + rows) * size :] == 0xA5).all()


@pytest.mark.parametrize("formats", PAIRS)
def test_append_agrees_on_special_values_and_reports_them(cuda: Any, host: Any, formats: Pair) -> None:
    blocks = edges()
    rows = np.concatenate([blocks, np.roll(blocks, 1, axis=0)], axis=1).reshape(-1)
    args = append_args(formats, (64, 64), rows, rows.copy(), 4, blocks.shape[0] + 4)
    on_cuda = run(cuda, "append_kv", **args)
    same(on_cuda, run(host, "append_kv", **args))
    seen = faults(on_cuda.health)
    assert seen[Fault.NONFINITE] == FaultCount(count=24, layer=LAYER, slot=4)  # 6 blocks, twice a row, in K and in V
    assert (Fault.FP8_SATURATED in seen) == ("fp8" in formats)
    assert (Fault.SCALE_OVERFLOW in seen) == (formats != ("fp8", "fp8"))


@pytest.mark.parametrize("formats", [("q8_0", "q5_1"), ("fp8", "q4_0"), ("q8_0", "fp8")])
def test_append_of_many_rows_stores_the_bytes_of_its_twin(
    cuda: Any, host: Any, rng: np.random.Generator, formats: Pair
) -> None:
    """So many blocks that fewer lanes share one."""
    dims, rows = (1024, 96), APPEND_MANY // 32 + 3
    k_rows, v_rows, special = spread(rng, rows * dims[0]), spread(rng, rows * dims[1]), edges().reshape(-1)
    k_rows[-special.size :] = v_rows[-special.size :] = special
    args = append_args(formats, dims, k_rows, v_rows, 1, rows + 2)
    same(run(cuda, "append_kv", **args), run(host, "append_kv", **args))


@pytest.mark.parametrize("k_format", ["q8_0", "fp8"])
def test_every_magnitude_and_tie_is_stored_alike(cuda: Any, host: Any, rng: np.random.Generator, k_format: str) -> None:
    x = rng.integers(0, 2**32, 64 * 96, np.uint64).astype(np.uint32).view(np.float32)
    steps = rng.integers(-511, 512, 64 * 96).astype(np.float32) / 2  # many ties in every format
    steps[::32] = 127
    for v_format in ("q5_1", "q4_0", "fp8"):
        for rows in (x, steps):
            args = append_args((k_format, v_format), (64, 64), rows, rows.copy(), 0, 96)
            same(run(cuda, "append_kv", **args), run(host, "append_kv", **args))


@pytest.mark.parametrize("formats", PAIRS)
def test_appending_rows_together_or_one_by_one_is_the_same(cuda: Any, rng: np.random.Generator, formats: Pair) -> None:
    dims, rows = (96, 64), 6
    k_rows, v_rows = spread(rng, rows * dims[0]), spread(rng, rows * dims[1])
    together = run(cuda, "append_kv", **append_args(formats, dims, k_rows, v_rows, 2, 9))
    args = append_args(formats, dims, k_rows, v_rows, 2, 9)
    for row in range(rows):
        args |= {
            "k_rows": k_rows[row * dims[0] : (row + 1) * dims[0]].copy(),
            "v_rows": v_rows[row * dims[1] : (row + 1) * dims[1]].copy(), "rows": 1, "slot": 2 + row,
        }  # fmt: skip
        args |= vars(run(cuda, "append_kv", **args))
    for name in ("k", "v", "len_d", "health"):
        assert np.array_equal(getattr(together, name), args[name])


def test_the_device_slot_beats_the_argument(cuda: Any, host: Any, rng: np.random.Generator) -> None:
    x = spread(rng, 2 * 32)
    by_argument = append_args(("q8_0", "q5_1"), (32, 32), x, x.copy(), 3, 8)
    by_device = by_argument | {"slot": 100, "pos_d": np.array([3], np.int32)}
    expected = run(host, "append_kv", **by_argument)
    for dev in (cuda, host):
        got = run(dev, "append_kv", **by_device)
        del got.pos_d
        same(got, expected)


@pytest.mark.parametrize(("length", "before", "after"), [(-1, 0, 5), (-1, 5, 5), (-1, 7, 7), (0, 7, 0), (6, 1, 6)])
def test_append_sets_the_length_that_it_is_told_to(cuda: Any, host: Any, length: int, before: int, after: int) -> None:
    x = np.ones(64, np.float32)
    args = append_args(("fp8", "fp8"), (32, 32), x, x.copy(), 3, 8, len=length, len_d=np.array([before], np.int32))
    for dev in (cuda, host):
        assert run(dev, "append_kv", **args).len_d[0] == after


@pytest.mark.parametrize(
    ("slot", "by_device", "reported"),
    [
        *((slot, by_device, max(slot, 0)) for slot in (-1, -(2**31), 7, 8, 2**31 - 1) for by_device in (False, True)),
        (2**40, False, 2**40),
        (-(2**40), False, 0),
    ],
)
def test_a_slot_outside_the_cache_writes_nothing_and_is_reported(
    cuda: Any, host: Any, slot: int, by_device: bool, reported: int
) -> None:
    x = np.full(64, np.nan, np.float32)
    args = append_args(("q8_0", "q5_1"), (32, 32), x, x.copy(), slot, 8, len_d=np.array([5], np.int32))
    if by_device:
        args |= {"slot": 0, "pos_d": np.array([slot], np.int32)}
    on_cuda = run(cuda, "append_kv", **args)
    same(on_cuda, run(host, "append_kv", **args))
    assert (on_cuda.k == 0xA5).all()
    assert (on_cuda.v == 0xA5).all()
    assert on_cuda.len_d[0] == 5
    assert faults(on_cuda.health) == {Fault.SLOT_RANGE: FaultCount(count=1, layer=LAYER, slot=reported)}


def test_the_error_record_keeps_counting_and_may_be_absent(cuda: Any, host: Any) -> None:
    x = np.full(32, np.inf, np.float32)
    args = append_args(("q8_0", "fp8"), (32, 32), x, x.copy(), 6, 8)
    for dev in (cuda, host):
        args["health"] = run(dev, "append_kv", **args | {"health": record()}).health
        later = run(dev, "append_kv", **args | {"slot": 2, "layer": 9})
        assert faults(later.health) == {Fault.NONFINITE: FaultCount(count=4, layer=9, slot=2)}
        without = run(dev, "append_kv", **args | {"health": None})
        assert np.array_equal(without.k, later.k) is False  # other slots
        assert without.len_d[0] == 7


@pytest.mark.parametrize("case", cases("append_rows"), ids=name_of)
def test_append_stores_the_bytes_of_the_vectors(cuda: Any, case: Case) -> None:
    dims = case.kv_dim_k, case.kv_dim_v
    args = append_args((case.k_format, case.v_format), dims, case["k_rows"], case["v_rows"], case.t0, case.max_ctx)
    args |= {name: np.full(args[name].size, case.fill, np.uint8) for name in "kv"}
    got = run(cuda, "append_kv", **args)
    for name, fmt in (("k", case.k_format), ("v", case.v_format)):
        same_bytes = getattr(got, name) == case.expected(f"{name}_out")
        if "except_block" in case:
            same_bytes[excepted(case, name, FORMATS[fmt].block_bytes)] = True
        assert same_bytes.all()


def excepted(case: Case, name: str, block_bytes: int) -> slice:
    """The bytes of the one block in which we differ from the vectors on purpose."""
    at = case.except_block
    start = ((case.t0 + at["row"]) * (case.fields[f"kv_dim_{name}"] // BLOCK) + at["block"]) * block_bytes
    return slice(start, start + block_bytes)


# ---------------------------------------------------------------- dequant_kv


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("bf16", [0, 1])
@pytest.mark.parametrize(("dims", "span"), [((32, 32), (1, 0, 1)), ((64, 96), (5, 3, 8)), ((512, 256), (33, 7, 64))])
def test_any_bytes_decode_as_in_the_twin(
    cuda: Any, host: Any, rng: np.random.Generator, formats: Pair, bf16: int, dims: Dims, span: Span
) -> None:
    rows, start, max_ctx = span
    args = dequant_args(rng, formats, dims, start, rows, max_ctx, bf16)
    a, b = run(cuda, "dequant_kv", **args), run(host, "dequant_kv", **args)
    assert same_floats(a.k_out, b.k_out)
    assert same_floats(a.v_out, b.v_out)
    assert not faults(a.health)
    assert np.array_equal(a.k, args["k"])


@pytest.mark.parametrize(("start", "rows"), [(-1, 2), (7, 2), (2**40, 1)])
def test_rows_outside_the_cache_decode_nothing_and_are_reported(
    cuda: Any, host: Any, rng: np.random.Generator, start: int, rows: int
) -> None:
    args = dequant_args(rng, ("q8_0", "q5_1"), (32, 32), start, rows, 8, 0)
    got = run(cuda, "dequant_kv", **args)
    same(got, run(host, "dequant_kv", **args))
    assert np.array_equal(got.k_out, args["k_out"])
    assert faults(got.health) == {Fault.SLOT_RANGE: FaultCount(count=1, layer=LAYER, slot=max(start, 0))}


def test_rows_beyond_those_asked_for_are_never_read(cuda: Any, rng: np.random.Generator) -> None:
    formats, dims = ("q8_0", "q5_1"), (64, 64)
    args = dequant_args(rng, formats, dims, 0, 8, 8, 0)
    whole = run(cuda, "dequant_kv", **args)
    # Planes that end with the last row asked for: a read beyond them leaves the allocation.
    ending = {name: args[name][:-8] for name in "kv"}
    part = run(cuda, "dequant_kv", **dequant_args(rng, formats, dims, 6, 2, 8, 0) | ending)
    assert same_floats(part.k_out, whole.k_out[6 * 64 :])
    assert same_floats(part.v_out, whole.v_out[6 * 64 :])


# ---------------------------------------------------------------- set_counters, copy_many


def as_signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def test_counters_are_set_by_their_masks_and_no_other(cuda: Any, host: Any, rng: np.random.Generator) -> None:
    masks = [[2**64 - 1, 2**64 - 1, 0, 0], [0, 0, 2**64 - 1, 2**64 - 1], [1 << 63, 1, 1 << 62, 1 << 63], [0, 0, 0, 0]]
    masks += rng.integers(0, 2**64, (8, 4), np.uint64).tolist()
    for a_lo, a_hi, b_lo, b_hi in masks:
        args: dict[str, Any] = {
            "counters": rng.integers(-9, 9, 128).astype(np.int32), "a": 2**31 - 1, "b": -(2**31),
            "a_lo": as_signed(a_lo), "a_hi": as_signed(a_hi), "b_lo": as_signed(b_lo), "b_hi": as_signed(b_hi),
            "health": None, "layer": 0,
        }  # fmt: skip
        got = run(cuda, "set_counters", **args).counters
        assert np.array_equal(got, run(host, "set_counters", **args).counters)
        in_a, in_b = a_hi << 64 | a_lo, b_hi << 64 | b_lo
        expected = [
            args["a"] if in_a >> i & 1 else args["b"] if in_b >> i & 1 else args["counters"][i] for i in range(128)
        ]
        assert got.tolist() == expected


def test_many_copies_of_any_size_and_alignment_move_their_bytes_only(dev: Any, rng: np.random.Generator) -> None:
    sizes = [0, 1, 3, 4, 15, 16, 17, 255, 1000, 4096, 70_001, *rng.integers(0, 3000, 20).tolist()]
    room = sum(sizes) + 64 * len(sizes)
    source, target = rng.integers(0, 256, room, np.uint8), poison(room, np.uint8)
    src, dst = (CudaSlice(dev.memory, room, np.uint8) for _ in range(2))
    src.copy_from(source)
    dst.copy_from(target)
    entries, at = [], 0
    for size in sizes:
        from_, to = at + int(rng.integers(0, 32)), at + int(rng.integers(0, 32))
        entries.append((dst.ptr + to, src.ptr + from_, size))
        target[to : to + size] = source[from_ : from_ + size]
        at += size + 64
    run(dev, "copy_many", table=np.array(entries, np.uint64), n=len(entries), health=None, layer=0)
    assert np.array_equal(dst.to_numpy(), target)
    assert np.array_equal(src.to_numpy(), source)
    src.close()
    dst.close()


@pytest.mark.gpu
def test_offsets_beyond_four_gigabytes_are_reached(cuda: Any, rng: np.random.Generator) -> None:
    dims, tokens = (1024, 1024), 5_000_000
    sizes = [tokens * 32 * 32 + 8] * 2
    planes = [CudaSlice(cuda.memory, size, np.uint8) for size in sizes]
    x = rng.uniform(-400, 400, 1024).astype(np.float32)
    rows, len_d = CudaSlice(cuda.memory, 1024), CudaSlice(cuda.memory, 1, np.int32)
    outs = [CudaSlice(cuda.memory, 1024) for _ in range(2)]
    rows.copy_from(x)
    geometry = (*dims, 1024, 1024, 3, 3)
    cuda.launch("append_kv", rows, rows, *planes, len_d, None, tokens - 1, 1, 0, tokens, *geometry, None, 1, None, 0)
    cuda.launch("dequant_kv", *planes, tokens - 1, 1, tokens, *geometry, *outs, 0, None, 0)
    expected = FORMATS["fp8"].decode(FORMATS["fp8"].encode(x))
    for out in outs:
        assert np.array_equal(out.to_numpy(), expected)
    for made in (*planes, *outs, rows, len_d):
        made.close()
