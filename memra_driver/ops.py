"""What an engine calls each step: the cache's own arithmetic, on either device.

`e` is the device that owns layer `il`. Inputs are f32, C-contiguous and token-major: a CudaSlice
(flat), an array with DLPack or `__cuda_array_interface__` on that device, or, on the host device, a
NumPy array or a DLPack tensor of the host; used in place. Results go into `out` arguments. Every call
is enqueued on the owner's stream and waits for nothing (the host device computes at once). T = 0 does
nothing.

The owner's stream waits for the work that an array's protocol tells of: DLPack orders the producer's
current stream, the array interface names one; a CudaSlice is taken as it is. A call holds its arrays
until it has enqueued. That is enough where their memory is freed in the order of the same stream (the
device was made on the library's stream, a CudaSlice is of this device); on another stream keep them
until the owner's stream has passed, and make the reader of an `out` wait (`e.stream.release_to`). A
recorded call waits for no other stream, whoever fills its arrays orders that before each launch, and
the graph keeps them.

`cache` is a Cache, or a CacheBatch of B sequences: then each array holds one block of T rows per sequence, [B, T, ..]
or flat, one launch serves all, and row b has the bits of the single call.

Raises, before anything is changed: ArrayError (dtype, shape, stride, device, overlap), ConfigError
(a layer of the wrong kind), DeviceMismatch, StateError, CapacityError, UnsupportedError (no kernel
for this geometry). DriverError when the driver refuses the launch, which changed nothing either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memra_driver.errors import CapacityError, ConfigError, UnsupportedError
from memra_driver.interop import Operand, operand, refuse_overlap, vector
from memra_driver.kept import NOT_KNOWN, OpKey, on_new_arrays, on_new_slices, prepare
from memra_driver.kernels import AttendGeometry, attend_kernel, attend_pieces, attend_room, recur_split
from memra_driver.layers import KvLayer, RecurLayer
from memra_driver.layout import StepOp
from memra_driver.place import has_kernels
from memra_driver.plan import ATTEND_HEAD_DIMS, MAX_GQA, MAX_INT, SCAN_STATE_SIZES

if TYPE_CHECKING:
    from memra_driver.batch import CacheBatch
    from memra_driver.cache import Cache

_F32 = (np.float32,)
_F32_OR_BF16 = (np.float32, np.uint16)  # bf16 travels as its bits


def append_kv(e: Any, cache: Cache | CacheBatch, il: int, k_rows: Any, v_rows: Any) -> None:
    """Quantises T rows into slots pos .. pos+T-1 of layer il: k_rows [T, kv_dim_k], v_rows [T, kv_dim_v].

    len and len_d become max(len, pos + T) in the same launch. Opens the step, or belongs to it.
    """
    try:
        key: OpKey = ("append_kv", il, k_rows.token, v_rows.token)
        known = cache.prepared.get(key)
    except NOT_KNOWN:
        key = known = None
    if known is not None and type(il) is int and known.again(e, cache):
        return
    given = (k_rows, v_rows)
    if on_new_slices(e, cache, key, given):
        return
    layer = _kv(e, cache, il)
    k = _rows(e, cache, k_rows, "k_rows", (layer.kv_dim_k,))
    rows = _count(cache, k, layer.kv_dim_k)
    v = _rows(e, cache, v_rows, "v_rows", (layer.kv_dim_v,), rows)
    refuse_overlap(_planes(cache, il, "k", "v"), {"k_rows": k, "v_rows": v})
    what, operands = ("append_kv", il), (k, v)
    if rows == 0 or on_new_arrays(e, cache, what, key, given, operands):
        return
    with cache.step(e, il, StepOp.APPEND, rows) as at:
        # The device finds the length by itself where it knows better than the host.
        length = -1 if at.pos_d is not None or at.seqs is not None else max(layer.len, at.slot + rows)
        args = (
            k, v, layer.k, layer.v, layer.len_d, at.pos_d, at.slot, rows, length, layer.max_ctx, layer.kv_dim_k,
            layer.kv_dim_v, layer.k_tok_bytes, layer.v_tok_bytes, layer.k_format, layer.v_format, at.seqs, at.n_seqs,
            at.health, il,
        )  # fmt: skip
        e.launch("append_kv", *args)
        for member in cache.members:
            own = member.kv_layer(il)
            own.len = max(own.len, member.pos + rows)
    prepare(e, cache, what, key, given, operands, il, StepOp.APPEND, rows, [("append_kv", args)])


def dequant_kv(e: Any, cache: Cache, il: int, start: int, stop: int, k_out: Any, v_out: Any) -> None:
    """Decodes rows start .. stop-1 of layer il: k_out [n, kv_dim_k], v_out [n, kv_dim_v], f32 or both bf16.

    bf16 outputs are 16-bit arrays of its bits. Rows at and above len are refused: nobody wrote them.
    """
    layer = _kv(e, cache, il)
    cache.check_readable("dequant_kv")
    cache.check_settled_read("dequant_kv")
    cache.check_length(f"layer {il}: len", layer.len)
    if not 0 <= start <= stop <= layer.len:
        raise CapacityError(f"layer {il}: rows {start} .. {stop}; 0 .. {layer.len} stand")
    rows = stop - start
    k = _rows(e, cache, k_out, "k_out", (layer.kv_dim_k,), rows, dtypes=_F32_OR_BF16, out=True)
    v = _rows(e, cache, v_out, "v_out", (layer.kv_dim_v,), rows, dtypes=(k.dtype,), out=True)
    refuse_overlap({"k_out": k, "v_out": v}, {"k": layer.k, "v": layer.v})
    if rows == 0:
        return
    e.launch(
        "dequant_kv", layer.k, layer.v, start, rows, cache.max_ctx, layer.kv_dim_k, layer.kv_dim_v,
        layer.k_tok_bytes, layer.v_tok_bytes, layer.k_format, layer.v_format, k, v, int(k.dtype.itemsize == 2),
        cache.health_d(il), il,
    )  # fmt: skip


def conv_update(e: Any, cache: Cache | CacheBatch, il: int, x: Any, w: Any, out: Any) -> None:
    """Causal depthwise convolution with SiLU over the ring and T new inputs; the ring then rolls by T.

    x, out [T, conv_dim]; w [conv_dim, d_conv], column 0 for the oldest input.
    out[t, c] = y / (1 + exp(-y)), y = sum_j w[c, j] * input[t - d_conv + 1 + j, c].
    The error record notes inputs that are not finite, not weights.
    """
    try:
        key: OpKey = ("conv_update", il, x.token, w.token, out.token)
        known = cache.prepared.get(key)
    except NOT_KNOWN:
        key = known = None
    if known is not None and type(il) is int and known.again(e, cache):
        return
    given = (x, w, out)
    if on_new_slices(e, cache, key, given):
        return
    layer = _recur(e, cache, il)
    inputs = _rows(e, cache, x, "x", (layer.conv_dim,))
    rows = _count(cache, inputs, layer.conv_dim)
    weights = operand(w, "w", (layer.d_conv,), _F32, e, rows=layer.conv_dim, out=False)
    result = _rows(e, cache, out, "out", (layer.conv_dim,), rows, out=True)
    refuse_overlap({"out": result} | _planes(cache, il, "conv_state"), {"x": inputs, "w": weights})
    what, operands = ("conv_update", il), (inputs, weights, result)
    if rows == 0 or on_new_arrays(e, cache, what, key, given, operands):
        return
    with cache.step(e, il, StepOp.CONV, rows) as at:
        tape = cache.tape(il, rows)[0] if cache.open_round is not None else None
        args = (
            inputs, weights, layer.conv_state, result, tape, at.pos_d, at.slot, rows, layer.conv_dim, layer.d_conv,
            at.seqs, at.n_seqs, at.health, il,
        )  # fmt: skip
        e.launch("conv_update", *args)
    prepare(e, cache, what, key, given, operands, il, StepOp.CONV, rows, [("conv_update", args)])


def gdn_prep(
    e: Any, cache: Cache | CacheBatch, il: int, conv_out: Any, alpha: Any, beta_raw: Any, dt_bias: Any, a: Any,
    q: Any, k: Any, v: Any, g_log: Any, beta: Any, *, eps: float,
) -> None:  # fmt: skip
    """Makes the scan's operands of layer il from the convolution's output; changes nothing in the cache.

    conv_out [T, conv_dim] (q, k of num_k heads, then v of num_v heads); alpha, beta_raw [T, num_v];
    dt_bias, a [num_v]; q, k, v [T, num_v, state_size]; g_log, beta [T, num_v].
    q, k: x * rsqrt(sum x^2 + eps), value head h takes key head h mod num_k. beta = sigmoid(beta_raw).
    g_log = a * softplus(alpha + dt_bias), the identity above 20.
    """
    try:
        key: OpKey = (
            "gdn_prep", il, eps, type(eps), conv_out.token, alpha.token, beta_raw.token, dt_bias.token, a.token,
            q.token, k.token, v.token, g_log.token, beta.token,
        )  # fmt: skip
        known = cache.prepared.get(key)
    except NOT_KNOWN:
        key = known = None
    if known is not None and type(il) is int and known.again(e, cache):
        return
    given = (conv_out, alpha, beta_raw, dt_bias, a, q, k, v, g_log, beta)
    if on_new_slices(e, cache, key, given):
        return
    layer = _recur(e, cache, il)
    cache.check_readable("gdn_prep")
    _check_state_size(layer, "gdn_prep")
    heads, size = layer.num_v, layer.state_size
    inputs = {"conv_out": _rows(e, cache, conv_out, "conv_out", (layer.conv_dim,))}
    rows = _count(cache, inputs["conv_out"], layer.conv_dim)
    for name, value in (("alpha", alpha), ("beta_raw", beta_raw)):
        inputs[name] = _rows(e, cache, value, name, (heads,), rows)
    for name, value in (("dt_bias", dt_bias), ("a", a)):
        inputs[name] = vector(value, name, heads, e)
    outputs = {}
    for name, value in (("q", q), ("k", k), ("v", v)):
        outputs[name] = _rows(e, cache, value, name, (heads, size), rows, out=True)
    for name, value in (("g_log", g_log), ("beta", beta)):
        outputs[name] = _rows(e, cache, value, name, (heads,), rows, out=True)
    refuse_overlap(outputs, inputs)
    eps = _number("eps", eps)
    what, operands = ("gdn_prep", il, eps, float), (*inputs.values(), *outputs.values())
    if rows == 0 or on_new_arrays(e, cache, what, key, given, operands):
        return
    at = cache.at(il)
    args = (
        *operands, at.pos_d, at.slot, rows, layer.num_k, heads, size, eps, at.seqs, at.n_seqs,
        at.health, il,
    )  # fmt: skip
    e.launch("gdn_prep", *args)
    prepare(e, cache, what, key, given, operands, il, None, rows, [("gdn_prep", args)])


def gdn_scan(
    e: Any, cache: Cache | CacheBatch, il: int, q: Any, k: Any, v: Any, g_log: Any, beta: Any, out: Any, *, scale: float
) -> None:
    """The gated delta rule over T rows: reads ssm_state, writes ssm_state_alt, and the two handles swap.

    q, k, v, out [T, num_v, state_size]; g_log, beta [T, num_v]. Per row and head, S [column][row]:
    kv = S k; dl = beta * (v - g kv); S = g S + dl k^T; out = scale * S q, with g = exp(g_log).
    Operands are not searched for what is not finite: conv_update and gdn_prep report what they are made of.
    """
    try:
        key: OpKey = ("gdn_scan", il, scale, type(scale), q.token, k.token, v.token, g_log.token, beta.token, out.token)
        known = cache.prepared.get(key)
    except NOT_KNOWN:
        key = known = None
    if known is not None and type(il) is int and known.again(e, cache):
        return
    given = (q, k, v, g_log, beta, out)
    if on_new_slices(e, cache, key, given):
        return
    layer = _recur(e, cache, il)
    _check_state_size(layer, "gdn_scan")
    heads, size = layer.num_v, layer.state_size
    inputs = {"q": _rows(e, cache, q, "q", (heads, size))}
    rows = _count(cache, inputs["q"], heads * size)
    for name, value in (("k", k), ("v", v)):
        inputs[name] = _rows(e, cache, value, name, (heads, size), rows)
    for name, value in (("g_log", g_log), ("beta", beta)):
        inputs[name] = _rows(e, cache, value, name, (heads,), rows)
    result = _rows(e, cache, out, "out", (heads, size), rows, out=True)
    refuse_overlap({"out": result} | _planes(cache, il, "ssm_state", "ssm_state_alt"), inputs)
    scale = _number("scale", scale)
    what, operands = ("gdn_scan", il, scale, float), (*inputs.values(), result)
    if rows == 0 or on_new_arrays(e, cache, what, key, given, operands):
        return
    with cache.step(e, il, StepOp.SCAN, rows) as at:
        tape = cache.scan_tape(il, rows) if cache.open_round is not None else None
        args = (
            *inputs.values(), *_states(cache, layer), result, tape, None, rows, heads, size, scale, at.seqs, at.n_seqs,
            at.health, il,
        )  # fmt: skip
        e.launch("gdn_scan", *args)
        _swap(cache, layer)
    prepare(e, cache, what, key, given, operands, il, StepOp.SCAN, rows, [("gdn_scan", args)])


def recur_step(
    e: Any, cache: Cache | CacheBatch, il: int, x: Any, w: Any, alpha: Any, beta_raw: Any, dt_bias: Any, a: Any,
    out: Any, *, eps: float, scale: float,
) -> None:  # fmt: skip
    """conv_update, gdn_prep and gdn_scan of layer il in one launch, with the bits of the three.

    x [T, conv_dim]; w [conv_dim, d_conv]; alpha, beta_raw [T, num_v]; dt_bias, a [num_v]; out [T, num_v, state_size].
    It counts as the layer's conv_update and gdn_scan of the step, in rounds, captures and batches too.
    """
    try:
        key: OpKey = (
            "recur_step", il, eps, type(eps), scale, type(scale), x.token, w.token, alpha.token, beta_raw.token,
            dt_bias.token, a.token, out.token,
        )  # fmt: skip
        known = cache.prepared.get(key)
    except NOT_KNOWN:
        key = known = None
    if known is not None and type(il) is int and known.again(e, cache):
        return
    given = (x, w, alpha, beta_raw, dt_bias, a, out)
    if on_new_slices(e, cache, key, given):
        return
    layer = _recur(e, cache, il)
    _check_state_size(layer, "recur_step")
    heads, size = layer.num_v, layer.state_size
    inputs = {"x": _rows(e, cache, x, "x", (layer.conv_dim,))}
    rows = _count(cache, inputs["x"], layer.conv_dim)
    inputs["w"] = operand(w, "w", (layer.d_conv,), _F32, e, rows=layer.conv_dim, out=False)
    for name, value in (("alpha", alpha), ("beta_raw", beta_raw)):
        inputs[name] = _rows(e, cache, value, name, (heads,), rows)
    for name, value in (("dt_bias", dt_bias), ("a", a)):
        inputs[name] = vector(value, name, heads, e)
    result = _rows(e, cache, out, "out", (heads, size), rows, out=True)
    planes = _planes(cache, il, "conv_state", "ssm_state", "ssm_state_alt")
    refuse_overlap({"out": result} | planes, inputs)
    eps, scale = _number("eps", eps), _number("scale", scale)
    what, operands = ("recur_step", il, eps, float, scale, float), (*inputs.values(), result)
    if rows == 0 or on_new_arrays(e, cache, what, key, given, operands):
        return
    with cache.step(e, il, StepOp.CONV | StepOp.SCAN, rows) as at:
        tape = cache.step_tape(il) if cache.open_round is not None else None
        args = (
            *inputs.values(), layer.conv_state, *_states(cache, layer), result, tape, at.pos_d, at.slot, rows,
            layer.d_conv, layer.num_k, heads, size, *recur_split(at.n_seqs, layer.num_k, heads, size), eps, scale,
            at.seqs, at.n_seqs, at.health, il,
        )  # fmt: skip
        e.launch(f"recur_step_{size}", *args)
        _swap(cache, layer)
    launches = [(f"recur_step_{size}", args)]
    prepare(e, cache, what, key, given, operands, il, StepOp.CONV | StepOp.SCAN, rows, launches)


def attend(
    e: Any, cache: Cache | CacheBatch, il: int, q: Any, out: Any, *, scale: float, window: int | None = None
) -> None:
    """Attention of T query rows at positions pos .. pos+T-1 over the quantised rows: T = 1 decodes, T > 1 verifies.

    q [T, n_head, head_dim_k], out [T, n_head, head_dim_v]; query head h reads K/V head h // gqa. Row r sees keys
    0 .. pos + r, of those the last `window` (None: the layer's own; 0: all). A layer without own K/V reads
    that of `cache.kv_layer_for(il)`. out = softmax(scale q K^T) V, within 2e-3 of its largest magnitude of the
    float64 value over the dequantised rows; values of V beyond 65504 become infinite. The error record notes a q that
    is not finite, not stored rows: their append did. May be called again in a step; refused where rows below pos + T
    are missing, and beyond CacheOptions.max_rows.
    """
    try:
        key: OpKey = ("attend", il, scale, type(scale), window, type(window), q.token, out.token)
        known = cache.prepared.get(key)
    except NOT_KNOWN:
        key = known = None
    if known is not None and type(il) is int and known.again(e, cache):
        return
    given = (q, out)
    if on_new_slices(e, cache, key, given):
        return
    _check_kernels(e)
    source = cache.cfg.kv_source(il)
    layer = _kv(e, cache, source)
    if cache.plan.device_of(il) != cache.plan.device_of(source):
        raise UnsupportedError(f"layer {il} reads the K/V of layer {source}, which lives on another device")
    heads, hk, hv = cache.cfg.heads(il), layer.head_dim_k, layer.head_dim_v
    gqa, rest = divmod(heads, layer.n_head_kv)
    if rest or not 1 <= gqa <= MAX_GQA:
        raise UnsupportedError(f"attend: {heads} query heads over {layer.n_head_kv} K/V heads; 1 to {MAX_GQA} each")
    for name, dim in (("head_dim_k", hk), ("head_dim_v", hv)):
        if dim not in ATTEND_HEAD_DIMS:
            raise UnsupportedError(f"attend: {name} {dim} has no kernel; there are {list(ATTEND_HEAD_DIMS)}")
    queries = _rows(e, cache, q, "q", (heads, hk))
    rows = _count(cache, queries, heads * hk)
    result = _rows(e, cache, out, "out", (heads, hv), rows, out=True)
    refuse_overlap({"out": result}, {"q": queries} | _planes(cache, source, "k", "v"))
    limit = min(member.plan.options.max_rows for member in cache.members)
    if rows > limit:
        raise CapacityError(f"attend of {rows} rows; the cache was built with CacheOptions(max_rows={limit})")
    width = layer.window if window is None else window
    scale, width = _number("scale", scale), min(width, MAX_INT)
    if width < 0:
        raise ConfigError(f"attend: window {width}; it is the number of keys that a row sees, 0 for all")
    cache.check_readable("attend")
    for member in cache.members:
        member.check_attend(source, rows)
    what, operands = ("attend", il, scale, float, window, type(window)), (queries, result)
    if rows == 0 or on_new_arrays(e, cache, what, key, given, operands):
        return
    at = cache.at(source)
    pieces = attend_pieces(at.n_seqs, rows * gqa)
    part = e.attend_scratch(attend_room(at.n_seqs, rows, heads, layer.n_head_kv, hv))
    geometry = AttendGeometry(
        layer.n_head_kv, hk, hv, layer.k_tok_bytes, layer.v_tok_bytes, layer.k_format, layer.v_format
    )
    sums = (
        queries, layer.k, layer.v, at.pos_d, at.slot, rows, layer.max_ctx, heads, *geometry, scale, width, part,
        pieces, at.seqs, at.n_seqs, at.health, il,
    )  # fmt: skip
    combined = (
        part, result, at.pos_d, at.slot, rows, layer.max_ctx, heads, layer.n_head_kv, hv, width, pieces, at.seqs,
        at.n_seqs, at.health, il,
    )  # fmt: skip
    launches = [(attend_kernel(e.arch, geometry, rows * gqa, pieces), sums), ("attend_combine", combined)]
    for name, args in launches:
        e.launch(name, *args)
    prepare(e, cache, what, key, given, operands, source, None, rows, launches)


F32_END = 2.0**128 - 2.0**103  # from here on a double rounds to infinity


def _number(name: str, value: Any) -> float:
    """A factor as a float; what the driver would choke on, once the step was noted, is refused here."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise ConfigError(f"{name} is {value!r}; it is a number")
    found = float(value)
    if not abs(found) < F32_END:
        raise ConfigError(f"{name} is {found}; it is a finite f32")
    return found


def tap_write(e: Any, cache: Cache, il: int, residual: Any) -> None:
    """Keeps the residual stream after layer il: residual [T, hidden] to rows 0 .. T-1 of its slot in the armed sink."""
    cache.check_open("tap_write")
    sink = cache.dflash_taps
    source = _rows(e, cache, residual, "residual", (1 if sink is None else sink.hidden,))
    rows = source.len // (1 if sink is None else sink.hidden)
    sink, slot = cache.tap_slot(e, il, rows)
    _check_kernels(e)
    refuse_overlap({"taps": sink.buf}, {"residual": source})
    if rows:
        target = sink.buf.view(slot * sink.hidden, sink.buf.len)
        stride = len(sink.layer_ids) * sink.hidden
        e.launch("copy_rows", source, target, sink.hidden, stride, rows, sink.hidden, cache.health_d(il), il)


def _kv(e: Any, cache: Cache | CacheBatch, il: int) -> KvLayer:
    layer = cache.layer(e, il, StepOp.APPEND)
    assert isinstance(layer, KvLayer)  # what StepOp.APPEND asks for
    _check_kernels(e)
    return layer


def _recur(e: Any, cache: Cache | CacheBatch, il: int) -> RecurLayer:
    layer = cache.layer(e, il, StepOp.SCAN)
    assert isinstance(layer, RecurLayer)  # what StepOp.SCAN asks for
    _check_kernels(e)
    return layer


def _rows(
    e: Any, cache: Cache | CacheBatch, value: Any, name: str, columns: tuple[int, ...], rows: int | None = None, *,
    dtypes: Any = _F32, out: bool = False,
) -> Operand:  # fmt: skip
    return operand(value, name, columns, dtypes, e, rows=rows, out=out, batch=cache.batch)


def _count(cache: Cache | CacheBatch, first: Operand, per_row: int) -> int:
    """T, by the first argument."""
    return first.len // (per_row * len(cache.members))


def _planes(cache: Cache | CacheBatch, il: int, *names: str) -> dict[str, Any]:
    """Buffers of layer il in every sequence, for the overlap check."""
    found = {}
    for i, member in enumerate(cache.members):
        for name in names:
            layer: Any = member.kv[il] if member.kv[il] is not None else member.recur[il]
            found[name if cache.batch is None else f"{name} of sequence {i}"] = getattr(layer, name)
    return found


def _states(cache: Cache | CacheBatch, layer: RecurLayer) -> tuple[Any, Any]:
    """What the scan of a step reads and what it writes; a batch's are in its table."""
    before, after = layer.ssm_state, layer.ssm_state_alt
    if cache.recording is not None:
        before = after = layer.home
    if cache.open_round is not None:
        after = layer.away if before is layer.home else layer.home
    return before, after


def _swap(cache: Cache | CacheBatch, layer: RecurLayer) -> None:
    """Behind a scan that did not work in place, and is no round's."""
    if cache.batch is None and cache.recording is None and cache.open_round is None:
        layer.swap()


def _check_kernels(e: Any) -> None:
    if not has_kernels(e):
        raise UnsupportedError(f"{e!r} has the seven operations only, no kernels; use CudaDev or HostDev")


def _check_state_size(layer: RecurLayer, name: str) -> None:
    if layer.state_size not in SCAN_STATE_SIZES:
        raise UnsupportedError(
            f"{name}: state_size {layer.state_size} has no kernel; there are {list(SCAN_STATE_SIZES)}"
        )
