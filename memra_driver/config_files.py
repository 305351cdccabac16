"""Which key of a GGUF header or of a config.json gives which field of ModelConfig, and the defaults.

Both readers return plain values by field name; ModelConfig checks them. Files come from strangers:
every failure is a ConfigError that names the file and the key.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from memra_driver.errors import ConfigError
from memra_driver.gguf_header import GgufHeader

MAX_LAYERS = 65_536  # the error record keeps a layer in 16 bits
MAX_JSON_BYTES = 16 << 20
_U32_MAX = 2**32 - 1

# Architectures that have an ssm part; only the first two have recurrent layers, and numbers in it.
_HYBRID = ("qwen35", "qwen35moe", "minimax-m3", "hy3", "gemma4", "glm-dsa", "step35")
_GGUF_ALIASES = {"qwen3next": "qwen35", "qwen3nextmoe": "qwen35moe"}
_HF_ARCHS = {
    "qwen3_moe": "qwen3moe",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next_moe": "qwen35moe",
    "minimax_m3": "minimax-m3",
    "minimax_m3_vl": "minimax-m3",
    "minimax_m3_text": "minimax-m3",
    "hy_v3": "hy3",
    "glm_moe_dsa": "glm-dsa",
}
_HF_PER_LAYER = ("gemma4", "step3p")  # beginnings of model types that config.json cannot describe to us


@dataclass(frozen=True)
class Source:
    """Values by field name (parts are dicts), where they come from, and the key of each field there."""

    values: dict[str, Any]
    where: str
    keys: dict[str, str] = field(default_factory=dict)


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file for reading, or ConfigError. Anything else could block or never end."""
    where = os.fspath(path)
    try:
        regular = stat.S_ISREG(os.stat(where).st_mode)
        if regular:
            return open(where, "rb")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where!r}: cannot be opened: {error}") from None
    raise ConfigError(f"{where}: not a regular file")


def is_gguf(path: str) -> bool:
    """Whether a path is named .gguf, or is a regular file that begins as one."""
    if path.lower().endswith(".gguf"):
        return True
    try:
        with _open(path) as file:
            return file.read(4) == b"GGUF"
    except (ConfigError, OSError):
        return False


def read_gguf(path: str | os.PathLike[str]) -> Source:
    """The header's values. Integers of any width are u32 here, floats are FLOAT32 or FLOAT64, else the default."""
    where = os.fspath(path)
    try:
        with _open(where) as file:
            header = GgufHeader(file, where)
            return Source(_gguf_values(header), where, header.keys)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from None


def _gguf_values(header: GgufHeader) -> dict[str, Any]:
    u32, f32 = header.u32, header.f32
    arch = _GGUF_ALIASES.get(header.arch, header.arch)
    n_layer = u32("n_layer", "block_count")
    if not 1 <= n_layer <= MAX_LAYERS:
        header.fail(header.keys["n_layer"], f"{n_layer} is outside 1 .. {MAX_LAYERS}")
    n_embd = u32("n_embd", "embedding_length")
    heads = u32("n_head", "attention.head_count", 1)
    if heads == 0:
        header.fail(header.keys["n_head"], "0 heads")
    head_dim_k = u32("head_dim_k", "attention.key_length", n_embd // heads)
    step35 = _gguf_step35(header, n_layer, head_dim_k) if arch == "step35" else None
    if step35 is None:
        n_head = u32("n_head", "attention.head_count")
        n_head_kv = u32("n_head_kv", "attention.head_count_kv", n_head)
    else:
        n_head, n_head_kv = max(step35["head_count"]), max(step35["head_count_kv"])
    interval = u32("full_attention_interval", "full_attention_interval", 0)
    if interval > 1 and arch not in _HYBRID:
        header.fail(header.keys["full_attention_interval"], f"{interval}, but {arch[:100]!r} has no recurrent layers")
    return {
        "arch": arch,
        "name": header.text("general.name"),
        "n_layer": n_layer,
        "n_embd": n_embd,
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "head_dim_k": head_dim_k,
        "head_dim_v": u32("head_dim_v", "attention.value_length", head_dim_k),
        "n_ff": u32("n_ff", "feed_forward_length", 0),
        "n_vocab": u32("n_vocab", "vocab_size", header.vocab_rows),
        "context_length": u32("context_length", "context_length", 0),
        "rms_eps": f32("rms_eps", "attention.layer_norm_rms_epsilon", 1e-6),
        "rope_freq_base": f32("rope_freq_base", "rope.freq_base", 1e4),
        "rope_dim_count": u32("rope_dim_count", "rope.dimension_count", head_dim_k),
        "rope_sections": header.u32s("rope_sections", "rope.dimension_sections") or (),
        "full_attention_interval": interval,
        "nextn_predict_layers": u32("nextn_predict_layers", "nextn_predict_layers", 0),
        "ssm": _gguf_ssm(header, interval) if arch in _HYBRID else None,
        "gemma4": _gguf_gemma4(header) if arch == "gemma4" else None,
        "step35": step35,
        "mla": _gguf_mla(header) if arch == "glm-dsa" else None,
    }


def _gguf_ssm(header: GgufHeader, interval: int) -> dict[str, int]:
    """All zero where no layer is recurrent; where one is, all but inner_size must be there."""
    required = ("conv_kernel", "state_size", "time_step_rank", "group_count") if interval > 1 else ()
    names = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    return {name: header.u32(f"ssm.{name}", f"ssm.{name}", None if name in required else 0) for name in names}


def _gguf_gemma4(header: GgufHeader) -> dict[str, Any]:
    def u32(name: str, suffix: str, default: int) -> int:
        return header.u32(f"gemma4.{name}", suffix, default)

    def f32(name: str, suffix: str, default: float) -> float:
        return header.f32(f"gemma4.{name}", suffix, default)

    pattern = header.u32s("gemma4.swa_pattern", "attention.sliding_window_pattern") or ()
    return {
        "head_count_kv": header.u32s("gemma4.head_count_kv", "attention.head_count_kv") or (),
        "swa_pattern": [windowed == 1 for windowed in pattern],
        "sliding_window": u32("sliding_window", "attention.sliding_window", 1024),
        "key_length_global": u32("key_length_global", "attention.key_length", 512),
        "key_length_swa": u32("key_length_swa", "attention.key_length_swa", 256),
        "rope_base_global": f32("rope_base_global", "rope.freq_base", 1e6),
        "rope_base_swa": f32("rope_base_swa", "rope.freq_base_swa", 1e4),
        "rope_dims_global": u32("rope_dims_global", "rope.dimension_count", 512),
        "rope_dims_swa": u32("rope_dims_swa", "rope.dimension_count_swa", 256),
        "final_logit_softcapping": f32("final_logit_softcapping", "final_logit_softcapping", 30.0),
        "n_embd_per_layer": u32("n_embd_per_layer", "embedding_length_per_layer_input", 0),
        "shared_kv_layers": u32("shared_kv_layers", "attention.shared_kv_layers", 0),
        "suppress_tokens": header.u32s("gemma4.suppress_tokens", "tokenizer.ggml.suppress_tokens") or (),
    }


def _gguf_step35(header: GgufHeader, n_layer: int, head_dim_k: int) -> dict[str, Any]:
    def per_layer(name: str, suffix: str) -> tuple[int, ...]:
        values = header.u32s(f"step35.{name}", suffix)
        if values is None:
            return (header.u32(f"step35.{name}", suffix),) * n_layer
        if len(values) < n_layer:
            header.fail(header.keys[f"step35.{name}"], f"{len(values)} entries for {n_layer} layers")
        return values

    pattern = header.u32s("step35.swa_pattern", "attention.sliding_window_pattern")
    every = 0 if pattern is not None else header.u32("step35.swa_pattern", "attention.sliding_window_pattern", 0)
    base = header.f32("step35.rope_base_global", "rope.freq_base", 1e4)
    rope_dims = header.u32("step35.rope_dims_swa", "rope.dimension_count", head_dim_k)
    return {
        "head_count": per_layer("head_count", "attention.head_count"),
        "head_count_kv": per_layer("head_count_kv", "attention.head_count_kv"),
        # A scalar n: every n-th layer, the first one included, is global.
        "swa_pattern": [il % every != 0 for il in range(n_layer)] if every else [x == 1 for x in pattern or ()],
        "sliding_window": header.u32("step35.sliding_window", "attention.sliding_window"),
        "rope_base_global": base,
        "rope_base_swa": header.f32("step35.rope_base_swa", "rope.freq_base_swa", base),
        "rope_dims_full": rope_dims // 2,
        "rope_dims_swa": rope_dims,
    }


def _gguf_mla(header: GgufHeader) -> dict[str, int]:
    names = ("q_lora_rank", "kv_lora_rank", "key_length_mla", "value_length_mla")
    ranks = {name: header.u32(f"mla.{name}", f"attention.{name}") for name in names}
    return {**ranks, "rope_dim": header.u32("mla.rope_dim", "rope.dimension_count")}


class _Json:
    """config.json with `text_config` laid over the top level. null counts as absent."""

    def __init__(self, where: str) -> None:
        import json

        def refuse(constant: str) -> NoReturn:
            raise ValueError(f"{constant} is not JSON")

        self.where = where
        self.keys: dict[str, str] = {}
        try:
            with _open(where) as file:
                size = os.fstat(file.fileno()).st_size  # what is asked for is also reserved
                if size > MAX_JSON_BYTES:
                    raise ConfigError(f"{where}: more than {MAX_JSON_BYTES >> 20} MiB, too long for a config.json")
                text = file.read(size)
            top = json.loads(text.decode("utf-8-sig"), parse_constant=refuse)
        except ConfigError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from None
        self._values = self._object(top, "the file")
        text_config = self._object(self._values.get("text_config") or {}, "text_config")
        self._values.update({key: value for key, value in text_config.items() if value is not None})

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {key}: {problem}")

    def _object(self, value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(key, f"a {type(value).__name__}, where an object is needed")
        return value

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def part(self, key: str) -> dict[str, Any]:
        """An object; empty where it is absent."""
        value = self.get(key)
        return {} if value is None else self._object(value, key)

    def u32(self, field: str, key: str, default: int | None = None) -> int:
        """A whole number. Absent: the default; without one, ConfigError."""
        self.keys[field] = key
        value = self.get(key)
        if value is None:
            if default is None:
                self.fail(key, "missing")
            return default
        if type(value) is not int:
            self.fail(key, f"a {type(value).__name__}, where a whole number is needed")
        if not 0 <= value <= _U32_MAX:
            shown = value if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
            self.fail(key, f"{shown} is outside 0 .. {_U32_MAX}")
        return value

    def real(self, field: str, key: str, default: float, within: dict[str, Any] | None = None) -> float:
        """A number, from the object `within` before the top level."""
        self.keys[field] = key
        value = within.get(key) if within else None
        value = self.get(key) if value is None else value
        if value is None:
            return default
        if type(value) not in (int, float):
            self.fail(key, f"a {type(value).__name__}, where a number is needed")
        return value  # type: ignore[no-any-return]


def read_hf(path: str | os.PathLike[str]) -> Source:
    """The values of a config.json, given itself or its folder. n_layer counts the MTP blocks, as in GGUF."""
    where = os.fspath(path)
    config = _Json(os.path.join(where, "config.json") if os.path.isdir(where) else where)
    u32, real = config.u32, config.real
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or len(model_type) > 100 or not model_type.isprintable():
        config.fail("model_type", "missing, or not a name")
    if model_type.startswith(_HF_PER_LAYER):
        config.fail("model_type", f"the layers of {model_type!r} differ in size; use its GGUF file or a preset")
    arch = _HF_ARCHS.get(model_type, model_type)
    nextn_is_absent = config.get("num_nextn_predict_layers") is None
    nextn = u32("nextn_predict_layers", "mtp_num_hidden_layers" if nextn_is_absent else "num_nextn_predict_layers", 0)
    n_trunk = u32("n_layer", "num_hidden_layers")
    n_embd = u32("n_embd", "hidden_size")
    n_head = u32("n_head", "num_attention_heads")
    head_dim = u32("head_dim_k", "head_dim", n_embd // max(1, n_head))
    interval = u32("full_attention_interval", "full_attention_interval", 0)
    if interval > 1 and arch not in _HYBRID:
        config.fail("full_attention_interval", f"{interval}, but {model_type!r} has no recurrent layers")
    _check_layer_types(config, n_trunk, interval)
    rope = config.part("rope_parameters")
    rotary = real("rope_dim_count", "partial_rotary_factor", 1.0, rope)
    return Source(
        {
            "arch": arch,
            "n_layer": n_trunk + nextn,
            "n_embd": n_embd,
            "n_head": n_head,
            "n_head_kv": u32("n_head_kv", "num_key_value_heads", n_head),
            "head_dim_k": head_dim,
            "head_dim_v": head_dim,
            "n_ff": u32("n_ff", "intermediate_size", 0),
            "n_vocab": u32("n_vocab", "vocab_size", 0),
            "context_length": u32("context_length", "max_position_embeddings", 0),
            "rms_eps": real("rms_eps", "rms_norm_eps", 1e-6),
            "rope_freq_base": real("rope_freq_base", "rope_theta", 1e4, rope),
            "rope_dim_count": round(rotary * head_dim) if 0 < rotary < 1 else head_dim,
            "full_attention_interval": interval,
            "nextn_predict_layers": nextn,
            "ssm": _hf_ssm(config, interval) if arch in _HYBRID else None,
        },
        config.where,
        config.keys,
    )


def _hf_ssm(config: _Json, interval: int) -> dict[str, int]:
    """All zero where no layer is recurrent; where one is, every key but the value head dim must be there."""
    needed = None if interval > 1 else 0
    ssm = {
        name: config.u32(f"ssm.{name}", key, needed)
        for name, key in (
            ("conv_kernel", "linear_conv_kernel_dim"),
            ("state_size", "linear_key_head_dim"),
            ("time_step_rank", "linear_num_value_heads"),
            ("group_count", "linear_num_key_heads"),
        )
    }
    key_dim = ssm["state_size"]
    value_dim = config.u32("ssm.inner_size", "linear_value_head_dim", key_dim)
    if value_dim != key_dim:
        config.fail("linear_value_head_dim", f"{value_dim} is not linear_key_head_dim, {key_dim}: states are square")
    return {**ssm, "inner_size": value_dim * ssm["time_step_rank"]}


def _check_layer_types(config: _Json, n_trunk: int, interval: int) -> None:
    """`layer_types`, where given, may only say what the interval says: nothing else is read from it."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or len(layer_types) < n_trunk:
        config.fail("layer_types", f"not a list of {n_trunk} entries")
    for il, layer_type in enumerate(layer_types[:n_trunk]):
        linear = interval > 0 and (il + 1) % interval != 0
        if (layer_type == "linear_attention") != linear:
            kind = "recurrent" if linear else "attention"
            config.fail("layer_types", f"full_attention_interval {interval} makes layer {il} {kind}, the list does not")
