"""The kernel table against the CUDA texts, their PTX and their NumPy twins. NVRTC compiles; no GPU, no driver."""

from __future__ import annotations

import ctypes
import inspect
import re
from functools import cache

import pytest

from memra_driver import kernels, nvrtc
from memra_driver.kernels import CONV_ROWS, KERNELS, Kernel, attend_shared_bytes
from memra_driver.kvdev import twin_of
from memra_driver.reference_attend import FOLD

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
# What takes long to compile: for the oldest, the newest, and where it runs.
SLOW = {source: ("sm_80", "sm_90", "sm_120") for source in nvrtc.sources() if source.startswith("attend")}
SOURCES = sorted({kernel.source for kernel in KERNELS.values()})
PTX_KIND = {"int": "u32", "long long": "u64", "float": "f32"}


@pytest.fixture(scope="module", autouse=True)
def _nvrtc_is_there() -> None:
    nvrtc.version()


@cache
def text_of(source: str) -> str:
    return (nvrtc.source_dir() / source).read_text()


@cache
def expanded(source: str) -> str:
    """A CUDA text whose macros that define kernels, and whose number of threads, are written out."""
    text = text_of(source)
    if "ATTEND_ENTRY(" in text:  # of attend_pipe_block.cuh, and within a macro of the text itself
        body = re.search(r"#define ATTEND_ENTRY\(name, body\)(.*?[^\\]\n)", text_of("attend_pipe_block.cuh"), re.DOTALL)
        assert body
        text = re.sub(
            r"^#define ATTEND\(([^)]*)\)(?:.*\\\n)*.*\n",
            lambda found: f"#define ATTEND({found[1]}){body[1]}",
            text,
            flags=re.MULTILINE,
        )
    for name, parameters, body in re.findall(r"^#define (\w+)\(([^)]*)\)((?:.*\\\n)+.*\n)", text, re.MULTILINE):
        if "__global__" not in body:
            continue
        text = text.replace(f"#define {name}({parameters}){body}", "")
        lines = re.sub(r"\s*\\\n", "\n", body)
        for call in re.findall(rf"^{name}\([^)]*\)$", text, re.MULTILINE):
            one = lines
            values = call[len(name) + 1 : -1].split(", ")
            for parameter, value in zip(parameters.split(", "), values, strict=True):
                one = re.sub(rf"\b{parameter}\b", value, one)
            text = text.replace(call, re.sub(r"^\s+MEMRA_EXPORT", "MEMRA_EXPORT", one, flags=re.MULTILINE))
    threads = re.search(r"#define THREADS (\d+)", text_of("attend.cuh"))
    assert threads
    pipe_threads = 32 * (kernels.PIPE_WARPS + kernels.PIPE_BRINGERS)
    text = text.replace("__launch_bounds__(PIPE_THREADS, 1)", f"__launch_bounds__({pipe_threads})")
    return text.replace("__launch_bounds__(THREADS)", f"__launch_bounds__({threads[1]})")


@cache
def ptx_of(source: str) -> str:
    """PTX of code that is not optimised: it takes little time, and has the parameters of any other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--device-debug"))
        return nvrtc.compile_ptx(source, "sm_90")


def declarations(source: str) -> dict[str, str]:
    """Name -> parameter list, as written, of every kernel of a CUDA text."""
    found = re.findall(
        r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)', expanded(source)
    )
    return {name: " ".join(params.split()) for name, params in found}


@pytest.mark.parametrize(
    ("source", "arch"), [(source, arch) for source in nvrtc.sources() for arch in SLOW.get(source, ARCHS)]
)
def test_every_source_compiles_for_every_architecture(source: str, arch: str) -> None:
    assert nvrtc.compile_cubin(source, arch)[:4] == b"\x7fELF"


def test_the_texts_define_the_kernels_of_the_table_and_no_others() -> None:
    assert nvrtc.sources() == SOURCES
    defined = {(name, source) for source in SOURCES for name in declarations(source)}
    assert defined == {(kernel.name, kernel.source) for kernel in KERNELS.values()}
    for source in SOURCES:
        text = expanded(source)
        assert text.count("__global__") == len(declarations(source))
        assert sorted(re.findall(r"^MEMRA_EXPORT\((\w+)\)$", text, re.MULTILINE)) == sorted(declarations(source))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_parameters_in_the_text_are_those_of_the_table(kernel: Kernel) -> None:
    assert declarations(kernel.source)[kernel.name] == " ".join(kernel.declaration.split())


BEGINS_IN = {"attend_pipe": ("attend_pipe_block.cuh", "void attend"), "recur_step": ("recur_step.cuh", "void run")}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_kernel_waits_for_the_one_in_front_of_it_before_anything_else(kernel: Kernel) -> None:
    """A launch may begin before that one has ended: until then a kernel does sums and makes pipes; no thread ends."""
    where = next((found for name, found in BEGINS_IN.items() if kernel.name.startswith(name)), None)
    whole, name = (text_of(where[0]), where[1]) if where else (expanded(kernel.source), kernel.name)
    body = re.search(rf"\b{name}\([^)]*\)\s*\{{(.*)", whole, re.DOTALL)
    assert body
    before, begins, _ = body[1].partition("memra_begin();")
    assert begins
    looks = re.sub(r"(__shared__ .*|MEMRA_DYN_SHARED\(.*|//.*|memra_pipe_init(_done)?\(.*)", "", before)
    assert not re.search(r"\[|->|\*\(|\breturn\b|memra_|asm|tasks", looks)


@pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS.values() if not kernel.arch])
def test_every_thread_of_a_kernel_waits(name: str) -> None:
    """Also one without work: a kernel that has ended without says that all those before it have ended."""
    text = re.sub(r"//.*|/\*.*?\*/", "", expanded(KERNELS[name].source))
    begin = re.search(rf"\b{name}\([^)]*\)\s*\{{", text)
    assert begin
    end, depth = begin.end(), 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    body = text[begin.end() : end - 1].strip()
    if re.search(r"\b(if|for|while|return)\b", body.partition("memra_begin();")[0]) or "memra_begin();" not in body:
        assert body.endswith("memra_begin();")
        assert not re.search(r"\breturn\b", body)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_parameters_in_the_ptx_are_those_of_the_table(kernel: Kernel) -> None:
    entry = re.search(rf"\.entry {kernel.name}\(([^)]*)\)", ptx_of(kernel.source))
    assert entry, kernel.name
    kinds = re.findall(rf"\.param \.(\w+)[^,\n]* {kernel.name}_param_\d+", entry[1])
    assert kinds == [PTX_KIND.get(kind, "u64") for kind, _ in kernel.params]
    assert all(kind in PTX_KIND or kind.endswith("*") for kind, _ in kernel.params)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_twin_has_the_name_and_the_parameters_of_the_kernel(kernel: Kernel) -> None:
    twin = twin_of(kernel.name)
    assert list(inspect.signature(twin).parameters) == [name for _, name in kernel.params]
    is_attend = kernel.name in kernels.ATTEND_ENTRIES  # all widths and state sizes have one twin
    assert twin.__name__ == ("attend" if is_attend else re.sub(r"_\d+$", "", kernel.name))


def test_the_table_and_the_text_agree_on_the_rows_that_a_thread_of_conv_walks() -> None:
    assert f"#define ROWS {CONV_ROWS} " in text_of("conv.cu")


def test_the_table_the_twin_and_the_text_agree_on_the_order_of_attention() -> None:
    numbers = dict(re.findall(r"#define (\w+) (\d+)", text_of("attend.cuh")))
    for name in ("MOST_KEYS", "GROUPS", "PAD"):
        assert int(numbers[name]) == getattr(kernels, f"ATTEND_{name}")
    (rule,) = re.findall(r"tile_shift_of\(int n_head_kv\) \{ return n_head_kv > (\d+) \? (\d+) : (\d+); \}",
                         text_of("attend.cuh"))  # fmt: skip
    few, half, whole = map(int, rule)
    for n_head_kv in range(1, 65):
        assert 1 << (half if n_head_kv > few else whole) == kernels.attend_tile(n_head_kv)
    assert int(numbers["FOLD"]) == FOLD
    assert int(numbers["FOLDS"]) == kernels.ATTEND_FOLDS
    assert int(numbers["FOLD"]) * int(numbers["FOLDS"]) == int(numbers["GROUPS"])


def test_every_entry_of_attend_has_the_width_and_the_columns_of_its_name() -> None:
    entries = re.findall(r"^ATTEND\(attend_(\d+)(_wide)?, (\d+), (\d+)\)$", text_of("attend.cu"), re.MULTILINE)
    assert len(entries) == len(kernels.ATTEND_COLUMNS)
    for width, wide, tiles, columns in entries:
        assert int(width) == 64 * int(tiles)
        assert kernels.ATTEND_COLUMNS[f"attend_{width}{wide}"] == 8 * int(columns)


@pytest.mark.parametrize("head_dim_v", kernels.ATTEND_WIDTHS)
@pytest.mark.parametrize("head_dim_k", [64, 96, 128, 192, 256, 512])
def test_every_pair_of_head_dims_has_an_entry_that_fits_into_shared_memory(head_dim_k: int, head_dim_v: int) -> None:
    for columns in (1, 8, 9, 256):
        geometry = kernels.AttendGeometry(1, head_dim_k, head_dim_v, 0, 0, 0, 1)
        name = kernels.attend_kernel("sm_80", geometry, columns, kernels.ATTEND_GROUPS)
        n_bytes = attend_shared_bytes(kernels.ATTEND_COLUMNS[name], 1, head_dim_k, head_dim_v)
        assert n_bytes <= kernels.ATTEND_SHARED_BYTES
        assert columns > 8 or not name.endswith("_wide")


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_launch_fits_its_bounds_and_the_limits_of_a_grid(kernel: Kernel) -> None:
    arguments = {name: 1 for _, name in kernel.params}
    arguments |= {"n_seqs": 3, "num_k": 16} if "num_k" in arguments or "num_v" in arguments else {}
    arguments |= {"rows": 100_000, "kv_dim_k": 1024, "kv_dim_v": 1024, "conv_dim": 8192, "num_v": 32, "n": 200}
    arguments |= {"state_size": 128, "n_head": 64, "n_head_kv": 4, "head_dim_k": 64, "head_dim_v": 512, "columns": 8192}
    if "window" in arguments:
        arguments["rows"] = 4096  # a launch of attend has a block per 8 columns and group, so not that many rows
        arguments["pieces"] = kernels.ATTEND_FOLDS if kernel.name.endswith("_folds") else kernels.ATTEND_GROUPS
    grid, block, _shared = kernel.shape(arguments)
    bound = re.search(rf"__launch_bounds__\((\d+)(?:, \d+)?\) {kernel.name}\(", expanded(kernel.source))
    assert bound
    room = 2 if kernel.name == "gdn_scan" else 1  # which takes blocks of twice as many warps, too
    assert room * block[0] * block[1] * block[2] == int(bound[1])
    assert 0 < grid[0] < 2**31
    heads = {"gdn_scan": "num_v"} | dict.fromkeys((name for name in KERNELS if name.startswith("recur_step")), "num_k")
    of_heads = arguments.get(heads.get(kernel.name, ""), 1), arguments["n_seqs"] if kernel.name in heads else 1
    assert grid[1:] == of_heads  # never a count of rows


def test_no_source_uses_a_header_of_cuda_or_a_type_that_differs_between_systems() -> None:
    headers = sorted({name for source in SOURCES for name in nvrtc.include_files(source)})
    assert {"attend.cuh", "device.cuh", "mma.cuh", "memra_formats.h", "memra_driver.h"} <= set(headers)
    for source in (*SOURCES, *headers):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text_of(source), flags=re.DOTALL)
        assert not re.search(r"(?<!long )\blong\b(?! long)", text), source
        assert set(re.findall(r"#include <(\w+\.h)>", text)) <= {"stdint.h", "stddef.h"}, source
    assert ctypes.sizeof(ctypes.c_longlong) == 8
