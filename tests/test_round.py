"""Rounds: whatever stands after one is what plain decoding of the accepted tokens leaves, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, device_counters
from decoding import MAX_CTX, OPTIONS, TRUE, WIDTH, Oracle, Player, begin, draft, hybrid, play, player_on

from memra_driver import ops
from memra_driver.cache import Cache, CacheState
from memra_driver.config import SsmConfig
from memra_driver.round import Round

MakeDev = Callable[..., Any]
UNSETTLED = CacheState.UNSETTLED


@pytest.fixture
def player(dev: Any) -> Any:
    player = player_on(dev)
    yield player
    player.close()


# Every way to end


@pytest.mark.parametrize("by", ["host", "device"])
@pytest.mark.parametrize("rows", range(1, WIDTH + 1))
def test_any_accepted_part_of_a_round_of_any_width_leaves_the_bits_of_plain_decoding(
    player: Player, rows: int, by: str
) -> None:
    for parity in (0, 1):
        for accept in range(rows + 1):
            begin(player, parity)
            play(player, rows, accept, by)
            player.cache.settle(player.e)
            player.check()
            player.step(TRUE)
            play(player, 2, 1, by)  # and it goes on from there
            player.cache.settle(player.e)
            player.check()


@pytest.mark.parametrize("seed", range(2))
def test_rounds_of_every_kind_follow_each_other(player: Player, seed: int) -> None:
    chance = random.Random(seed)
    while len(player.tokens) < MAX_CTX - WIDTH:
        rows = chance.randint(1, WIDTH)
        play(player, rows, chance.randint(0, rows), chance.choice(["host", "device"]))
        if player.cache.state is UNSETTLED:
            player.cache.settle(player.e)
        player.check()
        if chance.random() < 0.3:
            player.step(*[TRUE] * chance.randint(1, 3))


@pytest.mark.parametrize("parity", [0, 1])
def test_rounds_follow_each_other_without_the_host_knowing_the_counts(player: Player, parity: int) -> None:
    begin(player, parity)
    chance = random.Random(parity)
    for _ in range(8):
        rows = chance.randint(1, WIDTH)
        play(player, rows, chance.randint(0, rows), "device")
        assert player.cache.state is UNSETTLED
    player.cache.settle(player.e)
    player.check()
    player.step(TRUE, TRUE)
    player.check()


@pytest.mark.parametrize("parity", [0, 1])
def test_on_the_device_clock_the_host_may_still_say_how_many_stand(player: Player, parity: int) -> None:
    begin(player, parity)
    play(player, 3, 1, "device")
    for accept in (2, 0, 3, 1):
        play(player, 3, accept, "host")
        assert player.cache.state is UNSETTLED
    with Round(player.cache, player.e, width=WIDTH):
        player.run(draft(2, 0))
    player.cache.settle(player.e)
    player.check()


GEOMETRIES = {
    "no ring": hybrid(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1)),
    "long ring": hybrid(ssm=SsmConfig(conv_kernel=8, state_size=32, time_step_rank=2, group_count=1)),
    "full": hybrid(full_attention_interval=0, ssm=None, n_layer=2),
    "linear": hybrid(n_layer=2, full_attention_interval=8),
}


@pytest.mark.parametrize("by", ["host", "device"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_rounds_serve_every_mix_of_layers(dev: Any, name: str, by: str) -> None:
    player = player_on(dev, GEOMETRIES[name])
    for accept in (1, 0, 4, 2, 3):
        play(player, WIDTH, accept, by)
        player.cache.settle(dev)
        player.check()
    player.step(TRUE)
    player.check()
    player.close()


@pytest.mark.parametrize("by", ["host", "device"])
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_rounds_serve_planes_of_their_own(make_dev: MakeDev, kind: str, by: str) -> None:
    player = player_on(make_dev(kind, arena=False))
    for accept in (3, 0, 4, 1):
        play(player, WIDTH, accept, by)
        player.cache.settle(player.e)
        player.check()
    player.close()


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_round_over_two_devices_ends_on_both(make_dev: MakeDev, kind: str) -> None:
    devices = [make_dev(kind), make_dev(kind)]
    cache = Cache.new_pp2(*devices, 1, hybrid(), MAX_CTX, policy=POLICY, options=OPTIONS)
    player = Player(cache, Oracle(devices[0]))
    for accept in (1, 0, 4, 2):
        play(player, WIDTH, accept)
        player.check()
    with Round(cache, devices[1], width=WIDTH):
        player.run(draft(3, 0))
    player.check()
    player.close()


# Leaving without a commit


def test_leaving_by_an_exception_rejects_and_lets_it_through(player: Player) -> None:
    player.step(TRUE, TRUE)

    def leave() -> None:
        with Round(player.cache, player.e, width=WIDTH):
            player.run(draft(3, 1))
            raise LookupError

    with pytest.raises(LookupError):
        leave()
    player.check()


@pytest.mark.parametrize("stop", range(5))
def test_a_round_is_rejected_behind_any_of_its_layers(player: Player, stop: int) -> None:
    player.step(TRUE, TRUE)
    with Round(player.cache, player.e, width=WIDTH):
        player.run(draft(3, 0), layers=range(stop))
    player.check()
    player.step(TRUE)
    player.check()


@pytest.mark.parametrize(("by", "accept"), [("host", 2), ("host", 1), ("device", 2), ("device", 1)])
def test_layers_that_took_no_part_stay_where_they_were(player: Player, by: str, accept: int) -> None:
    """Say, a drafter that runs the lower half."""
    begin(player, 0)
    cache, e = player.cache, player.e
    upper = [cache.recur[2].conv_state.to_numpy(), cache.recur[2].ssm_state.to_numpy()]
    with Round(cache, e, width=WIDTH) as r:
        player.run(draft(2, accept), layers=[0, 1])
        if by == "host":
            r.commit(accept)
        else:
            r.commit_from_device(e.htod_i32([accept]))
    cache.settle(e)
    assert (cache.pos, cache.kv[1].len, cache.kv[3].len) == (3 + accept, 3 + accept, 3)
    assert device_counters(cache) == ({1: 3 + accept, 3: 3}, {3 + accept})
    np.testing.assert_array_equal(cache.recur[2].conv_state.to_numpy(), upper[0])
    np.testing.assert_array_equal(cache.recur[2].ssm_state.to_numpy(), upper[1])
    there = player.oracle.at([TRUE] * (3 + accept)).planes
    np.testing.assert_array_equal(cache.recur[0].conv_state.to_numpy(), there[0, "conv"])
    np.testing.assert_array_equal(cache.recur[0].ssm_state.to_numpy(), there[0, "ssm"])


@pytest.mark.parametrize("accept", [2, 3])
def test_a_convolution_alone_is_undone_and_committed_alone(player: Player, accept: int) -> None:
    begin(player, 1)
    cache, e = player.cache, player.e
    lane = player.lane(3).fill((3, draft(3, accept)))
    at = {name: lane.at[0, name] for name in ("x", "w", "convolved")}
    with Round(cache, e, width=WIDTH):
        ops.conv_update(e, cache, 0, at["x"], at["w"], at["convolved"])
    player.check()
    with Round(cache, e, width=WIDTH) as r:
        ops.conv_update(e, cache, 0, at["x"], at["w"], at["convolved"])
        r.commit(accept)
    ring = player.oracle.at([TRUE] * (3 + accept)).planes[0, "conv"]
    np.testing.assert_array_equal(cache.recur[0].conv_state.to_numpy(), ring)
    np.testing.assert_array_equal(cache.recur[0].ssm_state.to_numpy(), player.oracle.at([TRUE] * 3).planes[0, "ssm"])
