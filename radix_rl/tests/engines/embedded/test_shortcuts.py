"""Shortcuts: who gets them, and what remains true of a model that has them."""

import copy

import pytest
import torch

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.engines.embedded.shortcuts.apply import apply


def has_shortcuts(engine):
    return any("forward" in vars(m) for m in engine._core_now().runner.model.model.layers.modules())


@pytest.mark.parametrize(
    ("loaded", "shortcuts", "expected"),
    [(True, "auto", True), (True, "off", False), (False, "auto", False)],
)
async def test_only_a_model_that_the_engine_loaded_gets_shortcuts_and_all_answers_are_equal(
    loaded, shortcuts, expected, qwen3_moe, engine_of, tmp_path, prompt, request_of, check_against
):
    folder = tmp_path if loaded else None
    request = request_of("a", prompt(20, 1), max_new_tokens=12, seed=3)
    changes = {"shortcuts": shortcuts, "enable_return_routed_experts": False}
    async with engine_of(qwen3_moe, folder=folder, **changes) as engine:
        assert has_shortcuts(engine) == expected
        check_against(qwen3_moe, request, await engine.generate(request))
        core = engine._core_now()
    assert not any("forward" in vars(module) for module in core.runner.model.modules())


async def test_hooks_and_wishes_of_who_uses_the_engines_model_are_served(
    qwen3_moe, engine_of, tmp_path, prompt, request_of
):
    async with engine_of(qwen3_moe, folder=tmp_path) as engine:
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


async def test_expert_matrices_lie_by_input_through_updates_and_sleep(qwen3_moe, engine_of, tmp_path):
    def strides(engine):
        experts = engine._core_now().runner.model.model.layers[1].mlp.experts
        return experts.gate_up_proj.stride(), experts.down_proj.stride()

    async with engine_of(qwen3_moe, folder=tmp_path) as engine:
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


def test_a_copy_of_a_model_with_shortcuts_computes_with_weights_of_its_own(qwen3_moe):
    untouched = copy.deepcopy(qwen3_moe)
    apply(qwen3_moe)
    copied = copy.deepcopy(qwen3_moe)
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        for model in (untouched, copied):
            model.model.layers[1].mlp.experts.down_proj.mul_(-2.0)
        expected, own = untouched(token_ids).logits, copied(token_ids).logits
        assert not torch.allclose(expected, qwen3_moe(token_ids).logits, atol=1e-3)
    torch.testing.assert_close(own, expected)
