"""One run at a time in an output directory."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radix_rl.errors import ConfigurationError

FILE_NAME = ".lock"


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Hold the directory, made where it is missing, until the block or this process ends.

    Raises ConfigurationError if another run holds it, and for one that cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / FILE_NAME).open("w")
    except OSError as error:
        raise ConfigurationError(
            f"output_dir: cannot write into {str(output_dir)!r}: {error.strerror}; name another directory"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"output_dir: another run is writing into {str(output_dir)!r}; name another directory, or "
                "wait until it has ended"
            ) from error
        yield
