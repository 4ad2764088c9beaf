"""Lets modules that import GPU packages at their top be imported on a machine without a GPU.

SGLang names kernels of triton, torchvision and torchaudio while it is imported, whichever of them it runs
later. Here those packages are answered by empty modules: any name in them exists, decorators return the
function they were given, and launching a kernel raises. A .pth file installs this in every process of the
environment. Who asks whether a package is installed is told the truth.
"""

import enum
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = frozenset({"triton", "torchvision", "torchaudio"})


class _AnyBase:
    """Base of every class named in an absent package; accepts class arguments."""

    def __init_subclass__(cls, **_: object) -> None:
        super().__init_subclass__()


class StandIn(ModuleType):
    """A module in which every name exists: capitalized ones are classes, the others stand-ins again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        qualified = f"{self.__name__}.{name}"
        value = sys.modules.get(qualified)
        if value is None and name[0].isupper():
            value = type(name, (_AnyBase,), {"__module__": self.__name__})
        elif value is None:
            value = importlib.import_module(qualified)
        setattr(self, name, value)
        return value

    def __call__(self, *args: object, **kwargs: object) -> object:
        """As a decorator: bare, or with arguments."""
        if not kwargs and len(args) == 1 and callable(args[0]):
            return args[0]
        return lambda decorated: decorated

    def __getitem__(self, grid: object) -> object:
        raise RuntimeError(f"{self.__name__} is absent on this machine: kernels cannot be launched")

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> object:
        return iter(())

    def _combined(self, _: object) -> "StandIn":
        """Type expressions such as `A | B` and constants such as `A * 2`."""
        return self

    __or__ = __ror__ = __add__ = __radd__ = __mul__ = __rmul__ = _combined


class StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in _NEEDED_VALUES.get(module.__name__, {}).items():
            setattr(module, name, value)


class StandInFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in PACKAGES:
            return ModuleSpec(fullname, StandInLoader(), is_package=True)
        return None


class _KernelConfig:
    """`triton.Config`: remembers what it was given."""

    def __init__(
        self, kwargs: dict | None = None, num_warps: int = 4, num_stages: int = 2, **_: object
    ) -> None:
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


class _Constexpr:
    """`triton.language.constexpr`: holds a value."""

    def __init__(self, value: object = None) -> None:
        self.value = value


_Interpolation = enum.Enum(
    "InterpolationMode",
    {
        name.upper(): name
        for name in ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
    },
)
_Interpolation.__module__ = "torchvision.transforms"


def _power_of_2_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# Names whose value is used while modules are imported.
_NEEDED_VALUES: dict[str, dict[str, object]] = {
    "triton": {
        "__version__": "3.0.0",
        "Config": _KernelConfig,
        "cdiv": lambda a, b: (a + b - 1) // b,
        "next_power_of_2": _power_of_2_at_least,
    },
    "triton.language": {"constexpr": _Constexpr, "dtype": type("dtype", (), {})},
    "torchvision.transforms": {"InterpolationMode": _Interpolation},
    "torchvision.transforms.functional": {"InterpolationMode": _Interpolation},
}


def install() -> None:
    """Last in the search, so that a package that is really there wins."""
    sys.meta_path.append(StandInFinder())
    really_find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        spec = really_find(name, package)
        return None if spec is not None and isinstance(spec.loader, StandInLoader) else spec

    importlib.util.find_spec = find_spec
