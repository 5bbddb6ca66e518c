"""Messages for errors that pydantic found in users' files."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from grace.core.documents import shown

if TYPE_CHECKING:  # a run without a strategy needs no pydantic
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

RIGHT = {
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "dict_type": "must be keys with values",
    "model_type": "must be keys with values",
    "model_attributes_type": "must be keys with values",
    "missing": "is missing",
    "too_short": "must not be empty",
    "string_unicode": "must be text",
}


def hint(name: str, known: Iterable[str]) -> str:
    """Return the suggestion of the nearest known name, or an empty text.

    >>> hint("topq", ["topk", "qsgd"]), hint("x", ["topk"])
    (" (did you mean 'topk'?)", '')
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse_unknown_keys(model: "type[BaseModel]", value: object) -> object:
    """Return the value of a model unchanged; a validator that runs before the model's own.

    Args:
        model: the class, which accepts no other keys than its fields.
        value: the value in the file.

    Raises:
        PydanticCustomError: a key is no field of the model; it is ``ctx["key"]``.
    """
    from pydantic_core import PydanticCustomError

    fields = list(model.model_fields)
    for key in value if isinstance(value, dict) else ():
        if key not in fields:
            said = f"unknown key{hint(str(key), fields)}; known: {', '.join(fields)}"
            raise PydanticCustomError("unknown_key", "{said}", {"said": said, "key": key})
    return value


def location(error: "ErrorDetails") -> list[str | int]:
    """Return the keys and indices that lead to an error, an unknown key included."""
    key = error["ctx"]["key"] if error["type"] == "unknown_key" else None
    return [*error["loc"], *([] if key is None else [key])]


def in_words(error: "ErrorDetails", hidden: bool = False) -> str:
    """Return the message for one of ``ValidationError.errors()``.

    Args:
        error: the error.
        hidden: True if the wrong value may be a secret: the message then has only its type.

    >>> in_words({"type": "literal_error", "msg": "Input should be 1", "input": 2})
    'must be 1, not 2'
    """
    kind, said = error["type"], error["msg"]
    if kind in ("missing", "too_short"):
        return RIGHT[kind]
    if kind in RIGHT or said.startswith("Input should "):
        value = error["input"]
        given = f"a value of type {type(value).__name__}" if hidden else shown(value)
        return f"{RIGHT.get(kind) or said.replace('Input should', 'must', 1)}, not {given}"
    return str(said).removeprefix("Value error, ")
