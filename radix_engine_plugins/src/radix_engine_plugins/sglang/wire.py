"""What passes between tokenizer and scheduler, in SGLang's own free-form fields.

To the scheduler: a mark in `sampling_params.custom_params`, where SGLang puts marks of its own too. Back:
the rows in `customized_info`, for values of a request that SGLang does not know; the detokenizer passes
them on as they are. Plain Python types only: those in between may be processes that never load this plugin.
"""

from typing import Any, NamedTuple

import numpy as np

from radix_transfer_plugins.codecs.base import Codec

KEY = "radix_output_store"
"""In `customized_info`: for each request of a batch a list of the `PackedRows` of its fields, empty before
it ends."""


MARK = "radix_return_outputs_via_store"


def is_marked(sampling_params: Any) -> bool:
    """Whether the request opted in."""
    return bool(sampling_params.custom_params) and sampling_params.custom_params.get(MARK) is True


class PackedRows(NamedTuple):
    """One encoded field of one request.

    Both sides take the codec from the model's configuration, so that a quarter of the bytes are copied over
    the process boundaries.
    """

    field: str
    """Name in TokenOutputStash."""
    start_row: int
    """Absolute row of the first one."""
    shape: tuple[int, ...]
    """`[rows, layers, top_k]`."""
    data: bytes
    error: str | None = None
    """Why there are no rows: an exception in the scheduler would end the server, so it becomes the
    request's error."""


def pack_rows(codec: Codec, field: str, rows: np.ndarray, start_row: int) -> PackedRows:
    """`rows` `[rows, layers, top_k]` int32. Raises CodecError."""
    return PackedRows(field, start_row, rows.shape, bytes(codec.encode(rows, start_row)))


def unpack_rows(codec: Codec, packed: PackedRows) -> np.ndarray:
    """`[rows, layers, top_k]` int32, possibly a read-only view of `packed.data`."""
    return codec.decode(memoryview(packed.data), np.dtype(np.int32), packed.shape, packed.start_row)
