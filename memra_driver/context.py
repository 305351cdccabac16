"""The primary context of a device, and what a forked child may not do with one.

What lives on a context is freed through it, also when its object is closed already; the last of that releases it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

from . import driver
from .errors import DriverError, MemraError, StateError
from .memory import Closing, note_change

GONE = frozenset({driver.DEINITIALIZED, driver.CONTEXT_IS_DESTROYED})  # nothing is left that could be freed
# What a driver says of a context that is no more.
LOST = GONE | {driver.INVALID_VALUE, driver.INVALID_CONTEXT, driver.INVALID_HANDLE}

_started = False  # this process made a context
_forked = False  # this process is a fork of one that had


def _after_fork_in_child() -> None:
    global _forked
    _forked = _started or _forked
    note_change()


os.register_at_fork(after_in_child=_after_fork_in_child)


def in_a_fork() -> bool:
    """Whether this process was forked from one that used the GPU: there nothing is freed, and nothing works."""
    return _forked


def _refuse_in_a_fork() -> None:
    if _forked:
        raise StateError(
            "CUDA does not survive fork(): this process was forked from one that used the GPU; "
            "start children with multiprocessing's 'spawn', or use the GPU in the child only"
        )


class CudaContext(Closing):
    """The primary context of one device, shared with every other user of it in the process; never reset.

    Retained once here and released once: by `close()`, or, where slices and streams outlive that, with the last of
    them. Raises NoDriver, UnsupportedDriver, DriverError; StateError in a forked child.
    """

    def __init__(self, device: int = 0) -> None:
        global _started
        _refuse_in_a_fork()
        driver.init()
        _started = True
        self.device = device
        self._device = driver.device_get(device)
        self.handle = driver.device_primary_ctx_retain(self._device)
        self._release = weakref.finalize(self, _release_primary, self._device)
        self._release.atexit = False
        self._error: MemraError | None = None
        self._closed = False
        self._stopped = False  # closed, or with an error to raise: the one flag that `bind` looks at
        self._held: dict[tuple[str, int], int] = {}  # what lives on this context: (kind, handle) -> bytes
        self.pools = bool(self.attribute("MEMORY_POOLS_SUPPORTED"))
        self._id = driver.ctx_get_id(self.handle)

    def bind(self) -> None:
        """Makes the context current on the calling thread. Raises what a finaliser met since the last call."""
        if self._stopped or _forked:
            self._refuse()
        if driver.ctx_get_current() != self.handle:
            driver.ctx_set_current(self.handle)

    def bind_alive(self) -> None:
        """`bind`, for calls that hand the driver a stream, an event or memory.

        The driver follows such a handle without a look at the context: where somebody destroyed that, the process may
        die. A prepared launch goes without this question, which would cost it a tenth more, and runs that risk.
        """
        self.bind()
        self.check_alive()

    def check_alive(self) -> None:
        """Refused where somebody destroyed the context."""
        if not self.is_alive():
            raise StateError(f"somebody destroyed the context of device {self.device}: what lived there is gone")

    def is_alive(self) -> bool:
        """Whether the context is the one that it was, and not one that somebody reset. Raises DriverError."""
        try:
            return driver.ctx_get_id(self.handle) == self._id
        except DriverError as error:
            if error.code in LOST:
                return False
            raise

    def _refuse(self) -> None:
        _refuse_in_a_fork()
        if self._closed:
            raise StateError(f"the context of device {self.device} is closed")
        error, self._error, self._stopped = self._error, None, False
        if error is not None:
            raise error

    def record_error(self, error: MemraError) -> None:
        """Keeps the first error of a finaliser for the next call."""
        if self._error is None:
            self._error = error
            self._stopped = True
            note_change()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_ready(self) -> bool:
        """Whether `bind` would raise nothing of its own: it is open, with no error kept, and this is no fork."""
        return not (self._stopped or _forked)

    def close(self) -> None:
        """Refuses new work from now on; releases the primary context once nothing lives on it any more."""
        self._closed = self._stopped = True
        note_change()
        self._settle()

    def _settle(self) -> None:
        if self._closed and not self._held and not _forked and self._release.detach():
            try:
                driver.device_primary_ctx_release(self._device)
            except DriverError as error:
                if error.code not in LOST:  # somebody has reset it
                    raise

    def _hold(self, kind: str, handle: int, nbytes: int = 0) -> None:
        self._held[kind, handle] = nbytes

    def let_go(self, kind: str, handle: int, free: Callable[[int], None]) -> None:
        """Frees one thing that lives here, also when the context is closed already; recorded errors stay for later.

        Puts the thread's context back afterwards: a finaliser may run in the middle of work on another device. A call
        that only looks round keeps nothing from being freed when it fails; the first error is raised at the end.
        """
        errors: list[DriverError] = []

        def tried(call: Callable[..., Any], *args: int) -> tuple[bool, Any]:
            try:
                return True, call(*args)
            except DriverError as error:
                errors.append(error)
                return False, None

        try:
            known, before = tried(driver.ctx_get_current)
            here = before == self.handle or tried(driver.ctx_set_current, self.handle)[0]
            answered, alive = tried(self.is_alive)
            if (here or self.pools or kind != "memory") and (alive or not answered):
                tried(free, handle)  # of these calls only cuMemFree goes by the current context
            if known and before != self.handle:
                tried(driver.ctx_set_current, before)
        finally:
            self._held.pop((kind, handle), None)
            tried(self._settle)
        for error in errors:
            if error.code not in GONE:
                raise error

    @property
    def live_bytes(self) -> int:
        """Bytes allocated through this object and not freed."""
        return sum(list(self._held.values()))

    @property
    def live_count(self) -> int:
        """Allocations, streams and events made through this object and not given back."""
        return len(self._held)

    def attribute(self, name: str) -> int:
        """A device attribute by what follows CU_DEVICE_ATTRIBUTE_."""
        return driver.device_get_attribute(name, self._device)

    def name(self) -> str:
        return driver.device_get_name(self._device)

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def arch(self) -> str:
        """The name that NVRTC has for this GPU, as in "sm_90"."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes, by the driver's word. Bytes that the pool keeps for reuse count as not free."""
        self.bind()
        return driver.mem_get_info()

    def pool_info(self) -> tuple[int, int]:
        """(reserved, used) bytes of the device's default memory pool, by every user of it; (0, 0) without pools."""
        self.bind()
        if not self.pools:
            return 0, 0
        pool = driver.device_get_default_mem_pool(self._device)
        return (
            driver.mem_pool_get_attribute("RESERVED_MEM_CURRENT", pool),
            driver.mem_pool_get_attribute("USED_MEM_CURRENT", pool),
        )

    def keep_memory(self, nbytes: int) -> None:
        """Up to so many unused bytes stay in the device's default memory pool, for every user of it in the process."""
        self.bind()
        if self.pools:
            driver.mem_pool_set_release_threshold(driver.device_get_default_mem_pool(self._device), nbytes)

    def trim(self) -> None:
        """Gives back what that pool holds unused."""
        self.bind()
        if self.pools:
            driver.mem_pool_trim_to(driver.device_get_default_mem_pool(self._device), 0)

    def available(self) -> tuple[int, int]:
        """(available, total) bytes: what the driver calls free, and what the memory pool holds unused."""
        free, total = self.memory_info()
        reserved, used = self.pool_info()
        return free + reserved - used, total

    def enable_peer(self, other: CudaContext) -> bool:
        """Lets this device read and write the other's memory directly; False where the two cannot.

        Memory of pools is not part of it: their owner grants that by itself.
        """
        self.bind()
        if not driver.device_can_access_peer(self._device, other._device):
            return False
        try:
            driver.ctx_enable_peer_access(other.handle)
        except DriverError as error:
            if error.code not in (driver.PEER_ACCESS_UNSUPPORTED, driver.TOO_MANY_PEERS):
                raise
            return False
        return True


def _release_primary(device: int) -> None:
    if _forked:
        return
    with contextlib.suppress(MemraError):  # there is no later call on this context that could raise it
        driver.device_primary_ctx_release(device)
