"""The embedded engine's server and the real SGLang, stock, on one checkpoint in float32, asked the same.

Status codes, keys, greedy tokens, log-probabilities and routed experts are equal but for the differences that
each request below names; docs/server.md says why they are there.
"""

import base64
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

KEY, ADMIN_KEY = "plain-key", "admin-key"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
PLAIN = {"Authorization": f"Bearer {KEY}"}
EXPERTS_SHAPE = (-1, 3, 2)
LOGPROB_TOLERANCE = 1e-4

ADDED_HERE = re.compile(
    r"only here: \$([][.\w]*\.(routed_experts_shape|routed_experts_start_len)|\.error|\.success)$"
)
"""Keys beyond SGLang's, wherever they are."""
VOLATILE = re.compile(
    r"\.(id|created|e2e_latency|response_sent_to_client_ts|message|cached_tokens|cached_tokens_details)$"
)
"""Names, times and texts for people; and the cache, which here shares whole blocks."""
OF_ONE_SIDE = re.compile(r"\.(response_sent_to_client_ts|cached_tokens_details)$")
"""The first is in the first event of SGLang's streams and in the last here, the second is null where nothing
was cached."""

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
V1 = {"model": "tiny", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
SAY_HI = [{"role": "user", "content": "Hi"}]
REFUSED = ("status 200, here 400",)
ERROR_TYPE = ("differs: $.type",)
OFFSETS = ("differs: $.choices[].logprobs.text_offset[]",)


class Case(NamedTuple):
    path: str
    body: Any
    """A JSON object, raw bytes, or None for a GET."""
    known: tuple[str, ...] = ()


def generate(*known: str, **body: Any) -> Case:
    return Case("/generate", {"sampling_params": GREEDY, **body}, known)


def sampling(*known: str, text: Any = "Hello", **params: Any) -> Case:
    return Case("/generate", {"text": text, "sampling_params": params}, known)


def completion(*known: str, **body: Any) -> Case:
    return Case("/v1/completions", {**V1, **body}, known)


def chat(*known: str, **body: Any) -> Case:
    return Case("/v1/chat/completions", {**V1, "messages": SAY_HI, **body}, known)


CASES = {
    "text": generate(text="Hello"),
    "default length": sampling(temperature=0, ignore_eos=True),
    "to the end token": sampling(temperature=0, max_new_tokens=60),
    "null parameters": sampling(**GREEDY, top_p=None, top_k=None, stop=None),
    "characters of several tokens": generate(text="é€ 漢字"),
    "log-probabilities and experts": generate(text="Hello", return_logprob=True, return_routed_experts=True),
    "a long prompt": generate(
        input_ids=[i * 7 % 250 for i in range(600)], return_logprob=True, return_routed_experts=True
    ),
    "ids from a start row": generate(
        input_ids=[5, 6, 7], return_routed_experts=True, routed_experts_start_len=2
    ),
    "start row behind the prompt": generate(
        text="abc", return_routed_experts=True, routed_experts_start_len=3
    ),
    "batch": generate(text=["Hello", "abc"], return_logprob=True, return_routed_experts=True),
    "batch of one": generate(text=["Hello"]),
    "batch of ids": generate(input_ids=[[5, 6, 7], [8]]),
    "parameters for each": generate(
        text=["Hello", "abc"], sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 2}]
    ),
    "two samples": generate(text="Hello", sampling_params={**GREEDY, "n": 2}, return_routed_experts=True),
    "batch with two samples": generate(text=["Hello", "abc"], sampling_params={**GREEDY, "n": 2}),
    "own id": generate(text="Hello", rid="mine"),
    "own ids": generate(text=["Hello", "abc"], rid=["r1", "r2"]),
    "text in log-probabilities": generate(text="Hello", return_logprob=True, return_text_in_logprobs=True),
    "prompt ids": generate(text="Hello", return_prompt_token_ids=True),
    "no output": sampling(temperature=0, max_new_tokens=0),
    "no output, experts": generate(
        "differs: $.meta_info.routed_experts",
        text="Hello",
        sampling_params={"max_new_tokens": 0},
        return_routed_experts=True,
    ),
    "stop string": sampling(temperature=0, max_new_tokens=60, stop=["<assistant><assistant>"]),
    "stop string kept": sampling(temperature=0, max_new_tokens=60, stop="ass", no_stop_trim=True),
    "stop token": sampling(temperature=0, max_new_tokens=60, ignore_eos=True, stop_token_ids=[259]),
    "minimum length": sampling(temperature=0, max_new_tokens=12, min_new_tokens=9, stop_token_ids=[259]),
    "stop token as the last one": sampling(temperature=0, max_new_tokens=2, stop_token_ids=[259]),
    "stop string with the last token": sampling(temperature=0, max_new_tokens=2, stop=["<assistant>"]),
    "stop string and stop token": sampling(
        temperature=0, max_new_tokens=60, stop=["<assistant>"], stop_token_ids=[259]
    ),
    "stop string within the minimum": sampling(
        temperature=0, max_new_tokens=12, min_new_tokens=9, stop=["<assistant>"]
    ),
    "minimum over the default maximum": sampling(
        temperature=0, max_new_tokens=None, min_new_tokens=200, stop=["<assistant>"]
    ),
    "special tokens": sampling(**GREEDY, skip_special_tokens=False, spaces_between_special_tokens=False),
    # Apart: without the overlap schedule SGLang applies them in the order of a set of classes, which changes
    # from start to start.
    "additive penalties": generate(
        text="Hello",
        sampling_params={**GREEDY, "max_new_tokens": 20, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        return_logprob=True,
    ),
    "scaling penalty": generate(
        text="Hello",
        sampling_params={**GREEDY, "max_new_tokens": 20, "repetition_penalty": 1.3},
        return_logprob=True,
    ),
    "top_k 1": generate(
        "differs: $.meta_info.output_token_logprobs[][]",
        text="Hello",
        sampling_params={**GREEDY, "temperature": 1.0, "top_k": 1},
        return_logprob=True,
    ),
    "stream": generate(text="Hello", stream=True),
    "stream of everything": generate(
        text="Hello", stream=True, return_logprob=True, return_routed_experts=True
    ),
    "stream of a batch": generate(text=["Hello", "abc"], stream=True),
    "stream of two samples": generate(text="Hello", sampling_params={**GREEDY, "n": 2}, stream=True),
    "stream to a stop string": generate(
        text="Hello", sampling_params={**GREEDY, "max_new_tokens": 60, "stop": ["<assistant>"]}, stream=True
    ),
    # Mistakes
    "no input": generate(),
    "empty batch": generate(*REFUSED, text=[]),
    "text and ids": generate(*REFUSED, text="a", input_ids=[1]),
    "unknown field": generate(*REFUSED, text="a", no_such_field=1),
    "prompt too long": generate(input_ids=[1] * 5000),
    "output too long": sampling(max_new_tokens=5000),
    "unknown parameter": sampling("differs: $.error", tempo=1),
    "temperature of a wrong type": sampling("differs: $.error", temperature="warm"),
    "length of a wrong type": sampling("differs: $.error", max_new_tokens=3.0),
    "temperature": sampling(temperature=-1),
    "top_p 0": sampling(top_p=0),
    "top_p 2": sampling(top_p=2),
    "min_p 2": sampling(min_p=2),
    "top_k 0": sampling(top_k=0),
    "top_k 0, greedy": sampling(*REFUSED, **GREEDY, top_k=0),
    "length": sampling(max_new_tokens=-1),
    "minimum over maximum": sampling(max_new_tokens=1, min_new_tokens=2),
    "frequency penalty": sampling(frequency_penalty=3),
    "repetition penalty": sampling(repetition_penalty=3),
    "40 stop strings": sampling(stop=[str(i) for i in range(40)]),
    "stop token out of the vocabulary": sampling(*REFUSED, **GREEDY, stop_token_ids=[99999]),
    "no sample": sampling(*REFUSED, **GREEDY, n=0),
    "too few parameters": generate("status 500, here 400", text=["a", "b"], sampling_params=[GREEDY]),
    "start row over the prompt": generate(text="abc", return_routed_experts=True, routed_experts_start_len=9),
    "negative start row": generate(text="abc", return_routed_experts=True, routed_experts_start_len=-1),
    "too few ids": generate(text=["a", "b"], rid=["x"]),
    "one id twice": generate(text=["a", "b"], rid=["x", "x"]),
    "broken JSON": Case("/generate", b"{"),
    "a list": Case("/generate", b"[1]"),
    "empty body": Case("/generate", b""),
    "text of a wrong type": generate(text=5),
    "ids of a wrong type": generate(input_ids=["a"]),
    "parameters of a wrong type": generate(text="a", sampling_params="hot"),
    "stream of a wrong type": generate(text="a", stream="maybe"),
    "GET": Case("/generate", None),
    "stream with a mistake": generate(*REFUSED, text="a", sampling_params={"temperature": -1}, stream=True),
    # OpenAI's completions
    "completion": completion(prompt="Hello"),
    "completion, default length": Case(
        "/v1/completions", {"model": "tiny", "prompt": "Hi", "temperature": 0}
    ),
    "completion, log-probabilities": completion(*OFFSETS, prompt="Hello", logprobs=0),
    "completion, batch of two samples": completion(prompt=["Hello", "abc"], n=2),
    "completion, ids": completion(prompt=[5, 6, 7]),
    "completion, batch of ids": completion(prompt=[[5, 6, 7], [8]]),
    "completion, stop": completion(prompt="Hello", max_tokens=60, stop="<assistant>"),
    "completion, experts": completion(prompt="Hello", return_routed_experts=True),
    "completion, token ids": completion(prompt="Hello", return_token_ids=True),
    "completion, meta_info": completion(
        "only SGLang: $.sglext",
        "only here: $.choices[].meta_info",
        prompt="Hello",
        return_routed_experts=True,
        return_meta_info=True,
    ),
    "completion, stream": completion(prompt="Hello", stream=True),
    "completion, stream of everything": completion(
        prompt="Hello",
        stream=True,
        return_routed_experts=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    ),
    "completion without a model": Case(
        "/v1/completions", {"prompt": "Hello", "temperature": 0}, ("differs: $.model",)
    ),
    "completion, alternatives": completion(*REFUSED, prompt="Hello", logprobs=1),
    "completion, echo": completion(*REFUSED, prompt="Hello", echo=True),
    "completion, unknown field": completion(*REFUSED, prompt="Hello", nonsense=1),
    "completion without a prompt": Case("/v1/completions", V1),
    "completion, empty prompt": completion(prompt=""),
    "completion, empty batch": completion(prompt=[]),
    "completion, prompt of a wrong type": completion(prompt=5),
    "completion too long": completion(prompt="Hi", max_tokens=9999),
    "completion of nothing": completion(prompt="Hi", max_tokens=0),
    "completion, temperature": completion(prompt="Hi", temperature=-1),
    "completion, no sample": completion(*ERROR_TYPE, prompt="Hi", n=0),
    "completion, broken JSON": Case("/v1/completions", b"{"),
    # OpenAI's chat
    "chat": chat(),
    "chat, log-probabilities": chat(logprobs=True),
    "chat, two samples": chat(n=2),
    "chat, seed": chat(seed=4),
    "chat, newer length": Case(
        "/v1/chat/completions",
        {"model": "tiny", "messages": SAY_HI, "temperature": 0, "max_completion_tokens": 3},
    ),
    "chat, content parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]),
    "chat, several turns": chat(
        messages=[{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    ),
    "chat, stop": chat(stop=["m"], max_tokens=40),
    "chat, experts": chat(return_routed_experts=True),
    "chat, meta_info": chat(return_routed_experts=True, return_meta_info=True),
    "chat, token ids": chat(return_token_ids=True),
    "chat of nothing": chat(max_tokens=0),
    "chat, stream": chat(stream=True),
    "chat, stream of two samples": chat(stream=True, n=2),
    "chat, stream to a stop": chat(stream=True, stop=["m"], max_tokens=40),
    "chat, stream of everything": chat(
        stream=True, logprobs=True, return_routed_experts=True, stream_options={"include_usage": True}
    ),
    "chat, stream of token ids": chat("status 400, here 200", stream=True, return_token_ids=True),
    "chat, alternatives": chat(*REFUSED, logprobs=True, top_logprobs=2),
    "chat, unknown field": chat(*REFUSED, nonsense=1),
    "chat without messages": Case("/v1/chat/completions", V1),
    "chat, no message": chat(messages=[]),
    "chat, messages of a wrong type": chat(messages="Hi"),
    "chat, unknown role": chat(messages=[{"role": "king", "content": "a"}]),
    "chat, no content": chat(messages=[{"role": "user"}]),
    "chat too long": chat(max_tokens=9999),
    "chat, temperature": chat(temperature=-1),
    "chat, stream with a mistake": chat(temperature=-1, stream=True),
    "chat, no sample": chat(*ERROR_TYPE, n=0),
    "chat, tool required": chat(tool_choice="required"),
    "chat, broken JSON": Case("/v1/chat/completions", b"{"),
    # What the server is
    "health": Case("/health", None),
    "health, generated": Case("/health_generate", None),
    "ready": Case("/ready", None),
    "models": Case("/v1/models", None, ("differs: $.data[].owned_by",)),
    "model": Case("/v1/models/tiny", None, ("differs: $.owned_by",)),
    "absent model": Case("/v1/models/absent", None),
    "absent route": Case("/no_such_route", None),
    # Control, in this order
    "abort an unknown id": Case("/abort_request", {"rid": "unknown"}),
    "abort all": Case("/abort_request", {"abort_all": True}),
    "abort without an id": Case("/abort_request", {}, REFUSED),
    "abort an id of a wrong type": Case("/abort_request", {"rid": 5}),
    "flush": Case("/flush_cache", {}),
    "flush by GET": Case("/flush_cache", None),
    "continue without a pause": Case("/continue_generation", {}),
    "pause, abort": Case("/pause_generation", {"mode": "abort"}),
    "continue after abort": Case("/continue_generation", {}),
    "pause, retract": Case("/pause_generation", {"mode": "retract"}),
    "pause twice": Case("/pause_generation", {"mode": "retract"}, ("status 200, here 409",)),
    "continue after retract": Case("/continue_generation", {}),
    "pause, in_place": Case("/pause_generation", {"mode": "in_place"}),
    "flush while paused": Case("/flush_cache", {}),
    "continue after in_place": Case("/continue_generation", {}),
    "pause by default": Case("/pause_generation", {}),
    "continue after the default": Case("/continue_generation", {}),
    "pause, unknown mode": Case("/pause_generation", {"mode": "nap"}),
    "after the pauses": generate(text="Hello", return_logprob=True),
    "version": Case("/update_weight_version", {"new_version": "v1"}),
    "after the version": generate(text="Hello"),
    "no version": Case("/update_weight_version", {}),
    "release the cache": Case("/release_memory_occupation", {"tags": ["kv_cache"]}),
    "resume the cache": Case("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    "release what is unknown": Case("/release_memory_occupation", {"tags": ["shoes"]}, REFUSED),
}


@pytest.fixture(scope="module")
def servers(
    start_sglang: Callable[..., Any],
    start_process: Callable[..., Any],
    port: Callable[[], int],
    tiny_moe: Path,
) -> Iterator[tuple[Any, Any]]:
    """SGLang's and ours."""
    flags = ["--enable-return-routed-experts", "--served-model-name", "tiny", "--weight-version", "default"]
    flags += ["--api-key", KEY, "--admin-api-key", ADMIN_KEY]
    number = port()
    command = [str(Path(sys.executable).parent / "radix-rl"), "serve", str(tiny_moe)]
    command += ["--port", str(number), "--dtype", "float32", *flags]
    ours = start_process(command, f"http://127.0.0.1:{number}", OMP_NUM_THREADS="1")
    with start_sglang(tiny_moe, *flags) as theirs:
        yield theirs, ours.wait_until_healthy()
    ours.stop()


def ask(server: Any, case: Case) -> httpx.Response:
    is_control = not case.path.startswith(("/generate", "/v1"))
    headers = {"Content-Type": "application/json", **(ADMIN if is_control else PLAIN)}
    if case.body is None:
        return httpx.get(server.url + case.path, headers=headers, timeout=120)
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    for _ in range(10):
        answer = httpx.post(server.url + case.path, content=content, headers=headers, timeout=120)
        if not is_stream(answer) or all(len(parts) > 1 for parts in parts_of(events_of(answer)).values()):
            break
        # A busy server sent all tokens in one event: that does not tell what the events before the last hold.
    return answer


@pytest.mark.parametrize("name", CASES)
def test_answers_are_sglang_s_but_for_the_differences_named(servers: tuple[Any, Any], name: str) -> None:
    case = CASES[name]
    theirs, ours = (ask(server, case) for server in servers)

    found = set(differences(theirs, ours, without_null=case.path.startswith("/v1")))

    assert found == set(case.known), f"{theirs.text}\n{ours.text}"


ADMIN_ROUTES = [
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
]
PLAIN_ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]
OPEN_ROUTES = ["/health", "/health_generate", "/ready"]
INFO_ROUTES = ["/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models"]
AUTHORIZATIONS = [
    None,
    f"Bearer {KEY}",
    f"Bearer {ADMIN_KEY}",
    f"bearer {KEY}",
    f"Bearer  {KEY}",
    f"Basic {KEY}",
    KEY,
    "Bearer",
]


@pytest.mark.parametrize("path", [*ADMIN_ROUTES, *PLAIN_ROUTES, *OPEN_ROUTES, *INFO_ROUTES])
def test_each_route_takes_the_keys_that_it_takes_in_sglang(servers: tuple[Any, Any], path: str) -> None:
    """With both keys set. Bodies are broken, so that nothing happens where a key is taken."""
    method = "GET" if path in OPEN_ROUTES + INFO_ROUTES else "POST"
    is_open = path in OPEN_ROUTES
    taken = {f"Bearer {ADMIN_KEY}"} if path in ADMIN_ROUTES else {f"Bearer {KEY}", f"bearer {KEY}"}
    for value in AUTHORIZATIONS:
        headers = {"Content-Type": "application/json"} | ({} if value is None else {"Authorization": value})
        for server in servers:
            answer = httpx.request(
                method,
                server.url + path,
                headers=headers,
                content=b"{" if method == "POST" else None,
                timeout=60,
            )
            assert (answer.status_code != 401) == (is_open or value in taken), (server.url, value)
            if answer.status_code == 401:
                assert answer.json() == {"error": "Unauthorized"}


def differences(theirs: httpx.Response, ours: httpx.Response, without_null: bool) -> Iterator[str]:
    """Without those that are true of every answer."""
    if theirs.status_code != ours.status_code:
        yield f"status {theirs.status_code}, here {ours.status_code}"
        return
    for found in of_values(content_of(theirs, without_null), content_of(ours, without_null), "$"):
        if not ADDED_HERE.match(found) and not OF_ONE_SIDE.search(found):
            yield found


def content_of(response: httpx.Response, without_null: bool) -> Any:
    if is_stream(response):
        events = events_of(response)
        return by_sequence([no_null(event) for event in events] if without_null else events)
    if response.headers.get("content-type") == "application/json":
        return no_null(response.json()) if without_null else response.json()
    # Plain text is for people: whether there is any.
    return bool(response.text)


def is_stream(response: httpx.Response) -> bool:
    return response.headers.get("content-type") == "text/event-stream; charset=utf-8"


def events_of(stream: httpx.Response) -> list[dict[str, Any]]:
    lines = stream.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def parts_of(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """What was sent of each sequence, by its index, in order."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for part in event.get("choices", [event]):
            parts.setdefault(part.get("index", 0), []).append(part)
    return parts


def by_sequence(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what a stream says of each of its sequences.

    They may take turns in any order, in events that may each hold any number of tokens.
    """
    is_openai = "choices" in events[0]
    said: dict[str, Any] = {"after": [event for event in events if is_openai and not event["choices"]]}
    for index, (first, *middle, last) in parts_of(events).items():
        said[str(index)] = {"last": last, "keys": sorted({*first}.union(*middle))}
        if is_openai:
            # How much of the answer the last event holds depends on how busy the server was.
            said[str(index)]["last"] = {
                k: v if k not in ("text", "token_ids") else ... for k, v in last.items()
            }
            said[str(index)]["text"] = "".join(text_of(part) for part in (first, *middle, last))
            said[str(index)]["delta"] = first.get("delta")
            said[str(index)]["ids"] = [
                id_ for part in (first, *middle, last) for id_ in part.get("token_ids", [])
            ]
        else:
            ids = last["output_ids"]
            said[str(index)]["is cumulative"] = all(
                part["output_ids"] == ids[: len(part["output_ids"])] and last["text"].startswith(part["text"])
                for part in (first, *middle)
            )
            keys = first["meta_info"].keys() - {"weight_versions", "response_sent_to_client_ts"}
            said[str(index)]["keys of meta_info"] = sorted(keys)
    return said


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def no_null(value: Any) -> Any:
    """OpenAI's clients take a key with null for one that is absent."""
    if isinstance(value, dict):
        return {key: no_null(item) for key, item in value.items() if item is not None}
    return [no_null(item) for item in value] if isinstance(value, list) else value


def of_values(theirs: Any, ours: Any, path: str) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in theirs.keys() - ours.keys():
            yield f"only SGLang: {path}.{key}"
        for key in ours.keys() - theirs.keys():
            yield f"only here: {path}.{key}"
        for key in theirs.keys() & ours.keys():
            yield from of_values(theirs[key], ours[key], f"{path}.{key}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for one, other in zip(theirs, ours, strict=True):
            yield from of_values(one, other, f"{path}[]")
    elif not (VOLATILE.search(path) or is_same(theirs, ours, path)):
        yield f"differs: {path}"


def is_same(theirs: Any, ours: Any, path: str) -> bool:
    if path.endswith(".routed_experts"):
        return np.array_equal(sets_of(theirs), sets_of(ours))
    if isinstance(theirs, float) and isinstance(ours, float):
        return abs(theirs - ours) < LOGPROB_TOLERANCE
    return type(theirs) is type(ours) and theirs == ours


def sets_of(routed_experts: str) -> np.ndarray:
    rows = np.frombuffer(base64.b64decode(routed_experts), "<i4").reshape(EXPERTS_SHAPE)
    return np.sort(rows, axis=-1)
