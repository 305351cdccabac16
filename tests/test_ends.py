"""Ends of every kind, each in a process of its own: an error or nothing, never a crash or a hang.

Closed objects, a forked child, a context that somebody destroyed, the end of the interpreter: of slices, views,
streams, events, and of what other libraries still hold of them. With --gpu the same programs run on the real driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
Run = Callable[..., str]

BEGIN = """
    import atexit, ctypes, gc, os, sys, threading
    import numpy as np
    from foreign import delete, managed, taken
    from memra_driver import driver
    from memra_driver.device import CudaContext, CudaEvent, CudaSlice, CudaStream, HostMemory
    from memra_driver.errors import MemraError
    from memra_driver.kvdev import CudaDev

    def told(name, call):
        try:
            call()
        except MemraError as error:
            print(name, type(error).__name__, "closed" in str(error) and "closed" or "fork" in str(error) and "fork"
                  or getattr(error, "name", error))
        else:
            print(name, "nothing")

    context = CudaContext()
    stream = CudaStream(context)
    event = CudaEvent(context)
    piece = CudaSlice(stream, 8)
    piece.copy_from(np.arange(8, dtype=np.float32))
    part = piece.view(2, 6)
    uses = {
        "ptr": lambda: part.ptr,
        "to_numpy": lambda: piece.to_numpy(),
        "copy_from": lambda: part.copy_from(np.zeros(4, np.float32)),
        "view": lambda: part.view(1, 2),
        "dlpack": lambda: part.__dlpack__(stream=-1),
        "interface": lambda: getattr(part, "__cuda_array_interface__", None),
        "slice": lambda: CudaSlice(stream, 4),
        "synchronize": stream.synchronize,
        "record": lambda: stream.record(event),
        "wait": lambda: stream.wait(event),
        "wait_stream": lambda: stream.wait_stream(1),
        "query": event.query,
        "context": context.memory_info,
        "memset": lambda: stream.memset(piece._ptr, 0, 4),
        "copy": lambda: stream.memcpy_dtod(piece._ptr, piece._ptr + 16, 4),
        "newstream": lambda: CudaStream(context),
        "newevent": lambda: CudaEvent(context),
    }
"""


@pytest.fixture
def run(request: pytest.FixtureRequest, make_dev: Any) -> Run:
    """run(texts) -> what a fresh interpreter prints that runs them, on the stand-in, or with --gpu on the GPU."""
    load = "" if request.config.getoption("--gpu") else "import standin\ncontrol = standin.load()\n"

    def run(*texts: str) -> str:
        code = load + "".join(textwrap.dedent(text) for text in (BEGIN, *texts))
        paths = os.pathsep.join([str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")])
        child = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-W", "ignore::DeprecationWarning", "-c", code],
            capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, timeout=120,
        )  # fmt: skip
        assert (child.returncode, child.stderr) == (0, ""), child.stdout + child.stderr
        return child.stdout

    return run


def lines(text: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in text.splitlines())


def test_closed_objects_refuse(run: Run) -> None:
    said = lines(
        run("""
            array = managed(part.__dlpack__(stream=-1))
            for thing in (piece, part, event, stream, context):
                thing.close()
                thing.close()
            for name, use in uses.items():
                told(name, use)
        """)
    )
    assert said.pop("interface") == "nothing"  # an attribute that is not there
    assert set(said.values()) == {"StateError closed"}


def test_a_closed_device_leaves_what_others_hold(run: Run) -> None:
    out = run("""
        with CudaDev() as e:
            held = e.zeros(4)
            kept = held.__dlpack__(stream=-1)
            struct = taken(held.view(1, 3).__dlpack__(stream=-1, max_version=(1, 0)))
        told("use", held.to_numpy)
        told("export", held.__dlpack__)
        held.close()
        del held, e
        gc.collect()
        thread = threading.Thread(target=delete, args=(struct,))
        thread.start()
        thread.join()
        del kept
        print("let go")
    """)
    assert out == "use StateError closed\nexport StateError closed\nlet go\n"


FORK = """
    host = CudaSlice(HostMemory(), 4)
    host.copy_from(np.ones(4, np.float32))
    shared = np.from_dlpack(host)
    kept = piece.__dlpack__(stream=-1)
    struct = taken(part.__dlpack__(stream=-1, max_version=(1, 0)))
    e = CudaDev()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        asked = globals().get("control")  # the stand-in's, where it plays the driver
        if asked:
            asked.clear_trace()
        for name, use in uses.items():
            told(name, use)
        told("CudaDev", CudaDev)
        told("CudaContext", CudaContext)
        told("launch", lambda: e.launch("counters"))
        for thing in (part, piece, event, stream, context, e):
            told("close", thing.close)
        delete(struct)
        del kept, piece, part, event, stream, context, e, uses, use, thing
        gc.collect()
        print("asked", [call.name for call in asked.trace()] if asked else [])
        print("host", shared.tolist(), host.to_numpy().tolist())
        host.close()
        sys.exit(0)  # not os._exit: what runs at an interpreter's end runs here too
    print("child", os.waitpid(pid, 0)[1])
    print("parent", piece.to_numpy().tolist() == list(range(8)))
    delete(struct)
"""


def test_a_forked_child_is_refused_frees_nothing_and_ends(run: Run) -> None:
    said = lines(run(FORK))
    assert (said.pop("child"), said.pop("parent")) == ("0", "True")
    assert said.pop("asked") == "[]"  # of the driver, nothing
    assert said.pop("host") == "[1.0, 1.0, 1.0, 1.0] [1.0, 1.0, 1.0, 1.0]"
    assert said.pop("close") == "nothing"
    assert (said.pop("ptr"), said.pop("view")) == ("nothing", "nothing")  # arithmetic
    assert set(said.values()) == {"StateError fork"}


def test_a_destroyed_context_gives_errors_and_ends(run: Run) -> None:
    said = lines(
        run("""
            kept = piece.__dlpack__(stream=-1)
            struct = taken(part.__dlpack__(stream=-1, max_version=(1, 0)))
            e = CudaDev()
            cell = e.htod_i32([1, 2])
            with e.capture() as graph:
                e.launch("set_counters", cell, 3, 3, 1, 0, 1, 0, None, 0)
            graph.launch()
            from cuda.bindings import driver as cu
            assert cu.cuDevicePrimaryCtxReset(0)[0] == 0
            for name in sorted(set(uses) - {"ptr", "view", "interface", "dlpack"}):
                told(name, uses[name])
            told("launch", lambda: e.launch("set_counters", cell, 3, 3, 1, 0, 1, 0, None, 0))
            told("graph", graph.launch)
            told("alloc", lambda: e.zeros(4))
            delete(struct)
            del kept
            for thing in (graph, cell, part, piece, event, stream, context, e):
                told("close", thing.close)
            print("end of it")
        """)
    )
    assert said.pop("end") == "of it"
    assert said.pop("close") == "nothing"
    assert said.pop("context").startswith(("DriverError", "StateError"))  # it hands the driver nothing to follow
    assert all(value.startswith("StateError") for value in said.values()), said  # nothing that reached the driver


@pytest.mark.parametrize("dev", ["CudaDev", "capi.CDev"])
def test_a_cache_on_a_destroyed_context_gives_errors_and_ends(run: Run, dev: str) -> None:
    """Through Python's operations and the C library's."""
    said = lines(
        run(f"""
            from memra_driver import capi, ops
            from memra_driver.cache import Cache
            from decoding import hybrid
            e = {dev}()
            cache = Cache.new(e, hybrid(), 8)
            k, q, row = e.zeros(64), e.zeros(128), e.zeros(16)
            capi.bind(cache)
            for calls in (ops, capi.ops):
                for il in (1, 3):
                    calls.append_kv(e, cache, il, k, k)
                calls.attend(e, cache, 1, q, e.uninit(128), scale=1.0)
                cache.advance(e)
            snap, other = cache.snapshot(e), capi.calls.snapshot(cache)
            for _ in range(2):
                cache.snapshot_into(e, snap)
            with e.capture() as graph:
                ops.append_kv(e, cache, 1, k, k)
                cache.advance(e)
            out = e.uninit(128)
            from cuda.bindings import driver as cu
            assert cu.cuDevicePrimaryCtxReset(0)[0] == 0
            for name, calls in (("python", ops), ("c", capi.ops)):
                told(name + "-append", lambda: calls.append_kv(e, cache, 1, k, k))
                told(name + "-dequant", lambda: calls.dequant_kv(e, cache, 1, 0, 1, k, q.view(0, 64)))
            for name, use in {{
                "advance": lambda: cache.advance(e), "c-advance": lambda: capi.calls.advance(cache, 1),
                "snapshot": lambda: cache.snapshot(e), "c-snapshot": lambda: capi.calls.snapshot(cache),
                "rollback": lambda: cache.rollback(e, snap, 0),
                "c-rollback": lambda: capi.calls.rollback(cache, other, 0),
                "snapshot_into": lambda: cache.snapshot_into(e, snap),
                "c-snapshot_into": lambda: capi.calls.snapshot_into(cache, other),
                "digest": cache.digest, "c-digest": lambda: capi.calls.digest(cache), "launch": graph.launch,
                "park": lambda: cache.park_logits(e, row), "c-park": lambda: capi.calls.park_logits(cache, row),
                "attend": lambda: ops.attend(e, cache, 1, q, out, scale=1.0),
                "c-attend": lambda: capi.ops.attend(e, cache, 1, q, out, scale=1.0),
                "new": lambda: Cache.new(e, cache.cfg, 8),
            }}.items():
                told(name, use)
            for thing in (graph, snap, other, cache, k, q, row, e):
                told("close", thing.close)
            print("end of it")
        """)
    )
    assert said.pop("end") == "of it"
    assert said.pop("close") == "nothing"
    assert all(value.startswith(("DriverError", "StateError")) for value in said.values()), said


@pytest.mark.parametrize("names", ["kept", "dropped"])
def test_the_end_of_the_interpreter_meets_live_objects(run: Run, names: str) -> None:
    out = run(
        """
        def read_on(piece):
            while True:
                piece.to_numpy()

        threading.Thread(target=read_on, args=(piece,), daemon=True).start()
        host = CudaSlice(HostMemory(), 4)
        kept = [np.from_dlpack(host), piece.__dlpack__(stream=-1), host.view().__dlpack__()]
        knot = [piece, stream, part, kept]
        knot.append(knot)
        sys.kept = kept  # outlives every module
        e = CudaDev()
        big = e.zeros(1 << 16)
        """,
        "del piece, part, knot, kept, host, uses\n" if names == "dropped" else "",
        "print('end')\n",
    )
    assert out == "end\n"


@pytest.mark.parametrize("max_version", ["None", "(1, 0)"])
def test_a_consumer_may_outlive_the_interpreter(run: Run, max_version: str) -> None:
    # What the destructor of a global of a C++ program does: it runs behind Py_Finalize.
    out = run(f"""
        host = CudaSlice(HostMemory(), 4)
        structs = [taken(each.__dlpack__(max_version={max_version})) for each in (piece, part, host, host.view(1, 2))]
        at_exit = ctypes.CDLL(None).__cxa_atexit
        for struct in structs:
            assert at_exit(ctypes.c_void_p(struct.deleter), ctypes.c_void_p(ctypes.addressof(struct)), None) == 0
        piece.close()
        print("end")
    """)
    assert out == "end\n"


def test_exit_handlers_may_still_use_and_close_everything(run: Run) -> None:
    out = run("""
        def last():
            print(piece.to_numpy().tolist()[:2])
            kept = part.__dlpack__(stream=-1)
            for thing in (piece, event, stream, context):
                thing.close()
            del kept
            print("closed")
        atexit.register(last)
    """)
    assert out == "[0.0, 1.0]\nclosed\n"
