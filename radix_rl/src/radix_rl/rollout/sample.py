"""`Sample`: one sequence on its way from rollout to trainer."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from radix_rl.errors import ReplayError
from radix_rl.rollout.replay_index import ReplayIndex
from radix_rl.types import LOGPROB_FLOOR, FinishReason, GenerateOutput, GenerateRequest, VersionSpan


class Sample(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, eq=False):
    """N tokens: the first `prompt_tokens` are context, the other C = N - prompt_tokens are the response."""

    group_id: int
    """Samples of one prompt share it; advantages are computed over a group."""
    index: int
    """Position in its group."""
    tokens: list[int]
    prompt_tokens: int
    loss_mask: list[int]
    """`[C]` 1 for tokens the policy sampled, 0 for injected ones (tools, environment) and for those whose
    log-probability was not finite."""
    rollout_logprobs: list[float]
    """`[C]` under the distribution sampled from; 0.0 where loss_mask is 0."""
    version_spans: list[VersionSpan]
    """Over the response, sampled tokens only."""
    finish_reason: FinishReason
    """Of the last answer."""
    replay: ReplayIndex
    floored_tokens: int = 0
    """Sampled tokens whose log-probability was not finite; before any cut."""
    reward: float | None = None
    metadata: dict[str, Any] = {}

    @classmethod
    def from_response(
        cls,
        request: GenerateRequest,
        output: GenerateOutput,
        *,
        group_id: int,
        index: int,
        store_backend: str | None,
    ) -> "Sample":
        """The sample of a first turn. Raises ReplayError, see `ReplayIndex.add_response`."""
        sample = cls(
            group_id=group_id,
            index=index,
            tokens=list(request.input_ids),
            prompt_tokens=len(request.input_ids),
            loss_mask=[],
            rollout_logprobs=[],
            version_spans=[],
            finish_reason=output.finish_reason,
            replay=ReplayIndex(),
        )
        sample.add_response(request, output, store_backend=store_backend)
        return sample

    def add_response(
        self, request: GenerateRequest, output: GenerateOutput, *, store_backend: str | None
    ) -> None:
        """Append a later turn, or the rest of an aborted one.

        Tokens of the prompt beyond this sample's are injected ones.

        Raises ReplayError when the request does not continue these tokens or the replay rows do not fit.
        """
        known = len(self.tokens)
        if list(request.input_ids[:known]) != self.tokens:
            raise ReplayError(
                f"sample {self.name}: request {request.request_id} does not continue its {known} tokens; a "
                "later turn's input_ids start with every token before it"
            )
        if len(output.output_logprobs) != len(output.output_ids):
            raise ReplayError(
                f"sample {self.name}: {len(output.output_logprobs)} log-probabilities for "
                f"{len(output.output_ids)} tokens"
            )
        self.replay.add_response(request, output, store_backend=store_backend)
        self.add_injected(request.input_ids[known:])
        offset = len(self.loss_mask)
        self.tokens += output.output_ids
        usable = [logprob > LOGPROB_FLOOR for logprob in output.output_logprobs]
        self.loss_mask += map(int, usable)
        self.rollout_logprobs += [
            logprob if use else 0.0 for logprob, use in zip(output.output_logprobs, usable, strict=True)
        ]
        self.floored_tokens += usable.count(False)
        self.version_spans += [
            VersionSpan(start=span.start + offset, end=span.end + offset, version=span.version)
            for span in output.version_spans
        ]
        self.finish_reason = output.finish_reason

    def add_injected(self, token_ids: Sequence[int]) -> None:
        """Append tokens of a tool or the environment.

        They have no loss, no log-probability, and no replay rows before a next turn.
        """
        self.tokens += token_ids
        self.loss_mask += [0] * len(token_ids)
        self.rollout_logprobs += [0.0] * len(token_ids)

    def truncate(self, max_tokens: int) -> None:
        """Cut tokens, masks, log-probabilities, spans and every replay field together.

        The one place that cuts.
        """
        if len(self.tokens) <= max_tokens:
            return
        if max_tokens < self.prompt_tokens:
            raise ReplayError(
                f"sample {self.name}: cannot cut to {max_tokens} tokens, the prompt alone has "
                f"{self.prompt_tokens}; raise the limit or leave out prompts this long"
            )
        self.replay.truncate(max_tokens, self.prompt_tokens)
        kept = max_tokens - self.prompt_tokens
        del self.tokens[max_tokens:]
        del self.loss_mask[kept:]
        del self.rollout_logprobs[kept:]
        self.version_spans = [
            VersionSpan(start=span.start, end=min(span.end, kept), version=span.version)
            for span in self.version_spans
            if span.start < kept
        ]
        self.finish_reason = FinishReason(type="length", length=kept)

    @property
    def name(self) -> str:
        """How error messages call it."""
        return f"{self.group_id}/{self.index}"


def check_uniform(samples: Sequence[Sample], fields: Sequence[str]) -> None:
    """Each field is on all samples or on none; otherwise a ReplayError names a sample that lacks it."""
    for field in fields:
        lacking = [sample.name for sample in samples if field not in sample.replay.segments]
        if lacking and len(lacking) < len(samples):
            raise ReplayError(
                f"sample {lacking[0]} has no {field!r}, which {len(samples) - len(lacking)} of "
                f"{len(samples)} samples of its batch have; a field must be on all samples of a batch or on "
                "none"
            )


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """msgpack; inline arrays travel as dtype, shape and raw bytes."""
    return msgspec.msgpack.encode(samples, enc_hook=_encode_array)


def decode_samples(data: bytes) -> list[Sample]:
    """The inverse. Raises msgspec.ValidationError with the path of what does not fit."""
    return msgspec.msgpack.decode(data, type=list[Sample], dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {
            "dtype": value.dtype.name,
            "shape": list(value.shape),
            "data": np.ascontiguousarray(value).tobytes(),
        }
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"])
    raise NotImplementedError(f"cannot decode {kind.__name__}")
