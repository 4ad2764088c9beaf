import asyncio
import base64
import gc
import json

import numpy as np
import pytest

from radix_rl.engines.base import EngineInfo
from radix_rl.server.generation.body import parse_generate
from radix_transfer_plugins import StoreRef, TokenOutputStash


def _rows(text, output, start=0):
    """Rows of the letter engine: `[[i, token], [-1, -1]]` for every token that went through the model."""
    tokens = [ord(letter) - ord("a") for letter in text] + list(output)[:-1]
    return np.array([[[i, t], [-1, -1]] for i, t in enumerate(tokens)][start:], np.int32).reshape(-1, 2, 2)


def _experts(meta):
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    return rows.reshape(meta["routed_experts_shape"])


def test_one_prompt_answers_one_object(server):
    answer = server.generate(
        text="ab", sampling_params={"max_new_tokens": 3}, return_logprob=True, rid="r-1"
    ).json()

    assert answer["text"] == "cde"
    assert answer["output_ids"] == [2, 3, 4]
    meta = answer["meta_info"]
    assert meta["id"] == "r-1"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 1)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.5, 2, None], [-0.5, 3, None], [-0.5, 4, None]]
    assert meta["output_token_logprobs_length"] == 3
    assert meta["e2e_latency"] > 0
    assert "routed_experts" not in meta
    assert "output_store_ref" not in meta


def test_a_batch_answers_a_list_in_order_and_samples_follow_their_prompt(server):
    params = [{"max_new_tokens": 1, "n": 2}, {"max_new_tokens": 2, "n": 2}]
    answers = server.generate(input_ids=[[0], [10]], sampling_params=params, rid=["x", "y"]).json()

    assert [answer["output_ids"] for answer in answers] == [[1], [1], [11, 12], [11, 12]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x_0", "x_1", "y_0", "y_1"]


def test_n_turns_one_prompt_into_a_list(server):
    answers = server.generate(text="a", sampling_params={"max_new_tokens": 1, "n": 3}).json()

    assert [answer["text"] for answer in answers] == ["b"] * 3
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3


def test_routed_experts_inline_are_the_rows_from_the_asked_start(server):
    for start in (0, 1, 2):
        answer = server.generate(
            text="ab",
            sampling_params={"max_new_tokens": 3},
            return_routed_experts=True,
            routed_experts_start_len=start,
        ).json()
        meta = answer["meta_info"]
        assert meta["routed_experts_start_len"] == start
        np.testing.assert_array_equal(_experts(meta), _rows("ab", answer["output_ids"], start))


def test_zero_outputs_have_the_prompt_s_rows(server):
    meta = server.generate(
        text="abc", sampling_params={"max_new_tokens": 0}, return_routed_experts=True
    ).json()["meta_info"]

    assert meta["completion_tokens"] == 0
    assert meta["routed_experts_shape"] == [3, 2, 2]


def test_opted_in_the_reference_takes_the_place_of_the_arrays(server):
    answer = server.generate(
        text="ab",
        sampling_params={"max_new_tokens": 3},
        return_routed_experts=True,
        return_outputs_via_store=True,
    ).json()
    meta = answer["meta_info"]
    assert "routed_experts" not in meta
    ref = StoreRef.from_builtins(meta["output_store_ref"])
    assert server.objects() == {ref.key}

    (stash,) = server.store.read_many(
        [(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20
    )

    np.testing.assert_array_equal(stash.routed_experts, _rows("ab", answer["output_ids"]))


def test_a_batch_through_the_store_has_one_object_each(server):
    answers = server.generate(
        text=["a", "b"],
        sampling_params={"max_new_tokens": 2, "n": 2},
        return_routed_experts=True,
        return_outputs_via_store=True,
    ).json()

    keys = {answer["meta_info"]["output_store_ref"]["key"] for answer in answers}
    assert len(keys) == 4
    assert server.objects() == keys


@pytest.mark.parametrize("via_store", [False, True])
def test_sampled_logprobs_stay_in_the_answer_in_both_mask_modes(server, via_store):
    def meta(mode):
        return server.generate(
            text="a",
            sampling_params={"max_new_tokens": 2},
            return_sampling_mask=True,
            sampling_logprobs_mode=mode,
            return_outputs_via_store=via_store,
        ).json()["meta_info"]

    selected, support = meta("selected"), meta("support")

    assert selected["output_token_sampling_logprobs"] == [-0.5, -0.5]
    assert support["output_token_sampling_selected_logprobs"] == [-0.5, -0.5]
    if via_store:
        assert "output_token_sampling_mask" not in selected
        assert "output_token_sampling_logprobs" not in support
        assert "sampling_mask_logprobs" not in selected["output_store_ref"]["fields"]
        assert "sampling_mask_logprobs" in support["output_store_ref"]["fields"]
    else:
        assert selected["output_token_sampling_mask"] == [[1, 0], [2, 0]]
        assert selected["output_token_sampling_mask_length"] == 2
        assert support["output_token_sampling_logprobs"] == [[-0.5, -0.5], [-0.5, -0.5]]


def test_a_stop_token_is_cut_from_the_text_only_unless_asked_for(server):
    params = {"max_new_tokens": 9, "stop_token_ids": [4]}
    trimmed = server.generate(text="ab", sampling_params=params).json()
    whole = server.generate(text="ab", sampling_params=params | {"no_stop_trim": True}).json()

    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": 4}
    assert (trimmed["text"], trimmed["output_ids"]) == ("cd", [2, 3, 4])
    assert (whole["text"], whole["output_ids"]) == ("cde", [2, 3, 4])


def _events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[len("data: ") :]) for line in lines[:-1]]


def test_a_stream_is_cumulative_and_carries_the_reference_in_its_last_event_only(server):
    response = server.generate(
        text="ab",
        stream=True,
        sampling_params={"max_new_tokens": 3},
        return_logprob=True,
        return_routed_experts=True,
        return_outputs_via_store=True,
    )

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = _events(response)
    assert [event["text"] for event in events] == ["c", "cd", "cde", "cde"]
    assert [event["output_ids"] for event in events] == [[2], [2, 3], [2, 3, 4], [2, 3, 4]]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 3
    assert all("output_store_ref" not in event["meta_info"] for event in events[:-1])
    last = events[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": 3}
    assert len(last["output_token_logprobs"]) == 3
    assert server.objects() == {last["output_store_ref"]["key"]}


def test_a_streamed_batch_numbers_its_events(server):
    events = _events(server.generate(text=["a", "k"], stream=True, sampling_params={"max_new_tokens": 2}))

    final = {event["index"]: event["text"] for event in events if event["meta_info"]["finish_reason"]}
    assert final == {0: "bc", 1: "lm"}


def test_prompt_ids_and_token_texts_come_on_demand(server):
    answer = server.generate(
        text="ab",
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
    ).json()

    assert answer["prompt_token_ids"] == [0, 1]
    assert answer["meta_info"]["output_token_logprobs"] == [[-0.5, 2, "c"]]


def test_fields_of_sglang_that_change_nothing_are_accepted(server):
    response = server.generate(
        text="a",
        sampling_params={
            "max_new_tokens": 1,
            "temperature": None,
            "regex": None,
            "skip_special_tokens": True,
        },
        image_data=None,
        lora_path=None,
        top_logprobs_num=0,
        log_metrics=False,
        routing_key="k",
        logprob_start_len=-1,
        stream=False,
    )
    assert response.status_code == 200


def test_samples_with_one_seed_get_seeds_of_their_own():
    from radix_rl.engines.base import EngineInfo
    from radix_rl.server.generation.body import parse_generate

    info = EngineInfo(model_path="", weight_version="", context_length=10, vocab_size=10, num_layers=1)
    body = json.dumps(
        {"input_ids": [1], "sampling_params": {"n": 3, "sampling_seed": 5, "max_new_tokens": None}}
    )

    call = parse_generate(lambda: None, body.encode(), info)  # type: ignore[arg-type]

    assert [item.request.sampling.seed for item in call.items()] == [5, 6, 7]
    assert {item.request.sampling.max_new_tokens for item in call.items()} == {9}


async def test_a_client_that_reads_slowly_skips_partial_events(asgi_exchange):
    engine = asgi_exchange.app.state.server.engine
    body = json.dumps({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 60}}).encode()
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        if requests:
            return requests.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message.get("body", b""))
        while engine.running:
            await asyncio.sleep(0)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    await asgi_exchange.app(scope, receive, send)

    events = [part for part in b"".join(sent).split(b"\n\n") if part]
    assert 3 < len(events) < 25
    last = json.loads(events[-2].removeprefix(b"data: "))
    assert len(last["output_ids"]) == 60
    assert last["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_no_error_in_the_log(asgi_exchange, stream):
    engine = asgi_exchange.app.state.server.engine
    engine.step_s = 0.01
    body = json.dumps({"text": ["a", "b"], "stream": stream, "sampling_params": {"max_new_tokens": 60}})
    requests = [{"type": "http.request", "body": body.encode(), "more_body": False}]
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))

    async def receive():
        if requests:
            return requests.pop()
        while len(engine.running) < 2:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    await asgi_exchange.app(scope, receive, send)
    gc.collect()
    await asyncio.sleep(0)

    assert errors == []
    assert not engine.running


def test_an_answer_without_tokens_tells_the_version_too(server):
    meta = server.generate(text="ab", sampling_params={"max_new_tokens": 0}).json()["meta_info"]

    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 0}]


def test_without_max_new_tokens_an_answer_gets_what_fits_the_cache():
    info = EngineInfo(
        model_path="m", weight_version="0", context_length=512, vocab_size=8, num_layers=1,
        max_request_tokens=65,
    )  # fmt: skip
    body = {"input_ids": [1] * 5, "sampling_params": {"max_new_tokens": None}}

    (item,) = parse_generate(lambda: None, json.dumps(body).encode(), info).items()  # type: ignore[arg-type]

    assert item.request.sampling.max_new_tokens == 60


def test_a_prompt_that_is_too_long_alone_is_told_so(server):
    response = server.generate(input_ids=[1] * 600)

    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "shorten it" in message
    assert "max_new_tokens" not in message
