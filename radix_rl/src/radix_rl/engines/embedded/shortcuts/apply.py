"""The one door of the shortcuts: `apply` takes them all, and what it returns undoes them."""

from transformers import PreTrainedModel

from radix_rl.engines.embedded.shortcuts.bare_forward import use_bare_forward
from radix_rl.engines.embedded.shortcuts.direct_calls import use_direct_calls
from radix_rl.engines.embedded.shortcuts.experts import use_sorted_experts
from radix_rl.engines.embedded.shortcuts.norms import use_short_norms
from radix_rl.engines.embedded.shortcuts.rotary import use_short_rotary
from radix_rl.engines.embedded.shortcuts.undo import ModelChanges, recorded_changes


def apply(model: PreTrainedModel, *, experts: bool = True) -> ModelChanges:
    """Apply every shortcut to a model that nobody else uses; `undo()` of the result takes them back.

    `experts`: also the engine's function for experts, where the model would use "grouped_mm". It changes the
    memory layout of float32 experts, and so the last bits of their products; all else changes no bit.

    Until then the model cannot be pickled, saved whole by torch.save, sharded, compiled, or moved to "meta";
    submodules and parameters are exchanged by assignment only, not through `_modules` and `_parameters` or by
    `functional_call`; global hooks are not called. Hooks of modules are.
    """
    with recorded_changes(model) as changes:
        if experts:
            use_sorted_experts(model)
        use_short_norms(model)
        use_short_rotary(model)
        use_bare_forward(model)
        # The last: it changes the modules' types.
        use_direct_calls(model)
    return changes
