"""`SharedPrefixes`: which prompts are being prefilled now, so that the same work is not begun twice."""

from collections.abc import Iterable

from radix_rl.engines.embedded.cache.prefixes import common_length
from radix_rl.engines.embedded.schedule.sequence import Sequence

_MIN_SHARED_TOKENS = 16
"""Waiting a step costs more than computing fewer tokens than this again."""


class SharedPrefixes:
    def __init__(self, prefilling: Iterable[Sequence]) -> None:
        self._by_start: dict[tuple[int, ...], Sequence] = {}
        for sequence in prefilling:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        self._by_start.setdefault(sequence.request.input_ids[:_MIN_SHARED_TOKENS], sequence)

    def computes(self, sequence: Sequence) -> bool:
        """True if another request is computing enough of this prompt that waiting for it pays.

        What that request took from the cache is not counted: this one would find it there too.
        """
        prompt = sequence.request.input_ids
        other = self._by_start.get(prompt[:_MIN_SHARED_TOKENS])
        if other is None or other is sequence:
            return False
        return common_length(prompt, other.request.input_ids) - other.cached_tokens >= _MIN_SHARED_TOKENS
