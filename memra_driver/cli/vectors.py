"""The `memra-driver vectors` commands: the conformance kit for ports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The conformance kit for ports: export, verify, compare.")

Kit = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a kit.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
    small: Annotated[bool, typer.Option("--small", help="A few MB: the small shapes only.")] = False,
) -> None:
    """Write a kit: SPEC.md, what a porter must know, and a manifest with raw arrays, what a port must reproduce."""
    from memra_driver.kit import export as write

    count = write(folder, small=small)
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{count} cases, {n_bytes:,} bytes in {folder}; begin with {folder / 'SPEC.md'}")


@app.command()
def verify(
    folder: Kit, device: Annotated[str, typer.Option(help="auto, cuda:N or host.")] = "auto", as_json: Json = False
) -> None:
    """Run every case of a kit on this installation; status 1 where one differs."""
    from memra_driver.cli.devices import device_name, opened
    from memra_driver.kit import verify as run

    done = []
    with opened(device) as e:
        where = device_name(e)
        for each in run(e, folder):
            done.append(each)
            if not as_json and each.fault:
                print(each.line(), flush=True)
    failed = sum(1 for each in done if each.fault)
    if as_json:
        results = [each.as_json() for each in done]
        print(json.dumps({"device": where, "checks": len(done), "failed": failed, "results": results}, indent=2))
    else:
        print(f"{failed} of {len(done)} cases DIFFER on {where}" if failed else f"ALL GREEN ({len(done)} cases)")
    if failed:
        raise typer.Exit(1)


@app.command()
def compare(first: Kit, second: Kit) -> None:
    """Say where two kits differ first, in words; status 1 where they do."""
    from memra_driver.kit import compare as difference

    fault = difference(first, second)
    print(fault or "the kits say the same")
    if fault:
        raise typer.Exit(1)
