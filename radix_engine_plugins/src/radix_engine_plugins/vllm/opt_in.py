"""Which requests opted in.

The mark is an entry of `SamplingParams.extra_args`, where `vllm_xargs` of the HTTP API ends up and which vLLM
leaves to extensions.
"""
# pyright: reportMissingImports=false

from typing import TYPE_CHECKING, Any

from radix_engine_plugins.fields import OPT_IN

if TYPE_CHECKING:
    from radix_engine_plugins.vllm.session import StoreSession

WITHOUT_OUTPUT = "radix_without_output"
"""Mark of a completion that echoes its prompt and gives no token: vLLM samples one and drops it."""

_VALUES = {True: True, False: False, None: False}
"""JSON's true may arrive as 1: `vllm_xargs` holds strings and numbers."""


def opted_in(sampling_params: Any) -> bool:
    """Raises VLLMValidationError, which is answered with 400, for a value that is neither true nor false."""
    extra_args = getattr(sampling_params, "extra_args", None)
    return bool(extra_args) and is_true(extra_args.get(OPT_IN))


def is_true(value: Any) -> bool:
    from vllm.exceptions import VLLMValidationError

    try:
        return _VALUES[value]
    except (KeyError, TypeError):
        raise VLLMValidationError(
            f"{OPT_IN}: expected true or false, got {value!r}", parameter=OPT_IN
        ) from None


def refuse_what_cannot_be_met(session: "StoreSession | None") -> None:
    """Raises VLLMValidationError."""
    from vllm.exceptions import VLLMValidationError

    if session is None:
        raise VLLMValidationError(
            f"{OPT_IN}: this engine has no output store; start it with "
            f'--additional-config \'{{"output_store": {{"backend": NAME, "config": {{...}}}}}}\'',
            parameter=OPT_IN,
        )
    if not (session.captures_routed_experts or session.captures_sampling_mask):
        raise VLLMValidationError(
            f"{OPT_IN}: this engine captures nothing that could be stored; start it with "
            f"--enable-return-routed-experts or --return-sampling-mask",
            parameter=OPT_IN,
        )
