"""Connections that send nothing, or half a request, or are too many."""

import contextlib
import socket
import subprocess
import sys
import time

import httpx
import pytest

HEAD = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"

SERVER = """
import asyncio, resource
from types import SimpleNamespace
from fastapi import FastAPI
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
app = FastAPI()
settings = ServerSettings(model_path="m", served_model_name="m", max_connections={max_connections})
app.state.server = SimpleNamespace(settings=settings, close=lambda: None)
app.add_api_route("/health", lambda: "ok")
sock = bind("127.0.0.1", 0)
port = sock.getsockname()[1]
server = HttpServer(app, drain_s=1)
asyncio.run(server.run_on(sock, handle_signals=True, on_ready=lambda: print(port, flush=True)))
"""


def _connect(server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=10)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HT", HEAD, HEAD + b"{"], ids=["none", "head", "body", "more"]
)
def test_a_request_that_is_not_sent_to_its_end_is_ended_in_time(run_server, sent):
    with run_server(request_timeout_s=0.5) as server, _connect(server) as slow:
        start_s = time.perf_counter()
        slow.sendall(sent)
        answer = slow.recv(1000)

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert slow.recv(1000) == b""
        assert 0.4 < time.perf_counter() - start_s < 2
        assert server.client.get("/health").status_code == 200


def test_a_client_that_drips_has_no_more_time_than_one_that_waits(run_server):
    with run_server(request_timeout_s=0.5) as server, _connect(server) as slow:
        start_s = time.perf_counter()
        with contextlib.suppress(ConnectionError):
            for byte in HEAD + b" " * 100:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.perf_counter() - start_s < 2
        assert server.client.get("/health").status_code == 200


def test_a_long_generation_and_a_kept_connection_outlive_the_time_for_sending(run_server):
    with run_server(request_timeout_s=0.3) as server:
        server.engine.step_s = 0.2
        for _ in range(2):
            answer = server.generate(text="a", sampling_params={"max_new_tokens": 4})
            assert len(answer.json()["output_ids"]) == 4
            time.sleep(0.5)


@pytest.mark.parametrize(
    ("max_connections", "line"), [("None", "are taken"), ("10_000", "out of file descriptors")]
)
def test_a_server_without_file_descriptors_refuses_recovers_and_logs_a_line(max_connections, line):
    """Also where the limit was set too high, so that the system's is met."""
    script = SERVER.format(max_connections=max_connections)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        time.sleep(1)
        for connection in idle:
            connection.close()
        start_s = time.perf_counter()
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
        assert time.perf_counter() - start_s < 2
    finally:
        process.terminate()
        _, log = process.communicate(timeout=20)
    assert line in log
    assert len(log.splitlines()) <= 3, log[:3000]
