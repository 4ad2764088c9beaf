"""`summary.json`: the figures of a finished run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from radix_rl.observe.whole_file import write_whole

FILE_NAME = "summary.json"

Record = Mapping[str, Any]
"""One step's metrics, as `read_metrics` gives them."""

_COMPARED = {
    "mismatch_with_replay": "mismatch/mean_abs_with_replay",
    "mismatch_without_replay": "mismatch/mean_abs_without_replay",
    "k3_with_replay": "mismatch/k3_with_replay",
    "k3_without_replay": "mismatch/k3_without_replay",
}


def summarize(records: Sequence[Record]) -> dict[str, float]:
    """What a run's metrics come to; a figure that was never measured is left out.

    `reward_first` and `reward_last` are means over the first and the last tenth of the steps. Gaps are means
    over the steps that measured both sides, so that with and without replay are compared on the same samples.
    Bytes are sums over all steps, for the replay part of the answers.
    """
    accuracy, reward = _values(records, "eval/accuracy"), _values(records, "rollout/reward_mean")
    summary: dict[str, float] = {"steps": float(max((record["step"] for record in records), default=0))}
    if accuracy:
        summary |= {"accuracy_before": accuracy[0], "accuracy_after": accuracy[-1]}
    if reward:
        # Over a tenth of the run: the reward of a single step says little.
        part = max(1, len(reward) // 10)
        summary |= {"reward_first": fmean(reward[:part]), "reward_last": fmean(reward[-part:])}
    compared = [
        record for record in records if all(record.get(name) is not None for name in _COMPARED.values())
    ]
    of_one_side = {name: _values(compared or records, metric) for name, metric in _COMPARED.items()}
    summary |= {name: fmean(values) for name, values in of_one_side.items() if values}
    if disagreement := _values(records, "replay/router_disagreement"):
        summary["router_disagreement"] = fmean(disagreement)
    for name in ("response_bytes_inline", "response_bytes_store"):
        if sizes := _values(records, f"rollout/{name}"):
            summary[name] = sum(sizes)
    return summary


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Plain JSON types only. Readers see the old file or the whole new one."""
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    return write_whole(run_dir / FILE_NAME, text + b"\n")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Empty while a run has none."""
    path = run_dir / FILE_NAME
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]
