"""Messages to token ids, through the model's own chat template.

A template is a program, which may take any time: this is for a side process.
"""

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from radix_rl.engines.base import EngineInfo
from radix_rl.errors import RequestError
from radix_rl.server.generation.body import check_text_length
from radix_rl.server.http import BodyError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root")
"""SGLang's. Whether the model knows them is its chat template's matter."""


def render_chat(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    info: EngineInfo,
    *,
    tools: list[dict[str, Any]] | None,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Raises RequestError for what the template refuses, and for names that it does not read."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("the model has no chat template; start the server with --chat-template FILE")
    template = tokenizer.get_chat_template(None, tools)
    _check_names(template_kwargs, template, tokenizer)
    plain = [_plain_text(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=tools,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            tokenize=False,
            **template_kwargs,
        )
    except Exception as error:
        # Templates are programs of the model's author, who refuses bad messages by exceptions of any kind.
        raise RequestError(f"messages: the chat template refuses them: {error}") from error
    check_text_length(text, tokenizer, info)
    return tokenizer.encode(text, add_special_tokens=False)


def _check_names(template_kwargs: Mapping[str, Any], template: str, tokenizer: Any) -> None:
    """A client sets what its model's template reads, and nothing of the rendering itself."""
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    known = names_read(template) - own - {"messages", "kwargs"}
    for name in template_kwargs:
        if name not in known:
            raise RequestError(
                f"chat_template_kwargs.{name}: the model's chat template reads no such name; it reads "
                f"{', '.join(sorted(known)) or 'none beyond messages and tools'}"
            )


@lru_cache(maxsize=8)
def names_read(template: str) -> frozenset[str]:
    """Variables that a template takes from outside."""
    environment = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols])
    read = jinja2.meta.find_undeclared_variables(environment.parse(template))
    return frozenset(read) - {"raise_exception", "strftime_now"}


class _Generation(jinja2.ext.Extension):
    """The block that transformers adds to the language; its body reads like any other."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _plain_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its parts of type text joined; null is "", parts such as images are refused."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise BodyError(f"messages: expected a role of {', '.join(_ROLES)}, got {role!r}")
    if content is None and role == "user":
        raise BodyError("messages: expected content in a message of the user, got none")
    if content is None:
        return dict(message) | {"content": ""}
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(f"messages: expected content parts of type text, got {part!r}")
        parts.append(str(part.get("text", "")))
    return dict(message) | {"content": "".join(parts)}
