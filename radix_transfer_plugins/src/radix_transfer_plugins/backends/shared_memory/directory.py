"""Directories that only this user can enter, and that are no symbolic links."""

import os
import stat
from pathlib import Path

from radix_transfer_plugins.errors import ConfigError

PRIVATE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def open_private_directory(name: str | Path, parent: int | None = None) -> int:
    """Create it if needed; a file descriptor that the caller closes. Raises ConfigError."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"shared_memory: cannot create {str(name)!r}: {error.strerror}. Its parent must be a writable "
            "tmpfs: in Docker give --shm-size or --ipc=host, elsewhere `mount -t tmpfs -o size=8g tmpfs "
            "/dev/shm`, or configure `directory`"
        ) from error
    try:
        directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | PRIVATE_FLAGS, dir_fd=parent)
    except OSError as error:
        raise ConfigError(
            f"shared_memory: expected {str(name)!r} to be a directory of this user and no symbolic link: "
            f"{error.strerror}"
        ) from error
    status = os.fstat(directory)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(directory)
        raise ConfigError(
            f"shared_memory: {str(name)!r} must belong to user {os.geteuid()} with mode 0700, got user "
            f"{status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}; choose another space, or chown "
            "and chmod 700 it"
        )
    return directory
