"""Codecs follow a model's configuration, whatever family names its settings how."""

from types import SimpleNamespace

import pytest

from radix_engine_plugins.codecs import (
    dense_layers,
    experts_per_token,
    routed_experts_codec,
    store_codecs,
)
from radix_transfer_plugins.codecs.deltas import DeltasCodec
from radix_transfer_plugins.codecs.experts import ExpertsCodec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionBlocksCodec
from radix_transfer_plugins.codecs.raw import RawCodec


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"num_experts": 8}, 8),
        ({"num_local_experts": 512}, 512),
        ({"moe_num_experts": 64}, 64),
    ],
)
def test_codec_follows_the_models_number_of_experts(config: dict[str, int], ids: int) -> None:
    codec = routed_experts_codec(SimpleNamespace(**config))
    assert isinstance(codec, NarrowCodec)
    assert codec.ids == ids


@pytest.mark.parametrize("config", [{}, {"num_experts": None}, {"num_experts": 0}, {"num_experts": 100_000}])
def test_model_without_a_count_that_two_bytes_hold_is_stored_raw(config: dict[str, int | None]) -> None:
    assert isinstance(routed_experts_codec(SimpleNamespace(**config)), RawCodec)
    assert list(store_codecs(SimpleNamespace(**config))) == ["indexer_topk"]


def test_sparse_attention_and_experts_have_a_codec_each() -> None:
    config = SimpleNamespace(
        n_routed_experts=256,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        index_topk=2048,
        vocab_size=129_280,
    )
    codecs = store_codecs(config)
    assert {name: type(codec) for name, codec in codecs.items()} == {
        "routed_experts": ExpertsCodec,
        "indexer_topk": PositionBlocksCodec,
        "sampling_mask_token_ids": DeltasCodec,
    }
    assert codecs["routed_experts"].get_config() == {"experts": 256, "layers": 61, "dense_layers": "7"}


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ({"num_hidden_layers": 4}, set()),
        ({"num_hidden_layers": 4, "first_k_dense_replace": 2}, {0, 1}),
        ({"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}, {0, 1, 3, 5}),
        ({"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, {0, 2, 3}),
        ({"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}, {0, 2}),
    ],
)
def test_dense_layers_follow_each_familys_settings(config: dict[str, object], dense: set[int]) -> None:
    assert dense_layers(SimpleNamespace(**config)) == dense


@pytest.mark.parametrize("name", ["num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"])
def test_experts_per_token_go_by_several_names(name: str) -> None:
    assert experts_per_token(SimpleNamespace(**{name: 4})) == 4
    assert experts_per_token(SimpleNamespace()) is None
