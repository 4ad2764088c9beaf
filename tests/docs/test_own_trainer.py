"""The guide for trainers of one's own: its code runs as written and does what it says."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from radix_rl.errors import ReplayError
from radix_rl.train.replay.own_loop import ExpertReplay
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend

GUIDE = Path(__file__).parents[2] / "docs/own-trainer.md"
LAYERS, EXPERTS, TOP_K = 3, 8, 2
SEQUENCES = [[3, 4, 5, 6, 7], [8, 9, 10]]


@pytest.fixture
def model() -> Any:
    """Layer 1 is dense."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[1],
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def guide() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "guide"}
    for text in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(text, str(GUIDE), "exec"), namespace)
    return namespace


def recorded(seed: int) -> list[np.ndarray]:
    """Rows that no router chose: other experts for every token and layer."""
    random = np.random.default_rng(seed)
    found = []
    for tokens in SEQUENCES:
        rows = np.stack(
            [random.permutation(EXPERTS)[:TOP_K] for _ in range((len(tokens) - 1) * LAYERS)]
        ).reshape(len(tokens) - 1, LAYERS, TOP_K)
        rows[:, 1] = -1
        found.append(rows.astype(np.int32))
    return found


def experts_used(model: Any, run: Any) -> dict[int, torch.Tensor]:
    """By layer `[tokens, k]`: what the experts of a forward pass were asked for."""
    used: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Any:
        return lambda _module, arguments: used.update({layer: arguments[1].clone()})

    handles = [
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(note(layer)) for layer in (0, 2)
    ]
    run()
    for handle in handles:
        handle.remove()
    return used


def test_the_guides_step_reads_replays_learns_and_leaves_nothing(model, guide):
    store = OutputStore(create_backend("memory"), key_prefix="own-trainer/output-store")
    rows = recorded(seed=1)
    refs = store.put_many([TokenOutputStash(routed_experts=array) for array in rows])
    answers = [{"meta_info": {"output_store_ref": ref.to_builtins()}} for ref in refs]
    read, refs = guide["read_routed_experts"](store, answers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replay = ExpertReplay(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    used = experts_used(
        model,
        lambda: guide["train_step"](
            model, replay, optimizer, SEQUENCES, read, lambda logits, ids: logits[:, :-1].logsumexp(-1).mean()
        ),
    )
    store.delete_many(refs)

    width = max(map(len, SEQUENCES))
    for layer in (0, 2):
        chosen = used[layer].reshape(len(SEQUENCES), width, TOP_K)
        for sequence, array in enumerate(rows):
            assert torch.equal(chosen[sequence, : len(array)], torch.from_numpy(array[:, layer]).long())
    assert not torch.equal(before["model.layers.0.mlp.gate.weight"], model.model.layers[0].mlp.gate.weight)
    assert replay.counts.token_layers == 2 * sum(len(tokens) - 1 for tokens in SEQUENCES)
    assert list(store.list_objects()) == []
    store.close()


def test_outside_of_the_block_the_model_routes_for_itself(model, guide):
    ids = guide["pad"](SEQUENCES)
    replay = ExpertReplay(model)
    with torch.no_grad():
        alone = model(input_ids=ids, use_cache=False).logits
        with replay.batch(ids, recorded(seed=2)) as forward_finished:
            replayed = model(input_ids=ids, use_cache=False).logits
            forward_finished()
        again = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(alone, again)
    assert not torch.allclose(alone, replayed)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda: recorded(1)[:1], "2 sequences, got those of 1"),
        (lambda: [recorded(1)[0], recorded(1)[1][:, :2]], "layers and top_k the same"),
        (lambda: [np.zeros((9, LAYERS, TOP_K), np.int32), recorded(1)[1]], r"at most 4, layers, top_k"),
    ],
)
def test_rows_of_another_shape_are_refused(model, guide, rows, message):
    with (
        pytest.raises(ReplayError, match=message),
        ExpertReplay(model).batch(guide["pad"](SEQUENCES), rows()),
    ):
        pass
