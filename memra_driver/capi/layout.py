"""The ctypes structs of `memra_api.h`, field for field: what callers of the C library hand in and get back."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64


class LayoutRowC(Structure):
    """memra_layout_row."""

    _fields_ = (("type", c_char_p), ("field", c_char_p), ("offset", c_uint64), ("size", c_uint64))


class DeviceOptionsC(Structure):
    """memra_device_options."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("ordinal", c_int32),
        ("stream", c_uint64),
        ("context", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    )


class ConfigC(Structure):
    """memra_config."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("n_layer", c_uint32),
        ("n_head", c_uint32),
        ("n_head_kv", c_uint32),
        ("head_dim_k", c_uint32),
        ("head_dim_v", c_uint32),
        ("n_embd", c_uint32),
        ("n_vocab", c_uint32),
        ("full_attention_interval", c_uint32),
        ("nextn_predict_layers", c_uint32),
        ("has_ssm", c_uint32),
        ("ssm_conv_kernel", c_uint32),
        ("ssm_state_size", c_uint32),
        ("ssm_time_step_rank", c_uint32),
        ("ssm_group_count", c_uint32),
        ("has_gemma4", c_uint32),
        ("gemma4_head_count_kv", POINTER(c_uint32)),
        ("gemma4_swa_pattern", POINTER(c_uint8)),
        ("gemma4_n_head_count_kv", c_uint32),
        ("gemma4_n_swa_pattern", c_uint32),
        ("gemma4_sliding_window", c_uint32),
        ("gemma4_key_length_global", c_uint32),
        ("gemma4_key_length_swa", c_uint32),
        ("gemma4_shared_kv_layers", c_uint32),
        ("has_step35", c_uint32),
        ("step35_n_head_count", c_uint32),
        ("step35_head_count", POINTER(c_uint32)),
        ("step35_swa_pattern", POINTER(c_uint8)),
        ("step35_n_swa_pattern", c_uint32),
        ("step35_sliding_window", c_uint32),
    )


class PolicyC(Structure):
    """memra_policy."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("k", c_int32),
        ("v", c_int32),
        ("gkv", c_uint32),
        ("wkv", c_uint32),
        ("kv_fp8", c_uint32),
    )


class OptionsC(Structure):
    """memra_options."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("reserve_logits", c_uint32),
        ("max_rows", c_int64),
        ("round_width", c_int64),
        ("tap_layers", POINTER(c_int32)),
        ("tap_rows", c_int64),
        ("n_tap_layers", c_uint32),
        ("skip_mtp_state", c_uint32),
        ("strict", c_uint32),
        ("reserved", c_uint32),
    )


class PlaneC(Structure):
    """memra_plane."""

    _fields_ = (
        ("name", c_char_p),
        ("owner", c_char_p),
        ("group", c_char_p),
        ("dtype", c_int32),
        ("section", c_int32),
        ("mtp_section", c_int32),
        ("reserved", c_int32),
    )


class PlanRowC(Structure):
    """memra_plan_row."""

    _fields_ = (
        ("plane", c_char_p),
        ("layer", c_int32),
        ("device", c_int32),
        ("dtype", c_int32),
        ("reserved", c_uint32),
        ("len", c_int64),
        ("n_bytes", c_int64),
        ("offset", c_int64),
    )


class PlanC(Structure):
    """memra_plan."""

    _fields_ = (
        ("rows", POINTER(PlanRowC)),
        ("arena_bytes", POINTER(c_int64)),
        ("plane_bytes", POINTER(c_int64)),
        ("states_offset", POINTER(c_int64)),
        ("states_bytes", POINTER(c_int64)),
        ("device_of", POINTER(c_int32)),
        ("n_rows", c_int64),
        ("n_devices", c_int32),
        ("n_layer", c_int32),
    )


API_STRUCTS: dict[str, type[Structure]] = {
    "memra_layout_row": LayoutRowC,
    "memra_device_options": DeviceOptionsC,
    "memra_config": ConfigC,
    "memra_policy": PolicyC,
    "memra_options": OptionsC,
    "memra_plane": PlaneC,
    "memra_plan_row": PlanRowC,
    "memra_plan": PlanC,
}
