import threading
import time
import weakref

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.buckets.wire import CONTENT_TYPE, encode_bucket
from radix_rl.errors import EngineStateError, WeightUpdateError
from radix_rl.testing import wait_until
from radix_rl.weights.release import released


def _post(server, path, **body):
    return server.client.post(path, json=body)


def _body(**tensors):
    (bucket,) = pack_buckets(tensors.items(), 1 << 20)
    return encode_bucket(bucket)


def _send(server, body, content_type=CONTENT_TYPE):
    return server.client.post(
        "/update_weights_from_tensor", content=body, headers={"content-type": content_type}
    )


def test_a_paused_server_queues_and_continues(server):
    assert _post(server, "/pause_generation", mode="in_place").json()["status"] == "ok"
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(server.generate(text="a", sampling_params={"max_new_tokens": 1}).json())
    )
    client.start()
    time.sleep(0.1)
    assert answers == []

    assert _post(server, "/continue_generation").json()["status"] == "ok"
    client.join(10)

    assert answers[0]["text"] == "b"
    assert server.engine.calls == [("pause", "in_place"), ("resume",)]


def test_pausing_twice_is_a_409_and_the_default_mode_is_sglang_s(server):
    assert server.client.post("/pause_generation").status_code == 200
    assert server.engine.calls == [("pause", "abort"), ("abort", None)]

    response = _post(server, "/pause_generation", mode="retract")

    assert response.status_code == 409
    assert "paused already" in response.json()["error"]["message"]


def test_memory_is_released_and_resumed_by_tag(server):
    for path, body in (
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ):
        assert _post(server, path, **body).status_code == 200

    assert server.engine.calls == [
        ("sleep", ("weights", "kv_cache")),
        ("wake", ("weights",)),
        ("wake", ("kv_cache",)),
    ]


def test_flush_and_abort_all_reach_the_engine(server):
    assert server.client.post("/flush_cache").text == "Cache flushed.\n"
    assert server.engine.calls == [("flush_cache",)]
    server.engine.hold()
    server.engine.step_s = 0.01
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(
            server.generate(text="a", sampling_params={"max_new_tokens": 99}).json()
        )
    )
    client.start()
    wait_until(lambda: server.engine.running, "the request runs")

    assert _post(server, "/abort_request", abort_all=True).status_code == 200
    server.engine.release()
    client.join(10)

    assert answers[0]["meta_info"]["finish_reason"] == {"type": "abort", "message": "asked to"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause_generation", {"mode": "inplace"}, "inplace"),
        ("/pause_generation", {"modus": "abort"}, "modus"),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, "cuda_graph"),
        ("/abort_request", {}, "expected rid"),
        ("/begin_weight_update", {"selector": "draft"}, "selector"),
        ("/begin_weight_update", {"weight_version": 7}, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "/nonexistent"}, "/nonexistent"),
        ("/update_weight_version", {"new_version": None}, "new_version"),
    ],
)
def test_bad_bodies_of_control_routes_are_a_400_that_names_it(shared_server, path, body, message):
    response = _post(shared_server, path, **body)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_dropping_the_weights_drops_the_update_of_them(server):
    assert _post(server, "/begin_weight_update", weight_version="7").status_code == 200
    assert _post(server, "/release_memory_occupation", tags=["kv_cache"]).status_code == 200
    assert _post(server, "/begin_weight_update", weight_version="8").status_code == 409

    assert _post(server, "/release_memory_occupation", tags=["weights"]).status_code == 200

    assert _post(server, "/begin_weight_update", weight_version="8").status_code == 200


def test_an_update_goes_begin_buckets_end(server):
    assert _post(server, "/begin_weight_update", weight_version="7").json()["success"] is True
    assert _send(server, _body(w=torch.ones(2, 3), b=torch.zeros(1))).json()["success"] is True
    assert server.client.get("/model_info").json()["weight_version"] == "0"

    response = _post(server, "/end_weight_update")

    assert response.json()["weight_version"] == "7"
    assert server.client.get("/model_info").json()["weight_version"] == "7"
    begin, update, commit = server.engine.calls
    assert (begin, commit) == (("begin_weight_update", "7"), ("commit_weight_update", "7"))
    assert update == ("update_weights", "w", "b")
    torch.testing.assert_close(server.engine.weights, {"w": torch.ones(2, 3), "b": torch.zeros(1)})


def test_updates_out_of_order_are_a_409(server):
    assert _send(server, _body(w=torch.ones(1))).status_code == 409
    assert _post(server, "/end_weight_update").status_code == 409
    assert _post(server, "/begin_weight_update", weight_version="1").status_code == 200
    again = _post(server, "/begin_weight_update", weight_version="2")
    assert again.status_code == 409
    assert "/abort_weight_update" in again.json()["error"]["message"]
    assert _post(server, "/end_weight_update", weight_version="2").status_code == 400

    assert _post(server, "/abort_weight_update").status_code == 200
    assert _post(server, "/abort_weight_update").status_code == 200

    assert _post(server, "/begin_weight_update", weight_version="3").status_code == 200


def test_pickled_tensors_are_refused_unread(server):
    _post(server, "/begin_weight_update", weight_version="1")

    response = _post(server, "/update_weights_from_tensor", serialized_named_tensors=["gASVCgAAAA=="])

    assert response.status_code == 400
    assert "unpickling runs the sender's code" in response.json()["error"]["message"]
    assert _send(server, b"RXWB garbage").status_code == 400
    assert server.engine.calls == [("begin_weight_update", "1")]


def test_a_refused_bucket_ends_the_update(server):
    server.engine.failures["update_weights"] = [
        WeightUpdateError("'w' is no weight of the model; version '0' stays in force")
    ]
    _post(server, "/begin_weight_update", weight_version="1")

    response = _send(server, _body(w=torch.ones(1)))

    assert response.status_code == 400
    assert "stays in force" in response.json()["error"]["message"]
    assert _post(server, "/begin_weight_update", weight_version="1").status_code == 200


def test_weights_are_renamed_without_an_update(server):
    response = _post(server, "/update_weight_version", new_version="step-9")

    assert response.json()["new_version"] == "step-9"
    assert server.client.get("/model_info").json()["weight_version"] == "step-9"


def test_a_checkpoint_from_disk_becomes_a_version(server, tmp_path):
    config = Qwen3Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)

    response = _post(server, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="disk-1")

    assert response.json()["success"] is True
    assert server.client.get("/model_info").json()["weight_version"] == "disk-1"
    assert ("pause", "abort") not in server.engine.calls
    assert ("pause", "retract") in server.engine.calls
    assert not server.engine.paused
    received = server.engine.weights
    expected = dict(model.named_parameters())
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(received[name], tensor)


def test_a_kept_pause_is_that_of_an_update_that_was_made(server, tmp_path):
    config = Qwen3Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)

    server.engine.failures["update_weights"] = [WeightUpdateError("a tensor that does not fit")]
    response = _post(server, "/update_weights_from_disk", model_path=str(tmp_path), keep_pause=True)
    assert response.status_code == 400
    assert not server.engine.paused

    response = _post(server, "/update_weights_from_disk", model_path=str(tmp_path), keep_pause=True)
    assert response.status_code == 200
    assert server.engine.paused


def test_a_checkpoint_that_lacks_weights_is_refused(server, tmp_path):
    config = Qwen3Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "q_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=tensors)

    response = _post(server, "/update_weights_from_disk", model_path=str(tmp_path))

    assert response.status_code == 400
    assert "q_proj" in response.json()["error"]["message"]
    assert server.engine.version == "0"
    assert _post(server, "/begin_weight_update", weight_version="8").status_code == 200


def test_health_tells_whether_the_engine_can_generate(server):
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/health_generate").status_code == 200

    assert _post(server, "/release_memory_occupation", tags=["weights"]).status_code == 200

    for path in ("/health", "/health_generate"):
        response = server.client.get(path)
        assert response.status_code == 503
        assert "asleep" in response.json()["error"]["message"]
    assert server.generate(text="a").status_code == 409


def test_info_tells_clients_what_to_check(server):
    info = server.client.get("/get_server_info").json()
    store = server.store
    assert info["output_store"] == {
        "enabled": True,
        "backend": "memory",
        "ref_version": 1,
        "key_prefix": "test/run",
        "place": store.backend.place,
    }
    assert info["enable_return_routed_experts"] is True
    assert info["capabilities"]["pause_modes"] == ["abort", "retract", "in_place"]
    model = server.client.get("/get_model_info").json()
    assert model["model_path"] == "/models/letters"
    assert model["is_generation"] is True
    assert model["context_length"] == 512


def test_metrics_count_requests_tokens_and_puts(server):
    body = {"text": "ab", "return_routed_experts": True, "return_outputs_via_store": True}
    server.generate(sampling_params={"max_new_tokens": 3}, **body)
    server.generate(text="a", sampling_params={"top_p": 9})

    text = server.client.get("/metrics").text

    assert 'radix_rl_requests_total{outcome="answered"} 1.0' in text
    assert "radix_rl_output_tokens_total 3.0" in text
    assert "radix_rl_prompt_tokens_total 2.0" in text
    assert "radix_rl_running_requests 0.0" in text
    assert "output_store_puts_total 1.0" in text
    assert "output_store_put_bytes_total 64.0" in text


@pytest.mark.parametrize(
    ("keys", "path", "allowed"),
    [
        ({"api_key": "user"}, "/model_info", {"user"}),
        ({"api_key": "user"}, "/flush_cache", {"user"}),
        ({"admin_api_key": "admin"}, "/model_info", {None, "user", "admin"}),
        ({"admin_api_key": "admin"}, "/flush_cache", {"admin"}),
        ({"api_key": "user", "admin_api_key": "admin"}, "/model_info", {"user"}),
        ({"api_key": "user", "admin_api_key": "admin"}, "/flush_cache", {"admin"}),
        ({"api_key": "user", "admin_api_key": "admin"}, "/health", {None, "user", "admin"}),
        ({"api_key": "user", "admin_api_key": "admin"}, "/metrics", {None, "user", "admin"}),
    ],
)
def test_keys_guard_routes_as_in_sglang(run_server, keys, path, allowed):
    with run_server(**keys) as server:
        for key in (None, "user", "admin", "usér"):
            headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
            response = server.client.get(path, headers=headers)
            expected = key in allowed or (key == "usér" and None in allowed)
            assert response.status_code == (200 if expected else 401), key


def test_every_control_route_is_an_admin_route(run_server):
    with run_server(admin_api_key="admin") as server:
        for path in (
            "/abort_request",
            "/pause_generation",
            "/continue_generation",
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/end_weight_update",
            "/abort_weight_update",
            "/update_weights_from_disk",
            "/update_weight_version",
        ):
            assert server.client.post(path).status_code == 401, path
            assert server.client.post(path + "/").status_code == 401, path
        assert server.engine.calls == []


def test_keys_may_be_any_text(run_server):
    with run_server(api_key="schlüssel-鍵") as server:
        for key, status in (("schlüssel-鍵", 200), ("schlussel-鍵", 401)):
            response = server.client.get("/model_info", headers={"authorization": f"Bearer {key}".encode()})
            assert response.status_code == status


def test_an_abort_s_message_is_that_of_the_answer(server):
    server.engine.step_s = 0.01
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(
            server.generate(rid="r", text="a", sampling_params={"max_new_tokens": 500}).json()
        )
    )
    client.start()
    wait_until(lambda: server.engine.running, "the request runs")

    assert _post(server, "/abort_request", rid="r", abort_message="the trainer has enough").status_code == 200
    client.join(10)

    assert answers[0]["meta_info"]["finish_reason"] == {"type": "abort", "message": "the trainer has enough"}


def test_an_end_that_the_engine_s_state_forbids_keeps_the_update(server):
    _post(server, "/begin_weight_update", weight_version="7")
    _send(server, _body(w=torch.ones(1)))
    server.engine.failures["commit_weight_update"] = [
        EngineStateError("2 requests are running; pause the engine")
    ]
    assert _post(server, "/end_weight_update").status_code == 409
    assert ("abort_weight_update",) not in server.engine.calls

    assert _post(server, "/end_weight_update").json()["weight_version"] == "7"


def test_a_model_that_is_given_away_keeps_no_tensor():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    alive = []
    for (name, tensor), wanted in zip(released(model), expected, strict=True):
        assert torch.equal(tensor, wanted)
        assert model.get_parameter(name).numel() == 0
        alive.append(weakref.ref(tensor))
        del tensor
        assert [ref() is None for ref in alive[:-1]] == [True] * (len(alive) - 1)
