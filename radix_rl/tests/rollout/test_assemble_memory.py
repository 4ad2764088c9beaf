"""What a step's replay outputs take in memory while they are read."""

import tracemalloc

import numpy as np
import pytest

from radix_rl.rollout.sample import Sample
from radix_rl.train.replay.assemble import assemble_replay
from radix_rl.types import FinishReason, GenerateOutput, GenerateRequest
from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.codecs.narrow import NarrowCodec

NUM_SAMPLES, NUM_TOKENS, LAYERS, TOP_K = 16, 513, 48, 8


@pytest.fixture
def stored():
    """Samples of 512 rows, a byte an id, in two turns each; the store and the bytes that lie there."""
    config = {"name": "memory-of-a-step", "key_prefix": "test"}
    store = OutputStore(backend=create_backend("memory", config), codecs={"routed_experts": NarrowCodec(128)})
    samples = [sample_of(store, number) for number in range(NUM_SAMPLES)]
    yield samples, store, store.backend.stats().used_bytes
    store.delete_objects(older_than_s=0)
    store.close()


def sample_of(store: OutputStore, number: int) -> Sample:
    sample = None
    for start, end in ((0, 200), (200, NUM_TOKENS - 1)):
        request = GenerateRequest(
            request_id="r",
            input_ids=tuple(range(end)) if sample is None else (*sample.tokens, *range(end - 201)),
            return_routed_experts=True,
            routed_experts_start_len=start,
            return_outputs_via_store=True,
        )
        rows = np.full((end - start, LAYERS, TOP_K), number, np.int32)
        (ref,) = store.put_many(
            [TokenOutputStash(routed_experts=rows)], start_rows=[{"routed_experts": start}]
        )
        output = GenerateOutput(
            request_id="r",
            prompt_tokens=end,
            output_ids=(1,),
            output_logprobs=(-1.0,),
            finish_reason=FinishReason(type="stop"),
            version_spans=(),
            output_store_ref=ref,
        )
        if sample is None:
            sample = Sample.from_response(request, output, group_id=0, index=number, store_backend="memory")
        else:
            sample.add_response(request, output, store_backend="memory")
    assert sample is not None
    return sample


@pytest.mark.parametrize(("narrow", "dtype"), [(False, np.int32), (True, np.int8)])
def test_the_peak_is_that_of_the_result(stored, narrow, dtype):
    """And of one sample more, whose turns are being joined; the memory backend lends what it stores."""
    samples, store, num_bytes = stored
    tracemalloc.start()
    try:
        assembled = assemble_replay(samples, store, ["routed_experts"], num_bytes // 8, narrow=narrow)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {arrays["routed_experts"].dtype for arrays in assembled} == {np.dtype(dtype)}
    result_bytes = np.dtype(dtype).itemsize * num_bytes
    assert peak_bytes < result_bytes * (1 + 1.5 / NUM_SAMPLES)
    assert [int(arrays["routed_experts"].max()) for arrays in assembled] == list(range(NUM_SAMPLES))
