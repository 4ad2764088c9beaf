"""What `make_train_sample` takes from a rollout, and what it refuses."""

import numpy as np
import pytest

from radix_rl.errors import ReplayError
from radix_rl.rollout.sample import Sample
from radix_rl.train.batch import make_train_sample
from radix_rl.types import FinishReason, GenerateOutput, GenerateRequest


@pytest.fixture
def sample() -> Sample:
    """Two prompt tokens and two response tokens, 3 and 4."""
    request = GenerateRequest(request_id="r", input_ids=(1, 2))
    output = GenerateOutput(
        request_id="r", prompt_tokens=2, output_ids=(3, 4), output_logprobs=(-1.0, -2.0),
        finish_reason=FinishReason(type="length", length=2), version_spans=(),
    )  # fmt: skip
    return Sample.from_response(request, output, group_id=5, index=0, store_backend=None)


ROWS = np.arange(18, dtype=np.int32).reshape(3, 3, 2)
LENGTHS, IDS = np.array([2, 1], np.int32), np.array([7, 3, 4], np.int32)


def made(sample: Sample, **replay: np.ndarray):
    return make_train_sample(sample, advantage=1.0, loss_scale=1.0, replay=replay)


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.uint8])
def test_integers_that_fit_are_taken(sample, dtype):
    taken = made(
        sample, routed_experts=ROWS.astype(dtype), sampling_mask_lengths=LENGTHS.astype(dtype),
        sampling_mask_token_ids=IDS.astype(dtype), sampling_mask_logprobs=np.zeros(3, np.float32),
    )  # fmt: skip
    assert taken.routed_experts is not None
    assert taken.sampling_mask is not None
    assert taken.routed_experts.tolist() == ROWS.tolist()
    assert taken.sampling_mask.token_ids.tolist() == [7, 3, 4]


@pytest.mark.parametrize("field", ["routed_experts", "indexer_topk"])
@pytest.mark.parametrize(
    "rows", [ROWS + 0.7, ROWS + np.int64(1 << 32), ROWS[:, :, 0], ROWS[..., None], ROWS[:2], ROWS[0, 0, 0]]
)
def test_rows_that_would_name_something_else_are_refused(sample, field, rows):
    with pytest.raises(ReplayError, match=rf"sample 5/0: expected .*{field}"):
        made(sample, **{field: rows})


@pytest.mark.parametrize(
    ("lengths", "ids"),
    [
        (LENGTHS.astype(float), IDS),
        (LENGTHS, IDS + 0.5),
        (LENGTHS[:, None], IDS),
        (LENGTHS, IDS[:, None]),
        (np.array([4, -1], np.int32), IDS),
        (np.array([0, 3], np.int32), IDS),
        (LENGTHS, IDS[:2]),
    ],
)
def test_masks_that_do_not_fit_the_tokens_are_refused(sample, lengths, ids):
    with pytest.raises(ReplayError, match="sample 5/0"):
        made(sample, sampling_mask_lengths=lengths, sampling_mask_token_ids=ids)
