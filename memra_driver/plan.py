"""The one sizing oracle: every buffer of a cache with its bytes and its place, before any exists.

Pure arithmetic. Allocation walks a `CachePlan`; nothing else computes a size.

Order inside one device's arena: K and V planes in layer order; the counters (len_d of each layer,
then pos_d) and the error record; conv_state of every layer; ssm_state of the trailing MTP layers;
ssm_state of the trunk; ssm_state_alt of the trunk; ssm_state_alt of the MTP layers; tape; reserved
logits and taps. A snapshot keeps what lies from the first conv_state to the last ssm_state, so
it is one contiguous copy while the trunk's buffers have swapped an even number of times, and two
while the number is odd.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from memra_driver.config import LayerKind, ModelConfig, SsmConfig
from memra_driver.errors import ConfigError
from memra_driver.formats import BLOCK, BlockFormat, FormatPolicy
from memra_driver.layout import DTYPE_NAMES, HEALTH_BYTES
from memra_driver.options import MAX_INT as MAX_INT
from memra_driver.options import CacheOptions as CacheOptions
from memra_driver.planes import PLANES, DevicePlan, Plane
from memra_driver.planes import PlanRow as PlanRow

ALIGN_BYTES = 256  # what the driver's own allocations have
TAIL_PAD_BYTES = 8  # an aligned-word reader may look past the last block of a full plane
MAX_BYTES = 2**63 - 1  # lengths and offsets are i64 in the C structs
MAX_D_CONV = 8
SCAN_STATE_SIZES = (32, 64, 128, 256)
ATTEND_GROUPS = 132  # groups of key tiles that attention sums apart,
ATTEND_FOLDS = 12  # and folds of as many neighbours each, which one block may have summed up
ATTEND_TAIL = 8  # f32 behind the values of a partial sum: reference, weight, and six unused, for sectors of 32 bytes
ATTEND_HEAD_DIMS = (64, 96, 128, 192, 256, 512)
MAX_GQA = 16
_BY_NAME = {plane.name: plane for plane in PLANES}


def attend_part_bytes(rows: int, n_head: int, head_dim_v: int, pieces: int = ATTEND_GROUPS) -> int:
    """Bytes of attention's partial sums for one sequence: per row, head and piece its values, maximum and weight."""
    return 4 * rows * n_head * pieces * (head_dim_v + ATTEND_TAIL)


def check_fence(fence: Sequence[int], cfg: ModelConfig) -> tuple[int, ...]:
    """The fence as a tuple, or ConfigError: 0, strictly increasing, ending at n_layer or at the trunk's end."""
    bounds = tuple(fence)
    ends = f"{cfg.n_layer}" if cfg.n_trunk == cfg.n_layer else f"{cfg.n_layer} or {cfg.n_trunk}"
    if not all(isinstance(bound, int) for bound in bounds) or len(bounds) < 2:
        raise ConfigError(f"fence {list(fence)} must be at least two layer numbers")
    if len(bounds) - 1 > cfg.n_layer:
        raise ConfigError(
            f"{len(bounds) - 1} stages for {cfg.n_layer} layers: every stage owns at least one layer"
        )
    if bounds[0] != 0:
        raise ConfigError(f"fence {list(bounds)} starts at {bounds[0]}; it must start at 0")
    if bounds[-1] not in (cfg.n_layer, cfg.n_trunk):
        raise ConfigError(f"fence {list(bounds)} ends at {bounds[-1]}; it must end at {ends}")
    if any(a >= b for a, b in pairwise(bounds)):
        raise ConfigError(f"fence {list(bounds)} must be strictly increasing: every stage owns at least one layer")
    return bounds


@functools.lru_cache(maxsize=16, typed=True)
def _planned(
    cfg: ModelConfig, max_ctx: int, policy: FormatPolicy, options: CacheOptions | None, fence: tuple[int, ...] | None,
    placement: tuple[int, ...] | None,
) -> CachePlan:  # fmt: skip
    return CachePlan(cfg, max_ctx, policy, options, fence, placement=placement)


class CachePlan:
    """Every buffer of a cache for `cfg` at `max_ctx` tokens.

    policy None: FormatPolicy.from_env(), read now. fence: stage boundaries [0, c1, .., n_layer];
    None is one stage. placement: device index of each stage (default: stage s is device s).

    planes: rows in the order of the Rust allocation walk. rows: the same and the padding, in
    arena order. plane_bytes is the sum of the planes, arena_bytes that of the arenas; both are
    exactly what is allocated. Raises ConfigError naming the layer or option.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        max_ctx: int,
        policy: FormatPolicy | None = None,
        options: CacheOptions | None = None,
        fence: Sequence[int] | None = None,
        *,
        placement: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(max_ctx, int) or isinstance(max_ctx, bool):
            raise ConfigError(f"max_ctx is {max_ctx!r}; it must be an integer number of tokens")
        if not 0 <= max_ctx <= MAX_INT:
            raise ConfigError(f"max_ctx is {max_ctx}; it must lie in 0 .. {MAX_INT}")
        self.cfg = cfg
        self.max_ctx = max_ctx
        self.policy = FormatPolicy.from_env() if policy is None else policy
        self.options = CacheOptions() if options is None else options
        self.fence = check_fence((0, cfg.n_layer) if fence is None else fence, cfg)
        n_stages = len(self.fence) - 1
        self.placement = tuple(range(n_stages)) if placement is None else tuple(placement)
        if len(self.placement) != n_stages:
            raise ConfigError(f"{len(self.placement)} devices for the {n_stages} stages of fence {list(self.fence)}")
        if not all(0 <= device < n_stages for device in self.placement):
            raise ConfigError(f"placement {list(self.placement)}: devices are 0 .. {n_stages - 1}, at most one a stage")
        self.n_devices = max(self.placement) + 1
        self._check_geometry()
        self.planes = tuple(self._walk())
        self.rows, self.per_device = self._place()
        offsets = {(row.plane, row.layer, row.device): row for row in self.rows}
        self.planes = tuple(offsets[row.plane, row.layer, row.device] for row in self.planes)

    @classmethod
    def of(
        cls, cfg: ModelConfig, max_ctx: int, policy: FormatPolicy | None, options: CacheOptions | None,
        fence: Sequence[int] | None = None, placement: Sequence[int] | None = None,
    ) -> CachePlan:  # fmt: skip
        """The plan of these arguments, an earlier one where there was one: caches of one kind share theirs."""
        policy = FormatPolicy.from_env() if policy is None else policy
        # What is equal to a good fence may be none itself: 4.0 to 4.
        fence = None if fence is None else check_fence(fence, cfg)
        placement = None if placement is None else tuple(placement)
        try:
            return _planned(cfg, max_ctx, policy, options, fence, placement)
        except TypeError:  # what cannot be hashed is refused by its name, or planned anew
            return cls(cfg, max_ctx, policy, options, fence, placement=placement)

    @functools.cached_property
    def cuts(self) -> dict[tuple[str, int | None, int], tuple[int, int, Any]]:
        """Byte offset, elements and dtype in its arena of each plane, by name, layer and device.

        With "counters", the packed len_d and pos_d of a device, and "states", what a snapshot keeps of it.
        """
        cuts: dict[tuple[str, int | None, int], tuple[int, int, Any]] = {}
        for row in self.planes:
            cuts[row.plane, row.layer, row.device] = row.offset, row.len, DTYPE_NAMES[row.dtype]
        for device in self.per_device:
            d, (begin, end) = device.device, device.snapshot
            packed = [row.offset for row in self.planes if row.device == d and row.dtype == "i32"]
            cuts["counters", None, d] = min(packed), len(packed), DTYPE_NAMES["i32"]
            cuts["states", None, d] = begin, (end - begin) // 4, DTYPE_NAMES["f32"]
        return cuts

    @functools.cached_property
    def kinds(self) -> tuple[tuple[int, bool, bool], ...]:
        """Device index, and whether it gets K/V planes and recurrent state, of each layer."""
        return tuple((self.device_of(il), self.has_kv(il), self.has_state(il)) for il in range(self.cfg.n_layer))

    @functools.cached_property
    def counter_layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers with K/V of each device: in its arena their len_d lie side by side, behind them its pos_d."""
        return tuple(
            tuple(il for il, (at, has_kv, _) in enumerate(self.kinds) if has_kv and at == d)
            for d in range(self.n_devices)
        )

    # What the layers are.

    def device_of(self, il: int) -> int:
        """Device index of layer il. Layers past the fence's end belong to the last stage."""
        return self.placement[min(bisect_right(self.fence, il) - 1, len(self.placement) - 1)]

    def is_mtp(self, il: int) -> bool:
        """Whether il is one of the trailing MTP layers."""
        return il >= self.cfg.n_trunk

    def has_kv(self, il: int) -> bool:
        """Whether layer il gets K/V planes."""
        return self.cfg.owns_kv(il) and not self._skipped(il)

    def has_state(self, il: int) -> bool:
        """Whether layer il gets recurrent state."""
        return self.cfg.layer_kind(il) is LayerKind.LINEAR and not self._skipped(il)

    def formats(self, il: int) -> tuple[BlockFormat, BlockFormat]:
        """Block formats of K and V of layer il; decided here and nowhere else."""
        return self.policy.pair(self.cfg.is_gemma, self.cfg.is_windowed(il))

    def kv_dims(self, il: int) -> tuple[int, int]:
        """Elements per token of K and V of layer il."""
        head_dim_k, head_dim_v = self.cfg.head_dims(il)
        return self.cfg.kv_heads(il) * head_dim_k, self.cfg.kv_heads(il) * head_dim_v

    def tok_bytes(self, il: int) -> tuple[int, int]:
        """Bytes per token of K and V of layer il."""
        dims, formats = self.kv_dims(il), self.formats(il)
        return dims[0] // BLOCK * formats[0].block_bytes, dims[1] // BLOCK * formats[1].block_bytes

    def _skipped(self, il: int) -> bool:
        return self.options.skip_mtp_state and self.is_mtp(il)

    def _check_geometry(self) -> None:
        cfg, ssm = self.cfg, self.cfg.ssm
        for il in range(cfg.n_layer):
            if cfg.heads(il) > MAX_INT and self.kv_source(il) is not None:
                raise ConfigError(f"layer {il}: n_head is {cfg.heads(il)} query heads; at most {MAX_INT}")
            if self.has_kv(il):
                if cfg.kv_heads(il) < 1:
                    raise ConfigError(f"layer {il}: n_head_kv is {cfg.kv_heads(il)}; a layer with K/V needs at least 1")
                for which, dim in zip(("head_dim_k", "head_dim_v"), cfg.head_dims(il), strict=True):
                    if dim <= 0 or dim % BLOCK:
                        raise ConfigError(f"layer {il}: {which} is {dim}; it must be a positive multiple of {BLOCK}")
                for which, dim in zip(("kv_dim_k", "kv_dim_v"), self.kv_dims(il), strict=True):
                    if dim > MAX_INT:
                        raise ConfigError(f"layer {il}: {which} is {dim} elements per token; at most {MAX_INT}")
            elif self.has_state(il):
                if ssm is None:
                    raise ConfigError(f"layer {il} is recurrent, but the model has no ssm description")
                if not 1 <= ssm.conv_kernel <= MAX_D_CONV:
                    raise ConfigError(f"layer {il}: conv_kernel is {ssm.conv_kernel}; it must lie in 1 .. {MAX_D_CONV}")
                for field in ("state_size", "time_step_rank", "group_count"):
                    if getattr(ssm, field) < 1:
                        raise ConfigError(
                            f"layer {il}: {field} is {getattr(ssm, field)}; a recurrent layer needs at least 1"
                        )
                if ssm.conv_dim > MAX_INT:
                    raise ConfigError(f"layer {il}: conv_dim is {ssm.conv_dim} channels; at most {MAX_INT}")
        if self.options.reserve_taps is not None:
            layer_ids, _ = self.options.reserve_taps
            if len(layer_ids) > cfg.n_layer:
                raise ConfigError(f"reserve_taps names {len(layer_ids)} layers; the model has {cfg.n_layer}")
            for il in layer_ids:
                if not 0 <= il < cfg.n_layer:
                    raise ConfigError(f"reserve_taps names layer {il}; layers are 0 .. {cfg.n_layer - 1}")
            if len({self.device_of(il) for il in layer_ids}) > 1:
                raise ConfigError(
                    f"reserve_taps names layers {list(layer_ids)} of several devices; tap layers share one"
                )
            if cfg.n_embd < 1:
                raise ConfigError("reserve_taps needs n_embd, which this model description lacks")
        if self.options.reserve_logits and cfg.n_vocab < 1:
            raise ConfigError("reserve_logits needs n_vocab, which this model description lacks")

    # The rows.

    def _walk(self) -> list[PlanRow]:
        """Every plane in the order of the Rust walk, then what we add per device."""
        options, planes = self.options, []

        def add(owner: str, device: int, il: int | None = None) -> None:
            for plane in PLANES:
                if plane.owner == owner:
                    planes.append(self._row(plane, device, il))

        for il in range(self.cfg.n_layer):
            if self.has_kv(il):
                add("attention", self.device_of(il), il)
            elif self.has_state(il):
                add("recurrent", self.device_of(il), il)
        for device in range(self.n_devices):
            add("device", device)
        if options.round_width:
            for il in filter(self.has_state, range(self.cfg.n_layer)):
                add("round", self.device_of(il), il)
        if options.reserve_logits:
            add("logits", self.placement[-1])
        if options.reserve_taps is not None:
            add("taps", self.device_of(options.reserve_taps[0][0]))
        return planes

    def _row(self, plane: Plane, device: int, il: int | None) -> PlanRow:
        if il is not None:
            name = f"layer{il:02}.{plane.name}"
        else:
            name = plane.name if self.n_devices == 1 else f"device{device}.{plane.name}"
        length = self._length(plane.name, -1 if il is None else il)
        n_bytes = length * DTYPE_NAMES[plane.dtype].itemsize
        if n_bytes > MAX_BYTES:
            raise ConfigError(f"{name} needs more than {MAX_BYTES} bytes")
        return PlanRow(name, plane.name, il, device, plane.dtype, length, n_bytes, 0, plane.group)

    def _length(self, plane: str, il: int) -> int:
        """Elements of a plane of layer il; il counts for planes of layers only."""
        ssm, options = self.cfg.ssm or SsmConfig(), self.options
        match plane:
            case "k" | "v":
                return self.max_ctx * self.tok_bytes(il)[plane == "v"] + TAIL_PAD_BYTES
            case "len_d" | "pos_d":
                return 1
            case "health":
                return HEALTH_BYTES
            case "conv_state":
                return ssm.conv_dim * ssm.pad
            case "ssm_state" | "ssm_state_alt":
                return ssm.state_size * ssm.state_size * ssm.time_step_rank
            case "tape":  # per row: x of the convolution, then q, k, v and both gates of the scan
                return options.round_width * (ssm.conv_dim + ssm.time_step_rank * (3 * ssm.state_size + 2))
            case "logits":
                return self.cfg.n_vocab
            case "taps":
                layer_ids, rows = options.reserve_taps or ((), 0)
                return rows * len(layer_ids) * self.cfg.n_embd
        raise AssertionError(plane)

    def _section(self, row: PlanRow) -> int:
        plane = _BY_NAME[row.plane]
        return plane.mtp_section if row.layer is not None and self.is_mtp(row.layer) else plane.section

    def _place(self) -> tuple[tuple[PlanRow, ...], tuple[DevicePlan, ...]]:
        """Offsets and padding rows; the counters of a device are packed, every other plane is aligned."""
        rows: list[PlanRow] = []
        devices: list[DevicePlan] = []
        for device in range(self.n_devices):
            offset, plane_bytes = 0, 0
            first: dict[str, int] = {}  # plane -> where the first of it stands
            mine = sorted((row for row in self.planes if row.device == device), key=self._section)
            for row, following in zip(mine, [*mine[1:], None], strict=True):
                first.setdefault(row.plane, offset)
                rows.append(replace(row, offset=offset))
                offset += row.bytes
                plane_bytes += row.bytes
                packed = row.dtype == "i32" and following is not None and following.dtype == "i32"
                gap = 0 if packed else -offset % ALIGN_BYTES
                if gap:
                    rows.append(PlanRow(f"{row.name}.pad", "pad", row.layer, device, "u8", gap, gap, offset, "padding"))
                    offset += gap
            if offset > MAX_BYTES:
                raise ConfigError(f"the arena of device {device} needs more than {MAX_BYTES} bytes")
            # Where no recurrent layer lives the range is empty.
            begin = first.get("conv_state", offset)
            end = first.get("ssm_state_alt", begin)
            devices.append(DevicePlan(device, plane_bytes, offset, (begin, end)))
        return tuple(rows), tuple(devices)

    # Sums.

    @property
    def plane_bytes(self) -> int:
        """Sum of the planes over all devices: what the seven operations allocate."""
        return sum(device.plane_bytes for device in self.per_device)

    @property
    def arena_bytes(self) -> int:
        """Sum of the arenas over all devices: what one allocation per device asks of the driver."""
        return sum(device.arena_bytes for device in self.per_device)

    @property
    def mtp_bytes(self) -> int:
        """Bytes of planes that belong to trailing MTP layers, which no trunk pass reads."""
        return sum(row.bytes for row in self.planes if row.layer is not None and self.is_mtp(row.layer))

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by purpose; they add up to arena_bytes."""
        names = ("kv", "tail_pad", "recurrent", "double_buffer", "counters", "tape", "logits", "taps", "padding")
        sums = dict.fromkeys(names, 0)
        for row in self.rows:
            pad = TAIL_PAD_BYTES if row.group == "kv" else 0
            sums[row.group] += row.bytes - pad
            sums["tail_pad"] += pad
        return sums

    @property
    def first_use(self) -> dict[str, int]:
        """Bytes that are allocated when first asked for: a snapshot; logits and a tap row unless reserved; scratch.

        The scratch of attention belongs to the devices: all their caches share it.
        """
        later = {"snapshot": sum(device.snapshot_bytes for device in self.per_device)}
        if not self.options.reserve_logits:
            later["logits"] = 4 * self.cfg.n_vocab
        if self.options.reserve_taps is None:
            later["tap_row"] = 4 * self.cfg.n_embd
        later["attend_scratch"] = sum(map(self.attend_scratch_bytes, range(self.n_devices)))
        return later

    def attend_scratch_bytes(self, device: int) -> int:
        """What attention of max_rows rows needs on a device beside the cache; all caches of the device share it."""
        readers = [
            il for il in range(self.cfg.n_layer) if self.device_of(il) == device and self.kv_source(il) is not None
        ]
        return max(
            (attend_part_bytes(self.options.max_rows, self.cfg.heads(il), self.cfg.head_dims(il)[1]) for il in readers),
            default=0,
        )

    def kv_source(self, il: int) -> int | None:
        """The layer whose K/V layer il reads, if it reads any."""
        if self.cfg.layer_kind(il) is not LayerKind.FULL or self._skipped(il):
            return None
        try:
            return self.cfg.kv_source(il)
        except ConfigError:  # every layer borrows, so nobody owns any
            return None

    def check_ops(self) -> list[str]:
        """What no kernel serves in this geometry, one sentence each; empty when every operation can run."""
        problems = []
        cfg, ssm = self.cfg, self.cfg.ssm
        recurrent = ssm is not None and any(self.has_state(il) for il in range(cfg.n_layer))
        if ssm is not None and recurrent and ssm.state_size not in SCAN_STATE_SIZES:
            lacking = f"state_size {ssm.state_size} has no kernel; there are {list(SCAN_STATE_SIZES)}"
            problems.append(f"gdn_prep, gdn_scan and recur_step: {lacking}")
        for il in range(cfg.n_layer):
            source = self.kv_source(il)
            if source is None:
                continue
            for name, dim in zip(("head_dim_k", "head_dim_v"), cfg.head_dims(il), strict=True):
                if dim not in ATTEND_HEAD_DIMS:
                    problems.append(
                        f"attend, layer {il}: {name} {dim} has no kernel; there are {list(ATTEND_HEAD_DIMS)}"
                    )
            gqa, rest = divmod(cfg.heads(il), cfg.kv_heads(source))
            if rest or not 1 <= gqa <= MAX_GQA:
                heads = f"{cfg.heads(il)} query heads over {cfg.kv_heads(source)} K/V heads"
                problems.append(f"attend, layer {il}: {heads}; 1 to {MAX_GQA} query heads each")
            if self.device_of(il) != self.device_of(source):
                problems.append(f"attend, layer {il}: it reads the K/V of layer {source}, which is on another device")
        return problems

    def to_json(self) -> str:
        """The whole plan as a JSON object."""
        return json.dumps(
            {
                "max_ctx": self.max_ctx,
                "policy": asdict(self.policy),
                "options": asdict(self.options),
                "fence": list(self.fence),
                "placement": list(self.placement),
                "plane_bytes": self.plane_bytes,
                "arena_bytes": self.arena_bytes,
                "mtp_bytes": self.mtp_bytes,
                "totals": self.totals,
                "first_use": self.first_use,
                "per_device": [
                    asdict(device)
                    | {
                        "snapshot_bytes": device.snapshot_bytes,
                        "attend_scratch_bytes": self.attend_scratch_bytes(device.device),
                    }
                    for device in self.per_device
                ],
                "rows": [asdict(row) for row in self.rows],
            }
        )
