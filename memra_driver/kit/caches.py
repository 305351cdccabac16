"""Plays the cache programs of a kit: calls on one cache, and what is seen of it behind each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.errors import DriverError, KitError, MemraError
from memra_driver.kit.files import Array, Entry, fnv1a64
from memra_driver.kit.plans import planned
from memra_driver.memory import CudaSlice
from memra_driver.round import Round

MAX_CACHE_BYTES = 16 << 20  # of planes, snapshots and scratch together: what a program may ask for
SLOTS = 4  # snapshots that a program holds at once
STATES = {"gdn_scan", "rollback", "commit", "commit_device", "reject", "reset"}  # calls that move a recurrent state


@dataclass
class Seen:
    """What one call did: the name of its refusal, or where the cache stands and what it left in memory."""

    error: str
    after: Entry
    outputs: dict[str, Array] = field(default_factory=dict)


def pattern(tag: int, layer: int, start: int, count: int) -> Array:
    """h(tag, layer, i) for i = start .. start + count - 1, as u32: MurmurHash3's finaliser over a sum of products."""
    i = np.arange(start, start + count, dtype=np.uint64)
    h = (np.uint64(tag * 0x9E3779B1 + layer * 0x85EBCA77 & 0xFFFFFFFF) + i * np.uint64(0xC2B2AE3D)).astype(np.uint32)
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    return h ^ h >> 16


class Player:
    """A cache for the args of a case on device e, and the calls of its program.

    Where the case is exact, the states are seen by the digests of their bytes, and else by their values.
    """

    def __init__(self, e: Any, args: Entry) -> None:
        plan = planned(args)
        need = plan.arena_bytes + SLOTS * plan.first_use["snapshot"] + plan.first_use["attend_scratch"]
        if need > MAX_CACHE_BYTES or plan.n_devices > 1:
            raise KitError(f"a cache program for {plan.n_devices} devices and {need} bytes; 1 and {MAX_CACHE_BYTES}")
        self.e, self.exact = e, args["exact"]
        self.cache = Cache(plan, (e,))
        self.snaps: dict[int, Any] = {}
        self.round: Round | None = None
        self._digests: dict[str, tuple[bytes, str]] = {}  # by plane: what it held last, and the digest of that
        self._stack = ExitStack()

    def close(self) -> None:
        """Frees the cache and its snapshots."""
        for each in (*self.snaps.values(), self.cache):
            each.close()

    def call(self, step: Entry, inputs: dict[str, Array]) -> Seen:
        """Makes one call. A refusal is a result; KitError and the driver's errors are raised."""
        with ExitStack() as self._stack:  # arrays live as long as the call
            try:
                outputs = CALLS[step["op"]](self, step, inputs)
            except (KitError, DriverError):
                raise
            except MemraError as error:
                return Seen(type(error).__name__, self.after())
            arrays = {name: each.to_numpy() for name, each in (outputs or {}).items()}
        if step["op"] == "digest" and self.exact:
            arrays["sha256"] = np.frombuffer(bytes.fromhex(self.cache.digest()), np.uint8)
        if not self.exact and step["op"] in STATES:
            for il, layer in enumerate(self.cache.recur):
                if layer is not None and step.get("layer", il) == il:
                    arrays[f"layer{il:02}.ssm_state"] = layer.ssm_state.to_numpy()
        return Seen("", self.after(), arrays)

    def after(self) -> Entry:
        """Where the cache stands, and the digests of its planes."""
        cache = self.cache
        planes: dict[str, Array] = {}
        for il, (kv, recur) in enumerate(zip(cache.kv, cache.recur, strict=True)):
            name = f"layer{il:02}"
            if kv is not None:
                planes |= {f"{name}.k": kv.k.to_numpy(), f"{name}.v": kv.v.to_numpy()}
            elif recur is not None:
                planes[f"{name}.conv_state"] = recur.conv_state.to_numpy()
                if self.exact:
                    planes[f"{name}.ssm_state"] = recur.ssm_state.to_numpy()
                    planes[f"{name}.ssm_state_alt"] = recur.ssm_state_alt.to_numpy()
        planes["health"] = cache.health_d(0).to_numpy()
        snapshots = []
        for slot, snap in sorted(self.snaps.items()):
            lens = [-1 if n is None else n for n in snap.kv_len]
            snapshots.append({"slot": slot, "pos": snap.pos, "valid": not snap.invalid, "len": lens})
            for il, (conv, ssm) in enumerate(zip(snap.conv, snap.ssm, strict=True)):
                if conv is not None:
                    planes[f"snapshot{slot}.layer{il:02}.conv"] = conv.to_numpy()
                    if self.exact:
                        planes[f"snapshot{slot}.layer{il:02}.ssm"] = ssm.to_numpy()
        return {
            "state": cache.state.name, "pos": cache.pos, "pos_d": int(cache.pos_d(0).to_numpy()[0]),
            "step_rows": cache.step_rows, "replay_to": cache.replay_to, "generation": cache.generation,
            "len": [-1 if kv is None else kv.len for kv in cache.kv],
            "len_d": [-1 if kv is None else int(kv.len_d.to_numpy()[0]) for kv in cache.kv],
            "snapshots": snapshots,
            "planes": {name: self._digest(name, plane.tobytes()) for name, plane in planes.items()},
        }  # fmt: skip

    def _digest(self, name: str, content: bytes) -> str:
        if self._digests.get(name, (None, ""))[0] != content:
            self._digests[name] = content, fnv1a64(content)
        return self._digests[name][1]

    # What the calls share.

    def _keep(self, array: Array) -> Any:
        """An array on the device, until the call is over."""
        made = self._stack.enter_context(CudaSlice(self.e.memory, array.size, array.dtype))
        made.copy_from(np.ascontiguousarray(array).reshape(-1))
        return made

    def _rows(self, inputs: dict[str, Array], *names: str) -> list[Any]:
        if missing := [name for name in names if name not in inputs]:
            raise KitError(f"a call lacks its input {missing[0]!r}")
        return [self._keep(inputs[name]) for name in names]

    def _out(self, n: int) -> Any:
        return self._keep(np.zeros(n, np.float32))

    def _snap(self, step: Entry) -> Any:
        if step["slot"] not in self.snaps:
            raise KitError(f"there is no snapshot {step['slot']}")
        return self.snaps[step["slot"]]

    def _in_round(self) -> Round:
        if self.round is None:
            raise KitError("there is no round to end")
        return self.round

    def _layer(self, step: Entry, plane: str) -> Any:
        """The layer of a step, which has this plane."""
        layers: list[Any] = [kv or recur for kv, recur in zip(self.cache.kv, self.cache.recur, strict=True)]
        if step["layer"] >= len(layers) or not hasattr(layers[step["layer"]], plane):
            raise KitError(f"layer {step['layer']} has no {plane}")
        return layers[step["layer"]]

    # Calls of more than a line. Each returns its outputs, if it has any.

    def append_kv(self, step: Entry, inputs: dict[str, Array]) -> None:
        ops.append_kv(self.e, self.cache, step["layer"], *self._rows(inputs, "k_rows", "v_rows"))

    def conv_update(self, step: Entry, inputs: dict[str, Array]) -> dict[str, Any]:
        x, w = self._rows(inputs, "x", "w")
        out = self._out(x.len)
        ops.conv_update(self.e, self.cache, step["layer"], x, w, out)
        return {"out": out}

    def gdn_scan(self, step: Entry, inputs: dict[str, Array]) -> dict[str, Any]:
        operands = self._rows(inputs, "q", "k", "v", "g_log", "beta")
        out = self._out(operands[0].len)
        q, k, v, g_log, beta = operands
        ops.gdn_scan(self.e, self.cache, step["layer"], q, k, v, g_log, beta, out, scale=step["scale"])
        return {"out": out}

    def attend(self, step: Entry, inputs: dict[str, Array]) -> dict[str, Any]:
        (q,) = self._rows(inputs, "q")
        il, cfg = step["layer"], self.cache.cfg
        if il >= cfg.n_layer:
            raise KitError(f"attend in layer {il} of {cfg.n_layer}")
        hk, hv = cfg.head_dims(il)
        out = self._out(q.len // max(hk, 1) * hv)
        ops.attend(self.e, self.cache, il, q, out, scale=step["scale"], window=step["window"])
        return {"out": out}

    def digest(self, step: Entry, inputs: dict[str, Array]) -> None:
        self.cache.digest()

    def snapshot(self, step: Entry, inputs: dict[str, Array]) -> None:
        made = self.cache.snapshot(self.e)
        if step["slot"] in self.snaps:
            self.snaps[step["slot"]].close()
        self.snaps[step["slot"]] = made

    def enter_round(self, step: Entry, inputs: dict[str, Array]) -> None:
        self.round = Round(self.cache, self.e, width=step["width"]).__enter__()

    def commit_device(self, step: Entry, inputs: dict[str, Array]) -> None:
        self._in_round().commit_from_device(self._keep(np.array([step["count"]], np.int32)))

    def assign(self, step: Entry, inputs: dict[str, Array]) -> None:
        if len(step["len"]) != self.cache.cfg.n_layer:
            raise KitError(f"{len(step['len'])} lengths for {self.cache.cfg.n_layer} layers")
        self.cache.pos = step["pos"]
        for layer, length in zip(self.cache.kv, step["len"], strict=True):
            if layer is not None and length >= 0:
                layer.len = length

    def fill(self, step: Entry, inputs: dict[str, Array]) -> None:
        plane = getattr(self._layer(step, step["plane"]), step["plane"])
        start, count = step["start"], step["count"]
        if start + count > plane.len:
            raise KitError(f"{step['plane']} has {plane.len} elements, not {start} + {count}")
        h = pattern(step["tag"], step["layer"], start, count)
        floats = plane.dtype == np.float32
        values = ((h >> 8).astype(np.int32) - 8_388_608).astype(np.float32) if floats else (h >> 24).astype(np.uint8)
        plane.view(start, start + count).copy_from(values)


CALLS: dict[str, Callable[[Player, Entry, dict[str, Array]], dict[str, Any] | None]] = {
    "append_kv": Player.append_kv,
    "conv_update": Player.conv_update,
    "gdn_scan": Player.gdn_scan,
    "attend": Player.attend,
    "advance": lambda p, step, _: p.cache.advance(p.e, step["n"]),
    "snapshot": Player.snapshot,
    "snapshot_into": lambda p, step, _: p.cache.snapshot_into(p.e, p._snap(step)),
    "rollback": lambda p, step, _: p.cache.rollback(p.e, p._snap(step), step["accept"]),
    "truncate": lambda p, step, _: p.cache.truncate(p.e, step["to"]),
    "reset": lambda p, step, _: p.cache.reset(p.e),
    "round": Player.enter_round,
    "commit": lambda p, step, _: p._in_round().commit(step["accept"]),
    "commit_device": Player.commit_device,
    "reject": lambda p, step, _: p._in_round().reject(),
    "settle": lambda p, step, _: p.cache.settle(p.e),
    "assign": Player.assign,
    "sync_d": lambda p, step, _: p.cache.sync_d(p.e),
    "fill": Player.fill,
    "swap": lambda p, step, _: p._layer(step, "ssm_state").swap(),
    "digest": Player.digest,
}
