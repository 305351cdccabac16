"""What the operations compute: the convolution's window, the delta rule, rows at once, rows read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caches import POLICY, Feed, attention_only, put, rows_of, tiny

from memra_driver import ops
from memra_driver.cache import Cache
from memra_driver.config import SsmConfig
from memra_driver.errors import ConfigError
from memra_driver.formats import FORMATS, K_FORMATS, V_FORMATS, FormatPolicy, bf16_bits

Array = np.ndarray[Any, Any]


def linear(d_conv: int = 4, **sizes: int) -> Any:
    """One recurrent layer."""
    ssm = SsmConfig(conv_kernel=d_conv, **{"state_size": 32, "time_step_rank": 2, "group_count": 1} | sizes)
    return tiny(n_layer=1, ssm=ssm)


def new(e: Any, cfg: Any, max_ctx: int = 64, policy: FormatPolicy = POLICY) -> Cache:
    return Cache.new(e, cfg, max_ctx, policy=policy)


# The convolution's window


def convolve(cache: Cache, x: Array, w: Array, widths: tuple[int, ...]) -> Array:
    """Feeds x in steps of the given widths; the outputs, one row per token."""
    e, out, at = cache.devices[0], [], 0
    weights = put(e, w)
    for width in widths:
        result = e.uninit(width * x.shape[1])
        ops.conv_update(e, cache, 0, put(e, x[at : at + width]), weights, result)
        cache.advance(e, width)
        out.append(result.to_numpy().reshape(width, -1))
        at += width
    return np.concatenate(out)


def causal(x: Array, w: Array) -> Array:
    """The causal depthwise convolution with SiLU over zeros in front of x, in float64."""
    history = np.concatenate([np.zeros((w.shape[1] - 1, x.shape[1])), x.astype(np.float64)])
    y = np.stack([(history[t : t + w.shape[1]].T * w.astype(np.float64)).sum(1) for t in range(x.shape[0])])
    return y / (1 + np.exp(-y))


@pytest.mark.parametrize("d_conv", range(1, 9))
def test_rows_at_once_are_rows_one_by_one_and_the_causal_convolution(dev: Any, d_conv: int) -> None:
    cfg = linear(d_conv)
    x, w = rows_of(1, 0, "x", 0, 17, 128), rows_of(1, 0, "w", 0, 128, d_conv)
    with new(dev, cfg) as cache:
        one_by_one = convolve(cache, x, w, (1,) * 17)
        ring = cache.recur[0].conv_state.to_numpy()
        expected = causal(x, w)
        assert np.abs(one_by_one - expected).max() <= 1e-5 * np.abs(expected).max()
        last = x[17 - (d_conv - 1) :].T  # raw inputs, column 0 the oldest
        assert np.array_equal(ring.reshape(128, d_conv - 1), last)
        for widths in ((17,), (1, 2, 3, 4, 7), (7, 4, 3, 2, 1), (2,) * 8 + (1,), (3, 7, 7), (16, 1)):
            cache.reset(dev)
            assert convolve(cache, x, w, widths).tobytes() == one_by_one.tobytes()
            assert cache.recur[0].conv_state.to_numpy().tobytes() == ring.tobytes()


@pytest.mark.parametrize("d_conv", [2, 3, 4, 8])
@pytest.mark.parametrize("kept", range(1, 6))
def test_a_rollback_in_the_middle_of_a_wrap_restores_the_window(dev: Any, d_conv: int, kept: int) -> None:
    x, other = rows_of(1, 0, "x", 0, 12, 128), rows_of(2, 0, "x", 0, 12, 128)
    w = rows_of(1, 0, "w", 0, 128, d_conv)
    with new(dev, linear(d_conv)) as cache:
        plain = convolve(cache, x, w, (1,) * 12)
        cache.reset(dev)
        convolve(cache, x[:kept], w, (kept,))
        with cache.snapshot(dev) as snap:
            convolve(cache, other[:5], w, (2, 3))
            cache.rollback(dev, snap, 0)
            assert convolve(cache, x[kept:], w, (12 - kept,)).tobytes() == plain[kept:].tobytes()


@pytest.mark.parametrize("d_conv", [0, 9])
def test_a_window_that_no_kernel_has_is_refused_at_birth(dev: Any, d_conv: int) -> None:
    with pytest.raises(ConfigError, match=f"conv_kernel is {d_conv}"):
        new(dev, linear(d_conv))


# Gates and scan


@pytest.mark.parametrize(("num_k", "num_v"), [(1, 2), (2, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_prep_and_scan_are_the_gated_delta_rule(dev: Any, size: int, num_k: int, num_v: int) -> None:
    """Against float64, with value head h reading key head h mod num_k, from a state that is not zero."""
    rows, eps, scale = 3, 1e-6, size**-0.5
    with new(dev, linear(state_size=size, time_step_rank=num_v, group_count=num_k)) as cache:
        state = cache.recur[0]
        conv_out = rows_of(3, 0, "conv", 0, rows, (2 * num_k + num_v) * size)
        alpha, beta_raw = (rows_of(3, 0, name, 0, rows, num_v) for name in ("alpha", "beta"))
        dt_bias, a = (rows_of(3, 0, name, 0, 1, num_v)[0] for name in ("dt", "a"))
        a = -np.abs(a)
        start = rows_of(3, 0, "s", 0, num_v * size, size).reshape(num_v, size, size)
        state.ssm_state.copy_from(start.reshape(-1))
        q, k, v, out = (dev.uninit(rows * num_v * size) for _ in range(4))
        g_log, beta = (dev.uninit(rows * num_v) for _ in range(2))
        ops.gdn_prep(
            dev, cache, 0, *(put(dev, each) for each in (conv_out, alpha, beta_raw, dt_bias, a)), q, k, v, g_log, beta,
            eps=eps,
        )  # fmt: skip
        ops.gdn_scan(dev, cache, 0, q, k, v, g_log, beta, out, scale=scale)

        mixed = conv_out.astype(np.float64).reshape(rows, -1, size)
        heads = np.arange(num_v) % num_k
        unit = mixed[:, : 2 * num_k] / np.sqrt((mixed[:, : 2 * num_k] ** 2).sum(-1, keepdims=True) + eps)
        qs, ks, vs = unit[:, heads], unit[:, num_k + heads], mixed[:, 2 * num_k :]
        betas = 1 / (1 + np.exp(-beta_raw.astype(np.float64)))
        gates = a * np.log1p(np.exp(alpha.astype(np.float64) + dt_bias))
        s, ys = start.astype(np.float64), np.empty((rows, num_v, size))
        for t in range(rows):
            g = np.exp(gates[t])[:, None]
            delta = betas[t][:, None] * (vs[t] - g * np.einsum("hcr,hr->hc", s, ks[t]))
            s = g[..., None] * s + delta[..., None] * ks[t][:, None]
            ys[t] = scale * np.einsum("hcr,hr->hc", s, qs[t])
        pairs = ((q, qs), (k, ks), (v, vs), (g_log, gates), (beta, betas), (out, ys), (state.ssm_state, s))
        for got, expected in pairs:
            apart = np.abs(got.to_numpy() - expected.reshape(-1)).max()
            assert apart <= 1e-5 * np.abs(expected).max()


def test_every_output_row_is_that_of_its_single_step(dev: Any) -> None:
    with new(dev, tiny()) as one, new(dev, tiny()) as many:
        feeds = Feed(one), Feed(many)
        expected = []
        for _ in range(7):
            conv_out = feeds[0].conv(0, 1)
            expected.append((conv_out.to_numpy(), feeds[0].scan(0, conv_out, 1).to_numpy()))
            one.advance(dev)
        at = 0
        for width in (1, 2, 4):
            conv_out = feeds[1].conv(0, width)
            out = feeds[1].scan(0, conv_out, width)
            for got, column in ((conv_out, 0), (out, 1)):
                rows = [row[column] for row in expected[at : at + width]]
                assert got.to_numpy().tobytes() == np.concatenate(rows).tobytes()
            many.advance(dev, width)
            at += width


# Reading rows back


@pytest.mark.parametrize("v", V_FORMATS)
@pytest.mark.parametrize("k", K_FORMATS)
def test_dequantised_rows_are_the_decoded_bytes_in_f32_and_in_bf16(dev: Any, k: str, v: str) -> None:
    with new(dev, attention_only(1, head_dim_v=96), policy=FormatPolicy(k=k, v=v)) as cache:
        Feed(cache).step(9)
        layer = cache.kv[0]
        decoded = [
            FORMATS[name].decode(plane.to_numpy()[: 9 * tok].reshape(9, tok))
            for name, plane, tok in ((k, layer.k, layer.k_tok_bytes), (v, layer.v, layer.v_tok_bytes))
        ]
        for start, stop in ((0, 9), (0, 1), (8, 9), (3, 7), (4, 4)):
            for bf16 in (False, True):
                dtype = np.uint16 if bf16 else np.float32
                outs = [put(dev, np.full((stop - start) * dim, 7, dtype)) for dim in (128, 192)]
                ops.dequant_kv(dev, cache, 0, start, stop, *outs)
                for out, values in zip(outs, decoded, strict=True):
                    wanted = np.ascontiguousarray(values[start:stop]).reshape(-1)
                    assert out.to_numpy().tobytes() == (bf16_bits(wanted) if bf16 else wanted).tobytes()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_bytes_beyond_len_are_never_interpreted(dev: Any, byte: int) -> None:
    """Storage full of NaN scales: what is read back, and what a round leaves, is made of written rows only."""
    with new(dev, attention_only(1), 40) as cache, new(dev, attention_only(1), 40) as clean:
        for plane in (cache.kv[0].k, cache.kv[0].v):
            plane.copy_from(np.full(plane.len, byte, np.uint8))
        cache.reset(dev)
        feeds = Feed(cache), Feed(clean)
        for rows in (1, 30, 1, 1):
            for feed in feeds:
                feed.step(rows)
            outs = [put(dev, np.zeros(cache.pos * 128, np.float32)) for _ in range(2)]
            ops.dequant_kv(dev, cache, 0, 0, cache.pos, *outs)
            assert np.isfinite(outs[0].to_numpy()).all()
            assert np.isfinite(outs[1].to_numpy()).all()
            assert cache.digest() == clean.digest()
        assert (cache.kv[0].k.to_numpy()[33 * 136 :] == byte).all()


@pytest.mark.parametrize("policy", [FormatPolicy(), FormatPolicy(v="q4_0"), FormatPolicy(kv_fp8=True)], ids=str)
def test_rows_that_begin_anywhere_are_appended_like_aligned_ones(dev: Any, policy: FormatPolicy) -> None:
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((2, 5 * 128)).astype(np.float32)
    found = []
    for begin in (0, 1, 3):  # elements
        with Cache.new(dev, attention_only(1), 16, policy=policy) as cache:
            given = [put(dev, np.concatenate([np.zeros(begin, np.float32), each])) for each in rows]
            ops.append_kv(dev, cache, 0, *(each.view(begin, each.len) for each in given))
            found.append([plane.to_numpy().tobytes() for plane in (cache.kv[0].k, cache.kv[0].v)])
            for each in given:
                each.close()
    assert found[0] == found[1] == found[2]
