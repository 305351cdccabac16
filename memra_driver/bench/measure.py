"""How the bench measures: device time from replayed graphs over rotating buffers, host time by the clock.

Device time is that of one CUDA graph with many calls, launched several times in a row between events. Copies that bring
the clocks up and the first launches are not counted, so the host is ahead and the L2 is as the graph leaves it. The
calls of a graph go over at least ROTATION times the L2, so no call finds its data there; those of one decode step go
over what a model has, at B = 1 three times the L2, and its operations apart over less. What a model's projection has
just made (a row of q, k, v or gates) is shared by all calls and may be there; so may what is too small to go over that
much: rings and the slots of a few rows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from memra_driver import driver, nvrtc
from memra_driver.device import CudaEvent
from memra_driver.errors import MemraError

ROTATION = 4  # times the L2 that the calls of one graph go over
HOST_TURNS = 3  # a median of the host is over as many turns for each launch of a graph
UNMEASURED = 2  # launches of a graph before the first that counts
CHUNK = 64  # elements that views of the random numbers are aligned to
FASTEST_CLEAR = 6e12  # bytes per second: no clear fills more
MOST_CLEARS = 200  # in a row; a stream takes about a thousand calls before the host has to wait
HEAT_BYTES, HEAT_COPIES = 1 << 28, 48  # copied in front of a measurement: an idle GPU takes its clocks down
COLD_COPIES = 200  # of the whole pool, in front of the first
# What is no multiple of 4 KiB, or more than a GiB at once, a driver copies at two thirds of its best rate (seen on an
# H200). What others stand beside is its best.
COPY_STEP, MOST_COPIED = 1 << 12, 1 << 28
READER = "read.cu"


class Bench:
    """A device with what measuring on it needs: random numbers, room to copy to, times that were taken already.

    pool_bytes: of the random numbers, and of the room. replays: launches that a median is of.
    """

    def __init__(self, e: Any, *, pool_bytes: int, replays: int) -> None:
        self.e, self.replays = e, replays
        self.l2_bytes = int(e.context.attribute("L2_CACHE_SIZE"))
        self.rotation = ROTATION * self.l2_bytes
        self.first: dict[str, float] = {}  # operation -> seconds of its first call, until it was done
        self.faults: list[str] = []
        self._copies: dict[int, float] = {}
        self._at = 0
        self.numbers = e.uninit(pool_bytes // 4)
        self.room = e.uninit(pool_bytes // 4)
        self._fill(self.numbers)
        for _ in range(COLD_COPIES):
            e.copy_bytes(self.room.ptr, self.numbers.ptr, self.room.nbytes)

    def close(self) -> None:
        """Frees the pools."""
        self.numbers.close()
        self.room.close()

    def _fill(self, pool: Any) -> None:
        """Unit-normal numbers; a part is drawn, and doubled until the pool is full."""
        part = min(pool.len, 1 << 22)
        pool.view(0, part).copy_from(np.random.default_rng(7).standard_normal(part, np.float32))
        while part < pool.len:
            more = min(part, pool.len - part)
            self.e.copy_bytes(pool.ptr + 4 * part, pool.ptr, 4 * more)
            part += more

    def heat(self) -> None:
        """Keeps the device busy for some milliseconds, in stream order; waits for nothing."""
        n_bytes = min(HEAT_BYTES, self.room.nbytes)
        for _ in range(HEAT_COPIES):
            self.e.copy_bytes(self.room.ptr, self.numbers.ptr, n_bytes)

    def random(self, n: int) -> Any:
        """n random numbers, others at each call as long as the pool lasts."""
        if self._at + n > self.numbers.len:
            self._at = 0
        view = self.numbers.view(self._at, self._at + n)
        self._at += math.ceil(n / CHUNK) * CHUNK
        return view

    def sets(self, n_bytes: int, least: int = 4) -> int:
        """How many buffers of n_bytes the calls of a graph rotate over."""
        return max(least, math.ceil(self.rotation / n_bytes))

    # Device time.

    def device_seconds(self, enqueue: Callable[[], Any], calls: int, caches: Sequence[Any] = ()) -> float:
        """Seconds of one of the `calls` that `enqueue` makes: the median over the launches of a graph of them.

        Each launch moves the device's clock of `caches` as recorded; the host's stays where it is.
        """
        with self.e.capture() as graph:
            enqueue()
        try:
            for cache in caches:
                cache.prepare_replay(self.e)
            return statistics.median(self._launches(graph)) / calls
        finally:
            graph.close()

    def _launches(self, graph: Any) -> list[float]:
        stream = self.e.stream
        self.heat()
        for _ in range(UNMEASURED):
            driver.graph_launch(graph.handle, stream.handle)
        with self.events(self.replays + 1) as events:
            stream.record(events[0])
            for event in events[1:]:
                driver.graph_launch(graph.handle, stream.handle)
                stream.record(event)
            stream.synchronize()
            return [b.elapsed_ms(a) / 1e3 for a, b in pairwise(events)]

    @property
    def launches(self) -> int:
        """How often a graph is launched in all."""
        return UNMEASURED + self.replays

    def eager_seconds(self, before: Callable[[], Any], enqueue: Callable[[], Any], calls: int) -> float:
        """Seconds of one of the `calls` that `enqueue` makes, for what no capture takes: the median of several turns.

        Clears run on the device while the host enqueues; then comes `before`, which is not counted.
        """
        begin = time.perf_counter()
        before()
        enqueue()
        ahead = 2 * (time.perf_counter() - begin)
        clears = min(MOST_CLEARS, math.ceil(ahead * FASTEST_CLEAR / self.room.nbytes))
        found = []
        for _ in range(self.replays):
            with self.events(2) as (a, b):
                for _ in range(clears):
                    self.e.clear_bytes(self.room.ptr, self.room.nbytes)
                before()
                self.e.stream.record(a)
                enqueue()
                self.e.stream.record(b)
                self.e.synchronize()
                found.append(b.elapsed_ms(a) / 1e3)
        return statistics.median(found) / calls

    @contextmanager
    def events(self, n: int) -> Iterator[list[CudaEvent]]:
        """n events that can tell the time between two of them."""
        made = [CudaEvent(self.e.context, timing=True) for _ in range(n)]
        try:
            yield made
        finally:
            for event in made:
                event.close()

    # Ceilings.

    def copy_seconds(self, n_bytes: int) -> float:
        """Seconds of a copy that moves n_bytes, read and written, at the rate of rotating nodes of a graph."""
        half = max(CHUNK, n_bytes // 2 // CHUNK * CHUNK)
        if half not in self._copies:
            size = min(half, MOST_COPIED, self.room.nbytes)
            if size > 64 * COPY_STEP:
                size = size // COPY_STEP * COPY_STEP
            count = min(max(1, self.room.nbytes // size), self.sets(2 * size), 256)

            def enqueue() -> None:
                for i in range(count):
                    self.e.copy_bytes(self.room.ptr + i * size, self.numbers.ptr + i * size, size)

            self._copies[half] = self.device_seconds(enqueue, count) * half / size
        return self._copies[half]

    def read_rate(self) -> float | None:
        """Bytes per second of a kernel that only reads the pool; None where that kernel cannot be had."""
        context = self.e.context
        try:
            cubin = nvrtc.compile_cubin(READER, context.arch, Path(__file__).resolve().parent)
            library = driver.library_load_data(cubin)
        except MemraError:
            return None
        try:
            kernel = driver.library_get_kernel(library, "bench_read")
            args = np.array([self.numbers.ptr, self.numbers.nbytes // 16, self.room.ptr], np.uint64)
            params = np.array([args.ctypes.data + 8 * i for i in range(3)], np.uint64)
            grid = (8 * context.attribute("MULTIPROCESSOR_COUNT"), 1, 1)
            config = driver.launch_config(grid, (256, 1, 1), 0, self.e.stream.handle)
            read = driver.launcher(kernel, config, params.ctypes.data, "read")
            return float(self.numbers.nbytes / self.device_seconds(read, 1))
        except MemraError:
            return None
        finally:
            driver.library_unload(library)

    # Host time.

    def host_seconds(self, call: Callable[[], Any], calls: int, *, after: Callable[[], Any] = lambda: None) -> float:
        """Seconds of the host for one of the `calls` that `call` makes."""
        return self.host_beside([call], calls, after=after)[0]

    def host_beside(
        self, each: Sequence[Callable[[], Any]], calls: int, *, after: Callable[[], Any] = lambda: None
    ) -> list[float]:
        """host_seconds of several, measured in turn, so that a clock that changes or a busy host meets all alike."""

        def timed(call: Callable[[], Any]) -> Callable[[], float]:
            def turn() -> float:
                begin = time.perf_counter()
                call()
                return time.perf_counter() - begin

            return turn

        return [seconds / calls for seconds in self.medians_of([timed(call) for call in each], after=after)]

    def medians_of(
        self, turns: Sequence[Callable[[], float]], *, after: Callable[[], Any] = lambda: None
    ) -> list[float]:
        """The medians of what the turns return, one after the other, each on an idle device; `after` ends a turn."""
        found: list[list[float]] = [[] for _ in turns]
        for _ in range(HOST_TURNS * self.replays + 1):
            for seconds, turn in zip(found, turns, strict=True):
                self.e.synchronize()
                seconds.append(turn())
                after()
        self.e.synchronize()
        return [statistics.median(seconds[1:]) for seconds in found]

    def take_first(self, name: str, call: Callable[[], Any]) -> None:
        """Runs the call; the first of a name is timed until the device has done it."""
        if name in self.first:
            call()
            return
        self.e.synchronize()
        begin = time.perf_counter()
        call()
        self.e.synchronize()
        self.first[name] = time.perf_counter() - begin


@contextmanager
def watched(e: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Inside the block, what a device is asked to do: a list of (method, *arguments).

    Nothing is prepared meanwhile. What a cache has prepared before asks the device for nothing: forget that first.
    """
    done: list[tuple[Any, ...]] = []
    methods = ("launch", "copy_bytes", "clear_bytes", "copy_many")

    def watch(name: str) -> None:
        method = getattr(e, name)

        def noted(*args: Any) -> None:
            done.append((name, *args))
            method(*args)

        setattr(e, name, noted)

    for name in methods:
        watch(name)
    e.prepares = False
    try:
        yield done
    finally:
        for name in (*methods, "prepares"):
            delattr(e, name)
