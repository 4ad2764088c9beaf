"""Whatever fails, the run ends with the reason, and nothing stays in the store."""

import multiprocessing
import os
import shutil
import signal

import pytest
import torch

from radix_rl.errors import CheckpointError, DataError, RewardError, TrainingError
from radix_rl.launch.store import open_run_store
from radix_rl.observe.metrics import read_metrics
from radix_rl.train import rank_trainer as rank
from radix_rl.train.distributed import DistributedTrainer
from radix_rl.train.run import train
from radix_rl.train.worker import PolicyWorker

PREFIX = "failures/output-store"


@pytest.fixture
def config_and_count(make_config):
    """A configuration with a key prefix of its own, and a function that counts the objects below it."""
    config = make_config(output_store={"key_prefix": PREFIX})

    def count():
        run_store = open_run_store(config)
        assert run_store is not None
        try:
            return run_store.objects_left()
        finally:
            run_store.close()

    return config, count


def test_a_step_that_raises_frees_its_objects(config_and_count, environment, monkeypatch):
    config, count = config_and_count
    seen = []

    def fail(self, minibatches, *, measure_without_replay=False):
        seen.append(count())
        raise TrainingError("the optimizer fell over")

    monkeypatch.setattr(PolicyWorker, "train_step", fail)
    with pytest.raises(TrainingError, match="fell over"):
        train(config, lambda step, metrics: None, environment)
    assert seen == [16]
    assert count() == 0


def test_a_read_that_fails_frees_its_objects(config_and_count, environment, monkeypatch):
    config, count = config_and_count

    def fail(*arguments, **options):
        raise ConnectionError("the store went away")

    monkeypatch.setattr(rank, "assemble_replay", fail)
    with pytest.raises(ConnectionError, match="went away"):
        train(config, lambda step, metrics: None, environment)
    assert count() == 0


def test_a_score_that_raises_frees_the_objects_of_every_sample(config_and_count, environment):
    config, count = config_and_count
    rewards = config.rollout.rewards.model_copy(update={"max_failed": 3})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"rewards": rewards})})

    class Broken(type(environment)):
        def score(self, problem, output_ids, text):
            if problem.problem_id == "p2":
                raise DataError("problem p2 has no answer")
            return 1.0

    with pytest.raises(RewardError, match="p2"):
        train(config, lambda step, metrics: None, Broken())
    assert count() == 0


def test_a_child_rank_that_is_killed_ends_the_run_and_frees_its_objects(config_and_count, environment):
    config, count = config_and_count
    config = config.model_copy(update={"train": config.train.model_copy(update={"num_ranks": 2})})

    def kill_the_child(step, metrics):
        (child,) = multiprocessing.active_children()
        assert child.name == "trainer-rank-1"
        os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(TrainingError, match="trainer-rank-1 failed:\nthe process died without a word"):
        train(config, kill_the_child, environment)
    assert multiprocessing.active_children() == []
    assert not torch.distributed.is_initialized()
    assert count() == 0


def test_an_exception_in_a_child_rank_arrives_with_its_traceback(make_config):
    trainer = DistributedTrainer(make_config(train={"num_ranks": 2}), None, None)
    try:
        for _, pipe in trainer._children:
            pipe.send(("step", [(b"\xc1", [], [])], False))
        with pytest.raises(
            TrainingError, match=r"(?s)trainer-rank-1 failed:\nTraceback .*msgspec\.DecodeError"
        ):
            list(trainer.named_weights())
    finally:
        trainer.close()
    assert multiprocessing.active_children() == []


def test_dynamic_sampling_replaces_equal_groups_and_frees_them(make_config, environment):
    class EveryOtherIsHopeless(type(environment)):
        def score(self, problem, output_ids, text):
            hopeless = int(problem.problem_id[1:]) % 2
            return 0.0 if hopeless else super().score(problem, output_ids, text)

    config = make_config(rollout={"dynamic_sampling": {"enabled": True, "max_rounds": 5}}, train={"steps": 1})
    logged = []
    outcome = train(config, lambda step, metrics: logged.append(metrics), EveryOtherIsHopeless())
    # 4 groups of the first 4, 6 and 7 problems: 0, 2 of the first round, 4 of the second, 6 of the third.
    assert outcome.state.next_problem == 7
    assert logged[0]["rollout/reward_mean"] > 0
    assert outcome.objects_left == 0


@pytest.fixture
def disk_refuses(monkeypatch):
    """`disk_refuses(step)`: the checkpoint of that step is written by all ranks and then refused."""

    def refuse(step):
        real = rank.save_checkpoint

        def save(directory, worker, state, **options):
            path = real(directory, worker, state, **options)
            if state.step == step:
                shutil.rmtree(path)
                raise CheckpointError(f"checkpoint {path} could not be written: No space left on device")
            return path

        monkeypatch.setattr(rank, "save_checkpoint", save)

    return refuse


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_that_the_disk_refuses_is_a_warning(
    num_ranks, make_config, environment, disk_refuses, caplog
):
    config = make_config(train={"num_ranks": num_ranks}, checkpoint={"every_steps": 1})
    disk_refuses(1)
    outcome = train(config, environment=environment)
    folder = config.output_dir / "checkpoints"
    assert outcome.state.step == 2
    assert [path.name for path in folder.iterdir()] == ["step-2"]
    assert f"{folder}/step-1 could not be written: No space left on device; the run goes on" in caplog.text


def test_the_last_checkpoint_that_the_disk_refuses_ends_the_run_with_its_metrics(
    make_config, environment, disk_refuses
):
    config = make_config(checkpoint={"every_steps": 1})
    disk_refuses(2)
    with pytest.raises(CheckpointError, match="step-2 could not be written"):
        train(config, environment=environment)
    assert [path.name for path in (config.output_dir / "checkpoints").iterdir()] == ["step-1"]
    assert [record["step"] for record in read_metrics(config.output_dir / "metrics.jsonl")] == [1, 2]
