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
    logged = []
    outcome = train(config, lambda step, metrics: logged.append(metrics), environment)
    (metrics,) = logged
    assert metrics["train/tokens"] > 100
    assert metrics["gap/max_ratio_deviation_with_replay"] < 1e-4
    assert 1 - 1e-4 < metrics["train/ratio_min"] <= metrics["train/ratio_max"] < 1 + 1e-4
    assert metrics["replay/router_disagreement"] < 0.01
    assert metrics["replay/live_routed_share"] == 0
    assert outcome.objects_left == 0
