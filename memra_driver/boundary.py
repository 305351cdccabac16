"""Hidden-state rows between two pipeline stages: what crosses a fence of the model.

A boundary has two slots beside the receiving stage, so the sender may fill one while the other is read. Each slot has
two events: that its rows have arrived, and that they have been read. The sender's stream waits for the second before it
fills the slot again, the receiver's for the first before it reads; the host waits for neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from memra_driver import driver
from memra_driver.context import CudaContext, in_a_fork
from memra_driver.device import CudaEvent
from memra_driver.errors import CapacityError, ConfigError, MemraError, StateError, UnsupportedError
from memra_driver.interop import operand, same_stream
from memra_driver.kvdev import CudaDev, HostDev
from memra_driver.memory import Allocation, Borrowed, Closing, CudaView, run_all

SLOTS = 2


@dataclass
class _Traffic:
    """What was sent and received: eagerly, or in one capture. Row counts by slot."""

    sent: int = 0
    received: int = 0
    released: int = 0
    rows: list[int] = field(default_factory=lambda: [0] * SLOTS)


class _Unpooled:
    """Where a boundary's bytes come from: of a GPU, for its peers too, or page-locked ones of the host.

    Not from the memory pool: what is enabled between peers does not hold for that.
    """

    def __init__(self, context: CudaContext, other: CudaContext, *, pinned: bool) -> None:
        self.context, self.pinned, self.kind = context, pinned, "pinned" if pinned else "memory"
        self.used_by = context, other

    def alloc_bytes(self, nbytes: int) -> int:
        self.context.bind_alive()
        ptr = driver.mem_host_alloc(nbytes) if self.pinned else driver.mem_alloc(nbytes)
        self.context._hold(self.kind, ptr, 0 if self.pinned else nbytes)
        return ptr

    def free_bytes(self, ptr: int, nbytes: int) -> None:
        if in_a_fork():
            return
        free = driver.mem_free_host if self.pinned else driver.mem_free
        # The free is in no stream's order, and rows may still be on their way.
        waits = [partial(_wait_for, context) for context in self.used_by]
        run_all([*waits, partial(self.context.let_go, self.kind, ptr, free)])

    def record_error(self, error: MemraError) -> None:
        self.context.record_error(error)


def _wait_for(context: CudaContext) -> None:
    if not context.is_closed and context.is_alive():
        context.bind()
        driver.ctx_synchronize()


class Boundary(Closing):
    """Carries rows of `hidden` f32, up to max_rows at once, from stage dev_a to stage dev_b.

    `way` says how: "same", a copy on one device (two CudaDevs of one GPU, or two HostDevs, are one device here);
    "peer", a copy from GPU to GPU; "staged", over page-locked host memory, where the GPUs cannot reach each other. The
    rows cross on the sender's stream and the host never waits; of staged ones the second half is on the receiver's. For
    "peer" the first context gets access to the second one's memory, and keeps it.

    In a capture of dev_a's or dev_b's a send or receive is recorded. A graph that sends and one that receives are
    launched in turn, the sender's first, with no eager rows under way; the n-th send or receive of a graph uses slot
    n % 2, and one graph has at most two of each, unless it has both ends. What a capture has received is released when
    it ends. Close the graphs first.

    Raises ConfigError (sizes), UnsupportedError (a GPU and the host, or devices of neither kind), DriverError.
    """

    def __init__(self, dev_a: Any, dev_b: Any, hidden: int, max_rows: int) -> None:
        for name, value in (("hidden", hidden), ("max_rows", max_rows)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"a boundary of {name} {value!r}; it must be at least 1")
        kinds = [next((kind for kind in (CudaDev, HostDev) if isinstance(e, kind)), None) for e in (dev_a, dev_b)]
        if None in kinds or kinds[0] is not kinds[1]:
            raise UnsupportedError(f"a boundary joins two GPUs or two host devices, not {dev_a!r} and {dev_b!r}")
        self.dev_a, self.dev_b, self.hidden, self.max_rows = dev_a, dev_b, hidden, max_rows
        self._slot_bytes = 4 * hidden * max_rows
        self._slots: Any = None
        self._room: Allocation | None = None
        self._pinned: Allocation | None = None
        self._events: list[CudaEvent] = []
        self._in_order = True
        self._closed = False
        self._eager = _Traffic()
        self._recorded: weakref.WeakKeyDictionary[Any, _Traffic] = weakref.WeakKeyDictionary()
        self._sender: Any = None  # weakly, the graph that the last send was recorded in
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        a, b, n = self.dev_a, self.dev_b, SLOTS * self.hidden * self.max_rows
        if a.ordinal == b.ordinal:
            self.way = "same"
            self._slots = b.uninit(n)
        else:
            self.way = "peer" if a.context.enable_peer(b.context) else "staged"
            self._room = Allocation(_Unpooled(b.context, a.context, pinned=False), 4 * n)
            self._slots = Borrowed(b.memory, self._room.ptr, n, allocation=self._room)
        if self.way == "staged":
            self._pinned = Allocation(_Unpooled(a.context, b.context, pinned=True), 4 * n)
        if isinstance(a, CudaDev) and not (self.way == "same" and same_stream(a.stream.handle, b.stream.handle)):
            self._arrived = [self._event(a) for _ in range(SLOTS)]
            self._read = [self._event(b) for _ in range(SLOTS)]
            for event in self._read:  # before the slots exist in the order of b's stream, a's may not fill them
                b.stream.record(event)
            self._in_order = False  # on one stream everything is in order as it is

    def _event(self, e: Any) -> CudaEvent:
        made = CudaEvent(e.context)
        self._events.append(made)
        return made

    def __repr__(self) -> str:
        return f"Boundary({self.dev_a!r}, {self.dev_b!r}, {self.hidden}, {self.max_rows})"

    @property
    def is_closed(self) -> bool:
        return self._closed

    def send(self, rows: Any) -> None:
        """Enqueues the crossing of rows, f32 [T, hidden] on dev_a with T <= max_rows; T may be 0.

        They may be changed afterwards in the order of dev_a's stream. Waits for nothing. Raises ArrayError (dtype,
        shape, device), CapacityError (T), StateError: closed, or both slots hold rows that are not released.
        """
        self._check_open()
        a = self.dev_a
        source = operand(rows, "rows", (self.hidden,), (np.float32,), a, rows=None, out=False, bare=True)
        count = source.len // self.hidden
        if count > self.max_rows:
            raise CapacityError(f"{count} rows to send; the boundary was made for {self.max_rows}")
        traffic = self._traffic("send", a)
        self._check_slot(traffic)
        slot = traffic.sent % SLOTS
        if self._in_order:
            if count:
                a.copy_bytes(self._slots.ptr + slot * self._slot_bytes, source.ptr, source.nbytes)
        else:
            self._push(slot, source.ptr, source.nbytes)
        traffic.rows[slot] = count
        traffic.sent += 1
        graph = self._recording(a)
        if graph is not None:
            graph.kept.append(self)
            self._sender = weakref.ref(graph)

    def receive(self) -> CudaView:
        """The rows that were sent first of those not yet received: f32, T * hidden elements on dev_b, in the slot.

        They are the caller's until the next receive or `release`; what dev_b's stream has been given to do by then may
        read and write them. Waits for nothing. Raises StateError: closed, or nothing is under way.
        """
        self._check_open()
        b = self.dev_b
        traffic = self._traffic("receive", b)
        slot = traffic.received % SLOTS
        graph = self._recording(b)
        if graph is None or graph is self._recording(self.dev_a):
            if traffic.received == traffic.sent:
                raise StateError("receive: no rows are under way; send some first")
            count = traffic.rows[slot]
        else:
            count = self._recorded_count(traffic)
        if not self._in_order:
            b.context.bind_alive()
            self._release(traffic)
            self._pull(slot, 4 * self.hidden * count)
        traffic.received += 1
        traffic.released = traffic.received - 1
        if graph is not None:
            graph.kept.append(self)
            if traffic.received == 1:
                graph.at_end.append(self.release)
        start = slot * self.max_rows * self.hidden
        received: CudaView = self._slots.view(start, start + count * self.hidden)
        return received

    def release(self) -> None:
        """The rows received last have been read, by what dev_b's stream has been given so far. Does nothing twice."""
        self._check_open()
        traffic = self._traffic("release", self.dev_b)
        if not self._in_order:
            self.dev_b.context.bind_alive()
            self._release(traffic)
        traffic.released = traffic.received

    def close(self) -> None:
        """Frees the slots; waits for the copies under way where they cross devices. May be called twice."""
        if self._closed:
            return
        devices = () if self._in_order or in_a_fork() else (self.dev_a, self.dev_b)
        streams = [e.stream for e in devices if not e.stream.is_closed and e.context.is_alive()]
        for stream in streams:
            stream.refuse_in_capture("close of a boundary")
        self._closed = True
        waits: list[Callable[[], None]] = []
        for stream in streams:
            if self._room is not None:
                waits.append(stream.synchronize)  # what is no memory of a pool is not freed in the order of a stream
            elif stream is self.dev_b.stream:
                waits += [partial(stream.wait, event) for event in self._arrived]  # what was sent and never received
        closes = [each.close for each in (*self._events, *filter(None, [self._slots]))]
        run_all([*waits, *closes, *(room.free for room in filter(None, [self._room, self._pinned]))])

    def _push(self, slot: int, source: int, nbytes: int) -> None:
        """The sender's half: waits until the slot was read, fills it, says so. One context is bound for all of it."""
        a, start = self.dev_a, slot * self._slot_bytes
        a.context.bind_alive()
        stream, flags = a.stream.handle, self._flags(a)
        driver.stream_wait_event(stream, self._read[slot].handle, flags)
        if self._pinned is not None and nbytes:
            driver.memcpy_dtoh_async(self._pinned.ptr + start, source, nbytes, stream)
        elif nbytes:  # with peer access an ordinary copy goes from GPU to GPU, and a capture takes it
            driver.memcpy_dtod_async(self._slots.ptr + start, source, nbytes, stream)
        driver.event_record(self._arrived[slot].handle, stream, flags)

    def _pull(self, slot: int, nbytes: int) -> None:
        """The receiver's half: waits until the slot is full. The context is bound."""
        b, start = self.dev_b, slot * self._slot_bytes
        stream = b.stream.handle
        driver.stream_wait_event(stream, self._arrived[slot].handle, self._flags(b))
        if self._pinned is not None and nbytes:
            driver.memcpy_htod_async(self._slots.ptr + start, self._pinned.ptr + start, nbytes, stream)

    @staticmethod
    def _flags(e: Any) -> int:
        """In a capture the events are of outside it: the other stream is in another graph."""
        return 0 if e.recording is None else driver.EVENT_EXTERNAL

    def _release(self, traffic: _Traffic) -> None:
        """Says that the slot received last was read. The context is bound."""
        if traffic.released < traffic.received:
            b, slot = self.dev_b, (traffic.received - 1) % SLOTS
            driver.event_record(self._read[slot].handle, b.stream.handle, self._flags(b))
            traffic.released = traffic.received

    def _recording(self, e: Any) -> Any:
        """The capture that takes what e is given; of two GPU devices on one stream, either's."""
        both = (self.dev_a, self.dev_b) if self._in_order and isinstance(e, CudaDev) else (e,)
        return next((each.recording for each in both if each.recording is not None), None)

    def _traffic(self, what: str, e: Any) -> _Traffic:
        graph = self._recording(e)
        if graph is not None:
            return self._recorded.setdefault(graph, _Traffic())
        if isinstance(e, CudaDev):
            e.stream.refuse_in_capture(what)
        return self._eager

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the boundary is closed")

    def _check_slot(self, traffic: _Traffic) -> None:
        if traffic.sent - traffic.released < SLOTS:
            return
        held = traffic.received - traffic.released
        raise StateError(
            f"send: both slots are taken, {SLOTS - held} by rows under way and {held} by rows received and not"
            " released; receive or release first"
        )

    def _recorded_count(self, traffic: _Traffic) -> int:
        """The rows of the next receive of a graph that another graph sends to."""
        if traffic.received == SLOTS:
            raise StateError(f"receive: this graph receives {SLOTS} times already, and its sender has no more slots")
        sender = None if self._sender is None else self._sender()
        sent = None if sender is None or sender.is_closed else self._recorded[sender]
        if sent is None or traffic.received >= sent.sent:
            raise StateError("receive: record the send first; its graph says how many rows there are")
        return sent.rows[traffic.received]
