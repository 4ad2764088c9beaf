"""How many token rows have no recorded choice, and whether that is more than a run allows."""

from collections.abc import Sequence

import numpy as np

from radix_rl.errors import ReplayError
from radix_rl.train.batch import TrainSample
from radix_rl.train.collectives import Ranks

_CHOICES = {"routed_experts": "experts", "indexer_topk": "positions"}
"""Field of a sample -> what a row of it names."""


def unrecorded_rows(rows: np.ndarray) -> int:
    """Rows of `[tokens, layers, places]` that are -1 throughout."""
    return int((rows == -1).all(axis=(1, 2)).sum())


def check_unrecorded(samples: Sequence[TrainSample], max_share: float, ranks: Ranks) -> None:
    """Compare with `max_share` over the samples of a step on all ranks together.

    Only rows that something counted depends on are looked at, see `TrainSample.num_needed_rows`.

    Every rank calls it, and every rank raises ReplayError if one does.
    """
    for field, what in _CHOICES.items():
        found = [
            (sample, rows[: sample.num_needed_rows])
            for sample in samples
            if (rows := getattr(sample, field)) is not None
        ]
        unrecorded = [unrecorded_rows(rows) for _, rows in found]
        total = ranks.sum(
            {"rows": float(sum(len(rows) for _, rows in found)), "unrecorded": float(sum(unrecorded))}
        )
        if total["unrecorded"] <= max_share * total["rows"]:
            continue
        worst = max(range(len(found)), key=lambda place: unrecorded[place], default=None)
        of_sample = ""
        if worst is not None and unrecorded[worst]:
            sample, rows = found[worst]
            of_sample = f"; of sample {sample.name} {unrecorded[worst]} of {len(rows)}"
        raise ReplayError(
            f"{total['unrecorded']:.0f} of {total['rows']:.0f} token rows of this step have no recorded "
            f"{what}, more than the share {max_share} that train.max_unrecorded_share allows{of_sample}"
        )
