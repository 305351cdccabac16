"""Several sequences in one launch: row b is what the single sequence gives, and a refusal concerns all or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from caches import POLICY, image, put
from decoding import MADE, MAX_CTX, OPTIONS, TRUE, WRONG, Lane, Oracle, Player, hybrid, player_on
from standin import StandIn

from memra_driver import ops
from memra_driver.batch import FIELDS, CacheBatch
from memra_driver.cache import Cache
from memra_driver.errors import ArrayError, CapacityError, ConfigError, DeviceMismatch, DriverError, StateError
from memra_driver.formats import FormatPolicy
from memra_driver.health import Fault
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

MakeDev = Callable[..., Any]
SMALL = hybrid(n_layer=2)


@contextmanager
def sequences(e: Any, lengths: Sequence[int], cfg: Any = None) -> Iterator[list[Player]]:
    """Players of these lengths; one step each, so that their states have swapped or not."""
    players = [player_on(e, cfg) for _ in lengths]
    for each, length in zip(players, lengths, strict=True):
        for start in range(0, length, 8):
            each.step(*[TRUE] * min(8, length - start))
    yield players
    for each in players:
        each.close()


def token(b: int) -> int:
    """Every other sequence goes another way."""
    return WRONG if b % 2 else TRUE


def fill(lane: Lane, players: Sequence[Player]) -> list[list[int]]:
    tokens = [[token(b)] * lane.rows for b in range(len(players))]
    lane.fill(*[(each.start, own) for each, own in zip(players, tokens, strict=True)])
    return tokens


def step(batch: CacheBatch, lane: Lane, players: Sequence[Player]) -> None:
    tokens = fill(lane, players)
    lane.run(batch)
    batch.advance(batch.e, lane.rows)
    for b, (each, own) in enumerate(zip(players, tokens, strict=True)):
        found = lane.results(b)
        for r in range(lane.rows):
            want = each.oracle.at((*each.tokens, *own[: r + 1])).results
            assert found[r] == {key: want[key] for key in found[r]}, f"sequence {b}, row {r}"
        each.tokens += own


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "lengths",
    [(3,), (0, 5), (9, 1, 4, 0, 32), tuple(range(7)), (32, *range(7)), (*range(11), 32)],  # from 8 on attend folds
    ids=["1", "2", "5", "7", "8", "12"],
)
def test_every_row_has_the_bits_of_the_single_call(dev: Any, lengths: Sequence[int], rows: int) -> None:
    with sequences(dev, lengths) as players, CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, rows)
        for _ in range(2):
            step(batch, lane, players)
        for each in players:
            each.check()
        players[0].step(TRUE)  # by itself: its states swap
        step(batch, lane, players)
        for each in players:
            each.check()
        lane.close()


def test_what_the_preparation_makes_is_that_of_the_single_call(dev: Any) -> None:
    with sequences(dev, (2, 7, 0)) as players, sequences(dev, (2, 7, 0)) as twins:
        batch = CacheBatch([each.cache for each in players])
        lane = Lane(batch, 2)
        tokens = fill(lane, players)
        lane.run(batch)
        for b, twin in enumerate(twins):
            single = twin.run(tokens[b])
            for il in (0, 2):
                for name in MADE["LINEAR"]:
                    rows = lane.at[il, name].to_numpy().reshape(3, -1)
                    np.testing.assert_array_equal(rows[b], single.at[il, name].to_numpy())
        lane.close()
        batch.close()


def test_256_sequences_step_together(dev: Any) -> None:
    oracle = Oracle(dev, SMALL)
    caches = [Cache.new(dev, SMALL, 8, policy=POLICY) for _ in range(256)]
    players = [Player(cache, oracle) for cache in caches]
    for each in players[::32]:
        each.step(TRUE)
    with CacheBatch(caches) as batch:
        lane = Lane(batch, 1)
        for _ in range(2):
            step(batch, lane, players)
        for each in players[::17]:
            each.check()
        lane.close()
    for each in players:
        each.close()


@pytest.mark.parametrize("capacities", [(8, 40), (40, 8)])
def test_every_sequence_has_the_room_of_its_own_capacity(dev: Any, capacities: tuple[int, int]) -> None:
    """The longer one is stepped beyond the capacity of the other; nothing of it is reported or left out."""
    oracle = Oracle(dev)
    players = [Player(Cache.new(dev, hybrid(), n, policy=POLICY), oracle) for n in capacities]
    players[capacities.index(40)].step(*[TRUE] * 12)
    with CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, 2)
        for _ in range(4):
            step(batch, lane, players)
        for each in players:
            each.check()
            assert not each.cache.health()
        rows = batch.seqs(1).to_numpy().reshape(2, -1)
        assert tuple(rows[:, FIELDS.index("max_ctx")]) == capacities
        lane.close()
    for each in players:
        each.close()


def test_sequences_of_different_capacity_step_together(dev: Any) -> None:
    oracle = Oracle(dev)
    players = [Player(Cache.new(dev, hybrid(), n, policy=POLICY), oracle) for n in (40, 8, 64)]
    with CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, 2)
        for _ in range(4):
            step(batch, lane, players)
        for each in players:
            each.check()
        refused(batch, [(CapacityError, "max_ctx is 8", lambda: lane.run(batch))])
        lane.close()
    for each in players:
        each.close()


def test_a_batch_goes_on_after_whatever_its_members_did(dev: Any) -> None:
    with sequences(dev, (4, 5, 6, 7)) as players:
        caches = [each.cache for each in players]
        batch = CacheBatch(caches)
        lane = Lane(batch, 1)
        step(batch, lane, players)
        caches[0].reset(dev)
        players[0].tokens = []
        with caches[1].snapshot(dev) as snap:
            players[1].step(WRONG)
            caches[1].rollback(dev, snap, 0)
            players[1].tokens.pop()
        with Round(caches[2], dev, width=2) as r:
            players[2].run([TRUE, TRUE])
            r.commit(2)
        players[2].tokens += [TRUE, TRUE]
        state = caches[3].recur[0]  # somebody else exchanges the handles, and the bytes with them
        state.ssm_state_alt.copy_from(state.ssm_state.to_numpy())
        state.ssm_state, state.ssm_state_alt = state.ssm_state_alt, state.ssm_state
        step(batch, lane, players)
        for each in players:
            each.check()
        batch.close()
        batch.close()
        players[0].step(TRUE)  # the caches stay
        players[0].check()
        lane.close()


def test_a_fault_is_recorded_with_its_own_sequence(dev: Any) -> None:
    with sequences(dev, (2, 5, 3)) as players, CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, 1)
        fill(lane, players)
        k = lane.at[1, "k"].to_numpy()
        k[64 + 3] = np.nan
        lane.at[1, "k"].copy_from(k)
        lane.run(batch)
        batch.advance(dev)
        assert [bool(each.cache.health()) for each in players] == [False, True, False]
        fault = players[1].cache.health().faults[Fault.NONFINITE]
        assert (fault.layer, fault.slot) == (1, 5)
        lane.close()


# Shapes


def test_arrays_hold_one_block_of_rows_per_sequence(host: Any) -> None:
    with sequences(host, (1, 3)) as players, CacheBatch([each.cache for each in players]) as batch:
        rows = np.ones((2, 2, 64), np.float32)
        for wrong in (rows[:1], rows.reshape(4, 64), np.ones((3, 2, 64), np.float32), rows[:, :, :32].copy()):
            with pytest.raises(ArrayError, match="k_rows"):
                ops.append_kv(host, batch, 1, wrong, rows)
        with pytest.raises(ArrayError, match="v_rows"):
            ops.append_kv(host, batch, 1, rows, rows[:, :1].copy())
        with pytest.raises(ArrayError, match=r"k_rows.*\[2, rows, 64\]"):
            ops.append_kv(host, batch, 1, np.ones(64 * 3, np.float32), rows)
        ops.append_kv(host, batch, 1, rows, rows)
        assert [each.cache.kv[1].len for each in players] == [3, 5]
        x, w = np.ones((2, 2, 128), np.float32), np.ones((128, 4), np.float32)
        q, gate = x[..., :64].copy(), x[..., :2].copy()
        state = players[1].cache.recur[2].ssm_state.view(0, q.size)
        slices = [put(host, each) for each in (q, q, q, gate, gate)]
        with pytest.raises(ArrayError, match="out and ssm_state of sequence 1 share memory"):
            ops.gdn_scan(host, batch, 2, *slices, state, scale=1.0)
        with pytest.raises(ArrayError, match="x has shape"):
            ops.conv_update(host, batch, 0, x[0], w, x)


def test_no_rows_do_nothing(dev: Any) -> None:
    with sequences(dev, (2, 1)) as players, CacheBatch([each.cache for each in players]) as batch:
        nothing = dev.uninit(0)
        ops.append_kv(dev, batch, 1, nothing, nothing)
        ops.attend(dev, batch, 1, nothing, nothing, scale=1.0)
        batch.advance(dev, 0)
        for each in players:
            each.check()


# What is refused


def refused(batch: CacheBatch, calls: Sequence[tuple[type[Exception], str, Callable[[], Any]]]) -> None:
    """No member changed."""
    before = [image(member) for member in batch.members]
    for error, text, call in calls:
        with pytest.raises(error, match=text):
            call()
        assert [image(member) for member in batch.members] == before


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_what_cannot_be_a_batch_is_refused(make_dev: MakeDev, kind: str) -> None:
    e, other = make_dev(kind), make_dev(kind)
    good = Cache.new(e, hybrid(), 16, policy=POLICY)
    mtp = hybrid(n_layer=5, nextn_predict_layers=1)
    others = {
        "elsewhere": Cache.new(other, hybrid(), 16, policy=POLICY),
        "staged": Cache.new_pp2(e, other, 2, hybrid(), 16, policy=POLICY),
        "formats": Cache.new(e, hybrid(), 16, policy=FormatPolicy(k="fp8")),
        "config": Cache.new(e, hybrid(n_vocab=17), 16, policy=POLICY),
        "layers": Cache.new(e, hybrid(n_layer=2), 16, policy=POLICY),
        "mtp": Cache.new(e, mtp, 16, policy=POLICY),
        "mtp skipped": Cache.new(e, mtp, 16, policy=POLICY, options=CacheOptions(skip_mtp_state=True)),
        "closed": Cache.new(e, hybrid(), 16, policy=POLICY),
    }
    others["closed"].close()
    for error, text, members in (
        (ConfigError, "no sequences", []),
        (ConfigError, "sequence 1 stands in the batch already", [good, good]),
        (ConfigError, "sequence 2 stands in the batch already", [good, others["config"], good]),
        (DeviceMismatch, "sequence 1", [good, others["elsewhere"]]),
        (DeviceMismatch, "sequence 0", [others["staged"]]),
        (ConfigError, "sequence 1.*formats", [good, others["formats"]]),
        (ConfigError, "sequence 1.*configuration", [good, others["config"]]),
        (ConfigError, "sequence 1.*configuration", [good, others["layers"]]),
        (ConfigError, "skip_mtp_state", [others["mtp"], others["mtp skipped"]]),
        (StateError, "closed", [good, others["closed"]]),
    ):
        if members == [good, others["config"], good]:
            error, text = ConfigError, "configuration"  # whichever is seen first
        with pytest.raises(error, match=text):
            CacheBatch(members)
    for each in (good, *others.values()):
        each.close()


@pytest.mark.parametrize("state", ["pending", "round", "step", "unsettled"])
def test_a_member_that_is_not_at_rest_is_refused_at_the_birth_of_a_batch(dev: Any, state: str) -> None:
    with sequences(dev, (2, 3)) as players:
        caches = [each.cache for each in players]
        snap, r = caches[1].snapshot(dev), Round(caches[1], dev, width=2)
        if state in ("round", "unsettled"):
            r.__enter__()
        players[1].run([TRUE])
        if state == "pending":
            caches[1].rollback(dev, snap, 1)
        if state == "unsettled":
            r.commit_from_device(dev.htod_i32([1]))
        text = {"pending": "pending replay of 1", "round": "a round is", "step": "a step of 1", "unsettled": "settle"}
        before = [image(cache) for cache in caches]
        with pytest.raises(StateError, match=text[state]):
            CacheBatch(caches)
        assert [image(cache) for cache in caches] == before
        snap.close()


@pytest.mark.parametrize("state", ["pending", "round", "rows", "ran", "unsettled", "full", "behind", "closed"])
def test_a_member_that_cannot_keeps_all_from_every_operation(dev: Any, state: str) -> None:
    with sequences(dev, (2, 3, 5)) as players:
        caches = [each.cache for each in players]
        batch = CacheBatch(caches)
        lane = Lane(batch, 1)
        step(batch, lane, players)
        last, player = caches[2], players[2]
        snap, r = last.snapshot(dev), Round(last, dev, width=2)
        if state in ("round", "unsettled"):
            r.__enter__()
        if state in ("pending", "round", "unsettled"):
            player.run([TRUE])
        if state == "pending":
            last.rollback(dev, snap, 1)
        elif state == "unsettled":
            r.commit_from_device(dev.htod_i32([1]))
        elif state == "rows":
            player.run([TRUE, TRUE], [])
            player.lane(2).run(last, [2])
        elif state == "ran":
            player.run([TRUE], [0, 1, 2, 3])
        elif state == "full":
            while last.pos < MAX_CTX:
                player.step(*[TRUE] * min(8, MAX_CTX - last.pos))
        elif state == "behind":
            last.kv[1].len = last.kv[3].len = 2
            last.sync_d(dev)
        elif state == "closed":
            last.close()
        at = {(il, name): part for (il, name), part in lane.at.items()}
        made = [at[0, name] for name in MADE["LINEAR"]]
        gates = [at[0, name] for name in ("alpha", "beta_raw", "dt_bias", "a")]
        calls = {
            "append": lambda: ops.append_kv(dev, batch, 1, at[1, "k"], at[1, "v"]),
            "attend": lambda: ops.attend(dev, batch, 1, at[1, "query"], at[1, "attended"], scale=0.125),
            "conv": lambda: ops.conv_update(dev, batch, 0, at[0, "x"], at[0, "w"], at[0, "convolved"]),
            "prep": lambda: ops.gdn_prep(dev, batch, 0, at[0, "convolved"], *gates, *made, eps=1e-6),
            "scan": lambda: ops.gdn_scan(dev, batch, 0, *made, at[0, "scanned"], scale=0.2),
            "advance": lambda: batch.advance(dev, 1),
        }
        allowed = {  # it changes nothing, or nothing is wrong for it
            "rows": ("prep",), "ran": ("prep", "attend", "advance"), "full": ("prep",),
            "behind": ("prep", "conv", "scan", "advance"),
        }  # fmt: skip
        before = [None if cache is last and state == "closed" else image(cache) for cache in caches]
        for name, call in calls.items():
            if name in allowed.get(state, ()):
                continue
            with pytest.raises(CapacityError if state == "full" and name != "attend" else StateError):
                call()
            now = [None if was is None else image(cache) for was, cache in zip(before, caches, strict=True)]
            assert now == before, name
        snap.close()
        batch.close()
        lane.close()


@pytest.mark.parametrize("short", [0, 1, 2])
def test_one_sequence_without_the_rows_keeps_all_from_attending(dev: Any, short: int) -> None:
    with sequences(dev, (2, 3, 5)) as players, CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, 1)
        fill(lane, players)
        lane.run(batch, [0, 1])
        layer, pos = players[short].cache.kv[1], players[short].cache.pos
        assert layer is not None
        layer.len = pos
        text = f"only {pos} rows stand"
        refused(batch, [(
            StateError, text,
            lambda: ops.attend(dev, batch, 1, lane.at[1, "query"], lane.at[1, "attended"], scale=0.125),
        )])  # fmt: skip
        layer.len = pos + 1
        lane.run(batch, [2, 3])
        batch.advance(dev, 1)
        for b, each in enumerate(players):
            each.tokens.append(token(b))
            each.check()
        lane.close()


def test_a_step_in_progress_keeps_the_batch_to_its_rows(dev: Any) -> None:
    with sequences(dev, (2, 3)) as players, CacheBatch([each.cache for each in players]) as batch:
        lane, wide = Lane(batch, 1), Lane(batch, 2)
        fill(lane, players)
        lane.run(batch, [0, 1])
        refused(batch, [
            (StateError, "the open step has 1", lambda: wide.run(batch, [2])),
            (StateError, "has run append", lambda: ops.append_kv(dev, batch, 1, lane.at[1, "k"], lane.at[1, "v"])),
            (StateError, "advance by 2", lambda: batch.advance(dev, 2)),
            (StateError, "advance by -1", lambda: batch.advance(dev, -1)),
        ])  # fmt: skip
        lane.run(batch, [2, 3])
        batch.advance(dev)
        for b, each in enumerate(players):
            each.tokens.append(token(b))
            each.check()
        lane.close()
        wide.close()


def test_another_device_and_a_closed_batch_are_refused(dev: Any, make_dev: MakeDev) -> None:
    other = make_dev("host")
    with sequences(dev, (2, 3)) as players:
        batch = CacheBatch([each.cache for each in players])
        lane = Lane(batch, 1)
        fill(lane, players)
        k, v = lane.at[1, "k"], lane.at[1, "v"]
        refused(batch, [
            (DeviceMismatch, "is not the batch's device", lambda: batch.advance(other, 1)),
            (DeviceMismatch, "layer 1 lives on", lambda: ops.append_kv(other, batch, 1, k, v)),
            (ConfigError, "layer 0 has no K/V", lambda: ops.append_kv(dev, batch, 0, k, v)),
        ])  # fmt: skip
        lane.run(batch)
        batch.advance(dev)
        with dev.capture() as graph:
            lane.run(batch)
            batch.advance(dev)
        batch.close()
        refused(batch, [
            (StateError, "closed", lambda: lane.run(batch)),
            (StateError, "closed", lambda: batch.advance(dev)),
            (StateError, "a batch that it recorded is closed", graph.launch),
        ])  # fmt: skip
        graph.close()
        lane.close()


# What is asked of the driver


@pytest.mark.standin
def test_tables_are_uploaded_once_and_again_only_after_a_swap(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    with sequences(e, (2, 3, 4)) as players:
        standin.clear_trace()
        batch = CacheBatch([each.cache for each in players])
        assert len(standin.calls("cuMemcpyHtoDAsync")) == 2  # as the states stand, and as a capture finds them
        lane = Lane(batch, 1)
        for swapped in (False, True, True):
            if swapped:
                players[1].step(TRUE)
            for renewed in (swapped, False):
                fill(lane, players)
                standin.clear_trace()
                lane.run(batch)
                batch.advance(e)
                assert len(standin.calls("cuMemcpyHtoDAsync")) == int(renewed)
                for b, each in enumerate(players):
                    each.tokens.append(token(b))
        for each in players:
            each.check()
        batch.close()
        lane.close()


@pytest.mark.standin
def test_every_operation_is_one_launch_for_all(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    with sequences(e, (2, 3, 4, 5, 6)) as players, CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, 2)
        step(batch, lane, players)
        fill(lane, players)
        standin.clear_trace()
        lane.run(batch)
        batch.advance(e, 2)
        recurrent, attention = ["conv_update", "gdn_prep", "gdn_scan"], ["append_kv", "attend", "attend_combine"]
        found = ["attend" if "attend_" in n and "combine" not in n else n for n in standin.launches()]
        assert found == [*recurrent, *attention, "recur_step_32", *attention, "advance_batch"]
        assert {call.name for call in standin.trace()} == {"cuLaunchKernelEx"}
        lane.close()


@pytest.mark.standin
def test_a_launch_that_fails_moves_nobody(make_dev: MakeDev, standin: StandIn) -> None:
    e = make_dev("cuda")
    with sequences(e, (2, 3, 4)) as players, CacheBatch([each.cache for each in players]) as batch:
        lane = Lane(batch, 1)
        step(batch, lane, players)
        fill(lane, players)
        calls = [lambda il=il: lane.run(batch, [il]) for il in range(4)] + [lambda: batch.advance(e)]
        for call in calls:
            before = [image(member) for member in batch.members]
            standin.fail("cuLaunchKernelEx", 1, 719)
            with pytest.raises(DriverError, match="cuLaunchKernelEx"):
                call()
            assert [image(member) for member in batch.members] == before
            call()
        for b, each in enumerate(players):
            each.tokens.append(token(b))
            each.check()
        players[0].step(TRUE)
        standin.fail("cuMemcpyHtoDAsync", 2, 719)  # the new table; the inputs are uploaded before
        fill(lane, players)
        before = [image(member) for member in batch.members]
        with pytest.raises(DriverError, match="cuMemcpyHtoDAsync"):
            lane.run(batch)
        assert [image(member) for member in batch.members] == before
        step(batch, lane, players)
        for each in players:
            each.check()
        lane.close()


def test_the_options_of_a_batch_are_those_of_every_member(dev: Any) -> None:
    caches = [Cache.new(dev, hybrid(), 16, policy=POLICY, options=CacheOptions(max_rows=n)) for n in (8, 2)]
    with CacheBatch(caches) as batch:
        lane = Lane(batch, 3)
        for il in (0, 2):
            lane.run(batch, [il])
        ops.append_kv(dev, batch, 1, lane.at[1, "k"], lane.at[1, "v"])
        refused(batch, [
            (CapacityError, r"max_rows=2", lambda: ops.attend(
                dev, batch, 1, lane.at[1, "query"], lane.at[1, "attended"], scale=1.0)),
        ])  # fmt: skip
        lane.close()
    assert OPTIONS.max_rows == 8
    for cache in caches:
        cache.close()
