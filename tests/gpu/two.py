"""What a machine with two GPUs can say of pipelines, in one call; it is written beside this file.

    .venv/bin/python tests/gpu/two.py

tests: `pytest --gpu` of the files that use two devices. runs: the main job on one GPU, on two stages, and on four
stages of two GPUs, whose digests must be the same. places: where every buffer of such a cache lies, by the driver's
word. memcheck: a session with planes of their own under compute-sanitizer. boundary: hidden-state rows beside a raw
peer copy. The last lines are a table; the exit status is 1 where anything failed, 2 where nothing could be tried. All
but the last two run at once, so the times that the runs tell are none of a GPU of one's own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evidence import CLI, Line, keep, last_line, sanitized, standin

from memra_driver import driver, nvrtc
from memra_driver.boundary import Boundary
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig, SsmConfig
from memra_driver.device import CudaEvent
from memra_driver.inventory import usable_gpu
from memra_driver.kvdev import CudaDev
from memra_driver.plan import CacheOptions
from memra_driver.pp import balance
from memra_driver.session import Session

HERE = Path(__file__).resolve()
FILES = ("test_boundary.py", "test_stages.py", "test_pipeline.py", "test_readme.py")
MODEL, CTX = "qwen3.6-27b", 32768
RUN = ["run", MODEL, "--ctx", str(CTX), "--prompt", "24", "--rounds", "3", "--json"]
STAGES = ("cuda:0", "cuda:0,cuda:1", "cuda:0,cuda:1,cuda:0,cuda:1")
ROWS, HIDDEN = 4096, 5120
BYTES = 4 * ROWS * HIDDEN
LEAST_SHARE, MOST_TIMES = 0.9, 1.3  # of a raw copy: bandwidth of all rows, time of one


def apart(*command: str) -> subprocess.Popen[str]:
    """A command that runs beside this program."""
    return subprocess.Popen(
        command, cwd=HERE.parent.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate()
    return process.returncode, text


# Places


def cache_of(stages: list[CudaDev]) -> Cache:
    cfg = ModelConfig.from_preset(MODEL)
    options = CacheOptions(round_width=4, reserve_logits=True)
    return Cache.new_ppn(stages, balance(cfg, CTX, len(stages), options=options), cfg, CTX, options=options)


def places(devices: list[CudaDev], found: dict[str, Any]) -> Line:
    """Every buffer of a cache, a snapshot and a boundary of four stages on two GPUs."""
    begin = time.monotonic()
    seen, wrong = 0, []

    def look(name: str, ptr: int, expected: int) -> None:
        nonlocal seen
        seen += 1
        lies = driver.pointer_get_attribute("DEVICE_ORDINAL", ptr)
        if lies != expected:
            wrong.append(f"{name} on cuda:{lies}, not cuda:{expected}")

    stages = [devices[0], devices[1]] * 2
    with cache_of(stages) as cache, cache.snapshot(devices[0]) as snap:
        regions = {name: ptr for name, ptr, n_bytes, _ in cache.regions() if n_bytes}
        for row in cache.plan.planes:
            if row.bytes:
                look(row.name, regions[row.name], devices[row.device].ordinal)
        for il in range(cache.cfg.n_layer):
            where = devices[cache.plan.device_of(il)].ordinal
            for each in filter(None, (snap.conv[il], snap.ssm[il])):
                look(f"snapshot of layer {il}", each.ptr, where)
    for a, b in (devices, devices[::-1]):
        with Boundary(a, b, HIDDEN, 2) as boundary:
            look(f"slots of {boundary!r}", boundary._slots.ptr, b.ordinal)
    found["places"] = {"model": MODEL, "stages": len(stages), "buffers": seen, "elsewhere": wrong}
    return "places", not wrong, f"{seen} buffers, {len(wrong)} elsewhere", time.monotonic() - begin


# Boundaries


def busy(e: CudaDev, room: Any, times: int) -> None:
    """Keeps e at work while the host gets ahead."""
    for _ in range(times):
        e.clear_bytes(room.ptr, room.nbytes)


def seconds(e: CudaDev, enqueue: Callable[[], None], repeat: int, room: Any, each: int = 1) -> float:
    """Median of `repeat` measurements between two events on e of `each` calls, per call."""
    found = []
    for _ in range(repeat):
        with CudaEvent(e.context, timing=True) as begin, CudaEvent(e.context, timing=True) as end:
            busy(e, room, 1 + each // 4)
            e.stream.record(begin)
            for _ in range(each):
                enqueue()
            e.stream.record(end)
            e.synchronize()
            found.append(end.elapsed_ms(begin) / 1e3 / each)
    return statistics.median(found)


def host_seconds(e: CudaDev, enqueue: Callable[[], None], repeat: int) -> float:
    """Median time of the host in one call, with nothing in the way."""
    found = []
    for _ in range(repeat):
        e.synchronize()
        begin = time.perf_counter()
        enqueue()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def boundary(devices: list[CudaDev], found: dict[str, Any]) -> Line:
    """All rows and one row from GPU 0 to GPU 1, beside a copy of as many bytes between two allocations."""
    began = time.monotonic()
    a, b = devices
    measured: dict[str, Any] = {}
    with a.uninit(1 << 27) as room, a.uninit(ROWS * HIDDEN) as rows, Boundary(a, b, HIDDEN, ROWS) as crossing:
        a.clear_bytes(rows.ptr, rows.nbytes)
        a.context.bind()
        source = driver.mem_alloc(BYTES)
        b.context.bind()
        target = driver.mem_alloc(BYTES)
        for name, count in (("all", ROWS), ("one", 1)):
            part, n_bytes = rows.view(0, count * HIDDEN), 4 * HIDDEN * count

            def raw(n_bytes: int = n_bytes) -> None:
                a.context.bind()
                driver.memcpy_peer_async(target, b.context.handle, source, a.context.handle, n_bytes, a.stream.handle)

            def send(part: Any = part) -> None:
                crossing.send(part)
                crossing.receive()
                crossing.release()

            for call in (raw, send):
                call()
            b.synchronize()
            measured[name] = {
                "bytes": n_bytes,
                **{
                    f"{what}_{kind}": figure
                    for what, call in (("raw", raw), ("boundary", send))
                    for kind, figure in (
                        ("seconds", seconds(a, call, 21, room)),
                        ("back_to_back_seconds", seconds(a, call, 5, room, 8 if count > 1 else 64)),
                        ("host_seconds", host_seconds(a, call, 101)),
                    )
                },
            }
        b.context.bind()
        driver.mem_free(target)
        a.context.bind()
        driver.mem_free(source)
        way = crossing.way
    share = measured["all"]["raw_seconds"] / measured["all"]["boundary_seconds"]
    times = measured["one"]["boundary_seconds"] / measured["one"]["raw_seconds"]
    found["boundary"] = {"way": way, "rows": ROWS, "hidden": HIDDEN, **measured, "share": share, "times": times}
    for name, each in measured.items():
        figures = (f"{key} {value * 1e6:.1f} us" for key, value in each.items() if key != "bytes")
        print(f"{name} rows: {', '.join(figures)}")
    rate = BYTES / measured["all"]["boundary_seconds"] / 1e9
    passed = share >= LEAST_SHARE and times <= MOST_TIMES
    said = f"{way}, {rate:.0f} GB/s, {share:.3f} of a raw copy; one row {times:.2f} x its time"
    return "boundary", passed, said, time.monotonic() - began


# Memcheck


def crossing() -> int:
    """A session over four stages of two GPUs where every plane is an allocation of its own; for a sanitizer."""
    cfg = ModelConfig(
        arch="qwen35", n_layer=8, n_head=4, n_head_kv=2, head_dim_k=64, head_dim_v=64, n_embd=64, n_vocab=100,
        full_attention_interval=2, ssm=SsmConfig(conv_kernel=4, state_size=32, time_step_rank=4, group_count=2),
    )  # fmt: skip
    with CudaDev(0, arena=False) as a, CudaDev(1, arena=False) as b:
        for method in ("rollback", "round"):
            session = Session([a, b, a, b], cfg, 64, prompt=5, rounds=2, draft=3, seed=0, method=method)
            faults = [each.fault for each in session.run()]
            session.close()
            print(method, faults)
            if any(faults):
                return 1
    return 0


# All of it


def digests(text: str) -> Any:
    found = json.loads(text[text.index("{\n") :])
    return [(each["accepted"], each["pos"], each["digest"]) for each in found["history"]], found


def main() -> int:
    if sys.argv[1:] == ["crossing"]:
        return crossing()
    trouble = usable_gpu()
    if trouble or driver.device_get_count() < 2:
        print(f"two.py: {trouble or 'it needs two GPUs'}", file=sys.stderr)
        return 2
    devices = [CudaDev(0), CudaDev(1)]
    os.environ["MEMRA_CACHE_DIR"] = str(standin.cache_dir() / "nvrtc")  # where the tests keep kernels too
    nvrtc.compile_all([devices[0].context.arch])
    began = time.monotonic()
    files = [str(HERE.parent.parent / name) for name in FILES if (HERE.parent.parent / name).is_file()]
    shards = ["-n", "12"] if importlib.util.find_spec("xdist") else []
    command = ("-m", "pytest", "-q", "--gpu", "--tb=short", "-rfs", "-p", "no:cacheprovider")
    tests = apart(sys.executable, *command, *shards, *files)
    running = [(stages, apart(*CLI, *RUN, "--stages", stages)) for stages in STAGES]
    checked, text = sanitized("memcheck", sys.executable, str(HERE), "crossing")
    lines = [("memcheck", *checked[1:])]
    print(text[-800:])
    status, text = ended(tests)
    print(text[-7000:])
    lines.append(("pytest --gpu", status == 0, last_line(text), time.monotonic() - began))
    expected: Any = None
    ran = []
    for stages, process in running:
        status, text = ended(process)
        same, fence = False, None
        if status == 0:
            history, found = digests(text)
            expected = history if expected is None else expected
            same, fence = history == expected, found["fence"]
            ran.append({"stages": stages, "fence": fence, "same": same, "operations": found["operations"]})
        else:
            print(text[-2000:])
        said = f"{'the digests of one GPU' if same else 'OTHER digests'}, fence {fence}"
        lines.append((f"run {stages}", status == 0 and same, said, time.monotonic() - began))
    found: dict[str, Any] = {"command": f"memra-driver {' '.join(RUN)} --stages STAGES", "runs": ran}
    lines += [places(devices, found), boundary(devices, found)]
    for e in devices:
        e.close()
    found["parts"] = [{"part": what, "passed": passed, "said": said} for what, passed, said, _ in lines]
    keep("two", found)
    print()
    for what, passed, said, taken in lines:
        print(f"{'pass' if passed else 'FAIL'}  {what:<34} {taken:6.1f} s  {said}")
    return 0 if all(passed for _, passed, _, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
