"""`/generate`."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radix_rl.server.generation.body import parse_generate
from radix_rl.server.generation.exchange import Exchange
from radix_rl.server.generation.renderer import GenerateRenderer
from radix_rl.server.state import state_of

router = APIRouter()


@router.api_route("/generate", methods=["POST", "PUT"])
async def generate(request: Request) -> Response:
    state = state_of(request)
    call = parse_generate(await request.body(), state.tokenizer, await state.engine.info())
    return Exchange(state, call.items, GenerateRenderer(call, state.tokenizer), stream=call.stream)
