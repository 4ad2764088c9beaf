"""What cannot work is refused before anything starts, with the setting and the remedy."""

import pytest

from radix_rl.config import RunConfig, parse_config
from radix_rl.errors import ConfigurationError
from radix_rl.launch.checks import check_engine, check_launch
from radix_rl.launch.engines import build_engine, engines_of
from radix_rl.launch.store import new_key_prefix, open_run_store
from radix_transfer_plugins.keys import check_prefix


@pytest.fixture
def configure(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def build(**tables) -> RunConfig:
        table = {
            "output_dir": str(tmp_path / "run-1"),
            "model": {"path": str(tmp_path)},
            "environment": {"type": "arithmetic"},
            "train": {"steps": 1},
        }
        for name, values in tables.items():
            table[name] = table.get(name, {}) | values
        return parse_config(table, source="test")

    return build


REMOTE = {"engine": {"type": "remote", "urls": ["http://10.0.0.7:30000"]}, "weights": {"transport": "http"}}
LOCAL = {"engine": {"type": "remote", "urls": ["http://127.0.0.1:30000"]}, "weights": {"transport": "http"}}


def test_one_machine_with_the_defaults_can_be_launched(configure):
    check_launch(configure())


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"model": {"path": "/absent"}}, r"model\.path: '/absent' is not a folder"),
        (
            {"output_store": {"backend": "memory"}, "train": {"num_ranks": 2}},
            r"train\.num_ranks is 2.*shared_memory",
        ),
        (REMOTE | {"output_store": {"key_prefix": "a"}}, r"'http://10\.0\.0\.7:30000'.*\"mooncake\""),
        (LOCAL, r"output_store\.key_prefix: required"),
        ({"output_store": {"backend": "mooncake"}}, r"master_server_address: required"),
        (
            REMOTE
            | {
                "output_store": {
                    "backend": "mooncake",
                    "key_prefix": "a",
                    "config": {"master_server_address": "127.0.0.1:50051"},
                }
            },
            r"master_server_address: '127\.0\.0\.1' cannot be reached",
        ),
        ({"train": {"device": "tpuu"}}, r"train\.device: expected a torch device such as \"cpu\".*'tpuu'"),
        ({"engine": {"device": "cuda:99"}}, r"engine\.device: 'cuda:99' is not on this machine"),
        (LOCAL | {"weights": {"transport": "memory"}}, r"weights\.transport: \"memory\" needs.*=\"http\""),
        (
            LOCAL | {"output_store": {"backend": "memory"}},
            r"output_store\.backend: \"memory\" cannot be reached by a remote engine",
        ),
        ({"train": {"minibatches": 300}}, r"train\.minibatches is 300 but a step has only 256 samples"),
        (
            {"engine": {"kv_cache_tokens": 16}},
            r"rollout\.sampling\.max_new_tokens is 128.*no room.*engine\.kv_cache_tokens 16; raise",
        ),
        (
            {
                "engine": {"context_length": 200},
                "eval": {"every_steps": 1, "sampling": {"max_new_tokens": 200}},
            },
            r"eval\.sampling\.max_new_tokens is 200.*engine\.context_length 200",
        ),
        ({"weights": {"transport": "http"}}, r"weights\.transport: \"http\" needs engine\.type \"remote\""),
    ],
)
def test_each_refusal_names_setting_and_remedy(configure, tables, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        check_launch(configure(**tables))


def test_a_model_folder_without_config_is_refused(configure, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        check_launch(configure(model={"path": str(empty)}))


def test_all_faults_are_listed_at_once(configure):
    config = configure(model={"path": "/absent"}, weights={"transport": "http"})
    with pytest.raises(ConfigurationError, match=r"model\.path(.|\n)*weights\.transport"):
        check_launch(config)


def test_a_store_that_nobody_uses_is_neither_checked_nor_opened(configure):
    config = configure(
        output_store={"backend": "mooncake"}, train={"steps": 1, "replay_routed_experts": False}
    )
    check_launch(config)
    assert open_run_store(config) is None


def test_the_engine_writes_where_the_trainer_reads(configure):
    config = configure(output_store={"backend": "memory"})
    run_store = open_run_store(config)
    assert run_store is not None
    engine = build_engine(config, run_store)
    assert engine.capabilities.output_store == "memory"
    assert engine.capabilities.routed_experts
    assert run_store.settings.backend_config["key_prefix"].startswith("run-1-")
    assert run_store.objects_left() == 0
    check_engine(config, engine)
    run_store.close()


@pytest.mark.parametrize("name", ["my run", "études", "日本", "x" * 250, "a/../b"])
def test_any_directory_name_makes_a_key_prefix(name):
    assert check_prefix(new_key_prefix(name)).endswith("/output-store")


def test_prefixes_of_runs_started_together_differ():
    assert len({new_key_prefix("run") for _ in range(100)}) == 100


def test_several_servers_are_one_pool(configure, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    config = configure(
        engine={"type": "remote", "urls": ["http://a:1", "http://b:1"], "api_key_env": "THE_KEY"},
        weights={"transport": "http"},
        output_store={"enabled": False},
    )
    assert [engine.base_url for engine in engines_of(build_engine(config, None))] == [
        "http://a:1",
        "http://b:1",
    ]


def test_a_key_that_is_not_set_is_named(configure, monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    config = configure(
        engine={"type": "remote", "urls": ["http://a:1"], "admin_api_key_env": "THE_KEY"},
        weights={"transport": "http"},
    )
    with pytest.raises(ConfigurationError, match=r"engine\.admin_api_key_env.*'THE_KEY'.*not set"):
        check_launch(config)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_one_sample_a_prompt_needs_an_advantage_that_compares_no_samples(configure, advantage):
    one = {"samples_per_prompt": 1}
    with pytest.raises(ConfigurationError, match=r'every advantage would be 0.*advantage="reinforce_pp"'):
        check_launch(configure(rollout=one, algorithm={"advantage": advantage}))
    check_launch(configure(rollout=one, algorithm={"advantage": "reinforce_pp"}))
