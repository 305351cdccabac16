"""A run of the bench on the stand-in driver: what it measures, how often, over which memory; no time is asserted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_tiny import L2_BYTES, L2_CACHE_SIZE, MODEL, SHAPE, TINY
from conftest import MakeDev, c_library_missing
from standin import StandIn

from memra_driver import bench, nvrtc, ops
from memra_driver.bench import cases as bench_cases
from memra_driver.bench import host as bench_host
from memra_driver.bench import peers as bench_peers
from memra_driver.bench.measure import ROTATION, UNMEASURED, Bench, watched
from memra_driver.bench.raw import packed_launches
from memra_driver.bench.report import rows_of
from memra_driver.bench.rows import GROUPS, append_name, recurrent_name, step_name
from memra_driver.bench.targets import judged
from memra_driver.bench.work import REPEATABLE, Workload, attention_model

STEP_OPS = ("append_kv", "attend", "conv_update", "gdn_prep", "gdn_scan")


@pytest.fixture
def cuda(standin: StandIn, make_dev: MakeDev) -> Any:
    standin.set_attribute(0, L2_CACHE_SIZE, L2_BYTES)
    return make_dev("cuda")


@pytest.fixture
def measuring(cuda: Any) -> Iterator[Bench]:
    made = Bench(cuda, pool_bytes=1 << 16, replays=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return {}


@pytest.fixture
def result(results: dict[str, Any], cuda: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One run of everything, kept for all tests of this file."""
    if not results:
        c_library_missing()
        monkeypatch.setattr(nvrtc, "compile_all", lambda archs: {})
        monkeypatch.setenv("MEMRA_COMMIT", "c0ffee")
        monkeypatch.setattr(bench_peers, "installed", lambda: dict.fromkeys(bench_peers.PACKAGES.values()))
        results.update(bench.run(cuda, sizes=TINY, peers=True))
    return results


def test_a_run_measures_every_case_of_its_sizes(result: dict[str, Any]) -> None:
    rows = {row.name: row for row in rows_of(result)}
    assert {row.group for row in rows.values()} == set(GROUPS)
    wanted = [f"{name}, {parity}" for name in ("snapshot_into", "rollback") for parity in ("even", "odd")]
    wanted += [append_name(64, 8, (k, v)) for k in ("q8_0", "fp8") for v in ("q5_1", "q4_0", "fp8")]
    wanted += [append_name(96, 8), append_name(64, 1)]
    wanted += [SHAPE.name(1, 70), SHAPE.name(2, 70), SHAPE.name(1, 70, ("fp8", "fp8"))]
    wanted += [recurrent_name("gdn_scan", 2, batch) for batch in (1, 2)] + [recurrent_name("gdn_scan", 2, 1, 4)]
    wanted += [step_name(batch) for batch in (1, 2)]
    for name in wanted:
        assert rows[name].seconds, name
        assert rows[name].bytes, name
        assert rows[name].share, name
    for name in (
        f"Cache.new at {TINY.new_tokens}",
        "raw copy call, odd",
        "append_kv, eager on new slices",
        "kernels warm",
        "import numpy",
        "advance, eager",
    ):
        assert rows[name].host_seconds, name
    assert len(rows) == len(result["rows"])  # no name stands for two


def test_a_result_says_what_it_speaks_of(result: dict[str, Any]) -> None:
    assert result["device"] == "Stand-in GPU 0"
    assert (result["commit"], result["kernel_sources"]) == ("c0ffee", nvrtc.sources_hash())
    assert (result["l2_bytes"], result["rotation"], result["sizes"]) == (L2_BYTES, ROTATION, "tiny")
    assert result["ceilings"]["copy"] > 0
    assert result["empty_node_seconds"] > 0
    assert result["faults"] == []
    assert result["targets"] == judged(rows_of(result), GROUPS)


def test_absent_peers_are_said_to_be_absent(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in bench_peers.PACKAGES:
        monkeypatch.setitem(__import__("sys").modules, module, None)
    absent = dict.fromkeys(bench_peers.PACKAGES.values())
    assert bench_peers.installed() == absent
    assert list(bench_peers.peers(None, TINY, GROUPS, absent)) == []  # type: ignore[arg-type]
    assert set(result["peers"]) == set(absent)


def test_a_peer_that_fails_is_a_fault_and_no_end(measuring: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench, sizes: Any) -> Iterator[Any]:
        raise RuntimeError("no kernel image")
        yield

    monkeypatch.setattr(bench_peers, "PEERS", (("scan", ("torch",), broken),))
    assert list(bench_peers.peers(measuring, TINY, ("scan",), {"torch": "9"})) == []
    assert measuring.faults == ["torch, scan: RuntimeError: no kernel image"]


def test_a_round_begins_without_device_work_and_an_append_is_one_launch(result: dict[str, Any]) -> None:
    rows = {row.name: row for row in rows_of(result)}
    assert rows["round begins"].count == 0
    assert rows[append_name(64, 1)].count == 1


def test_what_was_not_asked_for_is_not_measured(cuda: Any) -> None:
    found = bench.run(cuda, groups=bench.chosen(["append"]), sizes=TINY)
    assert {row["group"] for row in found["rows"]} == {"append"}
    assert {each["group"] for each in found["targets"]} == {"append"}
    assert found["peers"] is None


# How it measures.


def test_copies_rotate_over_four_times_the_l2(measuring: Bench, standin: StandIn) -> None:
    standin.clear_trace()
    measuring.copy_seconds(2048)
    nodes = [call for call in standin.calls("node") if call.bytes == 1024]
    (launches,) = {len([call for call in nodes if call.dst == dst]) for dst in {call.dst for call in nodes}}
    assert launches == UNMEASURED + 2
    ends = {call.dst for call in nodes} | {call.src for call in nodes}
    assert len(ends) * 1024 >= ROTATION * L2_BYTES
    standin.clear_trace()
    measuring.copy_seconds(2048)  # is known by now
    assert standin.calls("node") == []


def test_attention_rotates_over_four_times_the_l2(result: dict[str, Any], measuring: Bench) -> None:
    (row,) = (row for row in rows_of(result) if row.name == SHAPE.name(1, 70))
    kv_bytes = 70 * (2 * 34 + 2 * 24)
    assert row.bytes is not None
    assert kv_bytes <= row.bytes
    assert measuring.sets(kv_bytes) == max(4, -(-ROTATION * L2_BYTES // kv_bytes))


def test_states_rotate_over_four_times_the_l2(measuring: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of memory: a scan in place moves each of them twice."""
    measuring.rotation = ROTATION * 16 * L2_BYTES
    found: list[int] = []

    class Weighed(Workload):
        def run(self, *args: Any, **options: Any) -> None:
            layers = [layer for cache in self.caches for layer in filter(None, cache.recur)]
            found.append(sum(layer.ssm_state.nbytes for layer in layers))
            super().run(*args, **options)

    monkeypatch.setattr(bench_cases, "Workload", Weighed)
    sizes = replace(TINY, most_layers=1024)
    assert [*bench_cases.scans(measuring, sizes), *bench_cases.recurs(measuring, sizes)]
    assert min(found) >= measuring.rotation


@pytest.mark.parametrize("op", STEP_OPS)
def test_measuring_an_operation_leaves_the_clock_and_asks_every_layer(
    op: str, measuring: Bench, standin: StandIn
) -> None:
    with Workload(measuring, MODEL, tokens=40, fill=True) as work:
        work.place(39, ahead=int(op == "attend"))
        work.op_seconds(op)
        assert [(cache.pos, cache.step_rows) for cache in work.caches] == [(39, 0)]
        standin.clear_trace()
        work.op_seconds(op)
        graph = [call.kernel for call in standin.calls("node")]
        named = [kernel for kernel in graph if kernel.startswith(op)]
        launches = UNMEASURED + 2
        calls = launches * len(work.layers(op))
        assert len(named) in ((calls, 2 * calls) if op == "attend" else (calls,))  # attend may combine in a second
        ends = [kernel for kernel in graph if kernel == "commit_counters"]
        assert len(ends) == (0 if op in REPEATABLE else launches)
    assert measuring.faults == []


def test_many_rows_are_other_rows_at_each_call(measuring: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    for rows, kept in ((8, 2), (4096, 4)):
        measuring.numbers.close()
        measuring.numbers = measuring.e.zeros(4 * 32 * rows)
        with Workload(measuring, attention_model(2, 1, 1, 32), tokens=rows, rows=rows) as work:
            monkeypatch.setattr(ops, "append_kv", lambda e, cache, il, k, v: seen.extend((k.ptr, v.ptr)))
            call = work.calls("append_kv", rows)
            call(0)
            call(1)
            assert len(set(seen)) == kept
            seen.clear()
            monkeypatch.undo()


def test_what_the_error_records_say_is_a_fault_of_the_run(measuring: Bench) -> None:
    measuring.numbers.copy_from(np.full(measuring.numbers.len, np.nan, np.float32))
    with Workload(measuring, attention_model(1, 1, 1, 32), tokens=4) as work:
        work.op_seconds("append_kv")
    assert len(measuring.faults) == 1
    assert "NONFINITE" in measuring.faults[0]


def test_a_watched_device_does_the_same_and_is_let_go(cuda: Any) -> None:
    with cuda.uninit(4) as a, cuda.zeros(4) as b, watched(cuda) as done:
        cuda.copy_bytes(a.ptr, b.ptr, 16)
        assert a.to_numpy().tolist() == [0, 0, 0, 0]
    assert done == [("copy_bytes", a._ptr, b._ptr, 16)]
    assert not {"launch", "copy_bytes", "clear_bytes", "copy_many"} & set(vars(cuda))


def test_what_an_operation_launches_is_packed_also_where_it_is_known_already(measuring: Bench) -> None:
    kernels = {"attend": ["attend", "attend_combine"], "recur_step": ["recur_step"]}
    with Workload(measuring, MODEL, tokens=40) as work:
        for op in bench_host.HOST_OPS:
            work.place(39, ahead=int(op == "attend"))
            work.host_seconds(op)
            packed = packed_launches(work, op)[0]
            assert [launch.name.rstrip("_0123456789") for launch in packed] == kernels.get(op, [op])
            for launch in packed:
                launch()


def test_the_calls_from_c_are_those_of_the_library(result: dict[str, Any]) -> None:
    if c_library_missing():
        pytest.skip(c_library_missing())
    names = {row.name for row in rows_of(result)}
    for op in bench_host.HOST_OPS:
        from_c = {f"{op}, from C", f"{op}, raw launches from C", f"{op}, raw Ex launches from C"}
        assert from_c | {f"{op}, C library from Python"} <= names


# Compiling.


def test_a_cold_compile_is_timed_once_and_leaves_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty cache the compile that is needed anyway is the cold one; else one goes to a folder apart."""
    folders: list[str] = []

    def compile_all(archs: list[str]) -> dict[Any, Any]:
        folder = nvrtc.cache_dir()
        assert folder is not None
        folder.mkdir(exist_ok=True)
        folders.append(str(folder))
        for source in nvrtc.sources():
            (folder / f"{nvrtc.cache_key(source, archs[0])}.cubin").touch()
        return {}

    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_all", compile_all)
    row = bench_host.compile_kernels("sm_90", anew=True)
    assert folders == [str(tmp_path)]
    assert row is not None
    assert row.count == len(nvrtc.sources())
    assert bench_host.compile_kernels("sm_90", anew=False) is None
    folders.clear()
    assert bench_host.compile_kernels("sm_90", anew=True) is not None
    assert folders[0] == str(tmp_path)
    assert folders[1] != str(tmp_path)
    assert os.environ["MEMRA_CACHE_DIR"] == str(tmp_path)
    monkeypatch.delenv("MEMRA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bench_host.compile_kernels("sm_90", anew=False) is not None  # another folder, and nothing in it
    assert bench_host.compile_kernels("sm_90", anew=True) is not None
    assert "MEMRA_CACHE_DIR" not in os.environ


# Imports.


def test_an_import_is_timed_as_it_is_where_python_keeps_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = "sys.modules['memra_driver.errors'].__file__"
    is_kept = f"import sys, importlib.util as u, os.path; assert os.path.isfile(u.cache_from_source({module}))"
    assert bench_host.import_seconds({"errors": ("import memra_driver.errors", is_kept)}, starts=2)["errors"] > 0
