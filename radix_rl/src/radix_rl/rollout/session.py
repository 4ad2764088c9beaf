"""`Session`: a conversation of several turns that becomes one sample."""

import uuid
from collections.abc import Collection, Sequence

from radix_rl.engines.base import Engine
from radix_rl.errors import ReplayError
from radix_rl.rollout.refs import delete_refs, discard_answer, in_thread_to_end
from radix_rl.rollout.sample import Sample
from radix_rl.types import GenerateOutput, GenerateRequest, SamplingParams
from radix_transfer_plugins import OutputStore


class Session:
    """Turns of one policy with what tools or an environment put between them. Nothing is ever re-tokenized.

    Each turn asks only for the replay rows that the turns before did not bring, so the payload of a turn is
    that of its new tokens. All turns carry one session id, and a pool keeps them on one engine, whose
    cached prefix they share. Use as an async context manager: leaving it by an error deletes what the turns
    stored; after a clean exit the sample's refs are the caller's.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: Sequence[int],
        *,
        group_id: int,
        index: int = 0,
        replay: Collection[str] = (),
        store: OutputStore | None = None,
        store_backend: str | None = None,
    ) -> None:
        """`replay`, `store`, `store_backend`: as for RolloutGenerator."""
        self._engine = engine
        self._prompt_ids = tuple(prompt_ids)
        self._group_id = group_id
        self._index = index
        self._replay = frozenset(replay)
        self._store = store
        self._store_backend = store_backend
        self._session_id = uuid.uuid4().hex
        self._num_turns = 0
        self._sample: Sample | None = None

    @property
    def sample(self) -> Sample:
        """All tokens so far. Raises ReplayError before the first turn."""
        if self._sample is None:
            raise ReplayError("the session has had no turn yet")
        return self._sample

    async def turn(self, sampling: SamplingParams) -> GenerateOutput:
        """Let the policy speak after everything so far. Raises RequestError, EngineError, ReplayError."""
        sample = self._sample
        request = GenerateRequest(
            request_id=f"{self._session_id}-{self._num_turns}",
            input_ids=self._prompt_ids if sample is None else tuple(sample.tokens),
            sampling=sampling,
            return_routed_experts="routed_experts" in self._replay,
            routed_experts_start_len=0 if sample is None else sample.replay.covered_rows,
            return_indexer_topk="indexer_topk" in self._replay,
            return_sampling_mask="sampling_mask" in self._replay,
            return_outputs_via_store=bool(self._replay) and self._store is not None,
            session_id=self._session_id,
        )
        self._num_turns += 1
        output = await self._engine.generate(request)
        try:
            if sample is None:
                self._sample = Sample.from_response(
                    request,
                    output,
                    group_id=self._group_id,
                    index=self._index,
                    store_backend=self._store_backend,
                )
            else:
                sample.add_response(request, output, store_backend=self._store_backend)
        except Exception:
            await in_thread_to_end(discard_answer, output, self._store)
            raise
        return output

    def inject(self, token_ids: Sequence[int]) -> None:
        """Append what a tool or the environment says: context of the next turn, never trained on."""
        self.sample.add_injected(token_ids)

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._sample is not None and self._store is not None:
            await in_thread_to_end(delete_refs, [self._sample], self._store)
