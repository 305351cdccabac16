"""The reference vectors of tests/vectors, loaded. A missing file is an error of the run, never a skip."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tally

FOLDER = Path(__file__).parent / "vectors"


@dataclass(frozen=True)
class Case:
    """One entry of kernels.json: numbers and names as attributes, arrays by key (fresh, flat copies).

    `expected` gives an array that a result is held against: it is counted, once a test.
    """

    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None

    def expected(self, name: str) -> np.ndarray[Any, Any]:
        tally.once("vectors", self.fields[name])
        return self[name]

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return _arrays()[self.fields[name]].reshape(-1).copy()

    def __contains__(self, name: str) -> bool:
        return name in self.fields


@cache
def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    with np.load(FOLDER / "kernels.npz") as file:
        return dict(file)


def cases(op: str) -> list[Case]:
    """Every case of kernels.json with this `op`."""
    found = [Case(entry) for entry in json.loads((FOLDER / "kernels.json").read_text()) if entry["op"] == op]
    assert found, f"kernels.json has no {op} cases"
    return found


def name_of(case: Case) -> str:
    """For pytest's ids."""
    return str(case.fields["case"])
