"""The fuzzer of the C library: its calls are written from memra_api.h, so that none can be forgotten.

The harness is tests/fuzz: world.h says what an input is, laws.c what every call is held to. driver.c runs inputs and
grows a corpus by the edges that gcc counts; `LLVMFuzzerTestOneInput` is the entry, so that who has clang can run it
under libFuzzer as well: `python tests/cfuzz.py FOLDER` writes what that needs and prints the command.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import echo_kernels  # noqa: E402
import standin  # noqa: E402

from memra_driver.kernels import KERNELS  # noqa: E402

FUZZ = TESTS / "fuzz"

# Pointers that the header lets be NULL.
MAY_BE_NULL = {
    ("memra_layout_table", "n_rows"), ("memra_plane_table", "n_planes"), ("memra_device_close", "device"),
    ("memra_policy_default", "policy"), ("memra_options_default", "options"), ("memra_plan_free", "plan"),
    ("memra_plan_new", "policy"), ("memra_plan_new", "options"), ("memra_plan_new", "fence"),
    ("memra_plan_new", "placement"), ("memra_cache_new", "policy"), ("memra_cache_new", "options"),
    ("memra_cache_new", "fence"), ("memra_cache_free", "cache"), ("memra_snapshot_free", "snapshot"),
    ("memra_graph_close", "graph"), ("memra_prepare_replay", "graph"),
}  # fmt: skip
# And those that may be NULL where there is nothing at them.
EMPTY = {("memra_copy_table", "entries"): "n", ("memra_upload", "src"): "n_bytes", ("memra_download", "dst"): "n_bytes"}
# Whose refusal may come behind calls of the driver that are taken back: what they made tells whether it can be.
MAY_TOUCH = {
    "memra_device_open", "memra_device_load", "memra_device_load_file", "memra_device_load_folder", "memra_capture_end",
    "memra_snapshot_new", "memra_attend",
}  # fmt: skip
MAY_CHANGE = {"memra_capture_end"}  # a capture that ends with a step open is given up
OUTPUTS = {
    "memra_device **": "memra_device *", "memra_cache **": "memra_cache *", "memra_snapshot **": "memra_snapshot *",
    "memra_graph **": "memra_graph *", "memra_plan **": "memra_plan *", "int32_t *": "int32_t",
    "uint64_t *": "uint64_t", "memra_health *": "memra_health",
}  # fmt: skip
INPUTS = {
    "memra_device *": "draw_device(in)", "const memra_device *": "draw_device(in)", "memra_cache *": "draw_cache(in)",
    "memra_snapshot *": "draw_snapshot(in)", "memra_graph *": "draw_graph(in)", "memra_plan *": "draw_plan(in)",
    "const memra_config *": "draw_config(in)", "const memra_policy *": "draw_policy(in)",
    "const memra_options *": "draw_options(in)", "const memra_device_options *": "draw_device_options(in)",
    "memra_policy *": "draw_policy(in)", "memra_options *": "draw_options(in)",
}  # fmt: skip
ARRAYS = {  # by name: how it is drawn, once the counts are known
    "devices": "draw_devices(in, {count})", "fence": "draw_fence(in, n_stages)",
    "placement": "draw_placement(in, n_stages)", "layer_ids": "draw_layer_ids(in, n)",
    "entries": "draw_entries(in, n)", "src": "draw_host(in, n_bytes)", "dst": "draw_host(in, n_bytes)",
    "cubin": "draw_cubin(in, &n_bytes)", "path": "draw_path(in, false)", "folder": "draw_path(in, true)",
}  # fmt: skip
SOUND = {  # by name; 0 for all others
    "rows": 1, "launches": 1, "width": 2, "n_seqs": 1, "max_ctx": "MAX_CTX", "n_devices": 1, "n_stages": 1, "n": 2,
    "t": 2, "hidden": 8, "stop": "standing_rows()", "window": -1, "n_layers": 1, "num_k": 1, "num_v": 2, "n_head": 2,
    "n_head_kv": 1, "head_dim_k": 64, "head_dim_v": 64, "state_size": 32, "columns": 32, "blocks": 1, "d_conv": 4,
    "conv_dim": 128, "pieces": 132, "kv_dim_k": 64, "kv_dim_v": 64, "k_tok_bytes": 68, "v_tok_bytes": 48,
}  # fmt: skip
ATTENTION = {"memra_append_kv", "memra_dequant_kv", "memra_attend"}  # whose layer is 1; the others' is 0
ENDS = {
    "memra_device_close": "drop_device(device, status)", "memra_cache_free": "drop_cache(cache, status)",
    "memra_snapshot_free": "drop_snapshot(snapshot, status)", "memra_graph_close": "drop_graph(graph, status)",
    "memra_plan_free": "drop_plan(plan)", "memra_free": "drop_memory(device, ptr, status)",
    "memra_alloc": "keep_memory(device, ptr, status)", "memra_device_open": "keep_device(device, status)",
    "memra_cache_new": "keep_cache(cache, status)", "memra_snapshot_new": "keep_snapshot(snapshot, status)",
    "memra_capture_end": "keep_graph(graph, status)", "memra_plan_new": "keep_plan(plan, status)",
}  # fmt: skip


@dataclass(frozen=True)
class Function:
    name: str
    returns: str
    params: tuple[tuple[str, str], ...]  # C type, name

    @property
    def pointers(self) -> list[str]:
        return [name for kind, name in self.params if "*" in kind]


def functions() -> list[Function]:
    """All that memra_api.h declares, in its order."""
    text = re.sub(r"/\*.*?\*/", "", (standin.CUDA_SRC / "memra_api.h").read_text(), flags=re.DOTALL)
    found = []
    for returns, name, listed in re.findall(r"MEMRA_API ([\w ]+[ *]+)(memra_\w+)\(([^)]*)\);", text):
        params = []
        for each in map(str.strip, " ".join(listed.split()).split(",")):
            if each == "void":
                continue
            match = re.fullmatch(r"(.*?)(\w+)(\[65\])?", each)
            assert match, each
            kind = match[1].strip() + (" *" if match[3] else "")
            params.append((kind, match[2]))
        found.append(Function(name, returns.strip(), tuple(params)))
    return found


def _scalar(function: Function, kind: str, name: str) -> str:
    if kind == "float":
        return "draw_float(in)"
    if kind == "uint64_t":
        return "draw_bytes(in)" if name == "n_bytes" else "draw_address(in)"
    sound = 1 if name == "il" and function.name in ATTENTION else SOUND.get(name, 0)
    return f"draw_int(in, {sound})" if kind == "int64_t" else f"({kind})draw_int32(in, {sound})"


def _pointer(function: Function, kind: str, name: str) -> tuple[str, str]:
    """The declaration of a pointer, and the type of what it points at where that is an answer."""
    if name in ARRAYS and kind not in OUTPUTS:
        count = "n_devices" if function.name == "memra_cache_bind" else "n_stages"
        return f"{kind.removesuffix('*')}*{name} = {ARRAYS[name].format(count=count)}", ""
    if kind in OUTPUTS:
        return f"{kind}{name} = draw_out(in, sizeof({OUTPUTS[kind]}))", OUTPUTS[kind]
    if kind == "char *":
        return "char *hex = draw_out(in, 65)", "char[65]"
    return f"{kind}{name} = {INPUTS[kind]}", ""


def _call(function: Function) -> str:
    """A C function that draws the arguments of one function of the library, calls it, and holds it to the laws."""
    lines = [f"static void call_{function.name}(input *in) {{"]
    lines += [f"    {k} {n} = {_scalar(function, k, n)};" for k, n in function.params if "*" not in k]
    answers = []
    for kind, name in function.params:
        if "*" in kind:
            declared, answer = _pointer(function, kind, name)
            lines.append(f"    {declared};")
            answers += [(name, answer)] if answer else []
    arguments = ", ".join(name for _, name in function.params)
    if function.returns == "int":
        may = []
        for i, pointer in enumerate(function.pointers):
            key = function.name, pointer
            may += [f"in->forced_null == {i}"] if key in MAY_BE_NULL else []
            may += [f"(in->forced_null == {i} && {EMPTY[key]} == 0)"] if key in EMPTY else []
        sound = " || ".join(may) or "false"
        lines.append(f"    const int status = {function.name}({arguments});")
        lines.append(f"    end_status(in, status, {sound});")
        for name, answer in answers:
            lines.append(f'    check_out("{name}", status, {name}, sizeof({answer}));')
    else:
        lines += [f"    (void){function.name}({arguments});", "    end_value(in);"]
    if function.name in ENDS:
        lines.append(f"    {ENDS[function.name]};")
    return "\n".join([*lines, "}\n"])


def calls() -> str:
    """The text of calls.c."""
    found = functions()
    parts = ['#include "world.h"\n', *(_call(function) for function in found), "const function functions[] = {"]
    for function in found:
        names = ", ".join(f'"{name}"' for name in function.pointers) or "0"
        may = ", ".join(str(function.name in names).lower() for names in (MAY_TOUCH, MAY_CHANGE))
        parts.append(f'    {{"{function.name}", call_{function.name}, {len(function.pointers)}, {{{names}}}, {may}}},')
    parts += ["};", f"const int n_functions = {len(found)};", "const char *const kernel_names[] = {"]
    parts += [f'    "{name}",' for name in KERNELS]
    parts += ["};", f"const int n_kernel_names = {len(KERNELS)};", ""]
    return "\n".join(parts)


# Building and running

FLAGS = (
    "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-DMEMRA_BUILD", f"-I{standin.CUDA_SRC}", f"-I{FUZZ}",
)  # fmt: skip
LIBRARIES = ("-ldl", "-lpthread")


def _object(source: Path) -> Path:
    """One compiled file; of the library's own, with its edges counted."""
    traced = ("-fsanitize-coverage=trace-pc",) if source.stem.startswith("memra_") else ()
    headers = [*standin.CUDA_SRC.glob("*.h"), *FUZZ.glob("*.h")]
    return standin.built(f"{source.stem}.o", ("gcc", *FLAGS, *standin.SANITIZERS, *traced, "-c"), [source], headers)


def build(folder: Path, changed: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """The fuzzer in `folder`, with the library's texts in it, on the sanitized stand-in driver.

    changed: of a file of the library, a text and what stands in its stead.
    """
    (folder / "calls.c").write_text(calls())
    sources = [folder / "calls.c", *sorted(FUZZ.glob("*.c"))]
    for source in sorted(standin.CUDA_SRC.glob("memra_*.c")):
        sources.append(source)
        if source.name in (changed or {}):
            old, new = (changed or {})[source.name]
            text = source.read_text()
            assert text.count(old) == 1, old
            sources[-1] = folder / source.name
            sources[-1].write_text(text.replace(old, new))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(_object, sources))
    driver, program = standin.build_driver(sanitized=True), folder / "fuzz"
    linked = ["gcc", *standin.SANITIZERS, *map(str, objects), str(driver), f"-Wl,-rpath,{driver.parent}"]
    subprocess.run([*linked, *LIBRARIES, "-o", str(program)], check=True)
    echo_kernels.build(folder)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "FAKE_CUDA_KERNELS": str(program.parent / "echo.so"),
        "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True)


@dataclass(frozen=True)
class Told:
    """What a run says of one function: calls by how they ended, and how often each pointer was NULL."""

    calls: int
    ok: int
    refused: int
    failed: int
    nulls: dict[str, int]


def read(output: str) -> tuple[dict[str, Told], int]:
    """What a run printed, by function, and how many inputs it had."""
    told = {}
    for name, line in re.findall(r"^(memra_\w+) (.*)$", output, re.MULTILINE):
        numbers = {key: int(value) for key, value in (each.split("=") for each in line.split())}
        told[name] = Told(*(numbers.pop(key) for key in ("calls", "ok", "refused", "failed")), numbers)
    (inputs,) = re.findall(r"^inputs (\d+)", output, re.MULTILINE)
    return told, int(inputs)


def libfuzzer(folder: Path) -> str:
    """Writes what a build under libFuzzer needs; the command that builds and runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls.c").write_text(calls())
    echo_kernels.build(folder)
    driver = standin.build_driver(sanitized=False)
    sources = f"{folder}/calls.c {FUZZ}/laws.c {FUZZ}/draws.c {standin.CUDA_SRC}/memra_*.c {driver}"
    flags = " ".join(flag for flag in FLAGS if flag != "-Werror")
    return (
        f"clang {flags} -fsanitize=fuzzer,address,undefined {sources} -Wl,-rpath,{driver.parent} {' '.join(LIBRARIES)}"
        f" -o {folder}/fuzz && FAKE_CUDA_KERNELS={folder}/echo.so {folder}/fuzz -max_len=480"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    print(libfuzzer(Path(sys.argv[1])))
