"""Weights by the names and shapes that a checkpoint of the model has.

transformers joins some tensors of a checkpoint when it loads one, such as the experts of a layer; servers
that load weights by their own rules, such as SGLang, want them as the checkpoint has them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from radix_rl.errors import ConfigurationError


class CheckpointNames:
    """For one architecture; holds no weights."""

    def __init__(self, model_path: Path) -> None:
        """Raises ConfigurationError for a folder that describes no causal language model."""
        try:
            config = AutoConfig.from_pretrained(model_path)
            with torch.device("meta"):
                self._model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"model.path: {str(model_path)!r} describes no model that transformers knows: {error}"
            ) from error

    def __call__(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as the checkpoint's one or more; views where that is possible."""
        for name, tensor in named_tensors:
            yield from revert_weight_conversion(self._model, {name: tensor}).items()

    def expected(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a whole checkpoint has, on the meta device; tied tensors once."""
        yield from self(self._model.named_parameters())
