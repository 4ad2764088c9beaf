"""The end of the server that this folder's tests share: after the others by its name."""

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BODY = {
    "input_ids": list(range(30, 60)),
    "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    "return_routed_experts": True,
    "return_outputs_via_store": True,
}
STORING_S = 2.0


def test_server_stopped_while_storing_delivers_or_leaves_nothing(
    server: Any,
    reader: Any,
    faults: Callable[..., None],
    puts_begun: Callable[[], int],
    wait_until: Callable[..., None],
) -> None:
    """SIGTERM to the launcher, as an operator sends it."""
    faults(delay_s=STORING_S)
    before = puts_begun()
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(server.generate(BODY))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: puts_begun() > before)
    server.process.send_signal(signal.SIGTERM)
    thread.join(timeout=60)
    server.process.wait(timeout=60)
    if isinstance(answers[0], dict):
        reader.take(answers[0]["meta_info"])
    assert reader.is_empty_within(30), reader.keys()
