"""`Session`: a conversation of several turns that becomes one sample."""

import uuid
from collections.abc import Collection, Sequence

from radix_rl.concurrency import in_thread_to_end
from radix_rl.engines.base import Engine
from radix_rl.errors import ReplayError
from radix_rl.rollout.refs import delete_refs
from radix_rl.rollout.sample import Sample
from radix_rl.rollout.sample_builder import SampleBuilder
from radix_rl.types import GenerateOutput, SamplingParams
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
        """`replay`, `store`, `store_backend`: as for SampleBuilder."""
        self._engine = engine
        self._prompt_ids = tuple(prompt_ids)
        self._group_id = group_id
        self._index = index
        self._builder = SampleBuilder(replay, store, store_backend)
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
        request = self._builder.request(
            f"{self._session_id}-{self._num_turns}",
            self._prompt_ids,
            sampling,
            sample=self._sample,
            session_id=self._session_id,
        )
        self._num_turns += 1
        output = await self._engine.generate(request)
        self._sample = await self._builder.join(
            request, output, sample=self._sample, group_id=self._group_id, index=self._index
        )
        return output

    def inject(self, token_ids: Sequence[int]) -> None:
        """Append what a tool or the environment says: context of the next turn, never trained on."""
        self.sample.add_injected(token_ids)

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        store = self._builder.store
        if kind is not None and self._sample is not None and store is not None:
            await in_thread_to_end(delete_refs, [self._sample], store)
