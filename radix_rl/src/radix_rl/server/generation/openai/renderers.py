"""Answers of OpenAI's routes, whole and as events; SGLang's additions under the names that SGLang uses."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from radix_rl.server.generation.answer import meta_info
from radix_rl.server.generation.exchange import Renderer
from radix_rl.server.generation.openai.bodies import CommonBody
from radix_rl.server.generation.text import GrowingText, final_text
from radix_rl.server.generation.token_bytes import token_bytes, token_text
from radix_rl.server.http import sse
from radix_rl.server.items import GenerateCall, Item, Tokenizer
from radix_rl.types import GenerateOutput, PartialOutput


class _Growing(msgspec.Struct, kw_only=True):
    """What of a choice that still grows was shown."""

    text: GrowingText
    shown_text: str = ""
    shown_tokens: int = 0


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
        self._head = {"id": self.id_prefix + call.name, "created": int(time.time())}
        self._model = body.model or model
        self._growing: dict[int, _Growing] = {}
        self._begun: set[int] = set()
        self._first_info: dict[str, Any] = {}
        """`meta_info` of the first choice."""
        self._prompt_tokens = self._completion_tokens = 0

    def part(self, item: Item, output: GenerateOutput, start_s: float) -> bytes:
        self._note(item, output, start_s)
        text = final_text(self._tokenizer, output.output_ids, output.finish_reason, item.text)
        choice = {"index": item.index, **self._content(text), "logprobs": self._logprobs(item, output, 0)}
        return msgspec.json.encode(choice | self._end_of(item, output, start_s))

    def answer(self, parts: Sequence[bytes]) -> bytes:
        choices: Any = msgspec.Raw(b"[" + b",".join(parts) + b"]")
        answer = self._object(self.whole, choices) | {"usage": self._usage()}
        answer["metadata"] = {name: self._first_info[name] for name in ("weight_version", "weight_versions")}
        if self._wants_sglext:
            answer["sglext"] = {"routed_experts": self._first_info.get("routed_experts")}
        return msgspec.json.encode(answer)

    def partial(self, item: Item, output: PartialOutput) -> bytes:
        growing = self._growing_of(item)
        text = growing.text.push(output.output_ids[growing.shown_tokens :])
        return self._begin(item) + self._delta_event(item, text, output, {"finish_reason": None})

    def finish(self, item: Item, output: GenerateOutput, start_s: float) -> bytes:
        self._note(item, output, start_s)
        text = final_text(self._tokenizer, output.output_ids, output.finish_reason, item.text)
        end = self._end_of(item, output, start_s)
        events = self._begin(item) + self._last_events(item, text, output, end)
        self._growing.pop(item.index, None)
        return events

    def end(self) -> bytes:
        events = b""
        if self._wants_sglext:
            sglext = {"routed_experts": self._first_info.get("routed_experts")}
            events += sse(self._object(self.chunk, []) | {"usage": None, "sglext": sglext})
        if self._body.include_usage:
            events += sse(self._object(self.chunk, []) | {"usage": self._usage()})
        return events + b"data: [DONE]\n\n"

    def _note(self, item: Item, output: GenerateOutput, start_s: float) -> None:
        """What the answer as a whole says of its choices."""
        if item.index == 0:
            self._first_info = meta_info(item, output, self._tokenizer, start_s)
        if item.sample == 0:
            self._prompt_tokens += output.prompt_tokens
        self._completion_tokens += len(output.output_ids)

    def _growing_of(self, item: Item) -> "_Growing":
        if item.index not in self._growing:
            text = GrowingText(self._tokenizer, item.text, item.request.sampling.stop)
            self._growing[item.index] = _Growing(text=text)
        return self._growing[item.index]

    @property
    def _wants_sglext(self) -> bool:
        return self._body.return_routed_experts and not self._body.wants_meta_info

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """Of a whole choice."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """Of an event's choice."""

    def _begin(self, item: Item) -> bytes:
        """Events before the first delta of a choice; nothing from the second call on."""
        return b""

    @abstractmethod
    def _last_events(self, item: Item, text: str, output: GenerateOutput, end: dict[str, Any]) -> bytes:
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
        self, item: Item, text: str, output: GenerateOutput | PartialOutput, end: dict[str, Any]
    ) -> bytes:
        """What `text` and `output` have and the client has not, and how the choice ended; b"" for nothing."""
        growing = self._growing_of(item)
        shown, first = growing.shown_text, growing.shown_tokens
        delta = text[len(shown) :]
        if not delta and first == len(output.output_ids) and end["finish_reason"] is None:
            return b""
        choice = {
            "index": item.index,
            **self._delta(delta),
            "logprobs": self._logprobs(item, output, first),
            **end,
        }
        if self._body.return_token_ids and self._call.stream:
            choice["token_ids"] = output.output_ids[first:]
            if not first:
                choice["prompt_token_ids"] = item.request.input_ids
        growing.shown_text = shown + delta
        growing.shown_tokens = len(output.output_ids)
        return sse(self._object(self.chunk, [choice]))

    def _end_of(self, item: Item, output: GenerateOutput, start_s: float) -> dict[str, Any]:
        end: dict[str, Any] = {
            "finish_reason": output.finish_reason.type,
            "matched_stop": output.finish_reason.matched,
        }
        if self._body.wants_meta_info:
            end["meta_info"] = meta_info(item, output, self._tokenizer, start_s)
        if self._body.return_token_ids and not self._call.stream:
            end |= self._token_ids(item, output)
        return end

    def _object(self, kind: str, choices: Any) -> dict[str, Any]:
        return self._head | {"object": kind, "model": self._model, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
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

    def _last_events(self, item: Item, text: str, output: GenerateOutput, end: dict[str, Any]) -> bytes:
        return self._delta_event(item, text, output, end)

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

    def _begin(self, item: Item) -> bytes:
        """The role, alone."""
        if item.index in self._begun:
            return b""
        self._begun.add(item.index)
        delta = {"role": "assistant", "content": ""}
        return self._chat_event(item, delta, {"finish_reason": None})

    def _last_events(self, item: Item, text: str, output: GenerateOutput, end: dict[str, Any]) -> bytes:
        """The end comes alone, after the last delta."""
        return self._delta_event(item, text, output, {"finish_reason": None}) + self._chat_event(
            item, {}, end
        )

    def _chat_event(self, item: Item, delta: dict[str, Any], end: dict[str, Any]) -> bytes:
        return sse(self._object(self.chunk, [{"index": item.index, "delta": delta, "logprobs": None, **end}]))

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
