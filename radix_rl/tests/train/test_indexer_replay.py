"""Indexer replay against the live model."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from radix_rl.config.rollout import SamplingConfig
from radix_rl.errors import ConfigurationError, ReplayError
from radix_rl.model_layers import decoder_layers, find_indexers
from radix_rl.train.batch import TrainSample, collate
from radix_rl.train.objective.logprobs import response_logprobs
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.indexers import IndexerReplay

CPU = torch.device("cpu")
SAMPLING = SamplingConfig()
FAMILIES = ("deepseek_v32", "glm_moe_dsa")


def with_positions(sample: TrainSample, rows: np.ndarray | None) -> TrainSample:
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
    return TrainSample(**{**fields, "indexer_topk": rows})


def record_live(model: PreTrainedModel, samples: list[TrainSample]) -> list[TrainSample]:
    """The samples with the positions that the model itself keeps, in its own order, -1 for filler."""
    indexers = find_indexers(decoder_layers(model))
    recorded = []
    for sample in samples:
        rows = np.full((sample.num_tokens - 1, len(indexers), 3), -1, dtype=np.int32)
        handles = []
        for number, indexer in enumerate(indexers):

            def hook(_module, _args, output, number=number, rows=rows):
                kept = output[0, : len(rows)].numpy()
                kept = np.where(kept <= np.arange(len(kept))[:, None], kept, -1)
                rows[:, number, : kept.shape[1]] = kept

            handles.append(indexer.register_forward_hook(hook))
        with torch.no_grad():
            model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False)
        for handle in handles:
            handle.remove()
        recorded.append(with_positions(sample, rows))
    return recorded


def last_positions(samples: list[TrainSample], num_indexers: int) -> list[TrainSample]:
    """Each token keeps itself and the two before it: a sliding window."""
    windows = []
    for sample in samples:
        token = np.arange(sample.num_tokens - 1, dtype=np.int32)[:, None]
        rows = np.maximum(token - np.arange(3, dtype=np.int32), -1)
        windows.append(with_positions(sample, np.repeat(rows[:, None], num_indexers, axis=1)))
    return windows


def replayed(model: PreTrainedModel, samples: list[TrainSample]):
    counts = ReplayCounts()
    batch = collate(samples, CPU)
    replay = IndexerReplay(model)
    with replay.microbatch(batch, counts):
        logprobs = response_logprobs(model, batch, SAMPLING)
        replay.forward_finished()
    return logprobs, counts


def plain(model: PreTrainedModel, samples: list[TrainSample]) -> torch.Tensor:
    return response_logprobs(model, collate(samples, CPU), SAMPLING)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_what_the_model_itself_kept_changes_nothing(family, make_model, make_samples):
    model = make_model(family)
    samples = record_live(model, make_samples())
    logprobs, counts = replayed(model, samples)
    torch.testing.assert_close(logprobs, plain(model, samples), rtol=0, atol=1e-5)
    assert counts.indexer_disagreeing == 0
    num_indexers = {"deepseek_v32": 3, "glm_moe_dsa": 2}[family]
    assert counts.indexer_token_layers == num_indexers * sum(s.num_tokens - 1 for s in samples)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_sees_exactly_the_recorded_positions(family, make_model, make_samples):
    model = make_model(family)
    samples = last_positions(make_samples(), {"deepseek_v32": 3, "glm_moe_dsa": 2}[family])
    logprobs, counts = replayed(model, samples)
    assert (logprobs - plain(model, samples)).abs().max() > 1e-3
    assert counts.indexer_disagreeing > 0
    # A token further back than the three layers see through their windows of 3 changes nothing.
    (longest,) = sorted(samples, key=lambda sample: -sample.num_tokens)[:1]
    assert longest.num_tokens > 9
    changed = longest.tokens.copy()
    changed[0] = (changed[0] + 1) % 64
    fields = {name: getattr(longest, name) for name in longest.__struct_fields__}
    other = TrainSample(**{**fields, "tokens": changed})
    one, _ = replayed(model, [longest])
    two, _ = replayed(model, [other])
    torch.testing.assert_close(one[:, 8:], two[:, 8:], rtol=0, atol=1e-5)
    difference = plain(model, [longest])[:, 8:] - plain(model, [other])[:, 8:]
    assert difference.abs().max() > 1e-3


def test_rows_without_positions_are_chosen_live(make_model, make_samples):
    model = make_model("deepseek_v32")
    samples = record_live(model, make_samples())
    rows = samples[0].indexer_topk.copy()
    rows[-1] = -1
    samples[0] = with_positions(samples[0], rows)
    total = sum(sample.num_tokens - 1 for sample in samples)
    logprobs, counts = replayed(model, samples)
    assert counts.indexer_token_layers == 3 * (total - 1)
    torch.testing.assert_close(logprobs, plain(model, samples), rtol=0, atol=1e-5)


def fewer_indexers(rows):
    return rows[:, :2]


def fewer_places(rows):
    return rows[..., :2]


def a_later_token(rows):
    rows[1, 1, 0] = 2
    return rows


def below_nothing(rows):
    rows[0, 0, 1] = -2
    return rows


def named_twice(rows):
    rows[1, 0] = (1, 1, -1)
    return rows


def fewer_than_there_are(rows):
    rows[2, 1, 2] = -1
    return rows


def one_indexer_missing(rows):
    rows[0, 1] = -1
    return rows


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (fewer_indexers, "2 indexers with 3 places each, the model has 3 with 3"),
        (fewer_places, "3 indexers with 2 places each, the model has 3 with 3"),
        (a_later_token, "indexer 1: token 1 kept position 2, expected -1 to 1"),
        (below_nothing, "indexer 0: token 0 kept position -2"),
        (named_twice, "names a position twice"),
        (
            one_indexer_missing,
            r"sample 0/0: the indexers of token 0 kept \[1, 0, 1\] positions, expected 1 of each",
        ),
        (fewer_than_there_are, r"sample 0/0: the indexers of token 2 kept \[3, 2, 3\] positions, expected 3"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(
    spoil: Callable[[np.ndarray], np.ndarray], message, make_model, make_samples
):
    samples = last_positions(make_samples(), 3)
    spoiled = [with_positions(sample, spoil(sample.indexer_topk.copy())) for sample in samples]
    with pytest.raises(ReplayError, match=message):
        replayed(make_model("deepseek_v32"), spoiled)


def test_an_exception_leaves_no_hook_and_no_rows_behind(make_model, make_samples):
    model = make_model("deepseek_v32")
    samples = last_positions(make_samples(), 3)
    batch = collate(samples, CPU)
    before = plain(model, samples)
    replay = IndexerReplay(model)

    def fail_in_the_middle():
        with replay.microbatch(batch, ReplayCounts()):
            response_logprobs(model, batch, SAMPLING)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_in_the_middle()
    assert torch.equal(plain(model, samples), before)


def test_recomputation_in_the_backward_pass_sees_the_same_positions(make_model, make_samples):
    gradients = []
    for checkpointing in (False, True):
        model = make_model("glm_moe_dsa")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                module.training = bool(getattr(module, "gradient_checkpointing", False))
        replay = IndexerReplay(model)
        with replay.microbatch(collate(last_positions(make_samples(), 2), CPU), ReplayCounts()):
            logprobs = response_logprobs(model, collate(make_samples(), CPU), SAMPLING)
            replay.forward_finished()
            logprobs.sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_without_indexers_is_refused(make_model):
    with pytest.raises(ConfigurationError, match="has no indexer"):
        IndexerReplay(make_model())


def test_samples_without_positions_are_refused(make_model, make_samples):
    with pytest.raises(ReplayError, match="carry no indexer_topk"):
        replayed(make_model("deepseek_v32"), make_samples())
