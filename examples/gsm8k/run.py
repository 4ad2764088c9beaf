"""GSM8K with SmolLM2-135M: a few steps of GRPO, dense and as a MoE, with a Mooncake store of its own.

python examples/gsm8k/run.py --data DIR [--form dense|moe|both] [key.path=value ...]
"""

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from model import convert_gguf, find_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar
from upcycle import upcycle

from radix_rl.config import load_config
from radix_rl.errors import ConfigurationError, RadixError
from radix_rl.observe.metrics import read_metrics
from radix_rl.train.run import train
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake
from radix_transfer_plugins.errors import OutputStoreError

HERE = Path(__file__).parent
RUNS = HERE.resolve().parents[1] / "runs/gsm8k"
FORMS = ("dense", "moe")
HUB_DATASET = "openai/gsm8k"


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    disable_progress_bar()
    try:
        data = data_overrides(options.data, options.hub)
        forms = FORMS if options.form == "both" else (options.form,)
        for form in forms:
            prepare_model(form, options.runs)
        with LocalMooncake(1 << 30, log_path=options.runs / "mooncake.log") as local:
            store = local.backend_config(local_buffer_size="64mb")
            for form in forms:
                run_form(form, options.runs, store, [*data, *options.overrides])
    except (RadixError, OutputStoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on GSM8K with SmolLM2-135M and a Mooncake store.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl")
    source.add_argument("--hub", action="store_true", help="read openai/gsm8k from the model hub")
    parser.add_argument("--form", choices=(*FORMS, "both"), default="both")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where models and results go")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of the run")
    return parser.parse_args(arguments)


def data_overrides(folder: Path | None, hub: bool) -> list[str]:
    """Settings that name the data. Raises ConfigurationError for a file that is not there."""
    if hub:
        prompt = load_config(HERE / "config_dense.toml").environment.model_dump()["system_prompt"]
        source = f"hub_dataset={json.dumps(HUB_DATASET)}, system_prompt={json.dumps(prompt)}"
        return [f'environment={{type="gsm8k", {source}}}']
    assert folder is not None, "one of the two is required"
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "test")}
    missing = [str(path) for path in paths.values() if not path.is_file()]
    if missing:
        raise ConfigurationError(
            f"--data: not found: {', '.join(missing)}; give the folder that holds GSM8K's train.jsonl and "
            "test.jsonl (examples/gsm8k/README.md says where to get them)"
        )
    return [f"environment.{name}_path={json.dumps(str(path.resolve()))}" for name, path in paths.items()]


def prepare_model(form: str, runs: Path) -> None:
    """Convert, and upcycle for the MoE, unless an earlier run has done so."""
    dense, folder = runs / "model-dense", runs / f"model-{form}"
    if not (dense / "config.json").is_file():
        gguf = find_gguf()
        print(f"converting {gguf.name} ...", flush=True)
        _whole(dense, lambda part: convert_gguf(gguf, part))
    if form == "moe" and not (folder / "config.json").is_file():
        print("upcycling to 4 experts a layer ...", flush=True)
        _whole(folder, lambda part: _upcycle_into(dense, part))


def run_form(form: str, runs: Path, store: dict, overrides: Sequence[str]) -> None:
    """`radix-rl train` on one form, then what happened."""
    output_dir = runs / form
    shutil.rmtree(output_dir, ignore_errors=True)
    settings = [f"output_store.config.{name}={json.dumps(value)}" for name, value in store.items()]
    paths = {"output_dir": output_dir, "model.path": runs / f"model-{form}"}
    settings += [f"{name}={json.dumps(str(path))}" for name, path in paths.items()]
    config = load_config(HERE / f"config_{form}.toml", [*settings, *overrides])
    started = time.perf_counter()
    summary = train(config).summary
    for record in read_metrics(output_dir / "metrics.jsonl"):
        names = ("rollout/reward_mean", "rollout/response_tokens_mean", "time/generate_s", "time/step_s")
        figures = "  ".join(f"{name} {record[name]:.3g}" for name in names if name in record)
        print(f"{form}: step {record['step']:.0f}  {figures}")
    print(f"{form}: {config.train.steps} steps in {time.perf_counter() - started:.0f} s, loading included")
    for name, value in summary.items():
        print(f"{form}: {name} {value if isinstance(value, str) else f'{value:.4g}'}")
    if summary.get("objects_left"):
        raise RadixError(f"{form}: {summary['objects_left']:.0f} objects were left in the store")


def _upcycle_into(dense: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    moe = upcycle(model, num_experts=4, experts_per_token=2, noise=0.02, seed=0)
    moe.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)


def _whole(folder: Path, write: Callable[[Path], None]) -> None:
    """`write` into a folder that takes its name only when it is complete."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    part.rename(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
