"""The conformance kit for ports: language-neutral vectors of everything that this package defines.

A kit records; it defines nothing. Exported on the host, it holds what the NumPy twins, the float64 oracle of attention,
the plan, the cache and the packaged vectors of the reference kernels say. SPEC.md, which stands in every kit, says
all that a porter has to know. Exact results are compared bit for bit, the others within the tolerance that their entry
has, relative to the largest magnitude of the array.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import memra_driver
from memra_driver import check
from memra_driver.check import Result
from memra_driver.check.attend import ATTEND_TOLERANCE
from memra_driver.check.case import TOLERANCE
from memra_driver.errors import DriverError, KitError, MemraError
from memra_driver.kit.caches import Player, Seen
from memra_driver.kit.files import Array, Entry, Kit, Writer, arrays_of, entries_of
from memra_driver.kit.kernels import FILES, kernel_case, kernel_cases
from memra_driver.kit.plans import plan_cases, plan_result
from memra_driver.kit.programs import programs
from memra_driver.kvdev import HostDev


def export(folder: str | os.PathLike[str], *, small: bool = False) -> int:
    """Writes a kit into a folder that is new or empty; returns how many cases it has. small: a few MB.

    The same installation writes the same bytes each time. Raises KitError.
    """
    writer = Writer(folder)
    e = HostDev()
    try:
        cases = [*kernel_cases(writer, small), *plan_cases(writer), *cache_cases(writer, e, small)]
    finally:
        e.close()
    writer.finish(f"memra-driver {memra_driver.__version__}", small, cases)
    return len(cases)


def cache_cases(writer: Writer, e: Any, small: bool) -> Iterator[Entry]:
    """Plays every program on e and records what is seen."""
    ends: dict[str, str] = {}
    for p in programs(small):
        player = Player(e, p.args)
        start = before = player.after()
        steps = []
        try:
            for step, inputs in p.steps:
                seen = player.call(step, inputs)
                steps.append(_step(writer, step, inputs, seen, before))
                before = seen.after
            ends[p.title] = player.cache.digest()
        finally:
            player.close()
        if p.same_as is not None and ends[p.title] != ends[p.same_as]:
            raise KitError(f"{p.title} and {p.same_as} end in different states")
        case = {"id": f"cache {p.title}", "op": "cache", "args": p.args, "arrays": [], "start": start, "steps": steps}
        yield case | ({"same_as": f"cache {p.same_as}"} if p.same_as else {})


def _step(writer: Writer, step: Entry, inputs: dict[str, Array], seen: Seen, before: Entry) -> Entry:
    """One call with its result; of the planes those that it changed."""
    near = {"attend": ATTEND_TOLERANCE, "digest": 0.0}.get(step["op"], TOLERANCE)
    arrays = [writer.array("caches.bin", name, "in", array) for name, array in inputs.items()]
    arrays += [writer.array("caches.bin", name, "out", array, near) for name, array in seen.outputs.items()]
    if seen.error:
        return step | {"arrays": arrays, "error": seen.error}
    planes = {name: each for name, each in seen.after["planes"].items() if before["planes"].get(name) != each}
    return step | {"arrays": arrays, "after": seen.after | {"planes": planes}}


def verify(e: Any, folder: str | os.PathLike[str]) -> Iterator[Result]:
    """Runs every case of a kit on device e. An error of the driver ends it; raises KitError for a kit that is none."""
    kit = Kit(folder)
    ends = {case["same_as"]: "" for case in kit.cases if "same_as" in case}  # digests that others are compared with
    for case in kit.cases:
        if case["op"] in FILES:
            made = kernel_case(kit, case)
            result, fatal = check.judge(e, made, made.want)
            yield result
            if fatal:
                return
        elif case["op"] == "plan":
            planned, tables = plan_result(case["args"])
            fault = difference(planned, case["result"], "the plan") or _outputs(kit, case, tables)[1]
            yield Result(case["id"], "plan", 0.0, "", fault)
        else:
            try:
                yield _cache(e, kit, case, ends)
            except KitError:
                raise
            except MemraError as error:
                yield Result(case["id"], "cache", 0.0, "", f"{type(error).__name__}: {error}")
                if isinstance(error, DriverError):
                    return


def _cache(e: Any, kit: Kit, case: Entry, ends: dict[str, str]) -> Result:
    """Plays a program, and keeps where it ends."""
    worst, where = 0.0, ""
    player = Player(e, case["args"])
    try:
        expected = case["start"]
        fault = difference(player.after(), expected, "the new cache")
        for number, step in enumerate(() if fault else case["steps"]):
            title = f"call {number}, {step['op']}"
            seen = player.call(step, arrays_of(kit, step, "in"))
            if seen.error != step.get("error", ""):
                fault = f"{title}: {seen.error or 'allowed'}, not {step.get('error', 'allowed')}"
                break
            if "after" in step:
                planes = expected["planes"] | step["after"]["planes"]
                expected = step["after"] | {"planes": planes}
            fault = difference(seen.after, expected, f"{title}: the cache")
            error, wrong, at = _outputs(kit, step, seen.outputs)
            if error > worst:
                worst, where = error, f"{title}, {at}"
            if fault or wrong:
                fault = fault or f"{title}: {wrong}"
                break
        if not fault and case["id"] in ends:
            ends[case["id"]] = player.cache.digest()
        if not fault and "same_as" in case and player.cache.digest() != ends[case["same_as"]]:
            fault = f"it does not end as {case['same_as']!r} does"
        return Result(case["id"], "cache", worst, where, fault)
    finally:
        player.close()


def _outputs(kit: Kit, holder: Entry, got: dict[str, Array]) -> tuple[float, str, str]:
    """The largest error of an output, the first fault among them, and where that largest error is."""
    worst, where = 0.0, ""
    for entry in entries_of(holder, "out"):
        name, want = entry["name"], kit.array(entry)
        if name not in got:
            return worst, f"there is no {name}", where
        error, fault = _apart(name, got[name].reshape(-1), want, entry["tolerance"], ("here", "in the kit"))
        if fault:
            return error, fault, where
        worst, where = max((worst, where), (error, name))
    return worst, "", where


def _apart(name: str, a: Array, b: Array, tolerance: float, who: tuple[str, str]) -> tuple[float, str]:
    """The largest error between two arrays, and the first element that is too far off, in words."""
    if (a.dtype, a.size) != (b.dtype, b.size):
        return 0.0, f"{name} is {a.size} of {a.dtype} {who[0]}, {b.size} of {b.dtype} {who[1]}"
    errors = check.apart(a, b, exact=not tolerance)
    far = (errors > tolerance).nonzero()[0]
    if not far.size:
        return (float(errors.max(initial=0)) if tolerance else 0.0), ""
    at, much = int(far[0]), f" where {tolerance:.0e} of the largest magnitude is allowed" if tolerance else ""
    count = f"{far.size} of {a.size} differ"
    return float(errors.max()), f"{name}[{at}] is {a[at]} {who[0]}, {b[at]} {who[1]}{much} ({count})"


# Two kits.


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> str:
    """The first difference between two kits in words, "" where there is none. Raises KitError.

    Outputs that have a tolerance may differ within it; who made the kits does not count.
    """
    one, two = Kit(a), Kit(b)
    for i, (x, y) in enumerate(zip(one.cases, two.cases, strict=False)):
        if x["id"] != y["id"]:
            return f"case {i} is {x['id']!r} in {a}, {y['id']!r} in {b}"
        fault = _case(one, two, x, y)
        if fault:
            return f"case {x['id']!r}: {fault}"
    if len(one.cases) != len(two.cases):
        (more, longer) = (a, one) if len(one.cases) > len(two.cases) else (b, two)
        behind = longer.cases[min(len(one.cases), len(two.cases))]["id"]
        return f"{len(one.cases)} cases in {a}, {len(two.cases)} in {b}; {behind!r} is only in {more}"
    return ""


def _case(one: Kit, two: Kit, x: Entry, y: Entry) -> str:
    steps = x.get("steps", ()), y.get("steps", ())
    fault = difference(_plain(x), _plain(y), "it") or _holder(one, two, x, y)
    for number, (p, q) in enumerate(zip(*steps, strict=False)):
        if fault:
            return fault
        fault = difference(_plain(p), _plain(q), "it") or _holder(one, two, p, q)
        fault = fault and f"call {number}, {p['op']}: {fault}"
    return fault or difference(len(steps[0]), len(steps[1]), "the number of calls")


def _plain(holder: Entry) -> Entry:
    """A case or a call without what is compared apart."""
    return {key: value for key, value in holder.items() if key not in ("arrays", "steps")}


def _holder(one: Kit, two: Kit, x: Entry, y: Entry) -> str:
    """The first difference between the arrays of two cases or calls."""
    found = [{(entry["name"], entry["role"]): entry for entry in each.get("arrays", ())} for each in (x, y)]
    fault = difference(sorted(map(list, found[0])), sorted(map(list, found[1])), "the list of arrays")
    for key, entry in found[0].items():
        if fault:
            return fault
        other = found[1][key]
        fault = difference(entry["shape"], other["shape"], f"the shape of {key[0]}")
        tolerance = min(entry.get("tolerance", 0.0), other.get("tolerance", 0.0))
        name = key[0] if key[1] == "in" else f"{key[0]} afterwards"
        who = "in the first", "in the second"
        fault = fault or _apart(name, one.array(entry), two.array(other), tolerance, who)[1]
    return fault


def difference(a: Any, b: Any, where: str) -> str:
    """The first place where two values of JSON differ, in words; "" where they do not."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in (*a, *(key for key in b if key not in a)):
            if key not in a or key not in b:
                return f"{where} {'has' if key in a else 'lacks'} {key!r}"
            fault = difference(a[key], b[key], f"{where}.{key}")
            if fault:
                return fault
        return ""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (difference(x, y, f"{where}[{i}]") for i, (x, y) in pairs)), "")
    return "" if a == b and type(a) is type(b) else f"{where} is {a!r}, not {b!r}"
