"""Run by the vLLM environment's interpreter: `vllm.AsyncLLM` with the store; answers as one JSON line."""

import asyncio
import json
import sys
from pathlib import Path

OPT_IN = {"return_outputs_via_store": True}
PROMPT = list(range(30, 50))


async def main(model: str, store_config: str) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    config = json.loads(store_config)
    faults = Path(config["faults"])
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            kv_cache_memory_bytes=64 << 20,
            enable_return_routed_experts=True,
            return_sampling_mask=True,
            logprobs_mode="processed_logprobs",
            additional_config={"output_store": {"backend": "faulty", "config": config}},
        )
    )

    async def ask(name: str, kind: RequestOutputKind, **params: object) -> list[dict]:
        sampling = {
            "max_tokens": 3,
            "temperature": 1.0,
            "top_k": 5,
            "ignore_eos": True,
            "extra_args": OPT_IN,
            **params,
        }
        request = SamplingParams(output_kind=kind, **sampling)
        prompt = {"prompt_token_ids": PROMPT}
        return [
            _plain(completion)
            async for output in engine.generate(prompt, request, name)
            for completion in output.outputs
        ]

    final, delta = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
    answers: dict[str, object] = {
        "single": (await ask("single", final))[-1],
        "samples": await ask("samples", final, n=2),
        "stream": await ask("stream", delta),
    }

    async def decoding(name: str) -> asyncio.Task:
        """A request that has tokens: one that came after it, and streams, has got some."""
        task = asyncio.create_task(ask(name, final, max_tokens=400))
        await asyncio.sleep(0)
        await ask(f"beside-{name}", delta, max_tokens=5, extra_args=None)
        return task

    task = await decoding("aborted")
    await engine.abort("aborted")
    answers["aborted"] = (await task)[-1]

    task = await decoding("cancelled")
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    answers["cancelled"] = type(result).__name__

    faults.write_text('{"error": "StoreFullError"}')
    (result,) = await asyncio.gather(ask("failed", final, n=2), return_exceptions=True)
    answers["failed"] = f"{type(result).__name__}: {result}"
    faults.unlink()
    await asyncio.sleep(1)
    print("ANSWERS " + json.dumps(answers))
    engine.shutdown()


def _plain(completion) -> dict:
    rows, mask = completion.routed_experts, completion.sampling_mask
    return {
        "token_ids": list(completion.token_ids),
        "ref": getattr(completion, "output_store_ref", None),
        "routed_experts": None if rows is None else rows.tolist(),
        "sampling_mask": None if mask is None else mask.token_ids,
        "finish_reason": completion.finish_reason,
    }


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
