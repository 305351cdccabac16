"""`memra-driver check --soak`: tells what a soak finds, and reports it at its end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any


def soak(
    make: Callable[[bool], Any],
    minutes: float | None,
    only: int | None,
    first: int | None,
    *,
    small: bool,
    as_json: bool,
) -> int:
    """Programs for so many minutes from seed `first` on, or the one of seed `only`; returns the exit status."""
    from memra_driver import nvrtc
    from memra_driver.soak import INTERRUPTED, Soak

    drawn = secrets.randbelow(10**9) if first is None else first
    soaking = Soak(make, drawn if only is None else only, small=small)
    try:
        found = iter(soaking.program(only)) if only is not None else soaking.run(60 * (minutes or 0))
        for each in found:
            if not as_json:
                print(each.line(), flush=True)
    finally:
        soaking.close()
    report = soaking.report
    if as_json:
        print(json.dumps({"kernel_sources": nvrtc.sources_hash()} | report.as_json(), indent=2))
    else:
        print(report.line())
    if report.findings:
        return 1
    return 130 if report.ended == INTERRUPTED else 0
