"""Tiny random models, reference forward passes of transformers, and engines over them."""

import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.types import GenerateOutput, GenerateRequest

VOCAB = 128


def spread_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Weights large enough that experts and tokens are told apart by far more than rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model.eval()


@pytest.fixture
def qwen3_moe() -> PreTrainedModel:
    """Three layers: a dense one, then two with 8 experts, 2 a token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return spread_weights(Qwen3MoeForCausalLM(config))


@pytest.fixture
def settings() -> Callable[..., EmbeddedEngineSetup]:
    """An engine configuration small enough that scheduling limits are met often."""

    def make(**changes: object) -> EmbeddedEngineSetup:
        values: dict[str, object] = {
            "dtype": "float32",
            "kv_cache_tokens": 2048,
            "context_length": 256,
            "max_running_requests": 8,
            "chunked_prefill_tokens": 48,
            "enable_return_routed_experts": True,
            "num_threads": 1,
        }
        return EmbeddedEngineSetup.model_validate(values | changes)

    return make


@pytest.fixture
def engine_of(
    settings: Callable[..., EmbeddedEngineSetup],
) -> Callable[..., AbstractAsyncContextManager[EmbeddedEngine]]:
    """`async with engine_of(model, **settings) as engine`: a started engine on a copy of the model.

    With `folder` the model is saved there, and the engine loads it itself, which is when it takes shortcuts.
    """

    @contextlib.asynccontextmanager
    async def make(
        model: PreTrainedModel, tokenizer: object = None, folder: Path | None = None, **changes: object
    ) -> AsyncIterator[EmbeddedEngine]:
        if folder is None:
            engine = EmbeddedEngine(settings(**changes), model=copy.deepcopy(model), tokenizer=tokenizer)
        else:
            model.save_pretrained(folder)
            engine = EmbeddedEngine(settings(model_path=str(folder), **changes), tokenizer=tokenizer)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    return make


@pytest.fixture
def prompt() -> Callable[[int, int], tuple[int, ...]]:
    """`prompt(length, seed)`: random token ids."""

    def make(length: int, seed: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())

    return make


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    """`request_of(id, ids, **sampling or request fields)`."""

    def make(request_id: str, input_ids: tuple[int, ...], **fields: object) -> GenerateRequest:
        own = {name: fields.pop(name) for name in list(fields) if name in GenerateRequest.__struct_fields__}
        values = {"request_id": request_id, "input_ids": input_ids, "sampling": fields, **own}
        return msgspec.convert(values, GenerateRequest)

    return make


class Reference:
    """What one full forward pass of transformers gives for a sequence."""

    def __init__(self, model: PreTrainedModel, token_ids: list[int]) -> None:
        chosen: dict[int, torch.Tensor] = {}
        handles = []
        for index, layer in enumerate(model.model.layers):
            for module in layer.modules():
                if type(module).__name__.endswith("Experts"):
                    handles.append(
                        module.register_forward_pre_hook(
                            lambda experts, args, index=index: chosen.__setitem__(
                                index, args[1] if len(args) > 1 else _only_expert(experts, args[0])
                            )
                        )
                    )
        with torch.no_grad():
            self.logits = model(input_ids=torch.tensor([token_ids])).logits[0].float()
        for handle in handles:
            handle.remove()
        width = next(iter(chosen.values())).shape[-1] if chosen else 0
        rows = np.full((len(token_ids), len(model.model.layers), width), -1, np.int32)
        for index, ids in chosen.items():
            rows[:, index] = ids.numpy()
        self.rows = rows


def _only_expert(experts: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Llama 4's experts each see every token, times a score that is 0 but for the one chosen."""
    num_experts = int(experts.num_experts)  # type: ignore[arg-type]
    strength = inputs.reshape(num_experts, -1, inputs.shape[-1]).abs().sum(-1)
    assert torch.equal((strength > 0).sum(0), torch.ones(strength.shape[1], dtype=torch.int64))
    return strength.argmax(0)[:, None]


@pytest.fixture
def check_against() -> Callable[[PreTrainedModel, GenerateRequest, GenerateOutput], None]:
    """Rows and log-probabilities of an answer equal those of one full forward pass over its final tokens."""

    def check(model: PreTrainedModel, request: GenerateRequest, output: GenerateOutput) -> None:
        prompt_tokens, count = len(request.input_ids), len(output.output_ids)
        reference = Reference(model, [*request.input_ids, *output.output_ids])
        if request.return_routed_experts:
            forwarded = prompt_tokens + count - 1 if count else prompt_tokens
            assert output.outputs is not None
            got = output.outputs.routed_experts
            assert got is not None
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, reference.rows[output.routed_experts_start : forwarded])
        params = request.sampling
        plain = params.top_p == 1.0 and params.top_k == -1 and params.min_p == 0.0
        if count and plain and params.frequency_penalty == params.presence_penalty == 0.0:
            logits = reference.logits[prompt_tokens - 1 : prompt_tokens + count - 1]
            logprobs = (logits / (params.temperature or 1.0)).log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(output.output_ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(output.output_logprobs, expected, atol=2e-4)

    return check
