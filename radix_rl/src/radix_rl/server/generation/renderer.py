"""`/generate` answers: SGLang's objects, one a prompt and sample; as events cumulative until the last."""

from collections.abc import Sequence
from typing import Any

import msgspec

from radix_rl.server.generation.answer import meta_info, partial_meta_info
from radix_rl.server.generation.body import GenerateCall, Item, Tokenizer
from radix_rl.server.generation.exchange import Renderer
from radix_rl.server.generation.text import GrowingText, final_text
from radix_rl.server.http import sse
from radix_rl.types import GenerateOutput, PartialOutput


class GenerateRenderer(Renderer):
    openai = False

    def __init__(self, call: GenerateCall, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._texts = [GrowingText(tokenizer, item.text, item.request.sampling.stop) for item in call.items]
        self._shown = [0] * len(call.items)

    def answer(self, outputs: Sequence[GenerateOutput], start_s: float) -> bytes:
        answers = [
            self._finished(item, output, start_s)
            for item, output in zip(self._call.items, outputs, strict=True)
        ]
        return msgspec.json.encode(answers[0] if self._call.is_single else answers)

    def partial(self, index: int, output: PartialOutput) -> bytes:
        item = self._call.items[index]
        text = self._texts[index].push(output.output_ids[self._shown[index] :])
        self._shown[index] = len(output.output_ids)
        meta = partial_meta_info(item, output, self._tokenizer)
        return self._event(index, self._object(item, text, output.output_ids, meta))

    def finish(self, index: int, output: GenerateOutput, start_s: float) -> bytes:
        return self._event(index, self._finished(self._call.items[index], output, start_s))

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def _event(self, index: int, content: dict[str, Any]) -> bytes:
        return sse(content if self._call.is_single else content | {"index": index})

    def _finished(self, item: Item, output: GenerateOutput, start_s: float) -> dict[str, Any]:
        text = final_text(self._tokenizer, output.output_ids, output.finish_reason, item.text)
        meta = meta_info(item, output, self._tokenizer, start_s)
        return self._object(item, text, output.output_ids, meta)

    def _object(
        self, item: Item, text: str, output_ids: Sequence[int], meta: dict[str, Any]
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text, "output_ids": output_ids, "meta_info": meta}
        if item.return_prompt_token_ids:
            content["prompt_token_ids"] = item.request.input_ids
        return content
