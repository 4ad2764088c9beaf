"""Every transport puts the same weights in force, bit for bit, and fails in time."""

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from radix_rl.addresses import host_and_port
from radix_rl.buckets.bucket import TensorSpec, pack_buckets
from radix_rl.buckets.checkpoint_names import CheckpointNames
from radix_rl.buckets.packed import pack
from radix_rl.config.engine import RemoteSettings
from radix_rl.engines.remote.client import HttpClient
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.engines.remote.weights import RemoteWeights
from radix_rl.errors import ConfigurationError, EngineError, EngineStateError, WeightUpdateError
from radix_rl.server.app import create_app
from radix_rl.server.runner import HttpServer, bind
from radix_rl.server.settings import ServerSettings
from radix_rl.testing import ScriptedEngine, tiny_model
from radix_rl.weights.sync import WeightSynchronizer, named_weights
from radix_rl.weights.transports.broadcast import BroadcastTransport
from radix_rl.weights.transports.disk import DiskTransport
from radix_rl.weights.transports.http import HttpTransport
from radix_rl.weights.transports.memory import MemoryTransport

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    changes = {"num_hidden_layers": 2, "num_experts": 4, "tie_word_embeddings": True}
    return tiny_model("qwen3_moe", **changes).bfloat16()


@pytest.fixture(scope="module")
def model_path(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture
async def serve():
    """Servers on this event loop, with a client and the application of each.

    Each is over a scripted engine.
    """
    started = []

    async def start(timeout_s=30.0, host="127.0.0.1"):
        sock = bind(host, 0)
        url = f"http://{host_and_port(host, sock.getsockname()[1])}"
        engine = ScriptedEngine()
        settings = ServerSettings(model_path="m", served_model_name="m", weight_update_timeout_s=timeout_s)
        app = create_app(engine, None, settings)
        server = HttpServer(app, drain_s=1)
        ready = asyncio.Event()
        task = asyncio.create_task(server.run_on(sock, handle_signals=False, on_ready=ready.set))
        await ready.wait()
        client = RemoteEngine(url, RemoteSettings())
        started.append((client, server, task))
        await client.start()
        return client, engine, app

    yield start
    for client, server, task in started:
        await client.close()
        server.stop()
        await task


@pytest.fixture
def unused_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def broadcast(timeout_s=30.0, host="127.0.0.1"):
    return BroadcastTransport(backend="gloo", host=host, port=0, device=CPU, timeout_s=timeout_s)


def assert_equal(weights, model):
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)


@pytest.mark.parametrize("bucket_bytes", [600, 1 << 20])
@pytest.mark.parametrize("name", ["memory", "http", "broadcast", "disk"])
async def test_every_transport_puts_the_same_bits_in_force_whatever_the_bucket(
    name, bucket_bytes, serve, model, model_path, tmp_path
):
    if name == "memory":
        engines = kept = [ScriptedEngine(), ScriptedEngine()]
    else:
        engines, kept = [], []
        for _ in range(2):
            client, engine, _ = await serve()
            engines.append(client)
            kept.append(engine)
    transport = {
        "memory": MemoryTransport,
        "http": HttpTransport,
        "broadcast": broadcast,
        "disk": lambda: DiskTransport(tmp_path / "versions", model_path),
    }[name]()
    synchronizer = WeightSynchronizer(
        engines, transport, bucket_bytes=bucket_bytes, checkpoint_names=CheckpointNames(model_path)
    )
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        metrics = await synchronizer.sync(version, named_weights(model))
        assert metrics["weights/sent_bytes"] > 0
        for engine in kept:
            assert engine.version == str(version)
            assert not engine.paused
            assert_equal(engine.weights, model)
    await synchronizer.close()


async def test_broadcasts_reach_engines_at_any_name_of_the_machine(own_host, serve, model):
    (first, one, _), (second, two, _) = await serve(host=own_host), await serve(host=own_host)
    synchronizer = WeightSynchronizer([first, second], broadcast(10.0, own_host), bucket_bytes=4_000)
    for version in (1, 2):
        await synchronizer.sync(version, named_weights(model))

    for engine in (one, two):
        assert engine.version == "2"
        assert_equal(engine.weights, model)
    await synchronizer.close()


@pytest.mark.parametrize(
    ("make", "name", "protocol"),
    [
        (HttpTransport, "http", "TakesEncodedBuckets"),
        (broadcast, "broadcast", "TakesBroadcasts"),
        (lambda: DiskTransport(Path("versions"), Path("model")), "disk", "TakesCheckpoints"),
    ],
)
def test_an_engine_is_asked_once_for_what_a_transport_needs(make, name, protocol):
    with pytest.raises(ConfigurationError, match=f"'{name}', but ScriptedEngine takes weights by memory"):
        make().check([ScriptedEngine()])
    with pytest.raises(ConfigurationError, match=f"ScriptedEngine lists it, but lacks methods of {protocol}"):
        make().check([ScriptedEngine(weight_transports=(name,))])
    make().check([RemoteLike(name)])


class RemoteLike(RemoteEngine):
    """A client that never connects."""

    def __init__(self, transport):
        super().__init__("http://127.0.0.1:1", RemoteSettings())
        self._weights = RemoteWeights(self._http, {"server": "radix-rl"})
        self._capabilities = self._capabilities_of(
            {"server": "radix-rl", "capabilities": {"weight_transports": [transport]}}
        )


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_means_every_interface_is_none_for_engines_to_reach(host):
    with pytest.raises(ConfigurationError, match=r"weights\.host: .* every interface"):
        broadcast(host=host)


async def test_a_host_that_is_not_this_machine_s_is_named(serve, model):
    client, engine, _ = await serve()
    synchronizer = WeightSynchronizer([client], broadcast(host="192.0.2.77"), bucket_bytes=4_000)

    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.77:0"):
        await synchronizer.sync(1, named_weights(model))
    assert (engine.version, engine.paused) == ("0", False)


def test_a_trainer_whose_engines_never_come_says_so_and_ends_in_order(second_address):
    """A store of torch that gave up waiting ended the process with "terminate called"."""
    script = f"""
import socket, torch
from radix_rl.errors import WeightUpdateError
from radix_rl.weights.update_group import UpdateGroup

listener = socket.create_server(({second_address!r}, 0))
try:
    UpdateGroup.host(
        "g", "gloo", listener=listener, world_size=2, device=torch.device("cpu"), timeout_s=1.0
    )
except WeightUpdateError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr
    assert f"rank 0 of 2 could not meet the others at {second_address}:" in ended.stdout
    assert "within 1 s" in ended.stdout
    assert "terminate called" not in ended.stderr


async def test_a_fleet_keeps_one_group_until_a_server_has_lost_it(serve, model):
    (first, one, _), (second, _, app) = await serve(), await serve()
    transport = broadcast()
    synchronizer = WeightSynchronizer([first, second], transport, bucket_bytes=1 << 20)
    await synchronizer.sync(1, named_weights(model))
    (name,) = app.state.weights.groups.names()
    await synchronizer.sync(2, named_weights(model))
    assert app.state.weights.groups.names() == [name]

    await second.weights.leave_group(name)
    await synchronizer.sync(3, named_weights(model))

    assert app.state.weights.groups.names() != [name]
    assert one.version == "3"
    await synchronizer.close()
    assert app.state.weights.groups.names() == []


async def test_a_server_that_never_receives_ends_the_update_in_time_and_the_next_one_works(
    serve, model, monkeypatch
):
    (first, one, _), (second, two, app) = await serve(2.0), await serve(2.0)
    synchronizer = WeightSynchronizer([first, second], broadcast(2.0), bucket_bytes=1 << 20)
    await synchronizer.sync(1, named_weights(model))

    woken = asyncio.Event()

    async def never(*_arguments, **_options):
        await woken.wait()
        raise WeightUpdateError("woken too late")

    monkeypatch.setattr(app.state.weights.groups, "receive", never)
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match=rf"no answer from .*{second.base_url}"):
        await synchronizer.sync(2, named_weights(model))
    assert time.monotonic() - started < 20
    assert (one.version, two.version) == ("1", "1")
    assert (one.staged, two.staged) == (None, None)
    assert (one.paused, two.paused) == (False, False)

    monkeypatch.undo()
    woken.set()
    await synchronizer.sync(3, named_weights(model))
    assert (one.version, two.version) == ("3", "3")
    await synchronizer.close()


async def test_a_refusal_of_one_server_ends_the_update_of_all(serve, model):
    (first, one, _), (second, two, _) = await serve(3.0), await serve(3.0)
    synchronizer = WeightSynchronizer([first, second], broadcast(3.0), bucket_bytes=4_000)
    await synchronizer.sync(1, named_weights(model))
    before = dict(two.weights)
    two.failures["update_weights"] = WeightUpdateError("no such weight")

    with pytest.raises(EngineError, match="no such weight"):
        await synchronizer.sync(2, [("w", torch.ones(3))])

    assert (one.version, two.version) == ("1", "1")
    assert two.weights == before
    await synchronizer.close()


async def test_versions_on_disk_are_whole_checkpoints_and_one_is_kept(serve, model, model_path, tmp_path):
    client, _, _ = await serve()
    synchronizer = WeightSynchronizer(
        [client], DiskTransport(tmp_path, model_path), bucket_bytes=3_000,
        checkpoint_names=CheckpointNames(model_path),
    )  # fmt: skip
    for version in (1, 2):
        await synchronizer.sync(version, named_weights(model))

    assert [path.name for path in tmp_path.iterdir()] == ["version-2"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "version-2", dtype="auto")
    assert_equal(dict(loaded.named_parameters()), model)
    assert len(list((tmp_path / "version-2").glob("*.safetensors"))) > 1


async def test_an_update_that_fails_leaves_no_version_on_disk(serve, model, model_path, tmp_path):
    client, engine, _ = await serve()
    synchronizer = WeightSynchronizer(
        [client], DiskTransport(tmp_path, model_path), bucket_bytes=3_000,
        checkpoint_names=CheckpointNames(model_path),
    )  # fmt: skip

    def broken():
        yield next(named_weights(model))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await synchronizer.sync(1, broken())
    assert list(tmp_path.iterdir()) == []
    assert engine.version == "0"


async def test_a_server_that_refuses_a_version_on_disk_leaves_none_there(serve, model, model_path, tmp_path):
    client, engine, _ = await serve()
    synchronizer = WeightSynchronizer(
        [client], DiskTransport(tmp_path, model_path), bucket_bytes=3_000,
        checkpoint_names=CheckpointNames(model_path),
    )  # fmt: skip
    engine.failures["update_weights"] = WeightUpdateError("no such weight")

    with pytest.raises(EngineError, match="no such weight"):
        await synchronizer.sync(1, named_weights(model))

    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_takes_no_file_is_an_error_of_the_update(serve, model, model_path, tmp_path):
    client, engine, _ = await serve()
    transport = DiskTransport(tmp_path / "versions", model_path)
    synchronizer = WeightSynchronizer(
        [client], transport, bucket_bytes=3_000, checkpoint_names=CheckpointNames(model_path)
    )

    def losing_the_folder():
        for named in named_weights(model):
            shutil.rmtree(tmp_path / "versions", ignore_errors=True)
            yield named

    with pytest.raises(WeightUpdateError, match=r"weights\.directory: .*model-00001\.safetensors"):
        await synchronizer.sync(1, losing_the_folder())
    assert (engine.version, engine.paused) == ("0", False)


async def test_after_an_update_that_failed_a_fixed_port_serves_again_and_no_group_is_left(
    serve, model, unused_port
):
    client, engine, app = await serve()
    transport = BroadcastTransport(
        backend="gloo", host="127.0.0.1", port=unused_port, device=CPU, timeout_s=10
    )
    synchronizer = WeightSynchronizer([client], transport, bucket_bytes=3_000)

    def broken():
        yield next(named_weights(model))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await synchronizer.sync(1, broken())
    (failed,) = app.state.weights.groups.names()
    await synchronizer.sync(2, named_weights(model))

    (name,) = app.state.weights.groups.names()
    assert name != failed
    assert engine.version == "2"
    await synchronizer.close()
    assert app.state.weights.groups.names() == []


def test_transports_to_servers_refuse_other_engines(tmp_path):
    for transport in (broadcast(), DiskTransport(tmp_path, tmp_path)):
        with pytest.raises(ConfigurationError, match="takes weights by memory"):
            WeightSynchronizer([ScriptedEngine()], transport, bucket_bytes=1)
    with pytest.raises(ConfigurationError, match='use "gloo"'):
        BroadcastTransport(backend="nccl", host="127.0.0.1", port=0, device=CPU, timeout_s=1)


def test_a_packed_bucket_is_sglang_s_larger_items_first_without_padding():
    tensors = {"b": torch.ones(3, dtype=torch.int8), "w": torch.tensor([1.0, 2.0]), "h": torch.ones(1).half()}
    (bucket,) = pack_buckets(tensors.items(), 1 << 20)

    packed = pack(bucket, CPU)

    assert [(spec.name, spec.start_byte, spec.end_byte) for spec in packed.specs] == [
        ("w", 0, 8), ("h", 8, 10), ("b", 10, 13),
    ]  # fmt: skip
    assert packed.buffer.numel() == 13
    assert {name: tensor.tolist() for name, tensor in packed.tensors()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


async def test_sglang_is_spoken_to_in_its_own_order_and_a_broken_update_is_a_mixture():
    posts = []
    answers = {}

    def answer(request):
        posts.append((request.url.path, msgspec.json.decode(request.content)))
        body = answers.get(request.url.path, {"success": True, "message": "Success"})
        return httpx.Response(200, json=body)

    http = HttpClient("http://sglang", transport=httpx.MockTransport(answer))
    weights = RemoteWeights(http, {"tp_size": 4})
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(2,), start_byte=0, end_byte=4)
    assert weights.num_ranks == 4
    await weights.begin("7")
    await weights.receive([spec], "g")
    await weights.receive([spec], "g")
    with pytest.raises(EngineStateError, match="mixture"):
        weights.check()
    await weights.commit("7")
    weights.check()
    assert [path for path, _ in posts] == [
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version",
    ]
    assert posts[1][1] == {
        "names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2]], "group_name": "g",
        "load_format": "flattened_bucket", "flush_cache": False,
    }  # fmt: skip

    answers["/update_weights_from_distributed"] = {"success": False, "message": "no such group"}
    await weights.begin("8")
    with pytest.raises(WeightUpdateError, match="no such group"):
        await weights.receive([spec], "g")
    await weights.abort()
    with pytest.raises(EngineStateError, match="mixture"):
        weights.check()
    await http.close()
