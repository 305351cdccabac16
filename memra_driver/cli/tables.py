"""What the commands show as tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from memra_driver.plan import CachePlan

out = Console(width=None if sys.stdout.isatty() else 160)  # a file or a pipe has no width to cut to


def show_operations(operations: list[dict[str, Any]], bandwidth: float) -> None:
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


def show_table(title: str, table: tuple[list[str], list[list[str]]]) -> None:
    head, rows = table
    shown = Table(title=title, title_justify="left")
    colours = {"miss": "red", "pass": "green", "aim": "bold green"}
    for i, name in enumerate(head):
        shown.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row), style=colours.get(row[-1]))
    out.print(shown)


def show_plan(model: str, priced: CachePlan) -> None:
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
        _show_stages(priced)
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


def _show_stages(priced: CachePlan) -> None:
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
