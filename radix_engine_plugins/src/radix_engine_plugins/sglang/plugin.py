"""Entry point of group `sglang.srt.plugins`. SGLang calls `activate` early in the launcher and in every
child process.

An SGLang plugin that raises is only logged and the server starts without it, so a client must ask
`/server_info` whether the store is on before it relies on `return_outputs_via_store`.

Without the flags nothing is patched but the argument parser and the constructor of engine arguments. With
them the launcher installs the front end's hooks when the arguments have been read (flags.py), and child
processes, which find the settings in their environment, the scheduler's.
"""

import os

SUPPORTED_SGLANG = ("0.5.23",)
"""Versions whose seams were checked; docs/sglang.md says how to move to another."""


def check_version(version: str) -> None:
    if version not in SUPPORTED_SGLANG:
        raise RuntimeError(
            f"radix-engine-plugins supports SGLang {', '.join(SUPPORTED_SGLANG)}, got {version!r}: "
            f"the output store stays off. Install a supported SGLang, or see docs/sglang.md on moving to "
            f"a new one."
        )


def activate() -> None:
    """Raises RuntimeError for an SGLang whose inner interfaces are not known to fit."""
    import sglang  # pyright: ignore[reportMissingImports]

    check_version(sglang.__version__)
    from radix_engine_plugins.sglang import settings

    if settings.ENVIRONMENT_VARIABLE in os.environ:
        from radix_engine_plugins.sglang import capture

        capture.install()
    else:
        from radix_engine_plugins.sglang import flags

        flags.install()
