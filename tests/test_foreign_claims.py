"""What a foreign array claims to be and no memory is: refused by name before anything, in few words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caches import POLICY, attention_only, put
from foreign import CPU, CUDA, MANAGED, PINNED, ROCM, Foreign, Tensor
from op_calls import MATRIX, T, arrays, new, refuse
from test_interop import home, results_of_append, tensor

from memra_driver import interop, ops
from memra_driver.cache import Cache
from memra_driver.device import CudaContext, CudaSlice, CudaStream
from memra_driver.errors import ArrayError, ConfigError, DeviceMismatch, ExportError


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"lengths": (-2, 128)}, r"has shape \[-2, 128\], which no array has"),
        ({"lengths": (-2, -128)}, "which no array has"), ({"lengths": (1 << 62, 128)}, "no address"),
        ({"lengths": ((1 << 63) - 1, 128)}, "no address"), ({"ndim": -1}, "a tensor of -1 dimensions"),
        ({"ndim": 65}, "a tensor of 65 dimensions"), ({"ndim": (1 << 31) - 1}, "a tensor of 2147483647 dimensions"),
        ({"lengths": None}, "without a shape"), ({"byte_offset": (1 << 64) - 4}, "leaves the address space"),
        ({"data": (1 << 64) - 4}, "no address"),
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_no_memory_can_be_is_refused_by_name(dev: Any, changes: dict[str, Any], match: str) -> None:
    with new(dev) as cache:
        good = {key: put(dev, array) for key, array in arrays("append_kv").items()}
        for name in good:
            bad = tensor(dev, np.ones(MATRIX, np.float32), **changes)
            refuse(dev, cache, "append_kv", good | {name: bad}, f"^{name} .*{match}")


@pytest.mark.parametrize(
    "changes",
    [
        {"len": -2 * 128}, {"len": 256.0}, {"len": 1 << 62}, {"len": 10**5000}, {"ptr": -4}, {"ptr": (1 << 64) + 256},
        {"ptr": (1 << 64) - 4}, {"ptr": "here"}, {"ptr": None}, {"dtype": "nonsense"}, {"dtype": 5}, {"device": "gpu"},
        {"device": 10**5000},
    ],
    ids=lambda changes: " ".join(changes),
)  # fmt: skip
def test_a_slice_that_no_memory_can_be_is_refused_by_name(dev: Any, changes: dict[str, Any]) -> None:
    with new(dev) as cache:
        good = {key: put(dev, array) for key, array in arrays("append_kv").items()}
        for name, held in good.items():
            fields = {"ptr": held.ptr, "len": held.len, "dtype": "f4", "nbytes": held.nbytes}
            taken = interop.operand(SimpleNamespace(**fields), name, (128,), (np.float32,), dev, rows=T, out=False)
            assert (taken.ptr, taken.len, taken.nbytes) == (held.ptr, held.len, held.nbytes)
            refuse(dev, cache, "append_kv", good | {name: SimpleNamespace(**fields | changes)}, f"^{name} ")


def test_how_far_outputs_reach_is_counted_and_not_asked_for(dev: Any) -> None:
    with new(dev) as cache:
        held = dev.zeros(2 * T * 128)
        short = [SimpleNamespace(ptr=held.ptr + at, len=T * 128, dtype="f4", nbytes=1) for at in (0, 8)]
        with pytest.raises(ArrayError, match="share memory"):
            ops.dequant_kv(dev, cache, 3, 0, T, *short)


def test_a_tensor_on_another_device_than_its_object_says_is_refused_by_name(host: Any, cuda: Any) -> None:
    for e, lies in (
        (host, [(CUDA, 0), (MANAGED, 0), (ROCM, 0), (CUDA, -1)]),
        (cuda, [(CPU, 0), (PINNED, 0), (CUDA, 3), (ROCM, 0), (CUDA, -1)]),
    ):
        with new(e) as cache:
            good = {key: put(e, array) for key, array in arrays("append_kv").items()}
            for kind, index in lies:
                for name in good:
                    bad = tensor(e, np.ones(MATRIX, np.float32), device_type=kind, device_id=index)
                    refuse(e, cache, "append_kv", good | {name: bad}, f"^{name} .*(hands over memory|cannot take)")
    for device in ((CUDA, -1), (MANAGED, -1), (CUDA, 1 << 31), (CUDA, 10**5000)):
        with new(host) as cache:
            good = {key: put(host, array) for key, array in arrays("append_kv").items()}
            far = Tensor(good["k_rows"].ptr, MATRIX, device=device)
            refuse(host, cache, "append_kv", good | {"k_rows": far}, "^k_rows does not say where it lives")
    plain = results_of_append(host, tensor(host, np.ones((1, 128), np.float32)))
    assert results_of_append(host, tensor(host, np.ones((1, 128), np.float32), device_type=PINNED)) == plain


@pytest.mark.standin
@pytest.mark.parametrize("device", [CUDA, MANAGED])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_tensor_over_freed_memory_is_refused_by_name(cuda: Any, device: int, recorded: bool) -> None:
    row = np.ones((1, 128), np.float32)
    gone, there = (tensor(cuda, row, device=(device, 0)) for _ in range(2))
    plain = put(cuda, row)
    gone.keep.close()
    match = "^v_rows lies at .* where the driver knows no memory"
    with Cache.new(cuda, attention_only(1), 8, policy=POLICY) as cache:
        if not recorded:
            with pytest.raises(ArrayError, match=match):
                ops.append_kv(cuda, cache, 0, plain, gone)
            return
        with cuda.capture() as graph:
            with pytest.raises(ArrayError, match=match):
                ops.append_kv(cuda, cache, 0, plain, gone)
            ops.append_kv(cuda, cache, 0, plain, there)
            cache.advance(cuda, 1)
        graph.launch()
        assert cache.pos == 1
        graph.close()


@pytest.mark.standin
def test_a_tensor_over_another_gpus_memory_is_refused_whatever_it_says_unless_it_is_managed(cuda: Any) -> None:
    with CudaContext(1) as other, CudaStream(other) as stream, CudaSlice(stream, 256) as far, new(cuda) as cache:
        good = {key: put(cuda, array) for key, array in arrays("append_kv").items()}
        lying = Tensor(far.ptr, MATRIX, device=(CUDA, 0))
        refuse(cuda, cache, "append_kv", good | {"k_rows": lying}, "^k_rows lives on cuda:1, the layer on cuda:0")
        managed = Tensor(far.ptr, MATRIX, device=(MANAGED, 1))
        assert interop.operand(managed, "x", (128,), (np.float32,), cuda, rows=T, out=False).device == 0


def test_what_is_empty_may_have_any_address(dev: Any) -> None:
    nowhere = Tensor(1 << 60, (0, 128), device=home(dev), data=1 << 60)
    assert interop.operand(nowhere, "x", (128,), (np.float32,), dev, rows=0, out=False).len == 0


def test_a_message_never_repeats_what_is_long(cuda: Any) -> None:
    long = "x" * (1 << 20)

    class Loud(Tensor):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError(long)

    class Shown(Tensor):
        def __dlpack__(self, **_: Any) -> Any:
            return long

    class Lost(Tensor):
        def __dlpack_device__(self) -> Any:
            raise ValueError(long)

    class Field:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise ValueError(long)

    held = put(cuda, np.ones(MATRIX, np.float32))
    fields = [(f"field{i}", "f4") for i in range(10000)]
    for bad in (
        *(kind(held.ptr, MATRIX) for kind in (Loud, Shown, Lost)), Field(), type(long, (), {})(),
        Foreign(held, MATRIX, typestr=long), Foreign(held, (1,) * 100000), Foreign(held, MATRIX, typestr=fields),
        Foreign(held, (0, 128), strides=(10**4000,) * 50), Foreign(held, MATRIX, strides=(10**4000,) * 2),
        SimpleNamespace(ptr=held.ptr, len=256, dtype=long, nbytes=1024), type(long, (Tensor,), {})(0, MATRIX, flags=2),
    ):  # fmt: skip
        with pytest.raises(ArrayError) as caught:
            interop.operand(bad, "x", (128,), (np.float32,), cuda, rows=T, out=False)
        assert str(caught.value).startswith("x ")
        assert len(str(caught.value)) < 1000
    for stream in (long, 10**5000, -(10**5000), SimpleNamespace(__cuda_stream__=(0, long, 0)),
                   SimpleNamespace(__cuda_stream__=(long, 0)), SimpleNamespace(device_index=1, long=long)):  # fmt: skip
        with pytest.raises((ConfigError, DeviceMismatch)) as refused:
            interop.stream_handle(stream, 0)
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("wrong", [5, "1.0", ("a", "b"), (1,), (1, 0, 0), (1.5, 0), ()], ids=str)
@pytest.mark.parametrize("name", ["dl_device", "max_version"])
def test_a_consumer_that_asks_for_no_pair_of_integers_is_refused_in_dlpacks_own_error(
    dev: Any, name: str, wrong: Any
) -> None:
    with dev.zeros(4) as held, pytest.raises(BufferError, match=f"^{name} is a pair of integers or None") as caught:
        held.__dlpack__(**{name: wrong})
    assert isinstance(caught.value, ExportError)
