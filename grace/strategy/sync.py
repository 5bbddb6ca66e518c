"""Synchronization of a part: any registered communicator with its parameters, or none but periodic averages."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from grace.core import specs
from grace.core.communicator import Communicator
from grace.core.documents import shown
from grace.core.outer import Outer
from grace.core.registry import find, known, unusable
from grace.core.schema_words import NATURAL, FileForm, argument_docs, fault_at, hint, opening, unknown_key
from grace.core.specs import Spec
from grace.errors import ConfigError

if TYPE_CHECKING:  # pydantic is loaded where files are read
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

JsonObject = dict[str, Any]
"""Object of a strategy's document: plain data, as JSON has it."""
ALONE = "none"
"""Type of variables whose gradients are not exchanged."""
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True, init=False)
class Sync(FileForm):
    """Synchronization of a part's gradient over all ranks.

    Args:
        type: a communicator's name; or "none": ranks train on their own, and average every ``period`` steps.
        group: parts of one group, type, compressor and memory travel in one collective.
        hierarchical: the ranks of each node average among themselves first, uncompressed; one of them exchanges with
            other nodes.
        options: the communicator's parameters, or ``period``. Those that are left out have their defaults.
        more: the same, as keywords.

    >>> Sync("reduce_broadcast", destination=1, staleness=2).options["staleness"]
    2
    """

    type: str
    group: int = field(metadata=NATURAL)
    hierarchical: bool
    options: JsonObject

    def __init__(
        self,
        type: str = "allreduce",
        group: int = 0,
        hierarchical: bool = False,
        options: JsonObject | None = None,
        **more: Any,
    ):
        # All parameters are kept, so that a file with a default written out is equal to one without.
        defaults = {key: value for key, value in parameters_of(type).items() if value is not MISSING}
        values = {**defaults, **(options or {}), **more}
        # The dataclass is frozen.
        vars(self).update(type=type, group=group, hierarchical=hierarchical, options=values)

    def __hash__(self) -> int:
        return hash((self.type, self.group, self.hierarchical, repr(self.options)))

    @property
    def destination(self) -> int:
        """Rank that averages for all; 0 for communicators that have none."""
        return cast(int, self.options.get("destination", 0))

    @property
    def grouped(self) -> bool:
        """True if parts of one group travel together; else those of one destination, or none."""
        return _has_groups(self.type)

    @classmethod
    def from_spec(cls, spec: Spec, group: int = 0) -> "Sync":
        """Return the synchronization of a spec, for parts of a group.

        Raises:
            ConfigError: there is no such type, or it has no such field.

        >>> Sync.from_spec("reduce_broadcast(destination=1)").to_dict()["destination"]
        1
        """
        kind, arguments = specs.parse(spec)
        for key, message in form_faults({"type": kind, **arguments}):
            raise ConfigError(f"sync {kind}{key and ', '}{key}: {message}")
        return cls(kind, **({"group": group} if _has_groups(kind) else {}) | arguments)

    def to_dict(self) -> JsonObject:
        """Return the form in a file; ``hierarchical`` only where it is True.

        >>> Sync("allgather", group=3).to_dict()
        {'type': 'allgather', 'group': 3}
        """
        group = {"group": self.group} if self.grouped else {}
        return {"type": self.type, **group, **({"hierarchical": True} if self.hierarchical else {}), **self.options}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield the faults of the fields: the field, and what would be right. A communicator checks its parameters."""
        yield from self.too_small()
        if not isinstance(self.hierarchical, bool):
            yield "hierarchical", f"must be true or false, not {shown(self.hierarchical)}"
        if self.hierarchical and not self.grouped:
            with_groups = ", ".join(filter(_has_groups, known("communicator")))
            yield "hierarchical", f"is for {with_groups}, not for {self.type}"
        if self.type == ALONE:
            yield from Outer(period=self.options["period"]).faults()

    # -- files -----------------------------------------------------------------------------------------

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Return the schema by which pydantic reads a file: keys with values, which :meth:`_read` takes."""
        from pydantic import JsonValue
        from pydantic_core import core_schema

        keys = handler.generate_schema(dict[str, JsonValue])
        # With a ref it stands once in the JSON Schema.
        return core_schema.no_info_after_validator_function(cls._read, keys, ref=f"{cls.__module__}.Sync:{id(cls)}")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: "CoreSchema", handler: "GetJsonSchemaHandler") -> "JsonSchemaValue":
        """Return the JSON Schema: a form for all communicators without parameters, one for each other type, and one for
        communicators that are not known here."""
        types = sync_types()
        plain = [kind for kind in types if _has_groups(kind) and not parameters_of(kind)]
        return {"oneOf": [_form(plain), *(_form([kind]) for kind in types if kind not in plain), _form([])]}

    @classmethod
    def _read(cls, document: JsonObject) -> "Sync":
        """Return the synchronization of an object in a file. Raise PydanticCustomError if it cannot be."""
        for key, message in form_faults(document):
            raise fault_at(key, message)
        read = cls(**document)
        for key, message in read.faults():
            raise fault_at(key, message)
        return read


def sync_types() -> list[str]:
    """Return the types of synchronization: the communicators' names, and "none".

    >>> sync_types()[:2], sync_types()[-1]
    (['allgather', 'allreduce'], 'none')
    """
    return [*known("communicator"), ALONE]


def parameters_of(kind: str) -> dict[str, object]:
    """Return the fields of a type beside ``group`` and ``hierarchical``, with their defaults; none of unknown types.

    >>> parameters_of("none")
    {'period': 1}
    """
    if kind == ALONE:
        return {"period": 1}
    cls: Any = find("communicator", kind)
    return {} if cls is None else _parameters(cls)


@lru_cache(256)  # a model has thousands of parts, and reading a signature takes long
def _parameters(cls: type[Communicator]) -> dict[str, object]:
    return cls.parameters()


def _has_groups(kind: str) -> bool:
    """Return True if a type's parts are grouped: those of a rooted communicator are by their root."""
    cls: Any = find("communicator", kind)
    return kind != ALONE and not (cls is not None and cls.rooted)


def form_faults(document: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield the fault of a file's object if its type or a key is unknown: the key (empty for the whole object), and
    what would be right."""
    if "type" not in document:
        yield "type", "is missing"
        return
    kind = document["type"]
    if not isinstance(kind, str):
        yield "type", f"must be text, not {shown(kind)}"
    elif kind in unusable("communicator"):
        yield "type", str(unusable("communicator")[kind])
    elif kind not in sync_types():
        yield "", f"type {shown(kind)} is not known{hint(kind, sync_types())}; known: {', '.join(sync_types())}"
    else:
        fields = ["type", *(["group", "hierarchical"] if _has_groups(kind) else []), *parameters_of(kind)]
        for key in document:
            if key not in fields:
                yield key, unknown_key(key, fields)
        for key, default in parameters_of(kind).items():
            if default is MISSING and key not in document:
                yield key, "is missing"


def _form(kinds: list[str]) -> JsonObject:
    """Return the JSON Schema of types with equal fields; of communicators that are not known if it is empty."""
    docs = argument_docs(Sync)
    types = {"enum": kinds} if kinds else {"not": {"enum": sync_types()}}
    properties: JsonObject = {"type": {"type": "string", **types, "description": docs["type"]}}
    if not kinds or _has_groups(kinds[0]):
        group = {"type": "integer", "minimum": NATURAL["ge"], "default": 0, "description": docs["group"]}
        led = {"type": "boolean", "default": False, "description": docs["hierarchical"]}
        properties.update(group=group, hierarchical=led)
    parameters = _parameter_forms(kinds[0]) if kinds else {}
    form = {
        "description": " ".join(f"`{kind}`: {_description(kind)}" for kind in kinds)
        or "A communicator that is not known here; its parameters are further keys.",
        "type": "object",
        "properties": {**properties, **parameters},
        "required": ["type", *(key for key, parameter in parameters.items() if "default" not in parameter)],
    }
    return {**form, "additionalProperties": False} if kinds else form


def _description(kind: str) -> str:
    if kind == ALONE:
        return "Ranks train on their own, and average the variable periodically."
    return opening(find("communicator", kind))


def _parameter_forms(kind: str) -> dict[str, JsonObject]:
    """Return the JSON Schema of a type's own fields, of what the class says of its parameters."""
    if kind == ALONE:
        what = "The number of steps between two averages."
        return {"period": {"type": "integer", "minimum": 1, "default": 1, "description": what}}
    cls = cast("type[Communicator]", find("communicator", kind))
    docs, annotations, forms = argument_docs(cls), dict[str, Any](), {}
    for base in reversed(cls.__mro__):
        annotations.update(getattr(vars(base).get("__init__"), "__annotations__", {}))
    for key, default in parameters_of(kind).items():
        annotation: Any = annotations.get(key)
        form: JsonObject = {"description": docs.get(key, f"A parameter of {kind}.")}
        plain = JSON_TYPES.get(getattr(annotation, "__origin__", annotation))
        if plain is not None:
            form |= {"type": plain, **getattr(annotation, "__metadata__", [{}])[0]}
        if default is not MISSING:
            form["default"] = default
        forms[key] = form
    return forms
