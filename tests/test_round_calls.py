"""What a round asks of the driver, and what a call that fails leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from caches import image
from decoding import TRUE, WIDTH, Player, begin, draft, play, player_on
from standin import StandIn

from memra_driver.cache import CacheState
from memra_driver.errors import DriverError
from memra_driver.round import Round

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]
CODE = 719  # a launch that failed
ROWS = 3
REBUILD, SCAN, COUNTERS = "conv_ring_rebuild", "gdn_scan", "commit_counters"
ENDS = {
    "reject": (0, ["set_counters"]),
    "partial": (1, [REBUILD, SCAN, SCAN, "set_counters"]),
    "full": (3, [REBUILD, "set_counters"]),
    "device": (2, [REBUILD, SCAN, SCAN, COUNTERS]),
    "unsettled reject": (0, [COUNTERS]),
    "unsettled partial": (1, [REBUILD, SCAN, SCAN, COUNTERS]),
}


@pytest.fixture
def player(make_dev: MakeDev) -> Any:
    player = player_on(make_dev("cuda"))
    yield player
    player.close()


def end(player: Player, r: Round, name: str, count: Any) -> None:
    if name == "device":
        r.commit_from_device(count)
    else:
        r.commit(ENDS[name][0])


def prepare(player: Player, name: str, parity: int = 1) -> None:
    """Three tokens in, on the clock that the end is named for."""
    begin(player, parity)
    if name.startswith("unsettled"):
        play(player, 1, 0, "device")


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("name", ENDS)
def test_a_round_copies_nothing_and_ends_with_one_launch_for_all_rings_and_one_a_state(
    player: Player, standin: StandIn, name: str, parity: int
) -> None:
    prepare(player, name, parity)
    lane = player.lane(ROWS).fill((3, draft(ROWS, 0)))
    count = player.e.htod_i32([2])
    standin.clear_trace()
    with Round(player.cache, player.e, width=WIDTH) as r:
        assert standin.trace() == []  # a beginning asks for nothing
        lane.run(player.cache)
        assert {call.name for call in standin.trace()} <= {"cuLaunchKernelEx", "cuMemAllocAsync"}  # attention's scratch
        standin.clear_trace()
        end(player, r, name, count)
        assert [(call.name, call.stream) for call in standin.trace()] == [
            ("cuLaunchKernelEx", player.e.stream.handle)
        ] * len(ENDS[name][1])
        assert sorted(standin.launches()) == sorted(ENDS[name][1])
        standin.clear_trace()
    assert standin.trace() == []  # nor does leaving


@pytest.mark.parametrize("accept", [1, ROWS])
def test_rings_that_are_allocations_of_their_own_take_a_launch_each(
    make_dev: MakeDev, standin: StandIn, accept: int
) -> None:
    player = player_on(make_dev("cuda", arena=False))
    begin(player, 1)
    standin.clear_trace()
    play(player, ROWS, accept)
    assert standin.launches().count(REBUILD) == 2
    player.check()
    player.close()


def test_a_round_without_a_step_asks_for_nothing(player: Player, standin: StandIn) -> None:
    player.e.kernels.load_all()
    standin.clear_trace()
    with Round(player.cache, player.e, width=WIDTH):
        pass
    assert standin.trace() == []
    player.check()


def test_a_round_allocates_nothing_and_waits_for_nothing(player: Player, standin: StandIn) -> None:
    begin(player, 0)
    for accept in (0, 1, ROWS):
        play(player, ROWS, accept, look=False)  # the kernels are loaded, the scratch is there
    count = player.e.htod_i32([1])
    lane = player.lane(ROWS).fill((player.start, draft(ROWS, 0)))
    standin.clear_trace()
    for how in (0, 1, ROWS, count):
        with Round(player.cache, player.e, width=WIDTH) as r:
            lane.run(player.cache)
            if isinstance(how, int):
                r.commit(how)
            else:
                r.commit_from_device(how)
    assert {call.name for call in standin.trace()} == {"cuLaunchKernelEx"}


def test_settling_reads_counters_and_nothing_else(player: Player, standin: StandIn) -> None:
    begin(player, 0)
    play(player, ROWS, 2, "device")
    standin.clear_trace()
    player.cache.settle(player.e)
    reads = standin.calls("cuMemcpyDtoHAsync")
    assert 0 < sum(call.bytes for call in reads) <= 4 * 3
    assert {call.name for call in standin.trace()} <= {"cuMemcpyDtoHAsync", "cuStreamSynchronize"}
    standin.clear_trace()
    player.cache.settle(player.e)
    assert standin.trace() == []


# Failures


def assert_whole_again(player: Player, snap: Any) -> None:
    """Tainted or not, the tokens from the snapshot on are those of plain decoding."""
    cache, e = player.cache, player.e
    cache.rollback(e, snap, 0)
    player.tokens = [TRUE] * 3
    player.check()
    play(player, ROWS, 2)
    player.check()


@pytest.mark.parametrize("name", ENDS)
def test_an_end_that_fails_has_changed_nothing_or_tainted_the_cache(
    player: Player, standin: StandIn, name: str
) -> None:
    cache, e = player.cache, player.e
    count = e.htod_i32([2])
    for nth in range(1, len(ENDS[name][1]) + 1):
        cache.reset(e)
        prepare(player, "reject")
        with cache.snapshot(e) as snap:
            if name.startswith("unsettled"):
                play(player, 1, 0, "device")
            with Round(cache, e, width=WIDTH) as r:
                player.run(draft(ROWS, ENDS[name][0]))
                before = image(cache)
                standin.fail("cuLaunchKernelEx", nth, CODE)
                with pytest.raises(DriverError, match="cuLaunchKernelEx"):
                    end(player, r, name, count)
                assert standin.pending_failures() == 0
                if nth == 1:
                    assert image(cache) == before
                    assert cache.open_round is r
                else:
                    assert (cache.state, cache.open_round) == (CacheState.TAINTED, None)
            if nth == 1:
                cache.settle(e)
                player.check()  # leaving has rejected
            else:
                assert cache.state is CacheState.TAINTED
            assert_whole_again(player, snap)


def test_an_end_that_failed_may_be_tried_again(player: Player, standin: StandIn) -> None:
    begin(player, 1)
    with Round(player.cache, player.e, width=WIDTH) as r:
        player.run(draft(ROWS, 2))
        standin.fail("cuLaunchKernelEx", 1, CODE)
        with pytest.raises(DriverError):
            r.commit(2)
        r.commit(2)
    player.tokens += [TRUE] * 2
    player.check()


def test_an_operation_that_fails_in_a_round_leaves_it_to_be_rejected(player: Player, standin: StandIn) -> None:
    begin(player, 1)
    lane = player.lane(ROWS).fill((3, draft(ROWS, 1)))
    standin.clear_trace()
    with Round(player.cache, player.e, width=WIDTH):
        lane.run(player.cache)
        launches = len(standin.launches())
    player.check()
    for nth in range(1, launches + 1):
        standin.fail("cuLaunchKernelEx", nth, CODE)
        with pytest.raises(DriverError), Round(player.cache, player.e, width=WIDTH):
            lane.run(player.cache)
        assert standin.pending_failures() == 0
        player.check()


def test_a_reject_that_fails_on_leaving_is_raised_and_the_round_can_still_be_rejected(
    player: Player, standin: StandIn
) -> None:
    begin(player, 1)
    r = Round(player.cache, player.e, width=WIDTH)

    def leave() -> None:
        with r:
            player.run(draft(ROWS, 1))
            standin.fail("cuLaunchKernelEx", 1, CODE)

    with pytest.raises(DriverError):
        leave()
    assert player.cache.open_round is r
    r.reject()
    player.check()


@pytest.mark.parametrize("name", ["settle", "reset"])
def test_an_unsettled_cache_survives_a_failure_of_what_leads_out(player: Player, standin: StandIn, name: str) -> None:
    begin(player, 1)
    play(player, ROWS, 2, "device")
    cache, e = player.cache, player.e
    leave = {"settle": lambda: cache.settle(e), "reset": lambda: cache.reset(e)}[name]
    before = image(cache)
    call = {"settle": "cuMemcpyDtoHAsync", "reset": "cuMemsetD8Async"}[name]
    for nth in (1, 2):
        if name == "reset" and nth == 2:
            break
        standin.fail(call, nth, CODE)
        with pytest.raises(DriverError):
            leave()
        assert standin.pending_failures() == 0
        assert image(cache) == before
    leave()
    if name == "reset":
        player.tokens = []
    player.check()
