"""What remains true of a model object that was given to an engine, which changes it for its steps."""

import copy

import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.engines.embedded.build import build_core


@pytest.mark.parametrize("products", ["native", "float32"])
def test_an_engine_on_the_model_of_an_earlier_one_computes_with_its_weights(products, qwen3_moe, settings):
    changes = {"dtype": "bfloat16", "bfloat16_products": products}
    build_core(settings(**changes), qwen3_moe, None)
    core = build_core(settings(**changes), qwen3_moe, None)
    model = core.runner.model
    token_ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert model(token_ids).logits.any()
        for layer in model.model.layers[1:]:
            layer.mlp.experts.down_proj.zero_()
        model.lm_head.weight.zero_()
        if core._products is not None:
            core._products.refresh()
        assert not model.model.layers[1].mlp(torch.ones(1, 1, 64, dtype=torch.bfloat16)).any()
        assert not model(token_ids).logits.any()


def test_generate_of_transformers_still_infers_the_mask_of_padded_prompts(qwen3_moe, settings):
    padded = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 5, 5, 6, 7]])
    qwen3_moe.generation_config.pad_token_id = 0
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = torch.stack(qwen3_moe.generate(padded, **options).logits)
    build_core(settings(), qwen3_moe, None)
    torch.testing.assert_close(torch.stack(qwen3_moe.generate(padded, **options).logits), expected)


async def test_hooks_and_wishes_of_who_uses_the_engines_model_are_served(
    qwen3_moe, engine_of, prompt, request_of
):
    async with engine_of(qwen3_moe) as engine:
        model = engine._core_now().runner.model
        seen = []
        model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        model.model.norm.register_forward_pre_hook(lambda *_: seen.append("norm"))
        await engine.generate(request_of("a", prompt(4, 1), max_new_tokens=1))
        assert seen == [False, "norm"]
        token_ids = torch.arange(12)[None]
        output = model(token_ids, output_hidden_states=True, return_dict=False, use_cache=False)
        (_, hidden_states) = output
        assert len(hidden_states) == 4
        assert seen == [False, "norm", True, "norm"]


async def test_expert_matrices_lie_by_input_through_updates_and_sleep(qwen3_moe, engine_of):
    def strides(engine):
        experts = engine._core_now().runner.model.model.layers[1].mlp.experts
        return experts.gate_up_proj.stride(), experts.down_proj.stride()

    async with engine_of(qwen3_moe) as engine:
        expected = (64 * 64, 1, 64), (64 * 32, 1, 64)
        assert strides(engine) == expected
        await send_weights(engine, qwen3_moe, "1")
        assert strides(engine) == expected
        await engine.sleep()
        await engine.wake()
        assert strides(engine) == expected
        await send_weights(engine, qwen3_moe, "2")
        assert strides(engine) == expected


async def send_weights(engine, model, version):
    await engine.begin_weight_update(version)
    for bucket in pack_buckets(model.named_parameters(), 1 << 20):
        await engine.update_weights(bucket)
    await engine.commit_weight_update(version)


def test_a_copy_of_the_engines_model_computes_with_weights_of_its_own(qwen3_moe, settings):
    untouched = copy.deepcopy(qwen3_moe)
    build_core(settings(), qwen3_moe, None)
    copied = copy.deepcopy(qwen3_moe)
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        for model in (untouched, copied):
            model.model.layers[1].mlp.experts.down_proj.mul_(-2.0)
        expected, own = untouched(token_ids).logits, copied(token_ids).logits
        assert not torch.allclose(expected, qwen3_moe(token_ids).logits, atol=1e-3)
    torch.testing.assert_close(own, expected)
