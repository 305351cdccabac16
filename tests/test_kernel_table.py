"""The kernel table against the CUDA texts, their PTX and their NumPy twins. NVRTC compiles; no GPU, no driver."""

from __future__ import annotations

import ctypes
import inspect
import re
from functools import cache

import pytest

from memra_driver import nvrtc, reference
from memra_driver.kernels import CONV_ROWS, KERNELS, Kernel

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
SOURCES = sorted({kernel.source for kernel in KERNELS.values()})
PTX_KIND = {"int": "u32", "long long": "u64", "float": "f32"}


@pytest.fixture(scope="module", autouse=True)
def _nvrtc_is_there() -> None:
    nvrtc.version()


@cache
def text_of(source: str) -> str:
    return (nvrtc.source_dir() / source).read_text()


@cache
def ptx_of(source: str) -> str:
    return nvrtc.compile_ptx(source, "sm_90")


def declarations(source: str) -> dict[str, str]:
    """Name -> parameter list, as written, of every kernel of a CUDA text."""
    found = re.findall(
        r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)', text_of(source)
    )
    return {name: " ".join(params.split()) for name, params in found}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", nvrtc.sources())
def test_every_source_compiles_for_every_architecture(source: str, arch: str) -> None:
    assert nvrtc.compile_cubin(source, arch)[:4] == b"\x7fELF"


def test_the_texts_define_the_kernels_of_the_table_and_no_others() -> None:
    assert nvrtc.sources() == SOURCES
    defined = {(name, source) for source in SOURCES for name in declarations(source)}
    assert defined == {(kernel.name, kernel.source) for kernel in KERNELS.values()}
    for source in SOURCES:
        assert text_of(source).count("__global__") == len(declarations(source))
        assert sorted(re.findall(r"^MEMRA_EXPORT\((\w+)\)$", text_of(source), re.MULTILINE)) == sorted(
            declarations(source)
        )


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_parameters_in_the_text_are_those_of_the_table(kernel: Kernel) -> None:
    assert declarations(kernel.source)[kernel.name] == " ".join(kernel.declaration.split())


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_parameters_in_the_ptx_are_those_of_the_table(kernel: Kernel) -> None:
    entry = re.search(rf"\.entry {kernel.name}\(([^)]*)\)", ptx_of(kernel.source))
    assert entry, kernel.name
    kinds = re.findall(rf"\.param \.(\w+)[^,\n]* {kernel.name}_param_\d+", entry[1])
    assert kinds == [PTX_KIND.get(kind, "u64") for kind, _ in kernel.params]
    assert all(kind in PTX_KIND or kind.endswith("*") for kind, _ in kernel.params)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_twin_has_the_name_and_the_parameters_of_the_kernel(kernel: Kernel) -> None:
    twin = getattr(reference, kernel.name)
    assert list(inspect.signature(twin).parameters) == [name for _, name in kernel.params]


def test_the_table_and_the_text_agree_on_the_rows_that_a_thread_of_conv_walks() -> None:
    assert f"#define ROWS {CONV_ROWS} " in text_of("conv.cu")


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_launch_fits_its_bounds_and_the_limits_of_a_grid(kernel: Kernel) -> None:
    arguments = {name: 1 for _, name in kernel.params}
    arguments |= {"rows": 100_000, "kv_dim_k": 1024, "kv_dim_v": 1024, "conv_dim": 8192, "num_v": 32, "n": 200}
    arguments |= {"state_size": 128}
    grid, block, _shared = kernel.shape(arguments)
    bound = re.search(rf"__launch_bounds__\((\d+)\) {kernel.name}\(", text_of(kernel.source))
    assert bound
    assert block[0] * block[1] * block[2] == int(bound[1])
    assert 0 < grid[0] < 2**31
    assert grid[1:] == (1, 1)


def test_no_source_uses_a_header_of_cuda_or_a_type_that_differs_between_systems() -> None:
    for source in (*SOURCES, "device.cuh", "memra_formats.h", "memra_driver.h"):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text_of(source), flags=re.DOTALL)
        assert not re.search(r"(?<!long )\blong\b(?! long)", text), source
        assert set(re.findall(r"#include <(\w+\.h)>", text)) <= {"stdint.h", "stddef.h"}, source
    assert ctypes.sizeof(ctypes.c_longlong) == 8
