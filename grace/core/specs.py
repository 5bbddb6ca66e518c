"""Specs: the text and dict forms that name a component and its parameters."""

import ast
from typing import Any

from grace.errors import ConfigError

Spec = str | dict[str, Any]
"""Text or dict that names a component and its parameters."""
LONGEST = 10_000
"""Largest number of characters of a spec."""


def parse(spec: Spec) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a spec.

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
    # Python's parser may crash the process on text that is nested deeply enough.
    if len(spec) > LONGEST:
        raise ConfigError(f"a spec of {len(spec):,} characters is too long: {spec!r}")
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        if tree.args or any(keyword.arg is None for keyword in tree.keywords):  # **options
            raise ConfigError(f"{spec}: write parameters by name, as in topk(ratio=0.01)")
        if len({keyword.arg for keyword in tree.keywords}) < len(tree.keywords):  # only compile() would refuse it
            raise ConfigError(f"{spec}: a parameter is given twice")
        return tree.func.id, {k.arg: _literal(spec.strip(), k) for k in tree.keywords}  # type: ignore[misc]
    raise ConfigError(f"cannot read the spec {spec!r}; write it like 'topk(ratio=0.01)'")


def split(spec: object) -> tuple[Spec, Spec] | None:
    """Return the two parts of a composition's spec, text or dict; None if the spec is no composition.

    >>> split("topk(ratio=0.01) | qsgd"), split("parallax(compressor=topk | qsgd)")
    (('topk(ratio=0.01)', 'qsgd'), None)
    """
    if isinstance(spec, dict) and spec.get("name") == "composed" and {"sparsifier", "values"} == set(spec) - {"name"}:
        return spec["sparsifier"], spec["values"]
    if not isinstance(spec, str) or "|" not in spec:
        return None
    parts = [part.strip() for part in _at_bars(spec)]
    if len(parts) == 1:
        return None
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"{spec!r}: a composition has two parts, as in topk(ratio=0.01) | qsgd(levels=7)")
    return parts[0], parts[1]


def _at_bars(text: str) -> list[str]:
    """Return the parts of a text between bars that are outside of parentheses, brackets, braces and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += 0 if quote else (letter in "([{") - (letter in ")]}")
        if letter == "|" and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _literal(spec: str, keyword: ast.keyword) -> object:
    """Return a parameter's value: a literal, or as text a bare word (``dtype=fp16``, ``warm_start=true``) or another
    spec (``compressor=topk(ratio=0.05)``), in lists and dicts too."""
    try:
        return _value(spec, keyword.value)
    except ConfigError:  # raised for a nested spec, whose message is more exact
        raise
    except (ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        raise ConfigError(f"{spec}: {keyword.arg} is not a number, a word, a spec or a literal of these") from None


def _value(spec: str, node: ast.expr) -> object:
    if isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)):
        text = str(ast.get_source_segment(spec, node))
        for part in split(text) or (text,):
            parse(part)  # raises for a nested spec that is wrong, before it is used
        return text
    if isinstance(node, ast.Name):
        return {"true": True, "false": False}.get(node.id, node.id)
    if isinstance(node, ast.List):
        return [_value(spec, item) for item in node.elts]
    if isinstance(node, ast.Dict):
        items = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _value(spec, item) for key, item in items}  # type: ignore[arg-type]
    return ast.literal_eval(node)
