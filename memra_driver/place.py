"""Where the planes of a cache come from, and how its bytes are moved on the device that owns them.

A device is asked for seven operations (`kvdev.KvDev`) and may offer more: an arena, copies by
address, kernels. This file is the only one that asks which of them a device has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memra_driver.errors import DriverError, DriverOutOfMemory, MemraError, OutOfMemory, UnsupportedError
from memra_driver.memory import Borrowed, run_all
from memra_driver.plan import ALIGN_BYTES, CachePlan, PlanRow

Key = tuple[str, int | None, int]  # plane, layer, device index
Action = Callable[[], None]  # one call that a device takes or refuses as a whole

COUNTERS_PER_LAUNCH = 128


def has_arena(e: Any) -> bool:
    """Whether e keeps all planes of a cache in one allocation."""
    return bool(getattr(e, "arena", False))


def overcommits(e: Any) -> bool:
    """Whether e may grant more memory than it has, as a host does; so may a device that does not tell."""
    return bool(getattr(e, "overcommits", True))


def has_kernels(e: Any) -> bool:
    """Whether e runs the kernel table."""
    return hasattr(e, "launch")


def ordinal(e: Any) -> int:
    """CUDA ordinal of e; -1 for host memory and for devices that have none."""
    return int(getattr(e, "ordinal", -1))


def united(stages: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The devices of some stages, each once, and the index of each stage's: one object is one device."""
    devices: list[Any] = []
    placement = []
    for e in stages:
        index = next((i for i, each in enumerate(devices) if each is e), len(devices))
        if index == len(devices):
            devices.append(e)
        placement.append(index)
    return devices, placement


def close_slices(slices: Iterable[Any]) -> None:
    """Frees what can be freed, as run_all; slices of a device without close() go with their last reference."""
    run_all(getattr(each, "close", lambda: None) for each in slices)


def check_fit(plan: CachePlan, devices: Sequence[Any]) -> None:
    """Raises OutOfMemory when a device has less available than the plan needs; nothing was allocated."""
    need: dict[int, int] = {}
    free: dict[int, tuple[int, int]] = {}
    for device, e in zip(plan.per_device, devices, strict=True):
        available = e.mem_info()[0] if hasattr(e, "mem_info") else None
        if available is None:
            continue
        where = ordinal(e)  # two streams of one GPU draw on the same memory
        need[where] = need.get(where, 0) + (device.arena_bytes if has_arena(e) else device.plane_bytes)
        free[where] = (available, device.device)
    for where, (available, _) in free.items():
        if need[where] > available:
            name = f"cuda:{where}" if where >= 0 else "host"
            others = "; nvidia-smi says who holds the rest" if where >= 0 else ""
            raise OutOfMemory(
                f"the cache needs {need[where]} bytes on {name}, which has {available} free;"
                f" lower max_ctx, choose smaller formats, or spread the layers over more devices{others}"
            )


class Planes(Mapping[Key, Any]):
    """The planes of a cache by key. Those in an arena are cut from it when they are first asked for.

    An arena also has the planes "counters", which spans its len_d and pos_d, and "states", which a snapshot keeps.
    """

    def __init__(self, plan: CachePlan) -> None:
        self.arenas: dict[int, Any] = {}  # by device index
        self._cuts = plan.cuts
        self._found: dict[Key, Any] = {}

    def put(self, key: Key, plane: Any) -> None:
        """A plane that is an allocation of its own."""
        self._found[key] = plane

    def __getitem__(self, key: Key) -> Any:
        found = self._found.get(key)
        if found is None:
            arena = self.arenas[key[2]]
            found = self._found[key] = arena.plane(*self._cuts[key])
        return found

    def apart(self, name: str, first: int, second: int, d: int) -> int:
        """Elements from where plane `name` of one layer begins in the arena to where that of another does."""
        (begin, _, dtype), (end, _, _) = self._cuts[name, first, d], self._cuts[name, second, d]
        return int((end - begin) // np.dtype(dtype).itemsize)

    def span(self, name: str, first: int, last: int, d: int) -> Any:
        """The arena from plane `name` of layer `first` to the end of that of layer `last`, with what lies between."""
        begin, _, dtype = self._cuts[name, first, d]
        length = self._cuts[name, last, d][1]
        if not length:
            return self[name, first, d]
        return self.arenas[d].plane(begin, self.apart(name, first, last, d) + length, dtype)

    def __contains__(self, key: object) -> bool:
        return key in self._found or (key in self._cuts and key[2] in self.arenas)

    def __iter__(self) -> Iterator[Key]:
        return filter(self.__contains__, self._cuts)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def place(plan: CachePlan, devices: Sequence[Any]) -> tuple[Planes, list[Any]]:
    """Allocates every plane: views into one cleared arena per device, or the seven operations in the Rust order.

    Returns the planes by key and the allocations that own them. Raises OutOfMemory as check_fit, DriverError. On a
    failure nothing stays allocated.
    """
    # What is free is asked before the first allocation. Where there is only one, on a device that makes or refuses it
    # as a whole, a birth is spared the question.
    is_judged = len(devices) == 1 and has_arena(devices[0]) and not overcommits(devices[0])
    if not is_judged:
        check_fit(plan, devices)
    planes = Planes(plan)
    owners: list[Any] = []
    try:
        for device, e in zip(plan.per_device, devices, strict=True):
            if has_arena(e):
                arena = e.alloc_arena(device.arena_bytes)
                owners.append(arena)
                planes.arenas[device.device] = arena
        for row in () if len(planes.arenas) == len(devices) else plan.planes:
            e = devices[row.device]
            if not has_arena(e):
                plane = _alloc(e, row)
                owners.append(plane)
                planes.put((row.plane, row.layer, row.device), plane)
    except BaseException as error:
        close_slices(owners)
        if is_judged and isinstance(error, DriverOutOfMemory):
            with contextlib.suppress(DriverError):
                check_fit(plan, devices)  # need and free in words, where they can be told
        raise
    return planes, owners


def _alloc(e: Any, row: PlanRow) -> Any:
    if row.dtype == "u8":
        return e.alloc_u8(row.len)
    if row.dtype == "i32":
        return e.htod_i32([0] * row.len)
    if row.group in ("logits", "taps", "tape"):
        return e.uninit(row.len)
    return e.zeros(row.len)


class Copies(NamedTuple):
    """Copies of planes on device e, in as few calls as it allows: the calls, and what they copy.

    ranges: (dst, src, bytes) by address; None where e copies slices only.
    """

    e: Any
    actions: list[Action]
    ranges: list[tuple[int, int, int]] | None

    @property
    def are_few(self) -> bool:
        """Whether they are at most two ranges: plain copies, or part of one launch."""
        return self.ranges is not None and len(self.ranges) <= 2

    @property
    def are_one_launch(self) -> bool:
        """Whether one launch makes all of them: few, and some."""
        return self.are_few and bool(self.ranges) and has_kernels(self.e)


def copies_of(e: Any, pairs: Sequence[tuple[Any, Any]]) -> Copies:
    """Copies src into dst for each (dst, src) of equal length.

    Neighbours in one arena are one range, padding included. Up to two ranges are plain copies,
    more are one copy_many.
    """
    pairs = [pair for pair in pairs if pair[0].len]
    if not hasattr(e, "copy_bytes"):
        return Copies(e, [lambda d=dst, s=src: e.copy_into(d, 0, s, s.len) for dst, src in pairs], None)  # type: ignore[misc]
    ranges: list[tuple[int, int, int]] = []
    for dst, src, n_bytes in sorted((dst.ptr, src.ptr, dst.nbytes) for dst, src in pairs):
        if ranges and has_arena(e):
            last_dst, last_src, last_bytes = ranges[-1]
            step = last_bytes + -last_bytes % ALIGN_BYTES
            if (dst, src) == (last_dst + step, last_src + step):
                ranges[-1] = (last_dst, last_src, step + n_bytes)
                continue
        ranges.append((dst, src, n_bytes))
    if len(ranges) <= 2:
        return Copies(e, [lambda r=each: e.copy_bytes(*r) for each in ranges], ranges)  # type: ignore[misc]
    return Copies(e, [lambda: e.copy_many(ranges)], ranges)


def copy_actions(e: Any, pairs: Sequence[tuple[Any, Any]]) -> list[Action]:
    """The calls of copies_of."""
    return copies_of(e, pairs).actions


def keep_actions(copies: Copies) -> list[Action]:
    """The copies into a snapshot: one launch where they are few, on a device with kernels."""
    if not copies.are_one_launch:
        return copies.actions
    args = restore_arguments(copies)
    return [lambda: copies.e.launch("restore", *args)]


def restore_actions(
    copies: Copies, counters: Sequence[Any], packed: Any, values: dict[int, int], health: Any
) -> list[Action]:
    """The copies, then counters[i] = values[i]: one launch for both where there are few of either."""
    e, distinct = copies.e, set(values.values())
    is_one = has_kernels(e) and packed is not None and packed.len <= COUNTERS_PER_LAUNCH and len(distinct) <= 2
    if not (is_one and copies.are_few):
        return [*copies.actions, *counter_actions(e, counters, packed, values, health)]
    args = restore_arguments(copies, packed, *_values_and_masks(values), health)
    return [lambda: e.launch("restore", *args)]


def restore_arguments(
    copies: Copies, counters: Any = None, a: int = 0, b: int = 0, in_a: int = 0, in_b: int = 0, health: Any = None
) -> tuple[Any, ...]:
    """Of the launch that makes at most two copies and sets counters: those of mask in_a to a, of in_b to b.

    Without the others: the copies alone.
    """
    assert copies.ranges is not None
    args: list[Any] = []
    for dst, src, n_bytes in [*copies.ranges, (0, 0, 0), (0, 0, 0)][:2]:
        args += [Borrowed(copies.e.memory, ptr, n_bytes, np.uint8) if n_bytes else None for ptr in (src, dst)]
        args.append(n_bytes)
    return *args, counters, a, b, *_mask_words(in_a, in_b), health, 0


def counter_actions(e: Any, counters: Sequence[Any], packed: Any, values: dict[int, int], health: Any) -> list[Action]:
    """Stores values[i] into counters[i], in stream order, without reading host memory late.

    packed: one slice over all of them, or None where each is an allocation of its own. Packed ones
    take one launch for any two distinct values.
    """
    if not has_kernels(e):
        return [lambda i=i, v=v: e.set_i32_one(counters[i], v) for i, v in values.items()]  # type: ignore[misc]
    if packed is None:
        return [_set_action(e, counters[i], {0: value}, health) for i, value in values.items()]
    actions: list[Action] = []
    for low in range(0, packed.len, COUNTERS_PER_LAUNCH):
        window = {i - low: v for i, v in values.items() if low <= i < low + COUNTERS_PER_LAUNCH}
        distinct = sorted(set(window.values()))
        for pair in zip(distinct[::2], [*distinct[1::2], *distinct[-1:]], strict=False):
            chosen = {i: v for i, v in window.items() if v in pair}
            actions.append(_set_action(e, packed.view(low, packed.len), chosen, health))
    return actions


def commit_counter_actions(
    e: Any, counters: Sequence[Any], packed: Any, chosen: Sequence[int], pos_d: Any, count: Any, accept: int, rows: int,
    health: Any,
) -> list[Action]:  # fmt: skip
    """counters[i] = pos + accepted rows for each chosen i, then pos moves by as many: all read on the device."""
    launches: list[tuple[Any, int]] = []  # where the mask begins, and the mask
    if packed is None:
        launches = [(counters[i], 1) for i in chosen]
    else:
        for low in range(0, len(counters), COUNTERS_PER_LAUNCH):
            mask = sum(1 << i - low for i in chosen if low <= i < low + COUNTERS_PER_LAUNCH)
            launches += [(packed.view(low, packed.len), mask)] if mask else []
    launches = launches or [(pos_d, 0)]
    actions: list[Action] = []
    for target, mask in launches:
        last = int(target is launches[-1][0])
        args = (target, pos_d, count, accept, rows, signed_word(mask), signed_word(mask >> 64), last, health, 0)
        actions.append(lambda args=args: e.launch("commit_counters", *args))  # type: ignore[misc]
    return actions


def _set_action(e: Any, target: Any, values: dict[int, int], health: Any) -> Action:
    """One launch that sets target[i] = values[i]: at most two distinct values, i below COUNTERS_PER_LAUNCH."""
    a, b, in_a, in_b = _values_and_masks(values)
    return lambda: e.launch("set_counters", target, a, b, *_mask_words(in_a, in_b), health, 0)


def _values_and_masks(values: dict[int, int]) -> tuple[int, int, int, int]:
    """The two values, and a mask of the counters that get either."""
    a, b = min(values.values()), max(values.values())
    in_a, in_b = (sum(1 << i for i, v in values.items() if v == value) for value in (a, b))
    return a, b, in_a, in_b


def _mask_words(in_a: int, in_b: int) -> list[int]:
    return [signed_word(mask >> shift) for mask in (in_a, in_b) for shift in (0, 64)]


def signed_word(word: int) -> int:
    """The low 64 bits as the signed number that a `long long` parameter takes."""
    word &= 2**64 - 1
    return word - (word >> 63 << 64)


def zero_actions(e: Any, planes: Sequence[Any]) -> list[Action]:
    """Zeroes planes in place; neighbours in one arena together."""
    planes = [plane for plane in planes if plane.len]
    if not hasattr(e, "clear_bytes"):
        fresh = {np.dtype(np.uint8): e.alloc_u8, np.dtype(np.float32): e.zeros}
        return [lambda p=p: e.copy_into(p, 0, fresh[np.dtype(p.dtype)](p.len), p.len) for p in planes]  # type: ignore[misc]
    ranges: list[tuple[int, int]] = []
    for ptr, n_bytes in sorted((plane.ptr, plane.nbytes) for plane in planes):
        if ranges and has_arena(e):
            last, last_bytes = ranges[-1]
            step = last_bytes + -last_bytes % ALIGN_BYTES
            if ptr == last + step:
                ranges[-1] = (last, step + n_bytes)
                continue
        ranges.append((ptr, n_bytes))
    return [lambda r=each: e.clear_bytes(*r) for each in ranges]  # type: ignore[misc]


def read_bytes(plane: Any, n_bytes: int) -> bytes:
    """The first n_bytes of a plane, after the work queued before; needs slices with to_numpy."""
    if not n_bytes:
        return b""
    if not hasattr(plane, "to_numpy"):
        raise UnsupportedError("this device's slices have no to_numpy, so their bytes cannot be read")
    if hasattr(plane, "view"):
        plane = plane.view(0, -(-n_bytes // plane.dtype.itemsize))
    data: bytes = plane.to_numpy().tobytes()
    return data[:n_bytes]


def run_actions(actions: Iterable[Action], taint: Callable[[], None]) -> None:
    """Runs the actions in order. What fails after the first, or is interrupted, leaves a change half made: taint()."""
    done = False
    try:
        for action in actions:
            action()
            done = True
    except BaseException as error:
        if done or not isinstance(error, MemraError):
            taint()
            if isinstance(error, DriverError):
                error.add_note("the cache is tainted: reset(), close(), or rollback(accept_len=0) to a valid snapshot")
        raise
