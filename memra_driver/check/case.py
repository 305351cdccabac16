"""One check of `check`: launches over named arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memra_driver.check.args import Args, Array
from memra_driver.kernels import KERNELS
from memra_driver.layout import SeqC

TOLERANCE = 1e-5  # of the largest magnitude, where expf or a long sum is at work
FIELDS = tuple(name for name, _ in SeqC._fields_)


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
