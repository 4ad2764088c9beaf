"""Sparse upcycling: a dense Llama becomes a Mixtral whose experts are copies of its MLP, with a fresh router.

    python examples/gsm8k/upcycle.py DENSE_DIR MOE_DIR

Routing weights of a token sum to 1 in Mixtral: without noise the MoE computes what the dense model does.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
)

from radix_rl.errors import ConfigurationError

ROUTER_STD = 0.02
"""Of the fresh router's weights: on normalised hidden states, experts start out about equally likely."""


def upcycle(
    dense: Any, *, num_experts: int, experts_per_token: int, noise: float, seed: int
) -> MixtralForCausalLM:
    """A new model in the dtype of `dense`, a LlamaForCausalLM.

    `noise` is relative to a matrix's standard deviation.

    Raises ConfigurationError for a model that is no Llama, or one with biases, which Mixtral lacks.
    """
    config = dense.config
    if config.model_type != "llama":
        raise ConfigurationError(f"upcycling takes a model of type 'llama', got {config.model_type!r}")
    if config.attention_bias or config.mlp_bias:
        raise ConfigurationError("upcycling takes a Llama without biases: Mixtral has none")
    moe = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=config.rope_parameters,
            tie_word_embeddings=config.tie_word_embeddings,
            num_local_experts=num_experts,
            num_experts_per_tok=experts_per_token,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    ).to(dense.dtype)  # pyright: ignore[reportArgumentType]
    moe.load_state_dict(_moe_weights(dense, num_experts, noise, torch.Generator().manual_seed(seed)))
    moe.generation_config = dense.generation_config
    return moe.eval()


def _moe_weights(
    dense: Any, num_experts: int, noise: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Mixtral's names and shapes; everything but the MLPs is the dense model's own tensor."""
    weights = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}

    def copies(matrix: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(num_experts, *matrix.shape, generator=generator, dtype=matrix.dtype)
        return matrix + noise * matrix.std() * drawn

    for index, layer in enumerate(dense.model.layers):
        mlp, prefix = layer.mlp, f"model.layers.{index}.mlp"
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        weights[f"{prefix}.experts.gate_up_proj"] = copies(gate_up)
        weights[f"{prefix}.experts.down_proj"] = copies(mlp.down_proj.weight.detach())
        router = torch.randn(num_experts, gate_up.shape[1], generator=generator, dtype=gate_up.dtype)
        weights[f"{prefix}.gate.weight"] = ROUTER_STD * router
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("dense", type=Path, help="folder of the dense Llama")
    parser.add_argument("moe", type=Path, help="folder to write")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument(
        "--noise", type=float, default=0.02, help="relative to each matrix's standard deviation"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dense = AutoModelForCausalLM.from_pretrained(options.dense, dtype=torch.float32)
    moe = upcycle(
        dense,
        num_experts=options.experts,
        experts_per_token=options.experts_per_token,
        noise=options.noise,
        seed=options.seed,
    )
    moe.save_pretrained(options.moe)
    AutoTokenizer.from_pretrained(options.dense).save_pretrained(options.moe)
    print(f"{options.moe}: {moe.num_parameters() / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
