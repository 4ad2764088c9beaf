"""`--additional-config '{"output_store": {"backend": NAME, "config": {...}}}'`.

For `LLM(...)` and `AsyncEngineArgs(...)` it is the keyword argument `additional_config`.

It is vLLM's own place for the settings of plugins, and reaches each process that builds answers.
"""

from typing import Any

import msgspec

from radix_engine_plugins.fields import STORE
from radix_engine_plugins.settings import StoreSettings

NAME = "radix_output_store"
"""Of this plugin, for `VLLM_PLUGINS`."""


def settings_of(vllm_config: Any) -> StoreSettings | None:
    """None: this engine has no store. Raises ValueError for malformed settings."""
    additional = vllm_config.additional_config
    asked = additional.get(STORE) if isinstance(additional, dict) else None
    if asked is None:
        return None
    try:
        return msgspec.convert({"config": {}, **asked} if isinstance(asked, dict) else asked, StoreSettings)
    except msgspec.ValidationError as error:
        raise ValueError(
            f'additional_config["{STORE}"]: expected {{"backend": NAME, "config": {{...}}}}, '
            f"got {asked!r}: {error}"
        ) from None


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises ValueError, naming setting and remedy, for modes in which outputs would be lost."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_role in ("kv_producer", "kv_consumer"):
        raise ValueError(
            f'additional_config["{STORE}"] does not work with kv_role={transfer.kv_role!r}: prefill/decode '
            f"disaggregation splits a request's outputs over two engines; leave out one of the two"
        )
    if transfer is not None and vllm_config.aux_output_config.enable_return_routed_experts:
        raise ValueError(
            f'additional_config["{STORE}"] does not work with enable_return_routed_experts and '
            f"kv_connector={transfer.kv_connector!r}: routed experts are kept by cache slot, so the rows of "
            "cache that is loaded back would be another request's; leave out kv_transfer_config (and "
            "kv_offloading_size, which makes one)"
        )
