"""What a generation route asks for: prompts with their settings, and the engine requests they expand to."""

import uuid
from array import array
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol

import msgspec

from radix_rl.types import GenerateRequest


class Tokenizer(Protocol):
    """What the server uses of a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> str: ...

    def convert_ids_to_tokens(self, token_id: int) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How output tokens become text."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    """True: the matched stop string or token stays in the text."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a call and what is asked for it."""

    token_ids: array
    """Of type "q": eight bytes an id, and cheap to pass between processes."""
    request: GenerateRequest
    """Everything but its id and its tokens, for the first sample."""
    text: TextOptions
    return_logprob: bool = False


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One engine request, and how its answer is rendered."""

    index: int
    """Its place in the answer: the samples of a prompt come one after the other."""
    sample: int
    request: GenerateRequest
    text: TextOptions
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False


class GenerateCall(msgspec.Struct, kw_only=True, dict=True):
    """A body of a generation route, parsed. Its items are made one by one, when they are needed."""

    prompts: list[Prompt]
    samples: int
    """Answers to each prompt."""
    stream: bool
    is_list: bool
    """The prompts came as a list, so that the answer is one too."""
    rid: str | list[str] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False

    @property
    def is_single(self) -> bool:
        """The answer is one object, not a list."""
        return not self.is_list and self.samples == 1

    @property
    def num_items(self) -> int:
        return len(self.prompts) * self.samples

    @cached_property
    def name(self) -> str:
        """Id of the whole: that of the first item starts with it."""
        if isinstance(self.rid, list):
            return self.rid[0]
        return uuid.uuid4().hex if self.rid is None else self.rid

    def items(self, *, samples: int | None = None) -> Iterator[Item]:
        """Every item, or those of the first `samples` of each prompt."""
        for number, prompt in enumerate(self.prompts):
            request = msgspec.structs.replace(prompt.request, input_ids=tuple(prompt.token_ids))
            for sample in range(samples or self.samples):
                yield self._item(number, sample, prompt, request)

    def _item(self, number: int, sample: int, prompt: Prompt, request: GenerateRequest) -> Item:
        index, sampling = number * self.samples + sample, request.sampling
        if sample and sampling.seed is not None:
            # Samples of one prompt with one seed would all be the same.
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + sample)
        return Item(
            index=index,
            sample=sample,
            request=msgspec.structs.replace(
                request, request_id=self._request_id(number, sample, index), sampling=sampling
            ),
            text=prompt.text,
            return_logprob=prompt.return_logprob,
            return_text_in_logprobs=self.return_text_in_logprobs,
            return_prompt_token_ids=self.return_prompt_token_ids,
        )

    def _request_id(self, number: int, sample: int, index: int) -> str:
        """Single: the id as given.

        One for several: `<rid>_<index>`. A list: one a prompt, and `<rid>_<sample>` where there are several
        samples.
        """
        if isinstance(self.rid, list):
            return self.rid[number] if self.samples == 1 else f"{self.rid[number]}_{sample}"
        return self.name if self.is_single else f"{self.name}_{index}"
