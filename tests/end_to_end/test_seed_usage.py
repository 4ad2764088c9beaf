"""The output store as a user uses it: a server process, `curl`, and a reader in a process of its own."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash, create_backend
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake

_LAYERS, _TOP_K, _EXPERTS = 3, 2, 8


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A random Qwen3-MoE with a tokenizer of one token a byte."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=_EXPERTS,
        num_experts_per_tok=_TOP_K,
        max_position_embeddings=512,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mooncake_master():
    with LocalMooncake(segment_bytes=64 << 20) as master:
        yield master


@pytest.fixture(scope="module", params=["shared_memory", "mooncake"])
def store_config(request):
    """Backend name, and its configuration as JSON text."""
    prefix = f"run-1/{uuid.uuid4().hex[:8]}"
    if request.param == "shared_memory":
        space = f"test-{uuid.uuid4().hex[:8]}"
        yield request.param, json.dumps({"space": space, "key_prefix": prefix})
        shutil.rmtree(f"/dev/shm/radix-{space}", ignore_errors=True)
    else:
        master = request.getfixturevalue("mooncake_master")
        config = {
            "master_server_address": master.address,
            "metrics_server_address": master.metrics_address,
            "local_hostname": "127.0.0.1",
            "local_buffer_size": "64mb",
            "key_prefix": prefix,
        }
        yield request.param, json.dumps(config)


class ServerProcess:
    """`radix-rl serve` on a port that the system chose; `stop` ends it as an operator does."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        command = [sys.executable, "-c", "from radix_rl.cli.main import main; main()", "serve", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.log = log
        self.url = ""
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stderr=output, stdout=output, env=environment, cwd=log.parent
            )

    def wait_until_ready(self) -> str:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"ready after .*: (http://\S+)", self.log.read_text())
            if found:
                return found.group(1)
            time.sleep(0.1)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_path, store_config):
    backend, config_json = store_config
    options = ["--output-store-backend", backend, "--output-store-backend-extra-config", config_json]
    arguments = [str(model_path), "--enable-return-routed-experts", "--port", "0", *options]
    process = ServerProcess(arguments, tmp_path_factory.mktemp("server") / "server.log")
    process.url = process.wait_until_ready()
    yield process
    process.kill()


def _post(url, **body):
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


_READER = """
import json, sys
from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash, create_backend

backend_name, config_json = sys.argv[1:]
meta_info = {"output_store_ref": json.load(sys.stdin)}

store = OutputStore(backend=create_backend(backend_name, config_json))
ref = StoreRef.from_builtins(meta_info["output_store_ref"])
(stash,) = store.read_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 30)
store.delete_many([ref])
store.close()
json.dump(stash.routed_experts.tolist(), sys.stdout)
"""


def test_the_published_usage_works_as_written(server, store_config):
    body = '{"text": "Hi", "return_routed_experts": true, "return_outputs_via_store": true}'
    address = server.url.removeprefix("http://")
    line = f"curl -s {address}/generate -d '{body}' | jq '.meta_info.output_store_ref'"
    ref_json = subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout
    assert len(json.dumps(json.loads(ref_json))) < 1000

    rows = subprocess.run(
        [sys.executable, "-c", _READER, *store_config],
        input=ref_json,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    experts = np.array(json.loads(rows.splitlines()[-1]))
    assert experts.shape[1:] == (_LAYERS, _TOP_K)
    assert 2 <= len(experts) <= 2 + 128 - 1
    assert experts.min() >= 0
    assert experts.max() < _EXPERTS


def test_rows_of_the_store_are_those_of_the_inline_answer_and_none_is_left(server, store_config):
    body = {
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "n": 2, "ignore_eos": True},
        "return_routed_experts": True,
    }
    inline = _post(server.url, **body)[0]
    stored = _post(server.url, **body, return_outputs_via_store=True)
    store = OutputStore(backend=create_backend(*store_config))
    refs = [StoreRef.from_builtins(answer["meta_info"]["output_store_ref"]) for answer in stored]
    assert len({info.key.rpartition("/")[0] for info in store.list_objects()}) == 2

    requests = [(ref, ["routed_experts"]) for ref in refs]
    stashes = store.read_many(requests, stash_type=TokenOutputStash, buffer_bytes=1 << 20)
    store.delete_many(refs)

    expected = np.frombuffer(base64.b64decode(inline["meta_info"]["routed_experts"]), "<i4")
    for answer, stash in zip(stored, stashes, strict=True):
        assert answer["output_ids"] == inline["output_ids"]
        np.testing.assert_array_equal(stash.routed_experts, expected.reshape(5 + 6 - 1, _LAYERS, _TOP_K))
    assert list(store.list_objects()) == []
    store.close()


def test_the_server_ends_in_order_on_sigterm(server):
    assert server.stop() == 0
    # Mooncake's library logs as its process ends, after everything of ours.
    lines = [line for line in server.log.read_text().splitlines() if not re.match(r"[IWEF]\d{4} ", line)]
    assert lines[-1].endswith("stopped")


def test_a_store_that_is_down_is_one_clear_line_before_the_model_is_loaded(tmp_path, model_path):
    config = '{"master_server_address": "127.0.0.1:9", "local_hostname": "127.0.0.1"}'
    options = ["--output-store-backend", "mooncake", "--output-store-backend-extra-config", config]
    server = ServerProcess([str(model_path), "--port", "0", *options], tmp_path / "server.log")
    try:
        assert server.process.wait(240) == 1
    finally:
        server.kill()
    log = server.log.read_text()
    assert "127.0.0.1:9" in log
    assert "mooncake_master" in log
    assert "Traceback" not in log
