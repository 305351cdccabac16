"""What an operation of the C library asks of the driver: once which context is current, and whether it is alive.

A program in C makes hundreds of these calls for every token, and each question takes some of the time of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from caches import POLICY
from decoding import MAX_CTX, OPTIONS, TRUE, Lane, Player, hybrid, player_on
from standin import StandIn

from memra_driver import Cache, capi, driver
from memra_driver.capi.device import LibraryDevice, library_device
from memra_driver.errors import DriverError

pytestmark = pytest.mark.standin
MakeDev = Callable[..., Any]
ENTERED = ["cuCtxGetId", "cuCtxGetCurrent"]
KERNELS = ("append_kv", "attend_combine", "attend", "conv_update", "gdn_prep", "gdn_scan", "recur_step")


@pytest.fixture
def player(cuda: Any, c_library: capi.Library) -> Iterator[Player]:
    player = player_on(cuda)
    capi.bind(player.cache)
    player.lane(1).fill((0, [TRUE])).run(player.cache, calls=capi.ops)  # the library's partial sums have room now
    player.cache.reset(cuda)
    yield player
    player.close()


def entry(name: str) -> str:
    """The name of a kernel without its numbers and formats; of a call as it is."""
    return next((each for each in KERNELS if name.startswith(each)), name)


def launches(op: str) -> list[str]:
    return ["attend", "attend_combine"] if op == "attend" else [op]


def run(cache: Any, standin: StandIn) -> list[tuple[str, int, list[str]]]:
    """A step of one row: of every operation its name, its layer, and what it asked of the driver."""
    seen = []

    class Watched:
        def __getattr__(self, name: str) -> Callable[..., None]:
            op = getattr(capi.ops, name)

            def noted(e: Any, cache: Any, il: int, *args: Any, **kwargs: Any) -> None:
                names = standin.asked(lambda: op(e, cache, il, *args, **kwargs))
                seen.append((name, il, [entry(each) for each in names]))

            return noted

    lane = Lane(cache, 1)
    lane.fill((cache.pos, [TRUE])).run(cache, calls=Watched())
    lane.close()
    return seen


def nothing(device: LibraryDevice) -> None:
    """A launch of no blocks: all that is asked before one."""
    device.call("memra_launch_advance_batch", 0, 0, 1, 0, 0)


def test_an_operation_asks_once(player: Player, standin: StandIn) -> None:
    seen = run(player.cache, standin)
    assert {op for op, _, _ in seen} == {*KERNELS} - {"attend_combine"}
    for op, _, names in seen:
        expected = [*ENTERED, "cuStreamIsCapturing", *launches(op)]
        assert names == expected, op


def test_an_operation_on_another_device_than_the_last_enters_it_anew(
    make_dev: MakeDev, c_library: capi.Library, standin: StandIn
) -> None:
    devices = [make_dev("cuda", 0), make_dev("cuda", 1)]
    digests = []
    for devs, fence in ((devices, [0, 2, 4]), (devices[:1], [0, 4])):
        with Cache.new_ppn(devs, fence, hybrid(), MAX_CTX, policy=POLICY, options=OPTIONS) as cache:
            capi.bind(cache)
            run(cache, standin)  # the library's partial sums have room behind it
            cache.reset(devs[0])
            for op, il, names in run(cache, standin):
                assert [name for name in names if name in KERNELS] == launches(op)
                if len(devs) == 2:
                    on = cache.plan.device_of(il)
                    enters = names.index("cuStreamIsCapturing"), names.index(launches(op)[0])
                    assert names[: enters[0]].count("cuCtxGetId") == 2
                    assert ("cuCtxSetCurrent" in names[slice(*enters)]) is (on == 0), op
                    assert names[enters[0] :].count("cuCtxGetId") == (len(launches(op)) if on == 0 else 0), op
            capi.calls.advance(cache, 1)
            digests.append(cache.digest())
    assert digests[0] == digests[1]


def test_a_launch_of_the_callers_asks_behind_any_operation(player: Player, standin: StandIn) -> None:
    cache = player.cache
    device = library_device(player.e)
    before = driver.ctx_get_current()
    run(cache, standin)
    assert standin.asked(lambda: nothing(device)) == ENTERED
    cache.reset(player.e)
    standin.fail("cuLaunchKernelEx")
    with pytest.raises(DriverError):
        run(cache, standin)
    driver.ctx_set_current(0)
    assert standin.asked(lambda: nothing(device)) == [*ENTERED, "cuCtxSetCurrent"]
    assert driver.ctx_get_current() == before
