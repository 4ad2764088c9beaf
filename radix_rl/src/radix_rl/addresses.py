"""Network addresses: how one is written beside a port, and sockets that listen on one and nothing wider."""

import ipaddress
import socket


def host_and_port(host: str, port: int) -> str:
    """`host:port` as in a URL; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine and is reached from it alone; names are not looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bind_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket bound to one address of this machine, not listening yet; the caller's to close.

    `host` is an IPv4 or IPv6 address or a name, of whose addresses the first that can be bound is taken.
    Port 0 lets the system choose. Raises OSError, and OverflowError for a port that is out of range.
    """
    if not 0 <= port <= 65535:
        # getaddrinfo would take it modulo 65536.
        raise OverflowError(f"expected a port from 0 to 65535, got {port}")
    first_error: OSError | None = None
    # Without the port, of which it would take the lower 16 bits.
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        sock = socket.socket(family, kind, protocol)
        # Connections of a listener before this one may still wait for their end.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address[0], port, *address[2:]))
        except OSError as error:
            sock.close()
            first_error = first_error or error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert first_error is not None, "getaddrinfo answers with an address or raises"
    raise first_error


def local_address_towards(host: str, port: int, timeout_s: float) -> str:
    """The address of this machine from which a connection to `host` goes out. Raises OSError."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        return connection.getsockname()[0]
