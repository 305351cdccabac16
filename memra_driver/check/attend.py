"""What `check` asks of attention: both its kernels together, and the second by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from memra_driver.check.args import (
    ALONE,
    LAYER,
    PAIRS,
    Args,
    Dims,
    Pair,
    Rng,
    attend_args,
    i32,
    in_folds,
    normal,
    poison,
    record,
    spoil,
)
from memra_driver.check.case import TOLERANCE, Case, batch, single
from memra_driver.kernels import ATTEND_FOLD_COLUMNS, PIPE_FIXED, AttendGeometry, attend_kernel, attend_tile
from memra_driver.nvrtc import PIPE_ARCH
from memra_driver.oracle_formats import encode
from memra_driver.plan import ATTEND_FOLDS, ATTEND_GROUPS, ATTEND_TAIL

ATTEND_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Attend:
    """One attention: rows at pos over keys of a kind, `gqa` query heads for each K/V head."""

    pair: Pair
    dims: Dims = (64, 64)
    rows: int = 1
    pos: int = 70
    heads_kv: int = 2
    gqa: int = 2
    window: int = 0
    kind: str = "normal"

    @property
    def title(self) -> str:
        what = f"{self.pair[0]}/{self.pair[1]} {self.heads_kv}x{self.gqa} heads of {self.dims[0]}/{self.dims[1]}"
        window = f", window {self.window}" if self.window else ""
        return f"{what}, {self.rows} rows at {self.pos}{window}{'' if self.kind == 'normal' else ', ' + self.kind}"


def args_of(rng: Rng, a: Attend) -> Args:
    """What attend and attend_combine take together."""
    stop, heads = a.pos + a.rows, a.heads_kv * a.gqa
    q = normal(rng, a.rows, heads, a.dims[0])
    keys, values = (normal(rng, stop, a.heads_kv * dim).reshape(stop, -1) for dim in a.dims)
    if a.kind == "one key dominates":
        keys[stop // 2] *= 40
    elif a.kind == "equal keys":
        keys[:] = keys[0]
    elif a.kind == "a spike in q":
        q[::37] *= 50
    elif a.kind == "outliers in q":
        each = q.reshape(-1, a.dims[0])
        each[np.arange(len(each)), rng.integers(a.dims[0], size=len(each))] = 100
    elif a.kind == "late rescaling":
        keys *= np.linspace(0.1, 6, stop, dtype=np.float32)[:, None]
    elif a.kind == "some of q not finite":
        spoil(rng, q, 3)
    stored = [
        encode(name, x.astype(np.float64).reshape(-1, 32)).reshape(stop, -1)
        for name, x in zip(a.pair, (keys, values), strict=True)
    ]
    k, v = (np.pad(x, ((0, 5), (0, 0)), constant_values=0xFF) for x in stored)  # rows that nobody may see are NaN
    args = attend_args(a.pair, q, k, v, a.pos, heads=(heads, a.heads_kv), dims=a.dims, window=a.window)
    return args | {"out": poison(a.rows * heads * a.dims[1])}


def attend_case(a: Attend, args: Args, **other: Any) -> Case:
    """Both kernels, one behind the other."""
    kernel = attend_kernel(PIPE_ARCH, AttendGeometry.of(args), a.rows * a.gqa, ATTEND_GROUPS)
    first = single(a.title, kernel, args | other)
    second = single("", "attend_combine", args | other)
    first.launches += second.launches
    first.arrays |= second.arrays
    first.tolerance, first.loose = {"out": ATTEND_TOLERANCE}, ("part",)
    if a.kind == "some of q not finite":
        first.loose = ("part", "out")
    return first


def attend_cases(rng: Rng, small: bool) -> Iterator[Case]:
    cases = [Attend(pair, rows=rows) for pair in PAIRS for rows in (1, 5)]
    shapes = [(64, 128, 3), (96, 96, 1), (128, 64, 16), (192, 128, 2), (64, 192, 4), (96, 256, 4), (64, 512, 2)]
    for k, v, gqa in shapes:
        cases += [Attend(PAIRS[0], (k, v), rows, 200, 1, gqa) for rows in (1, 4)]
    cases += [Attend(pair, (256, 256), rows, 90, 2, 3) for pair in PAIRS for rows in (1, 5)]
    for dims, heads_kv, gqa, all_rows in (((256, 256), 1, 8, (1, 2, 4)), ((64, 128), 8, 2, (1, 8, 12)),
                                          ((64, 192), 8, 2, (1, 5))):  # fmt: skip
        cases += [Attend(PAIRS[0], dims, rows, 100, heads_kv, gqa) for rows in all_rows]
    cases += [  # of every entry that was made for one geometry
        Attend(pair, (dim, dim), 2 if columns < 24 else 4, 130, heads_kv, columns // (2 if columns < 24 else 4))
        for pair in PAIRS
        for heads_kv, dim, columns in PIPE_FIXED[pair[0]]
    ]
    cases += [Attend(pair, (64, 192), 2, 100, heads_kv, 2) for pair in PAIRS[:3] for heads_kv in (4, 8)]
    cases += [Attend(pair, (96, 96), 2, 100, 2, 2) for pair in PAIRS[1:3]]
    cases += [Attend(PAIRS[0], (256, 256), 1, 100, 1, 2)]  # fewer columns than a team has warps
    windows = ((0, 0), (63, 64), (130, 7), (128, 65))
    cases += [Attend(PAIRS[3], rows=3, pos=pos, window=window) for pos, window in windows]
    windows = ((30, 0), (31, 32), (62, 7), (64, 33))
    cases += [Attend(PAIRS[3], rows=3, pos=pos, heads_kv=4, window=window) for pos, window in windows]
    kinds = ("one key dominates", "equal keys", "a spike in q", "late rescaling", "some of q not finite")
    cases += [Attend(PAIRS[1], rows=2, pos=300, kind=kind) for kind in kinds]
    cases += [Attend(PAIRS[1], (64, 64), 2, 300, 8, kind=kind) for kind in kinds]
    cases += [Attend(PAIRS[0], (dim, dim), 2, 100, 1, 8, kind="outliers in q") for dim in (256, 512)]
    around = {heads_kv: ATTEND_GROUPS * attend_tile(heads_kv) for heads_kv in (1, 2, 4)}  # groups get a second tile
    cases += [Attend(PAIRS[2], rows=3, pos=around[heads_kv] - 1, heads_kv=heads_kv) for heads_kv in (1, 4)]
    if not small:
        cases += [Attend(pair, (256, 256), 5, 400, 2, 8) for pair in PAIRS]
        cases += [Attend(PAIRS[0], (512, 512), rows, 150, 1, 8) for rows in (1, 16)]
        cases += [Attend(PAIRS[0], (192, 192), 9, 77, 2, 5), Attend(PAIRS[4], (128, 128), 16, 1000, 4, 4)]
        cases += [
            Attend(PAIRS[0], rows=2, pos=around[heads_kv] + 70, heads_kv=heads_kv, window=window)
            for heads_kv in (2, 4)
            for window in (0, 500, around[heads_kv])
        ]
    for a in cases:
        yield attend_case(a, args_of(rng, a))
    a = Attend(PAIRS[0])
    others: tuple[Args, ...] = ({"pos_d": i32(70), "slot": -9}, {"slot": 76}, {"slot": -1}, {"pos_d": i32(2**31 - 1)})
    for other in others:
        made = attend_case(a, args_of(rng, a), **other)
        where = f"pos_d {other['pos_d'][0]}" if "pos_d" in other else f"slot {other['slot']} of 76"
        made.title = f"{made.kernel} {where}"
        yield made
    made_for = [  # folds of every entry that was made for one geometry
        (pair, (dim, dim), heads_kv, 4, 1, (5, 130), True)
        for pair in PAIRS
        for heads_kv, dim, columns in PIPE_FIXED[pair[0]]
        if columns <= ATTEND_FOLD_COLUMNS
    ]
    for pair, dims, heads_kv, gqa, rows, positions, folds in (
        (PAIRS[0], (64, 64), 2, 2, 3, (0, 62, 200), False),
        (PAIRS[0], (128, 128), 2, 2, 3, (0, 62, 200), False),
        (PAIRS[0], (256, 256), 2, 8, 1, (0, 62, 800), True),  # a fold has more tiles than a ring has stages
        (PAIRS[0], (64, 64), 2, 2, 2, (0, 62, 200, *range(3, 12)), True),  # a block has several sequences
        (PAIRS[0], (128, 128), 2, 2, 2, (0, 130), True),
        (PAIRS[0], (64, 128), 8, 2, 2, (0, 130), True),
        (PAIRS[0], (64, 192), 8, 2, 2, (0, 130), True),
        (PAIRS[0], (96, 96), 2, 2, 2, (0, 62, 800), True),
        *made_for,
    ):
        several = [Attend(pair, dims, rows=rows, pos=pos, heads_kv=heads_kv, gqa=gqa) for pos in positions]
        members = [args_of(rng, a) | {"pos_d": i32(a.pos)} for a in several]
        members = [in_folds(each) for each in members] if folds else members
        entry = attend_kernel(PIPE_ARCH, AttendGeometry.of(members[0]), rows * gqa, members[0]["pieces"])
        title = f"{rows} rows{' in folds' if folds else ''} for"
        made = batch(title, entry, ("k", "v", "pos_d", "health"), ("q", "part"), members)
        behind = batch("", "attend_combine", ("pos_d", "health"), ("part", "out"), members)
        made.launches += behind.launches
        made.arrays |= behind.arrays
        made.tolerance, made.loose = {"out": ATTEND_TOLERANCE}, ("part",)
        yield made


def combine_cases(rng: Rng, small: bool) -> Iterator[Case]:
    """Partial sums of any pieces; those without a key are NaN."""
    shapes = [  # rows, heads, K/V heads, dims, position, window
        (1, 2, 1, 64, 0, 0), (3, 4, 2, 96, 700, 0), (2, 1, 1, 512, 9000, 0), (2, 3, 1, 64, 9000, 300),
        (3, 4, 4, 96, 350, 0), (2, 3, 3, 64, 5000, 0), (2, 8, 8, 64, 4500, 300),
    ]  # fmt: skip
    for (rows, heads, heads_kv, dim, pos, window), pieces in product(shapes, (ATTEND_GROUPS, ATTEND_FOLDS)):
        keys = attend_tile(heads_kv)
        part = np.full((rows, heads, pieces, dim + ATTEND_TAIL), np.nan, np.float32)
        for row in range(rows):
            last = pos + row
            tiles = range((max(0, last - window + 1) if window else 0) // keys, last // keys + 1)
            used = sorted({tile % ATTEND_GROUPS // (ATTEND_GROUPS // pieces) for tile in tiles})
            weight = rng.uniform(0.1, 64, (heads, len(used), 1))
            most = rng.normal(0, 4, (heads, len(used), 1))
            sums = rng.standard_normal((heads, len(used), dim)) * weight
            part[row][:, used, : dim + 2] = np.concatenate([sums, most, weight], axis=2)
        args = {
            "part": part.reshape(-1), "out": poison(rows * heads * dim), "pos_d": None, "slot": pos, "rows": rows,
            "max_ctx": pos + rows, "n_head": heads, "n_head_kv": heads_kv, "head_dim_v": dim, "window": window,
            "pieces": pieces, **ALONE, "health": record(), "layer": LAYER,
        }  # fmt: skip
        what = f"{heads_kv}x{heads // heads_kv} heads of {dim}, {rows} rows at {pos}"
        title = f"{what}{f', window {window}' if window else ''}, {pieces} pieces"
        yield single(title, "attend_combine", args, tolerance={"out": TOLERANCE})
