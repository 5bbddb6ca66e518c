"""Forms of users' files that pydantic reads, and messages for the errors that it finds."""

import difflib
import functools
import inspect
import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args, get_type_hints

from grace.core.documents import shown
from grace.errors import ConfigError, missing_extra

if TYPE_CHECKING:  # pydantic is loaded where files are read
    from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

NATURAL, POSITIVE = {"strict": True, "ge": 0}, {"strict": True, "ge": 1}
"""Metadata of a :class:`FileForm`'s fields for whole numbers from 0, and from 1 on."""

T = TypeVar("T")
RIGHT = {
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be keys with values",
    "model_type": "must be keys with values",
    "model_attributes_type": "must be keys with values",
    "dataclass_type": "must be keys with values",
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


def fault_at(key: str, message: str) -> "PydanticCustomError":
    """Return an error about a key of the value that pydantic validates, which a validator raises; an empty key stands
    for the whole value."""
    from pydantic_core import PydanticCustomError

    return PydanticCustomError("fault", "{said}", {"said": message, "key": key})


def check_unknown_keys(model: "type[BaseModel] | type[FileForm]", value: object) -> object:
    """Return the value of a model unchanged; a validator that runs before the model's own.

    Args:
        model: the class, which accepts no other keys than its fields.
        value: the value in the file.

    Raises:
        PydanticCustomError: a key is no field of the model.
    """
    fields = list(getattr(model, "model_fields", None) or model.__dataclass_fields__)
    for key in value if isinstance(value, dict) else ():
        if key not in fields:
            raise fault_at(key, unknown_key(str(key), fields))
    return value


def unknown_key(key: str, known: Collection[str]) -> str:
    """Return the message for a key that is none of the known ones.

    >>> unknown_key("nmae", ["name", "ranks"])
    "unknown key (did you mean 'name'?); known: name, ranks"
    """
    return f"unknown key{hint(key, known)}; known: {', '.join(known)}"


def opening(described: object) -> str:
    """Return the first paragraph of an object's docstring.

    >>> opening(hint)
    'Return the suggestion of the nearest known name, or an empty text.'
    """
    return " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split())


def argument_docs(cls: type) -> dict[str, str]:
    """Return the descriptions in the sections "Args" and "Attributes" of the docstrings of a class and its bases.

    >>> class Fan:
    ...     '''A fan.
    ...
    ...     Args:
    ...         low, high: speeds.
    ...     '''
    >>> argument_docs(Fan)
    {'low': 'Speeds.', 'high': 'Speeds.'}
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        sections = re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n?)+)", inspect.cleandoc(base.__doc__ or ""), re.M)
        for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", "\n".join(sections), re.M):
            said = " ".join(text.replace("``", "`").split())
            found.update(dict.fromkeys(names.split(", "), said[0].upper() + said[1:]))
    return found


class FileForm:
    """Base of dataclasses that are objects, and the form and the schema of a part of users' files.

    A field's metadata are keywords of ``pydantic.Field``; its description in the schema is that of the docstring. Only
    reading a file, and writing the schema, need pydantic.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Return the schema by which pydantic reads a file."""
        from pydantic_core import core_schema

        own = dict(handler.resolve_ref_schema(handler(source)))
        # The ref names the form in the JSON Schema. It moves outside, so that the form stands there once, by its name.
        ref = own.pop("ref")
        return core_schema.no_info_before_validator_function(cls.check_keys, own, ref=ref)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: "CoreSchema", handler: "GetJsonSchemaHandler") -> "JsonSchemaValue":
        """Return the JSON Schema, with descriptions from the docstring."""
        found = handler(core)
        schema, docs = handler.resolve_ref_schema(found), argument_docs(cls)
        schema["description"] = opening(cls)
        for key, field in schema.get("properties", {}).items():
            field.setdefault("description", docs.get(key, ""))
        return found

    @classmethod
    def check_keys(cls, value: object) -> object:
        """Return a file's value. Raise PydanticCustomError if it has an unknown key."""
        return check_unknown_keys(cls, value)

    def too_small(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that must be whole numbers from a bound on, and are not; and what would be right."""
        for name, low in _lower_bounds(cast(Hashable, type(self))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                yield name, f"must be a whole number of at least {low}, not {shown(value)}"


@functools.cache  # a model has thousands of parts
def _lower_bounds(form: Any) -> list[tuple[str, int]]:
    """Return the lower bounds of a form's whole numbers, by their names."""
    whole = [field for field in form.__dataclass_fields__.values() if field.type is int and "ge" in field.metadata]
    return [(field.name, field.metadata["ge"]) for field in whole]


class SpecForm:
    """Annotation of fields that hold a spec or an object; files have a spec."""

    def __get_pydantic_core_schema__(self, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Return the schema of specs: text, or keys with values."""
        from pydantic_core import core_schema

        spec = handler.generate_schema(str | dict[str, Any])
        return core_schema.no_info_before_validator_function(self._check, spec)

    def _check(self, value: object) -> object:
        if not isinstance(value, (str, dict)):
            raise fault_at("", f"must be text, as in `topk(ratio=0.01)`, or keys with values, not {shown(value)}")
        return value


def location(error: "ErrorDetails") -> list[str | int]:
    """Return the keys and indices that lead to an error."""
    key = error["ctx"]["key"] if error["type"] == "fault" else ""
    return [*error["loc"], *([] if key == "" else [key])]


def location_text(location: Sequence[str | int]) -> str:
    """Return keys and indices as text.

    >>> location_text(["rules", 0, "match"])
    'rules[0].match'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def read_record(kind: type[T], document: object, where: str) -> T:
    """Return the dataclass that is an object of a file, or a list of them; lists in it are tuples.

    Args:
        kind: the dataclass, or ``list[...]`` of it. Its annotations say what the file must have.
        document: the object, or the list.
        where: the file, for messages.

    Raises:
        ConfigError: the document does not fit, or the dataclass refuses it; the message names the field.

    >>> from grace.pipeline.planning.pipeline_plan import Stage
    >>> read_record(Stage, {"nodes": ["a"], "ranks": 0}, "p.json")
    Traceback (most recent call last):
    grace.errors.ConfigError: p.json, ranks: must be a list, not 0
    """
    try:
        from pydantic import ValidationError
    except ImportError as error:
        raise missing_extra("pydantic", "strategy") from error
    try:
        # As JSON, whose lists are tuples also for strict fields.
        form = _record_form(cast(Hashable, kind))
        return cast(T, form.validate_json(json.dumps([document], default=repr))[0])
    except ValidationError as error:
        first = error.errors()[0]
        field = location_text(location(first)[1:])
        joint = "" if not field or field.startswith("[") else ", "
        if first["type"] == "unexpected_keyword_argument":
            *path, key = first["loc"][1:]
            said = unknown_key(str(key), list(_record_at(kind, path).__dataclass_fields__))
        else:
            said = in_words(first)
        raise ConfigError(f"{where}{joint}{field}: {said}") from None


def _record_at(kind: Any, path: Iterable[str | int]) -> Any:
    """Return the dataclass at some keys and indices in a value of a type: a dataclass, or a list or mapping of them;
    any of these may be None instead."""
    for part in [*path, None]:
        if type(None) in get_args(kind):
            (kind,) = set(get_args(kind)) - {type(None)}
        if part is not None and is_dataclass(kind):
            kind = get_type_hints(kind)[str(part)]
        elif part is not None:
            kind = get_args(kind)[-1 if isinstance(part, str) else 0]
    return kind


@functools.cache
def _record_form(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, TypeAdapter

    # A list, because a dataclass alone takes no config from here.
    return TypeAdapter(list[kind], config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


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
