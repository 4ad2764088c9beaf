"""Answers, rows and log-probabilities equal a plain forward pass, whatever shares the batch."""

import asyncio
import threading

import pytest
import torch

from radix_rl.engines.embedded.capture.rows import RowCapture
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.engines.embedded.step import ForwardStep
from radix_rl.errors import (
    ConfigurationError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    RequestError,
)
from radix_rl.types import FinishReason


async def test_mixed_batch_equals_one_full_forward_per_request(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    requests = [
        request_of(
            str(i),
            prompt(1 + (37 * i) % 120, i),
            max_new_tokens=(7 * i) % 40,
            temperature=(i % 3) / 2,
            seed=i,
            return_routed_experts=True,
            routed_experts_start_len=(37 * i) % 120 // 2 if i % 4 == 0 else 0,
        )
        for i in range(24)
    ]
    async with engine_of(qwen3_moe) as engine:
        outputs = await asyncio.gather(*[engine.generate(request) for request in requests])
        stats = await engine.stats()
    for request, output in zip(requests, outputs, strict=True):
        assert len(output.output_ids) == request.sampling.max_new_tokens
        check_against(qwen3_moe, request, output)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_tokens_used) == (0, 0, 0)


async def test_rows_are_recorded_in_the_steps_of_requests_that_ask_for_them(
    qwen3_moe, engine_of, prompt, request_of, check_against, monkeypatch
):
    recorded: list[frozenset[str]] = []
    store = RowCapture.store

    def spy(capture: RowCapture, step: ForwardStep) -> None:
        recorded.append(step.recorded)
        store(capture, step)

    monkeypatch.setattr(RowCapture, "store", spy)
    long = request_of("long", prompt(30, 1), max_new_tokens=30)
    asking = [
        request_of(f"asks-{i}", prompt(20 + i, i), max_new_tokens=5 + i, return_routed_experts=True)
        for i in range(3)
    ]
    async with engine_of(qwen3_moe) as engine:
        assert (await engine.generate(long)).outputs is None
        assert set(recorded) == {frozenset()}
        recorded.clear()
        outputs = await asyncio.gather(*[engine.generate(request) for request in (*asking, long)])
    for request, output in zip(asking, outputs[:-1], strict=True):
        check_against(qwen3_moe, request, output)
    assert outputs[-1].outputs is None
    assert recorded[0] == {"routed_experts"}
    assert recorded[-1] == frozenset()


async def test_greedy_tokens_equal_transformers_generate(qwen3_moe, engine_of, prompt, request_of):
    ids = prompt(20, 3)
    expected = qwen3_moe.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    async with engine_of(qwen3_moe) as engine:
        output = await engine.generate(request_of("a", ids, max_new_tokens=12, temperature=0.0))
    assert output.output_ids == tuple(expected[0, 20:].tolist())
    assert output.finish_reason.type == "length"
    assert output.finish_reason.length == 12


async def test_same_seed_gives_same_tokens_whatever_else_runs(qwen3_moe, engine_of, prompt, request_of):
    target = request_of("t", prompt(30, 1), max_new_tokens=25, temperature=1.0, seed=7)
    truncated = request_of("u", prompt(30, 1), max_new_tokens=25, temperature=1.0, seed=7, top_p=0.8)
    async with engine_of(qwen3_moe) as engine:
        alone = await engine.generate(target)
        alone_truncated = await engine.generate(truncated)
        others = [
            engine.generate(request_of(str(i), prompt(5 + 9 * i, i), max_new_tokens=5 * i + 1, top_k=3 + i))
            for i in range(12)
        ]
        together = await asyncio.gather(
            *others[:6], engine.generate(target), engine.generate(truncated), *others[6:]
        )
    assert together[6].output_ids == alone.output_ids
    assert together[7].output_ids == alone_truncated.output_ids
    assert alone.output_ids != alone_truncated.output_ids


async def test_requests_without_a_seed_differ(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        outputs = await asyncio.gather(
            *[engine.generate(request_of(str(i), prompt(8, 1), max_new_tokens=20)) for i in range(4)]
        )
    assert len({output.output_ids for output in outputs}) == 4


async def test_no_output_gives_a_row_for_every_prompt_token_and_no_mask(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    request = request_of(
        "a", prompt(13, 1), max_new_tokens=0, return_routed_experts=True, return_sampling_mask=True
    )
    async with engine_of(qwen3_moe) as engine:
        output = await engine.generate(request)
    assert output.output_ids == ()
    assert output.finish_reason.type == "length"
    assert len(output.outputs.routed_experts) == 13
    assert len(output.outputs.sampling_mask_lengths) == 0
    check_against(qwen3_moe, request, output)


async def test_start_at_the_last_row_gives_zero_rows_not_none(qwen3_moe, engine_of, prompt, request_of):
    request = request_of(
        "a", prompt(9, 1), max_new_tokens=1, return_routed_experts=True, routed_experts_start_len=9
    )
    async with engine_of(qwen3_moe) as engine:
        output = await engine.generate(request)
    assert output.outputs.routed_experts.shape == (0, 3, 2)
    assert output.routed_experts_start == 9


async def test_prompt_longer_than_a_chunk_equals_one_forward(
    qwen3_moe, engine_of, prompt, request_of, check_against
):
    request = request_of("a", prompt(200, 1), max_new_tokens=20, return_routed_experts=True, temperature=0.0)
    async with engine_of(qwen3_moe, chunked_prefill_tokens=16) as engine:
        short = asyncio.create_task(engine.generate(request_of("b", prompt(3, 2), max_new_tokens=100)))
        output = await engine.generate(request)
        await short
    check_against(qwen3_moe, request, output)


async def test_small_cache_serves_everyone_in_order_of_arrival(qwen3_moe, engine_of, prompt, request_of):
    finished: list[int] = []

    async def run(engine, i):
        # Every third request needs the whole cache to itself.
        new = 100 if i % 3 == 0 else 10
        await engine.generate(request_of(str(i), prompt(12, i), max_new_tokens=new))
        finished.append(i)

    async with engine_of(qwen3_moe, kv_cache_tokens=112, context_length=112) as engine:
        await asyncio.gather(*[run(engine, i) for i in range(9)])
    assert sorted(finished) == list(range(9))
    assert [i for i in finished if i % 3 == 0] == [0, 3, 6]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 250}, "context length of 256"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens"),
        ({"stop": ("x",)}, "no tokenizer"),
        ({"routed_experts_start_len": 13}, r"0 to 12 \(the prompt's tokens\), got 13"),
        ({"return_outputs_via_store": True}, "has no output store"),
        ({"return_indexer_topk": True}, "enable_return_indexer_topk"),
    ],
)
async def test_request_that_can_never_be_served_is_refused_with_numbers(
    qwen3_moe, engine_of, prompt, request_of, fields, message
):
    async with engine_of(qwen3_moe) as engine:
        with pytest.raises(RequestError, match=message):
            await engine.generate(request_of("a", prompt(12, 1), **fields))
        assert len((await engine.generate(request_of("a", prompt(12, 1), max_new_tokens=3))).output_ids) == 3


async def test_a_sampling_mask_without_a_bound_is_refused_and_what_is_kept_is_counted(
    qwen3_moe, engine_of, prompt, request_of
):
    async with engine_of(qwen3_moe, sampling_mask_max_tokens=20) as engine:
        fields = {"max_new_tokens": 6, "return_sampling_mask": True}
        for unbounded in ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 21}):
            with pytest.raises(RequestError, match=r"raise sampling_mask_max_tokens .* engine\.sampling_m"):
                await engine.generate(request_of("a", prompt(12, 1), **fields, **unbounded))
        bounded = await engine.generate(request_of("a", prompt(12, 1), **fields, top_k=20))
        greedy = await engine.generate(request_of("b", prompt(12, 1), **fields, temperature=0.0))
        assert (await engine.stats()).sampling_mask_ids == 6 * 20 + 6
    assert bounded.outputs.sampling_mask_lengths.tolist() == [20] * 6
    assert greedy.outputs.sampling_mask_lengths.tolist() == [1] * 6


async def test_request_larger_than_the_cache_is_refused(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe, kv_cache_tokens=64) as engine:
        with pytest.raises(RequestError, match=r"cache of 112 tokens, but the engine's holds 64"):
            await engine.generate(request_of("a", prompt(12, 1), max_new_tokens=100))


async def test_token_outside_the_vocabulary_is_refused(qwen3_moe, engine_of, request_of):
    async with engine_of(qwen3_moe) as engine:
        with pytest.raises(RequestError, match=r"\[0, 128\), got 128"):
            await engine.generate(request_of("a", (1, 128), max_new_tokens=3))
        with pytest.raises(RequestError, match="at least one token"):
            await engine.generate(request_of("a", (), max_new_tokens=3))


async def test_id_of_a_running_request_is_refused(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        await engine.pause()
        first = asyncio.create_task(engine.generate(request_of("a", prompt(4, 1), max_new_tokens=3)))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="'a' belongs to a running request"):
            await engine.generate(request_of("a", prompt(4, 1), max_new_tokens=3))
        await engine.resume()
        assert len((await first).output_ids) == 3


async def test_stop_token_ends_the_answer_and_stays_in_it(qwen3_moe, engine_of, prompt, request_of):
    ids = prompt(10, 5)
    async with engine_of(qwen3_moe) as engine:
        free = await engine.generate(request_of("a", ids, max_new_tokens=20, temperature=0.0))
        stop = free.output_ids[4]
        first = free.output_ids.index(stop)
        stopped = await engine.generate(
            request_of("b", ids, max_new_tokens=20, temperature=0.0, stop_token_ids=(stop,))
        )
        later = await engine.generate(
            request_of(
                "c", ids, max_new_tokens=20, temperature=0.0, stop_token_ids=(stop,), min_new_tokens=12
            )
        )
        ignored = await engine.generate(
            request_of("d", ids, max_new_tokens=20, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
        )
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert stopped.finish_reason.type == "stop"
    assert stopped.finish_reason.matched == stop
    assert len(later.output_ids) >= 12
    assert stop not in later.output_ids[:11]
    assert ignored.output_ids == free.output_ids


async def test_answer_whose_last_allowed_token_is_a_stop_token_is_not_cut_off(
    qwen3_moe, engine_of, prompt, request_of
):
    """As SGLang has it: a finished sample must not look like a truncated one."""
    ids = prompt(10, 5)
    async with engine_of(qwen3_moe) as engine:
        free = await engine.generate(request_of("a", ids, max_new_tokens=3, temperature=0.0))
        stop = free.output_ids[-1]
        length = free.output_ids.index(stop) + 1
        stopped = await engine.generate(
            request_of("b", ids, max_new_tokens=length, temperature=0.0, stop_token_ids=(stop,))
        )
    assert stopped.output_ids == free.output_ids[:length]
    assert stopped.finish_reason == FinishReason(type="stop", matched=stop)


async def test_stream_shows_a_growing_answer_and_ends_with_the_whole_one(
    qwen3_moe, engine_of, prompt, request_of
):
    request = request_of("a", prompt(10, 5), max_new_tokens=20, seed=3, return_routed_experts=True)
    async with engine_of(qwen3_moe) as engine:
        whole = await engine.generate(request)
        parts = [part async for part in engine.stream(request)]
    *partial, last = parts
    assert last.output_ids == whole.output_ids
    assert len(last.outputs.routed_experts) == 29
    assert all(last.output_ids[: len(part.output_ids)] == part.output_ids for part in partial)
    lengths = [len(part.output_ids) for part in partial]
    assert lengths == sorted(set(lengths))


async def test_closing_a_stream_ends_its_request(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        stream = engine.stream(request_of("a", prompt(10, 5), max_new_tokens=200))
        await anext(stream)
        await stream.aclose()
        assert (await engine.stats()).num_running == 0


async def test_worker_that_raises_fails_its_requests_and_health(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        await engine.health()
        running = asyncio.create_task(engine.generate(request_of("a", prompt(4, 1), max_new_tokens=200)))
        await asyncio.sleep(0.02)

        def break_model(*_args: object) -> None:
            raise RuntimeError("boom")

        engine._core_now().runner.model.register_forward_pre_hook(break_model)
        with pytest.raises(EngineDeadError, match="boom"):
            await running
        with pytest.raises(EngineDeadError, match="boom"):
            await engine.health()
        with pytest.raises(EngineDeadError):
            await engine.generate(request_of("b", prompt(4, 1), max_new_tokens=2))


async def test_stop_ids_outside_the_vocabulary_are_refused_and_harm_nobody(
    qwen3_moe, engine_of, prompt, request_of
):
    # The model's own end token may be one that only its tokenizer has: it is never sampled.
    qwen3_moe.generation_config.eos_token_id = 500
    async with engine_of(qwen3_moe) as engine:
        for token in (128, -1):
            request = request_of("a", prompt(4, 1), max_new_tokens=4, stop_token_ids=(token,))
            with pytest.raises(
                RequestError, match=rf"stop_token_ids: expected ids in \[0, 128\), got {token}"
            ):
                await engine.generate(request)
        output = await engine.generate(request_of("b", prompt(4, 1), max_new_tokens=4, min_new_tokens=2))
    assert len(output.output_ids) == 4


async def test_an_answer_that_cannot_be_decoded_fails_its_request_and_no_other(
    qwen3_moe, engine_of, prompt, request_of
):
    class Undecodable:
        eos_token_id = None

        def decode(self, token_ids, **_):
            raise IndexError("piece id is out of range")

    async with engine_of(qwen3_moe, Undecodable()) as engine:
        other = asyncio.create_task(engine.generate(request_of("a", prompt(4, 1), max_new_tokens=40)))
        with pytest.raises(EngineError, match="piece id is out of range"):
            await engine.generate(request_of("b", prompt(4, 2), max_new_tokens=40, stop=("x",)))
        assert len((await other).output_ids) == 40
        assert (await engine.stats()).num_running == 0


async def test_a_cache_that_is_no_multiple_of_a_slot_serves_its_whole_context(
    qwen3_moe, engine_of, prompt, request_of
):
    async with engine_of(qwen3_moe, kv_cache_tokens=100, context_length=None) as engine:
        context = (await engine.info()).context_length
        output = await engine.generate(request_of("a", prompt(50, 1), max_new_tokens=context - 50))
    assert context == 96
    assert len(output.output_ids) == 46


@pytest.mark.parametrize(("num_tokens", "elsewhere"), [(8, False), (9, True)])
async def test_long_masks_are_joined_off_the_event_loop(
    num_tokens, elsewhere, qwen3_moe, engine_of, prompt, request_of, monkeypatch
):
    from radix_rl.engines.embedded import outputs

    threads: list[threading.Thread] = []
    stash_of = outputs.stash_of

    def spy(sequence):
        threads.append(threading.current_thread())
        return stash_of(sequence)

    monkeypatch.setattr(outputs, "stash_of", spy)
    monkeypatch.setattr(outputs, "_AT_ONCE_BYTES", 8 * 4)
    async with engine_of(qwen3_moe) as engine:
        request = request_of(
            "a", prompt(4, 1), max_new_tokens=num_tokens, return_sampling_mask=True, temperature=0.0
        )
        assert (await engine.generate(request)).outputs is not None
    (thread,) = threads
    assert (thread is not threading.current_thread()) == elsewhere


async def test_a_cancelled_start_ends_quietly(settings, monkeypatch):
    from radix_rl.engines.embedded import engine as module

    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    released = threading.Event()

    def too_late(*_args):
        released.wait(10)
        raise ConfigurationError("no such model")

    monkeypatch.setattr(module, "build_core", too_late)
    engine = EmbeddedEngine(settings(model_path="/nonexistent"))
    start = asyncio.create_task(engine.start())
    while engine._worker is None:
        await asyncio.sleep(0)
    start.cancel()
    await asyncio.sleep(0.01)
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    await engine.close()
    assert raised == []


async def test_exception_inside_a_step_leaves_no_step_active(qwen3_moe, prompt):
    from radix_rl.engines.embedded.step import active_step, running_step

    with pytest.raises(RuntimeError), running_step(object()):  # type: ignore[arg-type]
        raise RuntimeError
    assert active_step() is None


async def test_close_ends_the_worker_and_fails_what_still_runs(qwen3_moe, engine_of, prompt, request_of):
    async with engine_of(qwen3_moe) as engine:
        running = asyncio.create_task(engine.generate(request_of("a", prompt(4, 1), max_new_tokens=200)))
        await asyncio.sleep(0.02)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await running
    assert not [t for t in threading.enumerate() if t.name == "embedded-engine"]


async def test_calls_before_start_say_so(qwen3_moe, settings, prompt, request_of):
    from radix_rl.engines.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine(settings(), model=qwen3_moe)
    with pytest.raises(EngineStateError, match="not started"):
        await engine.generate(request_of("a", prompt(4, 1)))


async def test_path_that_is_no_model_is_refused(settings, tmp_path):
    from radix_rl.engines.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine(settings(model_path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigurationError, match="nowhere"):
        await engine.start()
