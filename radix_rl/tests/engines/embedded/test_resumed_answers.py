"""An answer that is aborted and resumed is the answer that it would have been."""

import msgspec
import pytest

from radix_rl.config.rollout import RolloutConfig, SamplingConfig
from radix_rl.rollout.environments.base import Environment, Problem
from radix_rl.rollout.generation import RolloutGenerator
from radix_rl.types import FinishReason


class Letters:
    """Every token is two letters, so that a stop string may begin in the middle of one."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(97 + token % 26) + chr(97 + token // 26) for token in ids)


class NoReward(Environment):
    def train_problem(self, index):
        return Problem(problem_id="p", prompt_ids=(5, 6, 7, 8), answer=None)

    def eval_problems(self):
        return []

    def score(self, problem, output_ids, text):
        return 0.0


class Aborting:
    """An engine whose first answers are aborted after so many tokens each."""

    def __init__(self, engine, cuts):
        self._engine = engine
        self._cuts = list(cuts)
        self.requests = []

    @property
    def capabilities(self):
        return self._engine.capabilities

    async def generate(self, request):
        self.requests.append(request)
        if not self._cuts:
            return await self._engine.generate(request)
        sampling = msgspec.structs.replace(request.sampling, max_new_tokens=self._cuts.pop(0))
        output = await self._engine.generate(msgspec.structs.replace(request, sampling=sampling))
        return msgspec.structs.replace(output, finish_reason=FinishReason(type="abort"))


@pytest.fixture
async def answer(qwen3_moe, engine_of):
    """`answer(cuts, **sampling)`: the sample, and the requests that it took."""
    async with engine_of(qwen3_moe, tokenizer=Letters()) as engine:

        async def make(cuts, **sampling):
            aborting = Aborting(engine, cuts)
            generator = RolloutGenerator(
                aborting,
                NoReward(),
                Letters().decode,
                RolloutConfig(samples_per_prompt=1, sampling=SamplingConfig(max_new_tokens=40, **sampling)),
                seed=1,
                replay=["routed_experts", "sampling_mask"],
            )
            (sample,) = await generator.generate(0, [NoReward().train_problem(0)])
            return sample, aborting.requests

        yield make


@pytest.mark.parametrize("cuts", [(1,), (11,), (3, 11, 5)])
async def test_tokens_and_logprobs_are_those_of_no_abort(answer, cuts):
    whole, _ = await answer([])
    resumed, requests = await answer(cuts)
    assert len(requests) == len(cuts) + 1
    assert resumed.tokens == whole.tokens
    assert resumed.rollout_logprobs == pytest.approx(whole.rollout_logprobs, abs=1e-4)
    assert resumed.finish_reason.type == "length"


@pytest.mark.parametrize("cuts", [(10,), (11,), (12,), (4, 7), (10, 1), (11, 1, 20)])
async def test_a_stop_string_ends_the_answer_wherever_it_was_cut(answer, cuts):
    unstopped, _ = await answer([])
    response = unstopped.tokens[4:]
    text = Letters().decode(response)
    # From the second letter of the 11th token to the first one of the 13th.
    stop = text[21:25]
    assert text.index(stop) == 21
    whole, _ = await answer([], stop=(stop,))
    assert whole.tokens == unstopped.tokens[: 4 + 13]
    resumed, _ = await answer(cuts, stop=("never", stop))
    assert resumed.tokens == whole.tokens
    assert resumed.finish_reason == FinishReason(type="stop", matched=stop)
    assert len(resumed.loss_mask) == len(resumed.rollout_logprobs) == 13
    assert resumed.version_spans[-1].end == 13
    assert resumed.replay.covered_rows == 4 + 13 - 1
    assert resumed.replay.segments["sampling_mask_lengths"][-1].end_row == 4 + 13
