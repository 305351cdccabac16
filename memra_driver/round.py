"""One speculative round as a transaction: it begins without a copy and ends with the tokens that stand.

Inside a round the convolution leaves the ring alone, the scan writes the other state buffer, and both copy their
inputs to the tape. So a reject has nothing to undo but lengths; a full accept rolls the ring and swaps the buffers; a
partial accept rebuilds the ring from the tape and runs the scan over the accepted rows again, from the state that
was kept. All three leave the bits of plain decoding.
"""

from __future__ import annotations

import operator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from memra_driver.errors import CapacityError, ConfigError, DeviceMismatch, StateError, UnsupportedError
from memra_driver.interop import operand
from memra_driver.layout import CacheState, StepOp
from memra_driver.place import Action, has_arena, has_kernels, ordinal, run_actions
from memra_driver.prepared import enqueue

_CONV, _SCAN = int(StepOp.CONV), int(StepOp.SCAN)

if TYPE_CHECKING:
    from memra_driver.cache import Cache
    from memra_driver.layers import RecurLayer


class Round:
    """`with Round(cache, e, width=4) as r:` one step of up to `width` rows through ops, then `r.commit(n)`.

    No advance inside; leaving without a commit rejects. width: at most CacheOptions.round_width. The cache
    must be ready with no step open; after device-side commits it may be unsettled. Nothing waits.
    Raises StateError, ConfigError, DeviceMismatch.
    """

    def __init__(self, cache: Cache, e: Any, *, width: int) -> None:
        width = operator.index(width)
        limit = cache.plan.options.round_width
        if not 1 <= width <= limit:
            raise ConfigError(f"a round of width {width}; the cache was built with CacheOptions(round_width={limit})")
        self.cache, self.e, self.width = cache, e, width
        self._mine = False

    @classmethod
    def begun(cls, cache: Cache) -> Round:
        """The round that is open already: a C caller began it."""
        made = cls.__new__(cls)
        made.cache, made.e, made.width, made._mine = cache, cache.devices[0], cache.as_c().contents.round_width, True
        return made

    @property
    def _open(self) -> bool:
        return self._mine and self.cache.open_round is self

    def __enter__(self) -> Self:
        cache = self.cache
        cache.check_device(self.e)
        cache.check_recording("a round")
        cache.check_state("a round", CacheState.READY, CacheState.UNSETTLED)
        if cache.step_rows:
            raise StateError(f"a round: a step of {cache.step_rows} rows is open; advance or roll back first")
        if cache.open_round is not None:
            raise StateError("a round is open already")
        cache.check_lengths()
        self._mine = True
        cache.begin_round(self, self.width)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self.reject()

    def _run(self, actions: list[Action]) -> None:
        """Runs the end of the round; where it fails half way the cache is tainted and the round over."""
        try:
            run_actions(actions, self.cache.taint)
        except BaseException:
            if self.cache.state is CacheState.TAINTED:
                self.over()
            raise

    def over(self) -> None:
        """Ends the round without touching the device: its cache was closed or tainted, or its capture given up."""
        self._mine = False
        self.cache.begin_round(None, 0)

    def commit(self, accept_len: int) -> None:
        """The first accept_len rows of the step stand; pos moves by as many."""
        accept_len, rows = operator.index(accept_len), self._rows()
        if not 0 <= accept_len <= rows:
            raise CapacityError(f"accept_len is {accept_len}; the round ran {rows} rows")
        if accept_len == 0:
            self.reject()
            return
        cache = self.cache
        in_place = cache.device_clock
        actions = self._rebuild_rings(None, accept_len, rows)
        swaps: list[RecurLayer] = []
        for il, layer in self._recurrent():
            owner = layer.owner
            actions += self._commit_layer(owner, il, layer, None, accept_len, rows, swap=not in_place)
            if accept_len == rows and not in_place and layer.step_ops & StepOp.SCAN:
                swaps.append(layer)
        end = cache.pos + accept_len
        lens = dict.fromkeys(self._took_part(), end)
        actions += cache.commit_actions(None, accept_len, rows, lens, end)
        self._run(actions)
        for layer in swaps:
            layer.swap()
        cache.drop_unsure_logits()
        self._finish(lens, end)

    def commit_from_device(self, accept_d: Any) -> None:
        """As commit, with the count in one device i32: nothing is read back, and it may be captured.

        It lies where the logits do, on the device of the last layer; the other devices of the cache get a copy, in the
        order of its stream and theirs, and it may be written again in that of its own. A count outside 0 .. rows is a
        fault of the error record and rejects. The cache is unsettled until `settle`. Raises UnsupportedError where a
        device has no kernels, DeviceMismatch where a cache spans GPUs and the host.
        """
        cache, rows = self.cache, self._rows()
        counts = self._on_each_device(accept_d)
        actions = self._rebuild_rings(counts, 0, rows)
        for il, layer in self._recurrent():
            count = counts[cache.plan.device_of(il)]
            actions += self._commit_layer(layer.owner, il, layer, count, 0, rows, swap=False)
        end = cache.pos + rows  # the most it can be; settle brings what it is
        lens = dict.fromkeys(self._took_part(), end)
        actions += cache.commit_actions(counts, 0, rows, lens, end)
        self._run(actions)
        begin = cache.pos
        cache.drop_unsure_logits()
        self._finish(lens, end)
        cache.unsettle(begin)

    def _on_each_device(self, accept_d: Any) -> list[Any]:
        """The count, for each device of the cache."""
        devices = self.cache.devices
        last = devices[self.cache.plan.placement[-1]]
        for e in devices:
            if not has_kernels(e):
                raise UnsupportedError(f"{e!r} has the seven operations only; a count cannot stay on it")
        if len({ordinal(e) < 0 for e in devices}) > 1:
            raise DeviceMismatch(f"commit_from_device: the host would wait for a count that crosses {list(devices)}")
        count = operand(accept_d, "accept_d", (1,), (np.int32,), last, rows=1, out=False, bare=True)
        return [count if e is last else e.count_from(last, count.ptr) for e in devices]

    def reject(self) -> None:
        """Nothing of the step stands: lengths return, and ring, state and pos never moved."""
        self._check_open()
        cache = self.cache
        cache.check_recording("the end of a round")
        lens = dict.fromkeys(self._took_part(), cache.pos)  # where they stood, or append had refused
        if cache.step_rows:
            self._run(cache.commit_actions(None, 0, cache.step_rows, lens, cache.pos))
        self._finish(lens, cache.pos)

    def _commit_layer(
        self, e: Any, il: int, layer: RecurLayer, count: Any, accept: int, rows: int, *, swap: bool
    ) -> list[Action]:
        """The state of one layer after the accepted rows; without `swap` always in place.

        A count that cannot be is reported once a device, by the counters: they know the position.
        """
        cache = self.cache

        def rescan() -> tuple[Any, ...]:
            _, *tape = cache.tape(il, rows)
            sizes = layer.num_v, layer.state_size, 1.0
            return *tape, state, state, None, None, count, taken, *sizes, None, 1, None, il

        if not layer.step_ops & _SCAN or (swap and accept == rows):
            return []
        state = layer.home if cache.recording is not None else layer.ssm_state  # what the scan read
        taken = rows if count is not None else accept
        fresh = {"accept_d": count, "rows": taken, "state_in": state, "state_out": state}
        return [enqueue(e, cache, ("rescan", il, rows), "gdn_scan", rescan, fresh)]

    def _rebuild_rings(self, counts: list[Any] | None, accept: int, rows: int) -> list[Action]:
        """The rings after the accepted rows: one launch for layers whose rings and tapes lie equally far apart."""
        runs: list[list[int]] = []
        for il, layer in self._recurrent():
            if not layer.step_ops & _CONV:
                continue
            if runs and self._continues(runs[-1], il):
                runs[-1].append(il)
            else:
                runs.append([il])
        return [self._rebuild_run(run, counts, accept, rows) for run in runs]

    def _continues(self, run: list[int], il: int) -> bool:
        """Whether layer il lies in the arena of the layers of a run, as far from the last as they from each other."""
        cache, last = self.cache, run[-1]
        d = cache.plan.device_of(il)
        if d != cache.plan.device_of(last) or not has_arena(cache.devices[d]):
            return False
        apart = cache.planes.apart
        names = ("tape", "conv_state")
        return len(run) == 1 or all(apart(name, last, il, d) == apart(name, run[-2], last, d) for name in names)

    def _rebuild_run(self, run: list[int], counts: list[Any] | None, accept: int, rows: int) -> Action:
        cache, first, last = self.cache, run[0], run[-1]
        d, layer, planes = cache.plan.device_of(first), cache.recur[first], cache.planes
        count = None if counts is None else counts[d]
        assert layer is not None

        def args() -> tuple[Any, ...]:
            apart = [0, 0]
            x, ring = planes["tape", first, d], layer.conv_state
            if len(run) > 1:
                x, ring = (planes.span(name, first, last, d) for name in ("tape", "conv_state"))
                apart = [planes.apart(name, first, run[1], d) for name in ("tape", "conv_state")]
            sizes = rows, layer.conv_dim, layer.d_conv, len(run)
            return x, ring, ring, count, accept, *sizes, *apart, None, first

        key, fresh = ("rebuild", first, last, len(run), rows), {"accept_d": count, "accept": accept}
        return enqueue(layer.owner, cache, key, "conv_ring_rebuild", args, fresh)

    def _recurrent(self) -> list[tuple[int, RecurLayer]]:
        return [(il, layer) for il, layer in enumerate(self.cache.recur) if layer is not None and layer.step_ops]

    def _took_part(self) -> list[int]:
        layers = enumerate(self.cache.kv)
        return [il for il, layer in layers if layer is not None and layer.step_ops & StepOp.APPEND]

    def _rows(self) -> int:
        self._check_open()
        self.cache.check_recording("the end of a round")
        rows: int = self.cache.step_rows
        if not rows:
            raise StateError("nothing to commit: the round ran no step")
        self.cache.check_length("pos", self.cache.pos)
        self.cache.check_length("pos, behind the rows of the round,", self.cache.pos + rows)
        return rows

    def _check_open(self) -> None:
        if not self._open:
            raise StateError("the round is over")

    def _finish(self, lens: dict[int, int], pos: int) -> None:
        cache = self.cache
        for il, length in lens.items():
            cache.kv_layer(il).len = length
        self.over()
        cache.end_step(pos)
        cache.drop_logits_above(pos)
