"""Strategy files: JSON or YAML in one schema, validated field by field."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

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
        StrictFloat,
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
from grace.strategy.builder import Cluster
from grace.strategy.matching import Dtype, Match, Natural, Positive, Spec, Strict
from grace.strategy.plan import COLLECTIVES, FIELDS, ShardPlan, Strategy, VariablePlan, fingerprint


class CollectiveEntry(Strict):
    """Synchronization by a collective."""

    type: Literal["allreduce", "allgather", "broadcast", "scatter_reduce", "scatter_merge"]
    """The communicator."""
    group: Natural = 0
    """Parts of one group, type, compressor and memory travel in one collective."""
    hierarchical: StrictBool = False
    """The ranks of each node average among themselves first, uncompressed; one of them exchanges with other nodes."""


class ReduceBroadcastEntry(Strict):
    """Synchronization by a rank that reduces and sends the mean round: a parameter server."""

    type: Literal["reduce_broadcast"]
    """This word."""
    destination: Natural = 0
    """The rank that reduces."""
    sync: StrictBool = True
    """False to apply means as they come."""
    staleness: Natural = 0
    """Steps that means are applied later; a rank may run as many steps ahead. With `sync: true` only."""
    local_replication: StrictBool = False
    """True to send the answer once to each node, where one rank sends it to the others."""
    ahead: Positive = AHEAD
    """Steps whose means may be under way, with `sync: false` only."""


class Alone(Strict):
    """No synchronization of gradients: ranks train on their own, and average the variable periodically."""

    type: Literal["none"]
    """This word."""
    period: Positive = 1
    """Steps between two averages."""


class Rounds(Strict):
    """Rounds in which ranks that train alone exchange how far they have drifted; `sync` carries the drifts."""

    optimizer: Spec = "none"
    """The outer optimizer's spec: `none` averages."""
    period: Positive
    """Iterations between two rounds."""
    fragments: Positive = 1
    """Number of fragments, which travel at different times."""
    delay: Natural = 0
    """Iterations for which a fragment may travel while training goes on."""
    merge: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.0
    """Share of its own drift that a rank keeps."""
    over: Literal["ranks", "nodes"] = "ranks"
    """`nodes`: the ranks of a node average gradients in every iteration."""


class Own(Strict):
    """Synchronization by another communicator, which is registered; its parameters are further keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    type: Annotated[StrictStr, Field(json_schema_extra={"not": {"enum": list(FIELDS)}})]
    """The communicator's name."""
    group: Natural = 0
    """Parts of one group, type, compressor and memory travel in one collective."""

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


TAGS = {**dict.fromkeys(COLLECTIVES, "collective"), "reduce_broadcast": "reduce_broadcast", "none": "none"}


def _tag(sync: object) -> str:
    kind = sync.get("type") if isinstance(sync, dict) else getattr(sync, "type", None)
    return TAGS.get(kind, "own") if isinstance(kind, str) else "own"


Synchronization = Annotated[
    Annotated[CollectiveEntry, Tag("collective")]
    | Annotated[ReduceBroadcastEntry, Tag("reduce_broadcast")]
    | Annotated[Alone, Tag("none")]
    | Annotated[Own, Tag("own")],
    Discriminator(_tag),  # so that an error is about the type that was written, not about all four
]


class Method(Strict):
    """Compression of a part, and its turn."""

    compressor: Spec = "none"
    """A spec, as in `topk(ratio=0.01)`."""
    memory: Spec | None = None
    """A spec; the compressor's default if left out."""
    priority: StrictInt = 0
    """Parts of a lower priority start first."""
    compress_after: Natural = 0
    """Steps that are exchanged uncompressed first."""


class PartEntry(Method):
    """Exchange of a part."""

    sync: Synchronization
    """The part's synchronization."""
    outer: Rounds | None = None
    """The rounds, if ranks train alone; else gradients are exchanged in every step."""


class CutEntry(Strict):
    """Lengths along an axis."""

    axis: Natural
    """The dimension that is cut; 0 for a sparse variable."""
    sizes: Annotated[list[Positive], Field(min_length=1)]
    """The parts' lengths, which add up to the dimension."""


class VariableEntry(Method):
    """A variable, with either its parts or, if it is not cut, the keys of its only part."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["sync"]}, {"required": ["partition", "parts"]}]}
    )

    shape: list[Natural]
    """The variable's dimensions; none for a scalar."""
    dtype: Dtype = "float32"
    """The gradient's dtype."""
    sparse: StrictBool = False
    """True if the gradient is rows, as for embeddings."""
    partition: CutEntry | None = None
    """The cut into parts; none if the variable is not cut."""
    parts: list[PartEntry] | None = None
    """The parts, one for each size of the partition."""
    sync: Synchronization | None = None
    """The synchronization of a variable that is not cut, as are its method, `priority` and `compress_after`."""
    outer: Rounds | None = None
    """The rounds, if ranks train alone; else gradients are exchanged in every step."""

    def plan(self, name: str) -> VariablePlan:
        """Return the variable's plan as an object.

        Raises:
            ConfigError: both forms are mixed, or neither is there.
        """
        own = self.model_fields_set & PartEntry.model_fields.keys()
        if self.partition is not None:
            if own:
                raise ConfigError(f"variable {name!r}, {min(own)}: a variable that is cut has it in each of its parts")
            if self.parts is None:
                raise ConfigError(f"variable {name!r}, parts: is missing; there must be one per size of the partition")
        elif self.parts is not None:
            raise ConfigError(f"variable {name!r}, parts: there is no partition that they would be parts of")
        elif self.sync is None:
            raise ConfigError(f"variable {name!r}, sync: is missing")
        return VariablePlan.from_dict(name, self.model_dump())


class Shards(Strict):
    """A rule's partition into parts of (nearly) equal lengths."""

    axis: Natural = 0
    """The dimension that is cut; a variable without it, or without elements, is not cut."""
    shards: Positive
    """The number of parts, at most the dimension."""


class RuleEntry(PartEntry):
    """The exchange of the variables that a rule matches."""

    match: Match
    """The condition that variables of this rule fulfil."""
    partition: Shards | None = None
    """The cut of each variable; if left out, it is not cut."""

    def plan(self, variable: Variable) -> VariablePlan:
        """Return the plan of a variable that the rule matches."""
        part = ShardPlan.from_dict(self.model_dump())
        axis = 0 if self.partition is None else self.partition.axis
        n = variable.shape[axis] if axis < len(variable.shape) else 0
        if self.partition is None or n == 0:
            return VariablePlan(variable, (part,))
        sizes = equal_sizes(n, min(self.partition.shards, n))
        return VariablePlan(variable, (part,) * len(sizes), self.partition.axis, sizes)


class BuilderEntry(Strict):
    """The builder of the strategy."""

    name: StrictStr
    """The builder's name."""
    params: dict[str, JsonValue] = {}
    """The builder's parameters."""
    seed: StrictInt = 0
    """The seed of the builder's random draws."""


class ClusterEntry(Strict):
    """The cluster that the strategy is for; keys that are left out are as in the run."""

    world_size: Positive | None = None
    """The number of ranks; a run of another number is refused."""
    nodes: Positive | None = None
    """The number of machines, for the record."""


class Document(Strict):
    """A file: a strategy, with an entry for every variable, or rules for variables of any model; or both."""

    # `version: true` equals 1 in Python, and so for Literal
    version: Annotated[Literal[1], BeforeValidator(lambda version: None if version is True else version)]
    """The version of the form of these files."""
    builder: BuilderEntry | None = None
    """The builder of the strategy, for the record."""
    model: StrictStr | None = None
    """The fingerprint of the variables: a file whose variables were changed by hand is refused, unless this is removed.
    """
    cluster: ClusterEntry = ClusterEntry()
    """The ranks that the strategy is for; any number if left out."""
    variables: dict[StrictStr, VariableEntry] = {}
    """The variables by name, in the model's order: each one has its entry, or a rule matches it."""
    rules: list[RuleEntry] = []
    """Rules for the variables that have no entry; the first that matches counts, and one must match."""


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON Schema of strategy files, for editors.

    >>> json_schema()["properties"]["rules"]["items"]
    {'$ref': '#/$defs/RuleEntry'}
    """
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **Document.model_json_schema(), "title": "Strategies of Grace"}


def parse(
    document: object,
    where: str = "the strategy",
    variables: Sequence[Variable] | None = None,
    cluster: Cluster | None = None,
) -> Strategy:
    """Return the strategy of a document.

    Args:
        document: nested dicts, as JSON and YAML give them.
        where: the document's name in messages: the file.
        variables: the model's variables, which rules are resolved for and which the strategy must be for.
        cluster: the cluster of a document that names none; by default the smallest one that the document allows.

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
        field = _format_location(schema_words.location(first))
        raise ConfigError(f"{where}{field and ', '}{field}: {schema_words.in_words(first)}") from None
    except RecursionError:
        raise ConfigError(f"{where}: it is nested too deeply") from None
    try:
        return _to_strategy(read, variables, cluster)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except re.error as error:
        raise ConfigError(f"{where}, rules: a regex cannot be read: {error}") from None


def _format_location(location: Sequence[int | str]) -> str:
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    # pydantic puts the tag of a union's member into the location: it is no key of the file
    tags = {f".{tag}" for tag in [*TAGS.values(), "own"]}
    return "".join(word for i, word in enumerate(words) if not (word in tags and words[i - 1] == ".sync")).lstrip(".")


def _to_strategy(read: Document, variables: Sequence[Variable] | None, cluster: Cluster | None) -> Strategy:
    if read.rules and variables is None:
        raise ConfigError("rules: they need a model whose variables they match (--model)")
    plans = {name: entry.plan(name) for name, entry in read.variables.items()}
    if read.rules:
        named = {variable.name for variable in variables or ()}
        for name in plans:
            if name not in named:
                raise ConfigError(f"variable {name!r}: the model has none of this name")
        plans = {v.name: plans[v.name] if v.name in plans else _plan_by_rules(read.rules, v) for v in variables or ()}
    builder = {} if read.builder is None else read.builder.model_dump()
    destinations = [part.sync.destination for plan in plans.values() for part in plan.parts]
    # a file that names no cluster, read without one: as many ranks as its destinations need
    least = max([read.cluster.nodes or 1, *(destination + 1 for destination in destinations)])
    size = read.cluster.world_size or (cluster.world_size if cluster else least)
    nodes = read.cluster.nodes or (len(set(cluster.ranks)) if cluster and cluster.world_size == size else 1)
    strategy = Strategy(tuple(plans.values()), size, nodes, builder)
    if variables is not None:
        strategy.check_model(variables)
    if read.model is not None and not read.rules and read.model != fingerprint(strategy.variables):
        raise ConfigError(
            "model: the fingerprint is not that of the variables below; they were changed, added, removed or reordered "
            "since it was built. Build it again, or take the line out"
        )
    return strategy


def _plan_by_rules(rules: Sequence[RuleEntry], variable: Variable) -> VariablePlan:
    for rule in rules:
        if rule.match.fits(variable):
            return rule.plan(variable)
    raise ConfigError(
        f"variable {variable.name!r}: no rule matches it; end the rules with one that matches all: match: {{}}"
    )


def load(path: str | Path, variables: Sequence[Variable] | None = None, cluster: Cluster | None = None) -> Strategy:
    """Return the strategy in a file: JSON if its name ends in .json, else YAML; see :func:`parse`."""
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
