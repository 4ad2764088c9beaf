"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radix_rl.server.generation.body import build_call
from radix_rl.server.generation.exchange import Exchange
from radix_rl.server.generation.openai.bodies import (
    ChatBody,
    CompletionBody,
    chat_call,
    completion_call,
    parse_body,
)
from radix_rl.server.generation.openai.renderers import ChatRenderer, CompletionRenderer
from radix_rl.server.http import decode_object, json_response
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
    body = parse_body(decode_object(await request.body()), CompletionBody)
    call = build_call(completion_call(body), state.tokenizer, await state.engine.info())
    renderer = CompletionRenderer(call, body, state.tokenizer, state.settings.served_model_name)
    return Exchange(state, call.items, renderer, stream=call.stream)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    body = parse_body(decode_object(await request.body()), ChatBody)
    call = build_call(chat_call(body, state.tokenizer), state.tokenizer, await state.engine.info())
    renderer = ChatRenderer(call, body, state.tokenizer, state.settings.served_model_name)
    return Exchange(state, call.items, renderer, stream=call.stream)
