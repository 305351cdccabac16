"""A small model that whole steps are run on, and rounds over it: shared by the tests of steps, graphs and rounds."""

from __future__ import annotations

from typing import Any

from caches import POLICY

from memra_driver.cache import Cache
from memra_driver.config import ModelConfig, SsmConfig
from memra_driver.formats import FormatPolicy
from memra_driver.plan import CacheOptions
from memra_driver.round import Round
from memra_driver.soak.geometry import OPTIONS
from memra_driver.soak.lane import HIDDEN, INPUTS, MADE, RESULTS, SCALE, Lane, columns, kind_of
from memra_driver.soak.plain import Moment, Reads
from memra_driver.soak.plain import Oracle as _Oracle
from memra_driver.soak.player import TRUE, WIDTH, WRONG, Player, draft

__all__ = [
    "HIDDEN", "INPUTS", "MADE", "MAX_CTX", "OPTIONS", "RESULTS", "SCALE", "TRUE", "WIDTH", "WRONG", "Lane", "Oracle",
    "Player", "begin", "columns", "draft", "hybrid", "kind_of", "play", "player_on",
]  # fmt: skip
MAX_CTX = 64


def hybrid(**changes: Any) -> ModelConfig:
    """Layers [linear, full] x 2; 1 K/V head of 64 for 2 query heads; 128 channels; 2 states of 32 x 32."""
    values: dict[str, Any] = {
        "n_layer": 4, "n_head": 2, "n_head_kv": 1, "head_dim_k": 64, "head_dim_v": 64, "full_attention_interval": 2,
        "n_embd": 8, "n_vocab": 16,
        "ssm": SsmConfig(conv_kernel=4, state_size=32, time_step_rank=2, group_count=1),
    }  # fmt: skip
    return ModelConfig(**values | changes)


_moments: dict[tuple[str, str], dict[tuple[int, ...], Moment]] = {}


class Oracle(_Oracle):
    """One that remembers what others of the same model have decoded, on devices of its kind."""

    def __init__(
        self, e: Any, cfg: ModelConfig | None = None, policy: FormatPolicy = POLICY, reads: Reads | None = None
    ) -> None:
        cfg = hybrid() if cfg is None else cfg
        # Kinds of device differ in the last bits of expf.
        moments = _moments.setdefault((type(e).__name__, repr((cfg, policy))), {})
        super().__init__(e, cfg, policy, MAX_CTX, reads, moments=moments)


def player_on(
    e: Any, cfg: ModelConfig | None = None, options: CacheOptions = OPTIONS, policy: FormatPolicy = POLICY, *,
    reads: Reads | None = None, max_ctx: int = MAX_CTX,
) -> Player:  # fmt: skip
    cfg = hybrid() if cfg is None else cfg
    return Player(Cache.new(e, cfg, max_ctx, policy=policy, options=options), Oracle(e, cfg, policy, reads))


def play(player: Player, rows: int, accept: int, by: str = "host", *, look: bool = True) -> None:
    """One whole round; its outputs are looked at unless there is no time."""
    tokens = draft(rows, accept)
    with Round(player.cache, player.e, width=WIDTH) as r:
        lane = player.run(tokens)
        if by == "host":
            r.commit(accept)
        else:
            r.commit_from_device(player.last.htod_i32([accept]))
    if look:
        player.check_results(lane, player.tokens, tokens)
    player.tokens += tokens[:accept]


def begin(player: Player, parity: int, tokens: int = 3) -> None:
    """`tokens` tokens in, with the states' handles where they were born (0) or exchanged (1)."""
    player.cache.reset(player.e)
    player.tokens = []
    player.step(*[TRUE] * (tokens - 1))
    player.step(TRUE)
    if any(state is not None and (state.ssm_state is not state.home) != parity for state in player.cache.recur):
        player.cache.reset(player.e)
        player.tokens = []
        player.step(*[TRUE] * tokens)
