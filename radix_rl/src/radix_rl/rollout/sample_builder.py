"""`SampleBuilder`: asks for the next piece of a sample, and joins the answer to what is there."""

from collections.abc import Collection, Sequence

from radix_rl.concurrency import in_thread_to_end
from radix_rl.rollout.refs import discard_answer
from radix_rl.rollout.sample import Sample
from radix_rl.types import GenerateOutput, GenerateRequest, SamplingParams
from radix_transfer_plugins import OutputStore


class SampleBuilder:
    """The replay outputs that the trainer needs, and how they travel. Holds no state between calls."""

    def __init__(
        self, replay: Collection[str] = (), store: OutputStore | None = None, store_backend: str | None = None
    ) -> None:
        """`replay`: which of "routed_experts", "indexer_topk" and "sampling_mask" the trainer needs.

        With `store` they travel through it, and `store_backend` is its registered name.
        """
        self.replay = frozenset(replay)
        self.store = store
        self.store_backend = store_backend

    def request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        sample: Sample | None,
        session_id: str | None = None,
    ) -> GenerateRequest:
        """The first request of a sample (`sample` is None), or the one that goes on where it ends.

        Asks only for the replay rows that the sample does not have yet.
        """
        return GenerateRequest(
            request_id=request_id,
            input_ids=tuple(prompt_ids if sample is None else sample.tokens),
            sampling=sampling,
            return_routed_experts="routed_experts" in self.replay,
            routed_experts_start_len=0 if sample is None else sample.replay.covered_rows,
            return_indexer_topk="indexer_topk" in self.replay,
            return_sampling_mask="sampling_mask" in self.replay,
            return_outputs_via_store=bool(self.replay) and self.store is not None,
            session_id=session_id,
        )

    async def join(
        self,
        request: GenerateRequest,
        output: GenerateOutput,
        *,
        sample: Sample | None,
        group_id: int,
        index: int,
    ) -> Sample:
        """`sample` with one more answer, or a new one.

        An answer that is refused does not leave its object behind. Raises ReplayError.
        """
        try:
            if sample is None:
                return Sample.from_response(
                    request, output, group_id=group_id, index=index, store_backend=self.store_backend
                )
            sample.add_response(request, output, store_backend=self.store_backend)
            return sample
        except Exception:
            await in_thread_to_end(discard_answer, output, self.store)
            raise
