"""CachePlan: what it lists, what it sums to, what it refuses; pure arithmetic, no device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from caches import POLICY, TINY_SSM, attention_only, gemma, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_driver.config import Gemma4Config, ModelConfig, SsmConfig, Step35Config
from memra_driver.errors import ConfigError
from memra_driver.formats import FORMATS, FormatPolicy
from memra_driver.plan import ALIGN_BYTES, CacheOptions, CachePlan, PlanRow

HEALTH_BYTES = 88
MIB = 1 << 20


def plan(cfg: ModelConfig, max_ctx: int = 64, fence: Iterable[int] | None = None, **options: Any) -> CachePlan:
    return CachePlan(cfg, max_ctx, POLICY, CacheOptions(**options), None if fence is None else tuple(fence))


def sizes(cache_plan: CachePlan) -> list[tuple[str, int | None, int]]:
    """(plane, layer, bytes) in the order of the walk."""
    return [(row.plane, row.layer, row.bytes) for row in cache_plan.planes]


# Bytes of the tiny geometry, by hand: 2 heads of 64 are 4 blocks; 128 channels, 3 columns; 2 states of 32 x 32.
K_BYTES, V_BYTES = 64 * 4 * 34 + 8, 64 * 4 * 24 + 8
CONV_BYTES, STATE_BYTES = 128 * 3 * 4, 2 * 32 * 32 * 4
TAPE_ROW_BYTES = 4 * (128 + 3 * 2 * 32 + 2 * 2)  # x, then q, k, v, then both gates
OURS = [("pos_d", None, 4), ("health", None, HEALTH_BYTES)]


def attention(il: int, k_bytes: int = K_BYTES, v_bytes: int = V_BYTES) -> list[tuple[str, int, int]]:
    return [("k", il, k_bytes), ("v", il, v_bytes), ("len_d", il, 4)]


def recurrent(il: int) -> list[tuple[str, int, int]]:
    return [("conv_state", il, CONV_BYTES), ("ssm_state", il, STATE_BYTES), ("ssm_state_alt", il, STATE_BYTES)]


def walk(kinds: str) -> list[tuple[str, int, int]]:
    """The planes of layers, one letter each: f full, l linear, - nothing."""
    planes = {"f": attention, "l": recurrent, "-": lambda il: []}
    return [plane for il, kind in enumerate(kinds) for plane in planes[kind](il)]


# Every plane is priced


@pytest.mark.parametrize(
    ("cfg", "kinds"),
    [
        (tiny(), "lllflllf"),
        (tiny(n_layer=9, nextn_predict_layers=1), "lllflllfl"),
        (tiny(n_layer=3), "lll"),
        (attention_only(), "fff"),
        (tiny(full_attention_interval=1, ssm=None), "ffffffff"),
    ],
    ids=["interval 4", "mtp layer beyond the trunk", "no attention layers", "no linear layers", "interval 1"],
)
def test_the_planes_are_those_of_the_rust_walk_and_then_the_counters(cfg: ModelConfig, kinds: str) -> None:
    assert sizes(plan(cfg)) == walk(kinds) + OURS


def test_a_layer_that_borrows_its_kv_gets_no_plane() -> None:
    windowed, globals_ = (64 * 4 * 1 * 32 + 8,) * 2, (64 * 2 * 2 * 32 + 8,) * 2  # e4m3 by Gemma's default
    owners = [*attention(0, *windowed), *attention(1, *windowed), *attention(2, *globals_)]
    assert sizes(plan(gemma(shared=3))) == owners + OURS
    assert sizes(plan(gemma(shared=6))) == OURS
    assert len(plan(gemma()).planes) == 6 * 3 + 2


def test_skip_mtp_state_leaves_the_trailing_layers_out_and_nothing_else() -> None:
    cfg = tiny(n_layer=9, nextn_predict_layers=1)
    assert sizes(plan(cfg, skip_mtp_state=True)) == walk("lllflllf-") + OURS
    assert plan(cfg).mtp_bytes == CONV_BYTES + 2 * STATE_BYTES
    assert plan(cfg, skip_mtp_state=True).mtp_bytes == 0
    attention_mtp = attention_only(4, nextn_predict_layers=2)
    assert sizes(plan(attention_mtp, skip_mtp_state=True)) == walk("ff--") + OURS


@pytest.mark.parametrize("width", [0, 4, 64])
def test_a_round_width_adds_one_tape_per_recurrent_layer(width: int) -> None:
    tapes = [("tape", il, width * TAPE_ROW_BYTES) for il in (0, 1, 2, 4, 5, 6)] if width else []
    assert sizes(plan(tiny(), round_width=width)) == walk("lllflllf") + OURS + tapes
    assert plan(tiny(), round_width=width).totals["tape"] == 6 * width * TAPE_ROW_BYTES
    assert plan(attention_only(), round_width=width).totals["tape"] == 0


def test_reserved_logits_and_taps_are_planes_and_leave_the_first_use() -> None:
    reserved = plan(tiny(), reserve_logits=True, reserve_taps=((1, 6), 5))
    assert sizes(reserved)[-2:] == [("logits", None, 50 * 4), ("taps", None, 5 * 2 * 32 * 4)]
    assert set(reserved.first_use) == {"snapshot", "attend_scratch"}
    later = plan(tiny()).first_use
    assert later["logits"] == 50 * 4
    assert later["snapshot"] == 6 * (CONV_BYTES + STATE_BYTES)  # both are multiples of 256: no padding between


def test_a_model_with_one_tap_column_has_a_ring_of_no_bytes() -> None:
    cfg = tiny(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1))
    assert [row.bytes for row in plan(cfg).planes if row.plane == "conv_state"] == [0] * 6


def test_a_cache_of_no_tokens_keeps_its_tail_pads() -> None:
    empty = plan(tiny(), max_ctx=0)
    assert [row.bytes for row in empty.planes if row.group == "kv"] == [8] * 4
    assert (empty.totals["kv"], empty.totals["tail_pad"]) == (0, 32)


def test_the_totals_name_every_term_and_add_up_to_the_arena() -> None:
    found = plan(tiny(n_layer=9, nextn_predict_layers=1), round_width=4, reserve_logits=True, reserve_taps=((0,), 2))
    totals = found.totals
    assert totals == {
        "kv": 2 * (K_BYTES + V_BYTES - 16), "tail_pad": 4 * 8, "recurrent": 7 * (CONV_BYTES + STATE_BYTES),
        "double_buffer": 7 * STATE_BYTES, "counters": 3 * 4 + HEALTH_BYTES, "tape": 7 * 4 * TAPE_ROW_BYTES,
        "logits": 200, "taps": 2 * 32 * 4, "padding": totals["padding"],
    }  # fmt: skip
    assert sum(totals.values()) == found.arena_bytes
    assert sum(totals.values()) - totals["padding"] == found.plane_bytes


def test_the_state_of_the_27b_is_144_mib_and_5_625_mib_per_copy_over_its_trunk() -> None:
    cfg = ModelConfig.from_preset("qwen3.6-27b")
    trunk, whole = plan(cfg, 1024, skip_mtp_state=True), plan(cfg, 1024)

    def by_plane(found: CachePlan, name: str) -> tuple[int, int]:
        rows = [row for row in found.planes if row.plane == name]
        return len(rows), sum(row.bytes for row in rows)

    assert by_plane(trunk, "ssm_state") == by_plane(trunk, "ssm_state_alt") == (48, 144 * MIB)
    assert by_plane(trunk, "conv_state") == (48, 5.625 * MIB)
    assert by_plane(whole, "ssm_state") == (49, 147 * MIB)
    assert by_plane(whole, "conv_state") == (49, round(5.7421875 * MIB))
    assert whole.first_use["snapshot"] == 147 * MIB + round(5.7421875 * MIB)
    assert trunk.first_use["snapshot"] == 144 * MIB + round(5.625 * MIB)


def test_the_9b_at_8192_tokens_has_the_numbers_that_are_quoted_for_it() -> None:
    found = plan(ModelConfig.from_preset("qwen3.5-9b"), 8192)
    assert found.totals["kv"] == 8 * 8192 * 1856
    assert found.totals["recurrent"] + found.totals["double_buffer"] == 25 * (98304 + 2 * 2097152)
    assert found.first_use["snapshot"] == 25 * 2195456


# Formats


@pytest.mark.parametrize("k", ["q8_0", "fp8"])
@pytest.mark.parametrize("v", ["q5_1", "q4_0", "fp8"])
def test_bytes_per_token_are_whole_blocks_for_every_pair_of_formats(k: str, v: str) -> None:
    cfg = attention_only(head_dim_k=96, head_dim_v=160)
    found = CachePlan(cfg, 7, FormatPolicy(k=k, v=v))
    for dim, tok, form in zip(found.kv_dims(0), found.tok_bytes(0), (FORMATS[k], FORMATS[v]), strict=True):
        assert tok * 32 == dim * form.block_bytes
    assert [row.bytes for row in found.planes[:2]] == [7 * tok + 8 for tok in found.tok_bytes(0)]


def test_the_policy_is_read_from_the_environment_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CachePlan(attention_only(), 8)
    monkeypatch.setenv("MEMRA_KV_V", "q4_0")
    after = CachePlan(attention_only(), 8)
    assert [form.name for form in before.formats(0)] == ["q8_0", "q5_1"]
    assert [form.name for form in after.formats(0)] == ["q8_0", "q4_0"]
    assert CachePlan(attention_only(), 8, POLICY).formats(0)[1].name == "q5_1"


# Geometry


@pytest.mark.parametrize("head_dim", [80, 100, 33, 0])
@pytest.mark.parametrize("which", ["head_dim_k", "head_dim_v"])
def test_a_head_dim_that_is_no_positive_multiple_of_32_is_refused_naming_the_layer(which: str, head_dim: int) -> None:
    with pytest.raises(ConfigError, match=rf"layer 3: {which} is {head_dim}\b"):
        plan(tiny(**{which: head_dim}))


def test_head_dim_96_is_whole_blocks_and_k_may_differ_from_v() -> None:
    found = plan(tiny(head_dim_k=96, head_dim_v=32))
    assert (found.kv_dims(3), found.tok_bytes(3)) == ((192, 64), (6 * 34, 2 * 24))


def test_one_windowed_layer_with_head_dim_80_among_valid_ones_is_refused() -> None:
    part = gemma().gemma4
    assert part is not None
    values = {field: getattr(part, field) for field in part.__dataclass_fields__}
    bad = type(part)(**values | {"key_length_swa": 80, "swa_pattern": (False, False, False, False, True, False)})
    with pytest.raises(ConfigError, match=r"layer 4: head_dim_k is 80\b"):
        plan(gemma(gemma4=bad))


def test_a_head_dim_matters_only_where_a_layer_owns_kv() -> None:
    assert sizes(plan(tiny(n_layer=3, head_dim_k=80, head_dim_v=0))) == walk("lll") + OURS


def test_the_dims_of_borrowing_layers_are_not_checked() -> None:
    part = gemma().gemma4
    assert part is not None
    values = {field: getattr(part, field) for field in part.__dataclass_fields__}
    shared = type(part)(**values | {"key_length_global": 80, "shared_kv_layers": 4})
    assert [row.layer for row in plan(gemma(gemma4=shared)).planes if row.plane == "k"] == [0, 1]


def test_step35_is_sized_by_the_global_head_count() -> None:
    part = Step35Config((4,) * 8, (1,) * 8, (False, True) * 4, 512)
    found = plan(tiny(full_attention_interval=0, ssm=None, arch="step35", step35=part))
    assert {found.kv_dims(il) for il in range(8)} == {(128, 128)}


@pytest.mark.parametrize("d_conv", [0, 9])
def test_a_convolution_of_0_or_9_taps_is_refused_where_a_recurrent_layer_exists(d_conv: int) -> None:
    ssm = SsmConfig(conv_kernel=d_conv, state_size=32, time_step_rank=2, group_count=1)
    with pytest.raises(ConfigError, match=f"layer 0: conv_kernel is {d_conv}"):
        plan(tiny(ssm=ssm))
    assert sizes(plan(tiny(full_attention_interval=0, ssm=ssm))) == walk("ffffffff") + OURS


@pytest.mark.parametrize("field", ["state_size", "time_step_rank", "group_count"])
def test_a_recurrent_layer_without_a_size_is_refused_by_name(field: str) -> None:
    values = {"conv_kernel": 4, "state_size": 32, "time_step_rank": 2, "group_count": 1}
    with pytest.raises(ConfigError, match=f"layer 0: {field} is 0"):
        plan(tiny(ssm=SsmConfig(**values | {field: 0})))


def test_a_recurrent_layer_of_a_model_without_ssm_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 0 is recurrent"):
        plan(tiny(ssm=None))


def test_a_state_size_without_a_kernel_is_planned_and_named_by_check_ops() -> None:
    odd = plan(tiny(ssm=SsmConfig(conv_kernel=4, state_size=16, time_step_rank=2, group_count=1)))
    (sentence,) = odd.check_ops()
    assert "gdn_scan" in sentence
    assert "16" in sentence
    for size in (32, 64, 128, 256):
        ssm = SsmConfig(conv_kernel=4, state_size=size, time_step_rank=2, group_count=1)
        assert plan(tiny(ssm=ssm)).check_ops() == []
    assert plan(attention_only()).check_ops() == []


@pytest.mark.parametrize("own_heads", [0, 1, 3])
def test_a_borrowing_layer_is_judged_by_the_heads_that_it_reads(own_heads: int) -> None:
    heads = (4, 4, 2, 4, own_heads, own_heads)  # the last two borrow from layers 3 and 2
    part = Gemma4Config(heads, (True, True, False) * 2, 8, 64, 64, shared_kv_layers=2)
    assert plan(gemma(gemma4=part, n_head=8)).check_ops() == []
    problems = plan(gemma(gemma4=part, n_head=6)).check_ops()
    assert [problem.partition(":")[0] for problem in problems] == [f"attend, layer {il}" for il in (0, 1, 3, 4)]


@pytest.mark.parametrize("max_ctx", [-1, 2**31, 2**40, 1.5, "64", True, None])
def test_a_context_that_no_i32_counter_can_hold_is_refused(max_ctx: Any) -> None:
    with pytest.raises(ConfigError, match="max_ctx"):
        CachePlan(tiny(), max_ctx, POLICY)


def test_a_row_that_a_kernel_cannot_count_in_an_int_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer 0: .*kv_dim_k is 2147483648"):
        plan(attention_only(n_head_kv=2**16, head_dim_k=2**15, head_dim_v=32), max_ctx=0)
    with pytest.raises(ConfigError, match=r"layer 0: n_head is 2147483648 query heads"):
        plan(attention_only(n_head=2**31))
    with pytest.raises(ConfigError, match=r"layer 0: .*conv_dim is 2147483648"):
        plan(tiny(ssm=SsmConfig(conv_kernel=2, state_size=2**15, time_step_rank=2**15, group_count=2**14)))


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 0}, {"max_rows": -1}, {"max_rows": 1.5}, {"max_rows": "4"}, {"round_width": -1},
        {"round_width": 2.5}, {"round_width": None}, {"reserve_taps": ((), 1)}, {"reserve_taps": ((0,), 0)},
        {"reserve_taps": ((0,), -1)}, {"reserve_taps": ((0,), 1.5)}, {"reserve_taps": (("0",), 1)},
        {"reserve_taps": ((0,),)}, {"reserve_taps": 3}, {"max_rows": 2**31}, {"round_width": 2**31},
        {"reserve_taps": ((0,), 2**63)},
    ],
    ids=repr,
)  # fmt: skip
def test_an_option_that_is_no_count_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        CacheOptions(**options)


def test_taps_of_a_layer_that_does_not_exist_or_of_two_devices_are_refused() -> None:
    for il in (-1, 8):
        with pytest.raises(ConfigError, match=f"layer {il}"):
            plan(tiny(), reserve_taps=((il,), 1))
    with pytest.raises(ConfigError, match="share"):
        plan(tiny(), fence=(0, 4, 8), reserve_taps=((3, 4), 1))


def test_what_the_model_does_not_describe_cannot_be_reserved() -> None:
    with pytest.raises(ConfigError, match="n_vocab"):
        plan(tiny(n_vocab=0), reserve_logits=True)
    with pytest.raises(ConfigError, match="n_embd"):
        plan(tiny(n_embd=0), reserve_taps=((0,), 1))


# Fences


@pytest.mark.parametrize(
    ("fence", "why"),
    [
        ((0, 4, 4, 8), "increasing"), ((0, 5, 4, 8), "increasing"), ((8, 0), "start at 0"), ((1, 8), "start at 0"),
        ((0, 9), "end at 8"), ((0, 4), "end at 8"), ((0,), "two"), ((), "two"), ((0, 4.0, 8), "layer numbers"),
        ((0, -1, 8), "increasing"),
    ],
)  # fmt: skip
def test_a_fence_that_is_no_partition_is_refused(fence: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(tiny(), fence=fence)


def test_a_fence_ends_at_all_layers_or_at_the_trunk_and_mtp_layers_go_to_the_last_stage() -> None:
    cfg = tiny(n_layer=9, nextn_predict_layers=1)
    for fence in ((0, 3, 8), (0, 3, 9)):
        found = plan(cfg, fence=fence)
        assert [found.device_of(il) for il in range(9)] == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match="9 or 8"):
        plan(cfg, fence=(0, 3, 7))


@pytest.mark.parametrize("placement", [(0, 2), (-1, 0), (1,), (0, 1, 1)])
def test_a_placement_on_devices_that_cannot_be_is_refused(placement: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"placement|devices for the 2 stages"):
        CachePlan(tiny(), 8, POLICY, fence=(0, 4, 8), placement=placement)
    assert CachePlan(tiny(), 8, POLICY, fence=(0, 4, 8), placement=(1, 0)).device_of(0) == 1


@pytest.mark.parametrize("fence", [(0, 3, 8), (0, 1, 2, 8), (0, 3, 4, 8), (0, 8)])
def test_a_fence_moves_planes_between_devices_and_changes_no_size(fence: tuple[int, ...]) -> None:
    whole, cut = plan(tiny(), round_width=4), plan(tiny(), round_width=4, fence=fence)
    assert [row for row in sizes(cut) if row[1] is not None] == [row for row in sizes(whole) if row[1] is not None]
    assert len(cut.per_device) == len(fence) - 1
    assert cut.plane_bytes == whole.plane_bytes + (len(fence) - 2) * (4 + HEALTH_BYTES)
    for row in cut.planes:
        if row.layer is not None:
            assert fence[row.device] <= row.layer < fence[row.device + 1]


# The arena


GEOMETRIES = {
    "interval 4": plan(tiny()),
    "mtp": plan(tiny(n_layer=9, nextn_predict_layers=1), round_width=4, reserve_logits=True, reserve_taps=((1,), 3)),
    "mtp attention": plan(attention_only(4, nextn_predict_layers=1)),
    "no attention": plan(tiny(n_layer=3)),
    "gemma": plan(gemma(shared=3), reserve_logits=True),
    "no ring": plan(tiny(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1))),
    "odd sizes": plan(tiny(ssm=SsmConfig(conv_kernel=3, state_size=5, time_step_rank=3, group_count=1)), round_width=1),
    "no tokens": plan(tiny(), max_ctx=0),
    "three stages": plan(tiny(n_layer=9, nextn_predict_layers=1), fence=(0, 3, 4, 9), round_width=4),
}


def check_arena(found: CachePlan) -> None:
    """The rows of each device tile its arena; every plane but a packed counter is aligned."""
    for device in found.per_device:
        rows = [row for row in found.rows if row.device == device.device]
        assert [row.offset for row in rows] == [0, *(row.offset + row.bytes for row in rows[:-1])]
        assert rows[-1].offset + rows[-1].bytes == device.arena_bytes
        planes = [row for row in rows if row.group != "padding"]
        assert sum(row.bytes for row in planes) == device.plane_bytes
        assert all(row.offset % ALIGN_BYTES == 0 for row in planes if row.dtype != "i32")
        assert all(row.bytes < ALIGN_BYTES for row in rows if row.group == "padding")
    assert found.plane_bytes == sum(device.plane_bytes for device in found.per_device)
    assert found.arena_bytes == sum(device.arena_bytes for device in found.per_device) == sum(found.totals.values())
    assert sorted(found.planes, key=repr) == sorted((r for r in found.rows if r.group != "padding"), key=repr)
    numbers = [number for row in found.rows for number in (row.len, row.bytes, row.offset)]
    assert {type(number) for number in numbers} == {int}


@pytest.mark.parametrize("found", GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_rows_of_a_device_tile_its_arena_without_gap_or_overlap(found: CachePlan) -> None:
    check_arena(found)


@pytest.mark.parametrize("found", GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_arena_is_in_the_stated_order(found: CachePlan) -> None:
    def rank(row: PlanRow) -> tuple[int, int]:
        mtp = row.layer is not None and row.layer >= found.cfg.n_trunk
        order = ["kv", "len_d", "pos_d", "health", "conv_state", "ssm_state mtp", "ssm_state", "ssm_state_alt",
                 "ssm_state_alt mtp", "tape", "logits", "taps"]  # fmt: skip
        name = "kv" if row.plane in ("k", "v") else row.plane
        layer = -1 if row.layer is None else row.layer
        return order.index(f"{name} mtp" if mtp and row.plane.startswith("ssm") else name), layer

    for device in found.per_device:
        ranks = [rank(row) for row in found.rows if row.device == device.device and row.group != "padding"]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize("found", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_snapshot_keeps_exactly_the_rings_and_the_states_in_one_range(found: CachePlan) -> None:
    for device in found.per_device:
        begin, end = device.snapshot
        inside = [row.plane for row in found.rows if row.device == device.device and row.bytes
                  and begin <= row.offset < end and row.group != "padding"]  # fmt: skip
        wanted = [row.plane for row in found.rows if row.device == device.device and row.bytes
                  and row.plane in ("conv_state", "ssm_state")]  # fmt: skip
        assert inside == wanted
        assert begin % ALIGN_BYTES == end % ALIGN_BYTES == 0
        assert device.snapshot_bytes == end - begin
    assert found.first_use["snapshot"] == sum(device.snapshot_bytes for device in found.per_device)


def test_counters_of_a_device_are_neighbours_and_pos_d_is_the_last() -> None:
    counters = [row for row in plan(attention_only(5)).rows if row.dtype == "i32"]
    assert [row.plane for row in counters] == ["len_d"] * 5 + ["pos_d"]
    assert {b.offset - a.offset for a, b in pairwise(counters)} == {4}


# Large numbers


@pytest.mark.parametrize("tokens", [246_722, 246_723, 246_724, 262_143, 493_447, 493_448, 2**31 - 1])
def test_byte_counts_are_exact_on_both_sides_of_2_31_and_2_32(tokens: int) -> None:
    cfg = attention_only(1, n_head_kv=64, head_dim_k=128, head_dim_v=128)  # 8192 elements: 8704 bytes of q8_0
    found = plan(cfg, tokens)
    assert found.tok_bytes(0) == (8704, 6144)
    assert sizes(found)[:2] == [("k", 0, tokens * 8704 + 8), ("v", 0, tokens * 6144 + 8)]
    check_arena(found)


def test_an_e4m3_plane_of_exactly_2_31_bytes_keeps_its_pad() -> None:
    cfg = attention_only(1, n_head_kv=64, head_dim_k=128, head_dim_v=128)
    found = CachePlan(cfg, 262_144, FormatPolicy(kv_fp8=True))
    assert [row.bytes for row in found.planes[:2]] == [2**31 + 8] * 2


def test_bytes_that_no_i64_holds_are_refused_by_plane_or_device() -> None:
    wide = {"n_head_kv": 2**16, "head_dim_k": 2**15 - 32, "head_dim_v": 2**15 - 32}  # 2**31 elements, or nearly
    one = plan(attention_only(1, **wide), 2**31 - 1)
    assert 2**61 < one.planes[1].bytes < one.planes[0].bytes < 2**63
    with pytest.raises(ConfigError, match=rf"the arena of device 0 needs more than {2**63 - 1} bytes"):
        plan(attention_only(3, **wide), 2**31 - 1)
    assert len(plan(attention_only(3, **wide), 2**31 - 1, fence=(0, 1, 2, 3)).per_device) == 3
    with pytest.raises(ConfigError, match=rf"taps needs more than {2**63 - 1} bytes"):
        plan(tiny(n_embd=2**31), reserve_taps=((0,), 2**31 - 1))


# Export


@pytest.mark.parametrize("found", GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_json_holds_the_whole_plan(found: CachePlan) -> None:
    data = json.loads(found.to_json())
    assert tuple(PlanRow(**row) for row in data["rows"]) == found.rows
    assert (data["plane_bytes"], data["arena_bytes"]) == (found.plane_bytes, found.arena_bytes)
    assert data["totals"] == found.totals
    assert data["first_use"] == found.first_use
    assert (tuple(data["fence"]), data["max_ctx"]) == (found.fence, found.max_ctx)
    assert FormatPolicy(**data["policy"]) == found.policy
    assert [device["arena_bytes"] for device in data["per_device"]] == [d.arena_bytes for d in found.per_device]


@given(
    n_layer=st.integers(1, 12), interval=st.integers(0, 5), nextn=st.integers(0, 2), heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 3)), d_conv=st.integers(1, 8), state=st.integers(1, 40),
    num_v=st.integers(1, 5), num_k=st.integers(1, 3), max_ctx=st.integers(0, 300), width=st.integers(0, 5),
    skip=st.booleans(), cut=st.integers(1, 11),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_geometry_tiles_its_arena(
    n_layer: int, interval: int, nextn: int, heads: int, dims: tuple[int, int], d_conv: int, state: int, num_v: int,
    num_k: int, max_ctx: int, width: int, skip: bool, cut: int,
) -> None:  # fmt: skip
    ssm = SsmConfig(conv_kernel=d_conv, state_size=state, time_step_rank=num_v, group_count=num_k)
    cfg = ModelConfig(
        n_layer, heads, 32 * dims[0], 32 * dims[1], full_attention_interval=interval,
        nextn_predict_layers=min(nextn, n_layer - 1), ssm=ssm,
    )  # fmt: skip
    fence = (0, cut, n_layer) if cut < n_layer else None
    found = plan(cfg, max_ctx, fence=fence, round_width=width, skip_mtp_state=skip)
    check_arena(found)
    assert {row.layer for row in found.planes if row.layer is not None} == {
        il for il in range(n_layer) if not (skip and il >= cfg.n_trunk)
    }


def test_the_tiny_state_is_what_these_numbers_say() -> None:
    assert (TINY_SSM.conv_dim, TINY_SSM.pad, TINY_SSM.key_dim) == (128, 3, 32)


def test_caches_of_one_kind_share_their_plan_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, options = tiny(), CacheOptions(max_rows=3)
    first = CachePlan.of(cfg, 64, POLICY, options)
    assert CachePlan.of(tiny(), 64, FormatPolicy(), CacheOptions(max_rows=3)) is first
    others = [
        CachePlan.of(cfg, 65, POLICY, options), CachePlan.of(cfg, 64, FormatPolicy(v="q4_0"), options),
        CachePlan.of(cfg, 64, POLICY, None), CachePlan.of(cfg, 64, POLICY, options, (0, 4, 8)),
        CachePlan.of(cfg, 64, POLICY, options, (0, 4, 8), (0, 0)), CachePlan.of(tiny(n_head_kv=4), 64, POLICY, options),
    ]  # fmt: skip
    assert len({id(each) for each in (first, *others)}) == 7
    for form in ("q5_1", "q4_0", "q5_1"):  # read at each call
        monkeypatch.setenv("MEMRA_KV_V", form)
        assert CachePlan.of(cfg, 64, None, options).policy == FormatPolicy(v=form)


@pytest.mark.parametrize("max_ctx", [True, 64.0, "64", -1])
def test_a_plan_that_is_refused_is_refused_by_of_too(max_ctx: Any) -> None:
    CachePlan.of(tiny(), 1, POLICY, None)
    CachePlan.of(tiny(), 64, POLICY, None)
    with pytest.raises(ConfigError, match="max_ctx"):
        CachePlan.of(tiny(), max_ctx, POLICY, None)


@pytest.mark.parametrize("split", [4.0, np.int64(4)])
def test_a_fence_of_no_whole_numbers_is_refused_whatever_went_before(split: Any) -> None:
    CachePlan.of(tiny(), 64, POLICY, None, (0, 4, 8), (0, 0))
    with pytest.raises(ConfigError, match="fence"):
        CachePlan.of(tiny(), 64, POLICY, None, (0, split, 8), (0, 0))
