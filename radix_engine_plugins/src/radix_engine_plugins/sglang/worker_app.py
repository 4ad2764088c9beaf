"""The HTTP app that workers of `--tokenizer-worker-num N` import, by `SGLANG_HTTP_SERVER_APP_PATH`.

These workers never load plugins: without this module they would drop `return_outputs_via_store` in silence.
It is imported by such a worker only, and importing it is what installs the hooks there. Each worker
connects a store client of its own when it makes its tokenizer manager.
"""
# pyright: reportMissingImports=false

from radix_engine_plugins.sglang import frontend, handover

frontend.install()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

handover.guard(app)

__all__ = ["app"]
