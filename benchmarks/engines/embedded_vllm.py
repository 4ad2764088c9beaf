"""The embedded engine with capture beside the stock vLLM wheel for CPUs without.

vLLM's fast model runner has no capture. One thread and one process each, on the same CPU; CPU seconds of the
process that generates. The engine runs the model operation by operation; vLLM does so in one figure and is
compiled in the other. Neither has a bar.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.engines.tiny_moe import NEW_TOKENS, EngineRun, tiny_model
from benchmarks.result import Result, not_measured, shown
from benchmarks.timing import cpu_seconds, median_ratio, stay_on_one_cpu, take_turns

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".env-vllm" / "bin" / "python"
PROGRAM = Path(__file__).parent / "vllm_program.py"
CONCURRENCY = 32
ROUNDS, COMPILED_ROUNDS = 7, 2
"""Each with a new engine and a new vLLM: between lives both differ by several percent. Compiling takes its
time in every life."""
NAME = f"embedded engine / vLLM without capture at {CONCURRENCY}"
EAGER, COMPILED = f"{NAME}, eager", f"{NAME}, compiled"


def run() -> list[Result]:
    if not PYTHON.exists():
        why = "no .env-vllm (make test-engines builds it)"
        return [not_measured(name, why, "x") for name in (EAGER, COMPILED)]
    torch.set_num_threads(1)
    stay_on_one_cpu()
    model = tiny_model()
    with tempfile.TemporaryDirectory(prefix="radix-bench-") as folder:
        model.save_pretrained(folder)
        results = [shown(EAGER, ratio(model, folder, "eager", ROUNDS), "x")]
        if shutil.which("g++"):
            results.append(shown(COMPILED, ratio(model, folder, "compiled", COMPILED_ROUNDS), "x"))
        else:
            results.append(not_measured(COMPILED, "no g++ for vLLM to compile with", "x"))
        return results


def ratio(model: PreTrainedModel, folder: str, mode: str, rounds: int) -> float:
    """Of vLLM's seconds to the engine's."""
    seconds = [side_by_side(model, folder, mode) for _ in range(rounds)]
    theirs, ours = ([s for life in seconds for s in life[name]] for name in ("vllm", "engine"))
    return median_ratio(theirs, ours)


def side_by_side(model: PreTrainedModel, folder: str, mode: str) -> dict[str, list[float]]:
    """Seconds of a new engine and a new vLLM, taking turns."""
    lengths = [NEW_TOKENS] * CONCURRENCY
    with EngineRun(model, "inline", prefix_cache_tokens=0) as engine, vllm(folder, mode) as program:
        return take_turns(
            {"engine": lambda: engine(lengths), "vllm": lambda: ask(program)},
            repetitions=5,
            # One of the two is idle while the other works.
            meter=lambda case: cpu_seconds(case, [program.pid]),
        )


@contextmanager
def vllm(model: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    """The program, ready; it ends with its standard input. `mode`: "eager" or "compiled"."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # V2 needs Triton.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # None: the wheel as it is. The environment also has a Triton backend, for tests of V2.
        "VLLM_PLUGINS": "",
        "TRITON_BACKENDS_IN_TREE": "1",
    }
    command = [str(PYTHON), str(PROGRAM), model, str(CONCURRENCY), str(NEW_TOKENS), mode]
    program = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        _expect(program, "ready")
        yield program
    finally:
        program.kill()
        program.wait()


def ask(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    _expect(program, "done")


def _expect(program: subprocess.Popen[str], word: str) -> None:
    assert program.stdout is not None
    for line in program.stdout:
        if line.strip() == word:
            return
    raise RuntimeError(f"vLLM ended with {program.wait()} before it was {word}")
