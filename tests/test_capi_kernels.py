"""How the C library takes kernels out of cubins, and that each launch has the table's shape and parameters."""

from __future__ import annotations

import ctypes
import itertools
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import echo_kernels
import numpy as np
import pytest
from standin import StandIn

from memra_driver import nvrtc
from memra_driver.capi.library import launch_function
from memra_driver.check.args import PAIRS
from memra_driver.errors import (
    AbiError,
    ArrayError,
    CapacityError,
    ConfigError,
    DeviceMismatch,
    DriverError,
    StateError,
    UnsupportedError,
)
from memra_driver.formats import FORMATS
from memra_driver.kernels import (
    ATTEND_COLUMNS,
    ATTEND_ENTRIES,
    ATTEND_FOLD_COLUMNS,
    KERNELS,
    PIPE_ENTRIES,
    PIPE_FIXED,
    AttendGeometry,
    attend_kernel,
    attend_pieces,
    recur_split,
)
from memra_driver.plan import ATTEND_FOLDS, ATTEND_GROUPS, ATTEND_HEAD_DIMS, attend_part_bytes

HOW = "python -m memra_driver --cubins sm_90 names a folder that does"

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]


@pytest.fixture
def cuda_kind() -> str:
    return "c"


@pytest.fixture
def e(make_dev: MakeDev) -> Any:
    return make_dev("cuda")


def cubin(source: str) -> bytes:
    return nvrtc.compile_cubin(source, "sm_90")


def load(e: Any, image: bytes) -> None:
    e.c.call("memra_device_load", image, len(image))


# Launches


def some_arguments(random_: random.Random, name: str) -> dict[str, Any]:
    """Arguments of a kernel, no two alike but by chance; sizes are small enough for a grid."""
    small = {
        "rows": (1, 70), "n_seqs": (1, 9), "conv_dim": (1, 5000), "num_v": (1, 64), "n": (1, 300), "columns": (1, 9000),
        "n_layers": (1, 60), "bytes": (0, 1 << 30), "bytes2": (0, 1 << 30),
        "kv_dim_k": (1, 4096), "kv_dim_v": (1, 4096), "n_head": (1, 64), "head_dim_v": (32, 512),
    }  # fmt: skip
    args: dict[str, Any] = {}
    for kind, parameter in KERNELS[name].params:
        if kind.endswith("*"):
            args[parameter] = random_.choice([None, SimpleNamespace(ptr=random_.getrandbits(64))])
        elif parameter in small:
            args[parameter] = random_.randint(*small[parameter])
        elif kind == "float":
            args[parameter] = struct.unpack("f", struct.pack("f", random_.gauss(0, 1)))[0]
        else:
            bits = 31 if kind == "int" else 63
            args[parameter] = random_.randint(-(2**bits), 2**bits - 1)
    if "state_size" in args:
        args["state_size"] = random_.choice([32, 64, 128, 256])
    if name.startswith("recur_step"):
        size = args["state_size"] = int(name.rpartition("_")[2])
        args |= {"num_k": random_.randint(1, 16), "d_conv": random_.randint(1, 8)}
        args["columns"] = random_.choice([n for n in (32, 64, 128, 256, 384, 512) if n % size == 0 or size % n == 0])
        args["blocks"] = random_.choice([1, -(-(-(-args["num_v"] // args["num_k"]) * size) // args["columns"])])
    if "pieces" in args:
        args["pieces"] = ATTEND_GROUPS if name in ATTEND_ENTRIES else random_.choice([ATTEND_FOLDS, ATTEND_GROUPS])
    if name in ATTEND_ENTRIES:
        args["n_head_kv"] = random_.choice([1, 2, 3, 4])
        args["n_head"] = args["n_head_kv"] * random_.randint(1, 16)
        if random_.random() < 0.5:  # at most as many columns as the narrow entry takes, or one more
            args["rows"], args["n_head"] = random_.choice([1, 7, 8, 9]), args["n_head_kv"]
        args["head_dim_k"] = random_.choice(ATTEND_HEAD_DIMS)
        args["head_dim_v"] = random_.choice(ATTEND_HEAD_DIMS)
    return args


def packed(random_: random.Random) -> dict[str, Any]:
    """A geometry of which most are served by attend_pipe: packed tokens of any two formats."""
    heads, dims = random_.randint(1, 9), [random_.choice([64, 96, 128, 192, 256, 512]) for _ in "kv"]
    formats = [FORMATS[random_.choice(names)] for names in (("q8_0", "fp8"), ("q5_1", "q4_0", "fp8"))]
    found: dict[str, Any] = {"n_head_kv": heads, "n_head": heads * random_.choice([1, random_.randint(1, 16)])}
    found["rows"] = random_.randint(1, 6)
    for name, dim, fmt in zip("kv", dims, formats, strict=True):
        more = random_.choice([0, 0, 0, 16])
        found |= {f"head_dim_{name}": dim, f"{name}_format": fmt.code}
        found[f"{name}_tok_bytes"] = heads * dim // 32 * fmt.block_bytes + more
    return found


def made_for(k: str, v: str, heads: int, dim: int, columns: int) -> dict[str, Any]:
    """The geometry of an entry that was made for it, and as many columns as it has."""
    found: dict[str, Any] = {"n_head_kv": heads, "n_head": heads * columns, "rows": 1}
    for name, fmt in zip("kv", (FORMATS[k], FORMATS[v]), strict=True):
        found |= {f"head_dim_{name}": dim, f"{name}_format": fmt.code}
        found[f"{name}_tok_bytes"] = heads * dim // 32 * fmt.block_bytes
    return found


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ATTEND_ENTRIES] + ["attend", "attend_pipe"])
def test_a_launch_has_the_shape_and_the_parameters_of_the_table(
    e: Any, standin: StandIn, echo: Path, name: str
) -> None:
    standin.use_kernels(echo)
    random_ = random.Random(name)
    seen = set()
    attends = {"attend": ATTEND_COLUMNS, "attend_pipe": PIPE_ENTRIES}.get(name)
    fixed: list[dict[str, Any]] = []
    if name == "attend_pipe":
        made = [made_for(k, v, *shape) for k, v in PAIRS for shape in PIPE_FIXED[k]]
        narrow = [args for args in made if args["n_head"] // args["n_head_kv"] <= ATTEND_FOLD_COLUMNS]
        fixed = [args | {"pieces": ATTEND_GROUPS} for args in made]
        fixed += [args | {"pieces": ATTEND_FOLDS} for args in narrow]
    for number in range(20 if attends is None else 300 + len(fixed)):
        args = some_arguments(random_, name if attends is None else "attend_64")
        entry = name
        if attends is not None:
            if name == "attend_pipe":
                args |= fixed[number] if number < len(fixed) else packed(random_)
            columns = args["rows"] * (args["n_head"] // args["n_head_kv"])
            if number >= len(fixed):
                args["pieces"] = attend_pieces(random_.choice([1, 256]), columns)
            entry = attend_kernel("sm_90", AttendGeometry.of(args), columns, args["pieces"])
        standin.clear_trace()
        e.launch(entry, *args.values())
        (call,) = standin.calls("cuLaunchKernelEx")
        assert call.kernel == entry
        assert (call.grid, call.block, call.smem) == KERNELS[entry].shape(args)
        assert call.stream == e.stream.handle
        given = [(0 if x is None else x.ptr) if kind.endswith("*") else x
                 for (kind, _), x in zip(KERNELS[entry].params, args.values(), strict=True)]  # fmt: skip
        assert list(echo_kernels.last(echo, entry)) == given
        seen.add(entry)
    assert seen >= (set(attends) if attends is not None else {name})


def test_no_blocks_are_no_launch(e: Any, standin: StandIn) -> None:
    e.kernels.load_all()
    standin.clear_trace()
    for name in set(KERNELS) - set(ATTEND_ENTRIES) - {"set_counters", "restore", "commit_counters"}:
        args = {parameter: None if kind.endswith("*") else 0 for kind, parameter in KERNELS[name].params}
        if name.startswith("recur_step"):
            size = int(name.rpartition("_")[2])
            args |= {"state_size": size, "columns": size, "blocks": 1, "num_k": 1, "num_v": 1, "d_conv": 1}
        args |= {"pieces": ATTEND_GROUPS} if "pieces" in args else {}
        e.launch(name, *args.values())
    assert standin.trace() == []


def changed(name: str, **values: Any) -> list[Any]:
    """The arguments of a direct call, all 1 but for some."""
    args = {parameter: 1.0 if kind == "float" else 1 for kind, parameter in KERNELS[name].params}
    if name.startswith("attend_64"):
        args |= {"head_dim_k": 64, "head_dim_v": 64}
    if name.startswith("recur_step"):
        args |= {"state_size": 64, "columns": 64}
    if "pieces" in args:
        args["pieces"] = ATTEND_GROUPS
    return list((args | values).values())


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("append_kv", {"rows": -1, "kv_dim_k": 64}, ConfigError),
        ("append_kv", {"n_seqs": -1, "kv_dim_k": 64}, ConfigError),
        ("append_kv", {"rows": 2**31 - 1, "kv_dim_k": 2**31 - 1, "kv_dim_v": 2**31 - 1}, CapacityError),
        ("dequant_kv", {"rows": 2**62, "kv_dim_k": 2**31 - 1}, CapacityError),
        ("dequant_kv", {"rows": -(2**63), "kv_dim_k": 64}, ConfigError),
        ("conv_update", {"conv_dim": -1}, ConfigError),
        ("gdn_prep", {"rows": 2**31 - 1, "num_v": 2**31 - 1, "n_seqs": 2**31 - 1}, CapacityError),
        ("copy_many", {"n": 2**31 - 1}, CapacityError),
        ("copy_many", {"n": -1}, ConfigError),
        ("restore", {"bytes2": -1}, ConfigError),
        ("restore", {"bytes": 2**62}, CapacityError),
        ("attend_64", {"rows": -1}, ConfigError),
        ("attend_64", {"rows": 2**31 - 1, "n_seqs": 2**31 - 1}, CapacityError),
        ("attend_64", {"n_head_kv": 0}, UnsupportedError),
        ("attend_64", {"n_head": 3, "n_head_kv": 2}, UnsupportedError),
        ("attend_64", {"n_head": 1, "n_head_kv": 2}, UnsupportedError),
        ("attend_64", {"head_dim_v": 513}, UnsupportedError),
        ("attend_64", {"head_dim_v": 0}, UnsupportedError),
        ("attend_64", {"head_dim_k": 513}, UnsupportedError),
        ("attend_64", {"head_dim_k": -64}, UnsupportedError),
        ("attend_64", {"pieces": 11}, ConfigError),
        ("attend_64", {"pieces": ATTEND_FOLDS, "rows": 9}, ConfigError),
        ("attend_combine", {"pieces": 0}, ConfigError),
        ("recur_step_64", {"rows": -1}, ConfigError),
        ("recur_step_64", {"n_seqs": 2**31 - 1, "num_k": 2**31 - 1}, CapacityError),
        ("recur_step_64", {"state_size": 16}, UnsupportedError),
        ("recur_step_64", {"num_k": 0}, UnsupportedError),
        ("recur_step_64", {"num_v": -1}, UnsupportedError),
        ("recur_step_64", {"d_conv": 9}, UnsupportedError),
        ("recur_step_64", {"columns": 96}, ConfigError),
        ("recur_step_64", {"columns": 16}, ConfigError),
        ("recur_step_64", {"columns": 1024, "num_v": 16}, ConfigError),
        ("recur_step_64", {"blocks": 2}, ConfigError),
    ],
)
def test_counts_that_are_none_or_fit_no_grid_are_refused(
    e: Any, standin: StandIn, name: str, values: dict[str, int], error: type[Exception]
) -> None:
    e.kernels.load_all()
    standin.clear_trace()
    function = launch_function(name)
    with pytest.raises(error, match=function.removeprefix("memra_launch_").removesuffix("_combine")):
        e.c.call(function, *changed(name, **values))
    assert standin.trace() == []


def test_python_asks_for_no_other_entry_of_attend_than_c_would_choose(e: Any) -> None:
    args = some_arguments(random.Random(1), "attend_64") | {"head_dim_v": 64, "rows": 1, "n_head": 2, "n_head_kv": 2}
    for name in set(ATTEND_ENTRIES) - {"attend_64"}:
        with pytest.raises(UnsupportedError, match=f"launches attend_64 for this attend, not {name}"):
            e.launch(name, *args.values())


def test_python_and_c_share_the_columns_of_a_recurrent_step_alike(e: Any) -> None:
    columns, blocks = ctypes.c_int32(), ctypes.c_int32()
    for n_seqs, keys, values, size in itertools.product(
        (1, 2, 8, 9, 64, 300), (1, 3, 16), (1, 2, 6, 32, 48), (32, 64, 128, 256)
    ):
        e.c.library.call(
            "memra_recur_split", n_seqs, keys, values, size, ctypes.byref(columns), ctypes.byref(blocks)
        )
        assert (columns.value, blocks.value) == recur_split(n_seqs, keys, values, size)
    with pytest.raises(UnsupportedError, match="state_size 48"):
        e.c.library.call("memra_recur_split", 1, 1, 1, 48, ctypes.byref(columns), ctypes.byref(blocks))
    with pytest.raises(UnsupportedError, match="launches recur_step_64 for this state size, not recur_step_32"):
        e.launch("recur_step_32", *some_arguments(random.Random(1), "recur_step_64").values())


def test_python_and_c_choose_the_pieces_of_attention_alike(e: Any) -> None:
    for n_seqs, columns in itertools.product((1, 7, 8, 256, 2**31 - 1), (1, 8, 9, 4096, 2**40)):
        assert e.c.library.ask("memra_attend_pieces", n_seqs, columns) == attend_pieces(n_seqs, columns)


def test_partial_sums_take_the_bytes_that_the_plan_says(e: Any) -> None:
    for n_seqs, rows, heads, dim in ((1, 1, 1, 64), (3, 16, 40, 512), (1, 0, 8, 64), (256, 16, 64, 256)):
        asked = e.c.library.ask("memra_attend_part_bytes", n_seqs, rows, heads, dim)
        assert asked == n_seqs * attend_part_bytes(rows, heads, dim)
    for absurd in ((-1, 1, 1, 64), (1, -1, 1, 64), (1, 1, -1, 64)):
        assert e.c.library.ask("memra_attend_part_bytes", *absurd) == 0


# Cubins


def test_a_kernel_that_is_not_loaded_is_named_with_the_architecture(e: Any, standin: StandIn) -> None:
    with pytest.raises(UnsupportedError, match=r"append_kv is not loaded; .* -m memra_driver --cubins sm_90"):
        e.c.call("memra_launch_append_kv", *changed("append_kv", kv_dim_k=64))
    load(e, cubin("append_kv.cu"))
    standin.clear_trace()
    table = np.zeros(3, np.uint64)
    with pytest.raises(UnsupportedError, match="copy_many"):
        e.c.call("memra_copy_table", table.ctypes.data, 1)
    assert standin.trace() == []


def test_each_cubin_is_loaded_once_and_only_its_own_kernels_are_asked_for(e: Any, standin: StandIn) -> None:
    for _ in range(2):
        for source in nvrtc.sources():
            load(e, cubin(source))
    assert len(standin.calls("cuLibraryLoadData")) == len(nvrtc.sources())
    assert standin.errors() == []
    attends = standin.calls("cuKernelSetAttribute")  # the shared memory of attend
    assert len(attends) == len(ATTEND_ENTRIES)
    assert not [call for call in standin.trace() if call.code]


@pytest.mark.parametrize("how", ["file", "folder"])
def test_cubins_come_from_files_too(e: Any, standin: StandIn, tmp_path: Path, how: str) -> None:
    for source in nvrtc.sources():
        (tmp_path / f"{source}.cubin").write_bytes(cubin(source))
    (tmp_path / "other.cubin.txt").write_text("not one")
    if how == "folder":
        e.c.call("memra_device_load_folder", str(tmp_path).encode())
    else:
        for path in tmp_path.glob("*.cubin"):
            e.c.call("memra_device_load_file", str(path).encode())
    assert len(standin.calls("cuLibraryLoadData")) == len(nvrtc.sources())
    e.c.call("memra_launch_advance_batch", 0, 0, 1, 0, 0)


def test_a_file_or_folder_that_cannot_serve_is_named(e: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.cubin: No such file"):
        e.c.call("memra_device_load_file", str(tmp_path / "absent.cubin").encode())
    with pytest.raises(ConfigError, match="cannot be read"):
        e.c.call("memra_device_load_file", str(tmp_path).encode())
    with pytest.raises(ConfigError, match="absent: No such file"):
        e.c.call("memra_device_load_folder", str(tmp_path / "absent").encode())
    with pytest.raises(ConfigError, match=r"no \*\.cubin there"):
        e.c.call("memra_device_load_folder", str(tmp_path).encode())
    (tmp_path / "a.cubin").write_bytes(b"\x7fELF, but no more")
    with pytest.raises(ArrayError, match="no cubin"):
        e.c.call("memra_device_load_folder", str(tmp_path).encode())
    for name in ("memra_device_load_file", "memra_device_load_folder"):
        with pytest.raises(ArrayError, match="NULL"):
            e.c.call(name, None)


def test_a_damaged_cubin_is_refused_wherever_it_ends(e: Any, standin: StandIn) -> None:
    whole = cubin("counters.cu")
    for n in (0, 1, 63, 64, *range(65, len(whole), 97), len(whole) - 1):
        standin.clear_trace()
        with pytest.raises(ArrayError, match=r"no cubin|cut off or damaged"):
            load(e, whole[:n])
        assert standin.trace() == []
    for image in (None, b"\x7fELG" + whole[4:]):
        with pytest.raises(ArrayError, match="no cubin"):
            e.c.call("memra_device_load", image, len(whole))


def test_a_cubin_with_any_byte_of_its_tables_wrong_is_no_danger(e: Any, standin: StandIn) -> None:
    """Header and section table as random bytes would have them: loaded or refused, and nothing is read beyond."""
    whole = cubin("counters.cu")
    table = struct.unpack_from("<Q", whole, 0x28)[0]
    random_ = random.Random(4)
    for _ in range(400):
        image = bytearray(whole)
        for _ in range(random_.randint(1, 4)):
            at = random_.choice([random_.randrange(4, 64), random_.randrange(table, len(whole))])
            image[at] = random_.getrandbits(8)
        try:
            load(e, bytes(image))
        except (ArrayError, ConfigError):
            continue


def test_a_cubin_without_our_kernels_is_refused(e: Any, standin: StandIn, tmp_path: Path) -> None:
    (tmp_path / "foreign.cu").write_text('extern "C" __global__ void append_kv2(int *x) { *x = 1; }\n')
    foreign = nvrtc.compile_cubin("foreign.cu", "sm_90", tmp_path)
    standin.clear_trace()
    with pytest.raises(ConfigError, match=f"holds no kernel of this library; {HOW}"):
        load(e, foreign)
    (tmp_path / "foreign.cubin").write_bytes(foreign)
    with pytest.raises(ConfigError, match=rf"foreign\.cubin holds no kernel of this library; {HOW}"):
        e.c.call("memra_device_load_file", str(tmp_path / "foreign.cubin").encode())
    assert standin.trace() == []
    with pytest.raises(ConfigError, match=rf"no \*\.cubin there holds a kernel of this library; {HOW}"):
        e.c.call("memra_device_load_folder", str(tmp_path).encode())
    (tmp_path / "ours.cubin").write_bytes(cubin("counters.cu"))
    e.c.call("memra_device_load_folder", str(tmp_path).encode())  # foreign ones beside ours do no harm


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute"])
def test_a_load_that_fails_leaves_nothing_and_can_be_repeated(e: Any, standin: StandIn, call: str) -> None:
    standin.fail(call, 2 if call != "cuLibraryLoadData" else 1, 200)
    with pytest.raises(DriverError, match=rf"^{call}\("):
        load(e, cubin("attend.cu"))
    loaded = {c.dst for c in standin.calls("cuLibraryLoadData") if not c.code}
    assert {c.src for c in standin.calls("cuLibraryUnload")} == loaded
    with pytest.raises(UnsupportedError, match="not loaded"):
        e.c.call("memra_launch_attend", *changed("attend_64"))
    load(e, cubin("attend.cu"))


@pytest.mark.parametrize("wrong", ["PPPPPPqiiqiiqqiiPiPq", "PPPPPPqiiqiiqqiiPiP", "PPPPPPiiiqiiqqiiPiPi", "P"])
def test_a_kernel_with_other_parameters_is_refused_by_name(
    e: Any, standin: StandIn, tmp_path: Path, wrong: str
) -> None:
    standin.use_kernels(echo_kernels.build(tmp_path, {"append_kv": wrong}))
    with pytest.raises(AbiError, match="append_kv was built with other parameters"):
        load(e, cubin("append_kv.cu"))
    assert len(standin.calls("cuLibraryLoadData")) == len(standin.calls("cuLibraryUnload")) == 1


def test_a_null_or_closed_device_is_refused(make_dev: MakeDev) -> None:
    e = make_dev("cuda")
    address, library = e.c.address, e.c.library
    e.close()
    with pytest.raises(StateError, match="the device is closed"):
        library.call("memra_launch_advance_batch", address, 0, 0, 1, 0, 0)
    with pytest.raises(DeviceMismatch, match="NULL"):
        library.call("memra_launch_advance_batch", None, 0, 0, 1, 0, 0)
