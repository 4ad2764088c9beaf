"""Rewards: what counts as one, what becomes of the others, and how many may fail."""

import asyncio
import threading
import time

import numpy as np
import pytest

from radix_rl.config.rollout import RewardConfig
from radix_rl.errors import RewardError
from radix_rl.rollout.environments.base import Environment, Problem
from radix_rl.rollout.replay_index import ReplayIndex
from radix_rl.rollout.sample import Sample
from radix_rl.rollout.scoring import FAILED, Scorer, num_failed
from radix_rl.types import FinishReason

PROBLEM = Problem(problem_id="train-17", prompt_ids=(1, 2), answer=None)


class Scripted(Environment):
    def __init__(self, function):
        self.function = function

    def train_problem(self, index):
        return PROBLEM

    def eval_problems(self):
        return []

    def score(self, problem, output_ids, text):
        return self.function()


def sample(index: int = 0) -> Sample:
    return Sample(
        group_id=3,
        index=index,
        tokens=[1, 2, 7],
        prompt_tokens=2,
        loss_mask=[1],
        rollout_logprobs=[-0.5],
        version_spans=[],
        finish_reason=FinishReason(type="stop"),
        replay=ReplayIndex(),
    )


async def score(function, **settings) -> Sample:
    scored = sample()
    await Scorer(Scripted(function), RewardConfig(**settings)).score(PROBLEM, scored, "7")
    return scored


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), np.int64(2), np.True_])
async def test_any_finite_number_is_a_reward(value):
    scored = await score(lambda: value)

    assert scored.reward == float(value)
    assert isinstance(scored.reward, float)
    assert num_failed([scored]) == 0


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0]])
async def test_what_is_no_finite_number_counts_as_0_and_as_failed(value, caplog):
    scored = await score(lambda: value)

    assert scored.reward == 0.0
    assert scored.metadata[FAILED] == f"expected a finite number, got {value!r}"
    assert num_failed([scored]) == 1
    assert "the reward of problem train-17, sample 3/0, failed" in caplog.text


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration(), SystemExit(1), TimeoutError("x")])
async def test_a_score_that_raises_counts_as_failed(error):
    def raises():
        raise error

    assert (await score(raises)).metadata[FAILED] == f"it raised {error!r}"


@pytest.mark.parametrize("error", [ValueError("bad"), TimeoutError("its own")])
async def test_so_does_a_coroutine_that_raises(error):
    async def raises():
        raise error

    assert (await score(raises)).metadata[FAILED] == f"it raised {error!r}"


async def test_scores_may_be_coroutines():
    async def slow():
        await asyncio.sleep(0.01)
        return 0.75

    assert (await score(slow)).reward == 0.75


async def test_a_score_that_hangs_is_given_up_after_its_time():
    go_on = threading.Event()
    started = time.perf_counter()

    scored = await score(go_on.wait, timeout_s=0.1)

    go_on.set()
    assert time.perf_counter() - started < 5
    assert scored.metadata[FAILED] == "it took longer than 0.1 s (rollout.rewards.timeout_s)"


async def test_a_coroutine_that_hangs_is_given_up_too():
    async def hangs():
        await asyncio.sleep(60)

    assert "longer than 0.1 s" in (await score(hangs, timeout_s=0.1)).metadata[FAILED]


async def test_one_more_failure_than_allowed_ends_the_rollout_and_names_it():
    scorer = Scorer(Scripted(lambda: None), RewardConfig(max_failed=2))
    await scorer.score(PROBLEM, sample(0), "")
    await scorer.score(PROBLEM, sample(1), "")

    with pytest.raises(RewardError, match=r"train-17, sample 3/2, failed: .*got None; 3 failed.*max_failed"):
        await scorer.score(PROBLEM, sample(2), "")


async def test_no_more_scores_run_at_a_time_than_allowed():
    lock, running, most = threading.Lock(), 0, 0

    def counted():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 1.0

    scorer = Scorer(Scripted(counted), RewardConfig(max_concurrent=3))
    await asyncio.gather(*(scorer.score(PROBLEM, sample(index), "") for index in range(12)))

    assert most == 3
