"""`radix-rl config schema|show`: what can be set, and what a file sets."""

import json
from pathlib import Path
from typing import Annotated

import typer

from radix_rl.config import RunConfig, load_config, to_toml

app = typer.Typer(help="Look at configurations.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration: every setting with its help, type and default."""
    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@app.command()
def show(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE")] = None,
) -> None:
    """Print the configuration that a run would have, defaults and overrides included.

    It is TOML that runs again as it is.
    """
    typer.echo(to_toml(load_config(config, overrides or [])), nl=False)
