"""Tiny models: every family runs, and the same name and seed give the same weights."""

import pytest
import torch

from radix_rl.testing import tiny_config, tiny_model, tiny_tokenizer
from radix_rl.testing.tiny_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs(family):
    with torch.no_grad():
        logits = tiny_model(family)(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits

    assert logits.shape == (1, 5, 257)
    assert logits.isfinite().all()


def test_the_same_seed_gives_the_same_weights_and_leaves_torch_s_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()

    first, second, other = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_an_unknown_family_names_those_that_there_are():
    with pytest.raises(KeyError, match="there are llama, qwen3"):
        tiny_config("lama")


def test_the_tokenizer_gives_every_byte_back():
    tokenizer = tiny_tokenizer()

    assert tokenizer.decode(tokenizer.encode("Größe 1")) == "Größe 1"
    assert len(tokenizer.encode("ab")) == 2
    assert tokenizer.eos_token_id == 256
