"""Which keys exist, and which of them a store may touch.

A key is one or more segments joined by single slashes; a segment is made of ASCII letters, digits and
`._=:@+-` and is neither "." nor "..". Nothing is ever normalised: a key that would need it is refused, so
that two spellings never mean one object and a plain string prefix decides what a store may touch.
"""

import itertools
import os
import re
import secrets
import time

from radix_transfer_plugins.errors import ConfigError, KeyOutsidePrefixError

MAX_KEY_LENGTH = 512
KEY_RULE = (
    f"1 to {MAX_KEY_LENGTH} ASCII letters, digits and ._=:@+- in segments joined by single slashes, "
    'none of them "." or ".."'
)
_SEGMENT = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._=:@+\-]+"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*", re.ASCII)
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)


def is_key(text: str) -> bool:
    return len(text) <= MAX_KEY_LENGTH and _KEY.fullmatch(text) is not None


def is_field_name(text: str) -> bool:
    return _FIELD_NAME.fullmatch(text) is not None


def check_prefix(key_prefix: object) -> str:
    """The prefix itself.

    Raises ConfigError unless it is a key of at most half the length that keys may have.
    """
    if isinstance(key_prefix, str) and len(key_prefix) <= MAX_KEY_LENGTH // 2 and is_key(key_prefix):
        return key_prefix
    raise ConfigError(
        f"key_prefix: expected at most {MAX_KEY_LENGTH // 2} characters as in 'run-1/output-store' "
        f"({KEY_RULE}), got {key_prefix!r}"
    )


def require_inside(key: str, key_prefix: str) -> None:
    """Raises KeyOutsidePrefixError unless `key` is the prefix, a slash and at least one segment more."""
    if not (is_key(key) and key.startswith(key_prefix + "/")):
        raise KeyOutsidePrefixError(
            f"the reference's key {key!r} lies outside this store's key prefix {key_prefix!r}; it is neither "
            "read nor deleted. If the writer is yours, give both sides the same key_prefix"
        )


class KeySource:
    """New keys `<prefix>/<writer>/<counter>`, never the same twice.

    The writer's id holds its start time and 64 random bits, so neither a restart nor another machine repeats
    it; a forked child draws its own.
    """

    def __init__(self, key_prefix: str) -> None:
        self._key_prefix = key_prefix
        self._renew()

    def _renew(self) -> None:
        # The counter is read through one attribute, so that a thread never pairs one writer's id with
        # another's counter.
        writer = f"{int(time.time()):x}-{secrets.token_hex(8)}"
        self._writer = (os.getpid(), writer, itertools.count())

    def next(self) -> str:
        if self._writer[0] != os.getpid():
            self._renew()
        _, writer, counter = self._writer
        return f"{self._key_prefix}/{writer}/{next(counter)}"
