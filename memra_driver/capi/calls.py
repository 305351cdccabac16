"""What a cache does beside the operations of a step, done by the C library: the methods of `Cache` as functions.

They work on a cache of Python's, as its own methods do; names and arguments are those of memra_api.h, and where the
library hands something out, a snapshot or a graph, it is the library's own and stands for itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from memra_driver.capi.device import LibraryDevice, bind, library_device
from memra_driver.capi.library import Library, whole
from memra_driver.errors import DriverError, MemraError, StateError
from memra_driver.health import Health
from memra_driver.interop import operand
from memra_driver.layout import CacheState, HealthC, SnapshotC
from memra_driver.memory import Closing

CAPTURE_YOURS = 1


def advance(cache: Any, n: int = 1) -> None:
    """As Cache.advance."""
    _call(cache, "memra_advance", whole(n))


def truncate(cache: Any, new_len: int) -> None:
    """As Cache.truncate."""
    _call(cache, "memra_truncate", whole(new_len))


def reset(cache: Any) -> None:
    """As Cache.reset."""
    _call(cache, "memra_reset")


def sync(cache: Any) -> None:
    """As Cache.sync_d."""
    _call(cache, "memra_sync")


def settle(cache: Any) -> None:
    """As Cache.settle."""
    _call(cache, "memra_settle")


def digest(cache: Any) -> str:
    """As Cache.digest."""
    text = ctypes.create_string_buffer(65)
    _call(cache, "memra_digest", text)
    return text.value.decode()


# Beside the sequence.


def park_logits(cache: Any, row: Any) -> None:
    """As Cache.park_logits; the buffer, where it has to be made, is the library's."""
    if cache.state is CacheState.CLOSED or cache.cfg.n_vocab < 1:
        _call(cache, "memra_park_logits", 0)  # is refused
    e = cache.devices[cache.plan.placement[-1]]
    source = operand(row, "row", (cache.cfg.n_vocab,), (np.float32,), e, rows=1, out=False, bare=True)
    _call(cache, "memra_park_logits", source.ptr)


def take_logits(cache: Any) -> int | None:
    """The address of the parked logits, or None; they stay parked."""
    row = ctypes.c_uint64()
    _call(cache, "memra_take_logits", ctypes.byref(row))
    return row.value or None


def arm_taps(cache: Any, layer_ids: Sequence[int], t: int, hidden: int) -> None:
    """As Cache.arm_taps; the buffer, where it has to be made, is the library's."""
    ids = (ctypes.c_int32 * len(layer_ids))(*map(whole, layer_ids))
    _call(cache, "memra_arm_taps", ids, len(layer_ids), whole(t), whole(hidden))


def disarm_taps(cache: Any) -> None:
    """As Cache.disarm_taps."""
    _call(cache, "memra_disarm_taps")


def health(cache: Any) -> Health:
    """As Cache.health."""
    record = HealthC()
    _call(cache, "memra_health_read", ctypes.byref(record))
    return Health.read([bytes(record)])


def clear_health(cache: Any) -> None:
    """As Cache.clear_health."""
    _call(cache, "memra_clear_health")


# Back and forth. A snapshot is Python's or the library's.


class LibrarySnapshot(Closing):
    """A snapshot that the library made and frees."""

    def __init__(self, library: Library, address: int, cache: Any) -> None:
        self._library, self._address = library, address
        self._cache = cache  # whose list it stands in

    def as_c(self) -> Any:
        """Pointer to the memra_snapshot struct."""
        return ctypes.cast(self._address, ctypes.POINTER(SnapshotC))

    def close(self) -> None:
        """Frees it; may be called twice. Refused while a capture is open."""
        try:
            self._library.call("memra_snapshot_free", self._address)
        except StateError:
            raise
        except MemraError:
            self._address = 0
            raise
        self._address = 0


def snapshot(cache: Any) -> LibrarySnapshot:
    """As Cache.snapshot."""
    made = ctypes.c_void_p()
    library = _call(cache, "memra_snapshot_new", ctypes.byref(made))
    assert made.value is not None  # what a status of 0 says
    return LibrarySnapshot(library, made.value, cache)


def snapshot_into(cache: Any, snap: Any) -> None:
    """As Cache.snapshot_into."""
    _call(cache, "memra_snapshot_into", snap.as_c())


def rollback(cache: Any, snap: Any, accept_len: int) -> None:
    """As Cache.rollback."""
    _call(cache, "memra_rollback", snap.as_c(), whole(accept_len))


# Rounds.


def round_begin(cache: Any, width: int) -> None:
    """As Round.__enter__."""
    _call(cache, "memra_round_begin", whole(width))


def round_commit(cache: Any, accept_len: int) -> None:
    """As Round.commit."""
    _call(cache, "memra_round_commit", whole(accept_len))


def round_commit_from_device(cache: Any, accept_d: Any) -> None:
    """As Round.commit_from_device."""
    last = cache.devices[cache.plan.placement[-1]]
    count = operand(accept_d, "accept_d", (1,), (np.int32,), last, rows=1, out=False, bare=True)
    _call(cache, "memra_round_commit_from_device", count.ptr)


def round_reject(cache: Any) -> None:
    """As Round.reject."""
    _call(cache, "memra_round_reject")


# Recorded steps.


class LibraryGraph(Closing):
    """A capture of the library's."""

    def __init__(self, device: LibraryDevice) -> None:
        self._device = device
        self.address: int | None = None  # from the end of the capture on
        self.kept: list[Any] = []  # the caches that it moves

    def launch(self) -> None:
        """As Graph.launch."""
        self._device.library.call("memra_graph_launch", self.address)

    def close(self) -> None:
        """Frees it; may be called twice."""
        address, self.address = self.address, None
        self._device.library.call("memra_graph_close", address)


@contextmanager
def capture(e: Any, *, yours: bool = False) -> Iterator[LibraryGraph]:
    """Records what the library enqueues on e inside the block. yours: the caller begins and ends the stream capture.

    What Python frees inside is freed at the end.
    """
    device = library_device(e)
    graph = LibraryGraph(device)
    with e.stream.frees_wait():
        device.call("memra_capture_begin", CAPTURE_YOURS if yours else 0)
        device.open_graph = graph
        try:
            yield graph
            made = ctypes.c_void_p()
            device.call("memra_capture_end", ctypes.byref(made))
        except BaseException:
            try:
                device.call("memra_capture_abandon")
            except DriverError:
                device.call("memra_capture_abandon")  # where the stream goes on; else it does nothing
            raise
        finally:
            device.open_graph = None
    graph.address = made.value


def prepare_replay(cache: Any, graph: LibraryGraph | None = None, launches: int = 1) -> None:
    """As Cache.prepare_replay."""
    _call(cache, "memra_prepare_replay", None if graph is None else graph.address, launches)


def replayed(cache: Any, graph: LibraryGraph, launches: int) -> None:
    """As Cache.replayed."""
    _call(cache, "memra_replayed", graph.address, whole(launches))


def _call(cache: Any, name: str, *args: Any) -> Library:
    library = bind(cache)
    library.call(name, cache.as_c(), *args)
    return library
