"""How long the operations of a session take, beside what a copy of as many bytes takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from memra_driver.device import CudaEvent
from memra_driver.kvdev import CudaDev

AHEAD_BYTES, AHEAD_CLEARS = 1 << 29, 4  # take the GPU longer than the host needs to enqueue an operation
COPY_BYTES = {True: 1 << 29, False: 1 << 26}  # CUDA, host: well past any cache level


@dataclass
class OpTimes:
    """How long each operation took and how many bytes it must move, as measured on the device.

    On a GPU a long clear is enqueued in front of each measured operation: while it runs the host gets ahead, so
    the time between the two events is the device's alone, and the operation finds none of its data in a cache.
    """

    e: Any
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bytes: dict[str, list[int]] = field(default_factory=dict)
    _pending: list[tuple[str, CudaEvent, CudaEvent]] = field(default_factory=list)
    _ahead: Any = None

    @contextmanager
    def measure(self, name: str, n_bytes: int) -> Iterator[None]:
        """Times what the block enqueues: between two events on a GPU, by the clock on the host.

        What a capture records runs later, so it is not timed.
        """
        if self.e.recording is not None:
            yield
            return
        if not isinstance(self.e, CudaDev):
            begin = time.perf_counter()
            yield
            self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
            self.bytes.setdefault(name, []).append(n_bytes)
            return
        if self._ahead is None:
            self._ahead = self.e.uninit(AHEAD_BYTES // 4)
        begin_event, end_event = (CudaEvent(self.e.context, timing=True) for _ in range(2))
        for _ in range(AHEAD_CLEARS):
            self.e.clear_bytes(self._ahead.ptr, self._ahead.nbytes)
        self.e.stream.record(begin_event)
        yield
        self.e.stream.record(end_event)
        self.bytes.setdefault(name, []).append(n_bytes)
        self._pending.append((name, begin_event, end_event))

    def settle(self) -> None:
        """Waits for the device and reads the events."""
        self.e.synchronize()
        for name, begin, end in self._pending:
            self.seconds.setdefault(name, []).append(end.elapsed_ms(begin) / 1e3)
            begin.close()
            end.close()
        self._pending.clear()

    def close(self) -> None:
        """Frees what the measuring needs."""
        if self._ahead is not None:
            self._ahead.close()

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
        times = OpTimes(e)
        for _ in range(7):
            with times.measure("copy", 8 * n):
                e.copy_into(dst, 0, src, n)
        times.settle()
        times.close()
        return 8 * n / statistics.median(times.seconds["copy"])
