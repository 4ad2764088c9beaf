"""Division of samples into minibatches, and of a minibatch's samples over ranks."""

import heapq
import itertools
import random
from collections.abc import Sequence


def split_minibatches(num_samples: int, num_minibatches: int, seed: str) -> list[list[int]]:
    """Sample positions in a random order, in parts whose sizes differ by at most one.

    The order depends on `seed` alone.
    """
    order = list(range(num_samples))
    random.Random(seed).shuffle(order)
    bounds = [num_samples * part // num_minibatches for part in range(num_minibatches + 1)]
    return [order[start:end] for start, end in itertools.pairwise(bounds)]


def assign_to_ranks(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Positions for each rank: the longest sample goes to the rank with the fewest tokens so far."""
    loads = [(0, rank) for rank in range(num_ranks)]
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    for position in sorted(range(len(num_tokens)), key=lambda p: -num_tokens[p]):
        load, rank = heapq.heappop(loads)
        assigned[rank].append(position)
        heapq.heappush(loads, (load + num_tokens[position], rank))
    return assigned
