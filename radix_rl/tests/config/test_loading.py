"""Configurations from TOML and overrides, and what a mistake is answered with."""

from pathlib import Path
from types import NoneType
from typing import get_args

import pytest

from radix_rl.config import RunConfig, load_config, parse_config, to_toml
from radix_rl.config.base import parse_bytes
from radix_rl.config.engine import RemoteEngineConfig
from radix_rl.config.tree import settings_below
from radix_rl.errors import ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((REPOSITORY / "examples").rglob("*.toml"))

MINIMAL = """
output_dir = "runs/x"
[model]
path = "m"
[environment]
type = "arithmetic"
[train]
steps = 3
"""


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def fault(path, *overrides):
    with pytest.raises(ConfigurationError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_example_parses(path):
    assert load_config(path).train.steps >= 1


def test_settings_have_the_types_of_the_tree(minimal):
    config = load_config(minimal)
    assert (config.output_dir, config.train.steps, config.engine.type) == (Path("runs/x"), 3, "embedded")


def test_overrides_are_typed_and_later_ones_win(minimal):
    config = load_config(
        minimal,
        [
            "train.steps=5",
            "train.steps=7",
            "optimizer.betas=[0.8, 0.9]",
            "output_store.read_buffer_bytes=1gb",
            "output_store.config.master_server_address=10.0.0.1:50051",
            "output_store.config.local_buffer_size=4096",
            "model.path=/models/a b",
            "eval.sampling.stop=['END']",
            "train.replay_routed_experts=false",
        ],
    )
    assert config.train.steps == 7
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.output_store.read_buffer_bytes == 1 << 30
    assert config.output_store.config == {
        "master_server_address": "10.0.0.1:50051",
        "local_buffer_size": 4096,
    }
    assert config.model.path == Path("/models/a b")
    assert config.eval.sampling.stop == ("END",)
    assert config.train.replay_routed_experts is False


def test_choosing_another_variant_drops_the_settings_of_the_one_before(minimal):
    minimal.write_text(MINIMAL + '[engine]\ntype = "embedded"\nkv_cache_tokens = 99\n')
    config = load_config(
        minimal, ["engine.type=remote", 'engine.urls=["http://a:1"]', "weights.transport=http"]
    )
    assert config.engine == RemoteEngineConfig(urls=("http://a:1",))


def test_an_override_of_the_same_variant_keeps_its_settings(minimal):
    minimal.write_text(MINIMAL + '[engine]\ntype = "embedded"\nkv_cache_tokens = 99\n')
    assert load_config(minimal, ["engine.type=embedded"]).engine.kv_cache_tokens == 99


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "engine.kv_cache_tokens=8",
            "engine.kv_cache_tokens: Input should be greater than or equal to 16, got 8",
        ),
        ("output_store.key_prefix='a b'", "output_store.key_prefix: expected at most 256 characters as in"),
        ("engine.urls=x", "engine.urls: unknown setting"),
        ("optimizer.lr=inf", "optimizer.lr: Input should be a finite number, got inf"),
        ("rollout.sampling.stop=['']", "rollout.sampling.stop.0: String should have at least 1 character"),
        (
            "train.device=tpuu",
            'train.device: expected a torch device such as "cpu" or "cuda:0", got \'tpuu\'',
        ),
        (
            "engine={type='remote', urls=['http://::1:8000']}",
            "engine.urls: expected a base URL such as \"http://10.0.0.1:30000\", got 'http://::1:8000'; an "
            "IPv6 address is put in brackets: http://[::1]:8000",
        ),
        (
            "engine={type='remote', urls=['http://a:1', 'http://a:1/']}",
            "engine.urls: expected each server once, got 'http://a:1' more than once",
        ),
        ("rollout.n=4", "rollout.n: unknown setting; did you mean rollout.samples_per_prompt?"),
        ("group_size=4", "group_size: unknown setting; did you mean rollout.samples_per_prompt?"),
        ("algorithm.adv_estimator=grpo", "did you mean algorithm.advantage?"),
        ("algorithm.kl_coef=0.1", "did you mean algorithm.kl_coefficient?"),
        ("ckpt.interval=5", "ckpt: unknown setting; did you mean checkpoint.every_steps?"),
        ("train.lr=1e-6", "train.lr: unknown setting; did you mean optimizer.lr?"),
        ("actor.optim.lr=1e-6", "actor: unknown setting; did you mean optimizer.lr?"),
        ("rollout.max-tokens=5", "did you mean rollout.sampling.max_new_tokens?"),
        ("rollout.samples-per-prompt=5", "did you mean samples_per_prompt?"),
        ("train.stepps=3", "train.stepps: unknown setting; did you mean steps?"),
        ("engine.dtyp=float32", "engine.dtyp: unknown setting; did you mean dtype"),
        (
            "rollout.sampling.temprature=1",
            "rollout.sampling.temprature: unknown setting; did you mean temperature?",
        ),
        ("algorithm.loss.qqq=1", "algorithm.loss.qqq: unknown setting; known here: clip_high, clip_low"),
        ("trian.steps=3", "trian: unknown setting; did you mean train?"),
        ("train.steps=many", "train.steps: Input should be a valid integer"),
        ("train.steps=0", "train.steps: Input should be greater than or equal to 1, got 0"),
        (
            "engine.dtype=float64",
            "engine.dtype: Input should be 'auto', 'bfloat16', 'float16' or 'float32', got 'float64'",
        ),
        ("weights.bucket_bytes=12 parsecs", "weights.bucket_bytes: expected a size such as 1048576"),
        ("engine.type=embeded", "engine.type: expected 'embedded', 'remote', got 'embeded'"),
        (
            "environment.type=arithmetics",
            "environment.type: expected 'arithmetic', 'gsm8k', got 'arithmetics'",
        ),
        (
            "observe.trackers=[{project='x'}]",
            "observe.trackers.0.type: required, but not set; known: tensorboard, wandb",
        ),
        ("optimizer.betas=[0.9, 1.0]", "optimizer: betas: expected two numbers in [0, 1), got [0.9, 1.0]"),
        ("rollout.sampling.top_k=0", "rollout.sampling: top_k: expected -1"),
        (
            "algorithm.correction={type='masked', low=3}",
            "algorithm.correction: expected low <= high, got low 3.0 and high 2.0",
        ),
        ("rollout.sampling.temperature=0", "rollout: sampling.temperature is 0 (greedy)"),
        ("train", "expected an override key.path=value, got 'train'"),
        ("=3", "expected an override key.path=value, got '=3'"),
        ("train.steps.x=3", "train.steps is a value, not a table"),
    ],
)
def test_a_mistake_is_answered_with_its_path_and_the_remedy(override, expected, minimal):
    assert expected in fault(minimal, override)


def test_all_mistakes_are_told_at_once(minimal):
    message = fault(minimal, "train.stepps=1", "seed=-1")
    assert "2 invalid setting(s)" in message
    assert "train.stepps" in message
    assert "seed" in message


def test_a_missing_setting_is_named(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    message = fault(path)
    assert all(f"{name}: required, but not set" in message for name in ("output_dir", "model", "train"))


def test_unreadable_and_broken_files_are_named(tmp_path):
    assert "cannot read configuration file" in fault(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [1,")
    assert "broken.toml is not valid TOML" in fault(broken)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_saved_example_is_the_same_configuration(path, tmp_path):
    config = load_config(path)
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(config), encoding="utf-8")
    assert load_config(saved) == config


def test_a_saved_configuration_keeps_every_kind_of_value(minimal, tmp_path):
    config = load_config(
        minimal,
        [
            'output_dir="runs/é \\"x\\" \\u007f"',
            "engine={type='remote', urls=['http://a:1'], api_key_env='K'}",
            "output_store.config={'a b'={c=[1, 2.5, true]}, d='\\\\'}",
            "observe.trackers=[{type='wandb', project='p'}, {type='tensorboard'}]",
            "optimizer.lr=1e-30",
            'rollout.sampling.stop=["\\n"]',
        ],
    )
    saved = tmp_path / "saved.toml"
    saved.write_text(to_toml(config), encoding="utf-8")
    assert load_config(saved) == config
    assert config.output_dir == Path('runs/é "x" \x7f')


def test_what_is_unset_by_default_can_be_left_out_of_a_file():
    for path, field in settings_below(RunConfig):
        assert NoneType not in get_args(field.annotation) or field.default is None, path


def test_an_override_takes_a_setting_away(minimal):
    minimal.write_text(MINIMAL + "[rollout]\nmax_sample_tokens = 9\nsamples_per_prompt = 3\n")
    config = load_config(minimal, ["rollout.max_sample_tokens=unset", "rollout.samples_per_prompt=unset"])
    assert (config.rollout.max_sample_tokens, config.rollout.samples_per_prompt) == (None, 8)
    assert load_config(minimal, ["eval=unset", "output_dir='unset'"]).output_dir == Path("unset")


def test_paths_begin_at_home_where_they_say_so(minimal, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config(minimal, ["output_dir=~/runs/x", "checkpoint.resume=~/runs/y"])
    assert (config.output_dir, config.checkpoint.resume) == (
        Path("/home/somebody/runs/x"),
        Path("/home/somebody/runs/y"),
    )


def test_a_byte_order_mark_before_a_configuration_is_skipped(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL, encoding="utf-8-sig")
    assert load_config(path).train.steps == 3


def test_a_configuration_survives_json(minimal):
    config = load_config(minimal)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_configuration_cannot_be_changed(minimal):
    with pytest.raises(ValueError, match="frozen"):
        load_config(minimal).train.steps = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("256mb", 256 << 20), ("1.5 GiB", 3 << 29), ("2K", 2048), ("1tb", 1 << 40), (7, 7)],
)
def test_sizes_are_powers_of_1024(text, expected):
    assert parse_bytes(text) == expected


def test_a_correction_needs_the_trainers_own_old_values():
    table = {
        "output_dir": "x",
        "model": {"path": "m"},
        "environment": {"type": "arithmetic"},
        "train": {"steps": 1},
        "algorithm": {"old_logprobs": "rollout", "correction": {"type": "truncated"}},
    }
    with pytest.raises(ConfigurationError, match="corrects twice"):
        parse_config(table, source="test")
