"""One process's client of the store, made with its tokenizer manager.

Hook: AFTER `TokenizerManager.__init__`, which every front end runs: the launcher, `sglang.Engine`, each
worker.
"""
# pyright: reportMissingImports=false

from typing import Any

from radix_engine_plugins import session
from radix_engine_plugins.codecs import routed_experts_codec
from radix_engine_plugins.settings import StoreSettings
from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.settings import settings_of


class StoreSession(session.StoreSession):
    def __init__(self, settings: StoreSettings, hf_text_config: Any, server_args: Any) -> None:
        super().__init__(settings, hf_text_config)
        self.experts_codec = routed_experts_codec(hf_text_config)
        self.captures_routed_experts = bool(server_args.enable_return_routed_experts)
        self.captures_indexer_topk = bool(server_args.enable_return_indexer_topk)


def connect(_: None, manager: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    settings = settings_of(server_args)
    if settings is not None:
        StoreSession(settings, manager.model_config.hf_text_config, server_args).attach(manager)


HOOKS = [("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", connect, hooks.AFTER)]
