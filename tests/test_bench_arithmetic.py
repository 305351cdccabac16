"""What the bench computes from what it measured: bytes, shares, verdicts, what moved, tables. No device."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import caches
import pytest

from memra_driver import bench
from memra_driver.batch import CacheBatch
from memra_driver.bench import report as report
from memra_driver.bench.rows import FULL, GROUPS, QUICK, Row
from memra_driver.bench.targets import TARGETS, Target, judged
from memra_driver.cache import Cache
from memra_driver.errors import ConfigError
from memra_driver.kvdev import HostDev
from memra_driver.op_bytes import kept_bytes, op_bytes
from memra_driver.plan import CacheOptions

TOKEN = 2 * 2 * 34 + 2 * 2 * 24  # K and V of a token: 2 heads of 64, q8_0 and q5_1
CHANNELS, TAPS, VALUES, STATE = 128, 4, 2, 32


def rows_and_rates() -> dict[str, Any]:
    """A result of two rows, without a run."""
    rows = [
        Row("scan", "gdn_scan 32 heads B=1 T=1", bytes=4_000_000, seconds=2e-6, copy_seconds=1e-6,
            ceiling_seconds=1e-6),
        Row("attend", "attend 16/2x256 q8_0+q5_1 T=1 at 1024", bytes=900, seconds=4e-6, host_seconds=1e-5,
            ceiling="read", ceiling_seconds=1e-6),
        Row("attend", FULL.attention[0].peer(1024), who="torch", bytes=2000, seconds=8e-6, ceiling="read"),
        Row("host", "append_kv, eager", host_seconds=2e-5),
    ]  # fmt: skip
    return {
        "schema": 1, "date": "2026-11-30", "device": "GPU", "driver": "13.0", "nvrtc": "13.0", "commit": None,
        "kernel_sources": "ab" * 32, "sizes": "full", "groups": list(GROUPS), "ceilings": {"copy": 4e12, "read": None},
        "empty_node_seconds": 1e-6, "peers": {"torch": "2.11", "cupy": None}, "faults": [],
        "rows": [row.as_json() for row in rows], "targets": judged(rows, GROUPS),
    }  # fmt: skip


# Bytes.


@pytest.fixture
def cache() -> Any:
    with Cache.new(HostDev(), caches.tiny(), 16, options=CacheOptions(round_width=4)) as made:
        made.pos = 5
        yield made


def test_attention_moves_its_rows_and_the_keys_that_are_seen(cache: Cache) -> None:
    assert op_bytes(cache, 3, 2) == {
        "append_kv": 2 * (2 * 4 * 128 + TOKEN),
        "attend": (5 + 2) * TOKEN + 2 * 2 * 2 * 64 * 4,  # q and out of two rows and heads
    }


def test_recurrent_layers_move_ring_and_state_twice(cache: Cache) -> None:
    ring, state = 4 * CHANNELS * (TAPS - 1), 4 * VALUES * STATE * STATE
    x, vector, gate = 2 * 4 * CHANNELS, 2 * 4 * VALUES * STATE, 2 * 4 * VALUES
    weights, constants = 4 * CHANNELS * TAPS, 2 * 4 * VALUES
    moved = op_bytes(cache, 0, 2)
    assert moved == {
        "conv_update": 2 * x + weights + 2 * ring,
        "gdn_prep": x + 3 * vector + 4 * gate + constants,
        "gdn_scan": 2 * state + 4 * vector + 2 * gate,
        "recur_step": x + 2 * ring + weights + 2 * gate + constants + 2 * state + vector,
    }
    in_round = op_bytes(cache, 0, 2, in_round=True)
    assert in_round["conv_update"] - moved["conv_update"] == x - ring  # the tape instead of the new ring
    assert in_round["gdn_scan"] - moved["gdn_scan"] == 3 * vector + 2 * gate


def test_a_window_hides_keys_and_a_borrower_appends_nothing() -> None:
    with Cache.new(HostDev(), caches.gemma(shared=2), 32) as cache:
        cache.pos = 20
        windowed = op_bytes(cache, 0, 1)
        layer = cache.kv_layer(0)
        heads = cache.cfg.heads(0)
        token = layer.k_tok_bytes + layer.v_tok_bytes
        assert windowed["attend"] == 8 * token + 4 * heads * (layer.head_dim_k + layer.head_dim_v)
        assert "append_kv" not in op_bytes(cache, 5, 1)
        assert "attend" in op_bytes(cache, 5, 1)


def test_a_batch_moves_what_its_sequences_move() -> None:
    e = HostDev()
    with Cache.new(e, caches.tiny(), 16) as a, Cache.new(e, caches.tiny(), 16) as b, CacheBatch([a, b]) as batch:
        a.pos, b.pos = 3, 9
        for il, op in ((3, "append_kv"), (3, "attend"), (0, "gdn_scan")):
            assert op_bytes(batch, il, 1)[op] == op_bytes(a, il, 1)[op] + op_bytes(b, il, 1)[op]
        assert kept_bytes(batch, 1) == kept_bytes(a, 1) + kept_bytes(b, 1)


def test_a_step_moves_seen_and_new_rows_and_each_state_twice(cache: Cache) -> None:
    states = 6 * (4 * CHANNELS * (TAPS - 1) + 4 * VALUES * STATE * STATE)
    assert kept_bytes(cache, 1) == 2 * states + 2 * (6 + 1) * TOKEN
    assert states == cache.plan.per_device[0].snapshot[1] - cache.plan.per_device[0].snapshot[0]


# Verdicts.

SPEED = Target("scan", "a", ("row", "seconds"), ("row", "copy_seconds"), 1.5, 1.2)
SHARE = Target("scan", "b", ("row", "copy_seconds"), ("row", "seconds"), 80, 90, unit="%", at_least=True)
TIME = Target("scan", "c", ("row", "seconds"), None, 2.0, unit="us")


@pytest.mark.parametrize(
    ("target", "seconds", "value", "verdict"),
    [
        (SPEED, 1.2e-6, 1.2, "aim"), (SPEED, 1.5e-6, 1.5, "pass"), (SPEED, 1.6e-6, 1.6, "miss"),
        (SHARE, 1e-6, 100, "aim"), (SHARE, 1.25e-6, 80, "pass"), (SHARE, 2e-6, 50, "miss"),
        (TIME, 2e-6, 2, "pass"), (TIME, 3e-6, 3, "miss"),
    ],
)  # fmt: skip
def test_a_target_is_judged_by_its_limits(target: Target, seconds: float, value: float, verdict: str) -> None:
    rows = {"row": Row("scan", "row", seconds=seconds, copy_seconds=1e-6)}
    assert target.value(rows) == pytest.approx(value)
    assert target.verdict(round(target.value(rows) or 0, 9)) == verdict


@pytest.mark.parametrize("row", [None, Row("scan", "row"), Row("scan", "row", seconds=1e-6)])
def test_what_was_not_measured_is_neither_met_nor_missed(row: Row | None) -> None:
    rows = {} if row is None else {"row": row}
    assert SPEED.value(rows) is None
    assert SPEED.verdict(None) == "not measured"


def test_a_count_of_nothing_meets_a_limit_of_nothing() -> None:
    (begins,) = (target for target in TARGETS if target.figure == ("round begins", "count"))
    assert begins.verdict(begins.value({"round begins": Row("snapshot", "round begins", count=0)})) == "pass"
    assert begins.verdict(begins.value({"round begins": Row("snapshot", "round begins", count=1)})) == "miss"


def test_targets_have_lines_of_their_own_and_aims_beyond_their_limits() -> None:
    assert len({target.line for target in TARGETS}) == len(TARGETS)
    assert {target.group for target in TARGETS} == set(GROUPS)
    for target in TARGETS:
        if target.aim is not None:
            assert (target.aim > target.limit) is target.at_least, target.line


def test_only_targets_of_the_groups_are_judged() -> None:
    assert {each["group"] for each in judged([], ["append", "scan"])} == {"append", "scan"}


def test_a_summary_counts_what_is_met() -> None:
    verdicts = ["pass", "aim", "miss", "not measured"]
    assert report.summary([{"verdict": each} for each in verdicts]) == "2 of 3 targets met, 1 not measured"


def test_shares_are_of_the_ceiling() -> None:
    assert Row("scan", "x", seconds=2.0, ceiling_seconds=1.0).share == 0.5
    assert Row("scan", "x", seconds=2.0).share is None


# Two results.


def moved(**changes: Any) -> dict[str, Any]:
    """rows_and_rates with fields of its first row replaced."""
    found = copy.deepcopy(rows_and_rates())
    found["rows"][0] |= changes
    found["targets"] = judged(report.rows_of(found), GROUPS)
    return found


def test_equal_results_have_nothing_to_say() -> None:
    assert report.compared(rows_and_rates(), rows_and_rates()) == ["nothing moved by more than 10%"]
    assert report.compared(rows_and_rates(), moved(seconds=2.19e-6)) == ["nothing moved by more than 10%"]


def test_what_moved_by_more_than_a_tenth_is_said_in_words() -> None:
    name = "gdn_scan 32 heads B=1 T=1"
    assert report.compared(rows_and_rates(), moved(seconds=1e-6)) == [f"{name}: 50% faster, 2 us -> 1 us"]
    slower = report.compared(rows_and_rates(), moved(seconds=3e-6))
    assert slower == [f"{name}: 50% slower, 2 us -> 3 us", f"target {name}: pass -> miss"]


def test_rows_of_one_result_only_and_other_machines_are_named() -> None:
    other = moved(name="something else") | {"device": "another GPU"}
    lines = report.compared(rows_and_rates(), other)
    assert "not the same device: GPU, then another GPU" in lines
    assert "something else: only in the second" in lines
    assert "gdn_scan 32 heads B=1 T=1: only in the first" in lines


def test_times_of_the_host_are_compared_too() -> None:
    other = copy.deepcopy(rows_and_rates())
    other["rows"][3]["host_seconds"] = 1e-5
    assert report.compared(rows_and_rates(), other) == ["append_kv, eager: 50% faster on the host, 20 us -> 10 us"]


def test_ceilings_counts_and_what_is_no_longer_measured_are_compared_too() -> None:
    other = copy.deepcopy(rows_and_rates())
    other["ceilings"]["copy"] /= 2
    other["rows"][0]["seconds"] = None
    other["rows"][3]["count"] = 9
    lines = report.compared(rows_and_rates(), other)
    assert "ceiling of copy: 4.00 TB/s -> 2.00 TB/s" in lines
    assert f"{other['rows'][0]['name']}: measured in the first alone" in lines
    assert f"{other['rows'][3]['name']}: None -> 9 calls" in lines


def test_copies_bytes_faults_and_limits_are_compared_too() -> None:
    other = copy.deepcopy(rows_and_rates())
    other["rows"][0] |= {"copy_seconds": 3e-6, "bytes": 1}
    other["faults"] = ["a NaN"]
    limit = other["targets"][0]
    gone = other["targets"].pop(1)
    limit["limit"] *= 2
    lines = report.compared(rows_and_rates(), other)
    name = other["rows"][0]["name"]
    assert f"{name}: 200% slower for a copy, 1 us -> 3 us" in lines
    assert f"{name}: 4000000 -> 1 bytes" in lines
    assert "faults: [], then ['a NaN']" in lines
    assert f"target {limit['line']}: limit {limit['limit'] / 2} -> {limit['limit']}" in lines
    assert f"target {gone['line']}: only in the first" in lines
    assert f"target {gone['line']}: only in the second" in report.compared(other, rows_and_rates())


# What is shown.


def test_seconds_are_told_in_the_unit_that_reads_best() -> None:
    told = [report.seconds_text(each) for each in (None, 1.234e-6, 123.4e-6, 1.5e-3, 2.5)]
    assert told == ["", "1.23 us", "123 us", "1.5 ms", "2.5 s"]


def test_tables_have_a_cell_for_every_column() -> None:
    result = rows_and_rates()
    for head, lines in (report.measured(report.rows_of(result)), report.verdicts(result["targets"])):
        assert all(len(line) == len(head) for line in lines)
        assert lines
    (line,) = report.measured(report.rows_of(result)[:1])[1]
    assert line == ["gdn_scan 32 heads B=1 T=1", "2 us", "4,000,000", "2.00", "50% (copy)", "50%", "", ""]


def test_the_heading_names_machine_ceilings_peers_and_faults() -> None:
    text = "\n".join(report.heading(rows_and_rates() | {"faults": ["a NaN"]}))
    for part in ("GPU, driver 13.0, NVRTC 13.0", "copy 4.00 TB/s", "torch 2.11, cupy absent", "FAULTS: a NaN"):
        assert part in text


def test_the_markdown_has_a_line_for_every_row_with_a_time() -> None:
    lines = report.markdown(rows_and_rates()).splitlines()
    for head, line in (
        ("| operation | B=1 |", "| gdn_scan 32 heads T=1 | 2 us (50%) |"),
        ("| operation | 1024 |", "| attend 16/2x256 q8_0+q5_1 T=1 | 4 us (25%) |"),
        ("| operation | 1024 |", "| torch SDPA bf16 16/2x256 | 8 us |"),
        ("| operation | eager |", "| append_kv | 20 us |"),
    ):
        assert head in lines
        assert line in lines
    assert f"* {report.summary(rows_and_rates()['targets'])}" in lines


def test_the_markdown_names_what_is_missed() -> None:
    (line,) = [each["line"] for each in moved(seconds=3e-6)["targets"] if each["verdict"] == "miss"]
    assert f"| {line} | 3.00 us | <= 2.90 us |" in report.markdown(moved(seconds=3e-6)).splitlines()
    assert line not in report.markdown(rows_and_rates())


def test_the_markdown_of_what_makes_no_columns_is_a_list() -> None:
    times = {"seconds": 2e-6, "copy_seconds": 1e-6, "host_seconds": 3e-6, "ceiling_seconds": 1e-6}
    row = Row("append", "append_kv T=1", bytes=5, **times)
    text = report.markdown(rows_and_rates() | {"rows": [row.as_json()]})
    assert "| append_kv T=1 | 2 us | 50% | 50% | 3 us |" in text.splitlines()


def test_what_enqueues_nothing_is_told_in_words() -> None:
    row = Row("snapshot", "round begins", count=0)
    text = report.markdown(rows_and_rates() | {"rows": [row.as_json()]})
    assert "| round begins | no device work |  |  |  |" in text.splitlines()


def test_the_step_is_told_with_its_model_and_what_its_calls_take_the_host() -> None:
    layers = {"append_kv": 10, "attend": 10, "recur_step": 30}
    rows = [Row("step", "decode step B=1: all", seconds=1e-4)]
    rows += [Row("host", f"{op}, {who}", host_seconds=1e-6) for op in layers for who in report.STEP_CALLERS]
    lines = report.markdown(rows_and_rates() | {"rows": [row.as_json() for row in rows]}).splitlines()
    (title,) = (line for line in lines if line.startswith("One decode step"))
    assert "qwen3.6-35b-a3b at 8192 tokens" in title
    assert "over 10 layers that attend and 30 recurrent ones; host: of one call" in title
    told = "50 us from Python, 50 us as bare launches from Python, 50 us from C"
    assert f"The calls of the step of B=1, but for its end, take the host {told}." in lines
    assert report.step_on_the_host(rows[:-1]) == ""


def test_the_picture_draws_operations_by_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = rows_and_rates()
    result["rows"] += [row | {"name": row["name"] + "0", "bytes": 7} for row in result["rows"] if row["bytes"] == 900]
    lines = report.series(report.rows_of(result))
    assert lines == [("attend 16/2x256 q8_0+q5_1 T=1", "-", [(7, 25.0), (900, 25.0)])]
    report.picture(tmp_path / "new" / "x.png", result)
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG")


def test_no_two_lines_of_the_picture_look_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = [
        Row("attend", f"attend {name} at {tokens}", bytes=tokens, seconds=2.0, ceiling_seconds=1.0)
        for name in range(50)
        for tokens in (1, 2)
    ]
    seen: list[Any] = []
    monkeypatch.setattr(pyplot, "close", lambda figure: seen.extend(figure.axes[0].lines))
    report.picture(tmp_path / "x.png", rows_and_rates() | {"rows": [row.as_json() for row in rows]})
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in seen}) == len(seen) == 50


def test_results_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.json"
    report.write(path, rows_and_rates())
    assert report.read(path) == json.loads(path.read_text()) == rows_and_rates()


OTHERS = [None, "", "[]", "{}", '{"rows": [{"nothing": 1}]}', '{"rows": []}']
OTHERS += [json.dumps(rows_and_rates() | {"targets": targets}) for targets in ([{}], ["none"])]


@pytest.mark.parametrize("text", OTHERS)
def test_other_files_are_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        report.read(path)


# What is asked for.


def test_groups_run_in_their_order_whatever_the_order_of_the_question() -> None:
    assert bench.chosen([]) == GROUPS
    assert bench.chosen(["scan,append", "load"]) == ("append", "scan", "load")
    assert set(bench.CASES) == set(GROUPS)
    with pytest.raises(ConfigError, match=r"--what scans: there are snapshot, append"):
        bench.chosen(["scans"])


def test_a_quick_run_is_part_of_a_full_one() -> None:
    for name in ("contexts", "other_contexts", "batches", "value_heads"):
        assert set(getattr(QUICK, name)) < set(getattr(FULL, name)) or getattr(QUICK, name) == getattr(FULL, name)
    assert replace(QUICK, name="full", replays=FULL.replays).attention == FULL.attention


# What is asked of the H200, line by line.


def held(row: str, field: str = "seconds") -> list[tuple[str | None, float]]:
    """(row that it stands beside, limit) of each target of this figure."""
    return [(target.beside and target.beside[0], target.limit) for target in TARGETS if target.figure == (row, field)]


@pytest.mark.parametrize("name", ["snapshot_into", "rollback"])
@pytest.mark.parametrize("parity", ["even", "odd"])
def test_the_host_of_a_snapshot_is_held_to_a_raw_copy_call_at_either_parity(name: str, parity: str) -> None:
    assert held(f"{name}, {parity}", "host_seconds") == [(f"raw copy call, {parity}", 1.5)]


@pytest.mark.parametrize("tokens", FULL.contexts)
def test_other_formats_are_held_to_the_first_at_every_length(tokens: int) -> None:
    (shape,) = (shape for shape in FULL.attention if shape.others)
    for pair in (("fp8", "fp8"), ("q8_0", "q4_0"), ("q8_0", "fp8")):
        assert held(shape.name(1, tokens, pair)) == [(shape.name(1, tokens), 1.10)]


def test_a_birth_is_held_to_its_limit_as_it_is_by_default() -> None:
    assert [target.figure[0] for target in TARGETS if "Cache.new" in target.line] == ["Cache.new at 8192"]
