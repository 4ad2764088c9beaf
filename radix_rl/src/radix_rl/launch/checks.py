"""Refuses combinations that cannot work, before anything starts.

Each refusal names the setting and the remedy.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from radix_rl.addresses import is_loopback
from radix_rl.config import RunConfig
from radix_rl.engines.base import Engine
from radix_rl.errors import ConfigurationError
from radix_rl.launch.engines import engines_of
from radix_rl.launch.model_folder import model_folder_fault


def check_launch(config: RunConfig) -> None:
    """What the configuration alone tells. Raises ConfigurationError listing every fault."""
    faults = [
        *_model_faults(config),
        *_device_faults(config),
        *_rollout_faults(config),
        *_engine_faults(config),
        *_store_faults(config),
        *_weight_faults(config),
    ]
    if faults:
        raise ConfigurationError("this run cannot be launched:\n  " + "\n  ".join(faults))


def check_engine(config: RunConfig, engine: Engine) -> None:
    """What only started engines tell. Raises ConfigurationError."""
    for member in engines_of(engine):
        can = member.capabilities
        if "in_place" not in can.pause_modes:
            raise ConfigurationError(
                f"weights change while requests are paused in place, but {type(member).__name__} pauses by "
                f"{', '.join(can.pause_modes) or 'no mode'} only; use an engine that has pause mode in_place"
            )
        if config.weights.transport not in can.weight_transports:
            raise ConfigurationError(
                f"weights.transport is {config.weights.transport!r}, but {type(member).__name__} takes "
                f"weights by {', '.join(can.weight_transports) or 'no transport'}"
            )


def _model_faults(config: RunConfig) -> Iterator[str]:
    if (fault := model_folder_fault(config.model.path)) is not None:
        yield f"model.path: {fault}"


def _device_faults(config: RunConfig) -> Iterator[str]:
    devices = {"train.device": config.train.device}
    if config.engine.type == "embedded":
        devices["engine.device"] = config.engine.device
    for name, text in devices.items():
        if text == "auto":
            continue
        device = torch.device(text)
        count = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            yield f'{name}: {text!r} is not on this machine, torch sees {count} CUDA device(s); use "cpu"'


def _rollout_faults(config: RunConfig) -> Iterator[str]:
    rollout, advantage = config.rollout, config.algorithm.advantage
    if rollout.samples_per_prompt == 1 and advantage in ("grpo", "dr_grpo", "rloo"):
        yield (
            f'rollout.samples_per_prompt is 1, but algorithm.advantage "{advantage}" compares the samples of '
            "one prompt: every advantage would be 0; set it to at least 2, or use "
            'algorithm.advantage="reinforce_pp"'
        )
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if num_samples < config.train.minibatches:
        yield (
            f"train.minibatches is {config.train.minibatches} but a step has only {num_samples} samples; "
            "raise rollout.prompts_per_step or lower train.minibatches"
        )


def _engine_faults(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.type == "remote":
        for setting in ("api_key_env", "admin_api_key_env"):
            variable = getattr(engine, setting)
            if variable is not None and not os.environ.get(variable):
                yield f"engine.{setting} names the environment variable {variable!r}, which is not set"
        return
    requests = {"rollout.sampling": config.rollout.sampling}
    if config.eval.every_steps > 0:
        requests["eval.sampling"] = config.eval.sampling
    # The last token never goes through the model, so that it needs no room in the cache.
    rooms = {"context_length": engine.context_length, "kv_cache_tokens": engine.kv_cache_tokens + 1}
    for setting, room in rooms.items():
        for section, sampling in requests.items():
            if room is not None and sampling.max_new_tokens >= room:
                yield (
                    f"{section}.max_new_tokens is {sampling.max_new_tokens}, which leaves no room for a "
                    f"prompt in engine.{setting} {getattr(engine, setting)}; raise engine.{setting} or lower "
                    f"{section}.max_new_tokens"
                )


def _store_faults(config: RunConfig) -> Iterator[str]:
    settings = config.output_store
    if not settings.enabled or not config.replayed_outputs:
        return
    urls = config.engine.urls if config.engine.type == "remote" else ()
    far = [url for url in urls if not is_loopback(urlsplit(url).hostname or "")]
    if settings.backend == "memory" and urls:
        yield (
            'output_store.backend: "memory" cannot be reached by a remote engine; use "shared_memory" on one '
            'machine or "mooncake"'
        )
    if settings.backend == "memory" and config.train.num_ranks > 1:
        yield (
            'output_store.backend: "memory" is seen by one process only, but train.num_ranks is '
            f'{config.train.num_ranks}; use "shared_memory"'
        )
    if settings.backend == "shared_memory" and far:
        yield (
            f'output_store.backend: "shared_memory" reaches one machine, but engine.urls has {far[0]!r}; '
            'use "mooncake" with a master that every host can reach'
        )
    if settings.backend == "mooncake":
        yield from _mooncake_faults(settings.config, far)
    if urls and settings.key_prefix is None and "key_prefix" not in settings.config:
        yield (
            'output_store.key_prefix: required with engine.type "remote"; set it to the key_prefix of the '
            "servers' --output-store-backend-extra-config, so that this run reads and deletes no other "
            "run's objects"
        )


def _mooncake_faults(settings: Mapping[str, Any], far: Sequence[str]) -> Iterator[str]:
    master = settings.get("master_server_address") or settings.get("master_server_addr")
    if not master:
        yield 'output_store.config.master_server_address: required by mooncake, such as "10.0.0.1:50051"'
        return
    addresses = {"master_server_address": str(master).rpartition(":")[0]}
    if "local_hostname" in settings:
        addresses["local_hostname"] = str(settings["local_hostname"])
    for name, host in addresses.items():
        if far and is_loopback(host):
            yield (
                f"output_store.config.{name}: {host!r} cannot be reached from the engine at {far[0]!r}; give "
                "an address of this machine's network"
            )


def _weight_faults(config: RunConfig) -> Iterator[str]:
    weights = config.weights
    if config.engine.type == "embedded":
        if weights.transport != "memory":
            yield (
                f'weights.transport: "{weights.transport}" needs engine.type "remote"; an embedded engine '
                'takes "memory"'
            )
        return
    if weights.transport == "memory":
        yield (
            'weights.transport: "memory" needs engine.type "embedded"; set weights.transport="http", or '
            '"broadcast" or "disk", which SGLang takes too'
        )
    far = [url for url in config.engine.urls if not is_loopback(urlsplit(url).hostname or "")]
    if weights.transport == "broadcast":
        if far and is_loopback(weights.host):
            yield (
                f"weights.host: {weights.host!r} cannot be reached from the engine at {far[0]!r}; give an "
                "address of this machine's network"
            )
        if weights.backend == "nccl" and torch.device(config.train.device).type != "cuda":
            yield 'weights.backend: "nccl" needs train.device "cuda"; use "gloo"'
