"""The C library in a forked child, and at the end of a process."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
from standin import StandIn
from test_no_driver import child

from memra_driver import capi
from memra_driver.capi.device import LibraryDevice
from memra_driver.capi.layout import DeviceOptionsC
from memra_driver.errors import (
    StateError,
)

pytestmark = pytest.mark.standin


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = work()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(send, told.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(pid, 0)
    return told


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child_the_library_refuses_all_but_what_it_knows_by_itself(
    c_device: LibraryDevice, c_library: capi.Library, standin: StandIn
) -> None:
    n = ctypes.byref(ctypes.c_uint64())
    options = DeviceOptionsC(struct_size=ctypes.sizeof(DeviceOptionsC))
    calls = [
        ("memra_device_open", ctypes.byref(options), n), ("memra_device_close", c_device.address),
        ("memra_alloc", c_device.address, 1, n), ("memra_free", c_device.address, 256), ("memra_alloc", None, 1, n),
        ("memra_device_load", c_device.address, b"x", 1), ("memra_device_synchronize", c_device.address),
        ("memra_launch_copy_many", c_device.address, 0, 0, 0, 0), ("memra_capture_begin", c_device.address, 0),
    ]  # fmt: skip

    def work() -> str:
        for name, *args in calls:
            with pytest.raises(StateError, match="fork"):
                c_library.call(name, *args)
            assert "fork" in c_library.ask("memra_last_error").decode()
        assert c_library.ask("memra_abi_version") == 1
        assert len(c_library.layout_rows()) > 100
        for name in ("handle", "stream", "arch"):
            assert c_library.ask(f"memra_device_{name}", c_device.address) == 0
        assert standin.trace() == []
        return "refused"

    assert in_a_fork(work) == "refused"
    c_device.call("memra_device_synchronize")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_and_frees_nothing(c_library: capi.Library, standin: StandIn) -> None:
    kept: list[Any] = [capi.CDev()]
    kept += [kept[0].zeros(4), LibraryDevice(c_library, 0, stream=None)]
    standin.clear_trace()

    def work() -> str:
        kept.clear()
        gc.collect()
        return "nothing" if standin.trace() == [] else str(standin.trace())

    assert in_a_fork(work) == "nothing"
    for each in reversed(kept):
        each.close()
    assert standin.live_bytes() == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_process_that_used_no_gpu_may_use_one(c_library: capi.Library) -> None:
    out = child(
        """
        import os, sys
        sys.path.insert(0, "tests")
        import standin
        standin.load()
        from memra_driver import capi
        library = capi.load()
        pid = os.fork()
        if pid:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        with capi.CDev() as e:
            print(e.zeros(3).to_numpy().tolist(), e.c_handle, flush=True)
        """
    )
    assert out == "[0.0, 0.0, 0.0] 1\n"


@pytest.mark.parametrize(
    "ending", ["", "del e, cache, piece", "cache.close()", "e.close()", "os.fork() or os._exit(0)"]
)
def test_a_process_ends_whatever_is_open(c_library: capi.Library, ending: str) -> None:
    out = child(
        f"""
        import os, sys
        sys.path.insert(0, "tests")
        import standin
        standin.load()
        from memra_driver import Cache, ModelConfig, capi
        e = capi.CDev()
        cache = Cache.new(e, ModelConfig(n_layer=1, n_head_kv=1, head_dim_k=64, head_dim_v=64), 8)
        capi.calls.advance(cache, 2)
        piece = e.zeros(8)
        sys.e, e.cycle = e, [e, cache]  # kept, and in a cycle
        {ending}
        print("ends")
        """
    )
    assert out == "ends\n"
