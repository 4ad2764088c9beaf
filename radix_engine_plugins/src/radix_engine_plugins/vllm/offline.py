"""LLM: outputs are put on other threads while the engine goes on.

They are waited for before the answers are returned.

Seams:
- `LLMEngine.add_request`: refuses what cannot be met.
- `LLMEngine.step`: starts the puts of what ended with this step; takes no time of the scheduler's.
- `OfflineInferenceMixin._run_engine`, behind `LLM.generate`, `LLM.chat` and `LLM.wait_for_completion`: waits
  for them. All answers are returned with their references, or an error is raised and nothing stays in the
  store.
"""
# pyright: reportMissingImports=false

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from radix_engine_plugins.fields import OPT_IN
from radix_engine_plugins.vllm import seams
from radix_engine_plugins.vllm.opt_in import opted_in, refuse_what_cannot_be_met
from radix_engine_plugins.vllm.outputs import TakenOutputs
from radix_engine_plugins.vllm.session import StoreSession
from radix_transfer_plugins import StoreRef
from radix_transfer_plugins.responses import REF_KEY

_ATTRIBUTE = "radix_pending_puts"
_IN_RUN = "radix_in_run"


def add_request(
    original: Callable[..., str],
    engine: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> str:
    if opted_in(params):
        refuse_what_cannot_be_met(StoreSession.of(engine))
    return original(engine, request_id, prompt, params, *args, **kwargs)


def step(original: Callable[..., list[Any]], engine: Any) -> list[Any]:
    outputs = original(engine)
    session = StoreSession.of(engine)
    if session is None:
        return outputs
    for output in outputs:
        for completion in getattr(output, "outputs", ()):
            taken = getattr(completion, "routed_experts", None)
            if isinstance(taken, TakenOutputs):
                completion.routed_experts = None
                put = asyncio.run_coroutine_threadsafe(session.put(taken), _loop())
                _pending(engine).append((completion, put))
    if not engine.__dict__.get(_IN_RUN):
        # Driven by somebody else than `LLM`, who expects outputs to be complete.
        _finish(engine)
    return outputs


def run_engine(original: Callable[..., list[Any]], llm: Any, *args: Any, **kwargs: Any) -> list[Any]:
    engine = llm.llm_engine
    engine.__dict__[_IN_RUN] = True
    try:
        answers = original(llm, *args, **kwargs)
    except BaseException:
        _discard(engine)
        raise
    finally:
        engine.__dict__[_IN_RUN] = False
    _finish(engine)
    return answers


def _finish(engine: Any) -> None:
    """Gives every completion its reference.

    Raises RuntimeError; then nothing of this run stays in the store.
    """
    pending = _pending(engine)
    try:
        for completion, put in pending:
            setattr(completion, REF_KEY, put.result().to_builtins())
    except BaseException as error:
        _discard(engine)
        if not isinstance(error, Exception):
            raise
        raise RuntimeError(
            f"{OPT_IN}: the outputs could not be stored: {type(error).__name__}: {error}"
        ) from error
    pending.clear()


def _pending(engine: Any) -> list[tuple[Any, "Future[StoreRef]"]]:
    return engine.__dict__.setdefault(_ATTRIBUTE, [])


def _discard(engine: Any) -> None:
    """Of all puts of this run, also of those that still run. Ended ones are deleted at once."""
    session = StoreSession.of(engine)
    pending = _pending(engine)
    for _, put in pending:
        assert session is not None

        def discard(put: "Future[StoreRef]", writer: Any = session.writer) -> None:
            if not put.cancelled() and put.exception() is None:
                writer.discard([put.result()])

        put.add_done_callback(discard)
    pending.clear()


_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """The loop in which puts are awaited, on a thread of its own; one a process."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
        threading.Thread(target=_loops[0].run_forever, name="output-store-loop", daemon=True).start()
    return _loops[0]


def install() -> None:
    from vllm.entrypoints.common.offline import OfflineInferenceMixin
    from vllm.v1.engine.llm_engine import LLMEngine

    seams.around(LLMEngine, "add_request", add_request)
    seams.around(LLMEngine, "step", step)
    seams.around(OfflineInferenceMixin, "_run_engine", run_engine)
