"""Tiny random models of Hugging Face families by name, and a tokenizer: milliseconds to make, no download.

Every model has 3 layers of width 32; those with experts have 8, of which a token takes 2. The same name and
seed give the same weights.
"""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

_DENSE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE = _DENSE | {"num_experts_per_tok": 2}
_LATENT = _MOE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DENSE),
    "qwen3": ("Qwen3Config", _DENSE | {"head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _MOE | {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE | {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", _MOE | {"num_experts": 8}),
    "mixtral": ("MixtralConfig", _MOE | {"num_local_experts": 8}),
    "gpt_oss": ("GptOssConfig", _MOE | {"num_local_experts": 8, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "deepseek_v32": (
        "DeepseekV32Config",
        _LATENT | {"index_topk": 3, "index_n_heads": 32, "index_head_dim": 8},
    ),
}
"""Name -> class of its configuration in transformers, and the fields."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model; `changes` replace its fields.

    Raises KeyError naming the families.
    """
    if family not in FAMILIES:
        raise KeyError(f"no tiny model {family!r}; there are {', '.join(FAMILIES)}")
    class_name, fields = FAMILIES[family]
    return getattr(transformers, class_name)(**(fields | changes))


def tiny_model(family: str, *, seed: int = 0, std: float = 0.15, **changes: Any) -> PreTrainedModel:
    """A float32 model on the CPU, in evaluation mode.

    Its matrices are normal with `std`, wide enough that experts and tokens are told apart by far more than
    rounding. `changes` are those of `tiny_config`. The random state of torch is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, std)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ids 0 to 255, and the end of sequence, id 256; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"
    return fast
