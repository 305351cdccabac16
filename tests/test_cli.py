"""The command line, and that its main job can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import gemma

pytest.importorskip("typer")
pytest.importorskip("rich")

from memra_driver import boundary, cli, kvdev, ops, session
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig
from memra_driver.memory import HostMemory
from memra_driver.plan import CachePlan
from memra_driver.pp import balance
from memra_driver.round import Round
from memra_driver.session import times as session_times

SMALL = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_run_ends_with_every_round_bit_identical(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "run", model, "--device", "host", "--rounds", "12", "--ctx", "128")
    assert status == 0
    assert text.splitlines()[-1] == "12/12 rounds bit-identical"
    for name in ("append_kv", "attend", "conv_update", "gdn_prep", "gdn_scan", "snapshot_into", "rollback"):
        assert name in text


def test_run_as_json_says_the_same(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "run", model, "--device", "host", "--json", "--rounds", "12", "--ctx", "128")
    summary = json.loads(text)
    assert status == 0
    assert (summary["identical"], summary["rounds"], summary["fault"]) == (12, 12, None)
    assert {each["accepted"] for each in summary["history"][1:]} >= {0, 5}, "the ends of the range are among the rounds"
    counts = {each["operation"]: each["count"] for each in summary["operations"]}
    assert counts["snapshot_into"] == counts["rollback"] == 12


def test_the_same_seed_gives_the_same_digests(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("run", model, "--device", "host", "--json", "--rounds", "3", "--seed")
    first, again, other = (json.loads(run(capsys, *argv, seed)[1])["history"] for seed in ("7", "7", "8"))
    assert first == again
    assert first[0]["digest"] != other[0]["digest"]


WAYS = [(), ("--method", "round"), ("--graph",), ("--method", "round", "--graph")]


def digests(capsys: pytest.CaptureFixture[str], *argv: str) -> list[tuple[int, int, int, str]]:
    """(sequence, accepted, pos, digest) of each round of a run in which all are bit-identical."""
    status, text, errors = run(capsys, *argv, "--json", "--ctx", "128")
    assert status == 0, errors
    return [(r["sequence"], r["accepted"], r["pos"], r["digest"]) for r in json.loads(text)["history"]]


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_every_way_of_running_a_round_gives_the_same_digests(
    device: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cuda":
        request.getfixturevalue("standin")
        monkeypatch.setattr(session_times, "AHEAD_BYTES", 1 << 12)
        monkeypatch.setattr(session_times, "COPY_BYTES", {True: 1 << 16})
    argv = ("run", model, "--device", device, "--prompt", "18", "--rounds", "5")
    plain, *others = (digests(capsys, *argv, *way) for way in WAYS)
    assert all(other == plain for other in others)


STAGES = {
    "host": ("host,host", "host,host,host"),
    "cuda": ("cuda:0,cuda:1", "cuda:1,cuda:0,cuda,cuda:1"),
}


@pytest.mark.parametrize(("way", "peers"), [((), True), (("--method", "round"), False)], ids=["rollback", "round"])
@pytest.mark.parametrize("kind", STAGES)
def test_any_stages_give_the_digests_of_one_device(
    kind: str,
    way: tuple[str, ...],
    peers: bool,
    model: str,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "cuda":
        request.getfixturevalue("standin").set_peers(peers)
        monkeypatch.setattr(session_times, "AHEAD_BYTES", 1 << 12)
        monkeypatch.setattr(session_times, "COPY_BYTES", {True: 1 << 16})
    argv = ("run", model, "--prompt", "17", "--rounds", "2", *way)
    expected = digests(capsys, *argv, "--device", kind)
    for stages in STAGES[kind]:
        assert digests(capsys, *argv, "--stages", stages) == expected
    assert digests(capsys, *argv, "--stages", STAGES[kind][0], "--fence", "1") == expected


def test_stages_on_one_gpu_may_be_recorded(
    model: str, standin: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_times, "AHEAD_BYTES", 1 << 12)
    monkeypatch.setattr(session_times, "COPY_BYTES", {True: 1 << 16})
    argv = ("run", model, "--prompt", "18", "--rounds", "3")
    expected = digests(capsys, *argv, "--device", "cuda")
    for way in (("--graph",), ("--method", "round", "--graph")):
        assert digests(capsys, *argv, *way, "--stages", "cuda:0,cuda:0,cuda:0") == expected


def test_what_crosses_to_the_next_stage_is_looked_at(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = boundary.Boundary.send

    def stale(self: boundary.Boundary, rows: Any) -> None:
        send(self, rows)
        if rows.len > self.hidden:  # of steps of more than one row
            HostMemory.array(self._slots.ptr, self._slots.len, np.uint32)[:] ^= 1 << 22  # whatever stands there

    monkeypatch.setattr(boundary.Boundary, "send", stale)
    status, text, _ = run(capsys, "run", model, "--stages", "host,host", "--ctx", "128")
    assert status == 1
    assert "outputs at position" in text


def test_the_operations_of_a_pipeline_count_what_crosses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "run", model, "--stages", "host,host,host", "--rounds", "2", "--json")[1]
    found = json.loads(text)
    (crossed,) = [each for each in found["operations"] if each["operation"] == "boundary"]
    assert (crossed["count"] > 0, crossed["median_bytes"] % (2 * 4 * 256)) == (True, 0)
    assert (found["device"], len(found["fence"])) == ("host, host, host", 4)


def test_a_sequence_is_the_same_alone_and_in_a_batch_whose_prompts_differ(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("run", model, "--device", "host", "--prompt", "3", "--batch")
    alone, three, graph = (digests(capsys, *argv, *more) for more in (("1",), ("3",), ("3", "--graph")))
    assert three == graph
    assert [line for line in three if line[0] == 0] == alone
    assert [pos for _, _, pos, _ in three[:3]] == [3, 4, 5]


def test_a_run_without_attention_launches_none_and_keeps_the_same_state(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("run", model, "--device", "host")
    with_attention = digests(capsys, *argv)
    monkeypatch.setattr(ops, "attend", None)
    assert digests(capsys, *argv, "--no-attend") == with_attention


def test_layers_that_borrow_k_and_v_attend_as_well() -> None:
    cfg = gemma(shared=2)
    assert cfg.gemma4 is not None
    cfg = replace(cfg, n_head=8, gemma4=replace(cfg.gemma4, key_length_swa=96))
    made = session.Session(kvdev.HostDev(), cfg, 64, prompt=20, rounds=3, draft=2, seed=0)
    assert [each.fault for each in made.run()] == [""] * 4
    asked = {name: len(seconds) for name, seconds in made.times.seconds.items()}
    made.close()
    assert asked["attend"] * 4 == asked["append_kv"] * 6  # six layers, two of which own nothing


def test_the_options_of_a_run_stand_in_its_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--rounds", "1", "--graph", "--no-attend", "--method", "round", "--device", "host", "--json")
    options = json.loads(run(capsys, "run", model, *argv)[1])["options"]
    assert options == {
        "prompt": 32, "rounds": 1, "draft": 4, "seed": 0, "attend": False, "method": "round", "batch": 1, "graph": True,
    }  # fmt: skip


def leave_out_the_replay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session.Session, "replay", lambda self, accepted: [{} for _ in accepted])


def leave_out_the_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Round, "commit", lambda self, accept_len: self.reject())


def leave_out_the_last_row_of_the_replay(patch: pytest.MonkeyPatch) -> None:
    """It is run, and nobody says what it put out."""
    replay = session.Session.replay

    def short(self: session.Session, accepted: list[int]) -> Any:
        return [dict(list(rows.items())[:-1]) for rows in replay(self, accepted)]

    patch.setattr(session.Session, "replay", short)


def change_one_row_of_attend(patch: pytest.MonkeyPatch) -> None:
    launch = kvdev.HostDev._launch

    def wrong(self: Any, name: str, *args: Any) -> None:
        launch(self, name, *args)
        if name == "attend_combine" and args[4] > 1:
            last = args[1].ptr + args[1].nbytes - 4
            value = HostMemory.array(last, 1, np.float32)
            value[0] = np.nextafter(value[0], np.float32(np.inf))

    patch.setattr(kvdev.HostDev, "_launch", wrong)


def leave_out_one_row(patch: pytest.MonkeyPatch) -> None:
    launch = kvdev.HostDev.launch

    def short(self: Any, name: str, *args: Any) -> None:
        if name == "append_kv" and args[7] > 1:
            args = (*args[:7], args[7] - 1, *args[8:])
        launch(self, name, *args)

    patch.setattr(kvdev.HostDev, "launch", short)


def leave_out_the_restore_of(plane: str) -> Any:
    def break_it(patch: pytest.MonkeyPatch) -> None:
        rollback = Cache.rollback

        def forgetful(self: Cache, e: Any, snap: Any, accept_len: int) -> None:
            kept = [None if layer is None else getattr(layer, plane).to_numpy() for layer in self.recur]
            rollback(self, e, snap, accept_len)
            for layer, bytes_ in zip(self.recur, kept, strict=True):
                if layer is not None:
                    getattr(layer, plane).copy_from(bytes_)

        patch.setattr(Cache, "rollback", forgetful)

    return break_it


@pytest.mark.parametrize(
    ("sabotage", "options"),
    [
        (leave_out_the_replay, ()),
        (leave_out_the_replay, ("--batch", "2")),
        *((leave_out_the_last_row_of_the_replay, options) for options in ((), ("--batch", "2"))),
        (leave_out_one_row, ()),
        (leave_out_one_row, ("--graph",)),
        (leave_out_the_restore_of("conv_state"), ()),
        (leave_out_the_restore_of("ssm_state"), ()),
        (leave_out_the_commit, ("--method", "round")),
        *((change_one_row_of_attend, options) for options in WAYS),
    ],
)
def test_run_fails_when_something_is_left_out(
    sabotage: Any,
    options: tuple[str, ...],
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    status, text, _ = run(capsys, "run", model, "--device", "host", "--rounds", "12", "--ctx", "128", *options)
    assert status == 1
    assert "differ" in text
    assert "12/12" not in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("run", "--ctx", "10", "--device", "host"), "max_ctx is 10"),
        (("run", "--batch", "2", "--method", "round", "--device", "host"), "a round is of one sequence"),
        (("run", "--device", "tpu"), "it takes auto, cuda:N or host"),
        (("run", "--stages", "host,tpu"), "it takes auto, cuda:N or host"),
        (("run", "--stages", "host,host", "--fence", "40"), "fence [0, 40, 33]"),
        (("run", "--stages", "host,host", "--fence", "1,2"), "2 stages take auto or 1 layer number"),
        (("run", "--stages", "host,host", "--fence", "x"), "2 stages take auto or 1 layer number"),
        (("run", "--stages", "host,host", "--graph"), "graph and batch are for stages on one device"),
        (("run", "--stages", "host,host", "--batch", "2"), "graph and batch are for stages on one device"),
        (("plan", "qwen3.5-9b", "--ctx", "8", "--stages", "40"), "a trunk of 32 layers has 1 .. 32"),
        (("plan", "qwen3.5-9b", "--ctx", "8", "--stages", "3", "--fence", "9,4"), "must be strictly increasing"),
        (("plan", "qwen3.5-9x", "--ctx", "8"), "qwen3.5-9b"),
        (("plan", "qwen3.5-9b", "--ctx", "-1"), "max_ctx is -1"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, errors = run(capsys, *argv)
    assert status == 2
    assert says in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors


def test_plan_prints_the_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "plan", "qwen3.5-9b", "--ctx", "8192", "--json")
    plan = json.loads(text)
    assert status == 0
    assert plan["totals"]["kv"] == 8 * 8192 * 1856
    assert plan["first_use"]["snapshot"] == 25 * 2195456
    assert run(capsys, "plan", "qwen3.5-9b", "--ctx", "8192")[1].count("ssm_state") == 2


def test_plan_prices_every_device_of_a_pipeline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("plan", "qwen3.6-27b", "--ctx", "32768", "--stages")
    for name in ("MEMRA_PP_STAGES", "MEMRA_PP_SPLIT", "MEMRA_PP_SPLITS"):
        monkeypatch.delenv(name, raising=False)
    cfg = ModelConfig.from_preset("qwen3.6-27b")
    found = json.loads(run(capsys, *argv, "4", "--json")[1])
    expected = CachePlan(cfg, 32768, fence=balance(cfg, 32768, 4))
    assert (found["fence"], len(found["per_device"])) == (list(expected.fence), 4)
    text = run(capsys, *argv, "4")[1]
    for device, stated in zip(expected.per_device, found["per_device"], strict=True):
        sizes = device.arena_bytes, device.snapshot_bytes, expected.attend_scratch_bytes(device.device)
        assert (stated["arena_bytes"], stated["snapshot_bytes"], stated["attend_scratch_bytes"]) == sizes
        layers = f"{expected.fence[device.device]} .. {expected.fence[device.device + 1] - 1}"
        (line,) = [line for line in text.splitlines() if layers in line]
        assert all(f"{size:,}" in line for size in sizes)
    assert json.loads(run(capsys, *argv, "2", "--fence", "5", "--json")[1])["fence"] == [0, 5, 65]
    monkeypatch.setenv("MEMRA_PP_STAGES", "3")
    monkeypatch.setenv("MEMRA_PP_SPLITS", "7,9")
    assert json.loads(run(capsys, *argv, "3", "--json")[1])["fence"] == [0, 7, 9, 64]
    assert json.loads(run(capsys, *argv, "4", "--json")[1])["fence"] == list(expected.fence)


def test_plan_draws_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert run(capsys, "plan", "gemma4-e4b", "--ctx", "4096", "--png", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    status, _, errors = run(capsys, "plan", "gemma4-e4b", "--ctx", "4096", "--png", str(tmp_path / "no" / "x.png"))
    assert status == 2
    assert "x.png" in errors


def test_info_never_fails(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "info", "--json")
    found = json.loads(text)
    assert status == 0
    assert found["kernel_sources"]
    assert isinstance(found["missing"], list)
    assert run(capsys, "info")[0] == 0


def test_info_names_the_c_library_or_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memra_driver import native

    monkeypatch.setattr(native, "library_dir", lambda: tmp_path)
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["library"] is None
    assert [line for line in found["missing"] if "build.py native" in line and line.startswith("libmemra_driver.so")]
    path = tmp_path / "libmemra_driver.so.1"
    path.write_bytes(b"")
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["library"] == str(path)
    assert not [line for line in found["missing"] if "native" in line]


def test_info_says_when_gpu_results_speak_of_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memra_driver import inventory, nvrtc

    results = tmp_path / "tests" / "gpu" / "results"
    results.mkdir(parents=True)
    record = {"device": "NVIDIA X", "date": "2026-01-01", "passed": 9, "failed": 0}
    for name, of in (("same", nvrtc.sources_hash()), ("other", "0" * 64)):
        (results / f"{name}.json").write_text(json.dumps(record | {"kernel_sources": of}))
    (results / "torn.json").write_text("{")
    monkeypatch.setattr(nvrtc, "source_dir", lambda: tmp_path / "cuda_src")
    monkeypatch.setattr(nvrtc, "sources_hash", lambda *_: record_hash)
    record_hash = json.loads((results / "same.json").read_text())["kernel_sources"]
    other, same, torn = inventory._evidence()
    assert "OTHER kernel sources" in other
    assert same.endswith("9 passed, 0 failed")
    assert "unreadable" in torn
