"""Entry point of group `vllm.general_plugins`.

vLLM calls `activate` in the front end, the engine core and each worker, before it makes any of them.

Without `output_store` in `additional_config` the seams do one thing: a request that opts in is refused, since
an inline answer in silence would be worse.
"""

import logging
from pathlib import Path

from radix_engine_plugins.versions import UnknownVersionError, check_version, read_shapes
from radix_engine_plugins.vllm.settings import NAME

logger = logging.getLogger(__name__)

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
"""Versions whose seams were checked; docs/vllm.md has the table, and says how to move to another."""


def activate() -> None:
    """Hook into vLLM.

    Raises UnknownVersionError for a version that does not fit if `VLLM_PLUGINS` names this plugin. Where it
    was merely found installed, it is logged and vLLM runs as if it were not there.
    """
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm import envs  # pyright: ignore[reportMissingImports]

    try:
        (package,) = vllm.__path__
        check_version(
            "vLLM", vllm.__version__, SUPPORTED_VLLM, Path(package), read_shapes(Path(__file__).parent)
        )
    except UnknownVersionError as error:
        if NAME in (envs.VLLM_PLUGINS or ()):
            raise
        logger.error("%s", error)
        return
    from radix_engine_plugins.vllm import async_engine, offline, request_state, routing_layers, session

    for part in (session, request_state, async_engine, offline, routing_layers):
        part.install()
