"""`SlotTable`: which running request owns which slot.

Slots [0, num_decoding) decode and slots [num_decoding, len(running)) are still prefilling, in order of
arrival, without holes, so that each group is one contiguous block of every slot tensor. Those that decode lie
in tiers, the longest in the first, so that attention need not read as many keys of each as the longest has.
"""

from collections.abc import Iterator
from itertools import pairwise

from radix_rl.engines.embedded.cache.slots import SlotCache, required_stride
from radix_rl.engines.embedded.schedule.sequence import Sequence, SequenceState

_FIRST_TIER = 8
"""Slots of the first tier; all tiers up to one together have as many slots as the next."""


def tier_ends(num_slots: int) -> Iterator[int]:
    """Where tiers end among the first `num_slots` slots, without the last one's end."""
    end = _FIRST_TIER
    while end < num_slots:
        yield end
        end *= 2


class SlotTable:
    """Used by the worker thread only.

    Three requests, A and B decode, C prefills its prompt of 4; the slots' stride is 16 tokens:

        slot 0: A, 9 tokens     slot 1: B, 7 tokens     slot 2: C, 0 tokens
        running == [A, B, C], num_decoding == 2, decoding == [A, B], prefilling == [C]

    A cached quantity with one head lies in rows `slot * 16 + position`: A's in 0 to 8, B's in 16 to 22. The
    next step writes rows 9, 23 and 32 to 35. When it is done, C decodes too and num_decoding is 3, without a
    move. When A ends then, `remove(0)` copies the last of its tier, C, to slot 0: running == [C, B].
    """

    def __init__(self, cache: SlotCache, max_running_requests: int) -> None:
        self._cache = cache
        self._max_running_requests = max_running_requests
        self.running: list[Sequence] = []
        """Index = slot."""
        self.num_decoding = 0

    @property
    def decoding(self) -> list[Sequence]:
        return self.running[: self.num_decoding]

    @property
    def prefilling(self) -> list[Sequence]:
        return self.running[self.num_decoding :]

    def try_add(self, sequence: Sequence) -> bool:
        """Give a request a slot if there is room now; divides the cache anew where that makes room."""
        count = len(self.running) + 1
        if count > self._max_running_requests:
            return False
        stride = required_stride(
            [other.reserved_tokens for other in self.running] + [sequence.reserved_tokens]
        )
        if not (self._cache.stride >= stride and self._cache.fits(count, self._cache.stride)):
            if not self._cache.fits(count, stride):
                return False
            self._cache.divide(stride, [other.computed for other in self.running])
        sequence.state = SequenceState.PREFILL
        self.running.append(sequence)
        return True

    def prefill_done(self, count: int) -> None:
        """The first `count` prefilling requests decode from now on."""
        for sequence in self.prefilling[:count]:
            sequence.state = SequenceState.DECODE
        self.num_decoding += count

    def remove(self, slot: int) -> None:
        """Free a slot; other requests move so that no hole remains.

        Call in descending order to move the least.
        """
        hole = slot
        if slot < self.num_decoding:
            # From each tier below the longest request moves up.
            ends = [end for end in tier_ends(self.num_decoding) if end > slot]
            for start, end in pairwise([*ends, self.num_decoding]):
                longest = max(range(start, end), key=lambda other: self.running[other].computed)
                self._move(longest, hole)
                hole = longest
            self.num_decoding -= 1
            self._move(self.num_decoding, hole)
            hole = self.num_decoding
        # Those that prefill keep their order; most of them have nothing in their slots yet.
        for source in range(hole + 1, len(self.running)):
            self._move(source, source - 1)
        self._cache.vacate(len(self.running) - 1)
        self.running.pop()

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self._cache.move(source, target, self.running[source].computed)
            self.running[target] = self.running[source]
