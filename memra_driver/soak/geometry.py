"""Models that random programs run on: shared by the soak and by tests that mix every call with every other."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from memra_driver.cache import Cache
from memra_driver.config import Gemma4Config, ModelConfig, SsmConfig, Step35Config
from memra_driver.formats import K_FORMATS, V_FORMATS, FormatPolicy
from memra_driver.plan import CacheOptions
from memra_driver.soak.plain import Oracle, Reads
from memra_driver.soak.player import WIDTH, Player

MAX_ROWS = 8  # of a step that attends
OPTIONS = CacheOptions(round_width=WIDTH, max_rows=MAX_ROWS)


@dataclass(frozen=True)
class Geometry:
    """A model, its formats, and which K/V each attending layer reads through which window (0: all)."""

    cfg: ModelConfig
    reads: Reads
    policy: FormatPolicy = field(default_factory=FormatPolicy)

    def oracle(self, e: Any, max_ctx: int, salt: int = 0) -> Oracle:
        """What decodes plainly on device e."""
        return Oracle(e, self.cfg, self.policy, max_ctx, self.reads, salt=salt)

    def player(self, e: Any, max_ctx: int, oracle: Oracle | None = None) -> Player:
        """A cache and its oracle, or that of others."""
        cache = Cache.new(e, self.cfg, max_ctx, policy=self.policy, options=OPTIONS)
        return Player(cache, self.oracle(e, max_ctx) if oracle is None else oracle, shares=oracle is not None)

    def __str__(self) -> str:
        cfg, ssm = self.cfg, self.cfg.ssm
        heads = f"{cfg.n_head}/{cfg.n_head_kv} heads of {cfg.head_dim_k}"
        state = "" if ssm is None else f", {ssm.time_step_rank} states of {ssm.state_size}, {ssm.conv_kernel} taps"
        return f"{cfg.arch}, {cfg.n_layer} layers, {heads}{state}, {self.policy.k}/{self.policy.v}"


SIZES: dict[str, dict[str, tuple[int, ...]]] = {  # what is drawn from, by the width of the model
    "small": {
        "kv": (1, 1, 2), "gqa": (1, 2), "dim": (64, 64, 96), "state": (32,), "groups": (1, 1, 2), "n_vocab": (5, 40),
    },
    "usual": {
        "kv": (1, 1, 2), "gqa": (1, 2, 3, 4, 8), "dim": (64, 64, 64, 96, 128), "state": (32, 32, 32, 64),
        "groups": (1, 1, 2), "n_vocab": (5, 16, 300),
    },
    "large": {"kv": (1, 2), "gqa": (4, 8), "dim": (128, 256), "state": (128,), "groups": (4, 8), "n_vocab": (10_000,)},
}  # fmt: skip


def drawn(random: Random, width: str = "usual") -> Geometry:
    """Any model: hybrid, attention only, Gemma's or Step's layers. width: one of SIZES; large are those of models."""
    sizes = SIZES[width]
    kind = random.choice(("hybrid", "hybrid", "hybrid", "attention", "gemma4", "step35"))
    heads_kv, gqa, dim = (random.choice(sizes[name]) for name in ("kv", "gqa", "dim"))
    ssm = _states(random, sizes)
    size: dict[str, Any] = {
        "n_head": heads_kv * gqa, "n_head_kv": heads_kv, "head_dim_k": dim, "head_dim_v": dim, "n_embd": 8,
        "n_vocab": random.choice(sizes["n_vocab"]),
    }  # fmt: skip
    if kind == "attention":
        cfg = ModelConfig(n_layer=random.randint(1, 3), **size)
    elif kind == "gemma4":
        cfg = _gemma4(random, heads_kv, dim, size)
    else:
        interval = random.choice((2, 2, 3, 4))
        n_layer = random.choice((interval, interval + 1, max(4, interval)))
        size |= {"full_attention_interval": interval, "ssm": ssm}
        part = Step35Config(
            head_count=tuple(heads_kv * random.choice(sizes["gqa"]) for _ in range(n_layer)),
            head_count_kv=(heads_kv,) * n_layer, swa_pattern=tuple(random.random() < 0.5 for _ in range(n_layer)),
            sliding_window=random.choice((1, 2, 5, 64)),
        )  # fmt: skip
        size |= {"arch": "step35", "step35": part} if kind == "step35" else {}
        cfg = ModelConfig(n_layer=n_layer, **size)
    policy = FormatPolicy(
        random.choice(K_FORMATS), random.choice(V_FORMATS), gkv=random.random() < 0.5, wkv=random.random() < 0.5
    )
    attending = [il for il in range(cfg.n_layer) if cfg.layer_kind(il).value == "full"]
    return Geometry(cfg, {il: (cfg.kv_source(il), cfg.window(il) or 0) for il in attending}, policy)


def _states(random: Random, sizes: dict[str, tuple[int, ...]]) -> SsmConfig:
    size, groups = (random.choice(sizes[name]) for name in ("state", "groups"))
    return SsmConfig(
        conv_kernel=random.choice((2, 3, 4, 4, 4, 8)), state_size=size, group_count=groups,
        time_step_rank=groups * random.choice((1, 2, 3)),
    )  # fmt: skip


def _gemma4(random: Random, heads_kv: int, dim: int, size: dict[str, Any]) -> ModelConfig:
    """Windowed and global layers of two widths, the last of which borrow."""
    n_layer = random.randint(3, 5)
    shared = random.randint(0, 2)
    pattern = [random.random() < 0.6 for _ in range(n_layer)]
    owned = n_layer - shared
    for il in range(owned, n_layer):
        if pattern[il] not in pattern[:owned]:
            pattern[il] = not pattern[il]
    part = Gemma4Config(
        head_count_kv=(heads_kv,) * n_layer, swa_pattern=tuple(pattern), sliding_window=random.choice((1, 3, 8)),
        key_length_global=dim, key_length_swa=random.choice((64, 96)), shared_kv_layers=shared,
    )  # fmt: skip
    return ModelConfig(arch="gemma4", n_layer=n_layer, gemma4=part, **size)
