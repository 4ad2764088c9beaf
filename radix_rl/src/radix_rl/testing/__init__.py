"""What tests of engines and of code above engines need; for tests of your own too. Needs pytest.

engine.py          EngineConformance: the suite of the engine contract
scripted_engine.py ScriptedEngine: answers by a script, without a model
tiny_models.py     tiny random models of many families, and a tokenizer of one token a byte
waiting.py         wait until a condition holds, on a thread or on the event loop
"""

try:
    import pytest as pytest
    import pytest_asyncio as pytest_asyncio
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"radix_rl.testing needs {error.name}, which is not installed: pip install pytest pytest-asyncio",
        name=error.name,
    ) from error

from radix_rl.testing.engine import EngineConformance
from radix_rl.testing.scripted_engine import Answer, ScriptedEngine
from radix_rl.testing.tiny_models import tiny_config, tiny_model, tiny_tokenizer
from radix_rl.testing.waiting import wait_for, wait_until

__all__ = [
    "Answer",
    "EngineConformance",
    "ScriptedEngine",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "wait_for",
    "wait_until",
]
