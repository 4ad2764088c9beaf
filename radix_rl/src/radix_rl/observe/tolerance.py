"""`Tolerance`: what only observes a run never ends it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Tolerance:
    """Turns failures of observers into warnings, one for each observer."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Swallow any Exception of the block; the first one of `what` is logged."""
        try:
            yield
        except Exception as error:
            if what not in self._warned:
                self._warned.add(what)
                logger.warning(
                    "%s failed; the run goes on, and later failures of it are not logged: %s: %s",
                    what,
                    type(error).__name__,
                    error,
                )
