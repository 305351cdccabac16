"""A soak: random programs on random models against plain decoding, for as long as wanted.

A program is what a seed makes several caches of one device go through, on one thread or on two with a device object
each (soak/program.py). Every call is foreseen: what is refused must change nothing, what is allowed must leave the
bytes, lengths and positions of plain decoding, which is held against formulas in float64 (soak/plain.py). Behind each
program everything must have been given back. What is found is told, and the next program goes on; a device that is of
no use any more ends the soak.

Memory stays bounded, so that it may run beside other work: two parts at a time, at most four caches of a small model
and two snapshots of each, on the device under 1 GB; on the host 64 MiB of remembered states a part.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from memra_driver import driver
from memra_driver.context import CudaContext
from memra_driver.errors import DriverError, MemraError
from memra_driver.soak.look import Difference
from memra_driver.soak.program import Part

MakeDevice = Callable[[bool], Any]  # arena -> a device object
IN_TIME, INTERRUPTED = "in time", "interrupted"
POLL_SECONDS = 0.2  # how soon Ctrl-C is heard
PATIENCE_SECONDS = 180  # for one call
MOST_FINDINGS = 100


def _n(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Finding:
    """What a program found. step: calls of its part so far; call: the last of them; again: what runs it alone."""

    seed: int
    part: int
    step: int
    call: str
    model: str
    what: str
    again: str

    def line(self) -> str:
        """As it is told."""
        where = f"seed {self.seed}, part {self.part}, step {self.step}"
        return f"FAULT {where}, {self.call}: {self.what}\n  model: {self.model}\n  again: {self.again}"


@dataclass
class Report:
    """What a soak has done so far. digest: of the calls of the last program, and of what stood behind each."""

    seed: int
    device: str = ""
    programs: int = 0
    steps: int = 0
    caches: int = 0
    refused: int = 0
    bytes_compared: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    ended: str = IN_TIME
    digest: str = ""
    memory: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the rates per second."""
        rates = {
            f"{name}_per_second": getattr(self, name) / self.seconds if self.seconds else 0.0
            for name in ("programs", "steps", "bytes_compared")
        }
        found = asdict(self)
        found["faults"] = found.pop("findings")
        return found | rates | {"faults_found": len(self.findings)}

    def line(self) -> str:
        """In one line."""
        rate = 1 / self.seconds if self.seconds else 0.0
        return (
            f"{_n(self.programs, 'program')}, {_n(self.steps, 'step')} on {_n(self.caches, 'cache')},"
            f" {_n(self.refused, 'refusal')}, {_n(self.bytes_compared, 'byte')} compared,"
            f" {_n(len(self.findings), 'fault')} found in {self.seconds:.1f} s"
            f" ({self.programs * rate:.1f} programs, {self.steps * rate:.0f} steps,"
            f" {self.bytes_compared * rate / 1e6:.1f} MB a second) on {self.device}"
            f"{'' if self.ended == IN_TIME else f'; {self.ended}'}"
        )


class Soak:
    """Programs one after the other. `run()` yields each finding as it is made; `report` stands at any time.

    make: makes a device object; it is called a few times, and all are closed by `close()`. seed: of the first program;
    the next has the next. small: small models only. A device that was lost, or Ctrl-C, ends it: see report.ended.
    """

    def __init__(self, make: MakeDevice, seed: int, *, small: bool = False) -> None:
        self.make, self.small, self.report = make, small, Report(seed)
        self._devices: dict[tuple[int, bool], list[Any]] = {}
        self._stop = threading.Event()
        self._context: CudaContext | None = None

    def run(self, seconds: float) -> Iterator[Finding]:
        """Programs until `seconds` have passed; the last one ends in the middle. It gives up after MOST_FINDINGS."""
        began = time.monotonic()
        timer = threading.Timer(seconds, self._stop.set)
        timer.daemon = True
        timer.start()
        try:
            while not self._stop.is_set() and self.report.ended == IN_TIME:
                found = self.program(self.report.seed + self.report.programs)
                self.report.seconds = time.monotonic() - began
                yield from found
                if len(self.report.findings) >= MOST_FINDINGS:
                    self.report.ended = f"given up after {MOST_FINDINGS} faults"
        except KeyboardInterrupt:
            self.report.ended = INTERRUPTED
        finally:
            timer.cancel()
            self._stop.set()
            self.report.seconds = time.monotonic() - began

    def alone(self, seed: int) -> Iterator[Finding]:
        """The one program of that seed."""
        began = time.monotonic()
        found = self.program(seed)
        self.report.seconds = time.monotonic() - began
        yield from found

    def program(self, seed: int) -> list[Finding]:
        """Runs one program; returns what it found."""
        random = Random(f"program {seed}")
        parts = []
        for number in range(random.choice((1, 2))):
            devices = self._devices_of(number, random.random() < 0.75)
            parts.append(Part(seed, number, devices, small=self.small))
        held = [[e.live() for e in part.devices] for part in parts]
        errors: list[BaseException | None] = [None] * len(parts)

        def run(number: int) -> None:
            try:
                parts[number].run(self._stop.is_set)
            except BaseException as error:
                errors[number] = error

        ended = self._let_run([partial(run, number) for number in range(len(parts))], parts)
        for number in range(len(parts)):
            if not ended[number]:
                errors[number] = Difference(f"no call came back for {PATIENCE_SECONDS} seconds")
        findings = []
        for number, (part, error, before) in enumerate(zip(parts, errors, held, strict=True)):
            if error is None:
                try:
                    self._look_behind(part, before)
                except (Difference, DriverError) as left:
                    error = left
            what = "" if error is None else self._told(error)
            errors[number] = error = None  # its frames hold the caches
            if what:
                steps, again = part.tally.steps, self._again(seed)
                findings.append(Finding(seed, number, steps, part.last, str(part), what, again))
        self._count(parts, findings)
        if findings:
            gc.collect()  # what a part was about to make goes now, not in the middle of another
        return findings

    def close(self) -> None:
        """Closes the devices. What the driver then still holds for this process is a finding as well."""
        self._stop.set()
        with ExitStack() as stack:
            if self.report.ended.startswith("the device"):
                stack.enter_context(suppress(MemraError))
            if self._context is not None:
                stack.callback(self._context.close)
                stack.callback(self._look_at_memory, self._context)
            for each in (e for devices in self._devices.values() for e in devices):
                stack.callback(each.close)
            self._devices, self._context = {}, None

    # Inside.

    def _devices_of(self, number: int, arena: bool) -> list[Any]:
        """Two objects of the device, for the part of that number."""
        key = number, arena
        if key not in self._devices:
            made = self._devices[key] = []
            for _ in range(2):
                made.append(self.make(arena))
            if hasattr(made[0], "kernels"):
                made[0].kernels.load_all()  # which may compile them: here, not on two threads at once
            if not self.report.device:
                self._meet(made[0])
        return self._devices[key]

    def _meet(self, e: Any) -> None:
        """The first device object: what the driver says before anything was made."""
        self.report.device = "host"
        if hasattr(e, "context"):
            self._context = CudaContext(e.ordinal)
            self.report.device = f"cuda:{e.ordinal} ({self._context.name()})"
            self.report.memory = self._memory(self._context, "before")

    @staticmethod
    def _memory(context: CudaContext, when: str) -> dict[str, int]:
        """What the driver says: bytes that this process has from the device's pool, and that nobody has."""
        return {f"pool_bytes_{when}": context.pool_info()[1], f"free_bytes_{when}": context.memory_info()[0]}

    def _look_at_memory(self, context: CudaContext) -> None:
        context.bind()
        driver.ctx_synchronize()
        memory = self.report.memory
        memory |= self._memory(context, "after")
        left = memory["pool_bytes_after"] - memory["pool_bytes_before"]
        if left and not self.report.findings:
            what = f"the driver's pool says that {left} bytes were never given back"
            seed = self.report.seed
            self.report.findings.append(Finding(seed, 0, 0, "the end", "all", what, self._again(seed)))

    def _again(self, seed: int) -> str:
        """The command that runs one program alone."""
        device, small = self.report.device.partition(" ")[0], " --small" if self.small else ""
        return f"memra-driver check --device {device}{small} --soak-seed {seed}"

    def _let_run(self, jobs: list[Callable[[], None]], parts: list[Part]) -> list[bool]:
        """Each on a thread of its own, until all have ended; whether each has. Ctrl-C lets them end at their next call.

        Where no call of theirs comes back any more it waits no longer, and the device is given up.
        """
        ended = [threading.Event() for _ in jobs]

        def run(number: int) -> None:
            try:
                jobs[number]()
            finally:
                ended[number].set()

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(jobs))]
        steps, since = -1, 0.0
        while True:
            try:  # around all of it: Ctrl-C may come at any point, and the threads must be waited for
                while threads:
                    threads.pop(0).start()
                for each in ended:
                    each.wait(POLL_SECONDS)
                if all(each.is_set() for each in ended):
                    break
                done = sum(part.tally.steps for part in parts)
                if done != steps:
                    steps, since = done, time.monotonic()
                elif time.monotonic() - since > PATIENCE_SECONDS:
                    self.report.ended = "the device does not answer any more"
                    self._devices.clear()  # to close them would wait as well
                    break
            except KeyboardInterrupt:
                if self.report.ended == INTERRUPTED:
                    raise  # for the second time
                self._stop.set()
                self.report.ended = INTERRUPTED
        return [each.is_set() for each in ended]

    def _told(self, error: BaseException) -> str:
        """What an error says; of one that nobody foresaw, where it came from."""
        if isinstance(error, DriverError):
            self._look_at_device(error)
        if isinstance(error, Difference):
            return str(error)
        if not isinstance(error, Exception):
            raise error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} (from {Path(frame.filename).name}:{frame.lineno})"

    def _look_at_device(self, error: DriverError) -> None:
        """Whether the device still works."""
        try:
            for devices in self._devices.values():
                devices[0].synchronize()
                devices[0].alloc_u8(4).close()
        except MemraError as second:
            self.report.ended = f"the device is of no use any more: {second}"
            self._stop.set()

    @staticmethod
    def _look_behind(part: Part, before: list[tuple[int, int]]) -> None:
        """A part has given back all that it made."""
        for e, (things, n_bytes) in zip(part.devices, before, strict=True):
            e.synchronize()
            now = e.live()
            if now != (things, n_bytes):
                left = f"{now[0] - things} things with {now[1] - n_bytes} bytes"
                raise Difference(f"{left} were left behind on {e!r}")

    def _count(self, parts: list[Part], findings: list[Finding]) -> None:
        report = self.report
        report.programs += 1
        report.findings += findings
        for part in parts:
            report.steps += part.tally.steps
            report.caches += part.tally.caches
            report.refused += part.tally.refused
            report.bytes_compared += part.tally.compared
        report.digest = "/".join(part.tally.calls.hexdigest()[:16] for part in parts)
