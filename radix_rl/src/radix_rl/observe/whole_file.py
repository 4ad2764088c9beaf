"""`write_whole`: files that readers see whole."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> Path:
    """Put `data` in place of what `path` holds; the path.

    Readers see the old file or the new one. Raises OSError naming the path, as on a full disk; then the old
    file is as it was, and no part of the new one is left.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path
