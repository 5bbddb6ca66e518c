"""Measuring links and codecs, planning and explaining, which ``auto`` does between two steps of training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grace.backends.topology import Topology
from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.registry import legal_communicators, make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.codecs import is_table, measure
from grace.planner.costs import CodecCost
from grace.planner.error_budget import ErrorModel
from grace.planner.exchange_costs import Costs
from grace.planner.explain import plan_of
from grace.planner.greedy import Candidate, find_candidates
from grace.planner.links import measure_network, oversubscription
from grace.planner.problem import Problem, methods_of
from grace.planner.step import Timeline
from grace.strategy.choices import AutoRequest
from grace.strategy.resources import cluster_of

if TYPE_CHECKING:  # which a request brings
    from grace.planner.builders.auto import Auto

LINK_SECONDS, CODEC_SECONDS = 2.0, 0.3
"""About how long the links are measured, and each method."""
LONGEST = 10.0
"""The most seconds that the links may be measured for: two plain steps, if they are longer than usual."""
SKEWED = 0.1
"""The part of a step by which a rank's computing must be longer than another's to be told."""


class Planning:
    """Measures, finds candidates and explains, for :class:`grace.planner.driver.Driver`.

    Args:
        request: what the user said.
        backend: the engine.
        names: gives the name of each rank's node; every rank asks at the same moment.
        variables: the model's, in declaration order.
        adaptive: True if the optimizer divides each element by its history, as Adam does.
    """

    problem: Problem
    """The problem with the methods that were measured; on rank 0, once there are candidates."""

    def __init__(
        self,
        request: AutoRequest,
        backend: Backend,
        names: Callable[[], Sequence[str]],
        variables: Sequence[Variable],
        adaptive: bool = False,
    ):
        self.options: Auto = request.options
        self.resources = request.resources
        self.backend, self.names, self.variables, self.adaptive = backend, names, list(variables), adaptive
        self.found: list[Candidate] = []
        self.remarks: list[str] = []

    def measure_links(self, plain: float) -> None:
        """Measure the links for about as long as two steps, which take ``plain`` seconds uncompressed; every rank must
        call it. Raise ConfigError if there is one rank."""
        if self.backend.size == 1:
            raise ConfigError("there is one rank, and nothing to exchange")
        self.nodes = list(self.names())
        self.oversubscribed = oversubscription(self.backend, self.nodes)
        seconds = max(LINK_SECONDS, min(2 * plain, LONGEST))
        self.network = measure_network(self.backend, seconds, crowded=self.oversubscribed > 1)

    def candidates(self, gradients: Mapping[str, Tensor], timeline: Timeline, skew: float = 0.0) -> list[Candidate]:
        """Measure the methods on this rank's gradients, and return the plans that are worth a try, best first. Rank 0
        alone calls it, with the slowest rank's timeline, and the seconds that it computes longer than the fastest."""
        options, network = self.options, self.network
        assert network is not None  # of several ranks
        tables = {name for name, x in gradients.items() if is_table(x)}
        errors = ErrorModel({}, tables, self.adaptive, make("compressor", options.reference).spec)
        costs = Costs(network, {}, by_ring=self.backend.by_ring, concatenates=self.backend.concatenates)
        cluster = cluster_of(self.resources, Topology(self.nodes))
        problem = Problem(
            self.variables, timeline, costs, cluster, errors, options.quality, options.methods, options.seed
        )
        self.problem, left_out = measured(problem, gradients, self.oversubscribed)
        self.found = find_candidates(self.problem)
        self.remarks = [f"not measured: {choice}: {why}" for choice, why in left_out.items()]
        if skew > SKEWED * timeline.compute:
            slow, fast = 1e3 * timeline.compute, 1e3 * (timeline.compute - skew)
            self.remarks.append(
                f"the slowest rank computes {slow:.3g} ms a step, the fastest {fast:.3g}: no compression shortens what "
                "the others wait for it"
            )
        return self.found

    def explained(self, chosen: str, note: str, seconds: Mapping[str, float]) -> tuple[dict[str, Any], str]:
        """Return the plan as a document, and in one line. A note says why the chosen candidate is not the fastest, if
        it is not; ``seconds`` are those of a step of each candidate that was tried."""
        tried = [replace(one, measured=seconds.get(one.name)) for one in self.found]
        plan = plan_of(self.problem, tried, chosen=chosen, note=note, remarks=self.remarks)
        return plan.to_dict(), "; ".join([plan.why, *plan.remarks[len(self.remarks) :]])


def measured(
    problem: Problem,
    gradients: Mapping[str, Tensor],
    oversubscribed: float = 1.0,
    progress: Callable[[str, float], object] = lambda what, done: None,
) -> tuple[Problem, dict[str, str]]:
    """Return the problem with the codecs and errors of its methods, measured on gradients, and no others; and why
    methods could not be measured, by their descriptions.

    Args:
        problem: with the links and tables as they are.
        gradients: by variable name.
        oversubscribed: ranks per core, which take turns at a codec.
        progress: called with each method, and the part that is done.
    """
    codecs, errors, left_out = dict[str, CodecCost](), dict[str, Mapping[str, float]](), dict[str, str]()
    choices = methods_to_measure(problem)
    for i, choice in enumerate(choices):
        progress(choice.describe(), i / len(choices))
        try:
            found = measure(choice, gradients, problem.ranks, problem.seed, CODEC_SECONDS)
        except ConfigError as error:  # it makes none of these gradients smaller
            left_out[choice.describe()] = str(error)
            continue
        codecs[found.method] = found.codec.times(oversubscribed)
        errors[choice.compressor.spec] = found.errors
    costs, model = replace(problem.costs, codecs=codecs), replace(problem.errors, measured=errors)
    return replace(problem, costs=costs, errors=model), left_out


def methods_to_measure(problem: Problem) -> list[Communicator]:
    """Return the communicators by which methods are measured: those of no compression and of the reference, which every
    plan is compared with, and of the methods that may be chosen.

    Where some gradients are rows, which are gathered, a method that is summed is measured by the all-gather as well, if
    that can carry it.

    >>> from grace.planner.builders.auto import Auto
    >>> from grace.strategy.builder import OneNode
    >>> rows = [Variable("table", (9, 2), sparse=True)]
    >>> [made.describe() for made in methods_to_measure(Auto(quality="exact").problem(rows, OneNode(2)))]
    ['allreduce, none, none', 'allgather, none, none']
    """
    methods = methods_of(problem.methods, problem.quality, problem.ranks, bool(problem.errors.tables))
    wanted = [method.communicator for method in methods]
    if problem.quality != "exact":  # the reference bounds errors, of whatever class it is itself
        wanted.append(build_communicator(problem.errors.reference, None, None, problem.ranks))
    sparse, found = any(variable.sparse for variable in problem.variables), dict[str, Communicator]()
    for communicator in wanted:
        found[communicator.describe()] = communicator
        if sparse and communicator.name == "allreduce" and "allgather" in legal_communicators(communicator.compressor):
            other = build_communicator(communicator.compressor.spec, communicator.memory.spec, "allgather")
            found[other.describe()] = other
    return list(found.values())
