"""Users' files: JSON and YAML as plain data, or an error that says which file is wrong, and where.

JSON needs nothing but Python; YAML its package.
"""

import dataclasses
import json
import math
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grace.core.atomic_files import atomic_write
from grace.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DEEPEST = 50
"""Largest depth of nested lists and objects. Readers of documents may recurse over them."""


def read(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None


def write(path: str | Path, document: object) -> None:
    """Write a document as JSON to a file, which is there whole or not at all."""
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def to_plain(record: "DataclassInstance") -> dict[str, Any]:
    """Return a dataclass, and those in it, as plain data: as they are when JSON is read, with lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(record)))  # type: ignore[no-any-return]


def parse(text: str, where: str, infinite: bool = False, only_json: bool = False) -> Any:
    """Return the document in a text: JSON if ``where`` ends in .json or an option says so; else YAML.

    Only text, numbers, true, false, null, lists and objects are accepted; no key may stand twice.

    Args:
        text: the text of the file.
        where: the file, for messages.
        infinite: True to read JSON with NaN and Infinity, which Python writes.
        only_json: True to read JSON, whatever the file is called.

    Raises:
        ConfigError: the text is no such document.

    >>> parse('{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    grace.errors.ConfigError: x.json: is not JSON: the key 'a' stands there a second time
    """
    kind = "JSON" if infinite or only_json or where.lower().endswith(".json") else "YAML"
    try:
        if kind == "JSON":
            found = json.loads(
                text,
                object_pairs_hook=_parse_object,
                parse_int=_parse_int,
                parse_constant=float if infinite else _raise_for_constant,
                parse_float=float if infinite else _parse_float,
            )
        else:
            found = _yaml(text)
        _check(found)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(f"{where}: is not {kind}: {said}") from None
    return found


def _parse_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands there a second time")
        found[key] = value
    return found


def _raise_for_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _parse_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _raise_for_constant(text)


def _parse_int(text: str) -> int:
    if len(text) > 300:  # Python refuses integers of more than 4,300 digits, and a float's largest has 309
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def shown(value: object) -> str:
    """Return a value for messages as text of one line, however large it is.

    >>> shown([1, "a"]), shown("a" * 100)
    ("[1, 'a']", "'aaaaaaaaaaaa...aaaaaaaaaaaaa'")
    """
    try:
        return reprlib.repr(value)
    except Exception:  # whole numbers of thousands of digits
        return f"a very large {type(value).__name__}"


def _check(document: object) -> None:
    """Refuse documents that are nested too deeply, and text that cannot be encoded, and so not printed."""
    level, seen = [document], set[int]()
    for _ in range(DEEPEST):
        below: list[object] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, (dict, list)) and id(value) not in seen:  # YAML may have one in many places
                seen.add(id(value))
                below += value if isinstance(value, list) else [*value, *value.values()]
        level = below
        if not level:
            return
    raise RecursionError  # parse() turns it into a message


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!a} holds half a character") from None


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise missing_extra("yaml", "strategy") from error

    class Plain(yaml.SafeLoader):
        """Loader of plain data only: dates stay text."""

        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
            word = node.tag.rpartition(":")[2]
            try:
                if word not in ("str", "int", "float", "bool", "null", "seq", "map", "merge"):
                    raise ValueError(f"could not determine a constructor for {node.tag}, which is not taken")
                return super().construct_object(node, deep)
            # PyYAML's constructors raise these for a text that does not suit its tag, as !!int x.
            except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
                said = str(error) if isinstance(error, ValueError) else f"{node.value!r} cannot be read as {word}"
                at = f" (line {node.start_mark.line + 1})"
                raise ValueError(said if "line " in said else said + at) from None

        checked = set[yaml.Node]()

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            # Keys are checked before those of merged mappings (<<), which they may override, come among them.
            if node not in self.checked:
                self.checked.add(node)
                self.check_keys(node)
            super().flatten_mapping(node)

        def check_keys(self, node: yaml.MappingNode) -> None:
            seen = set()
            for key, _ in node.value:
                if key.tag.endswith(":merge"):
                    continue
                # PyYAML takes the key "=" for a tag of its own, and makes text of it when it flattens.
                name = key.value if key.tag.endswith(":value") else self.construct_object(key, deep=True)
                if isinstance(name, (list, dict)):
                    raise ValueError(f"line {key.start_mark.line + 1}: a list or an object is no key")
                if name in seen:
                    raise ValueError(f"line {key.start_mark.line + 1}: the key {name!r} stands there a second time")
                seen.add(name)

    try:
        return yaml.load(text, Plain)
    except yaml.MarkedYAMLError as error:  # its own text quotes the line, which may be long, or private
        said = ": ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark or error.context_mark
        raise ValueError(said if mark is None else f"{said} (line {mark.line + 1})") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
