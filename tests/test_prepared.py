"""Operations that come again over the same slices: asked less, and the same bytes, clocks and refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, image, rows_of, tiny
from conftest import MakeDev
from standin import StandIn

from memra_driver import driver, launches, ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import CapacityError, ConfigError, DriverError, MemraError, StateError
from memra_driver.layout import Recorder
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

pytestmark = pytest.mark.not_through_c
OPTIONS = CacheOptions(round_width=4)
RECURRENT, ATTENTION, FUSED = 0, 3, 6


class Engine:
    """Drives a cache or a batch over slices that it keeps; `fused` layers take recur_step."""

    def __init__(self, cache: Any, rows: int, fused: int = FUSED) -> None:
        self.cache, self.rows, self.fused = cache, rows, fused
        first = cache.members[0]
        self.e = first.devices[0]
        self.first, self.lanes = first, len(cache.members)
        self.slices: dict[tuple[int, str], Any] = {}

    def slice(self, il: int, name: str, columns: int, per_row: bool = True) -> Any:
        if (il, name) not in self.slices:
            self.slices[il, name] = self.e.zeros(columns * (self.rows * self.lanes if per_row else 1))
        return self.slices[il, name]

    def fill(self, il: int, name: str, columns: int) -> Any:
        made = self.slice(il, name, columns)
        rows = [rows_of(b, il, name, each.pos, self.rows, columns) for b, each in enumerate(self.cache.members)]
        made.copy_from(np.concatenate(rows).reshape(-1))
        return made

    def append(self, il: int = ATTENTION) -> None:
        layer = self.first.kv[il]
        k, v = self.fill(il, "k", layer.kv_dim_k), self.fill(il, "v", layer.kv_dim_v)
        ops.append_kv(self.e, self.cache, il, k, v)

    def attend(self, il: int = ATTENTION, scale: Any = 0.125, window: Any = None) -> None:
        q, out = self.fill(il, "q", 4 * 64), self.slice(il, "attended", 4 * 64)
        ops.attend(self.e, self.cache, il, q, out, scale=scale, window=window)

    def _convolved(self, il: int) -> list[Any]:
        w = self.slice(il, "w", 128 * 4, per_row=False)
        w.copy_from(rows_of(0, il, "w", 0, 128, 4).reshape(-1) * np.float32(0.4))
        return [self.fill(il, "x", 128), w]

    def _gates(self, il: int) -> list[Any]:
        dt_bias, a = (self.slice(il, name, 2, per_row=False) for name in ("dt_bias", "a"))
        a.copy_from(np.array([-2, -0.1], np.float32))
        return [*(self.fill(il, name, 2) for name in ("alpha", "beta_raw")), dt_bias, a]

    def conv(self, il: int = RECURRENT) -> None:
        ops.conv_update(self.e, self.cache, il, *self._convolved(il), self.slice(il, "conv", 128))

    def _scanned(self, il: int) -> list[Any]:
        columns = {"q": 64, "k": 64, "v": 64, "g_log": 2, "beta": 2}
        return [self.slice(il, name, each) for name, each in columns.items()]

    def prep(self, il: int = RECURRENT) -> None:
        conv_out = self.slice(il, "conv", 128)
        ops.gdn_prep(self.e, self.cache, il, conv_out, *self._gates(il), *self._scanned(il), eps=1e-6)

    def scan(self, il: int = RECURRENT, scale: Any = 0.2) -> None:
        ops.gdn_scan(self.e, self.cache, il, *self._scanned(il), self.slice(il, "scanned", 64), scale=scale)

    def recur(self, il: int = RECURRENT) -> None:
        given = *self._convolved(il), *self._gates(il), self.slice(il, "scanned", 64)
        ops.recur_step(self.e, self.cache, il, *given, eps=1e-6, scale=0.2)

    def run(self) -> dict[str, bytes]:
        """One step of all layers, without advance; what it put out."""
        for il in range(8):
            if il == self.fused:
                self.recur(il)
            elif self.first.kv[il] is None:
                for op in (self.conv, self.prep, self.scan):
                    op(il)
            else:
                for op in (self.append, self.attend):
                    op(il)
        return {f"{il}.{name}": made.to_numpy().tobytes() for (il, name), made in self.slices.items()}

    def close(self) -> None:
        for each in self.slices.values():
            each.close()


def new(e: Any, **changes: Any) -> Cache:
    return Cache.new(e, tiny(n_head=4, **changes), 32, policy=POLICY, options=OPTIONS)


class Recheck:
    """Counts the arrays that operations look at closely."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n, whole = 0, ops.operand

        def counting(*args: Any, **named: Any) -> Any:
            self.n += 1
            return whole(*args, **named)

        monkeypatch.setattr(ops, "operand", counting)


def plainly(e: Any, do: Callable[[], Any], cache: Any) -> Any:
    """What `do` gives when nothing of the cache was prepared."""
    cache.prepared.clear()
    return do()


def words(do: Callable[[], Any]) -> tuple[type, str] | None:
    """How it was refused, None where it was not."""
    try:
        do()
    except MemraError as error:
        return type(error), str(error)
    return None


def test_the_same_slices_are_looked_at_once_and_give_the_bytes_of_new_ones(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Recheck(monkeypatch)
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Engine(known, 2), Engine(other, 2)
        for step in range(5):
            before = looked.n
            out = mine.run()
            assert (looked.n == before) == (step > 0)
            assert out == plainly(cuda, theirs.run, other)
            assert known.recur[FUSED].swaps == step + 1
            known.advance(cuda, 2)
            other.advance(cuda, 2)
            assert [x for x in image(known).items() if "ptr" not in x[0] and x[0] != "id"] == [
                x for x in image(other).items() if "ptr" not in x[0] and x[0] != "id"
            ]
        mine.close()
        theirs.close()


@pytest.mark.parametrize("accept", [0, 1, 3])
def test_in_rounds_too(cuda: Any, monkeypatch: pytest.MonkeyPatch, accept: int) -> None:
    looked = Recheck(monkeypatch)
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Engine(known, 3), Engine(other, 3)
        for step in range(4):
            with Round(known, cuda, width=3) as a, Round(other, cuda, width=3) as b:
                before = looked.n
                out = mine.run()
                assert (looked.n == before) == (step > 0)
                assert out == plainly(cuda, theirs.run, other)
                a.commit(accept)
                b.commit(accept)
        assert known.digest() == other.digest()
        mine.close()
        theirs.close()


@contextmanager
def two_batches(cuda: Any) -> Iterator[tuple[CacheBatch, CacheBatch]]:
    """Two batches of three caches that are alike, of which two have stepped."""
    caches = [new(cuda) for _ in range(6)]
    for i in (1, 2, 4, 5):
        Feed(caches[i], seed=i % 3).step(1)
    with CacheBatch(caches[:3]) as known, CacheBatch(caches[3:]) as other:
        yield known, other
    for each in caches:
        each.close()


def test_a_batch_is_looked_at_once(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Recheck(monkeypatch)
    with two_batches(cuda) as (known, other):
        mine, theirs = Engine(known, 2), Engine(other, 2)
        for step in range(4):
            before = looked.n
            out = mine.run()
            assert (looked.n == before) == (step > 0)
            assert out == plainly(cuda, theirs.run, other)
            known.advance(cuda, 2)
            other.advance(cuda, 2)
        assert [each.digest() for each in known.members] != [known.members[0].digest()] * 3
        mine.close()
        theirs.close()


def test_a_known_call_of_a_batch_is_refused_where_one_of_them_is_in_a_step_of_its_own(cuda: Any) -> None:
    with new(cuda) as a, new(cuda) as b, CacheBatch([a, b]) as batch:
        engine = Engine(batch, 1)
        engine.append()
        engine.attend()
        engine.attend()
        batch.advance(cuda)
        for each in (a, b):  # rows for attend to see
            layer = each.kv[ATTENTION]
            assert layer is not None
            layer.len = 2
        a._c.step_rows = 1
        with pytest.raises(StateError, match="sequence 0: a step of 1 rows of its own"):
            engine.attend()
        a._c.step_rows = 0
        engine.attend()
        engine.close()


def test_a_batch_whose_member_scanned_alone_finds_its_state(cuda: Any) -> None:
    caches = [new(cuda) for _ in range(4)]
    with CacheBatch(caches[:2]) as known, CacheBatch(caches[2:]) as other:
        for batch, before in ((known, lambda: None), (other, other.prepared.clear)):
            engine = Engine(batch, 1)
            for _ in range(3):
                before()
                engine.run()
                batch.advance(cuda)
                Feed(batch.members[0]).step(1)
            engine.close()
        assert [each.digest() for each in caches[:2]] == [each.digest() for each in caches[2:]]
    for each in caches:
        each.close()


def _ran_already(engine: Engine) -> None:
    for op in (engine.append, engine.conv, engine.scan):
        op()


def _step_of_three(engine: Engine) -> None:
    Feed(engine.cache).append(7, 3)


def _pending(engine: Engine) -> None:
    cache, e = engine.cache, engine.e
    with cache.snapshot(e) as snap:
        Feed(cache).step(1)
        cache.rollback(e, snap, 1)


def _scramble(kind: str, name: str) -> Callable[[Engine], None]:
    def spoil(engine: Engine) -> None:
        layer = getattr(engine.cache, kind)[ATTENTION if kind == "kv" else RECURRENT]
        getattr(layer._c, name).ptr += 256

    return spoil


def _scalar(name: str, value: int) -> Callable[[Engine], None]:
    return lambda engine: setattr(engine.cache._c, name, value)


def _length(value: int) -> Callable[[Engine], None]:
    return lambda engine: setattr(engine.cache.kv[ATTENTION]._c, "len", value)


def _closed(engine: Engine) -> None:
    for each in engine.slices.values():
        each.close()


SPOILED: dict[str, Callable[[Engine], None]] = {
    "closed operands": _closed,
    "ran already": _ran_already,
    "another step": _step_of_three,
    "pending replay": _pending,
    "tainted": lambda engine: engine.cache.taint(),
    "unsettled": lambda engine: engine.cache.set_state(CacheState.UNSETTLED),
    "closed": lambda engine: engine.cache.close(),
    "no such state": _scalar("state", 77),
    "C records": lambda engine: engine.cache.set_recorder(Recorder.C),
    "full": _scalar("pos", 31),
    "pos below 0": _scalar("pos", -3),
    "len behind": _length(1),
    "len beyond": _length(33),
    "k elsewhere": _scramble("kv", "k"),
    "v elsewhere": _scramble("kv", "v"),
    "len_d elsewhere": _scramble("kv", "len_d"),
    "ring elsewhere": _scramble("recur", "conv_state"),
    "state elsewhere": _scramble("recur", "ssm_state"),
    "other state elsewhere": _scramble("recur", "ssm_state_alt"),
    "a narrow round": lambda engine: Round(engine.cache, engine.e, width=1).__enter__() and None,
}
CALLS = ("append", "attend", "conv", "prep", "scan", "recur")


def test_a_round_and_a_plain_step_are_not_taken_for_each_other(cuda: Any) -> None:
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Engine(known, 2), Engine(other, 2)
        for _ in range(3):
            assert mine.run() == plainly(cuda, theirs.run, other)
            known.advance(cuda, 2)
            other.advance(cuda, 2)
            with Round(known, cuda, width=2) as a, Round(other, cuda, width=2) as b:
                assert mine.run() == plainly(cuda, theirs.run, other)
                a.commit(1)
                b.commit(1)
        with Round(known, cuda, width=1), pytest.raises(CapacityError, match="2 rows in a round of width 1"):
            mine.conv()
        with Round(known, cuda, width=2):
            known.kv[ATTENTION].len += 1
            with pytest.raises(StateError, match="would give up rows"):
                mine.append()
        known.kv[ATTENTION].len -= 1
        assert known.digest() == other.digest()
        mine.close()
        theirs.close()


@pytest.mark.misuse
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_refused_at_first_is_refused_later_in_the_same_words(
    cuda: Any, spoil: Callable[[Engine], None]
) -> None:
    refused = 0
    for name in CALLS:
        cache = new(cuda)
        engine = Engine(cache, 2, fused=RECURRENT if name == "recur" else FUSED)
        for _ in range(2):
            engine.run()
            cache.advance(cuda, 2)
        engine.fill = lambda il, name, _, slices=engine.slices: slices[il, name]  # type: ignore[method-assign]
        engine.slices[0, "w"].copy_from = engine.slices[0, "a"].copy_from = lambda _: None
        if name == "attend":
            cache.kv[ATTENTION].len += 2  # as if the engine had appended
        spoil(engine)
        known = dict(cache.prepared)
        cache.prepared.clear()
        plain = words(getattr(engine, name))
        if plain is not None:  # else this spoils other operations
            cache.prepared.update(known)
            assert words(getattr(engine, name)) == plain
            refused += 1
        cache.set_recorder(Recorder.NONE)
        cache.close()
        engine.close()
    assert refused


def test_a_value_of_another_type_is_not_the_one_that_was_checked(cuda: Any) -> None:
    with new(cuda) as cache:
        engine = Engine(cache, 1)
        engine.append()
        engine.attend(scale=1.0)
        with pytest.raises(ConfigError, match="scale is True"):
            engine.attend(scale=True)
        engine.close()


def test_a_window_that_is_no_whole_number_is_refused_whatever_went_before(cuda: Any) -> None:
    with new(cuda) as cache:
        engine = Engine(cache, 1)
        engine.append()
        for window in (4, 0):
            engine.attend(window=window)
            with pytest.raises(TypeError):
                engine.attend(window=float(window))
        engine.close()


def test_a_layer_number_of_another_type_is_taken_as_at_first(cuda: Any) -> None:
    with new(cuda) as cache:
        engine = Engine(cache, 1)
        engine.append()
        engine.attend()
        q, out = engine.slices[ATTENTION, "q"], engine.slices[ATTENTION, "attended"]
        with pytest.raises(TypeError):
            ops.attend(cuda, cache, float(ATTENTION), q, out, scale=0.125)  # type: ignore[arg-type]
        ops.attend(cuda, cache, np.array(ATTENTION), q, out, scale=0.125)  # type: ignore[arg-type]
        engine.close()


class Changing:
    """A scale of somebody's own, such as a tensor of one element, which may be another number at the next call."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


def test_a_scale_that_is_another_number_by_now_is_taken_as_it_is(cuda: Any) -> None:
    with new(cuda) as cache:
        engine, scale = Engine(cache, 2), Changing(0.5)  # the second row sees two keys
        engine.append()
        outs = []
        for value in (0.5, 0.5, 0.5, 2.0, 0.5, 2.0):
            scale.value = value
            for given in (scale, value):
                engine.slice(ATTENTION, "attended", 4 * 64).copy_from(np.zeros(2 * 4 * 64, np.float32))
                engine.attend(scale=given)
                outs.append(engine.slices[ATTENTION, "attended"].to_numpy().tobytes())
        assert outs[::2] == outs[1::2]
        engine.close()


def test_a_scale_of_minus_zero_is_not_that_of_zero(cuda: Any) -> None:
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Engine(known, 1), Engine(other, 1)
        for scale in (0, 0.0, -0.0, 0.0):
            for engine in (mine, theirs):
                for op in (engine.conv, engine.prep):
                    op()
            mine.scan(scale=scale)
            plainly(cuda, lambda now=scale: theirs.scan(scale=now), other)
            out, expected = (each.slices[RECURRENT, "scanned"].to_numpy() for each in (mine, theirs))
            assert out.tobytes() == expected.tobytes()
            assert np.signbit(out).any()
            known.advance(cuda)
            other.advance(cuda)
        mine.close()
        theirs.close()


@pytest.mark.parametrize("plane", ["k", "v", "len_d", "conv_state", "ssm_state", "ssm_state_alt"])
def test_a_plane_that_somebody_closed_is_not_written_to(make_dev: MakeDev, plane: str) -> None:
    e = make_dev("cuda", arena=False)
    with new(e) as cache:
        engine = Engine(cache, 1)
        engine.run()
        cache.advance(e)
        layer: Any = cache.kv[ATTENTION] if plane in ("k", "v", "len_d") else cache.recur[RECURRENT]
        getattr(layer, plane).close()
        op = engine.append if layer is cache.kv[ATTENTION] else engine.conv if plane == "conv_state" else engine.scan
        known = dict(cache.prepared)
        refused = words(lambda: plainly(e, op, cache))
        assert refused is not None
        cache.prepared.update(known)
        assert words(op) == refused
        engine.close()


def test_nor_one_of_another_sequence_of_a_batch(make_dev: MakeDev) -> None:
    e = make_dev("cuda", arena=False)
    with new(e) as first, new(e) as second, CacheBatch([first, second]) as batch:
        engine = Engine(batch, 1)
        engine.append()
        batch.advance(e)
        second.kv[ATTENTION].k.close()
        with pytest.raises(StateError, match="closed"):
            engine.append()
        engine.close()


def test_a_tape_that_somebody_closed_is_not_read(make_dev: MakeDev) -> None:
    e = make_dev("cuda", arena=False)
    with new(e) as cache:
        engine = Engine(cache, 2)
        for spoil in (False, True):
            with Round(cache, e, width=2) as round_:
                engine.run()
                if not spoil:
                    round_.commit(1)
                    continue
                cache.planes["tape", RECURRENT, 0].close()
                with pytest.raises(StateError, match="closed"):
                    round_.commit(1)
        engine.close()


def test_what_is_kept_for_later_asks_the_driver_for_nothing(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launches.LaunchPlan.launch

    def then_fail(plan: launches.LaunchPlan, stream: int, args: Any) -> None:
        launch(plan, stream, args)
        cuda.context.record_error(StateError("a finaliser failed"))

    with new(cuda) as cache:
        engine = Engine(cache, 1)
        with monkeypatch.context() as patch:
            patch.setattr(launches.LaunchPlan, "launch", then_fail)
            engine.append()  # it stands, and the next call has the error
        assert (cache.step_rows, len(cache.prepared)) == (1, 1)
        with pytest.raises(StateError, match="a finaliser failed"):
            cache.advance(cuda)
        cache.advance(cuda)
        engine.close()


def _known_append(e: Any, cache: Cache) -> Callable[[], None]:
    """One more append over slices that are known; the caller ends its step."""
    engine = Engine(cache, 1)
    layer = cache.kv[ATTENTION]
    assert layer is not None
    k, v = (engine.slice(ATTENTION, name, dim) for name, dim in (("k", layer.kv_dim_k), ("v", layer.kv_dim_v)))
    for _ in range(2):
        ops.append_kv(e, cache, ATTENTION, k, v)
        cache.end_step(0)
        layer.len = 0
    return lambda: ops.append_kv(e, cache, ATTENTION, k, v)


def _asked(standin: StandIn, call: Callable[[], None]) -> list[str]:
    standin.clear_trace()
    standin.trace_queries()
    try:
        call()
    finally:
        standin.trace_queries(False)
    return [each.name for each in standin.trace()]


def test_a_known_call_is_one_launch_and_nothing_else(cuda: Any, standin: StandIn) -> None:
    with new(cuda) as cache:
        append = _known_append(cuda, cache)
        assert _asked(standin, append) == ["cuLaunchKernelEx"]
        cache.end_step(0)
        cuda.zeros(8).close()  # something ended, but nothing of this call
        assert _asked(standin, append) == ["cuLaunchKernelEx"]


def test_the_end_of_a_step_is_one_launch_and_nothing_else(cuda: Any, standin: StandIn) -> None:
    with new(cuda) as cache:
        for rows in (1, 1, 3):
            Feed(cache).step(rows, advance=False)
            cuda.zeros(8).close()  # something ended, but nothing of this call
            calls = _asked(standin, lambda rows=rows: cache.advance(cuda, rows))
            assert (calls == ["cuLaunchKernelEx"]) == (cache.pos > 1)
            layer = cache.kv[ATTENTION]
            assert layer is not None
            assert (cache.step_rows, layer.step_ops, cache.pos_d(0).to_numpy()[0]) == (0, 0, cache.pos)


@pytest.mark.misuse
@pytest.mark.parametrize("rows", [2, 1, 0, -1])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_an_advance_that_came_through_before_is_refused_or_done_like_the_first(
    cuda: Any, spoil: Callable[[Engine], None], rows: int
) -> None:
    found = []
    for knows in (False, True):
        cache = new(cuda)
        engine = Engine(cache, 2)
        for _ in range(2):
            engine.run()
            cache.advance(cuda, 2)
        engine.run()
        spoil_known = cache._known_advance
        words(lambda engine=engine: spoil(engine))
        cache._known_advance = spoil_known if knows else None
        said = words(lambda cache=cache: cache.advance(cuda, rows))
        c = cache._c
        found.append((said, c.state, c.pos, c.step_rows, c.replay_to, [each.step_ops for each in cache.kv if each]))
        cache.set_recorder(Recorder.NONE)
        cache.close()
        engine.close()
    assert found[0] == found[1]


def test_an_advance_that_fails_moves_nothing_and_an_interrupt_taints(
    cuda: Any, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with new(cuda) as cache:
        for _ in range(2):
            Feed(cache).step(1)
        Feed(cache).step(1, advance=False)
        before = image(cache)
        standin.fail("cuLaunchKernelEx", 1, 719)
        with pytest.raises(DriverError):
            cache.advance(cuda)
        assert image(cache) == before
        with monkeypatch.context() as patch:
            patch.setattr("cuda.bindings.driver.cuLaunchKernelEx", interrupt)
            with pytest.raises(KeyboardInterrupt):
                cache.advance(cuda)
        assert cache.state is CacheState.TAINTED


@pytest.mark.parametrize("stream", [None, 1])  # 1: the legacy stream, which is that of the current context
def test_a_known_call_finds_its_context_whatever_is_current(make_dev: MakeDev, stream: int | None) -> None:
    e = make_dev("cuda", stream=stream)
    with new(e) as cache:
        append, layer = _known_append(e, cache), cache.kv[ATTENTION]
        assert layer is not None
        layer.k.copy_from(np.full(layer.k.len, 0xEE, np.uint8))
        driver.ctx_set_current(0)
        append()
        assert not layer.k.to_numpy()[: layer.k_tok_bytes].any()  # rows of zeros


def test_a_capture_records_a_known_call_like_a_new_one(cuda: Any) -> None:
    with new(cuda) as cache:
        append = _known_append(cuda, cache)
        with cuda.capture() as graph:
            append()
            cache.advance(cuda)
        with graph:
            assert [(move.cache, move.tokens, move.appended) for move in graph.moves] == [(cache, 1, {ATTENTION})]


def test_a_known_call_raises_what_a_finaliser_met(cuda: Any) -> None:
    with new(cuda) as cache:
        append = _known_append(cuda, cache)
        cuda.context.record_error(DriverError("cuMemFreeAsync(0x0)", 1, "CUDA_ERROR_INVALID_VALUE", "a finaliser's"))
        with pytest.raises(DriverError, match="a finaliser's"):
            append()
        append()


def test_what_was_prepared_keeps_no_slice_alive_and_goes_with_it(cuda: Any) -> None:
    with new(cuda) as cache:
        engine = Engine(cache, 1)
        before = cuda.context.live_bytes
        engine.append()
        assert len(cache.prepared) == 1
        engine.slices.clear()
        gc.collect()
        assert not cache.prepared
        assert cuda.context.live_bytes == before


def test_what_was_prepared_keeps_no_cache_alive(cuda: Any) -> None:
    cache = new(cuda)
    engine = Engine(cache, 1)
    engine.append()
    slices = engine.slices
    del engine
    gc.collect()
    gc.disable()
    try:
        before, prepared = cuda.context.live_bytes, weakref.ref(next(iter(cache.prepared.values())))
        del cache
        assert cuda.context.live_bytes < before
        assert prepared() is None
    finally:
        gc.enable()
    for each in slices.values():
        each.close()


def test_kernels_that_were_unloaded_are_loaded_anew(make_dev: MakeDev, monkeypatch: pytest.MonkeyPatch) -> None:
    e = make_dev("cuda")
    with new(e) as cache:
        engine = Engine(cache, 1)
        engine.append()
        cache.advance(e)
        e.synchronize()  # as its close says
        e.kernels.close()
        loaded: list[str] = []
        load = launches.KernelSet._load
        monkeypatch.setattr(
            launches.KernelSet, "_load", lambda self, kernel: (loaded.append(kernel.name), load(self, kernel))[1]
        )
        engine.append()
        cache.advance(e)
        assert loaded == ["append_kv", "set_counters"]
        engine.close()


def test_in_a_capture_nothing_is_taken_from_before_nor_kept_for_later(cuda: Any) -> None:
    with new(cuda) as cache:
        engine = Engine(cache, 1)
        engine.append()
        engine.attend()
        cache.advance(cuda)
        engine.fill = lambda il, name, _: engine.slices[il, name]  # type: ignore[method-assign]
        known = dict(cache.prepared)
        with cuda.capture() as graph:
            engine.append()
            engine.attend()
            cache.advance(cuda)
        assert cache.prepared == known
        for _ in range(3):
            graph.launch()
        assert (cache.pos, cache.kv[ATTENTION].len) == (4, 4)
        assert cache.kv[ATTENTION].len_d.to_numpy()[0] == 4
        graph.close()
        engine.close()


@pytest.mark.standin
def test_a_launch_that_fails_moves_nothing(cuda: Any, standin: StandIn) -> None:
    with new(cuda) as cache:
        engine = Engine(cache, 1)
        engine.run()
        cache.advance(cuda)
        for op in (engine.append, engine.conv, engine.scan, lambda: engine.recur(FUSED)):
            before = image(cache)
            standin.fail("cuLaunchKernelEx", 1, 719)
            with pytest.raises(MemraError, match="cuLaunchKernelEx"):
                op()
            assert image(cache) == before
            assert cache.state is CacheState.READY
            op()
        engine.close()


def test_an_interrupt_taints(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with new(cuda) as cache:
        engine = Engine(cache, 1)
        engine.append()
        cache.advance(cuda)
        with monkeypatch.context() as patch:
            patch.setattr("cuda.bindings.driver.cuLaunchKernelEx", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.append()
        assert cache.state is CacheState.TAINTED
        with pytest.raises(StateError, match="tainted"):
            engine.append()
        engine.close()
