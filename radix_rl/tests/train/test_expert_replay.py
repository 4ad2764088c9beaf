"""Routing replay against the live model."""

import ast
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from radix_rl.config.rollout import SamplingConfig
from radix_rl.errors import ConfigurationError, ReplayError
from radix_rl.routers.find import find_replayed_routers
from radix_rl.routers.known_classes import KnownClasses
from radix_rl.routers.registry import all_routers
from radix_rl.train.batch import TrainSample, collate
from radix_rl.train.collectives import Ranks
from radix_rl.train.objective.logprobs import response_logprobs
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.experts import RouterReplay
from radix_rl.train.replay.unrecorded import check_unrecorded

CPU = torch.device("cpu")
SAMPLING = SamplingConfig()
MOE_FAMILIES = (
    "qwen3_moe",
    "qwen3_moe_dense_first",
    "qwen2_moe",
    "olmoe",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "minimax_m2",
    "ernie4_5_moe",
)


def record_live(model: PreTrainedModel, samples: list[TrainSample]) -> list[TrainSample]:
    """The samples with the experts that the model itself picks for each of their tokens."""
    layers = int(model.config.num_hidden_layers)
    recorded = []
    for sample in samples:
        rows = np.full((sample.num_tokens - 1, layers, sample.routed_experts.shape[-1]), -1, dtype=np.int32)
        handles = []
        for layer, (_, router) in find_replayed_routers(model).items():

            def hook(_module, _args, output, layer=layer, rows=rows):
                rows[:, layer] = output[2][: len(rows)].numpy()

            handles.append(router.register_forward_hook(hook))
        with torch.no_grad():
            model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False)
        for handle in handles:
            handle.remove()
        recorded.append(with_rows(sample, rows))
    return recorded


def with_rows(sample: TrainSample, rows: np.ndarray | None) -> TrainSample:
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
    return TrainSample(**{**fields, "routed_experts": rows})


def replayed(model: PreTrainedModel, samples: list[TrainSample]):
    counts = ReplayCounts()
    batch = collate(samples, CPU)
    replay = RouterReplay(model)
    with replay.microbatch(batch, counts):
        logprobs = response_logprobs(model, batch, SAMPLING)
        replay.forward_finished()
    return logprobs, counts


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_replaying_what_the_model_itself_picked_changes_nothing(family, make_model, make_samples):
    model = make_model(family)
    samples = record_live(model, make_samples())
    logprobs, counts = replayed(model, samples)
    plain = response_logprobs(model, collate(samples, CPU), SAMPLING)
    torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-5)
    assert counts.disagreeing == 0
    routed_layers = len(find_replayed_routers(model))
    assert counts.token_layers == routed_layers * sum(sample.num_tokens - 1 for sample in samples)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_replaying_other_experts_changes_the_output_and_gradients_reach_the_router(
    family, make_model, make_samples
):
    model = make_model(family)
    dense = tuple(set(range(3)) - set(find_replayed_routers(model)))
    samples = make_samples(dense=dense)
    logprobs, counts = replayed(model, samples)
    plain = response_logprobs(model, collate(samples, CPU), SAMPLING)
    assert (logprobs - plain).abs().max() > 1e-3
    assert counts.disagreeing > counts.token_layers // 2
    logprobs.sum().backward()
    for _, router in find_replayed_routers(model).values():
        assert router.weight.grad.abs().max() > 0


def test_disagreement_compares_sets_and_not_their_order(make_model, make_samples):
    model = make_model()
    samples = [with_rows(s, s.routed_experts[..., ::-1].copy()) for s in record_live(model, make_samples())]
    logprobs, counts = replayed(model, samples)
    assert counts.disagreeing == 0
    torch.testing.assert_close(
        logprobs, response_logprobs(model, collate(samples, CPU), SAMPLING), rtol=0, atol=1e-5
    )


def test_disagreement_counts_each_differing_token_and_layer(make_model, make_samples):
    model = make_model()
    (sample,) = record_live(model, make_samples(1))
    rows = sample.routed_experts.copy()
    # The last layer feeds no other router, so exactly the two changed rows differ.
    for row in (0, 1):
        rows[row, 2, 0] = next(e for e in range(8) if e not in rows[row, 2])
    _, counts = replayed(model, [with_rows(sample, rows)])
    assert counts.disagreeing == 2


def test_rows_without_experts_route_live(make_model, make_samples):
    model = make_model()
    samples = record_live(model, make_samples())
    rows = samples[0].routed_experts.copy()
    rows[-1] = -1
    samples[0] = with_rows(samples[0], rows)
    total = sum(sample.num_tokens - 1 for sample in samples)
    logprobs, counts = replayed(model, samples)
    assert (counts.unrecorded_rows, counts.rows) == (1, total)
    torch.testing.assert_close(
        logprobs, response_logprobs(model, collate(samples, CPU), SAMPLING), rtol=0, atol=1e-5
    )


def change_layers(rows):
    return rows[:, :2]


def change_top_k(rows):
    return np.concatenate([rows, (rows[..., :1] + 1) % 8], axis=-1)


def partly_missing_place(rows):
    rows[0, 1, 0] = -1
    return rows


def partly_missing_layer(rows):
    rows[0, 1] = -1
    return rows


def unknown_expert(rows):
    rows[0, 0, 0] = 8
    return rows


def repeated_expert(rows):
    rows[0, 0] = 0
    return rows


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change_layers, "2 layers, but the model has 3"),
        (change_top_k, "routes to 2 experts a token, the recorded rows have 3"),
        (partly_missing_place, "partly -1"),
        (partly_missing_layer, "partly -1"),
        (unknown_expert, "experts 0 to 7, a recorded row names expert 8"),
        (repeated_expert, "names an expert twice"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(spoil, message, make_model, make_samples):
    samples = [with_rows(sample, spoil(sample.routed_experts)) for sample in make_samples()]
    with pytest.raises(ReplayError, match=message):
        replayed(make_model(), samples)


def test_a_refused_row_names_its_sample(make_model, make_samples):
    samples = make_samples(3)
    for spoil in (partly_missing_layer, unknown_expert, repeated_expert):
        spoiled = [samples[0], with_rows(samples[1], spoil(samples[1].routed_experts.copy())), samples[2]]
        with pytest.raises(ReplayError, match=f"sample {samples[1].name}: "):
            replayed(make_model(), spoiled)


def test_unfilled_rows_of_a_router_with_one_place_are_refused_with_the_sample(make_model, make_samples):
    """Zeros are a record that such a router could have made, but not in place of what the model chooses."""
    model = make_model(top_k=1)
    samples = record_live(model, [with_rows(s, s.routed_experts[..., :1]) for s in make_samples(3)])
    assert not (samples[1].routed_experts == 0).all(axis=(1, 2)).all()
    rows = samples[1].routed_experts.copy()
    rows[-4:] = 0
    with pytest.raises(ReplayError, match=rf"sample {samples[1].name}: 4 rows of .* are 0 throughout"):
        replayed(model, [samples[0], with_rows(samples[1], rows), samples[2]])


def test_a_router_with_one_place_that_chooses_the_first_expert_everywhere_is_replayed(
    make_model, make_samples
):
    model = make_model("gpt_oss", top_k=1)
    for _, router in find_replayed_routers(model).values():
        router.bias.data[0] = 1000.0
    samples = record_live(model, [with_rows(s, s.routed_experts[..., :1]) for s in make_samples(3)])
    assert all((sample.routed_experts == 0).all() for sample in samples)

    logprobs, counts = replayed(model, samples)

    assert counts.disagreeing == 0
    plain = response_logprobs(model, collate(samples, CPU), SAMPLING)
    torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-5)


def test_experts_in_a_dense_layer_are_refused(make_model, make_samples):
    with pytest.raises(ReplayError, match="layer 0, which has no router"):
        replayed(make_model("qwen3_moe_dense_first"), make_samples())


def test_an_exception_leaves_no_hook_and_no_rows_behind(make_model, make_samples):
    model = make_model()
    samples = make_samples()
    batch = collate(samples, CPU)
    plain = response_logprobs(model, batch, SAMPLING)
    replay = RouterReplay(model)

    def fail_in_the_middle():
        with replay.microbatch(batch, ReplayCounts()):
            response_logprobs(model, batch, SAMPLING)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_in_the_middle()
    assert torch.equal(response_logprobs(model, batch, SAMPLING), plain)
    replayed(model, samples)


@pytest.mark.parametrize("num_calls", [0, 2])
def test_a_router_that_is_not_called_exactly_once_is_an_error(num_calls, make_model, make_samples):
    model = make_model()
    batch = collate(make_samples(), CPU)
    replay = RouterReplay(model)
    with replay.microbatch(batch, ReplayCounts()):
        for _ in range(num_calls):
            response_logprobs(model, batch, SAMPLING)
        with pytest.raises(ReplayError, match="one call of each router"):
            replay.forward_finished()


def test_recomputation_in_the_backward_pass_sees_the_same_experts(make_model, make_samples):
    gradients = []
    for checkpointing in (False, True):
        model = make_model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                module.training = bool(getattr(module, "gradient_checkpointing", False))
        replay = RouterReplay(model)
        batch = collate(make_samples(), CPU)
        with replay.microbatch(batch, ReplayCounts()):
            logprobs = response_logprobs(model, batch, SAMPLING)
            replay.forward_finished()
            logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_recomputation_keeps_what_rows_without_a_record_chose_in_the_forward_pass(make_model, make_samples):
    model = make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = bool(getattr(module, "gradient_checkpointing", False))
    samples = record_live(model, make_samples())
    samples[0].routed_experts[2] = -1
    routers = find_replayed_routers(model)
    replay = RouterReplay(model)
    batch = collate(samples, CPU)
    seen = {layer: [] for layer in routers}
    with replay.microbatch(batch, ReplayCounts()):
        for layer, (_, router) in routers.items():
            router.register_forward_hook(lambda _m, _a, output, layer=layer: seen[layer].append(output[2]))
        logprobs = response_logprobs(model, batch, SAMPLING)
        replay.forward_finished()
        with torch.no_grad():
            for _, router in routers.values():
                router.weight.neg_()
        logprobs.sum().backward()
    for first, again in seen.values():
        assert (first >= 0).all()
        assert torch.equal(first, again)


def test_padding_and_last_tokens_are_spread_evenly_over_the_experts(make_model, make_samples):
    model = make_model()
    samples = make_samples()
    seen = []
    replay = RouterReplay(model)
    batch = collate(samples, CPU)
    with replay.microbatch(batch, ReplayCounts()):
        router = find_replayed_routers(model)[0].module
        handle = router.register_forward_hook(lambda _m, _a, output: seen.append(output[2]))
        response_logprobs(model, batch, SAMPLING)
        handle.remove()
    positions = torch.arange(batch.input_ids_bt.shape[1])
    unused = (positions >= (batch.lengths_b - 1)[:, None]).flatten()
    loads = torch.bincount(seen[0][unused].flatten(), minlength=8)
    assert loads.max() - loads.min() <= 1


def test_a_dense_model_and_an_unknown_router_are_refused(make_model):
    with pytest.raises(ConfigurationError, match="no routers"):
        RouterReplay(make_model("llama"))
    model = make_model()
    router = find_replayed_routers(model)[1].module
    router.__class__ = type("SomeNewRouter", (type(router),), {})
    with pytest.raises(
        ConfigurationError, match=r"layer 1: expected a router that can be replayed, got \['SomeNewRouter'\]"
    ):
        RouterReplay(model)


def forward_code(class_name: str) -> str:
    """What a router class of transformers computes, without comments."""
    (path,) = [
        path
        for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
        if f"class {class_name}(" in path.read_text()
    ]
    (found,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == class_name]
    assert isinstance(found, ast.ClassDef)
    (forward,) = [node for node in found.body if getattr(node, "name", "") == "forward"]
    return ast.unparse(forward)


def test_every_router_that_is_known_computes_what_a_tested_one_does(make_model):
    tested = {
        type(router).__name__
        for family in MOE_FAMILIES
        for _, router in find_replayed_routers(make_model(family)).values()
    }
    codes = {forward_code(name) for name in tested}
    # Qwen3.5-MoE and its kin are Qwen3-MoE that always normalises.
    always = forward_code("Qwen3_5MoeTopKRouter").splitlines()
    sometimes = forward_code("Qwen3MoeTopKRouter").splitlines()
    assert [line.strip() for line in always] == [
        line.strip() for line in sometimes if "norm_topk_prob" not in line
    ]
    codes.add("\n".join(always))
    known = {name for kind in all_routers() if isinstance(kind, KnownClasses) for name in kind.class_names}
    for name in sorted(known):
        assert forward_code(name) in codes, name


def test_rows_behind_the_last_token_that_counts_are_not_needed(make_model, make_samples):
    """A tool answered last: 3 tokens without rows, which no counted token sees."""
    (sample,) = make_samples(1)
    rows, ends = sample.routed_experts, len(sample.routed_experts)
    ended_by_tool = msgspec.structs.replace(
        sample,
        tokens=np.concatenate([sample.tokens, [5, 6, 7]]),
        loss_mask=np.concatenate([sample.loss_mask, np.zeros(3, np.float32)]),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs, np.zeros(3, np.float32)]),
        routed_experts=np.concatenate([rows, np.full((3, *rows.shape[1:]), -1, np.int32)]),
    )
    assert ended_by_tool.num_needed_rows == sample.num_needed_rows == ends
    check_unrecorded([ended_by_tool], 0.0, Ranks())
    hole = msgspec.structs.replace(ended_by_tool, routed_experts=ended_by_tool.routed_experts.copy())
    hole.routed_experts[ends - 1] = -1
    with pytest.raises(ReplayError, match=f"1 of {ends} token rows"):
        check_unrecorded([hole], 0.0, Ranks())

    counts = ReplayCounts()
    replay = RouterReplay(make_model("qwen3_moe"))
    replay._bind(collate([ended_by_tool, sample], CPU), counts)
    assert (counts.rows, counts.unrecorded_rows) == (2 * ends, 0)
