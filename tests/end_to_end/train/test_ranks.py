"""Several ranks train like one."""

import ipaddress
import multiprocessing
import os
from pathlib import Path

import msgspec
from transformers import AutoModelForCausalLM

from radix_rl.train.run import train


def run(config, environment):
    logged = []
    outcome = train(config, lambda step, metrics: logged.append(metrics), environment)
    model = AutoModelForCausalLM.from_pretrained(config.output_dir / "checkpoints" / "step-2" / "model")
    return logged, model, outcome


def test_two_ranks_take_the_same_steps_as_one(make_config, environment, tmp_path):
    results = []
    for num_ranks in (1, 2):
        config = make_config(
            output_dir=str(tmp_path / f"ranks-{num_ranks}"),
            train={"num_ranks": num_ranks, "minibatches": 2, "mismatch_without_replay_every_steps": 1},
            algorithm={"kl_coefficient": 0.05},
        )
        results.append(run(config, environment))
    (one, one_model, _), (two, two_model, outcome) = results
    assert outcome.objects_left == 0
    for name in one[0]:
        if not name.startswith(("time/", "weights/")) and "tokens_per_second" not in name:
            assert abs(one[0][name] - two[0][name]) <= 1e-4 * max(1, abs(one[0][name])), name
    for (name, expected), found in zip(one_model.named_parameters(), two_model.parameters(), strict=True):
        difference = (found - expected).abs()
        # Adam makes steps of one size of gradients of any: rounding of one near zero shows. Four steps move a
        # weight by up to 4 * 3e-3.
        assert difference.max() < 6e-4, name
        assert difference.mean() < 1e-5, name
    assert two_model.config.architectures == ["Qwen3MoeForCausalLM"]


def test_ranks_with_different_numbers_of_microbatches_train_like_one(make_config, environment, tmp_path):
    class OneLongPrompt(type(environment)):
        def train_problem(self, index):
            problem = super().train_problem(index)
            length = 4 if index % 4 else 50
            return msgspec.structs.replace(problem, prompt_ids=(problem.prompt_ids * 20)[:length])

    results = []
    for num_ranks in (1, 2):
        config = make_config(
            output_dir=str(tmp_path / f"ranks-{num_ranks}"),
            rollout={"prompts_per_step": 4, "samples_per_prompt": 1},
            algorithm={"advantage": "reinforce_pp"},
            # Every sample is a microbatch: the long one on one rank, the three short ones on the other.
            train={"num_ranks": num_ranks, "microbatch_tokens": 1},
        )
        results.append(run(config, OneLongPrompt()))
    (one, _, _), (two, _, outcome) = results
    assert outcome.objects_left == 0
    for name in ("train/tokens", "train/loss", "train/grad_norm", "replay/router_disagreement"):
        assert abs(one[0][name] - two[0][name]) <= 1e-4 * max(1, abs(one[0][name])), name


def test_ranks_listen_on_the_loopback_interface_only(make_config, environment, tmp_path):
    def look(_step, _metrics):
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        found.append({pid: listening_addresses(pid) for pid in pids})

    found = []
    config = make_config(output_dir=str(tmp_path / "run"), train={"num_ranks": 2, "steps": 1})
    train(config, look, environment)

    assert len(found[0]) == 2, "rank 0 and its child"
    for pid, addresses in found[0].items():
        assert addresses, f"process {pid} takes part in no group"
        for address in addresses:
            assert address.is_loopback, f"process {pid} listens on {address}"


def listening_addresses(pid):
    """Addresses of the TCP sockets that a process listens on, from Linux' /proc."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                words = bytes.fromhex(columns[1].partition(":")[0])
                # Words of 32 bits in the machine's own order.
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(packed)
                found.append(getattr(address, "ipv4_mapped", None) or address)
    return found
