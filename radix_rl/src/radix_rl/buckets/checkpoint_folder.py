"""What is wrong with a folder of weights that transformers does not load, or should not."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from radix_rl.buckets.checkpoint_names import CheckpointNames
from radix_rl.errors import ConfigurationError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_index(path: Path) -> None:
    """Refuse an index that names files outside of its folder. Raises ConfigurationError."""
    for name in _INDEXES:
        if not (path / name).is_file():
            continue
        try:
            files = set(json.loads((path / name).read_bytes())["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(
                f"model_path: {str(path / name)!r} is no index with a weight_map: {error!r}"
            ) from error
        for file in sorted(map(str, files)):
            if PurePosixPath(file).name != file or file == ".." or "\\" in file:
                raise ConfigurationError(
                    f"model_path: {str(path / name)!r} names {file!r}, but weights must be files of its own "
                    "folder"
                )


def load_failure(path: Path, error: BaseException) -> str:
    """Why transformers could not load the folder, in words that a user can act on."""
    if isinstance(error, pickle.UnpicklingError):
        return (
            "its weights are a pickle that holds more than tensors, which is refused since reading it would "
            "run code of whoever made it; save them as safetensors (safe_serialization=True)"
        )
    # An expert that is absent is told as a conversion that failed, without a name.
    missing = sorted(_missing(path)) if "conversion" in str(error) else []
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return f"the checkpoint lacks {listed}"
    return str(error) or type(error).__name__


def _missing(path: Path) -> set[str]:
    """Tensors that a checkpoint of the model has and the folder's safetensors do not; empty if unknown."""
    try:
        found = set(_names(path))
        return {name for name, _ in CheckpointNames(path).expected()} - found
    except (OSError, SafetensorError, ConfigurationError, RuntimeError):
        return set()


def _names(path: Path) -> Iterator[str]:
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            yield from opened.keys()
