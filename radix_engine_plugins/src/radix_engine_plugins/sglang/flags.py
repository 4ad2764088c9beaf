"""`--output-store-backend NAME --output-store-backend-extra-config JSON`.

And the same for `sglang.Engine(...)`.

Hooks, the only ones on a server without the flags:
- AFTER `ServerArgs.add_cli_args`, AROUND `ServerArgs.from_cli_args`: SGLang's parser has no place for
  foreign flags.
- `Engine.server_args_class`, made for being replaced: the engine's keyword arguments.
With a flag, AROUND `Engine._launch_subprocesses`, through which server and engine start their processes.
"""
# pyright: reportMissingImports=false

import argparse
import sys
from collections.abc import Callable
from typing import Any

from radix_engine_plugins.session import check_reachable
from radix_engine_plugins.sglang import hooks, settings

WORKER_APP = "radix_engine_plugins.sglang.worker_app:app"


def install() -> None:
    hooks.register(
        [
            ("sglang.srt.server_args.ServerArgs.add_cli_args", add_flags, hooks.AFTER),
            ("sglang.srt.server_args.ServerArgs.from_cli_args", read_flags, hooks.AROUND),
        ]
    )
    # Only where an engine loads its plugins: a launcher need not import the engine to learn that there are
    # no flags.
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        engine.Engine.server_args_class = staticmethod(_engine_arguments(engine.Engine.server_args_class))


def add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output store (radix-engine-plugins)")
    group.add_argument(
        "--output-store-backend",
        metavar="NAME",
        help="Store replay outputs of requests with return_outputs_via_store here: a backend registered with "
        "radix_transfer_plugins, such as shared_memory or mooncake.",
    )
    group.add_argument(
        "--output-store-backend-extra-config",
        metavar="JSON",
        help="The backend's configuration, a JSON object.",
    )


def read_flags(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    server_args = original(cls, args)
    # Other programs build the namespace with parsers of their own.
    backend = getattr(args, "output_store_backend", None)
    _turn_on(server_args, backend, getattr(args, "output_store_backend_extra_config", None))
    return server_args


def _engine_arguments(server_args_class: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.pop("output_store_backend", None)
        extra_config = kwargs.pop("output_store_backend_extra_config", None)
        server_args = server_args_class(*args, **kwargs)
        _turn_on(server_args, backend, extra_config)
        return server_args

    return make


def _turn_on(server_args: Any, backend: str | None, extra_config: Any) -> None:
    asked = settings.parse(backend, extra_config)
    if asked is None:
        return
    from radix_engine_plugins.sglang import frontend

    settings.refuse_unsupported(server_args)
    settings.attach(server_args, asked)
    frontend.install()
    hooks.apply(
        [("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", launch_subprocesses, hooks.AROUND)]
    )


def launch_subprocesses(
    original: Callable[..., Any], cls: type, server_args: Any, *args: Any, **kwargs: Any
) -> Any:
    asked = settings.settings_of(server_args)
    if asked is None:
        return original(cls, server_args, *args, **kwargs)
    check_reachable(asked)
    _use_worker_app()
    with settings.visible_to_children(asked):
        return original(cls, server_args, *args, **kwargs)


def _use_worker_app() -> None:
    """Make workers of `--tokenizer-worker-num N` import this app instead of SGLang's.

    A single front end does not read it.
    """
    from sglang.srt.environ import envs

    path = envs.SGLANG_HTTP_SERVER_APP_PATH
    if path.is_set() and path.get() != WORKER_APP:
        raise ValueError(
            f"--output-store-backend sets SGLANG_HTTP_SERVER_APP_PATH to {WORKER_APP!r}, but it is "
            f"{path.get()!r}; unset it"
        )
    path.set(WORKER_APP)
