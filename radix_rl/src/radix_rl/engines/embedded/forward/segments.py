"""Cuts the requests of a step into segments."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from radix_rl.engines.embedded.schedule.slot_table import tier_ends
from radix_rl.engines.embedded.step import Segment

CPU_WORTH_A_CUT_BYTES = 1 << 19
"""A CPU takes longer to read so much of one layer's keys and values than a further segment costs there."""


def cut_segments(
    first_slot: int, computed: Sequence[int], lengths: Sequence[int], worth_a_cut: float
) -> list[Segment]:
    """Segments of requests in the slots from `first_slot` on.

    `computed` tokens of each lie there, and `lengths` are to come. Neighbours of equal lengths are one
    segment, cut at the ends of tiers where attention to the shorter ones then reads at least `worth_a_cut`
    keys fewer.

    Three tokens of two requests: the one in slot 0 has 5 tokens and decodes its sixth, the one in slot 1
    prefills a prompt of 2. The model gets a row of three tokens, at the positions 5, 0 and 1:

    >>> decodes, prefills = cut_segments(0, computed=[5, 0], lengths=[1, 2], worth_a_cut=1000)
    >>> decodes
    Segment(first_slot=0, num_slots=1, columns=1, key_length=6)
    >>> prefills
    Segment(first_slot=1, num_slots=1, columns=2, key_length=2)

    When both decode they are one segment, `[2, 1]` tokens, and the shorter one's keys are masked from 3 on:

    >>> cut_segments(0, computed=[5, 2], lengths=[1, 1], worth_a_cut=1000)
    [Segment(first_slot=0, num_slots=2, columns=1, key_length=6)]
    """
    segments = []
    start = 0
    for columns, equal in groupby(lengths):
        end = start + len(list(equal))
        block = computed[start:end]
        for first, last in pairwise([0, *_cuts(first_slot + start, block, worth_a_cut), end - start]):
            key_length = max(block[first:last]) + columns
            segments.append(Segment(first_slot + start + first, last - first, columns, key_length))
        start = end
    return segments


def _cuts(first_slot: int, computed: Sequence[int], worth_a_cut: float) -> list[int]:
    cuts, first = [], 0
    for end in tier_ends(first_slot + len(computed)):
        cut = end - first_slot
        if cut <= first:
            continue
        saved = (max(computed[first:]) - max(computed[cut:])) * (len(computed) - cut)
        if saved >= worth_a_cut:
            cuts.append(cut)
            first = cut
    return cuts
