"""Offsets beyond 32 bits, and row counts beyond a grid axis."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import standin
from caches import POLICY, attention_only, put, rows_of

from memra_driver import driver, ops
from memra_driver.cache import Cache
from memra_driver.formats import FORMATS
from memra_driver.kernels import KERNELS
from memra_driver.plan import ATTEND_FOLDS, ATTEND_GROUPS

MakeDev = Callable[..., Any]


class At:
    """Memory as a kernel sees it: an address, and a size that need not exist."""

    def __init__(self, ptr: int, n_bytes: int) -> None:
        self.ptr, self.len, self.nbytes, self.dtype = ptr, n_bytes, n_bytes, np.dtype(np.uint8)


@pytest.fixture
def anywhere(dev: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels take addresses of no allocation: the stand-in's check of them is passed by, a GPU has none."""
    if dev.ordinal < 0 or request.config.getoption("--gpu"):
        return
    kernels = ctypes.CDLL(str(standin.build_kernels()))

    def launch(_: int, config: Any, params: int, name: str = "") -> None:
        standin.finish()
        grid, block = (
            (ctypes.c_uint * 3)(*(getattr(config, f"{what}Dim{axis}") for axis in "XYZ")) for what in ("grid", "block")
        )
        shape = (grid, block, config.sharedMemBytes)
        assert getattr(kernels, f"memra_cpu_launch_{name}")(*shape, ctypes.c_void_p(params)) == 0

    monkeypatch.setattr(driver, "launch_kernel", launch)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("formats", [("q8_0", "q5_1"), ("fp8", "fp8"), ("q8_0", "q4_0")], ids="-".join)
@pytest.mark.parametrize("token", [246_722, 246_723, 246_724, 262_143, 262_144, 493_447, 493_448, 2**31 - 2])
def test_a_row_lies_at_its_token_times_the_token_bytes_on_both_sides_of_2_31(
    dev: Any, formats: tuple[str, str], token: int
) -> None:
    """kv_dim 8192: the planes would be gigabytes, so their base lies that far below the few rows that exist."""
    k_format, v_format = (FORMATS[name] for name in formats)
    dim, max_ctx = 8192, 2**31 - 1
    rows = min(2, max_ctx - token)
    k_tok, v_tok = (8192 // 32 * form.block_bytes for form in (k_format, v_format))
    real = [dev.alloc_u8((rows + 2) * tok) for tok in (k_tok, v_tok)]  # a row of guard on either side
    planes = [
        At(each.ptr + tok - token * tok, (token + rows) * tok) for each, tok in zip(real, (k_tok, v_tok), strict=True)
    ]
    len_d, health = dev.htod_i32([0]), dev.alloc_u8(88)
    k_rows, v_rows = rows_of(4, 0, "k", 0, rows, dim), rows_of(4, 0, "v", 0, rows, dim)
    geometry = (dim, dim, k_tok, v_tok, k_format.code, v_format.code)
    dev.launch(
        "append_kv", put(dev, k_rows), put(dev, v_rows), *planes, len_d, None, token, rows, -1, max_ctx, *geometry,
        None, 1, health, 0,
    )  # fmt: skip
    for each, tok, form, x in zip(real, (k_tok, v_tok), (k_format, v_format), (k_rows, v_rows), strict=True):
        stored = each.to_numpy()
        assert stored[tok : (rows + 1) * tok].tobytes() == form.encode(x).tobytes()
        assert not stored[:tok].any()
        assert not stored[(rows + 1) * tok :].any()
    assert len_d.to_numpy()[0] == token + rows
    outs = [dev.uninit(rows * dim) for _ in range(2)]
    dev.launch("dequant_kv", *planes, token, rows, max_ctx, *geometry, *outs, 0, health, 0)
    for out, form, x in zip(outs, (k_format, v_format), (k_rows, v_rows), strict=True):
        assert out.to_numpy().tobytes() == form.decode(form.encode(x)).tobytes()
    assert not health.to_numpy().any()


def test_more_rows_than_a_grid_axis_of_65535_go_in_one_call(make_dev: MakeDev) -> None:
    """On the host and, by the launch shape, for CUDA: no row count rides an axis that ends at 65,535."""
    e, rows = make_dev("host"), 70_000
    cfg = attention_only(1, n_head_kv=1, head_dim_k=32, head_dim_v=32)
    with Cache.new(e, cfg, rows, policy=POLICY) as cache:
        x = np.zeros((rows, 32), np.float32)
        x[:, 0] = np.arange(rows) % 100
        ops.append_kv(e, cache, 0, x, x)
        cache.advance(e, rows)
        out = np.empty((3, 32), np.float32), np.empty((3, 32), np.float32)
        ops.dequant_kv(e, cache, 0, rows - 3, rows, *out)
        assert out[0][:, 0].round().tolist() == [97, 98, 99]
    for name, kernel in KERNELS.items():
        arguments = dict.fromkeys((parameter for _, parameter in kernel.params), 0) | {
            "rows": rows, "kv_dim_k": 32, "kv_dim_v": 32, "conv_dim": 128, "num_k": 1, "num_v": 2, "state_size": 32,
            "n": 1, "n_seqs": 1, "columns": 64, "n_head": 4, "n_head_kv": 2, "head_dim_k": 64, "head_dim_v": 64,
            "pieces": ATTEND_FOLDS if name.endswith("_folds") else ATTEND_GROUPS,
        }  # fmt: skip
        grid, block, _ = kernel.shape(arguments)
        assert grid[1:] == kernel.shape(arguments | {"rows": 1})[0][1:], name
        assert block[0] * block[1] * block[2] <= 1024
