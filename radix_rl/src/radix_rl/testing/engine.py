"""What every engine promises to rollout, server and weight sync (`engines/base.py`), as tests.

class TestMyEngine(EngineConformance):
    @pytest.fixture
    def engine(self):
        return MyEngine(...)

The suite starts the engine and closes it. What the engine's capabilities name is asked of it; what they leave
out must be refused with the contract's errors. An engine with an output store also needs the fixture `store`,
one whose weights can be sent as buckets the fixture `other_weights`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import pytest_asyncio
import torch

from radix_rl.buckets.bucket import WeightBucket, pack_buckets
from radix_rl.engines.base import Engine, MemoryTag, PauseMode
from radix_rl.errors import EngineError, EngineStateError, RequestError
from radix_rl.testing.waiting import wait_for
from radix_rl.types import GenerateOutput, GenerateRequest, PartialOutput, SamplingParams
from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash

REFUSED = (RequestError, EngineError)
BUCKET_BYTES = 1 << 14
FIELDS = ("routed_experts", "indexer_topk", "sampling_mask")

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@pytest.mark.asyncio
class EngineConformance:
    """Subclass it, define the fixture `engine`, and every test of it runs against your engine."""

    prompt_ids: ClassVar[tuple[int, ...]] = tuple(range(3, 15))
    long_tokens: ClassVar[int] = 900
    """So many output tokens take the engine longer than `begins_within_s`, and it has room for them."""
    begins_within_s: ClassVar[float] = 0.25
    """A request that was asked for begins in this time."""

    @pytest.fixture
    def engine(self) -> Engine:
        """An engine that was not started; greedy answers of 6 tokens to `prompt_ids` do not end earlier."""
        raise NotImplementedError("define the fixture `engine`")

    @pytest.fixture
    def store(self) -> OutputStore | None:
        """A reader of the store that the engine writes to; nothing else uses it during a test."""
        return None

    @pytest.fixture
    def other_weights(self) -> NamedTensors | None:
        """Every parameter of the engine's model with values that change its greedy answer."""
        return None

    @pytest_asyncio.fixture
    async def started(self, engine: Engine) -> AsyncIterator[Engine]:
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    def ask(self, request_id: str = "r", **changes: Any) -> GenerateRequest:
        """Six greedy tokens; `changes` are fields of the request or of its sampling parameters."""
        own = {name: changes.pop(name) for name in [*changes] if name in GenerateRequest.__struct_fields__}
        sampling = SamplingParams(**({"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True} | changes))
        fields: dict[str, Any] = {
            "request_id": request_id,
            "input_ids": self.prompt_ids,
            "sampling": sampling,
        }
        return GenerateRequest(**(fields | own))

    async def begin_long(self, engine: Engine, **changes: Any) -> "asyncio.Task[GenerateOutput]":
        """A running request "long"."""
        changes = {"max_new_tokens": self.long_tokens} | changes
        task = asyncio.create_task(engine.generate(self.ask("long", **changes)))
        await asyncio.sleep(self.begins_within_s)
        assert not task.done(), "the long request ended at once; raise long_tokens"
        return task

    # Answers

    async def test_info_is_that_of_the_start(self, engine: Engine) -> None:
        try:
            assert await engine.start() == await engine.info()
        finally:
            await engine.close()

    async def test_an_answer_has_the_tokens_that_were_asked_for(self, started: Engine) -> None:
        output = await started.generate(self.ask("mine"))
        assert (output.request_id, output.prompt_tokens) == ("mine", len(self.prompt_ids))
        assert len(output.output_ids) == len(output.output_logprobs) == 6
        assert all(logprob <= 0 for logprob in output.output_logprobs)
        assert output.finish_reason.type == "length"
        assert output.outputs is None
        assert output.output_store_ref is None

    async def test_version_spans_cover_the_output_once(self, started: Engine) -> None:
        output = await started.generate(self.ask())
        version = (await started.info()).weight_version
        assert [(span.start, span.end, span.version) for span in output.version_spans] == [(0, 6, version)]

    async def test_greedy_answers_repeat_whatever_else_runs(self, started: Engine) -> None:
        alone = await started.generate(self.ask())
        together = await asyncio.gather(*(started.generate(self.ask(f"r{i}")) for i in range(4)))
        assert {output.output_ids for output in together} == {alone.output_ids}

    async def test_the_same_seed_gives_the_same_tokens(self, started: Engine) -> None:
        first, second = await asyncio.gather(
            started.generate(self.ask("a", temperature=1.0, seed=7)),
            started.generate(self.ask("b", temperature=1.0, seed=7)),
        )
        assert first.output_ids == second.output_ids

    async def test_a_stop_token_ends_the_answer_and_is_part_of_it(self, started: Engine) -> None:
        whole = (await started.generate(self.ask())).output_ids
        stop = whole[3]
        output = await started.generate(self.ask(stop_token_ids=(stop,), ignore_eos=False))
        assert output.output_ids == whole[: whole.index(stop) + 1]
        assert (output.finish_reason.type, output.finish_reason.matched) == ("stop", stop)

    async def test_a_stream_grows_and_ends_with_the_answer(self, started: Engine) -> None:
        expected = (await started.generate(self.ask())).output_ids
        seen = [output async for output in started.stream(self.ask())]
        assert isinstance(seen[-1], GenerateOutput)
        assert seen[-1].output_ids == expected
        for partial in seen[:-1]:
            assert isinstance(partial, PartialOutput)
            assert partial.output_ids == expected[: len(partial.output_ids)]

    # Refusals

    @pytest.mark.parametrize(
        "bad",
        [{"top_p": 0.0}, {"temperature": -1.0}, {"input_ids": ()}, {"max_new_tokens": 1 << 30}],
        ids=lambda bad: next(iter(bad)),
    )
    async def test_a_request_that_cannot_be_met_is_the_request_s_error(
        self, started: Engine, bad: dict[str, Any]
    ) -> None:
        with pytest.raises(RequestError):
            await started.generate(self.ask(**bad))
        assert len((await started.generate(self.ask())).output_ids) == 6

    @pytest.mark.parametrize("field", FIELDS)
    async def test_outputs_that_the_engine_does_not_give_are_refused(
        self, started: Engine, field: str
    ) -> None:
        if getattr(started.capabilities, field):
            pytest.skip(f"the engine gives {field}")
        request = self.ask("r", **{f"return_{field}": True})
        with pytest.raises(RequestError):
            started.check(request)
        with pytest.raises(RequestError):
            await started.generate(request)

    async def test_what_the_engine_answers_passes_its_check(self, started: Engine) -> None:
        started.check(self.ask())

    async def test_storing_without_a_store_is_refused(self, started: Engine) -> None:
        if started.capabilities.output_store is not None:
            pytest.skip("the engine has a store")
        with pytest.raises(RequestError):
            started.check(self._stored())
        with pytest.raises(RequestError):
            await started.generate(self._stored())

    # Replay outputs

    async def test_rows_are_those_of_every_token_that_was_put_through(self, started: Engine) -> None:
        rows = await self._expert_rows(started, 0)
        info = await started.info()
        assert rows.shape == (len(self.prompt_ids) + 5, info.num_layers, info.experts_per_token)

    async def test_rows_begin_where_they_were_asked_for(self, started: Engine) -> None:
        whole, later = await self._expert_rows(started, 0), await self._expert_rows(started, 4)
        np.testing.assert_array_equal(later, whole[4:])

    async def test_stored_rows_are_the_inline_ones(self, started: Engine, store: OutputStore | None) -> None:
        reader = self._reader(started, store)
        inline = await self._expert_rows(started, 0)
        output = await started.generate(self._stored())
        ref = output.output_store_ref
        assert output.outputs is None
        assert ref is not None
        (stash,) = reader.read_many(
            [(ref, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 20
        )
        np.testing.assert_array_equal(stash.routed_experts, inline)
        reader.delete_many([ref])

    async def test_cancelling_leaves_no_object(self, started: Engine, store: OutputStore | None) -> None:
        reader = self._reader(started, store)
        task = await self.begin_long(started, return_routed_experts=True, return_outputs_via_store=True)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await started.generate(self.ask("next"))).output_ids) == 6
        # An answer that was on its way is deleted behind the caller's back.
        await asyncio.sleep(0.1)
        await wait_for(lambda: not [*reader.list_objects()], "the object of the cancelled request is deleted")

    async def test_an_aborted_answer_s_object_has_the_rows_of_its_tokens(
        self, started: Engine, store: OutputStore | None
    ) -> None:
        reader = self._reader(started, store)
        task = await self.begin_long(started, return_routed_experts=True, return_outputs_via_store=True)
        await started.abort("long")
        output = await task
        ref: StoreRef | None = output.output_store_ref
        assert ref is not None
        assert ref.fields["routed_experts"].shape[0] == len(self.prompt_ids) + len(output.output_ids) - 1
        reader.delete_many([ref])

    # Aborts and pauses

    async def test_an_abort_answers_with_what_there_is(self, started: Engine) -> None:
        task = await self.begin_long(started)
        await started.abort("long")
        output = await task
        assert output.finish_reason.type == "abort"
        assert len(output.output_ids) < self.long_tokens

    async def test_an_abort_without_an_id_ends_all(self, started: Engine) -> None:
        task = await self.begin_long(started)
        await started.abort()
        assert (await task).finish_reason.type == "abort"

    async def test_aborting_an_unknown_id_is_ignored(self, started: Engine) -> None:
        await started.abort("nobody")
        assert len((await started.generate(self.ask())).output_ids) == 6

    @pytest.mark.parametrize("mode", get_args(PauseMode))
    async def test_a_pause_holds_requests_until_the_engine_resumes(
        self, started: Engine, mode: PauseMode
    ) -> None:
        if mode not in started.capabilities.pause_modes:
            with pytest.raises(REFUSED):
                await started.pause(mode)
            return
        task = await self.begin_long(started)
        await started.pause(mode)
        queued = asyncio.create_task(started.generate(self.ask("queued")))
        await asyncio.sleep(self.begins_within_s)
        assert not queued.done()
        if mode == "abort":
            assert (await task).finish_reason.type == "abort"
        else:
            assert not task.done()
        await started.resume()
        assert len((await queued).output_ids) == 6
        if mode != "abort":
            await started.abort("long")
            assert len((await task).output_ids) > 0

    async def test_pausing_twice_is_refused_and_resuming_twice_is_not(self, started: Engine) -> None:
        mode = started.capabilities.pause_modes[0]
        await started.pause(mode)
        with pytest.raises(EngineStateError):
            await started.pause(mode)
        await started.resume()
        await started.resume()
        assert len((await started.generate(self.ask())).output_ids) == 6

    # Memory and weights

    @pytest.mark.parametrize("tag", get_args(MemoryTag))
    async def test_an_engine_without_its_memory_refuses(self, started: Engine, tag: MemoryTag) -> None:
        if tag not in started.capabilities.sleep_tags:
            with pytest.raises(REFUSED):
                await started.sleep([tag])
            return
        await started.sleep([tag])
        await started.sleep([tag])
        with pytest.raises(EngineError):
            await started.generate(self.ask())
        with pytest.raises(EngineError):
            await started.health()
        if tag == "kv_cache":
            await started.wake([tag])
            await started.wake([tag])
            await started.health()
            assert len((await started.generate(self.ask())).output_ids) == 6

    async def test_new_weights_are_in_force_after_the_commit_and_not_before(
        self, started: Engine, other_weights: NamedTensors | None
    ) -> None:
        buckets = await self._buckets(started, other_weights)
        before = await started.generate(self.ask())
        await started.begin_weight_update("7")
        await started.update_weights(buckets[0])
        assert (await started.generate(self.ask())).output_ids == before.output_ids
        await started.abort_weight_update()
        await started.abort_weight_update()
        assert (await started.generate(self.ask())).output_ids == before.output_ids
        await self._send(started, buckets, "7")
        after = await started.generate(self.ask())
        assert (await started.info()).weight_version == "7"
        assert after.output_ids != before.output_ids
        assert [span.version for span in after.version_spans] == ["7"]

    async def test_dropped_weights_come_back_with_a_whole_update(
        self, started: Engine, other_weights: NamedTensors | None
    ) -> None:
        buckets = await self._buckets(started, other_weights)
        if "weights" not in started.capabilities.sleep_tags:
            pytest.skip("the engine keeps its weights")
        await self._send(started, buckets, "1")
        before = await started.generate(self.ask())
        await started.sleep()
        await started.wake(["weights"])
        with pytest.raises(EngineError):
            await started.generate(self.ask())
        await self._send(started, buckets, "2")
        await started.wake()
        await started.health()
        assert (await started.generate(self.ask())).output_ids == before.output_ids

    async def test_flushing_the_cache_changes_no_answer(self, started: Engine) -> None:
        before = await started.generate(self.ask())
        await started.flush_cache()
        assert (await started.generate(self.ask())).output_ids == before.output_ids

    # The end

    async def test_closing_twice_is_harmless_and_ends_what_runs(self, started: Engine) -> None:
        task = await self.begin_long(started)
        await started.close()
        await started.close()
        with pytest.raises((EngineError, RuntimeError)):
            await task

    # Parts

    def _stored(self) -> GenerateRequest:
        return self.ask(return_routed_experts=True, return_outputs_via_store=True)

    async def _expert_rows(self, engine: Engine, start: int) -> np.ndarray:
        if not engine.capabilities.routed_experts:
            pytest.skip("the engine gives no routed experts")
        request = self.ask(return_routed_experts=True, routed_experts_start_len=start)
        output = await engine.generate(request)
        assert output.routed_experts_start == start
        assert output.outputs is not None
        assert output.outputs.routed_experts is not None
        return output.outputs.routed_experts

    def _reader(self, engine: Engine, store: OutputStore | None) -> OutputStore:
        if engine.capabilities.output_store is None:
            pytest.skip("the engine has no store")
        if not engine.capabilities.routed_experts:
            pytest.skip("the engine gives no routed experts")
        assert store is not None, "an engine with an output store: define the fixture `store`"
        return store

    async def _buckets(self, engine: Engine, weights: NamedTensors | None) -> list[WeightBucket]:
        if not {"memory", "http"} & set(engine.capabilities.weight_transports):
            with pytest.raises(REFUSED):
                await engine.update_weights(next(pack_buckets([("x", torch.zeros(1))], BUCKET_BYTES)))
            pytest.skip("the engine takes no buckets")
        assert weights is not None, "an engine that takes weights: define the fixture `other_weights`"
        return [*pack_buckets(weights, BUCKET_BYTES)]

    async def _send(self, engine: Engine, buckets: Iterable[WeightBucket], version: str) -> None:
        await engine.begin_weight_update(version)
        for bucket in buckets:
            await engine.update_weights(bucket)
        await engine.commit_weight_update(version)
