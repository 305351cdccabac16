"""What --device, --stages and --fence of the commands name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from memra_driver.errors import ConfigError, MemraError

if TYPE_CHECKING:
    from memra_driver.config import ModelConfig


def opener(name: str) -> Callable[[bool], Any]:
    """What makes device objects, with an arena or without, of the device that --device names."""
    from memra_driver.kvdev import CudaDev, HostDev

    kind, _, number = name.partition(":")
    ordinal = int(number or 0) if kind == "cuda" and (number.isdecimal() or name == "cuda") else None
    if name == "auto":
        ordinal = _first_gpu()
    elif name != "host" and ordinal is None:
        raise ConfigError(f"--device {name}: it takes auto, cuda:N or host")
    if ordinal is None:
        return lambda arena: HostDev(arena=arena)
    return lambda arena: CudaDev(ordinal, arena=arena)


@contextmanager
def opened(name: str, *, arena: bool = True) -> Iterator[Any]:
    """The device that --device names; auto is the first GPU that can be used, else the host."""
    e = opener(name)(arena)
    try:
        yield e
    finally:
        e.close()


def _first_gpu() -> int | None:
    """The number of the first GPU that can be used; None, when it has said why, where there is none."""
    from memra_driver import driver
    from memra_driver.inventory import usable_gpu
    from memra_driver.kvdev import CudaDev

    trouble = usable_gpu()
    for ordinal in range(0 if trouble else driver.device_get_count()):
        try:
            CudaDev(ordinal).close()
        except MemraError as error:
            print(f"memra-driver: without cuda:{ordinal}: {error}", file=sys.stderr)
        else:
            return ordinal
    print(f"memra-driver: on the host{': ' if trouble else ''}{trouble}", file=sys.stderr)
    return None


@contextmanager
def stages_of(names: str) -> Iterator[list[Any]]:
    """The device of each stage. A GPU is one device however often it is named; each host is one of its own."""
    with ExitStack() as stack:
        devices: list[Any] = []
        found: dict[str, Any] = {}
        for name in names.split(","):
            name = name.strip()
            name = "cuda:0" if name == "cuda" else name
            if name not in found or name == "host":
                found[name] = stack.enter_context(opened(name))
            devices.append(found[name])
        yield devices


def fence_of(cuts: str, cfg: ModelConfig, stages: int) -> tuple[int, ...] | None:
    """What --fence says: auto is MEMRA_PP_STAGES and its kin where they ask for as many stages, else None: balance."""
    from memra_driver.pp import pp_cuts

    if cuts == "auto":
        asked = pp_cuts(cfg.n_trunk) if stages > 1 else None
        return asked if asked is not None and len(asked) == stages + 1 else None
    numbers = [part.strip() for part in cuts.split(",")]
    if len(numbers) != stages - 1 or not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--fence {cuts}: {stages} stages take auto or {stages - 1} layer number{'s' * (stages > 2)}")
    return (0, *map(int, numbers), cfg.n_layer)


def device_name(e: Any) -> str:
    from memra_driver.kvdev import CudaDev

    return f"cuda:{e.ordinal} ({e.context.name()})" if isinstance(e, CudaDev) else "host"
