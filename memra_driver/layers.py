"""The layers of a cache as Python objects over C memory: the Rust structs of the same names."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from memra_driver import layout
from memra_driver.errors import StateError
from memra_driver.place import Key
from memra_driver.plan import CachePlan


def scalar(name: str, doc: str) -> Any:
    """A number that lives in the C struct of `self._c`; it may be assigned."""

    def write(self: Any, value: int) -> None:
        value = operator.index(value)
        if not -(2**63) <= value < 2**63:
            raise StateError(f"{name} is {value}; it is a 64-bit number")
        setattr(self._c, name, value)

    return property(lambda self: getattr(self._c, name), write, doc=doc)


def fixed(name: str, doc: str) -> Any:
    """A number that lives in the C struct of `self._c` and is not for assignment."""
    return property(lambda self: getattr(self._c, name), doc=doc)


def _plane(name: str, doc: str) -> Any:
    """A buffer whose address lives in the C struct: whoever swaps two of them there, swaps them here."""

    def read(self: Any) -> Any:
        ptr = getattr(self._c, name).ptr
        if ptr not in self._planes:
            raise StateError(f"{name} is 0x{ptr:x} in the C struct, which is none of this layer's buffers")
        return self._planes[ptr]

    def write(self: Any, plane: Any) -> None:
        c = getattr(self._c, name)
        if plane.ptr not in self._planes or plane.len != c.len:
            raise StateError(
                f"{name} takes one of this layer's own buffers of {c.len} elements: addresses never change"
            )
        c.ptr = plane.ptr

    return property(read, write, doc=doc)


def _own(names: Sequence[str], planes: Mapping[Key, Any], il: int, d: int) -> dict[int, Any]:
    """The buffers of a layer by address, cut when one of them is first asked for."""
    return {plane.ptr: plane for plane in (planes[name, il, d] for name in names)}


def swap_states(c: layout.RecurLayerC) -> None:
    """The two state buffers change places."""
    state, alt = c.ssm_state, c.ssm_state_alt
    state.ptr, alt.ptr, c.swaps = alt.ptr, state.ptr, c.swaps + 1


class KvLayer:
    """Quantised K/V of one full-attention layer. Token t of K starts at byte t * k_tok_bytes of `k`."""

    PLANES = ("k", "v", "len_d")

    def __init__(self, c: layout.KvLayerC, plan: CachePlan, il: int, owner: Any, planes: Mapping[Key, Any]) -> None:
        self._c, self.owner, self.max_ctx = c, owner, plan.max_ctx
        self._cut = planes, il, c.device_index

    @functools.cached_property
    def _planes(self) -> dict[int, Any]:
        return _own(self.PLANES, *self._cut)

    k = _plane("k", "u8 [max_ctx * k_tok_bytes + 8]")
    v = _plane("v", "u8 [max_ctx * v_tok_bytes + 8]")
    kv_dim_k = fixed("kv_dim_k", "elements of K per token")
    kv_dim_v = fixed("kv_dim_v", "elements of V per token")
    k_tok_bytes = fixed("k_tok_bytes", "bytes of K per token")
    v_tok_bytes = fixed("v_tok_bytes", "bytes of V per token")
    len = scalar("len", "tokens that stand; may be assigned, then call Cache.sync_d")
    len_d = _plane("len_d", "i32 [1]: len on the device")
    step_ops = fixed("step_ops", "StepOp bits of the open step")
    n_head_kv = fixed("n_head_kv", "K/V heads")
    head_dim_k = fixed("head_dim_k", "elements per K head")
    head_dim_v = fixed("head_dim_v", "elements per V head")
    window = fixed("window", "keys that a query sees; 0: all before it")
    k_format = fixed("k_format", "code of K's block format")
    v_format = fixed("v_format", "code of V's block format")


class RecurLayer:
    """Recurrent state of one linear-attention layer."""

    PLANES = ("conv_state", "ssm_state", "ssm_state_alt")

    def __init__(self, c: layout.RecurLayerC, plan: CachePlan, il: int, owner: Any, planes: Mapping[Key, Any]) -> None:
        self._c, self.owner = c, owner
        self._cut = planes, il, c.device_index

    @functools.cached_property
    def _planes(self) -> dict[int, Any]:
        return _own(self.PLANES, *self._cut)

    @functools.cached_property
    def home(self) -> Any:
        """Where ssm_state was born."""
        planes, il, d = self._cut
        return planes["ssm_state", il, d]

    @functools.cached_property
    def away(self) -> Any:
        """Where ssm_state_alt was born."""
        planes, il, d = self._cut
        return planes["ssm_state_alt", il, d]

    conv_state = _plane("conv_state", "f32 [conv_dim, d_conv - 1], raw inputs, column 0 the oldest")
    ssm_state = _plane("ssm_state", "f32 [num_v, state_size columns, state_size rows]")
    ssm_state_alt = _plane("ssm_state_alt", "the scan's other buffer, same shape; scratch")
    conv_dim = fixed("conv_dim", "channels of the convolution")
    d_conv = fixed("d_conv", "taps of the convolution")
    num_k = fixed("num_k", "key heads")
    num_v = fixed("num_v", "value heads")
    state_size = fixed("state_size", "rows and columns of one head's state")
    step_ops = fixed("step_ops", "StepOp bits of the open step")
    swaps = fixed("swaps", "how often the two state buffers changed places")

    def swap(self) -> None:
        """Exchanges the handles of ssm_state and ssm_state_alt, as after an eager scan."""
        swap_states(self._c)


class DflashTapSink:
    """Hidden states of chosen layers: `buf` is f32 [t, len(layer_ids), hidden] on one device."""

    def __init__(self, layer_ids: Sequence[int], buf: Any, hidden: int, t: int) -> None:
        self.layer_ids = list(layer_ids)
        self.buf = buf
        self.hidden = hidden
        self.t = t
