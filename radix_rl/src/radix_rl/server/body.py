"""JSON bodies of requests."""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from radix_rl.errors import RequestError

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
