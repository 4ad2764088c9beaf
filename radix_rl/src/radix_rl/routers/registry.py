"""The kinds of routers by name, ours and those of other packages."""

from radix_rl.errors import ConfigurationError
from radix_rl.routers.base import Router
from radix_transfer_plugins.class_registry import ClassRegistry
from radix_transfer_plugins.errors import ConfigError

GROUP = "radix_rl.routers"
"""Entry points of this group name further kinds: `my_router = "my_package.router:MyRouter"`."""

_PACKAGE = "radix_rl.routers"

_BUILTIN = {
    "softmax_then_choose": f"{_PACKAGE}.softmax_then_choose:SoftmaxThenChoose",
    "softmax_then_scale": f"{_PACKAGE}.softmax_then_scale:SoftmaxThenScale",
    "softmax_over_floor": f"{_PACKAGE}.softmax_over_floor:SoftmaxOverFloor",
    "choose_then_softmax": f"{_PACKAGE}.choose_then_softmax:ChooseThenSoftmax",
    "sigmoid_then_scale": f"{_PACKAGE}.sigmoid_then_scale:SigmoidThenScale",
    "sigmoid_then_normalise": f"{_PACKAGE}.sigmoid_then_normalise:SigmoidThenNormalise",
    "router_scores": f"{_PACKAGE}.router_scores:RouterScores",
    # Last: it recognises a layer by its experts, so that it fits those of most routers above too.
    "experts_call": f"{_PACKAGE}.experts_call:ExpertsCall",
}

_routers = ClassRegistry("router", Router, group=GROUP, builtin=_BUILTIN)


def register_router(cls: type[Router]) -> type[Router]:
    """Make a kind known in this process; usable as a decorator.

    An installed package uses an entry point instead, by which every process of a run finds it. Raises
    ConfigurationError for a name that is taken.
    """
    try:
        return _routers.register(cls)
    except ConfigError as error:
        raise ConfigurationError(str(error)) from None


def router_names() -> list[str]:
    """Every known name, without importing any kind."""
    return _routers.names()


def all_routers() -> list[Router]:
    """One instance of each kind, in the order in which they are asked: those from outside by name, then ours.

    Raises ConfigurationError for an entry point that cannot be used.
    """
    outside = [name for name in _routers.names() if name not in _BUILTIN]
    try:
        return [_routers.get(name)() for name in [*outside, *_BUILTIN]]
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
