"""A pause or a begun update that its client leaves behind ends by itself, or by who takes the server over."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from radix_rl.buckets.wire import OWNER_HEADER
from radix_rl.errors import EngineError, EngineStateError
from radix_rl.server.weights.lease import UpdateLease


def _post(server, path, owner=None, **body):
    return server.client.post(path, json=body, headers={OWNER_HEADER: owner} if owner else {})


def _lease(server):
    return server.client.get("/server_info").json()["weight_update_lease"]


def test_requests_of_a_server_whose_trainer_was_killed_are_answered_when_its_lease_runs_out(run_server):
    with run_server(pause_lease_s=1.0) as server, ThreadPoolExecutor() as pool:
        assert _post(server, "/pause_generation", "a", mode="in_place").status_code == 200
        assert _post(server, "/begin_weight_update", "a", weight_version="7").status_code == 200
        assert _lease(server)["owner"] == "a"
        started = time.monotonic()
        waiting = pool.submit(server.generate, text="a", sampling_params={"max_new_tokens": 1})

        assert waiting.result().json()["text"] == "b"

        assert 0.5 < time.monotonic() - started < 10
        assert _lease(server) is None
        assert ("abort_weight_update",) in server.engine.calls
        assert _post(server, "/pause_generation", "b").status_code == 200
        assert _post(server, "/begin_weight_update", "b").status_code == 200


def test_a_pause_without_an_owner_ends_too_and_continuing_ends_the_lease(run_server):
    with run_server(pause_lease_s=0.3) as server:
        assert _post(server, "/pause_generation").status_code == 200
        assert _post(server, "/continue_generation").status_code == 200
        assert _lease(server) is None
        assert _post(server, "/pause_generation").status_code == 200
        assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).json()["text"] == "b"


def test_the_pause_that_a_checkpoint_from_disk_is_to_keep_is_leased(run_server, tmp_path, monkeypatch):
    from radix_rl.server.weights import routes

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(routes, "_read_checkpoint", lambda _: iter(()))
    with run_server(pause_lease_s=0.3) as server:
        loaded = _post(server, "/update_weights_from_disk", model_path=str(tmp_path), keep_pause=True)
        assert loaded.status_code == 200
        assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).json()["text"] == "b"


def test_another_client_is_refused_until_it_takes_over_and_then_the_first_is(run_server):
    with run_server() as server:
        assert _post(server, "/pause_generation", "first", mode="in_place").status_code == 200
        assert _post(server, "/begin_weight_update", "first", weight_version="1").status_code == 200
        for path in ("/pause_generation", "/continue_generation", "/begin_weight_update"):
            refused = _post(server, path, "second")
            assert refused.status_code == 409
            assert "update of 'first'" in refused.text
            assert "take_over" in refused.text
        assert _post(server, "/abort_weight_update").status_code == 409, "nobody in particular"

        assert _post(server, "/continue_generation", "second", take_over=True).status_code == 200
        assert _post(server, "/pause_generation", "second", mode="in_place").status_code == 200
        assert _post(server, "/begin_weight_update", "second", weight_version="2").status_code == 200

        late = _post(server, "/end_weight_update", "first")
        assert late.status_code == 409
        assert "update of 'second'" in late.json()["message"]
        assert _post(server, "/end_weight_update", "second").json()["weight_version"] == "2"


class Ends:
    def __init__(self, lease_s):
        self.needed = False
        self.count = 0
        self.failure = None
        self.lease = UpdateLease(lease_s, is_needed=lambda: self.needed, end=self.end)

    async def end(self):
        self.count += 1
        if self.failure is not None:
            raise self.failure

    def call(self, owner="a", *, needed=True):
        with self.lease.call(owner):
            self.needed = needed


async def test_calls_of_the_owner_renew_the_lease():
    ends = Ends(0.2)
    for _ in range(5):
        ends.call()
        await asyncio.sleep(0.1)
    assert ends.count == 0
    await asyncio.sleep(0.3)
    assert ends.count == 1


async def test_the_lease_does_not_run_while_a_call_is_in_progress():
    ends = Ends(0.05)
    with ends.lease.call("a"):
        ends.needed = True
        await asyncio.sleep(0.2)
    assert ends.count == 0
    await asyncio.sleep(0.2)
    assert ends.count == 1


async def test_calls_without_a_pause_or_an_update_begin_no_lease():
    ends = Ends(0.05)
    ends.call("a", needed=False)
    ends.call("b", needed=False)
    await asyncio.sleep(0.1)
    assert (ends.count, ends.lease.describe()) == (0, None)


async def test_a_refused_call_does_not_renew_the_lease_of_another():
    ends = Ends(0.2)
    ends.call("a")
    for _ in range(3):
        await asyncio.sleep(0.1)
        if ends.count == 0:
            with pytest.raises(EngineStateError, match="update of 'a'"):
                ends.call("b")
    assert ends.count == 1


async def test_an_engine_that_cannot_continue_is_an_error_in_the_log(caplog):
    ends = Ends(0.01)
    ends.failure = EngineError("stuck")
    ends.call()
    await asyncio.sleep(0.1)
    assert "could not continue after a pause that nobody ended: stuck" in caplog.text
