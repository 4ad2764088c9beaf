"""`experts`: ids of up to 256 experts in one byte each; -1 takes no code.

Layers that never route are named once, in the configuration, and missing rows are a bit each.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from radix_transfer_plugins.codecs.base import Buffer, Codec, narrowest_signed
from radix_transfer_plugins.errors import CodecError, ConfigError, CorruptObjectError, RefError
from radix_transfer_plugins.huge_pages import new_array

MAX_EXPERTS = 256
MAX_LAYERS = 480
"""Whose mask, in hexadecimal digits, still fits a reference's codec configuration."""
_BLOCK_ITEMS = 1 << 18
"""Items worked on at a time: they stay in the processor's cache from one pass to the next."""
_PLACE = np.dtype("<u8")


class ExpertsCodec(Codec):
    """Integer arrays `[rows, layers, top_k]` of expert ids in [-1, experts). Ordered.

    `dense_layers` are the layers that never route: they hold -1 alone and are not stored. All settings
    follow from the model, never from the values of one array. Stored one after the other:

    1. A bit for each row, least significant bit first, padded to a whole byte: 1 where the row is missing,
       which means that all of its layers hold -1.
    2. A byte for each item of the layers that route, row-major: the id, or 0 in place of -1.
    3. For each -1 that neither a missing row nor a dense layer explains, its place among the bytes of 2. as a
       little-endian uint64, ascending.
    """

    name: ClassVar[str] = "experts"
    ordered: ClassVar[bool] = True
    row_addressable: ClassVar[bool] = True

    def __init__(self, experts: int, layers: int, dense_layers: frozenset[int] = frozenset()) -> None:
        if not _is_count(experts, MAX_EXPERTS):
            raise ConfigError(
                f"codec 'experts': expected experts in [1, {MAX_EXPERTS}], got {experts!r}; use codec "
                "'narrow' for more"
            )
        if not _is_count(layers, MAX_LAYERS):
            raise ConfigError(f"codec 'experts': expected layers in [1, {MAX_LAYERS}], got {layers!r}")
        if not all(isinstance(layer, int) and 0 <= layer < layers for layer in dense_layers):
            raise ConfigError(
                f"codec 'experts': expected dense layers in [0, {layers}), got {sorted(dense_layers)}"
            )
        self.experts = experts
        self.layers = layers
        self.dense_layers = frozenset(dense_layers)
        routed = [layer for layer in range(layers) if layer not in self.dense_layers]
        self._num_routed = len(routed)
        # A slice where it can be, since numpy needs no copy to take one.
        is_slice = bool(routed) and routed[-1] - routed[0] + 1 == len(routed)
        self._routed: slice | np.ndarray = (
            slice(routed[0], routed[-1] + 1) if is_slice else np.array(routed, np.intp)
        )

    @classmethod
    def from_config(cls, config: Mapping[str, str | int | bool]) -> Self:
        if set(config) != {"experts", "layers", "dense_layers"}:
            raise ConfigError(
                "codec 'experts': expected the configuration {'experts': N, 'layers': L, 'dense_layers': "
                f"HEX}}, got {dict(config)!r}"
            )
        text = config["dense_layers"]
        try:
            mask = int(text, 16) if isinstance(text, str) and text == text.strip("+-_ ") else -1
        except ValueError:
            mask = -1
        layers = config["layers"]
        if mask < 0 or not _is_count(layers, MAX_LAYERS) or mask >= 1 << int(layers):
            raise ConfigError(
                f"codec 'experts': expected dense_layers as a hexadecimal mask of the {layers!r} layers, got "
                f"{text!r}"
            )
        dense_layers = frozenset(layer for layer in range(int(layers)) if mask >> layer & 1)
        return cls(config["experts"], int(layers), dense_layers)  # type: ignore[arg-type]  # checked there

    def get_config(self) -> dict[str, str | int | bool]:
        mask = sum(1 << layer for layer in self.dense_layers)
        return {"experts": self.experts, "layers": self.layers, "dense_layers": f"{mask:x}"}

    def narrowest(self, dtype: np.dtype) -> np.dtype:
        return narrowest_signed(self.experts, dtype)

    def encode(self, array: np.ndarray, start_row: int) -> Buffer:
        if not self._holds_ids(array.dtype) or not self._fits(array.shape):
            raise CodecError(
                f"codec 'experts' with {self.experts} experts and {self.layers} layers stores integer arrays "
                f"[rows, {self.layers}, top_k] that can hold them, got {array.dtype!s} {array.shape}"
            )
        num_rows, _, top_k = array.shape
        row_items = self._num_routed * top_k
        missing = np.zeros(num_rows, bool)
        codes = np.empty((num_rows, self._num_routed, top_k), np.uint8)
        places: list[np.ndarray] = []
        for first, last in _row_blocks(0, num_rows, self.layers * top_k):
            block = array[first:last]
            self._require_dense(block)
            routed = block[:, self._routed]
            # Read as unsigned, -1 is the largest value: where there is none, one pass tells.
            if _largest_unsigned(routed) < self.experts:
                np.copyto(codes[first:last], routed, casting="unsafe")
                continue
            self._require_ids(routed)
            absent = routed == -1
            missing[first:last] = absent.all(axis=(1, 2))
            np.copyto(codes[first:last], routed, casting="unsafe")
            codes[first:last][absent] = 0
            absent[missing[first:last]] = False
            places.append(first * row_items + np.flatnonzero(absent))
        return np.concatenate(
            [
                np.packbits(missing, bitorder="little"),
                codes.reshape(-1),
                *(found.astype(_PLACE).view(np.uint8) for found in places if found.size),
            ]
        )

    def _require_dense(self, block: np.ndarray) -> None:
        for layer in self.dense_layers:
            if block[:, layer].size and not (block[:, layer] == -1).all():
                raise CodecError(
                    f"codec 'experts': layer {layer} is configured as one that never routes, but holds "
                    f"{block[:, layer].max()}; configure the codec with the model's dense layers"
                )

    def _require_ids(self, block: np.ndarray) -> None:
        least, largest = int(block.min()), int(block.max())
        if least < -1 or largest >= self.experts:
            raise CodecError(
                f"codec 'experts' stores ids in [-1, {self.experts}), got values from {least} to {largest}; "
                "configure it with the model's number of experts"
            )

    def decode(
        self,
        data: memoryview,
        dtype: np.dtype,
        shape: tuple[int, ...],
        start_row: int,
        rows: tuple[int, int] | None = None,
    ) -> np.ndarray:
        num_rows, _, top_k = shape
        first_row, last_row = (0, num_rows) if rows is None else rows
        missing, codes, places = self._parts(data, num_rows, top_k)
        out = new_array((last_row - first_row, self.layers, top_k), dtype)
        for first, last in _row_blocks(first_row, last_row, self.layers * top_k):
            block = codes[first:last]
            if self.experts < MAX_EXPERTS and block.size and int(block.max()) >= self.experts:
                raise CorruptObjectError(f"codec 'experts' found a code that is no id below {self.experts}")
            target = out[first - first_row : last - first_row]
            target[:, self._routed] = block
            for layer in self.dense_layers:
                target[:, layer] = -1
            absent = missing[first:last]
            if absent.any():
                if codes[first:last][absent].any():
                    raise CorruptObjectError("codec 'experts' found ids in a row that is marked as missing")
                target[absent] = -1
        self._restore(out, places, first_row, last_row, top_k)
        return out

    def _parts(
        self, data: memoryview, num_rows: int, top_k: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Missing rows `[rows]` bool, codes `[rows, routed layers, top_k]` uint8, places `[n]` uint64."""
        flag_bytes, code_bytes = self._sizes(num_rows, top_k)
        rest = len(data) - flag_bytes - code_bytes
        if rest < 0 or rest % _PLACE.itemsize:
            raise CorruptObjectError(
                f"codec 'experts' needs {flag_bytes + code_bytes} bytes for {num_rows} rows, and 8 for each "
                f"place of a -1, got {len(data)}"
            )
        bits = np.unpackbits(np.frombuffer(data, np.uint8, flag_bytes), bitorder="little")
        if bits[num_rows:].any():
            raise CorruptObjectError("codec 'experts' found flags of rows that there are not")
        codes = np.frombuffer(data, np.uint8, code_bytes, flag_bytes)
        places = np.frombuffer(data, _PLACE, rest // _PLACE.itemsize, flag_bytes + code_bytes)
        if places.size and (int(places.max()) >= code_bytes or (places[1:] <= places[:-1]).any()):
            raise CorruptObjectError("codec 'experts' found places of -1 that are not ascending or outside")
        return bits[:num_rows].view(bool), codes.reshape(num_rows, self._num_routed, top_k), places

    def _restore(
        self, out: np.ndarray, places: np.ndarray, first_row: int, last_row: int, top_k: int
    ) -> None:
        """Write the -1 of `places` into `out`, which holds rows [first_row, last_row)."""
        row_items = self._num_routed * top_k
        bounds = np.searchsorted(places, np.array([first_row * row_items, last_row * row_items], _PLACE))
        found = places[bounds[0] : bounds[1]].astype(np.intp) - first_row * row_items
        if not found.size:
            return
        row, item = np.divmod(found, row_items)
        layer, place = np.divmod(item, top_k)
        layers = np.arange(self.layers)[self._routed][layer]
        if out[row, layers, place].any():
            raise CorruptObjectError("codec 'experts' found an id where a -1 is stored")
        out[row, layers, place] = -1

    def check(self, dtype: np.dtype, shape: tuple[int, ...], stored_bytes: int, start_row: int = 0) -> None:
        if not self._holds_ids(dtype) or not self._fits(shape):
            raise RefError(
                f"codec 'experts' with {self.experts} experts returns integer arrays [rows, {self.layers}, "
                f"top_k] that can hold them, got {dtype!s} {list(shape)}"
            )
        flag_bytes, code_bytes = self._sizes(shape[0], shape[2])
        rest = stored_bytes - flag_bytes - code_bytes
        if not 0 <= rest <= _PLACE.itemsize * code_bytes or rest % _PLACE.itemsize:
            raise RefError(
                f"codec 'experts' stores shape {list(shape)} in {flag_bytes + code_bytes} bytes, and 8 for "
                f"each place of a -1, got stored_bytes {stored_bytes}"
            )

    def _sizes(self, num_rows: int, top_k: int) -> tuple[int, int]:
        """Bytes of the flags and of the codes."""
        return (num_rows + 7) // 8, num_rows * self._num_routed * top_k

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 3 and shape[1] == self.layers

    def _holds_ids(self, dtype: np.dtype) -> bool:
        return dtype.kind == "i" and 1 << (8 * dtype.itemsize - 1) >= self.experts


def _is_count(value: object, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest


def _row_blocks(first: int, last: int, row_items: int) -> list[tuple[int, int]]:
    step = max(1, _BLOCK_ITEMS // max(1, row_items))
    return [(row, min(last, row + step)) for row in range(first, last, step)]


def _largest_unsigned(block: np.ndarray) -> int:
    return int(block.view(block.dtype.str.replace("i", "u")).max(initial=0))
