"""Loading the trainer's model."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from radix_rl.config.model import ModelConfig
from radix_rl.config.train import TrainConfig
from radix_rl.errors import ConfigurationError
from radix_rl.train.policy import load_policy

SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_a_dense_model_ignores_the_experts_setting(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, ModelConfig(path=tmp_path, experts="batched_mm"), TrainConfig(steps=1))
    assert policy.dtype == torch.float32
    assert not policy.training


def test_a_moe_gets_the_configured_experts_implementation(tmp_path):
    moe = Qwen3MoeConfig(**SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    AutoModelForCausalLM.from_config(moe).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, ModelConfig(path=tmp_path, experts="batched_mm"), TrainConfig(steps=1))
    assert policy.config._experts_implementation == "batched_mm"


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"model\.path"):
        load_policy(tmp_path, ModelConfig(path=tmp_path), TrainConfig(steps=1))


def test_a_broken_weight_file_is_a_clear_error(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigurationError, match=r"model\.path: .* cannot be loaded as a causal LM"):
        load_policy(tmp_path, ModelConfig(path=tmp_path), TrainConfig(steps=1))
