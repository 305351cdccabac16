"""recur_step against the three operations that it stands for: the kernels, and the operation in every mode of a cache.

Everything is compared bit for bit: state, ring, outputs, tape, error record, and what later steps make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caches import POLICY, image, put, rows_of, tiny
from checks import faults
from kernel_runs import run, run_batch, same

from memra_driver import ops
from memra_driver.batch import CacheBatch
from memra_driver.cache import Cache
from memra_driver.check.args import LAYER, conv_args, i32, poison, prep_args, recur_args, scan_args, spoil
from memra_driver.errors import StateError
from memra_driver.health import Fault
from memra_driver.kernels import RECUR_COLUMNS, RECUR_TICKETS, recur_split
from memra_driver.layout import StepOp
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

# Key heads, value heads, state size, taps, rows: shared and unused key heads, every size, every length of a ring.
SHAPES = [
    (2, 4, 32, 4, 1), (2, 4, 128, 4, 8), (1, 1, 256, 1, 3), (3, 7, 64, 2, 2), (2, 6, 32, 8, 9), (4, 2, 64, 3, 17),
    (3, 1, 128, 5, 1), (1, 3, 32, 6, 5), (1, 2, 64, 7, 6),
]  # fmt: skip
SPOILED = {"x": 3, "alpha": 1, "beta_raw": 2}  # inputs that are not finite


def name_of(args: dict[str, Any]) -> str:
    return f"recur_step_{args['state_size']}"


def by_three(dev: Any, args: dict[str, Any]) -> SimpleNamespace:
    """What conv_update, gdn_prep and gdn_scan leave of the arguments of recur_step."""
    rng = np.random.default_rng(0)
    rows, keys, values, size = args["rows"], args["num_k"], args["num_v"], args["state_size"]
    channels = (2 * keys + values) * size
    common = {name: args[name] for name in ("pos_d", "slot", "health", "layer")}
    tape = None if args["tape"] is None else args["tape"][: rows * channels].copy()
    taken = {name: args[name] for name in ("x", "w", "conv_state")}
    taken |= {"tape": tape}
    convolved = run(dev, "conv_update", **conv_args(rng, rows, channels, args["d_conv"], **taken, **common))
    taken = {name: args[name] for name in ("alpha", "beta_raw", "dt_bias", "a", "eps")} | {"conv_out": convolved.out}
    common |= {"health": convolved.health}
    prepared = run(dev, "gdn_prep", **prep_args(rng, rows, keys, values, size, **taken, **common))
    taken = {name: getattr(prepared, name) for name in ("q", "k", "v", "g_log", "beta")}
    taken |= {"tape": None if tape is None else args["tape"][rows * channels :].copy()}
    taken |= {name: args[name] for name in ("state_in", "state_out", "out", "scale", "layer")}
    scanned = run(dev, "gdn_scan", **scan_args(rng, rows, values, size, **taken, health=prepared.health))
    found = {"conv_state": convolved.conv_state, "health": prepared.health, "out": scanned.out}
    found["state_out"] = scanned.state_out
    if tape is not None:
        found["tape"] = np.concatenate([convolved.tape, scanned.tape])
    return one_nan(SimpleNamespace(**found))


def one_nan(found: SimpleNamespace) -> SimpleNamespace:
    """With one and the same NaN for every NaN: which of two a CPU passes on is its compiler's choice."""
    for array in vars(found).values():
        if array.dtype == np.float32:
            array[np.isnan(array)] = np.nan
    return found


def tape_of(args: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Room for x, q, k, v, g_log and beta, and five elements that nobody writes."""
    return poison(args["x"].size + 3 * args["out"].size + 2 * args["alpha"].size + 5)


# Kernels


@pytest.mark.parametrize(("keys", "values", "size", "taps", "rows"), SHAPES)
def test_one_launch_leaves_the_bits_of_the_three_however_the_columns_are_shared(
    dev: Any, rng: np.random.Generator, keys: int, values: int, size: int, taps: int, rows: int
) -> None:
    args = recur_args(rng, rows, keys, values, size, taps, pos_d=i32(7))
    for name, n in SPOILED.items():
        spoil(rng, args[name], n)
    plain = by_three(dev, args)
    taped = by_three(dev, args | {"tape": tape_of(args)})
    for columns in sorted({32, size // 2, size, RECUR_COLUMNS} - {16}):
        split = {"columns": columns, "blocks": -(-(-(-values // keys) * size) // columns)}
        for share in (split, split | {"blocks": 1}):
            same(plain, one_nan(run(dev, name_of(args), **args | share)))
            same(taped, one_nan(run(dev, name_of(args), **args | share | {"tape": tape_of(args)})))
    assert faults(plain.health)[Fault.NONFINITE].layer == LAYER
    assert np.array_equal(taped.conv_state, args["conv_state"])


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_a_recurrent_step_agrees_with_its_twin(cuda: Any, host: Any, rng: np.random.Generator, size: int) -> None:
    args = recur_args(rng, 3, 2, 4, size, 4)
    args |= {"tape": tape_of(args)}
    same(run(cuda, name_of(args), **args), run(host, name_of(args), **args), nearly=("state_out", "out", "tape"))


@pytest.mark.parametrize(("keys", "values", "size", "taps"), [(2, 4, 32, 4), (1, 3, 64, 8), (2, 2, 128, 1)])
def test_rows_in_one_launch_are_those_of_a_launch_each_and_in_place(
    dev: Any, rng: np.random.Generator, keys: int, values: int, size: int, taps: int
) -> None:
    args = recur_args(rng, 11, keys, values, size, taps, columns=32)
    together = run(dev, name_of(args), **args | {"state_out": args["state_in"]})
    single, outs = args | {"rows": 1}, []
    for row in range(11):
        taken = {name: args[name].reshape(11, -1)[row].copy() for name in ("x", "alpha", "beta_raw", "out")}
        single |= taken | {"slot": args["slot"] + row}
        after = run(dev, name_of(args), **single)
        single |= {"state_in": after.state_out, "conv_state": after.conv_state, "health": after.health}
        outs.append(after.out)
    assert together.out.tobytes() == b"".join(out.tobytes() for out in outs)
    for name, other in (("state_out", "state_in"), ("conv_state", "conv_state"), ("health", "health")):
        assert getattr(together, name).tobytes() == single[other].tobytes()


@pytest.mark.parametrize("columns", [32, 64, 192])
def test_a_launch_for_several_sequences_is_one_for_each(dev: Any, rng: np.random.Generator, columns: int) -> None:
    sequences = [recur_args(rng, 2, 2, 6, 64, 4, columns=columns, pos_d=i32(b)) for b in range(3)]
    sequences = [args | {name: sequences[0][name] for name in ("w", "dt_bias", "a")} for args in sequences]
    spoil(rng, sequences[1]["x"], 2)
    for args, got in zip(sequences, run_batch(dev, "recur_step_64", sequences), strict=True):
        alone, got = one_nan(run(dev, "recur_step_64", **args)), one_nan(got)
        for name in ("out", "state_out", "conv_state", "health"):
            assert getattr(got, name).tobytes() == getattr(alone, name).tobytes()


def test_operands_may_lie_at_any_address_of_four_bytes(dev: Any, rng: np.random.Generator) -> None:
    args = scan_args(rng, 3, 2, 64)
    apart = run(dev, "gdn_scan", **args)
    whole = np.concatenate([poison(1), args["q"]])
    held, out = dev.uninit(whole.size), dev.uninit(args["out"].size)
    held.copy_from(whole)
    kept = {name: dev.uninit(args[name].size) for name in ("k", "v", "g_log", "beta", "state_in", "state_out")}
    for name, each in kept.items():
        each.copy_from(args[name].reshape(-1))
    dev.launch(
        "gdn_scan", held.view(1, held.len), *kept.values(), out, None, None, 3, 2, 64, args["scale"], None, 1, None, 0
    )
    assert out.to_numpy().tobytes() == apart.out.tobytes()
    assert kept["state_out"].to_numpy().tobytes() == apart.state_out.tobytes()


def test_few_sequences_are_spread_and_no_key_head_beyond_the_tickets_is_shared() -> None:
    assert recur_split(1, 16, 32, 128) == (32, 8)
    assert recur_split(32, 16, 32, 128) == (256, 1)
    for n_seqs in (1, 7, 256, 257, 5000):
        for keys, values, size in ((16, 48, 128), (1, 64, 128), (3, 7, 64), (16, 16, 256), (48, 48, 32)):
            columns, blocks = recur_split(n_seqs, keys, values, size)
            most = -(-values // keys) * size
            assert columns <= RECUR_COLUMNS
            assert columns % size == 0 or size % columns == 0
            assert blocks in (1, -(-most // columns))
            assert blocks == 1 or n_seqs * keys <= RECUR_TICKETS


# Operations


class Layers:
    """Steps of the recurrent layers of caches alike, by three operations or by one."""

    def __init__(self, e: Any, cache: Any, *, fused: bool) -> None:
        self.e, self.cache, self.fused = e, cache, fused
        self.members: Sequence[Cache] = cache.members
        self.kept: list[Any] = []

    def _put(self, array: Any) -> Any:
        self.kept.append(put(self.e, array))
        return self.kept[-1]

    def prepare(self, rows: int, seed: int) -> list[tuple[Any, ...]]:
        """Inputs and room for the outputs of a step, by layer."""
        found, each = [], range(len(self.members))
        for il, layer in enumerate(self.members[0].recur):
            if layer is None:
                continue
            heads, size, n = layer.num_v, layer.state_size, rows * len(self.members)
            columns = {"x": layer.conv_dim, "alpha": heads, "beta_raw": heads}
            x, alpha, beta_raw = (
                self._put(np.concatenate([rows_of(seed + b, il, name, 0, rows, width) for b in each]))
                for name, width in columns.items()
            )
            w = self._put(rows_of(0, il, "w", 0, layer.conv_dim, layer.d_conv) * np.float32(0.4))
            dt_bias, a = (self._put(np.linspace(lo, hi, heads, dtype=np.float32)) for lo, hi in ((-1, 1), (-2, -0.1)))
            widths = (heads * size, heads * size, heads * size, heads * size, heads, heads, layer.conv_dim)
            made = [self.e.uninit(n * width) for width in widths]
            self.kept += made
            found.append((il, layer, x, alpha, beta_raw, w, dt_bias, a, *made))
        return found

    def step(self, rows: int, seed: int, prepared: list[tuple[Any, ...]] | None = None) -> list[Any]:
        """The outputs of every recurrent layer; the step stays open."""
        outs = []
        prepared = self.prepare(rows, seed) if prepared is None else prepared
        for il, layer, x, alpha, beta_raw, w, dt_bias, a, q, k, v, out, g_log, beta, mixed in prepared:
            size = layer.state_size
            if self.fused:
                ops.recur_step(
                    self.e, self.cache, il, x, w, alpha, beta_raw, dt_bias, a, out, eps=1e-6, scale=size**-0.5
                )
            else:
                ops.conv_update(self.e, self.cache, il, x, w, mixed)
                ops.gdn_prep(
                    self.e, self.cache, il, mixed, alpha, beta_raw, dt_bias, a, q, k, v, g_log, beta, eps=1e-6
                )
                ops.gdn_scan(self.e, self.cache, il, q, k, v, g_log, beta, out, scale=size**-0.5)
            outs.append(out)
        return outs

    def state(self) -> list[dict[str, Any]]:
        """What a test can see of every cache, but for where it lives."""
        images = [image(member) for member in self.members]
        return [{name: at[name] for name in at if name != "id" and not name.endswith(".ptr")} for at in images]


@pytest.fixture
def both(dev: Any) -> Callable[..., tuple[Layers, Layers]]:
    """Two caches alike: one for the three operations, one for recur_step; or two batches of them."""

    def made(batch: int = 0) -> tuple[Layers, Layers]:
        options = CacheOptions(round_width=4)
        found = []
        for fused in (False, True):
            caches = [Cache.new(dev, tiny(), 64, policy=POLICY, options=options) for _ in range(batch or 1)]
            found.append(Layers(dev, CacheBatch(caches) if batch else caches[0], fused=fused))
        return found[0], found[1]

    return made


def equal(three: Layers, one: Layers, outs: tuple[list[Any], list[Any]]) -> None:
    assert [out.to_numpy().tobytes() for out in outs[0]] == [out.to_numpy().tobytes() for out in outs[1]]
    assert outs[0]
    assert three.state() == one.state()


def test_steps_of_any_width_leave_what_the_three_operations_leave(both: Any) -> None:
    three, one = both()
    for seed, rows in enumerate((3, 1, 1, 9, 4)):
        outs = three.step(rows, seed), one.step(rows, seed)
        equal(three, one, outs)
        for each in (three, one):
            each.cache.advance(each.e, rows)
    equal(three, one, outs)
    assert three.cache.digest() == one.cache.digest()


@pytest.mark.parametrize("accept", [0, 1, 3, 4])
@pytest.mark.parametrize("by_device", [False, True])
def test_a_round_ends_as_that_of_the_three_operations(both: Any, accept: int, by_device: bool) -> None:
    three, one = both()
    for swaps in range(2):  # from either parity of the buffers
        outs = three.step(1 + swaps, 7 + swaps), one.step(1 + swaps, 7 + swaps)
        for each in (three, one):
            each.cache.advance(each.e, 1 + swaps)
            with Round(each.cache, each.e, width=4) as r:
                outs[each.fused][:] = each.step(4, 20 + swaps)
                if by_device:
                    count = each.e.htod_i32([accept])
                    r.commit_from_device(count)
                    each.kept.append(count)
                elif accept:
                    r.commit(accept)
            each.cache.settle(each.e)
        equal(three, one, outs)
        assert three.cache.digest() == one.cache.digest()
        assert one.cache.pos == (1, 3)[swaps] + accept * (swaps + 1)


def test_a_recorded_step_leaves_what_the_three_operations_leave(both: Any) -> None:
    three, one = both()
    recorded = []
    for each in (three, one):
        each.step(2, 1)
        each.cache.advance(each.e, 2)
        first, second = each.prepare(2, 2), each.prepare(3, 3)
        with each.e.capture() as graph:
            outs = each.step(2, 2, first)
            each.cache.advance(each.e, 2)
            with Round(each.cache, each.e, width=3) as r:
                outs += each.step(3, 3, second)
                r.commit(2)
        recorded.append((graph, outs))
    for _ in range(3):
        for graph, _ in recorded:
            graph.launch()
        equal(three, one, (recorded[0][1], recorded[1][1]))
        assert three.cache.digest() == one.cache.digest()


def test_a_batch_takes_a_recurrent_step_as_the_three_operations(both: Any) -> None:
    three, one = both(3)
    for b in range(3):  # each sequence from a place of its own
        for each in (three, one):
            alone = Layers(each.e, each.members[b], fused=False)
            for seed in range(b):
                alone.step(1, 40 + seed)
                alone.cache.advance(each.e, 1)
    for seed, rows in ((1, 1), (2, 5)):
        outs = three.step(rows, seed), one.step(rows, seed)
        equal(three, one, outs)
        for each in (three, one):
            each.cache.advance(each.e, rows)
    assert [a.digest() for a in three.members] == [b.digest() for b in one.members]


def test_it_counts_as_the_convolution_and_the_scan_of_its_layer(both: Any) -> None:
    three, one = both()
    il = next(il for il, layer in enumerate(one.cache.recur) if layer is not None)
    one.step(2, 0)
    assert one.cache.recur[il].step_ops == StepOp.CONV | StepOp.SCAN
    before = image(one.cache)
    with pytest.raises(StateError, match=rf"layer {il} has run recur_step in this step; each runs once"):
        one.step(2, 0)
    one.fused = False
    with pytest.raises(StateError, match=rf"layer {il} has run conv in this step"):
        one.step(2, 0)
    layer = three.cache.recur[il]
    x, w = (put(three.e, rows_of(0, il, name, 0, *shape)) for name, shape in
            (("x", (2, layer.conv_dim)), ("w", (layer.conv_dim, layer.d_conv))))  # fmt: skip
    ops.conv_update(three.e, three.cache, il, x, w, three.e.uninit(x.len))
    three.fused = True
    with pytest.raises(StateError, match=rf"layer {il} has run conv in this step"):
        three.step(2, 0)
    assert image(one.cache) == before


def test_no_rows_do_nothing(both: Any) -> None:
    _, one = both()
    before = image(one.cache)
    one.step(0, 0)
    assert image(one.cache) == before
    assert one.cache.step_rows == 0
