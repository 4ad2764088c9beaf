"""Bearer keys, with SGLang's rules.

`--api-key` guards every route, `--admin-api-key` the routes that change the server.
"""

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radix_rl.server.http import json_response

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")
"""Probes and scrapers carry no secrets."""


class BearerAuth:
    """ASGI middleware.

    An admin route takes the admin key when there is one (the plain key is then refused there) and the plain
    key otherwise; without any key configured everything is open.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, admin_api_key: str | None, admin_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if scope["method"] == "OPTIONS" or path.startswith(_OPEN_PREFIXES):
            return True
        is_admin = path.rstrip("/") in self._admin_paths
        key = (self._admin_api_key or self._api_key) if is_admin else self._api_key
        if key is None:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Header bytes reach here as latin-1; clients send keys in UTF-8, as the key was configured.
        return scheme.lower() == "bearer" and secrets.compare_digest(given.encode("latin-1"), key.encode())
