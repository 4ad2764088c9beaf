"""The routes over the real embedded engine: what the stand-in of the other tests cannot show."""

import base64
import itertools
import json
import threading
import time
from functools import partial

import numpy as np
import openai
import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.buckets.wire import CONTENT_TYPE, encode_bucket
from radix_rl.engines.embedded.cache.slots import SlotTensor
from radix_rl.engines.embedded.weights import WeightUpdater
from radix_rl.testing import wait_until

GREEDY = {"temperature": 0, "ignore_eos": True}


def _greedy(server, text="Hello", **params):
    return server.generate(
        text=text, sampling_params=GREEDY | params, return_logprob=True, return_routed_experts=True
    ).json()


def test_rows_and_logprobs_cover_every_token(embedded_server):
    answer = _greedy(embedded_server, max_new_tokens=7)

    meta = answer["meta_info"]
    assert meta["routed_experts_shape"] == [5 + 7 - 1, 2, 2]
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(
        meta["routed_experts_shape"]
    )
    assert rows.min() >= 0
    assert rows.max() < 4
    assert len(meta["output_token_logprobs"]) == len(answer["output_ids"]) == 7
    assert all(logprob < 0 for logprob, _, _ in meta["output_token_logprobs"])


def test_a_stream_ends_with_what_the_whole_answer_is(embedded_server):
    whole = _greedy(embedded_server, max_new_tokens=12)
    response = embedded_server.generate(
        text="Hello", sampling_params=GREEDY | {"max_new_tokens": 12}, stream=True
    )

    lines = response.text.split("\n\n")
    events = [json.loads(line[len("data: ") :]) for line in lines if line and "[DONE]" not in line]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]
    for before, after in itertools.pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])


def test_a_stop_string_counts_with_the_last_token_and_within_the_minimum(embedded_server):
    whole = _greedy(embedded_server, max_new_tokens=30)["text"]
    stop = next(char for char in whole[3:] if char != "�")
    ended = _greedy(embedded_server, max_new_tokens=30, stop=stop)
    num_tokens = ended["meta_info"]["completion_tokens"]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}

    for limits in (
        {"max_new_tokens": num_tokens},
        {"max_new_tokens": 30, "min_new_tokens": 30},
        {"max_new_tokens": None, "min_new_tokens": 200},
    ):
        answer = _greedy(embedded_server, stop=stop, **limits)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert (answer["output_ids"], answer["text"]) == (ended["output_ids"], ended["text"])


def test_a_stop_string_ends_the_text_before_it_streamed_or_not(embedded_server):
    whole = _greedy(embedded_server, max_new_tokens=30)["text"]
    # A stop string that the greedy answer is known to contain.
    stop = next(whole[i : i + 2] for i in range(3, len(whole) - 2) if "�" not in whole[i : i + 2])
    params = {"max_new_tokens": 30, "stop": stop}

    answer = _greedy(embedded_server, **params)
    streamed = embedded_server.generate(text="Hello", sampling_params=GREEDY | params, stream=True).text

    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == whole[: whole.index(stop)]
    assert _greedy(embedded_server, **params, no_stop_trim=True)["text"].endswith(stop)
    texts = [json.loads(line[6:])["text"] for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert texts[-1] == answer["text"]
    assert all(stop not in text for text in texts)


def test_chat_goes_through_the_template(embedded_server):
    messages = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=embedded_server.url + "/v1", api_key="x") as client:
        answer = client.chat.completions.create(
            model="m", messages=messages, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
    direct = _greedy(embedded_server, "user: Hi;", max_new_tokens=4)

    assert answer.choices[0].message.content == direct["text"]
    assert answer.usage.prompt_tokens == len("user: Hi;")


def test_a_seed_gives_the_same_tokens_again(embedded_server):
    params = {"max_new_tokens": 10, "ignore_eos": True, "seed": 11}
    first = embedded_server.generate(text="Hello", sampling_params=params).json()
    among_others = embedded_server.generate(text=["Hello", "b", "ccc"], sampling_params=params).json()[0]

    assert first["output_ids"] == among_others["output_ids"]


def test_weights_are_renamed_and_asleep_weights_refuse(embedded_server):
    client = embedded_server.client
    assert client.post("/update_weight_version", json={"new_version": "v2"}).status_code == 200
    assert _greedy(embedded_server, max_new_tokens=1)["meta_info"]["weight_version"] == "v2"
    assert client.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
    refused = embedded_server.generate(text="a")
    assert refused.status_code == 409
    assert client.get("/health").status_code == 503
    assert client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200


def test_what_can_never_fit_the_cache_is_a_400_and_what_must_wait_waits(run_embedded):
    with run_embedded(kv_cache_tokens=64, context_length=256) as server:
        params = {"temperature": 0, "ignore_eos": True}
        refused = server.generate(text="a" * 40, sampling_params=params | {"max_new_tokens": 26})
        alone = server.generate(text="a" * 40, sampling_params=params | {"max_new_tokens": 25}).json()
        answers = []

        def ask():
            body = {"text": "a" * 40, "sampling_params": params | {"max_new_tokens": 25}}
            answers.append(server.generate(**body).json())

        # Each needs the whole cache, so that four of them queue.
        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(30)

    assert refused.status_code == 400
    assert "cache of 80 tokens, but the engine's holds 64" in refused.json()["error"]["message"]
    assert [answer["output_ids"] for answer in answers] == [alone["output_ids"]] * 4


def test_pausing_in_place_keeps_what_was_computed_and_new_weights_get_a_span_of_their_own(embedded_server):
    client = embedded_server.client
    answers = []
    body = {"text": "Hello", "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 200}}
    request = threading.Thread(target=lambda: answers.append(embedded_server.generate(**body).json()))

    def metric(name):
        lines = client.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"radix_rl_engine_{name} "))

    before = client.get("/model_info").json()["weight_version"]
    generated = metric("generated_tokens")
    request.start()
    wait_until(lambda: metric("generated_tokens") >= generated + 5, "five more tokens")
    assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    prefilled, generated = metric("prefilled_tokens"), metric("generated_tokens")
    time.sleep(0.05)
    assert metric("generated_tokens") == generated
    renamed = {"new_version": "later", "abort_all_requests": False}
    assert client.post("/update_weight_version", json=renamed).status_code == 200
    assert client.post("/continue_generation").status_code == 200
    request.join(30)

    assert metric("prefilled_tokens") == prefilled
    first, second = answers[0]["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == (before, 0, "later", 200)
    assert first["end"] == second["start"] >= 5
    assert answers[0]["meta_info"]["num_retractions"] == 0


@pytest.mark.parametrize("mode", ["selected", "support"])
def test_log_probabilities_that_are_not_finite_are_the_floor_in_valid_json(run_embedded, mode):
    with run_embedded() as server:
        with torch.no_grad():
            server.engine._core_now().runner.model.lm_head.weight.fill_(float("nan"))
        response = server.generate(
            text="Hello",
            sampling_params={"max_new_tokens": 3, "top_p": 0.9, "ignore_eos": True},
            return_logprob=True,
            return_sampling_mask=True,
            sampling_logprobs_mode=mode,
        )
        metrics = server.client.get("/metrics").text

    assert response.status_code == 200
    meta = json.loads(response.text, parse_constant=pytest.fail)["meta_info"]
    assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == [-9999.0] * 3
    if mode == "support":
        assert meta["output_token_sampling_logprobs"] == [[-9999.0]] * 3
    assert "radix_rl_engine_non_finite_logprobs 3.0" in metrics


def test_all_memory_is_released_and_comes_back_in_two_stages_around_new_weights(run_embedded):
    with run_embedded(prefix_cache_tokens=512) as server:
        client = server.client

        def post(path, **body):
            return client.post(path, json=body).status_code

        # What was never released is there already.
        assert post("/resume_memory_occupation", tags=["weights"]) == 200
        before = _greedy(server, max_new_tokens=6)
        model = server.engine._core_now().runner.model
        weights = [(name, p.detach().clone()) for name, p in model.named_parameters()]
        assert post("/release_memory_occupation") == 200
        assert post("/release_memory_occupation", tags=["kv_cache"]) == 200
        assert post("/resume_memory_occupation", tags=["kv_cache"]) == 409
        assert post("/begin_weight_update", weight_version="1") == 409
        assert post("/resume_memory_occupation", tags=["weights"]) == 200
        assert server.generate(text="a").status_code == 409
        assert post("/begin_weight_update", weight_version="1") == 200
        for bucket in pack_buckets(weights, 1 << 14):
            headers = {"content-type": CONTENT_TYPE}
            sent = client.post("/update_weights_from_tensor", content=encode_bucket(bucket), headers=headers)
            assert sent.status_code == 200
        assert post("/end_weight_update") == 200
        assert server.generate(text="a").status_code == 409
        assert post("/resume_memory_occupation", tags=["kv_cache"]) == 200
        after = _greedy(server, max_new_tokens=6)

    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["routed_experts"] == before["meta_info"]["routed_experts"]
    assert after["meta_info"]["cached_tokens"] == 0
    assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("0", "1")


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_waking_without_memory_is_told_and_can_be_tried_again(run_embedded, monkeypatch, tag):
    def refuse(*_):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
        )

    with run_embedded() as server:
        wake = partial(server.client.post, "/resume_memory_occupation", json={"tags": [tag]})
        assert server.client.post("/release_memory_occupation", json={"tags": [tag]}).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(
                *((WeightUpdater, "wake") if tag == "weights" else (SlotTensor, "allocate")), refuse
            )
            answer = wake()
        assert answer.status_code == 409
        assert "not enough memory" in answer.json()["error"]["message"]
        assert wake().status_code == 200
        if tag == "kv_cache":
            assert _greedy(server, max_new_tokens=2)["meta_info"]["completion_tokens"] == 2
