"""One process's client of the store, made with its tokenizer manager.

Hook: AFTER `TokenizerManager.__init__`, which every front end runs: the launcher, `sglang.Engine`, each
worker.
"""
# pyright: reportMissingImports=false

from typing import Any

from radix_engine_plugins.codecs import routed_experts_codec, store_codecs
from radix_engine_plugins.metrics import engine_metrics
from radix_engine_plugins.settings import StoreSettings
from radix_engine_plugins.sglang import hooks
from radix_engine_plugins.sglang.settings import settings_of
from radix_engine_plugins.writer import OutputStoreWriter
from radix_transfer_plugins import OutputStore, create_backend

_ATTRIBUTE = "radix_output_store_session"


class StoreSession:
    def __init__(self, settings: StoreSettings, hf_text_config: Any, server_args: Any) -> None:
        """Raises the store's errors when it cannot be reached."""
        backend = create_backend(settings.backend, settings.config)
        store = OutputStore(backend, codecs=store_codecs(hf_text_config))
        self.writer = OutputStoreWriter(store, metrics=engine_metrics())
        self.experts_codec = routed_experts_codec(hf_text_config)
        self.captures_routed_experts = bool(server_args.enable_return_routed_experts)
        self.captures_indexer_topk = bool(server_args.enable_return_indexer_topk)


def session_of(manager: Any) -> StoreSession | None:
    """None: this engine was started without a store, even if another one in the process has one."""
    return getattr(manager, _ATTRIBUTE, None)


def connect(_: None, manager: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    settings = settings_of(server_args)
    if settings is not None:
        setattr(manager, _ATTRIBUTE, StoreSession(settings, manager.model_config.hf_text_config, server_args))


HOOKS = [("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", connect, hooks.AFTER)]
