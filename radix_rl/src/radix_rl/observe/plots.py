"""The report's plots, as SVG text that refers to nothing outside itself."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib
import matplotlib.figure
import matplotlib.ticker
import msgspec

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#9aa3ad",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelcolor": "#3b444d",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 0,
    "font.size": 9,
    "grid.color": "#e6e9ed",
    "legend.frameon": False,
    "svg.hashsalt": "radix-rl",
    "text.color": "#3b444d",
    "xtick.color": "#6b7580",
    "ytick.color": "#6b7580",
}
_COLORS = ("#2563a8", "#d9773b", "#3f9a63", "#8a5fb0", "#b8a13a", "#7a8691")

_CSS_NAMES = {
    "#9aa3ad": "--plot-edge",
    "#3b444d": "--plot-text",
    "#e6e9ed": "--plot-grid",
    "#6b7580": "--plot-tick",
} | {color: f"--plot-series-{number}" for number, color in enumerate(_COLORS, start=1)}
"""Variable by which the page may change a colour, as for dark mode."""


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """What one plot shows of the metrics."""

    title: str
    note: str
    """One sentence: what a reader sees in it."""
    unit: str
    series: tuple[tuple[str, str], ...]
    """(metric, label)."""
    kind: Literal["lines", "stacked"] = "lines"
    log_scale: bool = False
    if_not_zero: bool = False
    """Left out where every value is 0: a run without replay has no bytes of it."""


PLOTS = (
    Plot(
        title="Reward",
        note="Mean reward of the sampled answers, and accuracy on held-out problems where it was measured.",
        unit="reward",
        series=(("rollout/reward_mean", "training samples"), ("eval/accuracy", "held-out accuracy")),
    ),
    Plot(
        title="Response length",
        note="Tokens that the policy sampled for an answer.",
        unit="tokens",
        series=(("rollout/response_tokens_mean", "mean"), ("rollout/response_tokens_max", "longest")),
    ),
    Plot(
        title="Log-probability mismatch, rollout against trainer",
        note="Mean absolute difference over response tokens, with the recorded routing and without it.",
        unit="nats a token",
        series=(
            ("mismatch/mean_abs_without_replay", "without replay"),
            ("mismatch/mean_abs_with_replay", "with replay"),
        ),
        log_scale=True,
    ),
    Plot(
        title="KL estimate (k3), rollout against trainer",
        note="Mean of exp(d) - 1 - d over response tokens; d is trainer minus rollout.",
        unit="nats a token",
        series=(("mismatch/k3_without_replay", "without replay"), ("mismatch/k3_with_replay", "with replay")),
        log_scale=True,
    ),
    Plot(
        title="Bytes of replay outputs in the answers",
        note="What the same outputs take inline as base64, and the references that travel in their place.",
        unit="bytes a step",
        series=(
            ("rollout/response_bytes_inline", "inline"),
            ("rollout/response_bytes_store", "through the store"),
        ),
        log_scale=True,
        if_not_zero=True,
    ),
    Plot(
        title="Seconds per phase",
        note="Wall-clock time of a step's phases, one on top of the other.",
        unit="s",
        series=(
            ("time/generate_s", "generate"),
            ("time/read_s", "read replay outputs"),
            ("time/train_s", "train"),
            ("time/sync_s", "sync weights"),
            ("time/eval_s", "evaluate"),
            ("time/checkpoint_s", "checkpoint"),
        ),
        kind="stacked",
    ),
    Plot(
        title="Loss",
        note="Policy loss of the step.",
        unit="loss",
        series=(("train/loss", "loss"),),
    ),
    Plot(
        title="Gradient norm",
        note="Before clipping.",
        unit="norm",
        series=(("train/grad_norm", "gradient norm"),),
    ),
)


def draw(plot: Plot, records: Sequence[Mapping[str, Any]]) -> str | None:
    """`<svg>` of the plot; None if there is nothing to show."""
    series = [(label, _points(records, metric)) for metric, label in plot.series]
    series = [(label, points) for label, points in series if points]
    is_zero = not any(value for _, points in series for value in points.values())
    if not series or (plot.if_not_zero and is_zero):
        return None
    with matplotlib.rc_context(_STYLE):
        figure = matplotlib.figure.Figure(figsize=(5.6, 2.9), layout="constrained")
        axes = figure.add_subplot()
        if plot.kind == "stacked":
            _draw_stacked(axes, series)
        else:
            _draw_lines(axes, series)
        if plot.log_scale and all(value > 0 for _, points in series for value in points.values()):
            axes.set_yscale("log")
        elif min(value for _, points in series for value in points.values()) >= 0:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel(plot.unit)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        if len(plot.series) > 1:
            # Also for the only one of several that was measured. Above the plot, where it hides nothing.
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(series), 3), fontsize=8)
        return _svg(figure, plot.title)


def _points(records: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    return {
        record["step"]: record[metric]
        for record in records
        if record.get(metric) is not None and math.isfinite(record[metric])
    }


def _draw_lines(axes: Any, series: Sequence[tuple[str, dict[int, float]]]) -> None:
    """Many points: the values pale, their running mean over them. Few: points joined by a line."""
    for (label, points), color in zip(series, _COLORS, strict=False):
        steps, values = list(points), list(points.values())
        if len(values) < 20:
            axes.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.6, label=label)
            continue
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9)
        axes.plot(steps, _running_mean(values), color=color, linewidth=1.8, label=label)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Exponential, over about a tenth of the run."""
    weight = 1 / max(2.0, len(values) / 10)
    means: list[float] = []
    for value in values:
        means.append(value if not means else means[-1] + weight * (value - means[-1]))
    return means


def _draw_stacked(axes: Any, series: Sequence[tuple[str, dict[int, float]]]) -> None:
    """A bar a step; a phase that a step lacks took no time."""
    steps = sorted({step for _, points in series for step in points})
    bottom = [0.0] * len(steps)
    for (label, points), color in zip(series, _COLORS, strict=False):
        values = [points.get(step, 0.0) for step in steps]
        axes.bar(steps, values, bottom=bottom, color=color, width=1.0, label=label, linewidth=0)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]


def _svg(figure: matplotlib.figure.Figure, title: str) -> str:
    """Without XML prolog, document type and metadata, which have no place inside HTML."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for color, name in _CSS_NAMES.items():
        svg = svg.replace(color, f"var({name}, {color})")
    # The plot takes the width of its card; its own size in points would not shrink on a narrow screen.
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*"', rf'<svg role="img" aria-label="{title}" \1width="100%"', svg, count=1
    )
