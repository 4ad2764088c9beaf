"""Puts an engine's parts together from its configuration."""

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.engines.base import EngineInfo
from radix_rl.engines.embedded.cache.slots import STRIDE_MULTIPLE
from radix_rl.engines.embedded.config import EmbeddedEngineConfig
from radix_rl.engines.embedded.core import EngineCore
from radix_rl.engines.embedded.forward.model import load_model
from radix_rl.engines.embedded.forward.runner import ModelRunner
from radix_rl.engines.embedded.shortcuts.direct_calls import cut_overheads
from radix_rl.engines.embedded.shortcuts.float32 import Float32Products, cpu_lacks_bfloat16
from radix_rl.errors import ConfigurationError
from radix_transfer_plugins import OutputStore, create_backend
from radix_transfer_plugins.codecs.base import Codec
from radix_transfer_plugins.codecs.narrow import NarrowCodec
from radix_transfer_plugins.codecs.positions import PositionsCodec

_NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


def _first(text_config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def build_core(
    config: EmbeddedEngineConfig, model: PreTrainedModel | None, tokenizer: Any | None
) -> EngineCore:
    """Load the model and allocate everything. Raises ConfigurationError."""
    loaded = load_model(config, model, tokenizer)
    # Before what looks at the calls of these modules.
    products = _products(config, loaded.model)
    runner = ModelRunner(
        loaded,
        kv_cache_tokens=config.kv_cache_tokens,
        max_tokens_per_step=config.chunked_prefill_tokens + config.max_running_requests,
        keeps_all_rows=config.prefix_cache_tokens > 0,
    )
    if config.enable_return_routed_experts:
        experts, top_k = (
            _first(loaded.text_config, _NUM_EXPERTS_NAMES),
            _first(loaded.text_config, _TOP_K_NAMES),
        )
        if experts is None or top_k is None:
            raise ConfigurationError(
                f"enable_return_routed_experts: {type(loaded.model).__name__}'s configuration names no "
                "number of experts "
                f"({', '.join(_NUM_EXPERTS_NAMES)}) or none per token ({', '.join(_TOP_K_NAMES)}); is it a "
                "dense model?"
            )
        runner.capture_routed_experts(experts, top_k)
    if config.enable_return_indexer_topk:
        index_topk = _first(loaded.text_config, ("index_topk",))
        if index_topk is None:
            raise ConfigurationError(
                f"enable_return_indexer_topk: {type(loaded.model).__name__}'s configuration has no "
                "index_topk; only models with sparse attention (DeepSeek-V3.2, GLM-MoE-DSA) have an indexer"
            )
        runner.capture_indexer_topk(int(index_topk))
    cut_overheads(loaded.model)
    runner.try_a_step()
    return EngineCore(
        runner,
        products=products,
        max_running_requests=config.max_running_requests,
        chunked_prefill_tokens=config.chunked_prefill_tokens,
        weight_version=config.weight_version,
        prefix_cache_tokens=config.prefix_cache_tokens,
    )


def _products(config: EmbeddedEngineConfig, model: PreTrainedModel) -> Float32Products | None:
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        return None
    wanted = config.bfloat16_products
    chosen = wanted == "float32" or (wanted == "auto" and cpu_lacks_bfloat16())
    return Float32Products(model) if chosen else None


def build_writer(config: EmbeddedEngineConfig, model: PreTrainedModel | None) -> OutputStoreWriter | None:
    """Connect to the configured store; None if there is none. Raises the store's errors.

    Codecs follow from the model's configuration: expert ids narrow to one or two bytes, indexer rows become
    bit sets.
    """
    if config.output_store is None:
        return None
    codecs: dict[str, Codec] = {"indexer_topk": PositionsCodec()}
    num_experts = _configured_experts(config, model)
    if num_experts is not None:
        codecs["routed_experts"] = NarrowCodec(num_experts)
    backend = create_backend(config.output_store.backend, config.output_store.config)
    store = OutputStore(backend=backend, codecs=codecs)
    return OutputStoreWriter(store, max_concurrent_puts=config.output_store.max_concurrent_puts)


def _configured_experts(config: EmbeddedEngineConfig, model: PreTrainedModel | None) -> int | None:
    if model is not None:
        model_config = model.config
    elif config.gguf_file is not None:
        return None
    else:
        try:
            model_config = AutoConfig.from_pretrained(str(config.model_path))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"model_path: {config.model_path!r} has no readable config.json: {error}"
            ) from error
    return _first(model_config.get_text_config(decoder=True), _NUM_EXPERTS_NAMES)


def describe_model(config: EmbeddedEngineConfig, core: EngineCore) -> EngineInfo:
    loaded = core.runner.loaded
    return EngineInfo(
        model_path=config.model_path or type(loaded.model).__name__,
        weight_version=core.weights.version or "",
        context_length=loaded.context_length,
        # The last token never goes through the model, so that it needs no room.
        max_request_tokens=config.kv_cache_tokens // STRIDE_MULTIPLE * STRIDE_MULTIPLE + 1,
        vocab_size=core.runner.vocab_size,
        num_layers=len(loaded.layers),
        num_experts=_first(loaded.text_config, _NUM_EXPERTS_NAMES),
        experts_per_token=_first(loaded.text_config, _TOP_K_NAMES),
    )
