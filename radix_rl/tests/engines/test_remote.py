"""The remote engine against our server on a real socket."""

import asyncio
import time

import pytest
import torch

from radix_rl.addresses import host_and_port
from radix_rl.config.engine import RemoteSettings
from radix_rl.engines.pool import EnginePool
from radix_rl.engines.remote import engine as engine_module
from radix_rl.engines.remote.engine import RemoteEngine
from radix_rl.engines.remote.liveness import LivenessWatch
from radix_rl.engines.remote.retry import RetryPolicy
from radix_rl.errors import (
    ConfigurationError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    RequestError,
)
from radix_rl.rollout.replay_index import ReplayIndex
from radix_rl.server.runner import bind
from radix_rl.testing import wait_for
from radix_rl.testing.scripted_engine import numbered_rows
from radix_rl.types import FinishReason, SamplingParams, VersionSpan
from radix_rl.weights.sync import WeightSynchronizer
from radix_rl.weights.transports.http import HttpTransport
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.errors import StoreFullError

VIA_STORE = {"return_routed_experts": True, "return_outputs_via_store": True}


@pytest.fixture
async def connect(memory_store):
    """`await connect(url, **settings)`: a started client of the shared memory store."""
    store, _ = memory_store
    opened = []

    async def start(
        url: str,
        *,
        needs: str | None = "memory",
        api_key: str | None = None,
        admin_api_key: str | None = None,
        takes_over: bool = False,
        **settings,
    ) -> RemoteEngine:
        engine = RemoteEngine(
            url,
            RemoteSettings(**settings),
            api_key=api_key,
            takes_over=takes_over,
            admin_api_key=admin_api_key,
            needs_output_store=needs,
            store=store,
        )
        opened.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in opened:
        await engine.close()


async def test_an_answer_is_the_engines_own(serve, connect, request_for):
    server = await serve()
    engine = await connect(server.url)
    sampling = SamplingParams(max_new_tokens=3, temperature=0.5, top_k=7, seed=11, stop_token_ids=(9,))
    answer = await engine.generate(request_for("r", sampling=sampling))
    assert answer.request_id == "r"
    assert answer.output_ids == (5, 6, 7)
    assert answer.output_logprobs == (-0.25, -0.5, -0.75)
    assert answer.finish_reason == FinishReason(type="stop", matched=9)
    assert answer.version_spans == (VersionSpan(0, 1, "0"), VersionSpan(1, 3, "1"))
    assert (answer.prompt_tokens, answer.cached_tokens) == (4, 3)
    assert answer.outputs is None
    assert answer.output_store_ref is None
    assert server.engine.requests[0].sampling == sampling


async def test_a_server_at_any_name_of_the_machine_answers_and_takes_weights(
    own_host, serve, connect, request_for
):
    sock = bind(own_host, 0)
    await serve(sock=sock)
    engine = await connect(f"http://{host_and_port(own_host, sock.getsockname()[1])}")

    assert (await engine.generate(request_for())).output_ids == (5, 6, 7)
    await WeightSynchronizer([engine], HttpTransport(), bucket_bytes=64).sync(1, [("w", torch.ones(3))])
    assert (await engine.info()).weight_version == "1"


async def test_info_and_capabilities_are_the_servers(serve, connect):
    server = await serve()
    engine = await connect(server.url)
    assert await engine.info() == await server.engine.info()
    assert engine.capabilities.output_store == "memory"
    assert engine.capabilities.routed_experts
    assert engine.capabilities.weight_transports == ("http", "broadcast", "disk")


async def test_rows_come_inline_with_the_shape_that_the_server_tells(serve, connect, request_for):
    engine = await connect((await serve()).url)
    answer = await engine.generate(request_for(return_routed_experts=True, routed_experts_start_len=2))
    assert answer.outputs is not None
    assert answer.outputs.routed_experts is not None
    assert answer.routed_experts_start == 2
    assert answer.outputs.routed_experts.tolist() == numbered_rows(6, 2, 3)[2:].tolist()


async def test_rows_come_through_the_store_as_a_reference(serve, connect, request_for, memory_store):
    store, _ = memory_store
    engine = await connect((await serve()).url)
    request = request_for(**VIA_STORE)
    answer = await engine.generate(request)
    index = ReplayIndex()
    index.add_response(request, answer, store_backend="memory")
    ref = answer.output_store_ref
    (stash,) = store.read_many([(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20)
    assert stash.routed_experts is not None
    assert stash.routed_experts.tolist() == numbered_rows(6, 2, 3).tolist()
    store.delete_many([ref])
    assert list(store.list_objects()) == []


async def test_a_server_without_the_store_is_refused_with_its_flag(serve, connect):
    server = await serve(with_store=False)
    with pytest.raises(
        ConfigurationError, match="has no output store; start it with --output-store-backend memory"
    ):
        await connect(server.url)
    with pytest.raises(
        ConfigurationError, match="needs the output store 'mooncake', but the server writes to 'memory'"
    ):
        await connect((await serve()).url, needs="mooncake")


async def test_keys_go_where_they_belong(serve, connect, request_for):
    server = await serve(api_key="user", admin_api_key="boss")
    engine = await connect(server.url, api_key="user", admin_api_key="boss")
    await engine.generate(request_for())
    await engine.pause()
    await engine.resume()
    with pytest.raises(ConfigurationError, match=r"401.*engine\.api_key_env"):
        await (await connect_unchecked(server.url)).info()
    plain = await connect(server.url, api_key="user")
    with pytest.raises(ConfigurationError, match=r"40[13].*engine\.admin_api_key_env"):
        await plain.pause()


async def connect_unchecked(url: str) -> RemoteEngine:
    return RemoteEngine(url, RemoteSettings())


async def test_a_refused_request_is_not_tried_again(serve, connect, request_for):
    server = await serve()
    engine = await connect(server.url)
    server.engine.failures["generate"] = [RequestError("over the context length")]
    with pytest.raises(RequestError, match="over the context length"):
        await engine.generate(request_for())
    assert len(server.engine.requests) == 1


async def test_a_server_error_is_tried_again_under_a_new_id(serve, connect, request_for):
    server = await serve()
    engine = await connect(server.url)
    server.engine.failures["generate"] = [StoreFullError("no room"), EngineError("hiccup")]
    assert (await engine.generate(request_for())).output_ids == (5, 6, 7)
    assert len({request.request_id for request in server.engine.requests}) == 3


async def test_a_server_that_keeps_failing_is_given_up(serve, connect, request_for):
    server = await serve()
    engine = await connect(server.url)
    server.engine.failures["generate"] = [EngineError("broken")] * 9
    with pytest.raises(EngineError, match="answered 500: broken"):
        await engine.generate(request_for())
    assert len(server.engine.requests) == 5


async def test_a_deadline_ends_the_wait_and_the_request(serve, connect, request_for, memory_store):
    server = await serve()
    engine = await connect(server.url, request_timeout_s=0.2)
    server.engine.hold()
    with pytest.raises(EngineDeadError, match=r"did not answer within 0\.2 s"):
        await engine.generate(request_for(**VIA_STORE))
    await wait_for(lambda: not server.engine.running, "the request has ended")
    assert list(memory_store[0].list_objects()) == []


async def test_a_cancelled_request_ends_and_leaves_no_object(serve, connect, request_for, memory_store):
    server = await serve()
    engine = await connect(server.url)
    server.engine.hold()
    task = asyncio.create_task(engine.generate(request_for(**VIA_STORE)))
    await wait_for(lambda: server.engine.running, "the request runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_for(lambda: not server.engine.running, "the request has ended")
    await engine.close()
    # The abort made the server answer with what it had; that answer's object was deleted here.
    assert ("abort", server.engine.requests[0].request_id) in server.engine.calls
    assert list(memory_store[0].list_objects()) == []


async def test_an_abort_takes_the_clients_id(serve, connect, request_for):
    server = await serve()
    engine = await connect(server.url)
    server.engine.hold()
    tasks = [asyncio.create_task(engine.generate(request_for(name))) for name in ("one", "two")]
    await wait_for(lambda: len(server.engine.running) == 2, "both requests run")
    await engine.abort("one")
    assert (await tasks[0]).finish_reason == FinishReason(type="abort", message="asked to")
    assert not tasks[1].done()
    await engine.abort()
    assert (await tasks[1]).finish_reason.type == "abort"


async def test_a_server_that_stops_fails_its_requests_within_seconds(serve, connect, request_for):
    server = await serve()
    engine = await connect(server.url)
    server.engine.hold()
    task = asyncio.create_task(engine.generate(request_for()))
    await wait_for(lambda: server.engine.running, "the request runs")
    started = time.monotonic()
    server.stop()
    with pytest.raises(EngineError):
        await task
    assert time.monotonic() - started < 10


async def test_a_request_waits_for_an_engine_that_cannot_generate_yet(serve, connect, request_for):
    """Asleep, for one: it answers once it is woken."""
    server = await serve()
    engine = await connect(server.url)
    engine._http.watch = LivenessWatch(engine._http._require_answer, interval_s=0.01, max_failures=2)
    server.engine.hold()
    task = asyncio.create_task(engine.generate(request_for()))
    await wait_for(lambda: server.engine.running, "the request runs")
    server.engine.failures["health"] = EngineDeadError("its worker is gone")
    with pytest.raises(EngineError, match="its worker is gone"):
        await engine.health()
    await asyncio.sleep(0.3)
    assert not task.done()
    server.engine.release()
    assert (await task).output_ids == (5, 6, 7)


async def test_start_waits_for_a_server_that_is_coming_up(serve, connect):
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    connecting = asyncio.create_task(connect(url))
    await asyncio.sleep(0.3)
    assert not connecting.done()
    await serve(sock=sock)
    await asyncio.wait_for(connecting, 20)


async def test_a_server_that_never_comes_up_is_an_error_at_the_deadline(connect):
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(EngineDeadError, match=f"127.0.0.1:{port}/health.*is the server running"):
        await connect(f"http://127.0.0.1:{port}", start_timeout_s=0.5)


async def test_control_calls_reach_the_engine(serve, connect):
    server = await serve()
    engine = await connect(server.url)
    await engine.pause("retract")
    await engine.resume()
    await engine.resume()
    await engine.sleep(["kv_cache"])
    await engine.wake(["kv_cache"])
    await engine.flush_cache()
    await engine.health()
    assert server.engine.calls == [
        ("pause", "retract"),
        ("resume",),
        ("sleep", ("kv_cache",)),
        ("wake", ("kv_cache",)),
        ("flush_cache",),
    ]


@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
async def test_new_weights_reach_every_server_whatever_the_bucket_size(serve, connect, bucket_bytes):
    servers = [await serve(), await serve()]
    engines = [await connect(server.url) for server in servers]
    tensors = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16))]
    synchronizer = WeightSynchronizer(engines, HttpTransport(), bucket_bytes=bucket_bytes)
    await synchronizer.sync(1, tensors)
    for server in servers:
        weights = {name: tensor.tolist() for name, tensor in server.engine.weights.items()}
        assert weights == {"a": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "b": [1.0, 1.0]}
        assert server.engine.version == "1"
        assert [call for call in server.engine.calls if call[0] != "update_weights"] == [
            ("pause", "in_place"),
            ("begin_weight_update", "1"),
            ("commit_weight_update", "1"),
            ("resume",),
        ]


async def test_a_server_that_fails_keeps_the_whole_fleet_at_the_old_version(serve, connect):
    servers = [await serve(), await serve()]
    engines = [await connect(server.url) for server in servers]
    servers[1].engine.failures["update_weights"] = EngineError("no memory")
    synchronizer = WeightSynchronizer(engines, HttpTransport(), bucket_bytes=64)
    with pytest.raises(EngineError, match="no memory"):
        await synchronizer.sync(1, [("a", torch.ones(3))])
    for server in servers:
        assert server.engine.version == "0"
        assert [call for call in server.engine.calls if call[0] != "update_weights"] == [
            ("pause", "in_place"),
            ("begin_weight_update", "1"),
            ("abort_weight_update",),
            ("resume",),
        ]


async def test_a_run_that_starts_ends_what_a_killed_one_left(serve, connect, request_for):
    server = await serve()
    killed = await connect(server.url)
    await killed.pause()
    await killed.begin_weight_update("7")

    reader = await connect(server.url)
    with pytest.raises(EngineStateError, match="weight update of"):
        await reader.pause()
    run = await connect(server.url, takes_over=True)

    assert (await run.generate(request_for())).output_ids == (5, 6, 7)
    await WeightSynchronizer([run], HttpTransport(), bucket_bytes=64).sync(1, [("w", torch.ones(3))])
    assert (await run.info()).weight_version == "1"
    with pytest.raises(EngineStateError):
        await killed.commit_weight_update("7")
    assert (await run.info()).weight_version == "1"


async def test_a_server_is_continued_although_it_fails_at_first(serve, connect, request_for, monkeypatch):
    server = await serve()
    engine = await connect(server.url)
    failures = [EngineError("busy"), EngineError("busy")]
    resume = server.engine.resume

    async def failing():
        if failures:
            raise failures.pop()
        await resume()

    monkeypatch.setattr(server.engine, "resume", failing)
    await WeightSynchronizer([engine], HttpTransport(), bucket_bytes=64).sync(1, [("w", torch.ones(3))])

    assert failures == []
    assert (await engine.generate(request_for())).output_ids == (5, 6, 7)


async def test_a_server_that_stays_paused_is_an_error_of_the_sync_and_can_be_resumed_later(
    serve, connect, request_for, monkeypatch
):
    server = await serve()
    engine = await connect(server.url)

    async def failing():
        raise EngineError("stuck")

    monkeypatch.setattr(engine_module, "_CONTINUE", RetryPolicy(max_tries=2, deadline_s=5))
    synchronizer = WeightSynchronizer([engine], HttpTransport(), bucket_bytes=64)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "resume", failing)
        with pytest.raises(EngineError, match="version 1 is in force, but RemoteEngine could not be resumed"):
            await synchronizer.sync(1, [("w", torch.ones(3))])
    assert synchronizer.version == 1
    await engine.resume()
    await synchronizer.sync(2, [("w", torch.ones(3))])
    assert (await engine.generate(request_for())).output_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_prefix": "other/run"}, r"key_prefix 'test/run', this run's has 'other/run'"),
        ({"name": "elsewhere"}, r"place '\w+', this run's has 'elsewhere'"),
    ],
)
async def test_a_server_that_stores_elsewhere_is_refused_before_the_first_request(
    serve, memory_store, changes, message
):
    server = await serve()
    store = OutputStore(backend=create_backend("memory", memory_store[1] | changes))
    engine = RemoteEngine(server.url, RemoteSettings(), needs_output_store="memory", store=store)
    with pytest.raises(ConfigurationError, match=message):
        await engine.start()
    assert server.engine.requests == []
    await engine.close()
    store.close()


async def test_two_servers_of_one_run_with_different_prefixes_are_refused_at_start(serve, memory_store):
    same, other = await serve(), await serve(key_prefix="other/run")
    engines = [
        RemoteEngine(url, RemoteSettings(), needs_output_store="memory", store=memory_store[0])
        for url in (same.url, other.url)
    ]
    pool = EnginePool(engines)
    with pytest.raises(ConfigurationError) as refused:
        await pool.start()
    assert str(refused.value).startswith(
        f"{other.url}: the server's output store has key_prefix 'other/run', this run's has 'test/run'"
    )
    assert same.engine.requests == other.engine.requests == []
    await pool.close()
