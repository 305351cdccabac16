"""The operations of a step as the C library runs them, with the arguments of `memra_driver.ops`.

What only Python knows is checked here (arrays and their number of rows, whose device e is); everything else is the
library's to refuse. One sequence at a time: no CacheBatch.
"""

from __future__ import annotations

from typing import Any

from memra_driver.capi.device import bind
from memra_driver.capi.library import whole
from memra_driver.errors import ConfigError, DeviceMismatch, UnsupportedError
from memra_driver.interop import Operand, vector
from memra_driver.layout import CacheState
from memra_driver.ops import _F32_OR_BF16, _count, _rows

OWN_WINDOW = -1  # of memra_attend


def append_kv(e: Any, cache: Any, il: int, k_rows: Any, v_rows: Any) -> None:
    """As ops.append_kv."""
    layer = _layer(e, cache, il, cache.kv)
    if layer is None:
        return _call(cache, "memra_append_kv", il, 0, 0, 0)
    k = _rows(e, cache, k_rows, "k_rows", (layer.kv_dim_k,))
    rows = _count(cache, k, layer.kv_dim_k)
    v = _rows(e, cache, v_rows, "v_rows", (layer.kv_dim_v,), rows)
    _call(cache, "memra_append_kv", il, rows, k, v)


def dequant_kv(e: Any, cache: Any, il: int, start: int, stop: int, k_out: Any, v_out: Any) -> None:
    """As ops.dequant_kv."""
    layer = _layer(e, cache, il, cache.kv)
    start, stop = whole(start), whole(stop)
    if layer is None or not 0 <= start <= stop <= layer.len:
        return _call(cache, "memra_dequant_kv", il, start, stop, 0, 0, 0)
    k = _rows(e, cache, k_out, "k_out", (layer.kv_dim_k,), stop - start, dtypes=_F32_OR_BF16, out=True)
    v = _rows(e, cache, v_out, "v_out", (layer.kv_dim_v,), stop - start, dtypes=(k.dtype,), out=True)
    _call(cache, "memra_dequant_kv", il, start, stop, k, v, int(k.dtype.itemsize == 2))


def attend(e: Any, cache: Any, il: int, q: Any, out: Any, *, scale: float, window: int | None = None) -> None:
    """As ops.attend."""
    source = cache.plan.kv_source(il) if 0 <= il < cache.cfg.n_layer else None
    layer = None if source is None else _layer(e, cache, source, cache.kv)
    if layer is None or not cache.cfg.heads(il):  # refused there
        return _call(cache, "memra_attend", il, 0, 0, 0, scale, OWN_WINDOW)
    heads, hk, hv = cache.cfg.heads(il), layer.head_dim_k, layer.head_dim_v
    queries = _rows(e, cache, q, "q", (heads, hk))
    rows = _count(cache, queries, heads * hk)
    result = _rows(e, cache, out, "out", (heads, hv), rows, out=True)
    if window is not None and window < 0:
        raise ConfigError(f"attend: window {window}; it is the number of keys that a row sees, 0 for all")
    _call(cache, "memra_attend", il, rows, queries, result, scale, OWN_WINDOW if window is None else window)


def conv_update(e: Any, cache: Any, il: int, x: Any, w: Any, out: Any) -> None:
    """As ops.conv_update."""
    layer = _layer(e, cache, il, cache.recur)
    if layer is None:
        return _call(cache, "memra_conv_update", il, 0, 0, 0, 0)
    inputs = _rows(e, cache, x, "x", (layer.conv_dim,))
    rows = _count(cache, inputs, layer.conv_dim)
    weights = _rows(e, cache, w, "w", (layer.d_conv,), layer.conv_dim)
    result = _rows(e, cache, out, "out", (layer.conv_dim,), rows, out=True)
    _call(cache, "memra_conv_update", il, rows, inputs, weights, result)


def gdn_prep(
    e: Any, cache: Any, il: int, conv_out: Any, alpha: Any, beta_raw: Any, dt_bias: Any, a: Any, q: Any, k: Any, v: Any,
    g_log: Any, beta: Any, *, eps: float,
) -> None:  # fmt: skip
    """As ops.gdn_prep."""
    layer = _layer(e, cache, il, cache.recur)
    if layer is None:
        return _call(cache, "memra_gdn_prep", il, 0, *(0,) * 10, eps)
    dim, heads, size = layer.conv_dim, layer.num_v, layer.state_size
    first = _rows(e, cache, conv_out, "conv_out", (dim,))
    rows = _count(cache, first, dim)
    gates = [_rows(e, cache, each, name, (heads,), rows) for name, each in (("alpha", alpha), ("beta_raw", beta_raw))]
    constants = [vector(each, name, heads, e) for name, each in (("dt_bias", dt_bias), ("a", a))]
    vectors = [_rows(e, cache, x, name, (heads, size), rows, out=True) for name, x in (("q", q), ("k", k), ("v", v))]
    made = [_rows(e, cache, x, name, (heads,), rows, out=True) for name, x in (("g_log", g_log), ("beta", beta))]
    _call(cache, "memra_gdn_prep", il, rows, first, *gates, *constants, *vectors, *made, eps)


def gdn_scan(
    e: Any, cache: Any, il: int, q: Any, k: Any, v: Any, g_log: Any, beta: Any, out: Any, *, scale: float
) -> None:
    """As ops.gdn_scan."""
    layer = _layer(e, cache, il, cache.recur)
    if layer is None:
        return _call(cache, "memra_gdn_scan", il, 0, *(0,) * 6, scale)
    heads, size = layer.num_v, layer.state_size
    first = _rows(e, cache, q, "q", (heads, size))
    rows = _count(cache, first, heads * size)
    vectors = [_rows(e, cache, each, name, (heads, size), rows) for name, each in (("k", k), ("v", v))]
    gates = [_rows(e, cache, each, name, (heads,), rows) for name, each in (("g_log", g_log), ("beta", beta))]
    result = _rows(e, cache, out, "out", (heads, size), rows, out=True)
    _call(cache, "memra_gdn_scan", il, rows, first, *vectors, *gates, result, scale)


def recur_step(
    e: Any, cache: Any, il: int, x: Any, w: Any, alpha: Any, beta_raw: Any, dt_bias: Any, a: Any, out: Any, *,
    eps: float, scale: float,
) -> None:  # fmt: skip
    """As ops.recur_step."""
    layer = _layer(e, cache, il, cache.recur)
    if layer is None:
        return _call(cache, "memra_recur_step", il, 0, *(0,) * 7, eps, scale)
    heads, size = layer.num_v, layer.state_size
    inputs = _rows(e, cache, x, "x", (layer.conv_dim,))
    rows = _count(cache, inputs, layer.conv_dim)
    weights = _rows(e, cache, w, "w", (layer.d_conv,), layer.conv_dim)
    gates = [_rows(e, cache, each, name, (heads,), rows) for name, each in (("alpha", alpha), ("beta_raw", beta_raw))]
    constants = [vector(each, name, heads, e) for name, each in (("dt_bias", dt_bias), ("a", a))]
    result = _rows(e, cache, out, "out", (heads, size), rows, out=True)
    _call(cache, "memra_recur_step", il, rows, inputs, weights, *gates, *constants, result, eps, scale)


def tap_write(e: Any, cache: Any, il: int, residual: Any) -> None:
    """As ops.tap_write."""
    sink = cache.dflash_taps
    hidden = 1 if sink is None else sink.hidden
    source = _rows(e, cache, residual, "residual", (hidden,))
    if sink is not None and il in sink.layer_ids and cache.devices[cache.plan.device_of(il)] is not e:
        raise DeviceMismatch(f"layer {il} does not live on {e!r}")
    _call(cache, "memra_tap_write", il, source.len // hidden, source)


def _layer(e: Any, cache: Any, il: int, layers: Any) -> Any:
    """Layer il, after checking that e owns it; None where the library will refuse, whatever the arrays are."""
    if cache.batch is not None:
        raise UnsupportedError("the C library works on one sequence at a time, not on a CacheBatch")
    layer = layers[il] if 0 <= il < len(layers) and cache.state is not CacheState.CLOSED else None
    if layer is not None and layer.owner is not e:
        raise DeviceMismatch(f"layer {il} lives on {layer.owner!r}, another object than the {e!r} given")
    return layer


def _call(cache: Any, name: str, *args: Any) -> None:
    """Calls the library with the addresses of the arrays."""
    library = bind(cache)
    library.call(name, cache.as_c(), *(each.ptr if isinstance(each, Operand) else each for each in args))
