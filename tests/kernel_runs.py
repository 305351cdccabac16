"""Runs a kernel of the table on a device with NumPy arrays, and compares what two devices made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from checks import close, worst

from memra_driver.kernels import KERNELS
from memra_driver.memory import CudaSlice


def run(dev: Any, kernel: str, **args: Any) -> SimpleNamespace:
    """Launches `kernel` with these parameters by name and returns every array as it is afterwards.

    The arrays given stay as they are. One array under two names is one piece of device memory.
    """
    names = [name for _, name in KERNELS[kernel].params]
    assert sorted(names) == sorted(args)
    slices: dict[int, CudaSlice] = {}
    for value in args.values():
        if isinstance(value, np.ndarray) and id(value) not in slices:
            slices[id(value)] = CudaSlice(dev.memory, value.size, value.dtype)
            slices[id(value)].copy_from(value.reshape(-1))
    dev.launch(kernel, *(slices.get(id(args[name]), args[name]) for name in names))
    after = SimpleNamespace()
    for name in names:
        if isinstance(args[name], np.ndarray):
            setattr(after, name, slices[id(args[name])].to_numpy())
    for made in slices.values():
        made.close()
    return after


def same(a: SimpleNamespace, b: SimpleNamespace, *, nearly: tuple[str, ...] = ()) -> None:
    """Every array of a has the bytes of its namesake in b; those named in `nearly` agree as `close` says."""
    for name, array in vars(a).items():
        other = getattr(b, name)
        if name in nearly:
            assert close(array, other), f"{name}: {worst(array, other)}"
        else:
            differing = np.flatnonzero(array.view(np.uint8) != other.view(np.uint8))
            assert differing.size == 0, f"{name}: {differing.size} bytes differ, the first is byte {differing[0]}"
