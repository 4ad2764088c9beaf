"""Run by the SGLang environment's interpreter: `sglang.Engine` with the store; answers as one JSON line."""

import asyncio
import json
import os
import sys

OPT_IN = {"return_routed_experts": True, "return_outputs_via_store": True}
PROMPT = list(range(30, 50))


def main(model: str, store_config: str) -> None:
    import sglang

    engine = sglang.Engine(
        model_path=model,
        dtype="float32",
        disable_overlap_schedule=True,
        max_total_tokens=4000,
        enable_return_routed_experts=True,
        sleep_on_idle=True,
        output_store_backend="shared_memory",
        output_store_backend_extra_config=store_config,
    )
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    sampled = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 5, "n": 2, "ignore_eos": True}
    answers = {
        "inherits": "RADIX_SGLANG_OUTPUT_STORE" in os.environ,
        "single": engine.generate(input_ids=PROMPT, sampling_params=sampling, **OPT_IN),
        "batch": engine.generate(input_ids=[PROMPT, PROMPT[:7]], sampling_params=sampling, **OPT_IN),
        "samples": engine.generate(input_ids=PROMPT, sampling_params=sampled, **OPT_IN),
        "stream": list(engine.generate(input_ids=PROMPT, sampling_params=sampling, stream=True, **OPT_IN))[
            -1
        ],
        "inline": engine.generate(input_ids=PROMPT, sampling_params=sampling, return_routed_experts=True),
    }

    async def ask() -> object:
        return await engine.async_generate(input_ids=PROMPT, sampling_params=sampling, **OPT_IN)

    async def cancel() -> str:
        endless = {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True}
        task = asyncio.ensure_future(
            engine.async_generate(input_ids=PROMPT, sampling_params=endless, **OPT_IN)
        )
        await asyncio.sleep(0.5)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        return type(result).__name__

    answers["async"] = engine.loop.run_until_complete(ask())
    answers["cancelled"] = engine.loop.run_until_complete(cancel())
    print("ANSWERS " + json.dumps(answers))
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
