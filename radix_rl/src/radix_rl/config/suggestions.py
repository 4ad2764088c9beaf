"""What an unknown setting may have been meant to be: by spelling, by place, and by what other tools say."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from radix_rl.config.other_names import OTHER_NAMES
from radix_rl.config.tree import settings_below


def suggest(root: type[BaseModel], section: type[BaseModel] | None, path: Sequence[str], value: Any) -> str:
    """A remedy for the unknown setting at `path`, whose last name is no field of `section`.

    `value` is what it was set to: the settings in a table that is unknown are looked for too.
    """
    known = sorted(section.model_fields) if section else []
    name = _normalised(path[-1])
    if name in known:
        return f"did you mean {name}?"
    meant = list(dict.fromkeys(place for leaf in _names_in(path, value) for place in _places(root, leaf)))
    if slips := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"did you mean {slips[0]}?"
    if isinstance(value, dict) and value and meant:
        return f"did you mean {' and '.join(meant)}?"
    if name in OTHER_NAMES and meant:
        return f"did you mean {' or '.join(meant)}?"
    if nearest := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(nearest)}?"
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"known here: {', '.join(known)}"


def _normalised(name: str) -> str:
    return name.lower().replace("-", "_")


def _names_in(path: Sequence[str], value: Any) -> Iterator[str]:
    """The unknown name, or those of the settings in a table of that name."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _names_in([*path, str(name)], inner)
    else:
        yield _normalised(path[-1])


def _places(root: type[BaseModel], name: str) -> list[str]:
    """Paths of the settings that `name` may mean anywhere in the tree."""
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    paths = dict.fromkeys(path for path, _ in settings_below(root))
    return [path for path in paths if path.rpartition(".")[2] == name and name != "type"]
