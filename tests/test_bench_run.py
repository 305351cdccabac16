"""A run of the bench on the stand-in driver: every group measures what it names, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import MakeDev
from standin import StandIn

from memra_driver import bench
from memra_driver.bench_rows import GROUPS, QUICK, Attention
from memra_driver.config import ModelConfig, SsmConfig

MODEL = ModelConfig(
    arch="qwen35", n_layer=3, n_head=2, n_head_kv=1, head_dim_k=64, head_dim_v=64, full_attention_interval=2,
    nextn_predict_layers=1, ssm=SsmConfig(conv_kernel=4, state_size=32, time_step_rank=2, group_count=1),
)  # fmt: skip
TINY = replace(
    QUICK, name="tiny", pool_bytes=1 << 16, replays=1, contexts=(70,), other_contexts=(70,),
    attention=(Attention(2, 1, 64, verify=2, others=(("fp8", "fp8"),)),), append_rows=8, append_layers=2,
    append_dims=((1, 64), (1, 96)), few_rows=(1,), few_layers=2, batches=(1, 2), value_heads=(2,), key_heads=1,
    state_size=32, most_layers=2, model=MODEL, new_tokens=16, step_tokens=40, step_batches=(1, 2), starts=1,
    host_tokens=40,
)  # fmt: skip
L2_CACHE_SIZE = 38  # of CUdevice_attribute


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return {}


@pytest.fixture
def result(results: dict[str, Any], standin: StandIn, make_dev: MakeDev) -> dict[str, Any]:
    """One run of everything, kept for all tests of this file."""
    if not results:
        standin.set_attribute(0, L2_CACHE_SIZE, 1 << 12)
        results.update(bench.run(make_dev("cuda"), sizes=TINY))
    return results


def test_every_group_has_rows(result: dict[str, Any]) -> None:
    assert {row["group"] for row in result["rows"]} == set(GROUPS)


