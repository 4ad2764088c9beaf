import pytest

from radix_transfer_plugins.errors import StoreFullError, StoreUnavailableError

OK = {"sampling_params": {"max_new_tokens": 1}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "exactly one of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, "exactly one of text and input_ids"),
        ({"text": []}, "at least one prompt"),
        ({"text": ""}, "prompt 0 has no tokens"),
        ({"input_ids": []}, "at least one prompt"),
        ({"input_ids": [[1], []]}, "prompt 1 has no tokens"),
        ({"input_ids": [1, [2]]}, "mixture"),
        ({"input_ids": [1, 67]}, r"expected ids in [0, 67)"),
        ({"input_ids": [-1]}, r"expected ids in [0, 67)"),
        ({"input_ids": ["1"]}, "$.input_ids[0]"),
        ({"input_ids": [0] * 600, **OK}, "context length of 512"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 512}}, "context length of 512"),
        ({"text": "a", "return_output_via_store": True}, "return_output_via_store"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states: not supported"),
        ({"text": "a", "top_logprobs_num": 3}, "top_logprobs_num: not supported"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "return_indexer_topk": True}, "--enable-return-indexer-topk"),
        ({"text": "a", "return_routed_experts": True, "routed_experts_start_len": 2}, "expected 0 to 1"),
        ({"text": "a", "return_routed_experts": True, "routed_experts_start_len": -1}, "expected 0 to 1"),
        ({"text": "a", "return_outputs_via_store": True}, "nothing to store was asked for"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "$.temperature"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"top_k": 0}}, "sampling_params.top_k"),
        ({"text": "a", "sampling_params": {"min_p": 2}}, "sampling_params.min_p"),
        ({"text": "a", "sampling_params": {"frequency_penalty": 3}}, "sampling_params.frequency_penalty"),
        ({"text": "a", "sampling_params": {"repetition_penalty": 0}}, "sampling_params.repetition_penalty"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [99]}}, "sampling_params.stop_token_ids"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex: not supported"),
        ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "differ"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "expected 2 values"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "same number"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "one twice"),
        ({"text": ["a", "b"], "rid": ["x"]}, "expected 2 ids"),
        ({"text": ["a", "b"], "sampling_params": {"n": 10**9}}, "at most 65536 sequences"),
        ({"input_ids": [10**30]}, "$.input_ids[0]"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**30}}, "context length of 512"),
    ],
)
def test_what_no_retry_can_save_is_a_400_that_names_it(shared_server, body, message):
    response = shared_server.client.post("/generate", json=body)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert shared_server.generate(text="a", **OK).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"text": "a"} x',
        b'{"text": "a", "sampling_params": {"temperature": NaN}}',
        b'{"text": "\\ud800"}',
        b'{"text": ' + b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "string", "bytes", "trailing", "NaN", "surrogate", "deep"],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_body_that_is_no_json_object_is_a_400(shared_server, data, path):
    response = shared_server.client.post(path, content=data)

    assert response.status_code == 400
    answer = response.json()
    assert "JSON" in (answer["message"] if path.startswith("/v1") else answer["error"]["message"])


async def test_a_client_that_leaves_while_it_sends_its_body_is_no_fault_of_the_server(asgi_exchange):
    async def receive():
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    await asgi_exchange.app(scope, receive, send)

    assert sent[0]["status"] == 400


def test_opting_in_without_a_store_names_the_flag(run_server):
    with run_server(store=False) as server:
        response = server.generate(text="a", return_routed_experts=True, return_outputs_via_store=True, **OK)

        assert response.status_code == 400
        assert "--output-store-backend" in response.json()["error"]["message"]
        assert server.client.get("/server_info").json()["output_store"]["enabled"] is False


def test_routed_experts_without_capture_name_the_flag(run_server):
    with run_server(capabilities={"routed_experts": False}) as server:
        response = server.generate(text="a", return_routed_experts=True, **OK)

        assert response.status_code == 400
        assert "--enable-return-routed-experts" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "error", [StoreFullError("needs 9 bytes, 1 free"), StoreUnavailableError("10.0.0.1 is silent")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_store_that_fails_fails_the_request_and_the_server_goes_on(server, monkeypatch, error, stream):
    opted_in = {"text": "a", "return_routed_experts": True, "return_outputs_via_store": True, **OK}

    def put_many(*_, **__):
        raise error

    monkeypatch.setattr(server.writer._store, "put_many", put_many)
    response = server.generate(stream=stream, **opted_in)
    if stream:
        assert str(error) in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 503
        assert str(error) in response.json()["error"]["message"]
    monkeypatch.undo()

    assert server.objects() == set()
    assert server.generate(**opted_in).status_code == 200


def test_unexpected_errors_keep_their_text_in_the_log(server, caplog):
    server.engine.failures["generate"] = RuntimeError("secret path /home/me")
    response = server.generate(text="a", **OK)
    server.engine.failures.clear()

    assert response.status_code == 500
    assert "secret" not in response.text
    assert "secret path" in caplog.text
    assert server.generate(text="a", **OK).status_code == 200
