"""Streams of other libraries: what a device takes as one, and how two streams are put in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from foreign import nameless
from standin import StandIn

from memra_driver import driver
from memra_driver.device import CudaContext, CudaStream
from memra_driver.errors import ConfigError, DeviceMismatch, StateError
from memra_driver.kvdev import CudaDev

pytestmark = pytest.mark.standin


@pytest.fixture
def stream(standin: StandIn) -> Iterator[CudaStream]:
    with CudaContext() as context, CudaStream(context) as stream:
        standin.clear_trace()
        yield stream


class Torch:
    """torch.cuda.Stream as it is from 2.10 on."""

    def __init__(self, handle: int, device: int = 0) -> None:
        self.cuda_stream, self.device_index = handle, device

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


KINDS: dict[str, Callable[[int], Any]] = {
    "int": lambda handle: handle,
    "numpy": lambda handle: np.uint64(handle),
    "protocol": lambda handle: SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
    "property": lambda handle: SimpleNamespace(__cuda_stream__=(0, handle)),  # cuda.core before 0.3
    "old torch": lambda handle: SimpleNamespace(cuda_stream=handle, device_index=0),
    "torch": Torch,
    "cupy": lambda handle: SimpleNamespace(ptr=handle, device_id=0),
    "cupy's null": lambda handle: SimpleNamespace(ptr=handle, device_id=-1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_stream_is_taken_by_a_device_and_put_in_order(
    kind: str, stream: CudaStream, standin: StandIn
) -> None:
    given = KINDS[kind](stream.handle)
    with CudaDev(stream=given) as e:
        assert e.stream.handle == stream.handle
        e.zeros(4).close()
    with CudaStream(stream.context) as other:
        standin.clear_trace()
        other.wait_stream(given)
        other.release_to(given)
        seen = [(call.name, call.stream) for call in standin.calls("cuEventRecord", "cuStreamWaitEvent")]
        assert seen == [
            ("cuEventRecord", stream.handle), ("cuStreamWaitEvent", other.handle),
            ("cuEventRecord", other.handle), ("cuStreamWaitEvent", stream.handle),
        ]  # fmt: skip
    assert [call.dst for call in standin.calls("cuEventCreate")] == [c.src for c in standin.calls("cuEventDestroy")]
    assert stream.handle not in {call.stream for call in standin.calls("cuStreamSynchronize")}


def test_a_stream_of_the_bindings_is_taken(stream: CudaStream) -> None:
    from cuda.bindings import driver as cu

    with CudaDev(stream=cu.CUstream(stream.handle)) as e:
        assert e.stream.handle == stream.handle


def test_a_stream_of_cuda_core_is_taken(stream: CudaStream) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda-python 12 comes without it")
    with CudaDev(stream=core.Stream.from_handle(stream.handle)) as e:
        assert e.stream.handle == stream.handle


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_stream_waits_for_the_default_ones_and_not_for_itself(
    handle: int, stream: CudaStream, standin: StandIn
) -> None:
    stream.wait_stream(handle)
    assert [call.stream for call in standin.calls("cuEventRecord")] == [handle]
    assert [call.stream for call in standin.calls("cuStreamWaitEvent")] == [stream.handle]
    standin.clear_trace()
    own = CudaStream(stream.context, handle)
    for other in {handle, handle or 1, handle if handle == 2 else 0}:
        own.wait_stream(other)
        own.release_to(other)
    stream.wait_stream(stream)
    assert standin.trace() == []


@pytest.mark.parametrize(
    "wrong",
    [
        "stream", -1, True, np.True_, 1.5, 1 << 64, None, SimpleNamespace(ptr="x"), SimpleNamespace(cuda_stream=None),
        SimpleNamespace(__cuda_stream__=lambda: 7), SimpleNamespace(__cuda_stream__=lambda: (0,)),
        SimpleNamespace(__cuda_stream__=lambda: (0, "x")), SimpleNamespace(__cuda_stream__=lambda: (1, 0)),
        SimpleNamespace(__cuda_stream__=lambda: (0, -1)),
    ],
    ids=nameless,
)  # fmt: skip
def test_what_is_no_stream_is_refused_and_nothing_is_enqueued(wrong: Any, stream: CudaStream, standin: StandIn) -> None:
    for use in (stream.wait_stream, stream.release_to):
        with pytest.raises(ConfigError):
            use(wrong)
    if wrong is not None:
        with pytest.raises(ConfigError):
            CudaStream(stream.context, wrong)
    assert standin.trace() == []


def test_a_stream_that_names_another_device_is_refused(stream: CudaStream) -> None:
    for theirs in (Torch(0, 1), SimpleNamespace(ptr=0, device_id=1)):  # handle 0 is of whatever device is current
        for use in (stream.wait_stream, stream.release_to, lambda given: CudaDev(stream=given)):
            with pytest.raises(DeviceMismatch, match="stream of device 1, not of device 0"):
                use(theirs)


def test_closed_streams_are_put_in_no_order(stream: CudaStream, standin: StandIn) -> None:
    other = CudaStream(stream.context)
    other.close()
    standin.clear_trace()
    for use in (
        lambda: other.wait_stream(stream), lambda: other.release_to(stream), lambda: stream.wait_stream(other),
        lambda: stream.release_to(other),
    ):  # fmt: skip
        with pytest.raises(StateError, match="closed"):
            use()
    assert standin.trace() == []


def test_work_goes_in_the_order_that_was_asked_for(stream: CudaStream, standin: StandIn) -> None:
    context = stream.context
    with CudaStream(context) as other:
        a = driver.mem_alloc(8)
        standin.clear_trace()
        stream.memset(a, 1, 8)
        other.wait_stream(stream)
        other.memset(a, 2, 8)
        other.release_to(stream)
        stream.memset(a, 3, 8)
        seen = [(call.name, call.stream) for call in standin.trace() if not call.name.startswith("cuEventC")]
        mine, theirs = stream.handle, other.handle
        assert [each for each in seen if each[0] != "cuEventDestroy"] == [
            ("cuMemsetD8Async", mine), ("cuEventRecord", mine), ("cuStreamWaitEvent", theirs),
            ("cuMemsetD8Async", theirs), ("cuEventRecord", theirs), ("cuStreamWaitEvent", mine),
            ("cuMemsetD8Async", mine),
        ]  # fmt: skip
        driver.mem_free(a)
