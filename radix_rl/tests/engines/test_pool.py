"""Several engines as one: load, sessions, and the death of one of them."""

import asyncio

import msgspec
import pytest

from radix_rl.engines.pool import EnginePool
from radix_rl.errors import EngineDeadError, EngineError, RequestError
from radix_rl.testing import ScriptedEngine, wait_for


@pytest.fixture
def engines(make_engine):
    return [make_engine() for _ in range(3)]


async def started(engine, count: int) -> None:
    await wait_for(lambda: len(engine.requests) >= count, f"{count} requests started")


async def test_requests_go_to_the_least_loaded_and_answers_keep_their_order(engines, request_for):
    pool = EnginePool(engines)
    for engine in engines:
        engine.hold()
    tasks = [asyncio.create_task(pool.generate(request_for(str(number)))) for number in range(6)]
    await asyncio.gather(*(started(engine, 2) for engine in engines))
    engines[1].release()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.01)
    # Engine 1 is idle now, the others have two requests each.
    more = [asyncio.create_task(pool.generate(request_for(str(number)))) for number in (6, 7)]
    await asyncio.gather(*more)
    assert [len(engine.requests) for engine in engines] == [2, 4, 2]
    for engine in engines:
        engine.release()
    answers = await asyncio.gather(*tasks)
    assert [answer.request_id for answer in answers] == [str(number) for number in range(6)]


async def test_a_session_stays_on_its_engine(engines, request_for):
    pool = EnginePool(engines)
    for turn in range(4):
        for session in ("a", "b"):
            await pool.generate(request_for(f"{session}{turn}", session_id=session))
    homes = {
        session: {
            index for index, engine in enumerate(engines) for r in engine.requests if r.session_id == session
        }
        for session in ("a", "b")
    }
    assert all(len(home) == 1 for home in homes.values())


async def test_a_dead_engine_is_replaced_by_another_and_left_out(engines, request_for):
    pool = EnginePool(engines)
    engines[0].failures["generate"] = [EngineDeadError("gone")]
    answer = await pool.generate(request_for("x", session_id="s"))
    assert answer.request_id == "x"
    for number in range(6):
        await pool.generate(request_for(str(number)))
    assert len(engines[0].requests) == 1
    await pool.close()


async def test_a_dead_engine_comes_back_when_it_is_healthy(engines, request_for):
    pool = EnginePool(engines[:2], revive_after_s=0.02)
    engines[0].failures["generate"] = [EngineDeadError("gone")]
    engines[0].failures["health"] = EngineDeadError("its worker is gone")
    await pool.generate(request_for())
    await asyncio.sleep(0.1)
    engines[1].failures["generate"] = [EngineDeadError("gone too")]
    with pytest.raises(EngineDeadError, match="no engine of 2 is left: gone too"):
        await pool.generate(request_for())
    engines[0].failures.clear()
    await asyncio.sleep(0.1)
    assert (await pool.generate(request_for("again"))).request_id == "again"
    await pool.close()


async def test_a_refused_request_is_not_tried_elsewhere(engines, request_for):
    pool = EnginePool(engines)
    engines[0].failures["generate"] = [RequestError("too long")]
    with pytest.raises(RequestError, match="too long"):
        await pool.generate(request_for())
    assert [len(engine.requests) for engine in engines] == [1, 0, 0]


async def test_control_calls_reach_every_engine_even_past_one_that_fails(engines):
    pool = EnginePool(engines)
    engines[0].failures["flush_cache"] = EngineError("stuck")
    with pytest.raises(EngineError, match="stuck"):
        await pool.flush_cache()
    assert [engine.calls for engine in engines[1:]] == [[("flush_cache",)]] * 2


async def test_one_unhealthy_engine_leaves_the_pool_healthy(engines):
    pool = EnginePool(engines)
    engines[0].failures["health"] = EngineDeadError("its worker is gone")
    await pool.health()
    for engine in engines:
        engine.failures["health"] = EngineDeadError("its worker is gone")
    with pytest.raises(EngineDeadError, match="its worker is gone"):
        await pool.health()


async def test_engines_of_different_stores_or_models_do_not_make_a_pool(engines):
    assert EnginePool(engines).capabilities.output_store is None
    with pytest.raises(EngineError, match=r"different output stores: \['None', 'memory'\]"):
        _ = EnginePool([*engines, ScriptedEngine(output_store="memory")]).capabilities
    larger = msgspec.structs.replace(await engines[0].info(), vocab_size=2001)
    with pytest.raises(EngineError, match="engine 3 serves another model"):
        await EnginePool([*engines, ScriptedEngine(info=larger)]).start()
