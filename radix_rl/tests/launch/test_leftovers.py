"""What a killed run left is found by its output directory, and one directory is one run's."""

import numpy as np
import pytest

from radix_rl.cli.store import _with_run
from radix_rl.config import parse_config, to_toml
from radix_rl.errors import ConfigurationError
from radix_rl.launch.lock import locked
from radix_rl.launch.store import key_prefix_before, open_run_store, remove_left, with_key_prefix
from radix_transfer_plugins import TokenOutputStash


@pytest.fixture
def config(tmp_path):
    table = {
        "output_dir": str(tmp_path / "my run"),
        "model": {"path": str(tmp_path)},
        "environment": {"type": "arithmetic"},
        "train": {"steps": 1},
        "output_store": {"backend": "memory", "config": {"name": "leftovers"}},
    }
    return parse_config(table, source="test")


def save(config):
    config.output_dir.mkdir(exist_ok=True)
    (config.output_dir / "config.toml").write_text(to_toml(config))


def test_a_run_in_the_same_directory_finds_and_removes_what_the_one_before_left(config):
    first = with_key_prefix(config)
    save(first)
    killed = open_run_store(first)
    assert killed is not None
    killed.store.put_many([TokenOutputStash(routed_experts=np.zeros((2, 1, 1), dtype=np.int32))])

    again = with_key_prefix(config)
    assert again.output_store.key_prefix == key_prefix_before(config.output_dir)
    assert again == first
    assert killed.objects_left() == 1
    remove_left(killed)
    assert killed.objects_left() == 0
    killed.close()


def test_the_store_tool_takes_a_run_for_its_store_and_prefix(config):
    run = with_key_prefix(config)
    save(run)
    folder = str(config.output_dir)
    assert _with_run(["gc", "--run", folder, "--delete"]) == [
        *("gc", "--backend", "memory", "--key-prefix", run.output_store.key_prefix),
        *("--config", '{"name": "leftovers"}', "--delete"),
    ]
    assert _with_run(["stat", "--backend", "memory"]) == ["stat", "--backend", "memory"]
    with pytest.raises(ConfigurationError, match="cannot read configuration file"):
        _with_run(["gc", "--run", folder + "-absent"])
    with pytest.raises(ConfigurationError, match="expected the output directory"):
        _with_run(["gc", "--run"])


def test_a_directory_that_a_run_holds_is_refused_to_another(tmp_path):
    with (
        locked(tmp_path / "run"),
        pytest.raises(ConfigurationError, match="another run is writing into"),
        locked(tmp_path / "run"),
    ):
        raise AssertionError
    with locked(tmp_path / "run"):
        pass


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="output_dir: cannot write into"), locked(tmp_path / "file"):
        raise AssertionError
