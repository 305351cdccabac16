"""What a run of the bench leaves: one row per thing measured, how big a run is, and the names that rows go by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memra_driver.config import ModelConfig

Pair = tuple[str, str]  # formats of K and V
GROUPS = ("snapshot", "append", "attend", "scan", "recur", "step", "host", "load")
PAIR: Pair = ("q8_0", "q5_1")


@dataclass
class Row:
    """One thing measured. Times are seconds of one call; None was not measured.

    bytes: what a call must move. copy_seconds: a copy that moves as many, in the same run. ceiling: what its share is
    of, "read" or "copy"; ceiling_seconds: what its bytes take at that rate. count: device work that one call enqueues.
    """

    group: str
    name: str
    who: str = "memra"
    bytes: int | None = None
    seconds: float | None = None
    copy_seconds: float | None = None
    host_seconds: float | None = None
    ceiling: str = "copy"
    ceiling_seconds: float | None = None
    count: int | None = None

    @property
    def share(self) -> float | None:
        """Of the ceiling."""
        return self.ceiling_seconds / self.seconds if self.ceiling_seconds and self.seconds else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Attention:
    """One geometry of attention."""

    n_head: int
    n_head_kv: int
    head_dim: int
    verify: int = 0  # rows of a verifying call; 0: decoding alone
    others: tuple[Pair, ...] = ()  # formats beside PAIR

    def name(self, rows: int, tokens: int, pair: Pair = PAIR) -> str:
        return f"attend {self.n_head}/{self.n_head_kv}x{self.head_dim} {'+'.join(pair)} T={rows} at {tokens}"

    def peer(self, tokens: int) -> str:
        return f"torch SDPA bf16 {self.n_head}/{self.n_head_kv}x{self.head_dim} at {tokens}"


@dataclass(frozen=True)
class Sizes:
    """How big a run is."""

    name: str
    pool_bytes: int = 1 << 31  # of the ceilings' copy, too
    replays: int = 7
    contexts: tuple[int, ...] = (1024, 8192, 32768, 131072)
    other_contexts: tuple[int, ...] = contexts  # of formats beside PAIR
    attention: tuple[Attention, ...] = (
        Attention(16, 2, 256, verify=4, others=(("fp8", "fp8"), ("q8_0", "q4_0"), ("q8_0", "fp8"))),
        Attention(24, 4, 256, verify=4),
        Attention(32, 8, 128),
        Attention(16, 2, 512),
    )
    append_rows: int = 4096
    append_layers: int = 12
    # K/V heads and head_dim; of the first every pair of formats
    append_dims: tuple[tuple[int, int], ...] = ((4, 256), (2, 256), (1, 96))
    few_rows: tuple[int, ...] = (1, 4, 8)
    few_layers: int = 48
    batches: tuple[int, ...] = (1, 8, 32, 64)
    value_heads: tuple[int, ...] = (32, 48)
    key_heads: int = 16
    state_size: int = 128
    scan_rows: int = 4
    most_layers: int = 128  # of one recurrent workload
    model: str | ModelConfig = "qwen3.6-35b-a3b"  # of snapshots, steps and host times
    new_tokens: int = 8192
    step_tokens: int = 8192
    step_batches: tuple[int, ...] = (1, 32)
    host_tokens: int = 1024
    round_width: int = 4
    accepted: int = 3
    starts: int = 5  # processes that an import time is the median of

    @property
    def cfg(self) -> ModelConfig:
        return ModelConfig.from_preset(self.model) if isinstance(self.model, str) else self.model


FULL = Sizes("full")
QUICK = Sizes(
    "quick", replays=3, contexts=(1024, 32768), other_contexts=(32768,), batches=(1, 32), value_heads=(32,), starts=3
)


def append_name(dim: int, rows: int, pair: Pair = PAIR) -> str:
    return f"append_kv {'+'.join(pair)} kv_dim {dim} T={rows}"


def recurrent_name(op: str, heads: int, batch: int, rows: int = 1) -> str:
    return f"{op} {heads} heads B={batch} T={rows}"


def states_name(heads: int, batch: int) -> str:
    """A copy of the states of a scan, read and written once."""
    return f"copy of the states, {heads} heads B={batch}"


def step_name(batch: int, op: str = "all") -> str:
    return f"decode step B={batch}: {op}"
