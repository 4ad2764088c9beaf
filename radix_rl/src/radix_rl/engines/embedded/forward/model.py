"""Loads a Hugging Face causal language model and makes it use the engine's cache."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from radix_rl.buckets.checkpoint_folder import check_index, load_failure
from radix_rl.engines.embedded.cache.slots import STRIDE_MULTIPLE
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.device import resolve_device
from radix_rl.engines.embedded.forward.attention import ATTENTION_NAME, register_attention
from radix_rl.errors import ConfigurationError
from radix_rl.model_layers import decoder_layers, longest_without_switch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: Any | None
    text_config: Any
    """The configuration of the language model itself, also where it is part of a larger one."""
    layers: torch.nn.ModuleList
    """Decoder layers of the target model; prediction layers kept elsewhere are not among them."""
    end_token_ids: frozenset[int]
    context_length: int


def load_model(
    config: EmbeddedEngineSetup, model: PreTrainedModel | None, tokenizer: Any | None
) -> tuple[PreTrainedModel, Any | None]:
    """The model, loaded or given, in the configured dtype, and its tokenizer.

    Raises ConfigurationError for a path that holds no model.
    """
    if (model is None) == (config.model_path is None):
        raise ConfigurationError(
            f"expected either model_path or a model object, got model_path={config.model_path!r} and "
            f"model={type(model).__name__}"
        )
    if model is None:
        return _from_path(config), tokenizer if tokenizer is not None else _tokenizer(config)
    if config.dtype != "auto":
        _cast_parameters(model, getattr(torch, config.dtype))
    return model, tokenizer


def prepare_model(config: EmbeddedEngineSetup, model: PreTrainedModel, tokenizer: Any | None) -> LoadedModel:
    """Make a model use the engine's cache. Raises ConfigurationError for one that the engine cannot run."""
    _move(model, resolve_device(config.device))
    model.eval()
    model.requires_grad_(False)
    text_config = model.config.get_text_config(decoder=True)
    _use_slot_attention(model)
    if config.experts_implementation is not None:
        model.set_experts_implementation(config.experts_implementation)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        text_config=text_config,
        layers=decoder_layers(model),
        end_token_ids=_end_token_ids(model, tokenizer),
        context_length=_context_length(config, text_config),
    )


def _move(model: PreTrainedModel, device: str) -> None:
    try:
        model.to(torch.device(device))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        # torch built without CUDA asserts.
        raise ConfigurationError(f"device: the model cannot be moved to {device!r}: {error}") from error


def _cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model as `from_pretrained(dtype=...)` does.

    Buffers such as rotary frequencies stay as exact as they are, and so do the parameters that the model
    class wants in float32.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not kept.intersection(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _torch_dtype(config: EmbeddedEngineSetup) -> torch.dtype | None:
    return None if config.dtype == "auto" else getattr(torch, config.dtype)


def _from_path(config: EmbeddedEngineSetup) -> PreTrainedModel:
    path = Path(str(config.model_path))
    expected = path / (config.gguf_file or "config.json")
    if not expected.is_file():
        raise ConfigurationError(
            f"model_path: expected a folder with {expected.name}, got {str(path)!r}"
            + ("" if path.is_dir() else " (no such folder)")
        )
    kwargs: dict[str, Any] = {}
    if config.gguf_file:
        # Packed weights could neither be updated nor named as a trainer names them.
        kwargs = {"gguf_file": config.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    return load_checkpoint(path, _torch_dtype(config), **kwargs)


def load_checkpoint(path: Path, dtype: torch.dtype | None, **kwargs: Any) -> PreTrainedModel:
    """Through transformers; None: the dtype it was saved in.

    Raises ConfigurationError for a folder that holds no whole model: transformers itself would fill missing
    weights with random numbers.
    """
    check_index(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", local_files_only=True, output_loading_info=True, **kwargs
        )
    except Exception as error:
        # Every part of the folder may be anything, and so may what transformers raises at it.
        reason = load_failure(path, error)
        raise ConfigurationError(
            f"model_path: transformers cannot load {str(path)!r} as a causal LM: {reason}"
        ) from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ConfigurationError(
            f"model_path: the checkpoint in {str(path)!r} lacks weights of {type(model).__name__}: {listed}"
        )
    return model


def _tokenizer(config: EmbeddedEngineSetup) -> Any | None:
    path = Path(config.tokenizer_path or str(config.model_path))
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if (
        config.tokenizer_path is None
        and config.gguf_file is None
        and not any((path / n).is_file() for n in names)
    ):
        logger.info("%s holds no tokenizer: text and stop strings are not available", path)
        return None
    kwargs = {"gguf_file": config.gguf_file} if config.gguf_file and config.tokenizer_path is None else {}
    try:
        return AutoTokenizer.from_pretrained(path, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"tokenizer_path: transformers cannot load a tokenizer from {str(path)!r}: {error}"
        ) from error


def _use_slot_attention(model: PreTrainedModel) -> None:
    layer_types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    unknown = {
        kind for kind in layer_types if "attention" not in kind or "linear" in kind or "compressed" in kind
    }
    if unknown:
        raise ConfigurationError(
            f"{type(model).__name__} has layers of type {sorted(unknown)}, whose state is no key-value "
            "cache; the embedded engine runs attention layers only"
        )
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAME:
        raise ConfigurationError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface; the "
            "embedded engine cannot give it a cache"
        )


def _end_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    sources = (
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    for source in sources:
        if source is not None:
            ids.update(source if isinstance(source, list | tuple) else [source])
    return frozenset(ids)


def _context_length(config: EmbeddedEngineSetup, text_config: Any) -> int:
    own = getattr(text_config, "max_position_embeddings", None)
    limit = "the model's own"
    if counts_positions_in_cache(text_config) and (own is None or text_config.floor_scale <= own):
        # From floor_scale on it scales queries by what it takes for their positions.
        own = text_config.floor_scale - 1
        limit = "floor_scale - 1, beyond which requests would share one request's query scales:"
    switch = longest_without_switch(text_config)
    if switch is not None and (own is None or switch < own):
        own = switch
        limit = "the length at which the model's rotary factors switch:"
    if config.context_length is not None:
        if own is not None and config.context_length > own:
            raise ConfigurationError(
                f"context_length: expected at most {limit} {own}, got {config.context_length}"
            )
        return config.context_length
    # Slots are a multiple of STRIDE_MULTIPLE long: the rest of the cache can hold no request.
    usable = config.kv_cache_tokens // STRIDE_MULTIPLE * STRIDE_MULTIPLE
    return usable if own is None else min(own, usable)


def counts_positions_in_cache(text_config: Any) -> bool:
    """Llama 4's temperature tuning takes positions from the length of the cache, not from `position_ids`."""
    return bool(getattr(text_config, "attn_temperature_tuning", False)) and hasattr(
        text_config, "floor_scale"
    )
