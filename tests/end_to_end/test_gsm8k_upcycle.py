"""The GSM8K example's upcycling, on a tiny random Llama."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from radix_rl.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def upcycle():
    spec = importlib.util.spec_from_file_location("upcycle", ROOT / "examples/gsm8k/upcycle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.upcycle


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24).view(2, 12)).logits


def test_without_noise_the_moe_computes_what_the_dense_model_does(upcycle, dense):
    moe = upcycle(dense, num_experts=4, experts_per_token=2, noise=0.0, seed=1)
    torch.testing.assert_close(logits(moe), logits(dense), rtol=1e-4, atol=1e-5)


def test_noise_makes_experts_differ_and_changes_the_logits_a_little(upcycle, dense):
    moe = upcycle(dense, num_experts=4, experts_per_token=2, noise=0.02, seed=1)
    experts = moe.model.layers[0].mlp.experts.down_proj
    assert not torch.equal(experts[0], experts[1])
    change = (logits(moe) - logits(dense)).abs().max()
    assert 0 < change < 0.2 * logits(dense).std()


def test_the_same_seed_gives_the_same_model(upcycle, dense):
    one, other = (upcycle(dense, num_experts=2, experts_per_token=1, noise=0.1, seed=7) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_model_that_is_no_llama_is_refused(upcycle):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ConfigurationError, match="'llama', got 'gpt2'"):
        upcycle(model, num_experts=2, experts_per_token=1, noise=0.0, seed=0)
