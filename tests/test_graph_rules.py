"""What a capture and a launch refuse, and what a failure of either leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from caches import POLICY, image
from decoding import MAX_CTX, OPTIONS, TRUE, WIDTH, WRONG, Lane, Player, begin, draft, hybrid, play, player_on
from standin import StandIn

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache, CacheState
from memra_driver.errors import CapacityError, DriverError, StateError
from memra_driver.round import Round

MakeDev = Callable[..., Any]
CODE = 719  # a launch that failed


@pytest.fixture
def player(dev: Any) -> Any:
    player = player_on(dev)
    yield player
    player.close()


@pytest.fixture
def on_cuda(make_dev: MakeDev) -> Any:
    player = player_on(make_dev("cuda"))
    yield player
    player.close()


def captured_step(player: Player, rows: int = 1) -> Any:
    lane = player.lane(rows)
    with player.e.capture() as graph:
        lane.run(player.cache)
        player.cache.advance(player.e, rows)
    return graph


def captured_round(player: Player, count: Any) -> Any:
    lane = player.lane(WIDTH)
    with player.e.capture() as graph, Round(player.cache, player.e, width=WIDTH) as r:
        lane.run(player.cache)
        r.commit_from_device(count)
    return graph


def launch(player: Player, graph: Any) -> None:
    player.lane(1).fill((player.start, [TRUE]))
    graph.launch()
    player.tokens.append(TRUE)


def refused(cache: Cache, calls: Sequence[tuple[type[Exception], str, Callable[[], Any]]]) -> None:
    before = image(cache)
    for error, text, call in calls:
        with pytest.raises(error, match=text):
            call()
        assert image(cache) == before


def test_rows_above_pos_are_not_given_up_by_a_launch(player: Player) -> None:
    """A recorded step leaves len_d where it ends, so a layer that was assigned more is refused, there and at launch."""
    begin(player, 1)
    cache, e, lane = player.cache, player.e, player.lane(1)
    layer = cache.kv[3]
    graph = captured_step(player)
    assert [sorted(move.appended) for move in graph.moves] == [[1, 3]]
    layer.len = 5
    cache.sync_d(e)
    text = r"layer 3: len is 5, pos is 3: .* a recorded step would give up rows 3 \.\. 4"
    refused(cache, [(StateError, text, graph.launch), (StateError, text, lambda: cache.replayed(graph, 1))])
    with e.capture() as partial:
        lane.run(cache, [0, 1, 2])
        with pytest.raises(StateError, match=text):
            lane.run(cache, [3])
        cache.advance(e)
    assert [sorted(move.appended) for move in partial.moves] == [[1]]
    layer.len = 3
    cache.sync_d(e)
    launch(player, graph)
    player.check()
    graph.close()
    partial.close()


# Inside a capture


def test_what_a_capture_cannot_hold_is_refused_and_leaves_it_good(player: Player) -> None:
    begin(player, 1)
    cache, e = player.cache, player.e
    lane, snap, count = player.lane(1), cache.snapshot(e), e.htod_i32([1])
    wide, q, out = player.lane(8), e.zeros(8 * 128), e.zeros(8 * 128)
    k, v, row = e.zeros(64), e.zeros(64), e.zeros(16)
    twin = Cache.new(e, hybrid(), 8, policy=POLICY)
    finished = captured_step(player)
    before = image(cache, snap)
    with e.capture() as graph:
        lane.run(cache)
        for text, call in (
            ("rollback: a capture is open", lambda: cache.rollback(e, snap, 0)),
            ("snapshot: a capture is open", lambda: cache.snapshot(e)),
            ("snapshot_into: a capture is open", lambda: cache.snapshot_into(e, snap)),
            ("reset: a capture is open", lambda: cache.reset(e)),
            ("digest: a capture is open", cache.digest),
            ("sync_d: a capture is open", lambda: cache.sync_d(e)),
            ("settle: a capture is open", lambda: cache.settle(e)),
            ("truncate: a capture is open", lambda: cache.truncate(e, 0)),
            ("prepare_replay: a capture is open", lambda: cache.prepare_replay(e)),
            ("dequant_kv: a capture is open", lambda: ops.dequant_kv(e, cache, 1, 0, 1, k, v)),
            ("a capture is open", lambda: CacheBatch([twin])),
            ("a capture is open", finished.launch),
            ("the capture is still open", graph.launch),
            ("logits need 16 elements.*do it once before", lambda: cache.park_logits(e, row)),
            ("a step of 1 rows is open", lambda: Round(cache, e, width=2).__enter__()),
            ("has run append in this step", lambda: lane.run(cache, [1])),
        ):  # fmt: skip
            with pytest.raises(StateError, match=text):
                call()
        with pytest.raises(StateError, match="a capture is open on this device already"):
            e.capture().__enter__()
        cache.advance(e)
        wide.run(cache, [0, 2])
        ops.append_kv(e, cache, 1, wide.at[1, "k"], wide.at[1, "v"])
        with pytest.raises(StateError, match=r"attend needs \d+ bytes of scratch.*attend once before"):
            ops.attend(e, cache, 1, q, out, scale=1.0)
        ops.append_kv(e, cache, 3, wide.at[3, "k"], wide.at[3, "v"])
        cache.advance(e, 8)
    assert image(cache, snap) == before
    lane.fill((3, [TRUE]))
    wide.fill((4, [TRUE] * 8))
    graph.launch()
    player.tokens += [TRUE] * 9
    player.check()
    launch(player, finished)
    player.check()
    for each in (graph, finished, snap, twin):
        each.close()
    assert count.len == 1


def test_a_capture_counts_its_own_capacity(player: Player) -> None:
    """From where it began: what it writes must fit there already."""
    while len(player.tokens) < MAX_CTX - 2:
        player.step(TRUE, TRUE)
    lane, cache, e = player.lane(1), player.cache, player.e
    with e.capture() as graph:
        for _ in range(2):
            lane.run(cache)
            cache.advance(e)
        with pytest.raises(CapacityError, match="max_ctx is 64"):
            lane.run(cache)
        with pytest.raises(CapacityError, match="max_ctx is 64"):
            cache.advance(e)
    player.check()
    graph.close()


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_cache_on_two_devices_takes_part_in_no_capture(make_dev: MakeDev, kind: str) -> None:
    devices = [make_dev(kind), make_dev(kind)]
    cache = Cache.new_pp2(*devices, 2, hybrid(), MAX_CTX, policy=POLICY, options=OPTIONS)
    lane = Lane(cache, 1).fill((0, [TRUE]))
    lane.run(cache)
    cache.advance(devices[0])
    before = image(cache)
    cache.arm_taps(devices[0], [0], 1, 8)
    residual = devices[0].zeros(8)
    with devices[0].capture() as graph:
        for call in (
            lambda: lane.run(cache, [0]), lambda: lane.run(cache, [2]), lambda: cache.advance(devices[0]),
            lambda: Round(cache, devices[0], width=1).__enter__(),
            lambda: ops.tap_write(devices[0], cache, 0, residual),
        ):  # fmt: skip
            with pytest.raises(StateError, match="a capture belongs to one device; this cache spans 2"):
                call()
        with pytest.raises(StateError, match="a capture is open"):
            cache.digest()
    assert graph.moves == []
    assert image(cache) == before
    graph.close()
    lane.close()
    cache.close()


@pytest.mark.parametrize("state", ["step", "round", "pending", "closed"])
def test_a_cache_that_is_not_at_rest_takes_part_in_no_capture(player: Player, state: str) -> None:
    begin(player, 1)
    cache, e = player.cache, player.e
    lane, snap = player.lane(1).fill((3, [TRUE])), cache.snapshot(e)
    text = {"step": "was open when", "round": "was open when", "pending": "pending replay of 1", "closed": "closed"}
    r = Round(cache, e, width=1)
    if state == "step":
        lane.run(cache, [0])
    elif state == "round":
        r.__enter__()
        lane.run(cache, [0])
    elif state == "pending":
        lane.run(cache)
        cache.rollback(e, snap, 1)
    before = None if state == "closed" else image(cache)
    if state == "closed":
        cache.close()
    with e.capture() as graph:
        for call in (lambda: lane.run(cache, [1]), lambda: cache.advance(e)):
            with pytest.raises(StateError, match=text[state]):
                call()
    assert graph.moves == []
    if state != "closed":
        assert image(cache) == before
        cache.rollback(e, snap, 0)
        player.check()
    graph.close()
    snap.close()


@pytest.mark.parametrize("left", ["step", "round", "round with a step"])
def test_a_step_or_round_open_at_the_end_fails_the_capture(player: Player, left: str) -> None:
    begin(player, 1)
    lane, e = player.lane(1), player.e
    rounds = []

    def capture() -> None:
        with e.capture() as graph:
            rounds.append(Round(player.cache, e, width=2))
            if left != "step":
                rounds[0].__enter__()
            if left != "round":
                lane.run(player.cache)
            graphs.append(graph)

    graphs: list[Any] = []
    before = image(player.cache)
    with pytest.raises(StateError, match="open at the end of the capture"):
        capture()
    assert image(player.cache) == before
    with pytest.raises(StateError, match="the round is over"):
        rounds[0].commit(1)
    with pytest.raises(StateError, match="the graph is closed"):
        graphs[0].launch()
    player.step(TRUE)
    player.check()
    graph = captured_step(player)
    launch(player, graph)
    player.check()
    graph.close()


@pytest.mark.parametrize("where", ["empty", "step", "half a step", "round"])
def test_an_exception_inside_gives_the_capture_up_and_puts_the_clock_back(player: Player, where: str) -> None:
    begin(player, 1)
    play(player, WIDTH, 0)
    cache, e, lane = player.cache, player.e, player.lane(2)
    graphs: list[Any] = []

    def leave() -> None:
        with e.capture() as graph:
            graphs.append(graph)
            if where == "round":
                with Round(cache, e, width=2):
                    lane.run(cache)
                    raise LookupError
            if where != "empty":
                lane.run(cache, [0, 1] if where == "half a step" else None)
            if where == "step":
                cache.advance(e, 2)
            raise LookupError

    before = image(cache)
    with pytest.raises(LookupError):
        leave()
    assert image(cache) == before
    assert e.recording is None
    with pytest.raises(StateError, match="the graph is closed"):
        graphs[0].launch()
    player.step(TRUE)
    graph = captured_step(player)
    launch(player, graph)
    player.check()
    graph.close()


# At a launch


def test_what_a_launch_refuses_changes_nothing(player: Player) -> None:
    begin(player, 1)
    play(player, WIDTH, 0)
    cache, e = player.cache, player.e
    graph, count = captured_step(player), e.htod_i32([1])
    a_round = captured_round(player, count)
    with cache.snapshot(e) as snap:
        lane = player.lane(2).fill((3, [TRUE, TRUE]))
        lane.run(cache)
        refused(cache, [
            (StateError, "a step of 2 rows is open", graph.launch),
            (StateError, "a step of 2 rows is open", lambda: cache.prepare_replay(e)),
            (StateError, "a step of 2 rows is open", lambda: cache.replayed(graph, 1)),
        ])  # fmt: skip
        cache.advance(e, 2)
        cache.rollback(e, snap, 2)
        refused(cache, [
            (StateError, "pending replay of 2 tokens", graph.launch),
            (StateError, "pending replay of 2 tokens", a_round.launch),
            (StateError, "pending replay of 2 tokens", lambda: cache.prepare_replay(e)),
        ])  # fmt: skip
        cache.rollback(e, snap, 0)
    player.check()
    while len(player.tokens) < MAX_CTX - WIDTH + 1:
        player.step(TRUE)
    refused(cache, [(CapacityError, r"4 rows .*position 61; max_ctx is 64", a_round.launch)])
    for _ in range(3):
        launch(player, graph)
    player.check()
    refused(cache, [(CapacityError, r"1 rows .*position 64", graph.launch)])
    cache.kv[1].len = 65
    refused(cache, [(StateError, "len is 65", graph.launch)])
    cache.kv[1].len = 64
    cache.reset(e)
    player.tokens = []
    launch(player, graph)
    player.check()
    graph.close()
    a_round.close()
    graph.close()
    refused(cache, [(StateError, "the graph is closed", graph.launch)])


def test_unsettled_launches_are_checked_against_the_largest_position(player: Player) -> None:
    player.step(TRUE)
    play(player, WIDTH, 0)
    cache, e = player.cache, player.e
    count = e.htod_i32([1])
    a_round, tokens = captured_round(player, count), draft(WIDTH, 1)
    for _ in range((MAX_CTX - 1) // WIDTH):
        player.lane(WIDTH).fill((player.start, tokens))
        a_round.launch()
        player.tokens.append(TRUE)
    refused(cache, [(CapacityError, r"4 rows .*position 61", a_round.launch)])
    cache.settle(e)
    player.check()
    player.lane(WIDTH).fill((player.start, tokens))
    a_round.launch()
    player.tokens.append(TRUE)
    cache.settle(e)
    player.check()
    a_round.close()


def test_one_cache_that_cannot_keeps_all_where_they_are(player: Player) -> None:
    e, other = player.e, player_on(player.e)
    player.step(TRUE)
    lanes = [Lane(each.cache, 1) for each in (player, other)]
    for each, lane in zip((other, player), lanes, strict=True):
        lane.fill((0, [WRONG])).run(each.cache)
        each.cache.advance(e)
    begin(player, 1)
    begin(other, 1)
    with e.capture() as graph:
        for each, lane in zip((player, other), lanes, strict=True):
            lane.run(each.cache)
            each.cache.advance(e)
    with other.cache.snapshot(e) as snap:
        other.step(TRUE)
        other.cache.rollback(e, snap, 1)
        before = image(player.cache)
        refused(other.cache, [(StateError, "pending replay", graph.launch)])
        assert image(player.cache) == before
    other.cache.close()
    with pytest.raises(StateError, match="the cache is closed"):
        graph.launch()
    player.check()
    graph.close()
    for lane in lanes:
        lane.close()
    other.close()


def test_graph_and_cache_may_be_closed_in_either_order(player: Player) -> None:
    begin(player, 0)
    first, second = captured_step(player), captured_step(player)
    first.close()
    first.close()
    launch(player, second)
    player.check()
    player.cache.close()
    with pytest.raises(StateError, match="the cache is closed"):
        second.launch()
    second.close()


# What is asked of the driver


@pytest.mark.standin
@pytest.mark.parametrize("parity", [0, 1])
def test_a_launch_stamps_the_counters_and_copies_only_where_states_are_away(
    on_cuda: Player, standin: StandIn, parity: int
) -> None:
    begin(on_cuda, parity)
    graph = captured_step(on_cuda)
    begin(on_cuda, parity)
    for _ in range(2):
        on_cuda.lane(1).fill((on_cuda.start, [TRUE]))
        standin.clear_trace()
        graph.launch()
        on_cuda.tokens.append(TRUE)
        calls = [call for call in standin.trace() if call.name != "node"]
        copies = ["cuMemcpyDtoDAsync"] * parity  # of neighbours in the arena
        assert [call.name for call in calls] == [*copies, "cuLaunchKernelEx", "cuGraphLaunch"]
        on_cuda.check()
        parity = 0  # brought home
    graph.close()


@pytest.mark.standin
def test_a_recorded_step_is_kernels_and_nothing_else(on_cuda: Player, standin: StandIn) -> None:
    begin(on_cuda, 1)
    play(on_cuda, WIDTH, 0)
    lane, count = on_cuda.lane(WIDTH), on_cuda.e.htod_i32([1])
    standin.clear_trace()
    graph = captured_round(on_cuda, count)
    captured = [call for call in standin.trace() if call.captured]
    assert {call.name for call in captured} == {"cuLaunchKernelEx"}
    lane.fill((3, draft(WIDTH, 1)))
    standin.clear_trace()
    graph.launch()
    assert [call.kernel for call in standin.calls("node")] == [call.kernel for call in captured]
    graph.close()


# Failures


@pytest.mark.standin
@pytest.mark.parametrize(
    "call", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphUpload", "cuLaunchKernelEx"]
)
def test_a_capture_that_fails_puts_the_clock_back(on_cuda: Player, standin: StandIn, call: str) -> None:
    begin(on_cuda, 1)
    before = image(on_cuda.cache)
    standin.fail(call, 2 if call == "cuLaunchKernelEx" else 1, CODE)
    with pytest.raises(DriverError, match=call):
        captured_step(on_cuda)
    standin.clear_failures()
    assert on_cuda.e.recording is None
    assert image(on_cuda.cache) == before
    on_cuda.step(TRUE)
    graph = captured_step(on_cuda)
    launch(on_cuda, graph)
    on_cuda.check()
    graph.close()


def recover(player: Player, snap: Any, graph: Any) -> None:
    cache, e = player.cache, player.e
    refused(cache, [
        (StateError, "tainted", graph.launch),
        (StateError, "tainted", cache.digest),
        (StateError, "tainted", lambda: Round(cache, e, width=1).__enter__()),
    ])  # fmt: skip
    cache.rollback(e, snap, 0)
    player.tokens = [TRUE] * 3
    player.check()
    launch(player, graph)
    player.check()


@pytest.mark.standin
@pytest.mark.parametrize("call", ["cuGraphLaunch", "node"])
def test_a_launch_that_fails_taints_and_a_rollback_heals(on_cuda: Player, standin: StandIn, call: str) -> None:
    begin(on_cuda, 1)
    graph = captured_step(on_cuda)
    snap = on_cuda.cache.snapshot(on_cuda.e)
    for nth in (1, 2, 5) if call == "node" else (1,):
        on_cuda.lane(1).fill((on_cuda.start, [WRONG]))
        standin.fail(call, nth, CODE)
        with pytest.raises(DriverError, match="cuGraphLaunch"):
            graph.launch()
        assert standin.pending_failures() == 0
        assert on_cuda.cache.state is CacheState.TAINTED
        recover(on_cuda, snap, graph)
    snap.close()
    graph.close()


@pytest.mark.standin
def test_a_preparation_that_fails_changes_nothing_or_taints(on_cuda: Player, standin: StandIn) -> None:
    cache, e = on_cuda.cache, on_cuda.e
    begin(on_cuda, 1)
    graph = captured_step(on_cuda)
    snap = cache.snapshot(e)
    for call in ("cuMemcpyDtoDAsync", "cuLaunchKernelEx"):
        begin(on_cuda, 1)
        cache.snapshot_into(e, snap)
        before = image(cache)
        on_cuda.lane(1).fill((3, [TRUE]))
        standin.fail(call, 1, CODE)
        with pytest.raises(DriverError, match=call):
            graph.launch()
        if call == "cuLaunchKernelEx":  # the copy was made
            assert cache.state is CacheState.TAINTED
            recover(on_cuda, snap, graph)
        else:
            assert image(cache) == before
            launch(on_cuda, graph)
            on_cuda.check()
    snap.close()
    graph.close()


@pytest.mark.standin
def test_kernels_that_cannot_be_loaded_keep_a_capture_from_beginning(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    standin.fail("cuLibraryLoadData", 2, 200)
    with pytest.raises(DriverError, match="cuLibraryLoadData"):
        e.capture().__enter__()
    assert e.recording is None
    assert standin.calls("cuStreamBeginCapture") == []
    with e.capture() as graph:
        pass
    graph.launch()  # of nothing
    graph.close()
    np.testing.assert_array_equal(e.zeros(3).to_numpy(), np.zeros(3))


@pytest.mark.parametrize("how", ["closed", "collected", "in a cycle"])
def test_what_dies_during_a_capture_is_freed_at_its_end(make_dev: MakeDev, how: str) -> None:
    """The garbage collector chooses its moment, and a free on a capturing stream would end the capture."""
    e = make_dev("cuda")
    kept, dying, clear = e.zeros(8), e.zeros(1000), e.context.live_bytes
    cycle: list[Any] = [dying]
    cycle.append(cycle)
    with e.capture() as graph:
        if how == "closed":
            dying.close()
        elif how == "collected":
            cycle.clear()
        del cycle, dying
        gc.collect()
        e.clear_bytes(kept.ptr, kept.nbytes)
        assert e.context.live_bytes == clear
    assert e.context.live_bytes == clear - 4000
    kept.copy_from(np.ones(8, np.float32))
    graph.launch()
    np.testing.assert_array_equal(kept.to_numpy(), np.zeros(8))
    graph.close()


def test_what_dies_in_a_capture_that_is_given_up_is_freed_too(make_dev: MakeDev) -> None:
    e = make_dev("cuda")
    dying = e.zeros(1000)
    before = e.context.live_bytes

    def capture() -> None:
        with e.capture():
            dying.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture()
    assert e.context.live_bytes == before - 4000
    assert e.recording is None
