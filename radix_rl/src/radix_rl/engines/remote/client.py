"""HTTP calls to one server, with what went wrong as this package's errors."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import httpx
import msgspec

from radix_rl.buckets.wire import OWNER_HEADER
from radix_rl.engines.remote.liveness import LivenessWatch
from radix_rl.engines.remote.retry import RetryPolicy, with_retries
from radix_rl.errors import ConfigurationError, EngineDeadError, EngineError, EngineStateError, RequestError

PROBE_TIMEOUT_S = 10.0
PROBE = RetryPolicy(max_tries=1, deadline_s=PROBE_TIMEOUT_S)


class HttpClient:
    """One connection pool.

    Raises RequestError (4xx), EngineStateError (409), EngineError (5xx after the last try), EngineDeadError
    (no connection, or no answer before the deadline), ConfigurationError (a key that is refused).
    """

    watch: LivenessWatch
    """For calls that may take as long as a generation or an update does: they end with their server."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        connect_timeout_s: float = 5.0,
        retry: RetryPolicy | None = None,
        owner: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare a client of one server.

        `admin_api_key` goes with control calls, `api_key` with all others (and with control calls if it is
        the only one). `owner`: whose pauses and weight updates those of these calls are, for our server.
        `transport` replaces the network.
        """
        self.base_url = base_url.rstrip("/")
        self._owner = owner
        self._keys = {False: api_key, True: admin_api_key or api_key}
        self._retry = retry or RetryPolicy()
        self.watch = LivenessWatch(self._require_answer)
        # Deadlines are those of the policies, and the watch's.
        timeout = httpx.Timeout(None, connect=connect_timeout_s)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(
            base_url=self.base_url, timeout=timeout, limits=limits, transport=transport, trust_env=False
        )

    async def get(self, path: str, retry: RetryPolicy | None = None) -> Any:
        """The JSON body of the answer, None if it has none.

        Tried again as the policy says: reading changes nothing.
        """
        policy = retry or self._retry
        return await with_retries(
            policy, f"{self.base_url}{path}", lambda: self._once("GET", path, None, {}, admin=False)
        )

    async def post(self, path: str, body: Any = None, *, admin: bool = False) -> Any:
        """One try with `body` as JSON.

        The JSON body of the answer, None if it has none. Control calls are watched; `admin=False` leaves that
        to the caller.
        """
        content = msgspec.json.encode({} if body is None else body)
        call = self._once("POST", path, content, {"Content-Type": "application/json"}, admin=admin)
        return await (self._watched(call) if admin else call)

    async def post_bytes(self, path: str, content: bytes, content_type: str) -> Any:
        """One try of a control call with a binary body."""
        return await self._watched(
            self._once("POST", path, content, {"Content-Type": content_type}, admin=True)
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def _watched(self, call: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.create_task(call)
        try:
            return await self.watch.guard(task)
        finally:
            task.cancel()

    async def _require_answer(self) -> None:
        """What the watch asks.

        Not /health: a paused SGLang, or one that is long at a prefill, fails it, and ours does asleep, yet
        the requests that wait there will be answered.
        """
        # A refusal is an answer.
        with contextlib.suppress(RequestError, ConfigurationError, EngineStateError):
            await self.get("/model_info", PROBE)

    async def _once(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str], *, admin: bool
    ) -> Any:
        if admin and self._owner is not None:
            headers = headers | {OWNER_HEADER: self._owner}
        if key := self._keys[admin]:
            headers = headers | {"Authorization": f"Bearer {key}"}
        try:
            response = await self._client.request(method, path, content=content, headers=headers)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise EngineDeadError(
                f"no connection to {self.base_url}{path}: {reason}; is the server running?"
            ) from error
        return self._parse(path, admin, response)

    def _parse(self, path: str, admin: bool, response: httpx.Response) -> Any:
        status = response.status_code
        if status < 300:
            return _json(response)
        message = f"{self.base_url}{path} answered {status}: {_error_message(response)}"
        if status in (401, 403):
            setting = "engine.admin_api_key_env" if admin else "engine.api_key_env"
            raise ConfigurationError(f"{message}; name the environment variable with the key in {setting}")
        if status == 404:
            raise ConfigurationError(
                f"{message}; the server does not have this route: is it the right URL and version?"
            )
        if status == 409:
            raise EngineStateError(message)
        if status < 500:
            raise RequestError(message)
        raise EngineError(message)


def _json(response: httpx.Response) -> Any:
    if not response.content or not response.headers.get("content-type", "").startswith("application/json"):
        return None
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError as error:
        raise EngineError(f"{response.request.url} answered with broken JSON: {error}") from error


def _error_message(response: httpx.Response) -> str:
    """The server's own words, of SGLang's, OpenAI's and FastAPI's shapes."""
    try:
        body = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return response.text[:500] or "(empty body)"
    if isinstance(body, dict):
        error = body.get("error", body)
        found = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        if found:
            return str(found)
    return response.text[:500]
