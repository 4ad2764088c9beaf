"""Whether an answer has reached a stop string: one rule for the engine and for answers in several parts."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""


def matched_stop(decode: Decode, output_ids: Sequence[int], stops: Sequence[str]) -> str | None:
    """The stop string that the last tokens of an answer contain."""
    text = decode(output_ids[-_window(stops) :])
    return next((stop for stop in stops if stop in text), None)


def first_stop_across(
    decode: Decode, output_ids: Sequence[int], seam: int, stops: Sequence[str]
) -> tuple[int, str] | None:
    """The first stop string that lies across `seam`, the number of tokens of the parts before the last one.

    Returns the number of tokens that the answer has when the string is complete, and the string. The engine
    that sampled the last part saw that part alone, and so could not match it.
    """
    if not stops or not seam:
        return None
    for end in range(seam + 1, min(len(output_ids), seam + _window(stops) - 1) + 1):
        matched = matched_stop(decode, output_ids[:end], stops)
        if matched is not None:
            return end, matched
    return None


def _window(stops: Sequence[str]) -> int:
    """Number of tokens that hold any match which ends at the last of them.

    Each decodes to at least part of one character, of four bytes at most.
    """
    return 4 * max(len(stop) for stop in stops) + 1
