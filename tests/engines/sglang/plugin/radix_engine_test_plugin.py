"""Loaded into servers under test through PYTHONPATH and the entry points beside this file.

`faulty`: a backend like shared_memory whose puts a test delays or fails through a file. `fake_indexer`:
rows of an indexer for models that have none, since SGLang captures them on a GPU only; they take SGLang's
own way from there on.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from radix_transfer_plugins import errors
from radix_transfer_plugins.backends.shared_memory import SharedMemoryBackend
from radix_transfer_plugins.codecs.base import Buffer

_counting = threading.Lock()

INDEXER_LAYERS, INDEX_TOPK = 2, 8


class FaultyBackend(SharedMemoryBackend):
    name: ClassVar[str] = "faulty"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """`faults`: path of a JSON file with any of delay_s; error: the name of one of the store's errors;
        put: the number of the one put that fails with it. A file beside it has a line for each put that
        began."""
        config = dict(config)
        faults = Path(str(config.pop("faults")))
        backend = super().from_config(config)
        backend.faults = faults
        return backend

    def put_batch(self, items: Sequence[tuple[str, Buffer]]) -> None:
        faults = json.loads(self.faults.read_text()) if self.faults.exists() else {}
        number = self._count_put()
        time.sleep(faults.get("delay_s", 0))
        if "error" in faults and faults.get("put", number) == number:
            raise getattr(errors, faults["error"])("injected by a test")
        super().put_batch(items)

    def _count_put(self) -> int:
        puts = self.faults.with_suffix(".puts")
        with _counting, puts.open("a+") as lines:
            lines.write("put\n")
            lines.flush()
            lines.seek(0)
            return len(lines.readlines())


def indexer_rows(num_rows: int):
    """`[num_rows, layers, top_k]` int32: the last `top_k` positions of each row's causal prefix,
    ascending."""
    import torch

    rows = torch.full((num_rows, INDEXER_LAYERS, INDEX_TOPK), -1, dtype=torch.int32)
    for row in range(num_rows):
        first = max(0, row + 1 - INDEX_TOPK)
        rows[row, :, : row + 1 - first] = torch.arange(first, row + 1, dtype=torch.int32)
    return rows


def fake_indexer() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

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
