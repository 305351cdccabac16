"""The kernel table (name, source, parameters, launch shape), launch plans, and module loading.

One table serves everybody: the CUDA texts in `cuda_src` have these parameters in this order (a
test compares), `reference.py` has a function of the same name with the same parameters, and
`launch(name, *arguments)` of either device takes them as they stand here.

Every kernel that works on positions takes its slot from `pos_d` (one i32 on the device, constant
during a step) when that pointer is not null, and else from `slot`. Every kernel takes the error
record of its cache (`health`, may be null) and the layer that it works for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[tuple[int, int, int], tuple[int, int, int], int]  # grid, block, dynamic shared bytes

CONV_ROWS = 16  # rows of one channel that a thread of conv_update walks; at least the largest ring
COPY_BLOCKS = 64  # blocks that share one entry of copy_many
SCAN_WARPS = 4  # columns of the state per block of gdn_scan, one warp each


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _line(blocks: int, threads: int) -> Shape:
    return (blocks, 1, 1), (threads, 1, 1), 0


@dataclass(frozen=True)
class Kernel:
    """One `extern "C"` kernel.

    `declaration` is the C parameter list; pointers, `int`, `long long` and `float` only.
    `shape` maps the arguments by name to (grid, block, dynamic shared memory bytes).
    """

    name: str
    source: str
    declaration: str
    shape: Callable[[dict[str, Any]], Shape]

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        """(C type, name) of each parameter, in order."""
        pairs = (part.strip().rpartition(" ") for part in self.declaration.split(","))
        return tuple((" ".join(kind.split()), name) for kind, _, name in pairs)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        # Quantises rows of K and V into slots slot .. slot+rows-1 and sets len_d, one launch.
        # A warp owns one block of 32 elements. len >= 0: the length to store; -1: max(*len_d, slot + rows).
        Kernel(
            "append_kv",
            "append_kv.cu",
            "const float* k_rows, const float* v_rows, uint8_t* k, uint8_t* v, int* len_d, const int* pos_d,"
            " long long slot, int rows, int len, long long max_ctx, int kv_dim_k, int kv_dim_v,"
            " long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format,"
            " memra_health* health, int layer",
            lambda a: _line(_ceil_div(a["rows"] * ((a["kv_dim_k"] + a["kv_dim_v"]) // 32), 8), 256),
        ),
        # Rows start .. start+rows-1 as f32 (out_bf16 = 0) or bf16, [rows, kv_dim] each.
        Kernel(
            "dequant_kv",
            "dequant_kv.cu",
            "const uint8_t* k, const uint8_t* v, long long start, long long rows, long long max_ctx,"
            " int kv_dim_k, int kv_dim_v, long long k_tok_bytes, long long v_tok_bytes,"
            " int k_format, int v_format, void* k_out, void* v_out, int out_bf16,"
            " memra_health* health, int layer",
            lambda a: _line(_ceil_div(a["rows"] * ((a["kv_dim_k"] + a["kv_dim_v"]) // 32), 8), 256),
        ),
        # x, out (rows, conv_dim); w (conv_dim, d_conv); conv_state (conv_dim, d_conv - 1). SiLU applied; rolls the ring.
        Kernel(
            "conv_update",
            "conv.cu",
            "const float* x, const float* w, float* conv_state, float* out, const int* pos_d,"
            " long long slot, int rows, int conv_dim, int d_conv, memra_health* health, int layer",
            lambda a: _line(_ceil_div(a["conv_dim"], 128) * _ceil_div(a["rows"], CONV_ROWS), 128),
        ),
        # conv_state = the ring after the first `accept` rows of x on top of ring_old (may be conv_state itself).
        # The count comes from accept_d when not null.
        Kernel(
            "conv_ring_rebuild",
            "conv.cu",
            "const float* x, const float* ring_old, float* conv_state, const int* accept_d, int accept,"
            " int rows, int conv_dim, int d_conv, memra_health* health, int layer",
            lambda a: _line(_ceil_div(a["conv_dim"], 128), 128),
        ),
        # conv_out (rows, conv_dim) -> q, k, v (rows, num_v, state_size), gates (rows, num_v).
        Kernel(
            "gdn_prep",
            "gdn_prep.cu",
            "const float* conv_out, const float* alpha, const float* beta_raw, const float* dt_bias,"
            " const float* a, float* q, float* k, float* v, float* g_log, float* beta,"
            " const int* pos_d, long long slot, int rows, int num_k, int num_v, int state_size, float eps,"
            " memra_health* health, int layer",
            lambda a: (((a["rows"] * a["num_v"]), 1, 1), (32, 4, 1), 0),
        ),
        # state_in, state_out (num_v, state_size columns, state_size rows); may be equal: a warp owns its column.
        # out (rows, num_v, state_size); null: discarded.
        Kernel(
            "gdn_scan",
            "gdn_scan.cu",
            "const float* q, const float* k, const float* v, const float* g_log, const float* beta,"
            " const float* state_in, float* state_out, float* out, const int* pos_d, long long slot,"
            " int rows, int num_v, int state_size, float scale, memra_health* health, int layer",
            lambda a: ((a["num_v"] * (a["state_size"] // SCAN_WARPS), 1, 1), (32, SCAN_WARPS, 1), 0),
        ),
        # counters[i] = a where bit i of (a_hi:a_lo) is set, = b where bit i of (b_hi:b_lo) is set; i < 128.
        Kernel(
            "set_counters",
            "counters.cu",
            "int* counters, int a, int b, long long a_lo, long long a_hi, long long b_lo, long long b_hi,"
            " memra_health* health, int layer",
            lambda a: _line(1, 128),
        ),
        # n copies of any size and alignment; entries must not overlap.
        Kernel(
            "copy_many",
            "copy_many.cu",
            "const memra_copy* table, int n, memra_health* health, int layer",
            lambda a: _line(a["n"] * COPY_BLOCKS, 256),
        ),
    )
}
