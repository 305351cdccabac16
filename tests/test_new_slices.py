"""Operations over slices that were not seen before, of lengths that were: asked less, and nothing else changes."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from caches import image
from conftest import MakeDev
from foreign import Foreign
from standin import StandIn
from test_prepared import (
    ATTENTION,
    CALLS,
    FUSED,
    RECURRENT,
    SPOILED,
    Engine,
    Recheck,
    new,
    plainly,
    two_batches,
    words,
)

from memra_driver import kept, ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import ConfigError, DriverError, MemraError, StateError
from memra_driver.layout import Recorder
from memra_driver.memory import Borrowed, CudaSlice
from memra_driver.round import Round

pytestmark = pytest.mark.not_through_c
LOOKED = 2  # steps of new slices until all lengths are known


class Renewing(Engine):
    """An engine that can go on over other slices with the same elements."""

    def renew(self) -> None:
        for key, old in self.slices.items():
            self.slices[key] = self.e.uninit(old.len)
            self.slices[key].copy_from(old.to_numpy())

    def known(self) -> None:
        """Steps until the form of every operation is there; then there are other slices."""
        for _ in range(LOOKED):
            self.run()
            self.cache.advance(self.e, self.rows)
            self.renew()

    def as_it_is(self) -> None:
        """Operations take the slices with the elements that they have."""
        self.fill = lambda il, name, _: self.slices[il, name]  # type: ignore[method-assign]
        self._convolved = lambda il: [self.slices[il, name] for name in ("x", "w")]  # type: ignore[method-assign]
        self._gates = lambda il: [  # type: ignore[method-assign]
            self.slices[il, name] for name in ("alpha", "beta_raw", "dt_bias", "a")
        ]


def alike(known: Cache, other: Cache) -> None:
    """All but addresses and the number of the cache."""
    mine, theirs = ([x for x in image(each).items() if "ptr" not in x[0] and x[0] != "id"] for each in (known, other))
    assert mine == theirs


def test_new_slices_of_known_lengths_are_not_looked_at_closely_and_give_the_same_bytes(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Recheck(monkeypatch)
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 2), Engine(other, 2)
        for step in range(6):
            before = looked.n
            out = mine.run()
            assert (looked.n == before) == (step >= LOOKED)
            assert out == plainly(cuda, theirs.run, other)
            assert known.recur[FUSED].swaps == step + 1
            known.advance(cuda, 2)
            other.advance(cuda, 2)
            alike(known, other)
            mine.renew()
        mine.close()
        theirs.close()


def test_in_rounds_too(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Recheck(monkeypatch)
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 3), Engine(other, 3)
        for step in range(5):
            with Round(known, cuda, width=3) as a, Round(other, cuda, width=3) as b:
                before = looked.n
                out = mine.run()
                assert (looked.n == before) == (step >= LOOKED)
                assert out == plainly(cuda, theirs.run, other)
                a.commit(step % 3)
                b.commit(step % 3)
            mine.renew()
        assert known.digest() == other.digest()
        mine.close()
        theirs.close()


def test_a_form_of_plain_steps_is_not_taken_in_a_round(cuda: Any) -> None:
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 2), Engine(other, 2)
        for _ in range(4):
            assert mine.run() == plainly(cuda, theirs.run, other)
            known.advance(cuda, 2)
            other.advance(cuda, 2)
            mine.renew()
            with Round(known, cuda, width=2) as a, Round(other, cuda, width=2) as b:
                assert mine.run() == plainly(cuda, theirs.run, other)
                a.commit(1)
                b.commit(1)
            mine.renew()
        alike(known, other)
        mine.close()
        theirs.close()


def test_a_batch_over_new_slices(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Recheck(monkeypatch)
    with two_batches(cuda) as (known, other):
        mine, theirs = Renewing(known, 2), Engine(other, 2)
        for step in range(5):
            before = looked.n
            out = mine.run()
            assert (looked.n == before) == (step >= LOOKED)
            assert out == plainly(cuda, theirs.run, other)
            known.advance(cuda, 2)
            other.advance(cuda, 2)
            for a, b in zip(known.members, other.members, strict=True):
                alike(a, b)
            mine.renew()
        mine.close()
        theirs.close()


def test_arrays_of_another_library_give_the_bytes_of_slices(cuda: Any) -> None:
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 2), Engine(other, 2)
        shapes = {"q": (2, 4, 64), "attended": (2, 4, 64)}
        launched = []
        monitor = cuda.launch
        cuda.launch = lambda name, *args: (launched.append(name), monitor(name, *args))[1]
        try:
            for step in range(4):
                mine.append()
                plainly(cuda, theirs.append, other)
                launched.clear()
                q, out = (
                    Foreign(mine.fill(ATTENTION, "q", 256) if name == "q" else mine.slice(ATTENTION, name, 256), shape)
                    for name, shape in shapes.items()
                )
                ops.attend(cuda, known, ATTENTION, q, out, scale=0.125)
                assert (launched == []) == (step > 0)
                plainly(cuda, theirs.attend, other)
                assert out.slice.to_numpy().tobytes() == theirs.slices[ATTENTION, "attended"].to_numpy().tobytes()
                known.advance(cuda, 2)
                other.advance(cuda, 2)
                mine.renew()
        finally:
            del cuda.launch
        alike(known, other)
        mine.close()
        theirs.close()


@pytest.mark.misuse
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_refused_at_first_is_refused_over_new_slices_in_the_same_words(
    cuda: Any, spoil: Callable[[Engine], None]
) -> None:
    refused = 0
    for name in CALLS:
        cache = new(cuda)
        engine = Renewing(cache, 2, fused=RECURRENT if name == "recur" else FUSED)
        engine.known()
        engine.as_it_is()
        if name == "attend":
            cache.kv[ATTENTION].len += 2  # as if the engine had appended
        spoil(engine)
        forms = dict(cache.prepared.forms)
        cache.prepared.clear()
        plain = words(getattr(engine, name))
        if plain is not None:  # else this spoils other operations
            cache.prepared.forms.update(forms)
            assert words(getattr(engine, name)) == plain
            refused += 1
        cache.set_recorder(Recorder.NONE)
        cache.close()
        engine.close()
    assert refused


def _part_of_its_own(engine: Renewing, name: str, other: str) -> Any:
    return engine.slices[RECURRENT, other].view(0, engine.slices[RECURRENT, name].len)


class Own(CudaSlice):
    """A slice of somebody's own kind, which says that it lies elsewhere."""

    @property
    def ptr(self) -> int:
        return 2


# What stands in the place of an input, of as many elements, or of the output.
WRONG: dict[str, Callable[[Renewing, Any], Any]] = {
    "closed": lambda engine, given: (given.close(), given)[1],
    "a closed view": lambda engine, given: (view := given.view(), view.close(), view)[2],
    "a view of a closed one": lambda engine, given: (view := given.view(), given.close(), view)[2],
    "integers": lambda engine, given: given.cast(np.int32),
    "bytes": lambda engine, given: engine.e.alloc_u8(given.len),
    "of the host": lambda engine, given: Borrowed(_Host(), given.ptr, given.len),
    "nowhere": lambda engine, given: Borrowed(given.memory, 0, given.len),
    "below 0": lambda engine, given: Borrowed(given.memory, -4096, given.len),
    "beyond the end": lambda engine, given: Borrowed(given.memory, 2**64 - 4, given.len),
    "no whole address": lambda engine, given: Borrowed(given.memory, "4096", given.len),  # type: ignore[arg-type]
    "between elements": lambda engine, given: Borrowed(given.memory, given.ptr + 2, given.len - 1),
    "misaligned": lambda engine, given: Borrowed(given.memory, given.ptr + 2, given.len),
    "one of another kind": lambda engine, given: Own(engine.e.memory, given.len),
    "too few": lambda engine, given: given.view(0, given.len - 1),
    "the ring": lambda engine, given: engine.cache.recur[RECURRENT].conv_state.view(0, given.len),
    "the state": lambda engine, given: engine.cache.recur[RECURRENT].ssm_state.view(0, given.len),
    "the other state": lambda engine, given: engine.cache.recur[RECURRENT].ssm_state_alt.view(0, given.len),
    "a list": lambda engine, given: [0.0] * given.len,
    "None": lambda engine, given: None,
}


class _Host:
    device = -1


@pytest.mark.misuse
@pytest.mark.parametrize("place", ["x", "alpha", "dt_bias", "scanned"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_slice_that_is_refused_at_first_is_refused_where_its_length_is_known(
    cuda: Any, wrong: Callable[[Renewing, Any], Any], place: str
) -> None:
    said = []
    for is_known in (False, True):
        cache = new(cuda)
        engine = Renewing(cache, 2, fused=RECURRENT)
        engine.known()
        engine.as_it_is()
        if not is_known:
            cache.prepared.clear()
        kept_alive = engine.slices[RECURRENT, place]
        try:
            engine.slices[RECURRENT, place] = wrong(engine, kept_alive)
        except MemraError:  # there are not so many elements
            pytest.skip("not to be had")
        before = {key: x for key, x in image(cache).items() if "ptr" not in key and key != "id"}
        said.append(words(engine.recur))
        after = {key: x for key, x in image(cache).items() if "ptr" not in key and key != "id"}
        assert (after == before) == (said[-1] is not None)
        cache.close()
    first, later = said
    if first is None or later is None or "0x" not in first[1]:
        assert first == later
    else:  # addresses differ
        assert (first[0], first[1].partition("0x")[0]) == (later[0], later[1].partition("0x")[0])


@pytest.mark.parametrize("pair", [("scanned", "x"), ("x", "scanned"), ("scanned", "alpha"), ("alpha", "scanned")])
def test_an_output_that_shares_memory_with_an_input_is_refused(cuda: Any, pair: tuple[str, str]) -> None:
    with new(cuda) as cache:
        engine = Renewing(cache, 1, fused=RECURRENT)
        engine.known()
        engine.as_it_is()
        name, other = pair
        whole = cuda.zeros(1024)
        sizes = [engine.slices[RECURRENT, each].len for each in pair]
        engine.slices[RECURRENT, name] = whole.view(64, 64 + sizes[0])
        last = 64 + sizes[0] - 1
        for start in (64, last, max(0, 64 - sizes[1] + 1)):
            engine.slices[RECURRENT, other] = whole.view(start, start + sizes[1])
            refused = words(engine.recur)
            assert refused is not None
            assert "share memory" in refused[1]
        for start in (last + 1, 64 - sizes[1]):
            if start >= 0:
                engine.slices[RECURRENT, other] = whole.view(start, start + sizes[1])
                engine.recur()
                cache.advance(cuda)


def test_inputs_may_be_the_same_memory(cuda: Any) -> None:
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 1, fused=RECURRENT), Engine(other, 1, fused=RECURRENT)
        for step in range(5):
            for engine in (mine, theirs):
                engine.slices.pop((ATTENTION, "v"), None)
                k = engine.slices[ATTENTION, "v"] = engine.slice(ATTENTION, "k", 128)
                gates = engine.slices[RECURRENT, "alpha"] = engine.slice(RECURRENT, "beta_raw", 2)
                if step > 2:
                    engine.slices[ATTENTION, "v"], engine.slices[RECURRENT, "alpha"] = k.view(), gates.view()
            mine.append()
            mine.recur()
            plainly(cuda, lambda: (theirs.append(), theirs.recur()), other)
            known.advance(cuda)
            other.advance(cuda)
            alike(known, other)
            mine.renew()


def test_new_slices_that_come_again_are_prepared_the_second_time(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    takes = kept.Form.takes
    monkeypatch.setattr(kept.Form, "takes", lambda form, given: (taken.append(given), takes(form, given))[1])
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 1), Engine(other, 1)
        mine.known()
        for _ in range(LOOKED):
            plainly(cuda, theirs.run, other)
            other.advance(cuda)
        counts = []
        for _ in range(4):
            taken.clear()
            assert mine.run() == plainly(cuda, theirs.run, other)
            counts.append(len(taken))
            known.advance(cuda)
            other.advance(cuda)
        first, second, third, fourth = counts
        assert first == second > 0
        assert third == fourth == 0
        mine.close()
        theirs.close()


def test_slices_that_take_turns_are_prepared_too_each_with_its_own(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 1), Engine(other, 1)
        mine.known()
        for _ in range(LOOKED):
            theirs.run()
            other.advance(cuda)
        sets = []
        for _ in range(3):
            mine.renew()
            sets.append(dict(mine.slices))
        for turn in range(5):
            for each in sets:
                mine.slices = each
                if turn == 2:
                    monkeypatch.setattr(kept.Form, "takes", None)  # nobody asks it
                assert mine.run() == plainly(cuda, theirs.run, other)
                known.advance(cuda)
                other.advance(cuda)
        alike(known, other)


def test_slices_that_are_always_new_take_no_more_memory(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 40)
    with new(cuda) as cache:
        engine = Renewing(cache, 1)
        engine.known()
        before = cuda.context.live_bytes
        most: list[int] = []
        for _ in range(25):
            engine.run()
            cache.advance(cuda)
            engine.renew()
            assert cuda.context.live_bytes == before
            most.append(max(map(len, (cache.prepared, cache.prepared.forms, cache.prepared.came))))
        assert max(most) <= 40
        engine.close()


def test_lengths_that_are_always_new_take_no_more_memory(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 4)
    with new(cuda) as cache:
        for rows in (1, 2, 3, 4, 5, 6, 7, 1, 2):
            Engine(cache, rows).append()
            cache.end_step(0)
            cache.kv[ATTENTION].len = 0
            assert len(cache.prepared.forms) <= 4


def test_slices_that_all_come_again_are_not_all_kept(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 4)
    with new(cuda) as cache:
        engine = Renewing(cache, 1)
        alive = []
        for _ in range(8):
            for _ in range(3):
                engine.append()
                cache.advance(cuda)
            alive.append(dict(engine.slices))
            assert len(cache.prepared) <= 4
            assert len(cache.prepared.forms) == 1
            engine.renew()


class Moving(CudaSlice):
    """A slice of somebody's own kind, which lies somewhere else at each call."""

    places: tuple[Any, ...] = ()
    turn = 0

    @property
    def ptr(self) -> int:
        return int(self.places[self.turn].ptr)


def test_a_slice_of_another_kind_is_asked_each_time(cuda: Any) -> None:
    with new(cuda) as cache:
        layer = cache.kv[ATTENTION]
        assert layer is not None
        v = cuda.zeros(128)
        for _ in range(2):  # of a length that is new, and of one that is known
            k = Moving(cuda.memory, 128)
            k.places = cuda.zeros(128), cuda.zeros(128)
            k.places[1].copy_from(np.full(128, 127, np.float32))
            for _ in range(4):
                for k.turn in (0, 1):
                    at = cache.pos * layer.k_tok_bytes
                    ops.append_kv(cuda, cache, ATTENTION, k, v)
                    cache.advance(cuda)
                    row = layer.k.to_numpy()[at : at + layer.k_tok_bytes]
                    assert row.any() == (k.turn == 1)


def test_inputs_that_share_memory_are_prepared_when_they_come_again(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Recheck(monkeypatch)
    with new(cuda) as cache:
        engine = Renewing(cache, 1, fused=RECURRENT)
        engine.known()
        engine.as_it_is()
        engine.slices[RECURRENT, "alpha"] = engine.slices[RECURRENT, "beta_raw"].view()
        counts = []
        for _ in range(4):
            before = looked.n
            engine.recur()
            cache.end_step(cache.pos)
            counts.append(looked.n - before)
        assert [each > 0 for each in counts] == [True, True, False, False]


def test_a_form_keeps_no_slice_and_no_cache_alive(cuda: Any) -> None:
    cache = new(cuda)
    engine = Renewing(cache, 1)
    engine.known()
    engine.run()
    forms = [weakref.ref(each.prepared) for each in cache.prepared.forms.values() if each is not None]
    assert forms
    slices = engine.slices
    del engine
    gc.collect()
    gc.disable()
    try:
        before = cuda.context.live_bytes
        nbytes = sum(each.nbytes for each in slices.values())
        slices.clear()
        assert cuda.context.live_bytes == before - nbytes
        before = cuda.context.live_bytes
        del cache
        assert cuda.context.live_bytes < before
        assert {each() for each in forms} == {None}
    finally:
        gc.enable()


@contextmanager
def over_new_slices(cuda: Any) -> Iterator[Renewing]:
    """An engine whose operations are known, and whose slices are new ones that it takes as they are."""
    with new(cuda) as cache:
        engine = Renewing(cache, 1)
        engine.known()
        engine.as_it_is()
        yield engine
        engine.close()


def test_a_capture_records_new_slices_like_any(cuda: Any) -> None:
    with over_new_slices(cuda) as engine:
        with cuda.capture() as graph:
            engine.append()
            engine.cache.advance(cuda)
        with graph:
            moved = [(move.cache, move.tokens, move.appended) for move in graph.moves]
            assert moved == [(engine.cache, 1, {ATTENTION})]
            assert {id(engine.slices[ATTENTION, name]) for name in ("k", "v")} <= set(map(id, graph.kept))


def test_a_call_over_new_slices_raises_what_a_finaliser_met(cuda: Any) -> None:
    with over_new_slices(cuda) as engine:
        cuda.context.record_error(DriverError("cuMemFreeAsync(0x0)", 1, "CUDA_ERROR_INVALID_VALUE", "a finaliser's"))
        with pytest.raises(DriverError, match="a finaliser's"):
            engine.append()
        engine.append()


@pytest.mark.standin
def test_a_launch_over_new_slices_is_one_call_and_moves_nothing_where_it_fails(cuda: Any, standin: StandIn) -> None:
    with new(cuda) as cache:
        engine = Renewing(cache, 1)
        engine.known()
        engine.as_it_is()
        for op in (engine.append, engine.conv, engine.scan, lambda: engine.recur(FUSED)):
            before = image(cache)
            standin.fail("cuLaunchKernelEx", 1, 719)
            with pytest.raises(MemraError, match="cuLaunchKernelEx"):
                op()
            assert image(cache) == before
            assert cache.state is CacheState.READY
            standin.clear_trace()
            standin.trace_queries()
            op()
            standin.trace_queries(False)
            assert [each.name for each in standin.trace()] == ["cuLaunchKernelEx"]
        engine.close()


def test_an_interrupt_taints(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with new(cuda) as cache:
        engine = Renewing(cache, 1)
        engine.known()
        engine.as_it_is()
        with monkeypatch.context() as patch:
            patch.setattr("cuda.bindings.driver.cuLaunchKernelEx", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.append()
        assert cache.state is CacheState.TAINTED
        with pytest.raises(StateError, match="tainted"):
            engine.append()
        engine.close()


def _interrupted_at(line: int, do: Callable[[], None]) -> bool:
    """Whether `do` came to so many lines of the package, behind which it was interrupted."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if "memra_driver" not in frame.f_globals.get("__name__", ""):
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.standin
@pytest.mark.parametrize("name", ["append", "conv", "recur"])
def test_an_interrupt_anywhere_taints_or_comes_before_or_behind_all_of_it(
    cuda: Any, standin: StandIn, name: str
) -> None:
    line = 0
    interrupted = True
    while interrupted:
        line += 1
        with new(cuda) as cache:
            engine = Renewing(cache, 1, fused=0)
            op = getattr(engine, name)
            for _ in range(LOOKED):
                op()
                cache.advance(cuda)
                engine.renew()
            engine.as_it_is()
            layers = cache.kv[ATTENTION], cache.recur[RECURRENT]
            standin.clear_trace()
            before = [cache.step_rows, layers[0].len, layers[1].swaps]
            interrupted = _interrupted_at(line, op)
            moved = [cache.step_rows, layers[0].len, layers[1].swaps] != before
            assert cache.state is CacheState.TAINTED or moved == bool(standin.launches())
            engine.close()
    assert line > 20


def test_a_window_without_a_hash_is_taken_as_at_first(cuda: Any) -> None:
    with new(cuda) as cache:
        engine = Renewing(cache, 1)
        engine.append()
        for _ in range(LOOKED + 1):
            engine.attend(window=4)
            engine.attend(window=np.array(4))
            engine.renew()
        engine.close()


def test_values_of_another_type_are_not_those_of_the_form(cuda: Any) -> None:
    with new(cuda) as cache:
        engine = Renewing(cache, 1)
        engine.append()
        for _ in range(LOOKED):
            engine.attend(scale=1.0)
            engine.renew()
        q, out = engine.slices[ATTENTION, "q"], engine.slices[ATTENTION, "attended"]
        with pytest.raises(ConfigError, match="scale is True"):
            engine.attend(scale=True)
        with pytest.raises(TypeError):
            engine.attend(scale=1.0, window=4.0)
        for il in (float(ATTENTION), "3"):
            with pytest.raises(TypeError):
                ops.attend(cuda, cache, il, q, out, scale=1.0)  # type: ignore[arg-type]
        ops.attend(cuda, cache, np.array(ATTENTION), q, out, scale=1.0)  # type: ignore[arg-type]
        engine.close()


def test_a_scale_of_minus_zero_is_not_that_of_zero(cuda: Any) -> None:
    with new(cuda) as known, new(cuda) as other:
        mine, theirs = Renewing(known, 1), Engine(other, 1)
        for scale in (0.0, 0.0, 0.0, -0.0):
            for engine in (mine, theirs):
                for op in (engine.conv, engine.prep):
                    op()
            mine.scan(scale=scale)
            plainly(cuda, lambda now=scale: theirs.scan(scale=now), other)
            out, expected = (each.slices[RECURRENT, "scanned"].to_numpy() for each in (mine, theirs))
            assert out.tobytes() == expected.tobytes()
            known.advance(cuda)
            other.advance(cuda)
            mine.renew()
        mine.close()
        theirs.close()


PLANES: dict[str, Callable[[Cache], Any]] = {
    "K of another layer": lambda cache: cache.kv[ATTENTION + 4].k,
    "another layer's state": lambda cache: cache.recur[RECURRENT + 4].ssm_state,
    "a state that a convolution leaves alone": lambda cache: cache.recur[RECURRENT].ssm_state_alt,
}


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("plane", PLANES.values(), ids=PLANES)
def test_an_operation_without_need_of_a_plane_that_somebody_closed_ends_without_an_error(
    make_dev: MakeDev, plane: Callable[[Cache], Any], arena: bool
) -> None:
    e = make_dev("cuda", arena=arena)
    for steps_before in range(LOOKED + 1):
        with new(e) as cache:
            engine = Renewing(cache, 1)
            for _ in range(steps_before):
                engine.append()
                engine.conv()
                cache.advance(e)
                engine.renew()
            plane(cache).close()
            for _ in range(3):
                for op in (engine.append, engine.conv):
                    op()
                cache.advance(e)
                engine.renew()
            engine.close()


def test_kernels_that_were_unloaded_are_loaded_anew(make_dev: MakeDev) -> None:
    e = make_dev("cuda")
    with new(e) as cache:
        engine = Renewing(cache, 1)
        engine.known()
        e.synchronize()
        e.kernels.close()
        for _ in range(3):
            engine.run()
            cache.advance(e)
            engine.renew()
        engine.close()


def test_a_batch_that_opens_a_step_gives_up_what_stands_on_later_rows(cuda: Any) -> None:
    found = []
    for is_known in (False, True):
        caches = [new(cuda) for _ in range(3)]
        with CacheBatch(caches) as batch:
            engine = Renewing(batch, 1)
            for _ in range(4):
                engine.run()
                batch.advance(cuda)
            later, now = caches[1].snapshot(cuda), caches[2].snapshot(cuda)
            parked = cuda.zeros(50)
            caches[0].last_logits_dev = parked
            for i, each in enumerate(caches):
                each.pos = 4 if i == 2 else 2
                for layer in filter(None, each.kv):
                    layer.len = 4
            if not is_known:
                batch.prepared.clear()
            engine.append()
            found.append(
                (
                    (later.invalid, now.invalid),
                    [each.last_logits_dev is None for each in caches],
                    [(each.step_rows, each.kv[ATTENTION].step_ops, each.kv[ATTENTION].len) for each in caches],
                )
            )
            engine.close()
            for each in (later, now, parked, *caches):
                each.close()
    assert found[0] == found[1]
    (later_is, now_is), dropped, stands = found[1]
    assert (bool(later_is), bool(now_is)) == (True, False)
    assert dropped == [True, True, True]
    assert stands == [(1, 1, 4), (1, 1, 4), (1, 1, 5)]
