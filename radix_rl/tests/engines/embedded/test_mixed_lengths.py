"""What a model computes from the whole batch's lengths: equal to each sequence alone, or refused by name."""

import asyncio

import pytest
import torch
import transformers as tf

from radix_rl.engines.embedded.forward import trial
from radix_rl.errors import ConfigurationError
from radix_rl.model_layers import longest_without_switch

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}


def spread(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


def phi3():
    return spread(
        tf.Phi3ForCausalLM(
            tf.Phi3Config(**SIZES, original_max_position_embeddings=32, rope_parameters=dict(LONGROPE))
        )
    )


async def test_long_rope_serves_contexts_below_its_switch_and_refuses_longer_ones(
    engine_of, prompt, request_of, check_against
):
    model = phi3()
    options = {"enable_return_routed_experts": False, "context_length": None}
    requests = [request_of(str(i), prompt(4 + 8 * i, i), max_new_tokens=12, seed=i) for i in range(3)]
    async with engine_of(model, **options) as engine:
        assert (await engine.info()).context_length == 32
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
        with pytest.raises(Exception, match="32"):
            await engine.generate(request_of("long", prompt(60, 5), max_new_tokens=4))
    for request, output in zip(requests, outputs, strict=True):
        check_against(model, request, output)
    with pytest.raises(
        ConfigurationError, match=r"expected at most the length at which .* factors switch: 32, got 256"
    ):
        async with engine_of(model, **(options | {"context_length": 256})):
            pass


def test_frequencies_that_depend_on_the_length_are_told_by_their_kind():
    assert longest_without_switch(phi3().config) == 32
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert longest_without_switch(tf.LlamaConfig(**SIZES, rope_parameters=dynamic)) == 256
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert longest_without_switch(tf.LlamaConfig(**SIZES, rope_parameters=linear)) is None
    by_layer = {"full_attention": dict(LONGROPE), "sliding_attention": {"rope_type": "default"}}
    assert longest_without_switch(tf.PretrainedConfig(rope_parameters=by_layer)) == 32


DECODERS = {
    "vocab_size": 128,
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["Bart", "MBart", "Marian", "Pegasus", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall"]
)
async def test_decoders_that_count_positions_over_the_batch_are_refused(name, dtype, engine_of):
    config = getattr(tf, f"{name}Config")(**DECODERS)
    model = spread(getattr(tf, f"{name}ForCausalLM")(config))
    with pytest.raises(ConfigurationError, match=rf"{name}\w* does not run in the embedded engine"):
        async with engine_of(model, dtype=dtype, enable_return_routed_experts=False):
            pass


@pytest.mark.parametrize("name", ["Gemma2", "OPT", "GPT2", "Phi", "StableLm", "GPTNeoX"])
async def test_families_of_other_kinds_pass_the_trial(name, engine_of, prompt, request_of):
    sizes = SIZES | {"num_key_value_heads": 4, "word_embed_proj_dim": 64, "ffn_dim": 96}
    if name == "GPT2":
        sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "eos_token_id": None}
    model = spread(
        getattr(tf, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(
            getattr(tf, f"{name}Config")(**sizes)
        )
    )
    requests = [request_of(str(i), prompt(3 + 9 * i, i), max_new_tokens=6, seed=i) for i in range(3)]
    model.set_attn_implementation("eager")
    async with engine_of(model, enable_return_routed_experts=False) as engine:
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        ids = torch.tensor([[*request.input_ids, *output.output_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(request.input_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.output_logprobs), expected, atol=2e-4, rtol=0)


async def test_a_model_that_wants_a_cache_of_its_own_is_refused_by_name(engine_of):
    model = tf.MiniMaxForCausalLM(
        tf.MiniMaxConfig(
            **SIZES, layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1
        )
    )
    with pytest.raises(ConfigurationError, match="MiniMaxForCausalLM does not run with the embedded engine"):
        async with engine_of(model):
            pass


async def test_rounding_of_a_deep_model_in_16_bits_is_no_fault_of_its_family(engine_of, prompt, request_of):
    sizes = SIZES | {"num_hidden_layers": 24}
    model = spread(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)))
    async with engine_of(model, dtype="bfloat16", enable_return_routed_experts=False) as engine:
        output = await engine.generate(request_of("a", prompt(5, 1), max_new_tokens=3))
    assert len(output.output_ids) == 3


async def test_an_error_in_16_bits_is_measured_by_the_models_own_rounding(engine_of, monkeypatch):
    model = spread(tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)))
    monkeypatch.setattr(trial, "_LARGEST_HALF_ERROR", 0.0)
    async with engine_of(model, dtype="bfloat16", enable_return_routed_experts=False):
        pass
    monkeypatch.setattr(trial, "_LARGEST_OF_ROUNDING", 0.0)
    model = spread(tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)))
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM does not run in the embedded engine"):
        async with engine_of(model, dtype="bfloat16", enable_return_routed_experts=False):
            pass
