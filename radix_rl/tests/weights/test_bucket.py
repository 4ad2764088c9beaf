"""Buckets: nothing split, nothing lost, nothing shared with the trainer."""

import pytest
import torch

from radix_rl.buckets.bucket import TensorSpec, WeightBucket, dtype_from_name, pack_buckets


def test_tensors_come_back_exactly(named_tensors):
    (bucket,) = pack_buckets(named_tensors, 1 << 20)
    assert [spec.dtype for spec in bucket.specs] == ["float32", "bfloat16", "int64", "float32", "float32"]
    for (name, found), (expected_name, expected) in zip(bucket.tensors(), named_tensors, strict=True):
        assert name == expected_name
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_buckets_stay_below_their_size_and_larger_tensors_travel_alone(named_tensors):
    # Aligned to 16 bytes they are 32, 16, 16, 48 and 0 bytes.
    buckets = list(pack_buckets(named_tensors, 48))
    assert [[spec.name for spec in bucket.specs] for bucket in buckets] == [["a", "b"], ["c"], ["d", "empty"]]
    assert [bucket.buffer.numel() for bucket in buckets] == [48, 16, 48]
    assert [len(bucket.specs) for bucket in pack_buckets(named_tensors, 1)] == [1, 1, 1, 1, 1]


def test_a_bucket_is_a_copy():
    weight = torch.zeros(4)
    (bucket,) = pack_buckets([("w", weight)], 64)
    weight.fill_(1.0)
    assert [tensor.sum().item() for _, tensor in bucket.tensors()] == [0.0]


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="'w' comes twice"):
        list(pack_buckets([("w", torch.zeros(1)), ("w", torch.zeros(1))], 64))


@pytest.mark.parametrize(
    "changes",
    [{"end_byte": 12}, {"start_byte": 2, "end_byte": 18}, {"dtype": "float99"}, {"shape": (-2, -2)}],
)
def test_a_spec_that_does_not_fit_is_refused(changes):
    fields = {"name": "w", "dtype": "float32", "shape": (4,), "start_byte": 0, "end_byte": 16} | changes
    with pytest.raises(ValueError, match=r"tensor 'w'|unknown tensor dtype"):
        WeightBucket(specs=(TensorSpec(**fields),), buffer=torch.zeros(16, dtype=torch.uint8))


def test_overlapping_specs_are_refused():
    specs = tuple(
        TensorSpec(name=name, dtype="float32", shape=(4,), start_byte=0, end_byte=16) for name in ("a", "b")
    )
    with pytest.raises(ValueError, match="'b'"):
        WeightBucket(specs=specs, buffer=torch.zeros(16, dtype=torch.uint8))


def test_dtypes_are_torch_names():
    assert dtype_from_name("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="'nn'"):
        dtype_from_name("nn")
