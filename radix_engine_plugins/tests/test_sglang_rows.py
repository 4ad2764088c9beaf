"""Which rows the SGLang plugin takes, on stand-ins for the few names of SGLang that it needs there."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radix_engine_plugins.sglang.wire import PackedRows


class TopK:
    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id


class HashTopK(TopK):
    """Routes by token id; SGLang's capturer does not see it."""


@pytest.fixture(scope="module")
def capture() -> Iterator[ModuleType]:
    """Imported as if SGLang were there; forgotten afterwards."""
    stand_ins = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": None,
            "HookSource": SimpleNamespace,
            "HookType": SimpleNamespace(AROUND=0, BEFORE=1, AFTER=2, REPLACE=3),
        },
        "sglang.srt.layers.moe.topk": {"TopK": TopK},
        "sglang.srt.layers.moe.hash_topk": {"HashTopK": HashTopK},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, values in stand_ins.items():
            module = ModuleType(name)
            module.__dict__.update(values)
            patch.setitem(sys.modules, name, module)
        before = set(sys.modules)
        yield importlib.import_module("radix_engine_plugins.sglang.capture")
        for name in set(sys.modules) - before:
            if name.startswith("radix_engine_plugins.sglang."):
                del sys.modules[name]


def worker_with(modules: list[object]) -> Any:
    """A model worker, hashable as SGLang's is."""

    class Worker:
        model_runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: modules))

    return Worker()


def test_layers_without_a_router_become_minus_one(capture: ModuleType) -> None:
    rows = np.zeros((2, 3, 2), np.int32)
    capture._blank_layers_that_do_not_route(rows, worker_with([TopK(1), object()]))
    assert rows[:, 1].tolist() == [[0, 0], [0, 0]]
    assert (rows[:, [0, 2]] == -1).all()


def test_hash_routers_that_sglang_does_not_capture_fail_the_request(capture: ModuleType) -> None:
    request = SimpleNamespace(rid="r")
    worker = worker_with([TopK(1), HashTopK(0)])

    def packed() -> PackedRows:
        capture._blank_layers_that_do_not_route(np.zeros((2, 2, 2), np.int32), worker)
        raise AssertionError("rows with holes were packed")

    capture._keep(request, "routed_experts", packed)
    ((field, *_, error),) = request.radix_packed_rows
    assert field == "routed_experts"
    assert "hash routers of layers [0]" in error


def capturer_of(num_rows: int | None) -> tuple[Any, list[dict[str, Any]]]:
    """Gives the rows that were asked for, or `num_rows` of them, and notes the questions."""
    asked: list[dict[str, Any]] = []

    def get_topk(**question: Any) -> Any:
        asked.append(question)
        count = question["seqlen"] - 1 - question["start_len"] if num_rows is None else num_rows
        return SimpleNamespace(numpy=lambda: np.zeros((count, 2, 2), np.int32))

    return SimpleNamespace(get_topk=get_topk), asked


@pytest.mark.parametrize(
    ("outputs", "start", "rows"), [(0, 0, 5), (1, 0, 5), (4, 0, 8), (4, 5, 3), (0, 5, 0)]
)
def test_rows_are_those_of_the_tokens_that_went_through_the_model(
    capture: ModuleType, outputs: int, start: int, rows: int
) -> None:
    request = SimpleNamespace(
        output_ids_through_stop=[0] * outputs,
        origin_input_ids=[0] * 5,
        kv=SimpleNamespace(req_pool_idx=3),
    )
    capturer, asked = capturer_of(None)
    processor = SimpleNamespace(req_to_token_pool=None)
    assert capture._rows(processor, request, capturer, start).shape == (rows, 2, 2)
    assert asked[0]["start_len"] == start
    lossy, _ = capturer_of(rows + 1)
    with pytest.raises(ValueError, match=rf"rows \[{start}, {start + rows}\) were asked .* gave {rows + 1}"):
        capture._rows(processor, request, lossy, start)
