"""Entry point of group `sglang.srt.plugins`.

SGLang calls `activate` early in the launcher and in every child process.

An SGLang plugin that raises is only logged and the server starts without it, so a client must ask
`/server_info` whether the store is on before it relies on `return_outputs_via_store`.

Without the flags nothing is patched but the argument parser and the constructor of engine arguments. With
them the launcher installs the front end's hooks when the arguments have been read (flags.py), and child
processes, which find the settings in their environment, the scheduler's.
"""

import os
from pathlib import Path

from radix_engine_plugins.versions import check_version, read_shapes

SUPPORTED_SGLANG = ("0.5.23",)
"""Versions whose seams were checked; docs/sglang.md has the table, and says how to move to another."""


def activate() -> None:
    """Hook into SGLang. Raises UnknownVersionError for a version that does not fit."""
    import sglang  # pyright: ignore[reportMissingImports]

    (package,) = sglang.__path__
    check_version(
        "SGLang", sglang.__version__, SUPPORTED_SGLANG, Path(package), read_shapes(Path(__file__).parent)
    )
    from radix_engine_plugins.sglang import settings

    if settings.ENVIRONMENT_VARIABLE in os.environ:
        from radix_engine_plugins.sglang import capture

        capture.install()
    else:
        from radix_engine_plugins.sglang import flags

        flags.install()
