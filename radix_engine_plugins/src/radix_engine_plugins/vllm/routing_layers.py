"""Which layers of the model route: vLLM leaves 0, an expert's id, in the rows of the others.

Adds a method to vLLM's workers, which the front end calls by vLLM's own `collective_rpc`.
"""
# pyright: reportMissingImports=false

from typing import Any

METHOD = "radix_routing_layers"


def routing_layers(worker: Any) -> list[int]:
    """Global numbers of the layers whose router vLLM captures; of the target model, not of a draft model."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource

    captured = (MoERunner, RoutedExpertsCaptureSource)
    return sorted(
        {module.layer_id for module in worker.get_model().modules() if isinstance(module, captured)}
    )


def install() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, METHOD, routing_layers)
