"""Captured steps and rounds of a player, closed behind a block; a launch as an engine makes it; what is tapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memra_driver.soak.player import Player, Recorded, Taps, launch_by_hand

__all__ = ["Recorded", "Taps", "launch_by_hand", "recorded", "warm"]


@contextmanager
def recorded(*args: Any, **options: Any) -> Iterator[Recorded]:
    made = Recorded(*args, **options)
    yield made
    made.close()


def warm(player: Player) -> None:
    """Room for attention of the widest step, which a capture cannot make."""
    player.warm()
