"""The codec contract: an array in, bytes out, and the same array back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from radix_transfer_plugins.errors import ConfigError

Buffer = bytes | bytearray | memoryview | np.ndarray
"""Anything with a C-contiguous buffer; its bytes are what is stored."""


class Codec(ABC):
    """Lossless encoding of one field. Chosen by the field and the model, never by the values of one array."""

    name: ClassVar[str]
    """Registered name, written into the reference."""
    ordered: ClassVar[bool]
    """True: elements come back where they were.

    False: each row along the last axis is a set, returned ascending, -1 padded.
    """
    row_addressable: ClassVar[bool]
    """True: `decode` can return a row range without decoding the rest."""

    @classmethod
    def from_config(cls, config: Mapping[str, str | int | bool]) -> Self:
        """Build from `get_config()`'s answer, which may come from the network. Raises ConfigError.

        A codec with settings overrides this and `get_config`; one without takes none.
        """
        if config:
            raise ConfigError(f"codec {cls.name!r} takes no configuration, got {dict(config)!r}")
        return cls()

    def get_config(self) -> dict[str, str | int | bool]:
        """What a reader needs to decode; plain JSON types, a few bytes."""
        return {}

    def narrowest(self, dtype: np.dtype) -> np.dtype:
        """The smallest type that `decode` can return instead of `dtype` without loss, whatever the values."""
        return dtype

    def row_bytes(self, dtype: np.dtype, shape: tuple[int, ...]) -> int | None:
        """Stored bytes of each row of an array, where its rows lie one after the other and nothing else does.

        Then `decode` takes the bytes of any rows as an array of those rows, and a reader may fetch a field in
        pieces. None: the stored bytes are only good as a whole.
        """
        return None

    @abstractmethod
    def encode(self, array: np.ndarray, start_row: int) -> Buffer:
        """Encode.

        The result may be a view of `array`. Raises CodecError, with the remedy, if it cannot be lossless.
        """

    @abstractmethod
    def decode(
        self,
        data: memoryview,
        dtype: np.dtype,
        shape: tuple[int, ...],
        start_row: int,
        rows: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """The array that was put, or its rows [rows[0], rows[1]) counted from the array's row 0.

        May return a read-only view over `data` where the stored bytes are the array's own. Raises
        CorruptObjectError.
        """

    @abstractmethod
    def check(self, dtype: np.dtype, shape: tuple[int, ...], stored_bytes: int, start_row: int = 0) -> None:
        """Refuse, without reading, a byte count or dtype that no array of this shape can have.

        Raises RefError. Takes constant time and memory whatever the numbers are: they may come from an enemy.
        """


def narrowest_signed(ids: int, dtype: np.dtype) -> np.dtype:
    """The smallest signed type for ids in [-1, ids), or `dtype` where that is unsigned or no larger."""
    for bits in (8, 16, 32):
        narrow = np.dtype(f"i{bits // 8}")
        if dtype.kind == "i" and narrow.itemsize < dtype.itemsize and ids <= 1 << (bits - 1):
            return narrow
    return dtype
