"""Specs: the text and dict forms that name a component and its parameters."""

import ast
import re
from typing import Any

from grace.errors import ConfigError

LONGEST = 10_000
"""Characters of a spec."""


def parse(spec: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A spec as (name, parameters).

    >>> parse("topk(ratio=0.01)")
    ('topk', {'ratio': 0.01})
    >>> parse("parallax(compressor=topk(ratio=0.05))")
    ('parallax', {'compressor': 'topk(ratio=0.05)'})
    >>> parse({"name": "topk", "ratio": 0.01})
    ('topk', {'ratio': 0.01})
    >>> parse("topk(0.01)")
    Traceback (most recent call last):
    grace.errors.ConfigError: topk(0.01): write parameters by name, as in topk(ratio=0.01)
    """
    if isinstance(spec, dict):
        if not isinstance(spec.get("name"), str):
            raise ConfigError(f"a dict spec needs a 'name': {spec!r}")
        return spec["name"], {key: value for key, value in spec.items() if key != "name"}
    if not isinstance(spec, str):
        raise ConfigError(f"a spec is text like 'topk(ratio=0.01)' or a dict, not {spec!r}")
    if len(spec) > LONGEST:
        raise ConfigError(f"a spec of {len(spec):,} characters is too long: {spec!r}")
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        if tree.args or any(keyword.arg is None for keyword in tree.keywords):
            raise ConfigError(f"{spec}: write parameters by name, as in topk(ratio=0.01)")
        if len({keyword.arg for keyword in tree.keywords}) < len(tree.keywords):
            raise ConfigError(f"{spec}: a parameter is given twice")
        return tree.func.id, {k.arg: _literal(spec.strip(), k) for k in tree.keywords}  # type: ignore[misc]
    raise ConfigError(f"cannot read the spec {spec!r}; write it like 'topk(ratio=0.01)'")


def split(spec: Any) -> tuple[Any, Any] | None:
    """The two parts of a composition's spec, text or dict; None if it is not one.

    >>> split("topk(ratio=0.01) | qsgd"), split("topk")
    (('topk(ratio=0.01)', 'qsgd'), None)
    """
    if isinstance(spec, dict) and spec.get("name") == "composed" and {"sparsifier", "values"} == set(spec) - {"name"}:
        return spec["sparsifier"], spec["values"]
    if not isinstance(spec, str) or "|" not in spec:
        return None
    parts = [part.strip() for part in re.split(r"\|(?![^(]*\))", spec)]  # not those inside parentheses
    if len(parts) == 1 and "(" in spec:
        return None
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"{spec!r}: a composition has two parts, as in topk(ratio=0.01) | qsgd(levels=7)")
    return parts[0], parts[1]


def _literal(spec: str, keyword: ast.keyword) -> Any:
    """A parameter's value: a literal, or as text a bare word (``dtype=fp16``, ``warm_start=true``) or another spec
    (``compressor=topk(ratio=0.05)``)."""
    if isinstance(keyword.value, ast.Call) or (
        isinstance(keyword.value, ast.BinOp) and isinstance(keyword.value.op, ast.BitOr)
    ):
        return ast.get_source_segment(spec, keyword.value)
    if isinstance(keyword.value, ast.Name):
        return {"true": True, "false": False}.get(keyword.value.id, keyword.value.id)
    try:
        return ast.literal_eval(keyword.value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise ConfigError(f"{spec}: {keyword.arg} is not a number, a word or a literal") from None
