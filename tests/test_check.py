"""`check` is green where the kernels are right, and red where one line of any of them is not."""

from __future__ import annotations

import json
import re
import shutil
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin as standin_module
import tally
import vectors_data

from memra_driver import check, cli, driver, formats, kvdev, nvrtc, reference, reference_attend, reference_common
from memra_driver.check.case import Case
from memra_driver.check.vectors import vector_cases
from memra_driver.kernels import KERNELS
from memra_driver.kvdev import HostDev

# Kernel, its source, and the line that is flipped.
IN_KERNELS = [
    ("append_kv", "append_kv.cu", "step_of(most, 127.0f", "step_of(most, 126.0f"),
    ("append_kv", "append_kv.cu", "step_of(range, 31.0f", "step_of(range, 30.0f"),
    ("append_kv", "append_kv.cu", "(e, s.inv, 8.5f", "(e, s.inv, 8.0f"),
    ("append_kv", "append_kv.cu", "* 0x01020408u >> 24", "* 0x01020408u >> 23"),
    ("append_kv", "append_kv.cu", "range), reciprocal, guess)", "range), reciprocal, 2 * guess)"),
    ("append_kv", "append_kv.cu", "<= 464.0f ? 0 : UNUSUAL", "<= 464e9f ? 0 : UNUSUAL"),
    ("dequant_kv", "dequant_kv.cu", "& 15) - 8)", "& 15) - 7)"),
    ("conv_update", "conv.cu", "expf(-sum)", "expf(sum)"),
    ("conv_ring_rebuild", "conv.cu", "taken > rows", "taken >= rows"),
    ("conv_ring_rebuild", "conv.cu", "x += which * x_apart", "x += 0 * x_apart"),
    ("gdn_prep", "gdn_prep.cu", "x > 20.0f", "x > 2.0f"),
    ("gdn_scan", "gdn_scan.cu", "__fmaf_rn(-g, memra", "__fmaf_rn(g, memra"),
    ("gdn_scan", "gdn_scan.cu", "column ? key(r) : query(r)", "column ? query(r) : key(r)"),
    ("recur_step", "recur_step.cu", "if (!*is_last) return;", "return;"),
    ("recur_step", "recur_step.cu", "p.tape[at] = p.x[at];", "p.tape[at] = 0.0f;"),
    ("recur_step", "recur_step.cu", "(u / SIZE) * p.num_k + p.key_head", "(u / SIZE) * p.num_k"),
    ("set_counters", "counters.cu", "} else if (in_b)", "} if (in_b)"),
    ("commit_counters", "counters.cu", "if (i == 0 && move_pos) *pos_d", "if (i == 0) *pos_d"),
    ("advance_batch", "counters.cu", "pos_d += n;", "pos_d += 1;"),
    ("copy_many", "copy_many.cu", "threadIdx.x < tail", "threadIdx.x + 1 < tail"),
    ("restore", "counters.cu", "(is_first ? src : src2) + at", "(is_first ? src : src2)"),
    ("copy_rows", "copy_many.cu", "c < end;", "c + 1 < end;"),
    ("attend", "attend.cu", "const bool seen = column < work.columns &&", "const bool seen = key + 1 <"),
    ("attend", "attend.cu", "sum[i] = __fmaf_rn(sum[i], worth, added)", "sum[i] = added"),
    ("attend_pipe", "attend_pipe.cu", "worth = exp2_of(__fsub_rn(reference, now))", "worth = 1.0f"),
    ("attend_combine", "attend_combine.cu", "__fmaf_rn(x[i].y, w, value.y)", "__fmaf_rn(x[i].x, w, value.y)"),
    ("attend", "attend.cu", "fold_sum(all_sum[i], sum[i], worth)", "sum[i]"),
    ("attend_pipe", "attend_pipe.cu", "fold_sum(value[d][n][i + 2], group.value[d][n][i + 2], worth)",
     "group.value[d][n][i + 2]"),
    ("attend_combine", "attend_combine.cu", "__shfl_sync(MEMRA_ALL_LANES, all, FOLD - 1)", "own.x"),
    ("attend_combine", "attend_combine.cu", "has(fold * FOLD) || (fold", "has(fold * FOLD) && (fold"),
]
# An entry that shows it, its header, and the line that is flipped: what only the compiler for a GPU reads. None of them
# leads out of the memory of the kernel, which would cost the whole process its context.
IN_PTX = [
    ("attend_64", "mma.cuh", '"f"(high), "f"(low)', '"f"(low), "f"(high)'),
    ("attend_64", "mma.cuh", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0])',
     '"r"(a[1]), "r"(a[0]), "r"(a[2]), "r"(a[3]), "r"(b[0])'),
    ("attend_pipe_64_8", "mma.cuh", '"r"(b0), "r"(b1), "r"(0));\n    } else', '"r"(b1), "r"(b0), "r"(0));\n    } else'),
    ("attend_pipe_64_8", "mma.cuh", "s32.s8.u8.s32", "s32.s8.s8.s32"),
    ("attend_pipe_64_8", "mma.cuh", "fma.rn.f16x2 %0, %1, %2, %3", "fma.rn.f16x2 %0, %1, %3, %2"),
    ("attend_64", "mma.cuh", '"r"(b[0]), "r"(b[1])', '"r"(b[1]), "r"(b[0])'),
    ("attend_64", "mma.cuh", "(lane & 16) / 2", "(lane & 16) / 4"),
    ("attend_64", "mma.cuh", "m0 + (lane & 8);", "m0;"),
    ("attend_64", "mma.cuh", ".x4.trans.shared", ".x4.shared"),
    ("attend_64", "attend.cuh", "ex2.approx.ftz", "lg2.approx.ftz"),
    ("gdn_scan", "device.cuh", "ld.global.cs.v4.f32 {%0, %1", "ld.global.cs.v4.f32 {%1, %0"),
    ("recur_step_64", "device.cuh", "st.global.cs.v4.f32 [%0], {%1, %2", "st.global.cs.v4.f32 [%0], {%2, %1"),
    ("append_kv", "device.cuh", "cvt.rn.f16.f32", "cvt.rz.f16.f32"),
    ("append_kv", "device.cuh", 'e4m3x2.f32 %0, %1, %2;" : "=h"(low)', 'e4m3x2.f32 %0, %2, %1;" : "=h"(low)'),
]
# Kernel, the module of its twin, and the operation that is flipped.
IN_TWINS = [
    ("append_kv", reference, "if len >= 0", "if len > 0"),
    ("dequant_kv", reference, "start + rows > max_ctx", "start + rows >= max_ctx"),
    ("conv_update", reference, "np.exp(-total)", "np.exp(total)"),
    ("conv_ring_rebuild", reference, "accept > rows", "accept >= rows"),
    ("gdn_prep", reference, "step > 20", "step > 2"),
    ("gdn_scan", reference, "(v[t, heads] - g", "(v[t, heads] + g"),
    ("recur_step", reference, "tape[rows * conv_dim :]", "tape[rows * conv_dim + 1 :]"),
    ("set_counters", reference, "elif ((b_lo", "if ((b_lo"),
    ("commit_counters", reference, "    if move_pos:\n        pos_d", "    if True:\n        pos_d"),
    ("advance_batch", reference, "[0] += n", "[0] += 1"),
    ("copy_many", reference, "memmove(dst, src, count)", "memmove(dst, src, count & ~1)"),
    ("restore", reference, "to[:count] = source[:count]", "to[: count - 1] = source[: count - 1]"),
    ("copy_rows", reference, "for row in range(rows):", "for row in range(rows - 1):"),
    ("attend", reference_attend, "at <= pos + row", "at < pos + row"),
    ("attend", reference_attend, "left[row, :, :, fold] =", "left[row, :, :, 0] ="),
    ("attend_combine", reference_attend, "total[:, head_dim_v + 1 :]", "total[:, head_dim_v:][:, :1]"),
]
IN_FORMATS = [
    ("q8_0", "np.float32(127)", "np.float32(126)"),
    ("q5_1", "np.float32(31)", "np.float32(30)"),
    ("q4_0", "np.float32(8.5)", "np.float32(8.0)"),
    ("fp8", 'side="left"', 'side="right"'),
]


@pytest.fixture(scope="module")
def small_cases() -> list[Case]:
    return list(check.cases(small=True))


def family(name: str) -> str:
    """"attend", "attend_pipe", "recur_step": all entries of it."""
    return re.sub(r"(_(\d+|q8_0|q5_1|q4_0|fp8|\d+x\d+))+(_wide|_folds)?$", "", name)


def of(kernel: str, cases: list[Case]) -> Iterator[Case]:
    """The cases that launch a kernel, or any entry of a family."""
    names = {name for name in KERNELS if kernel in (name, family(name))}
    return (case for case in cases if names & {name for name, _ in case.launches})


def flipped(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
    return text.replace(old, new)


def with_headers(source: str) -> str:
    """A kernel source with the headers that hold its own text written out."""
    text = (standin_module.CUDA_SRC / source).read_text()
    own = r'#include "((?:append_kv|copy|gdn|recur_step|attend_pipe_block|attend_pipe_score|attend_pipe_weigh)\.cuh)"\n'
    return re.sub(own, lambda found: with_headers(found[1]), text)


def with_kernel(standin: standin_module.StandIn, folder: Path, source: str, old: str, new: str) -> None:
    """The stand-in's kernels from now on, with one line of a source, or of its own headers, changed."""
    changed = folder / source
    changed.write_text(flipped(with_headers(source), old, new))
    kernels = sorted(standin_module.CUDA_SRC.glob("*.cu"))
    sources = [changed if each.name == source else each for each in kernels]
    standin.use_kernels(standin_module.build_kernels(sources))


def flipped_module(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """A copy of a module with one operation changed."""
    assert module.__file__ is not None
    copy = types.ModuleType(module.__name__)
    exec(
        compile(flipped(Path(module.__file__).read_text(), old, new), f"flipped {module.__name__}", "exec"), vars(copy)
    )
    return copy


def flipped_sources(folder: Path, entry: str, source: str, old: str, new: str) -> Path:
    """A copy of cuda_src with one line changed; of attend it has one entry only, since all take seconds to compile."""
    shutil.copytree(standin_module.CUDA_SRC, folder)
    (folder / source).write_text(flipped((folder / source).read_text(), old, new))
    attend = (folder / "attend.cu").read_text()
    (folder / "attend.cu").write_text(re.sub(rf"^ATTEND\((?!{entry},).*\n", "", attend, flags=re.MULTILINE))
    return folder


def first_red(e: Any, cases: Iterator[Case], path: Path) -> check.Result:
    red = next((result for result in check.run(e, cases, path) if result.fault), None)
    assert red is not None, "check stayed green"
    assert red.where, red.fault  # a wrong result, not an error
    assert check.replay(e, path).fault == red.fault
    return red


def test_the_checks_launch_every_kernel_of_the_table(small_cases: list[Case]) -> None:
    launched = {kernel for case in small_cases for kernel, _ in case.launches}
    assert launched == KERNELS.keys()
    assert len({case.title for case in check.cases()}) > len({case.title for case in small_cases}) > 200


def test_every_kernel_of_the_table_and_its_twin_have_a_line_that_is_flipped() -> None:
    sources = {family(name): kernel.source for name, kernel in KERNELS.items() if kernel.source[:12] != "attend_pipe_"}
    assert {kernel: source for kernel, source, _, _ in IN_KERNELS} == sources
    assert {kernel for kernel, _, _, _ in IN_TWINS} == sources.keys() - {"attend_pipe"}  # whose twin is attend's


def test_the_same_seed_makes_the_same_inputs_and_another_seed_others() -> None:
    first, again, other = (
        [array.tobytes() for case in check.cases(seed, small=True) for array in case.arrays.values()]
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_the_packaged_vectors_are_those_of_the_tests() -> None:
    folder = Path(str(files("memra_driver").joinpath("vectors")))
    packaged = json.loads((folder / "kernels.json").read_text())
    originals = {each["case"]: each for each in json.loads((vectors_data.FOLDER / "kernels.json").read_text())}
    with np.load(folder / "kernels.npz") as mine, np.load(vectors_data.FOLDER / "kernels.npz") as theirs:
        assert {name: mine[name].tobytes() for name in mine} == {name: theirs[name].tobytes() for name in mine}
    for entry in packaged:
        whole = originals[entry["case"]]
        assert {name: value for name, value in entry.items() if name != "except_block"}.items() <= whole.items()
        assert entry.get("except_block", {}).items() <= whole.get("except_block", {}).items()
    assert {each["op"] for each in packaged} == {each["op"] for each in originals.values()}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1.5e6


VECTOR_WANTS = {
    "append_kv": ({"k", "v"},), "conv_update": ({"out", "conv_state"},),
    "gdn_prep": ({"q", "k", "v", "g_log", "beta"},), "gdn_scan": ({"state_out"}, {"state_out", "out"}),
}  # fmt: skip


@pytest.mark.parametrize("kernel", VECTOR_WANTS)
def test_what_a_packaged_vector_holds_is_what_check_asks_for(kernel: str, tmp_path: Path) -> None:
    """A kernel that is right is red as soon as one element of a vector says something else."""
    e, path = HostDev(), tmp_path / "red.npz"
    found = [case for case in vector_cases(np.random.default_rng(0), True) if case.kernel == kernel]
    assert found
    assert {frozenset(case.want) for case in found} == {frozenset(names) for names in VECTOR_WANTS[kernel]}
    for case in found:
        for name, array in case.want.items():
            other = array.copy()
            at = int(np.abs(array.astype(np.float64)).argmax())
            other[at] = other[at] ^ 1 if other.dtype == np.uint8 else other[at] * np.float32(1.01)
            (red,) = check.run(e, [replace(case, want=case.want | {name: other})], path)
            assert red.where == f"{name}[{at}]", red.fault or "check stayed green"
            assert red.fault
        (green,) = check.run(e, [case], path)
        assert not green.fault
        tally.add("vectors", len(case.want))


def test_check_is_green_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--device", "host"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"ALL GREEN ({len(lines) - 1} checks)"
    assert all(line.startswith("ok ") for line in lines[:-1])


@pytest.mark.long(10)
def test_check_is_green_on_the_stand_in(standin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--device", "cuda:0", "--small", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["failed"], found["input"], found["checks"]) == (0, None, len(found["results"]))
    assert {each["kernel"] for each in found["results"]} >= KERNELS.keys() - {"attend_combine"}
    assert max(each["worst"] for each in found["results"]) > 0


@pytest.mark.long(9)
@pytest.mark.gpu
def test_check_is_green_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--device", "cuda:0"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(("kernel", "source", "old", "new"), IN_KERNELS)
def test_a_flipped_line_of_a_kernel_turns_check_red(
    standin: standin_module.StandIn, make_dev: Any, small_cases: list[Case], tmp_path: Path,
    kernel: str, source: str, old: str, new: str,
) -> None:  # fmt: skip
    with_kernel(standin, tmp_path, source, old, new)
    first_red(make_dev("cuda", arena=False), of(kernel, small_cases), tmp_path / "red.npz")
    standin.use_kernels(standin_module.build_kernels())
    assert not check.replay(make_dev("cuda", arena=False), tmp_path / "red.npz").fault


@pytest.mark.long(20)
@pytest.mark.gpu
@pytest.mark.parametrize(("entry", "source", "old", "new"), IN_PTX)
def test_a_flipped_line_that_only_a_gpu_runs_turns_check_red(
    make_dev: Any, small_cases: list[Case], tmp_path: Path, entry: str, source: str, old: str, new: str
) -> None:
    folder = flipped_sources(tmp_path / "cuda_src", entry, source, old, new)
    e = make_dev("cuda", arena=False)
    if "e4m3" in old and e.context.arch in ("sm_80", "sm_86", "sm_87"):
        pytest.skip("GPUs before sm_89 do not run that line")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "source_dir", lambda: folder)
        first_red(e, of(entry, small_cases), tmp_path / "red.npz")
    assert not check.replay(make_dev("cuda", arena=False), tmp_path / "red.npz").fault


@pytest.mark.long(8)
@pytest.mark.parametrize(("entry", "source", "old", "new"), IN_PTX)
def test_a_flipped_line_that_only_a_gpu_runs_reaches_the_image_that_is_loaded(
    standin: standin_module.StandIn, make_dev: Any, tmp_path: Path, entry: str, source: str, old: str, new: str
) -> None:
    images: list[bytes] = []
    load = driver.library_load_data
    for name, text in (("as it is", old), ("flipped", new)):
        folder = flipped_sources(tmp_path / name, entry, source, old, text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrtc, "source_dir", lambda folder=folder: folder)
            patch.setattr(driver, "library_load_data", lambda image: images.append(image) or load(image))
            make_dev("cuda", arena=False).kernels.plan(entry)
    assert [image[:4] for image in images] == [nvrtc.ELF] * 2
    assert images[0] != images[1]


@pytest.mark.parametrize(("kernel", "module", "old", "new"), IN_TWINS)
def test_a_flipped_operation_of_a_twin_turns_check_red(
    small_cases: list[Case], tmp_path: Path, kernel: str, module: types.ModuleType, old: str, new: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvdev, module.__name__.rpartition(".")[2], flipped_module(module, old, new))
        first_red(HostDev(), of(kernel, small_cases), tmp_path / "red.npz")
    assert not check.replay(HostDev(), tmp_path / "red.npz").fault


@pytest.mark.parametrize(("name", "old", "new"), IN_FORMATS)
def test_a_flipped_operation_of_a_format_turns_check_red(
    small_cases: list[Case], tmp_path: Path, name: str, old: str, new: str
) -> None:
    right = formats.FORMATS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reference_common.BY_CODE, right.code, flipped_module(formats, old, new).FORMATS[name])
        first_red(HostDev(), of("append_kv", small_cases), tmp_path / "red.npz")
    assert not check.replay(HostDev(), tmp_path / "red.npz").fault


def test_a_red_check_exits_with_1_and_keeps_the_input_that_showed_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.npz")
    argv = ["check", "--device", "host", "--small", "--save", kept]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvdev, "reference", flipped_module(reference, "np.exp(-total)", "np.exp(total)"))
        assert cli.main(argv) == 1
        lines = capsys.readouterr().out.splitlines()
        red = next(line for line in lines if line.startswith("FAILED"))
        assert lines[-1].endswith(f"FAILED on host; memra-driver check --replay {kept}")
        assert cli.main(["check", "--device", "host", "--replay", kept]) == 1
        assert capsys.readouterr().out.splitlines()[0] == red
    assert cli.main(["check", "--device", "host", "--replay", kept]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ALL GREEN (1 checks)"


def test_a_file_that_is_no_saved_input_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, x=np.zeros(3))
    shutil.copy(__file__, tmp_path / "text.npz")
    for each in (path, tmp_path / "text.npz", tmp_path / "absent.npz"):
        assert cli.main(["check", "--device", "host", "--replay", str(each)]) == 2
        assert each.name in capsys.readouterr().err


def test_a_driver_error_ends_the_run_and_is_a_failure(
    standin: standin_module.StandIn, make_dev: Any, small_cases: list[Case], tmp_path: Path
) -> None:
    e = make_dev("cuda", arena=False)
    standin.fail("cuLaunchKernelEx", 3, 700)
    results = list(check.run(e, small_cases, tmp_path / "red.npz"))
    assert [bool(result.fault) for result in results] == [False, False, True]
    assert "ILLEGAL_ADDRESS" in results[-1].fault
    assert not check.replay(e, tmp_path / "red.npz").fault
