"""Loaded into the server under measurement through PYTHONPATH: notes when its event loop is late.

A task sleeps a millisecond at a time; each time it wakes more than a millisecond late, it appends a line
"monotonic seconds, lateness in seconds" to the file named by RADIX_LOOP_PROBE. The clock is the machine's,
so that the measuring process can tell which lines fall into its window."""

import asyncio
import functools
import os
import time

TICK_S = 0.001


async def _watch(path: str) -> None:
    with open(path, "a", buffering=1) as log:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - due > TICK_S:
                log.write(f"{now:.6f} {now - due:.6f}\n")


def watch_sglang() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def start(_: None, manager) -> None:
        if not hasattr(manager, "loop_probe"):
            manager.loop_probe = manager.event_loop.create_task(_watch(os.environ["RADIX_LOOP_PROBE"]))

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
            engine.loop_probe = asyncio.create_task(_watch(os.environ["RADIX_LOOP_PROBE"]))

    AsyncLLM._run_output_handler = start
