"""Loaded into the server under measurement through PYTHONPATH: what happens to its event loop.

It appends lines "KIND MONOTONIC_S SECONDS" to the file named by RADIX_LOOP_PROBE. The clock is the machine's,
so that the measuring process can tell which lines fall into its window.

late: a task sleeps a millisecond at a time; it woke this much late, whoever was to blame.
hold: CPU time that one step of the plugin's way to the store took of the event loop's thread.
"""

import asyncio
import functools
import os
import time

TICK_S = 0.001
SHORTEST_HOLD_S = 0.0001


def _note(kind: str, seconds: float) -> None:
    with open(os.environ["RADIX_LOOP_PROBE"], "a") as log:
        log.write(f"{kind} {time.monotonic():.6f} {seconds:.6f}\n")


async def _watch() -> None:
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s = time.monotonic() - due
        if late_s > TICK_S:
            _note("late", late_s)


class _Timed:
    """Awaits a coroutine and notes the CPU time of each of its steps."""

    def __init__(self, coroutine) -> None:
        self._coroutine = coroutine

    def __await__(self):
        step, value = self._coroutine.send, None
        while True:
            started_s = time.thread_time()
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
            finally:
                held_s = time.thread_time() - started_s
                if held_s > SHORTEST_HOLD_S:
                    _note("hold", held_s)
            try:
                step, value = self._coroutine.send, (yield waits_for)
            except BaseException as error:
                step, value = self._coroutine.throw, error


def _time_steps(owner, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    async def timed(*args, **kwargs):
        return await _Timed(original(*args, **kwargs))

    setattr(owner, name, timed)


def _time_call(owner, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def timed(*args, **kwargs):
        started_s = time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            held_s = time.thread_time() - started_s
            if held_s > SHORTEST_HOLD_S:
                _note("hold", held_s)

    setattr(owner, name, timed)


def watch_sglang() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def start(_: None, manager) -> None:
        if not hasattr(manager, "loop_probe"):
            from radix_engine_plugins.sglang import finish, handover, receive

            _time_steps(finish, "_put")
            _time_call(finish, "_strip")
            _time_call(receive, "_take_mask")
            _time_call(handover, "_refs")
            manager.loop_probe = manager.event_loop.create_task(_watch())

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
        start,
        HookType.AFTER,
    )


def watch_vllm() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    start_output_handler = AsyncLLM._run_output_handler
    if hasattr(start_output_handler, "__wrapped__"):
        return

    @functools.wraps(start_output_handler)
    def start(engine) -> None:
        start_output_handler(engine)
        if not hasattr(engine, "loop_probe"):
            from radix_engine_plugins.vllm import answers
            from radix_engine_plugins.vllm.session import StoreSession

            _time_steps(StoreSession, "put")
            _time_call(answers, "_with_refs")
            engine.loop_probe = asyncio.create_task(_watch())

    AsyncLLM._run_output_handler = start
