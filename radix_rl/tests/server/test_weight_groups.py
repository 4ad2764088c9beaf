"""Weights over a process group, with SGLang's three routes."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.buckets.packed import pack
from radix_rl.weights.update_group import UpdateGroup

CPU = torch.device("cpu")

# What a trainer does that was written for SGLang: torch's own helpers, nothing of this package.
TRAINER = """
import sys
from datetime import timedelta
import torch
from safetensors.torch import load_file
from torch.distributed import PrefixStore, rendezvous
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

port, *paths = sys.argv[1:]
store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2))
group, _ = _new_process_group_helper(
    2, 0, [], Backend("gloo"), PrefixStore("from-afar", store), group_name="from-afar",
    timeout=timedelta(seconds=30),
)
one_by_one, flattened = (list(load_file(path).values()) for path in paths)
for tensor in (*one_by_one, torch.cat([tensor.flatten().view(torch.uint8) for tensor in flattened])):
    group.broadcast([tensor]).wait()
sys.stdin.read()
"""


def _post(server, path, **body):
    return server.client.post(path, json=body)


def _free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _parameters(server):
    return dict(server.engine._core_now().runner.model.named_parameters())


def _others(server, seed):
    """Other values for every parameter, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in _parameters(server).items()}


def _described(tensors):
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


@pytest.fixture
def meet():
    """Rank 0 of a group of two, the server being rank 1."""
    groups = []

    def make(server, name="g"):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with ThreadPoolExecutor() as pool:
            joined = pool.submit(
                _post, server, "/init_weights_update_group", master_address="127.0.0.1", master_port=port,
                rank_offset=1, world_size=2, group_name=name, backend="gloo",
            )  # fmt: skip
            group = UpdateGroup.host(name, "gloo", listener=listener, world_size=2, device=CPU, timeout_s=30)
            assert joined.result().json() == {
                "success": True,
                "message": "Succeeded to initialize custom process group.",
            }
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.close()


def _send(server, group, bucket, **body):
    """Broadcast a packed bucket while the server is told of it; the server's answer."""
    described = _described(dict(bucket.tensors()))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            _post, server, "/update_weights_from_distributed", group_name=group.name,
            load_format="flattened_bucket", **described, **body,
        )  # fmt: skip
        group.broadcast([bucket.buffer])
        return answer.result()


def test_what_a_trainer_in_another_process_broadcasts_is_in_force_bit_for_bit(embedded_server, tmp_path):
    versions = {None: _others(embedded_server, 1), "flattened_bucket": _others(embedded_server, 2)}
    for load_format, tensors in versions.items():
        save_file(tensors, tmp_path / f"{load_format}.safetensors")
    port = _free_port()
    paths = [str(tmp_path / f"{load_format}.safetensors") for load_format in versions]
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(port), *paths], stdin=subprocess.PIPE)
    try:
        joined = _post(
            embedded_server, "/init_weights_update_group", master_address="127.0.0.1", master_port=port,
            rank_offset=1, world_size=2, group_name="from-afar", backend="gloo",
        )  # fmt: skip
        assert joined.status_code == 200, joined.text
        assert "from-afar" in embedded_server.client.get("/server_info").json()["weight_update_groups"]
        for load_format, tensors in versions.items():
            assert _post(embedded_server, "/begin_weight_update").status_code == 200
            described = _described(dict(sorted(tensors.items())))
            received = _post(
                embedded_server, "/update_weights_from_distributed", **described,
                group_name="from-afar", load_format=load_format, weight_version=f"v-{load_format}",
            )  # fmt: skip
            assert received.json()["success"] is True, received.text
            ended = _post(embedded_server, "/end_weight_update").json()
            assert ended["weight_version"] == f"v-{load_format}"
            parameters = _parameters(embedded_server)
            assert all(torch.equal(p, tensors[name]) for name, p in parameters.items())
    finally:
        trainer.communicate(timeout=60)
    assert trainer.returncode == 0
    assert _post(embedded_server, "/destroy_weights_update_group", group_name="from-afar").json() == {
        "success": True,
        "message": "Succeeded to destroy custom process group.",
    }
    assert _post(embedded_server, "/destroy_weights_update_group", group_name="from-afar").status_code == 400


def test_a_broadcast_without_begin_is_an_update_of_its_own(embedded_server, meet):
    group = meet(embedded_server)
    new = _others(embedded_server, 2)
    (bucket,) = pack_buckets(new.items(), 1 << 30)

    answer = _send(embedded_server, group, pack(bucket, CPU), weight_version="at-once")

    assert answer.json()["success"] is True, answer.text
    assert embedded_server.client.get("/model_info").json()["weight_version"] == "at-once"
    assert all(torch.equal(p, new[name]) for name, p in _parameters(embedded_server).items())

    (half,) = pack_buckets(list(new.items())[:3], 1 << 30)
    refused = _send(embedded_server, group, pack(half, CPU), weight_version="half")
    assert refused.status_code == 400
    assert refused.json()["success"] is False
    assert "missing" in refused.json()["message"]
    assert embedded_server.client.get("/model_info").json()["weight_version"] == "at-once"
    _post(embedded_server, "/destroy_weights_update_group", group_name="g")


def test_a_sender_that_dies_leaves_the_old_weights_and_no_group(embedded_server, meet):
    old = {name: p.clone() for name, p in _parameters(embedded_server).items()}
    version = embedded_server.client.get("/model_info").json()["weight_version"]
    group = meet(embedded_server, "dies")
    new = _others(embedded_server, 3)
    (first,) = pack_buckets(list(new.items())[:5], 1 << 30)
    assert _post(embedded_server, "/begin_weight_update", weight_version="never").status_code == 200
    assert _send(embedded_server, group, pack(first, CPU)).status_code == 200

    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            _post, embedded_server, "/update_weights_from_distributed", group_name="dies",
            **_described(dict(list(new.items())[5:])),
        )  # fmt: skip
        time.sleep(0.3)
        group.close()
    response = answer.result()

    assert time.monotonic() - started < 10
    assert response.status_code == 400
    assert f"version '{version}' stays in force" in response.json()["message"]
    assert all(torch.equal(p, old[name]) for name, p in _parameters(embedded_server).items())
    assert "dies" not in embedded_server.client.get("/server_info").json()["weight_update_groups"]
    assert _post(embedded_server, "/begin_weight_update", weight_version="next").status_code == 200
    assert _post(embedded_server, "/abort_weight_update").status_code == 200


def test_a_sender_that_never_sends_is_given_up_and_holds_nobody(run_server, meet):
    with run_server(weight_update_timeout_s=2.0) as server:
        meet(server)
        started = time.monotonic()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(
                _post, server, "/update_weights_from_distributed", names=["w"], dtypes=["float32"],
                shapes=[[3]], group_name="g",
            )  # fmt: skip
            time.sleep(0.2)
            assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).json()["text"] == "b"
            assert not answer.done()
        assert 1.5 < time.monotonic() - started < 10
        assert answer.result().status_code == 400
        assert "did not take part within 2 s" in answer.result().json()["message"]
        assert server.engine.calls == []


def test_nobody_at_the_master_s_address_is_a_400_in_time(run_server):
    with run_server(weight_update_timeout_s=1.0) as server:
        started = time.monotonic()
        response = _post(
            server, "/init_weights_update_group", master_address="127.0.0.1", master_port=_free_port(),
            rank_offset=1, world_size=2, group_name="g", backend="gloo",
        )  # fmt: skip
        assert time.monotonic() - started < 10
        assert response.status_code == 400
        assert "could not meet the others" in response.json()["message"]
        assert server.client.get("/server_info").json()["weight_update_groups"] == []


def test_a_master_that_takes_the_connection_and_never_answers_is_given_up(run_server):
    with run_server(weight_update_timeout_s=1.0) as server, socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        response = _post(
            server, "/init_weights_update_group", master_address="127.0.0.1",
            master_port=silent.getsockname()[1], rank_offset=1, world_size=2, group_name="g", backend="gloo",
        )  # fmt: skip
        assert time.monotonic() - started < 10
        assert response.status_code == 400
        assert "could not meet the others" in response.json()["message"]


def test_tensors_that_never_come_end_their_own_update_and_no_later_one(run_server, meet):
    with run_server(weight_update_timeout_s=2.0) as server:
        meet(server)
        assert _post(server, "/begin_weight_update", weight_version="first").status_code == 200
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(
                _post, server, "/update_weights_from_distributed", names=["w"], dtypes=["float32"],
                shapes=[[3]], group_name="g",
            )  # fmt: skip
            time.sleep(0.5)
            assert _post(server, "/abort_weight_update").status_code == 200
            assert _post(server, "/begin_weight_update", weight_version="second").status_code == 200
        assert answer.result().status_code == 400
        assert _post(server, "/end_weight_update").json()["weight_version"] == "second"


def test_an_update_dropped_while_its_tensors_come_changes_nothing(embedded_server, meet):
    group = meet(embedded_server, "slow")
    new = _others(embedded_server, 4)
    old = {name: p.clone() for name, p in _parameters(embedded_server).items()}
    (bucket,) = pack_buckets(new.items(), 1 << 30)
    assert _post(embedded_server, "/begin_weight_update", weight_version="9").status_code == 200
    dropped = threading.Event()

    def drop_then_send():
        time.sleep(0.3)
        assert _post(embedded_server, "/abort_weight_update").status_code == 200
        dropped.set()

    dropper = threading.Thread(target=drop_then_send)
    dropper.start()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            _post, embedded_server, "/update_weights_from_distributed", group_name="slow",
            load_format="flattened_bucket", **_described(dict(pack(bucket, CPU).tensors())),
        )  # fmt: skip
        assert dropped.wait(10)
        group.broadcast([pack(bucket, CPU).buffer])
    dropper.join()

    assert answer.result().status_code == 409
    assert all(torch.equal(p, old[name]) for name, p in _parameters(embedded_server).items())
    _post(embedded_server, "/destroy_weights_update_group", group_name="slow")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/init_weights_update_group", {"backend": "nccl"}, 'use "gloo"'),
        ("/init_weights_update_group", {}, "nccl"),
        ("/init_weights_update_group", {"backend": "mpi"}, "mpi"),
        ("/init_weights_update_group", {"backend": "gloo", "rank_offset": 0}, "rank_offset"),
        ("/init_weights_update_group", {"backend": "gloo", "group_name": ""}, "group_name"),
        ("/init_weights_update_group", {"backend": "gloo", "master_port": 0}, "master_port"),
        ("/init_weights_update_group", {"backend": "gloo", "world_size": 1 << 40}, "world_size"),
        ("/update_weights_from_disk", {"model_path": "a" * 5000}, "File name too long"),
        ("/update_weight_version", {"new_version": ""}, "new_version"),
        ("/destroy_weights_update_group", {}, "weight_update_group"),
        ("/update_weights_from_distributed", {"group_name": "none"}, "/init_weights_update_group"),
        ("/update_weights_from_distributed", {"load_format": "direct"}, "direct"),
        ("/update_weights_from_distributed", {"selector": "draft"}, "selector"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_it(shared_server, path, body, message):
    defaults = {
        "/init_weights_update_group": {
            "master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2,
        },
        "/update_weights_from_distributed": {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]},
    }  # fmt: skip

    response = _post(shared_server, path, **(defaults.get(path, {}) | body))

    assert response.status_code == 400
    assert response.json().get("success") is False
    assert message in response.json()["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"names": ["w"], "dtypes": ["float99"], "shapes": [[1]]}, "float99"),
        ({"names": ["w", "x"], "dtypes": ["float32"], "shapes": [[1]]}, "one length"),
        ({"names": [], "dtypes": [], "shapes": []}, "at least one"),
        ({"names": ["w", "w"], "dtypes": ["int8"] * 2, "shapes": [[1], [1]]}, "comes twice"),
        ({"names": ["w"], "dtypes": ["int8"], "shapes": [[-1]]}, "negative"),
        ({"names": ["w"], "dtypes": ["float64"], "shapes": [[1 << 60]]}, "no room"),
        ({"names": ["w"], "dtypes": ["int8"], "shapes": [[0, 1 << 80]]}, "cannot be viewed"),
        ({"names": ["w"], "dtypes": ["float4_e2m1fn_x2"], "shapes": [[1]]}, "float4_e2m1fn_x2"),
        ({"names": ["w", "x"], "dtypes": ["int8", "float32"], "shapes": [[1], [1]]}, "aligned"),
    ],
)
def test_tensors_that_cannot_be_received_are_refused_before_the_receiving(server, meet, body, message):
    meet(server)

    response = _post(
        server, "/update_weights_from_distributed", group_name="g", load_format="flattened_bucket", **body
    )

    assert response.status_code == 400
    assert message in response.json()["message"]
    assert server.client.get("/server_info").json()["weight_update_groups"] == ["g"]
    again = _post(
        server, "/init_weights_update_group", master_address="127.0.0.1", master_port=5, rank_offset=1,
        world_size=2, group_name="g", backend="gloo",
    )  # fmt: skip
    assert again.status_code == 400
    assert "already" in again.json()["message"]
