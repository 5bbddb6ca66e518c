"""Strategy files: JSON or YAML in one schema, validated field by field."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from grace.communicators.reduce_broadcast import AHEAD
from grace.core import documents
from grace.core.atomic_files import replacing
from grace.core.registry import checked, known, make
from grace.core.variable import equal_sizes
from grace.errors import ConfigError, missing_extra

try:
    import yaml
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Discriminator,
        Field,
        JsonValue,
        StrictBool,
        StrictInt,
        StrictStr,
        Tag,
        ValidationError,
        field_validator,
        model_validator,
    )
    from pydantic_core import PydanticCustomError
except ImportError as error:
    raise missing_extra(error.name or "pydantic", "strategy") from error

import re

from grace.core.variable import Variable
from grace.strategy.plan import COLLECTIVES, FIELDS, ShardPlan, Strategy, Sync, VariablePlan, fingerprint

Natural = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]
Spec = StrictStr | dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Entry(_Strict):
    """What stands as ``sync``."""

    def made(self) -> Sync:
        """The same as an object."""
        return Sync(**self.model_dump())


class Collective(Entry):
    """Synchronization by a collective."""

    type: Literal["allreduce", "allgather", "broadcast", "scatter_reduce"]
    group: Natural = 0


class ReduceBroadcast(Entry):
    """Synchronization by a rank that reduces and sends round."""

    type: Literal["reduce_broadcast"]
    destination: Natural = 0
    sync: StrictBool = True
    staleness: Natural = 0
    local_replication: StrictBool = False
    ahead: Positive = AHEAD


class Alone(Entry):
    """No synchronization, but an average now and then."""

    type: Literal["none"]
    period: Positive = 1


class Own(Entry):
    """Synchronization by a communicator that is registered; its parameters stand beside."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    type: Annotated[StrictStr, Field(json_schema_extra={"not": {"enum": list(FIELDS)}})]
    group: Natural = 0

    @model_validator(mode="after")
    def _registered(self) -> "Own":
        if self.type not in known("communicator"):
            names = ", ".join({**FIELDS, **known("communicator")})
            raise PydanticCustomError("sync", "{what}", {"what": f"type {self.type!r} is not known; known: {names}"})
        try:
            checked("communicator", self.type, dict(self.model_extra or {}))
        except ConfigError as error:
            raise PydanticCustomError("sync", "{what}", {"what": str(error)}) from None
        return self

    def made(self) -> Sync:
        return Sync(self.type, self.group, options=dict(self.model_extra or {}))


TAGS = {**dict.fromkeys(COLLECTIVES, "collective"), "reduce_broadcast": "reduce_broadcast", "none": "none"}


def _tag(sync: Any) -> str:
    kind = sync.get("type") if isinstance(sync, dict) else getattr(sync, "type", None)
    return TAGS.get(kind, "own") if isinstance(kind, str) else "own"


Synchronization = Annotated[
    Annotated[Collective, Tag("collective")]
    | Annotated[ReduceBroadcast, Tag("reduce_broadcast")]
    | Annotated[Alone, Tag("none")]
    | Annotated[Own, Tag("own")],
    Discriminator(_tag),
]


class PartEntry(_Strict):
    """How a part is exchanged."""

    sync: Synchronization
    compressor: Spec = "none"
    memory: Spec | None = None
    priority: StrictInt = 0

    def part(self) -> ShardPlan:
        """The same as an object."""
        return ShardPlan(self.sync.made(), self.compressor, self.memory, self.priority)


class Cut(_Strict):
    """Lengths along an axis."""

    axis: Natural
    sizes: Annotated[list[Positive], Field(min_length=1)]


class VariableEntry(_Strict):
    """A variable: what it is, and either its parts or, if it is whole, the four keys of its only part."""

    shape: list[Natural]
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    sparse: StrictBool = False
    partition: Cut | None = None
    parts: list[PartEntry] | None = None
    sync: Synchronization | None = None
    compressor: Spec = "none"
    memory: Spec | None = None
    priority: StrictInt = 0

    def plan(self, name: str) -> VariablePlan:
        """The same as an object.

        Raises:
            ConfigError: both forms are mixed, or neither is there.
        """
        variable = Variable(name, tuple(self.shape), self.dtype, sparse=self.sparse)
        own = self.model_fields_set & {"sync", "compressor", "memory", "priority"}
        if self.partition is not None:
            if own:
                raise ConfigError(f"variable {name!r}, {min(own)}: a variable that is cut has it in each of its parts")
            if self.parts is None:
                raise ConfigError(f"variable {name!r}, parts: is missing; there must be one per size of the partition")
            parts = tuple(entry.part() for entry in self.parts)
            return VariablePlan(variable, parts, self.partition.axis, tuple(self.partition.sizes))
        if self.parts is not None:
            raise ConfigError(f"variable {name!r}, parts: there is no partition that they would be parts of")
        if self.sync is None:
            raise ConfigError(f"variable {name!r}, sync: is missing")
        return VariablePlan(variable, (ShardPlan(self.sync.made(), self.compressor, self.memory, self.priority),))


class Match(_Strict):
    """Which variables a rule is for: all that is given must hold."""

    name: StrictStr | None = None
    """A glob, as in ``encoder.*.weight``."""
    regex: StrictStr | None = None
    """A regular expression that the whole name matches."""
    min_bytes: Natural | None = None
    max_bytes: Natural | None = None
    ndim: Natural | None = None
    dtype: StrictStr | None = None
    sparse: StrictBool | None = None
    rule: Spec | None = None
    """One of a user's, or of another package: a registered :class:`~grace.strategy.rule.Rule`."""

    @field_validator("rule")
    @classmethod
    def _registered(cls, rule: Any) -> Any:
        try:
            make("rule", rule)
        except ConfigError as error:
            raise PydanticCustomError("rule", "{what}", {"what": str(error)}) from None
        return rule

    def fits(self, variable: Variable) -> bool:
        """Whether the rule is for this variable."""
        return (
            (self.name is None or fnmatchcase(variable.name, self.name))
            and (self.regex is None or re.fullmatch(self.regex, variable.name) is not None)
            and (self.min_bytes is None or variable.nbytes >= self.min_bytes)
            and (self.max_bytes is None or variable.nbytes <= self.max_bytes)
            and (self.ndim is None or len(variable.shape) == self.ndim)
            and (self.dtype is None or variable.dtype == self.dtype)
            and (self.sparse is None or variable.sparse == self.sparse)
            and (self.rule is None or _fits(self.rule, variable))
        )


def _fits(rule: str | dict[str, Any], variable: Variable) -> bool:
    try:
        return bool(make("rule", rule).fits(variable))
    except Exception as error:
        raise ConfigError(f"rule {rule} cannot tell whether it is for {variable.name!r}: {error}") from error


class Shards(_Strict):
    """A rule's partition: as many parts of (nearly) equal lengths."""

    axis: Natural = 0
    shards: Positive


class Rule(PartEntry):
    """What the variables that it matches get; the first rule that matches counts."""

    match: Match
    partition: Shards | None = None

    def plan(self, variable: Variable) -> VariablePlan:
        """The plan of a variable that it matches."""
        if self.partition is None or self.partition.axis >= len(variable.shape):
            return VariablePlan(variable, (self.part(),))
        n = variable.shape[self.partition.axis]
        sizes = equal_sizes(n, max(1, min(self.partition.shards, n)))
        return VariablePlan(variable, (self.part(),) * len(sizes), self.partition.axis, sizes)


class BuilderEntry(_Strict):
    """What built the strategy."""

    name: StrictStr
    params: dict[str, JsonValue] = {}
    seed: StrictInt = 0


class Cluster(_Strict):
    """What the strategy is for."""

    world_size: Positive = 1
    nodes: Positive = 1


class Document(_Strict):
    """A strategy file."""

    version: Annotated[Literal[1], BeforeValidator(lambda version: None if version is True else version)]
    builder: BuilderEntry | None = None
    model: StrictStr | None = None
    cluster: Cluster = Cluster()
    variables: dict[StrictStr, VariableEntry] = {}
    rules: list[Rule] = []


def parse(document: Any, where: str = "the strategy", variables: Sequence[Variable] | None = None) -> Strategy:
    """A strategy from a document.

    Args:
        document: nested dicts, as JSON and YAML give them.
        where: what messages call it: the file.
        variables: the model's, which rules are resolved for and which the strategy must be for.

    Raises:
        ConfigError: the message names the file, the variable and the field, and what would be right.

    >>> parse({"version": 1, "variables": {"w": {"shape": [2], "sync": {"type": "ring"}}}})
    Traceback (most recent call last):
    grace.errors.ConfigError: the strategy, variables.w.sync: type 'ring' is not known; known: allreduce, ...
    """
    try:
        read = Document.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{where}, {_place(first['loc'])}: {first['msg']}") from None
    except RecursionError:
        raise ConfigError(f"{where}: it is nested too deeply") from None
    try:
        return _compiled(read, variables)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except re.error as error:
        raise ConfigError(f"{where}, rules: a regex cannot be read: {error}") from None


def _place(location: Sequence[Any]) -> str:
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    tags = {f".{tag}" for tag in [*TAGS.values(), "own"]}
    return "".join(word for i, word in enumerate(words) if not (word in tags and words[i - 1] == ".sync")).lstrip(".")


def _compiled(read: Document, variables: Sequence[Variable] | None) -> Strategy:
    if read.rules and variables is None:
        raise ConfigError("rules: they need a model whose variables they match (--model)")
    plans = {name: entry.plan(name) for name, entry in read.variables.items()}
    if read.rules:
        named = {variable.name for variable in variables or ()}
        for name in plans:
            if name not in named:
                raise ConfigError(f"variable {name!r}: the model has none of this name")
        plans = {v.name: plans[v.name] if v.name in plans else _ruled(read.rules, v) for v in variables or ()}
    builder = {} if read.builder is None else read.builder.model_dump()
    strategy = Strategy(tuple(plans.values()), read.cluster.world_size, read.cluster.nodes, builder)
    if variables is not None:
        strategy.check_model(variables)
    if read.model is not None and not read.rules and read.model != fingerprint(strategy.variables):
        raise ConfigError(
            "model: the fingerprint is not that of the variables below; they were changed, added, removed or reordered "
            "since it was built. Build it again, or take the line out"
        )
    return strategy


class Choice(_Strict):
    """A rule of a builder's."""

    match: Match = Match()
    compressor: Any = "none"
    memory: Any = None


def chosen(rules: Sequence[Any], variable: Variable) -> tuple[Any, Any]:
    """Compressor and memory of the first of a builder's rules, ``{"match": {...}, "compressor": ...}``, that matches.

    Raises:
        ConfigError: a rule cannot be read.
    """
    for i, rule in enumerate(rules):
        try:
            choice = Choice.model_validate(rule)
            if choice.match.fits(variable):
                return choice.compressor, choice.memory
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"rule {i}, {_place(first['loc']) or 'as a whole'}: {first['msg']}") from None
        except re.error as error:
            raise ConfigError(f"rule {i}, match.regex: it cannot be read: {error}") from None
    return "none", None


def _ruled(rules: Sequence[Rule], variable: Variable) -> VariablePlan:
    for rule in rules:
        if rule.match.fits(variable):
            return rule.plan(variable)
    raise ConfigError(
        f"variable {variable.name!r}: no rule matches it; end the rules with one that matches all: match: {{}}"
    )


def load(path: str | Path, variables: Sequence[Variable] | None = None) -> Strategy:
    """The strategy in a file: JSON if its name ends in .json, else YAML; see :func:`parse`."""
    return parse(documents.parse(documents.read(Path(path)), str(path)), str(path), variables)


def dump(strategy: Strategy, path: str | Path) -> None:
    """Write a strategy: JSON if the name ends in .json, else YAML."""
    document = strategy.to_dict()
    if str(path).endswith(".json"):
        text = json.dumps(document, indent=1) + "\n"
    else:
        text = yaml.safe_dump(document, sort_keys=False, width=110, default_flow_style=None)
    with replacing(path) as draft:
        draft.write_text(text)
