"""`train` as a library: the output directory it accepts, and what it leaves there."""

import pytest

from radix_rl.config import parse_config
from radix_rl.errors import ConfigurationError, DataError
from radix_rl.train import run
from radix_rl.train.run import train


@pytest.fixture
def config(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return parse_config(
        {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "environment": {"type": "arithmetic"},
            "train": {"steps": 1},
        },
        source="test",
    )


@pytest.fixture
def fails_to_start(monkeypatch):
    async def fail(*_, **__):
        raise DataError("train.jsonl, line 3: broken")

    monkeypatch.setattr(run, "build_and_run", fail)


def test_a_run_that_failed_to_start_can_be_started_again(config, fails_to_start):
    for _ in range(2):
        with pytest.raises(DataError, match="line 3"):
            train(config)


def test_a_launch_that_is_refused_leaves_no_output_directory(config):
    refused = config.model_copy(update={"model": config.model.model_copy(update={"path": "/absent"})})
    refused = parse_config(refused.model_dump(mode="json"), source="test")
    with pytest.raises(ConfigurationError, match=r"model\.path"):
        train(refused)
    assert not config.output_dir.exists()


@pytest.mark.parametrize("what", ["metrics.jsonl", "checkpoints/step-3/state.json"])
def test_a_directory_that_holds_a_run_is_refused_and_kept_as_it_was(config, fails_to_start, what):
    path = config.output_dir / what
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 1}\n')
    with pytest.raises(ConfigurationError, match=r"output_dir: .* holds a run already"):
        train(config)
    assert [found for found in config.output_dir.rglob("*") if found.is_file()] == [path]
    assert path.read_text() == '{"step": 1}\n'


def test_a_run_that_failed_after_its_first_evaluation_can_be_started_again(config, fails_to_start):
    config.output_dir.mkdir()
    (config.output_dir / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    with pytest.raises(DataError, match="line 3"):
        train(config)


def test_resuming_a_finished_run_says_so_and_changes_nothing(config, caplog):
    checkpoint = config.output_dir / "checkpoints/step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"step": 1, "next_problem": 8, "optimizer_steps": 1}')
    (config.output_dir / "summary.json").write_text('{"steps": 1.0, "objects_left": 0}')
    before = {path: path.read_bytes() for path in config.output_dir.rglob("*.json")}
    again = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"resume": "latest"})}
    )
    outcome = train(again)
    assert f"nothing to do: {checkpoint} is at step 1 of train.steps = 1" in caplog.text
    assert outcome.state.step == 1
    assert outcome.summary == {"steps": 1.0, "objects_left": 0}
    assert (outcome.objects_left, outcome.written) == (0, ())
    files = [path for path in config.output_dir.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path: path.read_bytes() for path in files} == before


def test_an_output_directory_that_cannot_be_written_is_a_clear_error(config, fails_to_start):
    config.output_dir.write_text("a file")
    with pytest.raises(ConfigurationError, match=r"output_dir: cannot write into .*run': File exists"):
        train(config)


def test_a_run_without_any_environment_is_told_before_anything_is_written(config):
    without = config.model_copy(update={"environment": None})
    with pytest.raises(
        ConfigurationError, match=r"environment: none is configured; .* pass one to train\(\)"
    ):
        train(without)
    assert not config.output_dir.exists()
