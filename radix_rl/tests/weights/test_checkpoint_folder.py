"""A folder that is no whole checkpoint is refused in words that name what is wrong."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_rl.engines.embedded.forward.model import load_checkpoint
from radix_rl.errors import ConfigurationError
from radix_rl.testing import tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    tiny_model("qwen3_moe").save_pretrained(path)
    return path


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    shutil.copy(whole / "config.json", path)
    return path


def without(whole, part):
    tensors = load_file(whole / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize(
    "part", ["layers.1.mlp.experts.2.gate_proj.weight", "layers.0.self_attn.q_norm.weight"]
)
def test_an_absent_tensor_is_named(whole, folder, part):
    save_file(without(whole, part), folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigurationError, match=rf"lacks .*model\.{part}".replace("weight", "")):
        load_checkpoint(folder, None)


def test_a_pickle_that_holds_more_than_tensors_is_refused_without_advice_to_run_it(folder):
    class Runs:
        def __reduce__(self):
            return os.system, ("true",)

    torch.save({"a": Runs()}, folder / "pytorch_model.bin")

    with pytest.raises(
        ConfigurationError, match=r"pickle that holds more than tensors.*safetensors"
    ) as caught:
        load_checkpoint(folder, None)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/tmp/outside.safetensors", "sub/x.safetensors", ".."]
)
def test_an_index_may_name_files_of_its_own_folder_only(whole, folder, file):
    shutil.copy(whole / "model.safetensors", folder.parent / "outside.safetensors")
    names = load_file(whole / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigurationError, match="must be files of its own folder") as caught:
        load_checkpoint(folder, None)
    assert repr(file) in str(caught.value)


def test_an_index_within_its_folder_is_read(whole, folder):
    shutil.copy(whole / "model.safetensors", folder / "part.safetensors")
    names = load_file(whole / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert load_checkpoint(folder, None).num_parameters() > 0


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused_by_name(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)

    with pytest.raises(ConfigurationError, match="no index with a weight_map"):
        load_checkpoint(folder, None)
