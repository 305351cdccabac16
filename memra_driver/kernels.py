"""The kernel table: name, source, parameters, launch shape; and which entry serves a geometry.

One table serves everybody: the CUDA texts in `cuda_src` have these parameters in this order (a
test compares), `reference.py` has a function of the same name with the same parameters, and
`launch(name, *arguments)` of either device takes them as they stand here.

Every kernel that works on positions takes its slot from `pos_d` (one i32 on the device, constant
during a step) when that pointer is not null, and else from `slot`. Every kernel takes the error
record of its cache (`health`, may be null) and the layer that it works for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memra_driver import nvrtc
from memra_driver.errors import ConfigError
from memra_driver.formats import BLOCK, FORMATS, K_FORMATS, V_FORMATS
from memra_driver.plan import ATTEND_FOLDS, ATTEND_GROUPS, SCAN_STATE_SIZES, attend_part_bytes

Shape = tuple[tuple[int, int, int], tuple[int, int, int], int]  # grid, block, dynamic shared bytes

APPEND_TILES = (16, 32)  # blocks of 32 elements of a plane that a thread block of append_kv encodes, of few and of many
APPEND_MANY = 1 << 15
CONV_ROWS = 16  # rows of one channel that a thread of conv_update walks; at least the largest ring
COPY_BLOCKS = 64  # blocks that share one entry of copy_many
RESTORE_BYTES = 1 << 14  # that a block of restore copies
SCAN_COLUMNS = 16  # of a head's state, per block of gdn_scan
RECUR_ROWS = 8  # rows that a block of recur_step has in shared memory at a time
RECUR_COLUMNS = 512  # of the states that read one key head, which a block takes at a time
RECUR_BLOCKS = 132  # that recur_step is to have, where there are enough columns
RECUR_TICKETS = 4096  # key heads that several blocks of one launch may share
RECUR_PARAMS = (
    "const float* x, const float* w, const float* alpha, const float* beta_raw, const float* dt_bias, const float* a,"
    " float* conv_state, const float* state_in, float* state_out, float* out, float* tape, const int* pos_d,"
    " long long slot, int rows, int d_conv, int num_k, int num_v, int state_size, int columns, int blocks, float eps,"
    " float scale, const memra_seq* seqs, int n_seqs, memra_health* health, int layer"
)
ATTEND_MOST_KEYS = 64  # of a tile, which is summed together; attend_tile() says how many
ATTEND_PAD = 8
ATTEND_WIDTHS = (64, 128, 192, 256, 512)
ATTEND_SHARED_BYTES = 99 << 10  # the smallest limit of a block among GPUs from sm_80 on
ATTEND_COLUMNS = {f"attend_{width}": 8 for width in ATTEND_WIDTHS} | {
    f"attend_{width}_wide": 32 for width in ATTEND_WIDTHS if width <= 256
}
ATTEND_FOLD_COLUMNS = 8  # of a launch at most, and
ATTEND_FOLD_SEQS = 8  # sequences at least, for which a block folds groups
ATTEND_PARAMS = (
    "const float* q, const uint8_t* k, const uint8_t* v, const int* pos_d, long long slot, int rows,"
    " long long max_ctx, int n_head, int n_head_kv, int head_dim_k, int head_dim_v, long long k_tok_bytes,"
    " long long v_tok_bytes, int k_format, int v_format, float scale, int window, float* part, int pieces,"
    " const memra_seq* seqs, int n_seqs, memra_health* health, int layer"
)

# The path of attention for GPUs that copy in bulk, nvrtc.PIPE_ARCH: entries attend_pipe_W_C for any geometry, by the
# dims of V that a warp sums up and the columns of a block; and attend_pipe_K_V_HxD_C for formats K and V, H K/V heads
# and D dims of a head. Queries of fp8 have no room for the last (H, D, C). Those of as many columns as are folded leave
# partial sums of groups; the same name with _folds is the entry that leaves folds.
_BLOCK_BYTES = {fmt.code: fmt.block_bytes for fmt in FORMATS.values()}
_NAMES = {fmt.code: name for name, fmt in FORMATS.items()}
PIPE_COLUMNS = {64: (8, 16, 32), 128: (8, 16, 24), 256: (8,)}
_FIXED = ((2, 256, 8), (2, 256, 16), (2, 256, 32), (4, 256, 8), (4, 256, 16), (8, 128, 8), (8, 128, 16), (4, 256, 24))
PIPE_FIXED = {"q8_0": _FIXED, "fp8": _FIXED[:-1]}


def _with_folds(entries: Sequence[str]) -> list[str]:
    return [*entries, *(f"{name}_folds" for name in entries if name.endswith(f"_{ATTEND_FOLD_COLUMNS}"))]


_SOURCES = dict.fromkeys(
    _with_folds([f"attend_pipe_{width}_{c}" for width, all_ in PIPE_COLUMNS.items() for c in all_]), "attend_pipe.cu"
) | {
    name: f"attend_pipe_{k}_{v}.cu"
    for k in K_FORMATS
    for v in V_FORMATS
    for name in _with_folds([f"attend_pipe_{k}_{v}_{heads}x{dim}_{c}" for heads, dim, c in PIPE_FIXED[k]])
}
PIPE_ENTRIES = tuple(_SOURCES)
ATTEND_ENTRIES = (*ATTEND_COLUMNS, *PIPE_ENTRIES)
PIPE_WARPS = 8  # that compute
PIPE_BRINGERS = 4  # more, that bring K and V
PIPE_SHARED_BYTES = 227 << 10  # all that a block of sm_90 can have
PIPE_STAGE_BYTES = 70 << 10  # of K and V at most, where a stage can be smaller


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def attend_tile(n_head_kv: int) -> int:
    """Keys of a tile. The more K/V heads, the fewer keys a block of attend_pipe works on at a time.

    Every order of sums follows from it, so nothing but the geometry of a cache decides it.
    """
    return ATTEND_MOST_KEYS if n_head_kv <= 2 else ATTEND_MOST_KEYS // 2


def attend_shared_bytes(columns: int, n_head_kv: int, head_dim_k: int, head_dim_v: int) -> int:
    """Shared memory of an attend block; struct Shared in attend.cuh is its layout."""
    keys = attend_tile(n_head_kv)
    tile = keys * (max(head_dim_k, head_dim_v) + ATTEND_PAD)
    query = 2 * columns * (head_dim_k + ATTEND_PAD)
    weight = columns * (ATTEND_MOST_KEYS + ATTEND_PAD)
    return 2 * (tile + query + weight) + 4 * (keys * head_dim_k // 32 + columns * (ATTEND_MOST_KEYS + 3) + 1)


def _attend_shape(columns: int, a: dict[str, Any]) -> Shape:
    chunks = _ceil_div(a["rows"] * (a["n_head"] // a["n_head_kv"]), columns)
    blocks = a["n_seqs"] * chunks * a["n_head_kv"] * a["pieces"]
    shared_bytes = attend_shared_bytes(columns, a["n_head_kv"], a["head_dim_k"], a["head_dim_v"])
    return (blocks, 1, 1), (128, 1, 1), shared_bytes


def _pipe_shape_of(entry: str) -> Callable[[dict[str, Any]], Shape]:
    pieces = ATTEND_FOLDS if entry.endswith("_folds") else ATTEND_GROUPS

    def shape(a: dict[str, Any]) -> Shape:
        if a["pieces"] != pieces:  # the entry does not look at it, and part may have no room for what it leaves
            raise ConfigError(f"{entry} leaves {pieces} partial sums of a head, not {a['pieces']}")
        return (ATTEND_GROUPS, 1, 1), (32 * (PIPE_WARPS + PIPE_BRINGERS), 1, 1), PIPE_SHARED_BYTES

    return shape


def _combine_shape(a: dict[str, Any]) -> Shape:
    chunks = a["n_seqs"] * a["rows"] * a["n_head"] * _ceil_div(a["head_dim_v"], 64)
    return _line(chunks if a["pieces"] == ATTEND_GROUPS else _ceil_div(chunks, ATTEND_FOLDS), 32 * ATTEND_FOLDS)


def attend_pieces(n_seqs: int, columns: int) -> int:
    """Partial sums that attend leaves for each head of a row: of groups, or of folds where there are blocks enough so.

    columns: of one sequence, rows * query heads per K/V head. No result depends on it.
    """
    return ATTEND_FOLDS if n_seqs >= ATTEND_FOLD_SEQS and columns <= ATTEND_FOLD_COLUMNS else ATTEND_GROUPS


def attend_room(n_seqs: int, rows: int, n_head: int, n_head_kv: int, head_dim_v: int) -> int:
    """Bytes of the partial sums of one attend."""
    return n_seqs * attend_part_bytes(rows, n_head, head_dim_v, attend_pieces(n_seqs, rows * n_head // n_head_kv))


@functools.lru_cache
def recur_split(n_seqs: int, num_k: int, num_v: int, state_size: int) -> tuple[int, int]:
    """(columns, blocks) of recur_step: how many columns of the states a block takes at a time, and blocks per key head.

    As many columns as leave RECUR_BLOCKS blocks: what a key head's blocks read alike is read by few of them.
    """
    most, keys, columns = _ceil_div(num_v, num_k) * state_size, n_seqs * num_k, 32
    while columns < min(most, RECUR_COLUMNS):
        wider = 2 * columns if columns < state_size else columns + state_size
        if wider > RECUR_COLUMNS or keys * _ceil_div(most, wider) < RECUR_BLOCKS:
            break
        columns = wider
    return columns, _ceil_div(most, columns) if keys <= RECUR_TICKETS else 1


def _recur_shape(a: dict[str, Any]) -> Shape:
    stage = min(a["rows"], RECUR_ROWS) * (2 * a["state_size"] + a["columns"])
    gates = 2 * RECUR_ROWS * max(1, a["columns"] // a["state_size"])
    rings = 2 * a["state_size"] * (a["d_conv"] - 1) if a["blocks"] > 1 else 0
    return (a["blocks"], a["num_k"], a["n_seqs"]), (256, 1, 1), 4 * (stage + gates + rings)


def _line(blocks: int, threads: int) -> Shape:
    return (blocks, 1, 1), (threads, 1, 1), 0


def _append_blocks(n_seqs: int, blocks: int) -> int:
    """Thread blocks for so many blocks of a plane of each sequence."""
    return n_seqs * _ceil_div(blocks, APPEND_TILES[n_seqs * blocks >= APPEND_MANY])


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
    shared_bytes: int = 0  # dynamic shared memory that it must have been allowed
    arch: str | None = None  # the only one that it works on

    @functools.cached_property
    def params(self) -> tuple[tuple[str, str], ...]:
        """(C type, name) of each parameter, in order."""
        pairs = (part.strip().rpartition(" ") for part in self.declaration.split(","))
        return tuple((" ".join(kind.split()), name) for kind, _, name in pairs)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        # Quantises rows of K and V into slots slot .. slot+rows-1 and sets len_d, one launch.
        # A thread block encodes one of APPEND_TILES blocks of K and as many of V.
        # len >= 0: the length to store; -1: max(*len_d, slot + rows).
        Kernel(
            "append_kv",
            "append_kv.cu",
            "const float* k_rows, const float* v_rows, uint8_t* k, uint8_t* v, int* len_d, const int* pos_d,"
            " long long slot, int rows, int len, long long max_ctx, int kv_dim_k, int kv_dim_v,"
            " long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format,"
            " const memra_seq* seqs, int n_seqs, memra_health* health, int layer",
            lambda a: _line(_append_blocks(a["n_seqs"], a["rows"] * (max(a["kv_dim_k"], a["kv_dim_v"]) // 32)), 128),
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
        # x, out (rows, conv_dim); w (conv_dim, d_conv); conv_state (conv_dim, d_conv - 1), which rolls. SiLU applied.
        # tape: where to copy x, leaving the ring as it is, or null.
        Kernel(
            "conv_update",
            "conv.cu",
            "const float* x, const float* w, float* conv_state, float* out, float* tape, const int* pos_d,"
            " long long slot, int rows, int conv_dim, int d_conv, const memra_seq* seqs, int n_seqs,"
            " memra_health* health, int layer",
            lambda a: _line(a["n_seqs"] * _ceil_div(a["conv_dim"], 128) * _ceil_div(a["rows"], CONV_ROWS), 128),
        ),
        # conv_state = the ring after the first `accept` rows of x on top of ring_old (may be conv_state itself).
        # The count comes from accept_d when not null. n_layers at once, the next of them x_apart and ring_apart
        # elements further; layer: the first.
        Kernel(
            "conv_ring_rebuild",
            "conv.cu",
            "const float* x, const float* ring_old, float* conv_state, const int* accept_d, int accept,"
            " int rows, int conv_dim, int d_conv, int n_layers, long long x_apart, long long ring_apart,"
            " memra_health* health, int layer",
            lambda a: _line(a["n_layers"] * _ceil_div(a["conv_dim"], 128), 128),
        ),
        # conv_out (rows, conv_dim) -> q, k, v (rows, num_v, state_size), gates (rows, num_v).
        Kernel(
            "gdn_prep",
            "gdn_prep.cu",
            "const float* conv_out, const float* alpha, const float* beta_raw, const float* dt_bias,"
            " const float* a, float* q, float* k, float* v, float* g_log, float* beta,"
            " const int* pos_d, long long slot, int rows, int num_k, int num_v, int state_size, float eps,"
            " const memra_seq* seqs, int n_seqs, memra_health* health, int layer",
            lambda a: ((a["n_seqs"] * a["rows"] * a["num_v"], 1, 1), (32, 4, 1), 0),
        ),
        # state_in, state_out (num_v, state_size columns, state_size rows), at multiples of 16 bytes; may be equal.
        # out (rows, num_v, state_size); null: discarded. tape: where to copy the operands, or null.
        Kernel(
            "gdn_scan",
            "gdn_scan.cu",
            "const float* q, const float* k, const float* v, const float* g_log, const float* beta,"
            " const float* state_in, float* state_out, float* out, float* tape, const int* accept_d, int rows,"
            " int num_v, int state_size, float scale, const memra_seq* seqs, int n_seqs,"
            " memra_health* health, int layer",
            lambda a: ((a["state_size"] // SCAN_COLUMNS, a["num_v"], a["n_seqs"]), (32, 2, 1), 0),
        ),
        # The three above in one launch, one entry per state_size; `recur_split` gives columns and blocks.
        # tape: where to copy x and the operands of the scan, leaving the ring as it is, or null.
        *(
            Kernel(f"recur_step_{size}", "recur_step.cu", RECUR_PARAMS, _recur_shape) for size in SCAN_STATE_SIZES
        ),
        # counters[i] = a where bit i of (a_hi:a_lo) is set, = b where bit i of (b_hi:b_lo) is set; i < 128.
        Kernel(
            "set_counters",
            "counters.cu",
            "int* counters, int a, int b, long long a_lo, long long a_hi, long long b_lo, long long b_hi,"
            " memra_health* health, int layer",
            lambda a: _line(1, 128),
        ),
        # Two copies of any size (0, too) and alignment, which must not overlap, and counters as by set_counters, which
        # may be null where no mask has a bit.
        Kernel(
            "restore",
            "counters.cu",
            "const uint8_t* src, uint8_t* dst, long long bytes, const uint8_t* src2, uint8_t* dst2, long long bytes2,"
            " int* counters, int a, int b, long long a_lo, long long a_hi, long long b_lo, long long b_hi,"
            " memra_health* health, int layer",
            lambda a: _line(
                max(1, _ceil_div(a["bytes"], RESTORE_BYTES) + _ceil_div(a["bytes2"], RESTORE_BYTES)), 256
            ),
        ),
        # counters[i] = *pos_d + accept for the mask's bits; then, if move_pos, *pos_d += accept.
        Kernel(
            "commit_counters",
            "counters.cu",
            "int* counters, int* pos_d, const int* accept_d, int accept, int rows, long long mask_lo,"
            " long long mask_hi, int move_pos, memra_health* health, int layer",
            lambda a: _line(1, 128),
        ),
        # *pos_d += n of every sequence.
        Kernel(
            "advance_batch",
            "counters.cu",
            "const memra_seq* seqs, int n_seqs, int n, memra_health* health, int layer",
            lambda a: _line(_ceil_div(a["n_seqs"], 128), 128),
        ),
        # n copies of any size and alignment; entries must not overlap.
        Kernel(
            "copy_many",
            "copy_many.cu",
            "const memra_copy* table, int n, memra_health* health, int layer",
            lambda a: _line(a["n"] * COPY_BLOCKS, 256),
        ),
        # rows of `columns` f32 each; source and target rows may lie apart.
        Kernel(
            "copy_rows",
            "copy_many.cu",
            "const float* src, float* dst, long long src_stride, long long dst_stride, int rows, int columns,"
            " memra_health* health, int layer",
            lambda a: _line(a["rows"] * _ceil_div(a["columns"], 1024), 256),
        ),
        # Partial sums of attention by groups of key tiles, or by folds of them as `attend_pieces` has it; one entry per
        # width of V, wide ones for many columns.
        *(
            Kernel(name, "attend.cu", ATTEND_PARAMS, functools.partial(_attend_shape, columns), ATTEND_SHARED_BYTES)
            for name, columns in ATTEND_COLUMNS.items()
        ),
        # The same sums, for a geometry that has a pipe_width; on nvrtc.PIPE_ARCH only.
        *(
            Kernel(name, source, ATTEND_PARAMS, _pipe_shape_of(name), PIPE_SHARED_BYTES, nvrtc.PIPE_ARCH)
            for name, source in _SOURCES.items()
        ),
        # part (n_seqs, rows, n_head, pieces, head_dim_v + ATTEND_TAIL) -> out (n_seqs, rows, n_head, head_dim_v)
        Kernel(
            "attend_combine",
            "attend_combine.cu",
            "const float* part, float* out, const int* pos_d, long long slot, int rows, long long max_ctx,"
            " int n_head, int n_head_kv, int head_dim_v, int window, int pieces, const memra_seq* seqs, int n_seqs,"
            " memra_health* health, int layer",
            _combine_shape,
        ),
    )
}


class AttendGeometry(NamedTuple):
    """What decides, beside the GPU, which path serves attention: nothing of a single call, whose bits depend on it."""

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    k_tok_bytes: int
    v_tok_bytes: int
    k_format: int
    v_format: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> AttendGeometry:
        """That of a launch with these arguments."""
        return cls(*(arguments[name] for name in cls._fields))

    @property
    def pipe_width(self) -> int | None:
        """Dims of V that a warp sums up on the path of sm_90; None where the portable one serves."""
        k_plane = (self.k_tok_bytes, self.head_dim_k, self.k_format)
        v_plane = (self.v_tok_bytes, self.head_dim_v, self.v_format)
        for tok_bytes, dim, code in (k_plane, v_plane):
            packed = self.n_head_kv * dim // BLOCK * _BLOCK_BYTES.get(code, 0)
            if dim % 64 or tok_bytes != packed or tok_bytes % 16 or tok_bytes < 1:
                return None
        if self.n_head_kv > PIPE_WARPS or not self.pipe_fits(8):
            return None
        return next((w for w in PIPE_COLUMNS if w * (PIPE_WARPS // self.n_head_kv) >= self.head_dim_v), None)

    def pipe_fits(self, columns: int) -> bool:
        """Whether shared memory has room for two stages of K and of V, laid out as struct Block in attend_pipe.cuh."""
        heads, team_warps = self.n_head_kv, 1 << (PIPE_WARPS // self.n_head_kv).bit_length() - 1
        tokens = min(attend_tile(heads), 16 * team_warps)
        while tokens > 16 and tokens * (self.k_tok_bytes + self.v_tok_bytes) > PIPE_STAGE_BYTES:
            tokens //= 2
        stages = sum(4 * 128 * _ceil_div(tokens // 4 * b, 128) + 128 for b in (self.k_tok_bytes, self.v_tok_bytes))
        query = heads * columns // 8 * self.head_dim_k * (32 if self.k_format == FORMATS["fp8"].code else 16)
        weight = 2 * heads * (tokens // 16) * columns * 32
        reals = 4 * columns * heads * (1 + self.head_dim_k // 64 + 2 * team_warps)
        return 2 * stages <= PIPE_SHARED_BYTES - query - weight - reals - 768


@functools.lru_cache(maxsize=1024)
def attend_kernel(arch: str, geometry: AttendGeometry, columns: int, pieces: int) -> str:
    """The entry of attend for an arch, a geometry, columns (rows * query heads per K/V head), and `attend_pieces`.

    Raises ConfigError for folds of more columns than are folded.
    """
    if pieces == ATTEND_FOLDS and columns > ATTEND_FOLD_COLUMNS:
        raise ConfigError(f"attend: folds of {columns} columns; at most {ATTEND_FOLD_COLUMNS}")
    width = geometry.pipe_width if arch == nvrtc.PIPE_ARCH else None
    if width is not None:
        k, v = (_NAMES[code] for code in (geometry.k_format, geometry.v_format))
        shape = (geometry.n_head_kv, geometry.head_dim_k)
        fit = [c for *made_for, c in PIPE_FIXED.get(k, ()) if (*made_for,) == shape and v in V_FORMATS]
        name = f"attend_pipe_{k}_{v}_{shape[0]}x{shape[1]}"
        if not fit or geometry.head_dim_v != geometry.head_dim_k:
            fit = [c for c in PIPE_COLUMNS[width] if geometry.pipe_fits(c)]
            name = f"attend_pipe_{width}"
        entry = f"{name}_{next((c for c in fit if c >= columns), fit[-1])}"
        return f"{entry}_folds" if pieces == ATTEND_FOLDS else entry
    width = next(width for width in ATTEND_WIDTHS if geometry.head_dim_v <= width)
    narrow, wide = f"attend_{width}", f"attend_{width}_wide"
    shared_bytes = attend_shared_bytes(32, geometry.n_head_kv, geometry.head_dim_k, geometry.head_dim_v)
    return wide if columns > 8 and wide in ATTEND_COLUMNS and shared_bytes <= ATTEND_SHARED_BYTES else narrow
