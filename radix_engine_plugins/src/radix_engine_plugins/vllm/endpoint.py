"""Entry point of group `vllm.endpoint_plugins`, for API servers.

By vLLM's two calls for such plugins.

`attach_router`: the app's routes and middleware. `init_state`: the objects that handle requests; on these
three objects of the app, not on their classes, one method each is wrapped: it reads
`return_outputs_via_store` from the body, where every engine has it (`vllm_xargs` works too), and adds
references to the answer.
"""
# pyright: reportMissingImports=false

import json
from collections.abc import Callable
from typing import Any

from radix_engine_plugins.fields import OPT_IN, STORE
from radix_engine_plugins.handover import HandoverMiddleware
from radix_engine_plugins.settings import server_info
from radix_engine_plugins.vllm import seams
from radix_engine_plugins.vllm.answers import ChoiceIndex, answer_with_refs
from radix_engine_plugins.vllm.opt_in import WITHOUT_OUTPUT, is_true, refuse_what_cannot_be_met
from radix_engine_plugins.vllm.session import StoreSession
from radix_engine_plugins.vllm.settings import NAME

_SERVER_INFO = "/server_info"
_STATE = "radix_output_store_session"


class OutputStoreEndpoints:
    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        _wrap_outermost(app)
        _add_server_info(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        session = StoreSession.of(engine_client)
        setattr(state, _STATE, session)
        for handler, method, hook in (
            ("openai_serving_completion", "create_completion", completion),
            ("openai_serving_chat", "create_chat_completion", chat),
            ("serving_tokens", "serve_tokens", tokens),
        ):
            serving = getattr(state, handler, None)
            if serving is not None:
                _handle_with(serving, method, hook, session)


def _wrap_outermost(app: Any) -> None:
    """Around every other middleware, since only what leaves the last one has been sent.

    Middleware that is added the usual way, by the server's flags for example, would come around this one.
    """
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: HandoverMiddleware(build())


def _add_server_info(app: Any) -> None:
    """`/server_info`, as other engines have it: vLLM's own, and `output_store`.

    vLLM has its own in development mode only. A server that would ignore the request field answers without
    the key.
    """
    from fastapi import Request

    stock = next((route.endpoint for route in app.routes if getattr(route, "path", "") == _SERVER_INFO), None)

    async def info(raw_request: Request, config_format: str = "text") -> dict[str, Any]:
        answer = json.loads((await stock(raw_request, config_format)).body) if stock else {}
        session = getattr(raw_request.app.state, _STATE)
        return answer if session is None else {**answer, STORE: server_info(session.settings)}

    app.add_api_route(_SERVER_INFO, info, methods=["GET"])


Hook = Callable[[Any, Any], "tuple[bool, ChoiceIndex]"]
"""Of a request and its body as it came (None: it came from this process): whether it opted in, then marked
for the engine, and the order of its choices."""


def _handle_with(serving: Any, method: str, hook: Hook, session: StoreSession | None) -> None:
    original = seams.require(serving, method)

    async def handle(request: Any, raw_request: Any = None) -> Any:
        body = None if raw_request is None else await raw_request.body()
        wanted, choice_index = hook(request, body)
        if not wanted:
            return await original(request, raw_request)
        refuse_what_cannot_be_met(session)
        return await answer_with_refs(lambda: original(request, raw_request), choice_index)

    setattr(serving, method, handle)


def completion(request: Any, body: bytes | None) -> tuple[bool, ChoiceIndex]:
    """The engine's request ids end with the number of the prompt."""
    from vllm.exceptions import VLLMValidationError

    wanted = _marked_xargs(request)
    if wanted and request.use_beam_search:
        raise VLLMValidationError(f"{OPT_IN} does not work with use_beam_search", parameter=OPT_IN)
    if wanted and request.echo and request.max_tokens == 0:
        request.vllm_xargs[WITHOUT_OUTPUT] = 1
    num_samples = request.n or 1
    return wanted, lambda request_id, index: int(request_id.rpartition("-")[2]) * num_samples + index


def chat(request: Any, body: bytes | None) -> tuple[bool, ChoiceIndex]:
    from vllm.exceptions import VLLMValidationError

    wanted = _marked_xargs(request)
    if wanted and request.use_beam_search:
        raise VLLMValidationError(f"{OPT_IN} does not work with use_beam_search", parameter=OPT_IN)
    return wanted, _sample_index


def tokens(request: Any, body: bytes | None) -> tuple[bool, ChoiceIndex]:
    """Read the opt-in from the body, if it has the field.

    The class of these requests drops fields that it does not know.
    """
    extra_args = dict(request.sampling_params.extra_args or {})
    if OPT_IN not in extra_args and body is not None and OPT_IN.encode() in body:
        extra_args[OPT_IN] = json.loads(body).get(OPT_IN)
    wanted = is_true(extra_args.get(OPT_IN))
    if wanted:
        request.sampling_params.extra_args = {**extra_args, OPT_IN: True}
    return wanted, _sample_index


def _marked_xargs(request: Any) -> bool:
    xargs = request.vllm_xargs or {}
    wanted = is_true(xargs.get(OPT_IN, (request.model_extra or {}).get(OPT_IN)))
    if wanted:
        request.vllm_xargs = {**xargs, OPT_IN: 1}
    return wanted


def _sample_index(request_id: str, index: int) -> int:
    return index
