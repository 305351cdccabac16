"""What there is to compare of a cache, and how a difference is told: by plane, layer and first byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memra_driver.cache import Cache


class Difference(AssertionError):
    """What was found is not what it should be; the message says where."""


def same(what: str, found: Any, expected: Any) -> None:
    """Raises Difference unless the two are equal."""
    if found != expected:
        raise Difference(f"{what}: {_short(found)}, not {_short(expected)}")


def same_bytes(what: str, found: Any, expected: Any, row_bytes: int = 0) -> int:
    """Raises Difference with the first byte that differs; returns how many were compared.

    found, expected: bytes or arrays. row_bytes: of a token, for planes that have tokens.
    """
    a, b = (np.frombuffer(each if isinstance(each, bytes) else each.tobytes(), np.uint8) for each in (found, expected))
    if a.size != b.size:
        raise Difference(f"{what}: {a.size} bytes, not {b.size}")
    apart = np.flatnonzero(a != b)
    if apart.size:
        at = int(apart[0])
        token = f", of token {at // row_bytes}," if row_bytes else ""
        raise Difference(f"{what}: byte {at}{token} is {a[at]}, not {b[at]} ({apart.size} of {a.size} differ)")
    return int(a.size)


def near(what: str, found: Any, expected: Any, tolerance: float, *, magnitude: float | None = None) -> None:
    """Raises Difference where an element is further away than `tolerance` of the largest magnitude.

    magnitude: that of the sums before their terms cancelled; None: of what is expected.
    """
    a, b = (np.asarray(each, np.float64).reshape(-1) for each in (found, expected))
    apart = np.abs(a - b)
    allowed = tolerance * (np.abs(b).max(initial=0) if magnitude is None else magnitude)
    bad = np.flatnonzero(~(apart <= allowed))
    if bad.size:
        at = int(bad[0])
        raise Difference(
            f"{what}: element {at} is {a[at]!r}, not {b[at]!r}, with {allowed:.1e} allowed"
            f" ({bad.size} of {a.size} are off)"
        )


def first_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What differs between two mappings, "" when nothing does."""
    for key, value in before.items():
        now = after.get(key)
        if now != value:
            if isinstance(value, bytes) and isinstance(now, bytes):
                try:
                    same_bytes(key, now, value)
                except Difference as told:
                    return str(told)
            return f"{key}: {_short(now)}, not {_short(value)}"
    return ", ".join(f"{key} is new" for key in after if key not in before)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} .."


# A cache.


def scalars(cache: Cache) -> dict[str, Any]:
    """Every number of the cache that is no address."""
    numbers: dict[str, Any] = {
        name: getattr(cache, name) for name in ("pos", "max_ctx", "step_rows", "replay_to", "generation", "id", "state")
    }
    for il, layer in enumerate(cache.kv):
        if layer is not None:
            numbers[f"{il}.len"], numbers[f"{il}.ops"] = layer.len, layer.step_ops
    for il, state in enumerate(cache.recur):
        if state is not None:
            numbers[f"{il}.swaps"], numbers[f"{il}.ops"] = state.swaps, state.step_ops
    return numbers


def planes(cache: Cache) -> dict[str, Any]:
    """Every live slice by name; states by handle, as they stand now."""
    found: dict[str, Any] = {}
    for il, layer in enumerate(cache.kv):
        if layer is not None:
            found |= {f"{il}.{name}": getattr(layer, name) for name in ("k", "v", "len_d")}
    for il, state in enumerate(cache.recur):
        if state is not None:
            found |= {f"{il}.{name}": getattr(state, name) for name in ("conv_state", "ssm_state", "ssm_state_alt")}
    for il in range(cache.cfg.n_layer):
        d = cache.plan.device_of(il)
        found |= {f"device{d}.pos_d": cache.pos_d(il), f"device{d}.health": cache.health_d(il)}
    return found


def addresses(cache: Cache) -> dict[str, int]:
    """The address of every slice; the two states of a layer in ascending order, since their handles swap."""
    found = {name: plane.ptr for name, plane in planes(cache).items()}
    for il, state in enumerate(cache.recur):
        if state is not None:
            pair = sorted((state.ssm_state.ptr, state.ssm_state_alt.ptr))
            found[f"{il}.ssm_state"], found[f"{il}.ssm_state_alt"] = pair
    return found


def image(cache: Cache, *snapshots: Any) -> dict[str, Any]:
    """Everything that a refusal must leave as it is: all bytes, all scalars, the handles; snapshots too."""
    seen = scalars(cache)
    for name, plane in planes(cache).items():
        seen[f"{name}.ptr"], seen[f"{name}.bytes"] = plane.ptr, plane.to_numpy().tobytes()
    for number, snap in enumerate(snapshots):
        seen[f"snap{number}"] = (list(snap.kv_len), snap.pos, snap.generation, snap.invalid)
        for name, kept in (("conv", snap.conv), ("ssm", snap.ssm)):
            seen[f"snap{number}.{name}"] = [None if each is None else each.to_numpy().tobytes() for each in kept]
    return seen


def beside(cache: Cache) -> dict[str, Any]:
    """What `image` leaves out: every buffer by name and address, parked logits, and the tap sink."""
    logits, sink, c = cache.last_logits_dev, cache.dflash_taps, cache.as_c().contents
    seen: dict[str, Any] = {"regions": cache.regions(), "round": cache.open_round, "logits_at": cache.logits_at}
    seen["present"] = c.last_logits_dev.present, c.dflash_taps.present
    if logits is not None:
        seen["logits"] = logits.ptr, logits.to_numpy().tobytes()
    if sink is not None:
        seen["taps"] = list(sink.layer_ids), sink.hidden, sink.t, sink.buf.ptr, sink.buf.to_numpy().tobytes()
    return seen


def device_counters(cache: Cache) -> tuple[dict[int, int], set[int]]:
    """len_d by layer, and the set of pos_d over the devices."""
    lens = {il: int(layer.len_d.to_numpy()[0]) for il, layer in enumerate(cache.kv) if layer is not None}
    return lens, {int(cache.pos_d(il).to_numpy()[0]) for il in range(cache.cfg.n_layer)}
