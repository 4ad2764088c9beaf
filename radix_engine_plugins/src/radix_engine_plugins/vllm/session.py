"""One engine client's connection to the store, made with it.

Seams, all only followed by what is here:
- `EngineArgs.create_engine_config`: what is refused at launch, and a store that is not there, is reported
  before any process is started. With several API servers their parent runs it too.
- `AsyncLLM.__init__` and `LLMEngine.__init__`, which every front end runs: each API server process, the
  caller of `AsyncLLM`, the caller of `LLM`.
"""
# pyright: reportMissingImports=false

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from radix_engine_plugins import session
from radix_engine_plugins.fields import STORE
from radix_engine_plugins.settings import StoreSettings
from radix_engine_plugins.vllm import seams
from radix_engine_plugins.vllm.outputs import TakenOutputs
from radix_engine_plugins.vllm.routing_layers import METHOD
from radix_engine_plugins.vllm.settings import NAME, refuse_unsupported, settings_of
from radix_transfer_plugins import StoreRef

logger = logging.getLogger(__name__)


class StoreSession(session.StoreSession):
    def __init__(self, settings: StoreSettings, vllm_config: Any) -> None:
        model = vllm_config.model_config
        super().__init__(settings, model.hf_text_config)
        self.captures_routed_experts = bool(vllm_config.aux_output_config.enable_return_routed_experts)
        self.captures_sampling_mask = bool(model.return_sampling_mask)
        self.routing_layers: Sequence[int] | None = None
        """None while unknown, and always if rows are not captured."""
        self.is_in_server = False
        """Answers leave this process by a route, which must have a place for references."""

    async def put(self, taken: TakenOutputs) -> StoreRef:
        """Raises ValueError and the store's errors. The caller owns the object."""
        stash, start_rows = await asyncio.to_thread(
            taken.to_stash, routing_layers=self.routing_layers, sampling_mask=self.captures_sampling_mask
        )
        return await self.writer.write(stash, start_rows)

    async def learn_routing_layers(self, collective_rpc: Callable[[str], Awaitable[list[Any]]]) -> None:
        """Before the first `put`; `collective_rpc` asks the engine's workers."""
        if self.captures_routed_experts and self.routing_layers is None:
            self.routing_layers = _same_of_all(await collective_rpc(METHOD))


def _same_of_all(answers: list[list[int]]) -> list[int]:
    """Of the workers; pipeline parallelism, in which they would differ, vLLM refuses with routed experts."""
    first, *others = answers
    if any(other != first for other in others):
        raise ValueError(f"routed_experts: workers name different routing layers: {answers!r}")
    return first


def create_engine_config(
    original: Callable[..., Any], engine_args: Any, usage_context: Any = None, headless: bool = False
) -> Any:
    """`headless`: on a machine of engines only, none of which talks to the store."""
    vllm_config = original(engine_args, usage_context, headless)
    settings = settings_of(vllm_config)
    if settings is not None and not headless:
        refuse_unsupported(vllm_config)
        _require_endpoints(usage_context)
        session.check_reachable(settings)
    return vllm_config


def make_async_llm(
    original: Callable[..., None], engine: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    original(engine, vllm_config, *args, **kwargs)
    settings = settings_of(vllm_config)
    if settings is not None:
        opened = StoreSession(settings, vllm_config)
        opened.is_in_server = _is_server(kwargs.get("usage_context"))
        opened.attach(engine)


def make_llm_engine(
    original: Callable[..., None], engine: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    original(engine, vllm_config, *args, **kwargs)
    settings = settings_of(vllm_config)
    if settings is not None:
        opened = StoreSession(settings, vllm_config)
        if opened.captures_routed_experts:
            opened.routing_layers = _same_of_all(engine.collective_rpc(METHOD))
        opened.attach(engine)


def _require_endpoints(usage_context: Any) -> None:
    """Refuse a launch that loads no endpoint plugin.

    vLLM loads them only by name, and its Rust front end loads none; without them references would have no
    place in an answer.
    """
    from vllm import envs

    if not _is_server(usage_context):
        return
    if envs.VLLM_USE_RUST_FRONTEND and envs.VLLM_RUST_FRONTEND_PATH:
        raise ValueError(
            f'additional_config["{STORE}"] does not work with VLLM_USE_RUST_FRONTEND=1, which has no '
            "plugins; leave out one of the two"
        )
    if NAME not in (envs.VLLM_PLUGINS or ()):
        raise ValueError(
            f"an API server with an output store needs this plugin's routes: set VLLM_PLUGINS={NAME} in its "
            f"environment (a comma-separated list: name your other plugins too), got VLLM_PLUGINS="
            f"{','.join(envs.VLLM_PLUGINS or ())!r}"
        )


def _is_server(usage_context: Any) -> bool:
    from vllm.usage.usage_lib import UsageContext

    return usage_context == UsageContext.OPENAI_API_SERVER


def install() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    seams.around(EngineArgs, "create_engine_config", create_engine_config)
    seams.around(AsyncLLM, "__init__", make_async_llm)
    seams.around(LLMEngine, "__init__", make_llm_engine)
