"""What the bench runs operations on: caches of one geometry, their operands, and the graphs over their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.bench.measure import Bench
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig, SsmConfig
from memra_driver.formats import FormatPolicy
from memra_driver.kernels import attend_room
from memra_driver.op_bytes import op_bytes
from memra_driver.plan import CacheOptions, CachePlan

FUSED = hasattr(ops, "recur_step")
RECURRENT = ("recur_step",) if FUSED else ("conv_update", "gdn_prep", "gdn_scan")
ATTENTION = ("append_kv", "attend")
REPEATABLE = {"attend", "gdn_prep"}  # the others run once a layer and step
FILL_ROWS = 8192  # tokens that one append brings when a cache is filled
HOST_LAYERS = 32  # calls in a row that a host time is of, at most
SHARED_BYTES = 1 << 20  # rows of fewer bytes a call are shared by all: a projection has just made them


def attention_model(layers: int, n_head: int, n_head_kv: int, head_dim: int) -> ModelConfig:
    """Attention layers alone, all alike."""
    return ModelConfig(
        n_layer=layers, n_head=n_head, n_head_kv=n_head_kv, head_dim_k=head_dim, head_dim_v=head_dim, arch="bench"
    )


def recurrent_model(layers: int, value_heads: int, key_heads: int, state_size: int) -> ModelConfig:
    """Recurrent layers alone, all alike; the one attention layer behind them holds nothing that is used."""
    ssm = SsmConfig(conv_kernel=4, state_size=state_size, time_step_rank=value_heads, group_count=key_heads)
    return ModelConfig(
        n_layer=layers + 1, n_head_kv=1, head_dim_k=32, head_dim_v=32, arch="bench", full_attention_interval=layers + 1,
        ssm=ssm,
    )  # fmt: skip


class Workload:
    """`batch` caches of `cfg` that have room for `tokens` and for the steps of a graph, and operands for `rows` rows.

    fill: rows that stand in every attention layer. The clock stands at tokens - rows; `place` puts it elsewhere.
    Operands are unit-normal; those of the scan come from convolution and prep. Close it when done.
    """

    def __init__(
        self, bench: Bench, cfg: ModelConfig, *, tokens: int, batch: int = 1, rows: int = 1,
        policy: FormatPolicy | None = None, options: CacheOptions | None = None, fill: bool = False,
    ) -> None:  # fmt: skip
        self.bench, self.e, self.cfg, self.tokens, self.rows = bench, bench.e, cfg, tokens, rows
        room = tokens + rows * (bench.launches + 2)
        plan = CachePlan(cfg, room, policy or FormatPolicy(), options)
        self.ops: Any = ops  # or capi.ops, the same through the C library
        self._arrays: dict[tuple[str, int], Any] = {}
        with ExitStack() as owned:
            self.caches = [owned.enter_context(Cache(plan, (self.e,))) for _ in range(batch)]
            self.target: Any = owned.enter_context(CacheBatch(self.caches)) if batch > 1 else self.caches[0]
            trunk = range(cfg.n_trunk)
            self.attention = [il for il in trunk if self.caches[0].kv[il] is not None]
            self.recurrent = [il for il in trunk if self.caches[0].recur[il] is not None]
            self._constants = self._made_constants(owned)
            owned.callback(self._free_arrays)
            if fill:
                self._fill()
            self.place(tokens - rows)
            self._owned = owned.pop_all()

    def close(self) -> None:
        """Frees everything; notes what the caches' error records say, which should be nothing."""
        for cache in self.caches:
            health = cache.health()
            if health:
                self.bench.faults.append(f"{self.cfg.name or self.cfg.n_layer}: {health}")
        self._owned.close()

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def place(self, pos: int, *, ahead: int = 0) -> None:
        """Puts the clock of every cache to pos, with `ahead` more rows standing than that."""
        for cache in self.caches:
            cache.pos = pos
            for layer in filter(None, cache.kv):
                layer.len = pos + ahead
            cache.sync_d(self.e)

    # One operation.

    def call(self, op: str, il: int, rows: int | None = None) -> None:
        """Enqueues an operation of layer il, of `rows` rows (default: all)."""
        rows = self.rows if rows is None else rows
        self.bench.take_first(op, lambda: self.calls(op, rows)(il))

    def calls(self, op: str, rows: int) -> Callable[[int], None]:
        """An operation with its operands, as a function of the layer alone: all that its host time is of."""
        e, target, get = self.e, self.target, self._array
        if op == "append_kv":
            layer = self.caches[0].kv_layer(self.attention[0])
            sizes = [len(self.caches) * rows * dim for dim in (layer.kv_dim_k, layer.kv_dim_v)]
            if 4 * sum(sizes) >= SHARED_BYTES:
                return lambda il: self.ops.append_kv(e, target, il, *map(self.bench.random, sizes))
            k, v = map(self.bench.random, sizes)
            return lambda il: self.ops.append_kv(e, target, il, k, v)
        if op == "attend":
            q, out = get("attend.q", rows), get("attend.out", rows)
            layer = self.caches[0].kv_layer(self.attention[0])
            scale = layer.head_dim_k**-0.5
            heads, heads_kv = self.cfg.n_head, layer.n_head_kv
            self.e.attend_scratch(attend_room(len(self.caches), rows, heads, heads_kv, layer.head_dim_v))
            return lambda il: self.ops.attend(e, target, il, q, out, scale=scale)
        w, dt_bias, a = self._constants
        x, alpha, beta_raw = (get(name, rows) for name in ("x", "alpha", "beta_raw"))
        conv_out, out = get("conv_out", rows), get("out", rows)
        q, k, v, g_log, beta = (get(name, rows) for name in ("q", "k", "v", "g_log", "beta"))
        eps, scale = self.cfg.rms_eps, self._ssm.state_size**-0.5
        if op == "conv_update":
            return lambda il: self.ops.conv_update(e, target, il, x, w, conv_out)
        if op == "gdn_prep":
            return lambda il: self.ops.gdn_prep(
                e, target, il, conv_out, alpha, beta_raw, dt_bias, a, q, k, v, g_log, beta, eps=eps
            )  # fmt: skip
        if op == "gdn_scan":
            return lambda il: self.ops.gdn_scan(e, target, il, q, k, v, g_log, beta, out, scale=scale)
        fused: Any = getattr(self.ops, op)
        return lambda il: fused(e, target, il, x, w, alpha, beta_raw, dt_bias, a, out, eps=eps, scale=scale)

    def layers(self, op: str) -> list[int]:
        """The layers that an operation runs on."""
        return self.attention if op in ATTENTION else self.recurrent

    def run(self, names: Iterable[str], rows: int | None = None, *, repeat: int = 1) -> None:
        """Enqueues a step of these operations, layer after layer, and ends it where it moves the clock."""
        names, rows = tuple(names), self.rows if rows is None else rows
        bound = {op: self.calls(op, rows) for op in names}
        for _ in range(repeat):
            for il in range(self.cfg.n_trunk):
                for op in names:
                    if il in self.layers(op):
                        self.bench.take_first(op, lambda op=op, il=il: bound[op](il))  # type: ignore[misc]
        if not REPEATABLE.issuperset(names):
            self.target.advance(self.e, rows)

    def op_seconds(self, op: str, rows: int | None = None) -> float:
        """Device seconds of one call of an operation, over all layers from where the clock stands."""
        return self.step_seconds([op], rows) / len(self.layers(op))

    def step_seconds(self, names: Sequence[str], rows: int | None = None) -> float:
        """Device seconds of a step of these operations."""
        rows = self.rows if rows is None else rows
        self._warm(names, rows)
        return self.bench.device_seconds(lambda: self.run(names, rows), 1, self.caches)

    def op_bytes(self, op: str, rows: int | None = None) -> int:
        """Bytes that a call must move."""
        rows = self.rows if rows is None else rows
        return op_bytes(self.target, self.layers(op)[0], rows)[op]

    def host_seconds(self, op: str, rows: int | None = None, call: Callable[[int], None] | None = None) -> float:
        """Host seconds of one eager call; `call` brings operands of its own."""
        return self.host_beside(op, rows=rows, call=call)[0]

    def host_beside(
        self, op: str, *others: Callable[[], Any], rows: int | None = None, call: Callable[[int], None] | None = None
    ) -> list[float]:
        """host_seconds, and in turn with it those of others that do as much as a call on each layer."""
        rows = self.rows if rows is None else rows
        call, layers, pos = call or self.calls(op, rows), self.layers(op)[:HOST_LAYERS], self.caches[0].pos

        def mine() -> None:
            for il in layers:
                call(il)

        def end() -> None:
            if op not in REPEATABLE:
                self.target.advance(self.e, rows)
                self.place(pos)

        return self.bench.host_beside([mine, *others], len(layers), after=end)

    def _warm(self, names: Sequence[str], rows: int) -> None:
        """One eager step, for the first-call times and what a capture would not allocate; the clock stays."""
        pos, ahead = self.caches[0].pos, 0
        if self.attention:
            ahead = self.caches[0].kv_layer(self.attention[0]).len - pos
        if any(op not in self.bench.first for op in names) or "gdn_scan" in names:
            if "gdn_scan" in names and "gdn_prep" not in names:
                self.run(["conv_update", "gdn_prep"], rows)  # operands as a model has them
                self.place(pos, ahead=ahead)
            self.run(names, rows)
            self.place(pos, ahead=ahead)
        else:
            for op in names:
                self.calls(op, rows)

    # Operands.

    @property
    def _ssm(self) -> SsmConfig:
        return self.cfg.ssm or SsmConfig()

    def _made_constants(self, owned: ExitStack) -> list[Any]:
        ssm, draw = self._ssm, np.random.default_rng(11)
        weights = (
            draw.normal(0, 0.4, ssm.conv_dim * ssm.conv_kernel),
            draw.uniform(-3, 1, ssm.time_step_rank),
            -draw.uniform(0.05, 4, ssm.time_step_rank),
        )
        made = []
        for values in weights:
            made.append(owned.enter_context(self.e.uninit(values.size)))
            made[-1].copy_from(values.astype(np.float32))
        return made

    def _array(self, name: str, rows: int) -> Any:
        """The array of that name, for `rows` rows of every sequence; inputs are random numbers."""
        if (name, rows) not in self._arrays:
            ssm, layer = self._ssm, self.caches[0].kv_layer(self.attention[0]) if self.attention else None
            head_dims = (layer.head_dim_k, layer.head_dim_v) if layer else (0, 0)
            vector = ssm.time_step_rank * ssm.state_size
            columns = {
                "attend.q": self.cfg.n_head * head_dims[0], "attend.out": self.cfg.n_head * head_dims[1],
                "x": ssm.conv_dim, "conv_out": ssm.conv_dim, "alpha": ssm.time_step_rank,
                "beta_raw": ssm.time_step_rank, "q": vector, "k": vector, "v": vector, "g_log": ssm.time_step_rank,
                "beta": ssm.time_step_rank, "out": vector,
            }[name]  # fmt: skip
            n = len(self.caches) * rows * columns
            given = name in ("attend.q", "x", "alpha", "beta_raw")
            self._arrays[name, rows] = self.bench.random(n) if given else self.e.uninit(n)
        return self._arrays[name, rows]

    def _free_arrays(self) -> None:
        for array in self._arrays.values():
            array.close()

    def _fill(self) -> None:
        """Random rows in every attention layer, up to `tokens`."""
        for cache in self.caches:
            for begin in range(0, self.tokens, FILL_ROWS):
                rows = min(FILL_ROWS, self.tokens - begin)
                for il in self.attention:
                    layer = cache.kv_layer(il)
                    k, v = (self.bench.random(rows * dim) for dim in (layer.kv_dim_k, layer.kv_dim_v))
                    ops.append_kv(self.e, cache, il, k, v)
                cache.advance(self.e, rows)
