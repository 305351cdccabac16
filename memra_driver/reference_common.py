"""What the NumPy twins share: array types, the error record, and the members of a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from memra_driver.formats import FORMATS
from memra_driver.health import Fault
from memra_driver.layout import HEALTH_BYTES, SeqC
from memra_driver.memory import HostMemory

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

Twin = TypeVar("Twin", bound=Callable[..., None])

BY_CODE = {fmt.code: fmt for fmt in FORMATS.values()}


def report(health: U8 | None, kind: Fault, layer: int, slot: int, count: int) -> None:
    """Adds `count` faults, the first at position `slot`, to the record (`memra_health`); None: dropped."""
    if health is None:
        return
    words = health.view(np.uint64)
    words[kind] = (int(words[kind]) + count) % 2**64
    key = (max(slot, 0) << 16 | layer) % 2**64
    words[5 + kind] = max(int(words[5 + kind]), 2**64 - 1 - key)
    health[80:84].view(np.uint32)[0] |= 1 << kind


FIELDS = tuple(name for name, _ in SeqC._fields_)
_DTYPES = {"k": np.uint8, "v": np.uint8, "health": np.uint8, "len_d": np.int32, "pos_d": np.int32}


def k_bytes(a: dict[str, Any]) -> int:
    return int(a["max_ctx"] * a["k_tok_bytes"])


def v_bytes(a: dict[str, Any]) -> int:
    return int(a["max_ctx"] * a["v_tok_bytes"])


def batched(split: tuple[str, ...], **sizes: Callable[[dict[str, Any]], int]) -> Callable[[Twin], Twin]:
    """Lets a twin serve a batch: with `seqs` it runs once per sequence, on the buffers that memra_seq names.

    split: parameters that hold one block per sequence. sizes: elements of the parameters that memra_seq replaces;
    ssm_state stands for state_in and state_out. pos_d and health are replaced where the twin has them.
    """

    def wrap(twin: Twin) -> Twin:
        names = tuple(inspect.signature(twin).parameters)

        @functools.wraps(twin)
        def run(*args: Any) -> None:
            a = dict(zip(names, args, strict=True))
            if a["seqs"] is None:
                twin(*args)
                return
            n_seqs = a["n_seqs"]
            for i, addresses in enumerate(a["seqs"].reshape(-1, len(FIELDS))[:n_seqs].tolist()):
                own = dict(a, seqs=None, n_seqs=1)
                own["max_ctx"] = addresses.pop()
                own |= {name: _part(a[name], i, n_seqs) for name in split if a[name] is not None}
                for field, address in zip(FIELDS[:-1], addresses, strict=True):
                    size = {"pos_d": 1, "health": HEALTH_BYTES}.get(field) or (
                        sizes[field](own) if field in sizes else 0
                    )
                    array: NDArray[Any] | None = HostMemory.array(
                        address, size if address else 0, _DTYPES.get(field, np.float32)
                    )
                    if not address and field in ("pos_d", "health"):
                        array = None  # these may be null in a single call too
                    for name in ("state_in", "state_out") if field == "ssm_state" else (field,):
                        if name in names and field in ("pos_d", "health", *sizes):
                            own[name] = array
                twin(**{name: own[name] for name in names})

        return cast(Twin, run)

    return wrap


def _part(x: NDArray[Any], i: int, n: int) -> NDArray[Any]:
    """The i-th of n equal parts of an array, over the same memory."""
    size = x.size // n
    return x[i * size : (i + 1) * size]
