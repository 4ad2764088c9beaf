"""Tiny random models and samples for tests of the trainer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from radix_rl.config import RunConfig, parse_config
from radix_rl.train.batch import TrainSample

VOCABULARY = 64
NUM_EXPERTS = 8
TOP_K = 2
NUM_LAYERS = 3
INDEX_TOPK = 3

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": TOP_K,
}

MLA = SHAPE | {
    "num_key_value_heads": 4,
    "n_routed_experts": NUM_EXPERTS,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DSA = MLA | {"n_group": 1, "index_topk": INDEX_TOPK, "index_n_heads": 32, "index_head_dim": 8}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=NUM_EXPERTS, moe_intermediate_size=16, head_dim=8, norm_topk_prob=True
    ),
    "qwen3_moe_dense_first": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=NUM_EXPERTS, moe_intermediate_size=16, head_dim=8, mlp_only_layers=[0]
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE, num_experts=NUM_EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "olmoe": lambda: OlmoeConfig(**SHAPE, num_experts=NUM_EXPERTS),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=NUM_EXPERTS, router_jitter_noise=0.1),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, num_local_experts=NUM_EXPERTS, head_dim=8),
    "deepseek_v3": lambda: DeepseekV3Config(**MLA),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SHAPE,
        n_routed_experts=NUM_EXPERTS,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        head_dim=8,
    ),
    "deepseek_v2": lambda: DeepseekV2Config(**MLA, topk_method="greedy", routed_scaling_factor=1.5),
    # Many indexer heads: a key that the ReLU of every head sets to 0 ties with others.
    "deepseek_v32": lambda: DeepseekV32Config(**DSA),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(**DSA, indexer_types=["full", "shared", "full"]),
    "minimax_m2": lambda: MiniMaxM2Config(**SHAPE, num_local_experts=NUM_EXPERTS, head_dim=8),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
        **{name: value for name, value in SHAPE.items() if name != "num_experts_per_tok"},
        moe_num_experts=NUM_EXPERTS,
        moe_k=TOP_K,
        moe_intermediate_size=16,
    ),
    "llama": lambda: LlamaConfig(
        **{name: value for name, value in SHAPE.items() if name != "num_experts_per_tok"}
    ),
}


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """A model of a family in float32 with random weights; the same seed gives the same weights."""

    def make(family: str = "qwen3_moe", seed: int = 0, top_k: int = TOP_K) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = CONFIGS[family]()
        if top_k != TOP_K:
            config.num_experts_per_tok = top_k
        config._attn_implementation = "eager" if family == "gpt_oss" else "sdpa"
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            # Router weights start at zero in some families, which makes every choice a tie.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3 if "norm" not in name else 0.02)
        return model.eval()

    return make


@pytest.fixture
def make_samples() -> Callable[..., list[TrainSample]]:
    """Random samples with random recorded experts, each row a set."""

    def make(
        num_samples: int = 6, *, seed: int = 0, layers: int = NUM_LAYERS, dense: tuple[int, ...] = ()
    ) -> list[TrainSample]:
        generator = np.random.default_rng(seed)
        samples = []
        for index in range(num_samples):
            prompt, response = int(generator.integers(2, 8)), int(generator.integers(1, 9))
            rows = np.stack(
                [
                    [generator.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(layers)]
                    for _ in range(prompt + response - 1)
                ]
            ).astype(np.int32)
            rows[:, list(dense)] = -1
            samples.append(
                TrainSample(
                    name=f"{index}/0",
                    tokens=generator.integers(0, VOCABULARY, prompt + response),
                    loss_mask=np.ones(response, dtype=np.float32),
                    rollout_logprobs=-generator.random(response).astype(np.float32) - 3.5,
                    advantage=float(generator.normal()),
                    loss_scale=1 / 20,
                    routed_experts=rows,
                )
            )
        return samples

    return make


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run's configuration with sections overridden by table."""

    def make(**sections: dict) -> RunConfig:
        table: dict = {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "environment": {"type": "arithmetic"},
            "train": {"steps": 10},
            "optimizer": {"lr": 1e-2},
        }
        for name, values in sections.items():
            table[name] = {**table.get(name, {}), **values}
        return parse_config(table, source="test")

    return make
