"""The command that an interrupted run names."""

from pathlib import Path

import pytest

from radix_rl.cli.going_on import how_to_go_on
from radix_rl.config import parse_config


@pytest.fixture
def make_settings(tmp_path):
    def make(resume="never"):
        table = {
            "output_dir": str(tmp_path / "my run"),
            "model": {"path": str(tmp_path)},
            "train": {"steps": 9},
            "checkpoint": {"resume": resume},
        }
        return parse_config(table, source="test")

    return make


def test_the_newest_checkpoint_is_gone_on_with_and_overrides_are_kept(make_settings, tmp_path):
    for step in (2, 4):
        (tmp_path / f"my run/checkpoints/step-{step}").mkdir(parents=True)
    overrides = ["output_dir=my run", "checkpoint.resume=/elsewhere/step-1"]
    assert how_to_go_on(make_settings(), Path("a b.toml"), overrides) == (
        f"{tmp_path}/my run/checkpoints/step-4 is kept; go on with\n"
        "  radix-rl train 'a b.toml' 'output_dir=my run' checkpoint.resume=latest"
    )


def test_without_a_checkpoint_of_its_own_a_run_starts_where_it_started(make_settings):
    overrides = ["checkpoint.resume=/elsewhere/step-1"]
    assert how_to_go_on(make_settings("/elsewhere/step-1"), Path("run.toml"), overrides) == (
        "no checkpoint was saved after /elsewhere/step-1; go on with\n"
        "  radix-rl train run.toml checkpoint.resume=/elsewhere/step-1"
    )
    assert how_to_go_on(make_settings(), Path("run.toml"), []) == (
        "no checkpoint was saved, so that it begins again; go on with\n"
        "  radix-rl train run.toml checkpoint.resume=latest"
    )
