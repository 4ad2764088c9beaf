"""What every codec promises to `OutputStore`, as tests.

class TestMyCodec(CodecConformance):
    def make_codec(self):
        return MyCodec(level=3)

    def accepted(self):
        return [(np.arange(12, dtype=np.int32).reshape(3, 4), 0)]

    def rejected(self):
        return [(np.full((3, 4), -7, np.int32), 0)]
"""

import math
import time

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins.buffers import byte_view
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.errors import CodecError, ConfigError, CorruptObjectError, RefError

Example = tuple[np.ndarray, int]
"""An array and its start row."""


class CodecConformance:
    """Subclass it, define the three methods, and every test of it runs against your codec."""

    def make_codec(self) -> Codec:
        raise NotImplementedError("define make_codec")

    def accepted(self) -> list[Example]:
        """Arrays that the codec stores.

        At least one with rows, one with zero rows and one from a start row above 0.
        """
        raise NotImplementedError("define accepted")

    def rejected(self) -> list[Example]:
        """Arrays that the codec cannot store without loss."""
        raise NotImplementedError("define rejected")

    def test_every_array_comes_back_with_its_dtype_shape_and_values(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.accepted():
            before = array.copy()
            data = encode(codec, array, start_row)
            assert np.array_equal(array, before, equal_nan=array.dtype.kind in "fc"), (
                "encode changed its input"
            )
            decoded = codec.decode(data, array.dtype, array.shape, start_row)
            assert decoded.dtype == array.dtype
            assert decoded.shape == array.shape
            assert decoded.tobytes() == expected(codec, array).tobytes()

    def test_the_narrowest_dtype_holds_the_same_values(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.accepted():
            data = encode(codec, array, start_row)
            dtype = codec.narrowest(array.dtype)
            assert dtype.itemsize <= array.dtype.itemsize
            decoded = codec.decode(data, dtype, array.shape, start_row)
            assert decoded.dtype == dtype
            assert decoded.astype(array.dtype).tobytes() == expected(codec, array).tobytes()

    def test_rows_that_lie_one_after_the_other_are_decoded_apart(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.accepted():
            data = encode(codec, array, start_row)
            row_bytes = codec.row_bytes(array.dtype, array.shape)
            if row_bytes is None:
                continue
            assert len(data) == row_bytes * len(array)
            rows = [
                codec.decode(
                    data[row * row_bytes : (row + 1) * row_bytes],
                    array.dtype,
                    (1, *array.shape[1:]),
                    start_row + row,
                )
                for row in range(len(array))
            ]
            if rows:
                assert np.concatenate(rows).tobytes() == expected(codec, array).tobytes()

    def test_encoding_is_deterministic(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.accepted():
            assert encode(codec, array, start_row) == encode(self.make_codec(), array, start_row)

    def test_a_row_range_is_that_slice_of_the_whole(self) -> None:
        codec = self.make_codec()
        if not codec.row_addressable:
            return
        for array, start_row in self.accepted():
            if array.ndim == 0:
                continue
            data = encode(codec, array, start_row)
            num_rows = array.shape[0]
            for first, last in {
                (0, num_rows),
                (0, num_rows // 2),
                (num_rows // 3, num_rows),
                (num_rows, num_rows),
            }:
                part = codec.decode(data, array.dtype, array.shape, start_row, (first, last))
                assert part.shape == (last - first, *array.shape[1:])
                assert part.tobytes() == expected(codec, array)[first:last].tobytes()

    def test_memory_layout_and_byte_order_of_the_input_do_not_matter(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.accepted():
            data = encode(codec, array, start_row)
            spread = np.repeat(array[..., None], 2, axis=-1)[..., 0]
            assert encode(codec, spread, start_row) == data
            assert encode(codec, np.asfortranarray(array), start_row) == data
            assert encode(codec, array.astype(array.dtype.newbyteorder(">")), start_row) == data

    def test_a_reader_that_knows_only_the_reference_decodes(self) -> None:
        codec = self.make_codec()
        config = msgspec.json.encode(codec.get_config())
        assert len(config) <= 128, "the configuration travels in every reference"
        reader = type(codec).from_config(msgspec.json.decode(config))
        for array, start_row in self.accepted():
            decoded = reader.decode(encode(codec, array, start_row), array.dtype, array.shape, start_row)
            assert decoded.tobytes() == expected(codec, array).tobytes()

    def test_an_unknown_option_is_refused(self) -> None:
        codec = self.make_codec()
        with pytest.raises(ConfigError):
            type(codec).from_config({**codec.get_config(), "no_such_option": 1})

    def test_an_array_that_would_lose_something_is_refused(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.rejected():
            with pytest.raises(CodecError):
                codec.encode(array, start_row)

    def test_the_true_byte_count_passes_the_check_and_impossible_ones_do_not(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.accepted():
            stored_bytes = encode(codec, array, start_row).nbytes
            codec.check(array.dtype, array.shape, stored_bytes, start_row)
            for impossible in (-1, 64 * (array.nbytes + 64)):
                with pytest.raises(RefError):
                    codec.check(array.dtype, array.shape, impossible, start_row)

    def test_the_check_takes_no_longer_for_absurd_shapes(self) -> None:
        codec = self.make_codec()
        array = self.accepted()[0][0]
        began = time.process_time()
        for _ in range(100):
            with pytest.raises(RefError):
                codec.check(array.dtype, (2**40,) * max(array.ndim, 1), 100)
        assert time.process_time() - began < 1.0

    def test_bytes_missing_or_too_many_are_an_error(self) -> None:
        codec = self.make_codec()
        for array, start_row in self.accepted():
            data = encode(codec, array, start_row)
            for damaged in ([data[:-1]] if data.nbytes else []) + [memoryview(bytes(data) + b"\0")]:
                with pytest.raises(CorruptObjectError):
                    codec.decode(damaged, array.dtype, array.shape, start_row)

    def test_arbitrary_bytes_give_an_array_of_that_shape_or_an_error(self) -> None:
        codec = self.make_codec()
        rng = np.random.default_rng(0)
        for array, start_row in self.accepted():
            length = encode(codec, array, start_row).nbytes
            for _ in range(20):
                damaged = memoryview(rng.bytes(length))
                try:
                    decoded = codec.decode(damaged, array.dtype, array.shape, start_row)
                except CorruptObjectError:
                    continue
                assert decoded.shape == array.shape
                assert decoded.dtype == array.dtype


def encode(codec: Codec, array: np.ndarray, start_row: int) -> memoryview:
    return byte_view(codec.encode(array, start_row)).toreadonly()


def expected(codec: Codec, array: np.ndarray) -> np.ndarray:
    """What decoding returns: the array itself, or for sets its rows ascending with the -1 at the end."""
    if codec.ordered or math.prod(array.shape) == 0:
        return np.ascontiguousarray(array)
    last = np.iinfo(array.dtype).max
    ascending = np.sort(np.where(array == -1, last, array), axis=-1)
    return np.where(ascending == last, -1, ascending).astype(array.dtype)
