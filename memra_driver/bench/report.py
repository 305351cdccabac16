"""What is said of a run of the bench: tables for a terminal and for the README, a picture, and what moved between two.

Everything here works on the dictionary that `--json` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memra_driver.bench.rows import FULL, Row
from memra_driver.bench.work import ATTENTION, RECURRENT
from memra_driver.config import LayerKind
from memra_driver.errors import ConfigError

MOVED = 0.10  # what two runs may differ by without a word
NEEDED = {  # of a result: what its tables and a comparison speak of
    "device", "driver", "nvrtc", "commit", "kernel_sources", "sizes", "ceilings", "empty_node_seconds", "peers",
    "faults", "targets",
}  # fmt: skip
Table = tuple[list[str], list[list[str]]]  # head, rows; the first column is text
MARKERS = "osD^"  # of the picture: another where the colours come round
UNITS = (("us", 1e6, 1e3), ("ms", 1e3, 1e3), ("s", 1, float("inf")))


def read(path: Path) -> dict[str, Any]:
    """A file that `--json` wrote. Raises ConfigError for any other."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        rows_of(found)
        if lacking := NEEDED - found.keys():
            _no_result(path, f"it lacks {', '.join(sorted(lacking))}")
        verdicts([each for each in found["targets"] if each["group"]])
        return found
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _no_result(path, str(error))


def _no_result(path: Path, why: str) -> NoReturn:
    raise ConfigError(f"{path} is no result of memra-driver bench: {why}")


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result. Raises ConfigError where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def rows_of(result: dict[str, Any]) -> list[Row]:
    """The rows of a result."""
    return [Row(**row) for row in result["rows"]]


# Tables.


def heading(result: dict[str, Any]) -> list[str]:
    """Where and how it was measured, a line each."""
    read_rate, copy_rate = (result["ceilings"].get(name) for name in ("read", "copy"))
    rates = f"copy {_rate_text(copy_rate)}, read {_rate_text(read_rate)}"
    lines = [
        f"{result['device']}, driver {result['driver']}, NVRTC {result['nvrtc']},"
        f" commit {(result['commit'] or 'unknown')[:12]}, kernel sources {result['kernel_sources'][:12]}",
        f"ceilings of this run: {rates}; an empty node of a graph {seconds_text(result['empty_node_seconds'])}",
    ]
    if result["peers"] is not None:
        named = [f"{name} {version}" if version else f"{name} absent" for name, version in result["peers"].items()]
        lines.append(f"peers: {', '.join(named)}")
    return lines + [f"FAULTS: {fault}" for fault in result["faults"]]


def measured(rows: Iterable[Row]) -> Table:
    """Every row with its times, rate and shares."""
    head = ["operation", "device", "bytes", "TB/s", "of the ceiling", "of a copy", "host", "calls"]
    return head, [
        [
            row.name,
            seconds_text(row.seconds),
            "" if row.bytes is None else f"{row.bytes:,}",
            f"{row.bytes / row.seconds / 1e12:.2f}" if row.bytes and row.seconds else "",
            f"{_share(row)} ({row.ceiling})" if _share(row) else "",
            f"{row.copy_seconds / row.seconds:.0%}" if row.copy_seconds and row.seconds else "",
            seconds_text(row.host_seconds),
            "" if row.count is None else str(row.count),
        ]
        for row in rows
    ]


def verdicts(targets: Sequence[dict[str, Any]]) -> Table:
    """Every target with its value, limits and verdict."""
    lines = []
    for each in targets:
        sign = ">=" if each["at_least"] else "<="
        unit = each["unit"]
        aim = "" if each["aim"] is None else f"{sign} {number_text(each['aim'], unit)}"
        value = "" if each["value"] is None else number_text(each["value"], unit)
        lines.append([each["line"], value, f"{sign} {number_text(each['limit'], unit)}", aim, each["verdict"]])
    return ["target", "measured", "pass", "aim", "verdict"], lines


def summary(targets: Sequence[dict[str, Any]]) -> str:
    """How many targets are met, in words."""
    counts: dict[str, int] = {}
    for each in targets:
        counts[each["verdict"]] = counts.get(each["verdict"], 0) + 1
    met = counts.get("pass", 0) + counts.get("aim", 0)
    text = f"{met} of {met + counts.get('miss', 0)} targets met"
    return text + (f", {counts['not measured']} not measured" if counts.get("not measured") else "")


def _rate_text(rate: float | None) -> str:
    return f"{rate / 1e12:.2f} TB/s" if rate else "not measured"


def seconds_text(seconds: float | None) -> str:
    """Seconds in the unit that reads best."""
    if seconds is None:
        return ""
    unit, scale, _ = next(each for each in UNITS if seconds * each[1] < each[2])
    return f"{seconds * scale:.3g} {unit}" if seconds * scale < 100 else f"{seconds * scale:.0f} {unit}"


def number_text(value: float, unit: str) -> str:
    """A figure of a target in its unit."""
    if unit == "calls":
        return f"{value:.0f}"
    return f"{value:.0f} %" if unit == "%" else f"{value:.2f} {unit}"


def markdown(result: dict[str, Any]) -> str:
    """The README's account of a result: where, then a table a group, and how many targets hold."""
    rows = rows_of(result)
    parts = ["\n".join(f"* {line}" for line in (*heading(result), summary(result["targets"])))]
    missed = verdicts([each for each in result["targets"] if each["verdict"] == "miss"])[1]
    if missed:
        table = _markdown_table([["missed", "measured", "limit"], *(line[:3] for line in missed)])
        parts.append(f"What missed its limit; tests/bench/NOTES.md says what stands in the way:\n\n{table}")
    for group, (title, column) in CHAPTERS.items():
        mine = [row for row in rows if row.group == group]
        if mine:
            parts.append(f"{title}\n\n{_listed(mine) if column is None else _pivoted(mine, re.compile(column))}")
        if mine and group == "step" and (told := step_on_the_host(rows)):
            parts.append(told)
    return "\n\n".join(parts)


STEP_KINDS = [FULL.cfg.layer_kind(il) for il in range(FULL.cfg.n_trunk)]  # a quick run has the same model
STEP_LAYERS = {
    **dict.fromkeys(ATTENTION, STEP_KINDS.count(LayerKind.FULL)),
    **dict.fromkeys(RECURRENT, STEP_KINDS.count(LayerKind.LINEAR)),
}
STEP_CALLERS = {"eager": "from Python", "raw launches": "as bare launches from Python", "from C": "from C"}


def step_on_the_host(rows: Iterable[Row]) -> str:
    """What the calls of one step take the host, whoever makes them; "" where not all of them were measured."""
    found = {row.name: row.host_seconds for row in rows}
    told = []
    for caller, words in STEP_CALLERS.items():
        times = [(found.get(f"{op}, {caller}"), layers) for op, layers in STEP_LAYERS.items()]
        if not all(seconds for seconds, _ in times):
            return ""
        told.append(f"{seconds_text(sum((seconds or 0) * layers for seconds, layers in times))} {words}")
    return f"The calls of the step of B=1, but for its end, take the host {', '.join(told)}."


CHAPTERS = {  # group -> what its table says, and the part of a row's name that makes its columns
    "attend": ("Attention of a layer by tokens in the cache, and the share of the read ceiling:", r" at (\d+)$"),
    "scan": ("The gated delta rule by sequences, and the share of the copy ceiling:", r" (B=\d+)"),
    "recur": ("What stands around it:", r" (B=\d+)"),
    "append": ("Appends:", None),
    "snapshot": ("Snapshots and rounds:", None),
    "step": (
        f"One decode step of {FULL.model} at {FULL.step_tokens} tokens, all cache work as one graph, and its operations"
        f" over {STEP_KINDS.count(LayerKind.FULL)} layers that attend and {STEP_KINDS.count(LayerKind.LINEAR)}"
        " recurrent ones; host: of one call:",
        None,
    ),
    "host": ("The host, for one call of one row:", r", (.+)$"),
    "load": ("Before and at the first calls, on the host:", None),
}


def _listed(rows: Sequence[Row]) -> str:
    lines = [["operation", "time", "of the ceiling", "of a copy", "host"]]
    for row in rows:
        copy = f"{row.copy_seconds / row.seconds:.0%}" if row.copy_seconds and row.seconds else ""
        time = "no device work" if row.count == 0 else seconds_text(row.seconds)
        lines.append([row.name, time, _share(row), copy, seconds_text(row.host_seconds)])
    return _markdown_table(lines)


def _pivoted(rows: Sequence[Row], column: re.Pattern[str]) -> str:
    """A line for each name without its column."""
    columns: list[str] = []
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        found = column.search(row.name)
        name, at = (column.sub("", row.name), found[1]) if found else (row.name, "")
        if at not in columns:
            columns.append(at)
        share = f" ({_share(row)})" if row.share is not None else ""
        lines.setdefault(name, {})[at] = seconds_text(row.seconds or row.host_seconds) + share
    body = [[name, *(cells.get(at, "") for at in columns)] for name, cells in lines.items()]
    return _markdown_table([["operation", *columns], *body])


def _share(row: Row) -> str:
    return "" if row.share is None else f"{row.share:.0%}"


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, f"|---|{'--:|' * (len(lines[0]) - 1)}", *body])


# Two results.


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs by more than MOVED between two results, in words; every line speaks of the second."""
    lines = []
    for field in ("device", "driver", "nvrtc", "sizes", "peers", "faults"):
        if before[field] != after[field]:
            same = "" if field == "faults" else "not the same "
            lines.append(f"{same}{field}: {before[field]}, then {after[field]}")
    for name, rate in after["ceilings"].items():
        first = before["ceilings"].get(name)
        if rate != first and (not rate or not first or abs(rate - first) > MOVED * first):
            lines.append(f"ceiling of {name}: {_rate_text(first)} -> {_rate_text(rate)}")
    old, new = ({row.name: row for row in rows_of(each)} for each in (before, after))
    for name, row in new.items():
        if name not in old:
            lines.append(f"{name}: only in the second")
            continue
        for field, where in (("seconds", ""), ("host_seconds", " on the host"), ("copy_seconds", " for a copy")):
            a, b = getattr(old[name], field), getattr(row, field)
            if (a is None) != (b is None):
                lines.append(f"{name}: measured{where} in the {'first' if b is None else 'second'} alone")
            elif a and b and abs(b - a) > MOVED * a:
                word = "faster" if b < a else "slower"
                times = f"{seconds_text(a)} -> {seconds_text(b)}"
                lines.append(f"{name}: {abs(b / a - 1):.0%} {word}{where}, {times}")
        for field, unit in (("count", "calls"), ("bytes", "bytes")):
            a, b = getattr(old[name], field), getattr(row, field)
            if a != b:
                lines.append(f"{name}: {a} -> {b} {unit}")
    lines += [f"{name}: only in the first" for name in old if name not in new]
    was, now = ({each["line"]: each for each in result["targets"]} for result in (before, after))
    for line, each in now.items():
        if line not in was:
            lines.append(f"target {line}: only in the second")
            continue
        if was[line]["limit"] != each["limit"]:
            lines.append(f"target {line}: limit {was[line]['limit']} -> {each['limit']}")
        if was[line]["verdict"] != each["verdict"]:
            lines.append(f"target {line}: {was[line]['verdict']} -> {each['verdict']}")
    lines += [f"target {line}: only in the first" for line in was if line not in now]
    return lines or [f"nothing moved by more than {MOVED:.0%}"]


# The picture.


def picture(path: Path, result: dict[str, Any]) -> None:
    """Writes the share of the ceiling over the bytes of a call to a PNG file. Raises ConfigError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from None

    figure, axes = pyplot.subplots(figsize=(10, 5), dpi=120)
    lines = series(rows_of(result))
    colours = pyplot.get_cmap("tab20")
    for i, (label, style, points) in enumerate(lines):
        colour, marker = colours(i % colours.N), MARKERS[i // colours.N % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), marker + style, label=label, color=colour, markersize=5, linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(0, 105)
    axes.set_xlabel("bytes that a call must move")
    axes.set_ylabel("of the ceiling, %")
    axes.set_title(f"{result['device']}, driver {result['driver']}", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


def series(rows: Sequence[Row]) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """(label, style, points) of each line of the picture, points being bytes and share in per cent.

    A line is an operation of one geometry over tokens or sequences, and of any geometry where these make no columns;
    peers are dashed. What was measured at one size alone, or is a part of a step, is left out.
    """
    found: dict[str, tuple[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if row.group not in CHAPTERS or row.group == "step" or row.share is None or row.bytes is None:
            continue
        column = CHAPTERS[row.group][1]
        label = re.sub(column, "", row.name) if column else row.name.split()[0].rstrip(",")
        style = "-" if row.who == "memra" else "--"
        found.setdefault(label, (style, []))[1].append((row.bytes, 100 * row.share))
    return [(label, style, sorted(points)) for label, (style, points) in found.items() if len(points) > 1]
