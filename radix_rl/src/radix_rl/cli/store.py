"""`radix-rl store`: the store's own command line, under the name users of this package know."""

from typing import Annotated

import typer


def store(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="stat, list, gc or cat, and their options.", metavar="COMMAND ..."),
    ] = None,
) -> None:
    """Look into an output store and remove what crashed runs left: the same as `radix-store`."""
    from radix_transfer_plugins.cli import main

    raise typer.Exit(main([*(arguments or []), *context.args]))
