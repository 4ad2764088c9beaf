"""Puts an engine's parts together from its configuration."""

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from radix_engine_plugins.codecs import (
    EXPERT_COUNT_NAMES,
    EXPERTS_PER_TOKEN_NAMES,
    experts_per_token,
    num_indexer_positions,
    num_routed_experts,
    store_codecs,
)
from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.engines.base import EngineInfo
from radix_rl.engines.embedded.cache.slots import STRIDE_MULTIPLE
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.engines.embedded.core import EngineCore
from radix_rl.engines.embedded.forward.model import load_model, prepare_model
from radix_rl.engines.embedded.forward.runner import ModelRunner
from radix_rl.engines.embedded.forward.trial import try_steps
from radix_rl.engines.embedded.shortcuts.apply import apply as apply_shortcuts
from radix_rl.engines.embedded.shortcuts.float32 import Float32Products, cpu_lacks_bfloat16
from radix_rl.engines.embedded.shortcuts.undo import recorded_changes
from radix_rl.errors import ConfigurationError
from radix_transfer_plugins import OutputStore, create_backend
from radix_transfer_plugins.codecs.base import Codec


def build_core(
    config: EmbeddedEngineSetup, model: PreTrainedModel | None, tokenizer: Any | None
) -> EngineCore:
    """Load the model and allocate everything. Raises ConfigurationError; a model given is then as it was."""
    is_given = model is not None
    model, tokenizer = load_model(config, model, tokenizer)
    with recorded_changes(model) as changes:
        loaded = prepare_model(config, model, tokenizer)
        # Both before what looks at the calls of these modules.
        products = _products(config, model)
        if config.shortcuts == "auto" and model.device.type == "cpu" and not is_given:
            apply_shortcuts(model, experts=config.experts_implementation is None)
        runner = ModelRunner(
            loaded,
            kv_cache_tokens=config.kv_cache_tokens,
            max_tokens_per_step=config.chunked_prefill_tokens + config.max_running_requests,
            keeps_all_rows=config.prefix_cache_tokens > 0,
        )
        _attach_captures(config, runner)
        try_steps(runner)
    return EngineCore(
        runner,
        products=products,
        changes=changes,
        max_running_requests=config.max_running_requests,
        chunked_prefill_tokens=config.chunked_prefill_tokens,
        weight_version=config.weight_version,
        prefix_cache_tokens=config.prefix_cache_tokens,
    )


def _attach_captures(config: EmbeddedEngineSetup, runner: ModelRunner) -> None:
    text_config, model_name = runner.loaded.text_config, type(runner.model).__name__
    if config.enable_return_routed_experts:
        experts, top_k = num_routed_experts(text_config), experts_per_token(text_config)
        if experts is None or top_k is None:
            raise ConfigurationError(
                f"enable_return_routed_experts: {model_name}'s configuration names no number of experts "
                f"({', '.join(EXPERT_COUNT_NAMES)}) or none per token "
                f"({', '.join(EXPERTS_PER_TOKEN_NAMES)}); is it a dense model?"
            )
        runner.capture_routed_experts(experts, top_k)
    if config.enable_return_indexer_topk:
        index_topk = num_indexer_positions(text_config)
        if index_topk is None:
            raise ConfigurationError(
                f"enable_return_indexer_topk: {model_name}'s configuration has no index_topk; only models "
                "with sparse attention (DeepSeek-V3.2, GLM-MoE-DSA) have an indexer"
            )
        runner.capture_indexer_topk(index_topk)


def _products(config: EmbeddedEngineSetup, model: PreTrainedModel) -> Float32Products | None:
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        return None
    wanted = config.bfloat16_products
    chosen = wanted == "float32" or (wanted == "auto" and cpu_lacks_bfloat16())
    return Float32Products(model) if chosen else None


def build_writer(config: EmbeddedEngineSetup, model: PreTrainedModel | None) -> OutputStoreWriter | None:
    """Connect to the configured store; None if there is none. Raises the store's errors.

    Codecs follow from the model's configuration: expert ids narrow to one or two bytes, indexer rows become
    bit sets.
    """
    if config.output_store is None:
        return None
    codecs = _configured_codecs(config, model)
    backend = create_backend(config.output_store.backend, config.output_store.backend_config)
    store = OutputStore(backend=backend, codecs=codecs)
    return OutputStoreWriter(store, max_concurrent_puts=config.output_store.max_concurrent_puts)


def _configured_codecs(config: EmbeddedEngineSetup, model: PreTrainedModel | None) -> dict[str, Codec]:
    if model is not None:
        model_config = model.config
    elif config.gguf_file is not None:
        return {}
    else:
        try:
            model_config = AutoConfig.from_pretrained(str(config.model_path))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"model_path: {config.model_path!r} has no readable config.json: {error}"
            ) from error
    return store_codecs(model_config.get_text_config(decoder=True))


def describe_model(config: EmbeddedEngineSetup, core: EngineCore) -> EngineInfo:
    loaded = core.runner.loaded
    return EngineInfo(
        model_path=config.model_path or type(loaded.model).__name__,
        weight_version=core.weights.version or "",
        context_length=loaded.context_length,
        # The last token never goes through the model, so that it needs no room.
        max_request_tokens=config.kv_cache_tokens // STRIDE_MULTIPLE * STRIDE_MULTIPLE + 1,
        max_running_requests=config.max_running_requests,
        vocab_size=core.runner.vocab_size,
        num_layers=len(loaded.layers),
        num_experts=num_routed_experts(loaded.text_config),
        experts_per_token=experts_per_token(loaded.text_config),
    )
