"""Whose object is it? Each one stored belongs to this process until its reference has gone out to the client.

A reference is written -> handed on by the tokenizer manager -> sent. What does not get that far is deleted:
- written, never handed on: a sibling of the batch failed, the request was cancelled, the client left a
  stream.
- handed on, never sent: the client had left, or the answer that was built did not contain it (a failed chat
  answer). Only the bytes that go out can tell, so the app is wrapped: a reference is sent when its key
  passes in a body chunk to a client that is still connected. `sglang.Engine` has no client beyond its
  caller: there, handed on is sent.

Hooks:
- AROUND `TokenizerManager.generate_request`: the first half, and the refusal of requests that cannot be met.
- AROUND `http_server._setup_and_run_http_server`: wraps the app (workers of `--tokenizer-worker-num` do it
  in worker_app).
"""
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from radix_engine_plugins.fields import OPT_IN
from radix_engine_plugins.handover import HandoverMiddleware, Owned, http_receiver
from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.chat import streamed_refs
from radix_engine_plugins.sglang.request_fields import adopt_engine_opt_in, opted_in, root_of
from radix_engine_plugins.sglang.session import StoreSession
from radix_transfer_plugins.responses import REF_KEY

_ATTRIBUTE = "radix_handover"


def written_refs(obj: Any) -> Owned:
    """Of the client's request that `obj` is, or is an item of."""
    root = root_of(obj)
    return (obj if root is None else root).__dict__.setdefault(_ATTRIBUTE, Owned())


def generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any = None
) -> Any:
    adopt_engine_opt_in(obj)
    if not opted_in(obj):
        return original(manager, obj, request)
    return _hand_on(original, manager, obj, request)


async def _hand_on(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any
) -> AsyncIterator[Any]:
    _refuse_what_cannot_be_met(StoreSession.of(manager), obj)
    written = written_refs(obj)
    receiver = http_receiver()
    answers: Any = original(manager, obj, request)
    try:
        async for answer in answers:
            for index, ref in _refs(answer):
                streamed_refs(obj)[index] = ref
                written.move(ref["key"], to=receiver)
            yield answer
    finally:
        # First ends what still runs of the batch: it may store until then.
        await answers.aclose()
        written.discard_all()


def _refs(answer: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index of the choice, and its reference."""
    for item in answer if isinstance(answer, list) else [answer]:
        ref = item["meta_info"].get(REF_KEY)
        if ref is not None:
            yield item.get("index", 0), ref


def _refuse_what_cannot_be_met(session: StoreSession | None, obj: Any) -> None:
    """Raises ValueError, which SGLang answers with 400."""
    if session is None:
        raise ValueError(
            f"{OPT_IN}: this server has no output store; start it with --output-store-backend NAME"
        )
    if obj.return_routed_experts and not session.captures_routed_experts:
        raise ValueError("return_routed_experts: start the server with --enable-return-routed-experts")
    if obj.return_indexer_topk and not session.captures_indexer_topk:
        raise ValueError("return_indexer_topk: start the server with --enable-return-indexer-topk")


def guard(app: Any) -> None:
    """Wrap a FastAPI app that has not started yet."""
    app.add_middleware(HandoverMiddleware)


def setup_and_run_http_server(
    original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any
) -> Any:
    from sglang.srt.entrypoints.http_server import app

    guard(app)
    return original(server_args, *args, **kwargs)


HOOKS = [
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        generate_request,
        hooks.AROUND,
    ),
    (
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        setup_and_run_http_server,
        hooks.AROUND,
    ),
]
