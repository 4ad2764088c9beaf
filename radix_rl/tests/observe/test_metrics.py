"""metrics.jsonl and its readers; trackers; progress."""

import io
import json
import logging
import math
import re
import sys
import time
import warnings
from typing import get_args

import pytest
from rich.console import Console

from radix_rl.config import parse_config
from radix_rl.config.observe import TrackerConfig
from radix_rl.errors import ConfigurationError, DataError
from radix_rl.observe.metrics import read_metrics
from radix_rl.observe.progress import SHOWN, RunProgress
from radix_rl.observe.quiet import quiet_transformers
from radix_rl.observe.tolerance import Tolerance
from radix_rl.observe.trackers import create_trackers
from radix_rl.observe.trackers.factory import TRACKERS
from radix_rl.observe.trackers.json_lines import JsonLinesTracker


@pytest.fixture
def configure(tmp_path):
    def build(*trackers):
        table = {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path)},
            "environment": {"type": "arithmetic"},
            "train": {"steps": 1},
            "observe": {"trackers": list(trackers)},
        }
        return parse_config(table, source="test")

    return build


def test_each_step_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLinesTracker(path) as tracker:
        tracker.log(0, {"a": 1.5})
        assert read_metrics(path) == [{"step": 0, "a": 1.5}]
        tracker.log(1, {"a": 2.0})
        assert read_metrics(path) == [{"step": 0, "a": 1.5}, {"step": 1, "a": 2.0}]


def test_values_that_are_not_finite_become_null_and_are_told(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with JsonLinesTracker(path) as tracker, caplog.at_level(logging.WARNING):
        tracker.log(3, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert json.loads(path.read_text()) == {"step": 3, "a": None, "b": None, "c": 1.0}
    assert "a, b" in caplog.text


def test_a_resumed_run_goes_on_after_a_torn_line_and_its_steps_count_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0,"a":1}\n{"step":1,"a":2}\n{"step":2,"a"')
    assert [record["step"] for record in read_metrics(path)] == [0, 1]
    with JsonLinesTracker(path) as tracker:
        tracker.log(1, {"a": 5.0})
        tracker.log(2, {"a": 6.0})
    assert read_metrics(path) == [{"step": 0, "a": 1}, {"step": 1, "a": 5.0}, {"step": 2, "a": 6.0}]


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"a": 1}', '{"step": "x"}'])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step":0}}\n{line}\n{{"step":1}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_every_run_has_json_lines_and_the_configured_trackers_besides(configure):
    config = configure({"type": "tensorboard"})
    with create_trackers(config, Tolerance()) as trackers:
        trackers.log(1, {"train/loss": 0.5})
    assert read_metrics(config.output_dir / "metrics.jsonl") == [{"step": 1, "train/loss": 0.5}]
    assert list((config.output_dir / "tensorboard").glob("events.out.tfevents.*"))


def test_a_line_that_did_not_fit_is_taken_back_and_the_next_one_is_whole(tmp_path, files_grow_no_larger_than):
    path = tmp_path / "metrics.jsonl"
    with JsonLinesTracker(path) as tracker:
        tracker.log(0, {"a": 1.5})
        named = re.escape(f"File too large: '{path}'")
        with files_grow_no_larger_than(path.stat().st_size + 5), pytest.raises(OSError, match=named):
            tracker.log(1, {"a": 2.0})
        tracker.log(2, {"a": 2.5})
    assert read_metrics(path) == [{"step": 0, "a": 1.5}, {"step": 2, "a": 2.5}]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_one_warning_a_tracker_and_ends_nothing(configure, caplog, files_grow_no_larger_than):
    config = configure({"type": "tensorboard"})
    with create_trackers(config, Tolerance()) as trackers, caplog.at_level(logging.WARNING):
        trackers.log(1, {"train/loss": 0.5})
        largest = max(path.stat().st_size for path in config.output_dir.rglob("*") if path.is_file())
        with files_grow_no_larger_than(largest):
            for step in range(2, 50):
                trackers.log(step, {"train/loss": 0.5})
                time.sleep(
                    0.002
                )  # TensorBoard writes in a thread of its own, and tells of a failure afterwards
    warned = [message.split(" failed")[0] for message in caplog.messages if "the run goes on" in message]
    assert sorted(warned) == ["JsonLinesTracker", "TensorboardTracker"]


def test_metrics_that_cannot_be_opened_name_their_file(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        ConfigurationError, match=r"output_dir: cannot write .*metrics\.jsonl': Is a directory"
    ):
        JsonLinesTracker(tmp_path / "metrics.jsonl")


def test_every_tracker_that_can_be_configured_is_registered():
    sections = get_args(get_args(TrackerConfig)[0])
    assert {section.model_fields["type"].default for section in sections} == set(TRACKERS)


def test_a_tracker_that_is_not_installed_names_its_extra(configure, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'radix-rl\[wandb\]'"):
        create_trackers(configure({"type": "wandb", "project": "p"}), Tolerance())


def test_off_a_terminal_progress_is_a_line_a_step_with_what_that_step_measured():
    text = io.StringIO()
    with RunProgress("demo", 2, console=Console(file=text, width=40)) as progress:
        progress.update(0, {"eval/accuracy": 0.25})
        progress.update(1, {"rollout/reward_mean": 0.25, "eval/accuracy": 0.5})
        progress.update(2, {"rollout/reward_mean": 0.75})
    before, *lines = text.getvalue().splitlines()
    assert before == "demo: step 0/2  accuracy 25.0%"
    assert len(lines) == 2
    assert lines[0].startswith("demo: step 1/2  reward 0.250  accuracy 50.0%  s/step 0.")
    assert lines[1].startswith("demo: step 2/2  reward 0.750  s/step 0.")
    assert "\x1b" not in text.getvalue()


def test_on_a_terminal_progress_is_a_bar_whose_older_figures_name_their_step():
    text = io.StringIO()
    console = Console(file=text, width=160, force_terminal=True)
    with RunProgress("demo", 4, first_step=1, console=console) as progress:
        progress.update(2, {"rollout/reward_mean": 0.25, "eval/accuracy": 0.5})
        progress.update(3, {"rollout/reward_mean": 0.75})
    assert "3/4" in text.getvalue()
    assert "reward 0.750  accuracy 50.0% (step 2)" in text.getvalue()
    assert "demo: step" not in text.getvalue()


def test_elapsed_and_remaining_time_keep_their_width_at_80_columns():
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True, color_system=None)
    with RunProgress("a-run-with-a-rather-long-name", 10_000, console=console) as progress:
        progress.update(9_999, dict.fromkeys((metric for _, metric, _ in SHOWN), 1234.5))
    bar = [line for line in text.getvalue().splitlines() if "9999" in line]
    times = re.compile(r"9999/10000\s+\d:\d\d:\d\d left\s+[\d-]:[\d-]{2}:[\d-]{2}")
    assert any(times.search(line) for line in bar), bar


def test_transformers_is_quiet_within_the_block_alone():
    from transformers.utils import logging as hf_logging

    hf_logging.enable_progress_bar()
    before = hf_logging.get_verbosity()
    with quiet_transformers():
        assert not hf_logging.is_progress_bar_enabled()
        assert hf_logging.get_verbosity() >= logging.ERROR
        with warnings.catch_warnings(record=True) as shown:
            for module in ("transformers.utils.generic", "radix_rl.engines.base", "mine"):
                warnings.warn_explicit("later", FutureWarning, "file.py", 1, module=module)
        assert len(shown) == 1
    assert hf_logging.is_progress_bar_enabled()
    assert hf_logging.get_verbosity() == before
