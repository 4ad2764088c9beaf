"""`vllm.LLM` and `vllm.AsyncLLM` in the caller's process."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
PROMPT = list(range(30, 50))


def run(python: str, environment: dict[str, str], program: str, *arguments: str) -> dict[str, Any]:
    """What a program of this folder answered."""
    done = subprocess.run(
        [python, HERE / program, *arguments],
        env={**environment, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(lines[-1].removeprefix("ANSWERS "))


@pytest.fixture(scope="module")
def llm_answers(
    vllm_python: str,
    vllm_environment: dict[str, str],
    tiny_moe_dense_first: Path,
    store_config: dict[str, Any],
) -> dict[str, Any]:
    in_one_process = {**vllm_environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return run(
        vllm_python, in_one_process, "llm_program.py", str(tiny_moe_dense_first), json.dumps(store_config)
    )


@pytest.fixture(scope="module")
def async_answers(
    vllm_python: str,
    vllm_environment: dict[str, str],
    tiny_moe_dense_first: Path,
    store_config: dict[str, Any],
) -> dict[str, Any]:
    return run(
        vllm_python,
        vllm_environment,
        "async_llm_program.py",
        str(tiny_moe_dense_first),
        json.dumps(store_config),
    )


@pytest.fixture(scope="module")
def take(
    test_plugin: Any, open_reader: Callable[..., Any], store_config: dict[str, Any]
) -> Callable[..., Any]:
    reader = open_reader("faulty", store_config)
    return lambda answer: reader.take({"output_store_ref": answer["ref"]})


def check(
    take: Callable[..., Any], experts: Callable[..., Any], answer: dict[str, Any], prompt: list[int]
) -> None:
    assert answer["routed_experts"] is None
    assert answer["sampling_mask"] is None
    _, stash = take(answer)
    np.testing.assert_array_equal(stash.routed_experts, experts(prompt + answer["token_ids"])[:-1])
    supports = stash.sampling_mask_token_ids.reshape(-1, 5)
    assert all(token in row for token, row in zip(answer["token_ids"], supports, strict=True))


def test_llm_s_answers_have_references(
    llm_answers: dict[str, Any], take: Callable[..., Any], experts: Callable[..., Any]
) -> None:
    for answer, prompt in zip(llm_answers["batch"], [PROMPT, PROMPT[:7]], strict=True):
        assert answer["num_logprobs"] == 4
        check(take, experts, answer, prompt)
    assert len(llm_answers["samples"]) == 2
    for answer in (*llm_answers["samples"], *llm_answers["after"]):
        check(take, experts, answer, PROMPT)
    (started,) = llm_answers["start"]
    ref, stash = take(started)
    assert ref.fields["routed_experts"].start_row == 15
    np.testing.assert_array_equal(stash.routed_experts, experts(PROMPT + started["token_ids"])[15:-1])


def test_llm_is_stock_without_opting_in(llm_answers: dict[str, Any], experts: Callable[..., Any]) -> None:
    (answer,) = llm_answers["inline"]
    assert answer["ref"] is None
    expected = experts(PROMPT + answer["token_ids"])[:-1, 1:]
    np.testing.assert_array_equal(np.array(answer["routed_experts"])[:, 1:], expected)
    assert [len(support) for support in answer["sampling_mask"]] == [5] * 4


def test_llm_s_failed_put_is_an_error_that_leaves_nothing(llm_answers: dict[str, Any]) -> None:
    assert "could not be stored: StoreFullError" in llm_answers["failed"]
    assert "expected true or false, got 'maybe'" in llm_answers["unclear"]


def test_async_llm_s_answers_have_references(
    async_answers: dict[str, Any], take: Callable[..., Any], experts: Callable[..., Any]
) -> None:
    check(take, experts, async_answers["single"], PROMPT)
    for answer in async_answers["samples"]:
        check(take, experts, answer, PROMPT)


def test_async_llm_s_stream_has_its_reference_at_the_end(
    async_answers: dict[str, Any], take: Callable[..., Any], experts: Callable[..., Any]
) -> None:
    parts = async_answers["stream"]
    assert [part["ref"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    tokens = [token for part in parts for token in part["token_ids"]]
    check(take, experts, {**parts[-1], "token_ids": tokens}, PROMPT)


def test_async_llm_s_aborted_request_has_the_rows_of_its_partial_output(
    async_answers: dict[str, Any], take: Callable[..., Any], experts: Callable[..., Any]
) -> None:
    aborted = async_answers["aborted"]
    assert aborted["finish_reason"] == "abort"
    assert 0 < len(aborted["token_ids"]) < 400
    check(take, experts, aborted, PROMPT)


def test_failed_and_cancelled_requests_leave_nothing(
    async_answers: dict[str, Any], open_reader: Callable[..., Any], store_config: dict[str, Any]
) -> None:
    """Last of this file."""
    assert async_answers["cancelled"] == "CancelledError"
    assert "could not be stored: StoreFullError" in async_answers["failed"]
    reader = open_reader("faulty", store_config)
    assert reader.is_empty_within(30), reader.keys()
