"""The gate around the client's local buffer: retries run alone, and an interrupted one blocks nobody."""

import threading

import pytest

from radix_transfer_plugins.backends.mooncake.gate import LocalBufferGate


def test_a_retry_runs_alone_and_first_attempts_queue_behind_it() -> None:
    gate = LocalBufferGate()
    order: list[str] = []
    waiting = threading.Event()

    def retry() -> None:
        waiting.set()
        with gate.retry():
            order.append("retry")

    def attempt() -> None:
        with gate.attempt():
            order.append("attempt")

    with gate.attempt():
        retrying = threading.Thread(target=retry)
        retrying.start()
        assert waiting.wait(5)
        while not gate._retries_waiting:
            retrying.join(0.001)
        late = threading.Thread(target=attempt)
        late.start()
        late.join(0.05)
        assert order == []
    retrying.join(5)
    late.join(5)
    assert order == ["retry", "attempt"]


def test_a_retry_that_is_interrupted_while_it_waits_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = LocalBufferGate()

    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), gate.retry():
            pass
    done = threading.Event()

    def attempt() -> None:
        with gate.attempt(), gate._changed:
            done.set()

    threading.Thread(target=attempt, daemon=True).start()
    assert done.wait(5)
