"""What a model's layers are: ModelConfig and its parts, from a preset, a GGUF file or a config.json.

Field names and rules are those of the Rust original's configuration. Only what decides the sizes
and the use of the cache is here: no tensors, no CUDA. Head dimensions, state sizes and fences that
no cache can have are refused by the plan, which knows which layers they matter for.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from memra_driver.config_files import MAX_LAYERS, Source, is_gguf, read_gguf, read_hf
from memra_driver.errors import ConfigError
from memra_driver.gguf_header import shown_key

_U32_MAX = 2**32 - 1
_F32_MAX = 3.4028234663852886e38

PRESETS: tuple[str, ...]  # names that from_preset knows; read from presets.json at first use


class LayerKind(Enum):
    """What a layer keeps: K/V rows that grow (FULL) or a state of fixed size (LINEAR)."""

    FULL = "full"
    LINEAR = "linear"


def _bad(field: str, problem: str) -> ConfigError:
    """The error of one field; ModelConfig._build replaces the field by the key of the file."""
    return ConfigError(f"{field}: {problem}")


def _whole(value: Any, field: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _bad(field, f"needs a whole number, not a {type(value).__name__}")
    number = operator.index(value)
    if not 0 <= number <= _U32_MAX:
        shown = number if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
        raise _bad(field, f"{shown} is outside 0 .. {_U32_MAX}")
    return number


def _real(value: Any, field: str) -> float:
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise _bad(field, f"needs a number, not a {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _F32_MAX:
        raise _bad(field, f"{number} is not a finite f32")
    return number


def _flag(value: Any, field: str) -> bool:
    if value is True or value is False:
        return bool(value)
    if _whole(value, field) > 1:
        raise _bad(field, "needs true or false")
    return bool(value)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _bad(field, f"needs a string, not a {type(value).__name__}")
    return value


def _tuple(value: Any, field: str, element: Callable[[Any, str], Any]) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _bad(field, f"needs a sequence, not a {type(value).__name__}")
    return tuple(element(item, f"{field}[{index}]") for index, item in enumerate(value))


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "int": _whole,
    "float": _real,
    "str": _text,
    "tuple[int, ...]": functools.partial(_tuple, element=_whole),
    "tuple[bool, ...]": functools.partial(_tuple, element=_flag),
}


def _check_fields(part: Any, prefix: str = "") -> None:
    """Checks every plain field against its annotation; what fits is stored as the built-in type."""
    for field in fields(part):
        if check := _CHECKS.get(str(field.type)):
            object.__setattr__(part, field.name, check(getattr(part, field.name), prefix + field.name))


@dataclass(frozen=True)
class SsmConfig:
    """Sizes of a recurrent layer: five u32. `inner_size` is carried along; nothing is sized by it.

    conv_kernel is d_conv (taps), state_size the side of a head's square state (elements),
    time_step_rank the number of value heads, group_count the number of key heads.
    """

    conv_kernel: int = 0
    inner_size: int = 0
    state_size: int = 0
    time_step_rank: int = 0
    group_count: int = 0

    def __post_init__(self) -> None:
        _check_fields(self, "ssm.")

    @property
    def key_dim(self) -> int:
        """Channels of q, and of k: state_size * group_count."""
        return self.state_size * self.group_count

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.state_size * self.time_step_rank

    @property
    def pad(self) -> int:
        """Columns of the convolution ring: conv_kernel - 1 (0 without a convolution)."""
        return max(self.conv_kernel - 1, 0)


@dataclass(frozen=True)
class Gemma4Config:
    """Gemma 4's per-layer attention. Layers past the end of `head_count_kv` have n_head_kv heads."""

    head_count_kv: tuple[int, ...] = ()
    swa_pattern: tuple[bool, ...] = ()  # true: sliding window; one per layer
    sliding_window: int = 1024  # tokens
    key_length_global: int = 512  # head dim of K and V
    key_length_swa: int = 256
    rope_base_global: float = 1e6
    rope_base_swa: float = 1e4
    rope_dims_global: int = 512
    rope_dims_swa: int = 256
    final_logit_softcapping: float = 30.0
    n_embd_per_layer: int = 0
    shared_kv_layers: int = 0  # trailing layers that read an earlier layer's K/V
    suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self, "gemma4.")


@dataclass(frozen=True)
class Step35Config:
    """Step 3.5's per-layer attention. The cache is sized by ModelConfig.n_head_kv all the same."""

    head_count: tuple[int, ...] = ()  # query heads, one per layer
    head_count_kv: tuple[int, ...] = ()
    swa_pattern: tuple[bool, ...] = ()  # a layer past its end is windowed
    sliding_window: int = 0  # tokens
    rope_base_global: float = 1e4
    rope_base_swa: float = 1e4
    rope_dims_full: int = 64
    rope_dims_swa: int = 128

    def __post_init__(self) -> None:
        _check_fields(self, "step35.")

    def is_swa(self, il: int) -> bool:
        """Whether layer il has a sliding window."""
        return self.swa_pattern[il] if il < len(self.swa_pattern) else True


@dataclass(frozen=True)
class MlaConfig:
    """Latent attention of glm-dsa: K is the latent and the rope part, V the latent."""

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    key_length_mla: int = 0
    value_length_mla: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        _check_fields(self, "mla.")


_PARTS = {"ssm": SsmConfig, "gemma4": Gemma4Config, "step35": Step35Config, "mla": MlaConfig}


@dataclass(frozen=True)
class ModelConfig:
    """A model as the cache sees it. Equal by value, hashable.

    n_layer counts every block of the file, the `nextn_predict_layers` trailing MTP blocks included.
    Integers are u32, floats f32; sequences become tuples. A field of the wrong type, sign or size,
    or one that contradicts another, raises ConfigError naming it.
    """

    n_layer: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_head: int = 0  # 0: as many as n_head_kv
    arch: str = "other"  # as in GGUF's general.architecture
    name: str = ""
    n_embd: int = 0
    n_ff: int = 0
    n_vocab: int = 0
    context_length: int = 0
    rms_eps: float = 1e-6
    rope_freq_base: float = 1e4
    rope_dim_count: int = 0  # 0: all of head_dim_k
    rope_sections: tuple[int, ...] = ()
    full_attention_interval: int = 0
    nextn_predict_layers: int = 0
    ssm: SsmConfig | None = None
    gemma4: Gemma4Config | None = None
    step35: Step35Config | None = None
    mla: MlaConfig | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        for name, kind in _PARTS.items():
            part = getattr(self, name)
            if part is not None and not isinstance(part, kind):
                raise _bad(name, f"needs a {kind.__name__}, not a {type(part).__name__}")
        if not 1 <= self.n_layer <= MAX_LAYERS:
            raise _bad("n_layer", f"{self.n_layer} is outside 1 .. {MAX_LAYERS}")
        if self.nextn_predict_layers > self.n_layer:
            raise _bad("nextn_predict_layers", f"{self.nextn_predict_layers} of only {self.n_layer} layers")
        object.__setattr__(self, "n_head", self.n_head or self.n_head_kv)
        object.__setattr__(self, "rope_dim_count", self.rope_dim_count or self.head_dim_k)
        self._check_gemma4()
        self._check_step35()
        self._check_mla()

    def _check_gemma4(self) -> None:
        if self.gemma4 is None:
            if self.arch == "gemma4":
                raise _bad("gemma4", "missing; the layers of this architecture differ in size")
            return
        self._check_length("gemma4.swa_pattern", self.gemma4.swa_pattern)
        self._check_window("gemma4.sliding_window", self.gemma4.sliding_window)
        shared = self.gemma4.shared_kv_layers
        if shared > self.n_layer:
            raise _bad("gemma4.shared_kv_layers", f"{shared} of only {self.n_layer} layers")
        for il in range(self.n_layer - shared, self.n_layer):
            if self.layer_kind(il) is LayerKind.LINEAR:
                raise _bad("gemma4.shared_kv_layers", f"{shared} includes layer {il}, which has no K/V to borrow")

    def _check_step35(self) -> None:
        if self.step35 is None:
            if self.arch == "step35":
                raise _bad("step35", "missing; the layers of this architecture differ in query heads")
            return
        self._check_length("step35.head_count", self.step35.head_count)
        self._check_length("step35.head_count_kv", self.step35.head_count_kv)
        self._check_window("step35.sliding_window", self.step35.sliding_window)

    def _check_mla(self) -> None:
        if (mla := self.mla) is None:
            return
        if self.head_dim_k != mla.kv_lora_rank + mla.rope_dim:
            raise _bad("head_dim_k", f"{self.head_dim_k} is not {mla.kv_lora_rank} + {mla.rope_dim}, latent + rope")
        if self.head_dim_v != mla.kv_lora_rank:
            raise _bad("head_dim_v", f"{self.head_dim_v} is not the latent's {mla.kv_lora_rank}")

    def _check_length(self, field: str, per_layer: tuple[Any, ...]) -> None:
        if len(per_layer) < self.n_layer:
            raise _bad(field, f"{len(per_layer)} entries for {self.n_layer} layers")

    def _check_window(self, field: str, window: int) -> None:
        if window == 0 and any(self.is_windowed(il) for il in range(self.n_layer)):
            raise _bad(field, "0 tokens, but there are windowed layers")

    def _check_layer(self, il: int) -> None:
        if not 0 <= il < self.n_layer:
            raise ConfigError(f"layer {il} does not exist; layers are 0 .. {self.n_layer - 1}")

    # What a layer is.

    @property
    def n_trunk(self) -> int:
        """Layers before the trailing MTP blocks."""
        return self.n_layer - self.nextn_predict_layers

    @property
    def is_gemma(self) -> bool:
        """Whether layers follow Gemma's rules: two head sizes, formats of their own, shared K/V."""
        return self.gemma4 is not None

    def layer_kind(self, il: int) -> LayerKind:
        """FULL for every layer where the interval is 0, else for each interval's last; MTP blocks are no exception."""
        self._check_layer(il)
        interval = self.full_attention_interval
        return LayerKind.FULL if interval == 0 or (il + 1) % interval == 0 else LayerKind.LINEAR

    def is_windowed(self, il: int) -> bool:
        """Whether layer il attends a sliding window only."""
        self._check_layer(il)
        if self.gemma4 is not None:
            return self.gemma4.swa_pattern[il]
        return self.step35 is not None and self.step35.is_swa(il)

    def window(self, il: int) -> int | None:
        """Tokens of layer il's sliding window; None: it attends everything."""
        part = self.gemma4 or self.step35
        return part.sliding_window if part is not None and self.is_windowed(il) else None

    def heads(self, il: int) -> int:
        """Query heads of layer il."""
        self._check_layer(il)
        return self.n_head if self.step35 is None else self.step35.head_count[il]

    def kv_heads(self, il: int) -> int:
        """K/V heads that layer il is stored with."""
        self._check_layer(il)
        if self.gemma4 is not None and il < len(self.gemma4.head_count_kv):
            return self.gemma4.head_count_kv[il]
        return self.n_head_kv

    def head_dims(self, il: int) -> tuple[int, int]:
        """(K, V) elements per head of layer il."""
        self._check_layer(il)
        if self.gemma4 is None:
            return self.head_dim_k, self.head_dim_v
        head_dim = self.gemma4.key_length_swa if self.gemma4.swa_pattern[il] else self.gemma4.key_length_global
        return head_dim, head_dim

    def owns_kv(self, il: int) -> bool:
        """Whether layer il stores K/V of its own: an attention layer that does not borrow."""
        shared = self.gemma4.shared_kv_layers if self.gemma4 is not None else 0
        return self.layer_kind(il) is LayerKind.FULL and il < self.n_layer - shared

    def kv_source(self, il: int) -> int:
        """The layer whose K/V layer il reads: itself, or the last owner of its kind (windowed or global).

        Raises ConfigError for a recurrent layer, and where no layer of that kind owns K/V.
        """
        if self.owns_kv(il):
            return il
        if self.layer_kind(il) is LayerKind.LINEAR:
            raise ConfigError(f"layer {il} is recurrent: it reads no K/V")
        windowed = self.is_windowed(il)
        for owner in range(il - 1, -1, -1):
            if self.owns_kv(owner) and self.is_windowed(owner) == windowed:
                return owner
        kind = "windowed" if windowed else "global"
        raise ConfigError(f"layer {il} borrows K/V, but no {kind} layer before it owns any (gemma4.shared_kv_layers)")

    # Where it comes from.

    @classmethod
    def from_preset(cls, name: str) -> ModelConfig:
        """One of PRESETS. Raises ConfigError listing them for any other name."""
        if name not in _presets():
            raise ConfigError(f"{name!r} is no preset. {_preset_hint(name)}")
        return cls._build(Source({"name": name, **_presets()[name]}, f"preset {name}"))

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """From the header of a GGUF file; tensor data is neither read nor needed.

        Needs the `gguf` package (extra `gguf`). Raises ConfigError naming the file and the key.
        """
        return cls._build(read_gguf(path))

    @classmethod
    def from_hf(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """From a Hugging Face config.json or its folder. Raises ConfigError naming the file and the key."""
        return cls._build(read_hf(path))

    @classmethod
    def load(cls, model: str | os.PathLike[str]) -> ModelConfig:
        """From a preset's name, a GGUF file, a config.json or a folder with one. Raises ConfigError."""
        name = os.fspath(model)
        if name in _presets():
            return cls.from_preset(name)
        if is_gguf(name):
            return cls.from_gguf(name)
        if os.path.exists(name) or name.endswith(".json"):
            return cls.from_hf(name)
        raise ConfigError(f"{name!r} is neither a preset nor a file that exists. {_preset_hint(name)}")

    @classmethod
    def _build(cls, source: Source) -> ModelConfig:
        values = source.values
        try:
            parts = {name: kind(**values[name]) for name, kind in _PARTS.items() if values.get(name) is not None}
            return cls(**{**values, **parts})
        except ConfigError as error:
            name, _, problem = str(error).partition(": ")
            field, bracket, index = name.partition("[")
            key = shown_key(source.keys.get(field, field))
            raise ConfigError(f"{source.where}: {key}{bracket}{index}: {problem}") from None


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    import json
    from importlib.resources import files

    presets: dict[str, dict[str, Any]] = json.loads(files("memra_driver").joinpath("presets.json").read_text("utf-8"))
    return presets


def _preset_hint(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), _presets(), n=1, cutoff=0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}Presets: {', '.join(_presets())}"


def __getattr__(name: str) -> Any:
    if name == "PRESETS":
        return tuple(_presets())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
