"""The command line: help, and mistakes answered with one message and an exit code."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

RADIX_RL = [sys.executable, "-c", "from radix_rl.cli.main import main; main()"]

CONFIG = """
output_dir = "{folder}/run"
[model]
path = "{folder}/absent"
[environment]
type = "arithmetic"
[train]
steps = 3
"""


def run(*arguments):
    return subprocess.run([*RADIX_RL, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def test_the_version_is_told():
    result = run("--version")
    assert (result.returncode, result.stdout.strip()) == (0, f"radix-rl {metadata.version('radix-rl')}")


def test_help_names_every_command():
    result = run("--help")
    assert result.returncode == 0
    for command in ("train", "serve", "gateway", "store", "report", "config"):
        assert command in result.stdout


def test_help_is_quick_because_it_loads_no_model_library():
    code = (
        "import sys; import radix_rl.cli.main; assert not {'torch', 'transformers', 'matplotlib', "
        "'uvicorn'} & set(sys.modules), 'heavy import'"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_mistake_in_the_configuration_is_one_message_without_a_traceback(config):
    result = run("train", str(config), "train.stepps=4")
    assert result.returncode == 2
    assert "train.stepps: unknown setting; did you mean steps?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_in_the_configuration_is_told_before_a_model_library_is_loaded(config):
    code = (
        "import sys; from radix_rl.cli.main import app; from radix_rl.errors import ConfigurationError\n"
        f"try: app(['train', {str(config)!r}, 'train.stepps=4'], standalone_mode=False)\n"
        "except ConfigurationError: sys.exit(len({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("setting", ["engine.kv_cache_tokens=8", "optimizer.lr=nan", "engine.max_tokens=3"])
def test_a_wrong_setting_is_one_line_and_exit_status_2(config, setting):
    result = run("train", str(config), setting)
    assert result.returncode == 2
    assert setting.partition("=")[0] in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3


def test_a_model_path_that_is_none_is_told_before_anything_starts(config, tmp_path):
    result = run("train", str(config))
    assert result.returncode == 2
    assert "model.path" in result.stderr
    assert str(tmp_path / "absent") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_report_without_metrics_is_a_clear_error(tmp_path):
    result = run("report", str(tmp_path))
    assert result.returncode == 2
    assert "cannot read metrics" in result.stderr


def test_show_prints_what_a_run_would_have(config):
    printed = run("config", "show", str(config), "train.steps=8").stdout
    shown = tomllib.loads(printed)
    assert shown["train"]["steps"] == 8
    assert shown["rollout"]["samples_per_prompt"] == 8


def test_the_schema_explains_every_setting():
    schema = json.loads(run("config", "schema").stdout)
    assert schema["$defs"]["TrainConfig"]["properties"]["minibatches"]["description"]


def test_store_commands_are_the_stores_own():
    result = run("store", "stat", "--backend", "memory", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["objects"] == 0
    assert "--older-than" in run("store", "gc", "--help").stdout
