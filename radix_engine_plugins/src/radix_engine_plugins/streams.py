"""References in streamed answers: server-sent events, whose chunks are JSON after `data: `."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

_DATA = "data: "

Place = Callable[[dict[str, Any], dict[str, Any]], None]
"""Puts a reference into a choice; both are plain JSON objects."""


async def with_refs(
    chunks: Any, refs: Callable[[], Mapping[int, dict[str, Any]]], place: Place
) -> AsyncIterator[str]:
    """The chunks, with a reference in each choice's finish chunk. Closes `chunks` at the end.

    `refs` gives the references that are known by now, by index of the choice. Most chunks are passed on
    unread.
    """
    try:
        async for chunk in chunks:
            known = refs() if '"finish_reason":"' in chunk else {}
            yield chunk_with_refs(chunk, known, place) if known else chunk
    finally:
        await chunks.aclose()


def chunk_with_refs(chunk: str, refs: Mapping[int, dict[str, Any]], place: Place) -> str:
    """One chunk, with the references of the choices that end in it."""
    body = json.loads(chunk.removeprefix(_DATA))
    for choice in body["choices"]:
        if choice.get("finish_reason") is not None and choice["index"] in refs:
            place(choice, refs[choice["index"]])
    return f"{_DATA}{json.dumps(body, separators=(',', ':'))}\n\n"
