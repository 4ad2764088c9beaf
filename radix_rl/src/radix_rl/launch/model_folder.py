"""Whether a folder holds a model, and what to name in its place."""

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_folder_fault(path: Path, *, gguf_file: str | None = None, takes_gguf: bool = False) -> str | None:
    """What is wrong with `path` as the folder of a Hugging Face model, with the remedy; None: nothing.

    `gguf_file`: the file to look for in place of config.json. `takes_gguf`: whether one could be named.
    """
    needed = gguf_file or "config.json"
    if (path / needed).is_file():
        return None
    if path.is_file():
        remedy = f"give its folder {str(path.parent)!r}"
        if path.suffix == ".gguf" and takes_gguf:
            remedy += f" and --gguf-file {path.name}"
        return f"{str(path)!r} is a file; {remedy}"
    if not path.is_dir():
        if _HUB_NAME.fullmatch(str(path)) and not path.parent.is_dir():
            return (
                f"{str(path)!r} is not a folder; if it is a name on the model hub, download it first: "
                f"hf download {path} --local-dir models/{path.name}"
            )
        return f"{str(path)!r} is not a folder; give one that holds a Hugging Face model"
    return f"{str(path)!r} has no {needed}; {_remedy(path, takes_gguf)}"


def _remedy(path: Path, takes_gguf: bool) -> str:
    if (path / "model" / "config.json").is_file():
        return f"it is a checkpoint of a run, whose model is {str(path / 'model')!r}"
    if checkpoints := sorted((path / "checkpoints").glob("step-*/model/config.json")):
        newest = max(checkpoints, key=lambda file: int(file.parent.parent.name.removeprefix("step-")))
        return f"it is the output_dir of a run, whose newest model is {str(newest.parent)!r}"
    if names := sorted(file.name for file in path.glob("*.gguf")):
        if takes_gguf:
            return f"it has GGUF files: name one by --gguf-file {names[0]}"
        return (
            f"it has only GGUF files such as {names[0]!r}, which can be served (radix-rl serve {path} "
            f"--gguf-file {names[0]}) but not trained; give a folder with config.json and safetensors"
        )
    return "give a folder that holds a Hugging Face model"
