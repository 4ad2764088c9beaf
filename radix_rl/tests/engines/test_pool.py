"""Several engines as one: load, sessions, and the death of one of them."""

import asyncio

import pytest

from radix_rl.engines.pool import EnginePool
from radix_rl.errors import EngineDeadError, EngineError, RequestError


@pytest.fixture
def engines(holdable):
    return [holdable() for _ in range(3)]


async def started(engine, count: int) -> None:
    while len(engine.served) < count:
        await asyncio.sleep(0.001)


async def test_requests_go_to_the_least_loaded_and_answers_keep_their_order(engines, request_for):
    pool = EnginePool(engines)
    for engine in engines:
        engine.free.clear()
    tasks = [asyncio.create_task(pool.generate(request_for(str(number)))) for number in range(6)]
    await asyncio.gather(*(started(engine, 2) for engine in engines))
    engines[1].free.set()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.01)
    # Engine 1 is idle now, the others have two requests each.
    more = [asyncio.create_task(pool.generate(request_for(str(number)))) for number in (6, 7)]
    await asyncio.gather(*more)
    assert [len(engine.served) for engine in engines] == [2, 4, 2]
    for engine in engines:
        engine.free.set()
    answers = await asyncio.gather(*tasks)
    assert [answer.request_id for answer in answers] == [str(number) for number in range(6)]


async def test_a_session_stays_on_its_engine(engines, request_for):
    pool = EnginePool(engines)
    for turn in range(4):
        for session in ("a", "b"):
            await pool.generate(request_for(f"{session}{turn}", session_id=session))
    homes = {
        session: {
            index for index, engine in enumerate(engines) for r in engine.served if r.session_id == session
        }
        for session in ("a", "b")
    }
    assert all(len(home) == 1 for home in homes.values())


async def test_a_dead_engine_is_replaced_by_another_and_left_out(engines, request_for):
    pool = EnginePool(engines)
    engines[0].failures = [EngineDeadError("gone")]
    answer = await pool.generate(request_for("x", session_id="s"))
    assert answer.request_id == "x"
    for number in range(6):
        await pool.generate(request_for(str(number)))
    assert len(engines[0].served) == 1
    await pool.close()


async def test_a_dead_engine_comes_back_when_it_is_healthy(engines, request_for):
    pool = EnginePool(engines[:2], revive_after_s=0.02)
    engines[0].failures = [EngineDeadError("gone")]
    engines[0].healthy = False
    await pool.generate(request_for())
    await asyncio.sleep(0.1)
    engines[1].failures = [EngineDeadError("gone too")]
    with pytest.raises(EngineDeadError, match="no engine of 2 is left: gone too"):
        await pool.generate(request_for())
    engines[0].healthy = True
    await asyncio.sleep(0.1)
    assert (await pool.generate(request_for("again"))).request_id == "again"
    await pool.close()


async def test_a_refused_request_is_not_tried_elsewhere(engines, request_for):
    pool = EnginePool(engines)
    engines[0].failures = [RequestError("too long")]
    with pytest.raises(RequestError, match="too long"):
        await pool.generate(request_for())
    assert [len(engine.served) for engine in engines] == [1, 0, 0]


async def test_control_calls_reach_every_engine_even_past_one_that_fails(engines):
    pool = EnginePool(engines)

    async def fail() -> None:
        raise EngineError("stuck")

    engines[0].flush_cache = fail
    with pytest.raises(EngineError, match="stuck"):
        await pool.flush_cache()
    assert [engine.calls for engine in engines[1:]] == [["flush"], ["flush"]]


async def test_one_unhealthy_engine_leaves_the_pool_healthy(engines):
    pool = EnginePool(engines)
    engines[0].healthy = False
    await pool.health()
    for engine in engines:
        engine.healthy = False
    with pytest.raises(EngineDeadError, match="its worker is gone"):
        await pool.health()


async def test_engines_of_different_stores_or_models_do_not_make_a_pool(engines):
    pool = EnginePool(engines)
    assert pool.capabilities.output_store is None
    engines[1].writer = object()
    with pytest.raises(EngineError, match=r"different output stores: \['None', 'memory'\]"):
        _ = pool.capabilities
    other = await engines[2].info()

    async def larger():
        return type(other)(
            model_path="x", weight_version="0", context_length=64, vocab_size=101, num_layers=2
        )

    engines[2].info = larger
    with pytest.raises(EngineError, match="engine 2 serves another model"):
        await pool.start()
