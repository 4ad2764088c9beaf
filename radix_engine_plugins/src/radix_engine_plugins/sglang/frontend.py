"""All hooks of a process that talks to clients.

The launcher with one front end, `sglang.Engine`, and every worker of `--tokenizer-worker-num N`.
"""

from radix_engine_plugins.sglang import (
    chat,
    finish,
    handover,
    hooks,
    marking,
    receive,
    request_fields,
    server_info,
    session,
)


def install() -> None:
    # Request classes first: modules imported by the later targets bind them.
    hooks.apply(request_fields.CLASSES)
    hooks.apply(
        [
            *request_fields.HOOKS,
            *session.HOOKS,
            *marking.HOOKS,
            *receive.HOOKS,
            *finish.HOOKS,
            *handover.HOOKS,
            *chat.HOOKS,
            *server_info.HOOKS,
        ]
    )
