"""Recorded steps: what the operations enqueue between the ends of a capture, launched again as often as wanted.

While a capture is open, operations take the position from the device (pos_d), the scan works in place on the
buffer that ssm_state had at birth, and the host's clock moves only for the checks: at the end it returns to where it
was. The graph remembers which caches it moved and how far, and each launch moves them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memra_driver import driver
from memra_driver.errors import DriverError, StateError
from memra_driver.layout import CacheState, Recorder
from memra_driver.memory import Closing, note_change

if TYPE_CHECKING:
    from memra_driver.batch import CacheBatch
    from memra_driver.clock import CacheClock
    from memra_driver.layers import DflashTapSink


@dataclass
class Clock:
    """The host's scalars of a cache at one moment."""

    pos: int
    lens: list[int | None]
    state: CacheState
    logits: Any

    @classmethod
    def of(cls, cache: CacheClock) -> Clock:
        lens = [None if layer is None else layer.len for layer in cache.kv]
        return cls(cache.pos, lens, cache.state, cache.kept_logits())

    def put(self, cache: CacheClock) -> None:
        if cache.state is CacheState.CLOSED:
            return
        cache.end_step(self.pos)
        cache.set_state(self.state)
        cache.restore_logits(self.logits)
        for layer, length in zip(cache.kv, self.lens, strict=True):
            if layer is not None and length is not None:
                layer.len = length


@dataclass
class Move:
    """What one launch does to a cache: pos moves by `tokens`, and the layers of `appended` then stand there."""

    cache: CacheClock
    begin: Clock
    need: int = 0  # positions from pos on that a launch may write
    tokens: int = 0
    appended: frozenset[int] = frozenset()
    unsettles: bool = False
    parked: Any = None  # where a launch parks logits
    logits_at: int | None = None  # of a launch that parks: so far behind where it starts; None: not kept
    taps: DflashTapSink | None = None  # the sink that a launch writes to

    def check(self) -> None:
        """The layers that are appended to stand at pos, and the sink that was recorded is armed."""
        for il in self.appended:
            self.cache.check_not_behind(il)
            self.cache.check_not_ahead(il)
        self._check_taps()

    def _check_taps(self) -> None:
        """The same layers in the same slots of the same buffer."""
        taken, armed = self.taps, self.cache.dflash_taps
        if taken is None:
            return
        if armed is None or (armed.layer_ids, armed.hidden, armed.buf.ptr) != (
            taken.layer_ids,
            taken.hidden,
            taken.buf.ptr,
        ):
            now = "none are armed" if armed is None else f"{armed.layer_ids} are armed"
            where = " in another buffer" if armed is not None and armed.layer_ids == taken.layer_ids else ""
            raise StateError(
                f"graph launch: it was captured with taps {taken.layer_ids}, and {now}{where}; capture it again"
            )
        if armed.t < taken.t:
            raise StateError(f"graph launch: it was captured with taps of {taken.t} rows, and {armed.t} are armed")


class Graph(Closing):
    """A capture on one device. `launch` replays it; `moves` says what that does to which cache.

    An engine that launches the graph itself calls `cache.prepare_replay(e)` before and `cache.replayed(graph,
    launches)` behind. Close it before its device.
    """

    def __init__(self, e: Any) -> None:
        self.e = e
        self.moves: list[Move] = []
        self.batches: set[CacheBatch] = set()  # whose tables it reads
        self.kept: list[Any] = []  # the arrays that it reads and writes
        self.at_end: list[Callable[[], None]] = []  # what ends the recording of a part that is not over by itself
        self.is_closed = False
        self._recording = True

    def touch(self, cache: CacheClock) -> None:
        """A cache takes part; called by every operation before it changes the host's clock."""
        if any(move.cache is cache for move in self.moves):
            return
        if len(cache.devices) > 1:
            raise StateError(f"a capture belongs to one device; this cache spans {len(cache.devices)}")
        cache.check_state("capture", CacheState.READY, CacheState.UNSETTLED)
        if cache.step_rows or cache.open_round is not None:
            raise StateError("capture: a step or a round was open when the capture began; end it first")
        self.moves.append(Move(cache, Clock.of(cache)))
        cache.set_recorder(Recorder.PYTHON)

    def note(self, cache: CacheClock, end: int) -> None:
        """Rows below position `end` are written by a launch that starts where the capture started."""
        move = self.move_of(cache)
        move.need = max(move.need, end - move.begin.pos)

    def move_of(self, cache: CacheClock) -> Move:
        """What this graph does to a cache that takes part."""
        return next(move for move in self.moves if move.cache is cache)

    def launch(self) -> None:
        """Replays once, in stream order: stamps the counters, brings the states home, launches, moves the host.

        Raises, before anything is changed: StateError (a cache is not ready, or has a step open), CapacityError.
        """
        if self._recording or self.is_closed:
            raise StateError("the capture is still open" if self._recording else "the graph is closed")
        if self.e.recording is not None:
            raise StateError("graph launch: a capture is open; only steps and rounds can be recorded")
        if any(batch.is_closed for batch in self.batches):
            raise StateError("graph launch: a batch that it recorded is closed")
        for move in self.moves:
            move.cache.check_replayable("graph launch", move.need)
            move.check()
        for move in self.moves:
            move.cache.prepare_replay(self.e)
        try:
            self._run()
        except BaseException:
            for move in self.moves:
                move.cache.taint()
            raise
        for move in self.moves:
            move.cache.replayed(self, 1)

    def finish(self) -> None:
        """The capture has ended: learns how far each cache moved and puts the host's clock back."""
        self._recording = False
        unfinished = [move for move in self.moves if move.cache.step_rows or move.cache.open_round is not None]
        spoiled = [move for move in self.moves if move.cache.state in (CacheState.TAINTED, CacheState.CLOSED)]
        for move in self.moves:
            cache, begin = move.cache, move.begin
            move.tokens = cache.pos - begin.pos
            now = [None if layer is None else layer.len for layer in cache.kv]
            move.appended = frozenset(il for il, length in enumerate(now) if length != begin.lens[il])
            if move.parked is not None and cache.logits_at is not None:
                move.logits_at = cache.logits_at - begin.pos
            if cache.open_round is not None:
                cache.open_round.over()
            begin.put(cache)
            cache.set_recorder(Recorder.NONE)
        if spoiled:
            raise StateError("a cache was closed or an operation interrupted inside the capture; it is given up")
        if unfinished:
            raise StateError("a step or a round is open at the end of the capture; advance or commit inside it")

    def abandon(self) -> None:
        """The capture failed: the host's clock goes back, and the graph can never be launched."""
        self._recording, self.is_closed = False, True
        for move in self.moves:
            if move.cache.open_round is not None:
                move.cache.open_round.over()
            move.begin.put(move.cache)
            move.cache.set_recorder(Recorder.NONE)

    def close(self) -> None:
        """Frees the graph; may be called twice."""
        self.is_closed = True
        self.kept.clear()
        self.at_end.clear()

    def _run(self) -> None:
        raise NotImplementedError


_threads = threading.local()
open_captures: list[Graph] = []  # of all threads


def captures_of_this_thread() -> list[Graph]:
    """The captures that are open on this thread, the last begun at the end."""
    if not hasattr(_threads, "captures"):
        _threads.captures = []
    found: list[Graph] = _threads.captures
    return found


class CudaGraph(Graph):
    """A CUDA graph."""

    def __init__(self, e: Any) -> None:
        super().__init__(e)
        self.handle = 0  # CUgraphExec

    def close(self) -> None:
        super().close()
        handle, self.handle = self.handle, 0
        if handle:
            self.e.context.let_go("graph", handle, driver.graph_exec_destroy)

    def _run(self) -> None:
        self.e.context.bind_alive()
        driver.graph_launch(self.handle, self.e.stream.handle)


class HostGraph(Graph):
    """Calls that the host device noted, run again in order."""

    def __init__(self, e: Any) -> None:
        super().__init__(e)
        self.calls: list[tuple[Any, ...]] = []

    def close(self) -> None:
        super().close()
        self.calls.clear()

    def _run(self) -> None:
        for call, *args in self.calls:
            call(*args)


@contextmanager
def capture_cuda(e: Any) -> Iterator[CudaGraph]:
    """Records what is enqueued on e's stream inside the block."""
    graph = CudaGraph(e)
    with recording(e, graph), e.stream.frees_wait():
        e.context.bind_alive()
        driver.stream_begin_capture(e.stream.handle)
        try:
            yield graph
            while graph.at_end:
                graph.at_end.pop()()
            e.context.bind_alive()  # the block may have worked on another device
            made = driver.stream_end_capture(e.stream.handle)
        except BaseException:
            _discard(e)
            raise
        try:
            graph.handle = driver.graph_instantiate(made)
        finally:
            driver.graph_destroy(made)
        driver.graph_upload(graph.handle, e.stream.handle)
        if graph.is_closed:  # inside the block
            graph.close()


def _discard(e: Any) -> None:
    """Ends a capture that failed; what it recorded, if anything, is freed. Tried again where the stream goes on."""
    for _ in range(2):
        try:
            e.context.bind_alive()
        except StateError:
            return  # it went with its context
        except DriverError:
            continue
        with suppress(DriverError):  # it was invalid already, and has ended
            driver.graph_destroy(driver.stream_end_capture(e.stream.handle))
        with suppress(DriverError):
            if not driver.stream_is_capturing(e.stream.handle):
                return


@contextmanager
def recording(e: Any, graph: Graph) -> Iterator[None]:
    """e.recording is `graph` inside the block; afterwards the graph knows its moves, or is given up."""
    if e.recording is not None:
        raise StateError("a capture is open on this device already")
    e.recording = graph
    mine = captures_of_this_thread()
    mine.append(graph)
    open_captures.append(graph)
    note_change()
    try:
        yield
    except BaseException:
        e.recording = None
        mine.remove(graph)
        open_captures.remove(graph)
        note_change()
        graph.abandon()
        graph.close()
        raise
    e.recording = None
    mine.remove(graph)
    open_captures.remove(graph)
    note_change()
    try:
        graph.finish()
    except BaseException:
        graph.close()
        raise
