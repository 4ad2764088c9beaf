"""`plan_step`: from scored samples to what each minibatch trains on."""

from collections.abc import Sequence

import msgspec

from radix_rl.config import RunConfig
from radix_rl.rollout.sample import Sample
from radix_rl.train.advantages.registry import compute_advantages
from radix_rl.train.plan.loss_scales import loss_scales
from radix_rl.train.plan.share_out import split_minibatches


class SampleTask(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A sample with its part in the loss; `TrainSample` says what the numbers mean."""

    sample: Sample
    advantage: float
    loss_scale: float


def plan_step(config: RunConfig, samples: Sequence[Sample], step: int) -> list[list[SampleTask]]:
    """The minibatches of a step, over all ranks: depends on configuration, samples and step number alone."""
    rewards = [_reward(sample) for sample in samples]
    advantages = compute_advantages(
        config.algorithm.advantage, rewards, [sample.group_id for sample in samples]
    )
    counted = [sum(sample.loss_mask) for sample in samples]
    num_minibatches = min(config.train.minibatches, len(samples))
    plan = []
    for positions in split_minibatches(len(samples), num_minibatches, f"{config.seed}/{step}"):
        scales = loss_scales(
            [counted[position] for position in positions],
            config.algorithm.reduction,
            config.rollout.sampling.max_new_tokens,
        )
        plan.append(
            [
                SampleTask(sample=samples[position], advantage=float(advantages[position]), loss_scale=scale)
                for position, scale in zip(positions, scales, strict=True)
            ]
        )
    return plan


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.name} was not scored"
    return sample.reward
