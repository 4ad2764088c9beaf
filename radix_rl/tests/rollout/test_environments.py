"""Every environment that can be configured can be made."""

from typing import get_args

from radix_rl.config.environment import EnvironmentConfig
from radix_rl.rollout.environments.factory import ENVIRONMENTS


def test_every_environment_that_can_be_configured_is_registered():
    sections = get_args(get_args(EnvironmentConfig)[0])
    assert {section.model_fields["type"].default for section in sections} == set(ENVIRONMENTS)
