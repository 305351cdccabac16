"""A run of the bench that the stand-in driver gets through in seconds."""

from __future__ import annotations

from dataclasses import replace

from memra_driver.bench.rows import QUICK, Attention
from memra_driver.config import ModelConfig, SsmConfig

MODEL = ModelConfig(
    arch="qwen35", n_layer=3, n_head=2, n_head_kv=1, head_dim_k=64, head_dim_v=64, full_attention_interval=2,
    nextn_predict_layers=1, ssm=SsmConfig(conv_kernel=4, state_size=32, time_step_rank=2, group_count=1),
)  # fmt: skip
SHAPE = Attention(2, 1, 64, verify=2, others=(("fp8", "fp8"),))
TINY = replace(
    QUICK, name="tiny", pool_bytes=1 << 16, replays=1, contexts=(70,), other_contexts=(70,), attention=(SHAPE,),
    append_rows=8, append_layers=2, append_dims=((1, 64), (1, 96)), few_rows=(1,), few_layers=2, batches=(1, 2),
    value_heads=(2,), key_heads=1, state_size=32, most_layers=2, model=MODEL, new_tokens=16, step_tokens=40,
    step_batches=(1, 2), starts=1, host_tokens=40,
)  # fmt: skip
L2_CACHE_SIZE, L2_BYTES = 38, 1 << 12  # of CUdevice_attribute; of this test's GPU
