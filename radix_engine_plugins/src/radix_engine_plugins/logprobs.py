"""Log-probabilities that are not finite never reach an answer: JSON has no place for them."""

import numpy as np

LOGPROB_FLOOR = -9999.0
"""What an engine gives for a log-probability that is not finite. Such a token is not learnt from."""


def floored(logprobs: np.ndarray) -> tuple[np.ndarray, int]:
    """`logprobs` of any shape, float32, and how many of them became the floor.

    The array itself if all are finite, else a copy.
    """
    finite = np.isfinite(logprobs)
    if finite.all():
        return logprobs, 0
    return np.where(finite, logprobs, np.float32(LOGPROB_FLOOR)), int(np.count_nonzero(~finite))
