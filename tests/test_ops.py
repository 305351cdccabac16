"""Arguments of the operations: what they take, and what they refuse before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, image, put, tiny
from foreign import Foreign
from op_calls import MATRIX, OTHER_LAYER, OUTPUTS, SHAPES, WRITERS, T, arrays, call, new, refuse
from seven_ops import SevenOps

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.config import SsmConfig
from memra_driver.errors import ArrayError, CapacityError, ConfigError, UnsupportedError

MakeDev = Callable[..., Any]


@pytest.fixture
def host(make_dev: MakeDev) -> Any:
    return make_dev("host")


@pytest.fixture
def cuda(make_dev: MakeDev) -> Any:
    return make_dev("cuda")


# What is taken


@pytest.mark.parametrize("op", SHAPES)
def test_numpy_arrays_and_slices_of_the_host_give_the_same_bytes(host: Any, op: str) -> None:
    results = []
    for wrap in (lambda array: array, lambda array: put(host, array)):
        with new(host) as cache:
            given = {name: wrap(array) for name, array in arrays(op).items()}
            call(host, cache, op, given)
            outputs = [given[name] for name in OUTPUTS[op]]
            seen = image(cache)
            results.append((
                [np.asarray(out if isinstance(out, np.ndarray) else out.to_numpy()).tobytes() for out in outputs],
                {key: value for key, value in seen.items() if not key.endswith(".ptr") and key != "id"},
            ))  # fmt: skip
    assert results[0] == results[1]


@pytest.mark.parametrize("op", SHAPES)
def test_foreign_arrays_and_slices_of_a_gpu_give_the_same_bytes(cuda: Any, op: str) -> None:
    results = []
    for foreign in (False, True):
        with new(cuda) as cache:
            slices = {name: put(cuda, array) for name, array in arrays(op).items()}
            given = {name: Foreign(each, arrays(op)[name].shape) if foreign else each for name, each in slices.items()}
            call(cuda, cache, op, given)
            seen = image(cache)
            results.append((
                [slices[name].to_numpy().tobytes() for name in OUTPUTS[op]],
                {key: value for key, value in seen.items() if not key.endswith(".ptr") and key != "id"},
            ))  # fmt: skip
    assert results[0] == results[1]


def test_strides_that_say_what_contiguous_says_are_taken(cuda: Any) -> None:
    with new(cuda) as cache:
        row = put(cuda, np.ones((1, 128), np.float32))
        ops.append_kv(
            cuda, cache, 3, Foreign(row, (1, 128), strides=(512, 4)), Foreign(row, (1, 128), strides=(99, 4))
        )  # a single row's stride says nothing


def test_one_array_may_be_k_and_v(dev: Any) -> None:
    with new(dev) as cache:
        row = put(dev, arrays("append_kv")["k_rows"])
        ops.append_kv(dev, cache, 3, row, row)
        assert cache.kv[3].len == 2 * T


@pytest.mark.parametrize("op", SHAPES)
def test_no_rows_change_nothing(dev: Any, op: str) -> None:
    with new(dev) as cache:
        before = image(cache)
        given = {name: put(dev, array) for name, array in arrays(op, rows=0).items()}
        if op == "dequant_kv":
            ops.dequant_kv(dev, cache, 3, T, T, *given.values())
        else:
            call(dev, cache, op, given)
        assert image(cache) == before


# What is refused


@pytest.mark.parametrize("op", SHAPES)
def test_another_dtype_is_refused_by_name(host: Any, op: str) -> None:
    for name in SHAPES[op]:
        with new(host) as cache:
            for dtype in ("float64", "float16", "int32", ">f4"):
                given = arrays(op)
                given[name] = given[name].astype(dtype)
                refuse(host, cache, op, given, rf"^{name} has dtype")


@pytest.mark.parametrize("op", SHAPES)
def test_another_shape_is_refused_by_name(host: Any, op: str) -> None:
    for name in SHAPES[op]:
        with new(host) as cache:
            good = arrays(op)
            array = good[name]
            wrong = [array[..., :-1].copy(), array.reshape(-1, 1), array[None], np.array(1, np.float32)]
            if name in ("w", "dt_bias", "a") or list(good).index(name) > 0:  # the first argument decides how many rows
                wrong.append(np.concatenate([array, array]))
            for each in wrong:
                given = good | {name: each}
                refuse(host, cache, op, given, rf"^{name} has (shape|\d+ elements)")


@pytest.mark.parametrize("op", SHAPES)
def test_a_stride_is_refused_by_name(host: Any, op: str) -> None:
    for name in SHAPES[op]:
        with new(host) as cache:
            good = arrays(op)
            array = good[name]
            wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), np.float32)
            for each in (wide[..., ::2], array[::-1], np.asfortranarray(np.zeros(array.shape, np.float32))):
                if not each.flags.c_contiguous:
                    refuse(host, cache, op, good | {name: each}, rf"^{name} is strided")


@pytest.mark.parametrize("op", WRITERS)
def test_a_read_only_output_is_refused_by_name(host: Any, op: str) -> None:
    for name in OUTPUTS[op]:
        with new(host) as cache:
            given = arrays(op)
            given[name].flags.writeable = False
            refuse(host, cache, op, given, rf"^{name} is read-only")


@pytest.mark.parametrize("op", SHAPES)
def test_a_read_only_input_is_taken(host: Any, op: str) -> None:
    for name in [name for name in SHAPES[op] if name not in OUTPUTS[op]]:
        with new(host) as cache:
            given = arrays(op)
            given[name].flags.writeable = False
            call(host, cache, op, given)


@pytest.mark.parametrize("op", SHAPES)
def test_a_misaligned_array_is_refused_by_name(host: Any, op: str) -> None:
    for name in SHAPES[op]:
        with new(host) as cache:
            given = arrays(op)
            array = given[name]
            raw = np.zeros(array.nbytes + 8, np.uint8)
            start = -raw.ctypes.data % 4 + 1
            given[name] = raw[start : start + array.nbytes].view(np.float32).reshape(array.shape)
            refuse(host, cache, op, given, rf"^{name} lies at 0x[0-9a-f]+, which is not aligned")


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("wrong", [None, 3, "rows", [1.0, 2.0]], ids=repr)
def test_what_is_no_array_is_refused_by_name(dev: Any, op: str, wrong: Any) -> None:
    for name in SHAPES[op]:
        with new(dev) as cache:
            given = {key: put(dev, array) for key, array in arrays(op).items()}
            refuse(dev, cache, op, given | {name: wrong}, rf"^{name} is a {type(wrong).__name__}")


@pytest.mark.parametrize("op", WRITERS)
def test_an_output_that_shares_memory_is_refused(dev: Any, op: str) -> None:
    for name in OUTPUTS[op]:
        with new(dev) as cache:
            good = {key: put(dev, array) for key, array in arrays(op).items()}
            n = good[name].len
            for other, each in good.items():
                if other == name:
                    continue
                both = put(dev, np.zeros(n + each.len, np.float32))
                overlapping = both.view(0, n), both.view(n - 1, n - 1 + each.len)
                refuse(dev, cache, op, good | {name: overlapping[0], other: overlapping[1]}, "share memory")
                call_ok = {name: both.view(0, n), other: both.view(n, n + each.len)}  # neighbours share nothing
                with Cache.new(dev, tiny(), 32, policy=POLICY) as fresh:
                    Feed(fresh).step(T)
                    call(dev, fresh, op, good | call_ok)


@pytest.mark.parametrize(
    ("op", "name", "plane"),
    [
        ("conv_update", "out", "conv_state"), ("gdn_scan", "out", "ssm_state"), ("gdn_scan", "out", "ssm_state_alt"),
        ("gdn_scan", "q", "ssm_state_alt"), ("gdn_scan", "v", "ssm_state_alt"), ("conv_update", "x", "conv_state"),
    ],
)  # fmt: skip
def test_memory_of_the_layer_that_the_operation_works_on_is_refused(dev: Any, op: str, name: str, plane: str) -> None:
    with new(dev) as cache:
        given = {key: put(dev, array) for key, array in arrays(op).items()}
        given[name] = getattr(cache.recur[0], plane).view(0, given[name].len)
        refuse(dev, cache, op, given, f"{name} and {plane} share memory|{plane} and {name} share memory")


def test_rows_may_not_come_from_the_planes_nor_land_in_them(dev: Any) -> None:
    with new(dev) as cache:
        row = put(dev, np.zeros(MATRIX, np.float32))
        for name in ("k", "v"):
            inside = getattr(cache.kv[3], name).view(0, row.nbytes).cast(np.float32)
            for pair in ((inside, row), (row, inside)):
                refuse(dev, cache, "append_kv", dict(zip("kv", pair, strict=True)), f"{name} and ._rows share memory")
                refuse(dev, cache, "dequant_kv", dict(zip("kv", pair, strict=True)), f"._out and {name} share memory")


@pytest.mark.parametrize("op", SHAPES)
def test_memory_of_another_device_is_refused_by_name(host: Any, cuda: Any, op: str) -> None:
    for name in SHAPES[op]:
        for e, other in ((host, cuda), (cuda, host)):
            with new(e) as cache:
                given = {key: put(e, array) for key, array in arrays(op).items()}
                refuse(e, cache, op, given | {name: put(other, arrays(op)[name])}, rf"^{name} lives on")
        with new(cuda) as cache:
            given = {key: put(cuda, array) for key, array in arrays(op).items()}
            refuse(
                cuda, cache, op, given | {name: arrays(op)[name]}, rf"^{name} lives on the host, the layer on cuda:0"
            )


@pytest.mark.standin
@pytest.mark.parametrize("op", SHAPES)
def test_memory_of_another_gpu_is_refused_by_name(make_dev: MakeDev, op: str) -> None:
    for name in SHAPES[op]:
        e, other = make_dev("cuda", 0), make_dev("cuda", 1)
        with new(e) as cache:
            given = {key: put(e, array) for key, array in arrays(op).items()}
            far = put(other, arrays(op)[name])
            refuse(e, cache, op, given | {name: far}, rf"^{name} lives on cuda:1, the layer on cuda:0")
            refuse(e, cache, op, given | {name: Foreign(far, arrays(op)[name].shape)}, rf"^{name} lives on cuda:1")


@pytest.mark.parametrize("op", SHAPES)
def test_a_foreign_array_that_does_not_fit_is_refused_by_name(cuda: Any, op: str) -> None:
    for name in SHAPES[op]:
        with new(cuda) as cache:
            good = {key: put(cuda, array) for key, array in arrays(op).items()}
            each, shape = good[name], arrays(op)[name].shape
            for changes, match in (
                ({"typestr": "<f8", "shape": (*shape[:-1], shape[-1] // 2)}, "dtype"),
                ({"typestr": "<i4"}, "dtype"),
                ({"shape": (*shape, 1)}, "shape"),
                ({"shape": (*shape[:-1], shape[-1] - 1)}, "(shape|elements)"),
                ({"strides": tuple(8 * s for s in np.zeros(shape, np.uint8).strides)}, "strided"),
                ({"strides": tuple(-4 * s for s in np.zeros(shape, np.uint8).strides)}, "strided"),
                ({"data": (each.ptr + 2, False)}, "not aligned"),
            ):
                refuse(cuda, cache, op, good | {name: Foreign(each, shape, **changes)}, rf"^{name} .*{match}")
            if name in OUTPUTS[op]:
                refuse(
                    cuda, cache, op, good | {name: Foreign(each, shape, data=(each.ptr, True))}, f"^{name} is read-only"
                )


@pytest.mark.parametrize("op", SHAPES)
def test_a_slice_of_another_length_or_type_and_a_closed_one_are_refused(dev: Any, op: str) -> None:
    for name in SHAPES[op]:
        with new(dev) as cache:
            good = {key: put(dev, array) for key, array in arrays(op).items()}
            refuse(dev, cache, op, good | {name: good[name].view(0, good[name].len - 1)}, rf"^{name} has \d+ elements")
            refuse(dev, cache, op, good | {name: good[name].cast(np.int32)}, rf"^{name} has dtype int32")
            good[name].close()
            refuse(dev, cache, op, good, rf"^{name} is closed")


# Layers


@pytest.mark.parametrize("op", SHAPES)
def test_a_layer_of_the_other_kind_or_out_of_range_is_refused(dev: Any, op: str) -> None:
    with new(dev) as cache:
        given = {name: put(dev, array) for name, array in arrays(op).items()}
        before = image(cache)
        for il, match in ((OTHER_LAYER[op], "has no"), (-1, "layers are 0 .. 7"), (8, "layers are 0 .. 7")):
            with pytest.raises(ConfigError, match=match):
                call(dev, cache, op, given, il)
        assert image(cache) == before


def test_a_third_device_has_no_kernels_and_says_so() -> None:
    e = SevenOps()
    cache = Cache.new(e, tiny(), 8, policy=POLICY)
    for op in SHAPES:
        with pytest.raises(UnsupportedError, match="no kernels"):
            call(e, cache, op, arrays(op))
    assert (cache.step_rows, cache.kv[3].len) == (0, 0)


def test_a_state_size_without_a_kernel_lives_and_only_its_operations_are_refused(dev: Any) -> None:
    cfg = tiny(ssm=SsmConfig(conv_kernel=4, state_size=16, time_step_rank=2, group_count=1))
    with Cache.new(dev, cfg, 8, policy=POLICY) as cache, cache.snapshot(dev) as snap:
        feed = Feed(cache)
        conv_out = feed.conv(0, 1)  # 64 channels; the convolution does not mind
        before = image(cache)
        with pytest.raises(UnsupportedError, match=r"gdn_prep: state_size 16 has no kernel; there are \[32, 64"):
            feed.scan(0, conv_out, 1)
        heads, gates = (put(dev, np.zeros(shape, np.float32)) for shape in ((1, 2, 16), (1, 2)))
        with pytest.raises(UnsupportedError, match="gdn_scan: state_size 16"):
            ops.gdn_scan(dev, cache, 0, heads, heads, heads, gates, gates, heads, scale=1.0)
        assert image(cache) == before
        cache.advance(dev)
        cache.snapshot_into(dev, snap)
        cache.recur[0].ssm_state.copy_from(np.full(512, 2, np.float32))
        cache.rollback(dev, snap, 0)
        assert not cache.recur[0].ssm_state.to_numpy().any()
        assert cache.recur[0].conv_state.to_numpy().any()


# Ranges


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 3), (2, 1), (3, 3), (0, 2**31), (-2, -1)])
def test_dequantising_rows_that_nobody_wrote_is_refused(dev: Any, start: int, stop: int) -> None:
    with new(dev) as cache:
        rows = put(dev, np.zeros(MATRIX, np.float32)), put(dev, np.zeros(MATRIX, np.float32))
        before = image(cache)
        with pytest.raises(CapacityError, match=rf"rows {start} \.\. {stop}; 0 \.\. 2 stand"):
            ops.dequant_kv(dev, cache, 3, start, stop, *rows)
        assert image(cache) == before
        assert not rows[0].to_numpy().any()


def test_k_and_v_are_dequantised_to_one_type(dev: Any) -> None:
    with new(dev) as cache:
        f32, bf16 = put(dev, np.zeros(MATRIX, np.float32)), put(dev, np.zeros(MATRIX, np.uint16))
        before = image(cache)
        for pair, name in (((f32, bf16), "v_out"), ((bf16, f32), "v_out")):
            with pytest.raises(ArrayError, match=f"^{name} has dtype"):
                ops.dequant_kv(dev, cache, 3, 0, T, *pair)
        assert image(cache) == before
