"""Run by the vLLM environment's interpreter: `vllm.LLM` with the store; answers as one JSON line."""

import json
import sys
from pathlib import Path

OPT_IN = {"return_outputs_via_store": True}
PROMPT = list(range(30, 50))


def main(model: str, store_config: str) -> None:
    from vllm import LLM, SamplingParams

    config = json.loads(store_config)
    llm = LLM(
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

    def ask(*prompts: list[int], **params: object) -> list[dict]:
        sampling = SamplingParams(
            **{"max_tokens": 4, "temperature": 1.0, "top_k": 5, "ignore_eos": True, **params}
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [_plain(completion) for output in outputs for completion in output.outputs]

    answers: dict[str, object] = {
        "batch": ask(PROMPT, PROMPT[:7], extra_args=OPT_IN, logprobs=0),
        "samples": ask(PROMPT, n=2, extra_args=OPT_IN),
        "start": ask(PROMPT, routed_experts_prompt_start=15, extra_args=OPT_IN),
        "inline": ask(PROMPT),
    }
    faults = Path(config["faults"])
    faults.write_text('{"error": "StoreFullError"}')
    answers["failed"] = _error(lambda: ask(PROMPT, PROMPT[:7], extra_args=OPT_IN))
    faults.unlink()
    answers["unclear"] = _error(lambda: ask(PROMPT, extra_args={"return_outputs_via_store": "maybe"}))
    answers["after"] = ask(PROMPT, extra_args=OPT_IN)
    print("ANSWERS " + json.dumps(answers))


def _plain(completion) -> dict:
    rows, mask = completion.routed_experts, completion.sampling_mask
    return {
        "token_ids": list(completion.token_ids),
        "ref": getattr(completion, "output_store_ref", None),
        "routed_experts": None if rows is None else rows.tolist(),
        "sampling_mask": None if mask is None else mask.token_ids,
        "num_logprobs": len(completion.logprobs or ()),
    }


def _error(call) -> str:
    try:
        return f"none: {call()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
