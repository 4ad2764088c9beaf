"""Scheduler: rows of opted-in requests leave the inline path before anyone turns them into base64.

Hooks:
- AROUND `SchedulerBatchResultProcessor._maybe_collect_routed_experts` and `_maybe_collect_indexer_topk`,
  called once when a request ends, while its cache slots still name its rows. Opted-in requests get their
  rows here, by the row rule: stock SGLang gives a request without output one row too few and leaves 0 in
  layers that do not route.
- AROUND `SchedulerOutputStreamer.build_additional_customized_info` with its switch
  `has_additional_customized_info`: SGLang's own way to send more values of a request to the tokenizer.
"""
# pyright: reportMissingImports=false

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from radix_engine_plugins.codecs import routed_experts_codec
from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.wire import KEY, PackedRows, is_marked, pack_rows
from radix_transfer_plugins.codecs.raw import RawCodec

logger = logging.getLogger(__name__)

_ATTRIBUTE = "radix_packed_rows"
_COMPONENTS = "sglang.srt.managers.scheduler_components"


def install() -> None:
    processor = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
    streamer = f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer"
    hooks.register(
        [
            (f"{processor}._maybe_collect_routed_experts", collect_routed_experts, hooks.AROUND),
            (f"{processor}._maybe_collect_indexer_topk", collect_indexer_topk, hooks.AROUND),
            (f"{streamer}.build_additional_customized_info", send_packed_rows, hooks.AROUND),
        ]
    )
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    SchedulerOutputStreamer.has_additional_customized_info = True


def collect_routed_experts(original: Callable[..., None], processor: Any, req: Any) -> None:
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if not is_marked(req.sampling_params):
        return original(processor, req)
    capturer = get_global_experts_capturer()
    if not req.return_routed_experts or capturer is None:
        return None

    def packed() -> PackedRows:
        start = req.routed_experts_start_len
        rows = _rows(processor, req, capturer, start)
        _blank_layers_that_do_not_route(rows, processor.model_worker)
        codec = routed_experts_codec(processor.model_config.hf_text_config)
        return pack_rows(codec, "routed_experts", rows, start)

    _keep(req, "routed_experts", packed)
    return None


def collect_indexer_topk(original: Callable[..., None], processor: Any, req: Any) -> None:
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

    original(processor, req)
    if not (is_marked(req.sampling_params) and req.return_indexer_topk):
        return
    captured, req.indexer_topk = req.indexer_topk, None
    capturer = get_global_indexer_capturer()

    def packed() -> PackedRows:
        rows = captured.numpy() if capturer is None else _rows(processor, req, capturer, 0)
        return pack_rows(RawCodec(), "indexer_topk", rows, 0)

    if captured is not None:
        _keep(req, "indexer_topk", packed)


def send_packed_rows(
    original: Callable[..., dict[str, list]], streamer: Any, reqs: Sequence[Any]
) -> dict[str, list]:
    info = original(streamer, reqs)
    per_request = [req.__dict__.pop(_ATTRIBUTE, []) for req in reqs]
    if any(per_request):
        info[KEY] = per_request
    return info


def _keep(req: Any, field: str, packed: Callable[[], PackedRows]) -> None:
    try:
        rows = packed()
    except Exception as error:
        logger.exception("output store: no %s for request %s", field, req.rid)
        rows = PackedRows(field, 0, (), b"", error=f"{type(error).__name__}: {error}")
    req.__dict__.setdefault(_ATTRIBUTE, []).append(tuple(rows))  # a plain type: see wire.py


def _rows(processor: Any, req: Any, capturer: Any, start: int) -> np.ndarray:
    """Rows [start, tokens that went through the model), int32, owned by the caller."""
    outputs = len(req.output_ids_through_stop)
    end = len(req.origin_input_ids) + max(outputs - 1, 0)
    rows = capturer.get_topk(
        req_pool_idx=req.kv.req_pool_idx,
        seqlen=end + 1,
        req_to_token_pool=processor.req_to_token_pool,
        start_len=start,
    ).numpy()
    if len(rows) != end - start:
        raise ValueError(f"rows [{start}, {end}) were asked of the capturer, it gave {len(rows)}")
    return rows


def _blank_layers_that_do_not_route(rows: np.ndarray, model_worker: Any) -> None:
    blank = [layer for layer in range(rows.shape[1]) if layer not in _routing_layers(model_worker)]
    if blank:
        rows[:, blank, :] = -1


@functools.lru_cache(maxsize=1)
def _routing_layers(model_worker: Any) -> frozenset[int]:
    """Global numbers of the layers whose router is captured.

    ValueError for a router that SGLang does not capture.
    """
    from sglang.srt.layers.moe.hash_topk import HashTopK
    from sglang.srt.layers.moe.topk import TopK

    routers = [
        module for module in model_worker.model_runner.model.modules() if isinstance(module, TopK | HashTopK)
    ]
    silent = [router.layer_id for router in routers if isinstance(router, HashTopK)]
    if silent:
        raise ValueError(
            f"SGLang does not capture the hash routers of layers {silent}; routed experts would be incomplete"
        )
    return frozenset(router.layer_id for router in routers)
