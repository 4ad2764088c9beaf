"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radix_rl.server.generation.exchange import Exchange
from radix_rl.server.generation.openai.bodies import parse_chat, parse_completion
from radix_rl.server.generation.openai.renderers import ChatRenderer, CompletionRenderer
from radix_rl.server.http import json_response
from radix_rl.server.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [await _model_card(state_of(request))]})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    state = state_of(request)
    if model != state.settings.served_model_name:
        error = {
            "message": f"The model {model!r} does not exist; this server has "
            f"{state.settings.served_model_name!r}",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"error": error}, 404)
    return json_response(await _model_card(state))


async def _model_card(state: ServerState) -> dict[str, Any]:
    name = state.settings.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "radix-rl",
        "root": name,
        "parent": None,
        "max_model_len": (await state.engine.info()).context_length,
    }


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    state = state_of(request)
    call, body = await state.parse(parse_completion, await request.body())
    renderer = CompletionRenderer(call, body, state.tokenizer, state.settings.served_model_name)
    return Exchange(state, call, renderer)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    call, body = await state.parse(parse_chat, await request.body(), apart=True)
    renderer = ChatRenderer(call, body, state.tokenizer, state.settings.served_model_name)
    return Exchange(state, call, renderer)
