"""Pipeline stages: where the fence between devices stands.

A fence is (0, c1, .., n_layers): stage s owns the layers fence[s] .. fence[s + 1] - 1. `pp_cuts` reads it from the
environment, MEMRA_PP_STAGES, _SPLITS and _SPLIT, at every call; settings that make no sense are never an error: a
warning, once each, and one stage. `balance` proposes one by what the caches of the layers take.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from memra_driver.config import ModelConfig
from memra_driver.errors import ConfigError, OutOfMemory
from memra_driver.formats import FormatPolicy
from memra_driver.plan import ALIGN_BYTES, CacheOptions, CachePlan

_LOG = logging.getLogger("memra_driver")
_WHOLE = re.compile(r"[0-9]{1,18}", re.ASCII)
_warned: set[str] = set()


def _warn_once(problem: str) -> None:
    if problem not in _warned:
        _warned.add(problem)
        _LOG.warning("%s; the model stays on one stage", problem)


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


def pp_cuts(n_layers: int, environ: Mapping[str, str] | None = None) -> tuple[int, ...] | None:
    """The fence of `n_layers` trunk layers, or None for one stage. Never raises.

    MEMRA_PP_STAGES = N opens the door: unset, empty, 0 and 1 keep it shut. The cuts are
    MEMRA_PP_SPLITS ("c1,..,cN-1"), else MEMRA_PP_SPLIT (N = 2 only), else s * n_layers // N.
    """
    environ = os.environ if environ is None else environ
    stages_text = environ.get("MEMRA_PP_STAGES", "").strip()
    if stages_text in ("", "0", "1"):
        return None
    stages = _whole(stages_text)
    if stages is None or not 2 <= stages <= n_layers:
        _warn_once(f"MEMRA_PP_STAGES={stages_text!r} is not a number in 2 .. {n_layers}")
        return None
    if splits := environ.get("MEMRA_PP_SPLITS", "").strip():
        source = f"MEMRA_PP_SPLITS={splits!r}"
        cuts = [_whole(part) for part in splits.split(",")]
        if len(cuts) != stages - 1:
            _warn_once(f"{source} has {len(cuts)} cuts, {stages} stages need {stages - 1}")
            return None
    elif split := environ.get("MEMRA_PP_SPLIT", "").strip():
        source = f"MEMRA_PP_SPLIT={split!r}"
        if stages != 2:
            _warn_once(f"{source} is for two stages, not {stages}; use MEMRA_PP_SPLITS")
            return None
        cuts = [_whole(split)]
    else:
        source = "the even split"
        cuts = [stage * n_layers // stages for stage in range(1, stages)]
    fence = [0, *(cut for cut in cuts if cut is not None), n_layers]
    if None in cuts or any(a >= b for a, b in pairwise(fence)):
        _warn_once(f"{source} is not {stages - 1} layer numbers that rise strictly between 0 and {n_layers}")
        return None
    return tuple(fence)


def pp2_split(n_layers: int, environ: Mapping[str, str] | None = None) -> int | None:
    """The cut between two stages; None unless pp_cuts gives exactly two. Never raises."""
    fence = pp_cuts(n_layers, environ)
    return fence[1] if fence is not None and len(fence) == 3 else None


def stage_of(fence: Sequence[int], il: int) -> int:
    """The stage that owns layer il. Layers past the fence's end (MTP blocks) belong to the last stage."""
    return bisect_right(fence, il, 1, len(fence) - 1) - 1


def balance(
    cfg: ModelConfig, max_ctx: int, n: int, free_bytes: Sequence[int] | None = None, *,
    policy: FormatPolicy | None = None, options: CacheOptions | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """The fence of n stages that evens out the bytes of a cache of max_ctx tokens, each stage on a device of its own.

    The fullest stage is as empty as can be; among the fences that reach this, the rest is as even as can be. With
    free_bytes, what each stage's device has, "full" is the share of that. Trailing MTP layers count with the last
    stage. A stage may be without attention or without recurrent layers; no cut parts a layer from one whose K/V it
    reads, nor the layers of reserve_taps. policy, options: as for CachePlan.

    Raises ConfigError (n, free_bytes, or no such cut), OutOfMemory where a stage cannot fit whatever the fence.
    """
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= cfg.n_trunk:
        raise ConfigError(f"{n!r} stages; a trunk of {cfg.n_trunk} layers has 1 .. {cfg.n_trunk}")
    rooms = None if free_bytes is None else _sizes(free_bytes, n)
    plan = CachePlan(cfg, max_ctx, policy, options)
    sizes, cuts = _StageBytes(plan), [0, *_cuts(plan), cfg.n_trunk]
    if len(cuts) - 1 < n:
        raise ConfigError(f"{n} stages: this model can be cut at {cuts[1:-1]}, for {len(cuts) - 1} stages at most")

    def load(stage: int, begin: int, end: int) -> Fraction:
        size = sizes.of(begin, end)
        if rooms is None:
            return Fraction(size)
        return Fraction(size, rooms[stage]) if rooms[stage] else Fraction(2**64)

    fullest = _least(cuts, n, load, worst=True, limit=None)
    assert fullest is not None  # there are cuts enough
    if rooms is not None and fullest[0] > 1:
        total = sizes.of(0, cfg.n_trunk)
        raise OutOfMemory(
            f"no fence of {n} stages fits: the cache takes {total} bytes, the devices have {rooms} free;"
            " lower max_ctx, choose smaller formats, or take more devices"
        )
    evenest = _least(cuts, n, load, worst=False, limit=fullest[0])
    assert evenest is not None  # the one before is among them
    return (*evenest[1][:-1], cfg.n_layer)


def _sizes(free_bytes: Sequence[int], n: int) -> list[int]:
    """n sizes as Python's own integers, which never overflow."""
    try:
        sizes = [operator.index(each) for each in free_bytes]
    except TypeError:
        sizes = []
    if len(sizes) != n or min(sizes) < 0:
        raise ConfigError(f"free_bytes {free_bytes!r}: {n} stages take as many whole numbers, none below 0")
    return sizes


class _StageBytes:
    """Arena bytes of a stage that holds the layers begin .. end - 1, and the MTP layers where it ends the trunk."""

    def __init__(self, plan: CachePlan) -> None:
        self._n_trunk = plan.cfg.n_trunk
        self._layers, self._counters = [0] * plan.cfg.n_layer, [0] * plan.cfg.n_layer
        self._everywhere = self._last = 0
        for row in plan.planes:
            if row.dtype == "i32":
                if row.layer is not None:
                    self._counters[row.layer] += row.bytes
            elif row.layer is not None:
                self._layers[row.layer] += _aligned(row.bytes)
            elif row.group == "logits":
                self._last += _aligned(row.bytes)
            elif row.group == "taps" and plan.options.reserve_taps is not None:
                self._layers[plan.options.reserve_taps[0][0]] += _aligned(row.bytes)
            else:
                self._everywhere += _aligned(row.bytes)
        self._pos_bytes = sum(row.bytes for row in plan.planes if row.dtype == "i32" and row.layer is None)

    def of(self, begin: int, end: int) -> int:
        """The bytes that CachePlan.per_device has for it."""
        last = end == self._n_trunk
        mine = slice(begin, len(self._layers) if last else end)
        counters = _aligned(sum(self._counters[mine]) + self._pos_bytes)
        return sum(self._layers[mine]) + counters + self._everywhere + (self._last if last else 0)


def _aligned(n_bytes: int) -> int:
    return n_bytes + -n_bytes % ALIGN_BYTES


def _cuts(plan: CachePlan) -> list[int]:
    """Where the trunk may be cut."""
    taps = plan.options.reserve_taps[0] if plan.options.reserve_taps is not None else ()
    together = [(il, taps[0]) for il in taps]
    for il in range(plan.cfg.n_layer):
        source = plan.kv_source(il)
        if source is not None:
            together.append((il, source))
    return [cut for cut in range(1, plan.cfg.n_trunk) if not any(min(pair) < cut <= max(pair) for pair in together)]


def _least(
    cuts: Sequence[int], n: int, load: Callable[[int, int, int], Fraction], *, worst: bool, limit: Fraction | None
) -> tuple[Fraction, tuple[int, ...]] | None:
    """The choice of n stages between `cuts` with the least load: of the fullest stage, or the sum of the squares.

    limit: no stage is fuller. Returns the load and the fence, or None where there is no such choice.
    """
    best: list[tuple[Fraction, tuple[int, ...]] | None] = [(Fraction(0), (0,)), *[None] * (len(cuts) - 1)]
    for stage in range(n):
        following: list[tuple[Fraction, tuple[int, ...]] | None] = [None] * len(cuts)
        for i, end in enumerate(cuts):
            for before in best[:i]:
                if before is None:
                    continue
                mine = load(stage, before[1][-1], end)
                if limit is not None and mine > limit:
                    continue
                sums = max(before[0], mine) if worst else before[0] + mine * mine
                known = following[i]
                if known is None or sums < known[0]:
                    following[i] = (sums, (*before[1], end))
        best = following
    return best[-1]
