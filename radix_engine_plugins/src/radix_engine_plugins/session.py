"""One process's connection to the output store, held by the engine object that builds answers."""

from typing import Any, Self

from radix_engine_plugins.codecs import store_codecs
from radix_engine_plugins.metrics import engine_metrics
from radix_engine_plugins.settings import StoreSettings
from radix_engine_plugins.writer import OutputStoreWriter
from radix_transfer_plugins import OutputStore, create_backend

_ATTRIBUTE = "radix_output_store_session"


class StoreSession:
    """What every engine's session has; each engine adds what it captures."""

    def __init__(self, settings: StoreSettings, text_config: Any) -> None:
        """`text_config`: the model's, by which codecs are chosen.

        Raises the store's errors when it cannot be reached.
        """
        self.settings = settings
        backend = create_backend(settings.backend, settings.config)
        store = OutputStore(backend, codecs=store_codecs(text_config))
        self.writer = OutputStoreWriter(store, metrics=engine_metrics())

    def attach(self, holder: Any) -> None:
        """Let `of(holder)` find it."""
        setattr(holder, _ATTRIBUTE, self)

    @classmethod
    def of(cls, holder: Any) -> Self | None:
        """The session of an engine object.

        None: that engine was started without a store, even if another one in the process has one.
        """
        return getattr(holder, _ATTRIBUTE, None)


def check_reachable(settings: StoreSettings) -> None:
    """Connect once and leave, so that a wrong or absent store is reported before minutes of model loading.

    Raises the store's errors.
    """
    create_backend(settings.backend, settings.config).close()
