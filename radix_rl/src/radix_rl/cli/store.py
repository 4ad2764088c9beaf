"""`radix-rl store`: the store's own command line, under the name users of this package know."""

import json
from pathlib import Path
from typing import Annotated

import typer

from radix_rl.config import load_config
from radix_rl.config.saving import FILE_NAME as CONFIG_FILE
from radix_rl.errors import ConfigurationError


def store(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="stat, list, gc or cat, and their options.", metavar="COMMAND ..."),
    ] = None,
) -> None:
    """Look into an output store and remove what crashed runs left: the same as `radix-store`.

    `--run DIR` stands for the store and the key prefix of the run in that output directory.
    """
    from radix_transfer_plugins.cli import main

    raise typer.Exit(main(_with_run([*(arguments or []), *context.args])))


def _with_run(arguments: list[str]) -> list[str]:
    """`--run DIR` replaced by the backend, its settings and the key prefix of that run's configuration."""
    if "--run" not in arguments:
        return arguments
    place = arguments.index("--run")
    if place + 1 == len(arguments):
        raise ConfigurationError("--run: expected the output directory of a run")
    settings = load_config(Path(arguments[place + 1]) / CONFIG_FILE).output_store
    if settings.key_prefix is None:
        raise ConfigurationError(f"--run: the run in {arguments[place + 1]!r} stored no outputs")
    options = ["--backend", settings.backend, "--key-prefix", settings.key_prefix]
    if settings.config:
        options += ["--config", json.dumps(settings.config)]
    return [*arguments[:place], *options, *arguments[place + 2 :]]
