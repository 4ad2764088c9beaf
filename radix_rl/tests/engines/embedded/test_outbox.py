"""`Outbox`: event loops get their messages once, in order, and a closed loop costs the others nothing."""

import asyncio
import logging
from functools import partial

from radix_rl.engines.embedded.outbox import Outbox


def test_one_wake_up_brings_all_messages_in_order(monkeypatch):
    loop = asyncio.new_event_loop()
    wakes: list[object] = []
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(*args):
        wakes.append(args)
        return call_soon_threadsafe(*args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    outbox, seen = Outbox(), []
    for number in range(5):
        outbox.add(loop, partial(seen.append, number))
    outbox.send()
    outbox.send()
    assert len(wakes) == 1
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert seen == [0, 1, 2, 3, 4]


def test_a_closed_loop_is_told_of_and_the_others_get_theirs(caplog):
    closed, open_loop = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    outbox, seen = Outbox(), []
    outbox.add(closed, partial(seen.append, "lost"))
    outbox.add(open_loop, partial(seen.append, "there"))
    with caplog.at_level(logging.WARNING):
        outbox.send()
    open_loop.run_until_complete(asyncio.sleep(0))
    open_loop.close()
    assert seen == ["there"]
    assert "event loop was closed" in caplog.text
