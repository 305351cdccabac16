"""What people use today, measured in the same run: torch, flash-linear-attention and CuPy, each where it is installed.

Nothing here is imported before --peers asks for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from memra_driver.bench.cases import state_bytes
from memra_driver.bench.measure import UNMEASURED, Bench
from memra_driver.bench.rows import Row, Sizes, recurrent_name
from memra_driver.bench.work import Workload
from memra_driver.plan import CacheOptions

PACKAGES = {"torch": "torch", "fla": "flash-linear-attention", "cupy": "cupy"}
Call = Callable[[int], Any]  # enqueues call number i


def installed() -> dict[str, str | None]:
    """Version of each peer; None where it is absent."""
    found: dict[str, str | None] = {}
    for module, name in PACKAGES.items():
        try:
            made = importlib.import_module(module)
        except Exception:  # whatever a library raises that cannot be used here
            found[name] = None
            continue
        found[name] = str(getattr(made, "__version__", "of unknown version"))
    return found


def peers(bench: Bench, sizes: Sizes, groups: tuple[str, ...], present: dict[str, str | None]) -> Iterator[Row]:
    """Rows of the peers that are present, for these groups. One that fails is a fault of the run, not its end."""
    for group, needs, measure in PEERS:
        if group in groups and all(present[name] for name in needs):
            try:
                yield from measure(bench, sizes)
            except Exception as error:  # whatever a library of others raises
                bench.faults.append(f"{needs[-1]}, {group}: {type(error).__name__}: {error}")


def torch_seconds(bench: Bench, call: Call, calls: int) -> float:
    """Seconds of one of `calls` calls, by the rules of Bench.device_seconds: a graph of torch's own."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(0)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for i in range(calls):
                call(i)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(bench.replays + 1)]
        bench.heat()
        bench.e.synchronize()
        for _ in range(UNMEASURED):
            graph.replay()
        events[0].record(side)
        for event in events[1:]:
            graph.replay()
            event.record(side)
        side.synchronize()
        found: list[float] = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    return statistics.median(found) / calls


def _attention(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attention

    for shape in sizes.attention:
        for tokens in sizes.contexts:
            n_bytes = 2 * 2 * shape.n_head_kv * tokens * shape.head_dim
            count = bench.sets(n_bytes)
            kv = torch.randn(2, 1, shape.n_head_kv, tokens, shape.head_dim, device="cuda", dtype=torch.bfloat16)
            sets = [kv, *(kv.clone() for _ in range(count - 1))]
            q = torch.randn(1, shape.n_head, 1, shape.head_dim, device="cuda", dtype=torch.bfloat16)

            def call(i: int, q: Any = q, sets: Any = sets) -> None:
                attention(q, sets[i][0], sets[i][1], enable_gqa=True)

            seconds = torch_seconds(bench, call, count)
            del kv, sets
            torch.cuda.empty_cache()
            yield Row("attend", shape.peer(tokens), who="torch", bytes=n_bytes, seconds=seconds, ceiling="read")


def _foreach_copy(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    import torch

    cfg = sizes.cfg
    ssm, layers = cfg.ssm, sum(cfg.layer_kind(il).value == "linear" for il in range(cfg.n_trunk))
    assert ssm is not None  # the preset is of a hybrid model
    lengths = [ssm.conv_dim * ssm.pad, ssm.time_step_rank * ssm.state_size**2] * layers
    n_bytes = 2 * 4 * sum(lengths)
    count = bench.sets(n_bytes, least=2)
    pairs = [[[torch.randn(n, device="cuda") for n in lengths] for _ in range(2)] for _ in range(count)]

    def call(i: int, pairs: Any = pairs) -> None:
        torch._foreach_copy_(*pairs[i])

    seconds = torch_seconds(bench, call, count)
    del pairs, call
    torch.cuda.empty_cache()
    name = f"torch _foreach_copy_ of {len(lengths)} buffers"
    yield Row("snapshot", name, who="torch", bytes=n_bytes, seconds=seconds, copy_seconds=bench.copy_seconds(n_bytes))


def _gated_delta_rule(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as rule

    for heads in sizes.value_heads:
        for batch in sizes.batches:
            size = sizes.state_size
            n_bytes = 2 * 4 * batch * heads * size * size
            count = bench.sets(n_bytes // 2)  # the states that it leaves lie in the graph's own memory
            states = [torch.randn(batch, heads, size, size, device="cuda") for _ in range(count)]
            q, k, v = (torch.randn(batch, 1, heads, size, device="cuda") for _ in range(3))
            g, beta = -torch.rand(batch, 1, heads, device="cuda"), torch.rand(batch, 1, heads, device="cuda")

            def call(i: int, operands: Any = (q, k, v), gates: Any = (g, beta), states: Any = states) -> None:
                with torch.no_grad():
                    rule(
                        *operands, g=gates[0], beta=gates[1], initial_state=states[i], output_final_state=True,
                        use_qk_l2norm_in_kernel=True,
                    )  # fmt: skip

            seconds = torch_seconds(bench, call, count)
            del states
            torch.cuda.empty_cache()
            name = f"fla {recurrent_name('fused_recurrent_gated_delta_rule', heads, batch)}"
            copy = bench.copy_seconds(n_bytes)
            yield Row("scan", name, who="fla", bytes=n_bytes, seconds=seconds, copy_seconds=copy)


def _cupy_copy(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    import cupy

    half = state_bytes(sizes.cfg, CacheOptions(skip_mtp_state=True))
    count = bench.sets(2 * half, least=2)
    with cupy.cuda.ExternalStream(bench.e.stream.handle):
        pairs = [[cupy.empty(half, cupy.uint8) for _ in range(2)] for _ in range(count)]

        def run(pairs: Any = pairs) -> None:
            for to, source in pairs:
                cupy.copyto(to, source)

        seconds = bench.eager_seconds(run, run, count)
        host = bench.host_seconds(run, count)
        del pairs, run
    name = "CuPy copyto of a state's bytes"
    copy = bench.copy_seconds(2 * half)
    yield Row(
        "snapshot", name, who="cupy", bytes=2 * half, seconds=seconds, copy_seconds=copy, host_seconds=host
    )  # fmt: skip


def _through_dlpack(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """An eager append on tensors of torch, taken through DLPack."""
    import torch

    cfg = sizes.cfg
    with Workload(bench, cfg, tokens=sizes.host_tokens, options=CacheOptions(skip_mtp_state=True)) as work:
        dim = work.caches[0].kv_layer(work.attention[0]).kv_dim_k
        k, v = torch.randn(2, 1, dim, device="cuda")
        seconds = work.host_seconds("append_kv", call=lambda il: work.ops.append_kv(work.e, work.target, il, k, v))
        yield Row("host", "append_kv, eager on tensors of torch", host_seconds=seconds)


PEERS = (  # group, what it needs, how it is measured
    ("attend", ("torch",), _attention),
    ("snapshot", ("torch",), _foreach_copy),
    ("snapshot", ("cupy",), _cupy_copy),
    ("host", ("torch",), _through_dlpack),
    ("scan", ("torch", "flash-linear-attention"), _gated_delta_rule),
)
