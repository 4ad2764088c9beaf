"""`radix-rl serve MODEL`: the embedded engine behind SGLang's and OpenAI's routes."""

import asyncio
import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from radix_rl.addresses import host_and_port
from radix_rl.errors import ConfigurationError

if TYPE_CHECKING:
    from radix_rl.engines.embedded.config import EmbeddedEngineConfig
    from radix_rl.server.settings import ServerSettings

_MODEL = "Model and serving"
_CAPTURE = "Replay outputs and output store"
_ACCESS = "Access"


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face checkpoint.")],
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_MODEL)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: the system chooses.", rich_help_panel=_MODEL)] = 30000,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=_MODEL)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help='torch device; "auto": the first GPU, else the CPU.', rich_help_panel=_MODEL)
    ] = "auto",
    max_running_requests: Annotated[
        int, typer.Option(help="Requests in the running batch; others wait.", rich_help_panel=_MODEL)
    ] = 64,
    context_length: Annotated[
        int | None,
        typer.Option(help="Prompt plus output tokens; default: the model's own.", rich_help_panel=_MODEL),
    ] = None,
    kv_cache_tokens: Annotated[
        int, typer.Option(help="Tokens that the preallocated cache holds.", rich_help_panel=_MODEL)
    ] = 65536,
    chunked_prefill_tokens: Annotated[
        int, typer.Option(help="Prompt tokens through the model in one step.", rich_help_panel=_MODEL)
    ] = 2048,
    prefix_cache_tokens: Annotated[
        int, typer.Option(help="Tokens of prompts kept for reuse; 0: none.", rich_help_panel=_MODEL)
    ] = 0,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that /v1/models tells; default: MODEL.", rich_help_panel=_MODEL)
    ] = None,
    tokenizer_path: Annotated[
        str | None, typer.Option(help="Folder of the tokenizer; default: MODEL.", rich_help_panel=_MODEL)
    ] = None,
    gguf_file: Annotated[
        str | None, typer.Option(help="GGUF file in the folder MODEL.", rich_help_panel=_MODEL)
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Jinja file to use in place of the tokenizer's own.", rich_help_panel=_MODEL),
    ] = None,
    weight_version: Annotated[
        str, typer.Option(help="Version name of the weights loaded.", rich_help_panel=_MODEL)
    ] = "0",
    random_seed: Annotated[
        int, typer.Option(help="Seeds of requests that name none follow from it.", rich_help_panel=_MODEL)
    ] = 0,
    num_threads: Annotated[
        int | None, typer.Option(help="torch threads; default: torch's choice.", rich_help_panel=_MODEL)
    ] = None,
    enable_return_routed_experts: Annotated[
        bool,
        typer.Option(
            "--enable-return-routed-experts",
            help="Capture routed experts, for requests with return_routed_experts.",
            rich_help_panel=_CAPTURE,
        ),
    ] = False,
    enable_return_indexer_topk: Annotated[
        bool,
        typer.Option(
            "--enable-return-indexer-topk",
            help="Capture the positions that sparse attention kept.",
            rich_help_panel=_CAPTURE,
        ),
    ] = False,
    output_store_backend: Annotated[
        str | None,
        typer.Option(
            help="memory, shared_memory, mooncake or another installed one.", rich_help_panel=_CAPTURE
        ),
    ] = None,
    output_store_backend_extra_config: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help='Settings of the backend, such as \'{"key_prefix": "run-1/output-store"}\'.',
            rich_help_panel=_CAPTURE,
        ),
    ] = "{}",
    output_store_max_concurrent_puts: Annotated[
        int, typer.Option(help="Puts at the same time.", rich_help_panel=_CAPTURE)
    ] = 4,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="RADIX_RL_API_KEY", help="Bearer key of every route.", rich_help_panel=_ACCESS),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="RADIX_RL_ADMIN_API_KEY",
            help="Bearer key of the routes that change the server.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    weight_update_timeout_seconds: Annotated[
        float,
        typer.Option(
            help="How long joining a trainer's process group, one broadcast in it, and the body with a "
            "bucket, may take.",
            rich_help_panel=_MODEL,
        ),
    ] = 300.0,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may end after SIGTERM.", rich_help_panel=_MODEL)
    ] = 30.0,
) -> None:
    """Serve MODEL over HTTP: SGLang's /generate and control routes, OpenAI's completions and chat.

    With --output-store-backend, requests that set return_outputs_via_store get a small reference in
    meta_info.output_store_ref, and their replay outputs go to the store.
    """
    config = _engine_config(
        model_path=model,
        gguf_file=gguf_file,
        tokenizer_path=tokenizer_path,
        dtype=dtype,
        device=device,
        max_running_requests=max_running_requests,
        context_length=context_length,
        kv_cache_tokens=kv_cache_tokens,
        chunked_prefill_tokens=chunked_prefill_tokens,
        prefix_cache_tokens=prefix_cache_tokens,
        enable_return_routed_experts=enable_return_routed_experts,
        enable_return_indexer_topk=enable_return_indexer_topk,
        output_store=_store_target(
            output_store_backend, output_store_backend_extra_config, output_store_max_concurrent_puts
        ),
        weight_version=weight_version,
        seed=random_seed,
        num_threads=num_threads,
    )
    _check_keys({"api_key": api_key, "admin_api_key": admin_api_key})
    if not 0 <= drain_seconds < math.inf:
        raise ConfigurationError(f"--drain-seconds: expected 0 or more, got {drain_seconds!r}")
    settings = _settings(
        config, served_model_name or model, api_key, admin_api_key, weight_update_timeout_seconds
    )
    asyncio.run(_serve(config, settings, host, port, _chat_template(chat_template), drain_seconds))


def _check_keys(keys: dict[str, str | None]) -> None:
    """An empty one, such as of a secret that is not set, would leave the server open."""
    for name, key in keys.items():
        variable = f"RADIX_RL_{name.upper()}"
        if key == "" or (key is None and os.environ.get(variable) == ""):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{flag} or {variable}: expected a key, got an empty one; unset it to serve without a key"
            )


async def _serve(
    config: "EmbeddedEngineConfig",
    settings: "ServerSettings",
    host: str,
    port: int,
    chat_template: str | None,
    drain_s: float,
) -> None:
    from radix_rl.server.runner import HttpServer, bind

    start_s = time.monotonic()
    sock = bind(host, port)
    if config.output_store is not None:
        typer.echo(f"output store: {config.output_store.backend}", err=True)
    typer.echo(f"loading {config.model_path} ({config.dtype}, {config.device})", err=True)
    # Importing torch takes seconds; what was told before shows that something happens.
    from radix_rl.engines.embedded.engine import EmbeddedEngine
    from radix_rl.server.app import create_app

    engine = EmbeddedEngine(config)
    try:
        info = await engine.start()
        if engine.tokenizer is None:
            raise ConfigurationError(
                f"{config.model_path!r} has no tokenizer files, which the server needs for text; "
                "give --tokenizer-path"
            )
        if chat_template is not None:
            engine.tokenizer.chat_template = chat_template
        app = create_app(engine, engine.tokenizer, settings, writer=engine.writer)
        server = HttpServer(app, drain_s=drain_s)

        def on_ready() -> None:
            seconds = time.monotonic() - start_s
            address = f"http://{host_and_port(host, sock.getsockname()[1])}"
            typer.echo(
                f"ready after {seconds:.1f} s: {address} "
                f"(context {info.context_length} tokens, weight version {info.weight_version})",
                err=True,
            )

        await server.run_on(sock, handle_signals=True, on_ready=on_ready)
        typer.echo("stopping: closing engine and output store", err=True)
    finally:
        sock.close()
        await engine.close()
    typer.echo("stopped", err=True)


def _engine_config(**values: Any) -> "EmbeddedEngineConfig":
    from pydantic import ValidationError

    from radix_rl.engines.embedded.config import EmbeddedEngineConfig

    path = Path(values["model_path"])
    needed = values["gguf_file"] or "config.json"
    if not (path / needed).is_file():
        what = "is no folder" if not path.is_dir() else f"has no {needed}"
        raise ConfigurationError(
            f"MODEL: expected the folder of a Hugging Face checkpoint, got {str(path)!r}, which {what}"
        )
    values["device"] = _device(values["device"])
    try:
        return EmbeddedEngineConfig(**values)
    except ValidationError as error:
        problems = "; ".join(
            f"--{str(problem['loc'][0]).replace('_', '-')}: {problem['msg']}, got {problem['input']!r}"
            for problem in error.errors()
        )
        raise ConfigurationError(problems) from error


def _store_target(backend: str | None, extra_config: str, max_concurrent_puts: int) -> dict[str, Any] | None:
    try:
        config = json.loads(extra_config)
    except ValueError as error:
        raise ConfigurationError(f"--output-store-backend-extra-config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"--output-store-backend-extra-config: expected a JSON object, got {extra_config!r}"
        )
    if backend is None:
        if config:
            raise ConfigurationError("--output-store-backend-extra-config needs --output-store-backend")
        return None
    return {"backend": backend, "config": config, "max_concurrent_puts": max_concurrent_puts}


def _settings(
    config: "EmbeddedEngineConfig",
    served_model_name: str,
    api_key: str | None,
    admin_api_key: str | None,
    weight_update_timeout_s: float,
) -> "ServerSettings":
    from radix_rl.server.settings import ServerSettings

    assert config.model_path is not None
    if not weight_update_timeout_s > 0:
        raise ConfigurationError(
            f"--weight-update-timeout-seconds: expected more than 0, got {weight_update_timeout_s!r}"
        )
    arguments = config.model_dump(mode="json", exclude={"output_store"})
    return ServerSettings(
        model_path=config.model_path,
        served_model_name=served_model_name,
        enable_return_routed_experts=config.enable_return_routed_experts,
        output_store_backend=config.output_store.backend if config.output_store else None,
        device=config.device,
        weight_update_timeout_s=weight_update_timeout_s,
        api_key=api_key,
        admin_api_key=admin_api_key,
        launch_arguments=arguments,
    )


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template: cannot read {path!r}: {error}") from error


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
