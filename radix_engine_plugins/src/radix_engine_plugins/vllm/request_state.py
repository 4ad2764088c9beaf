"""Front end: arrays of opted-in requests leave the inline path before anyone turns them into lists or base64.

Seam: the name `RequestState` in `vllm.v1.engine.output_processor`, the class of what vLLM remembers of a
running request. Its subclass keeps the arrays of opted-in requests whole and hands them over with the last
output.
"""
# pyright: reportMissingImports=false

from typing import Any

from vllm.v1.engine import output_processor

from radix_engine_plugins.vllm import seams
from radix_engine_plugins.vllm.opt_in import WITHOUT_OUTPUT, opted_in
from radix_engine_plugins.vllm.outputs import TakenOutputs

_Stock = seams.require(output_processor, "RequestState")


class RequestState(_Stock):
    radix_params: Any = None
    """SamplingParams of a request that opted in."""

    @classmethod
    def from_new_request(cls, *args: Any, request: Any, **kwargs: Any) -> Any:
        state = super().from_new_request(*args, request=request, **kwargs)
        if opted_in(request.sampling_params):
            state.radix_params = request.sampling_params
            state.radix_masks = []
        return state

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, stop_reason: Any) -> Any:
        if self.radix_params is None:
            return super()._new_completion_output(token_ids, finish_reason, stop_reason)
        self.radix_masks += self.sampling_mask_chunks
        self.sampling_mask_chunks = []
        rows = []
        if finish_reason is not None:
            rows, self.routed_experts_chunks = self.routed_experts_chunks, []
        output = super()._new_completion_output(token_ids, finish_reason, stop_reason)
        num_output_tokens = self.detokenizer.num_output_tokens()
        # Aborted before its first token it has no outputs.
        if finish_reason is not None and num_output_tokens > 0:
            output.routed_experts = TakenOutputs(
                num_tokens=self.prompt_len + num_output_tokens,
                num_output_tokens=num_output_tokens,
                start_row=self.radix_params.routed_experts_prompt_start,
                rows=rows,
                masks=self.radix_masks,
                without_output=WITHOUT_OUTPUT in self.radix_params.extra_args,
            )
        return output


def install() -> None:
    for name in ("from_new_request", "_new_completion_output"):
        seams.require(_Stock, name)
    output_processor.RequestState = RequestState
