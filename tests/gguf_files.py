"""GGUF files for tests: sound ones by the gguf package's writer, any others byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memra_driver.config import ModelConfig
from memra_driver.errors import ConfigError

QWEN = {
    "block_count": 9,
    "embedding_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 32,
    "full_attention_interval": 4,
    "nextn_predict_layers": 1,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
GEMMA = {
    "block_count": 12,
    "embedding_length": 256,
    "attention.head_count": 8,
    "attention.head_count_kv": [8, 8, 8, 8, 8, 2] * 2,
    "attention.sliding_window_pattern": [True, True, True, True, True, False] * 2,
    "attention.key_length": 512,
    "attention.key_length_swa": 256,
    "attention.sliding_window": 1024,
}
STEP = {
    "block_count": 8,
    "embedding_length": 4096,
    "attention.head_count": [64, 96, 96, 96] * 2,
    "attention.head_count_kv": [8] * 8,
    "attention.key_length": 128,
    "attention.sliding_window": 512,
    "attention.sliding_window_pattern": [False, True, True, True] * 2,
}
LLAMA = {"block_count": 2, "embedding_length": 64, "attention.head_count": 2}


def write_gguf(
    path: Path,
    arch: str,
    keys: Mapping[str, Any],
    *,
    types: Mapping[str, str] | None = None,
    bare: bool = False,
    plain: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file by the gguf package's writer. `keys` get the architecture in front, `plain` does not.

    An int is written as UINT32, a float as FLOAT32, unless `types` names the writer's method.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch)
    method = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for prefix, entries in (("" if bare else f"{arch}.", keys), ("", plain or {})):
        for key, value in entries.items():
            getattr(writer, "add_" + (types or {}).get(key, method[type(value)]))(prefix + key, value)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


def outcome(path: Path) -> ModelConfig | str:
    """What reading the file gives: a configuration, or the text of the ConfigError. Nothing else may come."""
    try:
        return ModelConfig.load(path)
    except ConfigError as error:
        return str(error)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def raw_gguf(
    *entries: bytes, n_keys: int | None = None, n_tensors: int = 0, rest: bytes = b"", version: int = 3
) -> bytes:
    count = len(entries) if n_keys is None else n_keys
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, count) + b"".join(entries) + rest


ARCH = entry("general.architecture", 8, text("llama"))
NUMBERS = [entry("llama." + key, 4, struct.pack("<I", value)) for key, value in LLAMA.items()]
HUGE = 2**64 - 1


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)
