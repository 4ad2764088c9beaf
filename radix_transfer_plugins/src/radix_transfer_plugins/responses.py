"""Finds references in the responses of inference engines.

Readers need not know which engine answered.
"""

from collections.abc import Iterator
from typing import Any

from radix_transfer_plugins.errors import RefError
from radix_transfer_plugins.ref import StoreRef

REF_KEY = "output_store_ref"


def find_refs(response: Any) -> list[StoreRef]:
    """References of a response, of one chunk of a stream, or of a list of them, in the order of their items.

    Looked for in `meta_info` (SGLang's `/generate`), in each of `choices` and its `meta_info` (OpenAI's
    routes of SGLang and vLLM), and at the top. Responses are what JSON decodes to. Raises RefError for a
    reference that is malformed.
    """
    try:
        plain = list(_plain_refs(response))
    except RecursionError as error:
        raise RefError(
            "the response is nested deeper than any engine's; no reference is looked for"
        ) from error
    return [StoreRef.from_builtins(ref) for ref in plain]


def _plain_refs(item: Any) -> Iterator[Any]:
    if isinstance(item, list):
        for each in item:
            yield from _plain_refs(each)
    elif isinstance(item, dict):
        if item.get(REF_KEY) is not None:
            yield item[REF_KEY]
        yield from _plain_refs(item.get("meta_info"))
        yield from _plain_refs(item.get("choices"))
