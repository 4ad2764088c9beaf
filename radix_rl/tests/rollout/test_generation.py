"""The generator: order, seeds, bounds, resumption, and nothing left behind by an error."""

import asyncio
import time
from functools import partial

import msgspec
import pytest

from radix_rl.config.rollout import RewardConfig, RolloutConfig, SamplingConfig
from radix_rl.errors import ConfigurationError, EngineError, ReplayError, RequestError, RewardError
from radix_rl.rollout import generation
from radix_rl.rollout.environments.base import Environment, EpochOrder, Problem
from radix_rl.rollout.generation import RolloutGenerator
from radix_rl.rollout.metrics import rollout_metrics
from radix_rl.rollout.refs import delete_refs
from radix_rl.testing import ScriptedEngine, wait_for
from radix_rl.types import FinishReason

ABORT, STOP = FinishReason(type="abort"), FinishReason(type="stop")


class Lengths(Environment):
    """The reward of an answer is its number of tokens, as its text shows it."""

    def train_problem(self, index: int) -> Problem:
        return Problem(problem_id=f"p{index}", prompt_ids=tuple(range(1, index + 3)), answer=None)

    def eval_problems(self) -> list[Problem]:
        return [self.train_problem(index) for index in range(3)]

    def score(self, problem: Problem, output_ids: tuple[int, ...], text: str) -> float:
        assert text == " ".join(map(str, output_ids))
        return float(len(output_ids))


@pytest.fixture
def problems() -> list[Problem]:
    return [Lengths().train_problem(index) for index in range(4)]


@pytest.fixture
def make(engine, store):
    def build(over=engine, *, seed: int = 0, via_store: bool = True, **config) -> RolloutGenerator:
        options = {"samples_per_prompt": 2, "sampling": SamplingConfig(max_new_tokens=4)} | config
        return RolloutGenerator(
            over,
            Lengths(),
            lambda ids, skip_special_tokens: " ".join(map(str, ids)),
            RolloutConfig(**options),
            seed=seed,
            replay=["routed_experts"],
            store=store if via_store else None,
            store_backend="memory" if via_store else None,
        )

    return build


async def emptied(store) -> None:
    """An object whose request was cancelled while it was put is deleted in the background."""
    await wait_for(lambda: not list(store.list_objects()), "every object is deleted")


async def test_samples_come_in_order_scored_and_grouped_however_long_each_takes(
    engine, store, counted, make, problems
):
    engine.script = lambda request: counted(request, delay_s=0.01 * (6 - len(request.input_ids)))
    samples = await make().generate(0, problems, first_group_id=10)
    assert [(sample.group_id, sample.index) for sample in samples] == [
        (10 + group, index) for group in range(4) for index in range(2)
    ]
    assert [sample.prompt_tokens for sample in samples] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert [sample.reward for sample in samples] == [4.0] * 8
    assert len(list(store.list_objects())) == 8
    assert delete_refs(samples, store) == 8
    assert list(store.list_objects()) == []


async def test_sampling_seeds_follow_from_run_seed_step_and_place(engine, make, problems):
    async def seeds(seed: int, step: int, chosen: list[Problem]) -> dict[tuple[int, ...], list[int | None]]:
        engine.requests.clear()
        await make(seed=seed).generate(step, chosen)
        found: dict[tuple[int, ...], list[int | None]] = {}
        for request in engine.requests:
            found.setdefault(request.input_ids, []).append(request.sampling.seed)
        return found

    base = await seeds(0, 0, problems)
    assert len({seed for group in base.values() for seed in group}) == 8
    assert await seeds(0, 0, problems) == base
    for other in (await seeds(1, 0, problems), await seeds(0, 1, problems)):
        assert not {s for g in other.values() for s in g} & {s for g in base.values() for s in g}


async def test_a_problem_that_comes_twice_in_a_step_gets_other_answers(engine, make, problems):
    generator = make()
    await generator.generate(0, [problems[0], problems[0]])
    await generator.generate(0, [problems[0]], first_group_id=2)
    assert len({request.sampling.seed for request in engine.requests}) == len(engine.requests) == 6


async def test_requests_in_flight_stay_below_the_bound(engine, counted, make, problems):
    engine.script = partial(counted, delay_s=0.005)
    await make(max_concurrent_requests=3).generate(0, problems)
    assert engine.most_running == 3


async def test_an_engine_that_orders_requests_gets_a_step_at_once_and_in_order(counted, make, problems):
    engine = ScriptedEngine(partial(counted, delay_s=0.005), ordered_admission=True)
    generator = make(engine, via_store=False, max_concurrent_requests=1)
    await generator.generate(0, problems)
    assert engine.most_running == len(engine.requests)
    asked = [request.input_ids for request in engine.requests]
    assert asked == [problem.prompt_ids for problem in problems for _ in range(2)]


async def test_an_error_cancels_the_rest_and_leaves_nothing_in_the_store(
    engine, store, counted, make, problems
):
    def one_fails_late(request):
        delay_s = {2: 0.0, 3: 0.0, 4: 30.0, 5: 0.05}[len(request.input_ids)]
        error = RequestError("refused") if len(request.input_ids) == 5 else None
        return counted(request, delay_s=delay_s, error=error)

    engine.script = one_fails_late
    with pytest.raises(RequestError, match="refused"):
        await asyncio.wait_for(make().generate(0, problems), 5)
    assert not engine.running
    await emptied(store)


async def test_cancelling_a_step_leaves_nothing_in_the_store(engine, store, counted, make, problems):
    engine.script = lambda request: counted(request, delay_s=0.0 if len(request.input_ids) < 4 else 30.0)
    task = asyncio.create_task(make().generate(0, problems))
    await wait_for(lambda: len(list(store.list_objects())) == 4, "the short answers are stored")
    assert len(engine.requests) == 8
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.running
    await emptied(store)


async def test_a_failing_score_leaves_nothing_in_the_store(engine, store, make, problems, monkeypatch):
    def broken(self, problem, output_ids, text):
        raise ZeroDivisionError

    monkeypatch.setattr(Lengths, "score", broken)
    with pytest.raises(RewardError, match=r"problem p\d, sample \d/\d, failed: it raised ZeroDivisionError"):
        await make(rewards=RewardConfig(max_failed=7)).generate(0, problems)
    await emptied(store)


async def test_rewards_do_not_hold_up_generation(engine, store, make, problems, monkeypatch):
    def slow(self, problem, output_ids, text):
        time.sleep(0.2)
        return 1.0

    monkeypatch.setattr(Lengths, "score", slow)
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.perf_counter() - before)

    watching = asyncio.create_task(watch())
    started = time.perf_counter()
    samples = await make(rewards=RewardConfig(max_concurrent=8)).generate(0, problems)
    watching.cancel()
    assert [sample.reward for sample in samples] == [1.0] * 8
    # One after the other they take 1.6 s.
    assert time.perf_counter() - started < 1.2
    assert longest_s < 0.15
    delete_refs(samples, store)


async def test_a_refused_answer_is_deleted_too(engine, store, make, problems):
    generate = engine.generate

    async def shifted(request):
        output = await generate(request)
        return msgspec.structs.replace(output, output_ids=(*output.output_ids, 9), output_logprobs=(0.0,) * 5)

    engine.generate = shifted
    with pytest.raises(ReplayError, match="expected them to end at"):
        await make().generate(0, problems[:1])
    await emptied(store)


async def test_a_server_that_drops_the_store_flag_is_an_error(engine, make, problems):
    generate = engine.generate
    engine.generate = lambda request: generate(
        msgspec.structs.replace(request, return_outputs_via_store=False)
    )
    with pytest.raises(ReplayError, match="router"):
        await make().generate(0, problems)


@pytest.fixture
def aborted_twice(counted):
    """A script for 4 tokens: two aborts after a token each, then the other two."""

    def script(request):
        if request.sampling.max_new_tokens > 2:
            return counted(request, 1, finish_reason=ABORT)
        return counted(request, 2, finish_reason=STOP)

    return script


async def test_aborted_requests_go_on_where_they_ended(engine, store, aborted_twice, make, problems):
    engine.script = aborted_twice
    (first, second) = await make().generate(0, problems[:1])
    for sample in (first, second):
        assert len(sample.tokens) - sample.prompt_tokens == 4
        assert sample.loss_mask == [1, 1, 1, 1]
        assert sample.replay.covered_rows == len(sample.tokens) - 1
        assert sample.finish_reason == STOP
    assert delete_refs([first, second], store) == 6


async def test_tokens_that_an_abort_brings_without_their_rows_are_sampled_again(
    engine, store, counted, make, problems
):
    generate = engine.generate

    def first_ones_are_aborted(request):
        if len(engine.requests) > 2:
            return counted(request)
        return counted(request, 2, logprobs=(-7.0, -7.0), finish_reason=ABORT)

    async def without_rows_if_aborted(request):
        output = await generate(request)
        if output.finish_reason != ABORT:
            return output
        store.delete_many([output.output_store_ref])
        return msgspec.structs.replace(output, output_store_ref=None)

    engine.script, engine.generate = first_ones_are_aborted, without_rows_if_aborted
    samples = await make().generate(0, problems[:1])
    assert len(engine.requests) == 4
    for sample in samples:
        assert len(sample.tokens) - sample.prompt_tokens == 4
        assert -7.0 not in sample.rollout_logprobs
        assert sample.replay.covered_rows == len(sample.tokens) - 1
    delete_refs(samples, store)


async def test_an_engine_that_only_aborts_is_an_error_and_leaves_nothing(
    engine, store, counted, make, problems, monkeypatch
):
    monkeypatch.setattr(generation, "GIVE_UP_S", 0.3)
    engine.script = partial(counted, num_tokens=0, finish_reason=ABORT)
    with pytest.raises(EngineError, match=r"problem p0: aborted \d+ times in 0 s without a new token"):
        await make().generate(0, problems[:1])
    # Each pause is longer than the one before.
    assert len(engine.requests) < 2 * 10
    assert list(store.list_objects()) == []


async def test_aborts_while_a_request_queues_end_no_rollout(engine, store, counted, make, problems):
    left = dict.fromkeys((problem.prompt_ids for problem in problems), 5)

    def aborted_in_the_queue(request):
        left[request.input_ids] -= 1
        return counted(request) if left[request.input_ids] < 0 else counted(request, 0, finish_reason=ABORT)

    engine.script = aborted_in_the_queue
    samples = await make(samples_per_prompt=1).generate(0, problems[:1])
    assert [len(sample.tokens) - sample.prompt_tokens for sample in samples] == [4]
    delete_refs(samples, store)


async def test_an_evaluation_goes_on_after_an_abort(engine, aborted_twice, make):
    engine.script = aborted_twice
    samples = await make().evaluate(Lengths().eval_problems(), SamplingConfig(max_new_tokens=4))
    assert [sample.reward for sample in samples] == [4.0] * 3


async def test_samples_are_cut_to_the_limit(store, make, problems):
    samples = await make(max_sample_tokens=5).generate(0, problems)
    assert [len(sample.tokens) for sample in samples] == [5] * 8
    delete_refs(samples, store)


async def test_a_prompt_over_the_limit_is_refused_and_leaves_nothing(engine, store, make, problems):
    with pytest.raises(ReplayError, match="the prompt alone has 5"):
        await make(max_sample_tokens=4).generate(0, problems[-1:])
    assert engine.requests
    await emptied(store)


async def test_evaluation_stays_inline_and_asks_for_no_replay(engine, store, make):
    samples = await make().evaluate(
        Lengths().eval_problems(), SamplingConfig(max_new_tokens=3, temperature=0)
    )
    assert [sample.reward for sample in samples] == [3.0, 3.0, 3.0]
    assert not any(
        request.return_routed_experts or request.return_outputs_via_store for request in engine.requests
    )
    assert all(request.sampling.temperature == 0 for request in engine.requests)
    assert list(store.list_objects()) == []


def test_an_engine_without_the_store_is_refused_at_construction(make):
    with pytest.raises(
        ConfigurationError, match=r"'memory', but the engine writes to None.*output_store.enabled"
    ):
        make(ScriptedEngine())


async def test_metrics_compare_inline_bytes_with_refs(engine, store, make, problems):
    samples = await make().generate(0, problems[:1])
    figures = rollout_metrics(samples)
    # 2 samples of 5 rows x 2 layers x 3 experts x 4 bytes = 120 bytes each, 160 as base64.
    assert figures["rollout/response_bytes_inline"] == 320
    assert figures["rollout/response_bytes_store"] == sum(
        len(msgspec.json.encode(ref)) for sample in samples for ref in sample.replay.refs()
    )
    assert figures["rollout/stored_bytes"] == 240
    assert figures["rollout/reward_mean"] == 4.0
    assert figures["rollout/response_tokens_mean"] == 4.0
    delete_refs(samples, store)


async def test_without_a_store_what_is_sent_is_what_travels(make, problems):
    figures = rollout_metrics(await make(via_store=False).generate(0, problems[:1]))
    assert figures["rollout/response_bytes_store"] == figures["rollout/response_bytes_inline"] == 320
    assert figures["rollout/stored_bytes"] == 0


def test_every_epoch_is_a_permutation_of_its_own():
    order = EpochOrder(5, seed=1)
    epochs = [[order.record(5 * epoch + position) for position in range(5)] for epoch in range(4)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [EpochOrder(5, seed=1).record(index) for index in range(20)] == [
        i for epoch in epochs for i in epoch
    ]
