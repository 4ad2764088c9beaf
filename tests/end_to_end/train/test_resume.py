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


def test_resuming_equals_no_interruption(make_config, environment, tmp_path):
    settings = {
        # One request at a time: which requests share a batch depends on arrival, and rounding on the batch.
        "engine": {"max_running_requests": 1},
        "train": {"steps": 3, "minibatches": 2},
        "optimizer": {"lr": 3e-3, "warmup_steps": 4, "schedule": "cosine"},
        "checkpoint": {"every_steps": 1, "keep": 3},
    }
    logged: dict[str, dict] = {}
    for name in ("whole", "stopped"):
        records = logged[name] = {}
        config = make_config(output_dir=str(tmp_path / name), **settings)

        def log(step, metrics, records=records, name=name):
            records[step] = metrics
            if name == "stopped" and step == 2:
                raise KeyError("the machine went away")

        if name == "whole":
            train(config, log, environment)
        else:
            with pytest.raises(KeyError, match="went away"):
                train(config, log, environment)
    resumed = make_config(
        output_dir=str(tmp_path / "stopped"), **{**settings, "checkpoint": {"resume": "latest", "keep": 1}}
    )
    outcome = train(resumed, lambda step, metrics: logged["stopped"].update({step: metrics}), environment)

    assert outcome.state == RunState(step=3, next_problem=12, optimizer_steps=6)
    for name, value in logged["whole"][3].items():
        # A reference names the run's directory, and so differs in length.
        if not name.startswith(("time/", "weights/", "rollout/response_bytes_store")):
            assert logged["stopped"][3][name] == value, name
    expected = weights(tmp_path / "whole" / "checkpoints" / "step-3")
    found = weights(tmp_path / "stopped" / "checkpoints" / "step-3")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
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
