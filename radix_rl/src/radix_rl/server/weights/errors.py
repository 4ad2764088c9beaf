"""Errors of the weight routes."""

from starlette.responses import Response

from radix_rl.server.http import error_body, json_response, message_of, status_of


def update_error_response(error: BaseException) -> Response:
    """With `success` and `message`, which is what SGLang's clients read there."""
    body = {"success": False, "message": message_of(error), **error_body(error, openai=False)}
    return json_response(body, status_of(error))
