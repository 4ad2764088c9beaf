"""Options of the whole suite; and the real packages, loaded before pytest names test modules after their
folders.

The folders bear the packages' names, so that a test module imported first would take the package's place.
"""

import pytest

import radix_engine_plugins
import radix_rl
import radix_transfer_plugins

__all__ = ["radix_engine_plugins", "radix_rl", "radix_transfer_plugins"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults", "randomized fault tests")
    group.addoption("--fault-requests", type=int, default=1000, help="How many requests suffer faults.")
    group.addoption("--fault-seed", type=int, default=0, help="Seed of the faults, printed on failure.")
