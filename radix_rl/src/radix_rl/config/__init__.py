"""The configuration of a run: one frozen, typed tree (`RunConfig`).

`load_config` reads it from TOML and overrides. Each section knows its settings, defaults and bounds; what
sections may not be together is in `launch/checks.py`.

run.py            `RunConfig`, the whole tree
model.py          [model]: which model is trained
engine.py         [engine]: what generates the rollouts; the options of `serve` too
output_store.py   [output_store]: where replay outputs lie
environment.py    [environment]: problems, and how answers are scored
rollout.py        [rollout]: how many samples a step generates, and how
algorithm.py      [algorithm]: advantages, policy loss, KL penalty, correction
train.py          [train]: the training step
optimizer.py      [optimizer]: AdamW and its schedule
weights.py        [weights]: how new weights reach the engines
checkpoint.py     [checkpoint]: saving and resuming
evaluation.py     [eval]: accuracy on held-out problems
observe.py        [observe]: trackers
base.py           `Section`, and the value types that sections share
urls.py           base URLs of servers
loading.py        a TOML file and `key.path=value` overrides in
saving.py         a TOML file out
tree.py           which settings there are and where
suggestions.py    which setting an unknown one may have been meant to be
other_names.py    names that other tools give to the same settings
reference.py      the tree as a page of documentation
"""

from radix_rl.config.loading import apply_override, load_config, parse_config
from radix_rl.config.run import RunConfig
from radix_rl.config.saving import to_toml

__all__ = ["RunConfig", "apply_override", "load_config", "parse_config", "to_toml"]
