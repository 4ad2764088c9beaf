"""Weight updates: begin, binary buckets, end; or a checkpoint from disk. All are admin routes.

`/update_weights_from_tensor` takes the binary body of `radix_rl.weights.wire`. SGLang's own form is a
pickle, which runs code of whoever sends it; it is refused.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radix_rl.errors import ConfigurationError, EngineStateError, RequestError, WeightUpdateError
from radix_rl.server.body import read_body
from radix_rl.server.errors import json_response
from radix_rl.server.state import ServerState, state_of
from radix_rl.weights.bucket import WeightBucket, pack_buckets
from radix_rl.weights.wire import CONTENT_TYPE, decode_bucket

router = APIRouter()

_DISK_BUCKET_BYTES = 256 << 20


class BeginBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    weight_version: str


class EndBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    weight_version: str | None = None
    """If given, the version of begin; a guard against mixed-up updates."""


class EmptyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True): ...


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


def _success(message: str, **more: Any) -> Response:
    return json_response({"success": True, "message": message, **more})


@router.post("/begin_weight_update")
async def begin_weight_update(request: Request) -> Response:
    body = await read_body(request, BeginBody)
    state = state_of(request)
    if state.updating_to is not None:
        raise EngineStateError(
            f"an update to version {state.updating_to!r} has begun; end it or call /abort_weight_update first"
        )
    await state.engine.begin_weight_update(body.weight_version)
    state.updating_to = body.weight_version
    return _success(f"update to version {body.weight_version} begun")


@router.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: Request) -> Response:
    state = state_of(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type != CONTENT_TYPE:
        raise RequestError(
            f"update_weights_from_tensor: expected a body of type {CONTENT_TYPE}, got {content_type!r}; "
            f"SGLang's pickled "
            "tensors are refused, since unpickling runs the sender's code (see docs/server.md for the "
            "binary form)"
        )
    _updating(state)
    data = await request.body()
    try:
        bucket = await asyncio.to_thread(decode_bucket, data)
    except ValueError as error:
        raise RequestError(str(error)) from error
    try:
        await state.engine.update_weights(bucket)
    except WeightUpdateError:
        # An engine that refuses a bucket has ended the whole update.
        state.updating_to = None
        raise
    return _success(f"{len(bucket.specs)} tensors received")


@router.post("/end_weight_update")
async def end_weight_update(request: Request) -> Response:
    body = await read_body(request, EndBody)
    state = state_of(request)
    version = _updating(state)
    if body.weight_version not in (None, version):
        raise RequestError(
            f"weight_version: expected {version!r}, which was begun, got {body.weight_version!r}"
        )
    state.updating_to = None
    try:
        await state.engine.commit_weight_update(version)
    except BaseException:
        await state.engine.abort_weight_update()
        raise
    return _success(f"version {version} is in force", weight_version=version)


@router.post("/abort_weight_update")
async def abort_weight_update(request: Request) -> Response:
    """Drop a begun update; answers the same when there is none."""
    await read_body(request, EmptyBody)
    state = state_of(request)
    await state.engine.abort_weight_update()
    state.updating_to = None
    return _success("no update is in progress")


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request) -> Response:
    """Load a Hugging Face checkpoint, of the same architecture, as a new version."""
    body = await read_body(request, DiskBody)
    state = state_of(request)
    if body.load_format not in (None, "auto", "safetensors") or body.manifest:
        raise RequestError(
            f"load_format: expected auto or safetensors and no manifest, got {body.load_format!r}"
        )
    if not (Path(body.model_path) / "config.json").is_file():
        raise RequestError(f"model_path: expected a folder with a config.json, got {body.model_path!r}")
    if state.updating_to is not None:
        raise EngineStateError(
            f"an update to version {state.updating_to!r} is in progress; end or abort it first"
        )
    version = body.weight_version or body.model_path
    state.updating_to = version
    try:
        buckets = await asyncio.to_thread(_read_checkpoint, body.model_path)
        async with _paused(state, abort=body.abort_all_requests, keep=body.keep_pause):
            await _update(state, version, buckets)
    finally:
        state.updating_to = None
    return _success(f"version {version} loaded from {body.model_path}", num_paused_requests=0)


@router.post("/update_weight_version")
async def update_weight_version(request: Request) -> Response:
    """Rename the weights in force."""
    body = await read_body(request, VersionBody)
    state = state_of(request)
    if state.updating_to is not None:
        raise EngineStateError(
            f"an update to version {state.updating_to!r} is in progress; end or abort it first"
        )
    if body.abort_all_requests:
        await state.engine.abort()
    await state.engine.set_weight_version(body.new_version)
    return _success(f"Weight version updated to {body.new_version}", new_version=body.new_version)


async def _update(state: ServerState, version: str, buckets: list[WeightBucket]) -> None:
    try:
        await state.engine.begin_weight_update(version)
        for bucket in buckets:
            await state.engine.update_weights(bucket)
        await state.engine.commit_weight_update(version)
    except BaseException:
        await state.engine.abort_weight_update()
        raise


@contextlib.asynccontextmanager
async def _paused(state: ServerState, *, abort: bool, keep: bool) -> AsyncIterator[None]:
    """Requests that run end with what they have, or are computed again under the new weights; a pause that
    was there before stays."""
    try:
        await state.engine.pause("abort" if abort else "retract")
    except EngineStateError:
        if abort:
            await state.engine.abort()
        yield
        return
    try:
        yield
    finally:
        if not keep:
            await state.engine.resume()


def _updating(state: ServerState) -> str:
    if state.updating_to is None:
        raise EngineStateError(
            "no weight update has begun; call /begin_weight_update with a weight_version first"
        )
    return state.updating_to


def _read_checkpoint(path: str) -> list[WeightBucket]:
    """Through transformers, which turns a checkpoint's names into those of the model's parameters."""
    from radix_rl.engines.embedded.model_loader import load_checkpoint

    try:
        model = load_checkpoint(Path(path), None)
    except ConfigurationError as error:
        raise RequestError(str(error)) from error
    return list(
        pack_buckets(((name, tensor.data) for name, tensor in model.named_parameters()), _DISK_BUCKET_BYTES)
    )
