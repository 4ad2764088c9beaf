"""To servers, SGLang's own or ours, by a checkpoint in a folder that they see under the same path."""

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError
from safetensors.torch import save_file

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.concurrency import in_thread_to_end, torch_in_thread
from radix_rl.engines.base import Engine, WeightNames
from radix_rl.engines.fleet import on_all
from radix_rl.engines.weight_protocols import TakesCheckpoints
from radix_rl.errors import ConfigurationError, WeightUpdateError
from radix_rl.weights.transports.base import WeightTransport

_COPIED = ("config.json", "generation_config.json")


class DiskTransport(WeightTransport[TakesCheckpoints]):
    """Writes one safetensors file a bucket, with the tensor names of a checkpoint.

    The folder gets its name when it is whole, and the one before goes when the engines have read it.
    """

    name: ClassVar[str] = "disk"
    needs: ClassVar[type] = TakesCheckpoints

    def __init__(self, directory: Path, model_path: Path) -> None:
        """Versions are folders below `directory`; `model_path` is the model whose configuration they get."""
        self._directory = directory.absolute()
        self._model_path = model_path
        self._writing = self._directory / "writing"
        self._weight_map: dict[str, str] = {}
        self._num_files = 0
        self._total_bytes = 0
        self._last: Path | None = None

    def weight_names(self, engines: Sequence[Engine]) -> WeightNames:
        return "checkpoint"

    async def prepare(self, engines: Sequence[TakesCheckpoints]) -> None:
        await asyncio.to_thread(self._start)

    async def send(self, engines: Sequence[TakesCheckpoints], bucket: WeightBucket) -> int:
        await torch_in_thread(self._write, bucket)
        return bucket.buffer.numel()

    async def finish(self, engines: Sequence[TakesCheckpoints], version: str) -> None:
        path = await asyncio.to_thread(self._seal, version)

        try:
            await on_all(engines, lambda engine: engine.load_weights(path, version))
        except BaseException:
            await in_thread_to_end(shutil.rmtree, path, ignore_errors=True)
            raise
        last, self._last = self._last, path
        if last is not None and last != path:
            await asyncio.to_thread(shutil.rmtree, last, ignore_errors=True)

    async def abandon(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._writing, ignore_errors=True)

    def _start(self) -> None:
        shutil.rmtree(self._writing, ignore_errors=True)
        try:
            self._writing.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"weights.directory: cannot write to {str(self._directory)!r}: {error.strerror}"
            ) from error
        self._weight_map, self._num_files, self._total_bytes = {}, 0, 0

    def _write(self, bucket: WeightBucket) -> None:
        self._num_files += 1
        name = f"model-{self._num_files:05d}.safetensors"
        tensors = {name: tensor.cpu().clone() for name, tensor in bucket.tensors()}
        try:
            save_file(tensors, self._writing / name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"weights.directory: {self._writing / name}: {error}") from error
        self._weight_map |= dict.fromkeys(tensors, name)
        self._total_bytes += bucket.buffer.numel()

    def _seal(self, version: str) -> Path:
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
        path = self._directory / f"version-{version}"
        try:
            (self._writing / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
            for name in _COPIED:
                if (self._model_path / name).is_file():
                    shutil.copyfile(self._model_path / name, self._writing / name)
            # What a run before this one left under that name is replaced.
            shutil.rmtree(path, ignore_errors=True)
            os.replace(self._writing, path)
        except OSError as error:
            raise WeightUpdateError(f"weights.directory: {path}: {error}") from error
        return path
