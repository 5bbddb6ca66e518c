"""Strategies as objects: the parts of each variable, and the exchange of each part.

Nothing here needs a framework, or a package beyond NumPy; :mod:`grace.strategy.schema` reads and writes files.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Annotated, Any

from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator
from grace.core.component import is_ours
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.outer import Outer
from grace.core.registry import find, make, unusable
from grace.core.schema_words import NATURAL, FileForm, SpecForm
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.sparse_codec import unfit
from grace.strategy.sync import ALONE, JsonObject, Sync, parameters_of, sync_types

VERSION = 1
"""Version of a strategy's document."""
MOST_ELEMENTS = 2**56
"""Largest number of a variable's elements: more than any memory holds."""
Communicators = dict[tuple[str, ...], Communicator]
"""Communicators by type and options of the synchronization (without the destination), compressor and memory."""


@dataclass(frozen=True)
class ShardPlan(FileForm):
    """Plan of one part's exchange.

    Attributes:
        sync: synchronization of the part.
        compressor: spec, as in ``topk(ratio=0.01)``.
        memory: spec; the compressor's default if left out.
        priority: parts of a lower priority start first; among equals those whose gradients are ready first.
        compress_after: number of steps that are exchanged uncompressed first.
        outer: rounds, if ranks train alone; else gradients are exchanged in every step.
    """

    sync: Sync = field(default_factory=Sync)
    compressor: Annotated[Spec | Compressor, SpecForm()] = "none"
    memory: Annotated[Spec | Memory, SpecForm()] | None = None
    priority: int = field(default=0, metadata={"strict": True})
    compress_after: int = field(default=0, metadata=NATURAL)
    outer: Outer | None = None

    @property
    def rounds(self) -> Outer | None:
        """Settings of the rounds; those of averages for ``sync`` of type "none"; None if gradients are exchanged.

        >>> ShardPlan(Sync("none", period=4)).rounds
        Outer(optimizer='none', period=4, fragments=1, delay=0, merge=0.0, over='ranks')
        """
        return Outer(period=self.sync.options["period"]) if self.sync.type == ALONE else self.outer

    def to_dict(self) -> JsonObject:
        """Return the part's form in a file: specs in their shortest form, and further keys only if they are set."""
        compressor = make("compressor", self.compressor)
        memory = make("memory", compressor.traits.memory if self.memory is None else self.memory)
        form: JsonObject = {
            "sync": self.sync.to_dict(),
            "compressor": compressor.spec,
            "memory": memory.spec,
            "priority": self.priority,
        }
        for one in fields(ShardPlan):
            value = getattr(self, one.name)
            if one.name not in form and value != one.default:
                form[one.name] = value.to_dict() if isinstance(value, Outer) else value
        return form


@dataclass(frozen=True)
class VariablePlan:
    """Plan of one variable: its cut, and the exchange of each part.

    Attributes:
        variable: the variable.
        parts: one per size, in order; a single one of an uncut variable.
        axis, sizes: the cut: lengths along the axis, which add up to the dimension. None and () if uncut.
    """

    variable: Variable
    parts: tuple[ShardPlan, ...]
    axis: int | None = None
    sizes: tuple[int, ...] = ()

    def bounds(self) -> list[tuple[int, int]]:
        """Return the begin and the end of each part along the axis.

        >>> VariablePlan(Variable("w", (5, 2)), (ShardPlan(), ShardPlan()), axis=0, sizes=(3, 2)).bounds()
        [(0, 3), (3, 5)]
        """
        return list(pairwise(accumulate(self.sizes, initial=0)))

    def part_variables(self) -> list[Variable]:
        """Return each part as a variable of its own: ``name/part_i``, or the variable itself if it is uncut."""
        v, axis = self.variable, self.axis
        if axis is None:
            return [v]
        shapes = [(*v.shape[:axis], size, *v.shape[axis + 1 :]) for size in self.sizes]
        return [Variable(f"{v.name}/part_{i}", shape, v.dtype, v.device, v.sparse) for i, shape in enumerate(shapes)]

    def to_dict(self) -> JsonObject:
        """Return the variable's form in a file."""
        v = self.variable
        entry: JsonObject = {"shape": list(v.shape), "dtype": v.dtype, "sparse": v.sparse}
        if self.axis is None:
            return {**entry, **self.parts[0].to_dict()}
        cut = {"axis": self.axis, "sizes": list(self.sizes)}
        return {**entry, "partition": cut, "parts": [part.to_dict() for part in self.parts]}


def fingerprint(variables: Sequence[Variable]) -> str:
    """Return the sha256 over the ordered (name, shape, dtype, sparse) of a model's variables.

    >>> fingerprint([Variable("w", (2,))])[:8]
    'a72549b6'
    """
    # Not the device: the same model may train on another.
    facts = [[v.name, list(v.shape), v.dtype, v.sparse] for v in variables]
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Strategy:
    """Strategy for the variables of one model on one cluster; immutable, and checked when it is made.

    Attributes:
        plans: one per variable, in the model's order.
        world_size, nodes: the numbers of ranks and nodes of its cluster.
        builder: name and parameters of the builder.

    Raises:
        ConfigError: the strategy cannot work; the message names the variable and the field.

    >>> strategy = Strategy((VariablePlan(Variable("w", (4, 2)), (ShardPlan(compressor="topk"),)),))
    Traceback (most recent call last):
    grace.errors.ConfigError: variable 'w', sync: allreduce cannot carry topk: ...
    """

    plans: tuple[VariablePlan, ...]
    world_size: int = 1
    nodes: int = 1
    builder: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nodes > self.world_size:
            raise ConfigError(f"cluster.nodes: {self.nodes} nodes cannot have {self.world_size} ranks; a node has some")
        seen = set()
        communicators: Communicators = {}
        for plan in self.plans:
            if plan.variable.name in seen:
                raise ConfigError(f"variable {plan.variable.name!r} stands in the strategy twice")
            seen.add(plan.variable.name)
            for where, message in faults(plan, self.world_size, communicators):
                raise ConfigError(f"variable {plan.variable.name!r}, {where}: {message}")

    @property
    def variables(self) -> list[Variable]:
        """Variables that the strategy is for."""
        return [plan.variable for plan in self.plans]

    def to_dict(self) -> JsonObject:
        """Return the strategy's document, as in a file; :func:`grace.strategy.schema.parse` reads it."""
        return {
            "version": VERSION,
            "builder": self.builder or None,
            "model": fingerprint(self.variables),
            "cluster": {"world_size": self.world_size, "nodes": self.nodes},
            "variables": {plan.variable.name: plan.to_dict() for plan in self.plans},
        }

    @property
    def id(self) -> str:
        """sha256 of the canonical form: the document as JSON, keys sorted, variables in the model's order."""
        document = self.to_dict()
        document["variables"] = list(document["variables"].items())  # sort_keys would sort the variables, too
        return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def check_model(self, variables: Sequence[Variable]) -> None:
        """Compare the strategy's variables with a model's.

        Raises:
            ConfigError: the strategy is for another model; the message names the first variable that differs.
        """
        ours = [(v.name, v.shape, v.dtype, v.sparse) for v in self.variables]
        theirs = [(v.name, v.shape, v.dtype, v.sparse) for v in variables]
        for i in range(max(len(ours), len(theirs))):
            if ours[i : i + 1] != theirs[i : i + 1]:
                has = f"{variables[i].name!r}, {variables[i].describe()}" if i < len(theirs) else "no more variables"
                mine = self.variables[i] if i < len(ours) else None
                says = "no more variables" if mine is None else f"{mine.name!r}, {mine.describe()}"
                raise ConfigError(
                    f"the strategy is for another model; the first difference is variable {i}: the strategy has "
                    f"{says}; the model has {has}. Build it again for this model: grace strategy build"
                )


def faults(plan: VariablePlan, world_size: int, communicators: Communicators) -> Iterator[tuple[str, str]]:
    """Yield the faults of a variable's plan: the field, and what would be right.

    Args:
        plan, world_size: the plan, and the cluster's number of ranks.
        communicators: those of other variables' parts, which are used again for equal parts.
    """
    v, axis = plan.variable, plan.axis
    if v.numel > MOST_ELEMENTS:
        yield "shape", f"{list(v.shape)} has more elements than any memory"
        return
    if v.sparse and not v.shape:
        yield "shape", "a sparse variable has rows, so that it needs a first dimension"
        return
    if axis is None:
        if len(plan.parts) != 1 or plan.sizes:
            yield "parts", f"a variable that is not cut has one part, not {len(plan.parts)}"
    else:
        if not 0 <= axis < len(v.shape):
            # What is checked below needs the axis.
            yield "partition.axis", f"{axis} is no axis of shape {list(v.shape)}"
            return
        if v.sparse and axis != 0:
            yield "partition.axis", f"a sparse variable is cut along axis 0 only, not {axis}"
        if any(size < 1 for size in plan.sizes) or sum(plan.sizes) != v.shape[axis]:
            yield (
                "partition.sizes",
                f"{list(plan.sizes)} must be positive and add up to {v.shape[axis]}, which is {sum(plan.sizes)} here",
            )
        if len(plan.parts) != len(plan.sizes):
            yield "parts", f"there must be one per size: {len(plan.sizes)}, not {len(plan.parts)}"
    for i, part in enumerate(plan.parts):
        prefix = "" if axis is None else f"parts[{i}]."
        for where, message in part_faults(part, v, world_size, communicators):
            yield prefix + where, message


def part_faults(
    part: ShardPlan, variable: Variable, world_size: int, communicators: Communicators
) -> Iterator[tuple[str, str]]:
    """Yield the faults of a part's plan."""
    sync = part.sync
    cls: Any = find("communicator", sync.type)
    if cls is None and sync.type != ALONE:
        names = ", ".join(sync_types())
        yield "sync.type", str(unusable("communicator").get(sync.type, f"{sync.type!r} is not known; known: {names}"))
        return
    parameters = parameters_of(sync.type).keys()
    clashing = Sync.__dataclass_fields__.keys() & parameters
    if clashing:
        yield "sync.type", f"{sync.type} has a parameter {min(clashing)!r}, which a strategy's sync has too: rename it"
        return
    for option in sync.options.keys() - parameters:
        yield f"sync.{option}", f"{sync.type} has no such field; it has: {', '.join(parameters) or 'none of its own'}"
        return
    yield from ((f"sync.{key}", message) for key, message in sync.faults())
    whole = isinstance(sync.destination, int) and not isinstance(sync.destination, bool)
    if cls is not None and cls.rooted and not (whole and 0 <= sync.destination < world_size):
        yield "sync.destination", f"rank {sync.destination!r} is not one of {world_size} (0 to {world_size - 1})"
    yield from part.too_small()
    if part.outer is not None:
        if sync.type == ALONE:
            yield "outer", "sync none has a period of its own: choose another sync, which carries the drifts"
            return
        yield from ((f"outer.{key}", message) for key, message in part.outer.faults())
    if sync.type == ALONE:
        if part.compressor != "none" or part.memory not in (None, "none"):
            yield "compressor", "ranks that train on their own average variables, uncompressed: use none"
        return
    # A large model has thousands of equal parts: their communicator is made once. Only specs are compared.
    key = None
    if isinstance(part.compressor, str) and isinstance(part.memory, str | None):
        options = {**sync.options, "destination": 0} if cls.rooted else sync.options
        key = sync.type, repr(options), part.compressor, str(part.memory)
    communicator = None if key is None else communicators.get(key)
    try:
        if communicator is None:
            make("compressor", part.compressor)
    except ConfigError as error:
        yield "compressor", str(error)
        return
    try:
        if communicator is None:
            communicator = communicator_of(part)
        if key is not None:
            communicators[key] = communicator
    except (ValueError, TypeError) as error:  # ConfigError, or an error of a user's own communicator
        # build_communicator checks all three parts: the message tells which field of the file is wrong
        of_sync = not is_ours(cls) or "cannot carry" in str(error) or str(error).startswith(f"{sync.type}:")
        yield ("sync" if of_sync else "compressor"), str(error)
        return
    why = unfit(communicator.compressor, communicator.memory) if part.outer is None and variable.sparse else ""
    if why:
        yield "compressor", f"the variable is sparse, and {why}"


def communicator_of(part: ShardPlan) -> Communicator:
    """Return the communicator that carries a part; for a part that is not exchanged, the one of its periodic averages.

    Raises:
        ConfigError: its synchronization, compressor and memory do not go together.
    """
    if part.sync.type == ALONE:
        return build_communicator("none", "none", "allreduce")
    communicator = build_communicator(part.compressor, part.memory, {"name": part.sync.type, **part.sync.options})
    communicator.compress_after = part.compress_after
    return communicator
