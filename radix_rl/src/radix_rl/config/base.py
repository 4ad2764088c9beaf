"""`Section`: the base of every table of the configuration, and the value types that sections share."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    model_validator,
)

_LARGEST_INT64 = (1 << 63) - 1
_LONGEST_FILE_NAME = 255
"""Bytes, of any Linux file system."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Section(BaseModel):
    """A frozen table of settings. Unknown keys are refused; the docstring below an attribute is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _numbers_fit_64_bits(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and abs(value) > _LARGEST_INT64:
                raise ValueError(f"{name}: expected a number of at most 64 bits, got {value}")
        return self


def parse_bytes(value: Any) -> Any:
    """A size such as 1048576, "256mb" or "1.5 GiB" in bytes; units are powers of 1024.

    Other types pass unchanged.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f'expected a size such as 1048576, "256mb" or "1gb", got {value!r}')
    return int(float(match[1]) * _UNIT_BYTES[match[2].lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
"""A number of bytes; text with a unit is accepted."""


TokenCount = Annotated[int, Field(le=(1 << 31) - 1)]
"""A number of tokens, as large as positions can be."""

Seed = Annotated[int, Field(ge=0, le=_LARGEST_INT64)]
"""As large as every generator of random numbers takes."""


def _expanded(path: Path) -> Path:
    too_long = any(len(os.fsencode(part)) > _LONGEST_FILE_NAME for part in path.parts)
    if not path.parts or "\0" in str(path) or too_long:
        raise ValueError(f"expected a path, got {str(path)!r}")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"expected a path, got {str(path)!r}: {error}") from error


FilePath = Annotated[Path, AfterValidator(_expanded)]
"""A path of a file or folder; `~` is the user's home."""

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")


def check_device(value: str) -> str:
    """A name that torch can have a device of.

    Raises ValueError for another one; whether the machine has it is seen when the run is launched.
    """
    if _DEVICE.fullmatch(value) is None:
        raise ValueError(f'expected a torch device such as "cpu" or "cuda:0", got {value!r}')
    return value


Device = Annotated[str, AfterValidator(check_device)]
DeviceOrAuto = Annotated[str, AfterValidator(lambda value: value if value == "auto" else check_device(value))]


def variant_by_type(default: str) -> Discriminator:
    """Chooses a section's variant by its `type`, and `default` where a table names none."""

    def tag(value: Any) -> Any:
        return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)

    return Discriminator(tag)
