"""Pipeline stages: where the fence between devices stands, by MEMRA_PP_STAGES, _SPLITS and _SPLIT.

A fence is (0, c1, .., n_layers): stage s owns the layers fence[s] .. fence[s + 1] - 1. The
environment is read at every call. Settings that make no sense are never an error: a warning, once
each, and one stage.
"""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

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
