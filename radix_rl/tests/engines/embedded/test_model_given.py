"""A model object that was given to an engine: while the engine has it, and as it was after `close`."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook

from radix_rl.engines.embedded.build import build_core
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.engines.embedded.shortcuts.apply import apply
from radix_rl.errors import ConfigurationError, EngineDeadError


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


def built_and_closed(config, model):
    """The model after an engine had it for a while."""
    core = build_core(config, model, None)
    core.close(EngineDeadError("closed"))
    return model


async def test_after_close_a_given_model_is_what_it_was(qwen3_moe, settings, prompt, request_of):
    untouched = copy.deepcopy(qwen3_moe.train())
    engine = EmbeddedEngine(settings(), model=qwen3_moe)
    await engine.start()
    await engine.generate(request_of("a", prompt(20, 1), max_new_tokens=5, return_routed_experts=True))
    assert not qwen3_moe.training
    await engine.close()
    assert qwen3_moe.config.to_dict() == untouched.config.to_dict()
    assert qwen3_moe.config._attn_implementation == untouched.config._attn_implementation == "sdpa"
    for own, other in zip(qwen3_moe.modules(), untouched.modules(), strict=True):
        assert type(own) is type(other)
        assert own.training
        assert vars(own).keys() == vars(other).keys()
        assert not own._forward_hooks
        assert not own._forward_pre_hooks
    for own, other in zip(qwen3_moe.parameters(), untouched.parameters(), strict=True):
        assert own.requires_grad
        assert own.stride() == other.stride()
        assert torch.equal(own, other)


async def test_a_model_that_the_engine_refuses_is_what_it_was(qwen3_moe, settings):
    qwen3_moe.train()
    with pytest.raises(ConfigurationError, match="enable_return_indexer_topk"):
        await EmbeddedEngine(settings(enable_return_indexer_topk=True), model=qwen3_moe).start()
    assert qwen3_moe.training
    assert qwen3_moe.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad for parameter in qwen3_moe.parameters())
    assert not any("forward" in vars(module) for module in qwen3_moe.modules())


IDS = torch.arange(12)[None]


def pickled(model):
    return pickle.loads(pickle.dumps(model))(IDS).logits


def saved_whole(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)(IDS).logits


def compiled(model):
    return torch.compile(model, backend="eager")(IDS).logits


def called_with_other_weights(model):
    other = {name: parameter * 2 for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, other, (IDS,)).logits


def with_exchanged_parameters(model):
    model.lm_head._parameters["weight"] = torch.nn.Parameter(model.lm_head.weight * 3)
    return model(IDS).logits


def moved_to_meta(model):
    model.to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    # Not the whole: torch's grouped_mm knows no float32 on meta.
    logits = model.lm_head(model.model.norm(model.model.embed_tokens(IDS.to("meta"))))
    assert logits.is_meta
    return torch.tensor(logits.shape)


def under_a_global_hook(model):
    called = []
    handle = register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    try:
        model(IDS)
    finally:
        handle.remove()
    return sorted(called)


def sharded(model):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        return model(IDS).logits
    finally:
        dist.destroy_process_group()


USES = [
    *(pickled, saved_whole, compiled, called_with_other_weights, with_exchanged_parameters),
    *(moved_to_meta, under_a_global_hook, sharded),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("products", ["native", "float32"])
def test_what_torch_does_with_models_gives_the_same_after_an_engine_had_it(
    products, use, qwen3_moe, settings
):
    qwen3_moe = qwen3_moe.bfloat16()
    config = settings(dtype="auto", bfloat16_products=products)
    after = built_and_closed(config, copy.deepcopy(qwen3_moe))
    expected, got = use(qwen3_moe), use(after)
    assert got == expected if isinstance(got, list) else torch.equal(got, expected)


@pytest.mark.parametrize("use", USES)
def test_what_torch_does_with_models_gives_the_same_after_the_shortcuts_are_undone(use, qwen3_moe):
    shortened = copy.deepcopy(qwen3_moe)
    changes = apply(shortened)
    shortened(IDS)
    changes.undo()
    expected, got = use(qwen3_moe), use(shortened)
    assert got == expected if isinstance(got, list) else torch.equal(got, expected)


def test_hooks_that_a_user_adds_while_an_engine_has_the_model_stay(qwen3_moe, settings):
    core = build_core(settings(), qwen3_moe, None)
    called = []
    qwen3_moe.model.norm.register_forward_hook(lambda *_: called.append("norm"))
    core.close(EngineDeadError("closed"))
    qwen3_moe(IDS)
    assert called == ["norm"]
