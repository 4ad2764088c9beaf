"""The configuration of a run: one frozen, typed tree (`RunConfig`).

`load_config` reads it from TOML and overrides.
"""

from radix_rl.config.loading import apply_override, load_config, parse_config
from radix_rl.config.run import RunConfig
from radix_rl.config.saving import to_toml

__all__ = ["RunConfig", "apply_override", "load_config", "parse_config", "to_toml"]
