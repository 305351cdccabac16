"""Config files as a stranger may have made them: sound GGUF and config.json files, changed where it hurts.

`try_gguf(path, seed)` and `try_hf(path, seed)` make one each, read it, and hold the reader to its law: a ModelConfig or
a ConfigError of one printable line, in little time, with memory that the file's own bytes pay for. Every number of a
GGUF file that counts something may claim anything.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf_files import ARCH, GEMMA, LLAMA, NUMBERS, QWEN, STEP, raw_gguf, text
from test_config_hf import HF_LLAMA, HF_QWEN

from memra_driver.config import ModelConfig
from memra_driver.errors import ConfigError
from memra_driver.plan import CachePlan

SECONDS = 5.0  # of the processor, for one file
BYTES = 1 << 20  # that any file may cost, beside
BYTES_EACH = 96  # for each byte of the file: an element of one byte is a number in a tuple or two
GLM = {
    "block_count": 2, "embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1,
    "attention.key_length": 96, "attention.value_length": 64, "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 64, "attention.key_length_mla": 48, "attention.value_length_mla": 32,
    "rope.dimension_count": 32,
}  # fmt: skip
MODELS = {"qwen35": QWEN, "gemma4": GEMMA, "step35": STEP, "llama": LLAMA, "glm-dsa": GLM}
WILD = (0, 1, 2, 7, 31, 255, 2**16, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 7: "?", 10: "Q", 11: "q"}  # GGUF's type -> struct's
FLOATS = {6: "f", 12: "d"}
STRING, ARRAY = 8, 9


# GGUF


@dataclass
class Entry:
    """A key with its value; `claimed` are counts that are written instead of the true ones."""

    key: bytes
    kind: int
    value: Any
    element: int = 4
    claimed: dict[str, int] = field(default_factory=dict)

    def raw(self) -> bytes:
        key = struct.pack("<Q", self.claimed.get("key", len(self.key))) + self.key
        return key + struct.pack("<I", self.claimed.get("kind", self.kind)) + self._value()

    def _value(self) -> bytes:
        if self.kind == STRING:
            return struct.pack("<Q", self.claimed.get("length", len(self.value))) + self.value
        if self.kind == ARRAY:
            head = struct.pack("<I", self.claimed.get("element", self.element))
            head += struct.pack("<Q", self.claimed.get("length", len(self.value)))
            return head + self._elements()
        return self._number(self.kind, self.value)

    def _elements(self) -> bytes:
        if self.element == STRING:
            return b"".join(text(value) for value in self.value if isinstance(value, bytes))
        return b"".join(self._number(self.element, value) for value in self.value)

    @staticmethod
    def _number(kind: int, value: Any) -> bytes:
        layout = struct.Struct("<" + (INTEGERS | FLOATS)[kind])
        if kind in FLOATS:
            return layout.pack(float(value) if abs(value) < 2**120 else float("inf"))
        return (int(value) % 2 ** (8 * layout.size)).to_bytes(layout.size, "little")


def _entries(arch: str, dice: random.Random) -> list[Entry]:
    entries = [Entry(b"general.architecture", STRING, arch.encode()), Entry(b"general.name", STRING, "mödel".encode())]
    for key, value in MODELS[arch].items():
        name = f"{arch}.{key}".encode()
        if isinstance(value, list):
            entries.append(Entry(name, ARRAY, value, 7 if isinstance(value[0], bool) else 4))
        else:
            entries.append(Entry(name, dice.choice((4, 4, 4, 5, 10, 11)), value))
    entries.append(Entry(f"{arch}.rope.freq_base".encode(), dice.choice((6, 12)), 1e6))
    entries.append(Entry(f"{arch}.rope.dimension_sections".encode(), ARRAY, [11, 11, 10, 0], 5))
    entries.append(Entry(b"tokenizer.ggml.tokens", ARRAY, [b"a", b"", b"ccc"] * dice.randrange(4), STRING))
    return entries


def _change_entry(entries: list[Entry], dice: random.Random) -> None:
    entry = dice.choice(entries)
    what = dice.randrange(9)
    if what == 0:
        entry.claimed[dice.choice(("key", "kind", "length", "element"))] = dice.choice(WILD) % 2**32
    elif what == 1:
        entry.claimed["length"] = dice.choice((*WILD, len(str(entry.value)) + 1))
    elif what == 2:
        entries.remove(entry)
    elif what == 3:
        entries.append(copy.deepcopy(entry))
    elif what == 4 and entry.kind in INTEGERS | FLOATS:
        entry.kind = dice.choice((*INTEGERS, *FLOATS))
        entry.value = dice.choice((*WILD, -1, 1e-320, 0.5))
    elif what == 5 and entry.kind == ARRAY and entry.element != STRING:
        entry.element = dice.choice((*INTEGERS, *FLOATS))
        entry.value = [dice.choice((0, 1, 2, 8, *WILD)) for _ in range(dice.choice((0, 1, 8, 12, 13, 5000)))]
    elif what == 6 and entry.kind == STRING:
        entry.value = dice.choice((b"", b"\xff", b"\xc3", b"x" * 70_000, b"\x1b[2J\n\r\x00", b"qwen35", b"gemma4"))
    elif what == 7:
        entry.key = dice.choice((b"", b"\xed\xa0\x80", b"a\x1b[2Jb", b"k" * 65_536, entry.key.split(b".", 1)[-1]))
    else:
        number = dice.choice(WILD)
        entry.kind, entry.value = dice.choice(((4, number), (STRING, b"4"), (ARRAY, [number] * 3)))


def _tensors(dice: random.Random) -> tuple[int, bytes]:
    raw, n = b"", dice.randrange(4)
    for number in range(n):
        name = b"token_embd.weight" if number == 0 else b"blk.0.x"
        n_dims = dice.choice((1, 2, 2, 2, 4, 8, 9, 2**32 - 1))
        dims = [dice.choice((4, 7, *WILD)) for _ in range(min(n_dims, 9))]
        raw += text(name) + struct.pack("<I", n_dims) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 1, 0)
    return dice.choice((n, n, n, n + 1, *WILD)), raw


def gguf_file(dice: random.Random) -> bytes:
    """A file that was sound before up to four changes of its structure and some of its bytes."""
    entries = _entries(dice.choice(sorted(MODELS)), dice)
    for _ in range(dice.choice((0, 0, 0, 1, 1, 2, 4))):
        if entries:
            _change_entry(entries, dice)
    if dice.random() < 0.1:  # an architecture of any name, whose keys stand there without it
        for entry in entries:
            entry.key = entry.key.split(b".", 1)[-1] if not entry.key.startswith(b"general") else entry.key
            if entry.key == b"general.architecture" and entry.kind == STRING:
                entry.value = dice.choice((entry.value, b"\x1b[2J", b"a\nb", b"other", b"x" * 300))
    n_tensors, tensors = _tensors(dice) if dice.random() < 0.4 else (0, b"")
    n_keys = len(entries) if dice.random() < 0.9 else dice.choice((len(entries) + 1, max(len(entries) - 1, 0), *WILD))
    raw = bytearray(b"GGUF" + struct.pack("<IQQ", dice.choice((3, 3, 3, 3, 2, 1, 3 << 24)), n_tensors, n_keys))
    raw += b"".join(entry.raw() for entry in entries) + tensors
    for _ in range(dice.choice((0, 0, 0, 0, 1, 3))):
        at = dice.randrange(len(raw))
        patch = dice.randbytes(dice.randrange(9))
        raw[at : at + dice.choice((0, len(patch), 4))] = patch
    return bytes(raw[: dice.randrange(len(raw) + 1)] if dice.random() < 0.1 else raw)


# config.json

VALUES = (
    None, True, False, -1, 0, 1, 2, 3, 64, 65_536, 65_537, 2**31, 2**32, 2**60, 2**64, 10**400, 0.5, 1e-320, 1e308,
    -0.0, "", "4", "\ud800", "qwen3_next", "gemma4", "llama", "x" * 300, [], {}, [[]], ["linear_attention"] * 8,
    {"rope_theta": 10**40}, [None] * 100, {"model_type": "llama", "num_hidden_layers": 2**31},
)  # fmt: skip


def hf_file(dice: random.Random) -> bytes:
    config: dict[str, Any] = copy.deepcopy(dice.choice((HF_QWEN, HF_QWEN, HF_LLAMA)))
    known = [*HF_QWEN["text_config"], *HF_LLAMA, "text_config", "num_nextn_predict_layers"]  # type: ignore[misc]
    for _ in range(dice.choice((0, 1, 1, 2, 5))):
        place = dice.choice((config, config.get("text_config")))
        if not isinstance(place, dict):
            continue
        key = dice.choice(known)
        if dice.random() < 0.2:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(dice.choice(VALUES))
    raw = json.dumps(config).encode()
    if dice.random() < 0.2:
        at = dice.randrange(len(raw))
        patch = dice.choice((
            b"NaN", b"Infinity", b"-", b"1e999", b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"\xff", b"\x00", b'"',
            b"}", dice.randbytes(3),
        ))  # fmt: skip
        raw = raw[:at] + patch + raw[at + dice.choice((0, len(patch))) :]
    return raw


# The law


def cost(run: Callable[[], Any]) -> int:
    """Bytes of Python's memory that it takes at its height."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _law(read: Callable[[Path], ModelConfig], path: Path, raw: bytes) -> bool:
    """Whether the file gave a configuration; AssertionError where the law does not hold."""
    path.write_bytes(raw)
    begin = time.process_time()
    found: list[ModelConfig | str] = []

    def outcome() -> None:
        try:
            found.append(read(path))
        except ConfigError as error:
            found.append(str(error))

    peak = cost(outcome)
    (cfg,) = found
    assert peak < BYTES + BYTES_EACH * len(raw), f"{peak} bytes for a file of {len(raw)}"
    if isinstance(cfg, str):
        assert str(path) in cfg
        assert cfg.isprintable(), cfg
        assert len(cfg) < 1000 + len(str(path)), cfg
    else:
        assert ModelConfig(**{name: getattr(cfg, name) for name in cfg.__dataclass_fields__}) == cfg
        repr(cfg).encode()
        cfg.arch.encode()
        if cfg.n_layer <= 256:
            with contextlib.suppress(ConfigError):
                CachePlan(cfg, 64).to_json().encode()
    assert time.process_time() - begin < SECONDS
    return not isinstance(cfg, str)


def warm(path: Path) -> None:
    """Reads a sound file, or the first one would pay for what is imported with it."""
    path.write_bytes(raw_gguf(ARCH, *NUMBERS))
    ModelConfig.from_gguf(path)


def try_gguf(path: Path, seed: int) -> bool:
    return _law(ModelConfig.from_gguf, path, gguf_file(random.Random(seed)))


def try_hf(path: Path, seed: int) -> bool:
    return _law(ModelConfig.from_hf, path, hf_file(random.Random(seed)))
