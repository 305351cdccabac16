"""One check of `check`: launches over named arrays; and what its inputs are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memra_driver.formats import FORMATS, K_FORMATS, V_FORMATS
from memra_driver.kernels import KERNELS
from memra_driver.layout import HEALTH_BYTES, SeqC

Array = NDArray[Any]
Args = dict[str, Any]
Pair = tuple[str, str]
Rng = np.random.Generator

TOLERANCE = 1e-5  # of the largest magnitude, where expf or a long sum is at work
PAIRS = [(k, v) for k in K_FORMATS for v in V_FORMATS]
FIELDS = tuple(name for name, _ in SeqC._fields_)
LAYER = 5


@dataclass
class Case:
    """One check: launches over named arrays, and what may differ afterwards.

    An argument that is a string names an array or a table. A table is rows of numbers and addresses, "array+bytes".
    Every array is compared: by its bytes, or within its tolerance, relative to the largest magnitude. Those of `loose`
    are scratch. `want` holds arrays whose contents are known beforehand; the rest is asked of the expectation.
    """

    title: str
    launches: list[tuple[str, Args]]
    arrays: dict[str, Array]
    tables: dict[str, list[list[int | str]]] = field(default_factory=dict)
    tolerance: dict[str, float] = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    want: dict[str, Array] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """The kernel that is checked: the first."""
        return self.launches[0][0]


def single(title: str, kernel: str, args: Args, **other: Any) -> Case:
    """One launch; an array under two names is one piece of memory."""
    names: dict[int, str] = {}
    arrays: dict[str, Array] = {}
    placed: Args = {}
    for _, name in KERNELS[kernel].params:
        value = args[name]
        if isinstance(value, np.ndarray):
            arrays.setdefault(names.setdefault(id(value), name), value)
            value = names[id(value)]
        placed[name] = value
    return Case(f"{kernel} {title}", [(kernel, placed)], arrays, **other)


def batch(title: str, kernel: str, own: tuple[str, ...], split: tuple[str, ...], members: list[Args]) -> Case:
    """One launch for several sequences, whose single launches would have these arguments.

    own: what each has for itself, by its row of the table; split: arrays with a block per sequence. The scan's
    state is `state_in`.
    """
    arrays: dict[str, Array] = {}
    table: list[list[int | str]] = []
    for b, args in enumerate(members):
        row: dict[str, int | str] = dict.fromkeys(FIELDS, 0)
        row["max_ctx"] = args.get("max_ctx", 0)
        for name in own:
            arrays[f"{name}.{b}"] = args["state_in" if name == "ssm_state" else name]
            row[name] = f"{name}.{b}+0"
        table.append([row[name] for name in FIELDS])
    nowhere = {name: -(2**40) for name in ("slot", "max_ctx") if name in members[0]}  # the table's count
    replaced = {name for field_ in own for name in {"ssm_state": ("state_in", "state_out")}.get(field_, (field_,))}
    args = members[0] | nowhere | dict.fromkeys(replaced, None) | {"seqs": "seqs", "n_seqs": len(members)}
    for name in split:
        arrays[name] = np.concatenate([each[name] for each in members])
        args[name] = name
    placed = {name: args[name] for _, name in KERNELS[kernel].params}
    for name, value in placed.items():
        if isinstance(value, np.ndarray):
            arrays[name], placed[name] = value, name
    return Case(f"{kernel} {title} {len(members)} sequences", [(kernel, placed)], arrays, {"seqs": table})


# Inputs.


def poison(n: int, kind: Any = np.float32) -> Array:
    """Memory that shows where nothing was written."""
    return np.full(n * np.dtype(kind).itemsize, 0xA5, np.uint8).view(kind)


def normal(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(int(np.prod(shape)), np.float32)


def spread(rng: Rng, n: int) -> Array:
    """Both signs, magnitudes from 1e-9 to 1e5, a tenth of them zero."""
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-9, 5, n)
    return np.where(rng.random(n) < 0.1, 0, x).astype(np.float32)


def record() -> Array:
    return np.zeros(HEALTH_BYTES, np.uint8)


def i32(value: int) -> Array:
    return np.array([value], np.int32)


def spoil(rng: Rng, x: Array, n: int = 7) -> Array:
    """x with n values that are not finite."""
    x[rng.integers(0, x.size, n)] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), n)
    return x


def planes(pair: Pair, dims: tuple[int, int], max_ctx: int) -> Args:
    """K and V of `max_ctx` poisoned tokens with their padding, and what says how they are laid out."""
    args: Args = {}
    for side, name, dim in zip("kv", pair, dims, strict=True):
        token = dim // 32 * FORMATS[name].block_bytes
        args |= {
            side: poison(max_ctx * token + 8, np.uint8), f"{side}_tok_bytes": token,
            f"{side}_format": FORMATS[name].code,
        }  # fmt: skip
    return args | {"max_ctx": max_ctx}


ALONE: Args = {"seqs": None, "n_seqs": 1}
