"""Parts of the SGLang plugin that need no SGLang; the rest is tested in real servers by tests/engines."""

from types import SimpleNamespace

import numpy as np
import pytest

from radix_engine_plugins.settings import StoreSettings
from radix_engine_plugins.sglang.outputs import MaskChunk, RequestOutputs
from radix_engine_plugins.sglang.settings import attach, parse, settings_of
from radix_engine_plugins.sglang.wire import MARK, PackedRows, is_marked, pack_rows, unpack_rows
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.errors import CodecError

ROWS = np.array([[[3, 0], [-1, -1]], [[1, 2], [-1, -1]]], np.int32)


def test_flags_are_off_unless_a_backend_is_named() -> None:
    assert parse(None, None) is None
    assert parse("shared_memory", None) == StoreSettings("shared_memory", {})
    assert parse("mooncake", '{"local_buffer_size": "1gb"}') == StoreSettings(
        "mooncake", {"local_buffer_size": "1gb"}
    )
    assert parse("mooncake", {"key_prefix": "run-1"}) == StoreSettings("mooncake", {"key_prefix": "run-1"})


@pytest.mark.parametrize(
    ("backend", "config"), [(None, "{}"), ("a", "{"), ("a", "[1]"), ("a", "null"), ("a", 3)]
)
def test_malformed_flags_are_refused_by_name(backend: str | None, config: str) -> None:
    with pytest.raises(ValueError, match="--output-store-backend-extra-config"):
        parse(backend, config)


def test_settings_travel_on_the_server_arguments_as_plain_types() -> None:
    server_args = SimpleNamespace()
    assert settings_of(server_args) is None
    attach(server_args, StoreSettings("shared_memory", {"space": "run-1"}))
    assert vars(server_args) == {"_output_store": {"backend": "shared_memory", "config": {"space": "run-1"}}}
    assert settings_of(server_args) == StoreSettings("shared_memory", {"space": "run-1"})


def test_only_an_explicit_mark_opts_a_request_in() -> None:
    assert is_marked(SimpleNamespace(custom_params={MARK: True}))
    for params in (None, {}, {MARK: False}, {MARK: 1}, {"thinking_budget": 3}):
        assert not is_marked(SimpleNamespace(custom_params=params))


@pytest.mark.parametrize(
    ("codec", "num_bytes"), [(NarrowCodec(4), 8), (NarrowCodec(300), 16), (RawCodec(), 32)]
)
def test_rows_cross_processes_as_plain_types_and_come_back_the_same(
    codec: NarrowCodec | RawCodec, num_bytes: int
) -> None:
    packed = pack_rows(codec, "routed_experts", ROWS, start_row=5)
    assert tuple(packed) == ("routed_experts", 5, (2, 2, 2), packed.data, None)
    assert type(packed.data) is bytes
    assert len(packed.data) == num_bytes
    rows = unpack_rows(codec, packed)
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, ROWS)


def test_id_that_the_model_does_not_have_is_refused_before_it_is_narrowed() -> None:
    with pytest.raises(CodecError):
        pack_rows(NarrowCodec(3), "routed_experts", ROWS, 0)


def chunk(lengths: list[int], token_ids: list[int], logprobs: list[float]) -> MaskChunk:
    return MaskChunk(
        lengths=np.array(lengths, np.int32),
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
    )


def test_stash_joins_rows_and_mask_chunks() -> None:
    codec = NarrowCodec(4)
    outputs = RequestOutputs(rows={"routed_experts": pack_rows(codec, "routed_experts", ROWS, 7)})
    outputs.masks = [chunk([2, 1], [4, 5, 6], [-0.5, -1.0, 0.0]), chunk([1], [9], [0.0])]
    stash, start_rows = outputs.to_stash(codec, "support")
    np.testing.assert_array_equal(stash.routed_experts, ROWS)
    assert start_rows == {"routed_experts": 7}
    assert stash.sampling_mask_lengths.tolist() == [2, 1, 1]
    assert stash.sampling_mask_token_ids.tolist() == [4, 5, 6, 9]
    assert stash.sampling_mask_logprobs.tolist() == [-0.5, -1.0, 0.0, 0.0]
    assert outputs.to_stash(codec, "selected")[0].sampling_mask_logprobs is None


def test_mask_that_was_asked_for_is_there_with_no_output_and_absent_otherwise() -> None:
    stash, _ = RequestOutputs().to_stash(RawCodec(), "support")
    assert stash.sampling_mask_lengths.shape == (0,)
    assert stash.sampling_mask_token_ids.dtype == np.int32
    assert stash.sampling_mask_logprobs.dtype == np.float32
    stash, _ = RequestOutputs().to_stash(RawCodec(), None)
    assert stash.sampling_mask_lengths is None


def test_what_went_wrong_on_the_way_fails_the_stash() -> None:
    with pytest.raises(ValueError, match="3 supports for 4"):
        RequestOutputs(error="3 supports for 4 output tokens").to_stash(RawCodec(), None)
    lost = PackedRows("routed_experts", 0, (), b"", error="ValueError: hash routers")
    with pytest.raises(ValueError, match="routed_experts: ValueError: hash routers"):
        RequestOutputs(rows={"routed_experts": lost}).to_stash(RawCodec(), None)
