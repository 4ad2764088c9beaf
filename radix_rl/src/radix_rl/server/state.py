"""`ServerState`: what the routes of one server share."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from radix_engine_plugins.writer import OutputStoreWriter
from radix_rl.engines.base import Engine
from radix_rl.errors import ConfigurationError, RequestError
from radix_rl.server.metrics import ServerMetrics
from radix_rl.server.settings import ServerSettings
from radix_rl.types import GenerateRequest


class ServerState:
    """One event loop uses it. The engine and the writer belong to whoever made them."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: ServerSettings,
        writer: OutputStoreWriter | None,
    ) -> None:
        if (engine.capabilities.output_store is not None) != (writer is not None):
            raise ConfigurationError(
                f"the engine's output store is {engine.capabilities.output_store!r}, the server's "
                f"writer is {writer!r}; "
                "give both or neither: the server deletes what the engine stored and no client received"
            )
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.writer = writer
        self.metrics = ServerMetrics(CollectorRegistry())
        self.running: set[str] = set()
        """Ids of engine requests that clients wait for."""

    def check(self, requests: Iterable[GenerateRequest]) -> None:
        """Refuse, before anything starts, what this server cannot answer: RequestError with the remedy."""
        can = self.engine.capabilities
        for request in requests:
            if request.return_routed_experts and not (
                self.settings.enable_return_routed_experts and can.routed_experts
            ):
                raise RequestError(
                    "return_routed_experts: this server does not capture routed experts; start it with "
                    "--enable-return-routed-experts (and a model that has experts)"
                )
            if request.return_indexer_topk and not can.indexer_topk:
                raise RequestError(
                    "return_indexer_topk: this server does not capture indexer top-k; start it with "
                    "--enable-return-indexer-topk (and a model that has sparse attention)"
                )
            if request.return_sampling_mask and not can.sampling_mask:
                raise RequestError(
                    "return_sampling_mask: this server's engine does not return sampling masks"
                )
            if request.return_outputs_via_store:
                self._check_opt_in(request)

    def _check_opt_in(self, request: GenerateRequest) -> None:
        if self.settings.output_store_backend is None:
            raise RequestError(
                "return_outputs_via_store: this server has no output store; start it with "
                "--output-store-backend NAME "
                "(and --output-store-backend-extra-config JSON)"
            )
        if not (request.return_routed_experts or request.return_indexer_topk or request.return_sampling_mask):
            raise RequestError(
                "return_outputs_via_store: nothing to store was asked for; ask for return_routed_experts, "
                "return_indexer_topk or return_sampling_mask, or leave the flag out"
            )

    @contextmanager
    def registered(self, request_id: str) -> Iterator[None]:
        """Makes the id known to `/abort_request`. RequestError if a request of that id runs already."""
        if request_id in self.running:
            raise RequestError(f"rid: {request_id!r} is running already; ids of running requests must differ")
        self.running.add(request_id)
        try:
            yield
        finally:
            self.running.remove(request_id)

    def running_ids(self, rid: str) -> list[str]:
        """Engine requests of one client's `rid`: the id itself, or those of its batch or samples."""
        return [name for name in self.running if name == rid or name.startswith(f"{rid}_")]


def state_of(request: Request) -> ServerState:
    return request.app.state.server
