"""What comes before what on several streams, by the stand-in's trace: copies and fills that touch the same bytes with
nothing to order them.

The stand-in runs each call at once, so that a wait that is missing does no harm there; here it shows. A stream's work
is in order; a wait orders what follows behind all that came before the record of its event, and a stream that the host
waited for is behind everything that the host asks for later. Kernels are not looked at, nor is memory of the host that
a copy has left when its call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from standin import Call

Clock = dict[int, int]  # stream -> how much of its work came before


@dataclass
class _Access:
    call: Call
    ranges: list[tuple[int, int, bool]]  # first byte, behind the last, written
    clock: Clock


@dataclass
class _State:
    clocks: dict[int, Clock] = field(default_factory=dict)  # by stream
    events: dict[int, Clock] = field(default_factory=dict)  # by event
    host: Clock = field(default_factory=dict)


def _join(clock: Clock, other: Clock) -> None:
    for stream, n in other.items():
        clock[stream] = max(clock.get(stream, 0), n)


def _ranges(call: Call, pinned: range) -> list[tuple[int, int, bool]]:
    name = call.node or call.name
    found = []
    if name.startswith(("cuMemcpy", "cuMemset")) and ("DtoH" not in name or call.dst in pinned):
        found.append((call.dst, call.dst + call.bytes, True))
    if name.startswith("cuMemcpy") and ("HtoD" not in name or call.src in pinned):
        found.append((call.src, call.src + call.bytes, False))
    return found


def _conflict(a: _Access, b: _Access) -> bool:
    return any(
        begin < other_end and other < end and (written or other_written)
        for begin, end, written in a.ranges
        for other, other_end, other_written in b.ranges
    )


def races(trace: Sequence[Call], pinned: range = range(0)) -> list[str]:
    """Pairs of copies and fills on different streams that touch the same bytes, one of them writing, in no order.

    pinned: addresses of the host that copies reach later.
    """
    state, accesses, found = _State(), [], []
    for call in trace:
        if call.captured or call.code or not call.stream:
            continue
        name = call.node or call.name
        clock = state.clocks.setdefault(call.stream, {})
        _join(clock, state.host)
        if name == "cuStreamWaitEvent":
            _join(clock, state.events.get(call.src, {}))
            continue
        if name == "cuStreamSynchronize":
            _join(state.host, clock)
            continue
        if name == "cuEventRecord":
            state.events[call.src] = dict(clock)
            continue
        clock[call.stream] = clock.get(call.stream, 0) + 1
        ranges = _ranges(call, pinned)
        if not ranges:
            continue
        now = _Access(call, ranges, dict(clock))
        for before in accesses:
            seen = now.clock.get(before.call.stream, 0) >= before.clock[before.call.stream]
            if not seen and _conflict(before, now):
                found.append(f"{before.call.name} to 0x{before.call.dst:x} and {name} to 0x{call.dst:x}")
        accesses.append(now)
    return found
