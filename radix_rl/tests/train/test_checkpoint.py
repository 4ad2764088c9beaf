"""What a checkpoint holds, and which one a run goes on with."""

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from radix_rl.errors import CheckpointError, ConfigurationError
from radix_rl.testing import tiny_model
from radix_rl.train import checkpoint
from radix_rl.train.checkpoint import RunState, find_checkpoint, restore_worker, save_checkpoint, try_saving
from radix_rl.train.worker import PolicyWorker


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """Of steps 2, 9 and 10, and what a crash left of another."""
    for step in (2, 9, 10):
        (tmp_path / f"step-{step}").mkdir()
        state = RunState(step=step, next_problem=0, optimizer_steps=step)
        (tmp_path / f"step-{step}/state.json").write_bytes(msgspec.json.encode(state))
    (tmp_path / ".unfinished-step-11").mkdir()
    return tmp_path


def test_the_latest_is_the_one_of_the_highest_step(checkpoints):
    assert find_checkpoint("latest", checkpoints) == checkpoints / "step-10"
    assert find_checkpoint("latest", checkpoints / "absent") is None
    assert find_checkpoint("never", checkpoints) is None


def test_going_back_in_a_directory_with_later_checkpoints_is_refused(checkpoints, tmp_path):
    with pytest.raises(ConfigurationError, match=r"is at step 2, .* holds later ones \(step-9, step-10\)"):
        find_checkpoint(checkpoints / "step-2", checkpoints)
    assert find_checkpoint(checkpoints / "step-10", checkpoints) == checkpoints / "step-10"
    assert find_checkpoint(checkpoints / "step-2", tmp_path / "elsewhere") == checkpoints / "step-2"


class RunsCode:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_the_random_state_and_the_optimizer_survive(make_config, make_model, tmp_path):
    config = make_config()
    worker = PolicyWorker(config, make_model())
    state = RunState(step=1, next_problem=2, optimizer_steps=3)
    path = save_checkpoint(tmp_path / "checkpoints", worker, state, keep=1, tokenizer_from=tmp_path)
    expected = (random.random(), np.random.rand(), torch.rand(1))
    restore_worker(path, worker)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert worker.optimizer_steps == 3


@pytest.mark.parametrize(
    "refused", ["model/config.json", "model/model.safetensors", "trainer.pt", "state.json"]
)
def test_a_checkpoint_that_does_not_fit_on_the_disk_is_named_and_leaves_nothing(
    refused, make_config, make_model, tmp_path, files_grow_no_larger_than
):
    worker = PolicyWorker(make_config(), make_model())
    folder = tmp_path / "checkpoints"
    kept = save_checkpoint(
        folder,
        worker,
        RunState(step=1, next_problem=0, optimizer_steps=1),
        keep=2,
        tokenizer_from=tmp_path,
    )
    state = RunState(step=2, next_problem=0, optimizer_steps=2)
    size = (kept / refused).stat().st_size
    with (
        files_grow_no_larger_than(size - 1),
        pytest.raises(CheckpointError, match=r"^checkpoint .*/step-2 could not be written: .*File too large"),
    ):
        save_checkpoint(folder, worker, state, keep=2, tokenizer_from=tmp_path)
    assert list(folder.iterdir()) == [kept]
    save_checkpoint(folder, worker, state, keep=2, tokenizer_from=tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]


def test_an_error_that_is_not_the_disk_s_stays_itself(make_config, make_model, tmp_path, monkeypatch):
    worker = PolicyWorker(make_config(), make_model())
    monkeypatch.setattr(worker.model, "save_pretrained", lambda *_, **__: {}["absent"])
    state = RunState(step=1, next_problem=0, optimizer_steps=1)
    with pytest.raises(KeyError, match="absent"):
        save_checkpoint(tmp_path / "checkpoints", worker, state, keep=1, tokenizer_from=tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_was_written_last_stays_whatever_its_step(make_config, make_model, tmp_path):
    worker = PolicyWorker(make_config(), make_model())
    for step in (4, 6, 2, 3):
        state = RunState(step=step, next_problem=0, optimizer_steps=step)
        save_checkpoint(tmp_path / "checkpoints", worker, state, keep=2, tokenizer_from=tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-3"]


@pytest.mark.parametrize("settings", [{"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "top_k": 7}])
def test_a_generation_configuration_is_kept_as_it_was(settings, make_config, make_model, tmp_path):
    source = tmp_path / "source"
    model = make_model()
    model.save_pretrained(source)
    text = json.dumps(settings | {"eos_token_id": [1, 2]})
    (source / "generation_config.json").write_text(text)
    worker = PolicyWorker(make_config(), AutoModelForCausalLM.from_pretrained(source))

    try_saving(worker.model, tmp_path / "run", files_from=source)
    assert list((tmp_path / "run").iterdir()) == []
    state = RunState(step=1, next_problem=0, optimizer_steps=1)
    path = save_checkpoint(tmp_path / "run", worker, state, keep=1, tokenizer_from=source)

    assert (path / "model" / "generation_config.json").read_text() == text
    assert AutoModelForCausalLM.from_pretrained(path / "model").generation_config.eos_token_id == [1, 2]


def test_a_folder_without_a_generation_configuration_makes_a_checkpoint_without_one(
    make_config, make_model, tmp_path
):
    worker = PolicyWorker(make_config(), make_model())
    state = RunState(step=1, next_problem=0, optimizer_steps=1)
    path = save_checkpoint(tmp_path / "run", worker, state, keep=1, tokenizer_from=tmp_path)
    assert not (path / "model" / "generation_config.json").exists()


def test_a_model_that_cannot_be_saved_is_told_before_it_is_trained(make_model, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("refused")

    model = make_model()
    monkeypatch.setattr(model.config, "save_pretrained", refuse)
    with pytest.raises(ConfigurationError, match=r"a checkpoint of .* could not be saved: refused"):
        try_saving(model, tmp_path / "run", files_from=tmp_path)
    assert list((tmp_path / "run").iterdir()) == []


def test_tied_weights_that_share_no_memory_are_saved_once(make_config, tmp_path, monkeypatch):
    """As they come when they were gathered from several ranks."""
    model = tiny_model("llama", tie_word_embeddings=True)
    worker = PolicyWorker(make_config(train={"replay_routed_experts": False}), model)
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in gathered
    monkeypatch.setattr(checkpoint, "get_model_state_dict", lambda *_, **__: gathered)
    path = save_checkpoint(
        tmp_path / "checkpoints",
        worker,
        RunState(step=1, next_problem=0, optimizer_steps=1),
        keep=1,
        tokenizer_from=tmp_path,
    )
    saved = load_file(path / "model" / "model.safetensors")
    assert saved.keys() == gathered.keys() - {"lm_head.weight"}


def test_a_checkpoint_runs_no_code(checkpoints, make_config, make_model, monkeypatch):
    monkeypatch.chdir(checkpoints)
    torch.save({"optimizer": RunsCode()}, checkpoints / "step-10" / "trainer.pt")
    with pytest.raises(ConfigurationError, match=r"trainer\.pt holds no optimizer"):
        restore_worker(checkpoints / "step-10", PolicyWorker(make_config(), make_model()))
    assert not Path("ran").exists()


@pytest.mark.parametrize("content", [{}, [1], None])
def test_a_file_that_is_no_run_s_state_is_a_clear_error(content, checkpoints, make_config, make_model):
    path = checkpoints / "step-10" / "trainer.pt"
    if content is None:
        path.touch()
    else:
        torch.save(content, path)
    with pytest.raises(ConfigurationError, match=r"trainer\.pt holds no optimizer"):
        restore_worker(checkpoints / "step-10", PolicyWorker(make_config(), make_model()))
