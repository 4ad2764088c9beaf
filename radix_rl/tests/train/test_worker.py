"""The policy worker: what changes the result, and what must not."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radix_rl.errors import ConfigurationError, ReplayError, TrainingError
from radix_rl.train.batch import TrainSample, split_microbatches
from radix_rl.train.collectives import Ranks
from radix_rl.train.replay.unrecorded import check_unrecorded
from radix_rl.train.worker import PolicyWorker


def parameters_after_step(config, model, minibatches):
    worker = PolicyWorker(config, model)
    metrics = worker.train_step(minibatches)
    return [parameter.detach().clone() for parameter in model.parameters()], metrics


def gradients(config, model, samples):
    """Of one minibatch, before clipping: with plain SGD in place of AdamW nothing else hides them."""
    worker = PolicyWorker(config, model)
    worker.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = worker.train_step([samples])
    return [parameter.grad for parameter in model.parameters()], metrics


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(microbatch_tokens=st.integers(1, 120), seed=st.integers(0, 5))
def test_any_packing_into_microbatches_gives_the_same_loss_and_gradient(
    loss, microbatch_tokens, seed, make_config, make_model, make_samples
):
    samples = make_samples(7, seed=seed)
    results = []
    for tokens in (microbatch_tokens, 10_000):
        config = make_config(
            train={"microbatch_tokens": tokens},
            algorithm={"loss": {"type": loss}, "old_logprobs": "rollout"},
            optimizer={"max_grad_norm": 1e9},
        )
        results.append(gradients(config, make_model(), samples))
    (found, metrics), (expected, whole) = results
    assert metrics["train/loss"] == pytest.approx(whole["train/loss"], abs=1e-5)
    assert metrics["mismatch/k3_with_replay"] == pytest.approx(whole["mismatch/k3_with_replay"], rel=1e-4)
    assert metrics["replay/router_disagreement"] == whole["replay/router_disagreement"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("microbatch_tokens", [1, 10_000])
def test_the_unrecorded_share_is_that_of_the_step_however_it_is_packed(
    microbatch_tokens, make_config, make_model, make_samples
):
    samples = make_samples(4)
    samples[1].routed_experts[-2:] = -1
    total = sum(sample.num_tokens - 1 for sample in samples)
    shares = {"allowed": 2.5 / total, "refused": 1.5 / total}
    configs = {
        name: make_config(train={"microbatch_tokens": microbatch_tokens, "max_unrecorded_share": share})
        for name, share in shares.items()
    }

    _, metrics = parameters_after_step(configs["allowed"], make_model(), [samples[:2], samples[2:]])

    assert metrics["replay/unrecorded_share"] == pytest.approx(2 / total)
    message = (
        f"2 of {total} token rows of this step have no recorded experts, .*max_unrecorded_share.*of sample "
        f"{samples[1].name} 2 of {samples[1].num_tokens - 1}"
    )
    with pytest.raises(ReplayError, match=message):
        parameters_after_step(configs["refused"], make_model(), [samples[:2], samples[2:]])


class TwoRanks(Ranks):
    """Rank 0 beside another one, of which only the sums are known."""

    def __init__(self, other):
        self.other = other

    def sum(self, values):
        return {name: value + self.other[name] for name, value in values.items()}


def test_the_unrecorded_share_is_that_of_all_ranks(make_samples):
    samples = make_samples(2)
    samples[0].routed_experts[0] = -1
    rows = sum(sample.num_tokens - 1 for sample in samples)
    share = 1 / (rows + 100)

    check_unrecorded(samples, share, TwoRanks({"rows": 100.0, "unrecorded": 0.0}))
    with pytest.raises(ReplayError, match=f"2 of {rows + 100} token rows"):
        check_unrecorded(samples, share, TwoRanks({"rows": 100.0, "unrecorded": 1.0}))
    for sample in samples:
        sample.routed_experts[:] = 0
    with pytest.raises(ReplayError, match=f"5 of {rows + 100} token rows"):
        check_unrecorded(samples, share, TwoRanks({"rows": 100.0, "unrecorded": 5.0}))


def test_the_setting_s_old_name_is_refused_with_the_new_one(make_config):
    with pytest.raises(ConfigurationError, match=r"max_live_routed_share: .*max_unrecorded_share"):
        make_config(train={"max_live_routed_share": 0.1})


def test_a_token_the_mask_leaves_out_changes_nothing(make_config, make_model, make_samples):
    results = []
    for rollout_logprob in (-1.0, -9.0):
        samples = make_samples(3)
        samples[0].loss_mask[0] = 0
        samples[0].rollout_logprobs[0] = rollout_logprob
        config = make_config(algorithm={"old_logprobs": "rollout"}, optimizer={"max_grad_norm": 1e9})
        results.append(gradients(config, make_model(), samples))
    assert results[0][1] == results[1][1]
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one, other)


def test_logprobs_are_one_for_each_response_token_also_without_any(make_config, make_model, make_samples):
    samples = make_samples(2)
    samples[1].loss_mask = samples[1].loss_mask[:0]
    samples[1].rollout_logprobs = samples[1].rollout_logprobs[:0]
    found = PolicyWorker(make_config(), make_model()).logprobs(samples, replay=True)
    assert [len(values) for values in found] == [samples[0].num_response_tokens, 0]


def test_gradient_checkpointing_gives_the_same_step(make_config, make_model, make_samples):
    results = []
    for checkpointing in (False, True):
        model = make_model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                module.training = bool(getattr(module, "gradient_checkpointing", False))
        results.append(parameters_after_step(make_config(), model, [make_samples()])[0])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_positive_advantage_makes_its_response_likelier(make_config, make_model, make_samples):
    model = make_model()
    samples = make_samples(2)
    samples[0].advantage, samples[1].advantage = 1.0, -1.0
    worker = PolicyWorker(make_config(optimizer={"lr": 1e-3}), model)
    before = [float(values.sum()) for values in worker.logprobs(samples, replay=True)]
    worker.train_step([samples])
    after = [float(values.sum()) for values in worker.logprobs(samples, replay=True)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_later_minibatches_are_measured_against_the_policy_before_the_step(
    make_config, make_model, make_samples
):
    samples = make_samples(6)
    config = make_config(train={"minibatches": 2}, optimizer={"lr": 1e-2})
    worker = PolicyWorker(config, make_model())
    before = torch.cat(worker.logprobs(samples, replay=True))
    metrics = worker.train_step([samples[:3], samples[3:]])
    rollout = torch.cat([torch.from_numpy(sample.rollout_logprobs) for sample in samples])
    assert metrics["mismatch/mean_abs_with_replay"] == pytest.approx(
        float((before - rollout).abs().mean()), rel=1e-4
    )
    assert worker.optimizer_steps == 2
    # The first minibatch has ratio 1; after the first update the second has not.
    assert metrics["train/ratio_max"] > 1.001


def test_metrics_of_the_gap_are_what_their_names_say(make_config, make_model, make_samples):
    samples = make_samples(4)
    worker = PolicyWorker(make_config(), make_model())
    with_replay = torch.cat(worker.logprobs(samples, replay=True)).double()
    without = torch.cat(worker.logprobs(samples, replay=False)).double()
    rollout = torch.cat([torch.from_numpy(sample.rollout_logprobs) for sample in samples]).double()
    metrics = worker.train_step([samples], measure_without_replay=True)
    for kind, values in (("with_replay", with_replay), ("without_replay", without)):
        difference = values - rollout
        assert metrics[f"mismatch/mean_abs_{kind}"] == pytest.approx(float(difference.abs().mean()), rel=1e-4)
        k3 = float((difference.exp() - 1 - difference).mean())
        assert metrics[f"mismatch/k3_{kind}"] == pytest.approx(k3, rel=1e-4)
        assert metrics[f"mismatch/max_ratio_deviation_{kind}"] == pytest.approx(
            float((difference.exp() - 1).abs().max()), rel=1e-4
        )
    assert abs(metrics["mismatch/k3_with_replay"] - metrics["mismatch/k3_without_replay"]) > 1e-3


def test_the_kl_penalty_pulls_back_to_the_reference(make_config, make_model, make_samples):
    samples = make_samples(3)
    for sample in samples:
        sample.advantage = 0.0
        sample.routed_experts = None
    config = make_config(
        algorithm={"kl_coefficient": 1.0},
        train={"replay_routed_experts": False},
        optimizer={"lr": 1e-3},
    )
    model = make_model()
    reference = make_model().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    worker = PolicyWorker(config, model, reference=reference)
    penalties = [worker.train_step([samples])["train/kl_reference"] for _ in range(5)]
    assert penalties[-1] < penalties[0] * 0.9


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(make_config, make_model, make_samples):
    samples = make_samples(2)
    samples[0].advantage = math.inf
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(TrainingError, match="gradient of optimizer step 0"):
        PolicyWorker(make_config(), model).train_step([samples])
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_microbatches_hold_every_sample_once_within_the_budget(make_samples):
    samples = make_samples(40)
    groups = split_microbatches(samples, 50)
    assert sorted(position for group in groups for position in group) == list(range(40))
    for group in groups:
        longest = max(samples[position].num_tokens for position in group)
        assert len(group) * longest <= 50
    assert len(groups) < 40


def test_a_sample_over_the_budget_is_a_microbatch_of_its_own():
    def sample(length):
        return TrainSample(
            name="x",
            tokens=np.zeros(length, dtype=np.int64),
            loss_mask=np.ones(1, dtype=np.float32),
            rollout_logprobs=np.zeros(1, dtype=np.float32),
            advantage=0.0,
            loss_scale=1.0,
        )

    assert split_microbatches([sample(5), sample(30), sample(4)], 10) == [[1], [0, 2]]
