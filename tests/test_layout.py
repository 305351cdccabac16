"""memra_driver.h, memra_formats.h and layout.py describe the same memory, for C11, C++17 and NVRTC."""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import POLICY, attention_only, tiny
from conftest import MakeDev

import memra_driver
from memra_driver import layout, nvrtc
from memra_driver.cache import Cache
from memra_driver.formats import BLOCK, FORMATS
from memra_driver.health import Fault
from memra_driver.kvdev import HostDev
from memra_driver.layout import CacheState, Invalid, Recorder, StepOp

HEADERS = Path(memra_driver.get_include())
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
COMPILERS = {"C11": ("gcc", "-std=c11", "-x", "c"), "C++17": ("g++", "-std=c++17", "-x", "c++")}


@cache
def header(name: str) -> str:
    """The text of a header without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", (HEADERS / name).read_text(), flags=re.DOTALL)


def fields_of(struct: str) -> list[str]:
    """Field names of a struct, in the header's order."""
    found = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", header("memra_driver.h"), re.DOTALL)
    assert found, struct
    declared = (line.strip() for line in found[1].split(";"))
    return [re.sub(r"\[.*", "", line.split()[-1]).lstrip("*") for line in declared if line]


def enum_of(name: str, file: str = "memra_driver.h") -> dict[str, int]:
    found = re.search(rf"enum {name} \{{(.*?)\}}", header(file), re.DOTALL)
    assert found, name
    return {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)", found[1])}


def places() -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each field and (0, bytes) of each struct, by layout.py."""
    found = {}
    for name, struct in layout.STRUCTS.items():
        found[name] = (0, ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            found[f"{name}.{field}"] = (place.offset, place.size)
    return found


def probe() -> str:
    """A program that prints `name offset bytes` of each struct, field and number of the headers."""
    lines = ["#include <stdio.h>", '#include "memra_driver.h"', "int main(void) {"]
    for name in layout.STRUCTS:
        lines.append(f'    printf("{name} 0 %zu\\n", sizeof({name}));')
        for field in fields_of(name):
            size = f"sizeof((({name} *)0)->{field})"
            lines.append(f'    printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), {size});')
    for name in ("q8_0", "q5_1", "q4_0", "fp8"):
        code = f"MEMRA_{name.upper()}"
        lines.append(f'    printf("{name} %d %zu\\n", (int){code}, sizeof(memra_{name}));')
    enums = ("dtype", "state", "step_op", "fault", "invalid", "recorder")
    numbers = [key for name in enums for key in enum_of(f"memra_{name}")]
    for key in (*numbers, "MEMRA_ABI_VERSION", "MEMRA_FAULT_KINDS", "MEMRA_BLOCK"):
        lines.append(f'    printf("{key} %d 0\\n", (int){key});')
    return "\n".join([*lines, "    return 0;", "}", ""])


@cache
def printed(language: str) -> dict[str, tuple[int, int]]:
    """What the probe prints when compiled as `language` with every warning an error."""
    compiler, *options = COMPILERS[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "probe"
        command = [compiler, *options, *STRICT, "-I", str(HEADERS), "-", "-o", str(program)]
        subprocess.run(command, input=probe(), text=True, check=True)
        lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: (int(offset), int(size)) for name, offset, size in map(str.split, lines)}


@pytest.mark.parametrize("language", COMPILERS)
def test_every_field_lies_where_a_compiler_puts_it(language: str) -> None:
    found = {name: place for name, place in printed(language).items() if name.partition(".")[0] in layout.STRUCTS}
    assert found == places()


def test_every_struct_of_the_header_has_a_twin_with_the_same_fields_in_order() -> None:
    assert re.findall(r"typedef struct (\w+) \{", header("memra_driver.h")) == list(layout.STRUCTS)
    for name, struct in layout.STRUCTS.items():
        assert fields_of(name) == [field for field, *_ in struct._fields_], name


@pytest.mark.parametrize("language", COMPILERS)
def test_block_sizes_and_format_codes_are_those_of_formats_py(language: str) -> None:
    found = printed(language)
    assert {name: found[name] for name in FORMATS} == {name: (f.code, f.block_bytes) for name, f in FORMATS.items()}
    assert enum_of("memra_format", "memra_formats.h") == {f"MEMRA_{n.upper()}": f.code for n, f in FORMATS.items()}
    assert found["MEMRA_BLOCK"][0] == BLOCK


@pytest.mark.parametrize("language", COMPILERS)
def test_numbers_of_the_header_are_those_of_python(language: str) -> None:
    found = {name: value for name, (value, _) in printed(language).items() if name.startswith("MEMRA_")}
    assert found == {
        "MEMRA_U8": 1, "MEMRA_I32": 2, "MEMRA_F32": 3,
        **{f"MEMRA_{state.name}": int(state) for state in CacheState},
        **{f"MEMRA_OP_{op.name}": int(op) for op in StepOp},
        **{f"MEMRA_FAULT_{fault.name}": int(fault) for fault in Fault},
        **{f"MEMRA_INVALID_{why.name}": int(why) for why in Invalid if why}, "MEMRA_VALID": 0,
        "MEMRA_NOT_RECORDING": 0, "MEMRA_RECORDED_BY_PYTHON": Recorder.PYTHON, "MEMRA_RECORDED_BY_C": Recorder.C,
        "MEMRA_ABI_VERSION": layout.ABI_VERSION, "MEMRA_FAULT_KINDS": len(Fault), "MEMRA_BLOCK": BLOCK,
    }  # fmt: skip
    assert {code: dtype.name for code, dtype in layout.DTYPES.items()} == {1: "uint8", 2: "int32", 3: "float32"}


@pytest.mark.parametrize("language", COMPILERS)
@pytest.mark.parametrize("name", ["memra_driver.h", "memra_formats.h"])
def test_each_header_stands_alone_and_may_come_twice(language: str, name: str) -> None:
    compiler, *options = COMPILERS[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    text = f'#include "{name}"\n#include "{name}"\nint nothing(void);\nint nothing(void) {{ return 0; }}\n'
    command = [compiler, *options, *STRICT, "-I", str(HEADERS), "-fsyntax-only", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_lays_the_structs_out_alike(tmp_path: Path, arch: str) -> None:
    for name in ("memra_driver.h", "memra_formats.h"):
        (tmp_path / name).write_text((HEADERS / name).read_text())
    claims = []
    for name, (offset, size) in places().items():
        struct, _, field = name.partition(".")
        claims.append(f"sizeof(((({struct}*)0)->{field})) == {size}" if field else f"sizeof({struct}) == {size}")
        if field:
            claims.append(f"MEMRA_OFFSETOF({struct}, {field}) == {offset}")
    claims += [f"sizeof(memra_{name}) == {form.block_bytes}" for name, form in FORMATS.items()]
    text = "\n".join(f'static_assert({claim}, "{claim}");' for claim in claims)
    (tmp_path / "probe.cu").write_text(f'#include "memra_driver.h"\n{text}\nextern "C" __global__ void probe() {{}}\n')
    assert ".entry probe" in nvrtc.compile_ptx("probe.cu", arch, tmp_path)


def test_a_wrong_claim_about_a_struct_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "memra_driver.h").write_text((HEADERS / "memra_driver.h").read_text().replace("int64_t pos;", ""))
    (tmp_path / "memra_formats.h").write_text((HEADERS / "memra_formats.h").read_text())
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    command = ["gcc", "-std=c11", "-I", str(tmp_path), "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input='#include "memra_driver.h"\n', text=True, capture_output=True)
    assert done.returncode != 0
    assert "pos" in done.stderr


# The order of the Rust structs (memra_kv 0.72.0), an Option as a flag in front of its value.

RUST = {
    "memra_kv_layer": ["k", "v", "kv_dim_k", "kv_dim_v", "k_tok_bytes", "v_tok_bytes", "len", "len_d"],
    "memra_recur_layer": ["conv_state", "ssm_state", "ssm_state_alt"],
    "memra_cache": ["kv", "recur", "pos", "max_ctx", "last_logits_dev", "dflash_taps"],
    "memra_tap_sink": ["layer_ids", "buf", "hidden", "t"],
}


@pytest.mark.parametrize("name", RUST)
def test_the_rust_fields_come_first_and_in_the_order_of_rust(name: str) -> None:
    ours = {"present", "reserved", "struct_size", "abi_version", "n_taps"}
    leading = [field for field in fields_of(name) if field not in ours]
    assert leading[: len(RUST[name])] == RUST[name]
    numbers = [place for field, place in places().items() if field.startswith(f"{name}.")]
    assert numbers == sorted(numbers)


# Values that a cache writes


def test_the_structs_of_a_cache_say_what_the_cache_is() -> None:
    e = HostDev()
    with Cache.new(e, tiny(head_dim_v=32), 16, policy=POLICY) as cache:
        c = cache.as_c().contents
        assert (c.struct_size, c.abi_version) == (ctypes.sizeof(layout.CacheC), layout.ABI_VERSION)
        assert (c.pos, c.max_ctx, c.n_layer, c.n_devices, c.state) == (0, 16, 8, 1, CacheState.READY)
        assert (c.step_rows, c.replay_to, c.generation, c.id) == (0, 0, 0, cache.id)
        assert (c.last_logits_dev.present, c.dflash_taps.present) == (0, 0)
        assert [c.kv[il].present for il in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
        assert [c.recur[il].present for il in range(8)] == [1, 1, 1, 0, 1, 1, 1, 0]
        kv, layer = c.kv[3], cache.kv[3]
        assert layer is not None
        assert slice_of(kv.k) == (layer.k.ptr, 16 * 136 + 8, "uint8", -1)
        assert slice_of(kv.v) == (layer.v.ptr, 16 * 48 + 8, "uint8", -1)
        assert slice_of(kv.len_d) == (layer.len_d.ptr, 1, "int32", -1)
        names = ("kv_dim_k", "kv_dim_v", "k_tok_bytes", "v_tok_bytes", "len", "n_head_kv", "head_dim_k", "head_dim_v")
        assert [getattr(kv, name) for name in names] == [128, 64, 136, 48, 0, 2, 64, 32]
        codes = [FORMATS[name].code for name in ("q8_0", "q5_1")]
        assert [kv.k_format, kv.v_format, kv.window, kv.step_ops, kv.device_index] == [*codes, 0, 0, 0]
        recur, state = c.recur[0], cache.recur[0]
        assert state is not None
        assert slice_of(recur.conv_state) == (state.conv_state.ptr, 128 * 3, "float32", -1)
        assert slice_of(recur.ssm_state) == (state.ssm_state.ptr, 2 * 32 * 32, "float32", -1)
        assert slice_of(recur.ssm_state_alt) == (state.ssm_state_alt.ptr, 2 * 32 * 32, "float32", -1)
        names = ("conv_dim", "d_conv", "num_k", "num_v", "state_size", "step_ops", "swaps", "device_index")
        assert [getattr(recur, name) for name in names] == [128, 4, 1, 2, 32, 0, 0, 0]
        assert slice_of(c.devices[0].pos_d)[1:] == (1, "int32", -1)
        assert slice_of(c.devices[0].health)[1:] == (layout.HEALTH_BYTES, "uint8", -1)


def test_what_a_cache_writes_into_its_structs_is_not_in_the_next_of_its_plan() -> None:
    e = HostDev()
    with Cache.new(e, tiny(), 16, policy=POLICY) as first:
        first.pos = 3
        for layer in filter(None, first.kv):
            layer.len = 3
        for state in filter(None, first.recur):
            state.swap()
        with Cache.new(e, tiny(), 16, policy=POLICY) as second:
            assert second.plan is first.plan
            assert second.id > first.id
            assert (second.pos, {layer.len for layer in second.kv if layer}) == (0, {0})
            states = [state for state in second.recur if state]
            assert {(state.swaps, state.ssm_state.ptr == state.home.ptr) for state in states} == {(0, True)}
            ptrs = [{ptr for _, ptr, _, _ in cache.regions()} for cache in (first, second)]
            assert not ptrs[0] & ptrs[1]


def test_the_structs_live_as_long_as_any_of_them() -> None:
    cache = Cache.new(HostDev(), tiny(), 16, policy=POLICY)
    pointer, layer = cache.as_c(), cache.kv[3]
    assert layer is not None
    del cache
    gc.collect()
    assert [pointer.contents.kv[il].present for il in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
    del pointer
    gc.collect()
    assert (layer.max_ctx, layer.kv_dim_k, layer.len) == (16, 128, 0)


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("first", ["cache", "device"])
def test_the_structs_of_what_is_closed_can_still_be_read(make_dev: MakeDev, first: str, kind: str, arena: bool) -> None:
    e = make_dev(kind, arena=arena)
    cache = Cache.new(e, tiny(), 16, policy=POLICY)
    born = {name: ptr for name, ptr, _, _ in cache.regions()}
    stream = e.stream.handle if kind == "cuda" else 0
    for each in (cache, e) if first == "cache" else (e, cache):
        each.close()
    c = cache.as_c().contents
    assert (c.state, c.devices[0].stream, c.devices[0].has_arena) == (CacheState.CLOSED, stream, arena)
    assert (c.kv[3].k.ptr, c.recur[0].home) == (born["layer03.k"], born["layer00.ssm_state"])
    assert [layer and layer.len for layer in cache.kv] == [None, None, None, 0] * 2
    assert [layer and layer.swaps for layer in cache.recur] == [0, 0, 0, None] * 2


def test_a_cache_that_nobody_holds_is_gone_without_the_collector() -> None:
    gc.disable()
    try:
        cache = Cache.new(HostDev(), tiny(), 16, policy=POLICY)
        assert cache.kv[3] is cache.kv[3]
        ends = [weakref.ref(each) for each in (cache, cache.kv[3], cache.recur[0])]
        del cache
        assert [end() for end in ends] == [None] * 3
    finally:
        gc.enable()


def slice_of(c: Any) -> tuple[int, int, str, int]:
    return c.ptr, c.len, layout.DTYPES[c.dtype].name, c.device


def test_the_error_record_of_a_cache_is_a_memra_health() -> None:
    with Cache.new(HostDev(), attention_only(1), 4, policy=POLICY) as cache:
        health = cache.health_d(0)
        assert health.nbytes == ctypes.sizeof(layout.HealthC)
        assert health.ptr % 8 == 0
        record = np.zeros(layout.HEALTH_BYTES, np.uint8)
        struct = layout.HealthC.from_buffer(record)
        struct.flags, struct.count[1], struct.first[1] = 2, 7, 2**64 - 1 - (5 << 16 | 0)
        health.copy_from(record)
        seen = cache.health().faults[Fault.SCALE_OVERFLOW]
        assert (seen.count, seen.slot, seen.layer) == (7, 5, 0)
