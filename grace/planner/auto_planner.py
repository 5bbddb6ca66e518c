"""Measuring links and codecs, planning and explaining, which ``auto`` does between two steps of training."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from grace.backends.topology import Topology
from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.registry import legal_communicators, make
from grace.core.variable import Variable
from grace.errors import ConfigError, GraceError
from grace.planner.codecs import MeasuredMethod, measure
from grace.planner.error_budget import ErrorModel
from grace.planner.exchange_costs import Costs, codec_key
from grace.planner.explain import plan_of
from grace.planner.greedy import Candidate, find_candidates
from grace.planner.measure_network import measure_network, oversubscription
from grace.planner.problem import Problem, methods_of
from grace.planner.step_simulation import Timeline
from grace.session.agreement import gather_or_raise
from grace.strategy.choices import AutoRequest
from grace.strategy.resources import cluster_of

if TYPE_CHECKING:  # which a request brings
    from grace.planner.builders.auto import Auto

LINK_SECONDS, LONGEST, CODEC_SECONDS = 2.0, 10.0, 0.3
"""About how long the links are measured, at most where two plain steps are longer, and each method."""
SKEWED = 0.1
"""The part of a step by which a rank's computing must be longer than another's to be told."""


class AutoPlanner:
    """Measures, finds candidates and explains, for :class:`grace.planner.driver.Driver`.

    Args:
        request: the user's options.
        backend: the ranks.
        node_names: returns the name of each rank's node; a collective.
        variables: the variables to plan for.
        adaptive: True if the optimizer divides each element by its history, as Adam does.
    """

    problem: Problem
    """The problem with the methods that were measured, once they are."""

    def __init__(
        self,
        request: AutoRequest,
        backend: Backend,
        node_names: Callable[[], Sequence[str]],
        variables: Sequence[Variable],
        adaptive: bool = False,
    ):
        self.options: Auto = request.options
        self.resources = request.resources
        self.backend, self.node_names, self.variables, self.adaptive = backend, node_names, list(variables), adaptive
        self.found: list[Candidate] = []
        self.remarks: list[str] = []

    def measure_links(self, plain: float) -> None:
        """Measure the links for about as long as two steps, which take ``plain`` seconds uncompressed; every rank must
        call it. Raise ConfigError if there is one rank."""
        if self.backend.size == 1:  # so that auto says so, instead of a plan for no link
            raise ConfigError("there is one rank, and nothing to exchange")
        self.nodes = list(self.node_names())
        self.oversubscribed = oversubscription(self.backend, self.nodes)  # ranks that share cores take turns
        seconds = max(LINK_SECONDS, min(2 * plain, LONGEST))
        self.network = measure_network(self.backend, seconds, crowded=self.oversubscribed > 1)

    def measure_methods(self, gradients: Mapping[str, Tensor], tables: Collection[str], timeline: Timeline) -> None:
        """Measure the methods on each rank's gradients. Every rank must call it, with the slowest rank's timeline."""
        options, network = self.options, self.network
        assert network is not None  # of several ranks
        errors = ErrorModel({}, tables, self.adaptive, make("compressor", options.reference).spec)
        costs = Costs(network, {}, by_ring=self.backend.by_ring, concatenates=self.backend.concatenates)
        cluster = cluster_of(self.resources, Topology(self.nodes))
        problem = Problem(
            self.variables, timeline, costs, cluster, errors, options.quality, options.methods, options.seed
        )
        self.problem, left_out = measure_problem(problem, self.backend, gradients, self.oversubscribed)
        self.remarks = [f"not measured: {choice}: {why}" for choice, why in left_out.items()]

    def find_candidates(self, skew: float = 0.0) -> list[Candidate]:
        """Return the plans that are worth a try, best first. Rank 0 alone calls it, with the seconds that the slowest
        rank computes longer than the fastest."""
        self.found, timeline = find_candidates(self.problem), self.problem.timeline
        if skew > SKEWED * timeline.compute:
            slow, fast = 1e3 * timeline.compute, 1e3 * (timeline.compute - skew)
            self.remarks.append(
                f"the slowest rank computes {slow:.3g} ms a step, the fastest {fast:.3g}: no compression shortens what "
                "the others wait for it"
            )
        return self.found

    def explained(self, chosen: str, seconds: Mapping[str, float]) -> tuple[dict[str, object], str]:
        """Return the plan as a document, and in one line; ``seconds`` are those of a step of each tried candidate."""
        tried = [replace(one, measured=seconds.get(one.name)) for one in self.found]
        plan = plan_of(self.problem, tried, chosen=chosen, remarks=self.remarks)
        return plan.to_dict(), "; ".join([plan.why, *plan.remarks[len(self.remarks) :]])


def measure_problem(
    problem: Problem,
    backend: Backend,
    gradients: Mapping[str, Tensor],
    oversubscribed: float = 1.0,
    progress: Callable[[str, float], object] = lambda what, done: None,
) -> tuple[Problem, dict[str, str]]:
    """Return the problem with the codecs and errors of its methods, and no others; and why methods could not be
    measured. Every rank must call it (:func:`measure_methods`)."""
    choices = methods_to_measure(problem)
    found, left_out = measure_methods(
        backend, choices, gradients, problem.ranks, CODEC_SECONDS, oversubscribed, problem.seed, progress
    )
    costs = replace(problem.costs, codecs={one.method: one.codec for one in found.values()})
    errors = {one.compressor.spec: found[one.describe()].errors for one in choices if one.describe() in found}
    return replace(problem, costs=costs, errors=replace(problem.errors, measured=errors)), left_out


def measure_methods(
    backend: Backend,
    choices: Sequence[Communicator],
    gradients: Mapping[str, Tensor],
    ranks: int,
    seconds: float,
    oversubscribed: float = 1.0,
    seed: int = 0,
    progress: Callable[[str, float], object] = lambda what, done: None,
) -> tuple[dict[str, MeasuredMethod], dict[str, str]]:
    """Return measurements of methods, by their descriptions: the codecs of the slowest rank, for which all others wait,
    and the errors on this rank's gradients; and the reasons why other methods could not be measured.

    All ranks measure at once, because they encode at once in training too; where they share cores, rank 0 alone does,
    and the others' turns are added. Every rank must call it. They meet after each method, so that none waits for long:
    the first time, loops are compiled.

    Args:
        gradients: this rank's, by variable name.
        ranks, seconds: how many ranks will exchange, and about how long each method is measured.
        oversubscribed: ranks per core, which take turns at a codec.
        progress: called with each method, and the part that is done.
    """
    found, left_out = dict[str, MeasuredMethod](), dict[str, str]()
    for i, choice in enumerate(choices):
        method, mine, why, error = choice.describe(), None, "", None
        progress(method, i / len(choices))
        try:
            if oversubscribed == 1 or backend.rank == 0:
                mine = measure(choice, gradients, ranks, seed, seconds)
        except (GraceError, TypeError) as raised:  # it makes nothing smaller, or a framework lacks a type of numbers
            why = str(raised)
        except Exception as raised:
            error = raised
        answer = (mine.codec if mine else None, why)
        answers = gather_or_raise(backend, "times of methods", answer, error, "could not measure methods")
        if refusals := [why for _, why in answers if why]:
            left_out[method] = refusals[0]
            continue
        codecs = [codec for codec, _ in answers if codec is not None]
        slowest = max(codecs, key=lambda codec: codec.seconds(10, 1e6, ranks))  # for a bucket of a usual size
        found[method] = MeasuredMethod(codec_key(choice), slowest.times(oversubscribed), mine.errors if mine else {})
    return found, left_out


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
