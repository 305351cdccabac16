"""torch, CuPy and JAX beside a cache on a GPU: both directions, every order of streams and of ends.

Only with --gpu, and only where the library is installed. Where an order of streams is tested, a kernel that spins holds
one stream back, and the same is first done without order, which has to show the old value.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, image, put, tiny
from foreign import Foreign
from op_calls import MATRIX, OUTPUTS, SHAPES, T, arrays, call, new, refuse

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.device import CudaStream
from memra_driver.kvdev import CudaDev

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).resolve().parent
SPIN = 400_000_000  # cycles: a fifth of a second
ROW_BYTES = 136  # 128 elements of q8_0


class TorchLibrary:
    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")

    def given(self, array: Any) -> Any:
        return self.torch.tensor(array, device="cuda")

    def back(self, tensor: Any) -> Any:
        return tensor.cpu().numpy()

    def taken(self, exported: Any) -> Any:
        return self.torch.from_dlpack(exported)

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def fill(self, tensor: Any, value: float) -> None:
        tensor.fill_(value)

    def spin(self, cycles: int = SPIN) -> None:
        self.torch.cuda._sleep(cycles)

    def stream(self) -> Any:
        return self.torch.cuda.Stream()

    def stream_of(self, handle: int) -> Any:
        return self.torch.cuda.ExternalStream(handle)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self.torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def settle(self) -> None:
        self.torch.cuda.synchronize()


class CupyLibrary:
    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")
        text = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'
        self._spin = self.cupy.RawKernel(text, "spin")

    def given(self, array: Any) -> Any:
        return self.cupy.asarray(array)

    def back(self, array: Any) -> Any:
        return self.cupy.asnumpy(array)

    def taken(self, exported: Any) -> Any:
        return self.cupy.from_dlpack(exported)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def fill(self, array: Any, value: float) -> None:
        array.fill(value)

    def spin(self, cycles: int = SPIN) -> None:
        self._spin((1,), (1,), (np.int64(cycles),))

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def stream_of(self, handle: int) -> Any:
        return self.cupy.cuda.ExternalStream(handle)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return stream  # type: ignore[no-any-return]

    def settle(self) -> None:
        self.cupy.cuda.Device().synchronize()


@pytest.fixture(params=[TorchLibrary, CupyLibrary], ids=["torch", "cupy"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def outcome(e: Any, op: str, make: Any, read: Any) -> tuple[Any, ...]:
    with new(e) as cache:
        given = {name: make(array) for name, array in arrays(op).items()}
        call(e, cache, op, given)
        e.synchronize()
        seen = image(cache)
        return (
            [np.asarray(read(given[name])).tobytes() for name in OUTPUTS[op]],
            {key: value for key, value in seen.items() if not key.endswith(".ptr") and key != "id"},
        )


# In


@pytest.mark.parametrize("shared", [True, False], ids=["one stream", "two streams"])
@pytest.mark.parametrize("op", SHAPES)
def test_tensors_and_slices_give_the_same_bytes(make_dev: Any, library: Any, op: str, shared: bool) -> None:
    stream = library.stream()
    with library.on(stream):
        e = make_dev("cuda", stream=stream if shared else None)
        expected = outcome(e, op, lambda array: put(e, array), lambda held: held.to_numpy())
        assert outcome(e, op, library.given, library.back) == expected


def test_the_cache_waits_for_what_a_library_still_runs(make_dev: Any, library: Any) -> None:
    e, stream = make_dev("cuda"), library.stream()
    x = library.given(np.zeros((1, 128), np.float32))
    unordered = Foreign(SimpleNamespace(ptr=library.address(x)), (1, 128))
    with Cache.new(e, attention_only(1), 8, policy=POLICY) as cache:
        with library.on(stream):
            library.spin(1000)
            library.fill(x, 1)  # CuPy compiles for it, and has another way for 0
            library.fill(x, 0)
            ops.append_kv(e, cache, 0, x, x)  # everything is loaded
            cache.advance(e, 1)
            library.settle()
            library.spin()
            library.fill(x, 1)
            for rows in (unordered, x):
                ops.append_kv(e, cache, 0, rows, rows)
                cache.advance(e, 1)
        rows = cache.kv[0].k.to_numpy()[: 3 * ROW_BYTES].reshape(3, ROW_BYTES)
        assert not rows[1].any(), "the stream that spins was not held back; this test shows nothing"
        assert rows[2].any()


def test_what_a_tensor_is_not_fit_for_is_refused_by_name(make_dev: Any, torch: Any) -> None:
    e = make_dev("cuda")
    with new(e) as cache:
        good = {name: torch.tensor(array, device="cuda") for name, array in arrays("append_kv").items()}
        x = good["k_rows"]
        for bad, match in (
            (torch.zeros(128, T, device="cuda").T, "is strided"),
            (torch.zeros(T, 256, device="cuda")[:, ::2], "is strided"),
            (torch.zeros(1, 128, device="cuda").expand(T, 128), "is strided"),
            (x.double(), "has dtype float64"),
            (x.half(), "has dtype float16"),
            (x.bfloat16(), "has dtype bfloat16"),
            (x.cpu(), "lives on the host"),
            (x.cpu().pin_memory(), "lives on the host"),
            (x.reshape(-1), "has shape"),
            (x.clone().requires_grad_(), "grad"),
            (torch.nn.Parameter(x.clone()), "grad"),
        ):
            refuse(e, cache, "append_kv", good | {"k_rows": bad}, f"^k_rows .*{match}")
        weight = torch.nn.Parameter(torch.stack([x, x]))
        call(e, cache, "append_kv", good | {"k_rows": weight.detach()[1]})  # an offset, and no grad
        e.synchronize()


def test_bfloat16_tensors_get_the_bits(make_dev: Any, torch: Any) -> None:
    e = make_dev("cuda")
    with new(e) as cache:
        bits = [put(e, np.zeros(MATRIX, np.uint16)) for _ in "kv"]
        narrow = [torch.zeros(*MATRIX, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        ops.dequant_kv(e, cache, 3, 0, T, *bits)
        ops.dequant_kv(e, cache, 3, 0, T, *narrow)
        e.synchronize()
        for held, tensor in zip(bits, narrow, strict=True):
            assert tensor.view(torch.int16).cpu().numpy().tobytes() == held.to_numpy().tobytes()
            assert torch.from_dlpack(held).view(torch.bfloat16).float().any()


def test_tensors_of_the_host_are_taken_in_place_there(make_dev: Any, torch: Any) -> None:
    host = make_dev("host")
    for op in SHAPES:
        expected = outcome(host, op, lambda array: array, lambda array: array)
        assert outcome(host, op, torch.tensor, lambda tensor: tensor.numpy()) == expected
    with host.zeros(4) as held:
        torch.from_dlpack(held)[1] = 7
        assert held.to_numpy().tolist() == [0, 7, 0, 0]


def test_recorded_operations_take_tensors_and_keep_them(make_dev: Any, library: Any) -> None:
    stream = library.stream()
    with library.on(stream):
        e = make_dev("cuda", stream=stream)
        array = np.random.default_rng(0).standard_normal((1, 128), np.float32)
        with Cache.new(e, attention_only(1), 8, policy=POLICY) as cache:
            ops.append_kv(e, cache, 0, library.given(array), library.given(array))
            cache.advance(e, 1)
            x = library.given(array)
            with e.capture() as graph:
                ops.append_kv(e, cache, 0, x, x)
                cache.advance(e, 1)
            del x
            gc.collect()
            other = library.given(np.zeros((1, 128), np.float32))  # would lie where x did
            graph.launch()
            rows = cache.kv[0].k.to_numpy()[: 2 * ROW_BYTES].reshape(2, ROW_BYTES)
            assert rows[0].any()
            assert rows[0].tobytes() == rows[1].tobytes()
            del other
            graph.close()


# Out


class Unordered:
    """A slice whose consumers wait for nothing."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.held.__dlpack_device__()
        return device

    def __dlpack__(self, **asked: Any) -> Any:
        return self.held.__dlpack__(**asked | {"stream": -1})


def test_a_library_waits_for_what_the_cache_still_runs(make_dev: Any, library: Any) -> None:
    e, other = make_dev("cuda"), library.stream()
    held, own = e.zeros(1024), library.stream_of(e.stream.handle)
    with library.on(other):
        library.back(library.taken(held))
    with library.on(own):
        library.spin(1000)
        library.settle()
        library.spin()
    e.stream.memset(held.ptr, 1, held.nbytes)
    with library.on(other):
        early = library.back(library.taken(Unordered(held)))
        late = library.back(library.taken(held))
    assert not early.any(), "the stream that spins was not held back; this test shows nothing"
    assert late.all()
    held.close()


def test_a_librarys_own_tensor_is_read_behind_release_to(make_dev: Any, library: Any) -> None:
    e, other = make_dev("cuda"), library.stream()
    own = library.stream_of(e.stream.handle)
    with Cache.new(e, attention_only(1), 8, policy=POLICY) as cache:
        ones = put(e, np.ones((1, 128), np.float32))
        ops.append_kv(e, cache, 0, ones, ones)
        cache.advance(e, 1)
        with library.on(other):
            k, v = (library.given(np.zeros((1, 128), np.float32)) for _ in "kv")
            ops.dequant_kv(e, cache, 0, 0, 1, k, v)
            e.synchronize()
            library.fill(k, 0)
            library.back(k)
        with library.on(own):
            library.spin(1000)
            library.settle()
            library.spin()
        with library.on(other):
            ops.dequant_kv(e, cache, 0, 0, 1, k, v)
            early = library.back(k)
            e.stream.release_to(other)
            late = library.back(k)
        assert not early.any(), "the stream that spins was not held back; this test shows nothing"
        assert late.all()


def test_what_a_library_holds_outlives_cache_and_device(library: Any) -> None:
    e = CudaDev()
    context = e.context
    cache = Cache.new(e, tiny(), 16, policy=POLICY)
    Feed(cache).step(3)
    state = cache.recur[0].ssm_state
    expected = state.to_numpy()
    kept = library.taken(state)
    assert library.address(kept) == state.ptr
    cache.close()
    e.close()
    del cache, state, e
    gc.collect()
    assert context.live_bytes > 0
    assert library.back(kept).tobytes() == expected.tobytes()
    del kept
    gc.collect()
    assert context.live_bytes == 0


def test_torch_and_cupy_see_one_memory(make_dev: Any, torch: Any) -> None:
    cupy = pytest.importorskip("cupy")
    e = make_dev("cuda")
    held = e.zeros(64)
    seen = [torch.from_dlpack(held), torch.as_tensor(held, device="cuda")]
    made = [cupy.from_dlpack(held), cupy.asarray(held)]
    assert {each.data_ptr() for each in seen} | {each.data.ptr for each in made} == {held.ptr}
    made[0].fill(3)
    cupy.cuda.Device().synchronize()
    assert all(each.sum().item() == 192 for each in seen)
    assert held.to_numpy().tolist() == [3.0] * 64
    assert torch.from_dlpack(held.view(2, 5)).shape == (3,)
    assert torch.from_dlpack(held.view(2, 2)).numel() == 0
    plane = e.alloc_u8(34)
    assert torch.from_dlpack(plane).dtype == torch.uint8
    assert cupy.from_dlpack(plane).dtype == np.uint8
    del seen, made
    held.close()


# Streams


def test_streams_of_torch_and_cupy_are_taken(make_dev: Any, torch: Any) -> None:
    cupy = pytest.importorskip("cupy")
    context = make_dev("cuda").context
    side, mine = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for given, handle in (
        (torch.cuda.default_stream(), 0), (side, side.cuda_stream), (mine, mine.ptr),
        (torch.cuda.ExternalStream(mine.ptr), mine.ptr), (cupy.cuda.ExternalStream(side.cuda_stream), side.cuda_stream),
        (cupy.cuda.Stream.null, 0), (side.cuda_stream, side.cuda_stream),
    ):  # fmt: skip
        with CudaStream(context, given) as stream:
            assert stream.handle == handle
            stream.wait_stream(side)
            stream.release_to(mine)
    side.synchronize()
    mine.synchronize()


# Programs that own the context and the stream before the cache comes


def run(text: str, **environment: str) -> str:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment}, timeout=300,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


def test_a_torch_program_that_owns_context_and_stream_first(torch: Any) -> None:
    out = run("""
        import torch
        torch.manual_seed(0)
        mine = torch.randn(1000, device="cuda")
        total = mine.sum().item()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            rows = torch.randn(2, 3, 128, device="cuda")
            import numpy as np
            from caches import POLICY, attention_only
            from memra_driver import Cache, CudaDev, HostDev, ops
            def planes(e, k, v):
                with Cache.new(e, attention_only(1), 8, policy=POLICY) as cache:
                    ops.append_kv(e, cache, 0, k, v)
                    cache.advance(e, 3)
                    return [plane.to_numpy() for plane in (cache.kv[0].k, cache.kv[0].v)]
            e = CudaDev(stream=torch.cuda.current_stream())
            assert e.stream.handle == stream.cuda_stream
            got, expected = planes(e, *rows), planes(HostDev(), *rows.cpu().numpy())
            print("bytes", all(a.tobytes() == b.tobytes() for a, b in zip(got, expected)))
            kept = torch.from_dlpack(e.zeros(8))        # its slice is gone already
            e.close()
            kept.add_(1)
        stream.synchronize()
        print("kept", kept.sum().item())
        print("torch", mine.sum().item() == total, torch.randn(10, device="cuda").isfinite().all().item())
    """)
    assert out == "bytes True\nkept 8.0\ntorch True True\n"


def test_torch_may_end_with_everything_alive(torch: Any) -> None:
    out = run("""
        import sys, torch
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        from memra_driver.kvdev import CudaDev
        e = CudaDev(stream=stream)
        held = e.zeros(1 << 20)
        sys.kept = [torch.from_dlpack(held), torch.from_dlpack(held.view(1, 9)), held.__dlpack__(stream=-1), e]
        knot = [sys.kept, held, e]
        knot.append(knot)
        held.close()
        print("end")
    """)
    assert out == "end\n"


def test_a_jax_program_takes_and_gives_arrays() -> None:
    pytest.importorskip("jax")
    out = run(
        """
        import jax, jax.numpy as jnp, numpy as np
        rows = jax.random.normal(jax.random.key(0), (3, 128), jnp.float32)
        from caches import POLICY, attention_only
        from memra_driver import Cache, CudaDev, HostDev, ops
        def plane(e, rows):
            with Cache.new(e, attention_only(1), 8, policy=POLICY) as cache:
                ops.append_kv(e, cache, 0, rows, rows)
                cache.advance(e, 3)
                return cache.kv[0].k.to_numpy()
        e = CudaDev()
        print("bytes", plane(e, rows).tobytes() == plane(HostDev(), np.array(rows)).tobytes())
        held = e.zeros(64)
        e.stream.memset(held.ptr, 1, held.nbytes)
        seen = jax.dlpack.from_dlpack(held)
        held.close()
        print("seen", bool((seen != 0).all()), seen.shape)
        """,
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    assert out == "bytes True\nseen True (64,)\n"
