"""SHA-256 in C against hashlib: in plain C, and by the instructions of the processor where it has them."""

from __future__ import annotations

import ctypes
import hashlib
from itertools import pairwise

import numpy as np
import pytest
import standin

from memra_driver import native


class Sha256(ctypes.Structure):
    """memra_sha256 of memra_internal.h."""

    _fields_ = (
        ("h", ctypes.c_uint32 * 8), ("n_bytes", ctypes.c_uint64), ("block", ctypes.c_uint8 * 64),
        ("by_instructions", ctypes.c_bool),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    reason = standin.missing()
    if reason:
        pytest.skip(reason)
    folder = native.source_dir()
    command = ("gcc", "-std=c11", "-O2", "-fPIC", "-shared", f"-I{folder}")
    path = standin.built("sha256.so", command, [folder / "memra_sha256.c"], sorted(folder.glob("*.h")))
    return ctypes.CDLL(str(path))


def digest(library: ctypes.CDLL, parts: list[bytes], plain: bool) -> str:
    sha, text = Sha256(), ctypes.create_string_buffer(65)
    library.memra_sha256_begin(ctypes.byref(sha))
    if plain:
        sha.by_instructions = False
    elif not sha.by_instructions:
        pytest.skip("this processor has no instructions for it")
    for part in parts:
        library.memra_sha256_update(ctypes.byref(sha), part, ctypes.c_size_t(len(part)))
    library.memra_sha256_finish(ctypes.byref(sha), text)
    return text.value.decode()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "by-instructions"])
def test_the_digest_of_any_number_of_bytes_in_any_parts_is_that_of_hashlib(
    library: ctypes.CDLL, rng: np.random.Generator, plain: bool
) -> None:
    for n in (*range(200), 1000, 4096, 65537):
        data = rng.bytes(n)
        cuts = [0, *sorted(rng.integers(0, n + 1, 3).tolist()), n]
        parts = [data[begin:end] for begin, end in pairwise(cuts)]
        expected = hashlib.sha256(data).hexdigest()
        assert digest(library, [data], plain) == expected
        assert digest(library, parts, plain) == expected
