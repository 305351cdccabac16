"""What this machine offers: driver, GPUs, compiler, kernels, evidence; and what is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from memra_driver import driver, native, nvrtc
from memra_driver.errors import MemraError, NoDriver

OLDEST_NUMPY = (1, 26)
MODES = {2: "prohibited", 3: "exclusive, one process at a time"}  # CU_COMPUTEMODE_*


def inventory() -> dict[str, Any]:
    """Everything that `memra-driver info` shows, as JSON values. Never raises, whatever is absent or broken."""
    missing: list[str] = []

    def ask(question: Callable[[], Any]) -> Any:
        return _ask(question, missing)

    found: dict[str, Any] = {
        "version": import_module("memra_driver").__version__,
        "numpy": ask(lambda: _numpy(missing)),
        "bindings": ask(lambda: driver.version_text(driver.bindings_version())),
        "driver": ask(lambda: _driver_version(missing)),
        "nvrtc": ask(lambda: _nvrtc(missing)),
        "gpus": ask(lambda: _gpus(missing)) or [],
        "kernel_sources": ask(lambda: f"{nvrtc.source_dir()}, sha256 {nvrtc.sources_hash()[:16]}"),
        "kernel_cache": ask(lambda: _kernel_cache(missing)),
        "prebuilt_kernels": ask(_prebuilt) or [],
        "library": ask(lambda: _library(missing)),
        "gpu_results": ask(_evidence) or [],
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
    """Why no GPU can be used, or "" when there is one and all that it needs."""
    try:
        driver.init()
        if not driver.device_get_count():
            return "the driver sees no GPU"
        nvrtc.version()
    except MemraError as error:
        return str(error)
    return ""


def _ask(question: Callable[[], Any], missing: list[str]) -> Any:
    """The answer; None, and why among what is missing, where there is none."""
    try:
        return question()
    except Exception as error:  # what nobody foresaw, too: the rest is shown all the more
        told = str(error) if isinstance(error, MemraError) else f"{type(error).__name__}: {error}"
        if told not in missing:
            missing.append(told)
        return None


def _numpy(missing: list[str]) -> str | None:
    how = "pip install 'numpy>={}.{}'".format(*OLDEST_NUMPY)
    try:
        found = metadata.version("numpy")
    except metadata.PackageNotFoundError:
        missing.append(f"numpy, which all but plans and this page needs: {how}")
        return None
    if tuple(map(int, found.split(".")[:2])) < OLDEST_NUMPY:
        missing.append(f"numpy {found} is too old: {how}")
    return found


def _driver_version(missing: list[str]) -> str:
    """The version also of a driver that cannot be started."""
    try:
        driver.init()
    except NoDriver:
        raise
    except MemraError as error:
        missing.append(str(error))
    return driver.version_text(driver.driver_get_version())


def _gpus(missing: list[str]) -> list[str]:
    driver.init()
    ordinals = range(driver.device_get_count())
    return [_ask(partial(_gpu, ordinal, missing), missing) or f"cuda:{ordinal}" for ordinal in ordinals]


def _gpu(ordinal: int, missing: list[str]) -> str:
    """One line of what can be told; what keeps the GPU from being used goes to `missing`."""
    name = f"cuda:{ordinal}"
    device = driver.device_get(ordinal)
    major = driver.device_get_attribute("COMPUTE_CAPABILITY_MAJOR", device)
    minor = driver.device_get_attribute("COMPUTE_CAPABILITY_MINOR", device)
    arch = f"sm_{major}{minor}"
    parts = [f"{name} {driver.device_get_name(device)}", arch]
    if nvrtc.is_too_old(arch):
        missing.append(f"{name} is {nvrtc.too_old(arch)}")
    else:
        path = "bulk copies where the geometry allows, else portable" if arch == nvrtc.PIPE_ARCH else "portable"
        parts.append(f"attention: {path}")
        new = "" if (nvrtc.prebuilt_dir() / arch).is_dir() else _ask(lambda: nvrtc.too_new(arch), missing)
        missing += [f"{name}: {new}"] if new else []
    mode = MODES.get(driver.device_get_attribute("COMPUTE_MODE", device))
    parts += [f"compute mode: {mode}"] if mode else []
    total = driver.device_total_mem(device)
    try:
        parts.append(f"{_free(device) / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    except MemraError as error:
        missing.append(f"{name} cannot be used now: {error}")
        parts.append(f"{total / 2**30:.1f} GiB")
    return ", ".join(parts)


def _free(device: int) -> int:
    """Bytes; asked in a context, which shows as well that one can be had."""
    before = driver.ctx_get_current()  # first: what fails behind the next call has a context to release
    context = driver.device_primary_ctx_retain(device)
    try:
        driver.ctx_set_current(context)
        return driver.mem_get_info()[0]
    finally:
        with contextlib.suppress(MemraError):  # a context that somebody destroyed
            driver.ctx_set_current(before)
        driver.device_primary_ctx_release(device)


def _nvrtc(missing: list[str]) -> str:
    major, minor = nvrtc.version()
    try:
        has = driver.driver_get_version()
    except MemraError:  # told of the driver
        has = 0
    if has and major > has // 1000:
        missing.append(
            f"NVRTC {major}.{minor} makes kernels that a driver of CUDA {driver.version_text(has)} does not load: "
            f"update the driver, or pip install 'cuda-python=={has // 1000}.*' 'cuda-toolkit[nvrtc]=={has // 1000}.*'"
        )
    return f"{major}.{minor}, {nvrtc.library_path() or 'path unknown'}"


def _kernel_cache(missing: list[str]) -> str:
    trouble = nvrtc.cache_trouble()
    missing += [trouble] if trouble else []
    folder = nvrtc.cache_dir()
    return f"{folder or 'none'}{', cannot be written' if trouble and folder else ''}"


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
