"""Runs that let one driver call of an operation fail, then the next, until none is left.

After each failure the error names the call, and either nothing has changed (every byte, length and handle), or the
cache says that it is tainted and is whole again after a rollback or a reset. At the end the operation runs undisturbed
and leaves what it would have left, nothing is leaked, and the other cache of the device goes on.
"""

from __future__ import annotations

import collections
import gc
import re
import traceback
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import pytest
import tally
from caches import POLICY, attention_only, device_counters, image, put, rows_of, sequence
from cuda.bindings import driver as cu
from decoding import OPTIONS, TRUE, Oracle, Player, hybrid
from standin import ENDS, Call, StandIn

from memra_driver import driver, ops
from memra_driver.cache import Cache, CacheState
from memra_driver.capi.library import Library
from memra_driver.errors import DriverError, StateError
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

CODE = 719  # what the calls fail with: a launch that failed
ATTENTION = attention_only(2, n_head=2, n_vocab=16)
Run = Callable[[], Any]
# What the calls that failed were made for: functions of this package, those of the C library by name.
reached: set[CodeType | str] = set()


class Quick:
    """`ops` without attention, which changes nothing in a cache."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **named: None) if name == "attend" else getattr(ops, name)


class Stage:
    """Devices, and on them a cache of 5 tokens with a snapshot at 3, and another cache of 2 that has to go on."""

    def __init__(
        self, make_dev: Callable[..., Any], standin: StandIn, *, devices: int = 1, cfg: Any = None, arena: bool = True,
        options: CacheOptions = OPTIONS,
    ) -> None:  # fmt: skip
        self.standin, self.cfg, self.options = standin, hybrid() if cfg is None else cfg, options
        self.devices = [make_dev("cuda", ordinal, arena=arena) for ordinal in range(devices)]
        self.e = self.devices[0]
        for e in self.devices:
            e.kernels.load_all()
        self.oracle = Oracle(self.e, self.cfg)
        self.oracle.at([TRUE] * 6)
        for e in self.devices:
            e.attend_scratch(1 << 18)
        self.other = self._player(2)
        self.keep: list[Any] = []
        self.mates: list[Player] = []
        self.begin()
        self.cache.rollback(self.e, self.snap, 0)  # the device has what it needs for it
        self.end()

    def _player(self, tokens: int) -> Player:
        split = self.cfg.n_layer // 2
        if len(self.devices) == 1:
            cache = Cache.new(self.e, self.cfg, 32, policy=POLICY, options=self.options)
        else:
            cache = Cache.new_pp2(*self.devices, split, self.cfg, 32, policy=POLICY, options=self.options)
        player = Player(cache, self.oracle)
        self.step(player, tokens)
        return player

    def step(self, player: Player, rows: int) -> None:
        """A whole step, but for attention."""
        player.lane(rows).fill((player.start, [TRUE] * rows)).run(player.cache, calls=Quick())
        player.cache.advance(self.e, rows)
        player.tokens[player.cache.pos - rows :] = [TRUE] * rows

    def begin(self) -> None:
        """A fresh cache."""
        self.player = self._player(3)
        self.cache = self.player.cache
        self.snap = self.cache.snapshot(self.e)
        self.step(self.player, 2)

    def end(self) -> None:
        """Closes what `begin` and the operation made."""
        for each in (*self.keep, self.snap, *(p.cache for p in (self.player, *self.mates))):
            each.close()
        for lane in (lane for p in (self.player, *self.mates) for lane in p._lanes.values()):
            lane.close()
        self.keep, self.mates = [], []

    def close(self) -> None:
        self.step(self.other, 1)
        self.other.check()
        self.other.cache.close()
        for lane in self.other._lanes.values():
            lane.close()
        self.oracle.close()

    # For operations.

    def mate(self) -> Cache:
        """A third cache, of 2 tokens, that the operation works on as well."""
        self.mates.append(self._player(2))
        return self.mates[-1].cache

    def lane(self, rows: int, token: int = TRUE) -> Any:
        return self.player.lane(rows).fill((self.player.start, [token] * rows))

    def op(self, name: str, il: int, rows: int = 2, cache: Any = None, lane: Any = None) -> Run:
        """One operation of a step, over buffers that are filled."""
        lane = self.lane(rows) if lane is None else lane
        at = {name: part for (layer, name), part in lane.at.items() if layer == il}
        e, cache = lane.owners[il], self.cache if cache is None else cache
        made = [at.get(each) for each in ("sq", "sk", "sv", "g_log", "beta")]
        gates = [at.get(each) for each in ("alpha", "beta_raw", "dt_bias", "a")]
        calls: dict[str, Run] = {
            "append_kv": lambda: ops.append_kv(e, cache, il, at["k"], at["v"]),
            "attend": lambda: ops.attend(e, cache, il, at["query"], at["attended"], scale=0.125),
            "conv_update": lambda: ops.conv_update(e, cache, il, at["x"], at["w"], at["convolved"]),
            "gdn_prep": lambda: ops.gdn_prep(e, cache, il, at["convolved"], *gates, *made, eps=1e-6),
            "gdn_scan": lambda: ops.gdn_scan(e, cache, il, *made, at["scanned"], scale=0.2),
            "recur_step": lambda: ops.recur_step(
                e, cache, il, at["x"], at["w"], *gates, at["scanned"], eps=1e-6, scale=0.2
            ),
            "tap_write": lambda: ops.tap_write(e, cache, il, at["residual"]),
        }
        return calls[name]

    def round(self, rows: int = 3, token: int = TRUE) -> Round:
        """An open round whose step has run."""
        r = Round(self.cache, self.e, width=4).__enter__()
        self.lane(rows, token).run(self.cache, calls=Quick())
        return r

    def row(self, values: int = 16) -> Any:
        made = put(self.devices[-1], rows_of(0, 0, "logits", 0, 1, values))
        self.keep.append(made)
        return made

    # What is compared.

    def look(self) -> dict[str, Any]:
        """All that a failure may not change."""
        cache = self.cache
        seen = image(cache, self.snap) | {f"other {k}": v for k, v in image(self.other.cache).items()}
        for mate in self.mates:
            seen |= {f"mate {k}": v for k, v in image(mate.cache).items()}
        seen["beside"] = cache.logits_at, cache.last_logits_dev is None, cache.open_round is None
        sink = cache.dflash_taps
        seen["taps"] = None if sink is None else (sink.layer_ids, sink.t, sink.buf.ptr)
        return seen

    def outcome(self) -> dict[str, Any]:
        """What the operation leaves, comparable between caches."""
        cache = self.cache
        seen: dict[str, Any] = {"state": cache.state, "pos": cache.pos, "rows": cache.step_rows}
        if cache.state is CacheState.CLOSED:
            return seen
        counters = None if cache.state is CacheState.UNSETTLED else device_counters(cache)
        return seen | {"sequence": sequence(cache), "counters": counters, "logits": cache.logits_at}

    def check_tainted(self) -> None:
        """It refuses what would trust its bytes, and a rollback that accepts nothing, or a reset, makes it whole."""
        cache, e = self.cache, self.e
        refused: tuple[Run, ...] = (
            cache.digest, lambda: cache.snapshot(e), lambda: cache.advance(e), lambda: cache.sync_d(e),
            self.op("append_kv", 1), lambda: cache.prepare_replay(e), Round(cache, e, width=1).__enter__,
        )  # fmt: skip
        for call in refused:
            with pytest.raises(StateError, match="tainted"):
                call()
        cache.report()
        tokens = 3
        if self.snap.invalid or self.snap.generation != cache.generation:
            cache.reset(e)
            tokens = 0
        else:
            cache.rollback(e, self.snap, 0)
        self.player.tokens = [TRUE] * tokens
        self.step(self.player, 1)
        self.player.check()


def _free(ptr: int) -> None:
    status, context = cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT, ptr)
    if not int(status):  # else it has gone with its context
        cu.cuCtxSetCurrent(context)
        driver.ctx_synchronize()  # the free that failed had an order, this one has none
        driver.mem_free(ptr)


FREES: dict[str, Callable[[Call], Any]] = {
    "cuMemFreeAsync": lambda call: _free(call.src),
    "cuMemFree": lambda call: _free(call.src),
    "cuMemFreeHost": lambda call: driver.mem_free_host(call.src),
    "cuStreamDestroy": lambda call: driver.stream_destroy(call.stream),
    "cuEventDestroy": lambda call: driver.event_destroy(call.src),
    "cuGraphDestroy": lambda call: driver.graph_destroy(call.src),
    "cuGraphExecDestroy": lambda call: driver.graph_exec_destroy(call.src),
    "cuLibraryUnload": lambda call: driver.library_unload(call.src),
    "cuDevicePrimaryCtxRelease": lambda call: driver.device_primary_ctx_release(call.device),
}


class Sweep:
    """Lets the calls of a run fail in turn."""

    def __init__(self, standin: StandIn) -> None:
        self.standin = standin
        standin.clear_trace()
        self.balance: collections.Counter[str] = collections.Counter()

    def calls_of(self, run: Run) -> list[str]:
        """Runs undisturbed; returns the names of all driver calls that this takes, those that only ask included."""
        gc.collect()  # what earlier runs have left is freed now, not among these calls
        self._look_away()
        run()
        return [call.name for call in self.standin.trace()]

    def fail(self, nth: int, calls: Sequence[str], run: Run) -> DriverError:
        """Runs with its nth driver call failing; the error must be that of this call."""
        self._look_away()
        name = "cuGraphLaunch" if calls[nth - 1] == "node" else calls[nth - 1]
        self.standin.fail("*", nth, CODE)
        try:
            run()
        except DriverError as error:
            told = error
        else:
            raise AssertionError(f"call {nth} of {calls} failed, and nobody was told")
        finally:
            left = self.standin.pending_failures()
            self.standin.clear_failures()
        assert left == 0
        assert told.code == CODE, told
        assert re.match(rf"{name}\w*\(", told.call), f"call {nth} of {calls} failed; the error is of {told.call}"
        tally.add("fault points")
        for frame, _ in traceback.walk_tb(told.__traceback__):
            if frame.f_code is Library.call.__code__:
                reached.add(frame.f_locals["name"])
                assert frame.f_locals["self"].ask("memra_last_driver_code") == CODE, frame.f_locals["name"]
            else:
                reached.add(frame.f_code)
        self._give_back()
        return told.with_traceback(None)

    def _give_back(self) -> None:
        """What the call that failed was to free."""
        failed = self.standin.failed(CODE)
        if failed.name in FREES:
            try:
                FREES[failed.name](failed)
            except DriverError:  # it has gone with its context
                self.balance[ENDS.get(failed.name, "")] -= 1

    def made_something(self) -> bool:
        """Whether the last run has allocated or uploaded what its device or cache keeps for the next one."""
        kept = self.standin.calls("cuMemAlloc", "cuMemAllocAsync", "cuMemcpyHtoDAsync")
        return any(not call.code for call in kept)

    def check_balance(self) -> None:
        """What was made since the sweep began was given back."""
        self._look_away()
        assert not +self.balance, +self.balance

    def _look_away(self) -> None:
        driver.ctx_set_current(0)  # or the calls would depend on what ran before
        self.balance.update(self.standin.balance())
        self.standin.clear_trace()


# What changes where states are brought home; the sequence is the same.
PREPARED = (".swaps", ".ssm_state.ptr", ".ssm_state_alt.ptr", ".ssm_state_alt.bytes")


def left(standin: StandIn) -> tuple[int, int]:
    """Allocations, and graphs, once what nobody holds any more is gone."""
    gc.collect()
    return standin.live_count(), standin.live_graphs()


def sweep(
    stage: Stage, prepare: Callable[[Stage], Run], *, several: bool = False, most: int | None = None
) -> None:
    """Fails every driver call of what `prepare` returns, one at a time, or the first `most` of them.

    several: it works on several caches one after the other; each by itself may be prepared or tainted.
    """
    standin = stage.standin
    standin.trace_queries()
    each = Sweep(standin)
    for _ in range(2):  # the first time the device makes scratch and tables, which it keeps
        stage.begin()
        calls = each.calls_of(prepare(stage))
        expected = stage.outcome()
        stage.end()
    held = left(standin)
    run: Run | None = None
    for nth in range(1, len(calls[:most]) + 1):
        if run is None:
            stage.begin()
            run = prepare(stage)
        before = stage.look()
        each.fail(nth, calls, run)
        again = several or each.made_something()
        if stage.cache.state is CacheState.TAINTED:
            stage.check_tainted()
            again = True
        else:
            changed = [key for key, value in stage.look().items() if before[key] != value]
            if several and any(p.cache.state is CacheState.TAINTED for p in stage.mates):
                changed, again = [key for key in changed if not key.startswith("mate")], True
            if stage.snap.invalid:  # a snapshot_into that failed half way
                changed = [key for key in changed if not key.startswith("snap0")]
                stage.cache.snapshot_into(stage.e, stage.snap)
                again = True
            changed = [key for key in changed if not (several and key.endswith(PREPARED))]
            assert not changed, f"call {nth} of {calls}: {changed}"
        if again:
            stage.end()
            run = None
    if run is None:
        stage.begin()
        run = prepare(stage)
    run()
    assert stage.outcome() == expected
    stage.end()
    assert left(standin) == held, "left behind"
    each.check_balance()
    standin.trace_queries(False)
