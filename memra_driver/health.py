"""The error record of a cache, read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from memra_driver.layout import FAULT_KINDS, HealthC


class Fault(IntEnum):
    """What a kernel can report; memra_driver.h says what each means."""

    NONFINITE = 0
    SCALE_OVERFLOW = 1
    FP8_SATURATED = 2
    SLOT_RANGE = 3
    BAD_ACCEPT = 4


@dataclass(frozen=True)
class FaultCount:
    """How often a fault was seen, and the lowest position (then layer) at which it was."""

    count: int
    layer: int
    slot: int


@dataclass(frozen=True)
class Health:
    """The faults that a cache has seen since it was born or last cleared; false when there are none."""

    faults: dict[Fault, FaultCount]

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        if not self.faults:
            return "no faults"
        return "; ".join(
            f"{kind.name} x{seen.count}, first at layer {seen.layer}, position {seen.slot}"
            for kind, seen in sorted(self.faults.items())
        )

    @classmethod
    def read(cls, records: Iterable[bytes]) -> Health:
        """Merges the records of a cache's devices, each the bytes of a memra_health."""
        faults: dict[Fault, FaultCount] = {}
        for record in map(HealthC.from_buffer_copy, records):
            for kind in map(Fault, range(FAULT_KINDS)):
                if not record.flags >> kind & 1:
                    continue
                slot, layer = divmod(2**64 - 1 - record.first[kind], 1 << 16)
                seen = FaultCount(record.count[kind], layer, slot)
                if kind in faults:
                    other = faults[kind]
                    first = min(seen, other, key=lambda fault: (fault.slot, fault.layer))
                    seen = FaultCount(seen.count + other.count, first.layer, first.slot)
                faults[kind] = seen
        return cls(faults)
