"""What through_c.py says it does: the calls of a test on devices of the C library reach that library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decoding import WIDTH, draft, player_on
from through_c import CALLS, ENDS, OPS

from memra_driver import capi, ops
from memra_driver.errors import StateError
from memra_driver.round import Round

pytestmark = pytest.mark.standin


@pytest.fixture
def cuda_kind() -> str:
    return "c"


def test_every_call_that_c_has_goes_to_c(make_dev: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    call = capi.Library.call

    def noted(library: capi.Library, name: str, *args: Any) -> None:
        called.add(name.removeprefix("memra_"))
        call(library, name, *args)

    player = player_on(make_dev("cuda"))
    assert type(player.e) is capi.CDev
    monkeypatch.setattr(capi.Library, "call", noted)
    cache, e = player.cache, player.e
    player.step(0, 0)
    snap = cache.snapshot(e)
    cache.snapshot_into(e, snap)
    for how in ("commit", "commit_from_device", "reject"):
        with Round(cache, e, width=WIDTH) as r:
            player.run(draft(2, 1))
            getattr(r, how)(*{"commit": [1], "commit_from_device": [e.htod_i32([1])], "reject": []}[how])
        cache.settle(e)
    cache.arm_taps(e, [0], 1, 4)
    ops.tap_write(e, cache, 0, e.zeros(4))
    ops.dequant_kv(e, cache, 1, 0, 1, e.zeros(64), e.zeros(64))
    cache.park_logits(e, e.zeros(16))
    cache.health()
    cache.clear_health()
    cache.digest()
    cache.sync_d(e)
    cache.prepare_replay(e)
    cache.rollback(e, snap, 0)
    with pytest.raises(StateError, match="recurrent layers"):
        cache.truncate(e, 0)
    cache.reset(e)
    snap.close()
    player.close()
    assert called >= {*OPS, *CALLS.values(), *ENDS.values(), "round_begin"} - {"health"} | {"health_read"}


def test_what_python_records_stays_pythons(make_dev: Callable[..., Any]) -> None:
    player = player_on(make_dev("cuda"))
    player.step(0)
    with player.e.capture() as graph:
        player.lane(1).run(player.cache)
        assert player.cache.as_c().contents.recorder == 1
        player.cache.advance(player.e)
    with graph:
        player.lane(1).fill((1, [0]))
        graph.launch()
    player.tokens.append(0)
    player.check()
    player.close()
