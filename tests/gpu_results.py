"""Writes tests/gpu/results/<device name>.json after a whole run with --gpu: what passed where."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memra_driver.errors import MemraError
from memra_driver.inventory import machine

TESTS = Path(__file__).resolve().parent


class GpuResults:
    """Counts outcomes as pytest reports them, and tells failures at once: a GPU may be gone before the run's end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.counts["failed"] += 1
            self.failures.append(report.nodeid if report.when == "call" else f"{report.nodeid} ({report.when})")
            terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
            if terminal is not None and not hasattr(self.config, "workerinput"):
                terminal.write_line(f"\nFAILED {self.failures[-1]}\n{report.longreprtext[-1500:]}")
        elif report.skipped:
            self.counts["skipped"] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # a process of pytest-xdist, whose reports all reach the first one
            return
        asked = session.config.option
        whole = [str(TESTS)] == [str(Path(arg).resolve()) for arg in session.config.args]
        if not sum(self.counts.values()) or not whole or asked.keyword or asked.markexpr:
            return  # a part of the tests is no evidence for the whole
        try:
            about = machine()
        except MemraError as error:
            print(f"\nno results file: {error}")
            return
        write(about, self.counts, self.failures)


def write(about: dict[str, Any], counts: Counter[str], failures: list[str]) -> None:
    """The results of a whole run."""
    results = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about,
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": failures,
    }
    folder = TESTS / "gpu" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", about["device"])
    (folder / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
