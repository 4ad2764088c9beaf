"""OpenAI's routes through the real `openai` client."""

import base64

import numpy as np
import openai
import pytest

from radix_transfer_plugins import StoreRef, TokenOutputStash


def _client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server):
    with _client(server) as client:
        yield client


def _chat(client, **options):
    messages = [{"role": "user", "content": "ab"}]
    return client.chat.completions.create(model="letters", messages=messages, **options)


def test_models_are_listed_and_found(client):
    (model,) = client.models.list().data
    assert model.id == "letters"
    assert client.models.retrieve("letters").id == "letters"
    with pytest.raises(openai.NotFoundError, match="does not exist; this server has 'letters'"):
        client.models.retrieve("numbers")


def test_a_completion_has_text_usage_and_logprobs(client):
    answer = client.completions.create(model="letters", prompt="ab", max_tokens=3, logprobs=0)

    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("cde", "length")
    assert choice.logprobs.tokens == ["c", "d", "e"]
    assert choice.logprobs.token_logprobs == [-0.5] * 3
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        2,
        3,
        5,
    )


def test_completions_of_several_prompts_and_samples_keep_their_order(client):
    answer = client.completions.create(model="letters", prompt=["a", "k"], max_tokens=1, n=2)

    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "b"),
        (1, "b"),
        (2, "l"),
        (3, "l"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)
    assert len(client.completions.create(model="letters", prompt=[0, 1]).choices[0].text) == 16


def test_a_chat_answer_has_a_message_and_logprobs(client):
    answer = _chat(client, max_completion_tokens=2, logprobs=True, stop=["x"], seed=3)

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "cd")
    assert [(token.token, token.logprob) for token in choice.logprobs.content] == [("c", -0.5), ("d", -0.5)]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")


def test_content_parts_of_text_are_joined_and_images_refused(client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = client.chat.completions.create(
        model="letters", messages=[{"role": "user", "content": parts}], max_tokens=1
    )
    assert answer.choices[0].message.content == "c"
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(openai.BadRequestError, match="content parts of type text"):
        client.chat.completions.create(model="letters", messages=[{"role": "user", "content": image}])


def test_a_chat_stream_sends_each_token_once_and_usage_at_the_end(client):
    events = list(
        _chat(client, max_tokens=3, stream=True, logprobs=True, stream_options={"include_usage": True})
    )

    choices = [event.choices[0] for event in events if event.choices]
    assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
    assert choices[-1].delta.content is None
    assert "".join(choice.delta.content or "" for choice in choices) == "cde"
    logprobs = [token.logprob for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert logprobs == [-0.5] * 3
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert events[-1].usage.completion_tokens == 3
    assert len({event.id for event in events}) == 1


def test_a_completion_stream_sends_the_same_text(client):
    events = client.completions.create(model="letters", prompt="ab", max_tokens=3, stream=True)

    assert "".join(event.choices[0].text for event in events) == "cde"


STORED = {"return_routed_experts": True, "return_outputs_via_store": True, "return_meta_info": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_replay_outputs_go_through_the_store_on_both_routes(server, client, stream, route):
    options = {"max_tokens": 3, "extra_body": STORED, "stream": stream}
    if route == "chat":
        answer = _chat(client, **options)
    else:
        answer = client.completions.create(model="letters", prompt="ab", **options)
    choice = list(answer)[-1].choices[0] if stream else answer.choices[0]
    ref = StoreRef.from_builtins(choice.meta_info["output_store_ref"])

    (stash,) = server.store.read_many(
        [(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20
    )

    assert stash.routed_experts[:, 0].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert server.objects() == {ref.key}


def test_routed_experts_without_meta_info_are_where_sglang_has_them(client):
    answer = _chat(client, max_tokens=1, extra_body={"return_routed_experts": True})

    rows = np.frombuffer(base64.b64decode(answer.sglext["routed_experts"]), "<i4").reshape(-1, 2, 2)
    assert rows[:, 0].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_body": {"return_output_via_store": True}}, "return_output_via_store"),
        ({"extra_body": {"return_sampling_mask": True}}, "needs return_meta_info"),
        ({"temperature": 9e99, "top_p": 3}, "top_p"),
        ({"max_tokens": 9999}, "context length of 512"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs: not supported"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_requests_are_openai_s_bad_request_error(client, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        _chat(client, **options)


def test_a_failing_template_is_a_bad_request(run_server):
    refusing = "{{ raise_exception('roles must alternate') }}"
    with run_server(chat_template=refusing) as server:
        client = _client(server)
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            _chat(client)


def test_an_engine_that_fails_is_an_internal_server_error(server, client):
    server.engine.failures["generate"] = RuntimeError("boom")
    with pytest.raises(openai.InternalServerError):
        _chat(client)
    with pytest.raises(openai.APIError):
        list(_chat(client, stream=True))


def test_an_unknown_route_is_told_in_openai_s_form(shared_server):
    response = shared_server.client.post("/v1/embeddings", json={})

    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "POST /v1/embeddings: Not Found",
        "type": "invalid_request_error",
        "param": None,
        "code": 404,
    }
    response = shared_server.client.get("/generate")
    assert response.status_code == 405
    assert response.json() == {"detail": "Method Not Allowed"}


def test_a_stored_chat_answer_has_its_reference_without_return_meta_info(server, client):
    stored = {"return_routed_experts": True, "return_outputs_via_store": True}
    (choice,) = _chat(client, max_tokens=1, extra_body=stored).choices

    assert server.objects() == {choice.meta_info["output_store_ref"]["key"]}


def test_web_pages_may_call_the_server_where_their_origin_is_named(run_server):
    page = {"origin": "https://example.org"}
    asked = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    with run_server(cors_origins=("https://example.org",), api_key="k") as server:
        answer = server.client.options("/v1/completions", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["origin"])
        other = server.client.options("/v1/completions", headers=asked | {"origin": "https://other.org"})
        assert "access-control-allow-origin" not in other.headers
    with run_server() as server:
        assert "access-control-allow-origin" not in server.client.get("/health", headers=page).headers


def test_each_request_is_a_line_of_the_access_log(server, caplog):
    with caplog.at_level("INFO", "uvicorn.access"):
        server.client.get("/health")

    (line,) = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert '"GET /health HTTP/1.1" 200' in line
