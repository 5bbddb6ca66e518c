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
    "CutVariableEntry": "An entry of `variables` that is cut",
    "Cut": "`partition` of a variable",
    "PartEntry": "An entry of `parts`",
    "Sync": "`sync`",
    "Outer": "`outer`",
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
        for form in model.get("oneOf", [model]):
            rows = [_row(key, field, form.get("required", ())) for key, field in form["properties"].items()]
            of_type = f" of type {_kind(form['properties']['type'])}" if "oneOf" in model else ""
            described = form["description"] + "\n" if name else ""
            parts += [f"## {title}{of_type}\n", *([described] if described else [])]
            parts += ["| field | is | if left out | meaning |", "| --- | --- | --- | --- |", *rows, ""]
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
    for key in ("anyOf", "oneOf", "allOf"):  # allOf: of older versions of pydantic
        if key in field:
            return " or ".join(dict.fromkeys(_kind(one) for one in field[key] if one.get("type") != "null"))
    if "not" in field:
        return "any other"
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        items = _kind(field["items"])
        return f"a list; each is {items}"
    if isinstance(field.get("additionalProperties"), dict) and "VariableEntry" in str(field["additionalProperties"]):
        return f"an object; each is {_kind(field['additionalProperties'])}"
    least = f", at least {field['minimum']:g}" if "minimum" in field else ""
    return WORDS[field["type"]] + least


def _named(field: dict[str, Any]) -> str:
    if field["$ref"].endswith("/Sync"):
        return "an object, by its `type`"
    title = SECTIONS[field["$ref"].rpartition("/")[2]]
    anchor = title.lower().replace("`", "").replace(",", "").replace(" ", "-")
    return f"[an object](#{anchor})"
