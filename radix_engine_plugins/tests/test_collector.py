import numpy as np
import pytest

from radix_engine_plugins.collector import TokenOutputCollector


def _rows(first: int, end: int) -> np.ndarray:
    """`[end - first, 2, 3]`; row i holds i * 10 + (0..5)."""
    return (np.arange(first, end)[:, None, None] * 10 + np.arange(6).reshape(2, 3)).astype(np.int32)


def test_rows_come_back_in_order_whatever_the_chunks():
    collector = TokenOutputCollector(routed_experts_shape=(2, 3))
    for first, end in ((0, 1), (1, 100), (100, 100), (100, 301)):
        collector.add_routed_experts(_rows(first, end))

    stash = collector.to_stash(301)

    assert stash.routed_experts is not None
    assert stash.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(stash.routed_experts, _rows(0, 301))
    assert stash.indexer_topk is None
    assert stash.sampling_mask_lengths is None


@pytest.mark.parametrize("start_row", [0, 1, 4, 5, 9])
@pytest.mark.parametrize("chunk", [1, 2, 5, 10])
def test_rows_below_the_start_row_are_dropped(start_row, chunk):
    collector = TokenOutputCollector(routed_experts_shape=(2, 3), start_row=start_row)
    for first in range(0, 10, chunk):
        collector.add_routed_experts(_rows(first, first + chunk))

    stash = collector.to_stash(9)

    np.testing.assert_array_equal(stash.routed_experts, _rows(start_row, 9))
    assert collector.start_rows() == {"routed_experts": start_row}


def test_zero_rows_keep_their_shape_and_differ_from_not_asked_for():
    collector = TokenOutputCollector(routed_experts_shape=(2, 3), sampling_mask=True)

    stash = collector.to_stash(0)

    assert stash.routed_experts is not None
    assert stash.routed_experts.shape == (0, 2, 3)
    assert stash.indexer_topk is None
    assert stash.sampling_mask_lengths is not None
    assert stash.sampling_mask_lengths.shape == (0,)
    assert stash.sampling_mask_logprobs is None


def test_more_rows_than_tokens_forwarded_are_cut_and_fewer_are_refused():
    collector = TokenOutputCollector(routed_experts_shape=(2, 3), indexer_topk_shape=(2, 3))
    collector.add_routed_experts(_rows(0, 4))
    collector.add_indexer_topk(_rows(0, 3))

    assert collector.to_stash(3).routed_experts.shape == (3, 2, 3)
    with pytest.raises(ValueError, match=r"indexer_topk: 4 tokens .* only 3 rows"):
        collector.to_stash(4)


def test_sampling_masks_become_compressed_rows():
    collector = TokenOutputCollector(sampling_mask=True, sampling_mask_logprobs=True)
    collector.add_sampling_mask(np.array([7, 3], np.int32), np.array([-0.5, -1.0], np.float32))
    collector.add_sampling_mask(np.array([9], np.int32), np.array([0.0], np.float32))

    stash = collector.to_stash(0)

    np.testing.assert_array_equal(stash.sampling_mask_lengths, [2, 1])
    np.testing.assert_array_equal(stash.sampling_mask_token_ids, [7, 3, 9])
    np.testing.assert_array_equal(stash.sampling_mask_logprobs, np.array([-0.5, -1.0, 0.0], np.float32))
    assert collector.start_rows() == {}


def test_a_stash_is_not_changed_by_what_is_collected_later():
    collector = TokenOutputCollector(routed_experts_shape=(2, 3), expected_rows=8)
    collector.add_routed_experts(_rows(0, 4))
    stash = collector.to_stash(4)
    before = stash.routed_experts.copy()

    collector.add_routed_experts(_rows(50, 150))

    np.testing.assert_array_equal(stash.routed_experts, before)


def test_narrow_rows_are_widened_and_wide_ones_refused():
    collector = TokenOutputCollector(routed_experts_shape=(1, 2))
    collector.add_routed_experts(np.array([[[200, 255]]], np.uint8))

    np.testing.assert_array_equal(collector.to_stash(1).routed_experts, np.array([[[200, 255]]], np.int32))
    with pytest.raises(ValueError, match="int64"):
        collector.add_routed_experts(np.zeros((1, 1, 2), np.int64))


def test_a_refused_addition_leaves_the_collected_rows_as_they_were():
    collector = TokenOutputCollector(
        routed_experts_shape=(2, 3), sampling_mask=True, sampling_mask_logprobs=True
    )
    collector.add_routed_experts(_rows(0, 1))

    with pytest.raises(ValueError, match=r"expected rows of shape \[n, 2, 3\], got \(1, 3, 2\)"):
        collector.add_routed_experts(np.zeros((1, 3, 2), np.int32))
    with pytest.raises(ValueError, match="indexer_topk was not asked for"):
        collector.add_indexer_topk(_rows(0, 1))
    with pytest.raises(ValueError, match="sampling_mask_logprobs was asked for"):
        collector.add_sampling_mask(np.array([1], np.int32))
    with pytest.raises(ValueError, match="token ids"):
        collector.add_sampling_mask(np.array([1], np.int32), np.zeros(2, np.float32))

    stash = collector.to_stash(1)
    np.testing.assert_array_equal(stash.routed_experts, _rows(0, 1))
    assert len(stash.sampling_mask_lengths) == 0


def test_contradicting_settings_are_refused():
    with pytest.raises(ValueError, match="sampling_mask=True"):
        TokenOutputCollector(sampling_mask_logprobs=True)
    with pytest.raises(ValueError, match="start_row"):
        TokenOutputCollector(start_row=-1)
