"""Whole steps of a small model over fixed buffers, and what plain decoding of any tokens leaves.

Inputs are a function of layer, position and token, so a row that was rejected differs from the one that stands there
later. A `Lane` has the buffers of one step; a captured step reads them again at each launch. The `Oracle` decodes one
token at a time, keeps every past state, and holds each attention against float64. A `Player` drives a cache and knows
which tokens stand in it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from attend_runs import TOLERANCE, oracle
from caches import POLICY, device_counters, rows_of

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.config import LayerKind, ModelConfig, SsmConfig
from memra_driver.formats import FormatPolicy
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

WIDTH = 4
MAX_CTX = 64
OPTIONS = CacheOptions(round_width=WIDTH, max_rows=8)
TRUE, WRONG = 0, 1  # tokens: what stands in the end, and what a draft got wrong
HIDDEN = 8  # elements of a row of the residual stream, as far as it is tapped
SCALE = 0.125  # of attention
INPUTS = {
    "FULL": ("k", "v", "query", "residual"), "BORROWING": ("query", "residual"),
    "LINEAR": ("x", "alpha", "beta_raw", "residual"),
}  # fmt: skip
RESULTS = {"FULL": ("attended",), "BORROWING": ("attended",), "LINEAR": ("convolved", "scanned")}


def hybrid(**changes: Any) -> ModelConfig:
    """Layers [linear, full] x 2; 1 K/V head of 64 for 2 query heads; 128 channels; 2 states of 32 x 32."""
    values: dict[str, Any] = {
        "n_layer": 4, "n_head": 2, "n_head_kv": 1, "head_dim_k": 64, "head_dim_v": 64, "full_attention_interval": 2,
        "n_embd": 8, "n_vocab": 16,
        "ssm": SsmConfig(conv_kernel=4, state_size=32, time_step_rank=2, group_count=1),
    }  # fmt: skip
    return ModelConfig(**values | changes)


def kind_of(cache: Any, il: int) -> str | None:
    if cache.members[0].kv[il] is not None:
        return "FULL"
    if cache.cfg.layer_kind(il) is LayerKind.FULL and not cache.cfg.owns_kv(il):
        return "BORROWING"
    return None if cache.members[0].recur[il] is None else "LINEAR"


def columns(cfg: ModelConfig, il: int) -> dict[str, int]:
    """Elements per row of everything that a step of layer il reads, makes and leaves."""
    hk, hv = cfg.head_dims(il)
    sizes = {"k": cfg.kv_heads(il) * hk, "v": cfg.kv_heads(il) * hv}
    sizes |= {"query": cfg.heads(il) * hk, "attended": cfg.heads(il) * hv, "residual": HIDDEN}
    if cfg.ssm is not None:
        heads, states = cfg.ssm.time_step_rank, cfg.ssm.time_step_rank * cfg.ssm.state_size
        sizes |= dict.fromkeys(("x", "convolved"), cfg.ssm.conv_dim)
        sizes |= dict.fromkeys(("alpha", "beta_raw", "g_log", "beta"), heads)
        sizes |= dict.fromkeys(("sq", "sk", "sv", "scanned"), states)
    return sizes


MADE = {"FULL": (), "BORROWING": (), "LINEAR": ("sq", "sk", "sv", "g_log", "beta")}


@functools.cache
def _convolution(il: int, channels: int, taps: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng([il, channels, taps])
    return random.standard_normal((channels, taps), np.float32) * np.float32(0.4)


class Lane:
    """Buffers of one step of `rows` rows over a cache, or over a batch of sequences.

    fused: the last linear layer takes recur_step, the others its three operations one by one.
    """

    def __init__(self, cache: Any, rows: int, *, fused: bool = True) -> None:
        self.cfg, self.rows, self.n = cache.cfg, rows, len(cache.members)
        first = cache.members[0]
        self.owners = {il: first.devices[first.plan.device_of(il)] for il in range(self.cfg.n_layer)}
        self.kinds = {il: kind for il in range(self.cfg.n_layer) if (kind := kind_of(cache, il)) is not None}
        self.fused = max((il for il, kind in self.kinds.items() if kind == "LINEAR"), default=None) if fused else None
        self.at: dict[tuple[int, str], Any] = {}
        self._fixed: list[Any] = []  # what the parts are cut from, of each device
        self._inputs: list[tuple[Any, list[tuple[int, str, int]]]] = []
        for e in dict.fromkeys(self.owners.values()):
            mine = [il for il in self.kinds if self.owners[il] is e]
            self._inputs.append((self._cut(e, mine, INPUTS), [(il, n, s) for il, n, s in self._parts(mine, INPUTS)]))
            self._cut(e, mine, MADE)
            self._cut(e, mine, RESULTS)
            for il in mine:
                if self.kinds[il] == "LINEAR":
                    self._weights(e, il)

    def _parts(self, layers: Sequence[int], names: dict[str, tuple[str, ...]]) -> list[tuple[int, str, int]]:
        return [(il, name, columns(self.cfg, il)[name]) for il in layers for name in names[self.kinds[il]]]

    def _cut(self, e: Any, layers: Sequence[int], names: dict[str, tuple[str, ...]]) -> Any:
        parts = self._parts(layers, names)
        whole = e.uninit(self.n * self.rows * sum(size for _, _, size in parts))
        whole.copy_from(np.zeros(whole.len, np.float32))
        start = 0
        for il, name, size in parts:
            stop = start + self.n * self.rows * size
            self.at[il, name] = whole.view(start, stop)
            start = stop
        self._fixed.append(whole)
        return whole

    def _weights(self, e: Any, il: int) -> None:
        ssm = self.cfg.ssm
        w = _convolution(il, ssm.conv_dim, ssm.conv_kernel)
        heads = ssm.time_step_rank
        for name, array in (
            ("w", w), ("dt_bias", np.linspace(-1, 1, heads, dtype=np.float32)),
            ("a", np.linspace(-2, -0.1, heads, dtype=np.float32)),
        ):  # fmt: skip
            self.at[il, name] = e.uninit(array.size)
            self.at[il, name].copy_from(np.ascontiguousarray(array).reshape(-1))
            self._fixed.append(self.at[il, name])

    def fill(self, *sequences: tuple[int, Sequence[int]]) -> Lane:
        """Sets the inputs: of each sequence the position that the step starts at, and its tokens."""
        assert len(sequences) == self.n
        assert {len(tokens) for _, tokens in sequences} == {self.rows}
        for whole, parts in self._inputs:
            flat = [
                np.concatenate([
                    rows_of(token, il, name, start + r, 1, size)[0]
                    for start, tokens in sequences
                    for r, token in enumerate(tokens)
                ])
                for il, name, size in parts
            ]  # fmt: skip
            if whole.len:
                whole.copy_from(np.concatenate(flat))
        return self

    def run(self, cache: Any, layers: Sequence[int] | None = None, taps: Sequence[int] = (), calls: Any = ops) -> None:
        """Enqueues the operations of the step, and after the layers of `taps` the tap; the step stays open.

        calls: ops, or what has the same functions.
        """
        for il in self.kinds if layers is None else layers:
            e = self.owners[il]
            at = {name: part for (layer, name), part in self.at.items() if layer == il}
            gates = [at[name] for name in ("alpha", "beta_raw", "dt_bias", "a") if name in at]
            if il == self.fused:
                calls.recur_step(e, cache, il, at["x"], at["w"], *gates, at["scanned"], eps=1e-6, scale=0.2)
            elif self.kinds[il] == "LINEAR":
                calls.conv_update(e, cache, il, at["x"], at["w"], at["convolved"])
                made = [at[name] for name in MADE["LINEAR"]]
                calls.gdn_prep(e, cache, il, at["convolved"], *gates, *made, eps=1e-6)
                calls.gdn_scan(e, cache, il, *made, at["scanned"], scale=0.2)
            else:
                if self.kinds[il] == "FULL":
                    calls.append_kv(e, cache, il, at["k"], at["v"])
                calls.attend(e, cache, il, at["query"], at["attended"], scale=SCALE)
            if il in taps:
                calls.tap_write(e, cache, il, at["residual"])

    def close(self) -> None:
        """Frees the buffers."""
        for each in self._fixed:
            each.close()

    def results(self, b: int = 0) -> list[dict[tuple[int, str], bytes]]:
        """What each row of sequence b has put out, by layer and name."""
        names = [(il, name) for il, kind in self.kinds.items() for name in RESULTS[kind]]
        names = [(il, name) for il, name in names if il != self.fused or name != "convolved"]  # nobody made that
        arrays = {key: self.at[key].to_numpy().reshape(self.n, self.rows, -1)[b] for key in names}
        return [{key: array[r].tobytes() for key, array in arrays.items()} for r in range(self.rows)]


@dataclass
class Moment:
    """A plainly decoded cache after some tokens, and what the last of them put out."""

    digest: str
    planes: dict[tuple[int, str], np.ndarray[Any, Any]]
    results: dict[tuple[int, str], bytes]


_moments: dict[tuple[str, str], dict[tuple[int, ...], Moment]] = {}


Reads = Mapping[int, tuple[int, int]]  # by attending layer: the layer whose K/V it reads, and its window (0: all)


class Oracle:
    """Decodes one token at a time, and remembers every state by the tokens that led to it.

    What a layer attends to is compared with NumPy in float64; without `reads` each reads all of its own K/V.
    """

    def __init__(
        self, e: Any, cfg: ModelConfig | None = None, policy: FormatPolicy = POLICY, reads: Reads | None = None
    ) -> None:
        cfg = hybrid() if cfg is None else cfg
        self.e = e
        self.cache = Cache.new(e, cfg, MAX_CTX, policy=policy)
        self.lane = Lane(self.cache, 1, fused=False)
        attending = [il for il, kind in self.lane.kinds.items() if kind != "LINEAR"]
        self.reads = {il: (il, 0) for il in attending} if reads is None else reads
        assert [*self.reads] == attending
        # Kinds of device differ in the last bits of expf.
        self.moments = _moments.setdefault((type(e).__name__, repr((cfg, policy))), {})
        self.stands: tuple[int, ...] | None = ()
        if () not in self.moments:
            self.moments[()] = self._keep({})

    def at(self, tokens: Sequence[int]) -> Moment:
        """The state after these tokens."""
        tokens = tuple(tokens)
        known = next(n for n in range(len(tokens), -1, -1) if tokens[:n] in self.moments)
        for n in range(known, len(tokens)):
            if self.stands != tokens[:n]:
                self._load(n, self.moments[tokens[:n]])
            self.lane.fill((n, tokens[n : n + 1])).run(self.cache)
            self.cache.advance(self.e)
            self.stands = tokens[: n + 1]
            self.moments[self.stands] = self._keep(self.lane.results()[0])
            for il in self.reads:
                self.check_attended(self.stands, il, self.moments[self.stands].results[il, "attended"])
        return self.moments[tokens]

    def check_attended(self, tokens: Sequence[int], il: int, attended: bytes, window: int | None = None) -> None:
        """`attended` of the last of `tokens` is near float64 attention over the rows that stood then."""
        source, width = self.reads[il]
        layer, planes, rows = self.cache.kv[source], self.at(tokens).planes, len(tokens)
        assert layer is not None
        expected = oracle({
            "q": rows_of(tokens[-1], il, "query", rows - 1, 1, columns(self.cache.cfg, il)["query"]),
            "k": planes[source, "k"][: rows * layer.k_tok_bytes], "v": planes[source, "v"][: rows * layer.v_tok_bytes],
            "k_tok_bytes": layer.k_tok_bytes, "v_tok_bytes": layer.v_tok_bytes, "k_format": layer.k_format,
            "v_format": layer.v_format, "head_dim_k": layer.head_dim_k, "head_dim_v": layer.head_dim_v, "rows": 1,
            "slot": rows - 1, "n_head": self.cache.cfg.heads(il), "n_head_kv": layer.n_head_kv, "scale": SCALE,
            "window": width if window is None else window,
        })  # fmt: skip
        apart = np.abs(np.frombuffer(attended, np.float32).reshape(expected.shape) - expected).max()
        assert apart <= TOLERANCE * np.abs(expected).max(), f"layer {il} at position {rows - 1}: {apart}"

    def close(self) -> None:
        """Frees the cache; what it has seen stays known."""
        self.cache.close()
        self.lane.close()

    def _planes(self) -> dict[tuple[int, str], Any]:
        found = {}
        for il, layer in enumerate(self.cache.kv):
            if layer is not None:
                found |= {(il, "k"): layer.k, (il, "v"): layer.v}
        for il, state in enumerate(self.cache.recur):
            if state is not None:
                found |= {(il, "conv"): state.conv_state, (il, "ssm"): state.ssm_state}
        return found

    def _keep(self, results: dict[tuple[int, str], bytes]) -> Moment:
        return Moment(self.cache.digest(), {key: p.to_numpy() for key, p in self._planes().items()}, results)

    def _load(self, n: int, moment: Moment) -> None:
        for key, plane in self._planes().items():
            if plane.len:
                plane.copy_from(moment.planes[key])
        self.cache.pos = n
        for layer in filter(None, self.cache.kv):
            layer.len = n
        self.cache.sync_d(self.e)


class Player:
    """A cache and the tokens that stand in it. With a replay pending, `tokens` goes to its end."""

    def __init__(self, cache: Cache, oracle: Oracle) -> None:
        self.cache, self.oracle, self.e = cache, oracle, cache.devices[0]
        self.last = cache.devices[cache.plan.placement[-1]]  # where logits are, and counts
        self.tokens: list[int] = []
        self._lanes: dict[int, Lane] = {}

    def lane(self, rows: int) -> Lane:
        if rows not in self._lanes:
            self._lanes[rows] = Lane(self.cache, rows)
        return self._lanes[rows]

    @property
    def start(self) -> int:
        """Where the next row stands, whether the host knows it or not."""
        return self.cache.pos if self.cache.state is CacheState.PENDING_REPLAY else len(self.tokens)

    def run(self, tokens: Sequence[int], layers: Sequence[int] | None = None, taps: Sequence[int] = ()) -> Lane:
        """The operations of a step of these tokens, without its end."""
        lane = self.lane(len(tokens)).fill((self.start, tokens))
        lane.run(self.cache, layers, taps)
        return lane

    def step(self, *tokens: int, taps: Sequence[int] = ()) -> None:
        """A whole step; what each row put out is what plain decoding puts out there."""
        start = self.start
        lane = self.run(tokens, taps=taps)
        self.cache.advance(self.e, len(tokens))
        before = self.tokens[:start]
        self.tokens[start : start + len(tokens)] = tokens
        self.check_results(lane, before, tokens)

    def close(self) -> None:
        """Frees the cache, the oracle's and all buffers."""
        self.cache.close()
        self.oracle.close()
        for lane in self._lanes.values():
            lane.close()

    def check_results(self, lane: Lane, before: Sequence[int], tokens: Sequence[int]) -> None:
        found = lane.results()
        for r in range(len(tokens)):
            want = self.oracle.at((*before, *tokens[: r + 1])).results
            assert found[r] == {key: want[key] for key in found[r]}, f"row {r} of {len(tokens)}"

    def check(self) -> None:
        """Every clock stands behind the last token, and the bytes are those of plain decoding."""
        cache, n = self.cache, len(self.tokens)
        assert (cache.state, cache.pos, cache.step_rows, cache.open_round) == (CacheState.READY, n, 0, None)
        lens = {il: n for il, layer in enumerate(cache.kv) if layer is not None}
        assert {il: layer.len for il, layer in enumerate(cache.kv) if layer is not None} == lens
        assert device_counters(cache) == (lens, {n})
        assert cache.digest() == self.oracle.at(self.tokens).digest

    def check_pending(self, lens: dict[int, int]) -> None:
        """K/V stands at `lens`, ring and state at pos, as plain decoding left them there."""
        cache, n = self.cache, len(self.tokens)
        assert (cache.state, cache.replay_to, cache.step_rows) == (CacheState.PENDING_REPLAY, n, 0)
        assert {il: layer.len for il, layer in enumerate(cache.kv) if layer is not None} == lens
        assert device_counters(cache) == (lens, {cache.pos})
        written, begun = self.oracle.at(self.tokens).planes, self.oracle.at(self.tokens[: cache.pos]).planes
        for il, layer in enumerate(cache.kv):
            if layer is not None:
                for name, tok_bytes in (("k", layer.k_tok_bytes), ("v", layer.v_tok_bytes)):
                    stands = getattr(layer, name).to_numpy()[: lens[il] * tok_bytes]
                    assert stands.tobytes() == written[il, name][: lens[il] * tok_bytes].tobytes(), (il, name)
        for il, state in enumerate(cache.recur):
            if state is not None:
                assert state.conv_state.to_numpy().tobytes() == begun[il, "conv"].tobytes(), il
                assert state.ssm_state.to_numpy().tobytes() == begun[il, "ssm"].tobytes(), il


def player_on(
    e: Any, cfg: ModelConfig | None = None, options: CacheOptions = OPTIONS, policy: FormatPolicy = POLICY, *,
    reads: Reads | None = None, max_ctx: int = MAX_CTX,
) -> Player:  # fmt: skip
    cfg = hybrid() if cfg is None else cfg
    return Player(Cache.new(e, cfg, max_ctx, policy=policy, options=options), Oracle(e, cfg, policy, reads))


def draft(rows: int, accept: int) -> list[int]:
    """Tokens of a round of which the first `accept` are right."""
    return [TRUE] * accept + [WRONG] * (rows - accept)


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
