"""Tells the scheduler which requests opted in, and keeps warm-ups out of it.

The mark is an entry of `sampling_params.custom_params`, the one free-form field of a tokenized request,
which SGLang uses for marks of its own too. Hooks:
- AROUND `TokenizerManager._create_tokenized_object`: sets the mark; a request for no token at all runs no
  sampler, so it asks the scheduler for no sampling mask (on stock SGLang it fails with 500).
- AROUND `TokenizerManager._send_one_request`: with n > 1 SGLang first sends each prompt once with
  `max_new_tokens=0` to fill the prefix cache and throws the answer away. Such a request must store nothing
  and ask for nothing.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.request_fields import opted_in, root_of
from radix_engine_plugins.sglang.session import StoreSession
from radix_engine_plugins.sglang.wire import MARK


def create_tokenized_object(
    original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    tokenized = original(manager, obj, *args, **kwargs)
    if StoreSession.of(manager) is None or not hasattr(obj, "return_sampling_mask"):
        return tokenized
    sampling = tokenized.sampling_params
    if sampling.max_new_tokens == 0:
        tokenized.return_sampling_mask = False
    if opted_in(obj):
        sampling.custom_params = {**(sampling.custom_params or {}), MARK: True}
    return tokenized


def send_one_request(original: Callable[..., Any], manager: Any, tokenized: Any) -> Any:
    state = manager.rid_to_state.get(tokenized.rid)
    if StoreSession.of(manager) is not None and state is not None and _is_warm_up(state.obj):
        # `state.obj`, `tokenized` and its `sampling_params` are copies made for the warm-up.
        for name in ("return_routed_experts", "return_indexer_topk", "return_sampling_mask"):
            setattr(tokenized, name, False)
            setattr(state.obj, name, False)
        state.obj.return_outputs_via_store = False
        params = tokenized.sampling_params.custom_params or {}
        tokenized.sampling_params.custom_params = {
            key: value for key, value in params.items() if key != MARK
        } or None
    return original(manager, tokenized)


def _is_warm_up(obj: Any) -> bool:
    """Call once for each request sent: of a parallel request the first `batch_size` are the warm-ups."""
    root = root_of(obj)
    if root is None or getattr(root, "parallel_sample_num", 1) == 1:
        return False
    sent = root.__dict__.get("radix_num_sent", 0)
    root.__dict__["radix_num_sent"] = sent + 1
    return sent < root.batch_size


HOOKS = [
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        create_tokenized_object,
        hooks.AROUND,
    ),
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
        send_one_request,
        hooks.AROUND,
    ),
]
