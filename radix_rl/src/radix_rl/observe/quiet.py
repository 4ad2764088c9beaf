"""`quiet_transformers`: no bars and warnings of transformers between a run's own lines."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars, log lines below errors and FutureWarnings of transformers away in the block.

    A level other than the default, by TRANSFORMERS_VERBOSITY or in code, stays in force.
    """
    from transformers.utils import logging as hf_logging

    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    if level == logging.WARNING:
        hf_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # Some are told as if this package had caused them.
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|radix_rl)\b")
            yield
    finally:
        if bars:
            hf_logging.enable_progress_bar()
        if level == logging.WARNING:
            hf_logging.set_verbosity(level)
