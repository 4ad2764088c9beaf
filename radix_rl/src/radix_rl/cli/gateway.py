"""`radix-rl gateway URL...`: one address in front of several inference servers."""

import signal
from typing import Annotated

import typer

from radix_rl.addresses import is_loopback
from radix_rl.launch.gateway import Gateway, GatewaySettings, require_keys, require_output_store


def gateway(
    urls: Annotated[list[str], typer.Argument(help="http://host:port of each server.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    session_header: Annotated[
        str, typer.Option(help="Requests with the same value of this header go to the same server.")
    ] = "X-Session-Id",
    timeout_s: Annotated[int, typer.Option(help="Longest silence of a generation, seconds.")] = 3600,
    drain_s: Annotated[
        int, typer.Option(help="How long running requests may go on after a stop, seconds.")
    ] = 600,
    require_store: Annotated[
        bool, typer.Option(help="Refuse to start while a server has no output store.")
    ] = False,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="Listen beyond this machine in front of servers that ask for no key.",
        ),
    ] = False,
    print_config: Annotated[
        bool, typer.Option(help="Print HAProxy's configuration and leave it running.")
    ] = False,
) -> None:
    """Forward requests and answers unchanged to the least busy server, and check their health.

    Ctrl-C drains.
    """
    settings = GatewaySettings(
        urls=tuple(url.rstrip("/") for url in urls),
        host=host,
        port=port,
        session_header=session_header,
        timeout_s=timeout_s,
        drain_s=drain_s,
    )
    if not (allow_unauthenticated or is_loopback(host)):
        require_keys(settings)
    if require_store:
        require_output_store(settings.urls)
    running = Gateway(settings)
    if print_config:
        typer.echo(running.config_path.read_text())
    typer.echo(f"gateway: {running.url} -> {', '.join(settings.urls)} (admin socket {running.admin_socket})")

    def ask_to_stop(*_: object) -> None:
        raise KeyboardInterrupt

    # Scripts start their background jobs with SIGINT ignored.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, ask_to_stop)
    try:
        status = running.wait()
        raise typer.Exit(status)
    except KeyboardInterrupt:
        typer.echo("gateway: draining; running requests go on")
    finally:
        running.stop()
