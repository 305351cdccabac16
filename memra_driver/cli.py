"""The `memra-driver` command: info, plan, run, check, bench, vectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memra_driver.errors import ConfigError, DriverError, MemraError

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as missing:
    raise ImportError(f"the command line needs {missing.name}: pip install typer rich") from None

from memra_driver import cli_soak, cli_vectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memra_driver.config import ModelConfig
    from memra_driver.plan import CachePlan
    from memra_driver.session import Outcome, Session

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(cli_vectors.app, name="vectors")
out = Console(width=None if sys.stdout.isatty() else 160)  # a file or a pipe has no width to cut to

MODEL_HELP = "A preset, a GGUF file, an HF config.json or its folder."
DEFAULT_MODEL = "qwen3.5-9b"


class Method(StrEnum):
    """How a round ends: by rolling back to a snapshot and replaying, or as a transaction without copies."""

    rollback = "rollback"
    round = "round"


Device = Annotated[str, typer.Option(help="auto, cuda:N or host.")]
Fence = Annotated[str, typer.Option(help="auto, or the first layer of each stage but the first: c1,c2,..")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback()
def _about() -> None:
    """The per-sequence cache of hybrid language models on the CUDA driver API.

    For builds of C programs: --cflags, --libs, --cubins ARCH.
    """


@app.command()
def info(as_json: Json = False) -> None:
    """Driver, GPUs, compiler, where the kernels come from, what is missing and how to get it."""
    from memra_driver.inventory import inventory

    found = inventory()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        lines = value if isinstance(value, list) else [value or "none"]
        for line in lines or ["none"]:
            print(f"{key.replace('_', ' '):<18}{line}")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    ctx: Annotated[int, typer.Option(help="Capacity in tokens.")],
    as_json: Json = False,
    png: Annotated[Path | None, typer.Option(help="Also draw what fills the memory as the context grows.")] = None,
    skip_mtp_state: Annotated[bool, typer.Option(help="Plan no state for trailing MTP layers.")] = False,
    round_width: Annotated[int, typer.Option(help="Widest round to plan a tape for.")] = 0,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages, each on a device of its own.")] = 1,
    fence: Fence = "auto",
) -> None:
    """Every byte of a cache before it exists, per plane and device. Formats follow MEMRA_KV_K and its kin."""
    from memra_driver.chart import plan_png
    from memra_driver.plan import CacheOptions, CachePlan
    from memra_driver.pp import balance

    cfg = _model(model)
    options = CacheOptions(skip_mtp_state=skip_mtp_state, round_width=round_width)
    cuts = _fence(fence, cfg, stages) or balance(cfg, ctx, stages, options=options)
    priced = CachePlan(cfg, ctx, options=options, fence=cuts)
    if png is not None:
        plan_png(png, model, cfg, ctx, priced.policy, priced.options)
    if as_json:
        print(priced.to_json())
        return
    _print_plan(model, priced)


@app.command()
def run(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    ctx: Annotated[int, typer.Option(help="Capacity in tokens.")] = 1024,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of the prompt.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Speculative rounds.")] = 8,
    draft: Annotated[int, typer.Option(min=0, help="Drafted tokens a round; draft + 1 rows are verified.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs and the accept counts.")] = 0,
    attend: Annotated[bool, typer.Option(help="Attend in every attention layer.")] = True,
    method: Annotated[Method, typer.Option(help="Snapshot, roll back and replay; or a round.")] = Method.rollback,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that step together; each prompt is a token longer.")] = 1,
    graph: Annotated[bool, typer.Option("--graph", help="Record the step or round once, then launch it.")] = False,
    device: Device = "auto",
    stages: Annotated[str, typer.Option(help="Pipeline stages instead of a device: cuda:0,cuda:1,..")] = "",
    fence: Fence = "auto",
    as_json: Json = False,
) -> None:
    """A speculative session over the cache of MODEL, each round checked bit for bit against plain decoding."""
    from memra_driver.session import Session
    from memra_driver.session.times import copy_bandwidth

    cfg = _model(model)
    options: dict[str, Any] = {
        "prompt": prompt, "rounds": rounds, "draft": draft, "seed": seed, "attend": attend, "method": method.value,
        "batch": batch, "graph": graph,
    }  # fmt: skip
    with _stages(stages or device) as devices:
        session = Session(devices, cfg, ctx, fence=_fence(fence, cfg, len(devices)), **options)
        try:
            done = _watch(session, f"{model} on {', '.join(map(repr, session.devices))}", quiet=as_json)
            bandwidth = copy_bandwidth(devices[0])
            operations = session.times.table(bandwidth)
            cache_bytes = session.caches[0].report()["cache_bytes"]
            cuts = session.caches[0].plan.fence
        finally:
            session.close()
        where = ", ".join(map(_device_name, devices))
    identical = sum(1 for each in done if each.number and not each.fault)
    fault = next((each for each in done if each.fault), None)
    if as_json:
        summary = {
            "model": model, "device": where, "fence": cuts, "max_ctx": ctx, "options": options,
            "cache_bytes": cache_bytes,
            "rounds": rounds, "identical": identical,
            "fault": f"round {fault.number}: {fault.fault}" if fault else None,
            "copy_bytes_per_second": bandwidth, "operations": operations,
            "history": [line for each in done for line in _history(each)],
        }  # fmt: skip
        print(json.dumps(summary, indent=2))
    else:
        _print_operations(operations, bandwidth)
        out.print(
            f"{model}, {ctx} tokens, {cache_bytes / 2**20:,.1f} MiB a cache, {where}", highlight=False, markup=False
        )
        if fault is not None:
            out.print(f"[red]round {fault.number} differs: {escape(fault.fault)}[/]", highlight=False)
        out.print(f"[bold]{identical}/{rounds} rounds bit-identical[/]", highlight=False)
    if fault is not None:
        raise typer.Exit(1)


def _history(done: Outcome) -> list[dict[str, Any]]:
    """One entry per sequence; none of a round that broke off."""
    ends = enumerate(zip(done.accepted, done.pos, done.digests, strict=False))
    return [
        {"round": done.number, "sequence": b, "accepted": accepted, "pos": pos, "digest": digest}
        for b, (accepted, pos, digest) in ends
    ]


@app.command()
def check(
    device: Device = "auto",
    small: Annotated[bool, typer.Option("--small", help="Small shapes only: for a sanitizer, or a CPU.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the inputs; of the first program of a soak.")] = None,
    save: Annotated[Path, typer.Option(help="Where the first input that fails is written.")] = Path("check-failed.npz"),
    replay: Annotated[Path | None, typer.Option(help="Run one saved input again instead.")] = None,
    soak: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="MINUTES", help="Instead: random programs of whole caches against plain decoding, so long."
        ),
    ] = None,
    soak_seed: Annotated[
        int | None, typer.Option(min=0, metavar="SEED", help="Instead: the one program of a soak with this seed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Every kernel, every format and a list of shapes: whether this device leaves the right bytes.

    With --soak MINUTES (1.5 is fine) random programs run on random models instead: caches
    that are born and closed, steps, graphs, rounds, rollbacks and batches on two threads.
    Each call must do, or refuse, what is foreseen, and leave the bytes of plain decoding.
    What is found is told with the seed that --soak-seed takes to run that program alone;
    --seed is that of the first program, drawn if it is not given. Ctrl-C ends it with the
    report so far. Under 1 GB on the device, so it may run beside other work.

    Exit status: 0 nothing was found, 1 something was, 130 it was interrupted before.
    """
    if soak is not None or soak_seed is not None:
        if replay is not None:
            raise ConfigError("--soak and --soak-seed do not go with --replay")
        status = cli_soak.soak(_opener(device), soak, soak_seed, seed, small=small, as_json=as_json)
        raise typer.Exit(status)
    from memra_driver import check as checks
    from memra_driver import nvrtc

    seed = seed or 0
    done = []
    try:
        with _device(device, arena=False) as e:
            where = _device_name(e)
            found = iter([checks.replay(e, replay)]) if replay else checks.run(e, checks.cases(seed, small=small), save)
            for each in found:
                done.append(each)
                if not as_json:
                    print(each.line(), flush=True)
    except DriverError:
        if not any(each.fault for each in done):
            raise  # else the check is the news, not that the device it broke cannot be closed
    failed = [each for each in done if each.fault]
    kept = str(replay or save) if failed else None
    if as_json:
        summary = {
            "device": where, "kernel_sources": nvrtc.sources_hash(), "seed": seed, "small": small, "checks": len(done),
            "failed": len(failed), "input": kept, "results": [each.as_json() for each in done],
        }  # fmt: skip
        print(json.dumps(summary, indent=2))
    elif failed:
        print(f"{len(failed)} of {len(done)} checks FAILED on {where}; memra-driver check --replay {kept}")
    else:
        print(f"ALL GREEN ({len(done)} checks)")
    if failed:
        raise typer.Exit(1)


@app.command()
def bench(
    what: Annotated[
        list[str] | None,
        typer.Option(help="snapshot, append, attend, scan, recur, step, host, load; repeat, or commas. Default: all."),
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the results to a file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the share of the ceiling over the size.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also torch, flash-linear-attention and CuPy.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and launches.")] = False,
    read: Annotated[Path | None, typer.Option(help="Show this file of results instead of measuring.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Say what moved by more than 10 % between two files of results.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda:N.")] = "cuda:0",
) -> None:
    """Every operation of the cache on a GPU, beside what its memory can do, against what is asked of it."""
    from memra_driver import bench as benches
    from memra_driver.bench import report
    from memra_driver.bench.rows import FULL, QUICK

    if compare is not None:
        print("\n".join(report.compared(*map(report.read, compare))))
        return
    groups = benches.chosen(what or [])
    if read is not None:
        result = report.read(read)
    else:
        if not device.startswith("cuda"):
            raise ConfigError(f"--device {device}: the bench measures a GPU, cuda:N")
        tell = lambda group: print(f"memra-driver: {group}", file=sys.stderr, flush=True)  # noqa: E731
        with _device(device) as e:
            result = benches.run(e, groups=groups, sizes=QUICK if quick else FULL, peers=peers, tell=tell)
    if as_json is not None:
        report.write(as_json, result)
    for group in groups:
        rows = [row for row in report.rows_of(result) if row.group == group]
        if rows:
            _print_table(group, report.measured(rows))
    _print_table("targets", report.verdicts([each for each in result["targets"] if each["group"] in groups]))
    for line in (*report.heading(result), report.summary(result["targets"])):
        out.print(line, highlight=False, markup=False)
    if png is not None:
        report.picture(png, result)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0; 1 a round or check differed; 2 it could not be done."""
    try:
        app(args=None if argv is None else list(argv), prog_name="memra-driver")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except MemraError as error:
        print(f"memra-driver: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # standard output, as every file of ours is named in a MemraError
        print(f"memra-driver: {error.strerror or error}", file=sys.stderr)
        return 2
    except ImportError as error:  # of what a command needs and `info` does without
        print(f"memra-driver: {error}: pip install {(error.name or '').partition('.')[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _model(name: str) -> ModelConfig:
    from memra_driver.config import ModelConfig

    return ModelConfig.load(name)


def _opener(name: str) -> Callable[[bool], Any]:
    """What makes device objects, with an arena or without, of the device that --device names."""
    from memra_driver.kvdev import CudaDev, HostDev

    kind, _, number = name.partition(":")
    ordinal = int(number or 0) if kind == "cuda" and (number.isdecimal() or name == "cuda") else None
    if name == "auto":
        ordinal = _first_gpu()
    elif name != "host" and ordinal is None:
        raise ConfigError(f"--device {name}: it takes auto, cuda:N or host")
    if ordinal is None:
        return lambda arena: HostDev(arena=arena)
    return lambda arena: CudaDev(ordinal, arena=arena)


@contextmanager
def _device(name: str, *, arena: bool = True) -> Iterator[Any]:
    """The device that --device names; auto is the first GPU that can be used, else the host."""
    e = _opener(name)(arena)
    try:
        yield e
    finally:
        e.close()


def _first_gpu() -> int | None:
    """The number of the first GPU that can be used; None, when it has said why, where there is none."""
    from memra_driver import driver
    from memra_driver.inventory import usable_gpu
    from memra_driver.kvdev import CudaDev

    trouble = usable_gpu()
    for ordinal in range(0 if trouble else driver.device_get_count()):
        try:
            CudaDev(ordinal).close()
        except MemraError as error:
            print(f"memra-driver: without cuda:{ordinal}: {error}", file=sys.stderr)
        else:
            return ordinal
    print(f"memra-driver: on the host{': ' if trouble else ''}{trouble}", file=sys.stderr)
    return None


@contextmanager
def _stages(names: str) -> Iterator[list[Any]]:
    """The device of each stage. A GPU is one device however often it is named; each host is one of its own."""
    with ExitStack() as opened:
        devices: list[Any] = []
        found: dict[str, Any] = {}
        for name in names.split(","):
            name = name.strip()
            name = "cuda:0" if name == "cuda" else name
            if name not in found or name == "host":
                found[name] = opened.enter_context(_device(name))
            devices.append(found[name])
        yield devices


def _fence(cuts: str, cfg: ModelConfig, stages: int) -> tuple[int, ...] | None:
    """What --fence says: auto is MEMRA_PP_STAGES and its kin where they ask for as many stages, else None: balance."""
    from memra_driver.pp import pp_cuts

    if cuts == "auto":
        asked = pp_cuts(cfg.n_trunk) if stages > 1 else None
        return asked if asked is not None and len(asked) == stages + 1 else None
    numbers = [part.strip() for part in cuts.split(",")]
    if len(numbers) != stages - 1 or not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--fence {cuts}: {stages} stages take auto or {stages - 1} layer numbers")
    return (0, *map(int, numbers), cfg.n_layer)


def _device_name(e: Any) -> str:
    from memra_driver.kvdev import CudaDev

    return f"cuda:{e.ordinal} ({e.context.name()})" if isinstance(e, CudaDev) else "host"


def _watch(session: Session, title: str, *, quiet: bool) -> list[Outcome]:
    """Runs the session under a progress bar, which only a terminal shows."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())
    done = []
    with progress:
        task = progress.add_task(title, total=session.rounds + 1)
        for each in session.run():
            done.append(each)
            progress.advance(task)
    return done


def _print_operations(operations: list[dict[str, Any]], bandwidth: float) -> None:
    caption = f"bytes: what a call must move; a copy in this run: {bandwidth / 1e9:,.1f} GB/s, read + write"
    table = Table(caption=caption, caption_justify="left")
    table.add_column("operation")
    for name in ("count", "median us", "bytes", "GB/s", "of a copy"):
        table.add_column(name, justify="right", overflow="fold")
    for row in operations:
        table.add_row(
            row["operation"],
            str(row["count"]),
            f"{row['median_seconds'] * 1e6:,.1f}",
            f"{row['median_bytes']:,}",
            f"{row['copy_share'] * bandwidth / 1e9:,.1f}" if row["median_bytes"] else "-",
            f"{row['copy_share']:.1%}" if row["median_bytes"] else "-",
        )
    out.print(table)


def _print_table(title: str, table: tuple[list[str], list[list[str]]]) -> None:
    head, rows = table
    shown = Table(title=title, title_justify="left")
    colours = {"miss": "red", "pass": "green", "aim": "bold green"}
    for i, name in enumerate(head):
        shown.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row), style=colours.get(row[-1]))
    out.print(shown)


def _print_plan(model: str, priced: CachePlan) -> None:
    table = Table(title=f"{escape(model)} at {priced.max_ctx:,} tokens", title_justify="left")
    for name in ("device", "plane"):
        table.add_column(name)
    for name in ("count", "bytes each", "bytes", "share"):
        table.add_column(name, justify="right", overflow="fold")
    planes: dict[tuple[int, str], list[int]] = {}
    for row in sorted(priced.rows, key=lambda row: (row.device, row.plane == "pad")):
        planes.setdefault((row.device, row.plane), []).append(row.bytes)
    for (device, plane), sizes in planes.items():
        each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} .. {max(sizes):,}"
        share = sum(sizes) / priced.arena_bytes
        table.add_row(str(device), plane, str(len(sizes)), each, f"{sum(sizes):,}", f"{share:.2%}")
    out.print(table)
    if len(priced.fence) > 2:
        _print_stages(priced)
    sums = Table(show_header=False, box=None, pad_edge=False)
    sums.add_column()
    sums.add_column(justify="right", overflow="fold")
    for name, size in priced.totals.items():
        if size:
            sums.add_row(name.replace("_", " "), f"{size:,}")
    sums.add_row("[bold]allocated[/]", f"[bold]{priced.arena_bytes:,}[/]")
    if priced.mtp_bytes:
        sums.add_row("of it for MTP layers, which no trunk pass reads", f"{priced.mtp_bytes:,}")
    for name, size in priced.first_use.items():
        sums.add_row(f"later, when first used: {name.replace('_', ' ')}", f"{size:,}")
    out.print(sums)
    for problem in priced.check_ops():
        out.print(f"[yellow]{problem}[/]", highlight=False)


def _print_stages(priced: CachePlan) -> None:
    """What each device of a pipeline holds."""
    table = Table(caption="snapshot, scratch: allocated when first used", caption_justify="left")
    table.add_column("stage")
    for name in ("layers", "attention", "recurrent", "cache bytes", "share", "snapshot", "scratch"):
        table.add_column(name, justify="right", overflow="fold")
    for device in priced.per_device:
        mine = [il for il in range(priced.cfg.n_layer) if priced.device_of(il) == device.device]
        table.add_row(
            str(device.device),
            f"{mine[0]} .. {mine[-1]}",
            str(sum(map(priced.has_kv, mine))),
            str(sum(map(priced.has_state, mine))),
            f"{device.arena_bytes:,}",
            f"{device.arena_bytes / priced.arena_bytes:.2%}",
            f"{device.snapshot_bytes:,}",
            f"{priced.attend_scratch_bytes(device.device):,}",
        )
    out.print(table)
