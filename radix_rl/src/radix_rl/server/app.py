"""The ASGI application: routes, keys and error answers over one engine."""

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.engines.base import Engine
from radix_rl.errors import RadixError
from radix_rl.server import control_routes, info_routes
from radix_rl.server.auth import BearerAuth
from radix_rl.server.generation import route as generate_route
from radix_rl.server.generation.openai import routes as openai_routes
from radix_rl.server.http import BodyLimit, error_response, json_response
from radix_rl.server.settings import ServerSettings
from radix_rl.server.state import ServerState
from radix_rl.server.weights import routes as weight_routes
from radix_rl.server.weights.errors import update_error_response
from radix_rl.server.weights.state import WeightsState
from radix_transfer_plugins.errors import OutputStoreError


def create_app(
    engine: Engine,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    writer: OutputStoreWriter | None = None,
) -> FastAPI:
    """`engine` is started; it and `writer` stay the caller's, who closes them after the server has stopped.

    `writer` is the one the engine stores with, None exactly when the engine has no store.
    """
    app = FastAPI(title="radix-rl", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = ServerState(engine, tokenizer, settings, writer)
    app.state.weights = WeightsState(engine, settings)
    app.include_router(generate_route.router)
    app.include_router(info_routes.router)
    app.include_router(openai_routes.router)
    app.include_router(control_routes.router)
    app.include_router(weight_routes.router)
    app.add_exception_handler(RadixError, _on_error)
    app.add_exception_handler(OutputStoreError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None or settings.admin_api_key is not None:
        app.add_middleware(
            BearerAuth,
            api_key=settings.api_key,
            admin_api_key=settings.admin_api_key,
            admin_paths=frozenset(
                route.path
                for router in (control_routes.router, weight_routes.router)
                for route in router.routes
                if isinstance(route, Route)
            ),
        )
    if settings.cors_origins:
        # Outermost: a browser asks beforehand, without a key.
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


_WEIGHT_PATHS = frozenset(route.path for route in weight_routes.router.routes if isinstance(route, Route))


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    if path.rstrip("/") in _WEIGHT_PATHS:
        return update_error_response(error)
    return error_response(error, openai=path.startswith("/v1/"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """A route or a method that is not there: in OpenAI's form under its prefix, else in SGLang's."""
    assert isinstance(error, HTTPException)
    if not request.url.path.startswith("/v1/"):
        return json_response({"detail": error.detail}, error.status_code, error.headers)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": error.status_code}
    return json_response({"error": body}, error.status_code, error.headers)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    """The client left while it sent its body: no fault of the server, and nobody reads this."""
    return Response(status_code=400)
