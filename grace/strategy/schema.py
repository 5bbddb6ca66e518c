"""Strategy files: JSON or YAML in one schema, validated field by field."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from grace.communicators.reduce_broadcast import AHEAD
from grace.core import documents, schema_words
from grace.core.atomic_files import atomic_write
from grace.core.registry import checked, known, unusable
from grace.core.variable import equal_sizes
from grace.errors import ConfigError, missing_extra

try:
    import yaml
    from pydantic import (
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
        model_validator,
    )
    from pydantic_core import PydanticCustomError
except ImportError as error:
    raise missing_extra(error.name or "pydantic", "strategy") from error

import re

from grace.core.variable import Variable
from grace.strategy.matching import Match, Natural, Positive, Spec, Strict
from grace.strategy.plan import COLLECTIVES, FIELDS, ShardPlan, Strategy, Sync, VariablePlan, fingerprint


class Entry(Strict):
    """What stands as ``sync``."""

    def made(self) -> Sync:
        """The same as an object."""
        return Sync(**self.model_dump())


class Collective(Entry):
    """By a collective."""

    type: Literal["allreduce", "allgather", "broadcast", "scatter_reduce", "scatter_merge"]
    """The communicator."""
    group: Natural = 0
    """Parts of one group, type, compressor and memory travel in one collective."""
    hierarchical: StrictBool = False
    """The ranks of each node average among themselves first, uncompressed; one of them exchanges with other nodes."""


class ReduceBroadcast(Entry):
    """By a rank that reduces and sends the mean round: a parameter server."""

    type: Literal["reduce_broadcast"]
    """This word."""
    destination: Natural = 0
    """The rank that reduces."""
    sync: StrictBool = True
    """False to apply means as they come."""
    staleness: Natural = 0
    """So many steps later means are applied; a rank may run that far ahead. With `sync: true` only."""
    local_replication: StrictBool = False
    """Send the answer once to each node, where one rank hands it on."""
    ahead: Positive = AHEAD
    """Steps whose means may be under way, with `sync: false` only."""


class Alone(Entry):
    """Not at all: ranks train on their own, and average the variable now and then."""

    type: Literal["none"]
    """This word."""
    period: Positive = 1
    """Average after every so many steps."""


class Own(Entry):
    """By another communicator, which is registered; its parameters stand beside these."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    type: Annotated[StrictStr, Field(json_schema_extra={"not": {"enum": list(FIELDS)}})]
    """Its name."""
    group: Natural = 0
    """As with a collective."""

    @model_validator(mode="after")
    def _registered(self) -> "Own":
        if self.type not in {**known("communicator"), **unusable("communicator")}:
            names = list({**FIELDS, **known("communicator")})
            near = schema_words.hint(self.type, names)
            what = f"type {self.type!r} is not known{near}; known: {', '.join(names)}"
            raise PydanticCustomError("sync", "{what}", {"what": what})
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


class PartEntry(Strict):
    """How a part is exchanged."""

    sync: Synchronization
    """How it is synchronized."""
    compressor: Spec = "none"
    """A spec, as in `topk(ratio=0.01)`."""
    memory: Spec | None = None
    """A spec; the compressor's default if left out."""
    priority: StrictInt = 0
    """Parts of a lower one start first."""
    compress_after: Natural = 0
    """Steps that are exchanged uncompressed first."""

    def part(self) -> ShardPlan:
        """The same as an object."""
        return ShardPlan(self.sync.made(), self.compressor, self.memory, self.priority, self.compress_after)


class Cut(Strict):
    """Lengths along an axis."""

    axis: Natural
    """Which dimension is cut; 0 of a sparse variable."""
    sizes: Annotated[list[Positive], Field(min_length=1)]
    """The lengths, which add up to the dimension."""


class VariableEntry(Strict):
    """A variable: what it is, and either its parts or, if it is whole, the keys of its only part."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["sync"]}, {"required": ["partition", "parts"]}]}
    )

    shape: list[Natural]
    """Its dimensions; none for a scalar."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """Of its gradient."""
    sparse: StrictBool = False
    """Whether its gradient is rows, as those of embeddings are."""
    partition: Cut | None = None
    """How it is cut; a whole variable has none."""
    parts: list[PartEntry] | None = None
    """One for each size of the partition."""
    sync: Synchronization | None = None
    """How it is synchronized, if it is whole; the next four likewise."""
    compressor: Spec = "none"
    """A spec, as in `topk(ratio=0.01)`."""
    memory: Spec | None = None
    """A spec; the compressor's default if left out."""
    priority: StrictInt = 0
    """Variables of a lower one start first."""
    compress_after: Natural = 0
    """Steps that are exchanged uncompressed first."""

    def plan(self, name: str) -> VariablePlan:
        """The same as an object.

        Raises:
            ConfigError: both forms are mixed, or neither is there.
        """
        variable = Variable(name, tuple(self.shape), self.dtype, sparse=self.sparse)
        own = self.model_fields_set & {"sync", "compressor", "memory", "priority", "compress_after"}
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
        part = ShardPlan(self.sync.made(), self.compressor, self.memory, self.priority, self.compress_after)
        return VariablePlan(variable, (part,))


class Shards(Strict):
    """A rule's partition: as many parts of (nearly) equal lengths."""

    axis: Natural = 0
    """Which dimension is cut; a variable that has no such one stays whole."""
    shards: Positive
    """How many parts, at most the dimension."""


class Rule(PartEntry):
    """What the variables that it matches get."""

    match: Match
    """Which variables it is for."""
    partition: Shards | None = None
    """How they are cut; left out, they stay whole."""

    def plan(self, variable: Variable) -> VariablePlan:
        """The plan of a variable that it matches."""
        if self.partition is None or self.partition.axis >= len(variable.shape):
            return VariablePlan(variable, (self.part(),))
        n = variable.shape[self.partition.axis]
        sizes = equal_sizes(n, max(1, min(self.partition.shards, n)))
        return VariablePlan(variable, (self.part(),) * len(sizes), self.partition.axis, sizes)


class BuilderEntry(Strict):
    """What built the strategy."""

    name: StrictStr
    """The builder."""
    params: dict[str, JsonValue] = {}
    """Its parameters."""
    seed: StrictInt = 0
    """Of what it drew."""


class Cluster(Strict):
    """What the strategy is for; what is left out is as in the run."""

    world_size: Positive | None = None
    """The number of ranks; a run of another is refused."""
    nodes: Positive | None = None
    """The number of machines, for the record."""


class Document(Strict):
    """A file: a strategy, with an entry for every variable, or rules for variables of any model; or both."""

    version: Annotated[Literal[1], BeforeValidator(lambda version: None if version is True else version)]
    """Of this form."""
    builder: BuilderEntry | None = None
    """What built it; for the record."""
    model: StrictStr | None = None
    """The fingerprint of the variables: a file whose variables were changed by hand is refused, unless this goes."""
    cluster: Cluster = Cluster()
    """The ranks that it is for; any number if left out."""
    variables: dict[StrictStr, VariableEntry] = {}
    """By name, in the model's order: each one has its entry, or a rule matches it."""
    rules: list[Rule] = []
    """For the variables that have no entry; the first that matches counts, and one must."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema of strategy files, for editors.

    >>> json_schema()["properties"]["rules"]["items"]
    {'$ref': '#/$defs/Rule'}
    """
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **Document.model_json_schema(), "title": "Strategies of Grace"}


def parse(
    document: Any,
    where: str = "the strategy",
    variables: Sequence[Variable] | None = None,
    cluster: Any = None,
) -> Strategy:
    """A strategy from a document.

    Args:
        document: nested dicts, as JSON and YAML give them.
        where: what messages call it: the file.
        variables: the model's, which rules are resolved for and which the strategy must be for.
        cluster: what a document that names no cluster is for; by default as few ranks as it can be for.

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
        place = _place(schema_words.location(first))
        raise ConfigError(f"{where}{place and ', '}{place}: {schema_words.in_words(first)}") from None
    except RecursionError:
        raise ConfigError(f"{where}: it is nested too deeply") from None
    try:
        return _compiled(read, variables, cluster)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except re.error as error:
        raise ConfigError(f"{where}, rules: a regex cannot be read: {error}") from None


def _place(location: Sequence[Any]) -> str:
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    tags = {f".{tag}" for tag in [*TAGS.values(), "own"]}
    return "".join(word for i, word in enumerate(words) if not (word in tags and words[i - 1] == ".sync")).lstrip(".")


def _compiled(read: Document, variables: Sequence[Variable] | None, cluster: Any) -> Strategy:
    if read.rules and variables is None:
        raise ConfigError("rules: they need a model whose variables they match (--model)")
    plans = {name: entry.plan(name) for name, entry in read.variables.items()}
    if read.rules:
        named = {variable.name for variable in variables or ()}
        for name in plans:
            if name not in named:
                raise ConfigError(f"variable {name!r}: the model has none of this name")
        plans = {v.name: plans[v.name] if v.name in plans else _ruled(read.rules, v) for v in variables or ()}
    by = {} if read.builder is None else read.builder.model_dump()
    destinations = [part.sync.destination for plan in plans.values() for part in plan.parts]
    least = max([read.cluster.nodes or 1, *(destination + 1 for destination in destinations)])
    size = read.cluster.world_size or (cluster.world_size if cluster else least)
    nodes = read.cluster.nodes or (len(set(cluster.ranks)) if cluster and cluster.world_size == size else 1)
    strategy = Strategy(tuple(plans.values()), size, nodes, by)
    if variables is not None:
        strategy.check_model(variables)
    if read.model is not None and not read.rules and read.model != fingerprint(strategy.variables):
        raise ConfigError(
            "model: the fingerprint is not that of the variables below; they were changed, added, removed or reordered "
            "since it was built. Build it again, or take the line out"
        )
    return strategy


def _ruled(rules: Sequence[Rule], variable: Variable) -> VariablePlan:
    for rule in rules:
        if rule.match.fits(variable):
            return rule.plan(variable)
    raise ConfigError(
        f"variable {variable.name!r}: no rule matches it; end the rules with one that matches all: match: {{}}"
    )


def load(path: str | Path, variables: Sequence[Variable] | None = None, cluster: Any = None) -> Strategy:
    """The strategy in a file: JSON if its name ends in .json, else YAML; see :func:`parse`."""
    return parse(documents.parse(documents.read(Path(path)), str(path)), str(path), variables, cluster)


def dump(strategy: Strategy, path: str | Path) -> None:
    """Write a strategy: JSON if the name ends in .json, else YAML."""
    document = strategy.to_dict()
    if str(path).endswith(".json"):
        text = json.dumps(document, indent=1) + "\n"
    else:
        text = yaml.safe_dump(document, sort_keys=False, width=110, default_flow_style=None)
    with atomic_write(path) as draft:
        draft.write_text(text)
