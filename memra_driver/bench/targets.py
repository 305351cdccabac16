"""What the bench is held to: each line a figure of the run, beside another figure of the same run or by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memra_driver.bench.rows import FULL, PAIR, Row, append_name, recurrent_name, states_name, step_name
from memra_driver.formats import K_FORMATS, V_FORMATS

Figure = tuple[str, str]  # the name of a row, and the field of it
ABSENT = "not measured"


@dataclass(frozen=True)
class Target:
    """`figure`, divided by `beside` where there is one, against a limit.

    unit: "x" for a quotient, "%" for a share, else of time: s, ms, us; or "calls". at_least: larger is better.
    """

    group: str
    line: str
    figure: Figure
    beside: Figure | None
    limit: float
    aim: float | None = None
    unit: str = "x"
    at_least: bool = False

    def value(self, rows: dict[str, Row]) -> float | None:
        """The figure in the unit; None where the run did not measure it."""
        figure = _figure(rows, self.figure)
        if figure is None:
            return None
        if self.beside is not None:
            other = _figure(rows, self.beside)
            if not other:
                return None
            figure /= other
        return figure * {"ms": 1e3, "us": 1e6, "%": 100}.get(self.unit, 1)

    def verdict(self, value: float | None) -> str:
        """not measured, aim, pass or miss."""
        if value is None:
            return ABSENT

        def meets(limit: float) -> bool:
            return value >= limit if self.at_least else value <= limit

        if self.aim is not None and meets(self.aim):
            return "aim"
        return "pass" if meets(self.limit) else "miss"

    def as_json(self, rows: dict[str, Row]) -> dict[str, Any]:
        value = self.value(rows)
        figures = {"figure": list(self.figure), "beside": self.beside and list(self.beside)}
        return {**asdict(self), **figures, "value": value, "verdict": self.verdict(value)}


def judged(rows: Sequence[Row], groups: Sequence[str]) -> list[dict[str, Any]]:
    """Every target of these groups with its value and verdict."""
    named = {row.name: row for row in rows}
    return [target.as_json(named) for target in TARGETS if target.group in groups]


def _figure(rows: dict[str, Row], figure: Figure) -> float | None:
    row = rows.get(figure[0])
    value: float | None = None if row is None else getattr(row, figure[1])
    return value


def _copies() -> list[Target]:
    found = []
    for name in ("snapshot_into", "rollback"):
        for parity, limit in (("even", 1.25), ("odd", 1.4)):
            row = f"{name}, {parity}"
            line = f"{row} parity: beside a copy of the same bytes"
            found.append(Target("snapshot", line, (row, "seconds"), (row, "copy_seconds"), limit))
            raw: Figure = (f"raw copy call, {parity}", "host_seconds")
            line = f"{row} parity: the host beside one raw copy call"
            found.append(Target("snapshot", line, (row, "host_seconds"), raw, 1.5))
    begins = Target("snapshot", "a round begins without device work", ("round begins", "count"), None, 0, unit="calls")
    over = ("scan over all layers", "seconds")
    line = "partial commit: beside one scan of that width over all layers"
    commit = Target("snapshot", line, ("partial commit", "seconds"), over, 1.3)
    name = f"Cache.new at {FULL.new_tokens}"
    birth = Target("snapshot", f"{name} tokens: the host", (name, "host_seconds"), None, 300, unit="us")
    return [*found, begins, commit, birth]


def _appends() -> list[Target]:
    found = []
    rows = FULL.append_rows
    for dim, pairs, limit, aim in (
        (1024, [(k, v) for k in K_FORMATS for v in V_FORMATS], 80, 90), (512, [PAIR], 70, None), (96, [PAIR], 70, None)
    ):  # fmt: skip
        for pair in pairs:
            name = append_name(dim, rows, pair)
            figures: tuple[Figure, Figure] = ((name, "copy_seconds"), (name, "seconds"))
            line = f"{name}: of a copy"
            found.append(Target("append", line, *figures, limit, aim, unit="%", at_least=True))
    for rows in FULL.few_rows:
        name = append_name(1024, rows)
        found.append(Target("append", f"{name}", (name, "seconds"), None, 2.0, unit="us"))
    name = append_name(1024, 1)
    return [*found, Target("append", "K, V and len_d: launches", (name, "count"), None, 1, unit="calls")]


def _attends() -> list[Target]:
    found = []
    limits: dict[tuple[int, int, int], tuple[tuple[float, ...], tuple[float | None, ...]]] = {
        (16, 2, 256): ((0.75, 0.55, 0.52, 0.47), (0.65, 0.48, 0.47, 0.42)),
        (24, 4, 256): ((0.80, 0.55, 0.50, 0.45), (None,) * 4),
        (32, 8, 128): ((0.8, 0.6, 0.55, 0.5), (None,) * 4),
        (16, 2, 512): ((0.8, 0.6, 0.55, 0.5), (None,) * 4),
    }
    verify = {(16, 2, 256): (2.1, 1.65), (24, 4, 256): (2.4, 2.0)}
    for shape in FULL.attention:
        key = (shape.n_head, shape.n_head_kv, shape.head_dim)
        for tokens, limit, aim in zip(FULL.contexts, *limits[key], strict=True):
            one, peer = shape.name(1, tokens), shape.peer(tokens)
            line = f"{one}: beside torch SDPA"
            found.append(Target("attend", line, (one, "seconds"), (peer, "seconds"), limit, aim))
            if shape.verify:
                several, most = shape.name(shape.verify, tokens), verify[key][tokens >= 32768]
                line = f"{several}: beside decoding"
                found.append(Target("attend", line, (several, "seconds"), (one, "seconds"), most))
        for pair in shape.others:
            for tokens in FULL.other_contexts:
                other, one = shape.name(1, tokens, pair), shape.name(1, tokens)
                line = f"{other}: beside {'+'.join(PAIR)}"
                found.append(Target("attend", line, (other, "seconds"), (one, "seconds"), 1.10))
    return found


def _scans() -> list[Target]:
    found = []
    for heads in FULL.value_heads:
        one = recurrent_name("gdn_scan", heads, 1)
        found.append(Target("scan", one, (one, "seconds"), None, 2.9, unit="us"))
        for batch in FULL.batches[1:]:
            name = recurrent_name("gdn_scan", heads, batch)
            limit, aim = (90, 95) if batch >= 32 else (85, None)
            figures: tuple[Figure, Figure] = ((states_name(heads, batch), "seconds"), (name, "seconds"))
            line = f"{name}: of a copy of the states"
            found.append(Target("scan", line, *figures, limit, aim, unit="%", at_least=True))
        several = recurrent_name("gdn_scan", heads, 1, FULL.scan_rows)
        line = f"{several}: beside one row"
        found.append(Target("scan", line, (several, "seconds"), (one, "seconds"), 1.6))
    return found


def _recurs() -> list[Target]:
    found = []
    for heads in FULL.value_heads:
        name = recurrent_name("recur_step", heads, 1)
        found.append(Target("recur", name, (name, "seconds"), None, 5.0, unit="us"))
        for batch in FULL.batches[1:]:
            name, scan = (recurrent_name(op, heads, batch) for op in ("recur_step", "gdn_scan"))
            limit = 1.15 if batch >= 32 else 1.3
            line = f"{name}: beside the plain scan"
            found.append(Target("recur", line, (name, "seconds"), (scan, "seconds"), limit))
    return found


def _hosts() -> list[Target]:
    found = []
    ops = ("append_kv", "attend", "conv_update", "gdn_prep", "gdn_scan", "recur_step")
    for op in ops:
        eager: Figure = (f"{op}, eager", "host_seconds")
        raw: Figure = (f"{op}, raw launches", "host_seconds")
        line = f"{op}, eager from Python: beside the same launches, packed and raw"
        found.append(Target("host", line, eager, raw, 1.4))
    for op in ops:
        mine: Figure = (f"{op}, from C", "host_seconds")
        line = f"{op} through the C library, from C: beside the same launches from C"
        found.append(Target("host", line, mine, (f"{op}, raw launches from C", "host_seconds"), 1.2))
    return found


def _steps() -> Target:
    name = step_name(FULL.step_batches[-1])
    line = f"{name}: of the copy ceiling, over the bytes of the caches"
    ceiling: Figure = (name, "ceiling_seconds")
    return Target("step", line, ceiling, (name, "seconds"), 80, unit="%", at_least=True)


def _loads() -> list[Target]:
    imported: Figure = ("import memra_driver, above NumPy's", "host_seconds")
    cold, warm = ("kernels cold", "host_seconds"), ("kernels warm", "host_seconds")
    return [
        Target("load", imported[0], imported, None, 15, unit="ms"),
        Target("load", "all kernels of one GPU compiled, in parallel", cold, None, 40, unit="s"),
        Target("load", "all kernels loaded from the cache", warm, None, 150, unit="ms"),
    ]


TARGETS: tuple[Target, ...] = (
    *_copies(), *_appends(), *_attends(), *_scans(), *_recurs(), _steps(), *_hosts(), *_loads()
)  # fmt: skip
