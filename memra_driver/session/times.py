"""How long the operations of a session take, beside what a copy of as many bytes takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from memra_driver.device import CudaEvent
from memra_driver.kvdev import CudaDev

AHEAD_BYTES, AHEAD_CLEARS = 1 << 29, 4  # take the GPU longer than the host needs to enqueue an operation
COPY_BYTES = {True: 1 << 29, False: 1 << 26}  # CUDA, host: well past any cache level


@dataclass
class OpTimes:
    """How long each operation took and how many bytes it must move, as measured on the device.

    On a GPU a long clear is enqueued in front of each measured operation: while it runs the host gets ahead, so
    the time between the two events is the device's alone, and the operation finds none of its data in a cache. What
    works on several devices takes as long as it does on the slowest.
    """

    devices: Sequence[Any]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bytes: dict[str, list[int]] = field(default_factory=dict)
    _pending: list[tuple[str, list[tuple[CudaEvent, CudaEvent]]]] = field(default_factory=list)
    _ahead: dict[int, Any] = field(default_factory=dict)  # by place in `devices`

    @contextmanager
    def measure(self, name: str, n_bytes: int, e: Any = None) -> Iterator[None]:
        """Times what the block enqueues on e, or on all devices: between two events on a GPU, by the clock on the host.

        What a capture records runs later, so it is not timed.
        """
        on = [i for i, each in enumerate(self.devices) if e is None or each is e]
        if any(self.devices[i].recording is not None for i in on):
            yield
            return
        if not isinstance(self.devices[on[0]], CudaDev):
            begin = time.perf_counter()
            yield
            self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
            self.bytes.setdefault(name, []).append(n_bytes)
            return
        events = [(self._begin(i), CudaEvent(self.devices[i].context, timing=True)) for i in on]
        yield
        for i, (_, end) in zip(on, events, strict=True):
            self.devices[i].stream.record(end)
        self.bytes.setdefault(name, []).append(n_bytes)
        self._pending.append((name, events))

    def _begin(self, i: int) -> CudaEvent:
        """Keeps a device busy, then records an event there."""
        e = self.devices[i]
        if i not in self._ahead:
            self._ahead[i] = e.uninit(AHEAD_BYTES // 4)
        event = CudaEvent(e.context, timing=True)
        for _ in range(AHEAD_CLEARS):
            e.clear_bytes(self._ahead[i].ptr, self._ahead[i].nbytes)
        e.stream.record(event)
        return event

    def settle(self) -> None:
        """Waits for the devices and reads the events."""
        for e in self.devices:
            e.synchronize()
        for name, events in self._pending:
            self.seconds.setdefault(name, []).append(max(end.elapsed_ms(begin) for begin, end in events) / 1e3)
            for event in chain.from_iterable(events):
                event.close()
        self._pending.clear()

    def close(self) -> None:
        """Frees what the measuring needs."""
        for each in self._ahead.values():
            each.close()

    def table(self, copy_bytes_per_second: float) -> list[dict[str, Any]]:
        """Per operation: count, median seconds, bytes of a median call, share of the copy bandwidth."""
        rows = []
        for name, seconds in self.seconds.items():
            rates = [b / s for b, s in zip(self.bytes[name], seconds, strict=True) if s > 0]
            rows.append(
                {
                    "operation": name,
                    "count": len(seconds),
                    "median_seconds": statistics.median(seconds),
                    "median_bytes": int(statistics.median(self.bytes[name])),
                    "copy_share": statistics.median(rates) / copy_bytes_per_second if rates else 0.0,
                }
            )
        return rows


def copy_bandwidth(e: Any) -> float:
    """Bytes per second, read plus written, of one large copy on e: the median of seven."""
    n = COPY_BYTES[isinstance(e, CudaDev)] // 4
    with e.uninit(n) as src, e.zeros(n) as dst:
        e.clear_bytes(src.ptr, src.nbytes)
        e.copy_into(dst, 0, src, n)
        times = OpTimes([e])
        for _ in range(7):
            with times.measure("copy", 8 * n):
                e.copy_into(dst, 0, src, n)
        times.settle()
        times.close()
        return 8 * n / statistics.median(times.seconds["copy"])
