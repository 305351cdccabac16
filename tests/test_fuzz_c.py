"""Every function of the C library, called wrongly in every way that bytes can spell, keeps to what its header says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import cfuzz
import pytest
import standin
import tally

from memra_driver import native

pytestmark = pytest.mark.standin
RUNS = 3200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := standin.missing():
        pytest.skip(reason)
    if standin.sanitized_environment() is None:
        pytest.skip("gcc has no libasan here")
    return tmp_path_factory.mktemp("cfuzz")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    return cfuzz.build(folder)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_every_exported_function_is_fuzzed() -> None:
    told = subprocess.run(["nm", "-D", "--defined-only", native.build()], capture_output=True, text=True)
    exported = set(re.findall(r" T (memra_\w+)", told.stdout))
    assert exported == {function.name for function in cfuzz.functions()}
    assert len(exported) > 80


def test_every_pointer_of_every_function_may_be_null(program: Path) -> None:
    done = cfuzz.run(program, "--nulls")
    assert done.returncode == 0, done.stderr
    told, inputs = cfuzz.read(done.stdout)
    tally.add("fuzz inputs", inputs)
    for function in cfuzz.functions():
        assert told[function.name].calls > len(function.pointers), function.name
        assert list(told[function.name].nulls) == function.pointers
        assert all(told[function.name].nulls.values()), function.name
    pointers = sum(len(function.pointers) for function in cfuzz.functions())
    assert inputs == len(told) + pointers


@pytest.mark.long(9)
def test_no_sequence_of_calls_breaks_a_law(program: Path) -> None:
    done = cfuzz.run(program, "--runs", str(RUNS), "--seed", "1")
    assert done.returncode == 0, done.stderr
    told, inputs = cfuzz.read(done.stdout)
    tally.add("fuzz inputs", inputs)
    assert inputs > RUNS
    statuses = {function.name for function in cfuzz.functions() if function.returns == "int"}
    assert {name for name, each in told.items() if not each.ok} == set()
    never_refuse = {"memra_graph_close"}  # whose graphs are all closed ones here
    assert {name for name in statuses if not told[name].refused} <= never_refuse


# What somebody could have written instead, and the law that it breaks.
WRONG = {
    "a pointer that is not looked at": (
        "memra_kernels.c", "if (!columns || !blocks) return", "if (!columns) return", "null pointer",
    ),
    "an answer that is written beside its place": (
        "memra_beside.c", "memset(health, 0, sizeof *health);\n    MEMRA_TRY(memra_check_cache",
        "memset(health, 0, sizeof *health + 1);\n    MEMRA_TRY(memra_check_cache", "heap-buffer-overflow",
    ),
    "a change before the refusal": (
        "memra_cache.c", "const int recording = memra_check_not_recording(cache, \"memra_cache_free\");",
        "cache->generation++;\n    const int recording = memra_check_not_recording(cache, \"memra_cache_free\");",
        "law broken: memra_cache_free refused",
    ),
    "a refusal without a sentence": (
        "memra_error.c", "vsnprintf(sentence, sizeof sentence, format, arguments);", "sentence[0] = 0;",
        "without a sentence",
    ),
    "memory of the device that is not freed": (
        "memra_snapshot.c", "memra_device_give_back(device, made->allocations[i], &first);",
        "if (i) memra_device_give_back(device, made->allocations[i], &first);", "bytes are left on the device",
    ),
    "memory of the host that is not freed": (
        "memra_plan.c", "    free(plan->device_of);\n", "", "LeakSanitizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_library_that_does_wrong_is_caught(name: str, folder: Path, program: Path) -> None:
    file, right, wrong, words = WRONG[name]
    spoiled = folder / name.replace(" ", "_")
    spoiled.mkdir()
    done = cfuzz.run(cfuzz.build(spoiled, {file: (right, wrong)}), "--runs", "20000", "--seed", "1")
    assert done.returncode == 1
    assert words in done.stderr, done.stderr
    assert "input" in done.stderr
