"""`quiet_transformers`: no bars and warnings of transformers between a run's own lines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Transformers shows no progress bars and logs errors only, until the block ends.

    A level other than the default, by TRANSFORMERS_VERBOSITY or in code, stays in force.
    """
    from transformers.utils import logging as hf_logging

    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    if level == logging.WARNING:
        hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        if bars:
            hf_logging.enable_progress_bar()
        if level == logging.WARNING:
            hf_logging.set_verbosity(level)
