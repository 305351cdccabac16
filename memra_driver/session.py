"""The main job of a cache, on inputs that need no model: speculative decoding, checked bit for bit.

A `Session` drives two caches. One speculates: each round snapshots, verifies draft + 1 rows at once,
draws how many of them stand, rolls back and replays those. Its twin decodes only the tokens that
stand, one at a time. After every round both must have the same digest, and the rows that stand
must have the same bytes in everything that the operations returned.

Inputs are a fixed function of (seed, layer, position), so a replayed token brings the same rows.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig
from memra_driver.device import CudaEvent
from memra_driver.errors import CapacityError, MemraError, UnsupportedError
from memra_driver.formats import FormatPolicy
from memra_driver.kvdev import CudaDev
from memra_driver.plan import CachePlan

F32 = npt.NDArray[np.float32]

ACCEPT_CHANCE = 0.75
AHEAD_BYTES = 1 << 29  # takes the GPU longer to clear than the host to enqueue an operation
COPY_BYTES = {True: 1 << 29, False: 1 << 26}  # CUDA, host: well past any cache level


class Inputs:
    """What a model's projections would bring to the cache: unit-normal rows, gates in the models' range."""

    def __init__(self, cfg: ModelConfig, seed: int) -> None:
        self.cfg = cfg
        self.seed = seed
        self._rows: dict[tuple[int, str, int, int], F32] = {}

    def rows(self, il: int, name: str, columns: int, start: int, count: int) -> F32:
        """[count, columns] of positions start ..: the same row for the same position, whatever the call."""
        return np.stack([self._row(il, name, columns, start + i) for i in range(count)])

    def weights(self, il: int) -> dict[str, F32]:
        """Per-layer constants of a recurrent layer: w [conv_dim, d_conv], dt_bias and a [num_v]."""
        ssm = self.cfg.ssm
        assert ssm is not None
        random = self._generator(il, "weights", 0)
        return {
            "w": random.normal(0, 0.4, (ssm.conv_dim, ssm.conv_kernel)).astype(np.float32),
            "dt_bias": random.uniform(-3, 1, ssm.time_step_rank).astype(np.float32),
            "a": -random.uniform(0.05, 4, ssm.time_step_rank).astype(np.float32),
        }

    def forget_before(self, position: int) -> None:
        """Drops rows that nobody will ask for again."""
        self._rows = {key: row for key, row in self._rows.items() if key[3] >= position}

    def _row(self, il: int, name: str, columns: int, position: int) -> F32:
        key = (il, name, columns, position)
        if key not in self._rows:
            self._rows[key] = self._generator(il, name, position).standard_normal(columns, np.float32)
        return self._rows[key]

    def _generator(self, il: int, name: str, position: int) -> np.random.Generator:
        words = hashlib.blake2b(f"{self.seed}/{il}/{name}/{position}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(words, np.uint64)))


@dataclass
class OpTimes:
    """How long each operation took and how many bytes it must move, as measured on the device.

    On a GPU a long clear is enqueued in front of each measured operation: while it runs the host gets ahead, so
    the time between the two events is the device's alone, and the operation finds none of its data in a cache.
    """

    e: Any
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bytes: dict[str, list[int]] = field(default_factory=dict)
    _pending: list[tuple[str, CudaEvent, CudaEvent]] = field(default_factory=list)
    _ahead: Any = None

    @contextmanager
    def measure(self, name: str, n_bytes: int) -> Iterator[None]:
        """Times what the block enqueues: between two events on a GPU, by the clock on the host."""
        self.bytes.setdefault(name, []).append(n_bytes)
        if not isinstance(self.e, CudaDev):
            begin = time.perf_counter()
            yield
            self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
            return
        if self._ahead is None:
            self._ahead = self.e.uninit(AHEAD_BYTES // 4)
        self.e.clear_bytes(self._ahead.ptr, self._ahead.nbytes)
        begin_event, end_event = (CudaEvent(self.e.context, timing=True) for _ in range(2))
        self.e.stream.record(begin_event)
        yield
        self.e.stream.record(end_event)
        self._pending.append((name, begin_event, end_event))

    def settle(self) -> None:
        """Waits for the device and reads the events."""
        self.e.synchronize()
        for name, begin, end in self._pending:
            self.seconds.setdefault(name, []).append(end.elapsed_ms(begin) / 1e3)
            begin.close()
            end.close()
        self._pending.clear()

    def close(self) -> None:
        """Frees what the measuring needs."""
        if self._ahead is not None:
            self._ahead.close()

    def table(self, copy_bytes_per_second: float) -> list[dict[str, Any]]:
        """Per operation: count, median seconds, bytes of a median call, share of the copy bandwidth."""
        rows = []
        for name, seconds in self.seconds.items():
            rates = [b / s for b, s in zip(self.bytes[name], seconds, strict=True) if s > 0]
            rows.append(
                {
                    "operation": name,
                    "count": len(seconds),
                    "median_seconds": statistics.median(seconds),
                    "median_bytes": int(statistics.median(self.bytes[name])),
                    "copy_share": statistics.median(rates) / copy_bytes_per_second if rates else 0.0,
                }
            )
        return rows


def copy_bandwidth(e: Any) -> float:
    """Bytes per second, read plus written, of one large copy on e: the median of seven."""
    n = COPY_BYTES[isinstance(e, CudaDev)] // 4
    with e.uninit(n) as src, e.zeros(n) as dst:
        e.clear_bytes(src.ptr, src.nbytes)
        e.copy_into(dst, 0, src, n)
        times = OpTimes(e)
        for _ in range(7):
            with times.measure("copy", 8 * n):
                e.copy_into(dst, 0, src, n)
        times.settle()
        times.close()
        return 8 * n / statistics.median(times.seconds["copy"])


class Decoder:
    """Runs steps of the trunk over one cache, and keeps a hash of what each position got back."""

    def __init__(self, e: Any, cache: Cache, inputs: Inputs, times: OpTimes) -> None:
        self.e, self.cache, self.inputs, self.times = e, cache, inputs, times
        self._buffers: dict[str, Any] = {}
        self._weights: dict[int, dict[str, Any]] = {}

    def step(self, rows: int) -> dict[int, str]:
        """One step of `rows` tokens at pos, advanced. Returns position -> hash of every op's output row."""
        start = self.cache.pos
        hashes = {start + t: hashlib.sha256() for t in range(rows)}
        for il in range(self.cache.cfg.n_trunk):
            if self.cache.kv[il] is not None:
                self._attention(il, start, rows)
            elif self.cache.recur[il] is not None:
                for output in self._recurrent(il, start, rows):
                    for t, row in enumerate(output.reshape(rows, -1)):
                        hashes[start + t].update(row.tobytes())
        self.cache.advance(self.e, rows)
        return {position: sha.hexdigest() for position, sha in hashes.items()}

    def close(self) -> None:
        """Frees its buffers."""
        weights = [each for layer in self._weights.values() for each in layer.values()]
        for each in (*self._buffers.values(), *weights):
            each.close()

    def _attention(self, il: int, start: int, rows: int) -> None:
        layer = self.cache.kv[il]
        assert layer is not None
        k = self._input(il, "k", layer.kv_dim_k, start, rows)
        v = self._input(il, "v", layer.kv_dim_v, start, rows)
        n_bytes = rows * (4 * (layer.kv_dim_k + layer.kv_dim_v) + layer.k_tok_bytes + layer.v_tok_bytes)
        with self.times.measure("append_kv", n_bytes):
            ops.append_kv(self.e, self.cache, il, k, v)

    def _recurrent(self, il: int, start: int, rows: int) -> list[F32]:
        layer = self.cache.recur[il]
        assert layer is not None
        conv, heads, size = layer.conv_dim, layer.num_v, layer.state_size
        weights = self._layer_weights(il)
        x = self._input(il, "x", conv, start, rows)
        alpha = self._input(il, "alpha", heads, start, rows)
        beta_raw = self._input(il, "beta_raw", heads, start, rows)
        conv_out = self._output("conv_out", rows * conv)
        q, k, v, out = (self._output(name, rows * heads * size) for name in ("q", "k", "v", "out"))
        g_log, beta = (self._output(name, rows * heads) for name in ("g_log", "beta"))
        ring_bytes, state_bytes = layer.conv_state.nbytes, layer.ssm_state.nbytes
        with self.times.measure("conv_update", 2 * (x.nbytes + ring_bytes) + weights["w"].nbytes):
            ops.conv_update(self.e, self.cache, il, x, weights["w"], conv_out)
        with self.times.measure("gdn_prep", conv_out.nbytes + 3 * q.nbytes + 4 * g_log.nbytes):
            ops.gdn_prep(
                self.e, self.cache, il, conv_out, alpha, beta_raw, weights["dt_bias"], weights["a"],
                q, k, v, g_log, beta, eps=self.cache.cfg.rms_eps,
            )  # fmt: skip
        with self.times.measure("gdn_scan", 2 * state_bytes + 4 * q.nbytes + 2 * beta.nbytes):
            ops.gdn_scan(self.e, self.cache, il, q, k, v, g_log, beta, out, scale=size**-0.5)
        return [slice_.to_numpy() for slice_ in (conv_out, q, k, v, g_log, beta, out)]

    def _input(self, il: int, name: str, columns: int, start: int, rows: int) -> Any:
        filled = self._output(f"in.{name}", rows * columns)
        filled.copy_from(self.inputs.rows(il, name, columns, start, rows).reshape(-1))
        return filled

    def _output(self, name: str, n: int) -> Any:
        """n elements of a buffer kept by name; two layers may differ in size, so it grows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.len < n:
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[name] = self.e.uninit(n)
        return buffer.view(0, n)

    def _layer_weights(self, il: int) -> dict[str, Any]:
        if il not in self._weights:
            self._weights[il] = {}
            for name, array in self.inputs.weights(il).items():
                kept = self._weights[il][name] = self.e.uninit(array.size)
                kept.copy_from(array.reshape(-1))
        return self._weights[il]


@dataclass(frozen=True)
class Round:
    """What one round did. `fault` says what differed; "" when nothing did."""

    number: int
    accepted: int
    pos: int
    digest: str
    fault: str


class Session:
    """A speculative session over `cfg` on device e, and its twin. Iterate `run()`.

    Raises CapacityError when prompt and rounds do not fit into max_ctx, UnsupportedError when the
    geometry has no kernels.
    """

    def __init__(
        self, e: Any, cfg: ModelConfig, max_ctx: int, *, prompt: int, rounds: int, draft: int, seed: int,
        policy: FormatPolicy | None = None,
    ) -> None:  # fmt: skip
        self.width = draft + 1
        need = prompt + rounds * self.width
        if need > max_ctx:
            raise CapacityError(
                f"a prompt of {prompt} and {rounds} rounds of {self.width} rows may need {need} tokens;"
                f" max_ctx is {max_ctx}"
            )
        plan = CachePlan(cfg, max_ctx, policy)
        problems = plan.check_ops()
        if problems:
            raise UnsupportedError("; ".join(problems))
        self.e, self.prompt, self.rounds = e, prompt, rounds
        self.cache = Cache(plan, (e,))
        try:
            self.twin = Cache(plan, (e,))
        except BaseException:
            self.cache.close()
            raise
        self.times = OpTimes(e)
        self.inputs = Inputs(cfg, seed)
        self.speculating = Decoder(e, self.cache, self.inputs, self.times)
        self.plain = Decoder(e, self.twin, self.inputs, self.times)
        self._draw = np.random.default_rng(seed)

    def run(self) -> Iterator[Round]:
        """Yields the primed prompt as round 0, then each round; stops behind the first that differs."""
        snap = self.cache.snapshot(self.e)
        for number in range(self.rounds + 1):
            try:
                done = self._prime() if number == 0 else self._round(number, snap)
            except MemraError as error:
                done = Round(number, 0, self.cache.pos, "", f"{type(error).__name__}: {error}")
            yield done
            if done.fault:
                break
            self.inputs.forget_before(self.cache.pos)
        snap.close()

    def close(self) -> None:
        """Frees both caches and all scratch."""
        for each in (self.speculating, self.plain, self.cache, self.twin, self.times):
            each.close()

    def _prime(self) -> Round:
        hashes = self.speculating.step(self.prompt) if self.prompt else {}
        return self._compare(0, self.prompt, [hashes])

    def _round(self, number: int, snap: Any) -> Round:
        state_bytes = 2 * snap.nbytes
        with self.times.measure("snapshot_into", state_bytes):
            self.cache.snapshot_into(self.e, snap)
        verified = self.speculating.step(self.width)
        accepted = self._draw_accepted()
        with self.times.measure("rollback", state_bytes):
            self.cache.rollback(self.e, snap, accepted)
        replayed = self.replay(accepted)
        return self._compare(number, accepted, [verified, replayed])

    def replay(self, accepted: int) -> dict[int, str]:
        """Runs the accepted tokens again, in one step."""
        return self.speculating.step(accepted) if accepted else {}

    def _draw_accepted(self) -> int:
        """How many of the verified rows stand: each with the chance of a good draft, up to the first that fails."""
        chances = self._draw.random(self.width) < ACCEPT_CHANCE
        return self.width if chances.all() else int(chances.argmin())

    def _compare(self, number: int, accepted: int, seen: list[dict[int, str]]) -> Round:
        """Lets the twin decode the accepted tokens and compares outputs and digests."""
        faults = []
        for _ in range(accepted):
            position = self.twin.pos
            (expected,) = self.plain.step(1).values()
            faults += [f"outputs at position {position}" for hashes in seen if hashes.get(position) != expected]
        digest = self.cache.digest()
        if digest != self.twin.digest():
            faults.append("digest")
        self.times.settle()
        fault = f"{faults[0]} differ from plain decoding" if faults else ""
        return Round(number, accepted, self.cache.pos, digest, fault)
