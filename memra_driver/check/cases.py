"""What `check` launches of every kernel but attention's: formats, shapes and edges, on fresh random inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memra_driver.check.args import (
    LAYER,
    PAIRS,
    Args,
    Rng,
    append_args,
    commit_args,
    conv_args,
    dequant_args,
    edges,
    i32,
    normal,
    poison,
    prep_args,
    rebuild_args,
    record,
    recur_args,
    rows_args,
    scan_args,
    several_rebuild_args,
    spoil,
    spread,
)
from memra_driver.check.case import FIELDS, TOLERANCE, Case, batch, single
from memra_driver.kernels import RECUR_COLUMNS

# K/V.


def append_cases(rng: Rng, small: bool) -> Iterator[Case]:
    shapes = [((64, 32), 3, 5, 8), ((96, 160), 7, 2, 11), ((32, 1024), 5, 0, 5), ((1024, 1024), 17, 3, 40)]
    for pair in PAIRS:
        for dims, rows, slot, max_ctx in shapes[: 2 if small else None]:
            args = append_args(pair, dims, spread(rng, rows * dims[0]), spread(rng, rows * dims[1]), slot, max_ctx)
            yield single(f"{pair[0]}/{pair[1]} {dims[0]}x{dims[1]}, {rows} rows at {slot}", "append_kv", args)
        x = edges()
        both = np.concatenate([x, np.roll(x, 1, axis=0)], axis=1).reshape(-1)
        args = append_args(pair, (64, 64), both, both.copy(), 4, len(x) + 4)
        yield single(f"{pair[0]}/{pair[1]} values at the edges", "append_kv", args)
        ties = rng.integers(-511, 512, 64 * 12).astype(np.float32) / 2
        ties[::32] = 127
        any_bits = rng.integers(0, 2**32, 64 * 12, np.uint64).astype(np.uint32).view(np.float32)
        args = append_args(pair, (64, 64), ties, any_bits, 0, 12)
        yield single(f"{pair[0]}/{pair[1]} ties, and any bits at all", "append_kv", args)
    pair, dims = PAIRS[0], (64, 64)
    for slot, pos, length, at in (
        (99, 3, -1, "pos_d"),
        (3, None, 0, "len 0"),
        (7, None, -1, "slot 7 of 8"),
        (-1, None, -1, "slot -1"),
        (2**40, None, -1, "slot 2^40"),
        (0, -5, -1, "pos_d -5"),
    ):
        x = spoil(rng, normal(rng, 2, 64))
        other = {"pos_d": None if pos is None else i32(pos), "len": length}
        yield single(at, "append_kv", append_args(pair, dims, x, x.copy(), slot, 8, **other))
    for count in (1, 5):
        members = []
        for b in range(count):
            x, y = spoil(rng, normal(rng, 2, 64), 2), normal(rng, 2, 64)
            members.append(append_args(PAIRS[1], dims, x, y, 0, 9 + b, pos_d=i32(2 * b)))
        yield batch("for", "append_kv", ("k", "v", "len_d", "pos_d", "health"), ("k_rows", "v_rows"), members)


def dequant_cases(rng: Rng, small: bool) -> Iterator[Case]:
    dims = (96, 64)
    for pair in PAIRS:
        for bf16, start, rows, max_ctx in ((0, 0, 5, 5), (1, 3, 4, 9), (0, 100, 300, 512))[: 2 if small else None]:
            args = dequant_args(rng, pair, dims, start, rows, max_ctx, bf16)
            title = f"{pair[0]}/{pair[1]} {'bf16' if bf16 else 'f32'}, rows {start} .. {start + rows}"
            yield single(title, "dequant_kv", args)
            if pair == PAIRS[0]:
                outside = args | {"start": max_ctx - rows + 1, "health": record()}
                yield single(f"rows beyond {max_ctx}", "dequant_kv", outside)


# Recurrent layers.


def conv_cases(rng: Rng, small: bool) -> Iterator[Case]:
    near = {"out": TOLERANCE}
    shapes = [(1, 33, 4), (2, 128, 2), (5, 300, 4), (17, 96, 8), (3, 40, 1), (40, 200, 3)]
    shapes += [] if small else [(1, 8192, 4), (16, 8192, 4), (100, 1000, 5), (4, 64, 6), (7, 64, 7)]
    for rows, channels, taps in shapes:
        args = conv_args(rng, rows, channels, taps)
        yield single(f"{channels} channels, {taps} taps, {rows} rows", "conv_update", args, tolerance=near)
        for accept in sorted({0, 1, rows // 2, rows}):
            # alone, in place, and with the count on the device
            where: list[Args] = [{}, {"conv_state": args["conv_state"]}]
            count: Args = {"accept_d": i32(accept), "accept": -7} if accept else {"accept_d": None, "accept": 0}
            for i, other in enumerate(where):
                rebuild = rebuild_args(args, **count, **other)
                title = f"{channels} channels, {taps} taps, {accept} of {rows} rows{', in place' if i else ''}"
                yield single(title, "conv_ring_rebuild", rebuild)
    for accept in (-1, 6):
        rebuild = rebuild_args(conv_args(rng, 5, 64, 4), 0, accept_d=i32(accept))
        yield single(f"{accept} of 5 rows", "conv_ring_rebuild", rebuild)
    for accept in (2, 5, 6):
        yield single(f"{accept} of 5 rows, three layers", "conv_ring_rebuild", several_rebuild_args(rng, accept))
    for rows in (3, 20):
        args = conv_args(rng, rows, 70, 4, tape=poison(rows * 70))
        yield single(f"{rows} rows to the tape", "conv_update", args, tolerance=near)
        args = conv_args(rng, rows, 70, 4, pos_d=i32(5))
        spoil(rng, args["x"])[-1] = np.inf  # in a run of fewer than 32
        yield single(f"{rows} rows, some not finite", "conv_update", args, tolerance=near)
    members = [conv_args(rng, 4, 130, 4, pos_d=i32(b)) for b in range(3)]
    made = batch("for", "conv_update", ("conv_state", "pos_d", "health"), ("x", "out"), members)
    made.tolerance = near
    yield made


def prep_cases(rng: Rng, small: bool) -> Iterator[Case]:
    near = dict.fromkeys(("q", "k", "g_log", "beta"), TOLERANCE)
    shapes = [(1, 2, 6, 32), (3, 4, 4, 64), (2, 3, 2, 128), (5, 1, 2, 256)]
    for rows, keys, values, size in shapes + ([] if small else [(1, 16, 32, 128), (16, 16, 32, 128), (70, 2, 4, 64)]):
        args = prep_args(rng, rows, keys, values, size)
        yield single(f"{keys} to {values} heads of {size}, {rows} rows", "gdn_prep", args, tolerance=near)
    args = prep_args(rng, 4, 2, 6, 64, pos_d=i32(9))
    for name in ("conv_out", "alpha", "beta_raw"):
        spoil(rng, args[name], 2)
    yield single("some not finite", "gdn_prep", args, tolerance=near)
    args = prep_args(rng, 2, 2, 4, 32)
    args["dt_bias"][1], args["a"][2] = np.inf, np.nan
    yield single("constants that are not finite", "gdn_prep", args, tolerance=near)
    args = prep_args(rng, 2, 2, 4, 32)
    args["alpha"], args["beta_raw"] = 30 * args["alpha"], 30 * args["beta_raw"]
    yield single("gates far out", "gdn_prep", args, tolerance=near)
    own, split = ("pos_d", "health"), ("conv_out", "alpha", "beta_raw", *near, "v")
    members = [prep_args(rng, 2, 2, 4, 32, pos_d=i32(b)) for b in range(3)]
    members = [each | {name: members[0][name] for name in ("dt_bias", "a")} for each in members]
    made = batch("for", "gdn_prep", own, split, members)
    made.tolerance = near
    yield made


def scan_cases(rng: Rng, small: bool) -> Iterator[Case]:
    near = {"out": TOLERANCE, "state_out": TOLERANCE}
    for size in (32, 64, 128, 256):
        for rows, heads in ((1, 3), (5, 2), *(() if small else ((16, 4), (40, 1)))):
            args = scan_args(rng, rows, heads, size)
            yield single(f"{heads} states of {size}, {rows} rows", "gdn_scan", args, tolerance=near)
        args = scan_args(rng, 3, 2, size)
        args |= {"state_out": args["state_in"], "tape": poison(3 * 2 * (3 * size + 2))}
        title = f"2 states of {size}, 3 rows in place, to the tape"
        yield single(title, "gdn_scan", args, tolerance={"out": TOLERANCE, "state_in": TOLERANCE})
    for accept in (0, 2, 5, -1, 6):
        args = scan_args(rng, 5, 2, 64, accept_d=i32(accept), out=None)
        yield single(f"{accept} of 5 rows", "gdn_scan", args, tolerance={"state_out": TOLERANCE})
    members = [scan_args(rng, 2, 2, 32) for _ in range(3)]
    made = batch("for", "gdn_scan", ("ssm_state",), ("q", "k", "v", "g_log", "beta", "out"), members)
    made.tolerance = {"out": TOLERANCE} | {f"ssm_state.{b}": TOLERANCE for b in range(3)}
    yield made


def recur_cases(rng: Rng, small: bool) -> Iterator[Case]:
    near = {"out": TOLERANCE, "state_out": TOLERANCE}
    shapes = [(1, 2, 4, 32, 4), (3, 3, 7, 64, 2), (2, 1, 3, 128, 8), (9, 1, 1, 256, 4), (2, 4, 2, 32, 1)]
    shapes += [] if small else [(1, 16, 32, 128, 4), (4, 16, 48, 128, 4), (8, 2, 4, 256, 5), (20, 2, 4, 64, 7)]
    for rows, keys, values, size, taps in shapes:
        name, heads = f"recur_step_{size}", f"{keys} to {values} heads of {size}, {taps} taps, {rows} rows"
        args = recur_args(rng, rows, keys, values, size, taps)
        yield single(heads, name, args, tolerance=near)
        args = recur_args(rng, rows, keys, values, size, taps, columns=size, tape=poison(rows * args["x"].size * 4))
        yield single(f"{heads}, to the tape", name, args, tolerance=near | {"tape": TOLERANCE})
    args = recur_args(rng, 2, 1, 3, 128, 4, columns=RECUR_COLUMNS)
    yield single("all columns of 3 heads of 128 in one block", "recur_step_128", args, tolerance=near)
    args = recur_args(rng, 3, 2, 4, 64, 4, pos_d=i32(9))
    args["state_out"] = args["state_in"]
    for name in ("x", "alpha", "beta_raw"):
        spoil(rng, args[name], 2)
    near_in_place = {"out": TOLERANCE, "state_in": TOLERANCE}
    yield single("in place, some not finite", "recur_step_64", args, tolerance=near_in_place)
    members = [recur_args(rng, 2, 2, 4, 32, 4, pos_d=i32(b)) for b in range(3)]
    members = [each | {name: members[0][name] for name in ("w", "dt_bias", "a")} for each in members]
    own, split = ("conv_state", "ssm_state", "pos_d", "health"), ("x", "alpha", "beta_raw", "out")
    made = batch("for", "recur_step_32", own, split, members)
    made.tolerance = {"out": TOLERANCE} | {f"ssm_state.{b}": TOLERANCE for b in range(3)}
    yield made


# Counters and copies.


def counter_cases(rng: Rng, small: bool) -> Iterator[Case]:
    for _ in range(3):
        words = rng.integers(-(2**63), 2**63, 4).tolist()
        args = dict(zip(("a_lo", "a_hi", "b_lo", "b_hi"), words, strict=True)) | {
            "counters": rng.integers(-9, 9, 128).astype(np.int32), "a": 2**31 - 1, "b": -(2**31),
            "health": record(), "layer": LAYER,
        }  # fmt: skip
        yield single("random masks", "set_counters", args)
    for accept, on_device, move in ((0, 0, 1), (3, 0, 1), (5, 1, 1), (2, 1, 0), (6, 1, 1), (-1, 1, 1), (6, 1, 0)):
        counted: Args = {"accept_d": i32(accept), "accept": -3} if on_device else {"accept": accept}
        args = commit_args(rng, 70, **counted, rows=5, move_pos=move)
        yield single(f"{accept} of 5 rows{'' if move else ', pos stays'}", "commit_counters", args)
    for count in (1, 3, 200):
        arrays = {f"pos_d.{b}": i32(int(rng.integers(0, 9999))) for b in range(count)}
        rows: list[list[int | str]] = [[f"{n}.{b}+0" if n == "pos_d" else 0 for n in FIELDS] for b in range(count)]
        moved = {"seqs": "seqs", "n_seqs": count, "n": 3, "health": None, "layer": 0}
        yield Case(f"advance_batch {count} sequences", [("advance_batch", moved)], arrays, {"seqs": rows})


def copy_cases(rng: Rng, small: bool) -> Iterator[Case]:
    sizes = [0, 1, 3, 4, 15, 16, 17, 255, 1000, 4096, 70_001, *rng.integers(0, 3000, 20).tolist()]
    sizes += [] if small else [5_000_003, 1 << 22]
    table: list[list[int | str]] = []
    at = 0
    for size in sizes:
        to, from_ = (at + int(rng.integers(0, 32)) for _ in range(2))
        table.append([f"dst+{to}", f"src+{from_}", size])
        at += size + 64
    arrays = {"src": rng.integers(0, 256, at, np.uint8), "dst": poison(at, np.uint8)}
    many = {"table": "table", "n": len(table), "health": None, "layer": 0}
    title = f"copy_many {len(table)} copies of any alignment"
    yield Case(title, [("copy_many", many)], arrays, {"table": table})
    for n_bytes, n_bytes2, counts in ((0, 0, 1), (40_004, 0, 1), (5, 16_384, 1), (32_769, 16_391, 1), (16_391, 9, 0)):
        args: Args = {"bytes": n_bytes, "bytes2": n_bytes2, "health": None, "layer": 0, "a": 7, "b": 8}
        args["counters"] = rng.integers(-9, 9, 128).astype(np.int32) if counts else None
        args |= {"a_lo": 1023 * counts, "a_hi": 0, "b_lo": 1024 * counts, "b_hi": -(2**63) * counts}
        for end in ("", "2"):
            args |= {"src" + end: rng.integers(0, 256, 50_000, np.uint8), "dst" + end: poison(50_000, np.uint8)}
        yield single(f"{n_bytes} and {n_bytes2} bytes{'' if counts else ' alone'}", "restore", args)
    for rows, columns, src_stride, dst_stride in ((1, 7, 7, 7), (3, 1025, 1025, 3100), (5, 300, 301, 900)):
        args = rows_args(rng, rows, columns, src_stride, dst_stride)
        yield single(f"{rows} rows of {columns}", "copy_rows", args)
