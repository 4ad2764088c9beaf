"""The Python of the training guide runs as written, beside a run.toml."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs/training.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

CONFIG = """
output_dir = "{folder}/run"
[model]
path = "{model}"
[engine]
type = "embedded"
kv_cache_tokens = 2048
context_length = 64
[environment]
type = "arithmetic"
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
sampling.max_new_tokens = 4
[train]
steps = 1
num_threads = 1
"""


def test_the_script_with_an_environment_of_ones_own_runs(model_path, tmp_path, monkeypatch, capsys):
    (text,) = BLOCK.findall(GUIDE.read_text())
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path, model=model_path))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    exec(compile(text, str(GUIDE), "exec"), namespace)
    assert namespace["outcome"].state.step == 1
    assert namespace["outcome"].objects_left == 0
    assert capsys.readouterr().out.startswith("1 {")
