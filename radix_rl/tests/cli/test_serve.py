"""`radix-rl serve` up to where the engine would start; the whole of it is in tests/end_to_end."""

import inspect

import pytest
import typer
from typer.testing import CliRunner

from radix_rl.cli.serve import serve
from radix_rl.config.engine import EmbeddedEngineConfig
from radix_rl.errors import ConfigurationError
from radix_rl.server.runner import bind


@pytest.fixture
def run():
    """The error that a command line ends with."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(serve)

    def invoke(*arguments):
        result = CliRunner().invoke(app, list(arguments))
        return result.exception

    return invoke


@pytest.fixture
def model_path(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output-store-backend-extra-config", "{"], "is not JSON"),
        (["--output-store-backend-extra-config", "[]"], "expected a JSON object"),
        (["--output-store-backend-extra-config", '{"key_prefix": "x"}'], "needs --output-store-backend"),
        (["--dtype", "int3"], "--dtype"),
        (["--max-running-requests", "0"], "--max-running-requests"),
        (["--kv-cache-tokens", "8"], "--kv-cache-tokens: Input should be greater than or equal to 16, got 8"),
        (
            ["--max-total-tokens", "8"],
            "--kv-cache-tokens: Input should be greater than or equal to 16, got 8",
        ),
        (["--chunked-prefill-size", "3"], "--chunked-prefill-tokens: Input should be greater than"),
        (["--bfloat16-products", "exact"], "--bfloat16-products: Input should be 'auto', 'native' or"),
        (["--device", "abacus"], '--device: expected a torch device such as "cpu"'),
        (["--random-seed", "-1"], "--random-seed: Input should be greater than or equal to 0, got -1"),
        (["--num-threads", "0"], "--num-threads: Input should be greater than or equal to 1, got 0"),
        (
            ["--output-store-backend", "memory", "--output-store-max-concurrent-puts", "0"],
            "--output-store-max-concurrent-puts: Input should be greater than or equal to 1, got 0",
        ),
        (["--weight-update-timeout-seconds", "inf"], "--weight-update-timeout-seconds: expected more than 0"),
        (["--disable-radix-cache", "--prefix-cache-tokens", "9"], "contradicts --prefix-cache-tokens"),
        (["--chat-template", "/nonexistent/template"], "--chat-template: cannot read"),
        (["--gguf-file", "absent.gguf"], "has no absent.gguf"),
        (["--drain-seconds", "nan"], "--drain-seconds: expected 0 or more, got nan"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        (["--max-body-bytes", "0"], "--max-body-bytes: expected more than 0, got 0"),
        (["--max-connections", "0"], "--max-connections: expected more than 0, got 0"),
        (["--request-timeout-seconds", "nan"], "--request-timeout-seconds: expected more than 0, got nan"),
        (["--api-key", ""], "--api-key or RADIX_RL_API_KEY: expected a key, got an empty one"),
        (["--api-key", "k", "--admin-api-key", ""], "--admin-api-key or RADIX_RL_ADMIN_API_KEY"),
    ],
)
def test_a_wrong_setting_names_its_flag(run, model_path, options, message):
    error = run(model_path, "--device", "cpu", *options)

    assert isinstance(error, ConfigurationError)
    assert message in str(error)


def test_every_setting_of_the_engine_is_an_option():
    names = inspect.signature(serve).parameters
    assert set(EmbeddedEngineConfig.model_fields) - {"type"} <= set(names)
    assert {name: names[name].default for name in EmbeddedEngineConfig.model_fields if name != "type"} == {
        name: field.default for name, field in EmbeddedEngineConfig.model_fields.items() if name != "type"
    }


def test_options_reach_the_engine_in_both_spellings(run, model_path, monkeypatch):
    seen = []

    async def remember(setup, *_):
        seen.append(setup)

    monkeypatch.setattr("radix_rl.cli.serve._serve", remember)
    ours = ["--kv-cache-tokens", "320", "--chunked-prefill-tokens", "64", "--prefix-cache-tokens", "0"]
    sglangs = ["--max-total-tokens", "320", "--chunked-prefill-size", "64", "--disable-radix-cache"]
    rest = ["--device", "cpu", "--bfloat16-products", "native", "--experts-implementation", "eager"]

    assert run(model_path, *ours, *rest) is None
    assert run("--model-path", model_path, *sglangs, *rest) is None

    assert seen[0] == seen[1]
    assert (seen[0].kv_cache_tokens, seen[0].chunked_prefill_tokens) == (320, 64)
    assert (seen[0].bfloat16_products, seen[0].experts_implementation) == ("native", "eager")


def test_a_model_is_named_once(run, model_path):
    assert "expected MODEL or --model-path, got neither" in str(run())
    assert "expected MODEL or --model-path, got 'a' and 'b'" in str(run("a", "--model-path", "b"))


@pytest.mark.parametrize("variable", ["RADIX_RL_API_KEY", "RADIX_RL_ADMIN_API_KEY"])
def test_a_key_from_an_empty_variable_does_not_open_the_server(run, model_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "")
    assert f"{variable}: expected a key, got an empty one" in str(run(model_path, "--device", "cpu"))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.2", "::", "somewhere.example"])
def test_a_server_that_others_reach_needs_a_key_or_leave_to_be_open(run, model_path, monkeypatch, host):
    served = []

    async def remember(*arguments):
        served.append(arguments)

    monkeypatch.setattr("radix_rl.cli.serve._serve", remember)
    command = [model_path, "--device", "cpu", "--host", host]

    assert "--allow-unauthenticated" in str(run(*command))
    assert served == []
    for leave in (["--allow-unauthenticated"], ["--api-key", "k"], ["--admin-api-key", "k"]):
        assert run(*command, *leave) is None
    assert run(model_path, "--device", "cpu", "--host", "::1") is None
    assert len(served) == 4


def test_a_path_that_is_no_model_names_what_to_give(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absent = tmp_path / "absent"
    assert f"{str(absent)!r} is not a folder; give one" in str(run(str(absent)))
    assert "download it first: hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in str(
        run("Qwen/Qwen3-0.6B")
    )
    assert "has no config.json; give a folder" in str(run(str(tmp_path)))
    (tmp_path / "small-q8.gguf").touch()
    assert "name one by --gguf-file small-q8.gguf" in str(run(str(tmp_path)))
    assert "--gguf-file small-q8.gguf" in str(run(str(tmp_path / "small-q8.gguf")))
    for step in (9, 10):
        model = tmp_path / "run" / "checkpoints" / f"step-{step}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    assert f"whose model is {str(model)!r}" in str(run(str(model.parent)))
    assert f"whose newest model is {str(model)!r}" in str(run(str(tmp_path / "run")))


def test_a_port_that_is_taken_is_a_clear_error_before_the_model_is_loaded(run, model_path):
    taken = bind("127.0.0.1", 0)
    taken.listen()
    try:
        error = run(model_path, "--device", "cpu", "--port", str(taken.getsockname()[1]))
    finally:
        taken.close()

    assert isinstance(error, ConfigurationError)
    assert "choose another --port" in str(error)


def test_a_port_that_cannot_be_is_a_clear_error(run, model_path):
    error = run(model_path, "--device", "cpu", "--port", "99999")

    assert isinstance(error, ConfigurationError)
    assert "choose another --port" in str(error)


def test_keys_never_reach_what_server_info_tells():
    from radix_rl.cli.serve import _server_settings
    from radix_rl.engines.embedded.config import EmbeddedEngineSetup

    settings = _server_settings(
        EmbeddedEngineSetup(model_path="/m"),
        served_model_name="m",
        api_key="secret-1",
        admin_api_key="secret-2",
    )

    assert "secret" not in str(settings.launch_arguments)
