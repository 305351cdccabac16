"""The `memra-driver` command: info, plan, run, check, bench, vectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memra_driver.errors import ConfigError, DriverError, MemraError

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as missing:
    raise ImportError(f"the command line needs {missing.name}: pip install typer rich") from None

from memra_driver.cli import vectors
from memra_driver.cli.devices import device_name, fence_of, opened, opener, stages_of
from memra_driver.cli.soak import soak as run_soak
from memra_driver.cli.tables import out, show_operations, show_plan, show_table

if TYPE_CHECKING:
    from memra_driver.config import ModelConfig
    from memra_driver.session import Outcome, Session

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(vectors.app, name="vectors")

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
    cuts = fence_of(fence, cfg, stages) or balance(cfg, ctx, stages, options=options)
    priced = CachePlan(cfg, ctx, options=options, fence=cuts)
    if png is not None:
        plan_png(png, model, cfg, ctx, priced.policy, priced.options)
    if as_json:
        print(priced.to_json())
        return
    show_plan(model, priced)


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
    with stages_of(stages or device) as devices:
        session = Session(devices, cfg, ctx, fence=fence_of(fence, cfg, len(devices)), **options)
        try:
            done = _watch(session, f"{model} on {', '.join(map(repr, session.devices))}", quiet=as_json)
            bandwidth = copy_bandwidth(devices[0])
            operations = session.times.table(bandwidth)
            cache_bytes = session.caches[0].report()["cache_bytes"]
            cuts = session.caches[0].plan.fence
        finally:
            session.close()
        where = ", ".join(map(device_name, devices))
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
        show_operations(operations, bandwidth)
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
        if soak == 0:
            raise ConfigError("--soak 0 runs nothing: give it minutes, 0.5 say")
        status = run_soak(opener(device), soak, soak_seed, seed, small=small, as_json=as_json)
        raise typer.Exit(status)
    from memra_driver import check as checks
    from memra_driver import nvrtc

    seed = seed or 0
    done = []
    try:
        with opened(device, arena=False) as e:
            where = device_name(e)
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
        with opened(device) as e:
            result = benches.run(e, groups=groups, sizes=QUICK if quick else FULL, peers=peers, tell=tell)
    if as_json is not None:
        report.write(as_json, result)
    for group in groups:
        rows = [row for row in report.rows_of(result) if row.group == group]
        if rows:
            show_table(group, report.measured(rows))
    show_table("targets", report.verdicts([each for each in result["targets"] if each["group"] in groups]))
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


