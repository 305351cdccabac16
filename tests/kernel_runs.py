"""Runs a kernel of the table on a device with NumPy arrays, and compares what two devices made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from checks import close, worst

from memra_driver.kernels import KERNELS
from memra_driver.layout import SeqC
from memra_driver.memory import CudaSlice
from memra_driver.plan import SCAN_STATE_SIZES


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


# What one sequence of a batch has for itself: by its row of the table, and as a block of an array of all.
OWN = {
    "append_kv": (("k", "v", "len_d", "pos_d", "health"), ("k_rows", "v_rows")),
    "conv_update": (("conv_state", "pos_d", "health"), ("x", "out")),
    "gdn_prep": (("pos_d", "health"), ("conv_out", "alpha", "beta_raw", "q", "k", "v", "g_log", "beta")),
    "gdn_scan": (("ssm_state",), ("q", "k", "v", "g_log", "beta", "out")),
    **dict.fromkeys(
        (f"recur_step_{size}" for size in SCAN_STATE_SIZES),
        (("conv_state", "ssm_state", "pos_d", "health"), ("x", "alpha", "beta_raw", "out")),
    ),
    "attend_combine": (("pos_d", "health"), ("part", "out")),
}
ATTEND_OWN = (("k", "v", "pos_d", "health"), ("q", "part"))


def run_batch(
    dev: Any, kernel: str, sequences: list[dict[str, Any]], slot: int = -(2**40)
) -> list[SimpleNamespace]:
    """One launch for sequences whose single launches have these arguments; what `run` would return for each.

    slot: of the launch itself, which counts for none of them.

    gdn_scan and recur_step work in place: their state is `state_in`, and comes back as `state_out`.
    """
    own, split = OWN.get(kernel, ATTEND_OWN)
    table = np.zeros((len(sequences), len(SeqC._fields_)), np.uint64)
    columns = {name: i for i, (name, _) in enumerate(SeqC._fields_)}
    slices: list[dict[str, CudaSlice]] = []
    for row, args in zip(table, sequences, strict=True):
        arrays = {name: args["state_in" if name == "ssm_state" else name] for name in own}
        slices.append({name: CudaSlice(dev.memory, x.size, x.dtype) for name, x in arrays.items() if x is not None})
        for name, each in slices[-1].items():
            each.copy_from(arrays[name].reshape(-1))
            row[columns[name]] = each.ptr
        row[columns["max_ctx"]] = args.get("max_ctx", 0)
    replaced = {"ssm_state": ("state_in", "state_out")}
    absent = {name: None for field in own for name in replaced.get(field, (field,))}
    joined = {
        name: None if sequences[0][name] is None else np.concatenate([args[name].reshape(-1) for args in sequences])
        for name in split
    }
    unused = {name: value for name, value in (("slot", slot), ("max_ctx", -(2**40))) if name in sequences[0]}
    shared = {"seqs": table.reshape(-1), "n_seqs": len(sequences)}
    after = run(dev, kernel, **(sequences[0] | absent | joined | unused | shared))
    results = []
    for i, (args, held) in enumerate(zip(sequences, slices, strict=True)):
        one = {"state_out" if name == "ssm_state" else name: each.to_numpy() for name, each in held.items()}
        one |= {name: np.split(getattr(after, name), len(sequences))[i] for name in split if args[name] is not None}
        results.append(SimpleNamespace(**one))
        for each in held.values():
            each.close()
    return results


def same(a: SimpleNamespace, b: SimpleNamespace, *, nearly: tuple[str, ...] = ()) -> None:
    """Every array of a has the bytes of its namesake in b; those named in `nearly` agree as `close` says."""
    for name, array in vars(a).items():
        other = getattr(b, name)
        if name in nearly:
            assert close(array, other), f"{name}: {worst(array, other)}"
        else:
            differing = np.flatnonzero(array.view(np.uint8) != other.view(np.uint8))
            assert differing.size == 0, f"{name}: {differing.size} bytes differ, the first is byte {differing[0]}"
