"""When an answer ends. The order is SGLang's: stop strings, then stop tokens, then length.

So an answer whose last allowed token ends it is finished, not cut off. `min_new_tokens` keeps stop tokens
from being sampled, and does not keep stop strings from matching.
"""

from typing import Any

from radix_rl.engines.embedded.schedule.sequence import Sequence
from radix_rl.stop_strings import matched_stop
from radix_rl.types import FinishReason


class FinishCheck:
    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def after_token(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why the answer ends with this token, already appended; None: it goes on.

        The stop token stays in the answer.
        """
        params = sequence.request.sampling
        if params.stop:
            matched = self._matched_stop_string(sequence)
            if matched is not None:
                return FinishReason(type="stop", matched=matched)
        if token in sequence.stop_token_ids:
            return FinishReason(type="stop", matched=token)
        if len(sequence.output_ids) >= params.max_new_tokens:
            return FinishReason(type="length", length=params.max_new_tokens)
        return None

    def _matched_stop_string(self, sequence: Sequence) -> str | None:
        assert self._tokenizer is not None
        return matched_stop(self._tokenizer.decode, sequence.output_ids, sequence.request.sampling.stop)
