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
    call = await state.parse(parse_generate, await request.body())
    return Exchange(state, call, GenerateRenderer(call, state.tokenizer))
