"""Lets the calls of a test go through the C library: `ops`, the methods of Cache, the ends of a Round.

On caches whose devices are all `capi.CDev`s; a capture that Python has begun stays Python's. So the tests of caches
say of C what they say of Python, messages included.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from memra_driver import capi, ops
from memra_driver.cache import Cache
from memra_driver.round import Round

OPS = ("append_kv", "dequant_kv", "attend", "conv_update", "gdn_prep", "gdn_scan", "recur_step", "tap_write")
CALLS = {
    "advance": "advance", "truncate": "truncate", "reset": "reset", "sync_d": "sync", "settle": "settle",
    "snapshot_into": "snapshot_into", "rollback": "rollback", "prepare_replay": "prepare_replay",
    "park_logits": "park_logits", "digest": "digest", "health": "health", "clear_health": "clear_health",
}  # fmt: skip
WITHOUT_A_DEVICE = ("digest", "health", "clear_health")
ENDS = {"commit": "round_commit", "commit_from_device": "round_commit_from_device", "reject": "round_reject"}


def is_through_c(cache: Any) -> bool:
    return isinstance(cache, Cache) and cache.recording is None and all(type(e) is capi.CDev for e in cache.devices)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of the test."""
    for name in OPS:
        monkeypatch.setattr(ops, name, _op(getattr(ops, name), getattr(capi.ops, name)))
    for name, call in CALLS.items():
        monkeypatch.setattr(Cache, name, _method(getattr(Cache, name), getattr(capi.calls, call), name))
    for name, call in ENDS.items():
        monkeypatch.setattr(Round, name, _end(getattr(Round, name), getattr(capi.calls, call)))
    monkeypatch.setattr(Round, "__enter__", _begin(Round.__enter__))


def _op(python: Any, c: Any) -> Any:
    @functools.wraps(python)
    def op(e: Any, cache: Any, *args: Any, **named: Any) -> None:
        (c if is_through_c(cache) else python)(e, cache, *args, **named)

    return op


def _method(python: Any, c: Any, name: str) -> Any:
    """Whose device was given is Python's to check: the library is not given any."""

    @functools.wraps(python)
    def method(cache: Any, *args: Any, **named: Any) -> Any:
        if not is_through_c(cache):
            return python(cache, *args, **named)
        if name in WITHOUT_A_DEVICE:
            return c(cache)
        e, *rest = args
        if name == "park_logits":
            cache._check_last_device(e, name)
        else:
            cache.check_device(e)
        return c(cache, *rest, **named)

    return method


def _begin(python: Any) -> Any:
    @functools.wraps(python)
    def begin(opened: Any) -> Any:
        if not is_through_c(opened.cache):
            return python(opened)
        opened.cache.check_device(opened.e)
        capi.calls.round_begin(opened.cache, opened.width)
        opened.cache.begin_round(opened, opened.width)
        opened._mine = True
        return opened

    return begin


def _end(python: Any, c: Any) -> Any:
    @functools.wraps(python)
    def end(opened: Any, *args: Any) -> None:
        if is_through_c(opened.cache) and opened._open:
            c(opened.cache, *args)
        else:
            python(opened, *args)

    return end
