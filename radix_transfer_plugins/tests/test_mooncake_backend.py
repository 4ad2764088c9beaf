"""The mooncake backend against a real master.

Configuration, set-up failures, buffers, and what Mooncake leaves out.
"""

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from radix_transfer_plugins import OutputStore, create_backend
from radix_transfer_plugins.backends.mooncake import MooncakeBackend, MooncakeConfig
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake
from radix_transfer_plugins.backends.mooncake.stored import TRAILER_BYTES, Trailer, original_key, stored_key
from radix_transfer_plugins.errors import (
    ConfigError,
    CorruptObjectError,
    KeyExistsError,
    ObjectLostError,
    ReadBufferError,
    StoreFullError,
    StoreUnavailableError,
)

Connect = Callable[..., MooncakeBackend]
MIB = 1 << 20


@pytest.fixture(scope="module")
def master() -> Iterator[LocalMooncake]:
    with LocalMooncake(segment_bytes=192 * MIB) as master:
        yield master


@pytest.fixture
def connect(master: LocalMooncake) -> Iterator[Connect]:
    backends: list[MooncakeBackend] = []

    def open_one(**options: object) -> MooncakeBackend:
        backends.append(MooncakeBackend.from_config(master.backend_config(**options)))
        return backends[-1]

    yield open_one
    cleaner = open_one()
    cleaner.delete_batch([info.key for info in cleaner.list("")])
    for backend in backends:
        backend.close()


# Configuration and set-up


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "mooncake_master --rpc_port=50051"),
        ({"master_server_address": "a:1", "master_server_addr": "b:1"}, "give the master once"),
        ({"master_server_address": "localhost"}, "\"10.0.0.1:50051\", got 'localhost'"),
        (
            {"master_server_address": "a:1", "buffer": 1},
            "unknown option 'buffer'; known options: master_server",
        ),
        ({"master_server_address": "a:1", "local_buffer_size": "1 zb"}, "local_buffer_size"),
        ({"master_server_address": "a:1", "local_buffer_size": 0}, "every put goes through it"),
        ({"master_server_address": "a:1", "client_http_port": "x"}, "client_http_port"),
        ({"master_server_address": "a:1", "key_prefix": ".."}, "key_prefix"),
    ],
)
def test_wrong_configuration_is_refused_with_the_known_choices_or_the_remedy(
    config: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        create_backend("mooncake", config)
    assert named in str(caught.value)


def test_every_set_up_option_of_the_client_can_be_given_by_its_own_name() -> None:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore
    documented = store.setup.__doc__.split("Supported keys:")[1]
    names = [line.split(":")[0].split("(")[0].strip() for line in documented.splitlines() if ": " in line]
    assert "tenant_id" in names
    given = {
        "enable_ssd_offload": True,
        "enable_client_http_server": True,
        "client_http_port": 9311,
        "global_segment_size": "2mb",
        "local_buffer_size": "1gb",
    }
    config = {name: given.get(name, "text") for name in names} | {"master_server_addr": "a:1"}
    parsed = MooncakeConfig.parse(config)
    expected = set(names) - {"local_hostname", "master_server_addr"}
    assert set(parsed.setup) == expected
    assert parsed.local_hostname == "text"
    assert parsed.setup["global_segment_size"] == 2 * MIB
    assert parsed.local_buffer_bytes == parsed.setup["local_buffer_size"] == 1 << 30


def test_a_master_that_is_not_there_is_said_within_5_seconds() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=f"no master at 127.0.0.1:{port}.*--rpc_port={port}"):
        create_backend("mooncake", {"master_server_address": f"127.0.0.1:{port}"})
    assert time.monotonic() - began < 5


def test_a_server_that_is_no_master_is_said_within_5_seconds(master: LocalMooncake) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], master.metrics_port):
            began = time.monotonic()
            with pytest.raises(StoreUnavailableError, match=f"at 127.0.0.1:{port} .*not of --metrics_port"):
                create_backend("mooncake", {"master_server_address": f"127.0.0.1:{port}"})
            assert time.monotonic() - began < 5


def test_memory_that_cannot_be_had_is_said_with_its_size(connect: Connect) -> None:
    with pytest.raises(StoreUnavailableError, match=f"global_segment_size {1 << 50}"):
        connect(global_segment_size="1024tb")


def test_a_metadata_server_that_is_not_there_is_said_with_the_settings(connect: Connect) -> None:
    with pytest.raises(StoreUnavailableError, match=r"127.0.0.1:1/metadata.*P2PHANDSHAKE"):
        connect(metadata_server="http://127.0.0.1:1/metadata")


@pytest.mark.parametrize(
    ("error", "command"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "pip install 'radix-transfer-plugins[mooncake]'"),
        (
            ImportError("libibverbs.so.1: cannot open shared object file"),
            "apt-get install -y libibverbs1 librdmacm1 libnuma1",
        ),
    ],
)
def test_a_missing_client_or_library_is_said_with_the_command(
    error: ImportError, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError) as caught:
        MooncakeBackend.from_config({"master_server_address": "127.0.0.1:1"})
    assert command in str(caught.value)


def test_importing_the_backend_does_not_import_the_client() -> None:
    script = (
        "import sys, radix_transfer_plugins.backends.mooncake as m; print('mooncake.store' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_a_forked_child_is_refused_instead_of_hanging(connect: Connect) -> None:
    backend = connect()
    child = os.fork()
    if child == 0:
        try:
            backend.put_batch([("a", b"x")])
        except StoreUnavailableError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Keys and values


def test_keys_of_any_text_are_stored_and_listed_by_plain_prefix(connect: Connect) -> None:
    backend = connect()
    keys = ["a/b.c", "a/b_c", "a/b*", "ünï/😀", "new\nline", "%2F", "comma,a", "k" * 2000]
    backend.put_batch([(key, key.encode()) for key in keys])
    with backend.get_batch(keys) as lease:
        assert [bytes(view) for view in lease.views] == [key.encode() for key in keys]
    assert {info.key for info in backend.list("")} == set(keys)
    assert {info.key for info in backend.list("a/b.")} == {"a/b.c"}
    assert all(original_key(stored_key(key)) == key for key in keys)


def test_objects_of_other_users_of_the_master_are_neither_read_nor_listed(connect: Connect) -> None:
    backend = connect()
    native = backend._client._native
    assert (
        native.put_batch(["shared/foreign", "shared/short"], [b"f" * 1000, b"s"], backend._client.pinned) == 0
    )
    for key in ("shared/foreign", "shared/short"):
        with pytest.raises(CorruptObjectError, match=key):
            backend.get_batch([key])
        with pytest.raises(KeyExistsError):
            backend.put_batch([(key, b"x")])
    assert list(backend.list("shared/")) == []
    backend.delete_batch(["shared/foreign", "shared/short"])
    with pytest.raises(ObjectLostError):
        backend.get_batch(["shared/foreign"])


def test_truncated_objects_are_typed_errors(connect: Connect) -> None:
    class Rows(msgspec.Struct):
        rows: np.ndarray

    backend = connect()
    store = OutputStore(backend)
    (ref,) = store.put_many([Rows(np.arange(1000, dtype=np.int32))])
    key = f"{ref.key}/rows"
    for damaged in (bytes(4000), np.arange(999, dtype=np.int32).tobytes(), b""):
        backend.delete_batch([key])
        backend.put_batch([(key, damaged)])
        with pytest.raises(CorruptObjectError):
            store.read_many([(ref, ["rows"])], stash_type=Rows, buffer_bytes=1 << 20)
        with pytest.raises(CorruptObjectError):
            backend.get_batch_into([key], [memoryview(bytearray(4000 if len(damaged) < 4000 else 3999))])


# The local buffer


def test_concurrent_puts_with_room_for_one_all_finish(connect: Connect) -> None:
    backend = connect(local_buffer_size=32 * MIB)
    values = [np.full(20 * MIB, number, np.uint8) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: backend.put_batch([(f"k{number}", values[number])]), range(4)))
    for number, value in enumerate(values):
        with backend.get_batch([f"k{number}"]) as lease:
            assert np.array_equal(np.frombuffer(lease.views[0], np.uint8), value)


def test_thousands_of_keys_in_one_call_are_put_read_and_deleted(connect: Connect) -> None:
    backend = connect()
    keys = [f"many/{number}" for number in range(5000)]
    backend.put_batch([(key, key.encode()) for key in keys])
    with backend.get_batch(keys) as lease:
        assert [bytes(view) for view in lease.views] == [key.encode() for key in keys]
    buffers = [bytearray(len(key)) for key in keys]
    backend.get_batch_into(keys, [memoryview(buffer) for buffer in buffers])
    assert [buffer.decode() for buffer in buffers] == keys
    backend.delete_batch(keys)
    assert list(backend.list("many/")) == []


def test_a_value_larger_than_the_local_buffer_is_refused_with_both_sizes(connect: Connect) -> None:
    backend = connect(local_buffer_size=4 * MIB)
    with pytest.raises(
        StoreFullError, match=f"{5 * MIB + TRAILER_BYTES} .* {4 * MIB}; raise local_buffer_size"
    ):
        backend.put_batch([("small", b"x"), ("large", bytes(5 * MIB))])
    assert list(backend.list("")) == []


def test_a_batch_larger_than_the_local_buffer_goes_through_in_parts(connect: Connect) -> None:
    backend = connect(local_buffer_size=4 * MIB)
    values = {f"k{number}": bytes([number]) * (3 * MIB) for number in range(4)}
    backend.put_batch(list(values.items()))
    for key, value in values.items():
        with backend.get_batch([key]) as lease:
            assert bytes(lease.views[0]) == value


def test_views_that_hold_the_local_buffer_make_puts_and_reads_fail_until_released(connect: Connect) -> None:
    backend = connect(local_buffer_size=16 * MIB, wait_s=0.2)
    backend.put_batch([(f"k{number}", bytes(6 * MIB)) for number in range(3)])
    with pytest.raises(ReadBufferError, match=rf"3 objects of {3 * (6 * MIB + 24)} bytes .* {16 * MIB}"):
        backend.get_batch(["k0", "k1", "k2"])
    with backend.get_batch(["k0", "k1"]):
        with pytest.raises(ReadBufferError, match="unreleased views"):
            backend.get_batch(["k2"])
        with pytest.raises(StoreFullError, match="unreleased views"):
            backend.put_batch([("k3", bytes(6 * MIB))])
        buffer = bytearray(6 * MIB)
        backend.get_batch_into(["k2"], [memoryview(buffer)])
    backend.get_batch(["k2"]).release()
    backend.put_batch([("k3", bytes(6 * MIB))])
    assert {info.key for info in backend.list("")} == {"k0", "k1", "k2", "k3"}


def test_views_outlive_deletion_and_closing(connect: Connect) -> None:
    backend = connect()
    backend.put_batch([("a", b"\x07" * 100_000)])
    lease = backend.get_batch(["a"])
    backend.delete_batch(["a"])
    backend.close()
    assert lease.views[0] == b"\x07" * 100_000
    lease.release()


def test_reading_into_memory_names_absent_keys_and_wrong_lengths(connect: Connect) -> None:
    backend = connect()
    backend.put_batch([("a", b"12345"), ("e", b"")])
    buffers = [bytearray(5), bytearray(0)]
    backend.get_batch_into(["a", "e"], [memoryview(buffer) for buffer in buffers])
    assert buffers == [b"12345", b""]
    with pytest.raises(ObjectLostError, match="'gone'"):
        backend.get_batch_into(["gone"], [memoryview(bytearray(5))])
    for length in (4, 6):
        with pytest.raises(CorruptObjectError, match=f"expected {length} bytes, the store holds 5"):
            backend.get_batch_into(["a"], [memoryview(bytearray(length))])


def test_a_trailer_survives_its_bytes_and_refuses_others() -> None:
    trailer = Trailer.new()
    assert Trailer.unpack(trailer.pack(), "k") == trailer
    assert len(trailer.pack()) == TRAILER_BYTES
    with pytest.raises(CorruptObjectError, match="'k'"):
        Trailer.unpack(trailer.pack()[1:], "k")
    with pytest.raises(CorruptObjectError):
        Trailer.unpack(bytes(TRAILER_BYTES), "k")
