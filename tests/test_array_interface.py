"""Arrays with the CUDA array interface as arguments: the streams that they name, and what cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from caches import POLICY, attention_only, put
from foreign import Foreign, nameless
from op_calls import MATRIX, arrays, new, refuse
from standin import StandIn

from memra_driver import driver, ops
from memra_driver.cache import Cache
from memra_driver.device import CudaStream
from memra_driver.errors import ArrayError

MakeDev = Callable[..., Any]


@pytest.fixture
def second(cuda: Any) -> Any:
    with CudaStream(cuda.context) as stream:
        yield stream


def append(e: Any, rows: Any) -> None:
    with Cache.new(e, attention_only(1), 8, policy=POLICY) as cache:
        ops.append_kv(e, cache, 0, rows, rows)


@pytest.mark.standin
def test_an_arrays_stream_is_waited_for_by_an_event(cuda: Any, second: Any, standin: StandIn) -> None:
    held = cuda.zeros(128)
    for stream in (second.handle, 1, 2):
        standin.clear_trace()
        append(cuda, Foreign(held, (1, 128), stream=stream))
        waits = [(call.stream, call.src) for call in standin.calls("cuStreamWaitEvent")]
        records = [(call.stream, call.src) for call in standin.calls("cuEventRecord")]
        assert [stream for stream, _ in records] == [stream] * 2
        assert waits == [(cuda.stream.handle, event) for _, event in records]
        order = [call.name for call in standin.trace()]
        assert order.index("cuStreamWaitEvent") < order.index("cuLaunchKernelEx")
        assert standin.calls("cuStreamSynchronize", "cuEventSynchronize") == []


@pytest.mark.standin
def test_an_array_without_a_stream_or_on_ours_waits_for_nothing(make_dev: MakeDev, standin: StandIn) -> None:
    for stream, own in ((None, None), (0, 1), (2, 2)):
        e = make_dev("cuda", stream=stream)
        held = e.zeros(128)
        standin.clear_trace()
        append(e, Foreign(held, (1, 128)))
        append(e, Foreign(held, (1, 128), stream=None))
        append(e, Foreign(held, (1, 128), stream=e.stream.handle if own is None else own))
        assert standin.calls("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent") == []
        held.close()


def test_a_recorded_operation_takes_arrays_of_its_own_stream_and_of_captured_ones(cuda: Any, second: Any) -> None:
    held = cuda.zeros(128)
    with Cache.new(cuda, attention_only(1), 8, policy=POLICY) as cache:
        with cuda.capture() as graph:
            for stream in (second.handle, 1):
                array = Foreign(held, (1, 128), stream=stream)
                with pytest.raises(ArrayError, match=r"^k_rows is filled on stream .* order it before each launch"):
                    ops.append_kv(cuda, cache, 0, array, array)
            for stream in (None, cuda.stream.handle):
                array = Foreign(held, (1, 128), stream=stream)
                ops.append_kv(cuda, cache, 0, array, array)
                cache.advance(cuda, 1)
            driver.stream_begin_capture(second.handle)
            array = Foreign(held, (1, 128), stream=second.handle)
            ops.append_kv(cuda, cache, 0, array, array)
            cache.advance(cuda, 1)
            driver.graph_destroy(driver.stream_end_capture(second.handle))
        graph.launch()
        assert cache.pos == 3
        graph.close()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stream": 0}, "names stream 0"), ({"stream": -1}, "names stream -1"), ({"stream": "main"}, "cannot be read"),
        ({"mask": object()}, "is masked"), ({"typestr": "nonsense"}, "cannot be read"), ({"shape": None}, "cannot be"),
        ({"shape": (1.5, 128)}, "cannot be read"), ({"data": None}, "cannot be read"), ({"data": (0, False)}, "memory"),
        ({"data": (-4, False)}, "no address"), ({"data": (1 << 64, False)}, "no address"),
        ({"data": ((1 << 64) - 4, False)}, "no address"), ({"data": (10**5000, False)}, "no address"),
        ({"shape": (-2, 128)}, r"has shape \[-2, 128\], which no"), ({"shape": (-2, -128)}, "which no array has"),
        ({"shape": (1 << 62, 128)}, "no address"), ({"shape": (10**5000, 128)}, "which no array has"),
        ({"shape": (2, 128) + (1,) * 100}, "which no array has"), ({"stream": 1 << 64}, "names stream 184467"),
        ({"stream": 10**5000}, "names stream int"), ({"shape": iter(int, 1)}, "which no array has"),
        ({"strides": (512,)}, "is strided"), ({"strides": "none"}, "cannot be read"), ({"typestr": "<V2"}, "has dtype"),
    ],
    ids=nameless,
)  # fmt: skip
def test_an_interface_that_cannot_be_read_is_refused_by_name(cuda: Any, changes: dict[str, Any], match: str) -> None:
    with new(cuda) as cache:
        given = {name: put(cuda, array) for name, array in arrays("append_kv").items()}
        for name in given:
            refuse(
                cuda, cache, "append_kv", given | {name: Foreign(given[name], MATRIX, **changes)}, f"^{name} .*{match}"
            )


def test_an_interface_that_lacks_a_field_or_refuses_is_refused_by_name(cuda: Any) -> None:
    class Grad:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")

    with new(cuda) as cache:
        given = {name: put(cuda, array) for name, array in arrays("append_kv").items()}
        refuse(cuda, cache, "append_kv", given | {"v_rows": Grad()}, "^v_rows .* requires grad")
        for field in ("shape", "typestr", "data"):
            bad = Foreign(given["v_rows"], MATRIX)
            del bad.__cuda_array_interface__[field]
            refuse(cuda, cache, "append_kv", given | {"v_rows": bad}, f"^v_rows .*cannot be read.*{field}")


@pytest.mark.standin
def test_memory_that_was_freed_is_refused_by_name(cuda: Any) -> None:
    with new(cuda) as cache:
        given = {name: put(cuda, array) for name, array in arrays("append_kv").items()}
        gone = Foreign(given["k_rows"], MATRIX)
        given["k_rows"].close()
        refuse(
            cuda, cache, "append_kv", given | {"k_rows": gone}, "^k_rows lies at .* where the driver knows no memory"
        )


@pytest.mark.misuse
@pytest.mark.standin
def test_a_stream_that_is_gone_is_refused_by_name(cuda: Any) -> None:
    stream = CudaStream(cuda.context)
    handle = stream.handle
    stream.close()
    with new(cuda) as cache:
        given = {name: put(cuda, array) for name, array in arrays("append_kv").items()}
        gone = Foreign(given["v_rows"], MATRIX, stream=handle)
        refuse(
            cuda, cache, "append_kv", given | {"v_rows": gone}, "^v_rows is filled on stream .* cannot be waited for"
        )


def test_an_array_of_a_gpu_is_refused_on_the_host_without_a_driver(host: Any) -> None:
    with new(host) as cache:
        given = {name: put(host, array) for name, array in arrays("append_kv").items()}
        refuse(host, cache, "append_kv", given | {"k_rows": Foreign(given["k_rows"], MATRIX)}, "^k_rows lives on a GPU")
