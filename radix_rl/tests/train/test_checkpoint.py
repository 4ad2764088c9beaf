"""Which checkpoint a run goes on with."""

from pathlib import Path

import msgspec
import pytest

from radix_rl.errors import ConfigurationError
from radix_rl.train.checkpoint import RunState, find_checkpoint


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
