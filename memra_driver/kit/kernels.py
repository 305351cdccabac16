"""The operations of a kit: every check of `check` that a port can run, and the vectors of the reference kernels.

A case has the arguments of one kernel by name (attention: those of both its kernels, without the partial sums between
them, which are a port's own affair). A number stands as it is; a string says under which other name the array is; an
array that is absent is a null pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memra_driver import check
from memra_driver.check.args import ALONE, ONE_LAYER, Args, partial_sums, poison
from memra_driver.check.case import Case, single
from memra_driver.errors import KitError
from memra_driver.formats import BLOCK, K_FORMATS, V_FORMATS
from memra_driver.kernels import KERNELS, AttendGeometry, attend_kernel
from memra_driver.kit.files import NAMES, Entry, Kit, Writer, arrays_of, entries_of
from memra_driver.layout import HEALTH_BYTES
from memra_driver.nvrtc import PIPE_ARCH
from memra_driver.plan import ATTEND_GROUPS, ATTEND_HEAD_DIMS, MAX_GQA, SCAN_STATE_SIZES, attend_part_bytes
from memra_driver.reference_common import BY_CODE

FILES = {
    "append_kv": "formats.bin", "dequant_kv": "formats.bin", "conv_update": "conv.bin", "conv_ring_rebuild": "conv.bin",
    "gdn_prep": "gdn.bin", "gdn_scan": "gdn.bin", "attend": "attend.bin",
}  # fmt: skip
SMALL_BYTES = 110_000  # of a case's arrays: what a small kit leaves out is larger, the vectors excepted
MAX_SCRATCH_BYTES = 64 << 20
NULLABLE = {"pos_d", "accept_d", "tape", "health"}  # and the scan's out
GUARD = 3  # elements behind what dequant_kv writes, which stay
INNER = ("part", "pieces", *ALONE, *ONE_LAYER)  # how the work is put into launches, which is everyone's own affair


def kernel_cases(writer: Writer, small: bool) -> Iterator[Entry]:
    """Records what the twins, the oracle of attention and the vectors say of every case."""
    for case in check.cases(small=small):
        op = _op(case.kernel)
        if op not in FILES or case.tables or case.launches[0][1].get("n_layers", 1) > 1:
            continue
        n_bytes = sum(array.nbytes for name, array in case.arrays.items() if name != "part")
        if small and n_bytes > SMALL_BYTES and " vector " not in case.title:
            continue
        yield _entry(writer, op, case)


def _op(kernel: str) -> str:
    return "attend" if kernel.startswith("attend_") and kernel != "attend_combine" else kernel


def _entry(writer: Writer, op: str, case: Case) -> Entry:
    given: Args = {}
    for _, each in reversed(case.launches):
        given |= each
    args = {
        name: value for name, value in given.items() if value is not None and name not in INNER and value != name
    }
    expected = check.by_twins(case)
    arrays = []
    for name, before in case.arrays.items():
        if name == "part":
            continue
        blank = before.tobytes() == poison(before.size, before.dtype).tobytes()
        if not blank:
            arrays.append(writer.array(FILES[op], name, "in", before))
        if name not in case.loose and (blank or expected[name].tobytes() != before.tobytes()):
            after = expected[name].astype(before.dtype, copy=False)
            arrays.append(writer.array(FILES[op], name, "out", after, case.tolerance.get(name, 0.0)))
    return {"id": case.title.replace(case.kernel, op, 1), "op": op, "args": args, "arrays": arrays}


# Back to a check.


def kernel_case(kit: Kit, entry: Entry) -> Case:
    """A case of the kit as a check, after every size was held against its arguments."""
    op, args = entry["op"], entry["args"]
    _check_numbers(entry)
    given, wanted = arrays_of(kit, entry, "in"), arrays_of(kit, entry, "out")
    arrays = {name: poison(array.size, array.dtype) for name, array in wanted.items()} | given
    _check_sizes(entry, arrays)
    for name, array in wanted.items():
        if (array.dtype, array.size) != (arrays[name].dtype, arrays[name].size):
            raise KitError(f"case {entry['id']!r}: {name} is another array before and afterwards")
    for name, value in args.items():
        if isinstance(value, str):
            arrays[name] = arrays[value]  # one piece of memory under two names
    tolerance = {each["name"]: each["tolerance"] for each in entries_of(entry, "out") if each["tolerance"]}
    everything: Args = dict.fromkeys((*NULLABLE, "out")) | args | arrays | ALONE | ONE_LAYER
    if op == "attend":
        everything |= {"part": partial_sums(args["rows"], args["n_head"], args["head_dim_v"]), "pieces": ATTEND_GROUPS}
        if "out" not in wanted:
            everything["out"] = poison(args["rows"] * args["n_head"] * args["head_dim_v"])
        kernel = attend_kernel(PIPE_ARCH, AttendGeometry.of(args), args["rows"] * _gqa(args), ATTEND_GROUPS)
        case = single(entry["id"], kernel, everything)
        behind = single("", "attend_combine", everything)
        case.launches += behind.launches
        case.arrays |= behind.arrays
        case.loose = ("part",) if "out" in wanted else ("part", "out")
    else:
        case = single(entry["id"], op, everything)
    case.title, case.tolerance = entry["id"], tolerance
    case.want = {name: array for name, array in arrays.items() if name in case.arrays} | wanted
    return case


def _gqa(args: Args) -> int:
    return int(args["n_head"] // args["n_head_kv"])


def _check_numbers(entry: Entry) -> None:
    """What the schema cannot say: how the numbers hang together."""
    a, op = entry["args"], entry["op"]
    missing = [name for name in _numbers(op) if not isinstance(a.get(name), int | float)]
    if missing:
        raise KitError(f"case {entry['id']!r} lacks the numbers {', '.join(missing)}")
    faults = []
    if op in ("append_kv", "dequant_kv", "attend"):
        for side, names in zip("kv", (K_FORMATS, V_FORMATS), strict=True):
            fmt = BY_CODE.get(a[f"{side}_format"])
            dim = a["n_head_kv"] * a[f"head_dim_{side}"] if op == "attend" else a[f"kv_dim_{side}"]
            if fmt is None or fmt.name not in names:
                faults.append(f"{side}_format is {a[f'{side}_format']}")
            elif dim % BLOCK or a[f"{side}_tok_bytes"] != dim // BLOCK * fmt.block_bytes:
                faults.append(f"{side}_tok_bytes is {a[f'{side}_tok_bytes']} for {dim} elements of {fmt.name}")
    if op == "attend":
        if a["n_head"] % a["n_head_kv"] or not 1 <= _gqa(a) <= MAX_GQA:
            faults.append(f"{a['n_head']} query heads over {a['n_head_kv']}")
        faults += [f"{each} is {a[each]}" for each in ("head_dim_k", "head_dim_v") if a[each] not in ATTEND_HEAD_DIMS]
        if attend_part_bytes(a["rows"], a["n_head"], a["head_dim_v"]) > MAX_SCRATCH_BYTES:
            faults.append(f"{a['rows']} rows of {a['n_head']} heads need too much scratch")
    if op in ("gdn_prep", "gdn_scan") and a["state_size"] not in SCAN_STATE_SIZES:
        faults.append(f"state_size is {a['state_size']}")
    if faults:
        raise KitError(f"case {entry['id']!r}: {'; '.join(faults)}")


def _numbers(op: str) -> list[str]:
    """The parameters of an operation that are numbers."""
    kernels = ("attend_64", "attend_combine") if op == "attend" else (op,)
    pairs = {pair for kernel in kernels for pair in KERNELS[kernel].params}
    return sorted(name for kind, name in pairs if "*" not in kind and name not in INNER)


def _check_sizes(entry: Entry, arrays: dict[str, Any]) -> None:
    """Every array has the type and the number of elements that the operation works on."""
    a, op = entry["args"], entry["op"]
    sizes = SIZES[op](a)
    optional = NULLABLE | ({"out"} if op in ("gdn_scan", "attend") else set())
    aliases = [name for name, value in a.items() if isinstance(value, str)]
    unknown = [name for name in (*arrays, *aliases) if name not in sizes]
    unknown += [name for name in arrays if name in aliases]
    if unknown:
        raise KitError(f"case {entry['id']!r}: {unknown[0]!r} is nothing that {op} takes")
    for name, (kind, count) in sizes.items():
        array = arrays.get(a[name] if name in aliases else name)
        if array is None:
            if name not in optional:
                raise KitError(f"case {entry['id']!r} lacks the array {name!r}")
        elif (NAMES[array.dtype], array.size) != (kind, count):
            raise KitError(
                f"case {entry['id']!r}: {name} has {array.size} elements of {NAMES[array.dtype]};"
                f" {op} with these arguments takes {count} of {kind}"
            )


_NOTED = {"health": ("u8", HEALTH_BYTES), "pos_d": ("i32", 1)}


def _append_sizes(a: Args) -> dict[str, tuple[str, int]]:
    rows = {f"{side}_rows": ("f32", a["rows"] * a[f"kv_dim_{side}"]) for side in "kv"}
    planes = {side: ("u8", a["max_ctx"] * a[f"{side}_tok_bytes"] + 8) for side in "kv"}
    return rows | planes | {"len_d": ("i32", 1)} | _NOTED


def _dequant_sizes(a: Args) -> dict[str, tuple[str, int]]:
    kind = "u16" if a["out_bf16"] else "f32"
    outs = {f"{side}_out": (kind, a["rows"] * a[f"kv_dim_{side}"] + GUARD) for side in "kv"}
    planes = {side: ("u8", a["max_ctx"] * a[f"{side}_tok_bytes"] + 8) for side in "kv"}
    return outs | planes | {"health": _NOTED["health"]}


def _conv_sizes(a: Args) -> dict[str, tuple[str, int]]:
    rows = ("f32", a["rows"] * a["conv_dim"])
    weights = {"w": ("f32", a["conv_dim"] * a["d_conv"]), "conv_state": ("f32", a["conv_dim"] * (a["d_conv"] - 1))}
    return {"x": rows, "out": rows, "tape": rows} | weights | _NOTED


def _rebuild_sizes(a: Args) -> dict[str, tuple[str, int]]:
    ring = ("f32", a["conv_dim"] * (a["d_conv"] - 1))
    rows = {"x": ("f32", a["rows"] * a["conv_dim"]), "accept_d": ("i32", 1), "health": _NOTED["health"]}
    return rows | {"ring_old": ring, "conv_state": ring}


def _prep_sizes(a: Args) -> dict[str, tuple[str, int]]:
    rows, heads, size = a["rows"], a["num_v"], a["state_size"]
    vectors = dict.fromkeys("qkv", ("f32", rows * heads * size))
    gates = dict.fromkeys(("alpha", "beta_raw", "g_log", "beta"), ("f32", rows * heads))
    weights = dict.fromkeys(("dt_bias", "a"), ("f32", heads))
    return vectors | gates | weights | {"conv_out": ("f32", rows * (2 * a["num_k"] + heads) * size)} | _NOTED


def _scan_sizes(a: Args) -> dict[str, tuple[str, int]]:
    rows, heads, size = a["rows"], a["num_v"], a["state_size"]
    vectors = dict.fromkeys(("q", "k", "v", "out"), ("f32", rows * heads * size))
    gates = dict.fromkeys(("g_log", "beta"), ("f32", rows * heads))
    states = dict.fromkeys(("state_in", "state_out"), ("f32", heads * size * size))
    others = {"tape": ("f32", rows * heads * (3 * size + 2)), "accept_d": ("i32", 1), "health": _NOTED["health"]}
    return vectors | gates | states | others


def _attend_sizes(a: Args) -> dict[str, tuple[str, int]]:
    queries = {"q": ("f32", a["rows"] * a["n_head"] * a["head_dim_k"])}
    outs = {"out": ("f32", a["rows"] * a["n_head"] * a["head_dim_v"])}
    planes = {side: ("u8", a["max_ctx"] * a[f"{side}_tok_bytes"]) for side in "kv"}
    return queries | outs | planes | _NOTED


SIZES: dict[str, Callable[[Args], dict[str, tuple[str, int]]]] = {
    "append_kv": _append_sizes, "dequant_kv": _dequant_sizes, "conv_update": _conv_sizes,
    "conv_ring_rebuild": _rebuild_sizes, "gdn_prep": _prep_sizes, "gdn_scan": _scan_sizes, "attend": _attend_sizes,
}  # fmt: skip
