"""What a planner chooses from: ways to exchange a variable, and the layouts of the built-in builders."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace.communicators.choice import SCATTER, break_even, default_communicator
from grace.core import specs
from grace.core.registry import aliases, known, legal_communicators, make
from grace.core.transactional_dict import is_ours
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.sparse_codec import unfit
from grace.planner.problem import Problem
from grace.planner.quality import CLASSES, allows, class_of, shrinks
from grace.planner.works import works_of
from grace.strategy.execution import compiled
from grace.strategy.plan import ShardPlan, Strategy, Sync, VariablePlan

LADDERS: dict[str, Sequence[Any]] = {
    "ratio": (0.001, 0.01, 0.05),
    "rank": (1, 2, 4, 8),
    "levels": (1, 7, 127),
    "unbiased": (False, True),
}
"""Values that parameters of these names are tried with, in whichever method they are."""
BESIDE = (
    "qsgd(levels=7, bucket_size=64)",
    "topk(ratio=0.01) | qsgd(levels=7, bucket_size=64)",
    "topk(ratio=0.01) | efsignsgd",
    "topk(ratio=0.05) | efsignsgd",
)
"""Methods that are tried beside: in small blocks of equal scale, and compositions."""
FEEDBACK = "residual"
"""What keeps the error of a biased method that has no memory by default."""
REDUCED = "reduce_broadcast"
BUILDERS = (
    "all_reduce",
    "all_reduce(chunk_size=16)",
    "by_type",
    "parallax",
    "partitioned_all_reduce",
    "partitioned_ps",
    "ps",
    "ps_load_balancing",
    "ps_load_balancing(sorted=true)",
    "random_axis_partition_all_reduce",
    "size_threshold",
    "uneven_partitioned_ps",
    "uniform",
)
"""All built-in ones: each is tried with every method."""


@dataclass(frozen=True)
class Way:
    """How a variable, or a part of one, is exchanged, but for its group or destination.

    Attributes:
        compressor, memory: specs.
        sync: the synchronization, of group and destination 0.
        quality: the class; None if it has none.
    """

    compressor: str = "none"
    memory: str = "none"
    sync: Sync = dataclasses.field(default_factory=Sync)
    quality: str | None = "exact"

    @property
    def reduced(self) -> bool:
        """Whether it has a destination, and no group."""
        return self.sync.type == REDUCED

    @property
    def method(self) -> tuple[str, str]:
        """Compressor and memory."""
        return self.compressor, self.memory

    def part(self, place: int) -> ShardPlan:
        """A part in a group, or for a destination.

        >>> Way().part(3).sync.group
        3
        """
        at = {"destination" if self.reduced else "group": place}
        return ShardPlan(dataclasses.replace(self.sync, **at), self.compressor, self.memory)  # type: ignore[arg-type]

    def serves(self, variable: Variable) -> bool:
        """Whether it can carry a variable, and makes it smaller if it compresses at all."""
        compressor, memory = _made(*self.method)
        if variable.sparse:
            return not self.sync.hierarchical and not unfit(compressor, memory)
        return bool(compressor.traits.exact) or shrinks(compressor, variable)


@functools.cache
def _made(compressor: str, memory: str) -> tuple[Any, Any]:
    return make("compressor", compressor), make("memory", memory)


DENSE = Way()


def ways(problem: Problem) -> list[Way]:
    """All that may be chosen, no compression by all-reduce first: every method of the class with its legal
    communicators, of which the costs tell what they take.

    Communicators that bring the same and never take less are left out: broadcast beside allgather, all but allreduce
    of what can be summed. ScatterReduce is taken from as many ranks on as it pays (``choice.break_even``).

    Raises:
        ConfigError: ``methods`` names something unknown, or something that ``quality`` excludes.
    """
    world, found = problem.cluster.world_size, [DENSE]
    if problem.methods is None:
        for spec in _specs():
            ours = all(is_ours(type(part)) for part in make("compressor", spec).whole().values())
            if not ours and spec not in problem.errors:  # nobody knows what it loses
                continue
            for memory in _memories(spec):
                quality = class_of(spec, memory)
                if allows(problem.quality, quality):
                    found += _of(spec, memory, quality, world)
    else:
        for entry in problem.methods:
            found += _named(entry, problem.quality, world)
        found += [Way(sync=Sync(REDUCED))]
    found = [way for way in dict.fromkeys(found) if _costed(way, problem)]
    if problem.several_per_node:
        collected = [way for way in found if not way.reduced]
        led = [dataclasses.replace(way, sync=dataclasses.replace(way.sync, hierarchical=True)) for way in collected]
        found += [way for way in led if _costed(way, problem)]
    return found or [DENSE]


def _specs() -> Iterator[str]:
    """Specs of methods, each with the values of its ladders."""
    seen = set()
    for name in [*known("compressor"), *aliases("compressor")]:
        try:
            plain = make("compressor", name)
        except ConfigError:  # it has parameters without defaults
            continue
        ladder: list[dict[str, Any]] = [{}]
        for key, values in LADDERS.items():
            if key in plain.parameters():
                ladder = [{**said, key: value} for said in ladder for value in values]
        for said in ladder:
            spec = make("compressor", {**plain.to_dict(), **said} if said else name).spec
            if spec not in seen:
                seen.add(spec)
                yield spec
    yield from (make("compressor", spec).spec for spec in BESIDE)


def _memories(spec: str) -> list[str]:
    """The method's memory, and feedback where it has none and could have it."""
    traits = make("compressor", spec).traits
    usual = make("memory", traits.memory).spec
    lossy = traits.memory == "none" and not traits.unbiased and class_of(spec) is None
    return [usual, FEEDBACK] if lossy else [usual]


def _of(spec: str, memory: str, quality: str | None, world: int) -> list[Way]:
    """The ways that carry a method."""
    compressor = make("compressor", spec)
    legal = legal_communicators(compressor)
    if "allreduce" in legal:
        taken = ["allreduce"]
    else:
        taken = [name for name in legal if name in ("allgather", "scatter_merge")]
        least = break_even(compressor, memory)
        if SCATTER in legal and least is not None and world >= least:
            taken.append(SCATTER)
    if REDUCED in legal:
        taken.append(REDUCED)
    return [Way(spec, memory, Sync(name), quality) for name in taken]


def _named(entry: str | Mapping[str, str], quality: str, world: int) -> list[Way]:
    """The ways that an entry of ``methods`` names."""
    said: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) and "name" not in entry else {"compressor": entry}
    if others := said.keys() - {"compressor", "memory", "communicator"}:
        raise ConfigError(f"methods: {entry!r} has {min(others)!r}; there are compressor, memory and communicator")
    spec = said.get("compressor", "none")
    if isinstance(spec, str) and specs.split(spec) is None and specs.parse(spec)[0] in known("communicator"):
        said = {"communicator": spec}
    made: Any = make("compressor", said.get("compressor", "none"))
    memory: Any = make("memory", said.get("memory") or made.traits.memory)
    found = class_of(made.spec, memory.spec)
    if not allows(quality, found) and not (found is None and quality == CLASSES[-1]):
        raise ConfigError(
            f"methods names {made.spec} with the memory {memory.spec}, which is "
            f"{f'of the class {found!r}' if found else 'a vote, or loses what no memory keeps'}, and quality is "
            f"{quality!r}: take quality={found or CLASSES[-1]!r}, or another method"
        )
    if said.get("communicator") is None:
        return _of(made.spec, memory.spec, found, world)
    way = Way(made.spec, memory.spec, Sync.of(said["communicator"]), found)
    Strategy(
        (VariablePlan(Variable("w", (64, 64)), (way.part(0),)),), world
    )  # raises, saying what does not go together
    return [way]


def _costed(way: Way, problem: Problem) -> bool:
    """Whether the costs tell what a way takes."""
    probe = Variable("probe", (256, 256))
    ranks = problem.cluster.world_size
    strategy = Strategy((VariablePlan(probe, (way.part(0),)),), ranks, len(set(problem.cluster.ranks)))
    try:
        works_of(compiled(strategy, [probe]), ranks, problem.costs, problem.cluster.ranks)
    except ConfigError:
        return False
    return True


@dataclass(frozen=True)
class Layout:
    """How a builder cuts and groups variables, with any method.

    Attributes:
        builder: its spec.
        plans: what it makes of each variable, with :data:`PROBE` where the method goes.
    """

    builder: str
    plans: tuple[VariablePlan, ...]


PROBE = "fp16"
"""A method that may go anywhere, which tells where a builder compresses."""


def layouts(problem: Problem) -> list[Layout]:
    """Those of all built-in builders on the problem's cluster, each but once."""
    found: dict[tuple[VariablePlan, ...], Layout] = {}
    for spec in BUILDERS:
        builder = make("builder", spec)
        builder.compressor = PROBE
        plans = builder.build(problem.variables, problem.cluster).plans
        found.setdefault(plans, Layout(spec, plans))
    return list(found.values())


def collective(method: tuple[str, str], world: int) -> str:
    """The synchronization that builders give a method in a group.

    >>> collective(("topk", "residual"), 2), collective(("powersgd", "residual"), 2)
    ('allgather', 'allreduce')
    """
    compressor = make("compressor", method[0])
    if "allreduce" in legal_communicators(compressor):
        return "allreduce"
    return default_communicator(compressor, method[1], world)
