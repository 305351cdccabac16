"""What the bench measures of our operations, group by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memra_driver.bench.measure import Bench, watched
from memra_driver.bench.raw import raw_birth, raw_copy
from memra_driver.bench.rows import (
    PAIR,
    Attention,
    Pair,
    Row,
    Sizes,
    append_name,
    recurrent_name,
    states_name,
    step_name,
)
from memra_driver.bench.work import ATTENTION, FUSED, RECURRENT, Workload, attention_model, recurrent_model
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig
from memra_driver.formats import K_FORMATS, V_FORMATS, FormatPolicy
from memra_driver.op_bytes import kept_bytes
from memra_driver.plan import CacheOptions, CachePlan
from memra_driver.round import Round

PAIRS: list[Pair] = [(k, v) for k in K_FORMATS for v in V_FORMATS]
CALLS = 6  # snapshots, or rounds, between two events


def snapshots(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """snapshot_into and rollback at both parities of the trunk, rounds and their commits, the birth of a cache."""
    e, cfg = bench.e, sizes.cfg
    yield from _births(bench, sizes, cfg)
    options = CacheOptions(skip_mtp_state=True)
    count = min(CALLS, bench.sets(2 * state_bytes(cfg, options), least=2))
    caches = [Cache.new(e, cfg, 64, policy=FormatPolicy(), options=options) for _ in range(count)]
    snaps: list[Any] = []
    try:
        for cache in caches:
            for layer in filter(None, cache.recur):
                for plane in (layer.conv_state, layer.ssm_state):
                    e.copy_bytes(plane.ptr, bench.random(plane.len).ptr, plane.nbytes)
            snaps.append(cache.snapshot(e))
        turns = [(caches[i % count], snaps[i % count]) for i in range(CALLS)]
        n_bytes = 2 * snaps[0].nbytes
        for parity in ("even", "odd"):
            if parity == "odd":
                for cache in caches:
                    for layer in filter(None, cache.recur):
                        layer.swap()

            def renew() -> None:
                for cache, snap in turns:
                    cache.snapshot_into(e, snap)

            def back() -> None:
                for cache, snap in turns:
                    cache.rollback(e, snap, 0)

            raw = raw_copy(bench, min(n_bytes // 2, bench.room.nbytes))
            host = bench.host_beside([renew, back, lambda raw=raw: [raw() for _ in turns]], CALLS)  # type: ignore[misc]
            for name, run, seconds in (("snapshot_into", renew, host[0]), ("rollback", back, host[1])):
                yield Row(
                    "snapshot", f"{name}, {parity}", bytes=n_bytes, seconds=bench.eager_seconds(run, run, CALLS),
                    copy_seconds=bench.copy_seconds(n_bytes), host_seconds=seconds,
                )  # fmt: skip
            name = f"raw copy call, {parity}"
            yield Row("snapshot", name, who="cuda-python", bytes=n_bytes, host_seconds=host[2])
    finally:
        for each in [*snaps, *caches]:
            each.close()
    yield from _rounds(bench, sizes, cfg)


def state_bytes(cfg: ModelConfig, options: CacheOptions) -> int:
    begin, end = CachePlan(cfg, 0, FormatPolicy(), options).per_device[0].snapshot
    return end - begin


def _births(bench: Bench, sizes: Sizes, cfg: ModelConfig) -> Iterator[Row]:
    """A birth while the driver takes freed memory back at each wait, and while the process keeps it.

    Beside each the driver's part of it: one allocation of as many bytes and their clear.
    """
    e, made, name, policy = bench.e, [], f"Cache.new at {sizes.new_tokens}", FormatPolicy()
    n_bytes = CachePlan(cfg, sizes.new_tokens, policy).arena_bytes
    birth, end = raw_birth(bench, n_bytes)
    for kept, title in ((0, name), (1 << 40, f"{name}, memory kept")):
        e.keep_memory(kept)
        seconds = bench.host_seconds(
            lambda: made.append(Cache.new(e, cfg, sizes.new_tokens, policy=policy)), 1,
            after=lambda: made.pop().close(),
        )  # fmt: skip
        yield Row("snapshot", title, host_seconds=seconds)
        seconds = bench.host_seconds(birth, 1, after=end)
        yield Row("snapshot", f"{title}: allocation and clear", who="cuda-python", bytes=n_bytes, host_seconds=seconds)
    e.keep_memory(0)
    e.trim()


def _rounds(bench: Bench, sizes: Sizes, cfg: ModelConfig) -> Iterator[Row]:
    """How much device work begins a round; a partial commit beside one scan of that width over all layers."""
    e, accepted = bench.e, sizes.accepted
    options = CacheOptions(skip_mtp_state=True, round_width=sizes.round_width)
    with Workload(bench, cfg, tokens=64, rows=sizes.round_width, options=options) as work:
        (cache,), begin = work.caches, work.caches[0].pos
        with watched(e) as done, Round(cache, e, width=sizes.round_width):
            count = len(done)
        yield Row("snapshot", "round begins", count=count)
        steps = {rows: [work.calls(op, rows) for op in ("conv_update", "gdn_prep", "gdn_scan")] for rows in
                 (sizes.round_width, accepted)}  # fmt: skip
        opened: list[Round] = []

        def verify() -> None:
            opened.append(Round(cache, e, width=sizes.round_width).__enter__())
            for il in work.recurrent:
                for call in steps[sizes.round_width]:
                    call(il)

        def commit() -> None:
            opened.pop().commit(accepted)
            cache.pos = begin

        def prepare() -> None:
            conv, prep, _ = steps[accepted]
            for il in work.recurrent:
                conv(il)
                prep(il)

        def scan() -> None:
            for il in work.recurrent:
                steps[accepted][2](il)
            cache.end_step(begin)

        work.run(["conv_update", "gdn_prep", "gdn_scan"], accepted)
        work.place(begin)
        yield Row("snapshot", "partial commit", seconds=bench.eager_seconds(verify, commit, 1))
        yield Row("snapshot", "scan over all layers", seconds=bench.eager_seconds(prepare, scan, 1))


def appends(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """append_kv: many rows in every pair of formats and in odd widths, then few rows."""
    rows = sizes.append_rows
    cases = [(dims, pair) for dims in sizes.append_dims for pair in (PAIRS if dims is sizes.append_dims[0] else [PAIR])]
    for (heads, head_dim), pair in cases:
        layers = max(sizes.append_layers, bench.sets(8 * rows * heads * head_dim))
        model = attention_model(layers, heads, heads, head_dim)
        with Workload(bench, model, tokens=rows, rows=rows, policy=FormatPolicy(*pair)) as work:
            yield _row(bench, work, "append", append_name(heads * head_dim, rows, pair), "append_kv", rows)
    heads, head_dim = sizes.append_dims[0]
    for rows in sizes.few_rows:
        with Workload(bench, attention_model(sizes.few_layers, heads, heads, head_dim), tokens=64, rows=rows) as work:
            row = _row(bench, work, "append", append_name(heads * head_dim, rows), "append_kv", rows)
            with watched(bench.e) as done:
                work.call("append_kv", 0)
            row.count = len(done)
            work.target.advance(bench.e, rows)
            yield row


def attends(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """attend: decoding and verifying at every length, other formats at some."""
    for shape in sizes.attention:
        for pair in (PAIR, *shape.others):
            for tokens in sizes.contexts if pair == PAIR else sizes.other_contexts:
                yield from _attend(bench, shape, pair, tokens)


def _attend(bench: Bench, shape: Attention, pair: Pair, tokens: int) -> Iterator[Row]:
    policy = FormatPolicy(*pair)
    token = sum(shape.n_head_kv * shape.head_dim // 32 * form.block_bytes for form in policy.pair(False, False))
    model = attention_model(bench.sets(token * tokens), shape.n_head, shape.n_head_kv, shape.head_dim)
    with Workload(bench, model, tokens=tokens, policy=policy, fill=True) as work:
        for rows in (1, shape.verify) if shape.verify and pair == PAIR else (1,):
            work.place(tokens - rows, ahead=rows)
            yield _row(bench, work, "attend", shape.name(rows, tokens, pair), "attend", rows, ceiling="read")


def scans(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """gdn_scan for each number of heads and sequences, and of several rows."""
    for heads in sizes.value_heads:
        for batch in sizes.batches:
            yield from _recurrent(bench, sizes, "scan", ("gdn_scan",), heads, batch)


def recurs(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """What stands around the scan, apart and, where there is such a kernel, as one."""
    for heads in sizes.value_heads:
        for batch in sizes.batches:
            yield from _recurrent(bench, sizes, "recur", ("conv_update", "gdn_prep"), heads, batch)
            if FUSED:
                yield from _recurrent(bench, sizes, "recur", ("recur_step",), heads, batch)


def _recurrent(bench: Bench, sizes: Sizes, group: str, names: tuple[str, ...], heads: int, batch: int) -> Iterator[Row]:
    n_bytes = 2 * 4 * batch * heads * sizes.state_size**2
    layers = min(bench.sets(n_bytes // 2), sizes.most_layers)  # in place: each byte of memory is moved twice
    model = recurrent_model(layers, heads, sizes.key_heads, sizes.state_size)
    if group == "scan":
        copy = bench.copy_seconds(n_bytes)
        yield Row("scan", states_name(heads, batch), who="driver", bytes=n_bytes, seconds=copy, copy_seconds=copy)
    rows = sizes.scan_rows if batch == 1 and group == "scan" else 1
    with Workload(bench, model, tokens=64, batch=batch, rows=rows) as work:
        for op in names:
            for each in (1, rows) if rows > 1 else (1,):
                yield _row(bench, work, group, recurrent_name(op, heads, batch, each), op, each)


def steps(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """One decode step of all cache work of a model as one graph, and its operations apart."""
    cfg = sizes.cfg
    options = CacheOptions(skip_mtp_state=True)
    for batch in sizes.step_batches:
        with Workload(bench, cfg, tokens=sizes.step_tokens, batch=batch, options=options, fill=True) as work:
            pos = sizes.step_tokens - 1
            work.place(pos)
            names = (*ATTENTION, *RECURRENT)
            kept = kept_bytes(work.target, 1)
            seconds = work.step_seconds(names)
            yield Row("step", step_name(batch), bytes=kept, seconds=seconds, copy_seconds=bench.copy_seconds(kept))
            for op in names:
                work.place(pos, ahead=int(op == "attend"))
                ceiling = "read" if op == "attend" else "copy"
                row = _row(bench, work, "step", step_name(batch, op), op, 1, ceiling=ceiling)
                calls = len(work.layers(op))
                for field in ("seconds", "copy_seconds", "bytes"):
                    setattr(row, field, (getattr(row, field) or 0) * calls)
                yield row


def _row(bench: Bench, work: Workload, group: str, name: str, op: str, rows: int, *, ceiling: str = "copy") -> Row:
    n_bytes = work.op_bytes(op, rows)
    return Row(
        group, name, bytes=n_bytes, seconds=work.op_seconds(op, rows), copy_seconds=bench.copy_seconds(n_bytes),
        host_seconds=work.host_seconds(op, rows), ceiling=ceiling,
    )  # fmt: skip
