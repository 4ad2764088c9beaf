"""The routes over the real embedded engine: what the stand-in of the other tests cannot show."""

import base64
import itertools
import json

import numpy as np
import openai

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
