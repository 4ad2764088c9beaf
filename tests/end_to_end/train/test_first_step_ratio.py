"""Engine and trainer in float32 with exact replay agree on every token's probability."""

import pytest

from radix_rl.train.run import train


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "temperature": 0.7},
        {"max_new_tokens": 12, "top_k": 12, "top_p": 0.95},
    ],
    ids=["plain", "temperature", "truncated"],
)
def test_the_first_steps_importance_ratio_is_one_for_every_token(sampling, make_config, environment):
    config = make_config(
        train={"steps": 1},
        algorithm={"old_logprobs": "rollout"},
        rollout={"prompts_per_step": 8, "samples_per_prompt": 4, "sampling": sampling},
    )
    truncated = "top_k" in sampling
    assert config.replayed_outputs == ("routed_experts",) + ("sampling_mask",) * truncated
    check_first_step(config, environment)


@pytest.mark.parametrize("through_store", [True, False])
def test_so_it_is_with_sparse_attention(through_store, make_config, environment, sparse_attention_model_path):
    config = make_config(
        model={"path": str(sparse_attention_model_path)},
        output_store={"enabled": through_store},
        train={"steps": 1, "replay_indexer_topk": True},
        algorithm={"old_logprobs": "rollout"},
        rollout={
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "sampling": {"max_new_tokens": 12, "top_p": 0.9},
        },
    )
    assert config.replayed_outputs == ("routed_experts", "indexer_topk", "sampling_mask")
    metrics = check_first_step(config, environment)
    assert metrics["replay/indexer_disagreement"] < 0.01


def check_first_step(config, environment):
    logged = []
    outcome = train(config, lambda step, metrics: logged.append(metrics), environment)
    (metrics,) = logged
    assert metrics["train/tokens"] > 100
    assert metrics["mismatch/max_ratio_deviation_with_replay"] < 1e-4
    assert 1 - 1e-4 < metrics["train/ratio_min"] <= metrics["train/ratio_max"] < 1 + 1e-4
    assert metrics["replay/router_disagreement"] < 0.01
    assert metrics["replay/unrecorded_share"] == 0
    assert outcome.objects_left == 0
    return metrics
