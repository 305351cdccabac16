"""Everything that a GPU can say of these sources, in one call; what it says of record is written beside this file.

    .venv/bin/python tests/gpu/evidence.py [suite] [check] [sanitizers] [tests] [through_c] [embed] [runs] [soak]

The parts, all where none is named. suite: `pytest --gpu`. check: `memra-driver check`, every shape. sanitizers: the
four tools of compute-sanitizer over `check --small`, where every plane is an allocation of its own. tests: the same
over the tests that launch most, as many processes as cores, in turn on each GPU. through_c: memcheck over these as the
C library does them. embed: the four tools over the engine in C. runs: the main job on two models. soak: random
programs, in several processes on each GPU. The last lines are a table; the exit status is 1 where anything failed, 2
where nothing could be tried.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import standin  # noqa: E402

from memra_driver import driver, nvrtc  # noqa: E402
from memra_driver.device import CudaContext  # noqa: E402
from memra_driver.inventory import machine, usable_gpu  # noqa: E402

DEVICE = "cuda:0"
CLI = [sys.executable, "-m", "memra_driver"]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
RUNS = (
    ["run", "gemma4-e4b", "--ctx", "8192"],
    ["run", "qwen3.6-35b-a3b", "--ctx", "32768", "--method", "round", "--graph"],
)
# Groups of tests/test_*.py that share processes, and in how many parts: under racecheck, which takes longest, and else.
# Every kernel is in the first ones; the others follow when all tools are through with these.
SANITIZED = {
    ("attend_pipe", "attend_folds"): (6, 2),
    ("attend",): (3, 2),
    ("round", "rollback"): (2, 2),
    ("snapshots", "graph", "replayed_clock"): (2, 2),
    ("batch", "ops"): (2, 2),
    ("kernels_recurrent", "health_matrix"): (1, 1),
    ("steps", "taps"): (1, 1),
    ("kernels", "offsets", "special_values"): (1, 1),
    ("kernels_batch", "recur_step"): (1, 1),
}
SANITIZED_LAST = {
    ("attend_laws", "attend_layers"): (6, 3),
    ("prepared", "ops_results", "snapshots_again", "kernel_order"): (2, 1),
    ("round_rules", "graph_rules", "late_reads", "programs", "mixed", "many_layers"): (4, 2),
    ("cache", "cache_sequence", "health", "stages", "pipeline", "boundary"): (2, 1),
}
SANITIZED_SECONDS = 540  # for all of them
SOAK_MINUTES, SOAKS = 5, 4  # how long, and in how many processes on each GPU
Line = tuple[str, bool, str, float]  # what, whether it passed, what it said, seconds


def called(*command: str, live: bool = False) -> tuple[int, str]:
    """Exit status and output of a command, which is shown; live: the output too, as it comes."""
    print("$", " ".join(command), flush=True)
    lines = []
    with subprocess.Popen(
        command, cwd=TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if live:
                print(line, end="", flush=True)
    return process.returncode, "".join(lines)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "nothing"


def keep(kind: str, found: dict[str, Any]) -> None:
    """Writes results/<kind>/<device>.json, headed by what was tested where."""
    about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **machine()}
    folder = TESTS / "gpu" / "results" / kind
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", about["device"])
    (folder / f"{name}.json").write_text(json.dumps(about | found, indent=1) + "\n")


def suite() -> list[Line]:
    """Every test, in as many processes as cores; gpu_results.py writes what passed."""
    begin = time.monotonic()
    processes = ["-n", "auto", "--dist", "worksteal"]
    pytest = [sys.executable, "-m", "pytest", "-q", "--gpu", *processes, "--durations=30"]
    status, text = called(*pytest, live=True)
    return [("pytest --gpu", status == 0, last_line(text), time.monotonic() - begin)]


def summary_of(text: str) -> dict[str, Any]:
    """The JSON object that `check --json` printed, among what a tool added."""
    begin, end = text.find("{\n"), text.rfind("\n}")
    if begin < 0 or end < 0:
        return {}
    found: dict[str, Any] = json.loads(text[begin : end + 2])
    return found


def check() -> list[Line]:
    begin = time.monotonic()
    status, text = called(*CLI, "check", "--device", DEVICE, "--json")
    found = summary_of(text)
    if found:
        keep("check", {"command": "memra-driver check --json", **found})
    said = f"{found['checks']} checks, {found['failed']} failed" if found else text[-2000:]
    return [("check", status == 0, said, time.monotonic() - begin)]


def sanitized(tool: str, *command: str) -> tuple[Line, str]:
    """What a tool of compute-sanitizer says of a command, and all that was printed."""
    begin = time.monotonic()
    status, text = called("compute-sanitizer", "--tool", tool, "--error-exitcode", "7", *command)
    summary = re.findall(r"=+ (.*SUMMARY.*)", text)
    if status:
        print(re.sub(r"(?s)\{\n.*\n\}", "", text)[-6000:])  # what the tool says, without what it watched
    said = summary[-1] if summary else "no summary"
    return (tool, status == 0 and bool(summary), said, time.monotonic() - begin), text


def sanitizers() -> list[Line]:
    lines, tools = [], {}
    command = ["check", "--device", DEVICE, "--small", "--json"]
    for tool in TOOLS:
        (_, passed, said, seconds), text = sanitized(tool, *CLI, *command)
        found = summary_of(text)
        tools[tool] = {"summary": said, "passed": passed, "checks": found.get("checks"), "failed": found.get("failed")}
        lines.append((tool, passed, f"{said}, {found.get('checks')} checks, {found.get('failed')} failed", seconds))
    keep("sanitizers", {"command": f"compute-sanitizer --tool TOOL memra-driver {' '.join(command)}", "tools": tools})
    return lines


def tests() -> list[Line]:
    """Every tool over every group; what tests make fail on purpose is no error."""
    runs = [
        (tool, group, f"{i + 1}/{parts[tool != 'racecheck']}")
        for groups in (SANITIZED, SANITIZED_LAST)
        for tool in sorted(TOOLS, key=lambda tool: tool != "racecheck")
        for group, parts in groups.items()
        for i in range(parts[tool != "racecheck"])
    ]
    return sanitized_groups("sanitized_tests", runs, "--not-through-c")


def through_c() -> list[Line]:
    """memcheck over them with a second turn, through the C library; other tools watch kernels, which are the same."""
    return sanitized_groups("sanitized_c", [("memcheck", group, f"{i}/3") for group in SANITIZED for i in (1, 2, 3)])


def sanitized_groups(kind: str, runs: list[tuple[str, tuple[str, ...], str]], *options: str) -> list[Line]:
    """As many at a time as cores."""
    end = time.monotonic() + SANITIZED_SECONDS
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        turns = (str(i % driver.device_get_count()) for i in range(len(runs)))
        done = list(pool.map(lambda run, gpu: sanitized_group(*run, gpu, end, *options), runs, turns))
    tools: dict[str, dict[str, Any]] = {}
    for (tool, group, part), (_, passed, said, _) in zip(runs, done, strict=True):
        tools.setdefault(tool, {})[f"{' '.join(group)}, {part}"] = {"said": said, "passed": passed}
    keep(kind, {"command": f"compute-sanitizer --tool TOOL pytest --gpu {' '.join(options)} FILES", "tools": tools})
    return done


def sanitized_group(tool: str, group: tuple[str, ...], part: str, gpu: str, end: float, *options: str) -> Line:
    """What a tool says of a part of the tests of a group; they are given up where they are not done at `end`."""
    begin = time.monotonic()
    files = [f"tests/test_{name}.py" for name in group]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7"]
    command += ["--show-backtrace", "device"]  # one of Python's would keep the frames, and what they hold, alive
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "pytest", "-qx", "--gpu", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--keep-kernels", "--part", part, *options, *files]
    process = subprocess.Popen(
        command, cwd=TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,  # so that what it watches ends with it
        env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "MEMRA_TEST_GPUS": "1"},
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        text += "\nnot done in time"
    summary = re.findall(r"=+ (.*SUMMARY.*)", text)
    ran = re.findall(r"^\d+ (?:passed|failed).* in .*$", text, re.MULTILINE)
    passed = process.returncode == 0 and bool(summary)
    said = f"{summary[-1] if summary else 'no summary'}; {ran[-1] if ran else last_line(text)}"
    if not passed:
        print(f"$ {tool} {' '.join(group)} {part}\n{text[-8000:]}")
    return f"{tool}, {group[0]} {part}", passed, said, time.monotonic() - begin


def embed() -> list[Line]:
    from memra_driver import get_cubins, get_include, native

    lines, tools = [], {}
    with tempfile.TemporaryDirectory() as folder:
        library, program = native.build(Path(folder)).parent, f"{folder}/engine"
        source = str(TESTS / "embed" / "engine.c")
        flags = [f"-I{get_include()}", f"-L{library}", "-lmemra_driver", f"-Wl,-rpath,{library}"]
        subprocess.run(["gcc", "-std=c11", "-g", source, "-o", program, *flags], check=True)
        cubins = str(Path(get_cubins(CudaContext(0).arch)[0]).parent)
        for tool in TOOLS:
            (_, passed, said, seconds), text = sanitized(tool, program, cubins)
            printed = re.findall(r"^\w+ \d+ [0-9a-f]{64}$", text, re.MULTILINE)
            passed = passed and len(printed) == 4
            tools[tool] = {"summary": said, "passed": passed, "printed": printed}
            lines.append((f"engine.c, {tool}", passed, said, seconds))
    keep("embed", {"command": "compute-sanitizer --tool TOOL engine CUBINS", "tools": tools})
    return lines


def runs() -> list[Line]:
    lines = []
    for command in RUNS:
        begin = time.monotonic()
        status, text = called(*CLI, *command, "--device", DEVICE)
        print(text[-2500:])
        lines.append((" ".join(command[:2]), status == 0, last_line(text), time.monotonic() - begin))
    return lines


def soak() -> list[Line]:
    """`check --soak`, each process with a seed of its own."""
    begin = time.monotonic()
    command = [*CLI, "check", "--soak", str(SOAK_MINUTES), "--device", DEVICE, "--json"]
    gpus = [str(gpu) for gpu in range(driver.device_get_count())] * SOAKS
    processes = [
        subprocess.Popen(
            command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        )
        for gpu in gpus
    ]
    found = [summary_of(process.communicate()[0]) for process in processes]
    passed = all(each for each in found) and not any(process.returncode for process in processes)
    sums = {name: sum(each.get(name, 0) for each in found) for name in ("programs", "steps", "caches", "refused")}
    sums["minutes"] = round(sum(each.get("seconds", 0) for each in found) / 60)
    sums["faults_found"] = sum(each.get("faults_found", 1) for each in found)
    keep("soak", {"command": "memra-driver check --soak MINUTES --json", "sums": sums, "runs": found})
    return [("soak", passed, ", ".join(f"{n} {name}" for name, n in sums.items()), time.monotonic() - begin)]


def main(asked: list[str]) -> int:
    parts = {
        "suite": suite, "check": check, "sanitizers": sanitizers, "tests": tests, "through_c": through_c,
        "embed": embed, "runs": runs, "soak": soak,
    }  # fmt: skip
    unknown = set(asked) - set(parts)
    if unknown:
        print(f"{sorted(unknown)} are no parts; there are {list(parts)}")
        return 2
    if trouble := usable_gpu():
        print(f"evidence.py: {trouble}", file=sys.stderr)
        return 2
    os.environ["MEMRA_CACHE_DIR"] = str(standin.cache_dir() / "nvrtc")  # where the suite keeps kernels too
    nvrtc.compile_all([CudaContext(0).arch])
    os.environ["MEMRA_TEST_GPUS"] = str(driver.device_get_count())
    lines = [line for name, part in parts.items() if not asked or name in asked for line in part()]
    print("\n" + "\n".join(f"{key}: {value}" for key, value in machine().items()))
    for what, passed, said, seconds in lines:
        print(f"{'pass' if passed else 'FAIL'}  {what:<22} {seconds:6.1f} s  {said}")
    return 0 if all(passed for _, passed, _, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
