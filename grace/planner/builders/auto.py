"""Auto: the plan whose step is expected to be shortest."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grace.core.compressor import Compressor
from grace.core.quantities import BITS, SECONDS, parse_quantity
from grace.core.registry import make
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.planner.costs import DefaultCodecs
from grace.planner.error_budget import REFERENCE, ErrorModel, check_quality
from grace.planner.exchange_costs import Costs
from grace.planner.explain import Plan, plan_of
from grace.planner.greedy import find_candidates
from grace.planner.network import Links
from grace.planner.problem import Problem, methods_of
from grace.planner.step_simulation import Timeline
from grace.planner.uniform_plans import Baseline
from grace.strategy.builder import Builder, Cluster, bandwidths
from grace.strategy.plan import Strategy

GIGA = 1e9
"""bit/s of a Gbit/s."""
RATE, LATENCY = 10 * GIGA, 50e-6
"""bit/s of a link and seconds of a message, where nobody says them."""


@dataclass
class Auto(Builder):
    """Chooses by prediction: the method of every variable with which a step is expected to be shortest, within a bound
    on its error, among the methods of a class of quality; plain all-reduce if nothing is 3 % faster.

    It knows the links only by ``bandwidth`` and ``latency``, and what methods take and lose by figures that were
    measured elsewhere and by expectation; ``grace calibrate`` measures them on a cluster.

    Args:
        quality: what may be lost: "exact" (nothing), "half" (16-bit floats), "unbiased" (also methods that are right
            on average), or "feedback" (also biased ones with a memory).
        methods: what may be chosen beside no compression, specs of compressors, or dicts of "compressor", "memory" and
            "communicator"; None for those of that class that offer themselves. Votes must be named.
        reference: the method whose error on a matrix is the bound of others' there
            (:mod:`grace.planner.error_budget`).
        bandwidth: of each rank's link: Gbit/s, or as "100mbit"; that of the resources if left out, or else 10.
        latency: of a message: seconds, or as "50us"; 50 us if left out.
        backward: seconds of backward, in which gradients come in reverse order, by their elements; 0 if left out, so
            that nothing hides what is sent.
        seed: of random methods.
        replan: steps after which a run that measures plans again; 0 for never. It does not matter here.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> strategy = Auto(methods=["fp16"], bandwidth="100mbit").build([Variable("w", (1000, 1000))], OneNode(2))
    >>> strategy.plans[0].parts[0].compressor
    'cast'
    """

    quality: str = "feedback"
    methods: Sequence[Spec] | None = None
    reference: Spec | Compressor = REFERENCE
    bandwidth: float | str | None = None
    latency: float | str | None = None
    backward: float | None = None
    seed: int = 0
    replan: int = 0

    name = "auto"

    def __post_init__(self) -> None:
        if self.compressor != "none" or self.memory is not None:
            raise self.error("it chooses compressors and memories itself; methods= says among which")
        check_quality(self.quality)
        make("compressor", self.reference)
        if isinstance(self.methods, (str, dict)):
            self.methods = [self.methods]
        if self.methods is not None and not isinstance(self.methods, (list, tuple)):
            raise self.error(f"methods must be a list of specs, not {self.methods!r}")
        if self.methods is not None:  # or a run would learn of a mistake when it plans, after some steps
            methods_of(self.methods, self.quality, ranks=2)
        if self.backward is not None:
            self.check_number("backward", 0.0)
        self.check_integer("seed", 0)
        self.check_integer("replan", 0)
        self.links()

    @property
    def baseline(self) -> Builder:
        """The builder of the strategy that planning starts from."""
        return Baseline()

    def build(self, variables: Sequence[Variable], resources: Cluster) -> Strategy:
        """Return the strategy of :meth:`plan`."""
        made = self.strategy((), resources).builder
        return replace(self.plan(variables, resources).chosen.strategy, builder=made)

    def plan(self, variables: Sequence[Variable], resources: Cluster) -> Plan:
        """Return the choice, its candidates and its reasons. Raise ConfigError if ``methods`` names something unknown,
        or something that ``quality`` excludes."""
        problem = self.problem(variables, resources)
        return plan_of(problem, find_candidates(problem))

    def problem(self, variables: Sequence[Variable], resources: Cluster) -> Problem:
        """Return the problem, with the costs that are known without measuring."""
        return Problem(
            variables,
            timeline(variables, self.backward or 0.0),
            self.costs(resources),
            resources,
            ErrorModel(reference=make("compressor", self.reference).spec),
            self.quality,
            self.methods,
            self.seed,
        )

    def costs(self, resources: Cluster) -> Costs:
        """Return the costs of exchanges over the links that the parameters, or else the resources, describe; codecs as
        they were measured elsewhere. The ranks of a node share its bandwidth."""
        links = self.links()
        gbit = bandwidths(resources) if self.bandwidth is None else None
        if gbit is not None:
            counts = Counter(resources.ranks)
            if len(counts) == 1:
                links = replace(links, bandwidth=min(gbit) * GIGA / 8)  # each rank's share of its node's link
            else:  # all wait for the slowest node
                slowest = min(share * counts[node] for node, share in zip(resources.ranks, gbit, strict=True))
                links = Links(slowest * GIGA / 8, links.latency, max(counts.values()))
        return Costs(links, DefaultCodecs())

    def links(self) -> Links:
        """Return the links that the parameters describe. Raise ConfigError if one is no bandwidth, or no latency."""
        rate = self._quantity("bandwidth", RATE, BITS, GIGA, "Gbit/s above 0, or text as '100mbit'")
        if not rate:
            raise self.error(f"bandwidth must be Gbit/s above 0, or text as '100mbit', not {self.bandwidth!r}")
        return Links(rate / 8, self._quantity("latency", LATENCY, SECONDS, 1.0, "seconds, or text as '50us'"))

    def _quantity(self, key: str, default: float, units: Mapping[str, float], unit: float, form: str) -> float:
        """Return a parameter, which is a number in a unit or text with one of several, in units of 1."""
        value = getattr(self, key)
        if value is None:
            return default
        if isinstance(value, str):
            return parse_quantity(value, units, str(self.error(f"{key} must be {form}")))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise self.error(f"{key} must be {form}, not {value!r}")
        return value * unit


def timeline(variables: Sequence[Variable], backward: float) -> Timeline:
    """Return a timeline whose backward takes so many seconds, in which gradients come from the last to the first, each
    after a time like its elements; those of sparse variables after none.

    >>> from grace.core.variable import Variable
    >>> timeline([Variable("a", (3,)), Variable("b", (1,))], backward=4.0).ready
    {'b': 1.0, 'a': 4.0}
    """
    whole = sum(v.numel for v in variables if not v.sparse) or 1
    ready, done = {}, 0
    for variable in reversed(variables):
        done += 0 if variable.sparse else variable.numel
        ready[variable.name] = backward * done / whole
    return Timeline(ready, backward=backward)
