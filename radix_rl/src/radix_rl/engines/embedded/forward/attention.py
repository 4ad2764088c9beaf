"""How transformers models are made to read the slots.

By an attention function and a mask function under one name.

Outside an engine step both are transformers' own "sdpa", so a model whose configuration object is shared with
the engine's model still works.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from radix_rl.engines.embedded.step import ForwardStep, Segment, active_step

ATTENTION_NAME = "radix_slots"
_SMALL_HEAD = 1 << 14
"""Elements of one head's keys."""

_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
"""Attention of one segment: query, key, value, mask and scale; shapes as in `slot_attention`."""


def register_attention() -> None:
    """Make the name known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, slot_mask)


def slot_mask(
    *, mask_function: Callable[..., Any] = causal_mask_function, device: Any = None, **kwargs: Any
) -> torch.Tensor | None:
    """Additive mask `[b, 1, S, key_length]` of a step, or None where every key may be seen.

    transformers' mask functions compare query and key positions elementwise; here queries of one column lie
    at different positions, so the functions get `[b, 1, S, 1]` positions in place of one range. A key is
    meant by its position in the query's own slot.
    """
    step = active_step()
    if step is None:
        return sdpa_mask(mask_function=mask_function, device=device, **kwargs)
    only_causal = mask_function is causal_mask_function and kwargs.get("allow_is_causal_skip", True)
    if only_causal and step.num_tokens == 1:
        return None
    positions = step.positions
    queries = positions[:, None, :, None]
    keys = torch.arange(step.key_length, device=positions.device)
    if mask_function is causal_mask_function:
        hidden = keys > queries
    else:
        batch = torch.arange(len(positions), device=positions.device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=positions.device)
        hidden = ~mask_function(batch, head, queries, keys[None, None, None])
    dtype = kwargs.get("dtype") or torch.float32
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a step's queries over the slots.

    `query` `[b, heads, S, d]`, `key`/`value` `[slots, key_heads, L, d]` from `ForwardStep.keys`; returns `[b,
    S, heads, d]`.

    Query heads that share a key head become further rows of one attention problem, so keys are never repeated
    in memory.
    """
    step = active_step()
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} adds a position bias, which the slot attention does not know"
        )
    mask = attention_mask
    if kwargs.get("indices") is not None:
        assert len(step.segments) == 1
        mask = _keep_only(mask, kwargs["indices"], key.shape[2], query.dtype)
    elif mask is not None and mask.dtype != torch.bool and mask.dtype != query.dtype:
        mask = step.mask_of_dtype(mask, query.dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    if sinks is None and softcap is None:
        attend = partial(_fused_attention, step)
        short = mask is not None and mask.dtype == key.dtype and _is_short(key)
    else:
        attend = partial(_explicit_attention, sinks=sinks, softcap=softcap)
        short = False
    if len(step.segments) > 1:
        assert mask is not None
        return _attention_by_segment(step, query, key, value, mask, scale, attend, short), None
    if short and query.shape[2] == 1:
        assert mask is not None
        masks = step.mask_of_heads(mask, key.shape[1])
        output = _short_attention(query, key.flatten(0, 1), value.flatten(0, 1), masks, scale)
        return output.transpose(1, 2), None
    return attend(query, key, value, mask, scale), None


def _attention_by_segment(
    step: ForwardStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    attend: _Attend,
    short: bool,
) -> torch.Tensor:
    """Attention of the tokens of one row `[1, heads, T, d]`, each segment by itself.

    `short`: by `_short_attention` where its requests have one query each.
    """
    tokens = query[0].transpose(0, 1)
    outputs, start = [], 0
    for segment, rows in zip(step.segments, step.segment_masks(mask), strict=True):
        queries = tokens[start : start + segment.num_tokens]
        start += segment.num_tokens
        if short and segment.columns == 1:
            masks = step.mask_of_heads(rows, key.shape[1])
            keys, values = _by_head(key, segment, len(masks)), _by_head(value, segment, len(masks))
            outputs.append(_short_attention(queries, keys, values, masks, scale))
            continue
        queries = queries.view(segment.num_slots, segment.columns, *queries.shape[1:]).transpose(1, 2)
        slots = slice(segment.first_slot, segment.first_slot + segment.num_slots)
        keys, values = key[slots, :, : segment.key_length], value[slots, :, : segment.key_length]
        outputs.append(attend(queries, keys, values, rows, scale).flatten(0, 1))
    return torch.cat(outputs)[None]


def _fused_attention(
    step: ForwardStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Of one segment; shapes as in `slot_attention`."""
    batch, heads, columns, width = query.shape
    groups = heads // key.shape[1]
    if mask is not None:
        mask = step.repeat_mask(mask, groups)
    grouped = query.reshape(batch, key.shape[1], groups * columns, width)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(batch, heads, columns, value.shape[-1]).transpose(1, 2).contiguous()


def _is_short(key: torch.Tensor) -> bool:
    """Where attention's kernel takes longer to begin with each head than to read its keys."""
    return key.shape[2] * key.shape[3] <= _SMALL_HEAD and key.is_cpu and key.dtype == torch.float32


def _by_head(keys: torch.Tensor, segment: Segment, count: int) -> torch.Tensor:
    """`[slots, heads, L, d]` -> those of the segment's slots, `[count, its key_length, d]`."""
    slot, head, key, element = keys.stride()
    if slot != keys.shape[1] * head:
        return keys[segment.first_slot :].flatten(0, 1)[:count, : segment.key_length]
    # A view in one operation: a step of few tokens has a hundred of these.
    shape = (count, segment.key_length, keys.shape[3])
    return keys.as_strided(shape, (head, key, element), keys.storage_offset() + segment.first_slot * slot)


def _short_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one query a request, in batched products.

    `query` `[n, heads, ..., d]`, `keys`/`values` `[n * key_heads, L, d]`, `masks` `[n * key_heads, 1, L]`;
    returns the shape of `query`.
    """
    grouped = query.reshape(len(keys), -1, query.shape[-1])
    weights = torch.baddbmm(masks, grouped, keys.transpose(1, 2), alpha=scale).softmax(dim=-1)
    return torch.bmm(weights, values).view(*query.shape[:-1], values.shape[2])


def _keep_only(
    mask: torch.Tensor | None, indices: torch.Tensor, key_length: int, dtype: torch.dtype
) -> torch.Tensor:
    """Mask of sparse attention: of what `mask` shows, the key positions `indices` `[b, S, k]`."""
    dropped = torch.full((*indices.shape[:2], key_length), float("-inf"), dtype=dtype, device=indices.device)
    dropped.scatter_(-1, indices.long(), 0.0)
    return dropped[:, None] if mask is None else mask.to(dtype) + dropped[:, None]


def _explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention with a logit cap (Gemma) or a learned sink per head (gpt-oss), in plain products."""
    batch, heads, columns, width = query.shape
    key_heads = key.shape[1]
    grouped = query.reshape(batch, key_heads, -1, width)
    scores = (torch.matmul(grouped, key.transpose(2, 3)) * scaling).view(batch, heads, columns, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(batch, heads, columns, 1).to(scores.dtype)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = weights.to(value.dtype).reshape(batch, key_heads, -1, key.shape[2])
    return (
        torch.matmul(weights, value).view(batch, heads, columns, value.shape[-1]).transpose(1, 2).contiguous()
    )
