"""Routes that tell about the server and change nothing."""

import asyncio
import uuid
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from radix_rl.errors import EngineError
from radix_rl.server.http import json_response
from radix_rl.server.metrics import TellsStats, engine_registry
from radix_rl.server.state import ServerState, state_of
from radix_rl.server.weights.state import weights_of
from radix_rl.types import GenerateRequest, SamplingParams
from radix_transfer_plugins.ref import REF_VERSION

router = APIRouter()

_PROBE_TIMEOUT_S = 20.0


@router.get("/health")
@router.get("/ready")
async def health(request: Request) -> Response:
    """200 if the engine can generate, 503 with the reason if not. Generates nothing."""
    try:
        await state_of(request).engine.health()
    except EngineError as error:
        return json_response({"error": {"message": str(error)}}, 503)
    return Response()


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 once one token was really generated, 503 with the reason after at most 20 s."""
    engine = state_of(request).engine
    probe = GenerateRequest(
        request_id=f"health-{uuid.uuid4().hex}",
        input_ids=(0,),
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
    )
    try:
        await engine.health()
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await engine.generate(probe)
    except EngineError as error:
        return json_response({"error": {"message": str(error)}}, 503)
    except TimeoutError:
        message = f"no token within {_PROBE_TIMEOUT_S:g} s: the engine is paused, overloaded or stuck"
        return json_response({"error": {"message": message}}, 503)
    return Response()


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    state = state_of(request)
    info = await state.engine.info()
    return json_response(
        {
            "model_path": info.model_path,
            "served_model_name": state.settings.served_model_name,
            "tokenizer_path": info.model_path,
            "is_generation": True,
            "weight_version": info.weight_version,
            "context_length": info.context_length,
            "vocab_size": info.vocab_size,
            "num_hidden_layers": info.num_layers,
            "num_experts": info.num_experts,
            "num_experts_per_tok": info.experts_per_token,
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Launch arguments and what clients check before they opt in to the store."""
    state = state_of(request)
    return json_response(
        {
            **state.settings.launch_arguments,
            "version": version("radix-rl"),
            "server": "radix-rl",
            "enable_return_routed_experts": state.engine.capabilities.routed_experts,
            "output_store": output_store_info(state),
            "capabilities": msgspec.to_builtins(state.engine.capabilities),
            "num_running_requests": len(state.running),
            "weight_update_groups": weights_of(request).groups.names(),
            "weight_update_lease": weights_of(request).lease.describe(),
        }
    )


def output_store_info(state: ServerState) -> dict[str, Any]:
    """The block by which a client knows what the server stores.

    A client that will send `return_outputs_via_store` refuses a server whose block is missing or not enabled.
    """
    backend = state.engine.capabilities.output_store
    info: dict[str, Any] = {"enabled": backend is not None, "backend": backend, "ref_version": REF_VERSION}
    if state.writer is not None:
        info |= {"key_prefix": state.writer.key_prefix, "place": state.writer.place}
    return info


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Of the server, of the output store's writer and, where the engine tells, of its scheduler."""
    state = state_of(request)
    parts = [generate_latest(state.metrics.registry)]
    if state.writer is not None:
        parts.append(generate_latest(state.writer.metrics.registry))
    if isinstance(state.engine, TellsStats):
        parts.append(generate_latest(engine_registry(await state.engine.stats())))
    return Response(b"".join(parts), headers={"content-type": CONTENT_TYPE_LATEST})
