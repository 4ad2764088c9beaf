"""RL post-training with verified replay: engines, rollout, training and weight sync over an output store."""
