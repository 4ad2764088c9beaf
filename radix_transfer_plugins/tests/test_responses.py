import numpy as np
import pytest

from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.errors import RefError
from radix_transfer_plugins.responses import find_refs

ROWS = np.zeros((1, 1, 1), np.int32)


@pytest.fixture(scope="module")
def refs():
    store = OutputStore(create_backend("memory", {"name": "test_responses"}))
    refs = store.put_many([TokenOutputStash(routed_experts=ROWS)] * 2)
    yield refs
    store.delete_many(refs)
    store.close()


def test_refs_are_found_wherever_an_engine_puts_them(refs) -> None:
    a, b = (ref.to_builtins() for ref in refs)
    for response in (
        [{"meta_info": {"output_store_ref": a}}, {"meta_info": {"output_store_ref": b}}],
        {"choices": [{"meta_info": {"output_store_ref": a}}, {"meta_info": {"output_store_ref": b}}]},
        {"choices": [{"index": 0, "output_store_ref": a}, {"index": 1, "output_store_ref": b}]},
        [{"output_store_ref": a}, {"choices": [{"output_store_ref": b}]}],
    ):
        assert find_refs(response) == refs


def test_a_response_without_refs_has_none(refs) -> None:
    for response in (
        {"text": "hi", "meta_info": {"finish_reason": None}},
        {"choices": [{"index": 0, "meta_info": None, "output_store_ref": None}]},
        {"choices": []},
        [],
        None,
    ):
        assert find_refs(response) == []


def test_a_malformed_ref_is_an_error_not_an_absent_one(refs) -> None:
    with pytest.raises(RefError):
        find_refs({"meta_info": {"output_store_ref": {"version": 1}}})


def test_nesting_beyond_the_recursion_limit_is_a_ref_error() -> None:
    response = []
    for _ in range(5000):
        response = {"choices": [response]}
    with pytest.raises(RefError, match="nested"):
        find_refs(response)
