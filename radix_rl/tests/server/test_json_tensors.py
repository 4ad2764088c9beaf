"""`/update_weights_from_tensor` with SGLang's JSON keys: safetensors where SGLang has pickles."""

import base64
import io
import json
import pickle

import pytest
import torch
from safetensors.torch import save

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.buckets.safetensors import decode_named_tensors, encode_flattened, encode_named_tensors

TENSORS = {
    "w": torch.tensor([[1.5, -2.0, 3.25]], dtype=torch.bfloat16),
    "b": torch.arange(5, dtype=torch.float32),
    "n": torch.tensor(7, dtype=torch.int64),
}


def _post(server, path, **body):
    return server.client.post(path, json=body)


def _flattened():
    (bucket,) = pack_buckets(TENSORS.items(), 1 << 20)
    return encode_flattened(bucket)


def _text(data):
    return base64.b64encode(data).decode()


def _flat(metadata):
    return _text(save({"flattened_tensor": torch.zeros(8, dtype=torch.uint8)}, metadata=metadata))


@pytest.mark.parametrize(
    ("load_format", "text"),
    [(None, encode_named_tensors(TENSORS)), ("flattened_bucket", _flattened())],
)
def test_both_forms_give_the_engine_the_tensors_bit_for_bit(server, load_format, text):
    assert _post(server, "/begin_weight_update").status_code == 200

    answer = _post(
        server, "/update_weights_from_tensor", serialized_named_tensors=[text], load_format=load_format,
        weight_version="7", flush_cache=True,
    )  # fmt: skip

    assert answer.json()["success"] is True, answer.text
    assert _post(server, "/end_weight_update").json()["weight_version"] == "7"
    begin, update, commit = server.engine.calls
    assert (begin, commit) == (("begin_weight_update", ""), ("commit_weight_update", "7"))
    assert (update[0], set(update[1:])) == ("update_weights", TENSORS.keys())
    for name, tensor in TENSORS.items():
        assert server.engine.weights[name].dtype == tensor.dtype
        assert torch.equal(server.engine.weights[name], tensor)


def test_without_begin_one_call_is_a_whole_update(server):
    text = encode_named_tensors(TENSORS)

    answer = _post(server, "/update_weights_from_tensor", serialized_named_tensors=[text], weight_version="7")

    assert answer.json()["success"] is True
    names = [name for name, *_ in server.engine.calls]
    assert names == ["pause", "begin_weight_update", "update_weights", "commit_weight_update", "resume"]
    assert not server.engine.paused
    assert server.client.get("/model_info").json()["weight_version"] == "7"


def test_an_update_that_nobody_names_keeps_the_name(server):
    text = encode_named_tensors(TENSORS)

    assert _post(server, "/update_weights_from_tensor", serialized_named_tensors=[text]).status_code == 200

    assert ("commit_weight_update", "0") in server.engine.calls


def test_a_version_other_than_the_one_begun_is_refused(server):
    _post(server, "/begin_weight_update", weight_version="7")

    answer = _post(
        server, "/update_weights_from_tensor", serialized_named_tensors=[encode_named_tensors(TENSORS)],
        weight_version="8",
    )  # fmt: skip

    assert answer.status_code == 400
    assert "expected '7', which was begun, got '8'" in answer.json()["message"]


@pytest.mark.parametrize("name_length", range(60, 76))
def test_safetensors_are_taken_whatever_their_header_s_length_begins_with(name_length):
    """A header of 128 bytes begins with the byte that pickles begin with."""
    name = "a" * name_length
    text = encode_named_tensors({name: torch.tensor([2.5])})

    ((found, tensor),) = decode_named_tensors(text, None).tensors()

    assert found == name
    assert tensor.tolist() == [2.5]


def test_the_header_lengths_tried_include_one_that_begins_as_a_pickle_does():
    assert save({"a" * 68: torch.zeros(1)})[:1] == pickle.dumps(0)[:1]


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_any_binary_protocol_is_called_one(protocol):
    with pytest.raises(ValueError, match="this is a pickle"):
        decode_named_tensors(_text(pickle.dumps({"w": [1.0]}, protocol)), None)


def test_what_torch_saved_is_called_a_pickle():
    with pytest.raises(ValueError, match="this is a pickle"):
        decode_named_tensors(_text(_saved({"w": torch.zeros(1)})), None)


SPEC = {"name": "w", "dtype": "float32", "shape": [2], "start_idx": 0, "end_idx": 8}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"serialized_named_tensors": [_text(pickle.dumps({"w": [1.0]}))]}, "send base64 of safetensors"),
        ({"serialized_named_tensors": [_text(b"no such thing")]}, "safetensors.torch.save"),
        ({"serialized_named_tensors": ["%%%"]}, "not base64"),
        ({"serialized_named_tensors": []}, "one entry"),
        ({"serialized_named_tensors": [_text(save({}))]}, "at least one tensor"),
        ({"serialized_named_tensors": [_text(save(TENSORS))] * 2}, "got 2"),
        ({"serialized_named_tensors": [_text(save(TENSORS))], "load_format": "direct"}, "direct"),
        ({"serialized_named_tensors": [_text(save(TENSORS))], "load_format": "flattened_bucket"}, "uint8"),
        ({"serialized_named_tensors": [_flat(None)], "load_format": "flattened_bucket"}, "metadata"),
        ({"serialized_named_tensors": [_flat({"metadata": "[]"})], "load_format": "flattened_bucket"}, "one"),
        (
            {
                "serialized_named_tensors": [_flat({"metadata": json.dumps([SPEC | {"end_idx": 80}])})],
                "load_format": "flattened_bucket",
            },
            "80 bytes",
        ),
        (
            {
                "serialized_named_tensors": [_flat({"metadata": json.dumps([SPEC | {"dtype": "float3"}])})],
                "load_format": "flattened_bucket",
            },
            "float3",
        ),
        ({"named_tensors": []}, "named_tensors"),
    ],
)
def test_anything_else_is_a_400_that_says_what_to_send(shared_server, body, message):
    answer = _post(shared_server, "/update_weights_from_tensor", **body)

    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert message in answer.json()["message"]
