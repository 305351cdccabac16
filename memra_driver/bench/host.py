"""What the host pays: an eager call beside raw calls of the driver, an import beside NumPy's, kernels cold and warm."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from memra_driver import capi, native, nvrtc, ops
from memra_driver.bench.measure import Bench
from memra_driver.bench.raw import Packed, from_c, packed_launches
from memra_driver.bench.rows import Row, Sizes
from memra_driver.bench.work import ATTENTION, FUSED, HOST_LAYERS, Workload
from memra_driver.errors import MemraError
from memra_driver.launches import KernelSet
from memra_driver.plan import CacheOptions

CALLS = 32  # of advance in a row
IMPORTS = {  # name of the row -> what is imported already, what is timed
    "import numpy": ("pass", "import numpy"),
    "import memra_driver, above NumPy's": ("import numpy", "import memra_driver"),
    "import Cache, CudaDev and ops, above NumPy's": ("import numpy", "from memra_driver import Cache, CudaDev, ops"),
}
HOST_OPS = (*ATTENTION, "conv_update", "gdn_prep", "gdn_scan", *(("recur_step",) if FUSED else ()))


def hosts(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """An eager operation of one row, in Python and through the C library, beside the same launches, packed and raw."""
    cfg = sizes.cfg
    with Workload(bench, cfg, tokens=sizes.host_tokens, options=CacheOptions(skip_mtp_state=True)) as work:
        pos = work.tokens - 1
        for op in HOST_OPS:
            ahead = int(op == "attend")
            work.place(pos, ahead=ahead)
            launches = packed_launches(work, op)
            mine, raw = work.host_beside(op, _in_a_row(launches))
            yield Row("host", f"{op}, eager", host_seconds=mine)
            if op == "append_kv":
                yield Row("host", f"{op}, eager on new slices", host_seconds=_on_new_slices(bench, work))
            yield Row("host", f"{op}, raw launches", who="cuda-python", host_seconds=raw)
            if native.library() is not None and hasattr(capi.ops, op):
                work.ops = capi.ops
                yield Row("host", f"{op}, C library from Python", host_seconds=work.host_seconds(op))
                work.ops = ops
            yield from from_c(bench, work, op, launches, ahead=ahead)
        yield Row("host", "advance, eager", host_seconds=_advance(bench, work))


def _on_new_slices(bench: Bench, work: Workload) -> float:
    """An append over slices that it has not seen, of lengths that it has; the making of two views is part of it."""
    layer = work.caches[0].kv_layer(work.attention[0])
    dims = layer.kv_dim_k, layer.kv_dim_v
    return work.host_seconds(
        "append_kv", call=lambda il: ops.append_kv(work.e, work.target, il, *map(bench.random, dims))
    )


def _advance(bench: Bench, work: Workload) -> float:
    cache = work.caches[0]

    def turn() -> None:
        for _ in range(CALLS):
            cache.pos = 0
            cache.as_c().contents.step_rows = 1  # as behind the operations of a step
            cache.advance(work.e, 1)

    return bench.host_seconds(turn, CALLS)


def _in_a_row(launches: list[list[Packed]]) -> Callable[[], None]:
    """The same launches straight through cuda-python, layer after layer."""
    each = [launch for of_layer in launches[:HOST_LAYERS] for launch in of_layer]

    def turn() -> None:
        for launch in each:
            launch()

    return turn


def loads(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """An import beside NumPy's, and the kernels of this GPU compiled cold and loaded warm."""
    for name, seconds in import_seconds(IMPORTS, sizes.starts).items():
        yield Row("load", name, who="memra" if "memra" in IMPORTS[name][1] else "NumPy", host_seconds=seconds)
    yield Row("load", "kernels warm", host_seconds=_warm(bench))
    for op, seconds in bench.first.items():
        yield Row("load", f"first {op}", host_seconds=seconds)


def import_seconds(imports: dict[str, tuple[str, str]], starts: int) -> dict[str, float]:
    """Seconds of each second statement behind the first, in a process of its own, one of each in turn: the median.

    What Python makes of sources is kept from the first start on, whatever the caller's environment says of that.
    """
    found: dict[str, list[float]] = {name: [] for name in imports}
    path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONPYCACHEPREFIX": folder}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(starts):
            for name, (before, statement) in imports.items():
                code = f"import time; {before}; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
                found[name].append(float(done.stdout))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def compile_kernels(arch: str, *, anew: bool) -> Row | None:
    """Sees to it that every kernel is compiled; the row of a cold compile of all of them in parallel, where it was one.

    anew: where they are in the cache already, they are compiled once more into a folder that is dropped.
    """
    cache = nvrtc.cache_dir()
    keys = [nvrtc.cache_key(source, arch) for source in nvrtc.sources()]
    shipped = all(nvrtc.prebuilt_path(source, arch).is_file() for source in nvrtc.sources())
    cold = not shipped and cache is not None and not any((cache / f"{key}.cubin").is_file() for key in keys)
    begin = time.perf_counter()
    nvrtc.compile_all([arch])
    seconds = time.perf_counter() - begin
    if not cold:
        if not anew or shipped:
            return None
        before = os.environ.get("MEMRA_CACHE_DIR")
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MEMRA_CACHE_DIR"] = folder
            try:
                begin = time.perf_counter()
                nvrtc.compile_all([arch])
                seconds = time.perf_counter() - begin
            finally:
                del os.environ["MEMRA_CACHE_DIR"]
                if before is not None:
                    os.environ["MEMRA_CACHE_DIR"] = before
    return Row("load", "kernels cold", who="NVRTC", host_seconds=seconds, count=len(keys))


def _warm(bench: Bench) -> float | None:
    context = bench.e.context
    found = []
    for _ in range(3):
        kernels = KernelSet(context.arch, bench.e.kernels.device)
        begin = time.perf_counter()
        try:
            kernels.load_all()
        except MemraError:
            return None
        found.append(time.perf_counter() - begin)
        kernels.close()
    return statistics.median(found)
