"""`radix-rl`: the command line.

A fault of the user's is one clear message and exit code 2; a failed run exits with 1.
"""

import logging
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from radix_rl.cli import config as config_commands
from radix_rl.cli.gateway import gateway
from radix_rl.cli.serve import serve
from radix_rl.cli.store import store
from radix_rl.errors import ConfigurationError, DataError, RadixError
from radix_transfer_plugins.errors import ConfigError, OutputStoreError

app = typer.Typer(
    help="RL post-training with verified replay.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_USER_FAULTS = (ConfigurationError, DataError, ConfigError)
"""Mended by changing the command or its inputs; every other error on purpose is a run that failed."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"radix-rl {metadata.version('radix-rl')}")
        raise typer.Exit


@app.callback()
def _set_up(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens in detail.")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    handler = RichHandler(console=Console(stderr=True), show_path=False)
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[handler])


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(help="TOML file; see `radix-rl config schema`.", metavar="CONFIG")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings that replace the file's, such as train.steps=10.", metavar="KEY.PATH=VALUE"
        ),
    ] = None,
) -> None:
    """Train a policy: generate, score, update, sync, until the configured number of steps is done."""
    from radix_rl.config import load_config

    # Before PyTorch, which takes seconds: a misspelled setting is answered at once.
    settings = load_config(config, overrides or [])
    with Console(stderr=True).status("Loading PyTorch and transformers ..."):
        from radix_rl.cli.going_on import how_to_go_on
        from radix_rl.train.run import train as train_run

    # A scheduler's SIGTERM takes the run down as Ctrl-C does: what it stored is deleted. Scripts start their
    # background jobs with SIGINT ignored, which would swallow both.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        outcome = train_run(settings)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {how_to_go_on(settings, config, overrides or [])}", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    for path in outcome.written:
        typer.echo(f"wrote {path}")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Output directory of a run.", metavar="RUN_DIR")],
) -> None:
    """Write RUN_DIR/report.html from the run's metrics, also while it is still running."""
    from radix_rl.observe.report import write_report

    typer.echo(f"wrote {write_report(run_dir)}")


app.command(name="serve")(serve)
app.command(name="gateway")(gateway)
# The store's command line parses its own options, --help too.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(name="store", context_settings=_PASS_ON)(store)
app.add_typer(config_commands.app, name="config")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (RadixError, OutputStoreError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, _USER_FAULTS) else 1)
