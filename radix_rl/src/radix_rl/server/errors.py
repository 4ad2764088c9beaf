"""Exceptions to HTTP answers, in the shapes of SGLang (`{"error": {"message": ...}}`) and, on its routes, of
OpenAI; a malformed body gets both."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from radix_rl.errors import (
    EngineDeadError,
    EngineError,
    EngineStateError,
    RadixError,
    RequestError,
    WeightUpdateError,
)
from radix_rl.server.body import BodyError
from radix_transfer_plugins.errors import OutputStoreError, StoreFullError, StoreUnavailableError


def status_of(error: BaseException) -> int:
    """400: no retry can save the request; 409: the engine's state forbids it; 503: try again later or
    elsewhere.
    """
    if isinstance(error, RequestError | WeightUpdateError):
        return 400
    if isinstance(error, EngineStateError):
        return 409
    if isinstance(error, EngineDeadError | StoreUnavailableError | StoreFullError):
        return 503
    return 500


def message_of(error: BaseException) -> str:
    """What the client may read. Unexpected exceptions keep their text in the server's log only."""
    if isinstance(error, RadixError):
        return str(error)
    if isinstance(error, OutputStoreError):
        return f"the outputs could not be stored, so the request failed: {error}"
    return f"internal error: {type(error).__name__}; see the server's log"


def is_expected(error: BaseException) -> bool:
    return isinstance(error, RequestError | EngineError | OutputStoreError)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_body(error: BaseException, openai: bool) -> dict[str, Any]:
    status, message = status_of(error), message_of(error)
    body: dict[str, Any] = {} if openai else {"error": {"message": message}}
    if openai or isinstance(error, BodyError):
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        kind = "Bad Request" if isinstance(error, BodyError) else kind
        body |= {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return body


def error_response(error: BaseException, openai: bool = False) -> Response:
    return json_response(error_body(error, openai), status_of(error))


def sse(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
