"""What a run saves when it is cancelled, by where it was."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from radix_rl.errors import TrainingError
from radix_rl.testing import wait_for
from radix_rl.train import loop
from radix_rl.train.checkpoint import RunState
from radix_rl.train.loop import run_steps


class HeldTrainer:
    """Each step waits for `go`; what is saved is remembered."""

    optimizer_steps = 0

    def __init__(self):
        self.entered, self.go = threading.Event(), threading.Event()
        self.error = None
        self.saved = []

    def step(self, minibatches, *, measure_without_replay=False):
        self.entered.set()
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        self.optimizer_steps += 1
        return {"time/train_s": 1.0}

    def named_weights(self):
        return iter(())

    def save(self, state):
        self.saved.append(state.step)


@pytest.fixture
def make_parts(make_config, monkeypatch):
    """A run whose rollouts after `rollouts` never end."""

    def make(rollouts, **checkpoint):
        generated = []

        async def collect(parts, state, samples):
            generated.append(state.step)
            if len(generated) > rollouts:
                trainer.entered.set()
                await asyncio.sleep(60)
            return loop.Rollout(next_problem=state.next_problem + 1, groups=1)

        async def sync(version, weights):
            return {}

        monkeypatch.setattr(loop, "collect_samples", collect)
        monkeypatch.setattr(loop, "rollout_metrics", lambda samples: {})
        monkeypatch.setattr(loop, "plan_step", lambda config, samples, step: [])
        trainer = HeldTrainer()
        config = make_config(train={"steps": 9}, checkpoint=checkpoint)
        logged = []
        return SimpleNamespace(
            config=config,
            trainer=trainer,
            synchronizer=SimpleNamespace(sync=sync),
            run_store=None,
            no_signal=SimpleNamespace(after_plan=lambda step, plan: None),
            log=lambda step, metrics: logged.append(step),
            logged=logged,
        )

    return make


async def cancelled(parts, *, go_on):
    """Run from step 4 on, and cancel when the trainer or an endless rollout has begun."""
    task = asyncio.ensure_future(run_steps(parts, RunState(step=4, next_problem=0, optimizer_steps=0)))
    await asyncio.to_thread(parts.trainer.entered.wait, 10)
    task.cancel()
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_step_in_training_is_finished_saved_and_logged(make_parts):
    parts = make_parts(rollouts=9, save_on_interrupt=True)
    await cancelled(parts, go_on=parts.trainer.go)
    assert (parts.trainer.saved, parts.logged) == ([5], [5])


async def test_in_a_rollout_the_step_before_is_saved_once(make_parts):
    parts = make_parts(rollouts=1, save_on_interrupt=True)
    parts.trainer.go.set()
    task = asyncio.ensure_future(run_steps(parts, RunState(step=4, next_problem=0, optimizer_steps=0)))
    await wait_for(lambda: parts.logged == [5], "step 5 is logged")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (parts.trainer.saved, parts.logged) == ([5], [5])


@pytest.mark.parametrize("checkpoint", [{"save_on_interrupt": True}, {}])
async def test_without_a_new_step_or_the_setting_nothing_is_saved(checkpoint, make_parts):
    parts = make_parts(rollouts=1 if not checkpoint else 0, **checkpoint)
    await cancelled(parts, go_on=parts.trainer.go)
    assert parts.trainer.saved == []


async def test_a_step_that_fails_while_an_interrupt_waits_is_not_saved(make_parts, caplog):
    parts = make_parts(rollouts=9, save_on_interrupt=True)
    parts.trainer.error = TrainingError("the optimizer fell over")
    await cancelled(parts, go_on=parts.trainer.go)
    assert (parts.trainer.saved, parts.logged) == ([], [])
    assert "no checkpoint is saved at this interrupt: the trainer failed within a step" in caplog.text
