"""The GSM8K example's handling of its data path."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radix_rl.config import load_config

SYSTEM_PROMPT = "Solve the problem. End with the number alone after ####."
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/gsm8k"


def run_example(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "run.py"), "--runs", str(cwd / "runs"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=290)


def test_a_missing_data_folder_ends_before_anything_is_made(tmp_path):
    done = run_example("--data", str(tmp_path / "nowhere"), cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere/train.jsonl" in done.stderr
    assert "README.md" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("form", ["dense", "moe"])
def test_the_checked_in_configurations_parse(form):
    config = load_config(EXAMPLE / f"config_{form}.toml")
    assert config.environment.type == "gsm8k"
    assert config.train.replay_routed_experts == (form == "moe")


def test_a_tiny_moe_trains_on_a_given_folder_through_mooncake(tmp_path):
    """The whole example but for the model's conversion, which an earlier run has done."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "test"):
        lines = [
            json.dumps({"question": f"What is {n} + 1 ?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"})
            for n in range(4)
        ]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    make_tiny_moe(tmp_path / "runs/model-moe")
    (tmp_path / "runs/model-dense").symlink_to(tmp_path / "runs/model-moe")
    done = run_example(
        "--data",
        str(data),
        "--form",
        "moe",
        "rollout.sampling.max_new_tokens=8",
        "optimizer.lr=1e-3",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "moe: objects_left 0" in done.stdout
    summary = json.loads((tmp_path / "runs/moe/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["response_bytes_store"] > 0


def test_evaluation_scores_what_the_model_answers_greedily(tmp_path):
    """Three questions, of which two have the model's own answer as their solution."""
    model = tmp_path / "model"
    make_tiny_moe(model)
    questions = [f"What is {n} + 1 ?" for n in range(3)]
    numbers = [greedy_number(model, question) for question in questions]
    solutions = [numbers[0], numbers[1], numbers[2] + 1]
    lines = [
        json.dumps({"question": question, "answer": f"#### {solution}"})
        for question, solution in zip(questions, solutions, strict=True)
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))

    command = [sys.executable, str(EXAMPLE / "evaluate.py"), "--data", str(tmp_path), "--model", str(model)]
    done = subprocess.run([*command, "--max-tokens", "8"], capture_output=True, text=True, timeout=290)

    assert done.returncode == 0, done.stderr
    assert "accuracy 0.6667 (2 of 3)" in done.stdout
    assert "24 out" in done.stdout


def greedy_number(folder: Path, question: str) -> int:
    """The last number in what transformers generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    outputs = model.generate(**prompt, do_sample=False, max_new_tokens=8)
    answer = tokenizer.decode(outputs[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return int(re.findall(r"\d+", answer)[-1])


def make_tiny_moe(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"0123456789", "What", "is", "+", "?"]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
