"""`memra-driver bench`: every operation of the cache on one GPU, beside what the memory can do and what people use.

A run is a list of rows (rows.py), measured by rotating graphs (measure.py) over the cases of cases.py and host.py and,
if asked for, peers.py; targets.py judges it, report.py shows it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memra_driver.bench import cases, host
from memra_driver.bench import peers as others
from memra_driver.bench.measure import ROTATION, Bench
from memra_driver.bench.rows import FULL, GROUPS, Row, Sizes
from memra_driver.bench.targets import judged
from memra_driver.errors import ConfigError
from memra_driver.inventory import machine

SCHEMA = 1
CASES: dict[str, Callable[[Bench, Sizes], Iterator[Row]]] = {
    "snapshot": cases.snapshots,
    "append": cases.appends,
    "attend": cases.attends,
    "scan": cases.scans,
    "recur": cases.recurs,
    "step": cases.steps,
    "host": host.hosts,
    "load": host.loads,
}


def chosen(what: Sequence[str]) -> tuple[str, ...]:
    """The groups that `what` names, commas allowed, in the order of a run; all where it names none."""
    asked = [name for each in what for name in each.split(",") if name]
    unknown = sorted(set(asked) - set(GROUPS))
    if unknown:
        raise ConfigError(f"--what {', '.join(unknown)}: there are {', '.join(GROUPS)}")
    return tuple(name for name in GROUPS if not asked or name in asked)


def run(
    e: Any, *, groups: Sequence[str] = GROUPS, sizes: Sizes = FULL, peers: bool = False,
    tell: Callable[[str], None] = lambda group: None,
) -> dict[str, Any]:  # fmt: skip
    """Measures these groups on a CudaDev; returns what `--json` writes. `tell` hears of each group as it begins.

    Takes about 10 GiB of the GPU at its largest. Raises DriverError, CompileError, OutOfMemory.
    """
    rows: list[Row] = []
    ends = [] if (compiled := host.compile_kernels(e.context.arch, anew="load" in groups)) is None else [compiled]
    present = others.installed() if peers else None
    bench = Bench(e, pool_bytes=sizes.pool_bytes, replays=sizes.replays)
    try:
        ceilings = {
            "copy": 2 * bench.room.nbytes / bench.copy_seconds(2 * bench.room.nbytes),
            "read": bench.read_rate(),
        }
        node = empty_node(bench)
        for group in groups:
            tell(group)
            rows += CASES[group](bench, sizes)
        if present is not None:
            tell("peers")
            rows += others.peers(bench, sizes, tuple(groups), present)
        rows += ends
        for row in rows:
            rate = ceilings[row.ceiling] or ceilings["copy"]
            row.ceiling_seconds = row.bytes / rate if row.bytes and row.seconds else None
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **machine(),
            "device": e.context.name(),
            "sizes": sizes.name,
            "groups": list(groups),
            "l2_bytes": bench.l2_bytes,
            "rotation": ROTATION,
            "replays": sizes.replays,
            "ceilings": ceilings,
            "empty_node_seconds": node,
            "peers": present,
            "faults": bench.faults,
            "rows": [row.as_json() for row in rows],
            "targets": judged(rows, groups),
        }
    finally:
        bench.close()


def empty_node(bench: Bench, count: int = 256) -> float:
    """Seconds of a kernel in a graph that has nothing to do."""

    def enqueue() -> None:
        for _ in range(count):
            bench.e.launch("set_counters", bench.room.view(0, 1).cast("int32"), 0, 0, 0, 0, 0, 0, None, 0)

    return bench.device_seconds(enqueue, count)
