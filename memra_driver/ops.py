"""What an engine calls each step: the cache's own arithmetic, on either device.

`e` is the device that owns layer `il`. Inputs are f32, C-contiguous and token-major: a CudaSlice
(flat), an array with `__cuda_array_interface__` on that device, or a NumPy array on the host device.
Results go into `out` arguments. Every call is enqueued on the owner's stream and waits for nothing
(the host device computes at once). T = 0 does nothing.

Raises, before anything is changed: ArrayError (dtype, shape, stride, device, overlap), ConfigError
(a layer of the wrong kind), DeviceMismatch, StateError, CapacityError, UnsupportedError (no kernel
for this geometry). DriverError when the driver refuses the launch, which changed nothing either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memra_driver.errors import CapacityError, UnsupportedError
from memra_driver.interop import Operand, operand, refuse_overlap, vector
from memra_driver.layers import KvLayer, RecurLayer
from memra_driver.layout import StepOp
from memra_driver.place import has_kernels, ordinal
from memra_driver.plan import SCAN_STATE_SIZES

if TYPE_CHECKING:
    from memra_driver.cache import Cache

_F32 = (np.float32,)
_F32_OR_BF16 = (np.float32, np.uint16)  # bf16 travels as its bits


def append_kv(e: Any, cache: Cache, il: int, k_rows: Any, v_rows: Any) -> None:
    """Quantises T rows into slots pos .. pos+T-1 of layer il: k_rows [T, kv_dim_k], v_rows [T, kv_dim_v].

    len and len_d become max(len, pos + T) in the same launch. Opens the step, or belongs to it.
    """
    layer = _kv(e, cache, il)
    k = _rows(e, k_rows, "k_rows", (layer.kv_dim_k,))
    rows = k.len // layer.kv_dim_k
    v = _rows(e, v_rows, "v_rows", (layer.kv_dim_v,), rows)
    refuse_overlap({"k": layer.k, "v": layer.v}, {"k_rows": k, "v_rows": v})
    if rows == 0:
        return
    with cache.step_op(e, il, StepOp.APPEND, rows):
        length = max(layer.len, cache.pos + rows)
        e.launch(
            "append_kv", k, v, layer.k, layer.v, layer.len_d, None, cache.pos, rows, length, cache.max_ctx,
            layer.kv_dim_k, layer.kv_dim_v, layer.k_tok_bytes, layer.v_tok_bytes, layer.k_format, layer.v_format,
            None, 1, cache.health_d(il), il,
        )  # fmt: skip
        layer.len = length


def dequant_kv(e: Any, cache: Cache, il: int, start: int, stop: int, k_out: Any, v_out: Any) -> None:
    """Decodes rows start .. stop-1 of layer il: k_out [n, kv_dim_k], v_out [n, kv_dim_v], f32 or both bf16.

    bf16 outputs are 16-bit arrays of its bits. Rows at and above len are refused: nobody wrote them.
    """
    layer = _kv(e, cache, il)
    cache.check_readable("dequant_kv")
    cache.check_length(f"layer {il}: len", layer.len)
    if not 0 <= start <= stop <= layer.len:
        raise CapacityError(f"layer {il}: rows {start} .. {stop}; 0 .. {layer.len} stand")
    rows = stop - start
    k = _rows(e, k_out, "k_out", (layer.kv_dim_k,), rows, dtypes=_F32_OR_BF16, out=True)
    v = _rows(e, v_out, "v_out", (layer.kv_dim_v,), rows, dtypes=(k.dtype,), out=True)
    refuse_overlap({"k_out": k, "v_out": v}, {"k": layer.k, "v": layer.v})
    if rows == 0:
        return
    e.launch(
        "dequant_kv", layer.k, layer.v, start, rows, cache.max_ctx, layer.kv_dim_k, layer.kv_dim_v,
        layer.k_tok_bytes, layer.v_tok_bytes, layer.k_format, layer.v_format, k, v, int(k.dtype.itemsize == 2),
        cache.health_d(il), il,
    )  # fmt: skip


def conv_update(e: Any, cache: Cache, il: int, x: Any, w: Any, out: Any) -> None:
    """Causal depthwise convolution with SiLU over the ring and T new inputs; the ring then rolls by T.

    x, out [T, conv_dim]; w [conv_dim, d_conv], column 0 for the oldest input.
    out[t, c] = y / (1 + exp(-y)), y = sum_j w[c, j] * input[t - d_conv + 1 + j, c].
    """
    layer = _recur(e, cache, il)
    inputs = _rows(e, x, "x", (layer.conv_dim,))
    rows = inputs.len // layer.conv_dim
    weights = _rows(e, w, "w", (layer.d_conv,), layer.conv_dim)
    result = _rows(e, out, "out", (layer.conv_dim,), rows, out=True)
    refuse_overlap({"out": result, "conv_state": layer.conv_state}, {"x": inputs, "w": weights})
    if rows == 0:
        return
    with cache.step_op(e, il, StepOp.CONV, rows):
        e.launch(
            "conv_update", inputs, weights, layer.conv_state, result, None, None, cache.pos, rows, layer.conv_dim,
            layer.d_conv, None, 1, cache.health_d(il), il,
        )  # fmt: skip


def gdn_prep(
    e: Any, cache: Cache, il: int, conv_out: Any, alpha: Any, beta_raw: Any, dt_bias: Any, a: Any,
    q: Any, k: Any, v: Any, g_log: Any, beta: Any, *, eps: float,
) -> None:  # fmt: skip
    """Makes the scan's operands of layer il from the convolution's output; changes nothing in the cache.

    conv_out [T, conv_dim] (q, k of num_k heads, then v of num_v heads); alpha, beta_raw [T, num_v];
    dt_bias, a [num_v]; q, k, v [T, num_v, state_size]; g_log, beta [T, num_v].
    q, k: x * rsqrt(sum x^2 + eps), value head h takes key head h mod num_k. beta = sigmoid(beta_raw).
    g_log = a * softplus(alpha + dt_bias), the identity above 20.
    """
    layer = _recur(e, cache, il)
    cache.check_readable("gdn_prep")
    _check_state_size(layer, "gdn_prep")
    heads, size = layer.num_v, layer.state_size
    inputs = {"conv_out": _rows(e, conv_out, "conv_out", (layer.conv_dim,))}
    rows = inputs["conv_out"].len // layer.conv_dim
    for name, value in (("alpha", alpha), ("beta_raw", beta_raw)):
        inputs[name] = _rows(e, value, name, (heads,), rows)
    for name, value in (("dt_bias", dt_bias), ("a", a)):
        inputs[name] = vector(value, name, heads, ordinal(e))
    outputs = {}
    for name, value in (("q", q), ("k", k), ("v", v)):
        outputs[name] = _rows(e, value, name, (heads, size), rows, out=True)
    for name, value in (("g_log", g_log), ("beta", beta)):
        outputs[name] = _rows(e, value, name, (heads,), rows, out=True)
    refuse_overlap(outputs, inputs)
    if rows == 0:
        return
    e.launch(
        "gdn_prep", *inputs.values(), *outputs.values(), None, cache.pos, rows, layer.num_k, heads, size, eps,
        None, 1, cache.health_d(il), il,
    )  # fmt: skip


def gdn_scan(
    e: Any, cache: Cache, il: int, q: Any, k: Any, v: Any, g_log: Any, beta: Any, out: Any, *, scale: float
) -> None:
    """The gated delta rule over T rows: reads ssm_state, writes ssm_state_alt, and the two handles swap.

    q, k, v, out [T, num_v, state_size]; g_log, beta [T, num_v]. Per row and head, S [column][row]:
    kv = S k; dl = beta * (v - g kv); S = g S + dl k^T; out = scale * S q, with g = exp(g_log).
    """
    layer = _recur(e, cache, il)
    _check_state_size(layer, "gdn_scan")
    heads, size = layer.num_v, layer.state_size
    inputs = {"q": _rows(e, q, "q", (heads, size))}
    rows = inputs["q"].len // (heads * size)
    for name, value in (("k", k), ("v", v)):
        inputs[name] = _rows(e, value, name, (heads, size), rows)
    for name, value in (("g_log", g_log), ("beta", beta)):
        inputs[name] = _rows(e, value, name, (heads,), rows)
    result = _rows(e, out, "out", (heads, size), rows, out=True)
    refuse_overlap({"out": result, "ssm_state_alt": layer.ssm_state_alt}, inputs | {"ssm_state": layer.ssm_state})
    if rows == 0:
        return
    with cache.step_op(e, il, StepOp.SCAN, rows):
        e.launch(
            "gdn_scan", *inputs.values(), layer.ssm_state, layer.ssm_state_alt, result, None, None, rows, heads, size,
            scale, None, 1, cache.health_d(il), il,
        )  # fmt: skip
        layer.swap()


def _kv(e: Any, cache: Cache, il: int) -> KvLayer:
    layer = cache.layer(e, il, StepOp.APPEND)
    assert isinstance(layer, KvLayer)  # what StepOp.APPEND asks for
    _check_kernels(e)
    return layer


def _recur(e: Any, cache: Cache, il: int) -> RecurLayer:
    layer = cache.layer(e, il, StepOp.SCAN)
    assert isinstance(layer, RecurLayer)  # what StepOp.SCAN asks for
    _check_kernels(e)
    return layer


def _rows(
    e: Any, value: Any, name: str, columns: tuple[int, ...], rows: int | None = None, *, dtypes: Any = _F32,
    out: bool = False,
) -> Operand:  # fmt: skip
    return operand(value, name, columns, dtypes, ordinal(e), rows=rows, out=out)


def _check_kernels(e: Any) -> None:
    if not has_kernels(e):
        raise UnsupportedError(f"{e!r} has the seven operations only, no kernels; use CudaDev or HostDev")


def _check_state_size(layer: RecurLayer, name: str) -> None:
    if layer.state_size not in SCAN_STATE_SIZES:
        raise UnsupportedError(
            f"{name}: state_size {layer.state_size} has no kernel; there are {list(SCAN_STATE_SIZES)}"
        )
