"""The page of strategy files, made from their schema. ``make docs`` writes it to docs/strategy-files.md."""

from typing import Any

from grace.strategy.schema import json_schema

HEAD = """# Strategy files, field by field

This page lists every field of a strategy file. [Strategies](strategies.md) has examples and explains their purpose.
`make docs` makes this page from the code.

A file is YAML, or JSON if its name ends in `.json`. It has an entry for every variable, as `grace strategy build`
writes it, or rules for the variables of any model. If it has both, entries count first. Only `version` is required.
Fields and words that are not on this page are refused, and so are fields that contradict each other.

`grace strategy schema -o strategy.schema.json` writes the JSON Schema. Editors use it to complete and check files. With
the YAML language server, the first line of a file names it:

    # yaml-language-server: $schema=strategy.schema.json
"""
SECTIONS = {
    "": "The file",
    "ClusterEntry": "`cluster`",
    "BuilderEntry": "`builder`",
    "VariableEntry": "An entry of `variables`",
    "CutEntry": "`partition` of a variable",
    "PartEntry": "An entry of `parts`",
    "CollectiveEntry": "`sync` of type `allreduce`, `allgather`, `broadcast`, `scatter_reduce` or `scatter_merge`",
    "ReduceBroadcastEntry": "`sync` of type `reduce_broadcast`",
    "Alone": "`sync` of type `none`",
    "Rounds": "`outer`",
    "Own": "`sync` of another type",
    "RuleEntry": "An entry of `rules`",
    "Match": "`match` of a rule",
    "Shards": "`partition` of a rule",
}
WORDS = {
    "string": "text",
    "boolean": "true or false",
    "object": "an object",
    "integer": "a whole number",
    "number": "a number",
}


def strategy_page() -> str:
    """The whole page, in Markdown.

    >>> "| `staleness` | a whole number, at least 0 | `0` |" in strategy_page()
    True
    """
    schema = json_schema()
    parts = [HEAD]
    for name, title in SECTIONS.items():
        model = schema["$defs"][name] if name else schema
        rows = [_row(key, field, model.get("required", ())) for key, field in model["properties"].items()]
        described = "" if not name else model["description"] + "\n"
        parts += [f"## {title}\n", *([described] if described else []), "| field | is | if left out | meaning |"]
        parts += ["| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(parts).rstrip() + "\n"


def _row(key: str, field: dict[str, Any], required: Any) -> str:
    default = field.get("default")
    nothing = not any(default.values()) if isinstance(default, dict) else default in (None, [])
    usual = "must be there" if key in required else "nothing" if nothing else f"`{str(default).lower()}`"
    return f"| `{key}` | {_kind(field)} | {usual} | {field['description']} |"


def _kind(field: dict[str, Any]) -> str:
    """Return the description of the values that a field may have."""
    if "$ref" in field:
        return _named(field)
    for key in ("anyOf", "oneOf"):
        if key in field:
            kinds = [_kind(one) for one in field[key] if one.get("type") != "null"]
            refs = all("$ref" in one for one in field[key])
            return "an object, by its `type`" if refs and len(kinds) > 1 else " or ".join(dict.fromkeys(kinds))
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        items = _kind(field["items"])
        return f"a list; each is {items}"
    if isinstance(field.get("additionalProperties"), dict) and "VariableEntry" in str(field["additionalProperties"]):
        return f"an object; each is {_kind(field['additionalProperties'])}"
    least = f", at least {field['minimum']}" if "minimum" in field else ""
    return WORDS[field["type"]] + least


def _named(field: dict[str, Any]) -> str:
    title = SECTIONS[field["$ref"].rpartition("/")[2]]
    anchor = title.lower().replace("`", "").replace(",", "").replace(" ", "-")
    return f"[an object](#{anchor})"
