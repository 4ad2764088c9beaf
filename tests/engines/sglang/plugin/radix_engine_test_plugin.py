"""Loaded into servers under test through PYTHONPATH and the entry points beside this file.

`faulty`: a backend like shared_memory whose puts a test delays or fails through a file. `install`, in SGLang:
- rows of an indexer for models that have none, since SGLang captures them on a GPU only; they take SGLang's
  own way from there on;
- a log-probability that is not a number, in each support of `NAN_SUPPORT` tokens;
- chat answers that cannot be built, for messages that contain `UNANSWERABLE`.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from radix_transfer_plugins import errors
from radix_transfer_plugins.backends.shared_memory import SharedMemoryBackend
from radix_transfer_plugins.codecs.base import Buffer

_counting = threading.Lock()
_LONGEST_HOLD_S = 300.0

INDEXER_LAYERS, INDEX_TOPK = 2, 8
NAN_SUPPORT = 6
UNANSWERABLE = "unanswerable"


class FaultyBackend(SharedMemoryBackend):
    name: ClassVar[str] = "faulty"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Prepare a store that fails as a file says.

        `faults`: path of a JSON file with any of delay_s; hold: true as long as puts are to wait; error: the
        name of one of the store's errors; put: the number of the one stash that fails with it, again and
        again. A file beside it has the line `begun` for each stash whose put began and `ended` for each whose
        put is over.
        """
        config = dict(config)
        faults = Path(str(config.pop("faults")))
        backend = super().from_config(config)
        backend.faults = faults
        backend.refused = set()
        return backend

    def put_batch(self, items: Sequence[tuple[str, Buffer]], *, waited_s: float = 0.0) -> None:
        faults = self._injected()
        stashes: dict[str, list[bytes]] = {}
        for key, value in items:
            stashes.setdefault(key.rpartition("/")[0], []).append(bytes(value))
        numbers = [self._note_put("begun") for _ in stashes]
        try:
            time.sleep(faults.get("delay_s", 0))
            deadline_s = time.monotonic() + _LONGEST_HOLD_S
            while self._injected().get("hold") and time.monotonic() < deadline_s:
                time.sleep(0.02)
            self._refuse(stashes, numbers, faults)
            super().put_batch(items, waited_s=waited_s)
        finally:
            for _ in stashes:
                self._note_put("ended")

    def _injected(self) -> dict[str, Any]:
        return json.loads(self.faults.read_text()) if self.faults.exists() else {}

    def _refuse(
        self, stashes: Mapping[str, list[bytes]], numbers: Sequence[int], faults: Mapping[str, Any]
    ) -> None:
        if "error" not in faults:
            self.refused.clear()
        # What is put again has another key.
        contents = [tuple(fields) for fields in stashes.values()]
        for number, content in zip(numbers, contents, strict=True):
            if "error" in faults and faults.get("put", number) == number:
                self.refused.add(content)
        if self.refused.intersection(contents):
            raise getattr(errors, faults["error"])("injected by a test")

    def _note_put(self, event: str) -> int:
        """Returns how many puts this has happened to, this one included."""
        puts = self.faults.with_suffix(".puts")
        with _counting, puts.open("a+") as lines:
            lines.write(f"{event}\n")
            lines.flush()
            lines.seek(0)
            return lines.read().count(f"{event}\n")


def indexer_rows(num_rows: int):
    """Indexer rows `[num_rows, layers, top_k]` int32 for tests.

    The last `top_k` positions of each row's causal prefix, ascending.
    """
    import torch

    rows = torch.full((num_rows, INDEXER_LAYERS, INDEX_TOPK), -1, dtype=torch.int32)
    for row in range(num_rows):
        first = max(0, row + 1 - INDEX_TOPK)
        rows[row, :, : row + 1 - first] = torch.arange(first, row + 1, dtype=torch.int32)
    return rows


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def with_nan(original, lengths, token_ids, logprobs):
        chunk = original(lengths, token_ids, logprobs)
        if len(chunk.lengths) and chunk.lengths[0] == NAN_SUPPORT:
            chunk = msgspec.structs.replace(chunk, logprobs=chunk.logprobs.copy())
            chunk.logprobs[:] = float("nan")
        return chunk

    def build(original, serving, request, ret, created):
        if UNANSWERABLE in str(request.messages):
            raise ValueError(f"{UNANSWERABLE}, says a test")
        return original(serving, request, ret, created)

    mask = "sglang.srt.sampling.sampling_mask._chunk_from_buffers"
    chat = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response"
    HookRegistry.register(mask, with_nan, HookType.AROUND)
    HookRegistry.register(chat, build, HookType.AROUND)

    def collect(processor, req) -> None:
        if req.return_indexer_topk:
            outputs = len(req.output_ids_through_stop)
            req.indexer_topk = indexer_rows(len(req.origin_input_ids) + max(outputs - 1, 0))

    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._maybe_collect_indexer_topk",
        collect,
        HookType.REPLACE,
    )
