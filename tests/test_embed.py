"""Engines in C over the cache: a program without Python, and a running cache that goes to C and comes back."""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin
from embed.model import CONFIG, MAX_CTX, POLICY, Model, plain_digests, put

import memra_driver
from memra_driver import native, nvrtc, ops
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig
from memra_driver.plan import CacheOptions

EMBED = Path(__file__).resolve().parent / "embed"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built for these tests."""
    return native.build(tmp_path_factory.mktemp("library"))


def compiled(source: Path, made: Path, library: Path) -> Path:
    """A program over the library, as the README builds it."""
    command = [
        "gcc", "-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{memra_driver.get_include()}",
        str(source), "-o", str(made), f"-L{library.parent}", "-lmemra_driver", f"-Wl,-rpath,{library.parent}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return made


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    return compiled(EMBED / "engine.c", tmp_path_factory.mktemp("engine") / "engine", library)


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("cubins")}


def cubins_for(cubins: dict[str, Path], arch: str) -> Path:
    if arch not in cubins:
        folder = cubins[""] / arch
        folder.mkdir()
        for (source, _), image in nvrtc.compile_all([arch]).items():
            (folder / source).with_suffix(".cubin").write_bytes(image)
        cubins[arch] = folder
    return cubins[arch]


def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of a program that finds the stand-in driver; with --gpu the real one."""
    if request.config.getoption("--gpu"):
        return {**os.environ}
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(standin.build_driver(sanitized=False).parent),
        "FAKE_CUDA_KERNELS": str(standin.build_kernels(sanitized=False)),
    }


LENGTHS = {"prompt": 3, "rollback": 13, "rounds": 23, "graph": 26}


@needs_gcc
def test_an_engine_in_c_ends_where_plain_decoding_does(
    cuda: Any, request: pytest.FixtureRequest, program: Path, cubins: dict[str, Path]
) -> None:
    folder = cubins_for(cubins, cuda.context.arch)
    done = subprocess.run([program, folder], env=environment(request), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = plain_digests(cuda, list(LENGTHS.values()))
    lines = [f"{part} {n} {digest}" for (part, n), digest in zip(LENGTHS.items(), expected, strict=True)]
    assert done.stdout.splitlines() == lines


@needs_gcc
def test_the_c_program_of_the_readme_runs(
    cuda: Any, request: pytest.FixtureRequest, tmp_path: Path, library: Path, cubins: dict[str, Path]
) -> None:
    (text,) = re.findall(r"```c\n(.*?)```", (EMBED.parent.parent / "README.md").read_text(), re.DOTALL)
    (tmp_path / "decode.c").write_text(text)
    run = [compiled(tmp_path / "decode.c", tmp_path / "decode", library), cubins_for(cubins, cuda.context.arch)]
    done = subprocess.run(run, env=environment(request), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cfg = ModelConfig(n_layer=1, n_head=4, n_head_kv=2, head_dim_k=64, head_dim_v=64)
    with Cache.new(cuda, cfg, 128) as cache:
        for _ in range(3):
            ops.append_kv(cuda, cache, 0, cuda.zeros(128), cuda.zeros(128))
            cache.advance(cuda)
        assert done.stdout.split() == ["3", "3", cache.digest()]


@needs_gcc
@pytest.mark.standin
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_an_engine_in_c_is_clean_under_valgrind(
    request: pytest.FixtureRequest, program: Path, cubins: dict[str, Path]
) -> None:
    command = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite,possible"]
    folder = cubins_for(cubins, "sm_90")
    done = subprocess.run([*command, program, folder], env=environment(request), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@needs_gcc
@pytest.mark.standin
def test_an_engine_says_what_it_lacks(
    request: pytest.FixtureRequest, tmp_path: Path, program: Path, cubins: dict[str, Path]
) -> None:
    def said(folder: Path, **changes: str) -> str:
        env = environment(request) | changes
        done = subprocess.run([program, folder], env=env, capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr

    if ctypes.util.find_library("cuda") is None:  # else the machine's own driver is found
        assert "libcuda.so.1" in said(cubins_for(cubins, "sm_90"), LD_LIBRARY_PATH="")
    assert str(tmp_path / "absent") in said(tmp_path / "absent")
    (tmp_path / "bad.cubin").write_bytes(b"no ELF at all")
    assert "no cubin" in said(tmp_path)


def test_a_running_cache_goes_to_c_for_ten_steps_and_comes_back(cuda: Any) -> None:
    from memra_driver import capi

    model = Model(cuda)
    with Cache.new(cuda, CONFIG, MAX_CTX, policy=POLICY, options=CacheOptions(round_width=4)) as cache:
        capi.bind(cache)
        for _ in range(5):
            model.decode(cache)
            cache.advance(cuda)
        snap = cache.snapshot(cuda)
        for _ in range(10):
            model.decode(cache, capi.ops)
            capi.calls.advance(cache, 1)
        assert (cache.pos, [layer.len for layer in filter(None, cache.kv)]) == (15, [15, 15])
        for n in range(2):  # each side's operations in one step
            for il in range(CONFIG.n_layer):
                model.decode(cache, capi.ops if (il + n) % 2 else ops, [il])
            cache.advance(cuda)
        expected = plain_digests(cuda, [5, 6, 17])
        assert cache.digest() == capi.calls.digest(cache) == expected[2]
        capi.calls.rollback(cache, snap, 1)
        model.decode(cache)
        cache.advance(cuda)
        assert cache.digest() == expected[1]
        row = put(cuda, np.arange(16, dtype=np.float32))
        capi.calls.park_logits(cache, row)
        assert cache.last_logits_dev is not None
        np.testing.assert_array_equal(cache.take_logits(cuda).to_numpy(), np.arange(16))
        cache.rollback(cuda, snap, 0)
        assert cache.take_logits(cuda) is None
        assert cache.digest() == expected[0]
