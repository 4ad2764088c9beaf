"""A run that stops and goes on ends where an uninterrupted one does."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radix_rl.errors import ConfigurationError
from radix_rl.train.checkpoint import RunState
from radix_rl.train.run import train


def weights(path):
    return AutoModelForCausalLM.from_pretrained(path / "model").state_dict()


def comparable(metrics):
    """What two equal runs share: a reference names the run's directory, and so differs in length."""
    apart = ("time/", "weights/", "rollout/response_bytes_store")
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(apart) and not name.endswith("tokens_per_second")
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_is_one_run_and_resuming_equals_no_interruption(dtype, make_config, environment, tmp_path):
    settings = {
        # Fewer than a step has: who follows whom into a batch shows in the rounding of bfloat16.
        "engine": {"dtype": dtype, "max_running_requests": 5, "prefix_cache_tokens": 256},
        "rollout": {"max_concurrent_requests": 3, "prompts_per_step": 4, "sampling": {"max_new_tokens": 12}},
        "train": {"steps": 3, "minibatches": 2},
        "optimizer": {"lr": 3e-3, "warmup_steps": 4, "schedule": "cosine"},
        "checkpoint": {"every_steps": 1, "keep": 3},
        "eval": {"every_steps": 1, "num_problems": 8, "sampling": {"max_new_tokens": 12, "temperature": 0.0}},
    }
    logged: dict[str, dict] = {}

    def run(name, **changes):
        records = logged.setdefault(name, {})

        def log(step, metrics):
            records[step] = metrics
            if name == "stopped" and step == 2 and not changes:
                raise KeyError("the machine went away")

        config = make_config(output_dir=str(tmp_path / name), **{**settings, **changes})
        return train(config, log, environment)

    run("whole")
    run("again")
    with pytest.raises(KeyError, match="went away"):
        run("stopped")
    outcome = run("stopped", checkpoint={"resume": "latest", "keep": 1})

    assert outcome.state == RunState(step=3, next_problem=12, optimizer_steps=6)
    for name in ("again", "stopped"):
        for step, metrics in logged["whole"].items():
            assert comparable(logged[name][step]) == comparable(metrics), (name, step)
    expected = weights(tmp_path / "whole" / "checkpoints" / "step-3")
    for other in ("again", "stopped"):
        found = weights(tmp_path / other / "checkpoints" / "step-3")
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (other, name)
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["step-3"]


def test_a_checkpoint_is_a_hugging_face_model_with_its_tokenizer(make_config, environment):
    config = make_config(train={"steps": 1})
    train(config, lambda step, metrics: None, environment)
    path = config.output_dir / "checkpoints" / "step-1"
    assert AutoTokenizer.from_pretrained(path / "model").eos_token_id == 1
    assert msgspec.json.decode((path / "state.json").read_bytes())["step"] == 1


def test_resuming_from_a_path_without_a_checkpoint_is_refused(make_config, environment, tmp_path):
    config = make_config(checkpoint={"resume": str(tmp_path)})
    with pytest.raises(ConfigurationError, match=r"checkpoint\.resume: expected a checkpoint directory"):
        train(config, lambda step, metrics: None, environment)
