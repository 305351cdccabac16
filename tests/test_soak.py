"""A soak is clean where nothing is wrong, repeats a program by its seed, and finds what is wrong."""

from __future__ import annotations

import json
import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tally
from standin import StandIn
from test_check import with_kernel
from test_seeded_faults import _kept, stage_in_one_buffer

from memra_driver import cli, clock, driver
from memra_driver import soak as soak_module
from memra_driver.cache import Cache
from memra_driver.clock import CacheClock
from memra_driver.device import CudaStream
from memra_driver.errors import MemraError
from memra_driver.kvdev import CudaDev, HostDev
from memra_driver.round import Round
from memra_driver.rules import CacheRules
from memra_driver.snapshot import CacheSnapshot
from memra_driver.soak import IN_TIME, INTERRUPTED, Soak
from memra_driver.soak.look import Difference, first_change, near, same, same_bytes
from memra_driver.soak.program import Part

pytestmark = pytest.mark.standin
Fault = Callable[[pytest.MonkeyPatch], None]
MOST_PROGRAMS = 30
_alive: list[Any] = []


@pytest.fixture
def soaking(standin: StandIn) -> Iterator[Callable[..., Soak]]:
    """soaking(seed): a soak on the stand-in driver. arena: on no devices without one."""
    made: list[Soak] = []

    def make(seed: int = 1, *, arena: bool = False) -> Soak:
        made.append(Soak(lambda wanted: CudaDev(arena=arena or wanted), seed, small=True))
        return made[-1]

    yield make
    with suppress(MemraError):
        for each in made:
            each.close()
    standin.finish()
    while _kept:
        _kept.pop().close()
    _alive.clear()


def finds(soak: Soak, seed: int) -> bool:
    """Whether one of some programs finds something."""
    for number in range(seed, seed + MOST_PROGRAMS):
        found = soak.program(number)
        if found:
            print(f"program {number}: {found[0].line()}")
            return True
    return False


def wrong_after_rollback(m: pytest.MonkeyPatch) -> None:
    right = Cache.rollback

    def rollback(self: Cache, e: Any, snap: Any, accept_len: int) -> None:
        right(self, e, snap, accept_len)
        for layer in filter(None, self.kv):
            layer.len -= accept_len > 2

    m.setattr(Cache, "rollback", rollback)


def unwaited(m: pytest.MonkeyPatch) -> None:
    def read(self: CudaStream, ptr: int, out: Any) -> None:
        _alive.append(out)  # the device may still write it
        self.memcpy_dtoh(out, ptr)

    m.setattr(CudaStream, "read", read)


IN_PYTHON: dict[str, Fault] = {
    "a snapshot is leaked": lambda m: m.setattr(CacheSnapshot, "close", lambda self: _kept.append(self)),
    "a length is wrong after a rollback": wrong_after_rollback,
    "the ring is stale after a partial commit": lambda m: m.setattr(Round, "_rebuild_rings", lambda *args: []),
    "states are not home before a graph": lambda m: m.setattr(clock, "copy_actions", lambda *args: []),
    "a replay may take too many rows": lambda m: m.setattr(CacheRules, "check_replay", lambda *args: None),
    "a snapshot outlives its rows": lambda m: m.setattr(CacheClock, "give_up", lambda *args: None),
}
LATE: dict[str, Fault] = {
    "an event wait is skipped": lambda m: m.setattr(CudaStream, "wait", lambda self, event: None),
    "a staging buffer is used again": stage_in_one_buffer,
    "a wait is missing": unwaited,
    "a free comes too early": lambda m: m.setattr(CudaStream, "_free", lambda self, ptr: driver.mem_free(ptr)),
}
IN_KERNELS = {
    "a bounds check is missing": ("append_kv.cu", "first + p.rows > p.max_ctx) {", "first + p.rows > p.max_ctx + 1) {"),
    "a bit is wrong": ("append_kv.cu", "(e, s.inv, 8.5f", "(e, s.inv, 8.25f"),
    "a ring is not rebuilt": ("conv.cu", "taken > rows", "taken >= rows"),
    "a launch without room is not told": (
        "append_kv.cu",
        "if (leader) memra_report(p.health, MEMRA_FAULT_SLOT_RANGE",
        "if (0) memra_report(p.health, MEMRA_FAULT_SLOT_RANGE",
    ),
}


# Where nothing is wrong.


@pytest.mark.parametrize("seed", [0, 5], ids=["at once", "deferred"])
def test_programs_find_nothing_where_nothing_is_wrong(
    standin: StandIn, soaking: Any, seed: int
) -> None:
    standin.defer(seed)
    soak = soaking(104)
    for number in range(100, 104):
        assert soak.program(number) == []
    assert [each.line() for each in soak.run(1)] == []
    soak.close()
    report = soak.report
    tally.add("soak steps", report.steps)
    assert report.ended == IN_TIME
    assert report.programs > 4
    assert min(report.caches, report.refused) > 8
    assert report.bytes_compared > 10_000 * report.steps
    memory = report.memory
    assert (memory["pool_bytes_after"], memory["free_bytes_after"]) == (
        memory["pool_bytes_before"], memory["free_bytes_before"],
    )  # fmt: skip


def test_a_seed_repeats_a_program_and_another_makes_another(soaking: Any, host: Any) -> None:
    soak = Soak(lambda arena: HostDev(arena=arena), 1, small=True)
    digests = []
    for seed in (3, 4, 3):
        assert soak.program(seed) == []
        digests.append((soak.report.digest, soak.report.steps))
    soak.close()
    assert digests[0][0] == digests[2][0] != digests[1][0]
    assert digests[0][1] == digests[2][1] - digests[1][1]


def test_the_command_reports_in_json_what_it_did_and_found(
    standin: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["check", "--device", "cuda:1", "--soak", "0.02", "--small", "--seed", "7", "--json"]
    assert cli.main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    rates = {"programs_per_second", "steps_per_second", "bytes_compared_per_second"}
    done = {"programs", "steps", "caches", "refused", "bytes_compared", "faults_found", "faults", "seconds"}
    assert told.keys() >= {"device", "kernel_sources", "seed", "ended", "memory", *rates, *done}
    assert (told["device"], told["seed"], told["ended"]) == ("cuda:1 (Stand-in GPU 1)", 7, "in time")
    assert (told["faults_found"], told["faults"]) == (0, [])
    assert told["steps"] == pytest.approx(told["steps_per_second"] * told["seconds"])
    monkeypatch.setattr(Part, "_step", lambda self: same("the weather", "rain", "sun"))
    assert cli.main(["check", "--device", "cuda:1", "--small", "--soak-seed", "9", "--json"]) == 1
    (fault, *_) = json.loads(capsys.readouterr().out)["faults"]
    assert (fault["seed"], fault["step"], fault["what"]) == (9, 1, "the weather: 'rain', not 'sun'")
    assert fault["again"] == "memra-driver check --device cuda:1 --small --soak-seed 9"


def test_what_is_found_is_told_and_the_soak_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, seen = Part._step, []

    def step(self: Part) -> None:
        seen.append(self)
        same("the weather", "rain" if len(seen) == 1 else "sun", "sun")
        right(self)

    monkeypatch.setattr(Part, "_step", step)
    assert cli.main(["check", "--device", "host", "--soak", "0.02", "--small", "--seed", "3"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("FAULT seed 3, part ")
    assert told.count("FAULT") == 1
    assert "again: memra-driver check --device host --small --soak-seed 3\n" in told
    assert len(set(seen)) > 1
    assert " 1 fault found in " in told.splitlines()[-1]


def test_one_program_alone_is_told_with_its_time_and_what_the_end_finds_is_told_too(
    standin: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ["check", "--device", "cuda:0", "--small", "--soak-seed", "3"]
    assert cli.main(alone) == 0
    told = capsys.readouterr().out
    assert told.startswith("1 program, ")
    assert "(0.0 programs, 0 steps, 0.0 MB a second)" not in told
    assert cli.main([*alone, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > 0
    monkeypatch.setattr(Soak, "_memory", staticmethod(lambda context, when: {f"pool_bytes_{when}": len(when)}))
    assert cli.main(alone) == 1
    told = capsys.readouterr().out
    assert "FAULT seed 3, part 0, step 0, the end: the driver's pool says that -1 bytes were never given back\n" in told
    assert " 1 fault found in " in told.splitlines()[-1]


def test_a_difference_is_told_by_its_first_byte_and_token() -> None:
    found, other = np.arange(12, dtype=np.uint8), np.arange(12, dtype=np.uint8)
    other[[6, 11]] += 1
    assert same_bytes("layer 3 k", found, found.tobytes(), 4) == 12
    with pytest.raises(Difference, match=r"^layer 3 k: byte 6, of token 1, is 7, not 6 \(2 of 12 differ\)$"):
        same_bytes("layer 3 k", other, found, 4)
    with pytest.raises(Difference, match=r"^layer 3 k: 11 bytes, not 12$"):
        same_bytes("layer 3 k", found[1:], found)
    near("out", [1.0, 2.0], [1.0, 2.001], 1e-3)
    for wrong in (2.01, np.nan):
        with pytest.raises(Difference, match=r"^out: element 1 is .*with 2\.0e-03 allowed \(1 of 2 are off\)$"):
            near("out", [1.0, wrong], [1.0, 2.0], 1e-3)
    before = {"0.k.bytes": b"abc", "pos": 3}
    assert first_change(before, dict(before)) == ""
    assert first_change(before, before | {"0.k.bytes": b"abd"}) == "0.k.bytes: byte 2 is 100, not 99 (1 of 3 differ)"
    assert first_change(before, before | {"pos": 4, "len": 1}) == "pos: 4, not 3"
    assert first_change(before, before | {"len": 1}) == "len is new"


@pytest.fixture
def sigint() -> Iterator[None]:
    """Ctrl-C interrupts Python, also where a shell has started it in the background, with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_ends_it_with_the_report_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, pressed = Part._step, []

    def step(self: Part) -> None:
        if self.tally.steps > 5 and not pressed:
            pressed.append(self)
            signal.raise_signal(signal.SIGINT)
        right(self)

    monkeypatch.setattr(Part, "_step", step)
    status = cli.main(["check", "--device", "host", "--soak", "1", "--small", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 130, str(told["faults"])
    assert (told["ended"], told["programs"], told["faults_found"]) == ("interrupted", 1, 0)
    assert told["steps"] > 5


def test_ctrl_c_is_heard_wherever_the_wait_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it counts what its threads have done, which go on then."""
    looked: list[int] = []

    class Tally:
        @property
        def steps(self) -> int:
            looked.append(0)
            if len(looked) == 1:
                raise KeyboardInterrupt
            return len(looked)

    done = threading.Event()
    soak = Soak(lambda arena: HostDev(arena=arena), 1, small=True)
    part: Any = types.SimpleNamespace(tally=Tally())
    threading.Timer(0.6, done.set).start()
    assert soak._let_run([lambda: done.wait(5)], [part]) == [True]
    assert (soak.report.ended, done.is_set()) == (INTERRUPTED, True)


@pytest.mark.misuse
def test_a_device_that_is_lost_ends_it(standin: StandIn, soaking: Any) -> None:
    soak = soaking()
    assert soak.program(0) == []
    standin.break_behind("cuLaunchKernelEx", 50)
    found = list(soak.run(30))
    assert "719" in found[0].what
    assert soak.report.ended.startswith("the device is of no use any more: ")
    assert soak.report.programs == 2
    with suppress(MemraError):
        soak.close()
    standin.reset()


def test_a_device_that_does_not_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(Part, "_step", lambda self: answers.wait(30))
    monkeypatch.setattr(soak_module, "PATIENCE_SECONDS", 0.5)
    soak = Soak(lambda arena: HostDev(arena=arena), 1, small=True)
    found = list(soak.run(30))
    answers.set()
    soak.close()
    assert {each.what for each in found} == {"no call came back for 0.5 seconds"}
    assert (soak.report.programs, soak.report.ended) == (1, "the device does not answer any more")


def test_so_many_faults_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "_step", lambda self: same("the weather", "rain", "sun"))
    monkeypatch.setattr(soak_module, "MOST_FINDINGS", 3)
    soak = Soak(lambda arena: HostDev(arena=arena), 1, small=True)
    assert 3 <= len(list(soak.run(30))) <= 4
    soak.close()
    assert soak.report.ended == "given up after 3 faults"


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--soak", "1", "--replay", "x.npz", "--device", "host"]) == 2
    assert "--soak and --soak-seed do not go with --replay" in capsys.readouterr().err
    assert cli.main(["check", "--soak", "1", "--device", "cpu"]) == 2
    assert "--device cpu: it takes auto, cuda:N or host" in capsys.readouterr().err
    assert cli.main(["check", "--soak", "0", "--device", "host"]) == 2
    assert "--soak 0 runs nothing: give it minutes" in capsys.readouterr().err


# Where something is.


# Programs that show it at once; others do as well, but it takes longer.
SEEDS = {
    "a snapshot is leaked": 15, "a length is wrong after a rollback": 15,
    "the ring is stale after a partial commit": 27,
    "states are not home before a graph": 30, "a replay may take too many rows": 19, "a snapshot outlives its rows": 8,
    "a bit is wrong": 8, "a bounds check is missing": 8, "a launch without room is not told": 8,
    "a ring is not rebuilt": 2,
}  # fmt: skip


@pytest.mark.misuse
@pytest.mark.parametrize("name", [*IN_PYTHON, *LATE])
def test_a_soak_finds_that(standin: StandIn, soaking: Any, monkeypatch: Any, name: str) -> None:
    if name in LATE:
        standin.defer(3)
    with monkeypatch.context() as patch:
        (IN_PYTHON | LATE)[name](patch)
        assert finds(soaking(), SEEDS.get(name, 1))


@pytest.mark.misuse
@pytest.mark.parametrize("name", IN_KERNELS)
def test_a_soak_finds_in_a_kernel_that(standin: StandIn, soaking: Any, tmp_path: Path, name: str) -> None:
    with_kernel(standin, tmp_path, *IN_KERNELS[name])
    assert finds(soaking(arena=True), SEEDS.get(name, 1))  # what overruns a plane stays in memory of ours
