"""The picture of a plan: what fills the memory as the context grows."""

from __future__ import annotations

from pathlib import Path

from memra_driver.config import ModelConfig
from memra_driver.errors import ConfigError
from memra_driver.formats import FormatPolicy
from memra_driver.plan import CacheOptions, CachePlan

POINTS = 33
LABELS = {
    "kv": "K/V",
    "recurrent": "recurrent state",
    "double_buffer": "its double buffer",
    "tape": "tape of a round",
    "logits": "parked logits",
    "taps": "taps",
    "other": "counters, tail pads, padding",
}
MIB = 1 << 20


def plan_png(
    path: Path, name: str, cfg: ModelConfig, max_ctx: int, policy: FormatPolicy, options: CacheOptions
) -> None:
    """Writes a stacked area of the cache's bytes over the context, 0 .. max_ctx tokens, to a PNG file."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from None

    contexts = sorted({max_ctx * i // (POINTS - 1) for i in range(POINTS)})
    totals = [CachePlan(cfg, ctx, policy, options).totals for ctx in contexts]
    series = {group: [float(t[group]) / MIB for t in totals] for group in LABELS if group != "other"}
    named = set(series)
    series["other"] = [sum(size for group, size in t.items() if group not in named) / MIB for t in totals]
    series = {group: sizes for group, sizes in series.items() if any(sizes)}

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.stackplot(contexts, list(series.values()), labels=[LABELS[group] for group in series])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("cache, MiB")
    title = f"{name}: {sum(totals[-1].values()) / MIB:,.1f} MiB at {max_ctx:,} tokens"
    axes.set_title(title, parse_math=False)  # a file's name is no formula
    axes.margins(0, 0.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.tight_layout()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
