"""The real vLLM, with the store of these tests."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

CAPTURE = (
    "--enable-return-routed-experts",
    "--return-sampling-mask",
    "--logprobs-mode",
    "processed_logprobs",
    "--enable-scale-out",
)
"""Everything that can be stored; `--enable-scale-out` is `/inference/v1/generate`."""


@pytest.fixture(scope="session")
def capture() -> tuple[str, ...]:
    return CAPTURE


@pytest.fixture(scope="session")
def store_flags() -> Callable[[str, dict[str, Any]], list[str]]:
    """`store_flags(backend, config)`: flags of a server with this store."""

    def flags(backend: str, config: dict[str, Any]) -> list[str]:
        settings = {"output_store": {"backend": backend, "config": config}}
        return ["--additional-config", json.dumps(settings)]

    return flags


@pytest.fixture(scope="session")
def server(
    start_vllm: Callable[..., Any],
    tiny_moe_dense_first: Path,
    store_flags: Callable[..., list[str]],
    store_config: dict[str, Any],
) -> Iterator[Any]:
    """Shared by the tests of this folder, since starting one is what takes their time."""
    with start_vllm(tiny_moe_dense_first, *CAPTURE, *store_flags("faulty", store_config)) as server:
        yield server


@pytest.fixture
def tokens_since(metric: Callable[[Any, str], float]) -> Callable[[Any], Callable[[], float]]:
    """`tokens_since(server)()`: how many the server has generated since the first of these calls."""

    def since(server: Any) -> Callable[[], float]:
        before = metric(server, "vllm:generation_tokens_total")
        return lambda: metric(server, "vllm:generation_tokens_total") - before

    return since


@pytest.fixture
def reader(
    test_plugin: ModuleType,
    open_reader: Callable[[str, dict[str, Any]], Any],
    store_config: dict[str, Any],
) -> Iterator[Any]:
    """Every test leaves an empty store."""
    reader = open_reader("faulty", store_config)
    yield reader
    assert reader.clear() == []


@pytest.fixture(scope="session")
def experts(
    tiny_moe_dense_first: Path, full_forward: Callable[[Path], Callable[[list[int]], np.ndarray]]
) -> Callable[[list[int]], np.ndarray]:
    """Of one Hugging Face forward over these tokens."""
    return full_forward(tiny_moe_dense_first)


@pytest.fixture(scope="session")
def inline_rows() -> Callable[[str], np.ndarray]:
    """Decodes vLLM's own `routed_experts`."""

    def rows(encoded: str) -> np.ndarray:
        return np.load(io.BytesIO(base64.b64decode(encoded)))

    return rows
