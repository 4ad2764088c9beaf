"""Loads the models that a trainer computes with."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from radix_rl.config.model import ModelConfig
from radix_rl.config.train import TrainConfig
from radix_rl.errors import ConfigurationError


def load_policy(path: Path, model: ModelConfig, train: TrainConfig) -> PreTrainedModel:
    """The causal LM at `path`, in the trainer's dtype and on its device, without dropout.

    Raises ConfigurationError for a path that holds no model.
    """
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"model.path: expected a directory with config.json and safetensors files, got {str(path)!r}"
        )
    try:
        policy = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, train.dtype), attn_implementation=model.attention
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigurationError(
            f"model.path: {str(path)!r} cannot be loaded as a causal LM: {error}"
        ) from error
    if policy._can_set_experts_implementation():
        policy.set_experts_implementation(model.experts)
    policy = policy.to(train.device)  # pyright: ignore[reportArgumentType]
    # Dropout and router jitter would make trainer and engine differ.
    policy.eval()
    if train.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        for module in policy.modules():
            if getattr(module, "gradient_checkpointing", False):
                # Layers recompute only in training mode; the flag of their children stays off.
                module.training = True
    return policy


def load_reference(model: ModelConfig, train: TrainConfig) -> PreTrainedModel:
    """The initial model, frozen."""
    return load_policy(model.path, model, train).requires_grad_(False)
