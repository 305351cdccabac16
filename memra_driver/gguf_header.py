"""The key-value header of a GGUF file, from a stranger: an index first, values when they are asked for.

No count or length of the file drives an allocation or a loop before it was checked against the
file's size and a fixed limit. Every failure is a ConfigError that names the file and the key.
The `gguf` package gives the format's constants; its own reader keeps an object per token of the
vocabulary, which takes seconds, and believes every count.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO, NoReturn

from memra_driver.errors import ConfigError

MAX_HEADER_BYTES = 128 << 20  # real headers have 5 to 20 MiB, nearly all of it the tokenizer
MAX_ENTRIES = 1 << 17  # keys, and tensors
MAX_ARRAY = 1 << 20  # elements of an array that is read; one that is skipped may be longer
MAX_STRINGS = 1 << 22  # of an array that is skipped: they have to be passed one by one
MAX_TEXT = 65_535  # bytes of a key, or of a string that is read
MAX_DIMS = 8  # of a tensor
_WINDOW = 1 << 16  # bytes that the file is read by
_U32_MAX = 2**32 - 1


def shown_key(key: str) -> str:
    """A key of a stranger's file, for a message: cut and escaped where it is long or holds control characters."""
    return key if len(key) <= 100 and key.isprintable() else f"{key[:100]!a}.."


class GgufHeader:
    """What an open GGUF file says about its model. `where` is how messages name the file.

    The file is read through a window that moves forward, so that a tokenizer of half a million
    strings costs one pass and no object per string. Not a memory map: a file cut short by another
    process would end ours.
    """

    def __init__(self, file: BinaryIO, where: str) -> None:
        try:
            from gguf.constants import GGUF_MAGIC, GGUF_VERSION, GGUFValueType
        except ImportError as error:
            raise ConfigError(
                f"{where}: reading GGUF needs the gguf package ({error}): pip install gguf"
            ) from None
        kinds = GGUFValueType
        self._kinds = kinds
        self._layouts = {
            kind: struct.Struct("<" + code)
            for kind, code in (
                (kinds.UINT8, "B"),
                (kinds.INT8, "b"),
                (kinds.UINT16, "H"),
                (kinds.INT16, "h"),
                (kinds.UINT32, "I"),
                (kinds.INT32, "i"),
                (kinds.UINT64, "Q"),
                (kinds.INT64, "q"),
                (kinds.BOOL, "?"),
                (kinds.FLOAT32, "f"),
                (kinds.FLOAT64, "d"),
            )
        }
        self._floats = (kinds.FLOAT32, kinds.FLOAT64)
        self._u32, self._u64 = self._layouts[kinds.UINT32], self._layouts[kinds.UINT64]
        self.where = where
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._window, self._base, self._at = b"", 0, 0
        self._reading = "header"  # for messages: the key that the cursor is at
        self.keys: dict[str, str] = {}  # field -> key that it was looked up by
        self._index: dict[str, tuple[Any, int]] = {}  # key -> (type, offset of its value)

        if (magic := self._number(self._u32)) != GGUF_MAGIC:
            self.fail("magic", f"{magic:#010x} is not {GGUF_MAGIC:#010x}: not a GGUF file")
        if (version := self._number(self._u32)) not in (2, GGUF_VERSION):
            big = " (big-endian)" if version and version & 0xFFFF == 0 else ""
            self.fail("version", f"{version}{big} is not 2 or {GGUF_VERSION}")
        n_tensors, n_keys = self._number(self._u64), self._number(self._u64)
        self._index_keys(n_keys)
        self.vocab_rows = self._token_embedding_rows(n_tensors)
        self.arch = self._text("general.architecture")

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {shown_key(key)}: {problem}")

    # The cursor.

    def _need(self, count: int) -> int:
        """Offset in the window of the next `count` bytes, which were checked to be in the file."""
        end = self._at + count
        if end > self._size:
            self.fail(self._reading, f"the file ends at byte {self._size}, inside it (byte {end} is needed)")
        if end > MAX_HEADER_BYTES:
            self.fail(self._reading, f"reaches past {MAX_HEADER_BYTES >> 20} MiB, more than a header may have")
        if not self._base <= self._at <= end <= self._base + len(self._window):
            self._file.seek(self._at)
            self._window, self._base = self._file.read(max(count, _WINDOW)), self._at
            if len(self._window) < count:
                self.fail(self._reading, "the file became shorter while it was read")
        return self._at - self._base

    def _number(self, layout: struct.Struct) -> Any:
        offset = self._need(layout.size)
        self._at += layout.size
        return layout.unpack_from(self._window, offset)[0]

    def _skip(self, count: int) -> None:
        """Forward over bytes that are not looked at; they must be in the file all the same."""
        self._at += count
        self._need(0)

    def _skip_strings(self, count: int) -> None:
        """Over `count` strings: 8 bytes of length and as many bytes each."""
        length_at, window, offset = self._u64.unpack_from, self._window, self._at - self._base
        for _ in range(count):
            if offset + 8 > len(window):
                self._at = self._base + offset
                offset = self._need(8)
                window = self._window
            offset += 8 + length_at(window, offset)[0]
        self._at = self._base + offset
        self._need(0)

    def _string(self) -> str:
        length = self._number(self._u64)
        if length > MAX_TEXT:
            self.fail(self._reading, f"a string of {length} bytes; {MAX_TEXT} is the limit")
        offset = self._need(length)
        self._at += length
        try:
            return self._window[offset : offset + length].decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(self._reading, f"not UTF-8: {error.reason}")

    def _count(self, what: str, smallest: int, limit: int = MAX_HEADER_BYTES) -> int:
        """A 64-bit count of things that take at least `smallest` bytes each."""
        count: int = self._number(self._u64)
        self._check_count(count, what, smallest, limit)
        return count

    def _check_count(self, count: int, what: str, smallest: int, limit: int) -> None:
        if count > limit:
            self.fail(self._reading, f"{count} {what}; {limit} is the limit")
        if count * smallest > self._size - self._at:
            self.fail(self._reading, f"{count} {what} do not fit into the {self._size} bytes of the file")

    def _kind(self) -> Any:
        number = self._number(self._u32)
        try:
            return self._kinds(number)
        except ValueError:
            self.fail(self._reading, f"unknown value type {number}")

    def _index_keys(self, n_keys: int) -> None:
        self._check_count(n_keys, "keys", 13, MAX_ENTRIES)
        for number in range(n_keys):
            self._reading = f"key {number}"
            key = self._reading = self._string()
            kind = self._kind()
            if key in self._index:
                self.fail(key, "appears twice")
            self._index[key] = kind, self._at
            if kind in self._layouts:
                self._skip(self._layouts[kind].size)
            elif kind == self._kinds.STRING:
                self._skip(self._number(self._u64))
            else:
                self._skip_array()

    def _skip_array(self) -> None:
        element = self._kind()
        if element in self._layouts:
            size = self._layouts[element].size
            self._skip(self._count("elements", size) * size)
        elif element == self._kinds.STRING:
            self._skip_strings(self._count("strings", 8, MAX_STRINGS))
        else:
            self.fail(self._reading, "an array of arrays, which no key of a model has")

    def _token_embedding_rows(self, n_tensors: int) -> int:
        """Last dimension of token_embd.weight, 0 without it. Walks all tensor infos: a cut header shows."""
        rows = 0
        self._reading = "tensor infos"
        self._check_count(n_tensors, "tensors", 24, MAX_ENTRIES)
        for number in range(n_tensors):
            self._reading = f"tensor {number}"
            name = self._reading = self._string()
            n_dims = self._number(self._u32)
            if n_dims > MAX_DIMS:
                self.fail(name, f"{n_dims} dimensions; {MAX_DIMS} is the limit")
            dims = [self._number(self._u64) for _ in range(n_dims)]
            self._skip(4 + 8)  # type, offset of the data
            if name == "token_embd.weight" and dims:
                rows = dims[-1]
        return rows

    # Look-up: "{arch}.{suffix}", then the bare suffix. A value of the wrong type counts as absent.

    def _find(self, suffix: str) -> tuple[str, Any]:
        """The key that a suffix stands for in this file, and its type (None: absent)."""
        scoped = f"{self.arch}.{suffix}"
        key = scoped if scoped in self._index or suffix not in self._index else suffix
        return key, self._index[key][0] if key in self._index else None

    def _go_to(self, key: str) -> None:
        self._at, self._reading = self._index[key][1], key

    def _text(self, key: str, default: str | None = None) -> str:
        if key in self._index and self._index[key][0] == self._kinds.STRING:
            self._go_to(key)
            return self._string()
        if default is None:
            self.fail(key, "missing, or not a string")
        return default

    def text(self, key: str) -> str:
        """A string by its whole key; "" where it is absent."""
        return self._text(key, "")

    def _whole(self, key: str, value: int) -> int:
        if not 0 <= value <= _U32_MAX:
            self.fail(key, f"{value} is outside 0 .. {_U32_MAX}")
        return int(value)

    def has_u32(self, suffix: str) -> bool:
        """Whether the suffix names an integer (or a bool, which counts as 0 or 1)."""
        _, kind = self._find(suffix)
        return kind in self._layouts and kind not in self._floats

    def u32(self, field: str, suffix: str, default: int | None = None) -> int:
        """An integer of any width. Absent: the default; without one, ConfigError."""
        key, kind = self._find(suffix)
        self.keys[field] = key
        if self.has_u32(suffix):
            self._go_to(key)
            return self._whole(key, self._number(self._layouts[kind]))
        if default is None:
            split = ", and this is one part of a split file: open the first" if self._is_later_part() else ""
            self.fail(key, ("missing" if kind is None else f"{kind.name}, where a whole number is needed") + split)
        return default

    def _is_later_part(self) -> bool:
        if "split.no" not in self._index or self._index["split.no"][0] not in self._layouts:
            return False
        self._go_to("split.no")
        return bool(self._number(self._layouts[self._index["split.no"][0]]))

    def f32(self, field: str, suffix: str, default: float) -> float:
        """A FLOAT32 or FLOAT64; anything else counts as absent."""
        key, kind = self._find(suffix)
        self.keys[field] = key
        if kind not in self._floats:
            return default
        self._go_to(key)
        value = float(self._number(self._layouts[kind]))
        if kind == self._kinds.FLOAT64:
            return value
        from numpy import float32

        return float(str(float32(value)))  # the shortest decimal: 1e-06 from here equals 1e-06 from JSON

    def u32s(self, field: str, suffix: str) -> tuple[int, ...] | None:
        """An array of integers or bools; None where the key is absent or no array."""
        key, kind = self._find(suffix)
        self.keys[field] = key
        if kind != self._kinds.ARRAY:
            return None
        self._go_to(key)
        element = self._kind()
        if element not in self._layouts or element in self._floats:
            self.fail(key, f"an array of {element.name}, where whole numbers are needed")
        layout = self._layouts[element]
        count = self._count("elements", layout.size, MAX_ARRAY)
        offset = self._need(count * layout.size)
        values = struct.unpack_from(f"<{count}{layout.format[1:]}", self._window, offset)
        return tuple(self._whole(f"{key}[{index}]", value) for index, value in enumerate(values))
