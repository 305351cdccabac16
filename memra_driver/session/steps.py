"""Steps of a model's trunk over a cache or a batch: fill the inputs, enqueue the operations, hash the outputs.

Each layer runs on the device that it lives on. Where a stage begins, hidden-state rows cross over to it first, as they
do in a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.boundary import Boundary
from memra_driver.cache import Cache
from memra_driver.kernels import attend_room
from memra_driver.layers import KvLayer, RecurLayer
from memra_driver.op_bytes import op_bytes
from memra_driver.session.inputs import Inputs, Weights
from memra_driver.session.times import OpTimes

Hashes = list[dict[int, str]]  # per sequence: position -> hash of every operation's output row
Arrays = dict[str, Any]

INPUTS = {"hidden", "append.k", "append.v", "attend.q", "x", "alpha", "beta_raw"}
OUTPUTS = ("crossed", "conv_out", "q", "k", "v", "g_log", "beta", "out", "attend.out")


class Decoder:
    """Runs steps of the trunk over one cache, or over a batch of them with as many `inputs`.

    crossings: by the first layer of a stage, the boundary in front of it. fixed: every layer has buffers of its own, so
    that a step can be recorded as a graph and run again on other inputs; otherwise the layers of a device share them.
    """

    def __init__(
        self, target: Cache | CacheBatch, inputs: Sequence[Inputs], weights: Weights, times: OpTimes,
        crossings: Mapping[int, Boundary], *, attend: bool, fixed: bool = False,
    ) -> None:  # fmt: skip
        self.target, self.inputs, self.weights, self.times = target, inputs, weights, times
        self.crossings, self.attend, self.fixed = crossings, attend, fixed
        self.layers = range(target.cfg.n_trunk)
        self._buffers: dict[tuple[int, str], Any] = {}

    def step(self, rows: int, *, advance: bool = True) -> Hashes:
        """One step of `rows` tokens at pos, layer after layer."""
        hashes = self._hashes(rows)
        for il in self.layers:
            arrays = self._arrays(il, rows)
            self._fill(il, arrays, rows)
            self._enqueue(il, arrays, rows)
            self._collect(arrays, rows, hashes)
        if advance:
            self.target.advance(self._device(0), rows)
        return self._digests(hashes)

    def reserve(self, rows: int) -> None:
        """Allocates what a step of `rows` needs, since a capture allocates nothing."""
        for il in self.layers:
            self._arrays(il, rows)
            if self._kind(il) == "recurrent":
                self.weights.of(il)
            elif self.attend:
                cfg = self.target.cfg
                (_, hv), heads_kv = cfg.head_dims(il), cfg.kv_heads(cfg.kv_source(il))
                n_bytes = attend_room(len(self.target.members), rows, cfg.heads(il), heads_kv, hv)
                self._device(il).attend_scratch(n_bytes)

    def enqueue(self, rows: int) -> None:
        """The operations of a step alone, for a capture."""
        for il in self.layers:
            self._enqueue(il, self._arrays(il, rows), rows)

    def replay(self, graph: Any, rows: int, n_bytes: int) -> Hashes:
        """One launch of a recorded step of `rows`, on the inputs of the tokens at pos."""
        hashes = self._hashes(rows)
        for il in self.layers:
            self._fill(il, self._arrays(il, rows), rows)
        with self.times.measure("graph launch", n_bytes):
            graph.launch()
        for il in self.layers:
            self._collect(self._arrays(il, rows), rows, hashes)
        return self._digests(hashes)

    def cost(self, rows: int, *, in_round: bool) -> int:
        """Bytes that a whole step must move."""
        costs = {il: op_bytes(self.target, il, rows, in_round=in_round) for il in self.layers}
        crossed = sum(2 * 4 * boundary.hidden for boundary in self.crossings.values()) * rows * len(self.target.members)
        return crossed + sum(costs[il][name] for il in self.layers for name in self._operations(il))

    def close(self) -> None:
        """Frees its buffers, and the tables of a batch; the caches stay."""
        for each in self._buffers.values():
            each.close()
        if isinstance(self.target, CacheBatch):
            self.target.close()

    # One layer.

    def _device(self, il: int) -> Any:
        first = self.target.members[0]
        return first.devices[first.plan.device_of(il)]

    def _kind(self, il: int) -> str:
        first = self.target.members[0]
        if first.recur[il] is not None:
            return "recurrent"
        return "owner" if first.kv[il] is not None else "borrower"

    def _operations(self, il: int) -> tuple[str, ...]:
        """What a step runs at layer il."""
        kind = self._kind(il)
        if kind == "recurrent":
            return ("conv_update", "gdn_prep", "gdn_scan")
        return (*(("append_kv",) if kind == "owner" else ()), *(("attend",) if self.attend else ()))

    def _kv(self, il: int) -> KvLayer:
        """The K/V that layer il reads."""
        return self.target.members[0].kv_layer_for(il)

    def _recur(self, il: int) -> RecurLayer:
        layer = self.target.members[0].recur[il]
        assert layer is not None
        return layer

    def _columns(self, il: int) -> dict[str, int]:
        """What layer il takes and gives, with the elements of a row."""
        crossing = self.crossings.get(il)
        crossed = {} if crossing is None else {"hidden": crossing.hidden, "crossed": crossing.hidden}
        if self._kind(il) == "recurrent":
            state = self._recur(il)
            gates, vector = state.num_v, state.num_v * state.state_size
            of_scan = {"q": vector, "k": vector, "v": vector, "g_log": gates, "beta": gates, "out": vector}
            of_conv = {"x": state.conv_dim, "alpha": gates, "beta_raw": gates, "conv_out": state.conv_dim}
            return crossed | of_conv | of_scan
        layer, columns = self._kv(il), crossed
        if self._kind(il) == "owner":
            columns = columns | {"append.k": layer.kv_dim_k, "append.v": layer.kv_dim_v}
        if self.attend:
            heads = self.target.cfg.heads(il)
            columns |= {"attend.q": heads * layer.head_dim_k, "attend.out": heads * layer.head_dim_v}
        return columns

    def _arrays(self, il: int, rows: int) -> Arrays:
        count = rows * len(self.target.members)
        return {name: self._buffer(il, name, count * columns) for name, columns in self._columns(il).items()}

    def _buffer(self, il: int, name: str, n: int) -> Any:
        """n elements of a buffer that is kept; it grows."""
        e = self.crossings[il].dev_a if name == "hidden" else self._device(il)
        key = (il if self.fixed else -1 - self.times.devices.index(e), name)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.len < n:
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[key] = e.uninit(n)
        return buffer.view(0, n)

    def _fill(self, il: int, arrays: Arrays, rows: int) -> None:
        for name, columns in self._columns(il).items():
            if name in INPUTS:
                blocks = [
                    inputs.rows(il, name, columns, member.pos, rows)
                    for inputs, member in zip(self.inputs, self.target.members, strict=True)
                ]
                arrays[name].copy_from(np.concatenate(blocks).reshape(-1))

    def _enqueue(self, il: int, a: Arrays, rows: int) -> None:
        e, target = self._device(il), self.target
        cost = op_bytes(target, il, rows, in_round=target.open_round is not None)
        if il in self.crossings:
            self._cross(self.crossings[il], a["hidden"], a["crossed"])

        def measure(name: str, n_bytes: int) -> AbstractContextManager[None]:
            return self.times.measure(name, n_bytes, e)

        if self._kind(il) == "recurrent":
            w = self.weights.of(il)
            size = self._recur(il).state_size
            operands = [a[name] for name in ("q", "k", "v", "g_log", "beta")]
            with measure("conv_update", cost["conv_update"]):
                ops.conv_update(e, target, il, a["x"], w["w"], a["conv_out"])
            with measure("gdn_prep", cost["gdn_prep"]):
                ops.gdn_prep(
                    e, target, il, a["conv_out"], a["alpha"], a["beta_raw"], w["dt_bias"], w["a"], *operands,
                    eps=target.cfg.rms_eps,
                )  # fmt: skip
            with measure("gdn_scan", cost["gdn_scan"]):
                q, k, v, g_log, beta = operands
                ops.gdn_scan(e, target, il, q, k, v, g_log, beta, a["out"], scale=size**-0.5)
            return
        if self._kind(il) == "owner":
            with measure("append_kv", cost["append_kv"]):
                ops.append_kv(e, target, il, a["append.k"], a["append.v"])
        if self.attend:
            scale = 1.0 if target.cfg.is_gemma else self._kv(il).head_dim_k ** -0.5
            with measure("attend", cost["attend"]):
                ops.attend(e, target, il, a["attend.q"], a["attend.out"], scale=scale)

    def _cross(self, boundary: Boundary, hidden: Any, crossed: Any) -> None:
        with self.times.measure("boundary", 2 * hidden.nbytes, boundary.dev_a):
            boundary.send(hidden)
        received = boundary.receive()
        boundary.dev_b.copy_bytes(crossed.ptr, received.ptr, received.nbytes)
        boundary.release()

    # What came back.

    def _hashes(self, rows: int) -> list[dict[int, Any]]:
        return [{member.pos + t: hashlib.sha256() for t in range(rows)} for member in self.target.members]

    def _collect(self, arrays: Arrays, rows: int, hashes: list[dict[int, Any]]) -> None:
        """Adds the output rows of one layer."""
        for name in OUTPUTS:
            if name in arrays:
                blocks = arrays[name].to_numpy().reshape(len(hashes), rows, -1)
                for block, of_sequence in zip(blocks, hashes, strict=True):
                    for row, sha in zip(block, of_sequence.values(), strict=True):
                        sha.update(row.tobytes())

    @staticmethod
    def _digests(hashes: list[dict[int, Any]]) -> Hashes:
        return [{position: sha.hexdigest() for position, sha in each.items()} for each in hashes]


def commit_bytes(cache: Cache, accepted: int, *, again: bool) -> int:
    """Bytes that the commit of a round must move: rings, and where the scan runs again states and operands."""
    total = 0
    for layer in cache.recur[: cache.cfg.n_trunk] if accepted else ():
        if layer is not None:
            total += 2 * layer.conv_state.nbytes
            vector = 4 * accepted * layer.num_v * layer.state_size
            total += 2 * layer.ssm_state.nbytes + 3 * vector + 8 * accepted * layer.num_v if again else 0
    return total
