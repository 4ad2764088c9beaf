"""Answers of OpenAI's routes, whole and as events; SGLang's additions under the names that SGLang uses."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from radix_rl.server.generation.answer import meta_info
from radix_rl.server.generation.body import GenerateCall, Item, Tokenizer
from radix_rl.server.generation.exchange import Renderer
from radix_rl.server.generation.openai.bodies import CommonBody
from radix_rl.server.generation.text import GrowingText, final_text
from radix_rl.server.generation.token_bytes import token_bytes, token_text
from radix_rl.server.http import sse
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
        self._begun: set[int] = set()

    def answer(self, outputs: Sequence[GenerateOutput], start_s: float) -> bytes:
        choices = []
        for index, (item, output) in enumerate(zip(self._call.items, outputs, strict=True)):
            text = final_text(self._tokenizer, output.output_ids, output.finish_reason, item.text)
            choice = {"index": index, **self._content(text), "logprobs": self._logprobs(item, output, 0)}
            choices.append(choice | self._end_of(item, output, start_s))
        answer = self._object(self.whole, choices) | {"usage": self._usage(outputs)}
        info = meta_info(self._call.items[0], outputs[0], self._tokenizer, start_s)
        answer["metadata"] = {name: info[name] for name in ("weight_version", "weight_versions")}
        if self._wants_sglext:
            answer["sglext"] = {"routed_experts": info.get("routed_experts")}
        return msgspec.json.encode(answer)

    def partial(self, index: int, output: PartialOutput) -> bytes:
        text = self._texts[index].push(output.output_ids[self._shown_tokens[index] :])
        return self._begin(index) + self._delta_event(index, text, output, {"finish_reason": None})

    def finish(self, index: int, output: GenerateOutput, start_s: float) -> bytes:
        item = self._call.items[index]
        self._outputs[index] = output
        text = final_text(self._tokenizer, output.output_ids, output.finish_reason, item.text)
        return self._begin(index) + self._last_events(
            index, text, output, self._end_of(item, output, start_s)
        )

    def end(self) -> bytes:
        events = b""
        if self._wants_sglext:
            info = meta_info(self._call.items[0], self._outputs[0], self._tokenizer, 0.0)
            sglext = {"routed_experts": info.get("routed_experts")}
            events += sse(self._object(self.chunk, []) | {"usage": None, "sglext": sglext})
        if self._body.include_usage:
            outputs = [self._outputs[index] for index in range(len(self._call.items))]
            events += sse(self._object(self.chunk, []) | {"usage": self._usage(outputs)})
        return events + b"data: [DONE]\n\n"

    @property
    def _wants_sglext(self) -> bool:
        return self._body.return_routed_experts and not self._body.return_meta_info

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """Of a whole choice."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """Of an event's choice."""

    def _begin(self, index: int) -> bytes:
        """Events before the first delta of a choice; nothing from the second call on."""
        return b""

    @abstractmethod
    def _last_events(self, index: int, text: str, output: GenerateOutput, end: dict[str, Any]) -> bytes:
        """The rest of `text`, and `end`: why the choice ended."""

    @abstractmethod
    def _token_ids(self, item: Item, output: GenerateOutput) -> dict[str, Any]:
        """Of a whole choice that was asked for with `return_token_ids`."""

    @abstractmethod
    def _logprobs(
        self, item: Item, output: GenerateOutput | PartialOutput, first: int
    ) -> dict[str, Any] | None:
        """Of the output tokens from `first` on; None if not asked for."""

    def _delta_event(
        self, index: int, text: str, output: GenerateOutput | PartialOutput, end: dict[str, Any]
    ) -> bytes:
        """What `text` and `output` have and the client has not, and how the choice ended; b"" for nothing."""
        shown, first = self._shown_text[index], self._shown_tokens[index]
        delta = text[len(shown) :]
        if not delta and first == len(output.output_ids) and end["finish_reason"] is None:
            return b""
        choice = {
            "index": index,
            **self._delta(delta),
            "logprobs": self._logprobs(self._call.items[index], output, first),
            **end,
        }
        if self._body.return_token_ids and self._call.stream:
            choice["token_ids"] = output.output_ids[first:]
            if not first:
                choice["prompt_token_ids"] = self._call.items[index].request.input_ids
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
            end |= self._token_ids(item, output)
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
            "completion_tokens_details": None,
            "reasoning_tokens": 0,
        }


class CompletionRenderer(OpenAiRenderer):
    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _last_events(self, index: int, text: str, output: GenerateOutput, end: dict[str, Any]) -> bytes:
        return self._delta_event(index, text, output, end)

    def _token_ids(self, item: Item, output: GenerateOutput) -> dict[str, Any]:
        return {"token_ids": output.output_ids, "prompt_token_ids": item.request.input_ids}

    def _logprobs(
        self, item: Item, output: GenerateOutput | PartialOutput, first: int
    ) -> dict[str, Any] | None:
        if not item.return_logprob:
            return None
        tokens = [token_text(self._tokenizer, token) for token in output.output_ids]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens[first:],
            "token_logprobs": output.output_logprobs[first:],
            "top_logprobs": [],
            "text_offset": offsets[first:-1],
        }


class ChatRenderer(OpenAiRenderer):
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "reasoning_content": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _begin(self, index: int) -> bytes:
        """The role, alone."""
        if index in self._begun:
            return b""
        self._begun.add(index)
        delta = {"role": "assistant", "content": ""}
        return self._chat_event(index, delta, {"finish_reason": None})

    def _last_events(self, index: int, text: str, output: GenerateOutput, end: dict[str, Any]) -> bytes:
        """The end comes alone, after the last delta."""
        return self._delta_event(index, text, output, {"finish_reason": None}) + self._chat_event(
            index, {}, end
        )

    def _chat_event(self, index: int, delta: dict[str, Any], end: dict[str, Any]) -> bytes:
        return sse(self._object(self.chunk, [{"index": index, "delta": delta, "logprobs": None, **end}]))

    def _token_ids(self, item: Item, output: GenerateOutput) -> dict[str, Any]:
        return {"response_token_ids": output.output_ids, "prompt_token_ids": item.request.input_ids}

    def _logprobs(
        self, item: Item, output: GenerateOutput | PartialOutput, first: int
    ) -> dict[str, Any] | None:
        if not item.return_logprob:
            return None
        pairs = list(zip(output.output_ids, output.output_logprobs, strict=True))[first:]
        content = []
        for token, logprob in pairs:
            data = token_bytes(self._tokenizer, token)
            text = data.decode(errors="replace")
            content.append({"token": text, "bytes": list(data), "logprob": logprob, "top_logprobs": []})
        return {"content": content}
