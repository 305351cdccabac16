"""Rows between two stages: what arrives, in which order, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import put
from happens import races
from standin import StandIn

from memra_driver import driver
from memra_driver.boundary import Boundary
from memra_driver.device import CudaContext
from memra_driver.errors import ArrayError, CapacityError, ConfigError, DriverError, StateError, UnsupportedError
from memra_driver.memory import Borrowed, CudaSlice

MakeDev = Callable[..., Any]
HIDDEN, MAX_ROWS = 24, 5
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")


def pair(kind: str, make_dev: MakeDev, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    if kind == "cuda, staged":
        request.getfixturevalue("monkeypatch").setattr(CudaContext, "enable_peer", lambda self, other: False)
    if kind.startswith("host"):
        return make_dev("host"), make_dev("host")
    if kind == "cuda, one object":
        e = make_dev("cuda")
        return e, e
    if kind == "cuda, one GPU":
        return make_dev("cuda"), make_dev("cuda")
    if request.getfixturevalue("gpu_count") < 2:
        pytest.skip("needs two GPUs")
    return make_dev("cuda", 0), make_dev("cuda", 1)


WAYS = {
    "host": "same", "cuda, one object": "same", "cuda, one GPU": "same", "cuda, peer": "peer", "cuda, staged": "staged",
}  # fmt: skip


@pytest.fixture(params=list(WAYS))
def stages(request: pytest.FixtureRequest, make_dev: MakeDev) -> Any:
    return pair(request.param, make_dev, request)


@pytest.fixture(params=[kind for kind in WAYS if kind != "host"])
def gpus(request: pytest.FixtureRequest, make_dev: MakeDev) -> Any:
    return pair(request.param, make_dev, request)


@pytest.fixture
def boundary(stages: tuple[Any, Any]) -> Any:
    with Boundary(*stages, HIDDEN, MAX_ROWS) as made:
        yield made


def rows_of(number: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).standard_normal((count, HIDDEN), np.float32)


def arrived(received: Any) -> np.ndarray[Any, Any]:
    return np.asarray(received.to_numpy()).reshape(-1, HIDDEN)


@pytest.mark.parametrize("kind", list(WAYS))
def test_the_way_follows_from_the_devices(kind: str, make_dev: MakeDev, request: pytest.FixtureRequest) -> None:
    a, b = pair(kind, make_dev, request)
    if kind == "cuda, peer" and not CudaContext(0).enable_peer(CudaContext(1)):
        pytest.skip("these GPUs do not reach each other")
    with Boundary(a, b, HIDDEN, MAX_ROWS) as made:
        assert made.way == WAYS[kind]


def test_what_is_sent_arrives_in_order(boundary: Boundary) -> None:
    for number, count in enumerate((5, 1, 0, 3, 5, 2, 4)):
        sent = rows_of(number, count)
        boundary.send(put(boundary.dev_a, sent))
        received = boundary.receive()
        assert received.device == boundary.dev_b.ordinal
        assert arrived(received).tobytes() == sent.tobytes()


def test_two_are_under_way_at_once_and_the_first_comes_first(boundary: Boundary) -> None:
    a = boundary.dev_a
    boundary.send(put(a, rows_of(0, 2)))
    for number in range(1, 9):
        boundary.send(put(a, rows_of(number, 1 + number % 5)))
        received = boundary.receive()
        before = rows_of(number - 1, 2 if number == 1 else 1 + (number - 1) % 5)
        assert arrived(received).tobytes() == before.tobytes()
        boundary.release()


def test_rows_may_be_changed_behind_the_send(boundary: Boundary) -> None:
    rows = put(boundary.dev_a, rows_of(0, 3))
    boundary.send(rows)
    rows.copy_from(rows_of(1, 3).reshape(-1))
    assert arrived(boundary.receive()).tobytes() == rows_of(0, 3).tobytes()


def test_received_rows_go_on_over_the_next_boundary(stages: tuple[Any, Any]) -> None:
    a, b = stages
    with Boundary(a, b, HIDDEN, MAX_ROWS) as there, Boundary(b, a, HIDDEN, MAX_ROWS) as back:
        for number in range(5):
            there.send(put(a, rows_of(number, 4)))
            back.send(there.receive())
            assert arrived(back.receive()).tobytes() == rows_of(number, 4).tobytes()


def test_a_numpy_array_crosses_between_host_devices(make_dev: MakeDev) -> None:
    with Boundary(make_dev("host"), make_dev("host"), HIDDEN, MAX_ROWS) as boundary:
        boundary.send(rows_of(3, 2))
        assert arrived(boundary.receive()).tobytes() == rows_of(3, 2).tobytes()
        boundary.send(rows_of(4, 1)[0])  # a single row comes without its leading 1
        assert arrived(boundary.receive()).tobytes() == rows_of(4, 1).tobytes()


def test_refusals_are_typed_and_change_nothing(boundary: Boundary) -> None:
    a = boundary.dev_a
    with pytest.raises(StateError, match="no rows are under way"):
        boundary.receive()
    boundary.send(put(a, rows_of(0, 2)))
    for error, match, rows in (
        (CapacityError, "6 rows to send; the boundary was made for 5", put(a, rows_of(1, MAX_ROWS + 1))),
        (ArrayError, "elements", put(a, rows_of(1, 1)[:, 1:])),
        (ArrayError, "uint16", put(a, np.zeros(HIDDEN, np.uint16))),
        (ArrayError, "rows", 7),
    ):
        with pytest.raises(error, match=match):
            boundary.send(rows)
    boundary.send(put(a, rows_of(1, 3)))
    with pytest.raises(StateError, match="2 by rows under way and 0 by rows received"):
        boundary.send(put(a, rows_of(2, 1)))
    assert arrived(boundary.receive()).tobytes() == rows_of(0, 2).tobytes()
    with pytest.raises(StateError, match="1 by rows under way and 1 by rows received"):
        boundary.send(put(a, rows_of(2, 1)))
    boundary.release()
    boundary.release()
    boundary.send(put(a, rows_of(2, 1)))
    assert arrived(boundary.receive()).tobytes() == rows_of(1, 3).tobytes()
    assert arrived(boundary.receive()).tobytes() == rows_of(2, 1).tobytes()
    with pytest.raises(StateError, match="no rows are under way"):
        boundary.receive()


def test_rows_of_another_device_are_refused(make_dev: MakeDev, request: pytest.FixtureRequest) -> None:
    a, b = pair("cuda, peer", make_dev, request)
    with Boundary(a, b, HIDDEN, MAX_ROWS) as boundary:
        with pytest.raises(ArrayError, match="rows lives on cuda:1"):
            boundary.send(put(b, rows_of(0, 1)))
        with pytest.raises(ArrayError, match="rows lives on the host"):
            boundary.send(rows_of(0, 1))


def test_a_closed_boundary_refuses_all_but_close(boundary: Boundary) -> None:
    rows = put(boundary.dev_a, rows_of(0, 1))
    boundary.send(rows)
    boundary.close()
    boundary.close()
    assert boundary.is_closed
    for call in (lambda: boundary.send(rows), boundary.receive, boundary.release):
        with pytest.raises(StateError, match="the boundary is closed"):
            call()


@pytest.mark.parametrize(("hidden", "max_rows"), [(0, 1), (-1, 1), (1, 0), (True, 1), (1.5, 1)])
def test_sizes_that_cannot_be_are_refused(make_dev: MakeDev, hidden: Any, max_rows: Any) -> None:
    with pytest.raises(ConfigError, match="it must be at least 1"):
        Boundary(make_dev("host"), make_dev("host"), hidden, max_rows)


def test_a_gpu_and_the_host_have_no_boundary(make_dev: MakeDev) -> None:
    for stages in ((make_dev("cuda"), make_dev("host")), (make_dev("host"), make_dev("cuda")), (make_dev("host"), 3)):
        with pytest.raises(UnsupportedError, match="two GPUs or two host devices"):
            Boundary(*stages, HIDDEN, MAX_ROWS)


# Order, by the trace of the stand-in.


def traffic(boundary: Boundary) -> None:
    """Many crossings; between them the rows are changed by the sender and the slots by the reader, as they may be."""
    a, b = boundary.dev_a, boundary.dev_b
    rows = [put(a, rows_of(i, MAX_ROWS)) for i in range(2)]
    seen = b.uninit(MAX_ROWS * HIDDEN)
    boundary.send(rows[0])
    for number in range(8):
        source = rows[number % 2]
        a.clear_bytes(source.ptr, source.nbytes)
        boundary.send(source)
        received = boundary.receive()
        b.copy_bytes(seen.ptr, received.ptr, received.nbytes)
        b.clear_bytes(received.ptr, received.nbytes)
        if number % 3 == 0:  # the next receive ends the reading, too
            again = boundary.receive()
            b.copy_bytes(seen.ptr, again.ptr, again.nbytes)
            boundary.send(rows[0])
        boundary.release()
    while boundary._eager.sent > boundary._eager.received:
        received = boundary.receive()
        b.copy_bytes(seen.ptr, received.ptr, received.nbytes)
    boundary.release()


def pinned(boundary: Boundary) -> range:
    room = boundary._pinned
    return range(0) if room is None else range(room.ptr, room.ptr + 2 * boundary._slot_bytes)


@pytest.mark.standin
def test_every_crossing_is_ordered_both_ways_and_the_host_never_waits(gpus: Any, standin: StandIn) -> None:
    with Boundary(*gpus, HIDDEN, MAX_ROWS) as boundary:
        traffic(boundary)
        standin.clear_trace()
        traffic(boundary)
        trace = standin.trace()
        assert races(trace, pinned(boundary)) == []
        assert [call.name for call in trace if call.name in WAITS] == []
        if boundary._in_order:
            assert [call for call in trace if call.name in ("cuEventRecord", "cuStreamWaitEvent")] == []


@pytest.mark.standin
@pytest.mark.at_once
@pytest.mark.parametrize("left_out", ["event_record", "stream_wait_event"])
@pytest.mark.parametrize("side", ["dev_a", "dev_b"])
def test_each_event_is_needed(
    gpus: Any, standin: StandIn, monkeypatch: pytest.MonkeyPatch, left_out: str, side: str
) -> None:
    with Boundary(*gpus, HIDDEN, MAX_ROWS) as boundary:
        if boundary._in_order:
            pytest.skip("one stream")
        traffic(boundary)
        stream, call = getattr(boundary, side).stream.handle, getattr(driver, left_out)
        monkeypatch.setattr(driver, left_out, lambda *args: None if stream in args else call(*args))
        standin.clear_trace()
        traffic(boundary)
        assert races(standin.trace(), pinned(boundary))
        monkeypatch.undo()


@pytest.mark.standin
def test_rows_never_received_are_no_reason_to_free_under_a_copy(gpus: Any, standin: StandIn) -> None:
    boundary = Boundary(*gpus, HIDDEN, MAX_ROWS)
    boundary.send(put(gpus[0], rows_of(0, 2)))
    boundary.send(put(gpus[0], rows_of(1, 2)))
    standin.clear_trace()
    boundary.close()
    trace = standin.trace()
    if boundary.way == "same" and gpus[0] is not gpus[1]:
        names = [call.name for call in trace if call.name in ("cuStreamWaitEvent", "cuMemFreeAsync")]
        assert names == ["cuStreamWaitEvent", "cuStreamWaitEvent", "cuMemFreeAsync"]
        assert {call.stream for call in trace if call.name in names} == {gpus[1].stream.handle}
    elif boundary.way != "same":
        names = [call.name for call in trace if call.name in ("cuStreamSynchronize", "cuMemFree")]
        assert names == ["cuStreamSynchronize", "cuStreamSynchronize", "cuMemFree"]


@pytest.mark.standin
def test_a_crossing_is_one_copy_and_no_allocation(gpus: Any, standin: StandIn) -> None:
    with Boundary(*gpus, HIDDEN, MAX_ROWS) as boundary:
        rows = put(gpus[0], rows_of(0, 3))
        standin.clear_trace()
        boundary.send(rows)
        received = boundary.receive()
        copies = [call for call in standin.trace() if call.name.startswith("cuMemcpy")]
        assert {call.bytes for call in copies} == {rows.nbytes}
        assert [call.name for call in copies] == {
            "same": ["cuMemcpyDtoDAsync"],
            "peer": ["cuMemcpyDtoDAsync"],
            "staged": ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"],
        }[boundary.way]
        assert copies[0].stream == gpus[0].stream.handle
        assert copies[-1].dst == received.ptr
        assert not standin.calls("cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc")


@pytest.mark.standin
def test_without_peer_access_rows_are_staged(make_dev: MakeDev, standin: StandIn) -> None:
    standin.set_peers(False)
    a, b = make_dev("cuda", 0), make_dev("cuda", 1)
    with Boundary(a, b, HIDDEN, MAX_ROWS) as boundary:
        assert boundary.way == "staged"
        assert driver.pointer_get_attribute("MEMORY_TYPE", boundary._pinned.ptr) == 1  # of the host
        assert driver.pointer_get_attribute("DEVICE_ORDINAL", boundary._slots.ptr) == 1
        boundary.send(put(a, rows_of(0, 2)))
        assert arrived(boundary.receive()).tobytes() == rows_of(0, 2).tobytes()


@pytest.mark.standin
@pytest.mark.parametrize("code", [driver.PEER_ACCESS_UNSUPPORTED, driver.TOO_MANY_PEERS])
def test_rows_are_staged_where_peer_access_is_not_to_be_had_after_all(
    make_dev: MakeDev, standin: StandIn, code: int
) -> None:
    a, b = make_dev("cuda", 0), make_dev("cuda", 1)
    standin.fail("cuCtxEnablePeerAccess", 1, code)
    with Boundary(a, b, HIDDEN, MAX_ROWS) as boundary:
        assert boundary.way == "staged"
    assert not standin.pending_failures()


@pytest.mark.standin
@pytest.mark.parametrize(
    "name", ["cuMemAlloc", "cuMemHostAlloc", "cuEventCreate", "cuMemAllocAsync", "cuCtxEnablePeerAccess"]
)
@pytest.mark.parametrize("nth", [1, 4])
def test_a_birth_that_fails_leaves_nothing(gpus: Any, standin: StandIn, name: str, nth: int) -> None:
    before = standin.live_bytes()
    standin.fail(name, nth, 2)
    try:
        Boundary(*gpus, HIDDEN, MAX_ROWS).close()
    except DriverError:
        assert not standin.pending_failures()
    standin.clear_failures()
    assert standin.live_bytes() == before


@pytest.mark.standin
@pytest.mark.parametrize("nth", range(1, 5))
def test_a_call_that_fails_takes_no_slot(gpus: Any, standin: StandIn, nth: int) -> None:
    with Boundary(*gpus, HIDDEN, MAX_ROWS) as boundary:
        rows = put(gpus[0], rows_of(0, 3))
        for call in (lambda: boundary.send(rows), boundary.receive):
            standin.fail("*", nth, 999)
            try:
                call()
            except DriverError:
                standin.clear_failures()
                call()
            standin.clear_failures()
        assert boundary._eager.sent == boundary._eager.received == 1
        assert isinstance(boundary._slots, CudaSlice)


# Captures.


def test_both_ends_in_one_capture_are_launched_again(stages: tuple[Any, Any]) -> None:
    e = stages[0]
    rows, seen = put(e, rows_of(0, 3)), put(e, np.zeros((3, HIDDEN), np.float32))
    with Boundary(e, e, HIDDEN, MAX_ROWS) as boundary:
        with e.capture() as graph:
            for _ in range(3):
                boundary.send(rows)
                received = boundary.receive()
                e.copy_bytes(seen.ptr, received.ptr, received.nbytes)
        for number in (1, 2):
            rows.copy_from(rows_of(number, 3).reshape(-1))
            graph.launch()
            assert arrived(seen).tobytes() == rows_of(number, 3).tobytes()
        graph.close()
        boundary.send(rows)  # the capture has taken no slot
        assert arrived(boundary.receive()).tobytes() == rows_of(2, 3).tobytes()


def recorded(boundary: Boundary, times: int = 2) -> tuple[Any, Any, Any, Any]:
    """A graph that sends `times` times, one that receives as often, what they read and where they leave it."""
    a, b = boundary.dev_a, boundary.dev_b
    rows = [put(a, rows_of(i, 2 + i)) for i in range(times)]
    seen = [put(b, np.zeros((2 + i, HIDDEN), np.float32)) for i in range(times)]
    with a.capture() as sends:
        for each in rows:
            boundary.send(each)
    with b.capture() as receives:
        for each in seen:
            received = boundary.receive()
            b.copy_bytes(each.ptr, received.ptr, received.nbytes)
    return sends, receives, rows, seen


@pytest.mark.parametrize("times", [1, 2])
def test_a_graph_sends_and_another_receives(
    make_dev: MakeDev, request: pytest.FixtureRequest, gpus: Any, times: int
) -> None:
    if gpus[0] is gpus[1]:
        pytest.skip("one device: both ends are in one graph")
    with Boundary(*gpus, HIDDEN, MAX_ROWS) as boundary:
        sends, receives, rows, seen = recorded(boundary, times)
        standin = None if request.config.getoption("--gpu") else request.getfixturevalue("standin")
        if standin:
            standin.clear_trace()
        for number in range(3):
            for i, each in enumerate(rows):
                each.copy_from(rows_of(10 * number + i, 2 + i).reshape(-1))
            sends.launch()
            receives.launch()
            for i, each in enumerate(seen):
                assert arrived(each).tobytes() == rows_of(10 * number + i, 2 + i).tobytes()
        if standin:
            assert races(standin.trace(), pinned(boundary)) == []
        for graph in (sends, receives):
            graph.close()


@pytest.mark.standin
def test_graphs_are_ordered_both_ways_and_keep_their_boundary(gpus: Any, standin: StandIn) -> None:
    """Launched in turn with nothing to wait for in between, and with nobody else who knows of the boundary."""
    if gpus[0] is gpus[1]:
        pytest.skip("one device: both ends are in one graph")
    boundary = Boundary(*gpus, HIDDEN, MAX_ROWS)
    sends, receives, rows, seen = recorded(boundary)
    reached = pinned(boundary)
    del boundary
    gc.collect()
    standin.clear_trace()
    for _ in range(3):
        sends.launch()
        receives.launch()
    assert races(standin.trace(), reached) == []
    for sent, there in zip(rows, seen, strict=True):
        assert arrived(there).tobytes() == arrived(sent).tobytes()
    for graph in (sends, receives):
        graph.close()


def test_a_recorded_receive_needs_its_send_and_a_graph_has_two_of_each(gpus: Any) -> None:
    a, b = gpus
    if a is b:
        pytest.skip("one device: both ends are in one graph")
    with Boundary(*gpus, HIDDEN, MAX_ROWS) as boundary:
        with pytest.raises(StateError, match="record the send first"), b.capture():
            boundary.receive()
        rows = put(a, rows_of(0, 1))
        with a.capture() as sends:
            boundary.send(rows)
            boundary.send(rows)
            with pytest.raises(StateError, match="both slots are taken"):
                boundary.send(rows)
            with pytest.raises(StateError, match="capture is open"):
                boundary.close()
        with b.capture() as receives:
            boundary.receive()
            boundary.receive()
            with pytest.raises(StateError, match="2 times already"):
                boundary.receive()
        for graph in (sends, receives):
            graph.close()
        assert not boundary._eager.sent


def test_a_send_that_was_recorded_in_vain_is_none(gpus: Any) -> None:
    a, b = gpus
    if a is b:
        pytest.skip("one device: both ends are in one graph")
    with Boundary(*gpus, HIDDEN, MAX_ROWS) as boundary:
        rows, too_many = put(a, rows_of(0, 1)), put(a, rows_of(0, MAX_ROWS + 1))

        def send_and_fail() -> None:
            boundary.send(rows)
            boundary.send(too_many)

        with pytest.raises(CapacityError), a.capture() as given_up:
            send_and_fail()
        with pytest.raises(StateError, match="record the send first"), b.capture():
            boundary.receive()
        assert given_up.is_closed
        with a.capture() as sends:
            boundary.send(rows)
        with b.capture() as receives:
            boundary.receive()
            with pytest.raises(StateError, match="record the send first"):
                boundary.receive()
        for graph in (sends, receives):
            graph.close()


@pytest.mark.parametrize("recorder", ["dev_a", "dev_b"])
def test_two_devices_on_one_stream_are_in_one_capture(make_dev: MakeDev, recorder: str) -> None:
    a = make_dev("cuda")
    b = make_dev("cuda", stream=a.stream)
    rows, seen = put(a, rows_of(0, 3)), put(b, np.zeros((3, HIDDEN), np.float32))
    with Boundary(a, b, HIDDEN, MAX_ROWS) as boundary:
        with getattr(boundary, recorder).capture() as graph:
            boundary.send(rows)
            received = boundary.receive()
            b.copy_bytes(seen.ptr, received.ptr, received.nbytes)
        rows.copy_from(rows_of(1, 3).reshape(-1))
        graph.launch()
        assert arrived(seen).tobytes() == rows_of(1, 3).tobytes()
        assert not boundary._eager.sent
        graph.close()


# Memory.


def test_received_rows_are_good_as_long_as_somebody_has_them(stages: tuple[Any, Any]) -> None:
    """A view keeps them where the boundary was forgotten; what went out through DLPack, also where it was closed."""
    a, b = stages
    sent = rows_of(0, 2)
    boundary = Boundary(a, b, HIDDEN, MAX_ROWS)
    boundary.send(put(a, sent))
    received = boundary.receive()
    del boundary
    gc.collect()
    assert arrived(received).tobytes() == sent.tobytes()
    boundary = Boundary(a, b, HIDDEN, MAX_ROWS)
    boundary.send(put(a, sent))
    received = boundary.receive()
    b.synchronize()
    capsule = received.__dlpack__(stream=None if b.ordinal < 0 else -1)
    ptr = received.ptr
    boundary.close()
    with pytest.raises(StateError, match="closed"):
        received.to_numpy()
    assert arrived(Borrowed(b.memory, ptr, sent.size)).tobytes() == sent.tobytes()
    del capsule
