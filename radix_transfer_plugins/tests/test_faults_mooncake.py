"""The master, the segment host, writers and readers killed for real: typed errors, no hang, nothing left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from radix_transfer_plugins import create_backend
from radix_transfer_plugins.backends.base import Backend
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake, SegmentHost
from radix_transfer_plugins.errors import ObjectLostError, StoreFullError, StoreUnavailableError

SEGMENT_BYTES = 64 << 20
Connect = Callable[..., Backend]


@pytest.fixture
def master() -> Iterator[LocalMooncake]:
    # A master that soon notices dead clients and soon gives up puts that were begun and not ended.
    flags = ("--client_ttl=2", "--put_start_discard_timeout_sec=2", "--put_start_release_timeout_sec=3")
    with LocalMooncake(SEGMENT_BYTES, flags=flags) as master:
        yield master


@pytest.fixture
def connect(master: LocalMooncake) -> Iterator[Connect]:
    backends: list[Backend] = []

    def open_one(**options: object) -> Backend:
        backends.append(create_backend("mooncake", master.backend_config(**options)))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


def in_time(action: Callable[[], object], limit_s: float = 15.0) -> BaseException | None:
    """The typed error of an action that must end within the limit (the client's own RPC retries take 4 s)."""
    began = time.monotonic()
    try:
        action()
    except (StoreUnavailableError, StoreFullError, ObjectLostError) as error:
        return error
    finally:
        assert time.monotonic() - began < limit_s
    return None


def until_stored(backend: Backend, key: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if in_time(lambda: backend.put_batch([(key, b"after")])) is None:
            break
        time.sleep(0.2)
    with backend.get_batch([key]) as lease:
        assert bytes(lease.views[0]) == b"after"


def run_writer(master: LocalMooncake, code: str) -> subprocess.Popen[str]:
    """A process of its own, with `backend` connected; it prints what it reached."""
    script = (
        "import os, signal, sys, threading, time\n"
        "from radix_transfer_plugins import create_backend\n"
        f"backend = create_backend('mooncake', {master.backend_config()!r})\n"
        "native = backend._client._native\n"
        "def die(*args): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{code}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


KILLED_PUTS = {
    "before the put": "backend._put_group = die\nbackend.put_batch([('w/a', b'1' * 99), ('w/b', b'2' * 99)])",
    "during the transfer": (
        "value = bytes(24 << 20)\n"
        "threading.Timer(0.004, die).start()\n"
        "for number in range(1000): backend.put_batch([('w/a', value)]); backend.delete_batch(['w/a'])"
    ),
    "before the put is confirmed": (
        "backend._trailers = die\nbackend.put_batch([('w/a', b'1' * 99), ('w/b', b'2' * 99)])"
    ),
}


@pytest.mark.parametrize("stage", KILLED_PUTS)
def test_a_writer_killed_at_any_stage_leaves_whole_objects_or_none_and_blocks_nothing(
    stage: str, master: LocalMooncake, connect: Connect
) -> None:
    backend = connect(wait_s=10)
    writer = run_writer(master, KILLED_PUTS[stage])
    assert writer.wait(30) == -signal.SIGKILL
    left = list(backend.list("w/"))
    for info in left:
        with backend.get_batch([info.key]) as lease:
            assert len(lease.views[0]) == info.stored_bytes in (99, 24 << 20)
    # Garbage collection: what a list names can be deleted; then the keys and the room are free again.
    backend.delete_batch([info.key for info in left])
    assert list(backend.list("w/")) == []
    until_stored(backend, "w/a")
    for number in range(2):
        backend.put_batch([(f"room/{number}", bytes(24 << 20))])
    backend.delete_batch(["w/a", "room/0", "room/1"])
    assert backend.stats().objects == 0


def test_a_reader_killed_with_views_does_not_prevent_deletion(
    master: LocalMooncake, connect: Connect
) -> None:
    backend = connect()
    backend.put_batch([("a", bytes(8 << 20))])
    reader = run_writer(master, "lease = backend.get_batch(['a'])\nprint('held', flush=True)\ntime.sleep(60)")
    assert reader.stdout is not None
    assert reader.stdout.readline() == "held\n"
    reader.kill()
    reader.wait()
    reader.stdout.close()
    backend.delete_batch(["a"])
    assert list(backend.list("")) == []
    assert backend.stats().objects == 0


def test_a_killed_segment_host_is_a_typed_error_and_a_new_one_takes_over(
    master: LocalMooncake, connect: Connect
) -> None:
    backend = connect(wait_s=0.5)
    backend.put_batch([("a", bytes(1 << 20)), ("b", b"x")])
    assert master.segment_host is not None
    master.segment_host.kill()
    into = memoryview(bytearray(1 << 20))
    assert in_time(lambda: backend.get_batch(["a"])) is not None
    assert in_time(lambda: backend.get_batch_into(["a"], [into])) is not None
    assert in_time(lambda: backend.put_batch([("c", bytes(1 << 20))])) is not None
    in_time(lambda: backend.delete_batch(["a", "b"]))
    master.segment_host = SegmentHost(master.address, SEGMENT_BYTES)
    until_stored(backend, "d")
    assert isinstance(in_time(lambda: backend.get_batch(["a"])), ObjectLostError)
    assert isinstance(in_time(lambda: backend.get_batch(["c"])), ObjectLostError)
    assert {info.key for info in backend.list("")} == {"d"}


def test_a_killed_master_is_a_typed_error_and_a_new_one_takes_over(
    master: LocalMooncake, connect: Connect
) -> None:
    backend = connect(wait_s=0.5)
    backend.put_batch([("a", bytes(1 << 20))])
    with backend.get_batch(["a"]) as lease:
        master.kill()
        for action in (
            lambda: backend.put_batch([("c", b"x")]),
            lambda: backend.get_batch(["a"]),
            lambda: backend.delete_batch(["a"]),
            lambda: list(backend.list("")),
            backend.stats,
        ):
            assert isinstance(in_time(action), StoreUnavailableError)
        assert len(lease.views[0]) == 1 << 20
    master.restart()
    until_stored(backend, "d")
    assert isinstance(in_time(lambda: backend.get_batch(["a"])), ObjectLostError)
    assert {info.key for info in backend.list("")} == {"d"}


def test_a_stopped_master_delays_no_call_by_more_than_the_setting(
    master: LocalMooncake, connect: Connect
) -> None:
    keys = [f"a{number}" for number in range(20)]
    backend = connect(timeout_s=1)
    backend.put_batch([(key, bytes(100)) for key in keys])
    into = [memoryview(bytearray(100)) for _ in keys]
    master.process.send_signal(signal.SIGSTOP)
    for action in (
        lambda: backend.get_batch(keys),
        lambda: backend.get_batch_into(keys, into),
        lambda: backend.put_batch([(f"b{key}", b"x") for key in keys]),
        lambda: backend.delete_batch(keys),
        lambda: list(backend.list("")),
        backend.stats,
    ):
        error = in_time(action, limit_s=1.5)
        assert isinstance(error, StoreUnavailableError)
        assert re.search(r"did not answer within timeout_s|metrics_server_address", str(error))
    master.process.send_signal(signal.SIGCONT)
    until_stored(backend, "d")
    # The deletion may have reached the master, which then carries it out late.
    assert {info.key for info in backend.list("")} - set(keys) == {"d"}


def test_the_time_limit_is_not_left_in_the_environment(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1234")
    monkeypatch.delenv("MC_RPC_CONNECT_TIMEOUT_MS", raising=False)
    connect(timeout_s=3)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "1234"
    assert "MC_RPC_CONNECT_TIMEOUT_MS" not in os.environ


@pytest.mark.parametrize("name", ["local_buffer_size", "global_segment_size"])
def test_memory_that_this_machine_does_not_have_is_an_error_that_names_the_setting(
    name: str, connect: Connect
) -> None:
    with pytest.raises(StoreUnavailableError, match=f"could not allocate its memory.*{name} 214748364800"):
        connect(**{name: "200gb"})


@pytest.mark.parametrize("answer", [-901, 0], ids=["put unanswered", "read-back unanswered"])
def test_a_put_whose_outcome_is_unknown_is_removed_when_the_master_answers_again(
    answer: int, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect()

    class StopsAfterPut:
        """The native client, whose master stops answering right after a put that it carried out."""

        def __init__(self, native: object) -> None:
            self.native = native
            self.stopped = False

        def __getattr__(self, name: str) -> object:
            if name == "put_batch":
                return self.put_batch
            if name == "get_size" and self.stopped:
                return lambda key: -901
            return getattr(self.native, name)

        def put_batch(self, *args: object) -> int:
            assert self.native.put_batch(*args) == 0  # type: ignore[attr-defined]
            self.stopped = True
            return answer

    client = backend._client  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(client, "_native", StopsAfterPut(client._native))
        with pytest.raises(StoreUnavailableError, match="-901"):
            backend.put_batch([("a", b"1"), ("b", b"2")])
    assert {info.key for info in backend.list("")} == {"a", "b"}
    backend.put_batch([("c", b"3")])
    assert {info.key for info in backend.list("")} == {"c"}
