"""AsyncLLM: puts the outputs of a request that has ended, and only then lets its last output go on.

Seam: `AsyncLLM.generate`, whose generator completions, chat, `/inference/v1/generate` and users of AsyncLLM
all read. The put is awaited in the request's own task, so that others go on meanwhile.
"""
# pyright: reportMissingImports=false

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from radix_engine_plugins.fields import OPT_IN
from radix_engine_plugins.handover import Owned, http_receiver
from radix_engine_plugins.vllm import seams
from radix_engine_plugins.vllm.answers import Answer, current_answer
from radix_engine_plugins.vllm.opt_in import opted_in, refuse_what_cannot_be_met
from radix_engine_plugins.vllm.outputs import TakenOutputs
from radix_engine_plugins.vllm.session import StoreSession
from radix_transfer_plugins.responses import REF_KEY


def generate(
    original: Callable[..., AsyncIterator[Any]],
    engine: Any,
    prompt: Any,
    sampling_params: Any,
    request_id: str,
    **kwargs: Any,
) -> AsyncIterator[Any]:
    outputs = original(engine, prompt, sampling_params, request_id, **kwargs)
    if not opted_in(sampling_params):
        return outputs
    _refuse_streamed_input(prompt)
    # Taken here: a stream's generator is read in another context than it is made in.
    return _stored(outputs, engine, request_id, http_receiver(), current_answer())


async def _stored(
    outputs: Any, engine: Any, request_id: str, receiver: Owned | None, answer: Answer | None
) -> AsyncIterator[Any]:
    written = Owned()
    try:
        session = StoreSession.of(engine)
        refuse_what_cannot_be_met(session)
        assert session is not None
        if answer is None and (session.is_in_server or receiver is not None):
            _refuse_routes_without_a_place()
        async for output in outputs:
            await _put_all(session, engine, output, written)
            for completion in output.outputs:
                ref = getattr(completion, REF_KEY, None)
                if ref is not None:
                    written.move(ref["key"], to=receiver)
                    if answer is not None:
                        answer.refs[request_id, completion.index] = ref
            yield output
    finally:
        await outputs.aclose()
        written.discard_all()


async def _put_all(session: StoreSession, engine: Any, output: Any, written: Owned) -> None:
    """Of the completions that end with this output. Raises GenerationError, which is answered with 500."""
    from vllm.exceptions import GenerationError

    ended = [each for each in output.outputs if isinstance(each.routed_experts, TakenOutputs)]
    if not ended:
        return

    async def put(completion: Any) -> None:
        taken, completion.routed_experts = completion.routed_experts, None
        ref = await session.put(taken)
        written.add(ref, session.writer)
        setattr(completion, REF_KEY, ref.to_builtins())

    try:
        await session.learn_routing_layers(engine.collective_rpc)
        # All are waited for: one that goes on after another failed would store what nobody deletes.
        results = await asyncio.gather(*map(put, ended), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    except Exception as error:
        raise GenerationError(
            f"{OPT_IN}: the outputs could not be stored: {type(error).__name__}: {error}"
        ) from error


def _refuse_routes_without_a_place() -> None:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(
        f"{OPT_IN}: answers of this route have no place for a reference; use /v1/completions, "
        f"/v1/chat/completions or /inference/v1/generate",
        parameter=OPT_IN,
    )


def _refuse_streamed_input(prompt: Any) -> None:
    """Such a request ends several times."""
    from vllm.exceptions import VLLMValidationError

    if hasattr(prompt, "__aiter__"):
        raise VLLMValidationError(f"{OPT_IN} does not work with input that is streamed in", parameter=OPT_IN)


def install() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    seams.around(AsyncLLM, "generate", generate)
