"""A trainer's new weights reach the real SGLang, unmodified, by broadcast and by a checkpoint on disk."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from radix_rl.buckets.checkpoint_names import CheckpointNames
from radix_rl.config.engine import RemoteSettings
from radix_rl.config.weights import WeightsConfig
from radix_rl.engines.remote import client as http_client
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.engines.remote.liveness import LivenessWatch
from radix_rl.engines.remote.retry import RetryPolicy
from radix_rl.types import GenerateOutput, GenerateRequest, SamplingParams
from radix_rl.weights.sync import WeightSynchronizer
from radix_rl.weights.transports.factory import create_transport

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PROMPT = tuple(range(30, 60))
NUM_OUTPUTS = 6


@pytest.fixture(scope="module")
def server(start_sglang: Callable[..., Any], tiny_moe: Path) -> Iterator[Any]:
    with start_sglang(tiny_moe) as server:
        yield server


@pytest.fixture
async def engine(server: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(server.url, RemoteSettings())
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def synchronizer(engine: RemoteEngine, tiny_moe: Path, tmp_path: Path) -> Callable[[str], WeightSynchronizer]:
    def open_(transport: str) -> WeightSynchronizer:
        settings = WeightsConfig(transport=transport, timeout_s=120)  # pyright: ignore[reportArgumentType]
        return WeightSynchronizer(
            [engine],
            create_transport(settings, directory=tmp_path, model_path=tiny_moe),
            bucket_bytes=1 << 16,
            checkpoint_names=CheckpointNames(tiny_moe),
        )

    return open_


def trained(folder: Path, seed: int) -> PreTrainedModel:
    """The checkpoint after a large step, in another direction for each seed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


async def answer_of(engine: RemoteEngine, request_id: str) -> GenerateOutput:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_OUTPUTS, ignore_eos=True)
    return await engine.generate(GenerateRequest(request_id=request_id, input_ids=PROMPT, sampling=sampling))


def greedy(model: PreTrainedModel) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities by full forward passes."""
    ids, logprobs = list(PROMPT), []
    for _ in range(NUM_OUTPUTS):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return ids[len(PROMPT) :], logprobs


def assert_same(output: GenerateOutput, model: PreTrainedModel) -> None:
    tokens, logprobs = greedy(model)
    assert list(output.output_ids) == tokens
    assert list(output.output_logprobs) == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
async def test_sglang_answers_with_each_new_version(
    engine: RemoteEngine, synchronizer: Callable[[str], WeightSynchronizer], tiny_moe: Path, transport: str
) -> None:
    """Two updates: the second finds the group, or the folder, of the first."""
    sync = synchronizer(transport)
    seed = {"broadcast": 10, "disk": 20}[transport]
    for version in (1, 2):
        model = trained(tiny_moe, seed + version)
        before = await answer_of(engine, f"{transport}-{version}-before")
        assert list(before.output_ids) != greedy(model)[0]

        metrics = await sync.sync(version, model.named_parameters())

        after = await answer_of(engine, f"{transport}-{version}-after")
        assert_same(after, model)
        assert after.version_spans[-1].version == str(version)
        assert (await engine.info()).weight_version == str(version)
        assert metrics["weights/buckets"] > 1
    await sync.close()


async def test_request_waits_for_a_paused_sglang(
    engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its /health fails meanwhile."""
    monkeypatch.setattr(http_client, "PROBE", RetryPolicy(max_tries=1, deadline_s=1.0))
    engine._http.watch = LivenessWatch(engine._http._require_answer, interval_s=0.2, max_failures=2)
    await engine.pause("in_place")
    waiting = asyncio.create_task(answer_of(engine, "paused"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.health(), 4)
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting).output_ids) == NUM_OUTPUTS


async def test_a_run_that_starts_ends_what_a_killed_one_left(
    engine: RemoteEngine, server: Any, tiny_moe: Path, tmp_path: Path
) -> None:
    """A paused SGLang is not healthy, and a session that is open refuses another."""
    await engine.pause("in_place")
    await engine._http.post("/begin_weight_update", {}, admin=True)

    run = RemoteEngine(server.url, RemoteSettings(start_timeout_s=60), takes_over=True)
    try:
        await run.start()
        settings = WeightsConfig(transport="broadcast", timeout_s=120)
        synchronizer = WeightSynchronizer(
            [run],
            create_transport(settings, directory=tmp_path, model_path=tiny_moe),
            bucket_bytes=1 << 16,
            checkpoint_names=CheckpointNames(tiny_moe),
        )
        model = trained(tiny_moe, 31)
        await synchronizer.sync(31, model.named_parameters())
        assert_same(await answer_of(run, "after"), model)
        await synchronizer.close()
    finally:
        await run.close()


async def test_weights_in_request_bodies_are_refused_for_sglang(
    engine: RemoteEngine, synchronizer: Callable[[str], WeightSynchronizer]
) -> None:
    """Its bodies are pickles."""
    with pytest.raises(ValueError, match=r"'http', but RemoteEngine takes weights by broadcast, disk"):
        synchronizer("http")
