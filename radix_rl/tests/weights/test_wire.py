import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.buckets.wire import decode_bucket, encode_bucket


@pytest.fixture
def bucket():
    tensors = [
        ("a.weight", torch.arange(6, dtype=torch.float32).view(2, 3)),
        ("b.bias", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        ("c.empty", torch.empty(0, 4)),
        ("d.scalar", torch.tensor(7, dtype=torch.int64)),
    ]
    (bucket,) = pack_buckets(tensors, 1 << 20)
    return bucket


def test_a_bucket_comes_back_with_names_dtypes_shapes_and_values(bucket):
    decoded = dict(decode_bucket(encode_bucket(bucket)).tensors())

    expected = dict(bucket.tensors())
    assert list(decoded) == list(expected)
    for name, tensor in expected.items():
        assert decoded[name].dtype == tensor.dtype
        assert decoded[name].shape == tensor.shape
        assert torch.equal(decoded[name], tensor)


def test_the_layout_is_the_documented_one():
    (bucket,) = pack_buckets([("w", torch.tensor([1, 2], dtype=torch.uint8))], 1 << 20)

    body = encode_bucket(bucket)

    assert body[:8] == b"RXWB\x01\x00\x00\x00"
    header_bytes = int.from_bytes(body[8:16], "little")
    assert body[16 : 16 + header_bytes].startswith(b'{"buffer_bytes":')
    assert body[16 + header_bytes :][:2] == b"\x01\x02"


def test_every_truncation_is_refused(bucket):
    body = encode_bucket(bucket)
    for length in range(len(body)):
        with pytest.raises(ValueError, match="weight bucket"):
            decode_bucket(body[:length])


def test_every_flipped_byte_is_refused_or_changes_only_the_description(bucket):
    body = encode_bucket(bucket)
    header_bytes = int.from_bytes(body[8:16], "little")
    for position in [*range(16), *range(16 + header_bytes, len(body))]:
        broken = bytearray(body)
        broken[position] ^= 0xFF
        with pytest.raises(ValueError, match="weight bucket"):
            decode_bucket(broken)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (b'"shape":[0,4]', b'"shape":[0,99999999999999999999999]'),
        (b'"dtype":"int64"', b'"dtype":"nothing"'),
        (b'"tensors":[', b'"tensors":[' + b"[" * 100_000),
    ],
    ids=["size", "dtype", "deep"],
)
def test_a_header_that_describes_no_tensor_is_refused(bucket, ours, theirs):
    body = encode_bucket(bucket)
    header_bytes = int.from_bytes(body[8:16], "little")
    header = body[16 : 16 + header_bytes].replace(ours, theirs)
    broken = body[:8] + len(header).to_bytes(8, "little") + header + body[16 + header_bytes :]
    assert broken != body
    with pytest.raises(ValueError, match=r"weight bucket|unknown tensor dtype"):
        decode_bucket(broken)


def test_a_header_that_describes_bytes_outside_the_buffer_is_refused(bucket):
    body = encode_bucket(bucket)
    broken = body.replace(b'"start_byte":0,"end_byte":24', b'"start_byte":8,"end_byte":99')
    assert broken != body
    with pytest.raises(ValueError, match=r"a\.weight"):
        decode_bucket(broken)
