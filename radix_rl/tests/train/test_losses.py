"""Token losses, corrections and reductions against numbers worked out by hand."""

import math
from typing import get_args

import pytest
import torch

from radix_rl.config.algorithm import (
    CispoLossConfig,
    DapoLossConfig,
    GspoLossConfig,
    LossConfig,
    MaskedCorrectionConfig,
    NoCorrectionConfig,
    PpoClipLossConfig,
    TruncatedCorrectionConfig,
)
from radix_rl.train.objective.correction import correction_weights
from radix_rl.train.objective.kl import kl_to_reference
from radix_rl.train.objective.losses.registry import LOSSES, policy_loss
from radix_rl.train.plan.loss_scales import loss_scales


def logs(*ratios):
    """New and old log-probabilities `[1, t]` with these ratios."""
    new = torch.tensor([[math.log(ratio) for ratio in ratios]], requires_grad=True)
    return new, torch.zeros(1, len(ratios))


def run(config, ratios, advantages, mask=None):
    new, old = logs(*ratios)
    mask = torch.ones_like(old) if mask is None else torch.tensor([mask])
    losses = policy_loss(config, new, old, torch.tensor([advantages]), mask)
    (losses.loss_bt * mask).sum().backward()
    return losses, new.grad


def test_ppo_clips_where_the_ratio_would_help_beyond_the_bounds():
    # Advantage +1: 1.5 is clipped to 1.2, 0.5 is not. Advantage -1: 0.5 is clipped to 0.8, 1.5 is not.
    losses, grad = run(PpoClipLossConfig(), [1.5, 0.5, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0])
    torch.testing.assert_close(losses.loss_bt, torch.tensor([[-1.2, -0.5, 0.8, 1.5]]))
    assert losses.clipped_bt.tolist() == [[1, 0, 1, 0]]
    torch.testing.assert_close(grad, torch.tensor([[0.0, -0.5, 0.0, 1.5]]))


def test_dapo_has_the_higher_upper_bound():
    losses, _ = run(DapoLossConfig(), [1.25, 1.5, 0.7], [1.0, 1.0, -1.0])
    torch.testing.assert_close(losses.loss_bt, torch.tensor([[-1.25, -1.28, 0.8]]))
    assert losses.clipped_bt.tolist() == [[0, 1, 1]]


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    losses, grad = run(PpoClipLossConfig(dual_clip=3.0), [5.0, 2.0, 5.0], [-2.0, -2.0, 2.0])
    torch.testing.assert_close(losses.loss_bt, torch.tensor([[6.0, 4.0, -2.4]]))
    assert losses.clipped_bt.tolist() == [[1, 0, 1]]
    torch.testing.assert_close(grad, torch.tensor([[0.0, 4.0, 0.0]]))


def test_gspo_gives_every_token_the_geometric_mean_of_the_sequences_ratios():
    # Ratios 2 and 8 have the geometric mean 4; the masked token counts for nothing.
    losses, grad = run(GspoLossConfig(clip_high=9.0), [2.0, 8.0, 100.0], [1.0] * 3, mask=[1.0, 1.0, 0.0])
    torch.testing.assert_close(losses.ratio_bt[:, :2], torch.tensor([[4.0, 4.0]]))
    torch.testing.assert_close(grad, torch.tensor([[-4.0, -4.0, 0.0]]))
    clipped, grad = run(GspoLossConfig(), [1.1, 1.1], [1.0, 1.0])
    torch.testing.assert_close(clipped.loss_bt, torch.full((1, 2), -1.0004))
    torch.testing.assert_close(grad, torch.zeros(1, 2))


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    losses, grad = run(CispoLossConfig(clip_low=0.5, clip_high=1.0), [4.0, 0.1, 1.5], [1.0, -1.0, 2.0])
    # The gradient of -weight * advantage * logprob is -weight * advantage.
    torch.testing.assert_close(grad, torch.tensor([[-2.0, 0.5, -3.0]]))
    assert losses.clipped_bt.tolist() == [[1, 1, 0]]


def test_at_ratio_one_every_loss_has_the_policy_gradient():
    for config in (PpoClipLossConfig(), DapoLossConfig(), GspoLossConfig(), CispoLossConfig()):
        _, grad = run(config, [1.0, 1.0], [0.5, -2.0])
        torch.testing.assert_close(grad, torch.tensor([[-0.5, 2.0]]))


@pytest.mark.parametrize(
    "config", [PpoClipLossConfig(), DapoLossConfig(), GspoLossConfig(), CispoLossConfig()]
)
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_floored_log_probability_of_the_engine_gives_no_nan(config, advantage):
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    ones = torch.ones(1, 2)
    losses = policy_loss(config, new, torch.tensor([[-9999.0, -1.0]]), ones * advantage, ones)
    losses.loss_bt.sum().backward()
    assert new.grad is not None
    for values in (losses.loss_bt, losses.ratio_bt, new.grad):
        assert torch.isfinite(values).all()


def test_kl_to_the_reference_is_k3():
    policy, reference = torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, -1.0 + math.log(2)]])
    torch.testing.assert_close(kl_to_reference(policy, reference), torch.tensor([[0.0, 1 - math.log(2)]]))


@pytest.mark.parametrize("far", [20.0, 47.0, 9999.0])
def test_a_token_far_from_the_reference_gets_no_unbounded_penalty_or_gradient(far):
    reference = torch.zeros(1, 2)
    policy = torch.tensor([[-far, far]], requires_grad=True)

    penalty = kl_to_reference(policy, reference)
    penalty.sum().backward()

    torch.testing.assert_close(penalty, torch.tensor([[math.exp(20.0) - 21, math.exp(-20.0) + 19]]))
    assert policy.grad is not None
    if far > 20:
        assert policy.grad.tolist() == [[0.0, 0.0]]


OLD = torch.log(torch.tensor([[4.0, 1.0, 0.25]]))
ROLLOUT = torch.zeros(1, 3)
ONES = torch.ones(1, 3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NoCorrectionConfig(), [1.0, 1.0, 1.0]),
        (TruncatedCorrectionConfig(high=2.0), [2.0, 1.0, 0.25]),
        (MaskedCorrectionConfig(low=0.5, high=2.0), [0.0, 1.0, 0.0]),
        # The whole response's weight is 4 * 1 * 0.25 = 1.
        (TruncatedCorrectionConfig(level="sequence", high=0.5), [0.5, 0.5, 0.5]),
        (MaskedCorrectionConfig(level="sequence", low=0.5, high=2.0), [1.0, 1.0, 1.0]),
    ],
)
def test_correction_weights_are_bounded_probability_quotients(config, expected):
    torch.testing.assert_close(correction_weights(config, OLD, ROLLOUT, ONES), torch.tensor([expected]))


def test_sequence_weights_leave_masked_tokens_out():
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    weights = correction_weights(TruncatedCorrectionConfig(level="sequence", high=9.0), OLD, ROLLOUT, mask)
    torch.testing.assert_close(weights[:, :2], torch.full((1, 2), 4.0))


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 6, 0, 1 / 6]),
        ("sequence_mean", [1 / 4, 0, 1 / 8]),
        ("constant", [1 / 30, 0, 1 / 30]),
    ],
)
def test_scales_divide_by_what_counts_after_masks(reduction, expected):
    assert loss_scales([2, 0, 4], reduction, max_new_tokens=10) == pytest.approx(expected)


def test_every_loss_that_can_be_configured_is_registered():
    variants = [get_args(variant)[0] for variant in get_args(get_args(LossConfig)[0])]
    assert {variant().type for variant in variants} == set(LOSSES)
