"""Several turns as one sample, each turn with its own rows only."""

import numpy as np
import pytest

from radix_rl.errors import EngineError, ReplayError
from radix_rl.rollout.refs import delete_refs
from radix_rl.rollout.session import Session
from radix_rl.train.replay.assemble import assemble_replay
from radix_rl.types import SamplingParams

THREE = SamplingParams(max_new_tokens=3)


@pytest.fixture
def session(engine, store):
    return Session(
        engine,
        [1, 2, 3, 4],
        group_id=5,
        index=1,
        replay=["routed_experts"],
        store=store,
        store_backend="memory",
    )


async def test_turns_and_tools_become_one_sample_with_every_row(session, engine, store, rows):
    async with session:
        await session.turn(THREE)
        session.inject([50, 51])
        await session.turn(THREE)
        session.inject([52])
    sample = session.sample
    assert sample.tokens == [1, 2, 3, 4, 1000, 1001, 1002, 50, 51, 1000, 1001, 1002, 52]
    assert sample.loss_mask == [1, 1, 1, 0, 0, 1, 1, 1, 0]
    # 7 tokens, then 12: rows [0, 6) and [6, 11); the last sampled and the injected token have none.
    assert [request.routed_experts_start_len for request in engine.requests] == [0, 6]
    assert len({request.session_id for request in engine.requests}) == 1
    assert len({request.request_id for request in engine.requests}) == 2
    (arrays,) = assemble_replay([sample], store, ["routed_experts"], 1 << 20)
    assert np.array_equal(arrays["routed_experts"][:11], rows(0, 11))
    assert (arrays["routed_experts"][11:] == -1).all()
    assert delete_refs([sample], store) == 2


async def test_an_error_frees_what_the_turns_before_stored(session, engine, store):
    async def talk() -> None:
        async with session:
            await session.turn(THREE)
            assert len(list(store.list_objects())) == 1
            engine.failures["generate"] = EngineError("gone")
            await session.turn(THREE)

    with pytest.raises(EngineError, match="gone"):
        await talk()
    assert list(store.list_objects()) == []


async def test_a_refused_turn_frees_its_own_object(session, engine, store):
    async with session:
        await session.turn(THREE)
        generate, first = engine.generate, engine.requests[0]
        engine.generate = lambda request: generate(first)
        with pytest.raises(ReplayError):
            await session.turn(THREE)
    assert len(list(store.list_objects())) == 1
    # Also the refused answer's ref is listed, so that nothing can be forgotten.
    assert delete_refs([session.sample], store) == 2


def test_a_session_without_a_turn_has_no_sample(session):
    with pytest.raises(ReplayError, match="no turn yet"):
        session.inject([1])
