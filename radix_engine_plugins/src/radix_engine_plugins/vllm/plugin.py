"""Entry point of group `vllm.general_plugins`. vLLM calls `activate` in the front end, the engine core and
each worker, before it makes any of them.

Without `output_store` in `additional_config` the seams do one thing: a request that opts in is refused, since
an inline answer in silence would be worse.
"""

import logging

from radix_engine_plugins.vllm.settings import NAME

logger = logging.getLogger(__name__)

SUPPORTED_VLLM = ("0.32.0",)
"""Versions whose seams were checked; docs/vllm.md says how to move to another."""


def check_version(version: str) -> None:
    """A local part such as `+cu130` names a build of the same sources."""
    if version.partition("+")[0] not in SUPPORTED_VLLM:
        raise RuntimeError(
            f"radix-engine-plugins supports vLLM {', '.join(SUPPORTED_VLLM)}, got {version!r}: the output "
            f"store stays off. Install a supported vLLM, or see docs/vllm.md on moving to a new one."
        )


def activate() -> None:
    """Raises RuntimeError for a vLLM that is not known to fit if `VLLM_PLUGINS` names this plugin. Where it
    was merely found installed, it is logged and vLLM runs as if it were not there.
    """
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm import envs  # pyright: ignore[reportMissingImports]

    try:
        check_version(vllm.__version__)
    except RuntimeError as error:
        if NAME in (envs.VLLM_PLUGINS or ()):
            raise
        logger.error("%s", error)
        return
    from radix_engine_plugins.vllm import async_engine, offline, request_state, routing_layers, session

    for part in (session, request_state, async_engine, offline, routing_layers):
        part.install()
