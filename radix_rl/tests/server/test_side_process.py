"""Processes for long work on what clients send: there before the first such request, gone with the server."""

import multiprocessing
import threading

from radix_rl.testing.waiting import wait_until


def test_they_start_with_the_server_and_end_with_it(run_server):
    before = set(multiprocessing.active_children())
    with run_server() as server:
        wait_until(lambda: len(set(multiprocessing.active_children()) - before) == 2, "two are started")
        started = set(multiprocessing.active_children()) - before
        assert server.client.get("/health").status_code == 200
        assert all(process.is_alive() for process in started)

    wait_until(lambda: not started & set(multiprocessing.active_children()), "they have ended")


def test_a_server_that_ends_at_once_leaves_none(run_server):
    before = set(multiprocessing.active_children())
    with run_server():
        pass

    starting = "side-process"
    wait_until(
        lambda: not any(thread.name.startswith(starting) for thread in threading.enumerate()),
        "nothing is being started",
    )
    assert set(multiprocessing.active_children()) <= before
