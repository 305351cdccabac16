"""The C library's plans and caches through ctypes, and cases that Python and C plan alike.

A `Case` is one call: what a model, policy, options, fence and placement are, as keywords that both sides take.
`outcome_of_python` and `outcome_of_c` are the rows and sums of the plan, or the sentence that refuses it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_int32, c_uint8, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import standin
from caches import attention_only, gemma, tiny

from memra_driver import capi, layout, native
from memra_driver.cache import Cache
from memra_driver.capi.device import LibraryDevice
from memra_driver.capi.layout import ConfigC, OptionsC, PlanC, PolicyC
from memra_driver.capi.library import Library
from memra_driver.config import Gemma4Config, ModelConfig, SsmConfig, Step35Config
from memra_driver.errors import ConfigError
from memra_driver.formats import FORMATS, FormatPolicy
from memra_driver.plan import CacheOptions, CachePlan


@functools.cache
def library() -> Library:
    """The C library, built at first use, and again when the sources of this checkout changed."""
    checkout = hashlib.sha256(str(standin.CUDA_SRC).encode()).hexdigest()[:16]
    return capi.load(native.build(standin.cache_dir() / f"native-{checkout}"))


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


def changed(case: Case, change: str, value: Any) -> Case:
    """The case with one thing another: "max_ctx", "cfg.n_layer", "cfg.ssm.state_size", "options.max_rows", ..."""
    head, *path = change.split(".")
    if not path:
        return Case(**{**vars(case), head: value})
    whole = dict(vars(case)[head])
    at = whole
    for name in path[:-1]:
        at[name] = dict(at[name])
        at = at[name]
    at[path[-1]] = value
    return Case(**{**vars(case), head: whole})


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
    library().ask("memra_options_default", ctypes.byref(made))
    for name, value in options.items():
        if name == "reserve_taps":
            layers, made.tap_rows = value
            made.tap_layers, made.n_tap_layers = ctypes.cast(ints(layers), POINTER(c_int32)), len(layers)
        else:
            setattr(made, name, value)
    return made


def arguments(case: Case) -> tuple[Any, ...]:
    """config, max_ctx, policy, options of a call."""
    policy = policy_c(case.policy)
    return (
        ctypes.pointer(config_c(case.cfg)), case.max_ctx, None if policy is None else ctypes.pointer(policy),
        ctypes.pointer(options_c(case.options)),
    )  # fmt: skip


@contextmanager
def c_plan(case: Case) -> Iterator[PlanC]:
    """The plan that C makes. Raises ConfigError."""
    n_stages = len(case.placement or ()) if case.fence is None else len(case.fence) - 1
    made = POINTER(PlanC)()
    stages = ints(case.fence), n_stages, ints(case.placement)
    library().call("memra_plan_new", *arguments(case), *stages, ctypes.byref(made))
    try:
        yield made.contents
    finally:
        library().ask("memra_plan_free", made)


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
    except ConfigError as error:
        return str(error)


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
def c_device(e: Any = None, ordinal: int = 0, *, arena: bool = True, lib: Library | None = None) -> Iterator[Any]:
    """A device of the library; on the stream of a CudaDev, or on one that it makes."""
    stream, ordinal = (None, ordinal) if e is None else (e.stream, e.ordinal)
    with LibraryDevice(lib or library(), ordinal, stream=stream, arena=arena) as device:
        yield device


def addresses(devices: Sequence[LibraryDevice | None]) -> Any:
    return (c_void_p * len(devices))(*[None if device is None else device.address for device in devices])


def new_cache(case: Case, devices: Sequence[LibraryDevice | None], lib: Library | None = None) -> Any:
    """Pointer to the memra_cache that C makes of a case on one device a stage."""
    made = POINTER(layout.CacheC)()
    stages = ints(case.fence), 0 if case.fence is None else len(case.fence) - 1
    try:
        (lib or library()).call(
            "memra_cache_new", *arguments(case), addresses(devices), *stages, ctypes.byref(made)
        )  # fmt: skip
    except BaseException:
        assert not made
        raise
    return made


@contextmanager
def c_cache(case: Case, devices: Sequence[LibraryDevice | None]) -> Iterator[layout.CacheC]:
    made = new_cache(case, devices)
    try:
        yield made.contents
    finally:
        library().call("memra_cache_free", made)


def library_on(allocator: str, folder: Path) -> Library:
    """The library with its malloc, calloc and free those of `allocator`, a C text: memra_test_malloc and so on."""
    (folder / "allocator.c").write_text(allocator)
    made = folder / "allocator.o"
    native._run([*native.compiler(), "-std=c11", "-fPIC", "-c", "-o", str(made), str(folder / "allocator.c")])
    renamed = [f"-D{name}=memra_test_{name}" for name in ("malloc", "calloc", "free")]
    return Library(native.build(folder / "library", [*renamed, str(made)]))


# ---- Cases of caches

MTP = tiny(n_layer=9, nextn_predict_layers=1)
CASES = {
    "interval 4": Case.of(tiny(), 33),
    "no linear layers": Case.of(attention_only(), 33),
    "no attention layers": Case.of(tiny(n_layer=3), 33),
    "no tokens": Case.of(MTP, 0),
    "mtp": Case.of(MTP, 33, {}, {"round_width": 4, "max_rows": 7, "strict": True}),
    "mtp skipped": Case.of(MTP, 33, {}, {"skip_mtp_state": True, "reserve_logits": True}),
    "mtp that attends": Case.of(attention_only(4, nextn_predict_layers=2), 9, {}, {"skip_mtp_state": True}),
    "gemma": Case.of(gemma(shared=3), 33, {"wkv": False}),
    "gemma, windows of more than an int": changed(
        Case.of(gemma(), 5, {"gkv": False}), "cfg.gemma4.sliding_window", 2**32 - 1
    ),
    "step, windows and query heads by layer": changed(
        Case.of(attention_only(), 5), "cfg.step35",
        {"head_count": (4, 8, 2), "head_count_kv": (1, 1, 1), "swa_pattern": (True, False), "sliding_window": 9},
    ),
    "no query heads named": changed(Case.of(tiny(), 5), "cfg.n_head", 0),
    "gemma, nobody owns": Case.of(gemma(shared=6), 33),
    "reserved": Case.of(tiny(n_head=6), 33, {"v": "q4_0"}, {"reserve_logits": True, "reserve_taps": ((3, 0), 7)}),
    "no ring": Case.of(
        tiny(ssm=SsmConfig(conv_kernel=1, state_size=32, time_step_rank=2, group_count=1)), 5, {}, {"round_width": 1}
    ),
}  # fmt: skip
MODEL = CASES["mtp"].cfg
SPREAD = {
    "two": Case(MODEL, 33, {}, {"round_width": 2}, (0, 3, 9)),
    "two, to the trunk's end": Case(MODEL, 33, {}, {"reserve_logits": True}, (0, 3, 8)),
    "one twice": Case(
        MODEL, 33, {}, {"reserve_taps": ((8, 0), 2), "reserve_logits": True}, (0, 3, 5, 9), (0, 1, 0)
    ),
    "recurrent layers on one of two": Case(MODEL, 33, {}, {}, (0, 7, 8)),
}  # fmt: skip


def handles(cache: layout.CacheC) -> list[int]:
    """Whose devices they are, by memra_cache_device."""
    return [each.handle for each in cache.devices[: cache.n_devices]]


def image(cache: layout.CacheC) -> list[bytes]:
    """The bytes of all structs of a cache."""
    arrays = (cache.kv[: cache.n_layer], cache.recur[: cache.n_layer], cache.devices[: cache.n_devices])
    return [bytes(cache), *(bytes(each) for array in arrays for each in array)]


def of_python(case: Case, devices: list[Any]) -> Cache:
    """The same cache on CudaDevs, one a stage."""
    options = CacheOptions(**case.options)
    policy = case.plan().policy
    fence = case.fence or (0, case.model().n_layer)
    return Cache.new_ppn(devices, fence, case.model(), case.max_ctx, policy=policy, options=options)
