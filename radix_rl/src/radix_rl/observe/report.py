"""`report.html`: a run on one page that needs no network."""

import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from radix_rl.config.saving import FILE_NAME as CONFIG_FILE
from radix_rl.observe.metrics import FILE_NAME as METRICS_FILE
from radix_rl.observe.metrics import read_metrics
from radix_rl.observe.plots import PLOTS, draw
from radix_rl.observe.summary import read_summary, summarize
from radix_rl.observe.whole_file import write_whole

FILE_NAME = "report.html"


class Card(msgspec.Struct, frozen=True):
    """One headline figure."""

    label: str
    value: str
    note: str = ""


def write_report(run_dir: Path) -> Path:
    """Write the page of a run's directory, also while it runs; its path.

    Takes metrics.jsonl and, where they are, config.toml and summary.json.

    Raises DataError if there are no metrics or they are broken, OSError if the page cannot be written.
    """
    records = read_metrics(run_dir / METRICS_FILE)
    summary = summarize(records) | read_summary(run_dir)
    plots = [(plot, svg) for plot in PLOTS if (svg := draw(plot, records)) is not None]
    html = _template().render(
        title=run_dir.resolve().name,
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        num_steps=int(max((record["step"] for record in records), default=0)),
        cards=headline(summary),
        plots=plots,
        last=_last_values(records),
        summary={name: _number(value) for name, value in summary.items()},
        config=_flat_config(run_dir / CONFIG_FILE),
    )
    return write_whole(run_dir / FILE_NAME, html.encode())


def headline(summary: Mapping[str, Any]) -> list[Card]:
    """Cards for the figures that the summary has."""
    cards: list[Card] = []
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if before is not None and after is not None:
        cards.append(
            Card("Held-out accuracy", f"{before:.1%} → {after:.1%}", f"{100 * (after - before):+.1f} points")
        )
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if not cards and first is not None and last is not None:
        cards.append(Card("Mean reward", f"{first:.3f} → {last:.3f}", "first and last tenth of the steps"))
    for name, label in (("mismatch", "Mean log-probability mismatch"), ("k3", "KL estimate (k3)")):
        with_replay, without = summary.get(f"{name}_with_replay"), summary.get(f"{name}_without_replay")
        if with_replay is not None and without is not None:
            cards.append(
                Card(label, f"{without:.2g} → {with_replay:.2g}", _times(without, with_replay, "with replay"))
            )
    if (disagreement := summary.get("router_disagreement")) is not None:
        cards.append(
            Card("Routers that disagree", f"{disagreement:.1%}", "of token-layers, engine against trainer")
        )
    inline, store = summary.get("response_bytes_inline"), summary.get("response_bytes_store")
    if inline and store and inline != store:
        value = f"{_bytes(inline)} → {_bytes(store)}"
        cards.append(Card("Replay outputs in answers", value, _times(inline, store, "through the store")))
    left = summary.get("objects_left")
    if left or (left is not None and store):
        cards.append(Card("Objects left in the store", f"{left:g}"))
    if (seconds := summary.get("seconds")) is not None:
        cards.append(
            Card("Wall-clock time", f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s")
        )
    return cards


def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("radix_rl.observe", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("report.html.jinja")


def _times(large: float, small: float, how: str) -> str:
    return f"{large / small:.1f} times smaller {how}" if small > 0 else f"nothing left {how}"


def _last_values(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    """(metric, step, value) of the last step that has each metric."""
    found: dict[str, tuple[int, Any]] = {}
    for record in records:
        found |= {name: (record["step"], value) for name, value in record.items() if name != "step"}
    return [(name, int(step), _number(value)) for name, (step, value) in sorted(found.items())]


def _flat_config(path: Path) -> list[tuple[str, str]]:
    """(key path, value) of every setting."""
    if not path.is_file():
        return []
    return list(_flatten("", tomllib.loads(path.read_text(encoding="utf-8"))))


def _flatten(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [
            item
            for key, inner in value.items()
            for item in _flatten(f"{prefix}.{key}" if prefix else key, inner)
        ]
    return [(prefix, msgspec.json.encode(value).decode())]


def _number(value: Any) -> str:
    if value is None:
        return "not finite"
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes any count")
