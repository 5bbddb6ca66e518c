"""Strategy files: JSON or YAML in one schema, validated field by field."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from grace.core import documents, schema_words
from grace.core.atomic_files import atomic_write
from grace.core.schema_words import FileForm
from grace.core.variable import Variable, equal_sizes
from grace.errors import ConfigError, missing_extra

try:
    from pydantic import (
        BeforeValidator,
        Discriminator,
        Field,
        JsonValue,
        StrictBool,
        StrictInt,
        StrictStr,
        Tag,
        ValidationError,
    )
except ImportError as error:
    raise missing_extra(error.name or "pydantic", "strategy") from error

from grace.strategy.builder import Cluster
from grace.strategy.matching import Dtype, Match, Natural, Positive, Strict
from grace.strategy.plan import ShardPlan, Strategy, VariablePlan, fingerprint
from grace.strategy.sync import Sync


@dataclass(frozen=True, kw_only=True)
class PartEntry(ShardPlan):
    """Exchange of a part."""

    sync: Sync  # required in files

    def part(self) -> ShardPlan:
        """Return the part's plan as an object."""
        return ShardPlan(**{one.name: getattr(self, one.name) for one in fields(ShardPlan)})


@dataclass(frozen=True, kw_only=True)
class Facts(FileForm):
    """Facts of a variable.

    Attributes:
        shape: dimensions of the variable; none for a scalar.
        dtype: dtype of the gradient.
        sparse: true if the gradient is rows, as for embeddings.
    """

    shape: list[Natural]
    dtype: Dtype = "float32"
    sparse: StrictBool = False

    def variable(self, name: str) -> Variable:
        """Return the variable."""
        return Variable(name, tuple(self.shape), self.dtype, sparse=self.sparse)


@dataclass(frozen=True, kw_only=True)
class VariableEntry(PartEntry, Facts):
    """A variable that is not cut, with the keys of its only part."""

    def plan(self, name: str) -> VariablePlan:
        """Return the variable's plan as an object."""
        return VariablePlan(self.variable(name), (self.part(),))


class Cut(Strict):
    """Lengths along an axis."""

    axis: Natural
    """The dimension that is cut; 0 for a sparse variable."""
    sizes: Annotated[list[Positive], Field(min_length=1)]
    """The parts' lengths, which add up to the dimension."""


@dataclass(frozen=True, kw_only=True)
class CutVariableEntry(Facts):
    """A variable that is cut, with its parts.

    Attributes:
        partition: cut into parts.
        parts: the parts, one for each size of the partition.
    """

    partition: Cut
    parts: list[PartEntry]

    @classmethod
    def check_keys(cls, value: object) -> object:
        """Return a file's value. Raise PydanticCustomError if it has an unknown key, or one that belongs to a part."""
        for one in fields(ShardPlan):
            if isinstance(value, dict) and one.name in value:
                raise schema_words.fault_at(one.name, "a variable that is cut has it in each of its parts")
        return super().check_keys(value)

    def plan(self, name: str) -> VariablePlan:
        """Return the variable's plan as an object."""
        parts = tuple(part.part() for part in self.parts)
        return VariablePlan(self.variable(name), parts, self.partition.axis, tuple(self.partition.sizes))


WHOLE, CUT = "whole", "cut"


def _tag(entry: object) -> str:
    return CUT if isinstance(entry, dict) and entry.keys() & {"partition", "parts"} else WHOLE


AnyVariableEntry = Annotated[
    Annotated[VariableEntry, Tag(WHOLE)] | Annotated[CutVariableEntry, Tag(CUT)],
    Discriminator(_tag),  # so that an error is about the form that was written, not about both
]


class Shards(Strict):
    """A rule's partition into parts of (nearly) equal lengths."""

    axis: Natural = 0
    """The dimension that is cut; a variable without it, or without elements, is not cut."""
    shards: Positive
    """The number of parts, at most the dimension."""


@dataclass(frozen=True, kw_only=True)
class RuleEntry(PartEntry):
    """The exchange of the variables that a rule matches.

    Attributes:
        match: condition that variables of this rule fulfil.
        partition: cut of each variable; if left out, it is not cut.
    """

    match: Match
    partition: Shards | None = None

    def plan(self, variable: Variable) -> VariablePlan:
        """Return the plan of a variable that the rule matches."""
        part = self.part()
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
    variables: dict[StrictStr, AnyVariableEntry] = {}
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
    grace.errors.ConfigError: the strategy, variables.w.sync: type 'ring' is not known; known: allgather, ...
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
    # pydantic puts the tag of a union's member, which is no key of the file, behind a variable's name.
    return schema_words.location_text([part for i, part in enumerate(location) if i != 2 or location[0] != "variables"])


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
    least = max([read.cluster.nodes or 1, *(1 + rank for rank in destinations if isinstance(rank, int))])
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
    if str(path).endswith(".json"):
        documents.write(path, strategy.to_dict())
        return
    import yaml  # JSON does without

    with atomic_write(path) as draft:
        draft.write_text(yaml.safe_dump(strategy.to_dict(), sort_keys=False, width=110, default_flow_style=None))
