"""Memory that is full is named, with what is free and what to do; `info` tells whatever call fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cplan
import pytest
import tally
from standin import StandIn
from test_new_user import info

from memra_driver import capi, driver, inventory
from memra_driver.cache import Cache
from memra_driver.config import ModelConfig
from memra_driver.errors import DriverError, OutOfMemory
from memra_driver.kvdev import CudaDev


@pytest.mark.parametrize("pools", [1, 0], ids=["pools", "no-pools"])
@pytest.mark.parametrize("kind", ["CudaDev", "library"])
def test_memory_that_is_full_says_what_was_asked_for_and_what_is_free(
    standin: StandIn, c_library: Any, kind: str, pools: int
) -> None:
    standin.set_attribute(0, 115, pools)
    total = 1 << 30
    if kind == "CudaDev":
        e = CudaDev(0)
        ask: Callable[[], Any] = lambda: e.uninit(50_000)  # noqa: E731
    else:
        library = capi.device.LibraryDevice(c_library, 0, stream=None)
        ask = lambda: c_library.call("memra_alloc", library.address, 200_000, bytes(8))  # noqa: E731
    standin.set_total_memory(0, total)
    standin.run_out_after(0, 1000)
    with pytest.raises(DriverError) as caught:
        ask()
    asked = "cuMemAllocAsync(200000)" if pools else "cuMemAlloc(200000)"
    told = str(caught.value)
    assert told.startswith(f"{asked}: CUDA_ERROR_OUT_OF_MEMORY (2)")
    assert " of " in told.split("cuda:0 has 1000")[1]
    assert "nvidia-smi says who holds the rest" in told
    (e if kind == "CudaDev" else library).close()


@pytest.mark.parametrize("kind", ["CudaDev", "library"])
def test_a_cache_that_does_not_fit_says_what_is_free_and_what_to_do(
    standin: StandIn, c_library: Any, kind: str
) -> None:
    with CudaDev(0) as e, capi.device.LibraryDevice(cplan.library(), 0, stream=None) as device:
        born = {
            "CudaDev": lambda: Cache.new(e, ModelConfig.from_preset("qwen3.5-9b"), 1024),
            "library": lambda: cplan.new_cache(cplan.CASES["mtp"], [device]),
        }
        standin.run_out_after(0, 1000)
        with pytest.raises(OutOfMemory) as caught:
            born[kind]()
    told = str(caught.value)
    assert "bytes on cuda:0, which has 1000 free; lower max_ctx" in told
    assert told.endswith("nvidia-smi says who holds the rest")


def test_info_names_every_driver_call_that_fails_and_tells_the_rest(standin: StandIn) -> None:
    inventory.inventory()
    standin.trace_queries()
    standin.clear_trace()
    inventory.inventory()
    names = [call.name for call in standin.trace()]
    assert len(names) > 20
    for nth, name in enumerate(names, start=1):
        standin.fail("*", nth, 719)
        found = info()
        assert standin.pending_failures() == 0
        standin.clear_failures()
        if name == "cuDevicePrimaryCtxRelease":
            (device,) = standin.live_contexts()
            driver.device_primary_ctx_release(device)
        told = [line for line in found["missing"] if f"{name}(" in line]
        assert told or name == "cuCtxSetCurrent", nth  # what puts back a context that may be gone
        assert len(found["gpus"]) == 2 or name in ("cuInit", "cuDeviceGetCount"), (nth, name)
        tally.add("fault points")
    assert not info()["missing"]


def test_info_shows_what_is_free_and_leaves_no_context(standin: StandIn) -> None:
    standin.set_total_memory(0, 3 << 30)
    standin.clear_trace()
    found = info()
    assert not found["missing"]
    first, second = found["gpus"]
    assert "3.0 of 3.0 GiB free" in first
    assert "1.0 of 1.0 GiB free" in second
    made = [call.name for call in standin.trace()]
    assert made.count("cuDevicePrimaryCtxRetain") == made.count("cuDevicePrimaryCtxRelease") == 2
