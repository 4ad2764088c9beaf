"""Routes that change the server: abort, pause, cache, memory. All are admin routes."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radix_rl.engines.base import MemoryTag, PauseMode
from radix_rl.errors import RequestError
from radix_rl.server.http import json_response, read_body
from radix_rl.server.state import state_of
from radix_rl.server.weights.state import lease_call, weights_of

router = APIRouter()

ALL_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class AbortBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None
    """The message of the answers' finish reason."""
    finished_reason: dict[str, Any] | None = None
    """Accepted because SGLang clients send it; the engine gives the reason."""


class PauseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: PauseMode = "abort"


class ContinueBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    take_over: bool = False
    """Continue whoever paused, and drop the weight update that is open: for a run that starts after one that
    was killed, and for operators."""
    torch_empty_cache: bool = True
    """Accepted from SGLang clients; there is nothing to empty here."""


class MemoryBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tags: list[Literal["weights", "kv_cache"]] | None = None


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    """End one request, all of a batch, or everything.

    An id that is not running is ignored: it may have just finished.
    """
    body = await read_body(request, AbortBody)
    if not body.rid and not body.abort_all:
        raise RequestError("abort_request: expected rid, or abort_all: true")
    await state_of(request).abort(None if body.abort_all else body.rid, body.abort_message)
    return Response()


@router.post("/pause_generation")
async def pause_generation(request: Request) -> Response:
    body = await read_body(request, PauseBody)
    state = state_of(request)
    with lease_call(request):
        await state.engine.pause(body.mode)
        if body.mode == "abort":
            # What took the place of those that the pause ended, and what is still to come.
            await state.abort(message="the engine was paused")
        weights_of(request).is_paused = True
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    body = await read_body(request, ContinueBody)
    weights = weights_of(request)
    if body.take_over:
        weights.lease.give_up()
        with lease_call(request):
            await weights.end_pause()
    else:
        with lease_call(request):
            await state_of(request).engine.resume()
            weights.is_paused = False
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(request: Request) -> Response:
    await state_of(request).engine.flush_cache()
    return Response("Cache flushed.\n", media_type="text/plain")


@router.api_route("/release_memory_occupation", methods=["GET", "POST"])
async def release_memory_occupation(request: Request) -> Response:
    body = await read_body(request, MemoryBody)
    state, tags = state_of(request), body.tags or ALL_TAGS
    version = (await state.engine.info()).weight_version
    await state.engine.sleep(tags)
    if "weights" in tags:
        # Dropping the weights drops an update of them.
        weights_of(request).update.dropped(version)
    return json_response(None)


@router.api_route("/resume_memory_occupation", methods=["GET", "POST"])
async def resume_memory_occupation(request: Request) -> Response:
    body = await read_body(request, MemoryBody)
    await state_of(request).engine.wake(body.tags or ALL_TAGS)
    return json_response(None)
