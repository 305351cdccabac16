"""No public operation is left out of the fault runs: of each, by name, a driver call has failed, or it makes none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import fault_runs
import pytest
from cfuzz import functions
from fault_runs import ATTENTION, Stage, sweep
from standin import StandIn
from test_fault_ends import (
    CACHES,
    DEVICES,
    LOADS,
    OWNED,
    abandons,
    births,
    boundaries,
    caches_in_c,
    crossings,
    ends,
    loads,
)
from test_fault_runs import ACROSS, ALL, OF_THE_LIBRARY

import memra_driver
from memra_driver import capi
from memra_driver.batch import CacheBatch
from memra_driver.boundary import Boundary
from memra_driver.device import CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView
from memra_driver.graph import CudaGraph
from memra_driver.kvdev import CudaDev
from memra_driver.round import Round

pytestmark = pytest.mark.standin
WHOLE = (
    Boundary, CacheBatch, CudaContext, CudaDev, CudaEvent, CudaSlice, CudaStream, CudaView, CudaGraph, Round,
)  # fmt: skip
SPECIAL = {"__init__", "__dlpack__", "__cuda_array_interface__"}  # to enter is to get the object, to leave to close it
OF_A_ROUND = {"__enter__", "__exit__"}
# Of a cache the methods that are for its callers: those that the C library has a function for, and these.
OF_A_CACHE = {"new", "new_pp2", "new_ppn", "report", "regions", "close", "as_c", "kv_layer_for", "sync_d"}
DEEP = {"attend of a batch", "capture of a round", "memra_capture"}  # which make calls that no other operation makes
TOLD_LATER = {"CudaStream.frees_wait"}  # whose errors the next call raises
MAKE_NONE = {
    "Boundary": ("is_closed",),
    "Cache": ("as_c", "disarm_taps", "kv_layer_for", "regions", "replayed", "take_logits"),
    "CacheBatch": ("at", "check_readable", "is_closed", "layer", "recording", "seqs", "step"),
    "CudaContext": ("is_closed", "is_ready", "live_bytes", "live_count", "record_error"),
    "CudaDev": ("live",),
    "CudaEvent": ("handle",),
    "CudaSlice": ("cast", "is_closed", "plane", "ptr", "view"),
    "CudaStream": ("export_stream", "handle", "is_closed", "record_error", "refuse_in_capture"),
    "CudaView": ("__init__", "cast", "close", "is_closed", "plane", "ptr", "view"),
    "CudaGraph": ("__init__", "abandon", "finish", "move_of", "note", "touch"),
    "Round": ("__enter__", "__init__", "begun", "over"),
}  # fmt: skip
MAKE_NONE_IN_C = {
    "memra_abi_version", "memra_attend_part_bytes", "memra_attend_pieces", "memra_cache_bind", "memra_device_arch",
    "memra_device_handle",
    "memra_device_stream", "memra_disarm_taps", "memra_last_driver_code", "memra_last_error", "memra_layout_table",
    "memra_options_default", "memra_plan_free", "memra_plan_new", "memra_plane_table", "memra_policy_default",
    "memra_policy_from_env", "memra_recur_split", "memra_replayed", "memra_take_logits",
}  # fmt: skip


def code_of(member: Any) -> CodeType | None:
    """Of a function, a property, a class method or a context manager of this package."""
    if isinstance(member, property):
        member = member.fget
    function = inspect.unwrap(getattr(member, "__func__", member))
    is_ours = inspect.isfunction(function) and function.__module__.startswith("memra_driver")
    return function.__code__ if is_ours else None


def operations() -> Iterator[tuple[str, CodeType]]:
    for kind in WHOLE:
        for member in dir(kind):
            code = code_of(inspect.getattr_static(kind, member))
            special = SPECIAL | OF_A_ROUND if kind is Round else SPECIAL
            if code is not None and (member in special or not member.startswith("_")):
                yield f"{kind.__name__}.{member}", code
    called = {name for name, _ in inspect.getmembers(capi.calls, inspect.isfunction)}
    for member in dir(memra_driver.Cache):
        code = code_of(inspect.getattr_static(memra_driver.Cache, member))
        if code is not None and member in OF_A_CACHE | called:
            yield f"Cache.{member}", code
    for name, function in inspect.getmembers(memra_driver.ops, inspect.isfunction):
        if function.__module__ == memra_driver.ops.__name__ and not name.startswith("_"):
            yield f"ops.{name}", function.__code__


def fail_the_first_calls_of_each(make_dev: Callable[..., Any], standin: StandIn, in_c: bool) -> None:
    of_c, most = (OF_THE_LIBRARY, 4) if in_c else ({}, 1)  # Python asks for the context before it calls the library
    for devices in (1, 2):
        stage = Stage(make_dev, standin, devices=devices)
        for name in ACROSS if devices == 2 else [name for name in ALL | of_c if name not in ACROSS]:
            few = None if name in DEEP else most
            sweep(stage, (ALL | OF_THE_LIBRARY)[name], several="of two" in name, most=few)
        if devices == 2:
            for born in CACHES.values():
                births(standin, partial(born, stage.devices), most)
                ends(standin, partial(born, stage.devices), most)
            if in_c:
                caches_in_c(standin, "mtp", most)
                abandons(standin, stage.e)
        else:
            stage.begin()
            for name, made in OWNED.items():
                if in_c or not name.startswith("memra"):
                    ends(standin, made(stage), most=most)
            stage.end()
        stage.close()
    stage = Stage(make_dev, standin, cfg=ATTENTION)
    sweep(stage, lambda s: lambda: s.cache.truncate(s.e, 3), most=most)
    stage.close()
    with CudaContext(0) as context:
        standin.trace_queries()
        for device in DEVICES.values():
            births(standin, partial(device, context))
            ends(standin, partial(device, context), most)
        standin.trace_queries(False)
    for way in ("same", "staged"):
        boundaries(make_dev, standin, way, most)
        crossings(make_dev, standin, way, most)
    for name in LOADS:
        loads(standin, name, most=most)


@pytest.mark.parametrize("cuda_kind", ["cuda", "c"], indirect=True)
def test_each_operation_has_a_driver_call_that_failed(
    make_dev: Callable[..., Any], standin: StandIn, c_library: Any, cuda_kind: str
) -> None:
    fault_runs.reached.clear()
    fail_the_first_calls_of_each(make_dev, standin, cuda_kind == "c")
    reached, known = set(fault_runs.reached), dict(operations())
    if cuda_kind == "c":
        exported = {function.name for function in functions()}
        left = exported - reached - MAKE_NONE_IN_C
        wrong = reached & MAKE_NONE_IN_C
    else:
        none = {f"{kind}.{name}" for kind, names in MAKE_NONE.items() for name in names}
        left = {name for name, code in known.items() if code not in reached} - none - TOLD_LATER
        wrong = {name for name in none | TOLD_LATER if known[name] in reached}
    assert (left, wrong) == (set(), set())
