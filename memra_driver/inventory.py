"""What this machine offers: driver, GPUs, compiler, kernels, evidence; and what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

from memra_driver import driver, native, nvrtc
from memra_driver.errors import MemraError


def inventory() -> dict[str, Any]:
    """Everything that `memra-driver info` shows, as JSON values. Never raises for what is absent."""
    missing: list[str] = []
    found: dict[str, Any] = {
        "version": import_module("memra_driver").__version__,
        "bindings": _ask(lambda: driver.version_text(driver.bindings_version()), missing),
        "driver": _ask(_driver_version, missing),
        "gpus": _ask(_gpus, missing) or [],
        "nvrtc": _ask(_nvrtc, missing),
        "kernel_sources": f"{nvrtc.source_dir()}, sha256 {nvrtc.sources_hash()[:16]}",
        "kernel_cache": str(nvrtc.cache_dir() or "none: every process compiles anew"),
        "prebuilt_kernels": _prebuilt(),
        "library": _library(missing),
        "gpu_results": _evidence(),
    }
    for module, purpose in (("gguf", "GGUF files"), ("matplotlib", "plan --png and bench --png")):
        if importlib.util.find_spec(module) is None:
            missing.append(f"{module}, for {purpose}: pip install {module}")
    found["missing"] = missing
    return found


def machine() -> dict[str, Any]:
    """What a result of record is headed by: GPU 0, driver, NVRTC, and which sources it speaks of."""
    driver.init()
    return {
        "device": driver.device_get_name(driver.device_get(0)),
        "driver": driver.version_text(driver.driver_get_version()),
        "nvrtc": ".".join(map(str, nvrtc.version())),
        "commit": _commit(),
        "kernel_sources": nvrtc.sources_hash(),
    }


def _commit() -> str | None:
    """MEMRA_COMMIT, else what git says; None outside a checkout."""
    if os.environ.get("MEMRA_COMMIT"):
        return os.environ["MEMRA_COMMIT"]
    try:
        asked = ["git", "rev-parse", "HEAD"]
        run = subprocess.run(asked, cwd=Path(__file__).resolve().parent, capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() or None


def usable_gpu() -> str:
    """Why no GPU can be used, or "" when the first one can."""
    try:
        driver.init()
        if not driver.device_get_count():
            return "the driver sees no GPU"
        nvrtc.version()
    except MemraError as error:
        return str(error)
    return ""


def _ask(question: Any, missing: list[str]) -> Any:
    try:
        return question()
    except MemraError as error:
        if str(error) not in missing:
            missing.append(str(error))
        return None


def _driver_version() -> str:
    driver.init()
    return driver.version_text(driver.driver_get_version())


def _gpus() -> list[str]:
    driver.init()
    gpus = []
    for ordinal in range(driver.device_get_count()):
        device = driver.device_get(ordinal)
        major = driver.device_get_attribute("COMPUTE_CAPABILITY_MAJOR", device)
        minor = driver.device_get_attribute("COMPUTE_CAPABILITY_MINOR", device)
        arch = f"sm_{major}{minor}"
        path = "bulk copies where the geometry allows, else portable" if arch == nvrtc.PIPE_ARCH else "portable"
        gpus.append(f"cuda:{ordinal} {driver.device_get_name(device)}, {arch}, attention: {path}")
    return gpus


def _nvrtc() -> str:
    major, minor = nvrtc.version()
    return f"{major}.{minor}, {nvrtc.library_path() or 'path unknown'}"


def _prebuilt() -> list[str]:
    folder = nvrtc.prebuilt_dir()
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _library(missing: list[str]) -> str | None:
    path = native.library()
    if path is None:
        missing.append(f"{native.LINK_NAME}, for programs in C: {native.HOW_TO_GET}")
    return None if path is None else str(path)


def _evidence() -> list[str]:
    """One line per recorded GPU run, and whether it speaks of the kernel sources that are present."""
    lines = []
    folder = nvrtc.source_dir().parent / "tests" / "gpu" / "results"
    for path in sorted(folder.glob("*.json")):
        lines.append(_evidence_line(path))
    return lines


def _evidence_line(path: Path) -> str:
    try:
        record = json.loads(path.read_text())
        counts = f"{record['passed']} passed, {record['failed']} failed"
        same = record["kernel_sources"] == nvrtc.sources_hash()
        line = f"{record['device']}, {record['date']}: {counts}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name}: unreadable ({error})"
    return line if same else f"{line}; of OTHER kernel sources than those present: run the GPU tests again"
