"""Bodies of the weight routes, with SGLang's names and defaults."""

from typing import Any, Literal

import msgspec

Selector = Literal["target", "all"]
"""SGLang's choice of model runners; there is no draft model here."""


class BeginBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    weight_version: str | None = None
    """None: it comes with the tensors, as SGLang has it, or the name stays."""
    selector: Selector = "all"


class EndBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    weight_version: str | None = None
    """If given, the version of begin; a guard against mixed-up updates."""


class EmptyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True): ...


class TensorsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the two ways to send tensors have in common."""

    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    """No prefix is ever used across versions, whatever this says."""
    selector: Selector = "all"
    torch_empty_cache: bool = False


class FromTensorBody(TensorsBody, kw_only=True):
    serialized_named_tensors: list[str]
    """One entry a rank, of which this server has one; see radix_rl.buckets.safetensors."""


class FromDistributedBody(TensorsBody, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class InitGroupBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroupBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    group_name: str = "weight_update_group"


class DiskBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model_path: str
    weight_version: str | None = None
    """Default: the path."""
    load_format: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    keep_pause: bool = False
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None


class VersionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    new_version: str
    abort_all_requests: bool = True
