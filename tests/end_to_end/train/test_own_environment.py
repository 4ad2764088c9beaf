"""A run that is started from Python with an environment of one's own leaves all that the command leaves."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec

from radix_rl.config import load_config
from radix_rl.launch.store import with_key_prefix
from radix_rl.observe.metrics import read_metrics
from radix_rl.train.run import train


def test_a_run_from_python_writes_and_shows_what_the_command_does(make_config, environment, capsys):
    config = make_config(
        train={"steps": 2},
        eval={"every_steps": 1, "sampling": {"max_new_tokens": 12}},
        observe={"trackers": [{"type": "tensorboard"}]},
    )
    outcome = train(config, environment=environment)

    folder = config.output_dir
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert 0 < records[2]["rollout/reward_mean"] < 1
    saved = load_config(folder / "config.toml")
    assert saved == with_key_prefix(config)
    assert saved.output_store.key_prefix == outcome.summary["key_prefix"]
    assert msgspec.json.decode((folder / "summary.json").read_bytes()) == outcome.summary
    assert outcome.summary["steps"] == 2
    assert outcome.summary["objects_left"] == 0
    assert outcome.summary["accuracy_after"] == records[2]["eval/accuracy"]
    assert outcome.written == (folder / "summary.json", folder / "report.html")
    assert "<svg" in (folder / "report.html").read_text()
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    # Nothing of transformers' own bars and warnings between the run's lines.
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == f"run: stored outputs have the key prefix {outcome.summary['key_prefix']}"
    assert [line.partition("  ")[0] for line in lines] == [f"run: step {step}/2" for step in (0, 1, 2)]
    assert "reward" in lines[2]


def test_progress_can_be_switched_off(make_config, environment, capsys):
    train(make_config(train={"steps": 1}), environment=environment, show_progress=False)
    assert "step 1/1" not in capsys.readouterr().err


def test_the_script_of_the_guide_runs_with_two_ranks(model_path, tmp_path):
    guide = (Path(__file__).parents[3] / "docs/training.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    (tmp_path / "own.py").write_text(script)
    (tmp_path / "run.toml").write_text(
        f"""
        output_dir = "run"
        model = {{ path = "{model_path}" }}
        engine = {{ dtype = "float32", context_length = 64, kv_cache_tokens = 2048 }}
        output_store = {{ backend = "shared_memory" }}
        rollout = {{ prompts_per_step = 2, samples_per_prompt = 2, sampling = {{ max_new_tokens = 4 }} }}
        train = {{ steps = 1, num_ranks = 2, num_threads = 1 }}
        """
    )
    command = [sys.executable, "own.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("1 {'steps': 1.0")
    assert read_metrics(tmp_path / "run/metrics.jsonl")[0]["train/tokens"] > 0
