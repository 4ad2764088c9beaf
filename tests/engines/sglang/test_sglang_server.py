"""Behaviour of one server with the store: rows, masks, batches, streams, chat, aborts."""

import base64
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from radix_rl.config.engine import RemoteSettings
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.types import LOGPROB_FLOOR, GenerateRequest, SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPT = list(range(30, 60))
GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
ROWS = {"return_routed_experts": True, "return_outputs_via_store": True}
INLINE_KEYS = {
    "routed_experts",
    "indexer_topk",
    "output_token_sampling_mask",
    "output_token_sampling_mask_length",
}


def test_server_info_names_backend_and_versions(server: Any) -> None:
    info = httpx.get(f"{server.url}/server_info").json()["output_store"]
    assert info["enabled"] is True
    assert info["backend"] == "faulty"
    assert info["key_prefix"] == "run-1/outputs"
    assert info["plugin"] == "radix-engine-plugins"
    assert info["ref_version"] == 1


def test_rows_equal_a_full_forward(server: Any, reader: Any, experts_of_full_forward: Callable) -> None:
    answer = server.generate({"input_ids": PROMPT, "sampling_params": GREEDY, **ROWS})
    assert not INLINE_KEYS & answer["meta_info"].keys()
    ref, stash = reader.take(answer["meta_info"])
    expected = experts_of_full_forward(PROMPT + answer["output_ids"])[:-1]
    assert stash.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(stash.routed_experts, expected)
    assert ref.fields["routed_experts"].codec == "narrow"
    assert ref.fields["routed_experts"].stored_bytes == expected.size


def test_cached_prefix_gives_the_same_rows_as_the_inline_path(server: Any, reader: Any) -> None:
    request = {"input_ids": PROMPT[:20] * 2, "sampling_params": GREEDY, "return_routed_experts": True}
    inline = server.generate(request)["meta_info"]
    stored = server.generate({**request, "return_outputs_via_store": True})["meta_info"]
    assert stored["cached_tokens"] > 0
    _, stash = reader.take(stored)
    rows = np.frombuffer(base64.b64decode(inline["routed_experts"]), np.int32).reshape(-1, 3, 2)
    np.testing.assert_array_equal(stash.routed_experts, rows)


def test_start_row_is_honoured_and_named(server: Any, reader: Any, experts_of_full_forward: Callable) -> None:
    answer = server.generate(
        {"input_ids": PROMPT, "sampling_params": GREEDY, "routed_experts_start_len": 25, **ROWS}
    )
    ref, stash = reader.take(answer["meta_info"])
    assert ref.fields["routed_experts"].start_row == 25
    np.testing.assert_array_equal(
        stash.routed_experts, experts_of_full_forward(PROMPT + answer["output_ids"])[25:-1]
    )


def test_start_row_past_the_prompt_is_refused(server: Any, reader: Any) -> None:
    response = server.post("/generate", {"input_ids": PROMPT, "routed_experts_start_len": 31, **ROWS})
    assert response.status_code == 400
    assert "routed_experts_start_len" in response.text


@pytest.mark.parametrize("mask", [False, True])
def test_request_for_no_token_has_a_row_for_each_prompt_token_and_no_mask_row(
    server: Any, reader: Any, experts_of_full_forward: Callable, mask: bool
) -> None:
    sampling = {"max_new_tokens": 0, "top_k": 5}
    answer = server.generate(
        {"input_ids": PROMPT, "sampling_params": sampling, "return_sampling_mask": mask, **ROWS}
    )
    assert answer["output_ids"] == []
    _, stash = reader.take(answer["meta_info"])
    np.testing.assert_array_equal(stash.routed_experts, experts_of_full_forward(PROMPT))
    assert (stash.sampling_mask_lengths is not None) == mask
    if mask:
        assert stash.sampling_mask_lengths.shape == (0,)
        assert stash.sampling_mask_token_ids.shape == (0,)


def test_batch_keeps_its_order_and_each_item_its_object(
    server: Any, reader: Any, experts_of_full_forward: Callable
) -> None:
    prompts = [PROMPT[:10], PROMPT[5:25], PROMPT]
    answers = server.generate({"input_ids": prompts, "sampling_params": GREEDY, **ROWS})
    keys = [answer["meta_info"]["output_store_ref"]["key"] for answer in answers]
    assert len(set(keys)) == 3
    for prompt, answer in zip(prompts, answers, strict=True):
        _, stash = reader.take(answer["meta_info"])
        np.testing.assert_array_equal(
            stash.routed_experts, experts_of_full_forward(prompt + answer["output_ids"])[:-1]
        )


@pytest.mark.parametrize("mode", ["selected", "support"])
@pytest.mark.parametrize("n", [1, 3])
def test_stored_mask_holds_each_sampled_token_with_its_log_probability(
    server: Any, reader: Any, mode: str, n: int
) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 1.0, "top_k": 7, "n": n, "ignore_eos": True}
    request = {"input_ids": PROMPT, "return_sampling_mask": True, "sampling_logprobs_mode": mode}
    answer = server.generate({**request, "sampling_params": sampling, "return_outputs_via_store": True})
    for item in answer if n > 1 else [answer]:
        meta_info = item["meta_info"]
        assert not INLINE_KEYS & meta_info.keys()
        _, stash = reader.take(meta_info)
        assert stash.routed_experts is None
        assert stash.sampling_mask_lengths.tolist() == [7] * 5
        supports = np.split(stash.sampling_mask_token_ids, np.cumsum(stash.sampling_mask_lengths)[:-1])
        places = [
            support.tolist().index(token) for support, token in zip(supports, item["output_ids"], strict=True)
        ]
        if mode == "selected":
            assert stash.sampling_mask_logprobs is None
            assert len(meta_info["output_token_sampling_logprobs"]) == 5
        else:
            assert "output_token_sampling_logprobs" not in meta_info
            logprobs = stash.sampling_mask_logprobs.reshape(5, 7)
            np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1.0, rtol=1e-4)
            picked = [float(row[place]) for row, place in zip(logprobs, places, strict=True)]
            assert meta_info["output_token_sampling_selected_logprobs"] == pytest.approx(picked)


@pytest.mark.parametrize("mode", ["selected", "support"])
def test_log_probabilities_that_are_not_finite_become_the_floor_and_are_counted(
    server: Any, reader: Any, metric: Callable[..., float], test_plugin: Any, mode: str
) -> None:
    before = metric(server, "output_store_floored_logprobs_total")
    sampling = {"max_new_tokens": 3, "temperature": 1.0, "top_k": test_plugin.NAN_SUPPORT, "ignore_eos": True}
    request = {"input_ids": PROMPT, "return_sampling_mask": True, "sampling_logprobs_mode": mode}
    answer = server.generate({**request, "sampling_params": sampling, "return_outputs_via_store": True})
    name = (
        "output_token_sampling_logprobs" if mode == "selected" else "output_token_sampling_selected_logprobs"
    )
    assert answer["meta_info"][name] == [LOGPROB_FLOOR] * 3
    _, stash = reader.take(answer["meta_info"])
    num_floored = 3 if mode == "selected" else 3 * test_plugin.NAN_SUPPORT
    if mode == "support":
        assert (stash.sampling_mask_logprobs == LOGPROB_FLOOR).all()
    assert metric(server, "output_store_floored_logprobs_total") == before + num_floored


def test_metrics_stand_beside_the_engines_own(server: Any, reader: Any, metric: Callable[..., float]) -> None:
    names = ("output_store_puts_total", "output_store_put_bytes_total")
    before = [metric(server, name) for name in names]
    answer = server.generate({"input_ids": PROMPT, "sampling_params": GREEDY, **ROWS})
    ref, _ = reader.take(answer["meta_info"])
    stored_bytes = ref.fields["routed_experts"].stored_bytes
    assert [metric(server, name) for name in names] == [before[0] + 1, before[1] + stored_bytes]
    assert "sglang:prompt_tokens_total{" in httpx.get(f"{server.url}/metrics").text


async def test_our_client_knows_what_the_server_can_and_reads_its_objects(
    server: Any, reader: Any, experts_of_full_forward: Callable
) -> None:
    engine = RemoteEngine(
        server.url, RemoteSettings(num_layers=3, experts_per_token=2), needs_output_store="faulty"
    )
    await engine.start()
    can = engine.capabilities
    assert (can.routed_experts, can.indexer_topk, can.sampling_mask) == (True, True, True)
    request = GenerateRequest(
        request_id="ours",
        input_ids=tuple(PROMPT),
        sampling=SamplingParams(max_new_tokens=4, top_k=5, ignore_eos=True),
        return_routed_experts=True,
        return_sampling_mask=True,
        return_outputs_via_store=True,
    )
    answer = await engine.generate(request)
    await engine.close()
    _, stash = reader.take({"output_store_ref": answer.output_store_ref.to_builtins()})
    expected = experts_of_full_forward(PROMPT + list(answer.output_ids))[:-1]
    np.testing.assert_array_equal(stash.routed_experts, expected)
    assert stash.sampling_mask_lengths.tolist() == [5] * 4
    assert all(logprob < 0 for logprob in answer.output_logprobs)


def test_inline_support_mode_has_the_sampled_tokens_log_probabilities_too(server: Any, reader: Any) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 1.0, "top_k": 5, "ignore_eos": True}
    answer = server.generate(
        {
            "input_ids": PROMPT,
            "sampling_params": sampling,
            "return_sampling_mask": True,
            "sampling_logprobs_mode": "support",
        }
    )
    meta_info = answer["meta_info"]
    rows = zip(
        answer["output_ids"],
        meta_info["output_token_sampling_mask"],
        meta_info["output_token_sampling_logprobs"],
        strict=True,
    )
    expected = [logprobs[support.index(token)] for token, support, logprobs in rows]
    assert meta_info["output_token_sampling_selected_logprobs"] == expected
    assert "output_store_ref" not in meta_info


def test_inline_masks_work_with_several_samples(server: Any, reader: Any) -> None:
    sampling = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 5, "n": 2, "ignore_eos": True}
    answers = server.generate(
        {"input_ids": PROMPT, "sampling_params": sampling, "return_sampling_mask": True}
    )
    assert [len(answer["meta_info"]["output_token_sampling_mask"]) for answer in answers] == [3, 3]


def test_indexer_rows_go_through_the_store(server: Any, reader: Any, test_plugin: Any) -> None:
    answer = server.generate(
        {
            "input_ids": PROMPT,
            "sampling_params": GREEDY,
            "return_indexer_topk": True,
            "return_outputs_via_store": True,
        }
    )
    assert not INLINE_KEYS & answer["meta_info"].keys()
    ref, stash = reader.take(answer["meta_info"])
    assert ref.fields["indexer_topk"].codec == "position_blocks"
    np.testing.assert_array_equal(stash.indexer_topk, test_plugin.indexer_rows(35).numpy())
    assert stash.routed_experts is None


def test_stream_has_its_reference_in_the_finish_chunk_only(
    server: Any, reader: Any, experts_of_full_forward: Callable
) -> None:
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "top_k": 4, "ignore_eos": True}
    chunks = server.stream(
        "/generate",
        {"input_ids": PROMPT, "sampling_params": sampling, "return_sampling_mask": True, **ROWS},
    )
    assert len(chunks) == 6
    assert all(not INLINE_KEYS & chunk["meta_info"].keys() for chunk in chunks)
    assert ["output_store_ref" in chunk["meta_info"] for chunk in chunks] == [False] * 5 + [True]
    _, stash = reader.take(chunks[-1]["meta_info"])
    expected = experts_of_full_forward(PROMPT + chunks[-1]["output_ids"])[:-1]
    np.testing.assert_array_equal(stash.routed_experts, expected)
    assert stash.sampling_mask_lengths.tolist() == [4] * 6


def test_streamed_batch_has_a_reference_for_each_item(server: Any, reader: Any) -> None:
    chunks = server.stream(
        "/generate", {"input_ids": [PROMPT, PROMPT[:9]], "sampling_params": GREEDY, **ROWS}
    )
    finished = {
        chunk["index"]: chunk["meta_info"] for chunk in chunks if "output_store_ref" in chunk["meta_info"]
    }
    assert sorted(finished) == [0, 1]
    assert len(reader.take(finished[0])[1].routed_experts) == 35
    assert len(reader.take(finished[1])[1].routed_experts) == 14


CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 5,
    "ignore_eos": True,
}


def test_chat_answers_carry_references(server: Any, reader: Any) -> None:
    response = server.post("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1.0, **ROWS})
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        meta_info = choice["meta_info"]
        assert not INLINE_KEYS & meta_info.keys()
        _, stash = reader.take(meta_info)
        assert len(stash.routed_experts) == meta_info["prompt_tokens"] + 5 - 1


def test_streamed_chat_has_each_choice_s_reference_in_its_finish_chunk(server: Any, reader: Any) -> None:
    chunks = server.stream("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1.0, **ROWS})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    with_ref = {choice["index"]: choice for choice in choices if choice.get("meta_info")}
    assert sorted(with_ref) == [0, 1]
    for choice in with_ref.values():
        assert choice["finish_reason"] == "length"
        reader.take(choice["meta_info"])
    assert all("sglext" not in chunk for chunk in chunks)


def test_chat_without_opting_in_stays_inline(server: Any, reader: Any) -> None:
    response = server.post("/v1/chat/completions", {**CHAT, "return_routed_experts": True}).json()
    assert response["sglext"]["routed_experts"]
    assert not response["choices"][0].get("meta_info")


def test_chat_answer_that_cannot_be_built_leaves_nothing(
    server: Any, reader: Any, puts_begun: Callable[[], int], test_plugin: Any
) -> None:
    before = puts_begun()
    messages = [{"role": "user", "content": test_plugin.UNANSWERABLE}]
    response = server.post("/v1/chat/completions", {**CHAT, "messages": messages, **ROWS})
    assert response.status_code in (400, 500), response.text
    assert puts_begun() == before + 1
    assert reader.is_empty_within(30), reader.keys()


def test_nothing_asked_for_means_no_reference(server: Any, reader: Any) -> None:
    answer = server.generate(
        {"input_ids": PROMPT, "sampling_params": GREEDY, "return_outputs_via_store": True}
    )
    assert "output_store_ref" not in answer["meta_info"]


def test_aborted_request_delivers_the_rows_of_its_partial_output(
    server: Any,
    reader: Any,
    experts_of_full_forward: Callable,
    num_running: Callable[[Any], int],
    wait_until: Callable[..., None],
) -> None:
    sampling = {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True}
    answers: list[Any] = []
    body = {"rid": "abort-me", "input_ids": PROMPT, "sampling_params": sampling, **ROWS}
    thread = threading.Thread(target=lambda: answers.append(server.generate(body)))
    wait_until(lambda: num_running(server) == 0)
    thread.start()
    wait_until(lambda: num_running(server) == 1)
    server.post("/abort_request", {"rid": "abort-me"})
    thread.join(timeout=60)
    (answer,) = answers
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    output_ids = answer["output_ids"]
    assert 0 < len(output_ids) < 3000
    _, stash = reader.take(answer["meta_info"])
    np.testing.assert_array_equal(stash.routed_experts, experts_of_full_forward(PROMPT + output_ids)[:-1])


def test_aborted_in_the_queue_has_no_reference_and_no_error(
    server: Any, reader: Any, num_running: Callable[[Any], int], wait_until: Callable[..., None]
) -> None:
    """Paused in place nothing is scheduled, so the request waits until it is aborted."""
    answers: list[Any] = []
    body = {"rid": "queued", "input_ids": PROMPT, "sampling_params": GREEDY, **ROWS}
    running = {**body, "rid": "running", "sampling_params": {**GREEDY, "max_new_tokens": 3000}}
    threads = [
        threading.Thread(target=lambda b=b: answers.append(server.post("/generate", b)))
        for b in (running, body)
    ]
    wait_until(lambda: num_running(server) == 0)
    threads[0].start()
    wait_until(lambda: num_running(server) == 1)
    server.post("/pause_generation", {"mode": "retract"})
    # The front end holds new requests back while it is paused; the retracted one is in the scheduler's queue.
    server.post("/abort_request", {"rid": "running"})
    threads[0].join(timeout=30)
    server.post("/continue_generation", {})
    assert len(answers) == 1
    assert answers[0].status_code == 200
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert "output_store_ref" not in answers[0].json()["meta_info"]
    threads[1].start()
    threads[1].join(timeout=60)
    reader.take(answers[1].json()["meta_info"])
