"""Base URLs of servers, checked where they are typed."""

import ipaddress
from urllib.parse import urlsplit


def check_base_url(url: str) -> str:
    """`url` without a slash at its end. Raises ValueError unless it is http(s)://host[:port]."""
    text = url.strip().rstrip("/")
    expected = f'expected a base URL such as "http://10.0.0.1:30000", got {url!r}'
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise ValueError(expected)
    if (address := _bare_ipv6(rest)) is not None:
        raise ValueError(f"{expected}; an IPv6 address is put in brackets: {scheme}://{address}")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from error
    if not host or any(character.isspace() for character in text) or parts.query or parts.fragment:
        raise ValueError(expected)
    return text


def _bare_ipv6(netloc: str) -> str | None:
    """What an IPv6 address without brackets was meant to be, None for anything else."""
    if netloc.startswith("[") or netloc.count(":") < 2:
        return None
    head, _, port = netloc.rpartition(":")
    for address, suffix in ((head, f":{port}"), (netloc, "")):
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            continue
        if not suffix or port.isdecimal():
            return f"[{address}]{suffix}"
    return None
