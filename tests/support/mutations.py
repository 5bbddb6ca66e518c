"""Documents with something wrong in them, for property tests of whatever reads one."""

import copy
from typing import Any

from hypothesis import strategies as st

from tests.support.damaged_states import places

NUMBERS = [0, -1, 1, 2, 1e9, 10**18, 10**30, -(2**63), 0.5, -0.0, 1e-300, 1e308, float("inf"), float("nan")]
WORDS = ["", "0", "w", "none", "topk", "[/red]", "\x1b[31m", "\xe9", "\ud800", "x" * 300, "null", "2020-01-01"]
NESTED = [[], {}, [[]], [None], [0], [-1], {"": {}}, {"name": "topk"}, {"w": None}, [10**18] * 30]
ODD = st.sampled_from([None, True, False, *NUMBERS, *WORDS, *NESTED])
JSON = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
"""Values that JSON and YAML may give, and a little more."""


@st.composite
def mutated(draw: Any, document: Any, changes: int = 2) -> Any:
    """The document with some values replaced, removed, added, or their keys renamed."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, changes))):
        path = draw(st.sampled_from([(), *places(document)]))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(JSON)
            continue
        owner = document
        for key in path[:-1]:
            owner = owner[key]
        key, how = path[-1], draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if how == "replace":
            owner[key] = copy.deepcopy(draw(JSON))  # which may be changed next
        elif how == "remove":
            del owner[key]
        elif isinstance(owner, dict):
            owner[draw(st.sampled_from(["", "x", "name", "rank", "w/part_0", "\ud800", "__class__"]))] = copy.deepcopy(
                draw(JSON)
            )  # which may be changed next
        else:
            owner.append(copy.deepcopy(draw(JSON)))
    return document
