"""Behaviour of one API server with the store, on its three routes."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from radix_transfer_plugins.responses import find_refs

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPT = list(range(30, 50))
SAMPLING = {"max_tokens": 3, "temperature": 1.0, "top_k": 5, "ignore_eos": True}
COMPLETION = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True, **SAMPLING}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "return_token_ids": True,
    **SAMPLING,
}
TOKENS = {"token_ids": PROMPT, "sampling_params": SAMPLING}
OPT_IN = {"return_outputs_via_store": True}
ROUTES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/inference/v1/generate": TOKENS,
}
INLINE_KEYS = {"routed_experts", "sampling_mask"}


def ask(server: Any, path: str, **changes: Any) -> dict[str, Any]:
    response = server.post(path, {**ROUTES[path], **changes}, timeout=600)
    assert response.status_code == 200, response.text
    return response.json()


def with_sampling(path: str, **sampling: Any) -> dict[str, Any]:
    """Changes of a body of this route that set sampling parameters."""
    return {"sampling_params": {**SAMPLING, **sampling}} if path == "/inference/v1/generate" else sampling


def prompt_of(path: str, answer: dict[str, Any]) -> list[int]:
    return answer["prompt_token_ids"] if path == "/v1/chat/completions" else PROMPT


def inline_values(choice: dict[str, Any]) -> list[Any]:
    return [choice.get(key) for key in INLINE_KEYS if choice.get(key) is not None]


def check_outputs(
    reader: Any,
    experts: Callable[..., np.ndarray],
    choice: dict[str, Any],
    prompt: list[int],
    outputs: list[int],
) -> None:
    """Takes the choice's object: rows of a full forward, and a support with each sampled token in it."""
    assert not inline_values(choice)
    ref, stash = reader.take(choice)
    assert stash.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(stash.routed_experts, experts(prompt + outputs)[:-1])
    assert ref.fields["routed_experts"].codec == "experts"
    assert stash.sampling_mask_lengths.tolist() == [5] * len(outputs)
    supports = stash.sampling_mask_token_ids.reshape(-1, 5)
    assert all(token in support for token, support in zip(outputs, supports, strict=True))
    assert stash.sampling_mask_logprobs is None


def test_server_info_names_backend_and_versions(server: Any) -> None:
    info = httpx.get(f"{server.url}/server_info", timeout=60).json()["output_store"]
    assert info["enabled"] is True
    assert info["backend"] == "faulty"
    assert info["key_prefix"] == "run-1/outputs"
    assert info["plugin"] == "radix-engine-plugins"
    assert info["ref_version"] == 1


@pytest.mark.parametrize("path", ROUTES)
def test_rows_and_masks_equal_a_full_forward(server: Any, reader: Any, experts: Callable, path: str) -> None:
    answer = ask(server, path, **OPT_IN)
    (choice,) = answer["choices"]
    check_outputs(reader, experts, choice, prompt_of(path, answer), choice["token_ids"])


@pytest.mark.parametrize("path", ROUTES)
def test_several_samples_have_an_object_each(server: Any, reader: Any, experts: Callable, path: str) -> None:
    answer = ask(server, path, **with_sampling(path, n=2), **OPT_IN)
    keys = {choice["output_store_ref"]["key"] for choice in answer["choices"]}
    assert len(keys) == 2
    for choice in answer["choices"]:
        check_outputs(reader, experts, choice, prompt_of(path, answer), choice["token_ids"])


@pytest.mark.parametrize("path", ROUTES)
def test_stream_has_its_reference_in_the_finish_chunk_only(
    server: Any, reader: Any, experts: Callable, path: str
) -> None:
    chunks = server.stream(path, {**ROUTES[path], **with_sampling(path, n=2), **OPT_IN})
    prompt = next((p for chunk in chunks for p in prompts_in(chunk)), PROMPT)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        parts = [choice for choice in choices if choice["index"] == index]
        assert [part for part in parts if "output_store_ref" in part] == parts[-1:]
        assert parts[-1]["finish_reason"] == "length"
        assert not any(inline_values(part) for part in parts)
        outputs = [token for part in parts for token in part.get("token_ids") or ()]
        check_outputs(reader, experts, parts[-1], prompt, outputs)


def prompts_in(chunk: dict[str, Any]) -> list[list[int]]:
    """vLLM names the prompt's tokens in the first chunk: at its top, or in its choice."""
    found = [chunk.get("prompt_token_ids"), *(c.get("prompt_token_ids") for c in chunk["choices"])]
    return [tokens for tokens in found if tokens]


def test_several_prompts_keep_their_order(server: Any, reader: Any, experts: Callable) -> None:
    prompts = [PROMPT[:7], PROMPT]
    answer = ask(server, "/v1/completions", prompt=prompts, n=2, **OPT_IN)
    assert len(answer["choices"]) == 4
    for choice, prompt in zip(answer["choices"], [prompts[0]] * 2 + [prompts[1]] * 2, strict=True):
        check_outputs(reader, experts, choice, prompt, choice["token_ids"])


def test_stored_rows_equal_the_inline_rows(server: Any, reader: Any, inline_rows: Callable) -> None:
    """Greedy with a support of one; vLLM leaves 0 in the layer that does not route."""
    certain = {"top_k": 1}
    (inline,) = ask(server, "/v1/completions", **certain)["choices"]
    assert "output_store_ref" not in inline
    (stored,) = ask(server, "/v1/completions", **certain, vllm_xargs=OPT_IN)["choices"]
    assert stored["token_ids"] == inline["token_ids"]
    _, stash = reader.take(stored)
    rows = inline_rows(inline["routed_experts"])
    assert rows.dtype == np.uint8
    np.testing.assert_array_equal(stash.routed_experts[:, 1:], rows[:, 1:])
    assert (stash.routed_experts[:, 0] == -1).all()
    assert stash.sampling_mask_token_ids.tolist() == stored["token_ids"]


def test_without_opting_in_answers_stay_inline(server: Any, reader: Any) -> None:
    (choice,) = ask(server, "/inference/v1/generate")["choices"]
    assert choice["routed_experts"]
    assert [len(support) for support in choice["sampling_mask"]] == [5] * 3
    assert find_refs(choice) == []
    (refused,) = ask(server, "/inference/v1/generate", return_outputs_via_store=False)["choices"]
    assert refused["routed_experts"]


def test_start_row_is_honoured_and_named(server: Any, reader: Any, experts: Callable) -> None:
    (choice,) = ask(server, "/v1/completions", routed_experts_prompt_start=15, **OPT_IN)["choices"]
    ref, stash = reader.take(choice)
    assert ref.fields["routed_experts"].start_row == 15
    np.testing.assert_array_equal(stash.routed_experts, experts(PROMPT + choice["token_ids"])[15:-1])


def test_zero_rows_are_an_answer(server: Any, reader: Any) -> None:
    changes = {"routed_experts_prompt_start": len(PROMPT), "max_tokens": 1}
    (choice,) = ask(server, "/v1/completions", **changes, **OPT_IN)["choices"]
    _, stash = reader.take(choice)
    assert stash.routed_experts.shape == (0, 3, 2)


def test_start_row_past_the_prompt_is_refused(server: Any, reader: Any) -> None:
    response = server.post("/v1/completions", {**COMPLETION, "routed_experts_prompt_start": 21, **OPT_IN})
    assert response.status_code == 400
    assert "routed_experts_prompt_start" in response.text


def test_echo_of_the_prompt_alone_has_its_rows_and_no_mask_row(
    server: Any, reader: Any, experts: Callable
) -> None:
    (choice,) = ask(server, "/v1/completions", echo=True, max_tokens=0, **OPT_IN)["choices"]
    _, stash = reader.take(choice)
    np.testing.assert_array_equal(stash.routed_experts, experts(PROMPT))
    assert stash.sampling_mask_lengths.shape == stash.sampling_mask_token_ids.shape == (0,)


def test_sampled_tokens_log_probabilities_stay_in_the_answer(server: Any, reader: Any) -> None:
    (choice,) = ask(server, "/v1/completions", logprobs=0, **OPT_IN)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    reader.take(choice)


@pytest.mark.parametrize("value", ["maybe", [1]])
def test_opting_in_with_another_value_is_refused(server: Any, reader: Any, value: Any) -> None:
    for path, body in ROUTES.items():
        response = server.post(path, {**body, "return_outputs_via_store": value})
        assert response.status_code == 400, path
        assert "return_outputs_via_store" in response.text


def test_routes_without_a_place_for_a_reference_refuse(server: Any, reader: Any) -> None:
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 2, "temperature": 1.0, "top_k": 5}
    response = server.post("/v1/responses", {**body, "vllm_xargs": OPT_IN})
    assert response.status_code == 400
    assert "no place for a reference" in response.text


def test_aborted_request_delivers_the_rows_of_its_partial_output(
    server: Any, reader: Any, experts: Callable, tokens_since: Callable, wait_until: Callable
) -> None:
    answers: list[Any] = []
    generated = tokens_since(server)
    body = {**with_sampling("/inference/v1/generate", max_tokens=400), "request_id": "abort-me", **OPT_IN}
    thread = threading.Thread(target=lambda: answers.append(ask(server, "/inference/v1/generate", **body)))
    thread.start()
    wait_until(lambda: generated() >= 3)
    server.post("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-abort-me"]})
    thread.join(timeout=600)
    (choice,) = answers[0]["choices"]
    assert choice["finish_reason"] == "abort"
    assert 3 <= len(choice["token_ids"]) < 400
    check_outputs(reader, experts, choice, PROMPT, choice["token_ids"])
