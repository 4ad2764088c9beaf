"""JSON bodies of requests."""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from radix_rl.errors import RequestError

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


async def read_body(request: Request, body_type: type[BodyT]) -> BodyT:
    """An empty body is an empty object. Raises RequestError naming what is wrong and the known fields."""
    try:
        return msgspec.convert(decode_object(await request.body() or b"{}"), body_type)
    except msgspec.ValidationError as error:
        known = ", ".join(body_type.__struct_fields__) or "none"
        raise RequestError(f"{error}; known fields: {known}") from error


def decode_object(data: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises RequestError."""
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(f"the body is JSON, but nested too deeply: {error}") from error
    if not isinstance(raw, dict):
        raise RequestError(f"expected a JSON object, got {type(raw).__name__}")
    return raw
