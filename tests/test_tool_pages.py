"""Pages that are made from the code are whole, and the contributor's example works."""

import re
from pathlib import Path

import pytest
import torch

import grace
from grace.communicators import Allgather
from tools.methods_page import methods_page

ROOT = Path(__file__).parents[1]


def test_the_page_of_methods_has_a_section_and_a_row_for_each():
    page = methods_page()
    for name in grace.known("compressor"):
        assert f"\n### {name}\n" in page
        assert f"\n| [`{name}`](#{name}) |" in page


def test_the_page_of_strategy_files_has_a_row_for_each_field():
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    from grace.strategy.schema import json_schema
    from tools.strategy_page import strategy_page

    page, schema = strategy_page(), json_schema()
    for model in [schema, *schema["$defs"].values()]:
        for form in model.get("oneOf", [model]):
            for field in form.get("properties", ()):
                assert f"\n| `{field}` |" in page


def test_the_contributors_compressor_works_as_it_stands(local):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding.md").read_text(), re.S)
    names: dict = {"__name__": "contributed"}
    exec(code, names)
    compressor = names["Clip8"](clip=2.0)
    value = Allgather(compressor, "none").step(torch.tensor([0.5, -3.0]), "w")
    assert torch.allclose(value, torch.tensor([0.5, -2.0]), atol=1 / 127)
    with pytest.raises(grace.ConfigError, match="clip8: clip must be a number in"):
        names["Clip8"](clip=0)
