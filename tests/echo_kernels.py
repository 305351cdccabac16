"""Kernels that compute nothing and keep what they were given: for tests of launches, in place of the real ones."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import standin

from memra_driver.kernels import KERNELS, Kernel

PACKED = {"int": "i", "long long": "q", "float": "f"}
ROOM = 512


def codes_of(kernel: Kernel) -> str:
    """The parameters as `struct` writes them."""
    return "".join("Q" if kind.endswith("*") else PACKED[kind] for kind, _ in kernel.params)


def build(folder: Path, changed: Mapping[str, str] | None = None) -> Path:
    """The shared object that the stand-in takes for compiled kernels. changed: other parameters for some of them."""
    parts = [
        "#include <stddef.h>\n#include <stdint.h>\n#include <string.h>\n"
        "struct params { int32_t count, is_pointer[40]; size_t offset[40], size[40]; };\n"
        f"unsigned char memra_echo[{ROOM}];\nvoid memra_cpu_schedule(int order) {{ (void)order; }}\n"
    ]
    for kernel in KERNELS.values():
        codes = (changed or {}).get(kernel.name, codes_of(kernel))
        offsets = [struct.calcsize("@" + codes[:i] + "0" + code) for i, code in enumerate(codes)]
        sizes = [struct.calcsize(code) for code in codes]
        name, n = kernel.name, len(codes)
        rows = [", ".join(map(str, numbers)) for numbers in (offsets, sizes)]
        parts.append(
            f"const struct params memra_cpu_params_{name} = {{{n}, {{0}}, {{{rows[0]}}}, {{{rows[1]}}}}};\n"
            f"int memra_cpu_launch_{name}(const unsigned *g, const unsigned *b, unsigned s, void **params) {{\n"
            f"    const struct params *p = &memra_cpu_params_{name};\n"
            f"    for (int i = 0; i < {n}; i++) memcpy(memra_echo + p->offset[i], params[i], p->size[i]);\n"
            "    return 0;\n}\n"
        )
    path = folder / "echo.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input="".join(parts), text=True, check=True)
    return path


def last(path: Path, kernel: str) -> tuple[Any, ...]:
    """The parameters of the launch before, in order; `kernel` says what they are."""
    standin.finish()
    memory = (ctypes.c_ubyte * ROOM).in_dll(ctypes.CDLL(str(path)), "memra_echo")
    return struct.unpack_from("@" + codes_of(KERNELS[kernel]), memory)
