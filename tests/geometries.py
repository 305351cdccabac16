"""Small models that differ in what a layer is: shared by the tests that mix every call with every other."""

from __future__ import annotations

from decoding import hybrid

from memra_driver.config import Gemma4Config, ModelConfig, Step35Config
from memra_driver.formats import FormatPolicy
from memra_driver.soak.geometry import Geometry


def gemma4() -> ModelConfig:
    """Layers [windowed, global, windowed], then a windowed one that reads layer 2 and a global one that reads 1."""
    part = Gemma4Config(
        head_count_kv=(2, 1, 2, 2, 1), swa_pattern=(True, False, True, True, False), sliding_window=3,
        key_length_global=96, key_length_swa=64, shared_kv_layers=2,
    )  # fmt: skip
    return ModelConfig(
        arch="gemma4", n_layer=5, n_head=2, n_head_kv=1, head_dim_k=96, head_dim_v=96, n_embd=8, n_vocab=16, gemma4=part
    )


def step35() -> ModelConfig:
    """Layers [linear, windowed, linear, global]; four query heads in the windowed one, two in the other."""
    part = Step35Config(
        head_count=(2, 4, 2, 2), head_count_kv=(1,) * 4, swa_pattern=(True, True, True, False), sliding_window=2
    )
    return hybrid(arch="step35", step35=part)


GEOMETRIES = {
    "hybrid": Geometry(hybrid(), {1: (1, 0), 3: (3, 0)}),
    "gemma4": Geometry(
        gemma4(), {0: (0, 3), 1: (1, 0), 2: (2, 3), 3: (2, 3), 4: (1, 0)}, FormatPolicy(k="q8_0", v="q4_0", wkv=False)
    ),
    "step35": Geometry(step35(), {1: (1, 2), 3: (3, 0)}, FormatPolicy(k="fp8", v="q5_1")),
}
