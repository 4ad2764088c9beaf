"""Addresses are written as URLs need them, and what listens does so on one of them."""

import socket

import pytest

from radix_rl.addresses import bind_tcp, host_and_port, local_address_towards


@pytest.mark.parametrize(
    ("host", "written"), [("10.0.0.1", "10.0.0.1:5"), ("a.example", "a.example:5"), ("::1", "[::1]:5")]
)
def test_only_an_ipv6_address_gets_brackets(host: str, written: str) -> None:
    assert host_and_port(host, 5) == written


def test_a_bound_socket_is_reached_at_its_own_address_and_not_at_another(own_host: str) -> None:
    with bind_tcp(own_host, 0) as listener:
        listener.listen()
        address, port = listener.getsockname()[:2]
        with socket.create_connection((own_host, port), timeout=5):
            pass
        assert local_address_towards(own_host, port, 5) == address
        if address != "127.0.0.1":
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_that_is_taken_is_the_error_of_the_system() -> None:
    with bind_tcp("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            bind_tcp("127.0.0.1", taken.getsockname()[1])


def test_a_port_out_of_range_is_refused_and_not_cut() -> None:
    with pytest.raises(OverflowError):
        bind_tcp("127.0.0.1", 99999)


def test_a_name_that_nobody_has_is_the_error_of_the_system() -> None:
    with pytest.raises(socket.gaierror):
        bind_tcp("no-such-host.invalid", 0)
