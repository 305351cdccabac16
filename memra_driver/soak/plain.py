"""What plain decoding of any tokens leaves: one token at a time, on the same device, held against formulas in float64.

What a step writes to K/V and to the ring must be the formulas' own bytes; states and what the operations return must be
near them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memra_driver import oracle
from memra_driver.cache import Cache
from memra_driver.check.attend import ATTEND_TOLERANCE
from memra_driver.check.case import TOLERANCE
from memra_driver.config import ModelConfig
from memra_driver.formats import FormatPolicy
from memra_driver.oracle_formats import NAMES, encode
from memra_driver.soak.lane import SCALE, Array, Lane, columns, rows_of
from memra_driver.soak.look import near, same_bytes

Tokens = tuple[int, ...]
Reads = Mapping[int, tuple[int, int]]  # by attending layer: the layer whose K/V it reads, and its window (0: all)


@dataclass
class Moment:
    """A plainly decoded cache after some tokens, and what the last of them put out. K/V: the rows that stand."""

    digest: str
    planes: dict[tuple[int, str], Array]
    results: dict[tuple[int, str], bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of its planes."""
        return sum(plane.nbytes for plane in self.planes.values())


class Oracle:
    """Decodes one token at a time, and remembers the states by the tokens that led to them.

    reads: what each layer attends to; without it each reads all of its own K/V. moments: what is remembered already,
    by another oracle of the same model on the same kind of device. most_bytes: how much is remembered; beyond that all
    of it is forgotten, and decoded again when somebody asks. salt: of the lanes. compared: bytes that were held against
    the formulas, or by others against what is remembered.
    """

    def __init__(
        self, e: Any, cfg: ModelConfig, policy: FormatPolicy, max_ctx: int, reads: Reads | None = None, *,
        moments: dict[Tokens, Moment] | None = None, most_bytes: int = 1 << 26, salt: int = 0,
    ) -> None:  # fmt: skip
        self.e, self.most_bytes, self.salt, self.compared = e, most_bytes, salt, 0
        self.cache = Cache.new(e, cfg, max_ctx, policy=policy)
        self.lane = Lane(self.cache, 1, fused=False, salt=salt)
        attending = [il for il, kind in self.lane.kinds.items() if kind != "LINEAR"]
        self.reads = {il: (il, 0) for il in attending} if reads is None else reads
        if [*self.reads] != attending:
            raise ValueError(f"reads names layers {[*self.reads]}; {attending} attend")
        self.moments = {} if moments is None else moments
        self._bytes = sum(moment.nbytes for moment in self.moments.values())
        self.stands: Tokens | None = ()
        if () not in self.moments:
            self._remember((), {})

    def at(self, tokens: Sequence[int]) -> Moment:
        """The state after these tokens."""
        tokens = tuple(tokens)
        known = next(n for n in range(len(tokens), -1, -1) if tokens[:n] in self.moments)
        moment = self.moments[tokens[:known]]
        for n in range(known, len(tokens)):
            if self.stands != tokens[:n]:
                self._load(n, moment)
            self.stands = None
            self.lane.fill((n, tokens[n : n + 1])).run(self.cache)
            self.cache.advance(self.e)
            before, moment = moment, self._remember(tokens[: n + 1], self.lane.results()[0])
            self.stands = tokens[: n + 1]
            self._check(self.stands, before, moment)
        return moment

    def decoded(self, tokens: Sequence[int], il: int, start: int, stop: int) -> tuple[Array, Array]:
        """K and V of rows start .. stop-1 of layer il, f32."""
        planes, layer = self.at(tokens).planes, self.cache.kv_layer(il)
        step = {f"{side}_tok_bytes": getattr(layer, f"{side}_tok_bytes") for side in "kv"}
        step |= {f"{side}_format": getattr(layer, f"{side}_format") for side in "kv"}
        step |= {side: planes[il, side] for side in "kv"}
        k, v = (
            oracle.rows_of(step, side, start, stop, dim).astype(np.float32)
            for side, dim in (("k", layer.kv_dim_k), ("v", layer.kv_dim_v))
        )
        return k, v

    def close(self) -> None:
        """Frees the cache; what it has seen stays known."""
        self.cache.close()
        self.lane.close()

    def _remember(self, tokens: Tokens, results: dict[tuple[int, str], bytes]) -> Moment:
        if self._bytes > self.most_bytes:
            empty = self.moments[()]
            self.moments.clear()
            self.moments[()], self._bytes = empty, empty.nbytes
        n = len(tokens)
        found = {}
        for il, layer in enumerate(self.cache.kv):
            if layer is not None:
                found[il, "k"] = layer.k.view(0, n * layer.k_tok_bytes).to_numpy()
                found[il, "v"] = layer.v.view(0, n * layer.v_tok_bytes).to_numpy()
        for il, state in enumerate(self.cache.recur):
            if state is not None:
                found |= {(il, "conv"): state.conv_state.to_numpy(), (il, "ssm"): state.ssm_state.to_numpy()}
        made = self.moments[tokens] = Moment(self.cache.digest(), found, results)
        self._bytes += made.nbytes
        return made

    def _load(self, n: int, moment: Moment) -> None:
        """Brings the cache to a state that it had."""
        for il, layer in enumerate(self.cache.kv):
            if layer is not None:
                layer.k.view(0, n * layer.k_tok_bytes).copy_from(moment.planes[il, "k"])
                layer.v.view(0, n * layer.v_tok_bytes).copy_from(moment.planes[il, "v"])
                layer.len = n
        for il, state in enumerate(self.cache.recur):
            if state is not None:
                state.conv_state.copy_from(moment.planes[il, "conv"])
                state.ssm_state.copy_from(moment.planes[il, "ssm"])
        self.cache.pos = n
        self.cache.sync_d(self.e)

    # Against the formulas.

    def _check(self, tokens: Tokens, before: Moment, after: Moment) -> None:
        """One step of the last token leaves what the formulas make of what stood before."""
        for il, kind in self.lane.kinds.items():
            if kind == "LINEAR":
                self._check_state(tokens, il, before, after)
            elif kind == "FULL":
                self._check_rows(tokens, il, before, after)
        for il in self.reads:
            self.check_attended(tokens, il, after.results[il, "attended"])

    def _input(self, tokens: Tokens, il: int, name: str) -> Array:
        return rows_of(self.salt + tokens[-1], il, name, len(tokens) - 1, 1, columns(self.cache.cfg, il)[name]).reshape(
            -1
        )

    def _check_rows(self, tokens: Tokens, il: int, before: Moment, after: Moment) -> None:
        layer = self.cache.kv[il]
        assert layer is not None
        for side, form, tok_bytes in (
            ("k", layer.k_format, layer.k_tok_bytes), ("v", layer.v_format, layer.v_tok_bytes)
        ):  # fmt: skip
            rows = self._input(tokens, il, side).astype(np.float64).reshape(-1, 32)
            wanted = np.concatenate([before.planes[il, side], encode(NAMES[form], rows).reshape(-1)])
            what = f"plainly decoded, {len(tokens)} tokens: layer {il} {side}"
            self.compared += same_bytes(what, after.planes[il, side], wanted, tok_bytes)

    def _check_state(self, tokens: Tokens, il: int, before: Moment, after: Moment) -> None:
        ssm = self.cache.cfg.ssm
        assert ssm is not None
        what = f"plainly decoded, {len(tokens)} tokens: layer {il}"
        heads, size, channels = ssm.time_step_rank, ssm.state_size, ssm.conv_dim
        step: dict[str, Any] = {
            "rows": 1, "slot": len(tokens) - 1, "pos_d": None, "health": None, "tape": None, "accept_d": None,
            "layer": il, "conv_dim": channels, "d_conv": ssm.conv_kernel, "num_k": ssm.group_count, "num_v": heads,
            "state_size": size, "eps": 1e-6, "x": self._input(tokens, il, "x"), "w": self.lane.constant(il, "w"),
            "conv_state": before.planes[il, "conv"].copy(), "out": np.empty(channels),
        }  # fmt: skip
        oracle.conv_update(step)
        self.compared += same_bytes(f"{what} conv_state", after.planes[il, "conv"], step["conv_state"])
        near(f"{what} convolved", _floats(after.results[il, "convolved"]), step["out"], TOLERANCE)
        step |= {"conv_out": step["out"], "out": np.empty(heads * size)}
        step |= {name: self._input(tokens, il, name) for name in ("alpha", "beta_raw")}
        step |= {name: self.lane.constant(il, name) for name in ("dt_bias", "a")}
        step |= {name: np.empty(heads * size) for name in "qkv"} | {n: np.empty(heads) for n in ("g_log", "beta")}
        oracle.gdn_prep(step)
        step |= {"state_in": before.planes[il, "ssm"], "state_out": np.empty(heads * size * size), "scale": 0.2}
        oracle.gdn_scan(step)
        state, q = step["state_out"].reshape(heads, size, size), step["q"].reshape(heads, 1, size)
        summed = float(0.2 * (np.abs(state) * np.abs(q)).sum(axis=2).max())
        near(f"{what} scanned", _floats(after.results[il, "scanned"]), step["out"], TOLERANCE, magnitude=summed)
        near(f"{what} ssm_state", after.planes[il, "ssm"], step["state_out"], TOLERANCE)
        self.compared += sum(len(after.results[il, name]) for name in ("convolved", "scanned"))
        self.compared += after.planes[il, "ssm"].nbytes

    def check_attended(self, tokens: Sequence[int], il: int, attended: bytes, window: int | None = None) -> None:
        """`attended` of the last of `tokens` is near float64 attention over the rows that stood then."""
        tokens = tuple(tokens)
        source, width = self.reads[il]
        layer, rows = self.cache.kv[source], self.at(tokens).planes
        assert layer is not None
        step = {
            "k": rows[source, "k"], "v": rows[source, "v"], "k_tok_bytes": layer.k_tok_bytes,
            "v_tok_bytes": layer.v_tok_bytes, "k_format": layer.k_format, "v_format": layer.v_format,
            "head_dim_k": layer.head_dim_k, "head_dim_v": layer.head_dim_v, "n_head_kv": layer.n_head_kv,
            "scale": SCALE, "window": width if window is None else window,
        }  # fmt: skip
        q = self._input(tokens, il, "query").astype(np.float64).reshape(layer.n_head_kv, -1, layer.head_dim_k)
        wanted = oracle.attended(step, q, len(tokens) - 1)
        near(f"layer {il} attended at position {len(tokens) - 1}", _floats(attended), wanted, ATTEND_TOLERANCE)
        self.compared += len(attended)


def _floats(raw: bytes) -> Array:
    return np.frombuffer(raw, np.float32)
