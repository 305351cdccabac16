"""The ctypes structs of `memra_driver.h`, field for field.

The scalars of a cache live in this memory: Python and C read and write the same fields. A test
compares every name, offset and size with what a C compiler makes of the header.
"""

from __future__ import annotations

import array
import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_int32, c_int64, c_uint32, c_uint64
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

ABI_VERSION = 1
FAULT_KINDS = 5

DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int32), 3: np.dtype(np.float32)}
DTYPE_NAMES = {"u8": DTYPES[1], "i32": DTYPES[2], "f32": DTYPES[3]}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class CacheState(IntEnum):
    """What a cache allows now; `Cache` states the rules."""

    READY = 0
    UNSETTLED = 1
    PENDING_REPLAY = 2
    TAINTED = 3
    CLOSED = 4


class Recorder(IntEnum):
    """Whose capture a cache takes part in."""

    NONE = 0
    PYTHON = 1
    C = 2


class Invalid(IntEnum):
    """Why a snapshot cannot be restored."""

    VALID = 0
    GIVEN_UP = 1
    HALF_WAY = 2
    CACHE_CLOSED = 3
    CLOSED = 4


class StepOp(IntFlag):
    """What a layer has run in the open step."""

    APPEND = 1
    CONV = 2
    SCAN = 4


class SliceC(Structure):
    """memra_slice."""

    _fields_ = (("ptr", c_uint64), ("len", c_int64), ("dtype", c_int32), ("device", c_int32))


class KvLayerC(Structure):
    """memra_kv_layer."""

    _fields_ = (
        ("present", c_uint32),
        ("reserved", c_uint32),
        ("k", SliceC),
        ("v", SliceC),
        ("kv_dim_k", c_int64),
        ("kv_dim_v", c_int64),
        ("k_tok_bytes", c_int64),
        ("v_tok_bytes", c_int64),
        ("len", c_int64),
        ("len_d", SliceC),
        ("k_format", c_int32),
        ("v_format", c_int32),
        ("n_head_kv", c_int32),
        ("head_dim_k", c_int32),
        ("head_dim_v", c_int32),
        ("window", c_int32),
        ("step_ops", c_uint32),
        ("device_index", c_int32),
        ("n_head", c_int32),
        ("kv_source", c_int32),
    )


class RecurLayerC(Structure):
    """memra_recur_layer."""

    _fields_ = (
        ("present", c_uint32),
        ("reserved", c_uint32),
        ("conv_state", SliceC),
        ("ssm_state", SliceC),
        ("ssm_state_alt", SliceC),
        ("conv_dim", c_int32),
        ("d_conv", c_int32),
        ("num_k", c_int32),
        ("num_v", c_int32),
        ("state_size", c_int32),
        ("step_ops", c_uint32),
        ("swaps", c_uint32),
        ("device_index", c_int32),
        ("home", c_uint64),
        ("away", c_uint64),
        ("tape", SliceC),
    )


class LogitsC(Structure):
    """memra_logits."""

    _fields_ = (("present", c_uint32), ("reserved", c_uint32), ("slice", SliceC))


class TapSinkC(Structure):
    """memra_tap_sink."""

    _fields_ = (
        ("present", c_uint32),
        ("n_taps", c_uint32),
        ("layer_ids", POINTER(c_int32)),
        ("buf", SliceC),
        ("hidden", c_int64),
        ("t", c_int64),
    )


class CacheDeviceC(Structure):
    """memra_cache_device."""

    _fields_ = (
        ("pos_d", SliceC),
        ("health", SliceC),
        ("counters", SliceC),
        ("states", SliceC),
        ("stream", c_uint64),
        ("handle", c_uint64),
        ("ordinal", c_int32),
        ("has_arena", c_uint32),
    )


class SnapshotC(Structure):
    """memra_snapshot."""


SnapshotC._fields_ = (
    ("kv_len", POINTER(c_int64)),
    ("conv", POINTER(SliceC)),
    ("ssm", POINTER(SliceC)),
    ("pos", c_int64),
    ("n_layer", c_int64),
    ("given_up", c_int64),
    ("cache_id", c_uint64),
    ("generation", c_uint64),
    ("invalid", c_uint32),
    ("stamps", c_uint32),
    ("next", POINTER(SnapshotC)),
    ("by_library", c_uint32),
    ("reserved", c_uint32),
)


class OwnedC(Structure):
    """memra_owned."""


OwnedC._fields_ = (("next", POINTER(OwnedC)), ("release", CFUNCTYPE(c_int32, POINTER(OwnedC))), ("slice", SliceC))


class CacheC(Structure):
    """memra_cache."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("abi_version", c_uint32),
        ("kv", POINTER(KvLayerC)),
        ("recur", POINTER(RecurLayerC)),
        ("pos", c_int64),
        ("max_ctx", c_int64),
        ("last_logits_dev", LogitsC),
        ("dflash_taps", TapSinkC),
        ("n_layer", c_int64),
        ("devices", POINTER(CacheDeviceC)),
        ("n_devices", c_int32),
        ("strict", c_uint32),
        ("state", c_uint32),
        ("recorder", c_uint32),
        ("step_rows", c_int64),
        ("round_width", c_int64),
        ("replay_to", c_int64),
        ("generation", c_uint64),
        ("id", c_uint64),
        ("logits_at", c_int64),
        ("sure_pos", c_int64),
        ("round_limit", c_int64),
        ("max_rows", c_int64),
        ("n_vocab", c_int64),
        ("logits", SliceC),
        ("taps", SliceC),
        ("snapshots", POINTER(SnapshotC)),
        ("owned", POINTER(OwnedC)),
        ("logits_sure", c_uint32),
        ("reserved", c_uint32),
    )


class HealthC(Structure):
    """memra_health."""

    _fields_ = (
        ("count", c_uint64 * FAULT_KINDS),
        ("first", c_uint64 * FAULT_KINDS),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    )


class CopyC(Structure):
    """memra_copy."""

    _fields_ = (("dst", c_uint64), ("src", c_uint64), ("bytes", c_uint64))


class SeqC(Structure):
    """memra_seq."""

    _fields_ = (
        ("k", c_uint64),
        ("v", c_uint64),
        ("len_d", c_uint64),
        ("conv_state", c_uint64),
        ("ssm_state", c_uint64),
        ("pos_d", c_uint64),
        ("health", c_uint64),
        ("max_ctx", c_int64),
    )


HEALTH_BYTES = ctypes.sizeof(HealthC)

STRUCTS: dict[str, type[Structure]] = {
    "memra_slice": SliceC,
    "memra_kv_layer": KvLayerC,
    "memra_recur_layer": RecurLayerC,
    "memra_logits": LogitsC,
    "memra_tap_sink": TapSinkC,
    "memra_cache_device": CacheDeviceC,
    "memra_snapshot": SnapshotC,
    "memra_owned": OwnedC,
    "memra_cache": CacheC,
    "memra_health": HealthC,
    "memra_seq": SeqC,
    "memra_copy": CopyC,
}


def words(struct: Any) -> tuple[memoryview, memoryview]:
    """The memory of a struct, or of an array of them, as numbers of 8 and of 4 bytes."""
    memory = memoryview(struct).cast("B")
    return memory.cast("q"), memory.cast("I")


# Where fields that are read often lie, in words of 8 bytes.
POS_WORD, LEN_WORD = CacheC.pos.offset // 8, KvLayerC.len.offset // 8


def stand_of(c: CacheC) -> memoryview:
    """state, recorder, step_rows and round_width of a cache, which lie side by side, as they are at any time."""
    return words(c)[0][CacheC.state.offset // 8 : CacheC.round_width.offset // 8 + 1]


def ready_stand(step_rows: int, round_width: int) -> memoryview:
    """What `stand_of` equals while the cache is ready, nobody records it, and its step and round are these."""
    return memoryview(array.array("q", (0, step_rows, round_width)))


def column(structs: Any, name: str, dtype: Any) -> np.ndarray[Any, Any]:
    """One field of each struct of a ctypes array (of a memra_slice its address), as an array over the same memory."""
    kind = type(structs)._type_
    offset, stride = getattr(kind, name).offset, ctypes.sizeof(kind)
    return np.ndarray(len(structs), dtype, buffer=structs, offset=offset, strides=(stride,))


def put_slice(c: SliceC, plane: Any, device: int) -> None:
    """Writes a slice's address, length and dtype into a memra_slice."""
    c.ptr, c.len, c.device = plane.ptr, plane.len, device
    c.dtype = DTYPE_CODES[np.dtype(plane.dtype)]
