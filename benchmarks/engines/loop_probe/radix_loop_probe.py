"""Loaded into the server under measurement through PYTHONPATH: what happens to its event loop.

It appends lines "KIND MONOTONIC_S SECONDS" to the file named by RADIX_LOOP_PROBE. The clock is the machine's,
so that the measuring process can tell which lines fall into its window.

late: a timer of 2 ms came this much late, whoever was to blame.
hold: CPU time that one step of the plugin's way to the store took of the event loop's thread, without that of
the garbage collector, which runs wherever it happens to be due.
"""

import asyncio
import functools
import gc
import os
import time

TICK_S = 0.002
SHORTEST_LATE_S, SHORTEST_HOLD_S = 0.001, 0.0001
"""What is shorter is not noted: it costs more to write than it tells."""


def _note(kind: str, seconds: float) -> None:
    with open(os.environ["RADIX_LOOP_PROBE"], "a") as log:
        log.write(f"{kind} {time.monotonic():.6f} {seconds:.6f}\n")


def _watch(loop: asyncio.AbstractEventLoop) -> None:
    def tick(due_s: float) -> None:
        late_s = time.monotonic() - due_s
        if late_s > SHORTEST_LATE_S:
            _note("late", late_s)
        loop.call_later(TICK_S, tick, time.monotonic() + TICK_S)

    loop.call_soon(tick, time.monotonic())


class _Held:
    """Notes the CPU time of a block, which runs on one thread."""

    _collected_s = 0.0
    """By the garbage collector so far, on any thread."""

    def __enter__(self) -> None:
        self._started_s, self._before_s = time.thread_time(), _Held._collected_s

    def __exit__(self, *_: object) -> None:
        held_s = time.thread_time() - self._started_s - (_Held._collected_s - self._before_s)
        if held_s > SHORTEST_HOLD_S:
            _note("hold", held_s)


def _time_collections() -> None:
    started_s = [0.0]

    def collects(phase: str, _: dict) -> None:
        if phase == "start":
            started_s[0] = time.thread_time()
        else:
            _Held._collected_s += time.thread_time() - started_s[0]

    gc.callbacks.append(collects)


class _Timed:
    """Awaits a coroutine and notes the CPU time of each of its steps."""

    def __init__(self, coroutine) -> None:
        self._coroutine = coroutine

    def __await__(self):
        step, value = self._coroutine.send, None
        while True:
            try:
                with _Held():
                    waits_for = step(value)
            except StopIteration as end:
                return end.value
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
        with _Held():
            return original(*args, **kwargs)

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
            _time_collections()
            _watch(manager.event_loop)
            manager.loop_probe = True

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
            _time_collections()
            _watch(asyncio.get_running_loop())
            engine.loop_probe = True

    AsyncLLM._run_output_handler = start
