"""Several sequences in one launch: the operations of `ops`, over a table of what each sequence owns at a layer."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from memra_driver.errors import ConfigError, DeviceMismatch, StateError
from memra_driver.kept import Kept
from memra_driver.layers import KvLayer, RecurLayer
from memra_driver.layout import CacheState, SeqC, StepOp
from memra_driver.memory import Closing
from memra_driver.place import has_kernels, run_actions
from memra_driver.rules import At

if TYPE_CHECKING:
    from memra_driver.cache import Cache

FIELDS = tuple(name for name, _ in SeqC._fields_)


class CacheBatch(Closing):
    """B sequences of different lengths that step together; pass it to `ops` in place of a cache.

    All have one configuration, one set of formats and one device, and each stands in it once. Arrays hold one
    block of T rows per sequence. The scan works in place, so nothing swaps. The table of addresses is uploaded once,
    and again only after a member has swapped its state buffers elsewhere. Raises ConfigError, DeviceMismatch,
    StateError.
    """

    open_round = None  # a round is of one sequence

    def __init__(self, caches: Sequence[Cache]) -> None:
        if not caches:
            raise ConfigError("a batch of no sequences")
        first = caches[0]
        for i, cache in enumerate(caches):
            cache.check_settled("batch")
            if any(cache is other for other in caches[:i]):
                raise ConfigError(f"sequence {i} stands in the batch already; each cache once")
            if len(cache.devices) > 1 or cache.devices[0] is not first.devices[0]:
                raise DeviceMismatch(f"sequence {i} lives on {list(cache.devices)}; a batch is for one device")
            if cache.cfg != first.cfg or cache.plan.policy != first.plan.policy:
                raise ConfigError(f"sequence {i} has another configuration or other formats than sequence 0")
            if cache.plan.options.skip_mtp_state != first.plan.options.skip_mtp_state:
                raise ConfigError(f"sequence {i} keeps other layers than sequence 0 (skip_mtp_state)")
        self.e = first.devices[0]
        if not has_kernels(self.e):
            raise ConfigError(f"{self.e!r} has the seven operations only, no kernels")
        self.members = tuple(caches)
        self.batch = len(caches)
        self.prepared = Kept()
        self.cfg, self.plan = first.cfg, first.plan
        self._table = self._upload(home=False)
        self._states = [self._state_addresses(il) for il in range(self.cfg.n_layer)]  # those in the table
        self._home = self._upload(home=True)  # what a capture uses: a launch brings every state there

    @property
    def is_closed(self) -> bool:
        return bool(self._home.is_closed)

    def close(self) -> None:
        """Frees the tables; may be called twice. The caches stay, and graphs that recorded the batch end with it."""
        self.prepared.clear()
        self._table.close()
        self._home.close()

    def advance(self, e: Any, n: int = 1) -> None:
        """Ends the step of every sequence, in one launch: pos += n. Raises as Cache.advance, for all or none."""
        n = operator.index(n)
        if e is not self.e:
            raise DeviceMismatch(f"{e!r} is not the batch's device {self.e!r}")
        self._check_members()
        for member in self.members:
            member.check_advance(n)
        if n == 0:
            return
        seqs = self.seqs(0)
        run_actions([lambda: e.launch("advance_batch", seqs, self.batch, n, None, 0)], self._taint)
        for member in self.members:
            member.advanced(n)

    # What ops ask of a cache, for all of them.

    @property
    def recording(self) -> Any:
        """The graph that is being recorded on the batch's device."""
        return self.members[0].recording

    def layer(self, e: Any, il: int, op: StepOp) -> KvLayer | RecurLayer:
        """Layer il of the first sequence: the geometry of all."""
        for i, member in enumerate(self.members):
            member.check_open(f"batch, sequence {i}")
        return self.members[0].layer(e, il, op)

    def at(self, il: int) -> At:
        """A launch finds every sequence through the table."""
        return At(None, 0, self.seqs(il), self.batch, None)

    @contextmanager
    def step(self, e: Any, il: int, op: StepOp, rows: int) -> Iterator[At]:
        """As Cache.step, for every sequence: all are checked before the launch, and all are noted after it."""
        self._check_members()
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.step_op(e, il, op, rows))
            yield self.at(il)

    def check_readable(self, what: str) -> None:
        """An operation that reads the sequences and changes nothing."""
        self._check_members()
        for member in self.members:
            member.check_readable(what)

    def seqs(self, il: int) -> Any:
        """The table of layer il: memra_seq per sequence."""
        if self.recording is not None:
            self.recording.batches.add(self)
        elif self._state_addresses(il) != self._states[il]:
            old, self._table = self._table, self._upload(home=False)
            old.close()
            self._states = [self._state_addresses(each) for each in range(self.cfg.n_layer)]
        table = self._table if self.recording is None else self._home
        row_bytes = table.len // self.cfg.n_layer
        return table.view(il * row_bytes, (il + 1) * row_bytes).cast(np.uint64)

    def _check_members(self) -> None:
        """What every call refuses, whatever it does."""
        for i, member in enumerate(self.members):
            if member.state is CacheState.PENDING_REPLAY:
                left = member.replay_to - member.pos
                raise StateError(f"batch, sequence {i}: pending replay of {left} tokens; run them first")
            if member.open_round is not None:
                raise StateError(f"batch, sequence {i}: a round is open; commit or leave it first")
            if member.step_rows != self.members[0].step_rows:
                alone = i if member.step_rows else 0
                rows = self.members[alone].step_rows
                raise StateError(
                    f"batch, sequence {alone}: a step of {rows} rows of its own is open; advance or roll back first"
                )

    def _state_addresses(self, il: int) -> list[int]:
        layers = (member.recur[il] for member in self.members)
        return [layer.ssm_state.ptr for layer in layers if layer is not None]

    def _upload(self, *, home: bool) -> Any:
        """memra_seq [n_layer][batch] on the device."""
        rows = np.zeros((self.cfg.n_layer, self.batch, len(FIELDS)), np.uint64)
        for il in range(self.cfg.n_layer):
            for b, member in enumerate(self.members):
                rows[il, b] = self._row(member, il, home=home)
        table = self.e.alloc_u8(rows.nbytes)
        table.copy_from(rows.view(np.uint8).reshape(-1))
        return table

    def _row(self, member: Cache, il: int, *, home: bool) -> list[int]:
        kv, recur = member.kv[il], member.recur[il]
        at: dict[str, int] = dict.fromkeys(FIELDS, 0)
        if kv is not None:
            at |= {"k": kv.k.ptr, "v": kv.v.ptr, "len_d": kv.len_d.ptr}
        if recur is not None:
            state = recur.home if home else recur.ssm_state
            at |= {"conv_state": recur.conv_state.ptr, "ssm_state": state.ptr}
        at |= {"pos_d": member.pos_d(il).ptr, "health": member.health_d(il).ptr, "max_ctx": member.max_ctx}
        return [at[name] for name in FIELDS]

    def _taint(self) -> None:
        for member in self.members:
            member.taint()
