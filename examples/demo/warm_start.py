"""The demo's model before RL: a tiny MoE and its tokenizer, briefly trained on careless answers."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radix_rl.rollout.environments.arithmetic import ArithmeticEnvironment, Sum, story_words

STEPS = 360
BATCH_SIZE = 32
LEARNING_RATE = 2e-3
FORGOTTEN_CARRIES = 0.75
"""Share of carries that the worked answers forget: the fault that RL has to mend."""

PAD, END = "<pad>", "<eos>"
PAD_ID, END_ID = 0, 1
IGNORED_LABEL = -100
FIRST_PROBLEM = 1_000_000
"""Far behind the problems that RL sees."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words; numbers digit by digit."""
    words = [PAD, END, "<unk>", "+", "=", ";", *map(str, range(10)), *story_words()]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token="<unk>", model_max_length=128
    )


def make_model(vocab_size: int) -> Qwen3MoeForCausalLM:
    """1.3 million parameters: 4 MoE layers of 16 experts, 4 a token."""
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # pyright: ignore[reportCallIssue]
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        bos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config)


def careless_answer(problem: Sum, rng: random.Random) -> str:
    """The sum digit by digit, as in "7 + 5 = 1 2 ; 4 + 3 + 1 = 8 ; 8 2", by a teacher who forgets carries."""
    x_tens, x_units = divmod(problem.x, 10)
    y_tens, y_units = divmod(problem.y, 10)
    units = x_units + y_units
    carry = int(units >= 10 and rng.random() >= FORGOTTEN_CARRIES)
    tens = x_tens + y_tens + carry
    return (
        f"{x_units} + {y_units} = {units} ; {x_tens} + {y_tens} + {carry} = {tens} ; {tens}{units % 10} {END}"
    )


def warm_start(
    folder: Path, environment_settings: dict, seed: int, show: Callable[[int, float], None]
) -> int:
    """Train and save a Hugging Face checkpoint into `folder`; the number of parameters.

    `show` gets (steps done, loss). Routers keep their random weights: trained for so short a time they would
    only learn to prefer a few experts, and a router without favourites is what rounding upsets most.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    environment = ArithmeticEnvironment(tokenizer, seed=seed, **environment_settings)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    rng = random.Random(seed)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 30, 0.05 + 3.3 * (STEPS - step) / STEPS)
        first = FIRST_PROBLEM + step * BATCH_SIZE
        sums = [environment.train_sum(first + offset) for offset in range(BATCH_SIZE)]
        input_ids, labels = _batch(tokenizer, [(s.text, careless_answer(s, rng)) for s in sums])
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        show(step + 1, float(loss.detach()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def _batch(
    tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels), `[b, t]` int64, padded on the right; labels speak of the answers alone."""
    rows = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in texts]
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), length), PAD_ID)
    labels = torch.full((len(rows), length), IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels
