"""Loading the trainer's model."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BioGptConfig, Gemma2Config, OPTConfig

from radix_rl.config.model import ModelConfig
from radix_rl.config.train import TrainConfig
from radix_rl.errors import ConfigurationError
from radix_rl.testing import tiny_model
from radix_rl.train.policy import load_policy


def test_a_dense_model_ignores_the_experts_setting(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    policy = load_policy(tmp_path, ModelConfig(path=tmp_path, experts="batched_mm"), TrainConfig(steps=1))
    assert policy.dtype == torch.float32
    assert not policy.training


def test_a_moe_gets_the_configured_experts_implementation(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    policy = load_policy(tmp_path, ModelConfig(path=tmp_path, experts="batched_mm"), TrainConfig(steps=1))
    assert policy.config._experts_implementation == "batched_mm"


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"model\.path"):
        load_policy(tmp_path, ModelConfig(path=tmp_path), TrainConfig(steps=1))


def test_a_broken_weight_file_is_a_clear_error(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigurationError, match=r"model\.path: .* cannot be loaded as a causal LM"):
        load_policy(tmp_path, ModelConfig(path=tmp_path), TrainConfig(steps=1))


DROPPING = {
    "OPT": OPTConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=2, ffn_dim=16, num_attention_heads=2,
        word_embed_proj_dim=8, dropout=0.5, attention_dropout=0.5, layerdrop=0.5,
    ),
    "BioGPT": BioGptConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=2, intermediate_size=16, num_attention_heads=2,
        hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, activation_dropout=0.5, layerdrop=0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", DROPPING)
def test_gradient_checkpointing_computes_the_same_without_dropout(family, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(DROPPING[family]).save_pretrained(tmp_path)
    ids = torch.arange(10)[None]
    results = []
    for checkpointing in (False, True):
        train = TrainConfig(steps=1, gradient_checkpointing=checkpointing)
        policy = load_policy(tmp_path, ModelConfig(path=tmp_path), train)
        calls = []
        for module in policy.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        logits = policy(ids, use_cache=False).logits
        logits.log_softmax(-1)[0, :, 3].sum().backward()
        # Each layer is computed once more where it is recomputed.
        assert len(calls) == (4 if checkpointing else 2)
        results.append([logits, *(parameter.grad for parameter in policy.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def test_soft_capped_attention_is_refused_where_the_implementation_leaves_the_cap_out(tmp_path):
    config = Gemma2Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"model\.attention: Gemma2ForCausalLM caps .*=eager"):
        load_policy(tmp_path, ModelConfig(path=tmp_path), TrainConfig(steps=1))
    policy = load_policy(tmp_path, ModelConfig(path=tmp_path, attention="eager"), TrainConfig(steps=1))
    assert policy.config._attn_implementation == "eager"
