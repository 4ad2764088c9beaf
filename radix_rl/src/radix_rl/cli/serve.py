"""`radix-rl serve MODEL`: the embedded engine behind SGLang's and OpenAI's routes."""

import asyncio
import gc
import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from radix_rl.addresses import host_and_port, is_loopback
from radix_rl.cli.options import checked, options_of
from radix_rl.config.engine import EmbeddedEngineConfig
from radix_rl.config.output_store import OutputStoreConfig
from radix_rl.engines.embedded.config import EmbeddedEngineSetup
from radix_rl.errors import ConfigurationError
from radix_rl.launch.model_folder import model_folder_fault

if TYPE_CHECKING:
    from radix_rl.server.settings import ServerSettings

_MODEL = "Model and serving"
_ENGINE = "Engine"
_CAPTURE = "Replay outputs and output store"
_ACCESS = "Access"

_SGLANG_SPELLINGS = {
    "kv_cache_tokens": ["--max-total-tokens"],
    "chunked_prefill_tokens": ["--chunked-prefill-size"],
}
"""Settings that SGLang calls otherwise: field -> flags. Equal names need no entry."""


@options_of(EmbeddedEngineConfig, panel=_ENGINE, aliases=_SGLANG_SPELLINGS)
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face checkpoint.")
    ] = None,
    model_path: Annotated[
        str | None,
        typer.Option("--model-path", "--model", help="MODEL, in SGLang's spelling.", rich_help_panel=_MODEL),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_MODEL)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: the system chooses.", rich_help_panel=_MODEL)] = 30000,
    disable_radix_cache: Annotated[
        bool,
        typer.Option(
            "--disable-radix-cache",
            help="--prefix-cache-tokens 0, in SGLang's spelling.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
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
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="Listen beyond this machine without a key: whoever reaches the port controls the server.",
            rich_help_panel=_ACCESS,
        ),
    ] = False,
    weight_update_timeout_seconds: Annotated[
        float,
        typer.Option(
            help="How long joining a trainer's process group, one broadcast in it, and the body with a "
            "bucket, may take.",
            rich_help_panel=_MODEL,
        ),
    ] = 300.0,
    pause_lease_seconds: Annotated[
        float,
        typer.Option(
            help="How long a pause, or a begun weight update, lasts without a call of the client that made "
            "it; then generation continues. Longer than a trainer's longest work within an update, such as "
            "writing a checkpoint.",
            rich_help_panel=_MODEL,
        ),
    ] = 600.0,
    max_body_bytes: Annotated[
        int,
        typer.Option(
            help="Longer requests are a 413, but for those that bring weights.", rich_help_panel=_ACCESS
        ),
    ] = 64 << 20,
    parse_timeout_seconds: Annotated[
        float,
        typer.Option(
            help="How long tokenizing a request, or rendering its chat template, may take.",
            rich_help_panel=_ACCESS,
        ),
    ] = 20.0,
    request_timeout_seconds: Annotated[
        float,
        typer.Option(
            help="How long a client may take to send the head of a request, and then its body.",
            rich_help_panel=_ACCESS,
        ),
    ] = 60.0,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Further ones are refused; default: what the limit of open files leaves room for.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help='Web pages that may call the server, such as https://example.org; "*": any. Repeatable.',
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may end after SIGTERM.", rich_help_panel=_MODEL)
    ] = 30.0,
    *,
    settings: dict[str, Any],
) -> None:
    """Serve MODEL over HTTP: SGLang's /generate and control routes, OpenAI's completions and chat.

    With --output-store-backend, requests that set return_outputs_via_store get a small reference in
    meta_info.output_store_ref, and their replay outputs go to the store.
    """
    folder = _folder(model, model_path, gguf_file)
    if disable_radix_cache and settings["prefix_cache_tokens"] > 0:
        raise ConfigurationError(
            "--disable-radix-cache contradicts --prefix-cache-tokens; leave one of them out"
        )
    store = _store(output_store_backend, output_store_backend_extra_config, output_store_max_concurrent_puts)
    setup = checked(
        EmbeddedEngineSetup,
        settings
        | {
            "model_path": folder,
            "gguf_file": gguf_file,
            "tokenizer_path": tokenizer_path,
            "enable_return_routed_experts": enable_return_routed_experts,
            "enable_return_indexer_topk": enable_return_indexer_topk,
            "output_store": store,
            "weight_version": weight_version,
            "seed": random_seed,
            "num_threads": num_threads,
        },
        {"seed": "--random-seed"},
    )
    _check_keys({"api_key": api_key, "admin_api_key": admin_api_key})
    if not (api_key or admin_api_key or allow_unauthenticated or is_loopback(host)):
        raise ConfigurationError(
            f"--host: {host!r} is reached from other machines, and without a key whoever reaches it changes "
            "weights and stops requests; set --admin-api-key (and --api-key), or say --allow-unauthenticated"
        )
    if not 0 <= drain_seconds < math.inf:
        raise ConfigurationError(f"--drain-seconds: expected 0 or more, got {drain_seconds!r}")
    for flag, value in {
        "--weight-update-timeout-seconds": weight_update_timeout_seconds,
        "--pause-lease-seconds": pause_lease_seconds,
        "--parse-timeout-seconds": parse_timeout_seconds,
        "--request-timeout-seconds": request_timeout_seconds,
        "--max-body-bytes": max_body_bytes,
        "--max-connections": 1 if max_connections is None else max_connections,
    }.items():
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{flag}: expected more than 0, got {value!r}")
    setup = _with_device(setup)
    template = _chat_template(chat_template)
    answers = _server_settings(
        setup,
        served_model_name=served_model_name or folder,
        api_key=api_key,
        admin_api_key=admin_api_key,
        weight_update_timeout_s=weight_update_timeout_seconds,
        pause_lease_s=pause_lease_seconds,
        max_body_bytes=max_body_bytes,
        parse_timeout_s=parse_timeout_seconds,
        request_timeout_s=request_timeout_seconds,
        max_connections=max_connections,
        cors_origins=tuple(cors_origin or ()),
    )
    asyncio.run(_serve(setup, answers, host, port, template, drain_seconds))


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
    setup: EmbeddedEngineSetup,
    settings: "ServerSettings",
    host: str,
    port: int,
    chat_template: str | None,
    drain_s: float,
) -> None:
    from radix_rl.server.runner import HttpServer, bind

    start_s = time.monotonic()
    sock = bind(host, port)
    if setup.output_store is not None:
        typer.echo(f"output store: {setup.output_store.backend}", err=True)
    typer.echo(f"loading {setup.model_path} ({setup.dtype}, {setup.device})", err=True)
    # Importing torch takes seconds; what was told before shows that something happens.
    from radix_rl.engines.embedded.engine import EmbeddedEngine
    from radix_rl.server.app import create_app

    engine = EmbeddedEngine(setup)
    try:
        info = await engine.start()
        if engine.tokenizer is None:
            raise ConfigurationError(
                f"{setup.model_path!r} has no tokenizer files, which the server needs for text; give "
                "--tokenizer-path"
            )
        if chat_template is not None:
            engine.tokenizer.chat_template = chat_template
        app = create_app(engine, engine.tokenizer, settings, writer=engine.writer)
        server = HttpServer(app, drain_s=drain_s)

        # What is there now stays. Looking through it for garbage takes tenths of a second, in which nobody is
        # answered.
        gc.collect()
        gc.freeze()

        def on_ready() -> None:
            seconds = time.monotonic() - start_s
            address = f"http://{host_and_port(host, sock.getsockname()[1])}"
            typer.echo(
                f"ready after {seconds:.1f} s: {address} (context {info.context_length} tokens, weight "
                f"version {info.weight_version})",
                err=True,
            )

        await server.run_on(sock, handle_signals=True, on_ready=on_ready)
        typer.echo("stopping: closing engine and output store", err=True)
    finally:
        sock.close()
        await engine.close()
    typer.echo("stopped", err=True)


def _folder(model: str | None, model_path: str | None, gguf_file: str | None) -> str:
    """The folder named by one of the two spellings. Raises ConfigurationError unless it holds a model."""
    if (model is None) == (model_path is None):
        given = "neither" if model is None else f"{model!r} and {model_path!r}"
        raise ConfigurationError(f"MODEL: expected MODEL or --model-path, got {given}")
    folder = str(model or model_path)
    if (fault := model_folder_fault(Path(folder), gguf_file=gguf_file, takes_gguf=True)) is not None:
        raise ConfigurationError(f"MODEL: {fault}")
    return folder


def _with_device(setup: EmbeddedEngineSetup) -> EmbeddedEngineSetup:
    from radix_rl.engines.embedded.device import resolve_device

    return setup.model_copy(update={"device": resolve_device(setup.device)})


def _store(backend: str | None, extra_config: str, max_concurrent_puts: int) -> OutputStoreConfig | None:
    try:
        config = json.loads(extra_config)
    except ValueError as error:
        raise ConfigurationError(f"--output-store-backend-extra-config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"--output-store-backend-extra-config: expected a JSON object, got {extra_config!r}"
        )
    if backend is None and config:
        raise ConfigurationError("--output-store-backend-extra-config needs --output-store-backend")
    values = {"backend": backend or "", "config": config, "max_concurrent_puts": max_concurrent_puts}
    store = checked(OutputStoreConfig, values, {"max_concurrent_puts": "--output-store-max-concurrent-puts"})
    return None if backend is None else store


def _server_settings(setup: "EmbeddedEngineSetup", **options: Any) -> "ServerSettings":
    from radix_rl.server.settings import ServerSettings

    assert setup.model_path is not None
    return ServerSettings(
        model_path=setup.model_path,
        device=setup.device,
        launch_arguments=setup.model_dump(mode="json", exclude={"output_store"}),
        **options,
    )


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template: cannot read {path!r}: {error}") from error
