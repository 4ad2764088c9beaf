"""JSON bodies of requests, and answers: JSON, server-sent events, errors.

Errors take the shape of SGLang (`{"error": {"message": ...}}`) and, on its routes, of OpenAI; a malformed
body gets both.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radix_rl.errors import (
    EngineDeadError,
    EngineError,
    EngineStateError,
    RadixError,
    RequestError,
    WeightUpdateError,
)
from radix_transfer_plugins.errors import OutputStoreError, StoreFullError, StoreUnavailableError


class BusyError(EngineError):
    """Others take the server's time (HTTP 503)."""


class BodyTooLargeError(RequestError):
    """A body over the server's limit (HTTP 413)."""


UNBOUNDED_PATHS = frozenset({"/update_weights_from_tensor"})
"""Whose bodies are weights: as large as they are, and within a time limit of their own."""


class BodyLimit:
    """ASGI middleware that refuses bodies of more than `max_bytes`, but for UNBOUNDED_PATHS."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") in UNBOUNDED_PATHS:
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            if length.isdecimal() and int(length) > self._max_bytes:
                raise self._too_large(int(length))
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large(num_bytes)
            return message

        await self._app(scope, counted, send)

    def _too_large(self, num_bytes: int) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body has at least {num_bytes} bytes, over the {self._max_bytes} that this server takes; "
            "send less at once, or start it with a larger --max-body-bytes"
        )


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class BodyError(RequestError):
    """A body that is no JSON object, or one of the wrong names or types."""


async def read_body(request: Request, body_type: type[BodyT]) -> BodyT:
    """An empty body is an empty object. Raises BodyError naming what is wrong and the known fields."""
    try:
        return msgspec.convert(decode_object(await request.body() or b"{}"), body_type)
    except msgspec.ValidationError as error:
        known = ", ".join(body_type.__struct_fields__) or "none"
        raise BodyError(f"{error}; known fields: {known}") from error


def decode_object(data: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises BodyError."""
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise BodyError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise BodyError(f"the body is JSON, but nested too deeply: {error}") from error
    if not isinstance(raw, dict):
        raise BodyError(f"expected a JSON object, got {type(raw).__name__}")
    return raw


def status_of(error: BaseException) -> int:
    """The HTTP status of an error.

    400, 413: no retry can save the request; 409: the engine's state forbids it; 503: try again later or
    elsewhere.
    """
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, RequestError | WeightUpdateError):
        return 400
    if isinstance(error, EngineStateError):
        return 409
    if isinstance(error, EngineDeadError | BusyError | StoreUnavailableError | StoreFullError):
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
