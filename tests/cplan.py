"""The C library's plans and caches through ctypes, and cases that Python and C plan alike.

A `Case` is one call: what a model, policy, options, fence and placement are, as keywords that both sides take.
`outcome_of_python` and `outcome_of_c` are the rows and sums of the plan, or the sentence that refuses it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import standin

from memra_driver import layout, native
from memra_driver.config import Gemma4Config, ModelConfig, SsmConfig, Step35Config
from memra_driver.errors import ConfigError
from memra_driver.formats import FORMATS, FormatPolicy
from memra_driver.plan import CacheOptions, CachePlan

OK, CONFIG, ARRAY, DEVICE, STATE, OUT_OF_MEMORY, ABI, DRIVER = 0, 1, 2, 3, 5, 9, 10, 12  # enum memra_status
NO_ARENA = 1


class ConfigC(ctypes.Structure):
    """memra_config."""

    _fields_ = (
        *((name, c_uint32) for name in (
            "struct_size", "n_layer", "n_head", "n_head_kv", "head_dim_k", "head_dim_v", "n_embd", "n_vocab",
            "full_attention_interval", "nextn_predict_layers", "has_ssm", "ssm_conv_kernel", "ssm_state_size",
            "ssm_time_step_rank", "ssm_group_count", "has_gemma4",
        )),
        ("gemma4_head_count_kv", POINTER(c_uint32)), ("gemma4_swa_pattern", POINTER(c_uint8)),
        *((name, c_uint32) for name in (
            "gemma4_n_head_count_kv", "gemma4_n_swa_pattern", "gemma4_sliding_window", "gemma4_key_length_global",
            "gemma4_key_length_swa", "gemma4_shared_kv_layers", "has_step35", "step35_n_head_count",
        )),
        ("step35_head_count", POINTER(c_uint32)), ("step35_swa_pattern", POINTER(c_uint8)),
        ("step35_n_swa_pattern", c_uint32), ("step35_sliding_window", c_uint32),
    )  # fmt: skip


class PolicyC(ctypes.Structure):
    """memra_policy."""

    _fields_ = (
        ("struct_size", c_uint32), ("k", c_int32), ("v", c_int32), ("gkv", c_uint32), ("wkv", c_uint32),
        ("kv_fp8", c_uint32),
    )  # fmt: skip


class OptionsC(ctypes.Structure):
    """memra_options."""

    _fields_ = (
        ("struct_size", c_uint32), ("reserve_logits", c_uint32), ("max_rows", c_int64), ("round_width", c_int64),
        ("tap_layers", POINTER(c_int32)), ("tap_rows", c_int64), ("n_tap_layers", c_uint32),
        ("skip_mtp_state", c_uint32), ("strict", c_uint32), ("reserved", c_uint32),
    )  # fmt: skip


class PlaneC(ctypes.Structure):
    """memra_plane."""

    _fields_ = (
        ("name", c_char_p), ("owner", c_char_p), ("group", c_char_p), ("dtype", c_int32), ("section", c_int32),
        ("mtp_section", c_int32), ("reserved", c_int32),
    )  # fmt: skip


class PlanRowC(ctypes.Structure):
    """memra_plan_row."""

    _fields_ = (
        ("plane", c_char_p), ("layer", c_int32), ("device", c_int32), ("dtype", c_int32), ("reserved", c_uint32),
        ("len", c_int64), ("n_bytes", c_int64), ("offset", c_int64),
    )  # fmt: skip


class PlanC(ctypes.Structure):
    """memra_plan."""

    _fields_ = (
        ("rows", POINTER(PlanRowC)), ("arena_bytes", POINTER(c_int64)), ("plane_bytes", POINTER(c_int64)),
        ("states_offset", POINTER(c_int64)), ("states_bytes", POINTER(c_int64)), ("device_of", POINTER(c_int32)),
        ("n_rows", c_int64), ("n_devices", c_int32), ("n_layer", c_int32),
    )  # fmt: skip


class DeviceOptionsC(ctypes.Structure):
    """memra_device_options."""

    _fields_ = (
        ("struct_size", c_uint32), ("ordinal", c_int32), ("stream", c_uint64), ("context", c_uint64),
        ("flags", c_uint32), ("reserved", c_uint32),
    )  # fmt: skip


def declare(lib: Any) -> Any:
    """lib with the types of the functions that are called here."""
    for name in ("memra_last_error", "memra_plane_table", "memra_device_handle"):
        getattr(lib, name).argtypes = ()
    lib.memra_last_error.restype = c_char_p
    lib.memra_plane_table.argtypes, lib.memra_plane_table.restype = (POINTER(c_int32),), POINTER(PlaneC)
    lib.memra_device_handle.argtypes, lib.memra_device_handle.restype = (c_void_p,), c_uint64
    lib.memra_policy_from_env.argtypes = (POINTER(PolicyC),)
    lib.memra_options_default.argtypes, lib.memra_options_default.restype = (POINTER(OptionsC),), None
    model = (POINTER(ConfigC), c_int64, POINTER(PolicyC), POINTER(OptionsC))
    lib.memra_plan_new.argtypes = (*model, POINTER(c_int32), c_int32, POINTER(c_int32), POINTER(POINTER(PlanC)))
    lib.memra_plan_free.argtypes, lib.memra_plan_free.restype = (POINTER(PlanC),), None
    cache, devices = POINTER(layout.CacheC), POINTER(c_void_p)
    lib.memra_cache_new.argtypes = (*model, devices, POINTER(c_int32), c_int32, POINTER(cache))
    lib.memra_cache_free.argtypes = (cache,)
    lib.memra_cache_bind.argtypes = (cache, devices, c_int32)
    lib.memra_device_open.argtypes = (POINTER(DeviceOptionsC), POINTER(c_void_p))
    for name in ("memra_device_close", "memra_capture_abandon"):
        getattr(lib, name).argtypes = (c_void_p,)
    lib.memra_capture_begin.argtypes = (c_void_p, c_uint32)
    return lib


@functools.cache
def library() -> Any:
    """The C library, built from the sources at first use and kept under the hash of them."""
    return declare(ctypes.CDLL(str(native.build(standin.cache_dir() / "native"))))


class Refused(Exception):
    """A status other than MEMRA_OK: `status`, and the sentence of memra_last_error."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(f"{status}: {sentence}")
        self.status, self.sentence = status, sentence


def check(status: int, lib: Any = None) -> None:
    if status:
        raise Refused(status, (lib or library()).memra_last_error().decode())


# ---- Cases


@dataclass(frozen=True)
class Case:
    """One call of CachePlan and of memra_plan_new."""

    cfg: dict[str, Any]  # of ModelConfig; its parts as dicts
    max_ctx: int = 64
    policy: dict[str, Any] | None = field(default_factory=dict)  # None: from the environment
    options: dict[str, Any] = field(default_factory=dict)
    fence: tuple[int, ...] | None = None
    placement: tuple[int, ...] | None = None

    @classmethod
    def of(cls, cfg: ModelConfig, *args: Any, **rest: Any) -> Case:
        """A case of a config that exists: a preset, one of the tests."""
        names = ("ssm", "gemma4", "step35")
        parts = {name: vars(part) for name in names if (part := getattr(cfg, name)) is not None}
        return cls({**vars(cfg), **dict.fromkeys(names), **parts}, *args, **rest)

    def model(self) -> ModelConfig:
        kinds: dict[str, Any] = {"ssm": SsmConfig, "gemma4": Gemma4Config, "step35": Step35Config}
        parts = {name: kind(**self.cfg[name]) for name, kind in kinds.items() if self.cfg.get(name) is not None}
        return ModelConfig(**{**self.cfg, **parts})

    def plan(self) -> CachePlan:
        cfg = self.model()
        policy = None if self.policy is None else FormatPolicy(**self.policy)
        return CachePlan(
            cfg, self.max_ctx, policy, CacheOptions(**self.options), self.fence, placement=self.placement
        )  # fmt: skip


def ints(values: Sequence[int] | None, kind: Any = c_int32) -> Any:
    return None if values is None else (kind * len(values))(*values)


def config_c(cfg: dict[str, Any]) -> ConfigC:
    """memra_config of a model's fields; what C does not take is left out."""
    names = {name for name, _ in ConfigC._fields_}
    made = ConfigC(struct_size=ctypes.sizeof(ConfigC))
    for name, value in cfg.items():
        if name in names:
            setattr(made, name, value)
    for part in ("ssm", "gemma4", "step35"):
        for name, value in (cfg.get(part) or {}).items():
            if isinstance(value, tuple) and f"{part}_{name}" in names:
                kind = c_uint8 if name == "swa_pattern" else c_uint32
                setattr(made, f"{part}_{name}", ctypes.cast(ints(value, kind), POINTER(kind)))
                setattr(made, f"{part}_n_{name}", len(value))
            elif f"{part}_{name}" in names:
                setattr(made, f"{part}_{name}", value)
        if cfg.get(part) is not None:
            setattr(made, f"has_{part}", 1)
    if cfg.get("gemma4") is not None:  # Python's defaults
        for name in ("sliding_window", "key_length_global", "key_length_swa"):
            setattr(made, f"gemma4_{name}", cfg["gemma4"].get(name, getattr(Gemma4Config, name)))
    return made


def policy_c(policy: dict[str, Any] | None) -> Any:
    if policy is None:
        return None
    values = vars(FormatPolicy()) | policy
    codes = {name: FORMATS[values[name]].code for name in ("k", "v")}
    return PolicyC(**(values | codes), struct_size=ctypes.sizeof(PolicyC))


def options_c(options: dict[str, Any]) -> OptionsC:
    made = OptionsC()
    library().memra_options_default(made)
    for name, value in options.items():
        if name == "reserve_taps":
            layers, made.tap_rows = value
            made.tap_layers, made.n_tap_layers = ctypes.cast(ints(layers), POINTER(c_int32)), len(layers)
        else:
            setattr(made, name, value)
    return made


def arguments(case: Case) -> tuple[Any, ...]:
    """config, max_ctx, policy, options of a call."""
    return config_c(case.cfg), case.max_ctx, policy_c(case.policy), options_c(case.options)


@contextmanager
def c_plan(case: Case, lib: Any = None) -> Iterator[PlanC]:
    """The plan that C makes. Raises Refused."""
    lib = lib or library()
    made = POINTER(PlanC)()
    n_stages = len(case.placement or ()) if case.fence is None else len(case.fence) - 1
    status = lib.memra_plan_new(
        *arguments(case), ints(case.fence), n_stages, ints(case.placement), ctypes.byref(made)
    )  # fmt: skip
    assert bool(made) == (status == OK)
    check(status, lib)
    try:
        yield made.contents
    finally:
        lib.memra_plan_free(made)


def outcome_of_c(case: Case) -> Any:
    try:
        with c_plan(case) as plan:
            devices = range(plan.n_devices)
            rows = [
                (row.plane.decode(), None if row.layer < 0 else row.layer, row.device, row.dtype, row.len, row.n_bytes,
                 row.offset)
                for row in plan.rows[: plan.n_rows]
            ]  # fmt: skip
            states = [(plan.states_offset[d], plan.states_offset[d] + plan.states_bytes[d]) for d in devices]
            sums = [(plan.arena_bytes[d], plan.plane_bytes[d], states[d]) for d in devices]
            return rows, sums, plan.device_of[: plan.n_layer]
    except Refused as refused:
        if refused.status != CONFIG:
            raise
        return refused.sentence


def outcome_of_python(case: Case) -> Any:
    codes = {name: layout.DTYPE_CODES[dtype] for name, dtype in layout.DTYPE_NAMES.items()}
    try:
        plan = case.plan()
    except ConfigError as error:
        return str(error)
    rows = [(row.plane, row.layer, row.device, codes[row.dtype], row.len, row.bytes, row.offset) for row in plan.rows]
    sums = [(device.arena_bytes, device.plane_bytes, device.snapshot) for device in plan.per_device]
    return rows, sums, [plan.device_of(il) for il in range(plan.cfg.n_layer)]


# ---- Devices and caches


@contextmanager
def c_device(ordinal: int = 0, stream: int = 0, *, arena: bool = True, lib: Any = None) -> Iterator[Any]:
    """A device of the library; on the caller's stream, or on one that it makes."""
    lib = lib or library()
    device = c_void_p()
    options = DeviceOptionsC(
        struct_size=ctypes.sizeof(DeviceOptionsC), ordinal=ordinal, stream=stream, flags=0 if arena else NO_ARENA
    )
    check(lib.memra_device_open(options, device), lib)
    try:
        yield device
    finally:
        check(lib.memra_device_close(device), lib)


def new_cache(case: Case, devices: Sequence[Any], lib: Any = None) -> Any:
    """Pointer to the memra_cache that C makes of a case on one device a stage. Raises Refused."""
    lib = lib or library()
    made = POINTER(layout.CacheC)()
    n_stages = 0 if case.fence is None else len(case.fence) - 1
    given = (c_void_p * len(devices))(*devices)
    status = lib.memra_cache_new(*arguments(case), given, ints(case.fence), n_stages, ctypes.byref(made))
    assert bool(made) == (status == OK)
    check(status, lib)
    return made


@contextmanager
def c_cache(case: Case, devices: Sequence[Any]) -> Iterator[layout.CacheC]:
    made = new_cache(case, devices)
    try:
        yield made.contents
    finally:
        check(library().memra_cache_free(made))


def shared_library(folder: Path, source: str) -> Any:
    """The library built together with `source`, a C text, which every malloc, calloc and free of it goes through.

    The text defines memra_test_malloc and so on.
    """
    extra = folder / "extra.c"
    extra.write_text(source)
    native._run([*native.compiler(), "-std=c11", "-O1", "-fPIC", "-c", "-o", str(folder / "extra.o"), str(extra)])
    renamed = [f"-D{name}=memra_test_{name}" for name in ("malloc", "calloc", "free")]
    path = folder / "renamed" / native.SONAME
    native.build(path.parent, [*renamed, str(folder / "extra.o")])
    return declare(ctypes.CDLL(str(path)))
