"""The real SGLang, with the store of these tests."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest


@pytest.fixture(scope="session")
def start_store_server(
    start_sglang: Callable[..., Any],
    tiny_moe: Path,
    store_config: dict[str, Any],
    with_test_plugin: dict[str, str],
) -> Callable[..., Any]:
    """`with start_store_server(*more_flags) as server`: on the store of `store_config`."""
    flags = ["--enable-return-routed-experts", "--output-store-backend", "faulty"]
    flags += ["--output-store-backend-extra-config", json.dumps(store_config)]

    def start(*more: str) -> Any:
        return start_sglang(tiny_moe, *flags, *more, environment=with_test_plugin)

    return start


@pytest.fixture(scope="session")
def server(start_store_server: Callable[..., Any]) -> Iterator[Any]:
    """Shared by the tests of this folder, since starting one is what takes their time."""
    with start_store_server("--enable-return-indexer-topk", "--enable-metrics") as server:
        yield server


@pytest.fixture(scope="session")
def num_running() -> Callable[[Any], int]:
    """`num_running(server)`: requests past their prefill; each has a token at least.

    The server may tell of an ended one for a moment longer: wait for 0 before a new one.
    """

    def count(server: Any) -> int:
        loads = httpx.get(f"{server.url}/v1/loads", timeout=60).json()["loads"]
        return sum(load["num_running_reqs"] for load in loads)

    return count


@pytest.fixture
def reader(
    test_plugin: ModuleType,
    open_reader: Callable[[str, dict[str, Any]], Any],
    server: Any,
    store_config: dict[str, Any],
) -> Iterator[Any]:
    """Every test leaves an empty store."""
    reader = open_reader("faulty", store_config)
    yield reader
    assert reader.clear() == []
