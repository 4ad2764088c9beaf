"""Parts of the vLLM plugin that need no vLLM; the rest is tested in the real engine by tests/engines."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from radix_engine_plugins.settings import StoreSettings
from radix_engine_plugins.vllm import answers, seams
from radix_engine_plugins.vllm.outputs import TakenOutputs
from radix_engine_plugins.vllm.settings import refuse_unsupported, settings_of


def config(additional: Any, kv_transfer: Any = None, experts: bool = True) -> Any:
    captures = SimpleNamespace(enable_return_routed_experts=experts)
    return SimpleNamespace(
        additional_config=additional, kv_transfer_config=kv_transfer, aux_output_config=captures
    )


def test_settings_come_from_additional_config() -> None:
    assert settings_of(config({})) is None
    assert settings_of(config({"gdn_prefill_backend": "x"})) is None
    asked = {"backend": "mooncake", "config": {"key_prefix": "run-1"}}
    assert settings_of(config({"output_store": asked})) == StoreSettings("mooncake", {"key_prefix": "run-1"})
    assert settings_of(config({"output_store": {"backend": "a"}})) == StoreSettings("a", {})


@pytest.mark.parametrize(
    "asked", [{}, {"backend": 3}, {"backend": "a", "config": []}, {"backend": "a", "cfg": {}}, "mooncake", 1]
)
def test_malformed_settings_are_refused_by_name(asked: Any) -> None:
    with pytest.raises(ValueError, match=r'additional_config\["output_store"\]: expected'):
        settings_of(config({"output_store": asked}))


def test_disaggregation_is_refused() -> None:
    refuse_unsupported(config({}))
    with pytest.raises(ValueError, match="kv_role='kv_consumer'"):
        refuse_unsupported(config({}, SimpleNamespace(kv_role="kv_consumer"), experts=False))


def test_a_connector_that_loads_cache_back_is_refused_with_routed_experts_only() -> None:
    offloading = SimpleNamespace(kv_role="kv_both", kv_connector="OffloadingConnector")
    refuse_unsupported(config({}, offloading, experts=False))
    with pytest.raises(ValueError, match=r"kv_connector='OffloadingConnector'.*another request's"):
        refuse_unsupported(config({}, offloading))


def rows(*first_experts: int) -> np.ndarray:
    """`[n, 2, 2]` uint8; vLLM leaves 0 in layer 0, which does not route."""
    return np.array([[[0, 0], [expert, 200]] for expert in first_experts], np.uint8)


def mask(*supports: list[int]) -> Any:
    ids = np.array([token for support in supports for token in support], np.int64)
    ends = np.cumsum([0, *map(len, supports)])
    return SimpleNamespace(token_ids=ids, offsets=None if len(supports) == 1 else ends)


def test_chunks_join_to_int32_rows_with_minus_one_where_no_layer_routes() -> None:
    taken = TakenOutputs(num_tokens=5, num_output_tokens=3, start_row=1, rows=[rows(7, 8), rows(9)])
    stash, start_rows = taken.to_stash(routing_layers=[1], sampling_mask=False)
    assert stash.routed_experts is not None
    assert stash.routed_experts.dtype == np.int32
    expected = [[[-1, -1], [expert, 200]] for expert in (7, 8, 9)]
    assert stash.routed_experts.tolist() == expected
    assert start_rows == {"routed_experts": 1}
    assert stash.sampling_mask_lengths is None


def test_ids_above_a_byte_come_out_as_the_same_int32_rows() -> None:
    chunks = [rows(7).astype(np.uint16), np.array([[[0, 0], [300, 511]]], np.uint16)]
    taken = TakenOutputs(num_tokens=3, num_output_tokens=1, start_row=0, rows=chunks)
    stash, _ = taken.to_stash(routing_layers=[1], sampling_mask=False)
    assert stash.routed_experts is not None
    assert stash.routed_experts.dtype == np.int32
    assert stash.routed_experts.tolist() == [[[-1, -1], [7, 200]], [[-1, -1], [300, 511]]]


def test_zero_rows_keep_their_shape() -> None:
    taken = TakenOutputs(num_tokens=4, num_output_tokens=1, start_row=3, rows=[rows(1)[:0]])
    stash, _ = taken.to_stash(routing_layers=[0, 1], sampling_mask=False)
    assert stash.routed_experts is not None
    assert stash.routed_experts.shape == (0, 2, 2)


@pytest.mark.parametrize("captured", [[], [rows(1)], [rows(1, 2), rows(3)]])
def test_missing_or_surplus_rows_are_an_error(captured: list[np.ndarray]) -> None:
    taken = TakenOutputs(num_tokens=3, num_output_tokens=1, start_row=0, rows=captured)
    with pytest.raises(ValueError, match=r"rows \[0, 2\) are needed, vLLM gave"):
        taken.to_stash(routing_layers=[0, 1], sampling_mask=False)


def test_masks_of_one_and_of_several_tokens_join() -> None:
    taken = TakenOutputs(
        num_tokens=5, num_output_tokens=3, start_row=0, masks=[mask([4, 5]), mask([6], [7, 8, 9])]
    )
    stash, start_rows = taken.to_stash(routing_layers=None, sampling_mask=True)
    assert stash.routed_experts is None
    assert stash.sampling_mask_lengths is not None
    assert stash.sampling_mask_token_ids is not None
    assert stash.sampling_mask_lengths.dtype == stash.sampling_mask_token_ids.dtype == np.int32
    assert stash.sampling_mask_lengths.tolist() == [2, 1, 3]
    assert stash.sampling_mask_token_ids.tolist() == [4, 5, 6, 7, 8, 9]
    assert start_rows == {}


def test_lost_supports_are_an_error_and_an_output_that_is_not_returned_has_none() -> None:
    taken = TakenOutputs(num_tokens=3, num_output_tokens=2, start_row=0, masks=[mask([4, 5])])
    with pytest.raises(ValueError, match="2 output tokens, but vLLM gave 1 supports"):
        taken.to_stash(routing_layers=None, sampling_mask=True)
    taken = TakenOutputs(3, 1, 0, masks=[mask([4, 5])], without_output=True)
    stash, _ = taken.to_stash(routing_layers=None, sampling_mask=True)
    assert stash.sampling_mask_lengths is not None
    assert stash.sampling_mask_lengths.shape == (0,)


class Engine:
    def step(self, by: int) -> int:
        return by


def test_seams_wrap_once_and_absent_ones_are_named() -> None:
    def doubled(original: Any, engine: Any, by: int) -> int:
        return 2 * original(engine, by)

    seams.around(Engine, "step", doubled)
    seams.around(Engine, "step", doubled)
    assert Engine().step(3) == 6
    with pytest.raises(RuntimeError, match=r"this vLLM has no Engine\.leap"):
        seams.around(Engine, "leap", doubled)


class OpenChoice(BaseModel):
    model_config = ConfigDict(extra="allow")
    index: int


class ClosedChoice(BaseModel):
    index: int


class Response(BaseModel):
    choices: list[OpenChoice] | list[ClosedChoice]


@pytest.mark.parametrize("choice", [OpenChoice, ClosedChoice])
async def test_refs_are_in_the_dump_of_any_response(choice: type[BaseModel]) -> None:
    async def handle() -> Any:
        answer = answers.current_answer()
        assert answer is not None
        answer.refs["request", 1] = {"key": "k"}
        return Response.model_construct(choices=[choice(index=0), choice(index=1)])  # pyright: ignore

    response = await answers.answer_with_refs(handle, lambda request_id, index: index)
    assert isinstance(response, Response)
    assert response.model_dump()["choices"] == [{"index": 0}, {"index": 1, "output_store_ref": {"key": "k"}}]
    assert answers.current_answer() is None


async def test_refs_are_in_each_finish_chunk_of_a_stream() -> None:
    async def handle() -> Any:
        answer = answers.current_answer()
        assert answer is not None

        async def chunks() -> Any:
            yield 'data: {"choices":[{"index":0,"finish_reason":null}]}\n\n'
            answer.refs["request-1", 0] = {"key": "k"}
            yield 'data: {"choices":[{"index":2,"finish_reason":"stop"}]}\n\n'
            yield "data: [DONE]\n\n"

        return chunks()

    def second_prompt(request_id: str, index: int) -> int:
        return 2 * int(request_id.rpartition("-")[2]) + index

    stream = await answers.answer_with_refs(handle, second_prompt)
    first, last, done = [chunk async for chunk in stream]
    assert "output_store_ref" not in first
    (choice,) = json.loads(last.removeprefix("data: "))["choices"]
    assert choice == {"index": 2, "finish_reason": "stop", "output_store_ref": {"key": "k"}}
    assert done == "data: [DONE]\n\n"
