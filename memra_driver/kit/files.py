"""A conformance kit on disk: a manifest, raw arrays beside it, and what is checked of both before either is used.

A saved kit is a stranger's file. Its manifest is read up to a limit and held against the schema; a file is opened
only by a plain name inside the folder, never through a link, and must have exactly the size that the manifest says;
an array must lie inside its file, have the size of its shape, and hash to its digest. What fails is a KitError.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memra_driver.errors import KitError
from memra_driver.kit.schema import violation

Array = NDArray[Any]
Entry = dict[str, Any]  # of the manifest: a case, a step, or an array

FORMAT = "memra-kit-1"
MANIFEST, SCHEMA, SPEC = "manifest.json", "manifest.schema.json", "SPEC.md"
MAX_MANIFEST_BYTES = 64 << 20
MAX_FILE_BYTES = 512 << 20  # of all files together
MAX_ARRAY_BYTES = 1 << 30  # of all arrays together, each range of a file counted once: what is hashed
DTYPES = {"u8": np.uint8, "u16": np.uint16, "i32": np.int32, "i64": np.int64, "f32": np.float32}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
ALIGN = 16  # every array of a file begins at a multiple
_PRIME, _SEED, _CHUNK = 0x100000001B3, 0xCBF29CE484222325, 1 << 16


def packaged(name: str) -> bytes:
    """A text that every kit gets a copy of."""
    return files("memra_driver").joinpath("vectors", name).read_bytes()


# The digest.


def fnv1a64(data: bytes | memoryview | Array) -> str:
    """FNV-1a, 64 bits, as 16 hex digits.

    h = (h ^ byte) * prime depends on earlier bytes in its lowest 8 bits only as far as the ^ goes. Those are found
    first, bit by bit, each a running parity; what is left is a sum of powers of the prime.
    """
    octets = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
    powers = np.multiply.accumulate(np.full(min(_CHUNK, octets.size), _PRIME, np.uint64))
    h = _SEED
    for start in range(0, octets.size, _CHUNK):
        part = octets[start : start + _CHUNK]
        before, mixed = _low_bytes(h & 0xFF, part)
        steps = (mixed.astype(np.uint64) - before) * powers[: part.size][::-1]
        h = (h * int(powers[part.size - 1]) + int(steps.sum(dtype=np.uint64))) % 2**64
    return f"{h:016x}"


def _low_bytes(low: int, part: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The lowest byte of h before each step, and the same after its ^; `low` is the first."""
    before, mixed = np.zeros_like(part), np.zeros_like(part)
    for k in range(8):
        first = low >> k & 1
        bits = part >> k & 1
        flips = bits ^ (mixed * np.uint8(_PRIME & 0xFF) >> k & 1)  # the carries of the lower bits
        prior = np.empty_like(part)
        prior[:1] = first
        prior[1:] = np.bitwise_xor.accumulate(flips)[:-1] ^ first
        before |= prior << k
        mixed |= (prior ^ bits) << k
    return before, mixed


# Reading.


class Kit:
    """A kit that was read and checked: its cases, and the arrays that they name."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = self._manifest()
        problem = violation(self.manifest, json.loads(packaged(SCHEMA)))
        if problem:
            raise KitError(f"{self.folder / MANIFEST}: {problem}")
        self.cases: list[Entry] = self.manifest["cases"]
        self._files: dict[str, bytes] = {}
        self._digests: dict[tuple[str, int, int], str] = {}  # of ranges of files, which arrays may share
        self._hashed = 0  # bytes of them
        total = sum(entry["bytes"] for entry in self.manifest["files"])
        if total > MAX_FILE_BYTES:
            raise KitError(f"{self.folder / MANIFEST}: files of {total} bytes; at most {MAX_FILE_BYTES} are read")
        for entry in self.manifest["files"]:
            if entry["name"] in self._files:
                raise KitError(f"{self.folder / MANIFEST}: {entry['name']} is listed twice")
            self._files[entry["name"]] = self._read(entry["name"], entry["bytes"])
        seen: set[str] = set()
        for case in self.cases:
            if case["id"] in seen:
                raise KitError(f"{self.folder / MANIFEST}: two cases are called {case['id']!r}")
            seen.add(case["id"])
            for holder in (case, *case.get("steps", ())):
                self._check_arrays(case["id"], holder)

    def array(self, entry: Entry) -> Array:
        """The contents of an array, flat and read-only."""
        raw = self._files[entry["file"]]
        kind = np.dtype(DTYPES[entry["dtype"]])
        return np.frombuffer(raw, kind, entry["bytes"] // kind.itemsize, entry["offset"])

    def _manifest(self) -> Any:
        raw = self._read(MANIFEST, None)
        try:
            return json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise KitError(f"{self.folder / MANIFEST}: {error}") from None

    def _read(self, name: str, n_bytes: int | None) -> bytes:
        """A regular file of the folder, of `n_bytes`; the manifest, whose size nobody knows, up to its limit."""
        path = self.folder / name
        limit = MAX_MANIFEST_BYTES if n_bytes is None else MAX_FILE_BYTES
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            with open(handle, "rb") as file:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise KitError(f"{path} is no regular file")
                if n_bytes is not None and found.st_size != n_bytes:
                    raise KitError(f"{path} has {found.st_size} bytes; the manifest says {n_bytes}")
                if found.st_size > limit:
                    raise KitError(f"{path} has {found.st_size} bytes; at most {limit} are read")
                raw = file.read(found.st_size + 1)
        except OSError as error:
            raise KitError(f"{path}: {error.strerror or error}") from None
        if len(raw) != found.st_size:
            raise KitError(f"{path} changed while it was read")
        return raw

    def _digest(self, entry: Entry, where: str) -> str:
        key = entry["file"], entry["offset"], entry["bytes"]
        if key not in self._digests:
            self._hashed += entry["bytes"]
            if self._hashed > MAX_ARRAY_BYTES:
                raise KitError(f"{where}: with it the arrays have {self._hashed} bytes; at most {MAX_ARRAY_BYTES}")
            self._digests[key] = fnv1a64(self.array(entry))
        return self._digests[key]

    def _check_arrays(self, case: str, holder: Entry) -> None:
        taken: set[tuple[str, str]] = set()
        for entry in holder.get("arrays", ()):
            where = f"{self.folder}: case {case!r}, array {entry['name']!r}"
            if (entry["name"], entry["role"]) in taken:
                raise KitError(f"{where} stands there twice")
            taken.add((entry["name"], entry["role"]))
            if entry["file"] not in self._files:
                raise KitError(f"{where} lies in {entry['file']!r}, which the manifest does not list")
            elements = 1
            for extent in entry["shape"]:
                elements *= extent
            if elements * np.dtype(DTYPES[entry["dtype"]]).itemsize != entry["bytes"]:
                raise KitError(f"{where}: {entry['bytes']} bytes are not {entry['shape']} of {entry['dtype']}")
            if entry["offset"] % ALIGN or entry["offset"] + entry["bytes"] > len(self._files[entry["file"]]):
                raise KitError(f"{where}: {entry['bytes']} bytes at {entry['offset']} do not lie in {entry['file']}")
            found = self._digest(entry, where)
            if found != entry["fnv1a64"]:
                raise KitError(f"{where}: its digest is {found}, the manifest says {entry['fnv1a64']}")


def arrays_of(kit: Kit, holder: Entry, role: str) -> dict[str, Array]:
    """Fresh copies of the arrays of a case or step that have this role, by name."""
    return {entry["name"]: kit.array(entry).copy() for entry in holder.get("arrays", ()) if entry["role"] == role}


def entries_of(holder: Entry, role: str) -> Iterator[Entry]:
    """What the manifest says of those arrays."""
    return (entry for entry in holder.get("arrays", ()) if entry["role"] == role)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


# Writing.


class Writer:
    """Puts a kit into a folder that is new or empty. Equal arrays of a file are stored once."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise KitError(f"{self.folder} is not empty; a kit goes into a folder of its own")
        except OSError as error:
            raise KitError(f"{self.folder}: {error.strerror or error}") from None
        self._files: dict[str, bytearray] = {}
        self._placed: dict[tuple[str, bytes], int] = {}

    def array(self, file: str, name: str, role: str, array: Array, tolerance: float = 0.0) -> Entry:
        """Stores an array and returns its entry for the manifest. tolerance: of an output, 0 where it is exact."""
        kind = np.dtype(array.dtype)
        raw = np.ascontiguousarray(array).astype(kind.newbyteorder("<")).tobytes()
        content = self._files.setdefault(file, bytearray())
        if (file, raw) not in self._placed:
            content += bytes(-len(content) % ALIGN)
            self._placed[file, raw] = len(content)
            content += raw
        entry: Entry = {
            "name": name, "role": role, "dtype": NAMES[kind], "shape": list(array.shape), "file": file,
            "offset": self._placed[file, raw], "bytes": len(raw), "fnv1a64": fnv1a64(raw),
        }  # fmt: skip
        return entry | ({"tolerance": tolerance} if role == "out" else {})

    def finish(self, made_by: str, small: bool, cases: list[Entry]) -> None:
        """Writes everything; the manifest last, so that a folder with one is whole."""
        manifest = {
            "format": FORMAT, "made_by": made_by, "small": small, "byte_order": "little",
            "files": [{"name": name, "bytes": len(content)} for name, content in self._files.items()],
        }  # fmt: skip
        lines = ",\n".join(json.dumps(case, allow_nan=False) for case in cases)
        head = json.dumps(manifest, indent=1).removesuffix("\n}")
        text = f'{head},\n "cases": [\n{lines}\n]}}\n'
        contents: dict[str, bytes | bytearray] = {**self._files, SPEC: packaged(SPEC), SCHEMA: packaged(SCHEMA)}
        try:
            for name, content in contents.items():
                (self.folder / name).write_bytes(content)
            (self.folder / MANIFEST).write_text(text, "utf-8")
        except OSError as error:
            raise KitError(f"{self.folder}: {error.strerror or error}") from None
