"""Planning problems: a model on a cluster, the costs of both, and the methods that may be chosen."""

import contextlib
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grace.communicators.choice import build_communicator
from grace.core import specs
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.registry import aliases, known, make
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.sparse_codec import unfit
from grace.planner.error_budget import CLASSES, ErrorModel, allows, check_quality, class_of, shrinks
from grace.planner.exchange_costs import Costs, codec_key, costs_of_strategy
from grace.planner.step_simulation import Prediction, Timeline, simulate_step
from grace.strategy.builder import Cluster
from grace.strategy.plan import Strategy


@dataclass(frozen=True)
class Problem:
    """A model on a cluster.

    Attributes:
        variables: the model's, in declaration order.
        timeline: when the slowest rank computes what.
        costs: what exchanging and computing takes.
        cluster: the ranks and their nodes.
        errors: what methods lose of each variable, and may lose.
        quality: the class, of :data:`grace.planner.error_budget.CLASSES`.
        methods: what may be chosen beside no compression; None for the methods that offer themselves
            (:attr:`grace.core.compressor.Compressor.offered`) and that the class allows. Specs of compressors, as
            "topk(ratio=0.01)"; of communicators, as "reduce_broadcast", which then carry uncompressed gradients; or
            dicts of "compressor", "memory" and "communicator". Votes must be named.
        seed: of random methods.

    Raise ConfigError if there is no such class, or the timeline does not tell when a gradient is ready.
    """

    variables: Sequence[Variable]
    timeline: Timeline
    costs: Costs
    cluster: Cluster
    errors: ErrorModel = field(default_factory=ErrorModel)
    quality: str = "feedback"
    methods: Sequence[Spec] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_quality(self.quality)
        for variable in self.variables:
            if variable.name not in self.timeline.ready:
                raise ConfigError(f"the timeline does not tell when the gradient of {variable.name!r} is ready")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.cluster.world_size

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(set(self.cluster.ranks))

    def predict(self, strategy: Strategy) -> Prediction:
        """Predict a step under a strategy. Raise ConfigError if the costs do not tell what one of its methods takes."""
        return simulate_step(self.timeline, costs_of_strategy(strategy, self.costs))

    def share(self, method: "ExchangeMethod", variable: Variable) -> float:
        """Return the part of its bound that a method loses of a variable: at most 1 is within it, and infinite where it
        does not serve the variable."""
        if not method.serves(variable, self.errors.tables):
            return math.inf
        return self.errors.share(method.compressor, method.communicator.name, method.memory, variable)

    def candidates(self) -> list["ExchangeMethod"]:
        """Return the methods to choose from, no compression first; those whose costs nobody knows are left out. Raise
        ConfigError if ``methods`` names something unknown, or something that ``quality`` excludes."""
        found = methods_of(self.methods, self.quality, self.ranks, bool(self.errors.tables))
        codecs = self.costs.codecs
        return [one for one in found if codec_key(one.communicator) in codecs or one.compressor == "none"]


@dataclass(frozen=True)
class ExchangeMethod:
    """A way to exchange a variable: a communicator with its compressor and memory; its class, None if it has none; and
    whether it is offered for tables only."""

    communicator: Communicator = field(compare=False)
    quality: str | None
    tables_only: bool = False

    @property
    def compressor(self) -> str:
        """The compressor's spec."""
        return self.communicator.compressor.spec

    @property
    def memory(self) -> str:
        """The memory's spec."""
        return self.communicator.memory.spec

    def serves(self, variable: Variable, tables: Collection[str] = ()) -> bool:
        """Return True if it can carry a variable, and shrinks it if it compresses at all."""
        if self.tables_only and not (variable.sparse or variable.name in tables):
            return False
        compressor: Compressor = self.communicator.compressor
        if variable.sparse:
            return not unfit(compressor, self.communicator.memory)  # type: ignore[arg-type]
        return bool(compressor.traits.exact) or shrinks(compressor, variable)


def offers() -> dict[str, bool]:
    """Return the specs by which compressors offer themselves, ``none`` first; True for those of tables only."""
    found: dict[str, bool] = {}
    for _, cls in sorted(known("compressor").items(), key=lambda item: (item[0] != "none", item[0])):
        made: type[Compressor] = cls  # type: ignore[assignment]
        found |= dict.fromkeys(made.offered, False) | dict.fromkeys(made.offered_for_tables, True)
    return found


def methods_of(named: Sequence[Spec] | None, quality: str, ranks: int, tables: bool = True) -> list[ExchangeMethod]:
    """Return the methods that the user names (:attr:`Problem.methods`), or else those that offer themselves and are of
    the class, with their default communicators for so many ranks; some are offered for tables only. Raise ConfigError
    if something named is unknown, or excluded by the class.

    >>> [method.compressor for method in methods_of(["topk"], "feedback", 2)]
    ['none', 'topk']
    >>> [method.compressor for method in methods_of(None, "unbiased", 2)]
    ['none', 'cast', 'qsgd']
    """
    found = [ExchangeMethod(build_communicator("none", None, None, ranks), "exact")]
    if named is not None:
        found += [_named(entry, quality, ranks) for entry in named]
    else:
        for spec, tables_only in offers().items():
            if (tables or not tables_only) and allows(quality, class_of(spec)):
                found.append(ExchangeMethod(build_communicator(spec, None, None, ranks), class_of(spec), tables_only))
    return list({method.communicator.describe(): method for method in reversed(found)}.values())[::-1]


def _named(entry: Spec, quality: str, ranks: int) -> ExchangeMethod:
    """Return the method that an entry of ``methods`` names."""
    said: dict[str, Spec] = dict(entry) if isinstance(entry, Mapping) and "name" not in entry else {"compressor": entry}
    if others := said.keys() - {"compressor", "memory", "communicator"}:
        raise ConfigError(f"methods: {entry!r} has {min(others)!r}; there are compressor, memory and communicator")
    spec = said.get("compressor", "none")
    if isinstance(spec, str) and specs.split(spec) is None and specs.parse(spec)[0] in known("communicator"):
        said = {"communicator": spec}  # as "reduce_broadcast", with uncompressed gradients
    made: Compressor = make("compressor", said.get("compressor", "none"))
    memory: Memory = make("memory", said.get("memory") or made.traits.memory)
    found = class_of(made.spec, memory.spec)
    if not allows(quality, found) and not (found is None and quality == CLASSES[-1]):
        raise ConfigError(
            f"methods names {made.spec} with the memory {memory.spec}, which is "
            f"{f'of the class {found!r}' if found else 'a vote, or loses what no memory keeps'}, and quality is "
            f"{quality!r}: take quality={found or CLASSES[-1]!r}, or another method"
        )
    communicator = build_communicator(made, memory, said.get("communicator"), ranks)
    if communicator.delayed:
        raise ConfigError(
            f"methods names {communicator.spec}, which applies means in later steps. That changes training, so it is "
            "never chosen: give it to the optimizer as its communicator"
        )
    return ExchangeMethod(communicator, found)


@functools.cache
def short(spec: str) -> str:
    """Return a method's short name, if it has one, else its spec.

    >>> short("cast(dtype='bf16')")
    'bf16'
    """
    with contextlib.suppress(ConfigError):  # another Grace's, in a document
        spec = make("compressor", spec).spec
    return {make("compressor", name).spec: name for name in aliases("compressor")}.get(spec, spec)
