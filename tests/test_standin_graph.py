"""The stand-in driver: what a capture records and refuses, what the launch of a graph runs, reports and leaves."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import standin as standin_module
from cuda.bindings import driver as cu
from raw_driver import ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, LAUNCH_FAILED, from_device, ok, on_device
from standin import StandIn

from memra_driver import driver
from memra_driver.errors import DriverError, IllegalAddress

pytestmark = pytest.mark.standin

ILLEGAL_STATE, NOT_SUPPORTED, UNSUPPORTED, INVALIDATED, IMPLICIT = 401, 801, 900, 901, 906
PTR, INT = ctypes.c_void_p, ctypes.c_int
N = 64
LATE = "cuGraphLaunch|cuStreamSynchronize"  # who tells of a device's fault: the launch or, in deferred mode, a wait

AddOne = Callable[..., None]


@pytest.fixture
def stream(context: StandIn) -> Iterator[int]:
    driver.init()
    made = driver.stream_create()
    yield made
    cu.cuStreamDestroy(made)


@pytest.fixture
def add_one(context: StandIn, stream: int) -> Iterator[AddOne]:
    """add_one(ptr, n, name="add_one") launches that kernel of faults.cu on the stream; .library is where it is from."""
    context.use_kernels(standin_module.build_kernels([standin_module.SHIM / "faults.cu"]))
    library = driver.library_load_data(b"\x7fELF")

    def run(ptr: int, n: int = N, name: str = "add_one") -> None:
        cells = ctypes.c_uint64(ptr), ctypes.c_int(n)
        params = (PTR * 2)(*(ctypes.addressof(cell) for cell in cells))
        kernel = driver.library_get_kernel(library, name)
        config = driver.launch_config((1, 1, 1), (N, 1, 1), 0, stream)
        driver.launch_kernel(kernel, config, ctypes.addressof(params), name)
        for cell in cells:  # what a capture kept must not depend on these
            cell.value = 0

    run.library = library  # type: ignore[attr-defined]
    yield run
    cu.cuLibraryUnload(library)


@pytest.fixture
def x(context: StandIn) -> Iterator[int]:
    """N zeros, float32, on device 0."""
    ptr = on_device(np.zeros(N, np.float32))
    yield ptr
    cu.cuMemFree(ptr)


def values(ptr: int) -> np.ndarray:
    return from_device(ptr, np.empty(N, np.float32))


def launch_and_wait(graph: int, stream: int) -> None:
    driver.graph_launch(graph, stream)
    driver.stream_synchronize(stream)


def values_of(ptr: int) -> np.ndarray:
    """As values, on a context that is lost."""
    return np.frombuffer(ctypes.string_at(ptr, 4 * N), np.float32)


def captured(stream: int, work: Callable[[], Any]) -> int:
    """An executable graph of what `work` enqueues."""
    driver.stream_begin_capture(stream)
    work()
    graph = driver.stream_end_capture(stream)
    try:
        return driver.graph_instantiate(graph)
    finally:
        driver.graph_destroy(graph)


# ---------------------------------------------------------------- capture and replay


def test_a_capture_records_and_does_not_run(context: StandIn, stream: int, x: int, add_one: AddOne) -> None:
    driver.stream_begin_capture(stream)
    assert driver.stream_is_capturing(stream)
    add_one(x)
    driver.memset_d8_async(x, 7, 4, stream)
    driver.memcpy_dtod_async(x + 8, x, 4, stream)
    graph = driver.stream_end_capture(stream)
    assert not driver.stream_is_capturing(stream)
    assert int(cu.cuGraphGetNodes(graph)[2]) == 3
    assert (values(x) == 0).all()
    assert context.launches() == []
    driver.graph_destroy(graph)


def test_each_launch_runs_the_nodes_in_order(stream: int, x: int, add_one: AddOne) -> None:
    y = on_device(np.full(N, 9, np.float32))

    def work() -> None:
        add_one(x)
        driver.memcpy_dtod_async(y, x, 4 * N, stream)
        add_one(y)
        driver.memset_d8_async(y, 0, 4, stream)

    graph = captured(stream, work)
    driver.graph_upload(graph, stream)
    assert (values(y) == 9).all()
    for run in range(1, 4):
        driver.graph_launch(graph, stream)
        assert (values(x) == run).all()
        assert values(y)[0] == 0
        assert (values(y)[1:] == run + 1).all()
    driver.graph_exec_destroy(graph)
    driver.mem_free(y)


def test_the_parameters_are_those_of_the_capture(stream: int, x: int, add_one: AddOne) -> None:
    graph = captured(stream, lambda: [add_one(x, n) for n in (1, 2, 3)])
    gc.collect()
    driver.graph_launch(graph, stream)
    assert values(x)[:4].tolist() == [3, 2, 1, 0]
    driver.graph_exec_destroy(graph)


def test_a_graph_may_be_launched_on_another_stream_and_work_beside_a_capture_runs(
    stream: int, x: int, add_one: AddOne
) -> None:
    other = driver.stream_create()

    def work() -> None:
        driver.memset_d8_async(x, 0, 4, other)
        driver.stream_synchronize(other)
        driver.mem_free(driver.mem_alloc(8))
        add_one(x, 1)
        driver.memset_d8_async(x + 4, 0xFF, 4, other)

    graph = captured(stream, work)
    assert np.isnan(values(x)[1])
    driver.graph_launch(graph, other)
    assert values(x)[0] == 1
    driver.graph_exec_destroy(graph)
    driver.stream_destroy(other)


def test_an_empty_capture_is_a_graph(context: StandIn, stream: int) -> None:
    graph = captured(stream, lambda: None)
    driver.graph_launch(graph, stream)
    assert context.calls("node") == []
    driver.graph_exec_destroy(graph)


# ---------------------------------------------------------------- what a capture refuses


def begin_on(handle: int, mode: int = 2) -> int:
    return int(cu.cuStreamBeginCapture(handle, cu.CUstreamCaptureMode(mode))[0])


def event_on(stream: int, use: Callable[[int, int], Any]) -> Any:
    event = driver.event_create(timing=False)
    result = use(event, stream)
    driver.event_destroy(event)
    return result


HOST = np.zeros(N, np.float32)
UNSUPPORTED_CALLS: dict[str, Callable[[int, int], Any]] = {
    "cuStreamSynchronize": lambda s, x: cu.cuStreamSynchronize(s),
    "cuStreamQuery": lambda s, x: cu.cuStreamQuery(s),
    "cuCtxSynchronize": lambda s, x: cu.cuCtxSynchronize(),
    "cuMemAllocAsync": lambda s, x: cu.cuMemAllocAsync(8, s),
    "cuMemFreeAsync": lambda s, x: cu.cuMemFreeAsync(x, s),
    "cuMemcpyHtoDAsync": lambda s, x: cu.cuMemcpyHtoDAsync(x, HOST.ctypes.data, 8, s),
    "cuMemcpyDtoHAsync": lambda s, x: cu.cuMemcpyDtoHAsync(HOST.ctypes.data, x, 8, s),
    "cuEventRecord": lambda s, x: event_on(s, cu.cuEventRecord),
    "cuStreamWaitEvent": lambda s, x: event_on(s, lambda event, stream: cu.cuStreamWaitEvent(stream, event, 0)),
}


@pytest.mark.misuse
@pytest.mark.parametrize("name", UNSUPPORTED_CALLS)
def test_what_a_capture_cannot_hold_invalidates_it(context: StandIn, stream: int, x: int, name: str) -> None:
    driver.stream_begin_capture(stream)
    driver.memset_d8_async(x, 1, 8, stream)
    assert int(UNSUPPORTED_CALLS[name](stream, x)[0]) == UNSUPPORTED
    assert int(ok(cu.cuStreamIsCapturing(stream))) == 2
    assert driver.stream_is_capturing(stream)
    assert int(cu.cuMemsetD8Async(x, 0, 8, stream)[0]) == INVALIDATED
    with pytest.raises(DriverError, match="cuStreamEndCapture") as caught:
        driver.stream_end_capture(stream)
    assert caught.value.code == INVALIDATED
    assert not driver.stream_is_capturing(stream)
    [error] = context.take_errors()
    assert error.startswith(f"{name}: ")
    driver.memset_d8_async(x, 0, 8, stream)  # the stream is as before
    driver.stream_synchronize(stream)
    assert (values(x) == 0).all()
    assert context.live_graphs() == 0


@pytest.mark.misuse
def test_a_pointer_that_is_not_live_invalidates_the_capture_and_leaves_the_context(
    context: StandIn, stream: int, x: int, add_one: AddOne
) -> None:
    for enqueue in (lambda: add_one(x - 4096), lambda: driver.memset_d8_async(x, 0, 4 * N + 1, stream)):
        driver.stream_begin_capture(stream)
        with pytest.raises(DriverError):
            enqueue()
        with pytest.raises(DriverError) as caught:
            driver.stream_end_capture(stream)
        assert caught.value.code == INVALIDATED
        driver.stream_synchronize(stream)
    assert len(context.take_errors()) == 2


@pytest.mark.misuse
def test_the_default_stream_does_not_work_beside_a_blocking_stream_that_captures(context: StandIn, x: int) -> None:
    blocking = int(ok(cu.cuStreamCreate(0)))
    for use in (lambda: cu.cuMemsetD8(x, 0, 4), lambda: cu.cuStreamSynchronize(0)):
        driver.stream_begin_capture(blocking)
        assert int(use()[0]) == IMPLICIT
        assert int(cu.cuStreamEndCapture(blocking)[0]) == INVALIDATED
    assert len(context.take_errors()) == 2
    driver.stream_destroy(blocking)


@pytest.mark.misuse
def test_a_capture_begins_once_on_a_stream_of_its_own_and_ends_once(context: StandIn, stream: int) -> None:
    assert [begin_on(0), begin_on(1), begin_on(stream, 0)] == [UNSUPPORTED, UNSUPPORTED, NOT_SUPPORTED]
    assert int(cu.cuStreamEndCapture(stream)[0]) == ILLEGAL_STATE
    driver.stream_begin_capture(stream)
    assert begin_on(stream) == ILLEGAL_STATE
    driver.graph_destroy(driver.stream_end_capture(stream))
    assert len(context.take_errors()) == 5


@pytest.mark.misuse
def test_a_launch_is_not_captured(context: StandIn, stream: int) -> None:
    graph = captured(stream, lambda: None)
    driver.stream_begin_capture(stream)
    with pytest.raises(DriverError, match="cuGraphLaunch") as caught:
        driver.graph_launch(graph, stream)
    assert caught.value.code == UNSUPPORTED
    assert int(cu.cuStreamEndCapture(stream)[0]) == INVALIDATED


@pytest.mark.misuse
def test_a_stream_destroyed_while_it_captures_is_noted_and_keeps_no_graph(context: StandIn, stream: int) -> None:
    driver.stream_begin_capture(stream)
    driver.stream_destroy(stream)
    assert context.live_graphs() == 0
    assert "was capturing" in context.take_errors()[0]


# ---------------------------------------------------------------- trace and failures


def test_the_trace_tells_captured_calls_launches_and_nodes_apart(
    context: StandIn, stream: int, x: int, add_one: AddOne
) -> None:
    y = driver.mem_alloc(16)
    context.clear_trace()

    def work() -> None:
        add_one(x)
        driver.memset_d8_async(x, 5, 16, stream)
        driver.memcpy_dtod_async(y, x, 16, stream)

    graph = captured(stream, work)
    recorded = context.trace()
    assert [(c.name, c.captured) for c in recorded] == [
        ("cuStreamBeginCapture", False),
        ("cuLaunchKernelEx", True),
        ("cuMemsetD8Async", True),
        ("cuMemcpyDtoDAsync", True),
        ("cuStreamEndCapture", False),
        ("cuGraphInstantiate", False),
        ("cuGraphDestroy", False),
    ]
    context.clear_trace()
    other = driver.stream_create()
    driver.graph_launch(graph, other)
    made, launch, *nodes = context.trace()
    assert (launch.name, launch.src, launch.stream, launch.code) == ("cuGraphLaunch", graph, made.dst, 0)
    seen = [(c.name, c.node, c.kernel, c.stream, c.dst, c.src, c.bytes, c.grid, c.device, c.code) for c in nodes]
    assert seen == [
        ("node", "cuLaunchKernelEx", "add_one", other, 0, 0, 0, (1, 1, 1), 0, 0),
        ("node", "cuMemsetD8Async", "", other, x, 5, 16, (0, 0, 0), 0, 0),
        ("node", "cuMemcpyDtoDAsync", "", other, y, x, 16, (0, 0, 0), 0, 0),
    ]
    assert context.launches() == ["add_one"]
    driver.graph_exec_destroy(graph)
    driver.stream_destroy(other)
    driver.mem_free(y)


def test_a_failure_injected_into_a_node_stops_the_launch_there(
    context: StandIn, stream: int, x: int, add_one: AddOne
) -> None:
    graph = captured(stream, lambda: [add_one(x) for _ in range(4)])
    context.clear_trace()
    context.fail("node", nth=3, code=LAUNCH_FAILED)
    with pytest.raises(DriverError, match="cuGraphLaunch") as caught:
        driver.graph_launch(graph, stream)
    assert caught.value.code == LAUNCH_FAILED
    assert [(c.name, c.code) for c in context.trace()] == [
        ("cuGraphLaunch", LAUNCH_FAILED), ("node", 0), ("node", 0), ("node", LAUNCH_FAILED),
    ]  # fmt: skip
    assert (values(x) == 2).all()
    driver.graph_exec_destroy(graph)


def test_a_star_counts_every_record_of_a_launch(context: StandIn, stream: int, x: int, add_one: AddOne) -> None:
    graph = captured(stream, lambda: [add_one(x) for _ in range(2)])
    for nth, ran in ((1, 0), (2, 0), (3, 1)):
        driver.memset_d8_async(x, 0, 4 * N, stream)
        context.fail("*", nth, code=999)
        with pytest.raises(DriverError, match="cuGraphLaunch"):
            driver.graph_launch(graph, stream)
        assert (values(x) == ran).all()
    driver.graph_exec_destroy(graph)


STEPS: dict[str, Callable[[dict[str, int]], Any]] = {
    "cuStreamBeginCapture": lambda h: driver.stream_begin_capture(h["stream"]),
    "cuStreamIsCapturing": lambda h: driver.stream_is_capturing(h["stream"]),
    "cuStreamEndCapture": lambda h: h.update(graph=driver.stream_end_capture(h["stream"])),
    "cuGraphInstantiate": lambda h: h.update(made=driver.graph_instantiate(h["graph"])),
    "cuGraphDestroy": lambda h: driver.graph_destroy(h["graph"]),
    "cuGraphUpload": lambda h: driver.graph_upload(h["made"], h["stream"]),
    "cuGraphLaunch": lambda h: driver.graph_launch(h["made"], h["stream"]),
    "cuGraphExecDestroy": lambda h: driver.graph_exec_destroy(h["made"]),
}


def test_the_error_of_each_call_names_it_and_the_call_had_no_effect(context: StandIn, stream: int) -> None:
    handles = {"stream": stream}
    for name, step in STEPS.items():
        context.fail(name, code=999)
        with pytest.raises(DriverError, match=name) as caught:
            step(handles)
        assert caught.value.code == 999
        step(handles)


# ---------------------------------------------------------------- misuse at launch, leaks


@pytest.mark.misuse
@pytest.mark.parametrize("node", ["kernel", "copy", "fill"])
def test_a_node_whose_memory_was_freed_is_an_illegal_address(
    context: StandIn, stream: int, x: int, add_one: AddOne, node: str
) -> None:
    gone = driver.mem_alloc(4 * N)
    work = {
        "kernel": lambda: add_one(gone),
        "copy": lambda: driver.memcpy_dtod_async(x, gone, 4, stream),
        "fill": lambda: driver.memset_d8_async(gone, 0, 4, stream),
    }
    graph = captured(stream, work[node])
    driver.graph_launch(graph, stream)
    driver.mem_free(gone)
    with pytest.raises(IllegalAddress, match=LATE):
        launch_and_wait(graph, stream)
    [error] = context.take_errors()
    assert error.startswith("node cu")
    assert int(cu.cuStreamSynchronize(stream)[0]) == ILLEGAL_ADDRESS  # sticky, as after any such launch


@pytest.mark.misuse
def test_guards_are_checked_after_each_node(context: StandIn, stream: int, add_one: AddOne) -> None:
    short = on_device(np.zeros(N - 1, np.float32))
    graph = captured(stream, lambda: add_one(short))
    assert context.take_errors() == []
    driver.graph_launch(graph, stream)
    [error] = context.take_errors()
    assert error.startswith("add_one: byte ")
    assert f"of an allocation of {4 * N - 4} bytes was written" in error


@pytest.mark.misuse
def test_a_kernel_that_faults_in_a_graph_ends_the_context(context: StandIn, stream: int, x: int, add_one: Any) -> None:
    graph = captured(stream, lambda: [add_one(x, name="deadlock"), add_one(x)])
    with pytest.raises(DriverError, match=LATE) as caught:
        launch_and_wait(graph, stream)
    assert caught.value.code == LAUNCH_FAILED
    assert (values_of(x) < 1).all()  # the node behind it did not run
    assert int(cu.cuStreamSynchronize(stream)[0]) == LAUNCH_FAILED


@pytest.mark.misuse
def test_a_kernel_whose_library_is_unloaded_does_not_run_in_a_graph(
    context: StandIn, stream: int, x: int, add_one: Any
) -> None:
    graph = captured(stream, lambda: add_one(x))
    driver.library_unload(add_one.library)
    assert int(cu.cuGraphLaunch(graph, stream)[0]) == INVALID_HANDLE
    assert "unloaded" in context.take_errors()[0]
    assert (values(x) == 0).all()


@pytest.mark.misuse
def test_destroyed_and_foreign_graphs_are_refused(context: StandIn, stream: int) -> None:
    driver.stream_begin_capture(stream)
    graph = driver.stream_end_capture(stream)
    made = driver.graph_instantiate(graph)
    ctx0, ctx1 = driver.ctx_get_current(), driver.device_primary_ctx_retain(1)
    driver.ctx_set_current(ctx1)
    elsewhere = driver.stream_create()
    refused = [cu.cuGraphInstantiate(graph, 0), cu.cuGraphLaunch(made, elsewhere), cu.cuGraphUpload(made, elsewhere)]
    driver.ctx_set_current(ctx0)
    driver.graph_exec_destroy(made)
    driver.graph_destroy(graph)
    refused += [
        cu.cuGraphLaunch(made, stream), cu.cuGraphExecDestroy(made), cu.cuGraphDestroy(graph),
        cu.cuGraphInstantiate(graph, 0), cu.cuGraphLaunch(graph, stream),
    ]  # fmt: skip
    assert [int(r[0]) for r in refused] == [201, INVALID_HANDLE, INVALID_HANDLE] + [INVALID_VALUE] * 5
    assert len(context.take_errors()) == len(refused)
    driver.device_primary_ctx_release(1)


def test_captures_and_graphs_count_as_live_until_they_are_closed(context: StandIn, stream: int) -> None:
    counts = [context.live_graphs()]
    driver.stream_begin_capture(stream)
    counts.append(context.live_graphs())
    graph = driver.stream_end_capture(stream)
    made = driver.graph_instantiate(graph)
    counts.append(context.live_graphs())
    driver.graph_destroy(graph)
    counts.append(context.live_graphs())
    driver.graph_exec_destroy(made)
    assert [*counts, context.live_graphs()] == [0, 1, 2, 1, 0]


@pytest.mark.misuse
def test_a_context_takes_its_graphs_along(standin: StandIn) -> None:
    driver.init()
    driver.ctx_set_current(driver.device_primary_ctx_retain(1))
    stream, second = driver.stream_create(), driver.stream_create()
    made = captured(stream, lambda: None)
    driver.stream_begin_capture(second)
    assert standin.live_graphs() == 2
    driver.device_primary_ctx_release(1)
    assert standin.live_graphs() == 0
    assert int(cu.cuGraphExecDestroy(made)[0]) == 709
    driver.ctx_set_current(0)


@pytest.mark.misuse
def test_a_graph_that_is_left_fails_the_check_after_a_test(context: StandIn, stream: int) -> None:
    context.assert_clean()
    made = captured(stream, lambda: None)
    with pytest.raises(AssertionError, match="1 graphs"):
        context.assert_clean()
    driver.graph_exec_destroy(made)
    context.assert_clean()
