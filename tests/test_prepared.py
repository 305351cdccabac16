"""Operations that come again over the same slices: asked less, and the same bytes, clocks and refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, image, rows_of, tiny
from conftest import MakeDev
from standin import StandIn

from memra_driver import kernels, ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import CapacityError, ConfigError, MemraError, StateError
from memra_driver.layout import Recorder
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

pytestmark = pytest.mark.not_through_c
OPTIONS = CacheOptions(round_width=4)
RECURRENT, ATTENTION = 0, 3


class Engine:
    """Drives a cache or a batch over slices that it keeps."""

    def __init__(self, cache: Any, rows: int) -> None:
        self.cache, self.rows = cache, rows
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

    def attend(self, il: int = ATTENTION, scale: Any = 0.125) -> None:
        q, out = self.fill(il, "q", 4 * 64), self.slice(il, "attended", 4 * 64)
        ops.attend(self.e, self.cache, il, q, out, scale=scale)

    def conv(self, il: int = RECURRENT) -> None:
        w = self.slice(il, "w", 128 * 4, per_row=False)
        w.copy_from(rows_of(0, il, "w", 0, 128, 4).reshape(-1) * np.float32(0.4))
        ops.conv_update(self.e, self.cache, il, self.fill(il, "x", 128), w, self.slice(il, "conv", 128))

    def _scanned(self, il: int) -> list[Any]:
        columns = {"q": 64, "k": 64, "v": 64, "g_log": 2, "beta": 2}
        return [self.slice(il, name, each) for name, each in columns.items()]

    def prep(self, il: int = RECURRENT) -> None:
        alpha, beta_raw = (self.fill(il, name, 2) for name in ("alpha", "beta_raw"))
        dt_bias, a = (self.slice(il, name, 2, per_row=False) for name in ("dt_bias", "a"))
        a.copy_from(np.array([-2, -0.1], np.float32))
        conv_out = self.slice(il, "conv", 128)
        ops.gdn_prep(self.e, self.cache, il, conv_out, alpha, beta_raw, dt_bias, a, *self._scanned(il), eps=1e-6)

    def scan(self, il: int = RECURRENT) -> None:
        ops.gdn_scan(self.e, self.cache, il, *self._scanned(il), self.slice(il, "scanned", 64), scale=0.2)

    def run(self) -> dict[str, bytes]:
        """One step of all layers, without advance; what it put out."""
        for il in range(8):
            if self.first.kv[il] is None:
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


def test_a_batch_is_looked_at_once(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [new(cuda) for _ in range(6)]
    for i in (1, 2, 4, 5):
        Feed(caches[i], seed=i % 3).step(1)
    looked = Recheck(monkeypatch)
    with CacheBatch(caches[:3]) as known, CacheBatch(caches[3:]) as other:
        mine, theirs = Engine(known, 2), Engine(other, 2)
        for step in range(4):
            before = looked.n
            out = mine.run()
            assert (looked.n == before) == (step > 0)
            assert out == plainly(cuda, theirs.run, other)
            known.advance(cuda, 2)
            other.advance(cuda, 2)
        assert [each.digest() for each in caches[:3]] != [caches[0].digest()] * 3
        mine.close()
        theirs.close()
    for each in caches:
        each.close()


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
CALLS = ("append", "attend", "conv", "prep", "scan")


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
        engine = Engine(cache, 2)
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
    engine.close()
    del engine
    gc.collect()
    gc.disable()
    try:
        before = cuda.context.live_bytes
        del cache
        assert cuda.context.live_bytes < before
    finally:
        gc.enable()


def test_kernels_that_were_unloaded_are_loaded_anew(make_dev: MakeDev, monkeypatch: pytest.MonkeyPatch) -> None:
    e = make_dev("cuda")
    with new(e) as cache:
        engine = Engine(cache, 1)
        engine.append()
        cache.advance(e)
        e.synchronize()  # as its close says
        e.kernels.close()
        loaded: list[str] = []
        load = kernels.KernelSet._load
        monkeypatch.setattr(
            kernels.KernelSet, "_load", lambda self, kernel: (loaded.append(kernel.name), load(self, kernel))[1]
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
        for op in (engine.append, engine.conv, engine.scan):
            before = image(cache)
            standin.fail("cuLaunchKernel", 1, 719)
            with pytest.raises(MemraError, match="cuLaunchKernel"):
                op()
            assert image(cache) == before
            assert cache.state is CacheState.READY
            op()
        engine.close()


def test_an_interrupt_taints(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with new(cuda) as cache:
        engine = Engine(cache, 1)
        engine.append()
        cache.advance(cuda)
        with monkeypatch.context() as patch:
            patch.setattr(kernels.Launch, "run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.append()
        assert cache.state is CacheState.TAINTED
        with pytest.raises(StateError, match="tainted"):
            engine.append()
        engine.close()
