"""Token ids to text: of a finished answer, and of one that is still growing."""

from collections.abc import Sequence

from radix_rl.server.items import TextOptions, Tokenizer
from radix_rl.types import FinishReason

_REPLACEMENT = "�"


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], options: TextOptions) -> str:
    return tokenizer.decode(
        list(token_ids),
        skip_special_tokens=options.skip_special_tokens,
        spaces_between_special_tokens=options.spaces_between_special_tokens,
    )


def final_text(
    tokenizer: Tokenizer, output_ids: Sequence[int], finish_reason: FinishReason, options: TextOptions
) -> str:
    """Decode a finished answer.

    Without the stop token, or from the stop string on, unless `no_stop_trim`.
    """
    matched = finish_reason.matched if finish_reason.type == "stop" else None
    if isinstance(matched, int) and not options.no_stop_trim and output_ids and output_ids[-1] == matched:
        output_ids = output_ids[:-1]
    text = decode(tokenizer, output_ids, options)
    if isinstance(matched, str) and matched in text:
        position = text.index(matched)
        text = text[: position + len(matched)] if options.no_stop_trim else text[:position]
    return text


class GrowingText:
    """Text of a growing answer.

    What was shown once never changes: characters that are not complete yet, and what may turn out to be the
    beginning of a stop string, wait. The work per token does not grow with the answer.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._stop = stop
        self._token_ids: list[int] = []
        self._context = 0
        self._decoded = 0
        self._text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text to show after these further tokens."""
        self._token_ids.extend(token_ids)
        # Decoding a few earlier tokens too keeps the spaces between words that some tokenizers drop at
        # a text's start.
        before = decode(self._tokenizer, self._token_ids[self._context : self._decoded], self._options)
        after = decode(self._tokenizer, self._token_ids[self._context :], self._options)
        if len(after) > len(before) and not after.endswith(_REPLACEMENT):
            self._text += after[len(before) :]
            self._context, self._decoded = self._decoded, len(self._token_ids)
        return self._text[: len(self._text) - self._held_back()]

    def _held_back(self) -> int:
        if found := [self._text.index(stop) for stop in self._stop if stop in self._text]:
            return len(self._text) - min(found)
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop):
                return length
        return 0
