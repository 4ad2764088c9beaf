"""Checkpoints: complete or absent.

A directory holds the model in Hugging Face format and all a run needs to go on.
"""

import logging
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import GenerationConfig, PreTrainedModel

from radix_rl.errors import CheckpointError, ConfigurationError
from radix_rl.train.worker import PolicyWorker

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-\d+")
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stands between two steps."""

    step: int
    """Steps done."""
    next_problem: int
    """Index of the first training problem that was not used."""
    optimizer_steps: int


def save_checkpoint(
    directory: Path, worker: PolicyWorker, state: RunState, *, keep: int, tokenizer_from: Path
) -> Path:
    """Write `directory/step-N` and keep `keep` checkpoints: this one and those written last.

    Every rank calls it; rank 0 writes.

    Everything is written under another name, flushed to disk and renamed at the end: a crash leaves the
    checkpoints that were there. Raises CheckpointError where the disk has no room or cannot be written; then
    nothing of the new one is left.
    """
    target = directory / f"step-{state.step}"
    weights = get_model_state_dict(worker.model, options=_FULL)
    optimizer = get_optimizer_state_dict(worker.model, worker.optimizer, options=_FULL)
    if worker.ranks.index != 0:
        return target
    unfinished = directory / f".unfinished-{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        save_model(worker.model, unfinished / "model", weights, files_from=tokenizer_from)
        # A file of Python's: torch's own hides why the disk refused.
        with (unfinished / "trainer.pt").open("wb") as file:
            torch.save({"optimizer": optimizer, "random": _random_state()}, file)
        (unfinished / "state.json").write_bytes(msgspec.json.encode(state))
        _flush(unfinished)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if (reason := _disk_fault(error)) is None:
            raise
        raise CheckpointError(
            f"checkpoint {target} could not be written: {reason}; earlier checkpoints are kept"
        ) from error
    if target.exists():
        # A crash in between leaves both whole, under other names.
        replaced = directory / f".replaced-{target.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
        os.replace(unfinished, target)
        shutil.rmtree(replaced)
    else:
        os.replace(unfinished, target)
    others = sorted((path for path in _checkpoints(directory) if path != target), key=_written_at_ns)
    for old in others[: len(others) + 1 - keep]:
        shutil.rmtree(old)
    return target


def save_model(model: PreTrainedModel, folder: Path, weights: dict[str, Any], *, files_from: Path) -> None:
    """Write configuration and weights; generation configuration and tokenizer are the files of `files_from`.

    transformers reads generation configurations that it refuses to write.
    """
    generation_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=_untied(model, weights))
    finally:
        model.generation_config = generation_config
    (folder / "generation_config.json").unlink(missing_ok=True)
    for pattern in _COPIED_FILES:
        for path in files_from.glob(pattern):
            if path.suffix != ".safetensors":
                shutil.copy2(path, folder / path.name)


def try_saving(model: PreTrainedModel, output_dir: Path, *, files_from: Path) -> None:
    """Try at a run's start whether its checkpoints can be saved.

    Writes and removes all that a checkpoint has besides weights. Raises ConfigurationError.
    """
    folder = output_dir / ".trial-save"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        save_model(model, folder, {}, files_from=files_from)
    except Exception as error:
        # Configurations may hold anything, and so may what transformers raises at it.
        raise ConfigurationError(
            f"model.path: a checkpoint of {str(files_from)!r} could not be saved: {error}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _untied(model: PreTrainedModel, weights: dict[str, Any]) -> dict[str, Any]:
    """The weights without those that the model ties to others.

    transformers tells them by their shared memory, which weights gathered from several ranks do not have.
    """
    tied = model.all_tied_weights_keys
    return {name: weight for name, weight in weights.items() if tied.get(name) not in weights}


def find_checkpoint(resume: str | Path, directory: Path) -> Path | None:
    """The checkpoint that the setting `checkpoint.resume` means.

    Raises ConfigurationError for a path without one, and for one that later checkpoints of `directory` would
    overrule.
    """
    if resume == "never":
        return None
    if resume == "latest":
        return next(reversed(_checkpoints(directory)), None)
    path = Path(resume)
    if not (path / "state.json").is_file():
        raise ConfigurationError(
            f"checkpoint.resume: expected a checkpoint directory with state.json, got {str(path)!r}"
        )
    step = read_state(path).step
    later = [other for other in _checkpoints(directory) if _step_of(other) > step]
    if later:
        # They would count as the newest: the ones written from here on would be dropped for them.
        raise ConfigurationError(
            f"checkpoint.resume: {str(path)!r} is at step {step}, but {str(directory)!r} holds later "
            f"ones ({', '.join(other.name for other in later)}); remove them or name another output_dir"
        )
    return path


def read_state(checkpoint: Path) -> RunState:
    try:
        return msgspec.json.decode((checkpoint / "state.json").read_bytes(), type=RunState)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{checkpoint / 'state.json'} is not a run's state: {error}") from error


def restore_worker(checkpoint: Path, worker: PolicyWorker) -> None:
    """Optimizer, schedule and random state; the worker's model was loaded from `<checkpoint>/model` before.

    Raises ConfigurationError for a file that is not ours; it runs no code of the file's.
    """
    path = checkpoint / "trainer.pt"
    try:
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"{path} holds no optimizer and random state of a run: {error}") from error
    if not isinstance(saved, dict) or not {"optimizer", "random"} <= saved.keys():
        raise ConfigurationError(f"{path} holds no optimizer and random state of a run")
    set_optimizer_state_dict(worker.model, worker.optimizer, saved["optimizer"], options=_FULL)
    worker.optimizer_steps = read_state(checkpoint).optimizer_steps
    _set_random_state(saved["random"])


def _random_state() -> dict[str, Any]:
    """Of plain Python types and tensors, so that loading it runs no code of the file's."""
    algorithm, words, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.asarray(words)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    algorithm, words, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((algorithm, words.numpy(), *rest))
    torch.set_rng_state(state["torch"])


def _disk_fault(error: BaseException) -> str | None:
    """Why the disk refused; None for an error that has another cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
        if isinstance(cause, SafetensorError) and "I/O error" in str(cause):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _flush(directory: Path) -> None:
    """Wait until the disk has all below `directory`: a rename may reach it before the data does."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)


def _written_at_ns(checkpoint: Path) -> tuple[int, int]:
    """When it was written, and its step where the clock does not tell two apart."""
    return (checkpoint / "state.json").stat().st_mtime_ns, _step_of(checkpoint)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
