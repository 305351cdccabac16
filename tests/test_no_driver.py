"""Machines where something of NVIDIA's is missing, played by child processes that cannot find it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

NO_BINDINGS = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name == "cuda" or name.startswith("cuda."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        del sys.modules[name]  # namespace packages may be there from the start
    sys.meta_path.insert(0, Blocker())
"""
NO_LIBRARIES = """
    from cuda import pathfinder

    def find_nothing(name):
        raise pathfinder.DynamicLibNotFoundError(f"no {name} here")

    pathfinder.load_nvidia_dynamic_lib = find_nothing
"""
WHAT_IS_RAISED = """
    def told(call):
        try:
            call()
        except MemraError as error:
            print(f"{type(error).__name__}: {error}")
        else:
            print("no error")
"""


def child(*parts: str, **environment: str) -> str:
    """What a fresh interpreter prints that runs these texts; fails the test when it fails."""
    code = "".join(textwrap.dedent(part) for part in parts)
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("absence", [NO_BINDINGS, NO_LIBRARIES], ids=["bindings", "libraries"])
def test_the_package_and_the_modules_that_speak_cuda_import_without_it(absence: str) -> None:
    out = child(
        absence,
        "import memra_driver, memra_driver.driver, memra_driver.device, memra_driver.nvrtc\nprint('imported')\n",
    )
    assert out == "imported\n"


def test_the_import_loads_neither_numpy_nor_bindings() -> None:
    out = child(
        "import sys, memra_driver\n"
        "print([name for name in ('numpy', 'ctypes', 'cuda.bindings.driver', 'cuda.bindings.nvrtc')"
        " if name in sys.modules])\n"
    )
    assert out == "[]\n"


def test_without_bindings_a_gpu_names_the_extra_to_install() -> None:
    out = child(
        NO_BINDINGS,
        "from memra_driver.device import CudaContext\nfrom memra_driver.errors import MemraError\n",
        WHAT_IS_RAISED,
        "told(CudaContext)\n",
    )
    assert out.startswith("NoDriver: import cuda.bindings")
    assert "pip install 'cuda-python>=13" in out


def test_without_bindings_the_compiler_names_the_extra_to_install(tmp_path: Path) -> None:
    out = child(
        NO_BINDINGS,
        "from memra_driver import nvrtc\nfrom memra_driver.errors import MemraError\n",
        WHAT_IS_RAISED,
        "told(nvrtc.version)\ntold(lambda: nvrtc.compile_cubin('append_kv.cu', 'sm_90'))\n",
        MEMRA_CACHE_DIR=str(tmp_path),
    )
    for line in out.splitlines():
        assert line.startswith("NoDriver: ")
        assert "pip install 'cuda-python>=13" in line


def test_without_libcuda_a_gpu_asks_for_the_driver() -> None:
    out = child(
        NO_LIBRARIES,
        "from memra_driver.device import CudaContext\nfrom memra_driver.errors import MemraError\n",
        WHAT_IS_RAISED,
        "told(CudaContext)\n",
    )
    if out == "no error\n":
        pytest.skip("these bindings look for the driver by themselves, and there is one")
    assert out.startswith("NoDriver: cuInit(0): ")
    assert "install an NVIDIA display driver" in out


def test_without_libnvrtc_the_compiler_names_the_package_to_install() -> None:
    out = child(
        NO_LIBRARIES,
        "from memra_driver import nvrtc\nfrom memra_driver.errors import MemraError\n",
        WHAT_IS_RAISED,
        "told(nvrtc.version)\ntold(nvrtc.library_path)\n",
    )
    for line in out.splitlines():
        assert line.startswith("NoDriver: nvrtcVersion: ")
        assert "cuda-toolkit[nvrtc]" in line


def test_the_host_device_needs_nothing_of_nvidia() -> None:
    out = child(
        NO_BINDINGS,
        """
        import numpy as np
        from memra_driver.memory import CudaSlice, HostMemory

        with CudaSlice(HostMemory(), 3) as piece:
            piece.copy_from(np.array([1, 2, 3], np.float32))
            print(piece.to_numpy(), piece.device)
        """,
    )
    assert out == "[1. 2. 3.] -1\n"


def test_the_import_costs_at_most_fifteen_milliseconds_over_numpy() -> None:
    text = "import time, numpy\nt = time.perf_counter()\nimport memra_driver\nprint(1e3 * (time.perf_counter() - t))\n"
    child(text)  # writes the byte code
    assert min(float(child(text)) for _ in range(5)) <= 15  # other processes can only make it slower


def test_without_its_extra_the_command_line_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise ImportError('blocked', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from memra_driver.__main__ import main\n"
        "sys.exit(main())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2
    assert run.stderr == "memra-driver: the command line needs typer: pip install typer rich\n"


@pytest.mark.parametrize("script", ["evidence.py", "two.py"])
def test_what_a_gpu_is_asked_for_says_in_one_line_that_there_is_none(script: str) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith(f"{script}: ")
