"""Run by the vLLM environment's interpreter: generates once for each line of its standard input.

`python vllm_program.py MODEL REQUESTS NEW_TOKENS eager|compiled`
"""

import random
import sys

PROMPT_TOKENS, VOCAB = 16, 1024


def main(model: str, num_requests: int, new_tokens: int, mode: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=mode == "eager",
        max_model_len=512,
        max_num_seqs=num_requests,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
    )
    draw = random.Random(1)
    prompts = [
        {"prompt_token_ids": [draw.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]}
        for _ in range(num_requests)
    ]
    sampling = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
