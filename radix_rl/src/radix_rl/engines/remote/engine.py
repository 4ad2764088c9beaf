"""`RemoteEngine`: a server that speaks SGLang's API, ours or SGLang itself, behind the engine contract."""

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from radix_rl.buckets.bucket import TensorSpec, WeightBucket
from radix_rl.buckets.wire import encode_bucket
from radix_rl.config.engine import RemoteSettings
from radix_rl.engines.base import Engine, EngineCapabilities, EngineInfo, MemoryTag, PauseMode
from radix_rl.engines.remote.api import TokenShapes, generate_body, parse_answer
from radix_rl.engines.remote.client import PROBE, PROBE_TIMEOUT_S, HttpClient
from radix_rl.engines.remote.retry import RetryPolicy, with_retries
from radix_rl.engines.remote.weights import RemoteWeights
from radix_rl.errors import (
    ConfigurationError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    RequestError,
)
from radix_rl.types import GenerateOutput, GenerateRequest
from radix_transfer_plugins import OutputStore, StoreRef
from radix_transfer_plugins.errors import OutputStoreError, RefError
from radix_transfer_plugins.ref import REF_VERSION
from radix_transfer_plugins.responses import find_refs

logger = logging.getLogger(__name__)

_CONTINUE = RetryPolicy(max_tries=8, deadline_s=30.0)
"""A server that is left paused answers nobody."""
LATE_ANSWER_TIMEOUT_S = 10.0
"""How long a cancelled request's answer is waited for, so that its stored object can be deleted."""


class RemoteEngine(Engine):
    """A client only: it neither starts nor ends the server. `capabilities` are known after `start`."""

    def __init__(
        self,
        base_url: str,
        settings: RemoteSettings,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        takes_over: bool = False,
        needs_output_store: str | None = None,
        store: OutputStore | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect to nothing yet.

        `admin_api_key` is for control calls; without it they use `api_key`. `takes_over` is for the one
        trainer of a server: `start` ends the pause and the weight update that a trainer before it left.
        `needs_output_store`: backend
        name without which `start` refuses the server. `store` (not owned) is the reader's client of it:
        objects of cancelled requests that were answered nevertheless are deleted through it.
        """
        self._settings = settings
        self._takes_over = takes_over
        self._needs_output_store = needs_output_store
        self._store = store
        self._retry = RetryPolicy(deadline_s=settings.request_timeout_s)
        self._http = HttpClient(
            base_url,
            api_key=api_key,
            admin_api_key=admin_api_key,
            connect_timeout_s=settings.connect_timeout_s,
            owner=f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}",
            transport=transport,
        )
        self._capabilities: EngineCapabilities | None = None
        self._weights: RemoteWeights | None = None
        self._shapes: TokenShapes = {}
        self._context_length = 0
        """0: the server does not tell."""
        self._is_paused = False
        self._in_background: set[asyncio.Task[None]] = set()

    @property
    def base_url(self) -> str:
        return self._http.base_url

    @property
    def weights(self) -> RemoteWeights:
        """Updates of the server's weights, beyond what every engine can."""
        if self._weights is None:
            raise EngineError(f"{self.base_url}: start() comes before weight updates")
        return self._weights

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._capabilities is None:
            raise EngineError(f"{self.base_url}: start() comes before capabilities")
        return self._capabilities

    async def start(self) -> EngineInfo:
        """Connect.

        Raises EngineDeadError if the server is not healthy in time, ConfigurationError if it lacks the store.
        """
        patience = RetryPolicy(max_tries=1 << 30, deadline_s=self._settings.start_timeout_s)
        if self._takes_over:
            # First: a paused SGLang is not healthy.
            server = await self._http.get("/server_info", patience)
            await RemoteWeights(self._http, server).take_over()
        await self._http.get("/health", patience)
        server = await self._http.get("/server_info")
        if not isinstance(server, dict):
            raise ConfigurationError(f"{self.base_url}/server_info: expected a JSON object, got {server!r}")
        self._capabilities = self._capabilities_of(server)
        self._weights = RemoteWeights(self._http, server)
        self._check_store(server)
        info = await self.info()
        self._context_length = info.context_length
        if info.num_layers and info.experts_per_token:
            self._shapes["routed_experts"] = (info.num_layers, info.experts_per_token)
        return info

    async def info(self) -> EngineInfo:
        model = await self._http.get("/model_info")
        settings = self._settings
        try:
            return EngineInfo(
                model_path=model["model_path"],
                weight_version=str(model["weight_version"]),
                # SGLang tells neither of these here: 0 is "not told".
                context_length=model.get("context_length") or 0,
                vocab_size=model.get("vocab_size") or 0,
                num_layers=model.get("num_hidden_layers") or settings.num_layers or 0,
                num_experts=model.get("num_experts"),
                experts_per_token=model.get("num_experts_per_tok") or settings.experts_per_token,
            )
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.base_url}/model_info is not of SGLang's shape: {error!r}") from error

    def check(self, request: GenerateRequest) -> None:
        """By what the server told when `start` asked it; its own limits it checks itself."""
        super().check(request)
        needed = len(request.input_ids) + request.sampling.max_new_tokens
        if self._context_length and needed > self._context_length:
            raise RequestError(
                f"{len(request.input_ids)} prompt tokens and "
                f"max_new_tokens={request.sampling.max_new_tokens} make {needed}, over the context length "
                f"of {self._context_length} of {self.base_url}"
            )

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        """Connection errors and 5xx are tried again under a new server-side id until the deadline."""
        if self._weights is not None:
            self._weights.check()
        rids: list[str] = []
        call = asyncio.create_task(self._generate(request, rids))
        try:
            return await self._http.watch.guard(call)
        except asyncio.CancelledError:
            self._later(self._reap(call, rids))
            raise
        except EngineDeadError:
            call.cancel()
            raise

    async def _generate(self, request: GenerateRequest, rids: list[str]) -> GenerateOutput:
        async def attempt() -> Any:
            rids.append(f"{request.request_id}_{uuid.uuid4().hex[:8]}")
            try:
                return await self._http.post("/generate", generate_body(request, rids[-1]))
            except EngineError:
                # The server frees what nobody waits for; this reaches it behind a proxy that holds on.
                self._later(self._abort_quietly(rids[-1]))
                raise

        answer = await with_retries(self._retry, f"{self.base_url}/generate", attempt)
        try:
            return parse_answer(request, answer, self._shapes)
        except Exception:
            await self._discard_unread(answer)
            raise

    async def abort(self, request_id: str | None = None, message: str | None = None) -> None:
        """The server knows a request under its id, `_` and the try: it takes the id for all of them."""
        body: dict[str, Any] = {"abort_all": True} if request_id is None else {"rid": request_id}
        if message is not None:
            body |= {"abort_message": message}
        await self._http.post("/abort_request", body, admin=True)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        # An answer that is lost or not waited for may be that of a pause: `resume` must undo it.
        was_paused, self._is_paused = self._is_paused, True
        try:
            await self._http.post("/pause_generation", {"mode": mode}, admin=True)
        except (RequestError, EngineStateError, ConfigurationError):
            self._is_paused = was_paused
            raise

    async def resume(self) -> None:
        if not self._is_paused:
            return
        try:
            await self._post_again("/continue_generation")
        except EngineStateError:
            # Another client has taken the server over: the pause is not ours any more.
            self._is_paused = False
            raise
        self._is_paused = False

    async def _post_again(self, path: str) -> None:
        """A control call that is the same once and many times. A server may close connections after a 500."""
        await with_retries(_CONTINUE, f"{self.base_url}{path}", lambda: self._http.post(path, admin=True))

    async def sleep(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        await self._http.post("/release_memory_occupation", {"tags": list(tags)}, admin=True)

    async def wake(self, tags: Collection[MemoryTag] = ("weights", "kv_cache")) -> None:
        await self._http.post("/resume_memory_occupation", {"tags": list(tags)}, admin=True)

    async def flush_cache(self) -> None:
        await self._http.post("/flush_cache", admin=True)

    async def begin_weight_update(self, version: str) -> None:
        await self.weights.begin(version)

    async def update_weights(self, bucket: WeightBucket) -> None:
        await self.update_weights_encoded(encode_bucket(bucket))

    async def update_weights_encoded(self, body: bytes) -> None:
        """`body` is `encode_bucket`'s: a fleet shares one encoding."""
        await self.weights.send_encoded(body)

    async def load_weights(self, path: Path, version: str) -> None:
        await self.weights.load_checkpoint(path, version)

    @property
    def num_weight_ranks(self) -> int:
        return self.weights.num_ranks

    async def knows_weight_group(self, name: str) -> bool:
        return await self.weights.knows_group(name)

    async def join_weight_group(
        self, name: str, backend: str, *, address: str, port: int, rank_offset: int, world_size: int
    ) -> None:
        await self.weights.join_group(
            name, backend, address=address, port=port, rank_offset=rank_offset, world_size=world_size
        )

    async def leave_weight_group(self, name: str) -> None:
        await self.weights.leave_group(name)

    async def receive_weights(self, specs: Sequence[TensorSpec], group_name: str) -> None:
        await self.weights.receive(specs, group_name)

    async def commit_weight_update(self, version: str) -> None:
        await self.weights.commit(version)

    async def abort_weight_update(self) -> None:
        await self.weights.abort()

    async def set_weight_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._http.post("/update_weight_version", body, admin=True)

    async def health(self) -> None:
        await self._http.get("/health", PROBE)

    async def close(self) -> None:
        """Waits for clean-up calls; the server goes on."""
        if self._in_background:
            await asyncio.gather(*self._in_background, return_exceptions=True)
        await self._http.close()

    def _capabilities_of(self, server: Mapping[str, Any]) -> EngineCapabilities:
        """Our server tells them; of SGLang's, its flags do.

        Bodies with weights in them are our binary form, which only ours takes: SGLang's are pickles.
        """
        told = server.get("capabilities") or {}
        store = server.get("output_store") or {}
        is_ours = server.get("server") == "radix-rl"
        routed = server.get("enable_return_routed_experts", False)
        return EngineCapabilities(
            routed_experts=bool(told.get("routed_experts", True) and routed),
            indexer_topk=bool(told.get("indexer_topk", server.get("enable_return_indexer_topk", False))),
            sampling_mask=bool(told.get("sampling_mask", _sglang_returns_masks(server))),
            output_store=store.get("backend") if store.get("enabled") else None,
            pause_modes=tuple(told.get("pause_modes", ("abort", "retract", "in_place"))),
            sleep_tags=tuple(told.get("sleep_tags", ("weights", "kv_cache"))),
            weight_transports=("http", "broadcast", "disk") if is_ours else ("broadcast", "disk"),
            weight_names="model" if is_ours else "checkpoint",
        )

    def _check_store(self, server: Mapping[str, Any]) -> None:
        needed, found = self._needs_output_store, self.capabilities.output_store
        if needed is None:
            return
        if server.get("disaggregation_mode") not in (None, "null"):
            raise ConfigurationError(
                f"{self.base_url}: prefill/decode disaggregation ({server['disaggregation_mode']!r}) does "
                "not work with the output store; start the server without --disaggregation-mode, or set "
                "output_store.enabled=false"
            )
        if found != needed:
            has = f"writes to {found!r}" if found else "has no output store"
            raise ConfigurationError(
                f"{self.base_url}: the run needs the output store {needed!r}, but the server {has}; start it "
                f"with --output-store-backend {needed} --output-store-backend-extra-config JSON (SGLang and "
                "vLLM need the package radix-engine-plugins), or set output_store.enabled=false"
            )
        self._check_same_store(server["output_store"])
        version = server["output_store"].get("ref_version")
        if version != REF_VERSION:
            raise ConfigurationError(
                f"{self.base_url}: the server writes references of version {version!r}, this reader knows "
                f"{REF_VERSION}; install the same radix-transfer-plugins on both"
            )

    def _check_same_store(self, told: Mapping[str, Any]) -> None:
        """Compare what the server says of its store with the run's own.

        Raises ConfigurationError naming both.
        """
        if self._store is None:
            return
        own = {"key_prefix": self._store.key_prefix, "place": self._store.backend.place}
        for name, here in own.items():
            there = told.get(name)
            if there is None or here is None or there == here:
                continue
            raise ConfigurationError(
                f"{self.base_url}: the server's output store has {name} {there!r}, this run's has {here!r}: "
                "it could neither read nor delete what the server stores; give output_store.config and the "
                "server's --output-store-backend-extra-config the same key_prefix, and the same space or "
                "directory"
            )

    async def _reap(self, call: asyncio.Task[GenerateOutput], rids: list[str]) -> None:
        """End a request whose caller is gone.

        Its answer may be on the way: then its object is ours to delete.
        """
        if rids:
            await self._abort_quietly(rids[-1])
        await asyncio.wait([call], timeout=LATE_ANSWER_TIMEOUT_S)
        if not call.done():
            call.cancel()
        elif not call.cancelled() and call.exception() is None:
            await self._discard([call.result().output_store_ref])

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await asyncio.wait_for(self.abort(rid), PROBE_TIMEOUT_S)
        except (EngineError, TimeoutError, ConfigurationError, ValueError) as error:
            logger.debug("abort of %s: %s", rid, error)

    async def _discard_unread(self, answer: Any) -> None:
        """Delete the objects of an answer that cannot be used."""
        try:
            await self._discard(find_refs(answer))
        except RefError as error:
            logger.warning("the object of an unusable answer is left for garbage collection: %s", error)

    async def _discard(self, refs: Iterable[StoreRef | None]) -> None:
        """Delete the objects of an answer that nobody will read."""
        owned = [ref for ref in refs if ref is not None]
        if not owned or self._store is None:
            return
        try:
            await asyncio.to_thread(self._store.delete_many, owned)
        except OutputStoreError as error:
            logger.warning("could not delete the object of an unread answer: %s", error)

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._in_background.add(task)
        task.add_done_callback(self._in_background.discard)


def _sglang_returns_masks(server: Mapping[str, Any]) -> bool:
    """SGLang has no flag for sampling masks: one that knows them tells the longest support that it returns.

    It refuses them, request by request, in the modes that are left out here.
    """
    return bool(
        server.get("sampling_mask_max_tokens")
        and server.get("sampling_backend") != "ascend"
        and server.get("disaggregation_mode") in (None, "null")
        and server.get("speculative_algorithm") in (None, "DFLASH", "DSPARK")
    )
