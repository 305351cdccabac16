"""The kinds of buffers that a cache has, and what a plan says of one: shared by plan.py and, as a table, by C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Plane(NamedTuple):
    """A kind of buffer. `owner` says what there is one of it for; `section` orders the arena.

    MTP layers keep the outer places around the trunk's states: their planes stand in `mtp_section`.
    """

    name: str
    owner: str  # an attention or recurrent layer, each in every layer of that kind; a device; what is asked for
    dtype: str
    group: str  # which sum it counts in
    section: int
    mtp_section: int


# In the order of the Rust walk, then ours. memra_plan.c has the same table.
PLANES = (
    Plane("k", "attention", "u8", "kv", 0, 0),
    Plane("v", "attention", "u8", "kv", 0, 0),
    Plane("len_d", "attention", "i32", "counters", 1, 1),
    Plane("conv_state", "recurrent", "f32", "recurrent", 3, 3),
    Plane("ssm_state", "recurrent", "f32", "recurrent", 5, 4),
    Plane("ssm_state_alt", "recurrent", "f32", "double_buffer", 6, 7),
    Plane("pos_d", "device", "i32", "counters", 1, 1),
    Plane("health", "device", "u8", "counters", 2, 2),
    Plane("tape", "round", "f32", "tape", 8, 8),
    Plane("logits", "logits", "f32", "logits", 9, 9),
    Plane("taps", "taps", "f32", "taps", 10, 10),
)


@dataclass(frozen=True)
class PlanRow:
    """One buffer: `len` elements of `dtype` ("u8", "i32", "f32") at `offset` bytes in its device's arena.

    `group` says which sum it counts in; a row of group "padding" only fills the arena.
    """

    name: str
    plane: str
    layer: int | None
    device: int
    dtype: str
    len: int
    bytes: int
    offset: int
    group: str


@dataclass(frozen=True)
class DevicePlan:
    """Sums of one device. `snapshot` is the arena's byte range that a snapshot keeps."""

    device: int
    plane_bytes: int
    arena_bytes: int
    snapshot: tuple[int, int]

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot on this device."""
        return self.snapshot[1] - self.snapshot[0]
