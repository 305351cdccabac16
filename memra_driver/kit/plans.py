"""The plans of a kit: what a cache of every preset, and of some models that show a rule, allocates, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from memra_driver.config import PRESETS, Gemma4Config, ModelConfig, SsmConfig, Step35Config
from memra_driver.errors import KitError, MemraError
from memra_driver.formats import FormatPolicy
from memra_driver.kit.files import Array, Entry, Writer
from memra_driver.plan import CacheOptions, CachePlan
from memra_driver.planes import PLANES

PLANE_CODES = {name: code for code, name in enumerate((*(plane.name for plane in PLANES), "pad"))}
MODEL = (
    "n_layer", "n_head", "n_head_kv", "head_dim_k", "head_dim_v", "n_embd", "n_vocab", "full_attention_interval",
    "nextn_predict_layers",
)  # fmt: skip
PARTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "ssm": (SsmConfig, ("conv_kernel", "state_size", "time_step_rank", "group_count")),
    "gemma4": (
        Gemma4Config,
        ("head_count_kv", "swa_pattern", "sliding_window", "key_length_global", "key_length_swa", "shared_kv_layers"),
    ),
    "step35": (Step35Config, ("head_count", "head_count_kv", "swa_pattern", "sliding_window")),
}


def model_json(cfg: ModelConfig) -> Entry:
    """What sizes a cache, by the names of ModelConfig."""
    parts = {
        name: {field: getattr(part, field) for field in PARTS[name][1]} if (part := getattr(cfg, name)) else None
        for name in PARTS
    }
    return {name: getattr(cfg, name) for name in MODEL} | parts


def planned(args: Entry) -> CachePlan:
    """The plan of a case's args, or the refusal."""
    model = dict(args["model"])
    for name, (kind, _) in PARTS.items():
        if model.get(name) is not None:
            model[name] = kind(**model[name])
    policy, options = FormatPolicy(**args["policy"]), CacheOptions(**args["options"])
    return CachePlan(
        ModelConfig(**model), args["max_ctx"], policy, options, args["fence"], placement=args["placement"]
    )


def args_json(
    cfg: ModelConfig, max_ctx: int, policy: FormatPolicy, options: CacheOptions, fence: Any = None,
    placement: Any = None,
) -> Entry:  # fmt: skip
    """What `planned` takes."""
    return {
        "model": model_json(cfg), "max_ctx": max_ctx, "policy": asdict(policy), "options": asdict(options),
        "fence": fence, "placement": placement,
    }  # fmt: skip


def plan_result(args: Entry) -> tuple[Entry, dict[str, Array]]:
    """What a plan says, as the manifest has it, and its two tables; or the name of the refusal."""
    try:
        plan = planned(args)
    except KitError:
        raise
    except MemraError as error:
        return {"error": type(error).__name__}, {}
    columns = ("layer", "device", "len", "bytes", "offset")
    rows = [
        [PLANE_CODES[row.plane], *(-1 if (value := getattr(row, name)) is None else value for name in columns)]
        for row in plan.rows
    ]
    place = {(row.plane, row.layer, row.device): i for i, row in enumerate(plan.rows) if row.plane != "pad"}
    order = [place[row.plane, row.layer, row.device] for row in plan.planes]
    result = {
        "plane_bytes": plan.plane_bytes, "arena_bytes": plan.arena_bytes, "mtp_bytes": plan.mtp_bytes,
        "totals": plan.totals, "first_use": plan.first_use,
        "per_device": [asdict(each) | {"snapshot": list(each.snapshot)} for each in plan.per_device],
        "unsupported": len(plan.check_ops()),
    }  # fmt: skip
    return result, {"rows": np.array(rows, np.int64), "order": np.array(order, np.int32)}


def plan_cases(writer: Writer) -> Iterator[Entry]:
    """One case for each plan of `_plans`."""
    for title, args in _plans():
        result, tables = plan_result(args)
        arrays = [writer.array("plans.bin", name, "out", table) for name, table in tables.items()]
        yield {"id": f"plan {title}", "op": "plan", "args": args, "arrays": arrays, "result": result}


def _plans() -> Iterator[tuple[str, Entry]]:
    plain, lossy = FormatPolicy(), FormatPolicy("fp8", "q4_0", gkv=False, wkv=False)
    for name in PRESETS:
        cfg = ModelConfig.from_preset(name)
        half = cfg.n_trunk // 2
        every = CacheOptions(8, 4, True, ((0, 2, 5), 3))
        yield f"{name}", args_json(cfg, 8192, plain, CacheOptions())
        yield f"{name} without MTP state", args_json(cfg, 8192, plain, CacheOptions(skip_mtp_state=True))
        yield f"{name} with all reserves, fp8/q4_0", args_json(cfg, 1000, lossy, every)
        wide = FormatPolicy(wkv=False, kv_fp8=True)
        yield f"{name} on two devices", args_json(cfg, 262_144, wide, CacheOptions(64), [0, half, cfg.n_layer])
        yield f"{name} of no tokens", args_json(cfg, 0, plain, CacheOptions(round_width=1, skip_mtp_state=True))
    yield from _rules()


def _model(**other: Any) -> ModelConfig:
    ssm = SsmConfig(conv_kernel=4, state_size=32, time_step_rank=4, group_count=2)
    base: dict[str, Any] = {
        "n_layer": 6, "n_head_kv": 2, "head_dim_k": 64, "head_dim_v": 32, "full_attention_interval": 3, "ssm": ssm,
        "n_embd": 96, "n_vocab": 1001,
    }  # fmt: skip
    return ModelConfig(**base | other)


def _rules() -> Iterator[tuple[str, Entry]]:
    """Small models that each show a rule of sizing, and what is refused."""
    plain, none = FormatPolicy(), CacheOptions()
    mtp = _model(nextn_predict_layers=2)
    for fence, placement in (([0, 2, 4], None), ([0, 2, 6], [0, 0]), ([0, 2, 6], [1, 0]), ([0, 1, 3, 6], [1, 0, 1])):
        title = f"fence {fence}, devices {placement}"
        yield title, args_json(mtp, 77, plain, CacheOptions(round_width=3, reserve_logits=True), fence, placement)
    one_tap = SsmConfig(conv_kernel=1, state_size=16, time_step_rank=3, group_count=1)
    yield "no ring, no kernel", args_json(_model(ssm=one_tap), 5, plain, none)
    swa = (True, True, False, True, True, False)
    gemma = Gemma4Config((2, 2, 1, 2, 2, 1), swa, 8, 128, 64, shared_kv_layers=2)
    for gkv, wkv in ((True, True), (False, True), (True, False), (False, False)):
        policy = FormatPolicy(v="q4_0", gkv=gkv, wkv=wkv, kv_fp8=True)
        cfg = _model(full_attention_interval=0, ssm=None, gemma4=gemma, n_head=4)
        yield f"borrowed K/V, gkv {gkv}, wkv {wkv}", args_json(cfg, 50, policy, none)
    yield "K/V borrowed from another device", args_json(cfg, 50, plain, none, [0, 3, 6])
    lent = Gemma4Config((2, 2, 1, 2, 0, 3), swa, 8, 128, 64, shared_kv_layers=2)
    cfg = _model(full_attention_interval=0, ssm=None, gemma4=lent, n_head=4)
    yield "heads of the layer that lends", args_json(cfg, 50, plain, none)
    step = Step35Config((8, 12, 12, 0, 64, 8), (2,) * 6, (False, True, True), 16)
    yield "query heads by layer", args_json(_model(full_attention_interval=0, ssm=None, step35=step), 9, plain, none)
    broken: list[tuple[str, ModelConfig, int, CacheOptions, Any, Any]] = [
        ("head_dim 48", _model(head_dim_k=48), 9, none, None, None),
        ("head_dim 0", _model(head_dim_v=0), 9, none, None, None),
        ("no heads", _model(n_head_kv=0), 9, none, None, None),
        ("2^31 elements a token", _model(n_head_kv=2**26), 9, none, None, None),
        ("9 taps", _model(ssm=SsmConfig(9, 0, 32, 4, 2)), 9, none, None, None),
        ("no ssm", _model(ssm=None), 9, none, None, None),
        ("states of no rows", _model(ssm=SsmConfig(4, 0, 0, 4, 2)), 9, none, None, None),
        ("no key heads", _model(ssm=SsmConfig(4, 0, 32, 4, 0)), 9, none, None, None),
        ("no states", _model(ssm=SsmConfig(4, 0, 32, 0, 2)), 9, none, None, None),
        ("max_ctx 2^31", _model(), 2**31, none, None, None),
        ("max_ctx -1", _model(), -1, none, None, None),
        ("fence that starts at 1", _model(), 9, none, [1, 6], None),
        ("fence that ends at 5", _model(), 9, none, [0, 5], None),
        ("fence that stands", _model(), 9, none, [0, 3, 3, 6], None),
        ("fence of one post", _model(), 9, none, [0], None),
        ("devices that lack a stage", _model(), 9, none, [0, 3, 6], [0]),
        ("device 2 of 2", _model(), 9, none, [0, 3, 6], [0, 2]),
        ("taps of layer 6", _model(), 9, CacheOptions(reserve_taps=((6,), 1)), None, None),
        ("taps of two devices", _model(), 9, CacheOptions(reserve_taps=((0, 5), 1)), [0, 3, 6], None),
        ("taps without n_embd", _model(n_embd=0), 9, CacheOptions(reserve_taps=((0,), 1)), None, None),
        ("logits without n_vocab", _model(n_vocab=0), 9, CacheOptions(reserve_logits=True), None, None),
    ]
    for title, cfg, max_ctx, options, fence, placement in broken:
        yield title, args_json(cfg, max_ctx, plain, options, fence, placement)
