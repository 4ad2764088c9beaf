"""No thread that has done its part keeps OpenMP threads: beside idle ones, the others wait asleep."""

import os
import subprocess
import sys
import time

import httpx
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

THREADS = 8
"""A pool holds one less."""

RUN = """
import os, sys, threading
from pathlib import Path
import torch
from radix_rl.config import load_config
from radix_rl.train.run import train

def threads_that_are_not_pythons():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

# Makes threads too, none of OpenMP.
torch.set_num_threads(int(sys.argv[2]))
before = threads_that_are_not_pythons()
train(load_config(Path(sys.argv[1])), lambda step, metrics: print(threads_that_are_not_pythons() - before))
"""

CONFIG = """
output_dir = "{folder}/run"
[model]
path = "{model}"
[engine]
type = "embedded"
kv_cache_tokens = 2048
context_length = 64
[output_store]
key_prefix = "pools/output-store"
[environment]
type = "arithmetic"
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
sampling.max_new_tokens = 8
[train]
steps = 3
num_threads = {threads}
"""


@pytest.fixture(scope="module")
def model_path(model_path, tmp_path_factory):
    """The other tests' model with matrices that torch shares among threads also where it only copies them."""
    path = tmp_path_factory.mktemp("wide-model")
    config = AutoConfig.from_pretrained(model_path, hidden_size=128, vocab_size=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(path)
    return path


def test_trainer_and_engine_of_a_run_compute_without_each_other_s_idle_threads(model_path, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path, model=model_path, threads=THREADS))

    run = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(THREADS)], capture_output=True, text=True, timeout=300
    )

    assert run.returncode == 0, run.stderr
    left = [int(line) for line in run.stdout.split()]
    assert len(left) == 3
    assert max(left) < THREADS - 1


def test_a_server_serves_new_weights_without_the_idle_threads_of_who_read_them(serve, model_path):
    (server,) = serve(1, "--num-threads", str(THREADS))
    with httpx.Client(base_url=server.url, timeout=120) as client:
        generate(client)
        before = threads_at_rest(server.process.pid)

        answer = client.post("/update_weights_from_disk", json={"model_path": str(model_path)})
        assert answer.status_code == 200, answer.text
        generate(client)

        # Python's pool may have grown by a thread.
        assert threads_at_rest(server.process.pid) - before < THREADS - 1


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent():
    program = """
import os, torch
from radix_rl.openmp_pool import end_pool
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
child = os.fork()
if child == 0:
    end_pool()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "0", run.stderr


def generate(client):
    body = {"input_ids": [[5, 6, 7]] * 16, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text


def threads_at_rest(pid):
    """The count once it has stayed the same for a while."""
    counts = []
    ends = time.monotonic() + 30
    while len(counts) < 5 or len(set(counts[-5:])) > 1:
        assert time.monotonic() < ends, counts
        counts.append(len(os.listdir(f"/proc/{pid}/task")))
        time.sleep(0.1)
    return counts[-1]
