"""Arrays over memory that a backend lends, and what is left of them after the loan."""

from typing import Any, NoReturn

import numpy as np

from radix_transfer_plugins.errors import ReleasedViewError


class Loan:
    """Shared by all arrays of one lease; `ended` once and for all."""

    def __init__(self) -> None:
        self.ended = False

    def require(self) -> None:
        if self.ended:
            _refuse()


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ReleasedViewError(
        "this array was a view inside `with store.get_many(...)`, which has ended; copy what is needed "
        "inside the block, or use read_many"
    )


class LentArray(np.ndarray):
    """A read-only view that raises ReleasedViewError once its loan has ended.

    Slices of it are lent too; results of arithmetic and copies are plain arrays that the caller owns.
    `numpy.asarray` and other users of the bare buffer are not intercepted after the end, but keep the memory
    from being reused.
    """

    _loan: Loan | None

    @classmethod
    def over(cls, array: np.ndarray, loan: Loan) -> "LentArray":
        lent = array.view(cls)
        lent.flags.writeable = False
        lent._loan = loan
        return lent

    def __array_finalize__(self, source: Any) -> None:
        self._loan = getattr(source, "_loan", None)
        if self._loan is not None:
            self._loan.require()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if out is not None:
            options["out"] = tuple(_plain(array) for array in out)
        return getattr(ufunc, method)(*(_plain(array) for array in inputs), **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return function(*_plain(args), **_plain(kwargs))


def _plain(value: Any) -> Any:
    """`value` with every lent array in it replaced by a plain read-only view. Raises ReleasedViewError."""
    if isinstance(value, LentArray):
        if value._loan is not None:
            value._loan.require()
        return value.view(np.ndarray)
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _guarded(name: str) -> Any:
    plain_method = getattr(np.ndarray, name)

    def method(self: LentArray, *args: Any, **kwargs: Any) -> Any:
        if self._loan is not None:
            self._loan.require()
        return plain_method(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = plain_method.__doc__
    return method


def _guarded_to_plain(name: str) -> Any:
    plain_method = getattr(np.ndarray, name)

    def method(self: LentArray, *args: Any, **kwargs: Any) -> Any:
        return plain_method(_plain(self), *args, **kwargs)

    method.__name__ = name
    method.__doc__ = plain_method.__doc__
    return method


_LENDING_METHODS = (
    "__getitem__",
    "__iter__",
    "__len__",
    "item",
    "tolist",
    "tobytes",
    "reshape",
    "view",
    "ravel",
)
"""Methods whose results are lent too, or need no copy."""
_COPYING_METHODS = (
    *("__repr__", "__str__", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"),
    *(
        "__copy__",
        "__deepcopy__",
        "__reduce__",
        "__reduce_ex__",
        "dump",
        "dumps",
        "astype",
        "copy",
        "flatten",
    ),
    *(
        "sum",
        "prod",
        "min",
        "max",
        "mean",
        "std",
        "var",
        "any",
        "all",
        "argmax",
        "argmin",
        "argsort",
        "nonzero",
    ),
    *("cumsum", "cumprod", "dot", "take", "repeat", "searchsorted", "round", "clip", "compress", "choose"),
    *("diagonal", "trace"),
)
"""Methods whose results are plain arrays or values that the caller owns."""
for _name in _LENDING_METHODS:
    setattr(LentArray, _name, _guarded(_name))
for _name in _COPYING_METHODS:
    setattr(LentArray, _name, _guarded_to_plain(_name))


class ReleasedView:
    """Placeholder for an array of a `get_many` stash after the block.

    Using it raises ReleasedViewError.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse()

    def __repr__(self) -> str:
        return "<released view>"


for _name in (
    "__getitem__",
    "__iter__",
    "__len__",
    "__array__",
    "__bool__",
    "__eq__",
    "__lt__",
    "__gt__",
    "__add__",
):
    setattr(ReleasedView, _name, _refuse)
