"""What keeps a GPU from being used is named, with what to do: by `info`, by a command, by an exception and in C.

The stand-in driver plays the machines; what is absent from Python is blocked in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from standin import StandIn
from test_no_driver import NO_BINDINGS, NO_LIBRARIES, WHAT_IS_RAISED, child

pytest.importorskip("typer")
pytest.importorskip("rich")

from memra_driver import capi, cli, inventory, nvrtc
from memra_driver.cli.devices import opened
from memra_driver.errors import CompileError, DriverError, MemraError, NoDriver, UnsupportedError
from memra_driver.kernels import AttendGeometry, attend_kernel
from memra_driver.kvdev import CudaDev
from memra_driver.plan import ATTEND_GROUPS

COMPUTE_MODE, MAJOR, MINOR = 20, 75, 76
SHOWN = {  # keys of `info` that do not depend on a driver or a GPU
    "version", "numpy", "bindings", "nvrtc", "kernel_sources", "kernel_cache", "prebuilt_kernels", "library",
    "gpu_results", "missing",
}  # fmt: skip


def always(standin: StandIn, name: str, code: int) -> None:
    for nth in range(1, 9):
        standin.fail(name, nth, code)


def of_arch(standin: StandIn, major: int, minor: int) -> None:
    for ordinal in range(2):
        standin.set_attribute(ordinal, MAJOR, major)
        standin.set_attribute(ordinal, MINOR, minor)


def full(standin: StandIn) -> None:
    for ordinal in range(2):
        standin.run_out_after(ordinal, 0)


def in_mode(standin: StandIn, mode: int) -> None:
    for ordinal in range(2):
        standin.set_attribute(ordinal, COMPUTE_MODE, mode)
    always(standin, "cuDevicePrimaryCtxRetain", 46)


@dataclass(frozen=True)
class Machine:
    """How the stand-in plays it; what the message says, beside the call and the code; what `info` still knows."""

    play: Callable[[StandIn], None]
    says: tuple[str, ...]
    gpus: int = 2
    of_info: str = ""  # in the line of a GPU
    missing: bool = True  # `info` says so too
    in_c: bool = True


RELOAD = ("kernel module", "restart the machine")
MACHINES = {
    "no GPU": Machine(lambda s: s.set_device_count(0), ("NO_DEVICE (100)", "nvidia-smi -L", "CUDA_VISIBLE_DEVICES"), 0),
    "driver too old": Machine(
        lambda s: s.set_driver_version(12040), ("supports CUDA 12.4", "update the driver", "cuda-python==12.*"), 0,
        in_c=False,  # which needs no bindings
    ),
    "stub": Machine(lambda s: always(s, "cuInit", 34), ("STUB_LIBRARY (34)", "before the toolkit's stub"), 0),
    "fabric": Machine(lambda s: always(s, "cuInit", 802), ("SYSTEM_NOT_READY (802)", "nvidia-fabricmanager"), 0),
    "updated": Machine(lambda s: always(s, "cuInit", 803), ("DRIVER_MISMATCH (803)", *RELOAD), 0),
    "compat": Machine(lambda s: always(s, "cuInit", 804), ("(804)", "remove the CUDA compatibility package"), 0),
    "unknown": Machine(lambda s: always(s, "cuInit", 999), ("CUDA_ERROR_UNKNOWN (999)", *RELOAD), 0),
    "exclusive": Machine(
        lambda s: in_mode(s, 3), ("DEVICE_UNAVAILABLE (46)", "another process holds", "nvidia-smi -q -d COMPUTE"),
        of_info="compute mode: exclusive",
    ),
    "prohibited": Machine(
        lambda s: in_mode(s, 2), ("DEVICE_UNAVAILABLE (46)", "prohibited"), of_info="compute mode: prohibited"
    ),
    "no room for a context": Machine(
        lambda s: always(s, "cuDevicePrimaryCtxRetain", 2), (
            "cuDevicePrimaryCtxRetain(", "OUT_OF_MEMORY (2)", "no room for a context", "nvidia-smi says who holds",
        ),
        of_info="GiB",
    ),
    "too old a GPU": Machine(
        lambda s: of_arch(s, 7, 5), ("cuda:0", "sm_75", "sm_80 or newer"), of_info="sm_75"
    ),
}  # fmt: skip


def info() -> dict[str, Any]:
    found = inventory.inventory()
    assert set(found) >= SHOWN | {"driver", "gpus"}
    assert all(found[key] is not None for key in SHOWN - {"library"})
    return found


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return status, told.out, told.err


def check_text(machine: Machine, text: str) -> None:
    for part in machine.says:
        assert part in text, text


@pytest.mark.parametrize("name", MACHINES)
def test_info_names_it_and_shows_all_else(
    standin: StandIn, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    machine = MACHINES[name]
    machine.play(standin)
    found = info()
    assert len(found["gpus"]) == machine.gpus
    assert all(machine.of_info in line for line in found["gpus"])
    assert found["driver"] or name == "stub"
    assert [line for line in found["missing"] if all(part in line for part in machine.says)], found["missing"]
    machine.play(standin)
    status, text, _ = command(capsys, "info")
    assert status == 0
    check_text(machine, text)


@pytest.mark.parametrize("name", MACHINES)
def test_the_exception_names_it(standin: StandIn, name: str) -> None:
    machine = MACHINES[name]
    machine.play(standin)
    with pytest.raises(MemraError) as caught:
        CudaDev(0)
    check_text(machine, str(caught.value))
    if name == "too old a GPU":
        assert isinstance(caught.value, UnsupportedError)
    else:
        assert isinstance(caught.value, DriverError)


@pytest.mark.parametrize("name", [name for name, machine in MACHINES.items() if machine.in_c])
def test_the_last_error_of_the_library_names_it(standin: StandIn, c_library: Any, name: str) -> None:
    machine = MACHINES[name]
    machine.play(standin)
    with pytest.raises(MemraError) as caught:
        capi.device.LibraryDevice(c_library, 0, stream=None)
    check_text(machine, str(caught.value))


@pytest.mark.parametrize("name", MACHINES)
def test_a_command_that_wants_a_gpu_says_it_in_one_line_and_one_that_does_not_goes_to_the_host(
    standin: StandIn, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    machine = MACHINES[name]
    machine.play(standin)
    status, _, told = command(capsys, "check", "--small", "--device", "cuda:0")
    assert (status, len(told.splitlines())) == (2, 1)
    check_text(machine, told)
    standin.clear_failures()
    machine.play(standin)
    status, _, told = command(capsys, "plan", "qwen3.5-9b", "--ctx", "8")
    assert (status, told) == (0, "")
    with opened("auto") as e:
        assert e.ordinal == -1
    told = capsys.readouterr().err
    assert "on the host" in told
    check_text(machine, told)


def test_auto_takes_the_first_gpu_that_can_be_used(standin: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    standin.set_attribute(0, MAJOR, 7)
    with opened("auto") as e:
        assert e.ordinal == 1
    assert "without cuda:0: cuda:0 (Stand-in GPU 0) is sm_70" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_named(standin: StandIn, c_library: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(lambda s: None, ("cuDeviceGet", "INVALID_DEVICE (101)", "nvidia-smi -L", "numbers them from 0"))
    status, _, told = command(capsys, "check", "--device", "cuda:5")
    assert status == 2
    check_text(machine, told)
    with pytest.raises(DriverError) as caught:
        capi.device.LibraryDevice(c_library, 5, stream=None)
    check_text(machine, str(caught.value))


# Kernels that do not load, a compiler that does not fit


@pytest.mark.parametrize(("code", "name"), [(200, "INVALID_IMAGE"), (209, "NO_BINARY_FOR_GPU"), (222, "PTX_VERSION")])
@pytest.mark.parametrize("kind", ["CudaDev", "library"])
def test_a_cubin_that_the_driver_does_not_take_is_named(
    standin: StandIn, c_library: Any, kind: str, code: int, name: str
) -> None:
    standin.fail("cuLibraryLoadData", 1, code)
    with CudaDev(0) if kind == "CudaDev" else capi.CDev(0) as e, pytest.raises(DriverError) as caught:
        e.kernels.load_all()
    told = str(caught.value)
    assert told.startswith("cuLibraryLoadData(")
    assert f"{name} ({code})" in told
    assert "NVRTC newer than the driver: update the driver" in told


def test_a_gpu_that_nvrtc_does_not_know_is_named(standin: StandIn) -> None:
    of_arch(standin, 99, 0)
    says = f"NVRTC {nvrtc.version()[0]}.{nvrtc.version()[1]} compiles for sm_"
    found = info()
    assert [line for line in found["missing"] if f"cuda:1: {says}" in line and "not for sm_990" in line]
    assert "sm_990" in found["gpus"][0]
    with CudaDev(0) as e, pytest.raises(CompileError) as caught:
        e.kernels.load_all()
    assert says in str(caught.value)
    assert "pip install --upgrade" in str(caught.value)


def test_an_nvrtc_newer_than_the_driver_is_named(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 1))
    (line,) = [line for line in info()["missing"] if "NVRTC 99.1" in line]
    assert "a driver of CUDA 13.2 does not load" in line
    assert "'cuda-toolkit[nvrtc]==13.*'" in line


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_info_names_the_path_of_attention_that_is_launched(standin: StandIn, capability: tuple[int, int]) -> None:
    of_arch(standin, *capability)
    entry = attend_kernel("sm_{}{}".format(*capability), AttendGeometry(2, 256, 256, 544, 384, 0, 1), 8, ATTEND_GROUPS)
    path = {True: "attention: bulk copies where the geometry allows, else portable", False: "attention: portable"}
    told = inventory.inventory()["gpus"][0]
    assert f", {path[entry.startswith('attend_pipe')]}, " in told


def test_without_nvrtc_info_shows_the_gpus_and_what_to_install(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*args: Any) -> Any:
        raise NoDriver("nvrtcVersion", -1, "no libnvrtc", f"NVRTC was not found: pip install {nvrtc.NEED_NVRTC}")

    monkeypatch.setattr(nvrtc, "_nvrtc", none)
    found = inventory.inventory()
    assert (found["nvrtc"], len(found["gpus"])) == (None, 2)
    (line,) = [line for line in found["missing"] if "nvrtc" in line]
    assert "pip install 'cuda-toolkit[nvrtc]" in line
    monkeypatch.setenv("MEMRA_CACHE_DIR", "/nowhere/at/all")
    status, _, told = command(capsys, "check", "--small", "--device", "cuda:0")
    assert status == 2
    assert "pip install 'cuda-toolkit[nvrtc]" in told


# The cache folder


def test_a_cache_folder_that_cannot_be_written_is_named_once(
    standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path / "file"))
    nvrtc._tell_once.cache_clear()
    found = info()
    assert found["kernel_cache"].endswith("file, cannot be written")
    assert [line for line in found["missing"] if str(tmp_path / "file") in line and "set MEMRA_CACHE_DIR" in line]
    for _ in range(2):
        nvrtc.compile_cubin("counters.cu", "sm_90")
    assert [record.levelname for record in caplog.records if "MEMRA_CACHE_DIR" in record.message] == ["WARNING"]


# Python packages. A child process looks for the real driver, and there is none or there is.

INFO = "from memra_driver.inventory import inventory\nimport json\nprint(json.dumps(inventory()))\n"
WITHOUT_NUMPY = """
    import sys
    from importlib import metadata

    class Block:
        def find_spec(self, name, path=None, target=None):
            if name == "numpy" or name.startswith("numpy."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Block())
    has = metadata.version

    def version(name):
        if name == "numpy":
            raise metadata.PackageNotFoundError(name)
        return has(name)

    metadata.version = version
"""
ANOTHER_MAJOR = """
    import cuda.bindings.utils

    del cuda.bindings.utils.get_cuda_native_handle  # as bindings of CUDA 11 have none
"""


@pytest.mark.parametrize(
    ("absence", "says"),
    [
        (NO_BINDINGS, "pip install 'cuda-python>=13,<14'"),
        (ANOTHER_MAJOR, "pip install 'cuda-python>=13,<14'"),
        (NO_LIBRARIES, "NVRTC was not found: pip install 'cuda-toolkit[nvrtc]"),
        (WITHOUT_NUMPY, "pip install 'numpy>=1.26'"),
    ],
    ids=["no bindings", "other bindings", "no libraries", "no numpy"],
)
def test_info_works_without(absence: str, says: str) -> None:
    found = json.loads(child(absence, INFO))
    assert [line for line in found["missing"] if says in line], found["missing"]
    assert len(found["missing"]) == len(set(found["missing"]))
    assert found["kernel_sources"]
    assert found["kernel_cache"]


def test_another_major_of_the_bindings_is_an_exception_that_names_ours() -> None:
    out = child(
        ANOTHER_MAJOR,
        "from memra_driver.device import CudaContext\nfrom memra_driver.errors import MemraError\n",
        WHAT_IS_RAISED,
        "told(CudaContext)\n",
    )
    assert out.startswith("NoDriver: import cuda.bindings")
    assert "pip install 'cuda-python>=13" in out


def test_a_command_without_numpy_says_what_to_install() -> None:
    out = child(
        WITHOUT_NUMPY,
        "import contextlib\nfrom memra_driver import cli\nimport sys\nsys.stderr = sys.stdout\n"
        "print(cli.main(['run', '--device', 'host']))\n",
    )
    assert out == "memra-driver: No module named 'numpy': pip install numpy\n2\n"


def test_a_numpy_that_is_too_old_is_named(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory.metadata, "version", lambda name: "1.25.2")
    found = info()
    assert found["numpy"] == "1.25.2"
    assert "numpy 1.25.2 is too old: pip install 'numpy>=1.26'" in found["missing"]


def test_info_survives_what_nobody_foresaw(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("odd")

    for module, name in ((inventory.driver, "device_get_name"), (nvrtc, "sources_hash"), (inventory, "_evidence")):
        monkeypatch.setattr(module, name, broken)
    status, text, _ = command(capsys, "info", "--json")
    found = json.loads(text)
    assert (status, found["gpus"], found["driver"]) == (0, ["cuda:0", "cuda:1"], "13.2")
    assert "ZeroDivisionError: odd" in found["missing"]
