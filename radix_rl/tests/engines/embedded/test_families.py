"""Captured choices equal a full forward pass for every router and indexer interface.

Unknown interfaces are refused.
"""

import asyncio
import copy

import numpy as np
import pytest
import torch
import transformers as tf
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from radix_rl.engines.embedded.shortcuts.apply import apply
from radix_rl.engines.embedded.shortcuts.experts import (
    grouped_experts,
    sorted_experts_forward,
    use_sorted_experts,
)
from radix_rl.engines.embedded.shortcuts.norms import use_short_norms
from radix_rl.errors import ConfigurationError

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 16}
MLA = COMMON | {
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# Many indexer heads: a key that every head's ReLU sets to 0 ties with others, and ties have no right order.
DSA = MLA | {"index_topk": 6, "index_n_heads": 32, "index_head_dim": 32, "n_group": 1}

FAMILIES = {
    "Mixtral": GQA | {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Olmoe": COMMON
    | {"intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "Qwen2Moe": GQA
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "DeepseekV2": MLA | {"topk_method": "greedy"},
    "DeepseekV3": MLA,
    "Glm4Moe": GQA
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "GptOss": GQA
    | {
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "MiniMaxM2": GQA | {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "GraniteMoe": GQA | {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Llama4": GQA
    | {
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 2],
        "attention_chunk_size": 256,
    },
    "Afmoe": GQA
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "sliding_window": 32,
    },
    "DeepseekV32": DSA,
    "GlmMoeDsa": DSA | {"indexer_types": ["full", "shared", "full"]},
}
DENSE = {
    "Gemma3": GQA | {"intermediate_size": 64},
    # Its rotary embedding multiplies in float32 and rounds afterwards.
    "Olmo2": GQA | {"intermediate_size": 64},
}


@pytest.fixture
def family():
    def make(name: str) -> tf.PreTrainedModel:
        torch.manual_seed(1)
        config = getattr(tf, f"{name}TextConfig", None) or getattr(tf, f"{name}Config")
        model = getattr(tf, f"{name}ForCausalLM")(config(**(FAMILIES | DENSE)[name]))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.15)
        return model.eval()

    return make


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
async def test_rows_of_a_family_equal_one_full_forward(
    name, loaded, family, engine_of, tmp_path, prompt, request_of, check_against
):
    """A model that the engine loads goes by the shortcuts."""
    model = family(name)
    requests = [
        request_of(str(i), prompt(1 + 17 * i, i), max_new_tokens=12, seed=i, return_routed_experts=True)
        for i in range(5)
    ]
    async with engine_of(model, folder=tmp_path if loaded else None) as engine:
        assert ("forward" in vars(engine._core_now().runner.model)) == loaded
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        check_against(model, request, output)


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
async def test_indexer_rows_equal_one_full_forward_in_request_positions(
    name, family, engine_of, prompt, request_of
):
    model = family(name)
    requests = [
        request_of(str(i), prompt(1 + 17 * i, i), max_new_tokens=12, seed=i, return_indexer_topk=True)
        for i in range(5)
    ]
    async with engine_of(model, enable_return_indexer_topk=True) as engine:
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
    indexers = [m for m in model.modules() if type(m).__name__.endswith("Indexer")]
    assert len(indexers) == (3 if name == "DeepseekV32" else 2)
    for request, output in zip(requests, outputs, strict=True):
        kept: dict[int, torch.Tensor] = {}
        handles = [
            indexer.register_forward_hook(lambda _m, _a, out, i=i, kept=kept: kept.__setitem__(i, out[0]))
            for i, indexer in enumerate(indexers)
        ]
        ids = torch.tensor([[*request.input_ids, *output.output_ids]])
        with torch.no_grad():
            model(input_ids=ids)
        for handle in handles:
            handle.remove()
        rows = output.outputs.indexer_topk
        assert rows.shape == (ids.shape[1] - 1, len(indexers), 6)
        for position in range(len(rows)):
            for i in kept:
                expected = sorted(p for p in kept[i][position].tolist() if p <= position)
                got = rows[position, i].tolist()
                assert got == expected + [-1] * (6 - len(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FAMILIES, *DENSE])
@torch.no_grad()
def test_what_the_engine_computes_in_its_own_way_has_the_bits_of_transformers(name, dtype, family):
    own = family(name).to(dtype)
    use_sorted_experts(own)
    theirs = copy.deepcopy(own)
    for experts in grouped_experts(theirs):
        # The layout of its weights stays: by another one, products of a row or two round otherwise.
        del experts.forward
    apply(own)
    ids = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(own(input_ids=ids).logits, theirs(input_ids=ids).logits)
    changed = [m for m in own.modules() if type(m).__name__.endswith("RMSNorm") and "forward" in vars(m)]
    # Llama 4 and Gemma have norms of their own kind; in bfloat16 only three round where torch does.
    rounds_alike = ("GptOss", "Afmoe", "Olmo2")
    same = name in rounds_alike if dtype == torch.bfloat16 else name not in ("Llama4", "Gemma3")
    assert bool(changed) == same
    if name == "Mixtral":
        assert "forward" in vars(own.model.layers[0].self_attn)


def test_a_norm_that_is_not_torchs_is_left_alone():
    class OneMore(tf.models.llama.modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + self.weight

    model = tf.LlamaForCausalLM(tf.LlamaConfig(**GQA, intermediate_size=64))
    model.model.norm = OneMore(64)
    apply(model)
    assert "forward" in vars(model.model.layers[0].input_layernorm)
    assert "forward" not in vars(model.model.norm)
    replaced = tf.models.llama.modeling_llama.LlamaRMSNorm(64)
    model.model.norm = replaced
    assert model.model.norm is replaced


def test_a_norm_that_was_patched_or_sees_other_dtypes_keeps_its_own_function():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**GQA, intermediate_size=64))
    patched, plain = model.model.layers[0].input_layernorm, model.model.norm
    patched.forward = torch.zeros_like
    apply(model)
    x = torch.randn(3, 64)
    assert torch.equal(patched(x), torch.zeros(3, 64))
    assert plain(x.bfloat16()).dtype == torch.float32
    expected = tf.models.llama.modeling_llama.LlamaRMSNorm(64).bfloat16()(x.bfloat16())
    assert torch.equal(plain.bfloat16()(x.bfloat16()), expected)


@pytest.mark.parametrize("products", ["native", "float32"])
async def test_a_chosen_experts_implementation_is_not_replaced(
    products, family, engine_of, tmp_path, prompt, request_of
):
    def sorts(engine):
        experts = engine._core_now().runner.model.model.layers[0].mlp.experts
        captured = experts.forward.args[0]
        return getattr(captured, "func", None) is sorted_experts_forward

    model = family("Mixtral")
    changes = {"dtype": "bfloat16", "bfloat16_products": products, "experts_implementation": "eager"}
    async with engine_of(model, folder=tmp_path, **changes) as engine:
        assert not sorts(engine)
        assert (await engine.generate(request_of("a", prompt(4, 1), max_new_tokens=2))).output_ids
    async with engine_of(model, folder=tmp_path) as engine:
        assert sorts(engine)
    async with engine_of(model) as engine:
        assert not sorts(engine)


async def test_dense_model_with_capture_is_refused(engine_of):
    config = tf.LlamaConfig(**GQA, intermediate_size=64)
    with pytest.raises(ConfigurationError, match="enable_return_routed_experts"):
        async with engine_of(tf.LlamaForCausalLM(config)):
            pass


async def test_layers_whose_state_is_no_key_value_cache_are_refused(engine_of):
    recurrent = tf.Qwen3NextConfig(
        **GQA, intermediate_size=64, layer_types=["linear_attention", "full_attention", "full_attention"]
    )
    compressing = tf.DeepseekV4Config(
        **COMMON, num_key_value_heads=1, head_dim=32, q_lora_rank=32, moe_intermediate_size=32,
        n_routed_experts=8, num_experts_per_tok=2, mlp_layer_types=["hash_moe", "moe", "moe"],
    )  # fmt: skip
    for model, kind in (
        (tf.Qwen3NextForCausalLM(recurrent), "linear_attention"),
        (tf.DeepseekV4ForCausalLM(compressing), "heavily_compressed_attention"),
    ):
        with pytest.raises(ConfigurationError, match=kind):
            async with engine_of(model, enable_return_routed_experts=False):
                pass


class HashedFeedForward(torch.nn.Module):
    """Routes by token, without a router or a telling name; its experts are a stack of matrices or modules."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        if stacked:
            self.weight = torch.nn.Parameter(torch.randn(8, 64, 64))
        else:
            self.parts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("stacked", [False, True])
async def test_one_layer_that_routes_in_an_unknown_way_is_refused_though_others_are_known(
    qwen3_moe, engine_of, stacked
):
    qwen3_moe.model.layers[1].mlp = HashedFeedForward(stacked)
    with pytest.raises(ConfigurationError, match=r"layer 1: .*no known kind of router"):
        async with engine_of(qwen3_moe):
            pass


async def test_prediction_modules_beside_the_decoder_do_not_write_rows(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    drafting = copy.deepcopy(qwen3_moe)
    drafting.mtp = torch.nn.ModuleList([copy.deepcopy(drafting.model.layers[1])])
    drafting.mtp[0].mlp.gate.weight.data.mul_(-1.0)

    def draft(_module, _args, output):
        drafting.mtp[0].mlp(torch.randn(1, output.logits.shape[0], 64))

    drafting.register_forward_hook(draft)
    request = request_of("a", prompt(20, 1), max_new_tokens=10, return_routed_experts=True)
    async with engine_of(drafting) as engine:
        output = await engine.generate(request)
    check_against(qwen3_moe, request, output)
    assert np.array_equal(output.outputs.routed_experts[:, 0], np.full((29, 2), -1))


async def test_llama4_serves_contexts_in_which_its_query_scales_are_one(
    family, engine_of, prompt, request_of, check_against
):
    model = family("Llama4")
    model.config.floor_scale = 64
    for layer in model.model.layers:
        layer.self_attn.floor_scale = 64
    with pytest.raises(ConfigurationError, match=r"context_length: expected at most .* 63, got 256"):
        async with engine_of(model):
            pass
    requests = [
        request_of(str(i), prompt(40 + i, i), max_new_tokens=20, seed=i, return_routed_experts=True)
        for i in range(4)
    ]
    async with engine_of(model, context_length=None) as engine:
        assert (await engine.info()).context_length == 63
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        check_against(model, request, output)


@pytest.mark.parametrize("width", [64, 74, 198])
def test_a_norm_of_fewer_operations_is_the_models_own_in_every_row(width):
    """Times 1 / 74 or 1 / 198, a sum is the mean but for a row in hundreds."""
    eps = 1e-5
    norm = Qwen3MoeRMSNorm(width, eps=eps)
    model = torch.nn.Sequential(norm)
    rows = torch.randn(20_000, width, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        own = norm(rows)
        use_short_norms(model)
        assert "forward" in vars(norm)
        assert torch.equal(norm(rows), own)
