"""What the operator asked for, where each process finds it, and what is refused at launch."""
# pyright: reportMissingImports=false

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from radix_engine_plugins.settings import StoreSettings

ENVIRONMENT_VARIABLE = "RADIX_SGLANG_OUTPUT_STORE"
"""Set while child processes are started, so that they know before their arguments arrive."""

_ATTRIBUTE = "_output_store"
"""On ServerArgs: attributes with an underscore are bookkeeping and travel with it to other processes."""


def parse(backend: str | None, extra_config: str | Mapping[str, Any] | None) -> StoreSettings | None:
    """Values of the two flags; None: no store. Raises ValueError."""
    if backend is None:
        if extra_config is not None:
            raise ValueError("--output-store-backend-extra-config needs --output-store-backend NAME")
        return None
    config: Any = extra_config if extra_config is not None else {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--output-store-backend-extra-config: expected a JSON object, got {config!r}: {error}"
            ) from None
    if not isinstance(config, Mapping):
        raise ValueError(f"--output-store-backend-extra-config: expected a JSON object, got {config!r}")
    return StoreSettings(backend=backend, config=dict(config))


def attach(server_args: Any, settings: StoreSettings) -> None:
    setattr(server_args, _ATTRIBUTE, msgspec.to_builtins(settings))


def settings_of(server_args: Any) -> StoreSettings | None:
    """What `attach` put there, in this process or in the one that pickled the arguments."""
    plain = getattr(server_args, _ATTRIBUTE, None)
    return None if plain is None else msgspec.convert(plain, StoreSettings)


def refuse_unsupported(server_args: Any) -> None:
    """Raises ValueError, naming setting and remedy, for modes in which outputs would be lost."""
    from sglang.srt.environ import envs

    refused = {
        "--disaggregation-mode": server_args.disaggregation_mode not in (None, "null"),
        "--pp-size above 1 (a stage sees its own layers only)": server_args.pp_size > 1,
        "--use-ray": server_args.use_ray,
        "--grpc-mode": server_args.grpc_mode or server_args.smg_grpc_mode,
        "--encoder-only": server_args.encoder_only,
        "--enable-hierarchical-cache (rows are kept by cache slot: those of cache that is loaded back would "
        "be another request's)": server_args.enable_hierarchical_cache,
        "SGLANG_RUST_SERVER=1": envs.SGLANG_RUST_SERVER.get(),
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"--output-store-backend does not work with {setting}; leave out one of the two "
                f"(prefill/decode disaggregation splits a request's outputs over two engines)"
                if "disaggregation" in setting
                else f"--output-store-backend does not work with {setting}; leave out one of the two"
            )


@contextmanager
def visible_to_children(settings: StoreSettings) -> Iterator[None]:
    """Child processes started inside the block find the settings in their environment."""
    previous = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = msgspec.json.encode(settings).decode()
    try:
        yield
    finally:
        if previous is None:
            del os.environ[ENVIRONMENT_VARIABLE]
        else:
            os.environ[ENVIRONMENT_VARIABLE] = previous
