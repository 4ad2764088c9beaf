"""Every setting is typed, documented and frozen."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from radix_rl.config import RunConfig
from radix_rl.config.reference import reference


def sections(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found = {annotation}
        for field in annotation.model_fields.values():
            found |= sections(field.annotation)
        return found
    return {section for argument in get_args(annotation) for section in sections(argument)}


ALL = sorted(sections(RunConfig), key=lambda section: section.__name__)


def test_the_whole_tree_is_seen():
    assert len(ALL) > 20


@pytest.mark.parametrize("section", ALL, ids=lambda section: section.__name__)
def test_sections_refuse_unknown_keys_and_explain_themselves(section):
    assert section.model_config["extra"] == "forbid"
    assert section.model_config["frozen"]
    assert section.__doc__


def test_the_documentation_holds_the_present_tree():
    page = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text()
    assert reference() in page, "run `python -m radix_rl.config.reference` and put its output into the page"
