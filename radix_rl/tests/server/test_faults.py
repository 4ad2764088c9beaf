"""Many requests, most of them disturbed, over real sockets: in the end the store holds what clients hold.

More of it: `pytest radix_rl/tests/server/test_faults.py --fault-requests 20000 --fault-seed 7`.
"""

import asyncio
import contextlib
import json
import random
import threading
import time
from dataclasses import dataclass, field

import pytest

from radix_rl.testing import wait_until
from radix_transfer_plugins.errors import StoreFullError

_CONCURRENCY = 24


@dataclass
class Held:
    """What the clients know at the end."""

    keys: set[str] = field(default_factory=set)
    num_answered: int = 0
    num_errors: int = 0
    num_left: int = 0
    num_cut: int = 0
    """Connections that the server closed before a whole answer."""

    def assert_equal(self, stored: set[str], what: str) -> None:
        orphans, lost = stored - self.keys, self.keys - stored
        assert not orphans, f"{what}: {len(orphans)} of {len(stored)} objects that no client knows"
        assert not lost, f"{what}: {len(lost)} of {len(self.keys)} objects deleted under a client"

    def read(self, data: bytes) -> None:
        """Collect the references of every whole JSON object that arrived, as a client would."""
        head, _, body = data.partition(b"\r\n\r\n")
        if not head:
            return
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n")]
        for part in parts:
            try:
                answers = json.loads(part)
            except ValueError:
                continue
            for answer in answers if isinstance(answers, list) else [answers]:
                if "error" in answer:
                    self.num_errors += 1
                elif (ref := answer["meta_info"].get("output_store_ref")) is not None:
                    self.num_answered += 1
                    self.keys.add(ref["key"])


def _unchunked(body: bytes) -> bytes:
    """The bytes of the chunks that arrived, the last one possibly cut."""
    data = b""
    while body:
        size, separator, rest = body.partition(b"\r\n")
        if not separator:
            break
        data += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return data


class Client:
    """Sends one random request and, often, does not wait for its end."""

    def __init__(self, server, chance: random.Random, held: Held, number: int) -> None:
        self._server = server
        self._chance = chance
        self._held = held
        self._rid = f"r{number}"

    def _body(self) -> dict:
        chance = self._chance
        num_prompts = chance.choice((1, 1, 1, 3))
        n = chance.choice((1, 1, 2))
        prompts = [chance.choice("abcdef") for _ in range(num_prompts)]
        body = {
            "text": prompts if num_prompts > 1 else prompts[0],
            "rid": self._rid,
            "stream": chance.random() < 0.4,
            "sampling_params": {"max_new_tokens": chance.randrange(1, 8), "n": n},
            "return_routed_experts": True,
            "return_outputs_via_store": chance.random() < 0.9,
        }
        if num_prompts * n > 1 and chance.random() < 0.15 and hasattr(self._server.engine, "fail_ids"):
            self._server.engine.fail_ids.add(f"{self._rid}_{chance.randrange(num_prompts * n)}")
        return body

    async def run(self) -> None:
        host, port = self._server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(_request("/generate", self._body()))
        fate = self._chance.random()
        reading = asyncio.create_task(self._read(reader))
        try:
            if fate < 0.35:
                await asyncio.sleep(self._chance.random() * 0.08)
                # A half-close is all that the server can see of a client that leaves; reading on then
                # tells exactly what had been sent to it by that moment.
                writer.write_eof()
                self._held.num_left += 1
            elif fate < 0.5:
                await asyncio.sleep(self._chance.random() * 0.05)
                await self._abort()
            self._held.read(await reading)
        except OSError:
            self._held.num_cut += 1
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Everything that arrives before the connection ends, however it ends."""
        data = b""
        try:
            while chunk := await reader.read(65536):
                data += chunk
        except OSError:
            self._held.num_cut += 1
        return data

    async def _abort(self) -> None:
        host, port = self._server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(_request("/abort_request", {"rid": self._rid}))
        await reader.read()
        writer.close()


def _request(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(data)}", "", "")
    return "\r\n".join(lines).encode() + data


def _disturb_store(server, monkeypatch, chance: random.Random) -> None:
    """Puts take random time and fail now and then, by each stash; runs on the writer's threads."""
    put_many = server.writer._store.put_many

    def disturbed(stashes, **options):
        time.sleep(sum(chance.random() * 0.02 for _ in stashes))
        if any(chance.random() < 0.05 for _ in stashes):
            raise StoreFullError("needs 64 bytes, 0 free")
        return put_many(stashes, **options)

    monkeypatch.setattr(server.writer._store, "put_many", disturbed)


async def _storm(server, chance: random.Random, held: Held, numbers: range) -> None:
    at_once = asyncio.Semaphore(_CONCURRENCY)

    async def one(number: int) -> None:
        async with at_once:
            # A server that has stopped refuses the connection.
            try:
                await Client(server, chance, held, number).run()
            except OSError:
                held.num_cut += 1

    await asyncio.gather(*(one(number) for number in numbers))


def _suffer(server, monkeypatch, request) -> Held:
    """All the requests; then waits until the server is idle and compares store and clients."""
    seed, count = request.config.getoption("--fault-seed"), request.config.getoption("--fault-requests")
    chance, held = random.Random(seed), Held()
    _disturb_store(server, monkeypatch, random.Random(seed + 1))

    asyncio.run(_storm(server, chance, held, range(count)))

    # The assertions below say what is left, and of which seed.
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not _num_running(server) and server.objects() == held.keys, "the server is idle")
    assert _num_running(server) == 0
    held.assert_equal(server.objects(), f"--fault-seed {seed} --fault-requests {count}")
    assert held.num_answered > count // 4
    assert held.num_errors > 0
    assert held.num_left > count // 10
    assert server.writer.metrics.discards._value.get() > 0
    assert server.writer.metrics.discard_failures._value.get() == 0
    return held


def _num_running(server) -> int:
    return server.client.get("/server_info").json()["num_running_requests"]


def test_after_random_faults_the_store_holds_exactly_what_clients_hold(server, monkeypatch, request):
    server.engine.step_s = 0.004

    _suffer(server, monkeypatch, request)

    assert not server.engine.running


def test_after_random_faults_the_embedded_engine_is_empty(embedded_server, monkeypatch, request):
    _suffer(embedded_server, monkeypatch, request)

    metrics = embedded_server.client.get("/metrics").text
    for gauge in ("num_running", "num_waiting", "kv_cache_tokens_used"):
        assert f"radix_rl_engine_{gauge} 0.0" in metrics


def test_a_server_that_stops_amid_random_faults_leaves_what_clients_hold(run_server, monkeypatch, request):
    seed = request.config.getoption("--fault-seed")
    for round_number in range(4):
        chance, held = random.Random(1000 * seed + round_number), Held()
        with run_server() as server:
            _disturb_store(server, monkeypatch, random.Random(seed + round_number))
            server.engine.step_s = 0.15 if round_number % 2 else 0.01
            storm = _storm(server, chance, held, range(60))
            thread = threading.Thread(target=asyncio.run, args=(storm,))
            thread.start()
            time.sleep(0.1 + chance.random() * 0.3)
        thread.join(30)
        assert not thread.is_alive()
        assert not server.engine.running
        held.assert_equal(server.objects(), f"--fault-seed {seed}, round {round_number}")


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Thousands of expected failures would fill the report."""
    caplog.set_level("CRITICAL")
