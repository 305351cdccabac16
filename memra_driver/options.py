"""What a cache reserves and how it behaves: CacheOptions."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from memra_driver.errors import ConfigError

MAX_INT = 2**31 - 1  # positions are i32 on the device, and so are the rows and columns that a kernel takes


@dataclass(frozen=True)
class CacheOptions:
    """What a cache reserves and how it behaves.

    max_rows: rows that one attend takes. round_width: widest Round; 0 plans no tape.
    reserve_logits: allocate the parked logits at birth. reserve_taps: (layer_ids, rows) of a tap
    sink to allocate at birth. skip_mtp_state: trailing MTP layers get neither K/V nor state.
    strict: once the error record is not empty, digest and settle (the calls that wait) raise HealthError.
    """

    max_rows: int = 16
    round_width: int = 0
    reserve_logits: bool = False
    reserve_taps: tuple[tuple[int, ...], int] | None = None
    skip_mtp_state: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_rows", _count("max_rows", self.max_rows, 1))
        object.__setattr__(self, "round_width", _count("round_width", self.round_width, 0))
        if self.reserve_taps is not None:
            try:
                layer_ids, rows = self.reserve_taps
                layer_ids = tuple(map(operator.index, layer_ids))
            except (TypeError, ValueError):
                raise ConfigError(
                    f"CacheOptions.reserve_taps is {self.reserve_taps!r}; it takes (layer_ids, rows)"
                ) from None
            if not layer_ids:
                raise ConfigError("CacheOptions.reserve_taps names no layer; at least 1")
            rows = _count("reserve_taps rows", rows, 1)
            object.__setattr__(self, "reserve_taps", (layer_ids, rows))


def _count(name: str, value: Any, least: int) -> int:
    """value as an int in least .. MAX_INT; else ConfigError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"CacheOptions.{name} is {value!r}; it must be a whole number")
    if operator.index(value) < least:
        raise ConfigError(f"CacheOptions.{name} is {value}; it must be at least {least}")
    if operator.index(value) > MAX_INT:
        raise ConfigError(f"CacheOptions.{name} is {value}; at most {MAX_INT}")
    return operator.index(value)
