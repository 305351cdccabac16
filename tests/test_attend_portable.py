"""Attention on tensor cores against the portable text of the same kernels, or where g++ is missing against the twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import standin as standin_module
from attend_runs import (
    GROUP_ROUND,
    HEAD_DIMS,
    TAMPERS,
    TOLERANCE,
    Heads,
    Tamper,
    assert_same_bits,
    attend,
    attend_args,
    climbing,
    growing,
    shrinking,
)
from portable import PortableDev

from memra_driver.check.args import PAIRS, Pair
from memra_driver.kvdev import HostDev


@pytest.fixture
def portable() -> Any:
    """The device that runs the portable text; it shares no process-wide state with a real driver."""
    return HostDev() if standin_module.missing() else PortableDev()


def assert_agree(cuda: Any, portable: Any, args: dict[str, Any], says: str) -> None:
    got, expected = attend(cuda, args).out, attend(portable, args).out
    apart = np.abs(got.astype(np.float64) - expected) / np.abs(expected).max()
    assert apart.max() <= TOLERANCE, f"{says}: {apart.max():.2e} of the largest magnitude"  # a NaN is no agreement


@pytest.mark.standin
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_portable_device_runs_the_kernels_of_the_stand_in(
    cuda: Any, rng: np.random.Generator, formats: Pair, rows: int
) -> None:
    args = attend_args(rng, rows, 70, heads=(6, 2), dims=(64, 96), formats=formats, window=68, tamper=growing)
    args["q"][0] = np.nan  # is reported
    got, expected = attend(PortableDev(), args), attend(cuda, args)
    assert_same_bits(got.out, expected.out)
    assert np.array_equal(got.health, expected.health)
    assert np.isnan(got.out).sum() == 96


@pytest.mark.gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("rows", [1, 3])  # the narrow entry, and the wide one where there is one
def test_tensor_cores_agree_with_the_portable_text(
    cuda: Any, portable: Any, rng: np.random.Generator, formats: Pair, dim: int, rows: int
) -> None:
    for tamper in TAMPERS:
        args = attend_args(rng, rows, 90, heads=(3, 1), dims=(dim, dim), formats=formats, tamper=tamper)
        assert_agree(cuda, portable, args, tamper.__name__)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("tamper", [growing, shrinking, climbing], ids=lambda tamper: tamper.__name__)
def test_tensor_cores_agree_with_the_portable_text_where_groups_take_another_tile(
    cuda: Any, portable: Any, rng: np.random.Generator, formats: Pair, tamper: Tamper
) -> None:
    args = attend_args(rng, 3, GROUP_ROUND + 700, heads=(3, 1), formats=formats, tamper=tamper)
    assert_agree(cuda, portable, args, tamper.__name__)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [((16, 2), 256), ((24, 4), 256), ((32, 8), 128)])
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("rows", [1, 4])
def test_entries_made_for_one_geometry_agree_with_the_portable_text(
    cuda: Any, portable: Any, rng: np.random.Generator, formats: Pair, heads: Heads, dim: int, rows: int
) -> None:
    args = attend_args(rng, rows, 130, heads=heads, dims=(dim, dim), formats=formats, tamper=growing)
    assert_agree(cuda, portable, args, f"{rows} rows")
