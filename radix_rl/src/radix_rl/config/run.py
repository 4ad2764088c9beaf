"""`RunConfig`: the whole configuration tree of one training run."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from radix_rl.config.algorithm import AlgorithmConfig
from radix_rl.config.base import Section, Seed
from radix_rl.config.checkpoint import CheckpointConfig
from radix_rl.config.engine import EmbeddedEngineConfig, EngineConfig
from radix_rl.config.environment import EnvironmentConfig
from radix_rl.config.evaluation import EvalConfig
from radix_rl.config.model import ModelConfig
from radix_rl.config.observe import ObserveConfig
from radix_rl.config.optimizer import OptimizerConfig
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.config.rollout import RolloutConfig
from radix_rl.config.train import TrainConfig
from radix_rl.config.weights import WeightsConfig


class RunConfig(Section):
    """One training run."""

    output_dir: Path
    """Metrics, report and checkpoints go here."""
    seed: Seed = 0
    """Of sampling, data order and anything else that is drawn."""
    model: ModelConfig
    engine: EngineConfig = EmbeddedEngineConfig()
    output_store: OutputStoreConfig = OutputStoreConfig()
    environment: EnvironmentConfig | None = None
    """May be left out where Python code passes an environment of its own."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def replayed_outputs(self) -> tuple[str, ...]:
        """What the engine hands over and the trainer repeats: of "routed_experts", "indexer_topk" and
        "sampling_mask"."""
        wanted = {
            "routed_experts": self.train.replay_routed_experts,
            "indexer_topk": self.train.replay_indexer_topk,
            "sampling_mask": self.train.replay_sampling_mask and self.rollout.sampling.truncates,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.rollout.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0 (greedy), which gives every sample of a group the same "
                "answer; "
                "set it above 0"
            )
        advantage = self.algorithm.advantage
        if self.rollout.samples_per_prompt == 1 and advantage in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(
                f'rollout.samples_per_prompt is 1, but algorithm.advantage "{advantage}" compares the '
                "samples of one prompt: every advantage would be 0; set it to at least 2, or use "
                'algorithm.advantage="reinforce_pp"'
            )
        num_samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if num_samples < self.train.minibatches:
            raise ValueError(
                f"train.minibatches is {self.train.minibatches} but a step has only {num_samples} samples; "
                "raise rollout.prompts_per_step or lower train.minibatches"
            )
        if self.engine.type == "remote" and self.weights.transport == "memory":
            raise ValueError(
                'weights.transport "memory" needs engine.type "embedded"; set weights.transport="http", or '
                '"broadcast" or "disk", which SGLang takes too'
            )
        if (
            self.engine.type == "remote"
            and self.output_store.enabled
            and self.output_store.backend == "memory"
        ):
            raise ValueError(
                'output_store.backend "memory" cannot be reached by a remote engine; use "shared_memory" on '
                "one "
                'machine or "mooncake"'
            )
        return self
