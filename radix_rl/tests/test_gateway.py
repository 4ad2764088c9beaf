"""The gateway without engines: what it refuses, and a real HAProxy in front of two plain servers."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from radix_rl.addresses import host_and_port
from radix_rl.errors import ConfigurationError
from radix_rl.launch import gateway as gateway_module
from radix_rl.launch.gateway import (
    Gateway,
    GatewaySettings,
    find_haproxy,
    render,
    require_keys,
    require_output_store,
)


@pytest.mark.parametrize(
    "url",
    [
        "https://a:1",
        "a:1",
        "http://a",
        "http://a:1/path",
        "http://a:x",
        "http://a b:1",
        "http://:1",
        "http://::1:30000",
    ],
)
def test_url_that_is_no_plain_server_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigurationError, match="expected http://host:port"):
        GatewaySettings(urls=(url,))


def test_no_server_and_a_server_twice_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        GatewaySettings(urls=())
    with pytest.raises(ConfigurationError, match="twice"):
        GatewaySettings(urls=("http://a:1", "http://a:1"))


def test_header_that_would_change_the_configuration_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="header name"):
        GatewaySettings(urls=("http://a:1",), session_header="x) # ")


def test_configuration_names_every_server_in_each_backend() -> None:
    settings = GatewaySettings(urls=("http://a:1", "http://[::1]:2"), session_header="X-Conversation")
    text = render(settings, Path("/run/admin.sock"))
    assert text.count("    server s0 a:1\n    server s1 [::1]:2\n") == 2, "with checks and without"
    assert "stick on req.hdr(X-Conversation)" in text
    assert "balance leastconn" in text


def test_missing_haproxy_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigurationError, match="sudo apt-get install haproxy"):
        find_haproxy()


class Backend:
    """A server that answers with its name and what it was sent; every answer waits for `delay_s`."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        self.name = name
        self.delay_s = 0.0
        self.healthy = True
        self.dies = False
        self.free = threading.Event()
        """While it is not set, generations wait."""
        self.free.set()
        self.seen: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(200 if outer.healthy else 503, {"output_store": {"backend": "shared_memory"}})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.seen.append(body)
                time.sleep(outer.delay_s)
                outer.free.wait(60)
                if outer.dies:
                    # As a killed process: the connection ends without an answer.
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self.answer(200, {"server": outer.name, "sent": body.decode()})

            def answer(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, 0), Handler)
        # HAProxy ends its health checks by a reset, which the server would print.
        self._server.handle_error = lambda *_: None
        self.url = f"http://{host_and_port(host, self._server.server_address[1])}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    backends = [Backend("a"), Backend("b")]
    yield backends
    for backend in backends:
        backend.close()


@pytest.fixture
def start_gateway(backends: list[Backend]) -> Iterator[Callable[..., Gateway]]:
    started: list[Gateway] = []

    def start(**settings: Any) -> Gateway:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        urls = tuple(backend.url for backend in backends)
        gateway = Gateway(GatewaySettings(**{"urls": urls, "port": port, "drain_s": 5, **settings}))
        started.append(gateway)
        up = gateway.is_up
        wait_for(lambda: all(map(up, gateway.settings.urls)))
        return gateway

    yield start
    for gateway in started:
        gateway.stop()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the gateway did not get there in time"
        time.sleep(0.05)


def test_bodies_pass_unchanged_and_go_to_the_least_busy_server(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway()
    body = b'{"text": "h\\u00e9", "return_outputs_via_store": true, "unknown": [1,  2]}'
    backends[0].delay_s = backends[1].delay_s = 0.3
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{gateway.url}/generate", content=body, timeout=10).json()
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer["sent"].encode() for answer in answers] == [body] * 4
    assert sorted(answer["server"] for answer in answers) == ["a", "a", "b", "b"]


def test_requests_of_a_session_go_to_one_server(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway(session_header="X-Conversation")
    servers = {
        session: {
            httpx.post(f"{gateway.url}/generate", content=b"{}", headers={"X-Conversation": session}).json()[
                "server"
            ]
            for _ in range(6)
        }
        for session in ("one", "two", "three", "four")
    }
    assert all(len(names) == 1 for names in servers.values())


def test_generation_of_a_server_that_dies_is_answered_by_another(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway()
    backends[0].dies = True
    answers = [httpx.post(f"{gateway.url}/generate", content=b"{}", timeout=10) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["server"] for answer in answers} == {"b"}
    assert len(backends[0].seen) > 0


def test_other_requests_are_never_repeated(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway()
    for backend in backends:
        backend.dies = True
    assert httpx.post(f"{gateway.url}/end_weight_update", content=b"{}", timeout=10).status_code >= 500
    assert sum(len(backend.seen) for backend in backends) <= 1


def test_unhealthy_server_gets_nothing(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway()
    backends[1].healthy = False
    wait_for(lambda: not gateway.is_up(backends[1].url))
    names = {httpx.post(f"{gateway.url}/generate", content=b"{}").json()["server"] for _ in range(6)}
    assert names == {"a"}
    assert backends[1].seen == []


def test_request_of_a_server_that_turns_unhealthy_goes_on(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    """SGLang's /health fails while it is paused, and its requests wait for it."""
    gateway = start_gateway()
    with ThreadPoolExecutor() as pool:
        for backend in backends:
            backend.free.clear()
        running = pool.submit(httpx.post, f"{gateway.url}/generate", content=b"{}", timeout=60)
        try:
            wait_for(lambda: any(backend.seen for backend in backends))
            for backend in backends:
                backend.healthy = False
            wait_for(lambda: not any(gateway.is_up(backend.url) for backend in backends), timeout_s=30)
            time.sleep(0.2)
            assert not running.done()
        finally:
            for backend in backends:
                backend.free.set()
        assert running.result().status_code == 200


def test_while_no_server_is_healthy_requests_go_to_any(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    """As when all are paused for new weights. Sessions stay where they were."""
    gateway = start_gateway(session_header="X-Conversation")

    def names(session: str) -> set[str]:
        headers = {"X-Conversation": session}
        url = f"{gateway.url}/generate"
        return {httpx.post(url, content=b"{}", headers=headers).json()["server"] for _ in range(3)}

    before = {session: names(session) for session in ("one", "two", "three", "four")}
    for backend in backends:
        backend.healthy = False
    wait_for(lambda: not any(gateway.is_up(backend.url) for backend in backends), timeout_s=30)
    assert {session: names(session) for session in before} == before
    gateway.drain(backends[0].url)
    assert {httpx.post(f"{gateway.url}/generate", content=b"{}").json()["server"] for _ in range(4)} == {"b"}
    backends[1].dies = True
    gateway.ready(backends[0].url)
    assert {httpx.post(f"{gateway.url}/generate", content=b"{}").json()["server"] for _ in range(4)} == {"a"}


_KILLED_PROGRAM = """
import asyncio, sys

async def serve(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    if head.startswith(b"POST"):
        await reader.readexactly(2)
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def test_server_killed_under_load_costs_no_answer(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    """A request on its way from a dead server to another is not lost.

    Neither when the server dies nor when the checks notice.
    """
    command = [sys.executable, "-c", _KILLED_PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        killed = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        gateway = start_gateway(urls=(backends[0].url, killed))
        over = threading.Event()

        def ask() -> list[int]:
            """Status of each answer. A client of the standard library: it is the quicker one."""
            host = gateway.url.removeprefix("http://")
            statuses = []
            while not over.is_set():
                connection = HTTPConnection(host, timeout=20)
                connection.request("POST", "/generate", body=b"{}")
                statuses.append(connection.getresponse().status)
                connection.close()
            return statuses

        with ThreadPoolExecutor() as pool:
            asking = [pool.submit(ask) for _ in range(16)]
            try:
                time.sleep(0.5)
                process.kill()
                wait_for(lambda: not gateway.is_up(killed), timeout_s=30)
                time.sleep(0.5)
            finally:
                over.set()
            assert {status for future in asking for status in future.result()} == {200}


def test_drained_server_gets_nothing_new_until_it_is_ready_again(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway()
    gateway.drain(backends[0].url)
    assert {httpx.post(f"{gateway.url}/generate", content=b"{}").json()["server"] for _ in range(4)} == {"b"}
    gateway.ready(backends[0].url)
    assert {httpx.post(f"{gateway.url}/generate", content=b"{}").json()["server"] for _ in range(4)} == {
        "a",
        "b",
    }
    with pytest.raises(ConfigurationError, match="known:"):
        gateway.drain("http://elsewhere:1")


def test_port_that_another_gateway_has_is_refused(start_gateway: Callable[..., Gateway]) -> None:
    """Also one that nobody stops any more: it would get half of the requests."""
    first = start_gateway()
    for _ in range(3):
        with pytest.raises(ConfigurationError, match=rf"{first.url}:\n(.|\n)*[Aa]ddress already in use"):
            start_gateway(port=first.settings.port)


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_requests_outlive_the_gateway_command_and_its_folder_does_not(
    backends: list[Backend], how: str, tmp_path: Path
) -> None:
    """An interrupt at a terminal reaches all processes of the group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).parent / "radix-rl"), "gateway", backends[0].url, "--port", str(port)]
    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        ) as process,
        ThreadPoolExecutor() as pool,
    ):
        wait_for(lambda: answers(url), timeout_s=60)
        backends[0].delay_s = 2.0
        running = pool.submit(httpx.post, f"{url}/generate", content=b"{}", timeout=20)
        wait_for(lambda: bool(backends[0].seen))
        assert list(tmp_path.glob("radix-gateway-*"))
        if how == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.kill()
        assert running.result().status_code == 200
        process.communicate(timeout=20)
        wait_for(lambda: not answers(url))
        wait_for(lambda: not list(tmp_path.glob("radix-gateway-*")))
    assert process.returncode == (0 if how == "interrupt" else -signal.SIGKILL)


def test_a_gateway_listens_on_the_address_it_was_given_and_no_other(
    own_host: str, start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway(host=own_host)

    answer = httpx.post(f"{gateway.url}/generate", content=b"hello", timeout=10).json()

    assert answer["sent"] == "hello"
    if own_host != "localhost":
        assert not answers(f"http://127.0.0.1:{gateway.settings.port}")


def test_a_gateway_reaches_servers_at_any_name_of_the_machine(
    own_host: str, backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    named = Backend("named", own_host)
    backends.append(named)
    gateway = start_gateway(urls=(named.url,))

    answer = httpx.post(f"{gateway.url}/generate", content=b"hello", timeout=10).json()

    assert answer == {"server": "named", "sent": "hello"}


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_stopping_lets_running_requests_end(
    backends: list[Backend], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway()
    for backend in backends:
        backend.delay_s = 1.0
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{gateway.url}/generate", content=b"{}", timeout=10).status_code
        )
    )
    thread.start()
    wait_for(lambda: any(backend.seen for backend in backends))
    gateway.stop()
    thread.join()
    assert answers == [200]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/health")


@pytest.mark.parametrize(("status", "info"), [(200, {"version": "0.5.23"}), (404, {"detail": "Not Found"})])
def test_server_without_a_store_is_refused_by_name(
    backends: list[Backend], monkeypatch: pytest.MonkeyPatch, status: int, info: dict[str, str]
) -> None:
    """Stock SGLang answers without `output_store`, stock vLLM not at all."""
    require_output_store([backend.url for backend in backends])
    monkeypatch.setattr(
        httpx,
        "get",
        lambda url, **_: httpx.Response(status, json=info, request=httpx.Request("GET", url)),
    )
    with pytest.raises(ConfigurationError, match=r"has no output store.*unless VLLM_PLUGINS names"):
        require_output_store(["http://plain:1"])


@pytest.mark.parametrize(
    ("status", "complaint"), [(200, "answers without a key"), (404, "answers without a key"), (401, None)]
)
def test_a_gateway_that_others_reach_stands_before_servers_with_keys(monkeypatch, status, complaint):
    request = httpx.Request("GET", "http://a:1/server_info")
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(status, request=request))
    settings = GatewaySettings(urls=("http://a:1",), host="0.0.0.0")
    if complaint is None:
        require_keys(settings)
        return
    with pytest.raises(ConfigurationError, match=f"http://a:1 {complaint}.*--allow-unauthenticated"):
        require_keys(settings)


def test_a_server_that_does_not_tell_is_not_taken_for_one_with_a_key(monkeypatch):
    def refuse(*_, **__):
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "get", refuse)
    with pytest.raises(ConfigurationError, match="does not tell whether it asks for a key"):
        require_keys(GatewaySettings(urls=("http://a:1",), host="0.0.0.0"))


@pytest.mark.parametrize(
    "sent", [b"POST /generate HT", b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{"]
)
def test_request_that_is_not_sent_to_its_end_is_ended_in_time(
    start_gateway: Callable[..., Gateway], sent: bytes
) -> None:
    gateway = start_gateway(request_timeout_s=1)
    with socket.create_connection((gateway.settings.host, gateway.settings.port), timeout=10) as slow:
        start_s = time.perf_counter()
        slow.sendall(sent)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert 0.9 < time.perf_counter() - start_s < 5
