"""The page of strategy files, from their schema: ``python -m tools.strategy_page > docs/strategy-files.md``."""

from typing import Any

from grace.strategy.schema import json_schema

HEAD = """# Strategy files, field by field

Made by `python -m tools.strategy_page > docs/strategy-files.md` from the code; a test keeps it current.
[Strategies](strategies.md) has examples and explains what they are for.

A file is YAML, or JSON if its name ends in `.json`. It has an entry for every variable, which `grace strategy build`
writes, or rules for variables of any model; where both are there, entries count first. Only `version` must be there. A
field or word that is not on this page is refused by name, and so is what does not go together.

`grace strategy schema -o strategy.schema.json` writes the JSON Schema, by which editors complete and check files. With
the YAML language server, a file's first line names it:

    # yaml-language-server: $schema=strategy.schema.json
"""
SECTIONS = {
    "": "The file",
    "Cluster": "`cluster`",
    "BuilderEntry": "`builder`",
    "VariableEntry": "An entry of `variables`",
    "Cut": "`partition` of a variable",
    "PartEntry": "An entry of `parts`",
    "Collective": "`sync` of type `allreduce`, `allgather`, `broadcast`, `scatter_reduce` or `scatter_merge`",
    "ReduceBroadcast": "`sync` of type `reduce_broadcast`",
    "Alone": "`sync` of type `none`",
    "Rounds": "`outer`",
    "Own": "`sync` of another type",
    "Rule": "An entry of `rules`",
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
    """What a value may be, in words."""
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


if __name__ == "__main__":
    print(strategy_page(), end="")
