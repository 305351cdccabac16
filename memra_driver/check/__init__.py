"""Whether the kernels of a device leave the right bytes: every kernel, every format, a list of shapes.

On a GPU the twins of reference.py say what is right, for attention the float64 oracle. The host device runs those
twins itself, so there the oracle says it, which shares no code with them. Vectors of the reference implementation are
checked on both. The first input that fails can be saved and run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memra_driver import oracle
from memra_driver.check.args import Array
from memra_driver.check.attend import attend_cases, combine_cases
from memra_driver.check.case import FIELDS, Case
from memra_driver.check.cases import (
    append_cases,
    conv_cases,
    copy_cases,
    counter_cases,
    dequant_cases,
    prep_cases,
    recur_cases,
    scan_cases,
)
from memra_driver.check.vectors import vector_cases
from memra_driver.errors import ConfigError, DriverError, MemraError, NoDriver
from memra_driver.kernels import KERNELS, AttendGeometry, attend_kernel
from memra_driver.kvdev import HostDev
from memra_driver.memory import CudaSlice

SOURCES = (
    vector_cases, append_cases, dequant_cases, conv_cases, prep_cases, scan_cases, counter_cases, copy_cases,
    combine_cases, attend_cases, recur_cases,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One check. worst: the largest error relative to its array's largest magnitude; fault: "" when it is green."""

    check: str
    kernel: str
    worst: float
    where: str
    fault: str

    def line(self) -> str:
        """As `check` prints it."""
        if self.fault:
            return f"FAILED {self.check}: {self.fault}"
        return f"ok     {self.check}: {f'worst {self.worst:.1e} at {self.where}' if self.where else 'every byte'}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"worst": self.worst if np.isfinite(self.worst) else None}


def cases(seed: int = 0, *, small: bool = False) -> Iterator[Case]:
    """Every check, made as it is asked for. The inputs are a function of the seed."""
    for number, source in enumerate(SOURCES):
        yield from source(np.random.default_rng([seed, number]), small)


def run(e: Any, cases: Iterable[Case], save: Path) -> Iterator[Result]:
    """Checks each case on device e. The first that fails is written to `save`; an error of the driver ends the run."""
    saved = False
    for case in cases:
        want = expectation(e, case)
        result, fatal = judge(e, case, want)
        unsaved = None
        if result.fault and not saved:
            saved = True
            try:
                write(save, case, want)
            except ConfigError as error:
                unsaved = error  # what failed is the news
        yield result
        if unsaved is not None:
            raise unsaved
        if fatal:
            return


def replay(e: Any, path: Path) -> Result:
    """Runs a saved input again, against the expectation that was saved with it."""
    case = read(path)
    return judge(e, case, case.want)[0]


def judge(e: Any, case: Case, want: dict[str, Array]) -> tuple[Result, bool]:
    """The result, and whether the device is of no use any more."""
    try:
        after = launch(e, case)
    except NoDriver:
        raise  # nothing of this device was tried
    except MemraError as error:
        result = Result(case.title, case.kernel, float("inf"), "", f"{type(error).__name__}: {error}")
        return result, isinstance(error, DriverError)
    return compare(case, after, want), False


def launch(e: Any, case: Case) -> dict[str, Array]:
    """Every array of the case after its launches on e."""
    with ExitStack() as stack:
        slices: dict[str, Any] = {}

        def put(name: str, array: Array) -> None:
            slices[name] = stack.enter_context(CudaSlice(e.memory, array.size, array.dtype))
            slices[name].copy_from(array)

        for name, array in case.arrays.items():
            put(name, array)
        for name, rows in case.tables.items():
            words = [[_address(slices, entry) for entry in row] for row in rows]
            put(name, np.array(words, np.uint64).reshape(-1))
        for kernel, args in case.launches:
            values = (slices[each] if isinstance(each, str) else each for each in args.values())
            e.launch(_served(e, kernel, args), *values)
        return {name: slices[name].to_numpy() for name in case.arrays}


def _served(e: Any, kernel: str, args: dict[str, Any]) -> str:
    """The kernel, or what takes its place on a device that it is not made for."""
    if KERNELS[kernel].arch in (None, e.arch):
        return kernel
    columns = args["rows"] * (args["n_head"] // args["n_head_kv"])
    return attend_kernel(e.arch, AttendGeometry.of(args), columns, args["pieces"])


def _address(slices: dict[str, Any], entry: int | str) -> int:
    if isinstance(entry, int):
        return entry
    name, _, offset = entry.rpartition("+")
    return int(slices[name].ptr) + int(offset)


def expectation(e: Any, case: Case) -> dict[str, Array]:
    """What every array of the case should hold afterwards on e; those that stay are among them."""
    return _by_oracle(case) | case.want if isinstance(e, HostDev) else by_twins(case)


def by_twins(case: Case) -> dict[str, Array]:
    """The same as the twins have it, and for attention, whose sums have no order that all share, the oracle."""
    attends = case.kernel.startswith("attend_") and case.kernel != "attend_combine"
    return (_by_oracle(case) if attends else launch(HostDev(), case)) | case.want


def _by_oracle(case: Case) -> dict[str, Array]:
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    for kernel, args in case.launches:
        resolved = {
            name: arrays[value] if isinstance(value, str) and value in arrays else value for name, value in args.items()
        }
        if args.get("seqs") is not None:
            resolved["seqs"] = [_sequence(arrays, row) for row in case.tables["seqs"]]
        if "table" in args:
            resolved["table"] = [_copy(arrays, row) for row in case.tables["table"]]
        oracle.run(kernel, resolved)
    return arrays


def _sequence(arrays: dict[str, Array], row: list[int | str]) -> dict[str, Any]:
    """What memra_seq names, without what it leaves null."""
    named = dict(zip(FIELDS, row, strict=True))
    present = {field: value for field, value in named.items() if value != 0 or field == "max_ctx"}
    return {
        field: arrays[value.rpartition("+")[0]] if isinstance(value, str) else value for field, value in present.items()
    }


def _copy(arrays: dict[str, Array], row: list[int | str]) -> tuple[Array, Array]:
    ends = []
    for entry in row[:2]:
        name, _, offset = str(entry).rpartition("+")
        ends.append(arrays[name].view(np.uint8)[int(offset) : int(offset) + int(row[2])])
    return ends[0], ends[1]


def compare(case: Case, got: dict[str, Array], want: dict[str, Array]) -> Result:
    """Every array but the loose ones."""
    worst, where = 0.0, ""
    for name in case.arrays:
        if name in case.loose:
            continue
        a, b, tolerance = got[name], want[name], case.tolerance.get(name, 0.0)
        errors = apart(a, b, exact=not tolerance)
        at = int(np.argmax(errors)) if errors.size else 0
        error = float(errors[at]) if errors.size else 0.0
        if error > tolerance:
            much = "" if not tolerance else f", {error:.1e} of the largest magnitude; {tolerance:.0e} is allowed"
            count = f"{int((errors > tolerance).sum())} of {a.size} differ"
            fault = f"{name}[{at}] is {a[at]}, not {b[at]}{much} ({count})"
            return Result(case.title, case.kernel, error, f"{name}[{at}]", fault)
        if tolerance and error >= worst:
            worst, where = error, f"{name}[{at}]"
    return Result(case.title, case.kernel, worst, where, "")


def apart(a: Array, b: Array, *, exact: bool) -> Array:
    """How far each element is from what it should be: relative to the largest magnitude, or 1 where bytes differ.

    One NaN is as good as another.
    """
    if a.dtype != np.float32:
        return np.asarray(a != b, np.float64)
    nan = np.isnan(a) & np.isnan(b)
    same = (a.view(np.uint32) == b.view(np.uint32)) | nan
    if exact:
        return np.asarray(~same, np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    largest = np.abs(b[np.isfinite(b)].astype(np.float64)).max(initial=0) or 1.0
    with np.errstate(all="ignore"):
        error = np.abs(a.astype(np.float64) - b.astype(np.float64)) / largest
    return np.where(same, 0.0, np.where(finite, error, np.inf))


# Saved inputs.


def write(path: Path, case: Case, want: dict[str, Array]) -> None:
    """The case with its expectation, as an npz file without pickles."""
    text = json.dumps({
        "title": case.title, "launches": case.launches, "tables": case.tables, "tolerance": case.tolerance,
        "loose": case.loose,
    })  # fmt: skip
    parts: dict[str, Any] = {f"array.{name}": array for name, array in case.arrays.items()}
    parts |= {f"want.{name}": array for name, array in want.items()}
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, case=np.array(text), **parts)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def read(path: Path) -> Case:
    """A case that `write` left. Raises ConfigError for a file that is none."""
    try:
        with np.load(path, allow_pickle=False) as data:
            parts = {name: data[name] for name in data.files}
        fields = json.loads(str(parts.pop("case")))
        fields["launches"] = [(kernel, args) for kernel, args in fields["launches"]]
        fields["loose"] = tuple(fields["loose"])
        of = {
            kind: {name.removeprefix(f"{kind}."): array for name, array in parts.items() if name.startswith(f"{kind}.")}
            for kind in ("array", "want")
        }
        return Case(arrays=of["array"], want=of["want"], **fields)
    except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError) as error:
        raise ConfigError(f"{path} is no saved input of check: {error}") from None
