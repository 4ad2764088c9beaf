"""Loads the models that a trainer computes with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

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
    _check_attention(policy, model.attention)
    if policy._can_set_experts_implementation():
        policy.set_experts_implementation(model.experts)
    policy = policy.to(train.device)  # pyright: ignore[reportArgumentType]
    # Dropout and router jitter would make trainer and engine differ.
    policy.eval()
    if train.gradient_checkpointing:
        _checkpoint_layers(policy)
    return policy


def _check_attention(policy: PreTrainedModel, attention: str) -> None:
    capped = getattr(policy.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if attention == "sdpa" and capped is not None:
        raise ConfigurationError(
            f"model.attention: {type(policy).__name__} caps its attention logits at {capped}, which 'sdpa' "
            "leaves out; set model.attention=eager"
        )


def _checkpoint_layers(policy: PreTrainedModel) -> None:
    """Let the layers recompute in the backward pass, still without dropout.

    Raises ConfigurationError for a model whose layers cannot.
    """
    layers: list[Any] = [
        module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not policy.supports_gradient_checkpointing or not layers:
        raise ConfigurationError(
            f"train.gradient_checkpointing: {type(policy).__name__} has no layers that can be recomputed; "
            "set it to false"
        )
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        checkpoint = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = partial(_recomputed_in_evaluation, layer, checkpoint)
        # Layers recompute only in training mode.
        layer.training = True


def _recomputed_in_evaluation(
    layer: torch.nn.Module, checkpoint: Callable[..., Any], call: Callable[..., Any], *args: Any
) -> Any:
    """`checkpoint(call, *args)`, with the layer out of training mode while it computes.

    Many layers call functional dropout, which asks the layer itself for its mode.
    """

    def run(*args: Any) -> Any:
        layer.training = False
        try:
            return call(*args)
        finally:
            layer.training = True

    return checkpoint(run, *args)


def load_reference(model: ModelConfig, train: TrainConfig) -> PreTrainedModel:
    """The initial model, frozen."""
    return load_policy(model.path, model, train).requires_grad_(False)
