"""DLPack tensors of other libraries as arguments: taken in place, in order with their own work, or refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches import POLICY, attention_only, image, put, tiny
from foreign import BFLOAT16, CPU, CUDA, MANAGED, PINNED, ROCM, OldTensor, Tensor
from op_calls import MATRIX, OUTPUTS, SHAPES, WRITERS, T, arrays, call, new, refuse

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.errors import ArrayError
from memra_driver.layers import DflashTapSink
from memra_driver.plan import CacheOptions
from memra_driver.round import Round

MakeDev = Callable[..., Any]
BITS = np.dtype(np.uint16)
NARROW = {"code": BFLOAT16[0], "bits": BFLOAT16[1], "lanes": BFLOAT16[2]}


def home(e: Any) -> tuple[int, int]:
    """Where e's memory is, in DLPack's words."""
    return (CPU, 0) if e.ordinal < 0 else (CUDA, e.ordinal)


def tensor(e: Any, array: Any, kind: type[Tensor] = Tensor, **changes: Any) -> Tensor:
    """A tensor of another library with the array's elements, on e."""
    held = put(e, array)
    return kind(held.ptr, array.shape, array.dtype, **{"device": home(e), "keep": held} | changes)


def results(e: Any, op: str, wrap: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The bytes of the outputs and of the cache after one call with arguments that `wrap` makes of slices."""
    with new(e) as cache:
        slices = {name: put(e, array) for name, array in arrays(op).items()}
        call(e, cache, op, {name: wrap((each, arrays(op)[name].shape)) for name, each in slices.items()})
        seen = image(cache)
        return (
            [slices[name].to_numpy().tobytes() for name in OUTPUTS[op]],
            {key: value for key, value in seen.items() if not key.endswith(".ptr") and key != "id"},
        )


# What is taken


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
@pytest.mark.parametrize("op", SHAPES)
def test_tensors_and_slices_give_the_same_bytes(dev: Any, op: str, kind: type[Tensor]) -> None:
    def wrap(given: Any) -> Tensor:
        return kind(given[0].ptr, given[1], device=home(dev))

    assert results(dev, op, wrap) == results(dev, op, lambda given: given[0])


def test_every_argument_of_the_rest_is_taken_too(dev: Any) -> None:
    options = CacheOptions(round_width=2)
    with Cache.new(dev, tiny(n_head=2), 32, policy=POLICY, options=options) as cache:
        row = np.arange(128, dtype=np.float32).reshape(1, 128)
        out = tensor(dev, np.zeros((1, 2, 64), np.float32))
        cache.arm_taps(dev, [3], 1, 32)
        with Round(cache, dev, width=2) as r:
            ops.append_kv(dev, cache, 3, tensor(dev, row), tensor(dev, row))
            ops.attend(dev, cache, 3, tensor(dev, row.reshape(1, 2, 64)), out, scale=1.0)
            ops.tap_write(dev, cache, 3, tensor(dev, row[:, :32].copy()))
            count = dev.htod_i32([1])
            r.commit_from_device(Tensor(count.ptr, (1, 1), np.int32, device=home(dev), keep=count))
        cache.settle(dev)
        cache.park_logits(dev, tensor(dev, row[:, :50].copy()))
        assert (cache.pos, cache.kv[3].len) == (1, 1)
        assert cache.take_logits(dev).to_numpy().tolist() == list(range(50))
        assert cache.dflash_taps.buf.to_numpy().tolist() == list(range(32))
        v = dev.zeros(128)
        ops.dequant_kv(dev, cache, 3, 0, 1, dev.zeros(128), v)
        assert out.keep.to_numpy().tobytes() == v.to_numpy().tobytes()  # one key: its value


def test_strides_and_offsets_that_mean_c_order_are_honoured(dev: Any) -> None:
    row = np.arange(128, dtype=np.float32).reshape(1, 128)
    plain = results_of_append(dev, tensor(dev, row))
    for changes in ({"strides": (128, 1)}, {"strides": (7, 1)}, {"strides": (-999, 1)}):
        assert results_of_append(dev, tensor(dev, row, **changes)) == plain
    held = put(dev, np.concatenate([np.full((1, 128), 9, np.float32), row]))
    assert results_of_append(dev, Tensor(held.ptr, (1, 128), device=home(dev), byte_offset=512)) == plain
    without = tensor(dev, row)
    without.changes["strides"] = None  # what DLPack before 1.2 wrote for C order
    assert results_of_append(dev, without) == plain


def results_of_append(e: Any, rows: Any) -> bytes:
    with Cache.new(e, attention_only(1), 8, policy=POLICY) as cache:
        ops.append_kv(e, cache, 0, rows, rows)
        taken: bytes = cache.kv[0].k.to_numpy()[:136].tobytes()
        return taken


def test_pinned_memory_is_the_hosts_and_managed_memory_is_every_gpus(host: Any, cuda: Any) -> None:
    row = np.ones((1, 128), np.float32)
    for e, device in ((host, PINNED), (cuda, MANAGED)):
        plain = results_of_append(e, tensor(e, row))
        assert results_of_append(e, tensor(e, row, device=(device, 0))) == plain
    with new(cuda) as cache:
        given = {name: put(cuda, array) for name, array in arrays("append_kv").items()}
        pinned = tensor(cuda, np.ones(MATRIX, np.float32), device=(PINNED, 0))
        refuse(cuda, cache, "append_kv", given | {"k_rows": pinned}, "^k_rows lives on the host")
    with new(host) as cache:
        given = {name: put(host, array) for name, array in arrays("append_kv").items()}
        managed = tensor(host, np.ones(MATRIX, np.float32), device=(MANAGED, 0))
        refuse(host, cache, "append_kv", given | {"k_rows": managed}, "^k_rows lives on cuda:0")


@pytest.mark.parametrize("make", ["bits", "tensor"])
def test_bfloat16_is_written_as_its_bits(dev: Any, make: str) -> None:
    with new(dev) as cache:
        expected = [put(dev, np.zeros(MATRIX, BITS)) for _ in "kv"]
        ops.dequant_kv(dev, cache, 3, 0, T, *expected)
        held = [put(dev, np.zeros(MATRIX, BITS)) for _ in "kv"]
        changes = NARROW if make == "tensor" else {}
        ops.dequant_kv(dev, cache, 3, 0, T, *[Tensor(h.ptr, MATRIX, BITS, device=home(dev), **changes) for h in held])
        assert [h.to_numpy().tobytes() for h in held] == [x.to_numpy().tobytes() for x in expected]
        assert any(x.to_numpy().any() for x in expected)


def test_bfloat16_arrays_of_numpy_are_written_too(host: Any) -> None:
    with new(host) as cache:
        bits, narrow = np.zeros((2, *MATRIX), BITS), np.zeros((2, *MATRIX), ml_dtypes.bfloat16)
        ops.dequant_kv(host, cache, 3, 0, T, *bits)
        ops.dequant_kv(host, cache, 3, 0, T, *narrow)
        assert narrow.tobytes() == bits.tobytes() != bytes(narrow.nbytes)
        refuse(host, cache, "append_kv", {"k_rows": narrow[0], "v_rows": narrow[1]}, "^k_rows has dtype bfloat16")


def test_one_with_both_protocols_is_asked_for_dlpack(cuda: Any) -> None:
    class Both(Tensor):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("asked for the array interface")

    row = np.ones((1, 128), np.float32)
    assert results_of_append(cuda, tensor(cuda, row, Both)) == results_of_append(cuda, put(cuda, row))


# What a producer is asked for


def test_a_producer_is_asked_for_our_stream_a_version_and_no_copy(dev: Any) -> None:
    rows = tensor(dev, np.ones((1, 128), np.float32))
    results_of_append(dev, rows)
    expected = {"max_version": (1, 0), "copy": False}
    if dev.ordinal >= 0:
        expected["stream"] = dev.stream.handle
    assert rows.told == [expected] * 2
    old = tensor(dev, np.ones((1, 128), np.float32), OldTensor)
    results_of_append(dev, old)
    assert old.told == [{"stream": expected.get("stream")}] * 2


@pytest.mark.standin
@pytest.mark.parametrize(("handle", "asked"), [(0, 1), (1, 1), (2, 2)])
def test_a_default_stream_is_asked_for_by_its_number(make_dev: MakeDev, handle: int, asked: int) -> None:
    e = make_dev("cuda", stream=handle)
    rows = tensor(e, np.ones((1, 128), np.float32))
    results_of_append(e, rows)
    assert {told["stream"] for told in rows.told} == {asked}


def test_a_recorded_operation_asks_for_no_order(cuda: Any) -> None:
    rows = tensor(cuda, np.ones((1, 128), np.float32))
    with Cache.new(cuda, attention_only(1), 8, policy=POLICY) as cache:
        with cuda.capture() as graph:
            ops.append_kv(cuda, cache, 0, rows, rows)
            cache.advance(cuda, 1)
        assert {told["stream"] for told in rows.told} == {-1}
        graph.launch()
        assert cache.pos == 1
        graph.close()


class Handed(Tensor):
    """A tensor whose memory its capsule alone holds."""

    def capsule(self) -> Any:
        made = super().capsule()
        self.keep = None
        return made


def test_a_capsule_is_given_back_when_the_operation_returns_and_a_graph_keeps_it(dev: Any) -> None:
    class Storage:
        def __init__(self, held: Any) -> None:
            self.held = held

    def given() -> tuple[Any, Any]:
        rows = tensor(dev, np.ones((1, 128), np.float32), Handed)
        rows.keep = Storage(rows.keep)
        return rows, weakref.ref(rows.keep)

    plain = dev.zeros(128)
    with Cache.new(dev, attention_only(1), 8, policy=POLICY) as cache:
        rows, alive = given()
        ops.append_kv(dev, cache, 0, rows, plain)
        cache.advance(dev, 1)
        assert alive() is None
        rows, alive = given()
        with dev.capture() as graph:
            ops.append_kv(dev, cache, 0, rows, plain)
            cache.advance(dev, 1)
        assert alive() is not None
        graph.launch()
        dev.synchronize()
        graph.close()
        assert alive() is None


# What is refused


@pytest.mark.parametrize("op", SHAPES)
def test_a_tensor_that_does_not_fit_is_refused_by_name(dev: Any, op: str) -> None:
    for name in SHAPES[op]:
        with new(dev) as cache:
            good = {key: put(dev, array) for key, array in arrays(op).items()}
            held, shape = good[name], arrays(op)[name].shape
            flat = np.zeros(shape, np.uint8).strides
            for changes, match in (
                ({"code": 0}, "has dtype int32"),
                ({"bits": 16}, "has dtype float16"),
                ({"bits": 64}, "has dtype float64"),
                ({"lanes": 4}, "has dtype DLPack type 2 of 32 bits and 4 lanes"),
                (NARROW, f"has dtype {'bfloat16' if op != 'dequant_kv' else '.*'}"),
                ({"code": 17, "bits": 4}, "has dtype DLPack type 17 of 4 bits"),
                ({"strides": tuple(2 * step for step in flat)}, "is strided"),
                ({"strides": tuple(-step for step in flat)}, "is strided"),
                ({"strides": tuple(reversed(flat)) if len(flat) > 1 else (2,)}, "is strided"),
                ({"strides": (0,) * len(shape)}, "is strided"),
                ({"byte_offset": 2}, "is not aligned"),
                ({"data": None}, "no memory"),
                ({"flags": 2}, "hands over a copy"),
                ({"major": 2}, "DLPack version 2.0"),
                ({"device": (ROCM, 0)}, "DLPack device type 10"),
            ):
                if op == "dequant_kv" and changes is NARROW:
                    continue
                bad = Tensor(held.ptr, shape, **{"device": home(dev)} | changes)
                refuse(dev, cache, op, good | {name: bad}, rf"^{name} .*{match}")
            for wrong in ((*shape, 1), (*shape[:-1], shape[-1] - 1), ()):
                bad = Tensor(held.ptr, wrong, device=home(dev))
                refuse(dev, cache, op, good | {name: bad}, rf"^{name} has (shape|\d+ elements)")


@pytest.mark.parametrize("op", WRITERS)
def test_a_read_only_tensor_is_read_but_not_written(dev: Any, op: str) -> None:
    for name, shape in SHAPES[op].items():
        with new(dev) as cache:
            good = {key: put(dev, array) for key, array in arrays(op).items()}
            given = good | {name: Tensor(good[name].ptr, shape, device=home(dev), flags=1)}
            if name in OUTPUTS[op]:
                refuse(dev, cache, op, given, f"^{name} is read-only")
            else:
                call(dev, cache, op, given)


@pytest.mark.parametrize("op", SHAPES)
def test_a_tensor_of_another_device_is_refused_and_not_asked_for_anything(host: Any, cuda: Any, op: str) -> None:
    for name in SHAPES[op]:
        for e, device, where in (
            (host, (CUDA, 0), "cuda:0"),
            (cuda, (CPU, 0), "the host"),
            (cuda, (CUDA, 1), "cuda:1"),
        ):
            with new(e) as cache:
                given = {key: put(e, array) for key, array in arrays(op).items()}
                far = Tensor(given[name].ptr, arrays(op)[name].shape, device=device)
                refuse(e, cache, op, given | {name: far}, f"^{name} lives on {where}, the layer on")
                assert far.told == []


def test_what_a_producer_refuses_is_refused_by_name(dev: Any) -> None:
    class Refusing(Tensor):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    class Wrong(Tensor):
        def __dlpack__(self, **_: Any) -> Any:
            return object()

    class Used(Tensor):
        def capsule(self) -> Any:
            capsule = super().capsule()
            np.from_dlpack(Handing(capsule))
            return capsule

    class Handing:
        def __init__(self, capsule: Any) -> None:
            self.capsule = capsule

        def __dlpack__(self, **_: Any) -> Any:
            return self.capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return CPU, 0

    class Lost(Tensor):
        def __dlpack_device__(self) -> Any:
            raise ValueError("Unknown device type xla for Dlpack")

    with new(dev) as cache:
        good = {key: put(dev, array) for key, array in arrays("append_kv").items()}
        kinds: list[tuple[type[Tensor], str]] = [
            (Refusing, r"tensor.detach\(\)"), (Wrong, "no fresh DLPack capsule"), (Lost, "where it lives"),
        ]  # fmt: skip
        if dev.ordinal < 0:
            kinds.append((Used, "no fresh DLPack capsule"))
        for kind, match in kinds:
            for name in good:
                refuse(
                    dev, cache, "append_kv", good | {name: tensor(dev, np.ones(MATRIX, np.float32), kind)},
                    rf"^{name} .*{match}",
                )  # fmt: skip


def test_what_the_cache_keeps_is_a_slice(dev: Any) -> None:
    with Cache.new(dev, tiny(), 8, policy=POLICY) as cache:
        with pytest.raises(ArrayError, match="takes a CudaSlice"):
            cache.last_logits_dev = tensor(dev, np.zeros(50, np.float32))
        with pytest.raises(ArrayError, match="takes a CudaSlice"):
            cache.dflash_taps = DflashTapSink([3], tensor(dev, np.zeros(32, np.float32)), 32, 1)
        assert (cache.last_logits_dev, cache.dflash_taps) == (None, None)
