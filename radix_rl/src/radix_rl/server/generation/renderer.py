"""`/generate` answers: SGLang's objects, one a prompt and sample; as events cumulative until the last."""

from collections.abc import Sequence
from typing import Any

import msgspec

from radix_rl.server.generation.answer import meta_info, partial_meta_info
from radix_rl.server.generation.exchange import Renderer
from radix_rl.server.generation.text import GrowingText, final_text
from radix_rl.server.http import sse
from radix_rl.server.items import GenerateCall, Item, Tokenizer
from radix_rl.types import GenerateOutput, PartialOutput


class GenerateRenderer(Renderer):
    openai = False

    def __init__(self, call: GenerateCall, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._growing: dict[int, GrowingText] = {}
        self._shown: dict[int, int] = {}
        """By the index of the item: text that grows, and how many of its tokens were shown."""

    def part(self, item: Item, output: GenerateOutput, start_s: float) -> bytes:
        return msgspec.json.encode(self._finished(item, output, start_s))

    def answer(self, parts: Sequence[bytes]) -> bytes:
        return parts[0] if self._call.is_single else b"[" + b",".join(parts) + b"]"

    def partial(self, item: Item, output: PartialOutput) -> bytes:
        growing = self._growing.get(item.index)
        if growing is None:
            growing = GrowingText(self._tokenizer, item.text, item.request.sampling.stop)
            self._growing[item.index] = growing
        text = growing.push(output.output_ids[self._shown.get(item.index, 0) :])
        self._shown[item.index] = len(output.output_ids)
        meta = partial_meta_info(item, output, self._tokenizer)
        return self._event(item, self._object(item, text, output.output_ids, meta))

    def finish(self, item: Item, output: GenerateOutput, start_s: float) -> bytes:
        self._growing.pop(item.index, None)
        return self._event(item, self._finished(item, output, start_s))

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def _event(self, item: Item, content: dict[str, Any]) -> bytes:
        return sse(content if self._call.is_single else content | {"index": item.index})

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
