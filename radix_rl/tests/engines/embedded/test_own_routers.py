"""A router kind from outside is taught once: the engine records its choices, the trainer replays them."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from radix_rl.config.rollout import SamplingConfig
from radix_rl.errors import ConfigurationError
from radix_rl.routers import registry
from radix_rl.routers.base import Router
from radix_rl.train.batch import TrainSample, collate
from radix_rl.train.objective.logprobs import response_logprobs
from radix_rl.train.replay.counts import ReplayCounts
from radix_rl.train.replay.experts import RouterReplay

PACKAGE = '''
from typing import ClassVar

from radix_rl.routers.base import ReplayedRouter


class SquaredSigmoid(ReplayedRouter):
    """Weights are squared sigmoids, which no kind of ours has."""

    name: ClassVar[str] = "squared_sigmoid"

    def matches(self, module):
        return type(module).__name__ == "SquaredSigmoidRouter"

    def attach(self, layer, module, record):
        module.register_forward_hook(lambda _module, _args, output: record(output[2]))

    def weights(self, router, logits_ne, experts_nk):
        return logits_ne.sigmoid().square().gather(1, experts_nk)
'''


class SquaredSigmoidRouter(Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        experts = logits.topk(self.top_k, dim=-1).indices
        return logits, logits.sigmoid().square().gather(1, experts), experts


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    monkeypatch.setattr(registry._routers, "_classes", {})
    monkeypatch.setattr(registry._routers, "_found", None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts the package on the path, as pip would: a module and a dist-info folder with entry points."""

    def make(**points: str) -> None:
        (tmp_path / "own_router_package.py").write_text(PACKAGE)
        info = tmp_path / "own_router_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-router-package\nVersion: 1.0\n")
        lines = [f"{name} = {place}" for name, place in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[radix_rl.routers]", *lines, ""]))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "own_router_package", raising=False)

    return make


@pytest.fixture
def own_model(qwen3_moe):
    for layer in qwen3_moe.model.layers[1:]:
        layer.mlp.gate.__class__ = SquaredSigmoidRouter
    return qwen3_moe


def sample_of(request, output, rows: np.ndarray) -> TrainSample:
    tokens = np.array([*request.input_ids, *output.output_ids])
    return TrainSample(
        name="sample",
        tokens=tokens,
        loss_mask=np.ones(len(output.output_ids), np.float32),
        rollout_logprobs=np.zeros(len(output.output_ids), np.float32),
        advantage=1.0,
        loss_scale=1.0,
        routed_experts=rows,
    )


async def test_an_installed_kind_is_recorded_by_the_engine_and_replayed_by_the_trainer(
    own_model, install, engine_of, prompt, request_of
):
    install(squared_sigmoid="own_router_package:SquaredSigmoid")
    assert "squared_sigmoid" in registry.router_names()
    request = request_of("a", prompt(9, 1), max_new_tokens=6, return_routed_experts=True)
    chosen: dict[int, torch.Tensor] = {}
    async with engine_of(own_model) as engine:
        output = await engine.generate(request)
    rows = output.outputs.routed_experts
    handles = [
        own_model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda _m, _a, out, layer=layer: chosen.__setitem__(layer, out[2])
        )
        for layer in (1, 2)
    ]
    sample = sample_of(request, output, rows)
    own_model(input_ids=torch.from_numpy(sample.tokens)[None])
    for handle in handles:
        handle.remove()
    assert rows.shape == (14, 3, 2)
    assert (rows[:, 0] == -1).all()
    for layer, experts in chosen.items():
        assert rows[:, layer].tolist() == experts[:14].tolist()

    def replayed(sample: TrainSample) -> tuple[torch.Tensor, ReplayCounts]:
        counts, replay = ReplayCounts(), RouterReplay(own_model)
        batch = collate([sample], torch.device("cpu"))
        with replay.microbatch(batch, counts):
            logprobs = response_logprobs(own_model, batch, SamplingConfig())
            replay.forward_finished()
        return logprobs, counts

    plain = response_logprobs(own_model, collate([sample], torch.device("cpu")), SamplingConfig())
    logprobs, counts = replayed(sample)
    torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-5)
    assert counts.disagreeing == 0
    others, counts = replayed(sample_of(request, output, np.where(rows < 0, rows, (rows + 1) % 8)))
    assert (others - plain).abs().max() > 1e-3
    assert counts.disagreeing > 0


def test_the_guides_router_is_known_once_it_ran():
    guide = (Path(__file__).parents[4] / "docs/routers.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/routers.md", "exec"), {"__name__": "guide"})
    kind = registry.all_routers()[0]
    assert kind.name == "my_router"
    assert kind.matches(type("MyTopKRouter", (torch.nn.Module,), {})())


def test_every_kind_of_ours_has_a_row_in_the_guide():
    guide = (Path(__file__).parents[4] / "docs/routers.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)`", guide, re.M)) == registry.router_names()


def test_an_unknown_router_is_refused_with_the_kinds_that_are_known(own_model):
    with pytest.raises(ConfigurationError, match=r"got \['SquaredSigmoidRouter'\].*sigmoid_then_scale"):
        RouterReplay(own_model)


def test_a_kind_that_is_installed_under_a_name_of_ours_is_refused_with_both_places(install):
    install(experts_call="own_router_package:SquaredSigmoid")
    with pytest.raises(ConfigurationError, match="'experts_call' is claimed by own_router_package:Squared"):
        registry.all_routers()


def test_an_entry_point_that_is_no_router_is_refused(install):
    install(squared_sigmoid="own_router_package:ReplayedRouter")
    with pytest.raises(ConfigurationError, match="registered as router 'squared_sigmoid' but is"):
        registry.all_routers()


class StrangeRouter(torch.nn.Linear):
    """Picks experts in a way that no kind knows."""


class StrangeMlp(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = StrangeRouter(hidden, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.router(x).max(dim=-1, keepdim=True)
        return x * best.values


@pytest.fixture
def strange_model(qwen3_moe):
    torch.manual_seed(0)
    for layer in qwen3_moe.model.layers:
        layer.mlp = StrangeMlp(64)
    return qwen3_moe


async def test_unknown_router_is_refused_only_where_capture_is_on(
    strange_model, engine_of, prompt, request_of
):
    with pytest.raises(ConfigurationError, match=r"StrangeRouter.*known: .*experts_call.*docs/routers.md"):
        async with engine_of(strange_model):
            pass
    async with engine_of(strange_model, enable_return_routed_experts=False) as engine:
        assert len((await engine.generate(request_of("a", prompt(4, 1), max_new_tokens=2))).output_ids) == 2


async def test_a_kind_that_is_registered_in_code_is_recorded(strange_model, engine_of, prompt, request_of):
    class Strange(Router):
        name = "strange"

        def matches(self, module):
            return isinstance(module, StrangeRouter)

        def attach(self, layer, module, record):
            module.register_forward_hook(
                lambda _m, _a, scores: record(scores.reshape(-1, 4).argmax(-1, keepdim=True))
            )

    registry.register_router(Strange)
    with pytest.raises(ConfigurationError, match="'strange' is taken; known routers: choose_then_softmax"):
        registry.register_router(type("Other", (Strange,), {}))
    async with engine_of(strange_model) as engine:
        request = request_of("a", prompt(4, 1), max_new_tokens=2, return_routed_experts=True)
        rows = (await engine.generate(request)).outputs.routed_experts
    assert rows.shape == (5, 3, 2)
    assert (rows[:, :, 0] >= 0).all()
    # The configuration promises two experts a token; this router picks one.
    assert (rows[:, :, 1] == -1).all()
