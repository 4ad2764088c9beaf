"""`RolloutGenerator`: problems in, scored samples out.

It asks the engine for every sample of a step at once, under a bound on requests in flight; batching is the
engine's work. Retries are the engine's work too (see `engines/remote/`, `engines/pool.py`): what fails
here has failed for good.
"""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import msgspec

from radix_rl.concurrency import gather_or_cancel, in_thread_to_end
from radix_rl.config.rollout import RolloutConfig, SamplingConfig
from radix_rl.engines.base import Engine
from radix_rl.errors import ConfigurationError, EngineError
from radix_rl.rollout.environments.base import Environment, Problem
from radix_rl.rollout.refs import delete_refs
from radix_rl.rollout.replay_index import requested_fields
from radix_rl.rollout.sample import Sample
from radix_rl.rollout.sample_builder import SampleBuilder
from radix_rl.rollout.scoring import Scorer
from radix_rl.stop_strings import first_stop_across
from radix_rl.types import FinishReason, GenerateOutput, GenerateRequest, SamplingParams
from radix_transfer_plugins import OutputStore
from radix_transfer_plugins.errors import OutputStoreError

logger = logging.getLogger(__name__)


GIVE_UP_S = 60.0
"""An answer that was aborted again and again for so long without a new token is an error. Aborts in a short
time say nothing: whoever aborts everything several times reaches requests that only queue.
"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
"""Between two requests after an abort that brought no token: doubled each time."""


class Decode(Protocol):
    """Text of token ids, as a tokenizer's `decode` gives it."""

    def __call__(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str: ...


_REMEDIES = {
    "routed_experts": "for a server: start it with --enable-return-routed-experts; for a dense model: set "
    "train.replay_routed_experts=false",
    "indexer_topk": "for a server: start it with --enable-return-indexer-topk; for a model without sparse "
    "attention: set train.replay_indexer_topk=false",
    "sampling_mask": "set train.replay_sampling_mask=false, or sample without top_k, top_p and min_p",
}
"""Replay output -> what to do when the engine does not return it."""


def _without_lost_outputs(request: GenerateRequest, output: GenerateOutput) -> GenerateOutput:
    """Drop the tokens of an aborted answer that came without their rows.

    SGLang aborts a request that waits after a retraction with its tokens, but without their rows, which went
    with its cache. Such tokens cannot be replayed: they are sampled again.
    """
    delivered = output.outputs is not None or output.output_store_ref is not None
    if delivered or not (output.finish_reason.type == "abort" and requested_fields(request)):
        return output
    if output.output_ids:
        logger.info(
            "request %s was aborted without the replay outputs of its %d tokens; they are sampled again",
            request.request_id,
            len(output.output_ids),
        )
    return msgspec.structs.replace(output, output_ids=(), output_logprobs=(), version_spans=())


class RolloutGenerator:
    """Turns problems into scored samples. One event loop; holds no state between calls.

    Ownership: samples that `generate` returns carry refs, which the caller deletes after the last read.
    When it raises or is cancelled, it has cancelled the other requests and deleted every ref it was handed.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        decode: Decode,
        config: RolloutConfig,
        *,
        seed: int,
        replay: Collection[str] = (),
        store: OutputStore | None = None,
        store_backend: str | None = None,
    ) -> None:
        """`replay`, `store`, `store_backend`: as for SampleBuilder.

        Raises ConfigurationError for what the engine cannot give.
        """
        self._engine = engine
        self._environment = environment
        self._decode = decode
        self._config = config
        self._seed = seed
        self._builder = SampleBuilder(replay, store, store_backend)
        # Whoever waits here for another's end would meet others in a batch by chance.
        bounded = not engine.capabilities.ordered_admission
        self._slots = asyncio.Semaphore(config.max_concurrent_requests) if bounded else nullcontext()
        self._check_engine()

    async def generate(
        self, step: int, problems: Sequence[Problem], *, first_group_id: int = 0
    ) -> list[Sample]:
        """`samples_per_prompt` scored samples of each problem, in order: group i is problem i.

        Sampling seeds follow from the run's seed, the step, the group id and the place in the group: a
        problem that comes twice gets other answers.

        Raises RequestError, EngineError, ReplayError, RewardError.
        """
        samples: list[Sample] = []
        scorer = self._scorer()

        async def one(group: int, problem: Problem, index: int) -> Sample:
            sample = await self._sample(
                self._builder,
                self._config.sampling,
                f"{step}/{first_group_id + group}/{index}",
                problem,
                first_group_id + group,
                index,
            )
            samples.append(sample)
            if self._config.max_sample_tokens is not None:
                sample.truncate(self._config.max_sample_tokens)
            return await self._scored(scorer, problem, sample)

        try:
            return await gather_or_cancel(
                [
                    one(group, problem, index)
                    for group, problem in enumerate(problems)
                    for index in range(self._config.samples_per_prompt)
                ]
            )
        except BaseException:
            await self._give_up(samples)
            raise

    async def evaluate(self, problems: Sequence[Problem], sampling: SamplingConfig) -> list[Sample]:
        """One scored sample of each problem, in order.

        Asks for no replay outputs, and so leaves nothing in the store.
        """

        async def one(group: int, problem: Problem) -> Sample:
            path = f"eval/{group}"
            sample = await self._sample(SampleBuilder(), sampling, path, problem, group, index=0)
            return await self._scored(scorer, problem, sample)

        scorer = self._scorer()
        samples = await gather_or_cancel([one(group, problem) for group, problem in enumerate(problems)])
        if self._engine.capabilities.ordered_admission:
            # A run that is resumed here finds no prefixes of these problems either.
            await self._engine.flush_cache()
        return samples

    async def _sample(
        self,
        builder: SampleBuilder,
        sampling: SamplingConfig,
        seed_path: str,
        problem: Problem,
        group_id: int,
        index: int,
    ) -> Sample:
        """One sample, resumed as often as its request is aborted; the same as one that never was."""
        sample: Sample | None = None
        params = _sampling_params(sampling, self._derived_seed(seed_path))
        retries = _Retries(problem.problem_id)
        while True:
            seam = 0 if sample is None else len(sample.tokens) - sample.prompt_tokens
            request = _request(builder, params, problem, sample)
            try:
                async with self._slots:
                    output = _without_lost_outputs(request, await self._engine.generate(request))
                sample = await builder.join(request, output, sample=sample, group_id=group_id, index=index)
                if self._stop_across(sample, seam, sampling.stop) or output.finish_reason.type != "abort":
                    return sample
                await retries.after_abort(output)
            except BaseException:
                if sample is not None:
                    await self._give_up([sample])
                raise

    def _stop_across(self, sample: Sample, seam: int, stops: Sequence[str]) -> bool:
        """End the sample where a stop string is complete that began before the last answer's tokens."""
        decode = partial(self._decode, skip_special_tokens=False)
        response = sample.tokens[sample.prompt_tokens :]
        found = first_stop_across(decode, response, seam, stops)
        if found is None:
            return False
        num_tokens, stop = found
        sample.truncate(sample.prompt_tokens + num_tokens)
        sample.finish_reason = FinishReason(type="stop", matched=stop)
        return True

    async def _give_up(self, samples: Sequence[Sample]) -> None:
        """Free refs on the way out of an error, which must not be hidden by a second one."""
        if self._builder.store is None:
            return
        try:
            await in_thread_to_end(delete_refs, samples, self._builder.store)
        except OutputStoreError as error:
            logger.warning("could not delete the stored outputs of %d samples: %s", len(samples), error)

    def _scorer(self) -> Scorer:
        return Scorer(self._environment, self._config.rewards)

    async def _scored(self, scorer: Scorer, problem: Problem, sample: Sample) -> Sample:
        text = self._decode(sample.tokens[sample.prompt_tokens :], skip_special_tokens=True)
        await scorer.score(problem, sample, text)
        sample.metadata["problem_id"] = problem.problem_id
        return sample

    def _derived_seed(self, path: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{path}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 1

    def _check_engine(self) -> None:
        replay, store_backend = self._builder.replay, self._builder.store_backend
        unknown = replay - set(_REMEDIES)
        if unknown:
            raise ConfigurationError(f"unknown replay outputs {sorted(unknown)}")
        can = self._engine.capabilities
        for name in sorted(replay):
            if not getattr(can, name):
                raise ConfigurationError(
                    f"the trainer is to replay {name}, which this engine does not return; {_REMEDIES[name]}"
                )
        if replay and self._builder.store is not None and can.output_store != store_backend:
            raise ConfigurationError(
                f"the run reads replay outputs from the store backend {store_backend!r}, but the engine "
                f"writes to {can.output_store!r}; give the engine the same store (--output-store-backend) or "
                "set output_store.enabled=false"
            )


def _request(
    builder: SampleBuilder, sampling: SamplingParams, problem: Problem, sample: Sample | None
) -> GenerateRequest:
    """The first request of a sample, or the one that goes on where an aborted one ended.

    Its seed is the same: an engine that draws by seed and position samples what it would have sampled without
    the abort.
    """
    if sample is not None:
        left = sampling.max_new_tokens - (len(sample.tokens) - sample.prompt_tokens)
        sampling = msgspec.structs.replace(sampling, max_new_tokens=left)
    return builder.request(_new_request_id(), problem.prompt_ids, sampling, sample=sample)


class _Retries:
    """When an answer that is aborted again and again is asked for once more, and when no more."""

    def __init__(self, problem_id: str) -> None:
        self._problem_id = problem_id
        self._fruitless = 0
        """Aborts since the last new token."""
        self._since_s = 0.0

    async def after_abort(self, output: GenerateOutput) -> None:
        """Wait before the next request. Raises EngineError if none should follow."""
        if output.output_ids:
            self._fruitless = 0
            return
        now_s = asyncio.get_running_loop().time()
        if self._fruitless == 0:
            self._since_s = now_s
        self._fruitless += 1
        if now_s - self._since_s > GIVE_UP_S:
            raise EngineError(
                f"problem {self._problem_id}: aborted {self._fruitless} times in {now_s - self._since_s:.0f} "
                f"s without a new token ({output.finish_reason.message or 'no reason given'})"
            )
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2.0 ** min(self._fruitless - 1, 16), _LONGEST_PAUSE_S))


def _new_request_id() -> str:
    return uuid.uuid4().hex


def _sampling_params(config: SamplingConfig, seed: int) -> SamplingParams:
    return SamplingParams(**config.model_dump(), seed=seed)
