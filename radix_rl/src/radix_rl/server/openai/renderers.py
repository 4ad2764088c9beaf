"""Answers of OpenAI's routes, whole and as events; SGLang's additions under the names that SGLang uses."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from radix_rl.server.answer import meta_info
from radix_rl.server.errors import sse
from radix_rl.server.exchange import Renderer
from radix_rl.server.generate_body import GenerateCall, Item, Tokenizer
from radix_rl.server.openai.bodies import CommonBody
from radix_rl.server.text import GrowingText, final_text
from radix_rl.types import GenerateOutput, PartialOutput


class OpenAiRenderer(Renderer):
    openai = True
    id_prefix: str
    whole: str
    chunk: str
    """Values of `object`, of an answer and of an event."""

    def __init__(self, call: GenerateCall, body: CommonBody, tokenizer: Tokenizer, model: str) -> None:
        self._call = call
        self._body = body
        self._tokenizer = tokenizer
        self._head = {"id": self.id_prefix + call.items[0].request.request_id, "created": int(time.time())}
        self._model = body.model or model
        self._texts = [GrowingText(tokenizer, item.text, item.request.sampling.stop) for item in call.items]
        self._shown_text = [""] * len(call.items)
        self._shown_tokens = [0] * len(call.items)
        self._outputs: dict[int, GenerateOutput] = {}

    def answer(self, outputs: Sequence[GenerateOutput], start_s: float) -> bytes:
        choices = []
        for index, (item, output) in enumerate(zip(self._call.items, outputs, strict=True)):
            text = final_text(self._tokenizer, output.output_ids, output.finish_reason, item.text)
            choice = {"index": index, **self._content(text), "logprobs": self._logprobs(item, output, 0)}
            choices.append(choice | self._end_of(item, output, start_s))
        answer = self._object(self.whole, choices) | {"usage": self._usage(outputs)}
        answer["metadata"] = {
            "weight_version": outputs[0].version_spans[-1].version if outputs[0].version_spans else None
        }
        if self._body.return_routed_experts and not self._body.return_meta_info:
            inline = meta_info(self._call.items[0], outputs[0], self._tokenizer, start_s)
            answer["sglext"] = {"routed_experts": inline.get("routed_experts")}
        return msgspec.json.encode(answer)

    def partial(self, index: int, output: PartialOutput) -> bytes:
        text = self._texts[index].push(output.output_ids[self._shown_tokens[index] :])
        return self._delta_event(index, text, output)

    def finish(self, index: int, output: GenerateOutput, start_s: float) -> bytes:
        item = self._call.items[index]
        self._outputs[index] = output
        text = final_text(self._tokenizer, output.output_ids, output.finish_reason, item.text)
        events = self._delta_event(index, text, output)
        choice = {"index": index, **self._delta("", False), "logprobs": None}
        choice |= self._end_of(item, output, start_s)
        return events + sse(self._object(self.chunk, [choice]))

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._body.include_usage:
            return done
        outputs = [self._outputs[index] for index in range(len(self._call.items))]
        return sse(self._object(self.chunk, []) | {"usage": self._usage(outputs)}) + done

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """Of a whole choice."""

    @abstractmethod
    def _delta(self, text: str, is_first: bool) -> dict[str, Any]:
        """Of an event's choice."""

    @abstractmethod
    def _logprobs(
        self, item: Item, output: GenerateOutput | PartialOutput, first: int
    ) -> dict[str, Any] | None:
        """Of the output tokens from `first` on; None if not asked for."""

    def _delta_event(self, index: int, text: str, output: GenerateOutput | PartialOutput) -> bytes:
        shown, first = self._shown_text[index], self._shown_tokens[index]
        delta = text[len(shown) :]
        if first and not delta and first == len(output.output_ids):
            return b""
        choice = {
            "index": index,
            **self._delta(delta, first == 0),
            "logprobs": self._logprobs(self._call.items[index], output, first),
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = output.output_ids[first:]
        self._shown_text[index] = shown + delta
        self._shown_tokens[index] = len(output.output_ids)
        return sse(self._object(self.chunk, [choice]))

    def _end_of(self, item: Item, output: GenerateOutput, start_s: float) -> dict[str, Any]:
        end: dict[str, Any] = {
            "finish_reason": output.finish_reason.type,
            "matched_stop": output.finish_reason.matched,
        }
        if self._body.return_meta_info:
            end["meta_info"] = meta_info(item, output, self._tokenizer, start_s)
        if self._body.return_token_ids and not self._call.stream:
            end["token_ids"] = output.output_ids
        return end

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": kind, "model": self._model, "choices": choices}

    def _usage(self, outputs: Sequence[GenerateOutput]) -> dict[str, Any]:
        samples = self._call.items[0].samples
        prompt = sum(output.prompt_tokens for output in outputs[::samples])
        completion = sum(len(output.output_ids) for output in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        }


class CompletionRenderer(OpenAiRenderer):
    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str, is_first: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(
        self, item: Item, output: GenerateOutput | PartialOutput, first: int
    ) -> dict[str, Any] | None:
        if not item.return_logprob:
            return None
        tokens = [self._tokenizer.decode([token]) for token in output.output_ids]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens[first:],
            "token_logprobs": output.output_logprobs[first:],
            "top_logprobs": None,
            "text_offset": offsets[first:-1],
        }


class ChatRenderer(OpenAiRenderer):
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def _content(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        return {"message": message}

    def _delta(self, text: str, is_first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}

    def _logprobs(
        self, item: Item, output: GenerateOutput | PartialOutput, first: int
    ) -> dict[str, Any] | None:
        if not item.return_logprob:
            return None
        pairs = list(zip(output.output_ids, output.output_logprobs, strict=True))[first:]
        texts = [self._tokenizer.decode([token]) for token, _ in pairs]
        return {
            "content": [
                {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
                for text, (_, logprob) in zip(texts, pairs, strict=True)
            ]
        }
