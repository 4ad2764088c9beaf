"""Weight updates: tensors in bodies, over a process group or from disk. All are admin routes.

An update is begun, takes tensors in any of these ways, and ends; tensors that come while none has begun are
an update of their own, with the whole model in one call.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from radix_rl.buckets.bucket import WeightBucket, pack_buckets
from radix_rl.buckets.packed import empty_bucket
from radix_rl.buckets.safetensors import decode_named_tensors
from radix_rl.buckets.wire import CONTENT_TYPE, decode_bucket
from radix_rl.concurrency import torch_in_thread
from radix_rl.errors import ConfigurationError, RequestError, WeightUpdateError
from radix_rl.server.http import json_response, read_body
from radix_rl.server.state import state_of
from radix_rl.server.weights.bodies import (
    BeginBody,
    DestroyGroupBody,
    DiskBody,
    EmptyBody,
    EndBody,
    FromDistributedBody,
    FromTensorBody,
    InitGroupBody,
    TensorsBody,
    VersionBody,
)
from radix_rl.server.weights.state import lease_call, weights_of
from radix_rl.server.weights.update import WeightUpdate
from radix_rl.weights.release import released


async def _leased(request: Request) -> AsyncIterator[None]:
    with lease_call(request):
        yield


router = APIRouter(dependencies=[Depends(_leased)])

_DISK_BUCKET_BYTES = 256 << 20

_loading = threading.Lock()
"""transformers patches torch while it loads a model: one at a time in a process."""


def _success(message: str, **more: Any) -> Response:
    return json_response({"success": True, "message": message, **more})


@router.post("/begin_weight_update")
async def begin_weight_update(request: Request) -> Response:
    body = await read_body(request, BeginBody)
    await weights_of(request).update.begin(body.weight_version)
    named = f" to version {body.weight_version}" if body.weight_version is not None else ""
    return _success(f"update{named} begun")


@router.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: Request) -> Response:
    """One bucket in our binary form, or SGLang's JSON with safetensors in place of pickles."""
    update = weights_of(request).update
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type != CONTENT_TYPE:
        return await _from_json(request)
    async with update.receiving:
        update.check_open()
        number = update.number
        data = await _body_in_time(request)
        try:
            bucket = await torch_in_thread(decode_bucket, data)
        except ValueError as error:
            raise RequestError(str(error)) from error
        await update.add(bucket, number)
    return _success(f"{len(bucket.specs)} tensors received")


async def _body_in_time(request: Request) -> bytes:
    """A sender whose machine vanished says nothing any more: it must not keep others from sending theirs."""
    timeout_s = state_of(request).settings.weight_update_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await request.body()
    except TimeoutError as error:
        raise WeightUpdateError(
            f"the tensors did not arrive within {timeout_s:g} s (--weight-update-timeout-seconds)"
        ) from error


async def _from_json(request: Request) -> Response:
    update = weights_of(request).update
    body = await read_body(request, FromTensorBody)
    if len(body.serialized_named_tensors) != 1:
        raise RequestError(
            "serialized_named_tensors: expected one entry, for the one rank of this server, got "
            f"{len(body.serialized_named_tensors)}"
        )
    (text,) = body.serialized_named_tensors
    async with update.receiving:
        number = update.number
        try:
            bucket = await torch_in_thread(decode_named_tensors, text, body.load_format)
        except ValueError as error:
            raise RequestError(str(error)) from error
        return await _take(request, bucket, body, number)


@router.post("/init_weights_update_group")
async def init_weights_update_group(request: Request) -> Response:
    """Join the trainer's process group; answers when all of its members have met."""
    body = await read_body(request, InitGroupBody)
    await weights_of(request).groups.join(
        body.group_name,
        body.backend,
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
    )
    return _success("Succeeded to initialize custom process group.")


@router.post("/destroy_weights_update_group")
async def destroy_weights_update_group(request: Request) -> Response:
    body = await read_body(request, DestroyGroupBody)
    await weights_of(request).groups.leave(body.group_name)
    return _success("Succeeded to destroy custom process group.")


@router.post("/update_weights_from_distributed")
async def update_weights_from_distributed(request: Request) -> Response:
    """Receive what rank 0 broadcasts.

    What no tensors can be is refused before the receiving begins, so that the sender learns of it while it
    can still leave its own broadcast out; the engine looks at them after.
    """
    body = await read_body(request, FromDistributedBody)
    weights = weights_of(request)
    packed = body.load_format == "flattened_bucket"
    if body.load_format is not None and not packed:
        raise RequestError(f'load_format: expected null or "flattened_bucket", got {body.load_format!r}')
    device = weights.groups.device_of(body.group_name)
    try:
        bucket = empty_bucket(body.names, body.dtypes, body.shapes, device, packed=packed)
    except ValueError as error:
        raise RequestError(str(error)) from error
    async with weights.update.receiving:
        number = weights.update.number
        try:
            await weights.groups.receive(body.group_name, bucket, packed=packed)
        except WeightUpdateError as error:
            if number is not None:
                await weights.update.abort(number)
            version = (await state_of(request).engine.info()).weight_version
            in_force = f"version {version!r} stays in force" if version else "no weights are in force"
            raise WeightUpdateError(f"{error}; the update is dropped, {in_force}") from error
        return await _take(request, bucket, body, number)


async def _take(request: Request, bucket: WeightBucket, body: TensorsBody, number: int | None) -> Response:
    """Give tensors to the update that was open when they began to come, or make them one."""
    update = weights_of(request).update
    if number is None:
        async with update.at_once(
            body.weight_version, abort_requests=body.abort_all_requests, keep_pause=False
        ) as number:
            await update.add(bucket, number)
    else:
        if update.number == number:
            update.name(body.weight_version)
            if body.abort_all_requests:
                await state_of(request).abort()
        await update.add(bucket, number)
    return _success(f"{len(bucket.specs)} tensors received")


@router.post("/end_weight_update")
async def end_weight_update(request: Request) -> Response:
    body = await read_body(request, EndBody)
    update = weights_of(request).update
    async with update.receiving:
        update.check_open()
        update.name(body.weight_version)
        version = await update.commit()
    return _success(f"version {version} is in force", weight_version=version)


@router.post("/abort_weight_update")
async def abort_weight_update(request: Request) -> Response:
    """Drop a begun update; answers the same when there is none."""
    await read_body(request, EmptyBody)
    await weights_of(request).update.abort()
    return _success("no update is in progress")


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request) -> Response:
    """Load a Hugging Face checkpoint of the same architecture.

    As a new version, or as the tensors of the update that has begun.
    """
    body = await read_body(request, DiskBody)
    if body.load_format not in (None, "auto", "safetensors") or body.manifest:
        raise RequestError(
            f"load_format: expected auto or safetensors and no manifest, got {body.load_format!r}"
        )
    _check_folder(body.model_path)
    update = weights_of(request).update
    async with update.receiving:
        if (number := update.number) is not None:
            update.name(body.weight_version)
            await _add_all(update, await torch_in_thread(_read_checkpoint, body.model_path), number)
            return _success(f"tensors of {body.model_path} received", num_paused_requests=0)
        buckets = await torch_in_thread(_read_checkpoint, body.model_path)
        version = body.weight_version or body.model_path
        async with update.at_once(
            version, abort_requests=body.abort_all_requests, keep_pause=body.keep_pause
        ) as number:
            await _add_all(update, buckets, number)
        weights_of(request).is_paused |= body.keep_pause
    return _success(f"version {version} loaded from {body.model_path}", num_paused_requests=0)


@router.post("/update_weight_version")
async def update_weight_version(request: Request) -> Response:
    """Rename the weights in force."""
    body = await read_body(request, VersionBody)
    state = state_of(request)
    if not body.new_version:
        raise RequestError("new_version: expected a name, got an empty one")
    weights_of(request).update.check_closed()
    if body.abort_all_requests:
        await state.abort()
    await state.engine.set_weight_version(body.new_version)
    return _success(f"Weight version updated to {body.new_version}", new_version=body.new_version)


async def _add_all(update: WeightUpdate, buckets: Iterator[WeightBucket], number: int) -> None:
    while (bucket := await torch_in_thread(next, buckets, None)) is not None:
        await update.add(bucket, number)


def _check_folder(path: str) -> None:
    try:
        if (Path(path) / "config.json").is_file():
            return
    except OSError as error:
        raise RequestError(f"model_path: cannot be looked at: {error.strerror}") from error
    raise RequestError(f"model_path: expected a folder with a config.json, got {path!r}")


def _read_checkpoint(path: str) -> Iterator[WeightBucket]:
    """Through transformers, which turns a checkpoint's names into those of the model's parameters.

    The model that it builds shrinks as the buckets are taken, so that no second copy of it is ever whole.
    """
    from radix_rl.engines.embedded.forward.model import load_checkpoint

    try:
        with _loading:
            model = load_checkpoint(Path(path), None)
    except ConfigurationError as error:
        raise RequestError(str(error)) from error
    return pack_buckets(released(model), _DISK_BUCKET_BYTES)
