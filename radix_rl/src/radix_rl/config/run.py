"""`RunConfig`: the whole configuration tree of one training run."""

from radix_rl.config.algorithm import AlgorithmConfig
from radix_rl.config.base import FilePath, Section, Seed
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

    output_dir: FilePath
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
        """Names of the replay outputs that the engine hands over and the trainer repeats.

        Some of "routed_experts", "indexer_topk" and "sampling_mask".
        """
        wanted = {
            "routed_experts": self.train.replay_routed_experts,
            "indexer_topk": self.train.replay_indexer_topk,
            "sampling_mask": self.train.replay_sampling_mask and self.rollout.sampling.truncates,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)
