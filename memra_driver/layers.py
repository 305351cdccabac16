"""The layers of a cache as Python objects over C memory: the Rust structs of the same names."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from memra_driver import layout
from memra_driver.errors import StateError
from memra_driver.place import close_slices, ordinal


def scalar(name: str, doc: str) -> Any:
    """A number that lives in the C struct of `self._c`; it may be assigned."""

    def write(self: Any, value: int) -> None:
        setattr(self._c, name, operator.index(value))

    return property(lambda self: getattr(self._c, name), write, doc=doc)


def _plane(name: str, doc: str) -> Any:
    """A buffer whose address lives in the C struct: whoever swaps two of them there, swaps them here."""

    def read(self: Any) -> Any:
        return self._planes[getattr(self._c, name).ptr]

    def write(self: Any, plane: Any) -> None:
        if plane.ptr not in self._planes:
            raise StateError(f"{name} takes one of this layer's own buffers: addresses never change")
        layout.put_slice(getattr(self._c, name), plane, ordinal(self._owner))

    return property(read, write, doc=doc)


class KvLayer:
    """Quantised K/V of one full-attention layer. Token t of K starts at byte t * k_tok_bytes of `k`."""

    def __init__(self, c: layout.KvLayerC, owner: Any, k: Any, v: Any, len_d: Any) -> None:
        self._c = c
        self._owner = owner
        self._planes = {plane.ptr: plane for plane in (k, v, len_d)}
        for name, plane in (("k", k), ("v", v), ("len_d", len_d)):
            layout.put_slice(getattr(c, name), plane, ordinal(owner))

    k = _plane("k", "u8 [max_ctx * k_tok_bytes + 8]")
    v = _plane("v", "u8 [max_ctx * v_tok_bytes + 8]")
    kv_dim_k = scalar("kv_dim_k", "elements of K per token")
    kv_dim_v = scalar("kv_dim_v", "elements of V per token")
    k_tok_bytes = scalar("k_tok_bytes", "bytes of K per token")
    v_tok_bytes = scalar("v_tok_bytes", "bytes of V per token")
    len = scalar("len", "tokens that stand; may be assigned, then call Cache.sync_d")
    len_d = _plane("len_d", "i32 [1]: len on the device")
    step_ops = scalar("step_ops", "StepOp bits of the open step")
    n_head_kv = scalar("n_head_kv", "K/V heads")
    head_dim_k = scalar("head_dim_k", "elements per K head")
    head_dim_v = scalar("head_dim_v", "elements per V head")
    window = scalar("window", "keys that a query sees; 0: all before it")
    k_format = scalar("k_format", "code of K's block format")
    v_format = scalar("v_format", "code of V's block format")


class RecurLayer:
    """Recurrent state of one linear-attention layer."""

    def __init__(self, c: layout.RecurLayerC, owner: Any, conv_state: Any, ssm_state: Any, ssm_state_alt: Any) -> None:
        self._c = c
        self._owner = owner
        self._planes = {plane.ptr: plane for plane in (conv_state, ssm_state, ssm_state_alt)}
        names = ("conv_state", "ssm_state", "ssm_state_alt")
        for name, plane in zip(names, (conv_state, ssm_state, ssm_state_alt), strict=True):
            layout.put_slice(getattr(c, name), plane, ordinal(owner))

    conv_state = _plane("conv_state", "f32 [conv_dim, d_conv - 1], raw inputs, column 0 the oldest")
    ssm_state = _plane("ssm_state", "f32 [num_v, state_size columns, state_size rows]")
    ssm_state_alt = _plane("ssm_state_alt", "the scan's other buffer, same shape; scratch")
    conv_dim = scalar("conv_dim", "channels of the convolution")
    d_conv = scalar("d_conv", "taps of the convolution")
    num_k = scalar("num_k", "key heads")
    num_v = scalar("num_v", "value heads")
    state_size = scalar("state_size", "rows and columns of one head's state")
    step_ops = scalar("step_ops", "StepOp bits of the open step")
    swaps = scalar("swaps", "how often the two state buffers changed places")

    def swap(self) -> None:
        """Exchanges the handles of ssm_state and ssm_state_alt, as after an eager scan."""
        self.ssm_state, self.ssm_state_alt = self.ssm_state_alt, self.ssm_state
        self.swaps = (self.swaps + 1) & 0xFFFFFFFF


class DflashTapSink:
    """Hidden states of chosen layers: `buf` is f32 [t, len(layer_ids), hidden] on one device."""

    def __init__(self, layer_ids: Sequence[int], buf: Any, hidden: int, t: int) -> None:
        self.layer_ids = list(layer_ids)
        self.buf = buf
        self.hidden = hidden
        self.t = t


class CacheSnapshot:
    """Lengths, rings and states of a cache at one position; K/V bytes are not copied.

    kv_len[il]: K/V length, None where the layer has none. conv[il], ssm[il]: copies on the layer's
    own device. Only the cache that made it accepts it, and only until its reset or until rows below
    `pos` were discarded; `snapshot_into` makes it good again.
    """

    def __init__(self, cache_id: int, n_layer: int) -> None:
        self.kv_len: list[int | None] = [None] * n_layer
        self.conv: list[Any] = [None] * n_layer
        self.ssm: list[Any] = [None] * n_layer
        self.pos = 0
        self.cache_id = cache_id
        self.generation = 0
        self.invalid = ""  # why it cannot be used; "" when it can
        self._buffers: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on all devices."""
        return sum(each.nbytes for each in self._buffers)

    def close(self) -> None:
        """Frees the copies; may be called twice."""
        self.invalid = "it is closed"
        close_slices(self._buffers)
        self._buffers, self.conv, self.ssm = [], [None] * len(self.conv), [None] * len(self.ssm)
