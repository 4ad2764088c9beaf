"""JSON bodies of the control routes."""

from typing import TypeVar

import msgspec
from starlette.requests import Request

from radix_rl.errors import RequestError

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


async def read_body(request: Request, body_type: type[BodyT]) -> BodyT:
    """An empty body is an empty object. Raises RequestError naming what is wrong and the known fields."""
    data = await request.body()
    try:
        return msgspec.json.decode(data or b"{}", type=body_type)
    except msgspec.DecodeError as error:
        known = ", ".join(body_type.__struct_fields__) or "none"
        raise RequestError(f"{error}; known fields: {known}") from error
